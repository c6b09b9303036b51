#include "engine/checkpoint_loader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "checkpoint/safetensors.hpp"
#include "engine/checkpoint_contents.hpp"
#include "update/cast.hpp"

namespace zr::host::engine {

namespace {
std::string name_of(const checkpoint::TensorInfo& tensor) { return fmt::format("{} '{}'", tensor.kind, tensor.name); }

bool is_state(const checkpoint::TensorInfo& tensor) { return tensor.kind.starts_with("state."); }

// Zeroth converts between floating-point numbers.
bool is_convertible(const checkpoint::TensorInfo& from, const checkpoint::TensorInfo& to) {
  return from.dtype == to.dtype ||
         (checkpoint::safetensors_float(from.dtype) != ZR_NONE && checkpoint::safetensors_float(to.dtype) != ZR_NONE);
}

bool is_weight(const checkpoint::TensorInfo& tensor) { return tensor.kind == "weight" || tensor.kind == "master"; }

// The name in the file for a weight of this model.
std::string renamed(const std::string& name, const std::vector<config::Rename>& renames) {
  for (const config::Rename& rename : renames)
    if (const auto theirs = rewrite_glob(name, rename.ours, rename.theirs)) return *theirs;
  return name;
}
}  // namespace

std::string list_of(const std::string& what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = fmt::format("; {}: ", what);
  for (std::size_t i = 0; i < names.size() && i < 5; ++i) text += (i ? ", " : "") + printable(names[i]);
  return names.size() > 5 ? fmt::format("{} and {} more", text, names.size() - 5) : text;
}

void warn_of_rounded_buffers(const std::string& folder, const std::vector<std::string>& names) {
  if (names.empty()) return;
  log(ZR_LOG_WARN,
      fmt::format("{}: these buffers are saved in a narrower type than the model has them in, and keep the rounded "
                  "values{}; if the model computes them (a table of positions), compute them again after the load",
                  folder, list_of("rounded", names)));
}

void check_renames(const std::vector<config::Rename>& renames, const std::vector<plan::Parameter>& parameters,
                   const std::vector<model::ModelBuffer>& buffers) {
  std::vector<std::string> names;
  for (const plan::Parameter& parameter : parameters) {
    names.push_back(parameter.name);
    names.insert(names.end(), parameter.aliases.begin(), parameter.aliases.end());
  }
  for (const model::ModelBuffer& buffer : buffers) names.push_back(buffer.name);
  for (const config::Rename& rename : renames) {
    if (std::any_of(names.begin(), names.end(),
                    [&](const std::string& name) { return matches_glob(name, rename.ours); }))
      continue;
    const std::string near = nearest(rename.ours, names);
    fail_user(fmt::format(
        "{}: checkpoint.rename: '{}' matches no weight of the model{}; `*` matches any sequence of characters",
        rename.origin.text(), rename.ours, near.empty() ? "" : fmt::format("; the nearest is '{}'", near)));
  }
}

CheckpointLoader::CheckpointLoader(const job::StepContext& context, const Parts& parts,
                                   const checkpoint::Checkpoint& from, const CheckpointLoadOptions& options,
                                   const ParameterChange* change)
    : context_(context),
      parts_of_(parts),
      from_(from),
      options_(options),
      change_(change),
      same_optimizers_(!options.weights_only && from.manifest().metadata.optimizer == context.optimizers.ids()) {
  report_.folder = options.name.empty() ? from.folder() : options.name;
  find_weights();
  match();
}

bool CheckpointLoader::has_same_optimizer(uint32_t param) const {
  const auto weight = weights_.find(param);
  if (weight == weights_.end() || !weight->second->optimizer) return same_optimizers_;
  return !options_.weights_only &&
         weight->second->optimizer == context_.optimizers.id(context_.plan.input.parameters[param].optimizer);
}

void CheckpointLoader::find_weights() {
  for_each_tensor(context_.plan, [&](const ParameterTensor& tensor) {
    if (tensor.info.kind != "weight") return;
    const checkpoint::SavedTensor* saved = saved_for(tensor.param, tensor.info);
    if (!saved) return;
    weights_.emplace(tensor.param, saved);
    params_.emplace(saved->name, tensor.param);
  });
}

// The checkpoint's tensor for one of the model's tensors, by any of its names; null if the checkpoint has no such
// tensor.
const checkpoint::SavedTensor* CheckpointLoader::saved_for(uint32_t param, const checkpoint::TensorInfo& tensor) const {
  std::vector<std::string> names{tensor.name};
  if (param != kNoParam) {
    const auto& aliases = context_.plan.input.parameters[param].aliases;
    names.insert(names.end(), aliases.begin(), aliases.end());
  }
  std::vector<std::string> kinds{tensor.kind};
  if (tensor.kind == "master" || (tensor.kind == "buffer" && from_.from_other_program())) kinds.emplace_back("weight");
  for (const std::string& kind : kinds)  // fp32 is its own master
    for (const std::string& name : names)
      if (const checkpoint::SavedTensor* saved = from_.find(kind, renamed(name, options_.renames))) return saved;
  return nullptr;
}

// The checkpoint's tensor for an optimizer state; null if it has none, or its values are not to be loaded.
const checkpoint::SavedTensor* CheckpointLoader::saved_state(uint32_t param,
                                                             const checkpoint::TensorInfo& tensor) const {
  const auto weight = weights_.find(param);
  if (weight != weights_.end() && weight->second->shape != context_.plan.input.parameters[param].shape) return nullptr;
  if (!has_same_optimizer(param)) return nullptr;
  const checkpoint::SavedTensor* saved = saved_for(param, tensor);
  return saved && !options_.strict && !is_convertible(*saved, tensor) ? nullptr : saved;
}

void CheckpointLoader::report_other_shape(uint32_t param, const checkpoint::TensorInfo& tensor) {
  report_.other_shape.push_back(name_of(tensor));
  if (is_state(tensor)) fresh_params_.insert(param);
}

// Finds the checkpoint's tensor for one of the model's tensors, and adds it to parts_, or to the report if it cannot be
// loaded. Null if the checkpoint has no such tensor, or its values are not to be loaded.
const checkpoint::SavedTensor* CheckpointLoader::match_tensor(uint32_t param, const checkpoint::TensorInfo& tensor,
                                                              const plan::StateShape& shape) {
  const bool state = is_state(tensor);
  const bool fresh = change_ && param != kNoParam && change_->fresh.count(tensor.name);
  const checkpoint::SavedTensor* saved = fresh   ? nullptr
                                         : state ? saved_state(param, tensor)
                                                 : saved_for(param, tensor);
  if (!saved && state) {
    fresh_params_.insert(param);
    if (!fresh && has_same_optimizer(param)) missing_states_.push_back(name_of(tensor));
  }
  if (!saved)
    (state ? report_.fresh : report_.missing).push_back(name_of(tensor));
  else if (saved->shape != tensor.shape)
    report_other_shape(param, tensor);
  else
    parts_.push_back({param, tensor, saved, shape});
  return saved;
}

void CheckpointLoader::report_unmatched_state(const checkpoint::SavedTensor& saved) {
  report_.dropped.push_back(name_of(saved));
  const auto param = params_.find(saved.name);
  if (param == params_.end() ? same_optimizers_ : has_same_optimizer(param->second))
    unexpected_states_.push_back(name_of(saved));
}

// Reports the checkpoint's tensors that match no tensor of the model.
void CheckpointLoader::report_unmatched(const std::set<const checkpoint::SavedTensor*>& matched) {
  for (const checkpoint::SavedTensor& saved : from_.manifest().tensors) {
    if (matched.count(&saved) || saved.kind == "master" || saved.kind == checkpoint::kRankBuffer ||
        saved.kind.starts_with(checkpoint::kLocalState))
      continue;
    if (is_state(saved))
      report_unmatched_state(saved);
    else
      report_.unexpected.push_back(name_of(saved));
  }
}

void CheckpointLoader::match() {
  std::set<const checkpoint::SavedTensor*> matched;
  for_each_tensor(context_.plan, [&](const ParameterTensor& tensor) {
    if (options_.weights_only && !is_weight(tensor.info)) return;
    matched.insert(match_tensor(tensor.param, tensor.info, tensor.shape));
  });
  if (!change_)  // a refresh keeps the buffers in memory
    for (const model::ModelBuffer& buffer : context_.model.buffers())
      matched.insert(match_tensor(kNoParam, {"buffer", buffer.name, buffer.dtype, buffer.shape, {}}, {}));
  if (from_.from_other_program()) {
    match_empty_buffers(matched);
    match_repeated(matched);
  }
  if (!options_.strict) restart_fresh_params();  // otherwise they are an error
  report_unmatched(matched);
}

// A parameter with one state that is not loaded starts with all its states at zero.
void CheckpointLoader::restart_fresh_params() {
  std::erase_if(parts_, [&](const MatchedTensor& part) {
    if (!is_state(part.tensor) || fresh_params_.count(part.param) == 0) return false;
    report_.fresh.push_back(name_of(part.tensor));
    report_.dropped.push_back(name_of(*part.saved));
    return true;
  });
}

// Other programs list buffers without elements; there is nothing to load.
void CheckpointLoader::match_empty_buffers(std::set<const checkpoint::SavedTensor*>& matched) {
  for (const model::ModelBuffer& buffer : context_.model.empty_buffers()) {
    const checkpoint::SavedTensor* saved = from_.find("weight", renamed(buffer.name, options_.renames));
    if (saved && saved->shape != buffer.shape) report_.other_shape.push_back("buffer '" + buffer.name + "'");
    if (saved) matched.insert(saved);
  }
}

// Other programs list a tied parameter under each of its names.
void CheckpointLoader::match_repeated(std::set<const checkpoint::SavedTensor*>& matched) {
  for (const auto& [param, saved] : weights_) {
    const plan::Parameter& parameter = context_.plan.input.parameters[param];
    std::vector<std::string> names{parameter.name};
    names.insert(names.end(), parameter.aliases.begin(), parameter.aliases.end());
    for (const std::string& name : names) {
      const checkpoint::SavedTensor* other = from_.find("weight", renamed(name, options_.renames));
      const bool loads = saved->shape == parameter.shape;  // otherwise the shape is reported
      if (other && matched.insert(other).second && loads) repeated_.push_back({saved, other});
    }
  }
}

std::vector<std::string> CheckpointLoader::names_to_read() const {
  std::set<std::string> names;
  for (const MatchedTensor& part : parts_) names.insert(part.saved->name);
  for (const Repeated& repeated : repeated_) names.insert(repeated.other->name);
  return {names.begin(), names.end()};
}

bool CheckpointLoader::equal(const checkpoint::SavedTensor& a, const checkpoint::SavedTensor& b) const {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  constexpr int64_t kRun = int64_t{1} << 20;
  std::vector<char> left(static_cast<std::size_t>(std::min(a.bytes(), kRun))), right(left.size());
  for (int64_t at = 0; at < a.bytes(); at += kRun) {
    const int64_t bytes = std::min(kRun, a.bytes() - at);
    from_.read(a, at, bytes, left.data());
    from_.read(b, at, bytes, right.data());
    if (std::memcmp(left.data(), right.data(), static_cast<std::size_t>(bytes)) != 0) return false;
  }
  return true;
}

void CheckpointLoader::compare_repeated() {
  for (const Repeated& repeated : repeated_) {
    if (equal(*repeated.loaded, *repeated.other)) continue;
    if (options_.strict)
      fail_user(fmt::format(
          "{}: '{}' and '{}' are one tied parameter of the model, but differ in the file; save the file from a model "
          "in which they are tied, or set checkpoint.strict = false (in engine.load(), LoadOptions::strict), which "
          "loads '{}'",
          report_.folder, printable(repeated.loaded->name), printable(repeated.other->name),
          printable(repeated.loaded->name)));
    report_.unexpected.push_back(name_of(*repeated.other));
  }
}

void CheckpointLoader::check() const {
  const std::string& folder = report_.folder;
  if (options_.strict && !(report_.missing.empty() && report_.unexpected.empty() && report_.other_shape.empty()))
    fail_user(
        fmt::format("{}: does not fit the model{}{}{}; set checkpoint.strict = false (in engine.load(), "
                    "LoadOptions::strict) to load only the tensors that fit",
                    folder, list_of("missing", report_.missing), list_of("different shape", report_.other_shape),
                    list_of("unexpected", report_.unexpected)));
  check_dtypes();
  if (options_.strict && !(missing_states_.empty() && unexpected_states_.empty()))
    fail_user(
        fmt::format("{}: does not fit the optimizer{}{}; set checkpoint.strict = false (in engine.load(), "
                    "LoadOptions::strict), or load the weights only (checkpoint.init, LoadOptions::weights_only)",
                    folder, list_of("missing", missing_states_), list_of("unexpected", unexpected_states_)));
}

// Why the model's tensor has another dtype than the saved one, and the key to change.
std::string CheckpointLoader::dtype_remedy(const MatchedTensor& part) const {
  const auto needs = [&](std::string_view why, std::string_view remedy) {
    return fmt::format("{} {}; {}", why, part.tensor.dtype, remedy);
  };
  const config::TrainConfig& train = context_.config().train();
  const auto is_cast = [&](const std::string& pattern) { return matches_glob(part.tensor.name, pattern); };
  if (part.tensor.kind == "buffer")
    return std::ranges::none_of(train.cast_buffers.value, is_cast)
               ? needs("the model's buffer is", "give the buffer the checkpoint's dtype before the engine is created")
               : needs("with train.cast_buffers this job has the buffer as",
                       "set train.cast_buffers and train.dtype as in the job that saved the checkpoint");
  if (part.param != kNoParam && context_.plan.input.parameters[part.param].keeps_fp32)
    return needs("train.keep_fp32 keeps this parameter in",
                 "set train.keep_fp32 as in the job that saved the checkpoint");
  const bool saved_in_16_bits = !from_.from_other_program() && part.saved->dtype == "F32" &&
                                std::ranges::any_of(from_.manifest().tensors, [](const checkpoint::SavedTensor& saved) {
                                  return saved.kind == "weight" && (saved.dtype == "BF16" || saved.dtype == "F16");
                                });
  if (part.tensor.kind == "weight" && saved_in_16_bits)
    return needs("this job has it in", "set train.keep_fp32 as in the job that saved the checkpoint");
  return needs(part.tensor.kind == "weight" ? "train.dtype requires" : "this job requires",
               "set train.dtype to the checkpoint's dtype");
}

// Buffers that were saved in a narrower type than the model has them in.
std::vector<std::string> CheckpointLoader::rounded_buffers() const {
  std::vector<std::string> names;
  for (const MatchedTensor& part : parts_)
    if (part.tensor.kind == "buffer" &&
        checkpoint::stored_size(part.saved->dtype) < checkpoint::stored_size(part.tensor.dtype))
      names.push_back(fmt::format("'{}' ({})", part.tensor.name, part.saved->dtype));
  return names;
}

void CheckpointLoader::check_dtypes() const {
  const std::string& folder = report_.folder;
  for (const MatchedTensor& part : parts_) {
    if (part.saved->dtype == part.tensor.dtype) continue;
    const bool convertible = is_convertible(*part.saved, part.tensor);
    if (!convertible && is_state(part.tensor))
      fail_user(fmt::format(
          "{}: {} is {}, but optimizer '{}' declares it as {} with the keys of this job; set its keys as in the "
          "checkpoint's configuration (facts.config of manifest.json), or set checkpoint.strict = false to start such "
          "states at zero",
          folder, printable(name_of(part.tensor)), part.saved->dtype,
          context_.optimizers.id(context_.plan.input.parameters[part.param].optimizer), part.tensor.dtype));
    if (!convertible)
      fail_user(fmt::format(
          "{}: {} is {}, but the model has it as {}, and Zeroth converts only between F32, BF16 and F16; convert the "
          "tensor before it is saved, or load another checkpoint",
          folder, printable(name_of(part.tensor)), part.saved->dtype, part.tensor.dtype));
    const bool is_widened_buffer = part.tensor.kind == "buffer" && checkpoint::stored_size(part.saved->dtype) <
                                                                       checkpoint::stored_size(part.tensor.dtype);
    if (!options_.convert && part.tensor.kind != "master" && !is_widened_buffer)
      fail_user(
          fmt::format("{}: {} is {}, but {}, or checkpoint.convert = true (in engine.load(), LoadOptions::convert){}",
                      folder, printable(name_of(part.tensor)), part.saved->dtype, dtype_remedy(part),
                      from_.find("master", part.saved->name) ? ", which converts from the fp32 master" : ""));
  }
}

// Reads elements [first, first + count) of the tensor, converted to the model's dtype.
void CheckpointLoader::read_part(const MatchedTensor& part, int64_t first, int64_t count, void* to) const {
  const checkpoint::SavedTensor* saved = part.saved;
  const int64_t size = checkpoint::stored_size(part.tensor.dtype);
  if (saved->dtype == part.tensor.dtype) return from_.read(*saved, first * size, count * size, to);
  const checkpoint::SavedTensor* master = from_.find("master", saved->name);
  const checkpoint::SavedTensor& source = master ? *master : *saved;
  constexpr int64_t kRun = 256 * plan::kNormBlock;
  std::vector<char> staging(static_cast<std::size_t>(std::min(count, kRun)) * 4);
  std::vector<float> wide(static_cast<std::size_t>(std::min(count, kRun)));
  const zr_dtype has = checkpoint::safetensors_float(source.dtype),
                 wants = checkpoint::safetensors_float(part.tensor.dtype);
  for (int64_t at = 0; at < count; at += kRun) {
    const int64_t n = std::min(kRun, count - at);
    from_.read(source, (first + at) * size_of(has), n * size_of(has), staging.data());
    update::upcast(staging.data(), has, n, wide.data());
    update::downcast(wide.data(), n, wants, static_cast<char*>(to) + at * size);
  }
}

// Reads this rank's own values if training resumes on the same number of ranks; otherwise the values that train.buffers
// selects among those of the ranks that saved the checkpoint.
void CheckpointLoader::read_buffer(const MatchedTensor& part, const model::ModelBuffer& buffer) {
  const int64_t count = buffer.bytes / checkpoint::stored_size(buffer.dtype);
  const checkpoint::SavedTensor* ranks = from_.find(checkpoint::kRankBuffer, part.saved->name);
  read_part(part, 0, count, buffer.data);
  if (!ranks) return;  // otherwise the first read only verified the tensor
  MatchedTensor of_rank = part;
  of_rank.saved = ranks;
  const auto read = [&](int r, void* to) { read_part(of_rank, r * count, count, to); };
  const int saved = static_cast<int>(ranks->shape[0]);
  const config::BufferRule rule = parts_of_.buffers.rule();
  if ((saved == context_.world() && !options_.weights_only) || rule == config::BufferRule::per_rank)
    read(context_.rank() % saved, buffer.data);
  else if (rule == config::BufferRule::rank0)
    read(0, buffer.data);
  else
    std::memcpy(buffer.data, mean_of_ranks(buffer.dtype, buffer.bytes, saved, read).data(),
                static_cast<std::size_t>(buffer.bytes));
}

void CheckpointLoader::read() {
  state::ShardedState& state = parts_of_.state;
  const std::vector<model::ModelBuffer> own_buffers = parts_of_.buffers.own_buffers();
  std::unordered_map<std::string, const model::ModelBuffer*> buffers;
  for (const model::ModelBuffer& buffer : own_buffers) buffers.emplace(buffer.name, &buffer);
  const auto silent_until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  bool is_silent = context_.rank() == 0;
  for (const MatchedTensor& part : parts_) {
    if (is_silent && std::chrono::steady_clock::now() > silent_until) {
      is_silent = false;
      log(ZR_LOG_INFO, fmt::format("reading the checkpoint {}: {} of {} tensors so far", from_.folder(),
                                   &part - parts_.data(), parts_.size()));
    }
    if (part.param == kNoParam) {
      read_buffer(part, *buffers.at(part.tensor.name));
    } else if (context_.plan.input.parameters[part.param].frozen) {
      state.own_weights(part.param, offload::OptimizerStates::Access::write,
                        [&](int64_t first, int64_t count, void* memory) { read_part(part, first, count, memory); });
    } else {
      for (const uint32_t u : state.slices_of(part.param))
        state.visit_tensor(part.param, part.tensor.kind, state.slices()[u].first, state.slices()[u].count,
                           offload::OptimizerStates::Access::write, [&](void* memory, int64_t first, int64_t n) {
                             const int64_t begin = part.shape.of(first);
                             read_part(part, begin, part.shape.of(first + n) - begin, memory);
                           });
    }
  }
  context_.model.write_buffers();
}

void CheckpointLoader::for_each_weight(const std::function<void(uint32_t param, const std::string& saved)>& fn) const {
  for (const MatchedTensor& part : parts_)
    if (part.tensor.kind == "weight") fn(part.param, part.saved->name);
}

CheckpointLoadReport CheckpointLoader::report() const {
  CheckpointLoadReport report = report_;
  report.rounded_buffers = rounded_buffers();
  if (options_.weights_only) {
    report.fresh.clear();
    report.dropped.clear();
  }
  return report;
}

}  // namespace zr::host::engine
