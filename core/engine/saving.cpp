// Session's checkpoints: its logical tensors, by the parts that this rank holds, and what is not a tensor.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "engine/planning.hpp"
#include "engine/safetensors_dtype.hpp"
#include "engine/session.hpp"

namespace zr::host {

void Session::each_memory(uint32_t param, const std::string& role, int64_t first, int64_t count,
                          OptimizerStates::Access use, const std::function<void(void*, int64_t, int64_t)>& fn) {
  int64_t at = first;
  const int64_t end = first + count;
  for (const uint32_t u : slices_of_[param]) {
    const UpdateSlice& slice = slices_[u];
    if (at >= end || at < slice.first || at >= slice.first + slice.count) continue;
    const int64_t n = std::min(end, slice.first + slice.count) - at;
    if (role == "weight") {
      reach(part_of(slice.weight, at - slice.first, n), use, param,
            [&](void* memory, int64_t first_of, int64_t some) { fn(memory, at + first_of, some); });
    } else {
      std::size_t array = master_array();
      for (std::size_t i = 0; i < plan_.input.slots.size(); ++i)
        if (role == std::string("state.") + plan_.input.slots[i].name) array = slot_array(i);
      visit(slice, array, at, n, use, fn);
    }
    at += n;
  }
  for (const uint32_t w : weights_of_[param]) {
    const Piece& piece = plan_.mine.weights[w];
    if (at >= end || at < piece.first || at >= piece.first + piece.count) continue;
    const int64_t n = std::min(end, piece.first + piece.count) - at;
    const zr_dtype dtype = plan_.input.weight_dtype;
    char* const memory =
        static_cast<char*>(buffers_[piece.buffer]) + (piece.offset + at - piece.first) * size_of(dtype);
    reach({memory, n, dtype, 0, {1, 0}}, use, param,
          [&](void* values, int64_t first_of, int64_t some) { fn(values, at + first_of, some); });
    at += n;
  }
  if (at < end)
    fail_bug("rank " + std::to_string(rank()) + " has no memory of '" + plan_.input.parameters[param].name +
             "' where its plan says so");
}

// This rank's memory of those elements; null: they are read from a tier when they are wanted.
const char* Session::memory_of(uint32_t param, const std::string& role, int64_t first, int64_t count) {
  const char* all = nullptr;
  bool one = true;
  for (const uint32_t u : slices_of_[param]) one &= states_->in_memory(slices_[u].tier) || role == "weight";
  if (disk_buffers_ && role == "weight")
    for (const uint32_t w : weights_of_[param]) one &= !disk_buffers_->holds(buffers_[plan_.mine.weights[w].buffer]);
  if (!one) return nullptr;
  each_memory(param, role, first, count, OptimizerStates::Access::read, [&](void* memory, int64_t, int64_t n) {
    one = n == count;
    all = static_cast<const char*>(memory);
  });
  return one ? all : nullptr;
}

void Session::each_tensor(const std::function<void(uint32_t param, TensorInfo tensor)>& fn) const {
  const auto of = [&](const Parameter& p, const std::string& role, zr_dtype dtype) {
    return TensorInfo{role, p.name, safetensors_name(dtype), p.shape,
                      role == "weight" ? p.aliases : std::vector<std::string>{}};
  };
  const auto& parameters = plan_.input.parameters;
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    fn(i, of(parameters[i], "weight", plan_.input.weight_dtype));
    if (parameters[i].frozen) continue;
    if (plan_.has_master) fn(i, of(parameters[i], "master", ZR_F32));
    for (const zr_slot& slot : plan_.input.slots)
      fn(i, of(parameters[i], std::string("state.") + slot.name, slot.dtype));
  }
}

std::string Session::facts() {
  CheckpointMetadata facts;
  const auto* optimizer = optimizer_->api<zr_optimizer_api>();
  if (optimizer->save_globals) {
    CallError error;
    const auto sink = [](void* ctx, const char* key, const void* value, uint64_t bytes) {
      static_cast<CheckpointMetadata*>(ctx)->globals[key].assign(static_cast<const char*>(value), bytes);
    };
    call(optimizer->save_globals(optimizer_->self(), sink, &facts, &error), error, optimizer_->who("save_globals"));
  }
  for (const zr_slot& slot : plan_.input.slots) facts.slots.emplace_back(slot.name);
  for (std::size_t i = 0; i < param_steps_.size(); ++i)
    facts.parameter_steps[plan_.input.parameters[i].name] = param_steps_[i];
  const LossScale::State scale = loss_scale_.state();
  facts.loss_scale = {scale.value, scale.good, scale.hysteresis_left, scale.skips, scale.dynamic};
  facts.last_step_applied = applied_;
  facts.optimizer = setup_.optimizer.table->id;
  facts.updates = updates_;
  facts.samples = samples_;
  facts.engines = name_.others();
  facts.seed = config().integer("train.seed");
  facts.world = world();
  facts.strategy = setup_.strategy.table->id;
  facts.config = config().to_toml();
  return to_text(facts);
}

CheckpointContents Session::image(const std::vector<char>& differing) {
  CheckpointContents image;
  image.step = step_;
  image.run = control_->job_id();
  each_tensor([&](uint32_t param, TensorInfo tensor) {
    const auto index = static_cast<uint32_t>(image.tensors.size());
    const int64_t size = stored_size(tensor.dtype);
    for (const auto& [first, count] : plan_.saved_runs(param)) {
      Slab slab{index, first * size, count * size, memory_of(param, tensor.role, first, count), {}};
      if (!slab.data)
        slab.read = [this, param, role = tensor.role, size, start = first](int64_t from, int64_t bytes, void* to) {
          each_memory(param, role, start + from / size, bytes / size, OptimizerStates::Access::read,
                      [&](const void* memory, int64_t at, int64_t n) {
                        std::memcpy(static_cast<char*>(to) + (at - start) * size - from, memory,
                                    static_cast<std::size_t>(n * size));
                      });
        };
      image.slabs.push_back(std::move(slab));
    }
    image.tensors.push_back(std::move(tensor));
  });
  add_buffers(image, differing);
  return image;
}

// Each buffer once, with the values that train.buffers declares; where ranks differ, each rank's own too.
void Session::add_buffers(CheckpointContents& image, const std::vector<char>& differing) {
  const auto aligned = [](int64_t bytes) {
    return (bytes + CheckpointContents::kAlignment - 1) / CheckpointContents::kAlignment *
           CheckpointContents::kAlignment;
  };
  const std::vector<ModelBuffer> own = model_buffers_.own();
  for (std::size_t i = 0; i < own.size(); ++i) {
    const ModelBuffer& buffer = own[i];
    if (stored_size(buffer.dtype) == 0)
      fail_user("buffer '" + buffer.name + "' has the type " + buffer.dtype +
                ", which safetensors files do not have; convert it, or keep it out of the module's buffers");
    const bool declared = i < declared_buffers_.size() && !declared_buffers_[i].empty();
    if (rank() == 0 && buffer.bytes > 0)
      image.slabs.push_back({static_cast<uint32_t>(image.tensors.size()),
                             0,
                             buffer.bytes,
                             declared ? declared_buffers_[i].data() : buffer.data,
                             {}});
    image.tensors.push_back({"buffer", buffer.name, buffer.dtype, buffer.shape, {}});
    if (!differing[i]) {
      image.later_bytes += world() > 1 ? aligned(buffer.bytes) : 0;
      continue;
    }
    std::vector<int64_t> shape{world()};
    shape.insert(shape.end(), buffer.shape.begin(), buffer.shape.end());
    image.slabs.push_back(
        {static_cast<uint32_t>(image.tensors.size()), rank() * buffer.bytes, buffer.bytes, buffer.data, {}});
    image.tensors.push_back({kRankBuffer, buffer.name, buffer.dtype, std::move(shape), {}});
  }
}

std::string Session::checkpoint_dir() const {
  const std::string& dir = config().text("checkpoint.dir");
  return dir.empty() || setup_.engine.empty() ? dir : dir + "/" + setup_.engine;
}

void Session::prepare_saving(bool first) {
  const std::string dir = checkpoint_dir();
  if (dir.empty()) return;
  const bool periodic = config().integer("checkpoint.every") > 0;
  if (first && periodic && config().integer("checkpoint.keep") == 1 && !name_.others().empty() && rank() == 0)
    log(ZR_LOG_WARN, "checkpoint.keep = 1 (" + config().origin("checkpoint.keep").text() +
                         ") with several engines: a job that ends between their saves leaves no checkpoints of one "
                         "moment to resume from; set it to 2 or more");
  if (periodic || stop_signal_) saver_->lock_folder(dir);
  if (!snapshots(config())) return;
  int64_t bytes = plan_.snapshot_bytes();
  const std::vector<ModelBuffer> buffers = model_.buffers();
  for (const ModelBuffer& buffer : buffers) bytes += buffer.bytes * ((rank() == 0 ? 1 : 0) + (world() > 1 ? 1 : 0));
  ledger_.plan(Tier::host, MemoryKind::snapshot, bytes);
  saver_->reserve_for(image(std::vector<char>(buffers.size(), 0)));
}

// The state now, with facts; until the save ends declared_buffers_ keeps what it refers to.
CheckpointContents Session::present() {
  const int64_t before = comm_->volume().total();
  const std::vector<char> differing = model_buffers_.differing(*comm_);
  declared_buffers_ = model_buffers_.declared(*comm_, differing);
  excluded_communication_ += comm_->volume().total() - before;
  CheckpointContents now = image(differing);
  now.metadata_json = facts();
  now.last_step_applied = applied_;
  return now;
}

std::string Session::save(const std::string& root, int64_t keep, bool async) {
  if (in_backward_ || micro_ > 0)
    fail_user(
        "engine.save() between engine.backward() and the engine.step() that ends its step: gradients are not "
        "saved; call it after a step");
  check_complete();
  model_.check_scopes("engine.save()");
  comm_->barrier("before a checkpoint is saved");  // a rank that does not come is a hang like any other
  settle();
  by_config_ = false;
  saved_weights_.clear();
  compare_weights();
  CheckpointContents now = present();
  std::string folder = root + "/" + checkpoint_name(step_);
  saving_ = step_;
  if (async && !done()) {
    saver_->save_async(root, std::move(now), keep);
  } else {
    folder = saver_->save(root, now, keep);
    recorder_->saved(step_);
  }
  declared_buffers_.clear();
  lap(Phase::checkpoint);
  step_start_ = mark_;
  return folder;
}

// What the save in the background came to, which is over now.
void Session::settle() {
  try {
    if (saver_->wait()) recorder_->saved(saving_);
  } catch (const Failure& failure) {
    if (!by_config_) throw;
    not_saved(failure);
  }
}

// A checkpoint that nobody's code asked for was not written: said, counted, and training goes on. But no rank goes on
// without its peers, nor with a tier that failed, on whichever rank: what stands there is not whole.
void Session::not_saved(const Failure& failure) {
  if (failure.exit() == Exit::peer_lost) throw failure;
  char failed = 0;
  for (const auto& tier : tiers_) failed |= tier && tier->failed();
  const bool together = tiers_.size() > 1 && std::uncaught_exceptions() <= exceptions_;  // not at this rank's own end
  for (const std::string& one :
       together ? comm_->all_gather_bytes({failed}, "tiers") : std::vector{std::string{failed}})
    if (one[0]) throw failure;
  recorder_->not_saved();
  if (rank() == 0) log(ZR_LOG_ERROR, std::string(failure.what()) + "; training goes on");
}

void Session::save_if_due(const GlobalStats& global) {
  const std::string dir = checkpoint_dir();
  const int64_t every = config().integer("checkpoint.every"), keep = config().integer("checkpoint.keep");
  const bool ends = step_ == config().integer("train.steps") || global.stop;
  if (global.stop && !stopped_) {
    stopped_ = true;
    if (rank() == 0)
      log(ZR_LOG_INFO, std::string(::strsignal(global.stop)) + ": step " + std::to_string(step_) + " is saved in " +
                           dir + ", then the job ends; `zeroth train --resume` goes on");
    recorder_->stopped(global.stop);
  }
  const bool due = !dir.empty() && (stopped_ || (every > 0 && (step_ % every == 0 || ends)));
  std::exception_ptr untold;
  if (due || global.save_failed) try {
      settle();
    } catch (const Failure&) {
      untold = std::current_exception();
    }
  if (due) try {
      save(dir, keep, config().boolean("checkpoint.async"));
      by_config_ = true;
      if (!unsaved_write_ && !disk_buffers_)
        for (const UpdateSlice& slice : slices_) saved_weights_.push_back(hash_of_weights(slice));
    } catch (const Failure& failure) {
      if (ends) {  // what the run came to is lost: its exit code says so
        recorder_->not_saved();
        throw;
      }
      not_saved(failure);
    }
  if (untold) std::rethrow_exception(untold);
}

}  // namespace zr::host
