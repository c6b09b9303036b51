// The tier on disk beside fio: the same block, depth, file size and O_DIRECT, io_uring with registered files and memory
// in both, in turns. `bench_nvme ROWS.json`; NVME_BENCH names the folder, else build/runs.
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "bench/row.hpp"
#include "contract/shell.hpp"
#include "unit/plugins/offload_rig.hpp"

namespace {

namespace fs = std::filesystem;
using zr::bench::Row;
using zr::test::Answer;
using zr::test::Pages;
using zr::test::part_of;
using zr::test::Tier;
constexpr std::size_t kFile = std::size_t{2} << 30, kBlock = 1 << 20, kBatch = 16 * kBlock;
constexpr int kDepth = 8, kRounds = 8;

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

Measured timed(const std::function<void()>& work) {
  const double cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  work();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {kFile * 1e-9 / seconds, (cpu_seconds() - cpu) / (kFile * 1e-9)};
}

// fio's own figures; its processor time is told in per cent of the run.
Measured fio(const std::string& folder, const std::string& how) {
  const auto done = zr::testing::shell(
      "fio --name=" + how + " --filename=" + folder + "/fio --rw=" + how + " --size=" + std::to_string(kFile) +
      " --bs=" + std::to_string(kBlock) + " --iodepth=" + std::to_string(kDepth) +
      " --ioengine=io_uring --registerfiles=1 --fixedbufs=1 --direct=1 --output-format=json");
  const auto json =
      nlohmann::json::parse(done.output.substr(std::min(done.output.find('{'), done.output.size())), nullptr, false);
  if (done.code != 0 || json.is_discarded()) fail("fio (apt-get install fio): " + done.output);
  const auto& job = json.at("jobs").at(0);
  const double bytes = job.at("read").at("io_bytes").get<double>() + job.at("write").at("io_bytes").get<double>();
  const double seconds = job.at("job_runtime").get<double>() * 1e-3;
  const double cpu = (job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>()) / 100 * seconds;
  return {bytes * 1e-9 / seconds, cpu / (bytes * 1e-9)};
}

// Slots of the tier and the memory in which the host would have windows of them.
class Ours {
 public:
  Ours(const std::string& folder, bool checksum)
      : tier_("nvme", {"path=\"" + folder + "\"", "engine=uring", "depth=" + std::to_string(kDepth),
                       std::string("checksum=") + (checksum ? "true" : "false")}),
        memory_(2 * kBatch),
        slot_(tier_.reserve(kFile)) {
    memory_.fill(1);
    const zr_view view = zr::test::whole(slot_, memory_).memory;
    zr::host::CallError error;
    if (tier_.api().reg(tier_.self(), &view, &error) != ZR_OK) std::printf("%s\n", error.msg);
  }
  // Two callers that wait: while one's transfers end, the other's are under way.
  Measured all(bool writes) {
    return timed([&] {
      std::vector<std::thread> callers;
      for (std::size_t t = 0; t < 2; ++t)
        callers.emplace_back([&, t] {
          for (std::size_t at = t * kBatch; at < kFile; at += 2 * kBatch) {
            const std::vector<zr_transfer> one{part_of(slot_, at, memory_, t * kBatch, kBatch)};
            good(writes ? tier_.write(one) : tier_.read(one));
          }
        });
      for (std::thread& one : callers) one.join();
    });
  }
  // Reads and writes by turns, each of one block.
  Measured mixed() {
    return timed([&] {
      std::vector<zr_done*> window(2 * kDepth, nullptr);
      for (std::size_t i = 0; i < kFile / kBlock; ++i) {
        zr_done*& place = window[i % window.size()];
        if (place) good(tier_.wait(place));
        const std::vector<zr_transfer> one{part_of(slot_, i * kBlock, memory_, i % window.size() * kBlock, kBlock)};
        place = i % 2 ? tier_.begin_write(one) : tier_.begin_read(one);
      }
      for (zr_done* one : window) good(tier_.wait(one));
    });
  }

 private:
  Tier tier_;
  Pages memory_;
  uint64_t slot_;
};

struct Series {
  std::vector<double> ours, theirs;
};

std::vector<Row> measure(const std::string& folder) {
  Ours checked(folder, true), plain(folder, false);
  Series read, write, mixed, cpu, checksum;
  for (int round = -1; round < kRounds; ++round) {
    Measured r{}, w{}, m{}, fio_r{}, fio_w{}, fio_m{}, plain_r{}, plain_w{}, again_r{}, again_w{};
    // Two side by side: the disk is not the same to the second; and each as often first, for what caches below it hold.
    using Pair = std::pair<std::function<void()>, std::function<void()>>;
    for (const auto& [one, other] :
         {Pair{[&] { w = checked.all(true); }, [&] { fio_w = fio(folder, "write"); }},
          Pair{[&] { r = checked.all(false); }, [&] { fio_r = fio(folder, "read"); }},
          Pair{[&] { m = checked.mixed(); }, [&] { fio_m = fio(folder, "rw"); }},
          Pair{[&] { again_w = checked.all(true); }, [&] { plain_w = plain.all(true); }},
          Pair{[&] { again_r = checked.all(false); }, [&] { plain_r = plain.all(false); }}}) {
      round % 2 ? one() : other();
      round % 2 ? other() : one();
    }
    if (round < 0) continue;  // files are laid out
    const auto add = [](Series& to, double ours, double theirs) {
      to.ours.push_back(ours);
      to.theirs.push_back(theirs);
    };
    add(read, r.gigabytes_a_second, fio_r.gigabytes_a_second);
    add(write, w.gigabytes_a_second, fio_w.gigabytes_a_second);
    add(mixed, m.gigabytes_a_second, fio_m.gigabytes_a_second);
    add(cpu, (plain_r.cpu_seconds_a_gigabyte + plain_w.cpu_seconds_a_gigabyte) / 2,
        (fio_r.cpu_seconds_a_gigabyte + fio_w.cpu_seconds_a_gigabyte) / 2);
    add(checksum, 2 / (1 / again_r.gigabytes_a_second + 1 / again_w.gigabytes_a_second),
        2 / (1 / plain_r.gigabytes_a_second + 1 / plain_w.gigabytes_a_second));
  }
  using zr::bench::compare;
  return {compare("nvme_read", "GB/s", read.ours, "fio", read.theirs, 0.9, false),
          compare("nvme_write", "GB/s", write.ours, "fio", write.theirs, 0.9, false),
          compare("nvme_mixed", "GB/s", mixed.ours, "fio", mixed.theirs, 0.9, false),
          compare("nvme_cpu", "s/GB", cpu.ours, "fio", cpu.theirs, 1 / 1.5),
          compare("nvme_checksum", "GB/s", checksum.ours, "without checksums", checksum.theirs, 0, false)};
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
