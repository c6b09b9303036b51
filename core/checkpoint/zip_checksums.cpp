#include "checkpoint/zip_checksums.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/crc.hpp>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host::checkpoint {

namespace {

// Signatures and sizes of the parts at the end of an archive (PKWARE's APPNOTE.TXT 4.3). Numbers are little-endian.
constexpr std::string_view kEnd{"PK\x05\x06"}, kZip64Locator{"PK\x06\x07"}, kZip64End{"PK\x06\x06"},
    kEntry{"PK\x01\x02"};
constexpr int64_t kEndBytes = 22, kZip64LocatorBytes = 20, kZip64EndBytes = 56, kMaxCommentBytes = 65535;
constexpr std::size_t kEntryBytes = 46;

[[noreturn]] void fail_damaged(const File& file) {
  fail_user(fmt::format("{}: is damaged: the list of its records cannot be read; save or download it again",
                        printable(file.path())));
}

// `offset` and `bytes` come from the file.
std::string read_at(const File& file, uint64_t offset, uint64_t bytes) {
  const auto size = static_cast<uint64_t>(file.size());
  if (offset > size || bytes > size - offset) fail_damaged(file);
  std::string text(bytes, '\0');
  file.read(static_cast<int64_t>(offset), text.data(), static_cast<int64_t>(bytes));
  return text;
}

template <class T>
T number(std::string_view bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// The entries of the records.
std::string read_directory(const File& file) {
  const int64_t size = file.size(), tail = std::min(size, kEndBytes + kMaxCommentBytes);
  const std::string last = read_at(file, static_cast<uint64_t>(size - tail), static_cast<uint64_t>(tail));
  const std::size_t found = tail < kEndBytes ? last.npos : last.rfind(kEnd, static_cast<std::size_t>(tail - kEndBytes));
  if (found == last.npos) fail_damaged(file);
  const auto bytes = number<uint32_t>(last, found + 12), offset = number<uint32_t>(last, found + 16);
  constexpr uint32_t kInZip64End = std::numeric_limits<uint32_t>::max();
  if (bytes != kInZip64End && offset != kInZip64End) return read_at(file, offset, bytes);
  const int64_t end = size - tail + static_cast<int64_t>(found);
  if (end < kZip64LocatorBytes) fail_damaged(file);
  const std::string locator = read_at(file, static_cast<uint64_t>(end - kZip64LocatorBytes), kZip64LocatorBytes);
  if (!locator.starts_with(kZip64Locator)) fail_damaged(file);
  const std::string zip64 = read_at(file, number<uint64_t>(locator, 8), kZip64EndBytes);
  if (!zip64.starts_with(kZip64End)) fail_damaged(file);
  return read_at(file, number<uint64_t>(zip64, 48), number<uint64_t>(zip64, 40));
}

}  // namespace

std::map<std::string, uint32_t> zip_checksums(const File& file) {
  const std::string directory = read_directory(file);
  std::map<std::string, uint32_t> checksums;
  for (std::string_view rest = directory; !rest.empty();) {
    if (rest.size() < kEntryBytes || !rest.starts_with(kEntry)) fail_damaged(file);
    const std::size_t name = number<uint16_t>(rest, 28),
                      bytes = kEntryBytes + name + number<uint16_t>(rest, 30) + number<uint16_t>(rest, 32);
    if (rest.size() < bytes) fail_damaged(file);
    checksums.emplace(rest.substr(kEntryBytes, name), number<uint32_t>(rest, 16));
    rest.remove_prefix(bytes);
  }
  return checksums;
}

uint32_t crc32_of(const void* data, std::size_t bytes) {
  boost::crc_32_type crc;
  crc.process_bytes(data, bytes);
  return crc.checksum();
}

}  // namespace zr::host::checkpoint
