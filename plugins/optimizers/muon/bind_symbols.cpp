// bind_symbols LIBRARY COPY NAME: copies a shared library under another soname, with references to its own symbols
// bound to itself (DF_SYMBOLIC), as if it had been linked with -Bsymbolic.
//
// libtorch contains a oneDNN of its own and exports some of its template instantiations, which the dynamic linker would
// use in place of those of the library of muon: a job that is linked with libtorch would run the wrong initialization.
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

template <class T>
T& at(std::vector<char>& file, std::size_t offset) {
  if (offset + sizeof(T) > file.size()) throw std::runtime_error("the file is shorter than its headers say");
  return *reinterpret_cast<T*>(file.data() + offset);
}

void bind(std::vector<char>& file, const std::string& name) {
  const auto& header = at<Elf64_Ehdr>(file, 0);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64)
    throw std::runtime_error("it is not a 64-bit ELF file");
  std::size_t dynamic = 0, strings = 0, soname = 0;
  bool has_flags = false;
  for (int i = 0; i < header.e_phnum; ++i)
    if (const auto& segment = at<Elf64_Phdr>(file, header.e_phoff + i * sizeof(Elf64_Phdr));
        segment.p_type == PT_DYNAMIC)
      dynamic = segment.p_offset;
  for (std::size_t entry = dynamic; at<Elf64_Dyn>(file, entry).d_tag != DT_NULL; entry += sizeof(Elf64_Dyn)) {
    auto& value = at<Elf64_Dyn>(file, entry);
    if (value.d_tag == DT_STRTAB) strings = value.d_un.d_ptr;  // in the first segment, address and offset are equal
    if (value.d_tag == DT_SONAME) soname = value.d_un.d_val;
    if (value.d_tag != DT_FLAGS) continue;
    value.d_un.d_val |= DF_SYMBOLIC;
    has_flags = true;
  }
  if (!has_flags || soname == 0) throw std::runtime_error("it has no DT_FLAGS or no soname");
  char* const text = &at<char>(file, strings + soname);
  if (std::strlen(text) != name.size())
    throw std::runtime_error("the new name must be as long as the soname '" + std::string(text) + "'");
  std::copy(name.begin(), name.end(), text);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::cerr << "usage: bind_symbols LIBRARY COPY NAME\n", 2;
  try {
    std::ifstream in(argv[1], std::ios::binary);
    std::vector<char> file{std::istreambuf_iterator<char>(in), {}};
    bind(file, argv[3]);
    std::ofstream out(argv[2], std::ios::binary);
    out.write(file.data(), static_cast<std::streamsize>(file.size()));
    if (!out.flush()) throw std::runtime_error("cannot write " + std::string(argv[2]));
  } catch (const std::exception& error) {
    return std::cerr << "bind_symbols: error: " << argv[1] << ": " << error.what() << "\n", 1;
  }
}
