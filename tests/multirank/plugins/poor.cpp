// The least capable communicator that the host supports, written with sdk/ only; the host composes what it lacks.
#include "poor.hpp"

#include <memory>

namespace {

class PoorPlugin : public zr::Communicator<PoorPlugin, poor::Poor> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bool("gathers", "true", "offer all_gather, which the host needs to compose the other collectives"),
      zr::key_bool("exchanges", "false", "also offer all_to_all and fp32"),
      zr::key_bool("cpu", "true", "accept host memory, where the host has its buffers")};
  PoorPlugin(const zr::Config& config, const zr::Host& host)
      : host_(host),
        gathers_(config.boolean("gathers")),
        exchanges_(config.boolean("exchanges")),
        cpu_(config.boolean("cpu")) {}
  zr_comm_caps caps() const {
    zr_comm_caps caps{};
    caps.ops = (gathers_ ? 1u << ZR_ALL_GATHER : 0u) | 1u << ZR_BARRIER | (exchanges_ ? 1u << ZR_ALL_TO_ALL : 0u);
    caps.dtypes = exchanges_ ? 1u << ZR_U8 | 1u << ZR_F32 : 1u << ZR_U8;
    caps.device_types = cpu_ ? zr::kCpuOnly : uint64_t{1} << ZR_DEVICE_CUDA;
    return caps;
  }
  std::unique_ptr<poor::Poor> open(const zr_comm_open& how) { return std::make_unique<poor::Poor>(host_, how); }

 private:
  zr::Host host_;
  bool gathers_, exchanges_, cpu_;
};

}  // namespace

ZR_COMMUNICATOR(PoorPlugin, "poor", "tests", "1.0.0");
