#include "zr/weights.hpp"

#include <ATen/MemoryOverlap.h>
#include <ATen/native/Resize.h>
#include <c10/core/InferenceMode.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "api/module.hpp"
#include "api/state_dict_conversion.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/save.hpp"
#include "checkpoint/state_dict_pickle.hpp"
#include "engine/checkpoint_choice.hpp"
#include "engine/checkpoint_loader.hpp"
#include "model/deferred.hpp"
#include "model/parameter_registry.hpp"
#include "model/placeholder.hpp"
#include "model/torch_dtype.hpp"

namespace zr {

namespace {

using host::checkpoint::Checkpoint;
using host::checkpoint::SavedTensor;

// A tensor of the module with all its names.
struct Target {
  std::string kind;  // "weight" or "buffer"
  std::vector<std::string> names;
  torch::Tensor tensor;
  std::string text() const { return kind + " '" + host::printable(names[0]) + "'"; }
};

void add_targets(const std::string& kind, const Tensors& tensors, std::vector<Target>& targets) {
  for (const auto& [name, tensor] : tensors) {
    const auto same = [&, &tensor = tensor](const Target& target) { return target.tensor.is_same(tensor); };
    const auto tied = std::find_if(targets.begin(), targets.end(), same);
    if (tied == targets.end())
      targets.push_back({kind, {name}, tensor});
    else
      tied->names.push_back(name);
  }
}

bool has_memory(const torch::Tensor& tensor) {
  if (tensor.is_meta() || host::model::Placeholder::is_marked(tensor) || host::model::Construction::of(tensor))
    return false;
  const auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                      static_cast<std::size_t>(tensor.storage_offset()));
  return tensor.numel() == 0 || (tensor.storage().nbytes() >= bytes && tensor.storage().data());
}

void check_target(const Target& target) {
  const std::string call = "zr::load_weights(): " + target.text();
  if (host::model::ParameterRegistry::find(target.tensor.unsafeGetTensorImpl()))
    host::fail_user(call + " belongs to an engine; load it with engine.load(), or call engine.release() before");
  if (!target.tensor.has_storage()) host::fail_user(call + " is not a dense tensor; only these are loaded");
  if (!has_memory(target.tensor))
    host::fail_user(call +
                    " has no memory: it was made with zr::deferred or on the device meta, its engine was destroyed "
                    "without engine.release(), or its storage was freed; give it memory, or load it with an engine");
  if (at::has_internal_overlap(target.tensor) == at::MemOverlap::Yes)
    host::fail_user(call + " has elements that share memory, as expand() makes them; use clone() in the module");
  if (target.tensor.is_inference() && !c10::InferenceMode::is_enabled())
    host::fail_user(call + " was made in c10::InferenceMode; call zr::load_weights() in that mode too");
}

// The elements of its storage that a tensor has, sorted.
torch::Tensor elements_of(const torch::Tensor& tensor) {
  const auto all = static_cast<int64_t>(tensor.storage().nbytes()) / static_cast<int64_t>(tensor.itemsize());
  const torch::Tensor elements =
      torch::arange(all, torch::kLong).as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return std::get<0>(elements.flatten().sort());
}

// Whether two tensors share a part of their elements, but not all. Views of the same elements are tied tensors.
bool overlap_partly(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.storage().is_alias_of(b.storage()) || a.numel() == 0 || b.numel() == 0) return false;
  const at::MemOverlapStatus status = at::get_overlap_status(a, b);
  if (status != at::MemOverlapStatus::TooHard) return status == at::MemOverlapStatus::Partial;
  if (a.itemsize() != b.itemsize()) return true;
  const torch::Tensor left = elements_of(a), right = elements_of(b);
  return !torch::equal(left, right) && torch::isin(left, right).any().item<bool>();
}

void check_overlaps(const std::vector<Target>& targets) {
  std::multimap<const void*, const Target*> by_storage;
  for (const Target& target : targets) {
    const void* const storage = target.tensor.storage().unsafeGetStorageImpl();
    const auto [first, last] = by_storage.equal_range(storage);
    for (auto other = first; other != last; ++other)
      if (overlap_partly(target.tensor, other->second->tensor))
        host::fail_user("zr::load_weights(): " + other->second->text() + " and " + target.text() +
                        " share a part of their memory; give each its own, or share all of it");
    by_storage.emplace(storage, &target);
  }
}

// The newest checkpoint if `from` is a folder of checkpoints, else `from`.
std::string newest_in(const std::string& from) {
  namespace checkpoint = host::checkpoint;
  if (checkpoint::is_state_dict_file(from) || checkpoint::is_from_other_program(from) ||
      host::path_exists(from + "/" + checkpoint::kManifest))
    return from;
  const std::vector<std::string> names = checkpoint::checkpoints_in(from);
  return names.empty() ? from : from + "/" + names.back();
}

// A checkpoint, or a state dictionary that is converted to a temporary file while this object exists.
struct Source {
  explicit Source(const std::string& path) {
    if (path.empty())
      host::fail_user("zr::load_weights(module, from): the file name is empty; name a checkpoint or a file of weights");
    if (host::checkpoint::is_state_dict_file(path)) {
      converted = std::make_unique<StateDictConversion>(path);
      converted->write_all();
      checkpoint.emplace(converted->path());
      converted->remove_name();
    } else {
      checkpoint.emplace(host::engine::checkpoints_to_try(path, false, host::checkpoint::single_rank_comm()).front());
    }
  }
  std::unique_ptr<StateDictConversion> converted;
  std::optional<Checkpoint> checkpoint;
};

class WeightLoader {
 public:
  WeightLoader(const ProgramModule& module, const std::string& from)
      : source_(from), name_(source_.converted ? from : source_.checkpoint->folder()) {
    add_targets("weight", module.parameters(), targets_);
    add_targets("buffer", module.buffers(), targets_);
    for (const Target& target : targets_) check_target(target);
    check_overlaps(targets_);
  }

  LoadReport load(bool strict) {
    LoadReport report;
    report.folder = name_;
    for (const Target& target : targets_) match(target, report);
    for (const SavedTensor& saved : file().manifest().tensors)
      if ((saved.kind == "weight" || saved.kind == "buffer") && !matched_.contains(&saved))
        report.unexpected.push_back(saved.kind + " '" + host::printable(saved.name) + "'");
    using host::engine::list_of;
    if (strict && !(report.missing.empty() && report.unexpected.empty() && report.other_shape.empty()))
      host::fail_user(name_ + ": does not fit the module" + list_of("missing", report.missing) +
                      list_of("different shape", report.other_shape) + list_of("unexpected", report.unexpected) +
                      "; pass strict = false to zr::load_weights() to load only the tensors that fit");
    host::engine::warn_of_rounded_buffers(name_, rounded_);
    const torch::NoGradGuard no_grad;
    for (const auto& [target, saved] : loads_) try {
        torch::Tensor(target->tensor).copy_(values_of(*saved));
      } catch (const c10::Error& error) {
        host::fail_user(name_ + ": " + target->text() +
                        " cannot be loaded: " + host::first_line(error.what_without_backtrace()));
      }
    return report;
  }

 private:
  const Checkpoint& file() const { return *source_.checkpoint; }

  // Finds the saved tensor for one of the module's, under any of its names.
  void match(const Target& target, LoadReport& report) {
    const SavedTensor* found = nullptr;
    for (const std::string& name : target.names) {
      const SavedTensor* saved = saved_as(file().from_other_program() ? "weight" : target.kind, name);
      if (!saved || saved == found) continue;
      matched_.insert(saved);
      if (!found)
        found = saved;
      else if (!equal(*found, *saved))
        report.unexpected.push_back(target.kind + " '" + host::printable(name) + "', which differs from '" +
                                    host::printable(found->name) + "'");
    }
    const bool empty_buffer = target.kind == "buffer" && target.tensor.numel() == 0;  // checkpoints do not list these
    if (!found && empty_buffer) return;
    if (!found) return report.missing.push_back(target.text());
    if (target.tensor.sizes() != torch::IntArrayRef(found->shape)) return report.other_shape.push_back(target.text());
    const std::string type = host::model::safetensors_name(target.tensor.scalar_type());
    const SavedTensor* const master = found->dtype == type ? nullptr : file().find("master", found->name);
    const SavedTensor* const saved = master ? master : found;
    check_type(target, type, *saved);
    const bool is_half = saved->dtype == "BF16" || saved->dtype == "F16";
    if (target.kind == "buffer" && is_half && target.tensor.is_floating_point() && target.tensor.element_size() > 2)
      rounded_.push_back("'" + target.names[0] + "' (" + saved->dtype + ")");
    loads_.emplace_back(&target, saved);
  }

  // The saved tensor of a name; that of tied weights also by the names that the model of the job had for them.
  const SavedTensor* saved_as(const std::string& kind, const std::string& name) const {
    if (const SavedTensor* saved = file().find(kind, name)) return saved;
    for (const SavedTensor& saved : file().manifest().tensors)
      if (saved.kind == kind && std::ranges::find(saved.aliases, name) != saved.aliases.end()) return &saved;
    return nullptr;
  }

  // Floating-point types that Zeroth computes with, and integers, become any floating-point type, as Module::to() makes
  // them.
  void check_type(const Target& target, const std::string& type, const SavedTensor& saved) const {
    const bool is_plain = host::checkpoint::safetensors_float(saved.dtype) != ZR_NONE ||
                          torch::isIntegralType(host::model::torch_type_named(saved.dtype), /*includeBool=*/true);
    if (saved.dtype == type || (is_plain && target.tensor.is_floating_point())) return;
    host::fail_user(name_ + ": " + target.text() + " is " + saved.dtype + ", but the module has it as " + type +
                    "; values of fp32, bf16, fp16 and integers are converted to floating-point types only");
  }

  bool equal(const SavedTensor& a, const SavedTensor& b) const {
    if (a.dtype != b.dtype || a.shape != b.shape) return false;
    const torch::Tensor left = values_of(a), right = values_of(b);
    return std::memcmp(left.data_ptr(), right.data_ptr(), left.nbytes()) == 0;
  }

  torch::Tensor values_of(const SavedTensor& saved) const {
    torch::Tensor values = torch::empty(saved.shape, host::model::torch_type_named(saved.dtype));
    if (saved.bytes() > 0) file().read(saved, 0, saved.bytes(), values.data_ptr());
    return values;
  }

  const Source source_;
  const std::string name_;
  std::vector<Target> targets_;
  std::set<const SavedTensor*> matched_;
  std::vector<std::string> rounded_;  // buffers
  std::vector<std::pair<const Target*, const SavedTensor*>> loads_;
};

// A job that saves to the folder may remove a checkpoint while it is read: then there is a newer one.
LoadReport load_newest(const ProgramModule& module, const std::string& from, bool strict) {
  for (;;) {
    const std::string newest = newest_in(from);
    try {
      return WeightLoader(module, newest).load(strict);
    } catch (const Error&) {
      if (newest == from || newest_in(from) == newest) throw;
    }
  }
}
}  // namespace

LoadReport load_weights(torch::nn::Module& module, const std::string& from, bool strict) {
  return load_newest(*program_module(module), from, strict);
}

LoadReport load_weights(torch::jit::Module& module, const std::string& from, bool strict) {
  return load_newest(*program_module(module), from, strict);
}

}  // namespace zr
