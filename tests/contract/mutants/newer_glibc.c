/* A symbol of a version that no supported glibc has: newer_glibc.map gives it the version. */
int zr_mutant_of_newer_glibc(void) { return 1; }
