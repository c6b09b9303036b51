// Compares the disk tier with fio: the same file, block size, depth and O_DIRECT, and io_uring with registered files
// and memory in both, alternating over pieces of the file. `bench_nvme ROWS.json`; NVME_BENCH names the folder
// (default: build/runs).
#include <gnu/libc-version.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <set>

#include "base/huge_page_memory.hpp"
#include "bench/row.hpp"
#include "support/offload_rig.hpp"
#include "support/shell.hpp"

namespace {

namespace fs = std::filesystem;
using zr::bench::Row;
using zr::test::Answer;
using zr::test::Tier;
constexpr std::size_t kFile = std::size_t{2} << 30, kPiece = kFile / 4, kBlock = 1 << 20, kBatch = 16 * kBlock;
constexpr int kDepth = 8, kRounds = 4;
constexpr std::size_t kPattern = 512;  // bytes that fio repeats

struct Measured {
  double gigabytes, seconds, cpu_seconds;
  double rate() const { return gigabytes / seconds; }
  double cpu() const { return cpu_seconds / gigabytes; }
};
Measured operator+(const Measured& a, const Measured& b) {
  return {a.gigabytes + b.gigabytes, a.seconds + b.seconds, a.cpu_seconds + b.cpu_seconds};
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "bench_nvme: error: %s\n", what.c_str());
  std::exit(3);
}
void good(const Answer& answer) {
  if (answer.code != ZR_OK) fail(answer.text);
}

double cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Called before each measurement of either side.
void let_the_disk_rest() { std::this_thread::sleep_for(std::chrono::milliseconds(500)); }

Measured timed(const std::function<void()>& work) {
  let_the_disk_rest();
  const double cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  work();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {kPiece * 1e-9, seconds, cpu_seconds() - cpu};
}

// The contents of every block of the file.
std::string pattern() {
  std::mt19937 random(1);
  std::string bytes(kPattern, ' ');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Runs fio on one piece, also with huge pages, and returns its results; fio reports CPU time in percent of the run.
Measured fio(const std::string& file, const std::string& how, std::size_t from) {
  std::string hex = "0x";
  for (const char byte : pattern()) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    hex += digits;
  }
  let_the_disk_rest();
  const auto done = zr::testing::shell(
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=" + how + " --filename=" + file + " --rw=" + how +
      " --offset=" + std::to_string(from) + " --size=" + std::to_string(kPiece) + " --bs=" + std::to_string(kBlock) +
      " --iodepth=" + std::to_string(kDepth) +
      " --ioengine=io_uring --registerfiles=1 --fixedbufs=1 --direct=1 --overwrite=1 --allow_file_create=0"
      " --fallocate=none --iomem_align=2M --output-format=json --buffer_pattern=" +
      hex + " --refill_buffers=0");
  const auto json =
      nlohmann::json::parse(done.output.substr(std::min(done.output.find('{'), done.output.size())), nullptr, false);
  if (done.code != 0 || json.is_discarded()) fail("fio (apt-get install fio): " + done.output);
  const auto& job = json.at("jobs").at(0);
  const double bytes = job.at("read").at("io_bytes").get<double>() + job.at("write").at("io_bytes").get<double>();
  if (bytes != kPiece) fail("fio moved " + std::to_string(bytes) + " bytes: " + done.output);
  const double seconds = job.at("job_runtime").get<double>() * 1e-3;
  return {bytes * 1e-9, seconds, (job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>()) / 100 * seconds};
}

// An allocation on the tier, and host memory for transfers to and from it.
class Ours {
 public:
  Ours(const std::string& folder, bool checksum)
      : before_(files_of(folder)),
        tier_("nvme", {"path=\"" + folder + "\"", "engine=uring", "depth=" + std::to_string(kDepth),
                       std::string("checksum=") + (checksum ? "true" : "false")}),
        memory_(zr::host::allocate_huge_pages(2 * kBatch)),
        small_(zr::host::allocate_huge_pages(2 * kBatch)),
        slot_(tier_.reserve(kFile)) {
    if (!memory_ || !small_) fail("cannot allocate memory");
    ::madvise(small_.get(), 2 * kBatch, MADV_NOHUGEPAGE);
    const std::string bytes = pattern();
    for (char* memory : {memory_.get(), small_.get()}) {
      for (std::size_t at = 0; at < 2 * kBatch; at += kPattern) std::memcpy(memory + at, bytes.data(), kPattern);
      const zr_view view = part(memory, 0, 2 * kBatch).memory;
      zr::host::CallError error;
      if (tier_.api().reg(tier_.self(), &view, &error) != ZR_OK) fail(error.msg);
    }
    for (const std::string& file : files_of(folder))
      if (!before_.count(file)) file_ = file;
    if (file_.empty()) fail("the tier has no file in " + folder);
    for (std::size_t from = 0; from < kFile; from += kPiece) all(true, from);  // writes all blocks and checksums
  }
  // A path by which another process can open the tier's unnamed file.
  const std::string& file() const { return file_; }
  // Two callers wait in turn: while one's transfers complete, the other's are in flight.
  Measured all(bool writes, std::size_t from, bool large_pages = true) {
    char* memory = large_pages ? memory_.get() : small_.get();
    return timed([&] {
      std::vector<std::thread> callers;
      for (std::size_t t = 0; t < 2; ++t)
        callers.emplace_back([&, t] {
          for (std::size_t at = t * kBatch; at < kPiece; at += 2 * kBatch) {
            const std::vector<zr_transfer> one{part(memory + t * kBatch, from + at, kBatch)};
            good(writes ? tier_.write(one) : tier_.read(one));
          }
        });
      for (std::thread& one : callers) one.join();
    });
  }
  // Reads, then writes.
  Measured both(std::size_t from, bool large_pages = true) {
    const Measured reading = all(false, from, large_pages);
    return reading + all(true, from, large_pages);
  }
  // Alternates reads and writes of one block each, both from the start of the piece, as fio does.
  Measured mixed(std::size_t from) {
    return timed([&] {
      std::vector<zr_done*> window(2 * kDepth, nullptr);
      for (std::size_t i = 0; i < kPiece / kBlock; ++i) {
        zr_done*& pending = window[i % window.size()];
        if (pending) good(tier_.wait(pending));
        char* memory = memory_.get() + i % window.size() * kBlock;
        const std::vector<zr_transfer> one{part(memory, from + i / 2 * kBlock, kBlock)};
        pending = i % 2 ? tier_.begin_write(one) : tier_.begin_read(one);
      }
      for (zr_done* one : window) good(tier_.wait(one));
    });
  }

 private:
  zr_transfer part(char* memory, std::size_t at, std::size_t bytes) const {
    return {slot_, at, {memory, static_cast<int64_t>(bytes), ZR_U8, 0, {1, 0}}};
  }
  // Open files of the allocation's size; a tier may have other files there.
  static std::set<std::string> files_of(const std::string& folder) {
    std::set<std::string> files;
    for (const auto& one : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (fs::read_symlink(one.path(), gone).string().rfind(folder + "/", 0) == 0 &&
          fs::file_size(one.path(), gone) == kFile)
        files.insert("/proc/" + std::to_string(::getpid()) + "/fd/" + one.path().filename().string());
    }
    return files;
  }
  std::set<std::string> before_;
  Tier tier_;
  zr::host::HugePageMemory memory_, small_;
  uint64_t slot_;
  std::string file_;
};

// Results in pairs of pieces: in one piece ours ran first, in the other the reference, because caches below the file
// system may help the second run.
class Series {
 public:
  void add(const Measured& ours, const Measured& theirs) {
    if (half_) {
      ours_.push_back(last_ours_ + ours);
      theirs_.push_back(last_theirs_ + theirs);
    }
    last_ours_ = ours;
    last_theirs_ = theirs;
    half_ = !half_;
  }
  Row rates(const std::string& name, const std::string& reference, double target) const {
    return zr::bench::compare(name, "GB/s", all(ours_, &Measured::rate), reference, all(theirs_, &Measured::rate),
                              target, false);
  }
  Row cpu(const std::string& name, const std::string& reference, double target) const {
    return zr::bench::compare(name, "s/GB", all(ours_, &Measured::cpu), reference, all(theirs_, &Measured::cpu),
                              target);
  }

 private:
  static std::vector<double> all(const std::vector<Measured>& measured, double (Measured::*figure)() const) {
    std::vector<double> figures;
    for (const Measured& one : measured) figures.push_back((one.*figure)());
    return figures;
  }
  bool half_ = false;
  Measured last_ours_{}, last_theirs_{};
  std::vector<Measured> ours_, theirs_;
};

std::vector<Row> measure(const std::string& folder) {
  Ours checked(folder, true), plain(folder, false);
  Series read, write, mixed, cpu, checksum, pages;
  for (int piece = 0; piece < kRounds * static_cast<int>(kFile / kPiece); ++piece) {
    const std::size_t from = static_cast<std::size_t>(piece) * kPiece % kFile;
    const auto pair = [&](const std::function<Measured()>& one, const std::function<Measured()>& other) {
      std::pair<Measured, Measured> both;
      if (piece % 2) both.first = one();
      both.second = other();
      if (piece % 2 == 0) both.first = one();
      return both;
    };
    const auto beside_fio = [&](const char* how, const std::function<Measured()>& ours) {
      return pair(ours, [&] { return fio(checked.file(), how, from); });
    };
    const auto [r, fio_r] = beside_fio("read", [&] { return checked.all(false, from); });
    const auto [w, fio_w] = beside_fio("write", [&] { return checked.all(true, from); });
    const auto [m, fio_m] = beside_fio("rw", [&] { return checked.mixed(from); });
    plain.both(from);  // warms the cache for both
    const auto [summed, bare] = pair([&] { return checked.both(from); }, [&] { return plain.both(from); });
    const auto [large, small] = pair([&] { return checked.both(from); }, [&] { return checked.both(from, false); });
    read.add(r, fio_r);
    write.add(w, fio_w);
    mixed.add(m, fio_m);
    cpu.add(bare, fio_r + fio_w);
    checksum.add(summed, bare);
    pages.add(large, small);
  }
  return {read.rates("nvme_read", "fio", 0.9),
          write.rates("nvme_write", "fio", 0.9),
          mixed.rates("nvme_mixed", "fio", 0.9),
          cpu.cpu("nvme_cpu", "fio", 1 / 1.5),
          checksum.rates("nvme_checksum", "without checksums", 0),
          pages.rates("nvme_large_pages", "small pages", 0)};
}

}  // namespace

int main(int argc, char** argv) {
  const char* named = std::getenv("NVME_BENCH");
  std::string folder = std::string(named ? named : ZR_BUILD_DIR "/runs") + "/bench_nvme";
  fs::create_directories(folder);
  folder = fs::canonical(folder).string();
  if (std::strtod(::gnu_get_libc_version(), nullptr) < 2.35)
    fail("needs glibc 2.35 or later, so that GLIBC_TUNABLES gives fio huge pages");
  struct statvfs disk {};
  if (::statvfs(folder.c_str(), &disk) != 0 || disk.f_bavail * disk.f_frsize < 4 * kFile)
    fail(folder + ": needs 8 GiB of free space; name another folder with NVME_BENCH");
  const std::vector<Row> rows = measure(folder);
  fs::remove_all(folder);
  for (const Row& row : rows) zr::bench::print(row);
  if (argc > 1) zr::bench::append(argv[1], rows);
}
