// The communicator "nccl": the ranks of one or several nodes exchange data between their devices through NCCL.
// ZR_COMM_DEVICE: the type of the device.
#include <map>
#include <mutex>

#include "nccl_communicator.hpp"
#include "zr/communicator.hpp"

namespace {

// Of the device with this number; the communicators that use it keep it.
std::shared_ptr<nccl::LastOperation> last_operation_on(int32_t number, nccl::GpuDevice& device) {
  static std::mutex mutex;
  static auto& all = *new std::map<int32_t, std::weak_ptr<nccl::LastOperation>>;  // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<nccl::LastOperation> kept = all[number].lock();
  if (!kept) all[number] = kept = std::make_shared<nccl::LastOperation>(device.make_mark());
  return kept;
}

class Nccl : public zr::Communicator<Nccl, nccl::NcclCommunicator> {
 public:
  static constexpr const char* description = "NCCL between the GPUs of one or several nodes";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::key_bytes("staging_bytes", "\"64MiB\"", 4096, 1e12,
                    "memory of the GPU for data of peers that is reduced, and for host memory in transit"),
      zr::key_text("library", "\"libnccl.so.2\"", nullptr, "name or absolute path of NCCL's library"),
      zr::key_duration("connect_timeout", "\"2min\"", 0.1, 86400,
                       "longest time that NCCL may take to connect the ranks")};
  Nccl(const zr::Config& config, const zr::Host& host)
      : host_(host),
        settings_{config.integer("staging_bytes"), config.text("library"),
                  std::chrono::duration<double>(config.number("connect_timeout"))} {}

  // Of host memory.
  uint64_t open_bytes(int32_t) const noexcept { return static_cast<uint64_t>(settings_.staging_bytes); }
  zr_comm_caps caps() const {
    zr_comm_caps caps{};
    caps.flags = ZR_COMM_RANK_ORDERED | ZR_COMM_UPCAST | ZR_COMM_ACCUMULATE | ZR_COMM_STREAMS;
    for (uint32_t op = ZR_ALL_REDUCE; op <= ZR_BARRIER; ++op)
      if (op != ZR_SEND && op != ZR_RECV) caps.ops |= uint64_t{1} << op;
    for (int dtype = ZR_F32; dtype <= ZR_I64; ++dtype) caps.dtypes |= uint64_t{1} << dtype;
    caps.reduces = 1u << ZR_SUM | 1u << ZR_MIN | 1u << ZR_MAX;
    caps.device_types = zr::kCpuOnly;
    if (nccl::has_device()) caps.device_types |= uint64_t{1} << ZR_COMM_DEVICE;
    return caps;
  }
  std::unique_ptr<nccl::NcclCommunicator> open(const zr_comm_open& options) {
    if (options.device.type != ZR_DEVICE_CPU && options.device.type != ZR_COMM_DEVICE)
      throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'nccl' has no memory on devices of type " +
                                                std::to_string(options.device.type));
    if (!nccl::has_device())
      throw zr::PluginError(ZR_UNSUPPORTED,
                            "communicator 'nccl' needs a GPU on every rank, and this process cannot use one; see "
                            "nvidia-smi and CUDA_VISIBLE_DEVICES, or choose another communicator");
    const bool on_host = options.device.type == ZR_DEVICE_CPU;
    return std::make_unique<nccl::NcclCommunicator>(host_, options, settings_,
                                                    device(on_host ? nccl::current_device(host_) : options.device.id));
  }

 private:
  std::shared_ptr<nccl::SharedDevice> device(int32_t number) {
    auto& kept = devices_[number];
    if (!kept) {
      auto device = nccl::open_device(number);
      auto last = last_operation_on(number, *device);
      kept = std::make_shared<nccl::SharedDevice>(nccl::SharedDevice{std::move(device), std::move(last)});
    }
    return kept;
  }

  zr::Host host_;
  const nccl::Settings settings_;
  std::map<int32_t, std::shared_ptr<nccl::SharedDevice>> devices_;
};

}  // namespace

ZR_TAG(several_hosts);
ZR_COMMUNICATOR(Nccl, "nccl", "zeroth", "1.0.0");
