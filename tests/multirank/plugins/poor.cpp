// The poorest communicator a host must make do with, written from sdk/ alone; what it lacks the host must compose.
#include "poor.hpp"

#include <memory>

namespace {

class PoorPlugin : public zr::Communicator<PoorPlugin, poor::Poor> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bool("gathers", "true", "offer the all_gather without which the host can compose nothing"),
      zr::key_bool("exchanges", "false", "offer all_to_all, and fp32, too")};
  PoorPlugin(const zr::Config& config, const zr::Host& host)
      : host_(host), gathers_(config.boolean("gathers")), exchanges_(config.boolean("exchanges")) {}
  std::unique_ptr<poor::Poor> open(const zr_comm_open& how) {
    return std::make_unique<poor::Poor>(host_, how, gathers_, exchanges_);
  }

 private:
  zr::Host host_;
  bool gathers_, exchanges_;
};

}  // namespace

ZR_COMMUNICATOR(PoorPlugin, "poor", "tests", "1.0.0");
