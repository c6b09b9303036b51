#include "conform/elf_image.hpp"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

#include "conform/text.hpp"

namespace zr::conform {

namespace {

#if defined(__x86_64__)
constexpr Elf64_Half kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr Elf64_Half kMachine = EM_AARCH64;
#else
#error "unsupported architecture: add its ELF machine number"
#endif

// The bytes of the file; every read is checked against their number.
class Bytes {
 public:
  explicit Bytes(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
  }
  template <class T>
  std::optional<T> at(uint64_t offset) const {
    if (offset > bytes_.size() || bytes_.size() - offset < sizeof(T)) return {};
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }
  uint64_t size() const { return bytes_.size(); }
  std::string text(uint64_t offset) const {
    if (offset >= bytes_.size()) return "";
    const std::size_t end = bytes_.find('\0', offset);
    return end == std::string::npos ? "" : bytes_.substr(offset, end - offset);
  }

 private:
  std::string bytes_;
};

void read_symbols(const Bytes& bytes, const Elf64_Ehdr& head, ElfImage& image) {
  for (uint64_t i = 0; i < head.e_shnum; ++i) {
    const auto section = bytes.at<Elf64_Shdr>(head.e_shoff + i * sizeof(Elf64_Shdr));
    if (!section || section->sh_type != SHT_DYNSYM) continue;
    const auto strings = bytes.at<Elf64_Shdr>(head.e_shoff + section->sh_link * sizeof(Elf64_Shdr));
    if (!strings) return;
    for (uint64_t at = sizeof(Elf64_Sym); at + sizeof(Elf64_Sym) <= section->sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = bytes.at<Elf64_Sym>(section->sh_offset + at);
      if (!symbol) return;
      const unsigned binding = ELF64_ST_BIND(symbol->st_info);
      if (binding == STB_LOCAL) continue;
      image.symbols.push_back(
          {bytes.text(strings->sh_offset + symbol->st_name), symbol->st_shndx != SHN_UNDEF, binding == STB_GNU_UNIQUE});
    }
  }
}

void read_versions(const Bytes& bytes, const Elf64_Ehdr& head, ElfImage& image) {
  for (uint64_t i = 0; i < head.e_shnum; ++i) {
    const auto section = bytes.at<Elf64_Shdr>(head.e_shoff + i * sizeof(Elf64_Shdr));
    if (!section || section->sh_type != SHT_GNU_verneed) continue;
    const auto strings = bytes.at<Elf64_Shdr>(head.e_shoff + section->sh_link * sizeof(Elf64_Shdr));
    uint64_t at = section->sh_offset;
    for (uint32_t library = 0; strings && library < section->sh_info; ++library) {
      const auto need = bytes.at<Elf64_Verneed>(at);
      if (!need) return;
      uint64_t entry = at + need->vn_aux;
      for (int version = 0; version < need->vn_cnt; ++version) {
        const auto one = bytes.at<Elf64_Vernaux>(entry);
        if (!one) return;
        image.versions.push_back(bytes.text(strings->sh_offset + one->vna_name));
        entry += one->vna_next;
      }
      at += need->vn_next;
    }
  }
}

void read_dynamic(const Bytes& bytes, const Elf64_Ehdr& head, ElfImage& image) {
  bool has_stack_header = false;
  for (uint64_t i = 0; i < head.e_phnum; ++i) {
    const auto header = bytes.at<Elf64_Phdr>(head.e_phoff + i * sizeof(Elf64_Phdr));
    if (header && header->p_type == PT_GNU_STACK) {
      has_stack_header = true;
      image.executable_stack = header->p_flags & PF_X;
    }
  }
  image.executable_stack |= !has_stack_header;
  for (uint64_t i = 0; i < head.e_shnum; ++i) {
    const auto section = bytes.at<Elf64_Shdr>(head.e_shoff + i * sizeof(Elf64_Shdr));
    if (!section || section->sh_type != SHT_DYNAMIC) continue;
    const auto strings = bytes.at<Elf64_Shdr>(head.e_shoff + section->sh_link * sizeof(Elf64_Shdr));
    for (uint64_t at = 0; strings && at + sizeof(Elf64_Dyn) <= section->sh_size; at += sizeof(Elf64_Dyn)) {
      const auto entry = bytes.at<Elf64_Dyn>(section->sh_offset + at);
      if (!entry) return;
      if (entry->d_tag == DT_NEEDED) image.needed.push_back(bytes.text(strings->sh_offset + entry->d_un.d_val));
      if (entry->d_tag == DT_TEXTREL || (entry->d_tag == DT_FLAGS && (entry->d_un.d_val & DF_TEXTREL)))
        image.text_relocations = true;
    }
  }
}

// The number of bytes that the headers describe; all ones if it exceeds 64 bits.
uint64_t described_bytes(const Bytes& bytes, const Elf64_Ehdr& head) {
  uint64_t end = 0;
  const auto add = [&end](uint64_t offset, uint64_t length) {
    end = std::max(end, length > ~offset ? ~uint64_t{0} : offset + length);
  };
  add(head.e_phoff, uint64_t{head.e_phnum} * sizeof(Elf64_Phdr));
  add(head.e_shoff, uint64_t{head.e_shnum} * sizeof(Elf64_Shdr));
  for (uint64_t i = 0; i < head.e_phnum; ++i)
    if (const auto header = bytes.at<Elf64_Phdr>(head.e_phoff + i * sizeof(Elf64_Phdr)))
      add(header->p_offset, header->p_filesz);
  return end;
}

}  // namespace

ElfImage read_elf(const std::filesystem::path& file) {
  ElfImage image;
  const Bytes bytes(file);
  const auto head = bytes.at<Elf64_Ehdr>(0);
  if (!head || std::memcmp(head->e_ident, ELFMAG, SELFMAG) != 0) {
    image.problem = "it is not an ELF file, or cannot be read";
  } else if (head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_ident[EI_DATA] != ELFDATA2LSB ||
             head->e_machine != kMachine) {
    image.problem = "it was built for another machine";
  } else if (head->e_type != ET_DYN) {
    image.problem = "it is not a shared library";
  } else if (const uint64_t described = described_bytes(bytes, *head); described > bytes.size()) {
    image.problem = concat("it is cut off: it has ", bytes.size(), " bytes, but its headers describe ", described,
                           "; build or copy it again");
  } else {
    read_symbols(bytes, *head, image);
    read_versions(bytes, *head, image);
    read_dynamic(bytes, *head, image);
  }
  return image;
}

}  // namespace zr::conform
