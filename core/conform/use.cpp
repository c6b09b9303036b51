#include "conform/use.hpp"

#include "conform/process.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/offload.h"
#include "zr/abi/optimizer.h"
#include "zr/abi/strategy.h"

namespace zr::host::conform {

void use_component(Case& test, Instance& instance, const Mode& mode) {
  if (test.role() == "optimizer") use_optimizer(instance, mode);
  if (test.role() == "strategy") use_strategy(instance, mode);
  if (test.role() == "communicator") use_communicator(instance, mode);
  if (test.role() == "offload") use_offload(instance, mode);
}

namespace {
template <class Out, class F>
void check_output(const char* name, F&& fn) {
  const Array memory(sizeof(Out), 8);
  const Out empty{};
  std::memcpy(memory.data(), &empty, sizeof empty);
  auto* out = memory.as<Out>();
  out->size = sizeof(Out);
  must(name, [&](zr_error* error) { return fn(out, error); });
  require(memory.surroundings_are_intact(), name, " writes beyond the `size` bytes of its output");
  require(out->size <= sizeof(Out), name, " sets size to ", out->size, ", but has only ", sizeof(Out), " bytes");
}
}  // namespace

void check_output_size(Instance& instance, const std::string& role) {
  void* const self = instance.self();
  if (role == "optimizer")
    check_output<zr_optimizer_desc>("describe()", [&](zr_optimizer_desc* out, zr_error* error) {
      const int64_t shape[] = {5, 1};  // some optimizers support matrices only
      const zr_param param{sizeof(zr_param), 0, "weight", shape, 2, 0, 5, 0, 0};
      return instance.api<zr_optimizer_api>().describe(self, &param, out, error);
    });
  if (role == "strategy")
    check_output<zr_strategy_desc>("describe()", [&](zr_strategy_desc* out, zr_error* error) {
      return instance.api<zr_strategy_api>().describe(self, out, error);
    });
  if (role == "communicator")
    check_output<zr_comm_caps>("caps()", [&](zr_comm_caps* out, zr_error* error) {
      return instance.api<zr_communicator_api>().caps(self, out, error);
    });
  if (role == "offload")
    check_output<zr_offload_caps>("caps()", [&](zr_offload_caps* out, zr_error* error) {
      return instance.api<zr_offload_api>().caps(self, out, error);
    });
}

void as_ranks(Case& test, const std::function<void(const HostOptions& options)>& body) {
  const Store store;
  HostOptions options;
  options.store = &store;
  if (test.role() != "communicator") return body(options);
  options.world = 2;
  run_ranks(2, [&](int rank) {
    HostOptions own = options;
    own.rank = rank;
    body(own);
  });
}

}  // namespace zr::host::conform
