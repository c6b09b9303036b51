#include "conform/world.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "zr/names.hpp"

namespace zr::conform {

namespace {
constexpr auto kLongestWait = std::chrono::seconds(10);

zr_code fill(zr_error* error, zr_code code, const std::string& text) {
  error->code = code;
  std::snprintf(error->msg, sizeof error->msg, "%s", text.c_str());
  return code;
}
}  // namespace

World::World(const Options& options)
    : options_(options),
      table_(sizeof(zr_collectives_api) + ArgumentMemory::kUnknownBytes),
      submitted_(static_cast<std::size_t>(options.size)),
      observers_(static_cast<std::size_t>(options.size)),
      left_(static_cast<std::size_t>(options.size)),
      work_(static_cast<std::size_t>(options.size)),
      traces_(static_cast<std::size_t>(options.size)) {
  const std::size_t extra = options.longer_structs ? ArgumentMemory::kUnknownBytes : 0;
  const zr_collectives_api table{static_cast<uint32_t>(sizeof(zr_collectives_api) + extra), 0, submit, progress};
  std::memcpy(table_.data(), &table, sizeof table);
  std::memset(table_.data() + sizeof table, 0xa5, extra);
  for (int rank = 0; rank < options.size; ++rank) ports_.push_back({this, rank});
}

zr_comm_ref World::ref(int rank) const {
  return {reinterpret_cast<const zr_collectives_api*>(table_.data()),
          const_cast<Port*>(&ports_[static_cast<std::size_t>(rank)]), rank, options_.size};
}

zr_code World::submit(void* port, const zr_coll* coll, zr_stream* stream, zr_done* done, zr_error* error) {
  auto& [world, rank] = *static_cast<Port*>(port);
  if (coll->size < ZR_SIZE_0_9(zr_coll)) world->stop("it submitted a zr_coll that is shorter than in ABI 0.9");
  const SimulatedDevice* const device = world->options_.device;
  if (!device && stream) world->stop("it submitted a collective with a stream, but got none");
  if (!device) return world->submit(rank, *coll, done, error);
  zr_coll own;
  ZR_TAKE(&own, coll);
  const bool has_views = own.src.count > 0 || own.dst.count > 0;
  if (has_views && stream != device->stream(rank))
    world->stop("it submitted a collective without the stream of its call");
  if (const std::string problem = world->move_to_backing(own); !problem.empty()) world->stop(problem);
  return world->submit(rank, own, done, error);
}

// Replaces addresses of the device by those of the memory behind them.
std::string World::move_to_backing(zr_coll& coll) const {
  for (zr_view* view : {&coll.src, &coll.dst}) {
    if (view->count > 0) {
      view->data = options_.device->is(view->device) ? options_.device->backing(view->data) : nullptr;
      if (!view->data) return "it submitted a collective with a view that is not in memory of the stream's device";
    }
    view->device = {ZR_DEVICE_CPU, 0};
  }
  return "";
}

zr_code World::progress(void* port, zr_error*) {
  World& world = *static_cast<Port*>(port)->world;
  const MutexLock lock(world.mutex_);
  world.advance();
  return ZR_OK;
}

std::string World::text_of(const RankCollective& collective) const {
  const zr_coll& coll = collective.coll;
  const zr_view& view = coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER ? coll.dst : coll.src;
  std::string text = concat(name_of_op(coll.op));
  if (coll.op != ZR_BARRIER) text += concat(" ", name_of(view.dtype));
  if (is_reduction(coll.op)) text += concat(" of ", view.count);
  if (coll.op >= ZR_BROADCAST && coll.op <= ZR_SCATTER) text += concat(" root ", coll.root);
  return text + " '" + collective.label + "'";
}

zr_code World::submit(int rank, const zr_coll& given, zr_done* done, zr_error* error) {
  RankCollective collective(given, options_.size);
  MutexLock lock(mutex_);
  const auto r = static_cast<std::size_t>(rank), index = submitted_[r]++;
  traces_[r].push_back(text_of(collective));
  if (!problem_.empty()) return fill(error, ZR_INTERNAL, problem_);
  if (index >= options_.fail_at) return fill(error, options_.code, "a collective failed on purpose");
  if (collective.coll.op == ZR_SEND || collective.coll.op == ZR_RECV)
    return fill(error, ZR_UNSUPPORTED, "this communicator has neither send nor recv");
  while (operations_.size() <= index) {
    Operation& added = operations_.emplace_back();
    added.ranks.resize(static_cast<std::size_t>(options_.size));
    added.completions.resize(static_cast<std::size_t>(options_.size));
  }
  Operation& operation = operations_[index];
  operation.ranks[r] = std::move(collective);
  if (done) {
    operation.completions[r] = &Completion::from(done);
    ++operation.completions[r]->references;
  }
  ++operation.arrived;
  if (options_.device) return ZR_OK;  // enqueued
  if (!options_.lazy || !done) advance();
  changed_.notify_all();
  return done ? zr_code{ZR_OK} : wait_for(rank, index, lock, error);
}

void World::enqueue(int rank, std::function<void()> work) {
  const MutexLock lock(mutex_);
  const auto r = static_cast<std::size_t>(rank);
  work_[r].push_back({submitted_[r], std::move(work)});
}

void World::synchronize(int rank) {
  MutexLock lock(mutex_);
  const auto r = static_cast<std::size_t>(rank);
  changed_.notify_all();
  zr_error error{};
  if (submitted_[r] > 0 && wait_for(rank, submitted_[r] - 1, lock, &error) != ZR_OK) fail(error.msg);
  work_before(r, submitted_[r] + 1);
  if (!problem_.empty()) fail(problem_);
}

void World::forget(int rank) {
  const MutexLock lock(mutex_);
  work_[static_cast<std::size_t>(rank)].clear();
}

// Does the rank's work up to its collective of this number.
void World::work_before(std::size_t rank, std::size_t collective) {
  std::deque<Work>& work = work_[rank];
  for (; !work.empty() && work.front().after <= collective && problem_.empty(); work.pop_front()) try {
      work.front().run();
    } catch (const Failure& failure) {
      stop_locked(failure.reason);
      return;
    }
}

zr_code World::wait_for(int rank, std::size_t index, MutexLock& lock, zr_error* error) {
  const auto deadline = std::chrono::steady_clock::now() + kLongestWait;
  const auto r = static_cast<std::size_t>(rank);
  while (!operations_[index].performed && problem_.empty()) {
    advance();
    if (operations_[index].performed) break;
    for (std::size_t other = 0; other < left_.size(); ++other)
      if (left_[other] && submitted_[other] <= index)
        stop_locked(concat("rank ", rank, " waits in ", traces_[r][index], ", which rank ", other, " never calls"));
    if (std::chrono::steady_clock::now() > deadline)
      stop_locked(concat("rank ", rank, " waits in ", traces_[r][index], " for more than 10 seconds"));
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
  return operations_[index].performed ? zr_code{ZR_OK} : fill(error, ZR_INTERNAL, problem_);
}

// Performs the collectives that all ranks have submitted, in order.
void World::advance() {
  for (; performed_ < operations_.size() && problem_.empty(); ++performed_) {
    Operation& operation = operations_[performed_];
    if (operation.arrived < options_.size) return;
    if (const std::string mismatch = problem_of(operation.ranks); !mismatch.empty())
      return stop_locked(concat("collective ", performed_, ": ", mismatch));
    for (std::size_t rank = 0; rank < work_.size(); ++rank) work_before(rank, performed_);
    if (!problem_.empty()) return;
    perform(operation.ranks);
    operation.performed = true;
    for (std::size_t rank = 0; rank < observers_.size(); ++rank)
      if (observers_[rank]) observers_[rank](performed_, operation.ranks[rank].coll);
    for (Completion* completion : operation.completions)
      if (completion) {
        completion->resolve(ZR_OK, 0, nullptr);
        --completion->references;
      }
    changed_.notify_all();
  }
}

zr_code World::wait(Completion& completion) {
  MutexLock lock(mutex_);
  advance();
  if (completion.is_resolved()) return ZR_OK;
  if (!problem_.empty()) return ZR_INTERNAL;
  if (std::find(left_.begin(), left_.end(), true) != left_.end() && performed_ == operations_.size())
    return ZR_OK;  // not one of a collective
  changed_.wait_for(lock, std::chrono::milliseconds(2));
  return ZR_OK;
}

void World::leave(int rank) {
  const MutexLock lock(mutex_);
  left_[static_cast<std::size_t>(rank)] = true;
  changed_.notify_all();
}

void World::observe(int rank, Observer observer) {
  const MutexLock lock(mutex_);
  observers_[static_cast<std::size_t>(rank)] = std::move(observer);
}
std::size_t World::submitted(int rank) const {
  const MutexLock lock(mutex_);
  return submitted_[static_cast<std::size_t>(rank)];
}

void World::stop(const std::string& problem) {
  const MutexLock lock(mutex_);
  stop_locked(problem);
}
void World::stop_locked(const std::string& problem) {
  if (problem_.empty()) problem_ = problem;
  changed_.notify_all();
}
std::string World::problem() const {
  const MutexLock lock(mutex_);
  return problem_;
}
std::vector<std::string> World::trace(int rank) const {
  const MutexLock lock(mutex_);
  return traces_[static_cast<std::size_t>(rank)];
}

}  // namespace zr::conform
