// Zero2, of which rank KILLED_RANK (an environment variable; 1 if it is not set) kills its process in the fourth step
// when the new weights are to be gathered, if the environment variable KILLED_IN is "gather".
#include <csignal>
#include <cstdlib>
#include <string_view>

#include "zr/flat_shards.hpp"

namespace {

class Killed : public zr::FlatStrategy<Killed, zr::GradientMemory::double_buffered> {
 public:
  static constexpr zr_key keys[] = {zr::key_bytes("bucket_bytes", "\"64KiB\"", 65536, 1e15, "as of zero2")};
  explicit Killed(const zr::Config& config) : FlatStrategy(config.integer("bucket_bytes")) {}
  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    rank_ = in.rank;
    FlatStrategy::bind(in, bound);
  }
  void event(uint32_t kind, const zr_use& use) {
    steps_ += kind == ZR_STEP_BEGIN;
    FlatStrategy::event(kind, use);
  }
  void updated(const zr_use& use) {
    const char* const phase = std::getenv("KILLED_IN");
    const char* const rank = std::getenv("KILLED_RANK");
    const bool is_killed = rank_ == (rank ? std::atoi(rank) : 1);
    if (phase && std::string_view(phase) == "gather" && is_killed && steps_ == 4) ::raise(SIGKILL);
    FlatStrategy::updated(use);
  }

 private:
  int32_t rank_ = 0;
  int steps_ = 0;  // begun
};

}  // namespace

ZR_STRATEGY(Killed, "killed", "tests", "1.0.0");
