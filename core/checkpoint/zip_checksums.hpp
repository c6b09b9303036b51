// The checksums that a zip archive has of its records. libtorch's reader of torch.save() files does not compare them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "base/file.hpp"

namespace zr::host::checkpoint {

/// The CRC-32 of the uncompressed bytes of each record, by the record's name in the archive: "model/data/0". Throws
/// UserError naming the file if the archive's directory is damaged.
std::map<std::string, uint32_t> zip_checksums(const File& file);
/// The CRC-32 that zip archives use.
uint32_t crc32_of(const void* data, std::size_t bytes);

}  // namespace zr::host::checkpoint
