// Optimizer 'services': plain SGD that uses every service of the host when it is created.
#include <cstring>
#include <string>

#include "zr/optimizer.hpp"

namespace {

void require(bool condition, const char* what) {
  if (!condition) throw zr::PluginError(ZR_INTERNAL, what);
}

class Services : public zr::Optimizer<Services> {
 public:
  Services(const zr::Config&, const zr::Host& host) : host_(host) {
    use_memory();
    use_store(use_job());
    use_machine();
    const zr::Tasks tasks(host);
    require(tasks.width() == 1, "job.threads is 1");
  }
  ~Services() { host_.need<zr_memory_service>().free(host_.abi(), &memory_); }

  void update(const zr::Update& u) const {
    for (int64_t i = 0; i < u.count; ++i) u.weight[i] -= static_cast<float>(u.lr) * (u.grad[i] * u.mul);
  }

 private:
  void use_memory() {
    memory_ = zr::allocate(host_, 5000, "other: services", 4096);
    require(memory_.count == 5000 && memory_.dtype == ZR_U8, "the memory has the bytes that were requested");
    require(reinterpret_cast<uintptr_t>(memory_.data) % 4096 == 0, "the memory is aligned");
    const auto* bytes = static_cast<const char*>(memory_.data);
    require(bytes[0] == 0 && bytes[4999] == 0, "the memory is zeroed");
    std::memset(memory_.data, 7, 5000);
    const auto& memory = host_.need<zr_memory_service>();
    memory.account(host_.abi(), "other: services", 100);
    memory.account(host_.abi(), "other: services", -100);
  }
  int32_t use_job() const {
    const auto& job = host_.need<zr_job_service>();
    require(job.world == 2 && job.rank >= 0 && job.rank < 2, "the job has two ranks");
    require(job.local_world == 2 && job.local_rank == job.rank, "both are on this node");
    require(job.job_id && job.run_folder, "the texts of the job are not null");
    return job.rank;
  }
  void use_store(int32_t rank) const {
    const auto& store = host_.need<zr_store_service>();
    zr_error error = zr::no_error();
    const std::string own = "services/" + std::to_string(rank), other = "services/" + std::to_string(1 - rank);
    require(store.put(host_.abi(), own.c_str(), &rank, sizeof rank, &error) == ZR_OK, "put() stores a value");
    int32_t value = -1;
    uint64_t bytes = sizeof value;
    require(store.get(host_.abi(), other.c_str(), -1, &value, &bytes, &error) == ZR_OK, "get() waits for the value");
    require(bytes == sizeof value && value == 1 - rank, "the value is that of the other rank");
  }
  void use_machine() const {
    const auto* machine = host_.find<zr_machine_service>();
    uint64_t block = 0;
    uint32_t depth = 0;
    require(machine && machine->disk(host_.abi(), "/", &block, &depth) == ZR_UNSUPPORTED, "no disk was measured");
  }

  zr::Host host_;
  zr_view memory_{};
};

}  // namespace

ZR_OPTIMIZER(Services, "services", "zeroth", "0.1.0");
