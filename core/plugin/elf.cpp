// Boost.DLL 1.74's library_info is not enough: it reads only .symtab, which stripped files do not have, and takes the
// names from the last string table of the file.
#include "plugin/elf.hpp"

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

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

}  // namespace

std::optional<std::vector<std::string>> exported_symbols(const std::filesystem::path& file,
                                                         const std::string& section) {
  const Image image(file);
  const auto head = image.at<Elf64_Ehdr>(0);
  if (!head || !native(*head)) return {};
  const auto header = [&](uint64_t i) { return image.at<Elf64_Shdr>(head->e_shoff + i * sizeof(Elf64_Shdr)); };
  const auto names = header(head->e_shstrndx);
  if (!names) return {};
  std::optional<Elf64_Shdr> symbols;
  uint64_t section_index = 0;  // 0 is never a section's index
  for (uint64_t i = 1; i < head->e_shnum; ++i) {
    const auto section_header = header(i);
    if (!section_header) return {};
    if (section_header->sh_type == SHT_DYNSYM) symbols = section_header;
    if (image.text(*names, section_header->sh_name) == section) section_index = i;
  }
  std::vector<std::string> found;
  const auto strings = symbols ? header(symbols->sh_link) : std::nullopt;
  if (!strings || section_index == 0) return found;
  for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols->sh_size; at += sizeof(Elf64_Sym)) {
    const auto symbol = image.at<Elf64_Sym>(symbols->sh_offset + at);
    if (!symbol) return {};
    if (symbol->st_shndx == section_index) found.push_back(image.text(*strings, symbol->st_name));
  }
  return found;
}

}  // namespace zr::host::plugin
