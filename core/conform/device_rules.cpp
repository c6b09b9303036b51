// ZR-O24, ZR-S22, ZR-C24: plug-ins that accept streams. Optimizers and communicators call the library of their device,
// so that their work on a stream is not checked; strategies only issue collectives, on a device that the checks
// simulate.
#include <string>

#include "conform/communicator_run.hpp"
#include "conform/optimizer_rules.hpp"
#include "conform/rule.hpp"
#include "conform/simulated_device.hpp"

#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/device.h"

namespace zr::host::conform {

namespace {

void remark_unchecked(Case& test, const std::string& calls, uint64_t device_types) {
  test.remark(concat("not checked here: ", calls, ", which need ", text_of_device_types(device_types)));
}

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
  const zr_component& component = run.instance().component();
  const void* table = nullptr;
  if (component.extension) call_void("extension()", [&] { table = component.extension("zr.optimizer.device/1"); });
  require(table, "it has no zr.optimizer.device/1, without which the host calls step() without a stream");
  const auto& api = *static_cast<const zr_optimizer_device_api*>(table);
  require(api.size >= sizeof api && api.norm_blocks, "zr.optimizer.device/1 has ", api.size,
          " bytes, or norm_blocks is NULL");
  remark_unchecked(test, "step() with a stream, and norm_blocks()", device_types);
}

void communicator_streams_are_declared(Case& test) {
  TestHost host;
  Instance instance(test, host);
  const zr_comm_caps caps = caps_of(instance);
  if (!(caps.flags & ZR_COMM_STREAMS)) skip("caps() does not report ZR_COMM_STREAMS: it moves host memory");
  require(simulated_type(caps.device_types) >= 0, "caps() reports ZR_COMM_STREAMS, but device_types is ",
          caps.device_types, ", with CPU memory only");
  remark_unchecked(test, "mem_alloc() on a device, and submit() with a stream", caps.device_types);
}

constexpr Rule kOptimizerRules[] = {
    {"ZR-O24", "optimizer", "With ZR_OPT_STREAMS, device_types names a device, and zr.optimizer.device/1 is there.",
     optimizer_streams_are_declared},
};
constexpr Rule kCommunicatorRules[] = {
    {"ZR-C24", "communicator", "With ZR_COMM_STREAMS, device_types names a device in addition to CPU memory.",
     communicator_streams_are_declared},
};

}  // namespace

std::span<const Rule> optimizer_device_rules() { return kOptimizerRules; }
std::span<const Rule> communicator_device_rules() { return kCommunicatorRules; }

}  // namespace zr::host::conform
