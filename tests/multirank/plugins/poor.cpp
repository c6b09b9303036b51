// The least capable communicator that the host supports, written with sdk/ only; the host composes what it lacks.
#include "poor.hpp"

#include <memory>

namespace {

class PoorPlugin : public zr::Communicator<PoorPlugin, poor::Poor> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bool("gathers", "true", "offer all_gather, which the host needs to compose the other collectives"),
      zr::key_bool("exchanges", "false", "also offer all_to_all and fp32")};
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
