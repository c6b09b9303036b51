// Checkpoints of 85 M parameters with AdamW's states (1 GB) under zero2 on two ranks. Saves and loads, with checksums,
// are compared with plain sequential writes and reads of the same bytes by two processes in the same folder. Also
// measures how long an asynchronous save blocks training, and compares the hash with reading memory.
// `bench_checkpoint ROWS.json` starts its two ranks itself; CHECKPOINT_BENCH names the folder (default: build/runs).
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>

#include "bench/memory_job.hpp"
#include "bench/ranks.hpp"
#include "bench/row.hpp"
#include "checkpoint/manifest.hpp"

namespace {

namespace fs = std::filesystem;
using zr::bench::Job;
using zr::bench::Row;
constexpr int64_t kPiece = int64_t{4} << 20;

[[noreturn]] void fail(const std::string& what) {
  std::perror(("bench_checkpoint: " + what).c_str());
  std::_Exit(3);
}

// A file that this process writes and reads sequentially, without the checkpoint format.
class Plain {
 public:
  Plain(std::string path, int64_t bytes)
      : path_(std::move(path)), bytes_(bytes), memory_(static_cast<std::size_t>(bytes), 'x') {}
  ~Plain() { fs::remove(path_); }
  Plain(const Plain&) = delete;
  void write() {
    fs::remove(path_);
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (int64_t at = 0; at < bytes_; at += kPiece)
      if (::pwrite(fd, memory_.data() + at, static_cast<std::size_t>(std::min(kPiece, bytes_ - at)), at) < 0)
        fail(path_);
    if (::fdatasync(fd) != 0) fail(path_);
    ::close(fd);
  }
  void read() {
    const int fd = ::open(path_.c_str(), O_RDONLY);
    for (int64_t at = 0; at < bytes_; at += kPiece)
      if (::pread(fd, memory_.data() + at, static_cast<std::size_t>(std::min(kPiece, bytes_ - at)), at) <= 0)
        fail(path_);
    ::close(fd);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int64_t bytes_;
  std::vector<char> memory_;
};

// Drops the file from the page cache, so that the next read comes from the disk.
void forget(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  if (fd < 0) return;
  ::fdatasync(fd);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
}

struct Scene {
  int64_t bytes;
  double gigabytes(double ms) const { return static_cast<double>(bytes) * 1e-6 / ms; }
};

// The session has not trained, as in a resumed run: loading into a model in training first checks its weights.
std::vector<Row> saves_and_loads(const std::string& toml, const std::string& folder) {
  Job job(toml, "checkpoint", {"strategy=zero2"});
  zr::host::comm::CommRuntime& comm = job.session.comm();
  const Scene scene{job.model.count() * 12};
  Plain plain(folder + "/plain-" + std::to_string(comm.rank()), scene.bytes / 2);
  std::vector<double> saves, writes, loads, reads, cold_loads, cold_reads;
  for (int round = -1; round < 10; ++round) {
    fs::remove(plain.path());
    if (comm.rank() == 0) fs::remove_all(folder + "/c");
    comm.barrier("removed");
    double write = 0, save = 0;
    std::string saved;
    for (const bool ours : {round % 2 == 0, round % 2 != 0}) {  // alternate: the speed of a disk changes
      if (ours)
        save = job.timed([&] { saved = job.session.checkpointer().save(folder + "/c", 0, false); });
      else
        write = job.timed([&] { plain.write(); });
    }
    const double load = job.timed([&] { job.session.checkpointer().load(saved, {}); });
    const double read = job.timed([&] { plain.read(); });
    job.timed([&] {
      forget(plain.path());
      if (comm.rank() == 0)
        for (const auto& file : fs::directory_iterator(saved)) forget(file.path());
    });
    const double cold_load = job.timed([&] { job.session.checkpointer().load(saved, {}); });
    const double cold_read = job.timed([&] { plain.read(); });
    if (round < 0) continue;
    writes.push_back(scene.gigabytes(write));
    saves.push_back(scene.gigabytes(save));
    reads.push_back(scene.gigabytes(read));
    loads.push_back(scene.gigabytes(load));
    cold_reads.push_back(scene.gigabytes(cold_read));
    cold_loads.push_back(scene.gigabytes(cold_load));
  }
  if (comm.rank() == 0) fs::remove_all(folder + "/c");
  return {zr::bench::compare("checkpoint_save", "GB/s", saves, "plain writes", writes, 0.8, false),
          zr::bench::compare("checkpoint_load", "GB/s", cold_loads, "plain reads", cold_reads, 0.8, false),
          zr::bench::compare("checkpoint_load_cached", "GB/s", loads, "plain reads, cached", reads, 0, false)};
}

// How long a blocking save and an asynchronous save each stop training.
Row stall(const std::string& toml, const std::string& folder) {
  Job job(toml, "checkpoint_async", {"strategy=zero2", "checkpoint.dir=" + folder + "/c", "checkpoint.async=true"});
  const auto step = [&] {
    job.session.begin_backward(1.0, 1.0);
    job.model.backward();
    job.session.end_backward();
    job.session.step();
  };
  std::vector<double> stalls, saves;
  for (int round = -1; round < 5; ++round) {
    step();
    job.session.finish();  // wait for the previous asynchronous save
    const double save = job.timed([&] { job.session.checkpointer().save(folder + "/c", 1, false); });
    step();
    const double stalled = job.timed([&] { job.session.checkpointer().save(folder + "/c", 1, true); });
    if (round < 0) continue;
    stalls.push_back(stalled);
    saves.push_back(save);
  }
  return zr::bench::compare("checkpoint_async_stall", "ms", stalls, "a blocking save", saves, 2.5);
}

__attribute__((target_clones("avx512f", "avx2", "default"))) uint64_t sum(const uint64_t* words, std::size_t n) {
  return std::accumulate(words, words + n, uint64_t{0});
}

Row hashes() {
  std::vector<uint64_t> words(std::size_t{64} << 20 >> 3, 3);
  std::vector<double> hashed, read;
  uint64_t all = 0;
  const auto timed = [&](const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    all += work();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return static_cast<double>(words.size()) * 8e-9 / seconds;
  };
  for (int round = -1; round < 9; ++round) {
    const double a =
        timed([&] { return zr::host::checkpoint::hash_of(words.data(), static_cast<int64_t>(words.size()) * 8); });
    const double b = timed([&] { return sum(words.data(), words.size()); });
    if (round < 0) continue;
    hashed.push_back(a);
    read.push_back(b);
  }
  if (all == 0) std::puts("");
  return zr::bench::compare("hash", "GB/s", hashed, "reading memory, 1 thread", read, 0, false);
}

void measure(const std::string& toml, const std::string& rows) {
  const char* named = std::getenv("CHECKPOINT_BENCH");
  const std::string folder = std::string(named ? named : ZR_BUILD_DIR "/runs") + "/bench_checkpoints";
  fs::create_directories(folder);
  struct statvfs disk {};
  if (::statvfs(folder.c_str(), &disk) != 0 || disk.f_bavail * disk.f_frsize < (uint64_t{6} << 30))
    fail(folder + ": needs 6 GiB of free space");
  std::vector<Row> table = saves_and_loads(toml, folder);
  table.push_back(stall(toml, folder));
  if (std::string(std::getenv("ZR_RANK") ? std::getenv("ZR_RANK") : "0") != "0") return;
  fs::remove_all(folder);
  table.push_back(hashes());
  for (const Row& row : table) zr::bench::print(row);
  zr::bench::append(rows, table);
}

}  // namespace

int main(int argc, char** argv) { return zr::bench::on_two_ranks(argc, argv, measure); }
