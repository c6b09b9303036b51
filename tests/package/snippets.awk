# Makes one C++ file of the ```cpp blocks of a page: each block is the body of a function. Line numbers are those of the page.
BEGIN { print "#include \"snippets.hpp\"" }
/^```cpp/ {
  ++blocks
  printf "void block_%d(zr::Engine& engine) {\n#line %d \"%s\"\n", blocks, NR + 1, FILENAME
  inside = 1
  next
}
/^```/ {
  if (inside) print "}"
  inside = 0
  next
}
inside { print }
END { if (!blocks) exit 1 }
