// Session's checkpoints, the other way: what a checkpoint has for this model, and every rank's parts of it.
#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_map>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "checkpoint/load.hpp"
#include "engine/safetensors_dtype.hpp"
#include "engine/session.hpp"
#include "update/cast.hpp"

namespace zr::host {

namespace {
std::string who(const TensorInfo& tensor) { return tensor.role + " '" + tensor.name + "'"; }

// "; missing: weight 'a', state.exp_avg 'b' and 3 more"
std::string list_of(const std::string& what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = "; " + what + ": ";
  for (std::size_t i = 0; i < names.size() && i < 5; ++i) text += (i ? ", " : "") + printable(names[i]);
  return text + (names.size() > 5 ? " and " + std::to_string(names.size() - 5) + " more" : "");
}

bool is_weight(const TensorInfo& tensor) { return tensor.role == "weight" || tensor.role == "master"; }

// What the file calls a weight of this model.
std::string renamed(const std::string& name, const std::vector<Rename>& renames) {
  for (const Rename& rename : renames)
    if (const auto theirs = rewrite_glob(name, rename.ours, rename.theirs)) return *theirs;
  return name;
}

// A rule for nothing is a mistake in its name.
void check_renames(const std::vector<Rename>& renames, const std::vector<Parameter>& parameters,
                   const std::vector<ModelBuffer>& buffers) {
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters) {
    names.push_back(parameter.name);
    names.insert(names.end(), parameter.aliases.begin(), parameter.aliases.end());
  }
  for (const ModelBuffer& buffer : buffers) names.push_back(buffer.name);
  for (const Rename& rename : renames) {
    if (std::any_of(names.begin(), names.end(),
                    [&](const std::string& name) { return matches_glob(name, rename.ours); }))
      continue;
    const std::string near = nearest(rename.ours, names);
    fail_user(rename.origin.text() + ": checkpoint.rename: '" + rename.ours + "' matches no weight of the model" +
              (near.empty() ? "" : "; the nearest is '" + near + "'") + "; `*` stands for any run of characters");
  }
}
}  // namespace

// The tensor of `from` for one of this model's, by any of its names; null: it has none.
const SavedTensor* Session::saved_for(const Checkpoint& from, uint32_t param, const TensorInfo& tensor,
                                      const std::vector<Rename>& renames) const {
  std::vector<std::string> names{tensor.name};
  if (param != kNoParam) {
    const auto& aliases = plan_.input.parameters[param].aliases;
    names.insert(names.end(), aliases.begin(), aliases.end());
  }
  std::vector<std::string> roles{tensor.role};
  if (tensor.role == "master" || (tensor.role == "buffer" && from.foreign())) roles.emplace_back("weight");
  for (const std::string& role : roles)  // fp32 is its own master
    for (const std::string& name : names)
      if (const SavedTensor* saved = from.find(role, renamed(name, renames))) return saved;
  return nullptr;
}

Session::Match Session::match(const Checkpoint& from, const LoadOptions& how, bool same_optimizer) const {
  Match match;
  std::set<const SavedTensor*> known;
  const auto take = [&](uint32_t param, const TensorInfo& tensor) {
    const bool state = tensor.role.starts_with("state.");
    const bool fresh = refreshed_ && param != kNoParam && refreshed_->fresh.count(tensor.name);
    const SavedTensor* saved =
        fresh || (state && !same_optimizer) ? nullptr : saved_for(from, param, tensor, how.renames);
    known.insert(saved);
    if (!saved && state) match.fresh_params.insert(param);
    if (!saved)
      (state ? match.fresh : match.missing).push_back(who(tensor));
    else if (saved->shape != tensor.shape)
      match.other_shape.push_back(who(tensor));
    else
      match.parts.push_back({param, tensor, saved});
  };
  each_tensor([&](uint32_t param, const TensorInfo& tensor) {
    if (!how.weights_only || is_weight(tensor)) take(param, tensor);
  });
  if (!refreshed_)  // buffers stay in memory
    for (const ModelBuffer& buffer : model_.buffers())
      take(kNoParam, {"buffer", buffer.name, buffer.dtype, buffer.shape, {}});
  for (const SavedTensor& saved : from.manifest().tensors) {
    if (known.count(&saved) || saved.role == "master" || saved.role == kRankBuffer) continue;
    if (saved.role.starts_with("state."))
      match.dropped.push_back(who(saved));
    else
      match.unexpected.push_back(who(saved));
  }
  return match;
}

void Session::check_match(const Checkpoint& from, const Match& found, const LoadOptions& how,
                          bool same_optimizer) const {
  const std::string& folder = from.folder();
  const bool states = !how.weights_only && same_optimizer;
  if (how.strict && !(found.missing.empty() && found.unexpected.empty() && found.other_shape.empty()))
    fail_user(folder + ": does not fit the model" + list_of("missing", found.missing) +
              list_of("of another shape", found.other_shape) + list_of("unexpected", found.unexpected) +
              "; load with strict = false to take what fits");
  if (how.strict && states && !(found.fresh.empty() && found.dropped.empty()))
    fail_user(folder + ": does not fit the optimizer" + list_of("missing", found.fresh) +
              list_of("unexpected", found.dropped) + "; load with strict = false, or the weights only");
  for (const Match::Part& part : found.parts) {
    if (part.saved->dtype == part.tensor.dtype) continue;
    if (safetensors_float(part.saved->dtype) == ZR_NONE || safetensors_float(part.tensor.dtype) == ZR_NONE)
      fail_user(folder + ": " + printable(who(part.tensor)) + " is " + part.saved->dtype + ", the model has it in " +
                part.tensor.dtype + ", and neither becomes the other; load another checkpoint");
    if (!how.convert && part.tensor.role != "master")
      fail_user(folder + ": " + printable(who(part.tensor)) + " is " + part.saved->dtype +
                (part.tensor.role == "weight" ? ", train.dtype wants " : ", this job wants ") + part.tensor.dtype +
                "; set train.dtype to what it is, or load with convert = true, which rounds from the fp32 master");
  }
}

// Elements [first, first + count) of this rank, in the type it is to have.
void Session::read_part(const Checkpoint& from, const Match::Part& part, int64_t first, int64_t count, void* to) const {
  const SavedTensor* saved = part.saved;
  const int64_t size = stored_size(part.tensor.dtype);
  if (saved->dtype == part.tensor.dtype) return from.read(*saved, first * size, count * size, to);
  const SavedTensor* master = from.find("master", saved->name);
  const SavedTensor& source = master ? *master : *saved;
  constexpr int64_t kRun = 256 * kNormBlock;
  std::vector<char> staging(static_cast<std::size_t>(std::min(count, kRun)) * 4);
  std::vector<float> wide(static_cast<std::size_t>(std::min(count, kRun)));
  const zr_dtype has = safetensors_float(source.dtype), wants = safetensors_float(part.tensor.dtype);
  for (int64_t at = 0; at < count; at += kRun) {
    const int64_t n = std::min(kRun, count - at);
    from.read(source, (first + at) * size_of(has), n * size_of(has), staging.data());
    upcast(staging.data(), has, n, wide.data());
    downcast(wide.data(), n, wants, static_cast<char*>(to) + at * size);
  }
}

// This rank's own values where the same number of ranks goes on with training; else those that train.buffers declares
// of the ranks that saved it.
void Session::read_buffer(const Checkpoint& from, const Match::Part& part, const ModelBuffer& buffer,
                          bool weights_only) {
  const int64_t count = buffer.bytes / stored_size(buffer.dtype);
  const SavedTensor* ranks = from.find(kRankBuffer, part.saved->name);
  read_part(from, part, 0, count, buffer.data);
  if (!ranks) return;  // else it was read only to be checked
  Match::Part of_rank = part;
  of_rank.saved = ranks;
  const auto read = [&](int r, void* to) { read_part(from, of_rank, r * count, count, to); };
  const int saved = static_cast<int>(ranks->shape[0]);
  const BufferRule rule = model_buffers_.rule();
  if ((saved == world() && !weights_only) || rule == BufferRule::per_rank)
    read(rank() % saved, buffer.data);
  else if (rule == BufferRule::rank0)
    read(0, buffer.data);
  else
    std::memcpy(buffer.data, mean_of_ranks(buffer.dtype, buffer.bytes, saved, read).data(),
                static_cast<std::size_t>(buffer.bytes));
}

void Session::read_all(const Checkpoint& from, const Match& found, bool weights_only) {
  const std::vector<ModelBuffer> own = model_buffers_.own();
  std::unordered_map<std::string, const ModelBuffer*> buffers;
  for (const ModelBuffer& buffer : own) buffers.emplace(buffer.name, &buffer);
  for (const Match::Part& part : found.parts) {
    if (part.param == kNoParam) {
      read_buffer(from, part, *buffers.at(part.tensor.name), weights_only);
    } else if (plan_.input.parameters[part.param].frozen) {
      own_weights(part.param,
                  [&](int64_t first, int64_t count, void* memory) { read_part(from, part, first, count, memory); });
    } else {
      for (const uint32_t u : slices_of_[part.param])
        each_memory(part.param, part.tensor.role, slices_[u].first, slices_[u].count, OptimizerStates::Access::write,
                    [&](void* memory, int64_t first, int64_t n) { read_part(from, part, first, n, memory); });
    }
  }
}

void Session::clear_states(uint32_t param) {
  for (const uint32_t u : slices_of_[param])
    for (std::size_t i = 0; i < plan_.input.slots.size(); ++i)
      visit(slices_[u], slot_array(i), slices_[u].first, slices_[u].count, OptimizerStates::Access::write,
            [&](void* memory, int64_t, int64_t n) {
              std::memset(memory, 0, static_cast<std::size_t>(n * size_of(plan_.input.slots[i].dtype)));
            });
  param_steps_[param] = 0;
}

// Step, schedule, scale and what the optimizer keeps besides its states.
void Session::take_facts(const Checkpoint& from, const Match& found, const CheckpointMetadata& facts) {
  step_ = begun_ = from.manifest().step;
  refreshed_ ? name_.at_step(step_) : name_.loaded(step_, facts.engines);
  updates_ = updates_before_ = facts.updates;
  samples_ = facts.samples;
  const bool same_optimizer = facts.optimizer == setup_.optimizer.table->id;
  for (const Match::Part& part : found.parts) {
    if (part.tensor.role != "weight") continue;
    const auto steps = facts.parameter_steps.find(part.saved->name);
    param_steps_[part.param] = steps == facts.parameter_steps.end() || !same_optimizer ? 0 : steps->second;
  }
  // A state that begins anew begins at its parameter's first step; the others of that parameter with it.
  for (const uint32_t param : found.fresh_params) clear_states(param);
  applied_ = facts.last_step_applied;
  const auto& scale = facts.loss_scale;
  loss_scale_.restore({scale.value, scale.good, scale.hysteresis_left, scale.skips, scale.dynamic});
  gradients_->watch(loss_scale_.watches());
  const auto* optimizer = optimizer_->api<zr_optimizer_api>();
  if (same_optimizer && optimizer->load_global)
    for (const auto& [key, bytes] : facts.globals) {
      CallError error;
      call(optimizer->load_global(optimizer_->self(), key.c_str(), bytes.data(), bytes.size(), &error), error,
           optimizer_->who("load_global"));
    }
  if (refreshed_) return reseed();
  if (const int64_t own = config().integer("train.seed"); facts.seed != own && rank() == 0)
    log(ZR_LOG_WARN, from.folder() + ": was trained with train.seed = " + std::to_string(facts.seed) +
                         ", from here on it is " + std::to_string(own) + ": another run than the one that goes on");
  if (const int64_t own = step_ * config().integer("train.global_batch"); samples_ != own && rank() == 0)
    log(ZR_LOG_WARN, from.folder() + ": has read " + std::to_string(samples_) + " samples, " + std::to_string(step_) +
                         " steps of train.global_batch would be " + std::to_string(own) +
                         ": a program that reads by step goes on at another sample");
  recorder_->resume(step_);
  reseed();
}

LoadReport Session::load(const std::string& path, const LoadOptions& asked) {
  if (in_backward_ || micro_ > 0)
    fail_user("engine.load() between engine.backward() and the engine.step() that ends its step; call it after a step");
  model_.check_scopes("engine.load()");
  comm_->barrier("before a checkpoint is loaded");  // nor does a peer read still what is written here
  settle();
  by_config_ = false;
  saved_weights_.clear();
  take_written();
  check_renames(asked.renames, plan_.input.parameters, model_.buffers());
  const Checkpoint from = open(path, asked);
  LoadOptions how = asked;
  how.weights_only |= from.foreign();
  const CheckpointMetadata facts = how.weights_only ? CheckpointMetadata{} : from.manifest().metadata;
  const std::string optimizer = setup_.optimizer.table->id;
  Match found = match(from, how, facts.optimizer == optimizer);
  check_match(from, found, how, facts.optimizer == optimizer);
  incomplete_ = true;
  gradients_summed_ = false;
  recorder_->forget_hash();
  const int64_t chunk_bytes = from.largest_chunk();
  ledger_.add(Tier::host, MemoryKind::other, "checkpoint chunk", chunk_bytes);
  try {
    run_on_all_ranks(saver_->peers(), [&] { read_all(from, found, how.weights_only); });
  } catch (...) {
    ledger_.add(Tier::host, MemoryKind::other, "checkpoint chunk", -chunk_bytes);
    throw;
  }
  ledger_.add(Tier::host, MemoryKind::other, "checkpoint chunk", -chunk_bytes);
  model_buffers_.refresh(*comm_);
  const int64_t before = comm_->volume().total();
  notify_updated();
  excluded_communication_ += comm_->volume().total() - before;
  if (how.weights_only)
    for (uint32_t param = 0; param < param_steps_.size(); ++param) clear_states(param);
  else
    take_facts(from, found, facts);
  incomplete_ = false;
  LoadReport report{
      from.folder(), std::move(found.missing), std::move(found.unexpected), std::move(found.other_shape), {}, {}};
  if (!how.weights_only) {
    report.fresh = std::move(found.fresh);
    report.dropped = std::move(found.dropped);
  }
  tell(report, how.weights_only ? -1 : from.manifest().step, optimizer);
  lap(Phase::checkpoint);
  step_start_ = mark_;
  return report;
}

// What was not taken is never a secret.
void Session::tell(const LoadReport& report, int64_t step, const std::string& optimizer) const {
  if (rank() != 0 || refreshed_) return;
  std::string text = report.folder + ": " + (step < 0 ? "weights" : "step " + std::to_string(step)) + " loaded";
  text += list_of("missing", report.missing) + list_of("of another shape", report.other_shape) +
          list_of("unexpected", report.unexpected);
  log(report.missing.empty() && report.other_shape.empty() && report.unexpected.empty() ? ZR_LOG_INFO : ZR_LOG_WARN,
      text);
  if (!report.fresh.empty())
    log(ZR_LOG_WARN, report.folder + ": optimizer '" + optimizer + "' starts fresh" + list_of("with", report.fresh));
  if (!report.dropped.empty())
    log(ZR_LOG_WARN, report.folder + ": optimizer '" + optimizer + "' leaves" + list_of("unused", report.dropped));
}

}  // namespace zr::host
