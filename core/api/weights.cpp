#include "zr/weights.hpp"

#include <torch/types.h>

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
#include "checkpoint/state_dict_pickle.hpp"
#include "engine/checkpoint_loader.hpp"
#include "model/parameter_registry.hpp"
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

void check_target(const Target& target) {
  const std::string call = "zr::load_weights(): " + target.kind + " '" + target.names[0] + "'";
  if (host::model::ParameterRegistry::find(target.tensor.unsafeGetTensorImpl()))
    host::fail_user(call + " belongs to an engine; load it with engine.load(), or call engine.release() before");
  if (target.tensor.numel() > 0 && !target.tensor.storage().data())
    host::fail_user(call +
                    " has no memory; construct the module without zr::deferred, or create an engine and call "
                    "engine.load()");
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
    } else {
      checkpoint.emplace(host::checkpoint::is_from_other_program(path) ? path
                                                                       : host::checkpoint::find_checkpoint(path));
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
  }

  LoadReport load(bool strict) {
    LoadReport report;
    report.folder = name_;
    for (const Target& target : targets_) match(target, report);
    for (const SavedTensor& saved : file().manifest().tensors)
      if ((saved.kind == "weight" || saved.kind == "buffer") && !matched_.contains(&saved))
        report.unexpected.push_back(saved.kind + " '" + saved.name + "'");
    using host::engine::list_of;
    if (strict && !(report.missing.empty() && report.unexpected.empty() && report.other_shape.empty()))
      host::fail_user(name_ + ": does not fit the module" + list_of("missing", report.missing) +
                      list_of("different shape", report.other_shape) + list_of("unexpected", report.unexpected) +
                      "; pass strict = false to zr::load_weights() to load only the tensors that fit");
    const torch::NoGradGuard no_grad;
    for (const auto& [target, saved] : loads_) torch::Tensor(target->tensor).copy_(values_of(*saved));
    return report;
  }

 private:
  const Checkpoint& file() const { return *source_.checkpoint; }

  // Finds the saved tensor for one of the module's, under any of its names.
  void match(const Target& target, LoadReport& report) {
    const std::string text = target.kind + " '" + target.names[0] + "'";
    const SavedTensor* found = nullptr;
    for (const std::string& name : target.names) {
      const SavedTensor* saved = file().find(file().from_other_program() ? "weight" : target.kind, name);
      if (!saved || !matched_.insert(saved).second) continue;
      if (!found)
        found = saved;
      else if (found->shape == saved->shape && !torch::equal(values_of(*found), values_of(*saved)))
        report.unexpected.push_back("weight '" + name + "', which differs from '" + found->name + "'");
    }
    const bool empty_buffer = target.kind == "buffer" && target.tensor.numel() == 0;  // checkpoints do not list these
    if (!found && empty_buffer) return;
    if (!found) return report.missing.push_back(text);
    if (target.tensor.sizes() != torch::IntArrayRef(found->shape)) return report.other_shape.push_back(text);
    const SavedTensor* master =
        target.tensor.scalar_type() == torch::kFloat ? file().find("master", found->name) : nullptr;
    const SavedTensor* const saved = master ? master : found;
    const bool converts =
        torch::isFloatingType(host::model::torch_type_named(saved->dtype)) && target.tensor.is_floating_point();
    if (!converts && host::model::safetensors_name(target.tensor.scalar_type()) != saved->dtype)
      host::fail_user(name_ + ": " + text + " is " + saved->dtype + ", but the module has it as " +
                      host::model::safetensors_name(target.tensor.scalar_type()) +
                      "; only floating-point types are converted");
    loads_.emplace_back(&target, saved);
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
  std::vector<std::pair<const Target*, const SavedTensor*>> loads_;
};
}  // namespace

LoadReport load_weights(torch::nn::Module& module, const std::string& from, bool strict) {
  return WeightLoader(*program_module(module), from).load(strict);
}

LoadReport load_weights(torch::jit::Module& module, const std::string& from, bool strict) {
  return WeightLoader(*program_module(module), from).load(strict);
}

}  // namespace zr
