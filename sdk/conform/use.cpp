#include "conform/use.hpp"

#include <algorithm>
#include <array>

#include "conform/communicator_run.hpp"
#include "conform/optimizer_run.hpp"
#include "conform/process.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/offload.h"
#include "zr/abi/optimizer.h"
#include "zr/abi/strategy.h"

namespace zr::conform {

void use_component(Case& test, Instance& instance, const Mode& mode) {
  if (test.role() == "optimizer") use_optimizer(instance, mode);
  if (test.role() == "strategy") use_strategy(instance, mode);
  if (test.role() == "communicator") use_communicator(instance, mode);
  if (test.role() == "offload") use_offload(instance, mode);
}

void use_open_component(Case& test, Instance& instance, const std::function<void()>& check) {
  if (test.role() == "communicator") {
    OpenComm comm(instance);
    if (check) check();
    return comm.close();
  }
  use_component(test, instance, {});
  if (check) check();
}

namespace {
template <class Out, class F>
OutputSize measure(const char* name, std::size_t least, F&& fn) {
  constexpr std::size_t kBeyond = 256;  // bytes
  constexpr char kContent = '\x5b';
  alignas(16) std::array<char, sizeof(Out) + kBeyond> memory;
  memory.fill(kContent);
  const Out empty{};
  std::memcpy(memory.data(), &empty, sizeof empty);
  auto* out = reinterpret_cast<Out*>(memory.data());
  out->size = sizeof(Out);
  must(name, [&](zr_error* error) { return fn(out, error); });
  const bool intact =
      std::all_of(memory.begin() + sizeof(Out), memory.end(), [](char byte) { return byte == kContent; });
  return {name, intact, out->size, sizeof(Out), least};
}
}  // namespace

OutputSize output_size(Instance& instance, const std::string& role) {
  void* const self = instance.self();
  if (role == "optimizer")
    return measure<zr_optimizer_desc>("describe()", ZR_SIZE_0_9(zr_optimizer_desc),
                                      [&](zr_optimizer_desc* out, zr_error* error) {
                                        const int64_t shape[] = {5, 1};  // some optimizers support matrices only
                                        const zr_param param{sizeof(zr_param), 0, "weight", shape, 2, 0, 5, 0, 0};
                                        return instance.api<zr_optimizer_api>().describe(self, &param, out, error);
                                      });
  if (role == "strategy")
    return measure<zr_strategy_desc>("describe()", ZR_SIZE_0_9(zr_strategy_desc),
                                     [&](zr_strategy_desc* out, zr_error* error) {
                                       return instance.api<zr_strategy_api>().describe(self, out, error);
                                     });
  if (role == "communicator")
    return measure<zr_comm_caps>("caps()", ZR_SIZE_0_9(zr_comm_caps), [&](zr_comm_caps* out, zr_error* error) {
      return instance.api<zr_communicator_api>().caps(self, out, error);
    });
  return measure<zr_offload_caps>("caps()", ZR_SIZE_0_9(zr_offload_caps), [&](zr_offload_caps* out, zr_error* error) {
    return instance.api<zr_offload_api>().caps(self, out, error);
  });
}

void find_exceptions(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const EscapedException&) {
    throw;
  } catch (const Failure&) {
  } catch (const Skipped&) {
  }
}

namespace {

void call_communicator(Instance& instance) {
  OpenComm comm(instance);
  const zr_communicator_api& api = comm.api();
  find_exceptions([&] { comm.progress(); });
  zr_view view{};
  if (api.mem_alloc &&
      call("mem_alloc()", [&](zr_error* error) { return api.mem_alloc(comm.comm(), 4096, 64, 0, &view, error); }).ok())
    call_void("mem_free()", [&] { api.mem_free(comm.comm(), &view); });
  call_void("abort()", [&] { api.abort(comm.comm()); });
  comm.close();
}

// The tier is open.
void call_offload(Instance& instance) {
  const auto& api = instance.api<zr_offload_api>();
  void* const self = instance.self();
  uint64_t id = 0;
  must("reserve()", [&](zr_error* error) { return api.reserve(self, uint64_t{2} << 20, "tag", &id, error); });
  zr_view view{};
  if (api.map && call("map()", [&](zr_error* error) { return api.map(self, id, &view, error); }).ok())
    call_void("unmap()", [&] { api.unmap(self, id); });
  const Array memory(std::size_t{2} << 20, std::size_t{2} << 20);
  view = view_of(memory.data(), static_cast<int64_t>(memory.size()), ZR_U8);
  if (api.reg && call("reg()", [&](zr_error* error) { return api.reg(self, &view, error); }).ok())
    call_void("unreg()", [&] { api.unreg(self, &view); });
  call_void("release()", [&] { api.release(self, id); });
}

}  // namespace

void call_every_function(Case& test, Instance& instance) {
  const zr_component& component = instance.component();
  if (component.extension) call_void("extension()", [&] { component.extension("zr.conform.unknown/1"); });
  if (test.role() == "optimizer")
    find_exceptions([&] { OptimizerRun(instance).add_group(1, Instance::values_for(test)); });
  find_exceptions([&] { output_size(instance, test.role()); });
  find_exceptions([&] { use_component(test, instance, {}); });
  if (test.role() == "communicator") find_exceptions([&] { call_communicator(instance); });
  if (test.role() == "offload") find_exceptions([&] { call_offload(instance); });
  const zr_module& module = *test.library().module();
  instance.destroy();
  if (module.shutdown) call_void("shutdown()", module.shutdown);
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

}  // namespace zr::conform
