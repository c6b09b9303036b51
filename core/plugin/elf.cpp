// Boost.DLL 1.74's library_info is not enough: it reads only .symtab, which stripped files do not have, and takes the
// names from the last string table of the file.
#include "plugin/elf.hpp"

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

namespace zr::host::plugin {

namespace {

// A file's bytes, mapped. Every read is checked against its length.
class Image {
 public:
  explicit Image(const std::filesystem::path& file) {
    const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    struct stat status {};
    if (::fstat(fd, &status) == 0 && status.st_size > 0) {
      void* at = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
      if (at != MAP_FAILED) {
        data_ = static_cast<const char*>(at);
        size_ = static_cast<std::size_t>(status.st_size);
      }
    }
    ::close(fd);
  }
  ~Image() {
    if (data_) ::munmap(const_cast<char*>(data_), size_);
  }
  Image(const Image&) = delete;

  template <class T>
  std::optional<T> at(uint64_t offset) const {
    if (offset > size_ || size_ - offset < sizeof(T)) return {};
    T value;
    std::memcpy(&value, data_ + offset, sizeof value);
    return value;
  }
  // The text at `offset` of a string table; "" if it does not end inside the table.
  std::string text(const Elf64_Shdr& table, uint64_t offset) const {
    if (table.sh_offset > size_ || size_ - table.sh_offset < table.sh_size || offset >= table.sh_size) return "";
    const char* from = data_ + table.sh_offset + offset;
    const auto* end = static_cast<const char*>(std::memchr(from, 0, table.sh_size - offset));
    return end ? std::string(from, end) : "";
  }

 private:
  const char* data_ = nullptr;
  std::size_t size_ = 0;
};

bool native(const Elf64_Ehdr& head) {
#if defined(__x86_64__)
  constexpr Elf64_Half machine = EM_X86_64;
#elif defined(__aarch64__)
  constexpr Elf64_Half machine = EM_AARCH64;
#else
#error "unsupported architecture: add its ELF machine number"
#endif
  return std::memcmp(head.e_ident, ELFMAG, SELFMAG) == 0 && head.e_ident[EI_CLASS] == ELFCLASS64 &&
         head.e_ident[EI_DATA] == ELFDATA2LSB && head.e_machine == machine && head.e_type == ET_DYN;
}

// The sections of a library.
struct Sections {
  std::optional<Elf64_Shdr> symbols, strings;  // the dynamic symbols and their names
  uint64_t index = 0;                          // of the section with the given name; 0 is never a section's index
};
// nullopt if it is not a library of this machine, or if its tables exceed the file.
std::optional<Sections> sections_of(const Image& image, const std::string& name) {
  const auto head = image.at<Elf64_Ehdr>(0);
  if (!head || !native(*head)) return {};
  const auto header = [&](uint64_t i) { return image.at<Elf64_Shdr>(head->e_shoff + i * sizeof(Elf64_Shdr)); };
  const auto names = header(head->e_shstrndx);
  if (!names) return {};
  Sections sections;
  for (uint64_t i = 1; i < head->e_shnum; ++i) {
    const auto section = header(i);
    if (!section) return {};
    if (section->sh_type == SHT_DYNSYM) sections.symbols = section;
    if (image.text(*names, section->sh_name) == name) sections.index = i;
  }
  if (sections.symbols) sections.strings = header(sections.symbols->sh_link);
  if (!sections.strings) sections.symbols.reset();
  return sections;
}

// Calls fn(symbol, name) for each dynamic symbol. False if the table exceeds the file.
template <class Fn>
bool for_each_symbol(const Image& image, const Sections& sections, Fn&& fn) {
  if (!sections.symbols) return true;
  for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= sections.symbols->sh_size; at += sizeof(Elf64_Sym)) {
    const auto symbol = image.at<Elf64_Sym>(sections.symbols->sh_offset + at);
    if (!symbol) return false;
    fn(*symbol, image.text(*sections.strings, symbol->st_name));
  }
  return true;
}

// Symbols that linkers define in every library.
bool is_of_linker(const std::string& name) {
  static constexpr std::string_view kNames[] = {"_init", "_fini", "_edata", "_end", "__bss_start"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

}  // namespace

std::optional<std::vector<std::string>> exported_symbols(const std::filesystem::path& file,
                                                         const std::string& section) {
  const Image image(file);
  const auto sections = sections_of(image, section);
  if (!sections) return {};
  std::vector<std::string> found;
  if (sections->index == 0) return found;
  const bool complete = for_each_symbol(image, *sections, [&](const Elf64_Sym& symbol, std::string name) {
    if (symbol.st_shndx == sections->index) found.push_back(std::move(name));
  });
  return complete ? std::optional(found) : std::nullopt;
}

std::vector<ExportedSymbol> all_exports(const std::filesystem::path& file) {
  const Image image(file);
  const auto sections = sections_of(image, "");
  std::vector<ExportedSymbol> found;
  if (!sections) return found;
  for_each_symbol(image, *sections, [&](const Elf64_Sym& symbol, std::string name) {
    const unsigned bind = ELF64_ST_BIND(symbol.st_info), visibility = ELF64_ST_VISIBILITY(symbol.st_other);
    const bool defined = symbol.st_shndx != SHN_UNDEF && symbol.st_shndx != SHN_ABS;
    const bool exported = bind == STB_GLOBAL || bind == STB_WEAK || bind == STB_GNU_UNIQUE;
    if (defined && exported && (visibility == STV_DEFAULT || visibility == STV_PROTECTED) && !is_of_linker(name))
      found.push_back({std::move(name), bind == STB_GNU_UNIQUE});
  });
  return found;
}

}  // namespace zr::host::plugin
