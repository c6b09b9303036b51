// The fuzz target: passes bytes to the parser of manifests, safetensors headers or indexes.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.hpp"
#include "base/hex.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::test {

enum class Fed { manifest, manifest_with_its_hash, header, index };
inline constexpr int kFed = 4;

/// True if the parser accepts the text. Any result but success or UserError ends the process, and so does a tensor
/// outside its file.
inline bool feed(Fed what, const std::string& text) {
  using namespace zr::host;
  const auto require = [](bool holds) {
    if (!holds) __builtin_trap();
  };
  try {
    if (what == Fed::index) {
      for (const auto& [tensor, file] : checkpoint::parse_index("f", text)) require(file.find('/') == file.npos);
    } else if (what == Fed::header) {
      const auto bytes = static_cast<int64_t>(text.size()) + 1000;
      const checkpoint::TensorHeader header =
          checkpoint::parse_header("f", text, static_cast<int64_t>(text.size()) + 8, bytes);
      for (const checkpoint::StoredTensor& tensor : header.tensors)
        require(tensor.begin >= 0 && tensor.begin <= tensor.end && header.data + tensor.end <= bytes);
    } else {
      std::string whole = text;
      if (what == Fed::manifest_with_its_hash)  // the body is parsed only if its hash is correct
        whole = "{\"xxh3\":\"" + hex(checkpoint::hash_of(text.data(), static_cast<int64_t>(text.size()))) +
                "\",\n\"manifest\":" + text + "}\n";
      const checkpoint::Manifest manifest = checkpoint::parse_manifest("f", whole);
      for (const checkpoint::SavedTensor& tensor : manifest.tensors) {
        require(tensor.file < manifest.files.size());
        const checkpoint::SavedFile& file = manifest.files[tensor.file];
        require(file.name.find('/') == file.name.npos && tensor.offset >= file.data && tensor.bytes() >= 0 &&
                tensor.offset + tensor.bytes() <= file.bytes);
        int64_t chunks = 0;
        for (const checkpoint::Chunk& chunk : tensor.chunks) chunks += chunk.bytes;
        require(chunks == tensor.bytes());
      }
    }
    return true;
  } catch (const Error& failure) {
    require(failure.exit_code() == exit_code::user);
    return false;
  }
}

}  // namespace zr::test
