#include "cli/checkpoint_commands.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/safetensors.hpp"
#include "cli/progress.hpp"
#include "engine/stored.hpp"
#include "shard/rounding.hpp"

namespace zr::host {

namespace fs = std::filesystem;

namespace {
Checkpoint opened(const std::string& folder) {
  Progress progress("opening " + folder);
  return Checkpoint(folder, [&](int64_t done, int64_t all) { progress.at(done, all); });
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t n : shape) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return text.empty() ? "1" : text;
}
}  // namespace

int verify_checkpoints(const std::string& folder) {
  std::vector<std::string> all;
  if (is_there((fs::path(folder) / kManifest).string())) {
    all.push_back(folder);
  } else {
    for (const std::string& name : checkpoints_in(folder)) all.push_back((fs::path(folder) / name).string());
    if (all.empty()) find_checkpoint(folder);  // throws
  }
  int code = 0;
  for (const std::string& one : all) try {
      const Checkpoint checkpoint = opened(one);
      {
        Progress progress(one, checkpoint.bytes());
        checkpoint.verify([&](int64_t done) { progress.at(done); });
      }
      std::cout << one << ": whole, step " << checkpoint.manifest().step << ", " << checkpoint.manifest().tensors.size()
                << " tensors, " << bytes_text(checkpoint.bytes()) << "\n";
    } catch (const Failure& failure) {
      std::cout << failure.what() << "\n";
      code = failure.code();
    }
  return code;
}

void show_checkpoint(const std::string& folder) {
  const Checkpoint checkpoint = opened(find_checkpoint(folder));
  const Manifest& manifest = checkpoint.manifest();
  const auto facts = nlohmann::json::parse(manifest.facts);
  std::cout << checkpoint.folder() << ": step " << manifest.step << " of run " << manifest.run << ", "
            << bytes_text(checkpoint.bytes()) << "\n";
  if (facts.contains("world"))
    std::cout << "written by " << facts["world"] << " ranks under " << facts["strategy"].get<std::string>() << " with "
              << facts["optimizer"]["id"].get<std::string>() << "\n";
  if (facts.contains("config")) std::cout << "\n" << facts["config"].get<std::string>() << "\n";
  std::size_t name = 0, shape = 0, role = 0;
  for (const SavedTensor& tensor : manifest.tensors) {
    name = std::max(name, tensor.name.size());
    role = std::max(role, tensor.role.size());
    shape = std::max(shape, shape_text(tensor.shape).size());
  }
  for (const SavedTensor& tensor : manifest.tensors)
    std::printf("%-*s  %-*s  %-5s %*s  %10s\n", static_cast<int>(role), tensor.role.c_str(), static_cast<int>(name),
                tensor.name.c_str(), tensor.dtype.c_str(), static_cast<int>(shape), shape_text(tensor.shape).c_str(),
                bytes_text(tensor.bytes()).c_str());
}

void export_weights(const ExportOptions& options) {
  const Checkpoint from = opened(find_checkpoint(options.from));
  if (is_there((fs::path(options.to) / kManifest).string()) || !checkpoints_in(options.to).empty())
    fail_user("zeroth export: " + options.to + " holds checkpoints, and stays as it is; name another folder");
  const zr_dtype wanted = options.dtype.empty() ? zr_dtype{ZR_NONE} : float_named(options.dtype);
  struct Item {
    const SavedTensor *tensor, *source;
    std::string dtype;
  };
  std::vector<Item> items;
  int64_t all = 0;
  for (const SavedTensor& tensor : from.manifest().tensors) {
    if (tensor.role != "weight" && tensor.role != "buffer") continue;
    const bool converts = tensor.role == "weight" && wanted != ZR_NONE && float_of(tensor.dtype) != ZR_NONE &&
                          float_of(tensor.dtype) != wanted;
    const SavedTensor* master = converts ? from.find("master", tensor.name) : nullptr;
    items.push_back({&tensor, master ? master : &tensor, converts ? stored_name(wanted) : tensor.dtype});
    all += tensor.bytes() / stored_size(tensor.dtype) * stored_size(items.back().dtype);
  }
  const bool one = options.to.ends_with(".safetensors");
  std::vector<TensorHeader> headers(1);
  std::vector<std::size_t> file_of;
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return stored_size(a.dtype) > stored_size(b.dtype); });
  for (const Item& item : items) {
    int64_t at = headers.back().tensors.empty() ? 0 : headers.back().tensors.back().end;
    if (!one && at >= options.file_bytes) {
      headers.emplace_back();
      at = 0;
    }
    const int64_t bytes = item.tensor->bytes() / stored_size(item.tensor->dtype) * stored_size(item.dtype);
    headers.back().tensors.push_back({item.tensor->name, item.dtype, item.tensor->shape, at, at + bytes});
    headers.back().metadata = {{"format", "pt"}};
    file_of.push_back(headers.size() - 1);
  }
  if (!one) make_folder(options.to);
  const auto name = [&](std::size_t k) {
    char text[80];
    std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", k + 1, headers.size());
    return one ? options.to : (fs::path(options.to) / text).string();
  };
  constexpr int64_t kRun = int64_t{1} << 20;  // elements
  std::vector<char> room(static_cast<std::size_t>(kRun) * 8), narrowed(static_cast<std::size_t>(kRun) * 4);
  std::vector<float> wide(static_cast<std::size_t>(kRun));
  Progress progress("exporting to " + options.to, all);
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  std::size_t next = 0;
  int64_t done = 0;
  for (std::size_t k = 0; k < headers.size(); ++k) {
    const std::string aside = name(k) + ".aside";
    remove_path(aside);
    {
      File file(aside, File::Use::create);
      const std::string header = write_header(headers[k]);
      file.write(0, header.data(), static_cast<int64_t>(header.size()));
      int64_t at = headers[k].data;
      for (; next < items.size() && file_of[next] == k; ++next) {
        const Item& item = items[next];
        map[item.tensor->name] = fs::path(name(k)).filename().string();
        const int64_t size = stored_size(item.source->dtype), count = item.source->bytes() / size;
        for (int64_t first = 0; first < count; first += kRun) {
          const int64_t n = std::min(kRun, count - first);
          from.read(*item.source, first * size, n * size, room.data());
          const char* out = room.data();
          if (item.source->dtype != item.dtype) {
            widen(room.data(), float_of(item.source->dtype), n, wide.data());
            narrow(wide.data(), n, float_of(item.dtype), narrowed.data());
            out = narrowed.data();
          }
          const int64_t bytes = n * stored_size(item.dtype);
          file.write(at, out, bytes);
          at += bytes;
          progress.at(done += bytes);
        }
      }
      file.sync();
    }
    rename_path(aside, name(k));
  }
  sync_folder(fs::absolute(options.to).parent_path().string());
  if (!one) sync_folder(options.to);
  if (!one)
    write_file((fs::path(options.to) / kIndex).string(),
               nlohmann::ordered_json{{"metadata", {{"total_size", all}}}, {"weight_map", map}}.dump(1) + "\n");
}

}  // namespace zr::host
