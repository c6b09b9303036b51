// The tier on disk beside fio: the same file, block, depth and O_DIRECT, io_uring with registered files and memory in
// both, by turns in pieces of the file. `bench_nvme ROWS.json`; NVME_BENCH names the folder, else build/runs.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <set>

#include "base/page_memory.hpp"
#include "bench/row.hpp"
#include "contract/shell.hpp"
#include "unit/plugins/offload_rig.hpp"

namespace {

namespace fs = std::filesystem;
using zr::bench::Row;
using zr::test::Answer;
using zr::test::Tier;
constexpr std::size_t kFile = std::size_t{2} << 30, kPiece = kFile / 4, kBlock = 1 << 20, kBatch = 16 * kBlock;
constexpr int kDepth = 8, kRounds = 6;
constexpr std::size_t kPattern = 512;  // as long as fio takes one

struct Measured {
  double gigabytes_a_second, cpu_seconds_a_gigabyte;
};

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

// fio needs a while to start, in which the disk rests: so it rests before ours.
Measured timed(const std::function<void()>& work) {
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  work();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {kPiece * 1e-9 / seconds, (cpu_seconds() - cpu) / (kPiece * 1e-9)};
}

// What is in every block of the file, whoever wrote it.
std::string pattern() {
  std::mt19937 random(1);
  std::string bytes(kPattern, ' ');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// fio's own figures of one piece, in large pages too, without which the disk gives it half; its processor time is told
// in per cent of the run.
Measured fio(const std::string& file, const std::string& how, std::size_t from) {
  std::string hex = "0x";
  for (const char byte : pattern()) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    hex += digits;
  }
  const auto done = zr::testing::shell(
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=" + how + " --filename=" + file + " --rw=" + how +
      " --offset=" + std::to_string(from) + " --size=" + std::to_string(kPiece) + " --bs=" + std::to_string(kBlock) +
      " --iodepth=" + std::to_string(kDepth) +
      " --ioengine=io_uring --registerfiles=1 --fixedbufs=1 --direct=1 --overwrite=1 --allow_file_create=0"
      " --fallocate=none --iomem_align=2M --output-format=json --buffer_pattern=" +
      hex);
  const auto json =
      nlohmann::json::parse(done.output.substr(std::min(done.output.find('{'), done.output.size())), nullptr, false);
  if (done.code != 0 || json.is_discarded()) fail("fio (apt-get install fio): " + done.output);
  const auto& job = json.at("jobs").at(0);
  const double bytes = job.at("read").at("io_bytes").get<double>() + job.at("write").at("io_bytes").get<double>();
  if (bytes != kPiece) fail("fio moved " + std::to_string(bytes) + " bytes: " + done.output);
  const double seconds = job.at("job_runtime").get<double>() * 1e-3;
  const double cpu = (job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>()) / 100 * seconds;
  return {bytes * 1e-9 / seconds, cpu / (bytes * 1e-9)};
}

// A slot of the tier and the memory in which the host would have windows of it.
class Ours {
 public:
  Ours(const std::string& folder, bool checksum, bool large_pages = true)
      : before_(files_of(folder)),
        tier_("nvme", {"path=\"" + folder + "\"", "engine=uring", "depth=" + std::to_string(kDepth),
                       std::string("checksum=") + (checksum ? "true" : "false")}),
        memory_(zr::host::page_memory(2 * kBatch)),
        slot_(tier_.reserve(kFile)) {
    if (!large_pages) ::madvise(memory_.get(), 2 * kBatch, MADV_NOHUGEPAGE);
    const std::string bytes = pattern();
    for (std::size_t at = 0; at < 2 * kBatch; at += kPattern) std::memcpy(memory_.get() + at, bytes.data(), kPattern);
    const zr_view view = part(0, 0, 2 * kBatch).memory;
    zr::host::CallError error;
    if (tier_.api().reg(tier_.self(), &view, &error) != ZR_OK) std::printf("%s\n", error.msg);
    for (const std::string& file : files_of(folder))
      if (!before_.count(file)) file_ = file;
    if (file_.empty()) fail("the tier has no file in " + folder);
    for (std::size_t from = 0; from < kFile; from += kPiece) all(true, from);  // laid out, its sums known
  }
  // By which another process opens the tier's file, which has no name.
  const std::string& file() const { return file_; }
  // Two callers that wait: while one's transfers end, the other's are under way.
  Measured all(bool writes, std::size_t from) {
    return timed([&] {
      std::vector<std::thread> callers;
      for (std::size_t t = 0; t < 2; ++t)
        callers.emplace_back([&, t] {
          for (std::size_t at = t * kBatch; at < kPiece; at += 2 * kBatch) {
            const std::vector<zr_transfer> one{part(from + at, t * kBatch, kBatch)};
            good(writes ? tier_.write(one) : tier_.read(one));
          }
        });
      for (std::thread& one : callers) one.join();
    });
  }
  // Read, then written.
  Measured both(std::size_t from) {
    const Measured r = all(false, from), w = all(true, from);
    return {2 / (1 / r.gigabytes_a_second + 1 / w.gigabytes_a_second),
            (r.cpu_seconds_a_gigabyte + w.cpu_seconds_a_gigabyte) / 2};
  }
  // Reads and writes by turns, each of one block.
  Measured mixed(std::size_t from) {
    return timed([&] {
      std::vector<zr_done*> window(2 * kDepth, nullptr);
      for (std::size_t i = 0; i < kPiece / kBlock; ++i) {
        zr_done*& place = window[i % window.size()];
        if (place) good(tier_.wait(place));
        const std::vector<zr_transfer> one{part(from + i * kBlock, i % window.size() * kBlock, kBlock)};
        place = i % 2 ? tier_.begin_write(one) : tier_.begin_read(one);
      }
      for (zr_done* one : window) good(tier_.wait(one));
    });
  }

 private:
  zr_transfer part(std::size_t at, std::size_t in_memory, std::size_t bytes) const {
    return {slot_, at, {memory_.get() + in_memory, static_cast<int64_t>(bytes), ZR_U8, 0, {1, 0}}};
  }
  static std::set<std::string> files_of(const std::string& folder) {
    std::set<std::string> files;
    for (const auto& one : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string file = fs::read_symlink(one.path(), gone).string();
      if (file.rfind(folder, 0) == 0)
        files.insert("/proc/" + std::to_string(::getpid()) + "/fd/" + one.path().filename().string());
    }
    return files;
  }
  std::set<std::string> before_;
  Tier tier_;
  zr::host::PageMemory memory_;
  uint64_t slot_;
  std::string file_;
};

struct Series {
  std::vector<double> ours, theirs;
  void add(double one, double other) {
    ours.push_back(one);
    theirs.push_back(other);
  }
};

std::vector<Row> measure(const std::string& folder) {
  Ours checked(folder, true), plain(folder, false), small(folder, true, false);
  Series read, write, mixed, cpu, checksum, pages;
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t from = 0; from < kFile; from += kPiece) {
      const bool first = (static_cast<std::size_t>(round) + from / kPiece) % 2 != 0;  // each as often
      // Two side by side: the disk is not the same to the second.
      const auto pair = [&](const std::function<Measured()>& one, const std::function<Measured()>& other) {
        std::pair<Measured, Measured> both;
        if (first) both.first = one();
        both.second = other();
        if (!first) both.first = one();
        return both;
      };
      const auto [r, fio_r] =
          pair([&] { return checked.all(false, from); }, [&] { return fio(checked.file(), "read", from); });
      const auto [w, fio_w] =
          pair([&] { return checked.all(true, from); }, [&] { return fio(checked.file(), "write", from); });
      const auto [m, fio_m] =
          pair([&] { return checked.mixed(from); }, [&] { return fio(checked.file(), "rw", from); });
      const auto [summed, bare] = pair([&] { return checked.both(from); }, [&] { return plain.both(from); });
      const auto [large, little] = pair([&] { return checked.both(from); }, [&] { return small.both(from); });
      read.add(r.gigabytes_a_second, fio_r.gigabytes_a_second);
      write.add(w.gigabytes_a_second, fio_w.gigabytes_a_second);
      mixed.add(m.gigabytes_a_second, fio_m.gigabytes_a_second);
      cpu.add(bare.cpu_seconds_a_gigabyte, (fio_r.cpu_seconds_a_gigabyte + fio_w.cpu_seconds_a_gigabyte) / 2);
      checksum.add(summed.gigabytes_a_second, bare.gigabytes_a_second);
      pages.add(large.gigabytes_a_second, little.gigabytes_a_second);
    }
  }
  using zr::bench::compare;
  return {compare("nvme_read", "GB/s", read.ours, "fio", read.theirs, 0.9, false),
          compare("nvme_write", "GB/s", write.ours, "fio", write.theirs, 0.9, false),
          compare("nvme_mixed", "GB/s", mixed.ours, "fio", mixed.theirs, 0.9, false),
          compare("nvme_cpu", "s/GB", cpu.ours, "fio", cpu.theirs, 1 / 1.5),
          compare("nvme_checksum", "GB/s", checksum.ours, "without checksums", checksum.theirs, 0, false),
          compare("nvme_large_pages", "GB/s", pages.ours, "in small pages", pages.theirs, 0, false)};
}

}  // namespace

int main(int argc, char** argv) {
  const char* named = std::getenv("NVME_BENCH");
  const std::string folder = std::string(named ? named : ZR_BUILD_DIR "/runs") + "/bench_nvme";
  fs::create_directories(folder);
  struct statvfs disk {};
  if (::statvfs(folder.c_str(), &disk) != 0 || disk.f_bavail * disk.f_frsize < 4 * kFile)
    fail(folder + ": 8 GiB are needed there; name another folder with NVME_BENCH");
  const std::vector<Row> rows = measure(folder);
  fs::remove_all(folder);
  for (const Row& row : rows) zr::bench::print(row);
  if (argc > 1) zr::bench::append(argv[1], rows);
}
