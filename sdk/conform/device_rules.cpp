// ZR-O24: optimizers that accept streams. They call the library of their device, so that their work on a stream is not
// checked here.

#include "conform/optimizer_rules.hpp"
#include "conform/rule.hpp"
#include "conform/simulated_device.hpp"

#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/device.h"

namespace zr::conform {

namespace {

void optimizer_streams_are_declared(Case& test) {
  TestHost host;
  const OptimizerRun run(test, host);
  uint64_t device_types = 0;
  for (const Shape& shape : run.supported(kShapes)) {
    const zr_optimizer_desc desc = run.describe(shape).desc;
    if (!(desc.flags & ZR_OPT_STREAMS)) continue;
    require(simulated_type(desc.device_types) >= 0, "describe() of a parameter of shape ", text_of(shape),
            " reports ZR_OPT_STREAMS, but device_types is ", desc.device_types, ", with CPU memory only");
    device_types |= desc.device_types;
  }
  if (device_types == 0) skip("describe() does not report ZR_OPT_STREAMS for any parameter: it updates host memory");
  const auto* api = extension_of<zr_optimizer_device_api>(run.instance(), "zr.optimizer.device/1");
  require(api, "it has no zr.optimizer.device/1, without which the host calls step() without a stream");
  require(api->size >= sizeof *api && api->norm_blocks, "zr.optimizer.device/1 has ", api->size,
          " bytes, or norm_blocks is NULL");
  test.remark(concat("not checked here: step() with a stream, and norm_blocks(), which need ",
                     text_of_device_types(device_types)));
}

constexpr Rule kRules[] = {
    {"ZR-O24", "optimizer", "With ZR_OPT_STREAMS, device_types names a device, and zr.optimizer.device/1 is there.",
     optimizer_streams_are_declared},
};
}  // namespace

std::span<const Rule> optimizer_device_rules() { return kRules; }

}  // namespace zr::conform
