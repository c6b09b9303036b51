#include "engine/saver.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "base/round_up.hpp"
#include "base/text.hpp"

namespace zr::host::engine {

namespace {
constexpr std::size_t kValueBytes = 900 << 10;     // bytes per value of the store, whose limit is 1 MiB
constexpr auto kTimeout = std::chrono::hours(24);  // a lost rank ends the wait immediately

// Stores a string of any length.
void put_long(control::Control& control, const std::string& key, const std::string& text) {
  control.put(key, fmt::format("{}", text.size()));
  for (std::size_t at = 0; at < text.size(); at += kValueBytes)
    control.put(fmt::format("{}.{}", key, at), text.substr(at, kValueBytes));
}

// Reads such a string and removes it from the store, so only one rank may read it.
std::string get_long(control::Control& control, const std::string& key) {
  const auto length = static_cast<std::size_t>(std::stoull(control.get(key, kTimeout)));
  std::string text;
  while (text.size() < length) {
    const std::string part = fmt::format("{}.{}", key, text.size());
    text += control.get(part, kTimeout);
    control.drop(part);
  }
  control.drop(key);
  return text;
}

int64_t aligned(int64_t bytes) { return round_up(bytes, checkpoint::CheckpointContents::kAlignment); }

int64_t snapshot_bytes(const checkpoint::CheckpointContents& contents) {
  int64_t bytes = contents.later_bytes;
  for (const checkpoint::Slab& slab : contents.slabs) bytes += aligned(slab.bytes);
  return bytes;
}
}  // namespace

Saver::Saver(std::shared_ptr<control::Control> control, Ledger& ledger)
    : control_(std::move(control)), ledger_(ledger) {}

Saver::~Saver() { close(); }

void Saver::close() {
  log_exception_of([&] { wait(); });
  reserve(0);
  locks_.clear();
}

checkpoint::CheckpointComm checkpoint_comm_of(const std::shared_ptr<control::Control>& control) {
  if (control->world() == 1) return checkpoint::single_rank_comm();
  // Counts the objects of all Engines of this process; all ranks create them in the same order.
  static std::atomic<uint64_t> objects{0};
  const std::string begin = fmt::format("checkpoint.{}.", ++objects);
  const auto calls = std::make_shared<int>(0);
  const auto key = [begin, calls](int rank) { return fmt::format("{}{}.{}", begin, *calls, rank); };
  checkpoint::CheckpointComm comm;
  comm.rank = control->rank();
  comm.world = control->world();
  comm.gather = [control, calls, key](const std::string& text) {
    ++*calls;
    std::vector<std::string> texts;
    if (control->rank() != 0) {
      put_long(*control, key(control->rank()), text);
      return texts;
    }
    texts.push_back(text);
    for (int r = 1; r < control->world(); ++r) texts.push_back(get_long(*control, key(r)));
    return texts;
  };
  comm.broadcast = [control, calls, key](const std::string& text) {
    ++*calls;
    if (control->rank() != 0) return get_long(*control, key(control->rank()));
    for (int r = 1; r < control->world(); ++r) put_long(*control, key(r), text);
    return text;
  };
  return comm;
}

void Saver::lock_on_rank0(const std::string& root) {
  make_folder(root);
  std::error_code error;
  const std::string canonical = std::filesystem::canonical(root, error).string();
  locks_.try_emplace(error ? root : canonical, root);
}

void Saver::lock_folder(const std::string& root) {
  run_on_all_ranks(checkpoint_comm(), [&] {
    if (control_->rank() == 0) lock_on_rank0(root);
  });
}

void Saver::reserve_for(const checkpoint::CheckpointContents& contents) {
  if (const int64_t bytes = snapshot_bytes(contents); bytes > snapshot_bytes_) reserve(bytes);
}

void Saver::reserve(int64_t bytes) {
  if (snapshot_) {
    snapshot_.reset();
    ledger_.add(Tier::host, MemoryKind::snapshot, "copy for checkpoints", -snapshot_bytes_);
    snapshot_bytes_ = 0;
  }
  if (bytes == 0) return;
  snapshot_ = allocate_huge_pages(bytes);
  if (!snapshot_)
    fail_environment(
        fmt::format("rank {} cannot allocate {} of host memory for the copy that checkpoint.async writes from; set "
                    "checkpoint.async = false",
                    control_->rank(), bytes_text(bytes)));
  snapshot_bytes_ = bytes;
  ledger_.add(Tier::host, MemoryKind::snapshot, "copy for checkpoints", bytes);
  std::memset(snapshot_.get(), 0,
              static_cast<std::size_t>(bytes));  // makes the kernel allocate it now, not during training
}

std::string Saver::write(const std::string& root, const checkpoint::CheckpointContents& contents, int64_t keep,
                         const checkpoint::CheckpointComm& comm) {
  run_on_all_ranks(comm, [&] {
    if (comm.rank == 0) lock_on_rank0(root);
  });
  checkpoint::SaveOptions options;
  options.keep = keep;
  const checkpoint::SaveResult saved = zr::host::checkpoint::save(root, contents, comm, options);
  for (const std::string& warning : saved.warnings) log(ZR_LOG_WARN, warning);
  return saved.folder;
}

std::string Saver::save(const std::string& root, const checkpoint::CheckpointContents& contents, int64_t keep) {
  return write(root, contents, keep, checkpoint_comm());
}

void Saver::save_async(const std::string& root, checkpoint::CheckpointContents contents, int64_t keep) {
  // Also on ranks with nothing to copy, because an allocation or a read from a tier may fail on one rank only.
  run_on_all_ranks(checkpoint_comm(), [&] {
    reserve_for(contents);
    copy(contents);
  });
  writer_ = std::thread([this, root, keep, contents = std::move(contents), comm = checkpoint_comm()] {
    try {
      write(root, contents, keep, comm);
    } catch (...) {
      failure_ = std::current_exception();
      failed_ = true;
    }
  });
}

// Copies the slabs into snapshot_ and redirects them to the copies.
void Saver::copy(checkpoint::CheckpointContents& contents) {
  int64_t at = 0;
  for (checkpoint::Slab& slab : contents.slabs) {
    if (slab.data)
      std::memcpy(snapshot_.get() + at, slab.data, static_cast<std::size_t>(slab.bytes));
    else
      slab.read(0, slab.bytes, snapshot_.get() + at);
    slab.data = snapshot_.get() + at;
    at += aligned(slab.bytes);
  }
}

bool Saver::wait() {
  const bool wrote = writer_.joinable();
  if (wrote) writer_.join();
  if (failed_.exchange(false)) std::rethrow_exception(std::exchange(failure_, nullptr));
  return wrote;
}

}  // namespace zr::host::engine
