#include "gathers.hpp"

#include <algorithm>

namespace zero3 {

namespace {
std::vector<int64_t> sizes(const Cells& cells, int64_t width) {
  std::vector<int64_t> bytes;
  for (const Cell& cell : cells.all()) bytes.push_back(cell.size * width);
  return bytes;
}
}  // namespace

int64_t window_elements(const Cells& cells, const Limits& limits, int64_t width) {
  const int64_t wanted = std::min(limits.prefetch / width + cells.largest_use(), limits.live / width);
  return std::min(cells.sharded(), std::max(wanted, cells.largest_use()));
}

Gathers::Gathers(const zr_plan_in& in, const Cells& cells, const Limits& limits, const zr::Comm& comm,
                 const zr_view& shard, const zr_view& window, const zr::Host& host)
    : in_(&in),
      cells_(cells),
      limits_(limits),
      comm_(comm),
      host_(host),
      shard_(shard),
      window_view_(window),
      align_(in.align),
      width_(zr::bytes_of(in.weight_dtype)),
      window_(window.count),
      trace_(sizes(cells, zr::bytes_of(in.weight_dtype))),
      live_(cells.all().size()) {
  for (const Cell& cell : cells.all()) {
    counts_.emplace_back();
    for (int32_t r = 0; r < in.world; ++r) counts_.back().push_back(cell.part(r).size());
  }
}

Gathers::~Gathers() {
  for (const Live& live : live_) free_apart(live.apart);
  for (const auto& [bytes, memory] : spare_) free_apart(memory);
}

zr_view Gathers::memory(uint32_t cell) const {
  if (live_[cell].place >= 0) return zr::part(window_view_, live_[cell].place, cells_.all()[cell].size);
  zr_view view = live_[cell].apart;
  view.dtype = in_->weight_dtype;
  view.count = cells_.all()[cell].size;
  return view;
}

void Gathers::acquire(const uint32_t* params, uint32_t n, uint32_t phase, zr_view* whole) {
  const bool traced = phase == ZR_FORWARD || phase == ZR_BACKWARD;
  std::vector<uint32_t> wanted;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t c = cells_.cell_of(params[i]);
    Live& live = live_[c];
    if (live.users++ > 0) continue;
    wanted.push_back(c);
    if (traced && !trace_.use(c)) changed(c);
    if (live.ahead) ahead_bytes_ -= bytes(c);
    live.ahead = false;
  }
  // The largest first: a small one could stand in the middle of the only room for it.
  std::stable_sort(wanted.begin(), wanted.end(), [&](uint32_t a, uint32_t b) { return room(a) > room(b); });
  for (const uint32_t c : wanted) {
    if (live_[c].state != State::absent) continue;
    while (!take(c))
      if (!drop_farthest(-1)) {
        take_apart(c, phase);
        break;
      }
    start(c);
  }
  if (traced) prefetch();
  for (const uint32_t c : wanted) arrive(c);
  for (uint32_t i = 0; i < n; ++i)
    whole[i] = zr::part(memory(cells_.cell_of(params[i])), cells_.offset(params[i]), in_->params[params[i]]->count);
}

void Gathers::release(const uint32_t* params, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t c = cells_.cell_of(params[i]);
    Live& live = live_[c];
    if (--live.users > 0) continue;
    const int64_t distance = trace_.distance(c);
    if (distance == Trace::kNever || distance > limits_.reuse || live_bytes_ > limits_.live || live.place < 0) drop(c);
  }
}

void Gathers::changed(uint32_t c) {
  constexpr int kTold = 3;
  if (comm_.rank() != 0 || changes_++ >= kTold) return;
  host_.log(ZR_LOG_INFO, std::string("zero3: the order of execution changed at '") +
                             in_->params[cells_.all()[c].params.front()]->name +
                             "'; weights are gathered on demand until it is recorded anew" +
                             (changes_ == kTold ? " (further changes are not told)" : ""));
}

// Window room for a cell, within the limit.
bool Gathers::take(uint32_t c) {
  if (live_bytes_ > 0 && live_bytes_ + bytes(c) > limits_.live) return false;
  live_[c].place = window_.take(room(c));
  return live_[c].place >= 0;
}

// Memory that training takes stays for the next time, and grows only: a steady model soon takes none.
zr_view Gathers::alloc_apart(int64_t bytes, bool stays) {
  if (stays) {
    if (const auto fits = spare_.lower_bound(bytes); fits != spare_.end()) return spare_.extract(fits).mapped();
    if (!spare_.empty()) free_apart(spare_.extract(std::prev(spare_.end())).mapped());
  }
  zr_view memory{};
  zr_error error = zr::no_error();
  zr::check(host_.need<zr_memory_service>().alloc(host_.abi(), static_cast<uint64_t>(bytes), 64,
                                                  "window: gathered weights, apart", &memory, &error),
            error);
  return memory;
}

void Gathers::free_apart(const zr_view& memory) {
  if (memory.data) host_.need<zr_memory_service>().free(host_.abi(), &memory);
}

void Gathers::take_apart(uint32_t c, uint32_t phase) {
  Live& live = live_[c];
  live.place = window_.take(room(c));  // within one operator the limit on live bytes does not hold
  if (live.place >= 0) return;
  live.stays = phase != ZR_EXPORT_PHASE;  // that may be the whole model, once
  live.apart = alloc_apart(bytes(c), live.stays);
  if (!live.stays || told_apart_) return;
  told_apart_ = true;
  if (comm_.rank() == 0)
    host_.log(ZR_LOG_INFO, std::string("zero3: '") + in_->params[cells_.all()[c].params.front()]->name +
                               "' finds no room in the window beside what the same operator uses; it is gathered "
                               "apart. A larger prefetch_bytes makes the window larger");
}

// Of the cells nobody uses, the one that is used last goes, if that is not before `beyond` bytes from now.
bool Gathers::drop_farthest(int64_t beyond) {
  uint32_t farthest = 0;
  int64_t distance = beyond;
  for (const uint32_t c : held_) {
    if (live_[c].users > 0) continue;
    const int64_t d = trace_.distance(c);
    if (d > distance) {
      farthest = c;
      distance = d;
    }
  }
  if (distance == beyond) return false;
  drop(farthest);
  return true;
}

void Gathers::drop(uint32_t c) {
  Live& live = live_[c];
  live.done.wait();  // its memory is still being written
  live.done = zr::Done();
  if (live.place >= 0) window_.give_back(live.place, room(c));
  if (live.apart.data && live.stays) {
    spare_.emplace(live.apart.count, live.apart);
  } else {
    free_apart(live.apart);
  }
  if (live.ahead) ahead_bytes_ -= bytes(c);
  live_bytes_ -= bytes(c);
  live.apart = zr_view{};
  live.place = -1;
  live.ahead = false;
  live.state = State::absent;
  held_.erase(std::find(held_.begin(), held_.end(), c));
  next_ = std::min(next_, trace_.next(c));  // it may have been passed over while it was here
}

void Gathers::start(uint32_t c) {
  const Cell& cell = cells_.all()[c];
  Live& live = live_[c];
  held_.push_back(c);
  live_bytes_ += bytes(c);
  live.state = State::coming;
  live.done = comm_.start(zr::all_gather(zr::part(shard_, cell.own, cell.part(comm_.rank()).size()), memory(c),
                                         in_->params[cell.params.front()]->name, counts_[c].data()));
}

void Gathers::arrive(uint32_t c) {
  Live& live = live_[c];
  if (live.state != State::coming) return;
  live.done.wait();
  live.done = zr::Done();
  live.state = State::whole;
}

void Gathers::prefetch() {
  if (!trace_.follows()) return;
  const auto& order = trace_.order();
  for (next_ = std::max(next_, trace_.at()); next_ < order.size(); ++next_) {
    const uint32_t c = order[next_];
    if (live_[c].state != State::absent) continue;
    if (ahead_bytes_ + bytes(c) > limits_.prefetch) return;
    const int64_t when = trace_.distance(c);
    while (!take(c))
      if (!drop_farthest(when)) return;
    live_[c].ahead = true;
    ahead_bytes_ += bytes(c);
    start(c);
  }
}

void Gathers::wait() {
  for (const uint32_t c : std::vector<uint32_t>(held_)) arrive(c);
}

void Gathers::pass_end() {
  wait();
  const size_t at = trace_.at();
  if (trace_.follows() && at > 0 && at < trace_.order().size()) changed(trace_.order()[at]);  // it ended before
  trace_.end();
  next_ = 0;
}

void Gathers::refresh() {
  for (const uint32_t c : std::vector<uint32_t>(held_)) {
    if (live_[c].users > 0)
      throw zr::Error(ZR_INVALID, std::string("weights changed while '") +
                                      in_->params[cells_.all()[c].params.front()]->name +
                                      "' was in use; end the zr::gather scope before engine.step() or engine.set()");
    drop(c);
  }
}

}  // namespace zero3
