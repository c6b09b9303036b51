#include "conform/use.hpp"

#include "conform/process.hpp"

namespace zr::host::conform {

void use_component(Case& test, Instance& instance, const Mode& mode) {
  if (test.role() == "optimizer") use_optimizer(instance, mode);
  if (test.role() == "strategy") use_strategy(instance, mode);
  if (test.role() == "communicator") use_communicator(instance, mode);
  if (test.role() == "offload") use_offload(instance, mode);
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
