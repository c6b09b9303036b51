# Doxygen's input filter: turns the comments of a header, which are plain ("//", "/* */"), into Doxygen's.
#  - The comment that begins the file describes the file.
#  - A comment on lines of its own describes what follows.
#  - A comment at the end of a line describes what the line declares: every name, if there are several.
#  - `size` and `rsv` of the structs in zr/abi, which zr/abi/base.h explains once, get their meaning here.
# Line numbers stay the same, so that Doxygen's warnings name the lines of the header.

function meaning(name, text) {
  if (name ~ /(^|[ *])rsv$/) return "reserved: 0"
  if (name ~ /uint32_t size$/) return "sizeof the struct where the caller was compiled"
  return text
}

# The declarations of `code`, each with `text` as its comment: "int a, b;" -> "int a, /**< text */ b; /**< text */".
function described(code, text,    names, n, i, out, said) {
  if (code !~ /^ *[A-Za-z_][A-Za-z0-9_:<>* ]*( = [^(){},;]+)?(, *[A-Za-z0-9_* ]+(\[[0-9]+\])?( = [^(){},;]+)?)*;$/)
    return text == "" ? code : code " /**< " text " */"
  sub(/;$/, "", code)
  n = split(code, names, /, */)
  out = ""
  for (i = 1; i <= n; ++i) {
    said = meaning(names[i], text)
    out = out names[i] (i < n ? "," : ";") (said == "" ? "" : " /**< " said " */") (i < n ? " " : "")
  }
  return out
}

NR == 1 && FILENAME ~ /\/include\// {
  name = FILENAME
  sub(/.*\/include\//, "", name)
  in_head = /^\/\//
  if (sub(/^\/\/ /, "/// @file " name " ") || sub(/^\/\* /, "/** @file " name " ")) { print; next }
}
in_head && /^\/\// { sub(/^\/\//, "///"); print; next }
{ in_head = 0 }

in_trailing {  # the rest of a comment that began at the end of a line
  if (/\*\//) in_trailing = 0
  print
  next
}
/^ *\/\/ / { sub(/\/\/ /, "/// "); print; next }
/^ *\/\/\/ / { print; next }
/^ *\/\* / { sub(/\/\* /, "/** "); print; next }
/^ *\*/ || /^}/ { print; next }
match($0, / +\/\/ /) {
  print described(substr($0, 1, RSTART - 1), substr($0, RSTART + RLENGTH))
  next
}
match($0, / +\/\* /) {
  code = substr($0, 1, RSTART - 1)
  text = substr($0, RSTART + RLENGTH)
  if (sub(/ \*\/$/, "", text)) { print described(code, text); next }
  in_trailing = 1
  print code " /**< " text
  next
}
/^  [^()]*(size|rsv)[,;]/ { print described($0, ""); next }
{ print }
