#include "comm/open_communicator.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>

#include "base/host_view.hpp"
#include "comm/coll.hpp"
#include "comm/comm_runtime.hpp"
#include "plugin/extension.hpp"

namespace zr::host::comm {

namespace {
bool is_aligned(const void* address, uint64_t align) { return reinterpret_cast<uintptr_t>(address) % align == 0; }

// Why memory of mem_alloc() is rejected; "" if it is not.
std::string memory_problem(const zr_view& memory, const zr_device& device, uint64_t bytes, uint64_t align) {
  if (std::string problem = view_problem_on(device, "the memory", memory); !problem.empty()) return problem;
  if (!memory.data || memory.dtype != ZR_U8 || memory.count < static_cast<int64_t>(bytes))
    return fmt::format("the memory is null, or not {} elements of U8", bytes);
  return is_aligned(memory.data, align) ? "" : fmt::format("the memory is not aligned to {} bytes", align);
}

// Why a mapping of shared weights is rejected; "" if it is not.
std::string mapping_problem(const std::string& name, const void* mapping) {
  if (!mapping) return name + " is null";
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return is_aligned(mapping, page) ? "" : fmt::format("{} does not begin at a page boundary ({} bytes)", name, page);
}
}  // namespace

const zr_shared_weights_api* shared_weights_of(const plugin::Component& communicator) {
  return plugin::extension_of<zr_shared_weights_api>(
      communicator, "zr.communicator.shared_weights/1", ZR_SIZE_0_9(zr_shared_weights_api),
      {offsetof(zr_shared_weights_api, alloc), offsetof(zr_shared_weights_api, free)});
}

std::string sharing_obstacle(const plugin::Instance& communicator, const std::vector<int>& ranks_of_hosts) {
  const auto* api = shared_weights_of(communicator.component());
  const std::string subject = fmt::format("communicator '{}'", communicator.component().table->id);
  if (!api) return subject + " cannot share memory";
  if (!api->can_share) return ranks_of_hosts.size() == 1 ? "" : subject + " shares memory on one host only";
  CallError error;
  const auto n_hosts = static_cast<uint32_t>(ranks_of_hosts.size());
  const zr_code code =
      call_plugin(&error, [&] { return api->can_share(communicator.self(), n_hosts, ranks_of_hosts.data(), &error); });
  if (code == ZR_UNSUPPORTED) return plugin_text(error);
  check(code, error, communicator.call_text("can_share"));
  return "";
}

zr_comm_caps communicator_caps(const plugin::Instance& communicator) {
  zr_comm_caps caps{};
  caps.size = sizeof caps;
  const std::string call = communicator.call_text("caps");
  const auto* api = communicator.api<zr_communicator_api>();
  call_and_check(call, [&](zr_error* error) { return api->caps(communicator.self(), &caps, error); });
  if (!(caps.ops & bit(ZR_ALL_GATHER)) || !(caps.dtypes & bit(ZR_U8)))
    fail_environment(call +
                     ": it does not support all_gather of bytes, from which the engine composes missing operations; "
                     "choose another communicator");
  if (!(caps.device_types & bit(ZR_DEVICE_CPU)))
    fail_environment(fmt::format(
        "{}: device_types is {:#x}, without CPU memory ({:#x}), where the engine has its buffers; choose another "
        "communicator",
        call, caps.device_types, bit(ZR_DEVICE_CPU)));
  return caps;
}

uint64_t stream_types_of(const plugin::Instance& communicator) {
  constexpr uint64_t kExact = ZR_COMM_STREAMS | ZR_COMM_RANK_ORDERED | ZR_COMM_UPCAST | ZR_COMM_ACCUMULATE;
  const zr_comm_caps caps = communicator_caps(communicator);
  return (caps.flags & kExact) == kExact ? caps.device_types & ~bit(ZR_DEVICE_CPU) : 0;
}

bool is_native(const zr_comm_caps& caps, const zr_coll& coll) {
  if (!(caps.ops & bit(coll.op))) return false;
  if (coll.op == ZR_BARRIER) return true;
  const zr_dtype sent_dtype =
      coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER || coll.op == ZR_RECV ? coll.dst.dtype : coll.src.dtype;
  if (!(caps.dtypes & bit(static_cast<uint64_t>(sent_dtype)))) return false;
  if (!is_reduction(coll)) return true;
  const bool low_precision = sent_dtype == ZR_BF16 || sent_dtype == ZR_F16;
  const bool floating = low_precision || sent_dtype == ZR_F32 || sent_dtype == ZR_F64;
  // In a reduce, only the root knows whether it upcasts; the ranks must decide identically.
  const bool upcasts = coll.op == ZR_REDUCE ? low_precision : coll.dst.dtype != sent_dtype;
  const uint32_t any_order = uint32_t{ZR_COLL_ANY_ORDER} | ZR_COLL_INT8 | ZR_COLL_INT4;
  return (caps.reduces & bit(coll.reduce)) &&
         (!floating || coll.reduce != ZR_SUM || (caps.flags & ZR_COMM_RANK_ORDERED) || (coll.flags & any_order)) &&
         (!(coll.flags & ZR_COLL_ACCUMULATE) || (caps.flags & ZR_COMM_ACCUMULATE)) &&
         (!upcasts || (caps.flags & ZR_COMM_UPCAST));
}

OpenCommunicator::OpenCommunicator(const plugin::Instance& plugin, int rank, int world, const zr_device& device)
    : plugin_(plugin), api_(plugin.api<zr_communicator_api>()), device_(device) {
  // Ranks open communicators in the same order.
  static std::atomic<uint64_t> opened{0};
  const std::string store_prefix = fmt::format("comm.data.{}.", ++opened);
  const zr_comm_open options{sizeof(zr_comm_open), rank, world, 0, device, "data", store_prefix.c_str()};
  plugin.call("open", [&](zr_error* error) { return api_->open(plugin.self(), &options, &comm_, error); });
  if (!comm_) fail_internal(call_text("open") + " reported success, but left *comm null; this is a bug in the plug-in");
}

OpenCommunicator::~OpenCommunicator() {
  call_plugin_void(call_text("close"), [&] { api_->close(comm_); });
}

zr_code OpenCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done, zr_error* error) {
  return call_plugin(error, [&] { return api_->submit(comm_, &coll, stream, done, error); });
}

zr_code OpenCommunicator::progress(zr_error* error) {
  if (!api_->progress) return ZR_OK;
  return call_plugin(error, [&] { return api_->progress(comm_, error); });
}

void OpenCommunicator::abort() {
  call_plugin_void(call_text("abort"), [&] { api_->abort(comm_); });
}

void* OpenCommunicator::mem_alloc(uint64_t bytes, uint64_t align) {
  if (!api_->mem_alloc) return nullptr;
  zr_view memory{};
  const std::string call = call_text("mem_alloc");
  call_and_check(call, [&](zr_error* error) { return api_->mem_alloc(comm_, bytes, align, 0, &memory, error); });
  if (const std::string problem = memory_problem(memory, device_, bytes, align); !problem.empty())
    fail_plugin_bug(call, problem);
  memory_.emplace(memory.data, memory);
  return memory.data;
}

void OpenCommunicator::mem_free(void* memory) {
  const auto at = memory_.find(memory);
  if (at == memory_.end()) return;
  call_plugin_void(call_text("mem_free"), [&] { api_->mem_free(comm_, &at->second); });
  memory_.erase(at);
}

std::pair<void*, const void*> OpenCommunicator::shared_alloc(uint64_t bytes) {
  void* writer = nullptr;
  const void* reader = nullptr;
  const std::string call = call_text("shared_weights alloc");
  const auto* api = shared_weights_of(plugin_.component());
  call_and_check(call, [&](zr_error* error) { return api->alloc(comm_, bytes, &writer, &reader, error); });
  for (const std::string& problem : {mapping_problem("*writer", writer), mapping_problem("*reader", reader)})
    if (!problem.empty()) fail_plugin_bug(call, problem);
  return {writer, reader};
}

void OpenCommunicator::shared_free(void* writer) {
  const auto* api = shared_weights_of(plugin_.component());
  call_plugin_void(call_text("shared_weights free"), [&] { api->free(comm_, writer); });
}

}  // namespace zr::host::comm
