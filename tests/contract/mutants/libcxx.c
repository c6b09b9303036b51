/* A library with the name of libc++, for a plug-in that needs it. */
int zr_mutant_libcxx = 1;
