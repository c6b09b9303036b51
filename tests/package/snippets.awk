# Makes one C++ file of the ```cpp blocks of Markdown pages. A block that begins with an #include is a program and becomes
# a namespace; other blocks become the body of a function. Line numbers are those of the page.
BEGIN { print "#include \"snippets.hpp\"" }
FNR == 1 { print "// " FILENAME }
/^```cpp/ {
  begins = 1
  next
}
/^```/ {
  if (inside) print "}"
  inside = 0
  next
}
begins {
  ++blocks
  if (/^#include/) printf "namespace block_%d {\n", blocks
  else printf "void block_%d(zr::Engine& engine, torch::nn::Linear block) {\n", blocks
  printf "#line %d \"%s\"\n", FNR, FILENAME
  begins = 0
  inside = 1
}
inside { print }
END { if (blocks < 8) exit 1 }
