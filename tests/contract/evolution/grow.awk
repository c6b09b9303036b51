# Prints an ABI header as a later version might have it: every sized struct has LEVEL x 16 more bytes at its end, and
# every table (a struct with functions) LEVEL more functions. Few bytes, because AddressSanitizer finds a copy that is
# too long only if it ends next to the object. Usage: awk -v LEVEL=1 -f grow.awk base.h
function flush_struct(closing) {
  if (sized) {
    for (i = 1; i <= LEVEL; ++i) {
      if (table) printf "  zr_code (*grown_function_%d)(void *self, zr_error *);\n", i
      printf "  uint64_t grown_%d[2];\n", i
    }
    ++grown
  }
  print closing
  inside = 0
}
/^#define ZR_ABI_MINOR / { sub(/[0-9]+u/, (9 + LEVEL) "u") }
/^ZR_STATIC_ASSERT\(ZR_ABI_MINOR == 9/ { next }  # in draft headers, which exist for one version only
/^typedef struct [a-z_]+ \{/ { inside = 1; sized = 0; table = 0; first = 1; line = $0; sub(/^[^{]*\{/, "", line) }
inside && !/^typedef struct/ { line = $0 }
inside {
  gsub(/\/\*.*\*\//, "", line)
  if (first && line ~ /[a-z]/) { sized = line ~ /^ *uint32_t size[,;]/; first = 0 }
  if (line ~ /\(\*[a-z_]+\)\(/) table = 1
  if ($0 ~ /^\} [a-z_]+;/) { flush_struct($0); next }
}
{ print }
