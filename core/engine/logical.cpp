// Session's logical tensors: any parameter's value, gradient or state, whole and in fp32, however it is sharded.
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "engine/session.hpp"
#include "update/cast.hpp"

namespace zr::host {

uint32_t Session::find(const std::string& parameter) const {
  if (const auto found = index_.find(parameter); found != index_.end()) return found->second;
  std::vector<std::string> names;
  for (const Parameter& p : plan_.input.parameters) names.push_back(p.name);
  const std::string near = nearest(parameter, names);
  fail_user("the model has no parameter '" + printable(parameter) + "'" +
            (near.empty() ? "" : "; did you mean '" + near + "'?"));
}

std::size_t Session::find_buffer(const std::string& name) {
  const std::vector<ModelBuffer> buffers = model_.buffers();
  const auto found = std::find_if(buffers.begin(), buffers.end(), [&](const ModelBuffer& b) { return b.name == name; });
  if (found == buffers.end()) fail_bug("the model has no buffer '" + name + "'");
  return static_cast<std::size_t>(found - buffers.begin());
}

std::string Session::buffer(const std::string& name) {
  const std::size_t index = find_buffer(name);
  const int64_t before = comm_->volume().total();
  const std::string declared = model_buffers_.declared(*comm_, model_buffers_.differing(*comm_))[index];
  excluded_communication_ += comm_->volume().total() - before;
  restart_clock();
  if (!declared.empty()) return declared;
  const ModelBuffer own = model_buffers_.own()[index];
  return {static_cast<const char*>(own.data), static_cast<std::size_t>(own.bytes)};
}

void Session::set_buffer(const std::string& name, const std::string& bytes) {
  const std::size_t index = find_buffer(name);
  if (model_buffers_.in_evaluation())
    fail_user("engine.set_buffer('" + name +
              "') while a zr::Engine::Evaluation exists, whose end gives the buffer its earlier value back; call it "
              "before or after the evaluation");
  const uint64_t hash = hash_of(bytes.data(), static_cast<int64_t>(bytes.size()));
  const int64_t before = comm_->volume().total();
  const std::vector<std::string> hashes =
      comm_->all_gather_bytes(std::string(reinterpret_cast<const char*>(&hash), sizeof hash), "engine.set_buffer()");
  excluded_communication_ += comm_->volume().total() - before;
  for (std::size_t r = 1; r < hashes.size(); ++r)
    if (hashes[r] != hashes[0])
      fail_user("engine.set_buffer('" + name + "'): rank " + std::to_string(r) +
                " passes other values than rank 0; pass equal tensors on all ranks");
  std::memcpy(model_buffers_.own()[index].data, bytes.data(), bytes.size());
  restart_clock();
}

// What a role is of a slice: an array of its states, or memory that stands by itself.
std::optional<std::size_t> Session::array_of(LogicalRole role, const std::string& slot) const {
  if (role == LogicalRole::value && plan_.has_master) return master_array();
  if (role != LogicalRole::state) return {};
  std::vector<std::string> names;
  for (std::size_t i = 0; i < plan_.input.slots.size(); ++i) {
    if (slot == plan_.input.slots[i].name) {
      if (plan_.input.slots[i].shape != ZR_SLOT_LIKE_PARAM || plan_.input.slots[i].dtype != ZR_F32)
        fail_user("optimizer state '" + slot + "' is not an fp32 tensor like its parameter");
      return slot_array(i);
    }
    names.emplace_back(plan_.input.slots[i].name);
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  fail_user("optimizer '" + std::string(setup_.optimizer.table->id) + "' has no state '" + slot +
            "'; it has: " + (list.empty() ? "none" : list));
}

void Session::visit(const UpdateSlice& slice, std::size_t array, int64_t first, int64_t count,
                    OptimizerStates::Access use, const std::function<void(void*, int64_t, int64_t)>& fn) {
  const int64_t skip = slice.state - slice.first;
  states_->visit(array, first + skip, count, use, "states of '" + plan_.input.parameters[slice.param].name + "'",
                 [&](void* memory, int64_t at, int64_t n) { fn(memory, at - skip, n); });
}

namespace {
// Where the elements [first, first + count) and [from, from + n) are both.
std::pair<int64_t, int64_t> common(int64_t first, int64_t count, int64_t from, int64_t n) {
  const int64_t begin = std::max(first, from);
  return {begin, std::max<int64_t>(0, std::min(first + count, from + n) - begin)};
}
}  // namespace

void Session::read(uint32_t param, LogicalRole role, const std::string& slot, float* out) {
  read(param, role, slot, 0, plan_.input.parameters[param].count, out);
}

void Session::read(uint32_t param, LogicalRole role, const std::string& slot, int64_t first, int64_t count,
                   float* out) {
  const Parameter& parameter = plan_.input.parameters[param];
  if (role == LogicalRole::value) {
    // What was written inside a scope is visible here under some strategies only, until the scope ends.
    model_.check_scope(param, "engine.get('" + parameter.name + "')");
    take_written();
  }
  check_complete();
  if (role == LogicalRole::gradient) check_gradients(parameter.name);
  if (parameter.frozen && role != LogicalRole::value)
    fail_user("parameter '" + parameter.name + "' is frozen: it has no gradient and no optimizer state");
  read_settled(param, role, slot, first, count, out);
}

void Session::read_settled(uint32_t param, LogicalRole role, const std::string& slot, int64_t first, int64_t count,
                           float* out) {
  const Parameter& parameter = plan_.input.parameters[param];
  const auto array = array_of(role, slot);
  for (const uint32_t u : slices_of_[param]) {
    const UpdateSlice& slice = slices_[u];
    const auto [from, n] = common(first, count, slice.first, slice.count);
    if (n == 0) continue;
    if (array) {
      visit(slice, *array, from, n, OptimizerStates::Access::read, [&](void* memory, int64_t at, int64_t some) {
        std::memcpy(out + (at - first), memory, static_cast<std::size_t>(some) * 4);
      });
      continue;
    }
    const zr_view view = part_of(role == LogicalRole::value ? slice.weight : slice.grad, from - slice.first, n);
    reach(view, OptimizerStates::Access::read, param, [&](const void* memory, int64_t at, int64_t some) {
      upcast(memory, view.dtype, some, out + (from - first) + at);
    });
  }
  if (parameter.frozen)
    for (const uint32_t w : weights_of_[param]) {
      const Piece& piece = plan_.mine.weights[w];
      const auto [from, n] = common(first, count, piece.first, piece.count);
      const zr_dtype dtype = plan_.input.weight_dtype;
      if (n == 0) continue;
      char* const memory =
          static_cast<char*>(buffers_[piece.buffer]) + (piece.offset + from - piece.first) * size_of(dtype);
      reach({memory, n, dtype, 0, {1, 0}}, OptimizerStates::Access::read, param,
            [&](const void* values, int64_t at, int64_t some) {
              upcast(values, dtype, some, out + (from - first) + at);
            });
    }
  for (const Segment& segment : plan_.segments[param]) {
    const auto [from, n] = common(first, count, segment.first, segment.count);
    if (n == 0 || segment.owners.size() == static_cast<std::size_t>(world())) continue;
    zr_coll broadcast{};
    broadcast.op = ZR_BROADCAST;
    broadcast.root = segment.owners.front();
    broadcast.src = broadcast.dst = {out + (from - first), n, ZR_F32, 0, {1, 0}};
    broadcast.label = parameter.name.c_str();
    comm_->run_control(broadcast);
  }
  if (role == LogicalRole::gradient)
    for (int64_t i = 0; i < count; ++i) out[i] *= grad_mul_;
}

// Before the boundary the sums differ by strategy: of one rank, of a shard, or not begun.
void Session::check_gradients(const std::string& parameter) const {
  if (gradients_summed_) return;
  const std::string call = "engine.get('" + parameter + "', zr::TensorKind::gradient): ";
  if (in_backward_ || micro_ > 0)
    fail_user(call + "the gradient is not summed over ranks and micro-batches before engine.step() ends the step; " +
              "call it after engine.step(), which keeps the sum until the next engine.backward()");
  fail_user(call + "this engine has no gradient yet; call it after engine.backward() and engine.step()");
}

void Session::reach(const zr_view& view, OptimizerStates::Access use, uint32_t param,
                    const std::function<void(void*, int64_t, int64_t)>& fn) {
  if (!disk_buffers_ || !disk_buffers_->holds(view.data)) return fn(view.data, 0, view.count);
  disk_buffers_->visit(view, use, "weights or sums of '" + plan_.input.parameters[param].name + "'", fn);
}

void Session::own_weights(uint32_t param, const std::function<void(int64_t first, int64_t count, void* memory)>& fn) {
  const int64_t size = size_of(plan_.input.weight_dtype);
  for (const uint32_t w : weights_of_[param]) {
    const Piece& piece = plan_.mine.weights[w];
    char* memory = static_cast<char*>(buffers_[piece.buffer]) + piece.offset * size;
    if (!readers_[piece.buffer]) {
      reach({memory, piece.count, plan_.input.weight_dtype, 0, {1, 0}}, OptimizerStates::Access::write, param,
            [&](void* values, int64_t at, int64_t some) { fn(piece.first + at, some, values); });
    } else if (plan_.input.parameters[param].frozen) {
      if (rank() == 0) fn(piece.first, piece.count, memory);
    } else {
      for (const uint32_t u : slices_of_[param])
        fn(slices_[u].first, slices_[u].count, memory + (slices_[u].first - piece.first) * size);
    }
  }
}

void Session::store(uint32_t param, const float* values) {
  for (const uint32_t u : slices_of_[param])
    if (plan_.has_master)
      visit(slices_[u], master_array(), slices_[u].first, slices_[u].count, OptimizerStates::Access::write,
            [&](void* memory, int64_t first, int64_t count) {
              std::memcpy(memory, values + first, static_cast<std::size_t>(count) * 4);
            });
  own_weights(param, [&](int64_t first, int64_t count, void* memory) {
    downcast(values + first, count, plan_.input.weight_dtype, memory);
  });
}

void Session::store_full(uint32_t param, const void* full) {
  const zr_dtype dtype = plan_.input.weight_dtype;
  const auto at = [&](int64_t first) { return static_cast<const char*>(full) + first * size_of(dtype); };
  own_weights(param, [&](int64_t first, int64_t count, void* memory) {
    const auto bytes = static_cast<std::size_t>(count * size_of(dtype));
    if (std::memcmp(memory, at(first), bytes) == 0) return;  // a scope that only read
    std::memcpy(memory, at(first), bytes);
    stored_full_.insert(param);
  });
}

uint64_t Session::hash_of_weights(const UpdateSlice& slice) {
  Hash hash;
  reach(slice.weight, OptimizerStates::Access::read, slice.param,
        [&](const void* values, int64_t, int64_t count) { hash.add(values, count * size_of(slice.weight.dtype)); });
  return hash.value();
}

void Session::report_written(uint32_t param) {
  if (weight_digest_) weight_digest_->written(param);
  recorder_->forget_hash();
  report_unsaved(param);
}

void Session::report_unsaved(uint32_t param) {
  if (saved_weights_.empty()) return;
  bool differs = false;  // else the write was undone, or only read
  for (const uint32_t u : slices_of_[param]) differs |= hash_of_weights(slices_[u]) != saved_weights_[u];
  if (!differs) return;
  saved_weights_.clear();
  unsaved_write_ = true;
  log(ZR_LOG_WARN, "weights were written to after the checkpoint of step " + std::to_string(step_) + " ('" +
                       plan_.input.parameters[param].name +
                       "'): checkpoint.every saves at the end of engine.step(), before what the program does then; "
                       "to have it in the checkpoint, call engine.save() after it instead");
}

// Masters follow at the next call that needs them, under every strategy: a write that is undone before leaves no trace.
void Session::take_written() {
  for (const uint32_t param : model_.written()) {
    report_written(param);
    for (const uint32_t u : slices_of_[param]) adopt_master(slices_[u]);
  }
  for (const uint32_t param : std::exchange(stored_full_, {})) {
    report_written(param);
    for (const uint32_t u : slices_of_[param]) adopt_master(slices_[u]);
  }
  if (!plan_.has_master) return;
  for (const uint32_t param : model_.exposed()) {
    bool changed = false;
    for (const uint32_t u : slices_of_[param]) changed |= adopt_master(slices_[u]);
    if (changed) report_written(param);
  }
  for (const UpdateSlice* slice : weight_samples_.changed())
    if (adopt_master(*slice)) report_written(slice->param);
  weight_samples_.remember();
}

bool Session::adopt_master(const UpdateSlice& slice) {
  if (!plan_.has_master) return false;
  const zr_dtype dtype = plan_.input.weight_dtype;
  bool changed = false;
  reach(slice.weight, OptimizerStates::Access::read, slice.param, [&](const void* weights, int64_t at, int64_t some) {
    const int64_t begin = slice.first + at;
    visit(slice, master_array(), begin, some, OptimizerStates::Access::modify,
          [&](void* memory, int64_t first, int64_t count) {
            changed |= sync_master_from_weights(static_cast<const char*>(weights) + (first - begin) * size_of(dtype),
                                                dtype, count, static_cast<float*>(memory));
          });
  });
  return changed;
}

void Session::check_same_values(const Parameter& parameter, const float* values) {
  const uint64_t mine = XXH3_64bits(values, static_cast<std::size_t>(parameter.count) * 4);
  const auto all =
      comm_->all_gather_bytes(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), "engine.set");
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      fail_user("engine.set('" + parameter.name + "'): rank " + std::to_string(r) +
                " gives other values than rank 0; give the same tensor on all ranks");
}

void Session::write(uint32_t param, LogicalRole role, const std::string& slot, const float* values) {
  const Parameter& parameter = plan_.input.parameters[param];
  if (role == LogicalRole::gradient) fail_user("a gradient cannot be set: it is the sum of what backward gave");
  if (role == LogicalRole::state && parameter.frozen)
    fail_user("parameter '" + parameter.name + "' is frozen: it has no optimizer state");
  check_same_values(parameter, values);
  if (role == LogicalRole::value) {
    model_.check_scopes("engine.set('" + parameter.name + "')");
    if (plan_.input.alias) comm_->barrier("before a value is set");  // a peer may still read what is written here
    take_written();
    store(param, values);
    report_unsaved(param);
    recorder_->forget_hash();
    const int64_t before = comm_->volume().total();
    notify_updated();
    excluded_communication_ += comm_->volume().total() - before;
    return;
  }
  const auto array = array_of(role, slot);
  for (const uint32_t u : slices_of_[param])
    visit(slices_[u], *array, slices_[u].first, slices_[u].count, OptimizerStates::Access::write,
          [&](void* memory, int64_t from, int64_t count) {
            std::memcpy(memory, values + from, static_cast<std::size_t>(count) * 4);
          });
}

std::string Session::weights_hash() {
  model_.check_scopes("engine.weights_hash()");
  compare_weights();
  take_written();
  check_complete();
  constexpr int64_t kPart = 64 * kNormBlock;  // elements at a time, whatever the model
  std::vector<uint32_t> order(plan_.input.parameters.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return plan_.input.parameters[a].name < plan_.input.parameters[b].name; });
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  std::vector<float> values(kPart);
  for (const uint32_t param : order) {
    const Parameter& parameter = plan_.input.parameters[param];
    XXH3_64bits_update(state.get(), parameter.name.c_str(), parameter.name.size() + 1);
    for (int64_t first = 0; first < parameter.count; first += kPart) {
      const int64_t count = std::min(kPart, parameter.count - first);
      read_settled(param, LogicalRole::value, "", first, count, values.data());
      XXH3_64bits_update(state.get(), values.data(), static_cast<std::size_t>(count) * 4);
    }
  }
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(XXH3_64bits_digest(state.get())));
  return text;
}

}  // namespace zr::host
