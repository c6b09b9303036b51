// Session's checkpoints: its logical tensors, by the parts that this rank holds, and what is not a tensor.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/safetensors.hpp"
#include "checkpoint/save.hpp"
#include "engine/session.hpp"
#include "shard/rounding.hpp"

namespace zr::host {

using Json = nlohmann::json;

namespace {
constexpr int64_t kWord = 900 << 10;                // of the store's values, which hold 1 MiB
constexpr auto kPatience = std::chrono::hours(24);  // a rank that is lost ends the wait at once

std::string stored_name(zr_dtype dtype) {
  switch (dtype) {
    case ZR_BF16: return "BF16";
    case ZR_F16: return "F16";
    case ZR_F64: return "F64";
    case ZR_I8: return "I8";
    case ZR_U8: return "U8";
    case ZR_I32: return "I32";
    case ZR_I64: return "I64";
    default: return "F32";
  }
}

std::string to_hex(const void* data, uint64_t bytes) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (uint64_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<const unsigned char*>(data)[i];
    text += {digits[byte >> 4], digits[byte & 15]};
  }
  return text;
}

std::string from_hex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

// Words of any length by the control plane's store, which any thread may use.
void put_long(Control& control, const std::string& key, const std::string& word) {
  control.put(key, std::to_string(word.size()));
  for (std::size_t at = 0; at < word.size(); at += kWord)
    control.put(key + "." + std::to_string(at), word.substr(at, kWord));
}
std::string get_long(Control& control, const std::string& key) {
  const auto length = static_cast<std::size_t>(std::stoull(control.get(key, kPatience)));
  std::string word;
  while (word.size() < length) word += control.get(key + "." + std::to_string(word.size()), kPatience);
  return word;
}
}  // namespace

Peers Session::peers() {
  if (world() == 1) return alone();
  const auto key = [](uint64_t word, int from) {
    return "checkpoint." + std::to_string(word) + "." + std::to_string(from);
  };
  Peers peers;
  peers.rank = rank();
  peers.world = world();
  peers.gather = [this, key](const std::string& mine) {
    const uint64_t word = ++words_;
    std::vector<std::string> all;
    if (rank() != 0) put_long(*control_, key(word, rank()), mine);
    for (int r = 0; rank() == 0 && r < world(); ++r) all.push_back(r == 0 ? mine : get_long(*control_, key(word, r)));
    return all;
  };
  peers.tell = [this, key](const std::string& mine) {
    const uint64_t word = ++words_;
    if (rank() == 0) put_long(*control_, key(word, 0), mine);
    return rank() == 0 ? mine : get_long(*control_, key(word, 0));
  };
  return peers;
}

// What this rank saves of a parameter: its share of each run, where several have the same.
std::vector<std::pair<int64_t, int64_t>> Session::shares(uint32_t param) const {
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (const Segment& segment : plan_.segments[param]) {
    const auto me = std::find(segment.owners.begin(), segment.owners.end(), rank());
    if (me == segment.owners.end()) continue;
    const int64_t index = me - segment.owners.begin(), n = static_cast<int64_t>(segment.owners.size()),
                  leaves = leaves_of(segment.count);
    const auto cut = [&](int64_t i) { return std::min(segment.count, leaves * i / n * kLeaf); };
    if (cut(index + 1) > cut(index)) runs.emplace_back(segment.first + cut(index), cut(index + 1) - cut(index));
  }
  return runs;
}

// This rank's memory of elements [first, first + count), which it holds.
char* Session::memory_of(uint32_t param, const std::string& role, int64_t first, int64_t count) {
  const auto within = [&](int64_t from, int64_t n) { return from <= first && first + count <= from + n; };
  for (const Unit& unit : units_) {
    if (unit.param != param || !within(unit.first, unit.count)) continue;
    zr_view view = role == "weight" ? unit.weight : unit.master;
    for (std::size_t i = 0; i < plan_.input.slots.size(); ++i)
      if (role == std::string("state.") + plan_.input.slots[i].name) view = unit.slots[i];
    return bytes_of(view) + (first - unit.first) * size_of(view.dtype);
  }
  for (const Piece& piece : plan_.mine.weights)
    if (piece.param == param && within(piece.first, piece.count))
      return static_cast<char*>(buffers_[piece.buffer]) +
             (piece.offset + first - piece.first) * size_of(plan_.input.weight_dtype);
  fail_bug("rank " + std::to_string(rank()) + " has no memory of '" + plan_.input.parameters[param].name +
           "' where its plan says so");
}

// Calls fn(param, tensor) for every tensor that belongs to a parameter, in an order that is the same on all ranks.
template <class F>
void Session::each_tensor(F&& fn) const {
  const auto of = [&](const Parameter& p, const std::string& role, zr_dtype dtype) {
    return Tensor{role, p.name, stored_name(dtype), p.shape, role == "weight" ? p.aliases : std::vector<std::string>{}};
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
  Json globals = Json::object();
  const auto* optimizer = optimizer_->api<zr_optimizer_api>();
  if (optimizer->save_globals) {
    CallError error;
    const auto sink = [](void* ctx, const char* key, const void* value, uint64_t bytes) {
      (*static_cast<Json*>(ctx))[key] = to_hex(value, bytes);
    };
    call(optimizer->save_globals(optimizer_->self(), sink, &globals, &error), error, optimizer_->who("save_globals"));
  }
  Json slots = Json::array(), steps = Json::object();
  for (const zr_slot& slot : plan_.input.slots) slots.push_back(slot.name);
  for (std::size_t i = 0; i < param_steps_.size(); ++i) steps[plan_.input.parameters[i].name] = param_steps_[i];
  const LossScale::Image scale = loss_scale_.image();
  return Json{{"world", world()},
              {"strategy", setup_.strategy.table->id},
              {"optimizer", {{"id", setup_.optimizer.table->id}, {"slots", slots}, {"globals", globals}}},
              {"updates", updates_},
              {"parameter_steps", steps},
              {"loss_scale",
               {{"value", scale.value},
                {"good", scale.good},
                {"hysteresis_left", scale.hysteresis_left},
                {"skips", scale.skips}}},
              {"seed", config().integer("train.seed")},
              {"config", config().to_toml()}}
      .dump();
}

std::string Session::save(const std::string& root, int64_t keep) {
  if (in_backward_ || micro_ > 0)
    fail_user(
        "engine.save() between engine.backward() and the engine.step() that ends its step: gradients are not "
        "saved; call it after a step");
  check_complete();
  model_.check_scopes();
  take_written();
  agree(peers(), [&] {
    if (rank() == 0 && lock_root_ != root) {
      lock_.reset();
      lock_ = std::make_unique<FolderLock>(root);
      lock_root_ = root;
    }
  });
  Image image;
  image.step = step_;
  image.run = control_->job_id();
  image.facts = facts();
  each_tensor([&](uint32_t param, Tensor tensor) {
    const auto index = static_cast<uint32_t>(image.tensors.size());
    const int64_t size = plan_.input.parameters[param].count ? tensor.bytes() / plan_.input.parameters[param].count : 0;
    for (const auto& [first, count] : shares(param))
      image.slabs.push_back({index, first * size, count * size, memory_of(param, tensor.role, first, count)});
    image.tensors.push_back(std::move(tensor));
  });
  for (const ModelBuffer& buffer : model_.buffers()) {
    if (rank() == 0 && buffer.bytes > 0)
      image.slabs.push_back({static_cast<uint32_t>(image.tensors.size()), 0, buffer.bytes, buffer.data});
    image.tensors.push_back({"buffer", buffer.name, buffer.dtype, buffer.shape, {}});
  }
  SaveOptions options;
  options.keep = keep;
  const std::string folder = zr::host::save(root, image, peers(), options);
  mark_ = step_start_ = std::chrono::steady_clock::now();
  return folder;
}

void Session::check_complete() const {
  if (incomplete_)
    fail_user("the checkpoint that was loaded last was not whole, so the weights are none: load another one");
}

namespace {
// "; missing: weight 'a', state.exp_avg 'b' and 3 more"
std::string list_of(const std::string& what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = "; " + what + ": ";
  for (std::size_t i = 0; i < names.size() && i < 5; ++i) text += (i ? ", " : "") + names[i];
  return text + (names.size() > 5 ? " and " + std::to_string(names.size() - 5) + " more" : "");
}

bool is_weight(const Tensor& tensor) { return tensor.role == "weight" || tensor.role == "master"; }
}  // namespace

// What is to be read from the checkpoint, and what it lacks.
Session::Match Session::match(const Checkpoint& from, const LoadHow& how) const {
  Match match;
  std::set<std::pair<std::string, std::string>> known;
  const auto take = [&](uint32_t param, const Tensor& tensor) {
    const std::string who = tensor.role + " '" + tensor.name + "'";
    const SavedTensor* saved = from.find(tensor.role, tensor.name);
    known.emplace(tensor.role, tensor.name);
    if (!saved && tensor.role == "master") saved = from.find("weight", tensor.name);  // fp32 is its own master
    if (!saved)
      (is_weight(tensor) || tensor.role == "buffer" ? match.missing : match.fresh).push_back(who);
    else if (saved->shape != tensor.shape)
      match.other_shape.push_back(who);
    else
      match.parts.push_back({param, tensor, saved});
  };
  each_tensor([&](uint32_t param, const Tensor& tensor) {
    if (how.weights_only && !is_weight(tensor)) return;
    take(param, tensor);
  });
  for (const ModelBuffer& buffer : model_.buffers())
    take(kNoParam, {"buffer", buffer.name, buffer.dtype, buffer.shape, {}});
  for (const SavedTensor& saved : from.manifest().tensors)
    if (!known.count({saved.role, saved.name}) && !(how.weights_only && saved.role.starts_with("state.")) &&
        saved.role != "master")
      match.unexpected.push_back(saved.role + " '" + saved.name + "'");
  return match;
}

// A part of this rank's, in the type it is to have.
void Session::read_part(const Checkpoint& from, const Match::Part& part, int64_t first, int64_t count, void* to) const {
  const SavedTensor* saved = part.saved;
  const int64_t size = stored_size(part.tensor.dtype);
  if (saved->dtype == part.tensor.dtype) return from.read(*saved, first * size, count * size, to);
  // Another type: from fp32, which is the master.
  const SavedTensor* master = from.find("master", saved->name);
  const SavedTensor& source = master ? *master : *saved;
  constexpr int64_t kRun = 256 * kLeaf;
  std::vector<char> room(static_cast<std::size_t>(std::min(count, kRun)) * 4);
  std::vector<float> wide(static_cast<std::size_t>(std::min(count, kRun)));
  const zr_dtype has = source.dtype == "BF16" ? ZR_BF16 : source.dtype == "F16" ? ZR_F16 : ZR_F32;
  const zr_dtype wants = part.tensor.dtype == "BF16" ? ZR_BF16 : part.tensor.dtype == "F16" ? ZR_F16 : ZR_F32;
  for (int64_t at = 0; at < count; at += kRun) {
    const int64_t n = std::min(kRun, count - at);
    from.read(source, (first + at) * size_of(has), n * size_of(has), room.data());
    widen(room.data(), has, n, wide.data());
    narrow(wide.data(), n, wants, static_cast<char*>(to) + at * size);
  }
}

void Session::resume(const std::string& root) {
  std::string newest;
  agree(peers(), [&] {
    if (rank() == 0 && !checkpoints_in(root).empty()) newest = find_checkpoint(root);
  });
  newest = peers().tell(newest);
  if (!newest.empty()) load(newest, {});
}

LoadReport Session::load(const std::string& path, const LoadHow& how) {
  if (in_backward_ || micro_ > 0)
    fail_user("engine.load() between engine.backward() and the engine.step() that ends its step; call it after a step");
  model_.check_scopes();
  std::string folder;
  agree(peers(), [&] {
    if (rank() == 0) folder = find_checkpoint(path);
  });
  folder = peers().tell(folder);
  std::optional<Checkpoint> from;
  agree(peers(), [&] { from.emplace(folder); });
  Match found = match(*from, how);
  if (how.strict && !(found.missing.empty() && found.unexpected.empty() && found.other_shape.empty()))
    fail_user(folder + ": does not fit the model" + list_of("missing", found.missing) +
              list_of("of another shape", found.other_shape) + list_of("unexpected", found.unexpected) +
              "; load with strict = false to take what fits");
  const Json facts = Json::parse(from->manifest().facts);
  if (!how.convert)
    for (const Match::Part& part : found.parts)
      if (part.tensor.role == "weight" && part.saved->dtype != part.tensor.dtype)
        fail_user(folder + ": weight '" + part.tensor.name + "' is " + part.saved->dtype + ", train.dtype wants " +
                  part.tensor.dtype +
                  "; set train.dtype to what it is, or load with convert = true, which rounds from "
                  "the fp32 master");
  const auto* optimizer = optimizer_->api<zr_optimizer_api>();
  const Json& globals = facts["optimizer"]["globals"];
  const bool same_optimizer = facts["optimizer"]["id"] == setup_.optimizer.table->id;
  if (!how.weights_only && same_optimizer && !found.fresh.empty() && how.strict)
    fail_user(folder + ": does not fit the optimizer" + list_of("missing", found.fresh) +
              "; load with strict = false, or the weights only");
  if (plan_.input.alias) comm_->barrier("before a checkpoint is loaded");  // a peer may still read what is written here
  incomplete_ = true;
  const int64_t room = from->largest_chunk();
  ledger_.add(Tier::host, Kind::other, "checkpoint chunk", room);
  try {
    agree(peers(), [&] {
      for (const Match::Part& part : found.parts) {
        if (part.param == kNoParam) {
          for (const ModelBuffer& buffer : model_.buffers())
            if (buffer.name == part.tensor.name) from->read(*part.saved, 0, buffer.bytes, buffer.data);
        } else if (plan_.input.parameters[part.param].frozen) {
          own_weights(part.param, [&](int64_t first, int64_t count, void* memory) {
            read_part(*from, part, first, count, memory);
          });
        } else {
          for (const Unit& unit : units_)
            if (unit.param == part.param)
              read_part(*from, part, unit.first, unit.count,
                        memory_of(part.param, part.tensor.role, unit.first, unit.count));
        }
      }
    });
  } catch (...) {
    ledger_.add(Tier::host, Kind::other, "checkpoint chunk", -room);
    throw;
  }
  ledger_.add(Tier::host, Kind::other, "checkpoint chunk", -room);
  incomplete_ = false;
  const int64_t before = comm_->wire().total();
  notify_updated();
  wire_aside_ += comm_->wire().total() - before;
  if (!how.weights_only) {
    step_ = from->manifest().step;
    updates_ = facts["updates"].get<int64_t>();
    for (std::size_t i = 0; i < param_steps_.size(); ++i)
      param_steps_[i] = facts["parameter_steps"].value(plan_.input.parameters[i].name, int64_t{0});
    const Json& scale = facts["loss_scale"];
    loss_scale_.restore({scale["value"], scale["good"], scale["hysteresis_left"], scale["skips"]});
    gradients_->watch(loss_scale_.watches());
    if (same_optimizer && optimizer->load_global)
      for (const auto& [key, value] : globals.items()) {
        CallError error;
        const std::string bytes = from_hex(value.get<std::string>());
        call(optimizer->load_global(optimizer_->self(), key.c_str(), bytes.data(), bytes.size(), &error), error,
             optimizer_->who("load_global"));
      }
    record_->resume(step_);
    reseed();
  }
  mark_ = step_start_ = std::chrono::steady_clock::now();
  return {folder, found.missing, found.unexpected, found.other_shape, found.fresh};
}

}  // namespace zr::host
