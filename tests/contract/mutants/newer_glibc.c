/* Stands for a glibc that is newer than any supported one: newer_glibc.map gives its symbol a version. */
int zr_mutant_of_newer_glibc(void) { return 1; }
