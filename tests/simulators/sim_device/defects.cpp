// Planted defects: what the engine would do if it did not wait, or used the wrong stream or memory. By value of
// ZR_SIM_BACKEND_DEFECT, with the tests in tests/multirank/model that find it (D: DeviceDefectsTest, B:
// BothStreamsTest, W: DeviceWaitsTest):
//   block          no stream waits for an event of another stream (D)
//   block=N        the Nth of these waits in the process is missing, counted from 1; its stream then runs each task at
//                  once (W, through zr_sim_drop_wait())
//   block_engine   the default stream, which the engine of a program with another stream uses, does not wait for events
//                  of other streams and runs each task at once (B)
//   block_program  the other streams do not wait, and run each task at once (B)
//   early          the host does not wait for events (D)
//   early=N        the Nth wait of the host for an event is missing (W, through zr_sim_drop_host_wait())
//   stream         copies between host and device run on another stream than the current one (D)
//   host           the host reads memory of the device before each of these copies (D)
//   reuse          the allocator reuses memory that another stream still uses (D)
//   driver         the device cannot be initialized (DeviceStartTest)
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

std::string_view planted() {
  static const char* const defect = std::getenv("ZR_SIM_BACKEND_DEFECT");
  return defect == nullptr ? "" : defect;
}

// Waits of one kind in this process, of which one may be missing.
struct Waits {
  const std::string_view defect;  // without all of them; with "=N", without the Nth
  std::atomic<int64_t> seen = 0, missing;
  explicit Waits(std::string_view name) : defect(name), missing(0) {
    if (planted().starts_with(std::string(name) + "="))
      missing = std::stoll(std::string(planted().substr(name.size() + 1)));
  }
  bool drops_next() { return ++seen == missing; }
  uint64_t restart(uint64_t number) {
    missing = static_cast<int64_t>(number);
    return static_cast<uint64_t>(seen.exchange(0));
  }
};
Waits& of_streams() {
  static auto* const it = new Waits("block");
  return *it;
}
Waits& of_the_host() {
  static auto* const it = new Waits("early");
  return *it;
}
std::atomic<StreamQueue*> early_queue = nullptr;

}  // namespace

bool has_defect(const char* name) { return planted() == name; }

bool drops_wait(StreamQueue& queue) {
  if (has_defect("block")) return true;
  const bool of_default_stream = queue.handle().id() == 0;
  const bool of_one_side = has_defect(of_default_stream ? "block_engine" : "block_program");
  if (!of_one_side && !of_streams().drops_next()) return false;
  queue.set_early(true);
  early_queue = &queue;
  return true;
}

bool drops_host_wait() { return has_defect("early") || of_the_host().drops_next(); }

}  // namespace zr::test::sim

extern "C" {
// Waits are counted from 1 again, and the one with this number is missing; 0: none. Returns how many there were since
// the last call. Of streams for events of other streams; of the host for events.
uint64_t zr_sim_drop_wait(uint64_t number) {
  if (auto* const queue = zr::test::sim::early_queue.exchange(nullptr)) queue->set_early(false);
  return zr::test::sim::of_streams().restart(number);
}
uint64_t zr_sim_drop_host_wait(uint64_t number) { return zr::test::sim::of_the_host().restart(number); }
}
