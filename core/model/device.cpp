#include "model/device.hpp"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <unordered_map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/host_config.hpp"
#include "model/device_library.hpp"
#include "model/process_setup.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
struct Opened {
  Mutex mutex;
  std::vector<at::Device> devices ZR_GUARDED_BY(mutex){at::Device(at::kCPU)};
  std::unordered_map<at::Device, int64_t> engine_bytes ZR_GUARDED_BY(mutex);
  static Opened& get() {
    static auto* opened = new Opened;  // tensors may be freed after static destructors ran
    return *opened;
  }
};

std::string type_of(const std::string& device) { return device.substr(0, device.find(':')); }

std::string key_of(const std::string& device) { return "job.device = \"" + printable(device) + "\""; }

// The folder of libtorch_cpu.so.
std::filesystem::path torch_folder() {
  Dl_info info{};
  const void* const symbol = reinterpret_cast<const void*>(&at::globalContext);
  if (::dladdr(symbol, &info) == 0 || !info.dli_fname) return {};
  std::error_code error;
  const auto path = std::filesystem::canonical(info.dli_fname, error);
  return error ? std::filesystem::path() : path.parent_path();
}

void load(const std::string& device, const std::filesystem::path& library, const std::string& remedy) {
  // Operators of other libraries find the backend's functions through libtorch's tables, but the backend's own parts
  // find each other by name.
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL)) return;
  const char* const problem = ::dlerror();
  fail_environment(key_of(device) + ": cannot load " + library.string() + ": " + (problem ? problem : "unknown error") +
                   "; " + remedy);
}

at::Device parse(const std::string& name) {
  try {
    return at::Device(name);
  } catch (const std::exception&) {
    fail_user(key_of(name) +
              ": libtorch does not know a device of this name; use \"cpu\", \"cuda\" or \"cuda:<number>\", or name the "
              "library with the device's backend in job.device_library");
  }
}

const c10::impl::DeviceGuardImplInterface* guard_of(at::DeviceType type) {
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type) : nullptr;
}

c10::DeviceAllocator* allocator_of(at::Device device) {
  return device.is_cpu() ? nullptr : dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
}
}  // namespace

void load_device_library(const std::string& device, const std::string& library) {
  const std::string type = type_of(device);
  if (!library.empty())
    return load(device, library, "correct job.device_library, the library with libtorch's backend for this device");
  if (type == config::kCpuDevice) return;
  const std::filesystem::path own = torch_folder() / ("libtorch_" + type + ".so");
  std::error_code error;
  if (!std::filesystem::exists(own, error))
    fail_environment(key_of(device) + ": this libtorch does not have a backend for '" + printable(type) + "' (" +
                     own.string() +
                     " does not exist); use a libtorch that was built for it, or name the library with the backend in "
                     "job.device_library");
  load(device, own, "install the libraries that it needs, or set job.device = \"cpu\"");
}

int device_count(at::DeviceType type) {
  const auto* const guard = guard_of(type);
  return guard && type != at::kCPU ? guard->deviceCount() : 0;
}

void synchronize_streams(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  for (const c10::Stream& stream : {guard.getDefaultStream(device), guard.getStream(device)}) {
    c10::Event reached(device.type());
    reached.record(stream);
    reached.synchronize();
  }
}

at::Device open_device(const std::string& name, int local_rank) {
  const at::Device wanted = parse(name);
  if (wanted.is_cpu()) return at::kCPU;
  if (!guard_of(wanted.type()))
    fail_environment(key_of(name) +
                     ": libtorch has not loaded a backend for this device; name its library in job.device_library");
  try {
    at::globalContext().lazyInitDevice(wanted.type());
  } catch (const std::exception& exception) {
    fail_environment(key_of(name) + ": the device cannot be used: " + first_line(exception.what()) +
                     "; check the driver, or set job.device = \"cpu\"");
  }
  const int count = device_count(wanted.type());
  if (count == 0)
    fail_environment(key_of(name) +
                     ": this node has no such device, or its driver is missing or too old; check the "
                     "driver, or set job.device = \"cpu\"");
  if (wanted.has_index() && wanted.index() >= count)
    fail_user(key_of(name) + ": this node has " + std::to_string(count) +
              (count == 1 ? " such device" : " such devices") +
              ", numbered from 0; choose one of them, or leave out "
              "the number: each rank then uses the device of its local rank");
  const at::Device device(wanted.type(),
                          static_cast<at::DeviceIndex>(wanted.has_index() ? wanted.index() : local_rank % count));
  try {
    c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
    (void)at::empty({1}, at::TensorOptions().device(device));
  } catch (const std::exception& exception) {
    fail_environment(key_of(name) + ": " + device.str() + " cannot be used: " + first_line(exception.what()) +
                     "; check the device, or set job.device = \"cpu\"");
  }
  const std::vector<at::Device> before = devices_in_use();
  if (std::find(before.begin(), before.end(), device) != before.end()) return device;
  if (before.size() == 1) ProcessSetup::start_autograd_threads();
  if (before.size() > 1 && before.back().type() != device.type())
    fail_user(key_of(name) + ": this process already trains on " + before.back().str() +
              ", and autograd supports one type of device per process; use the same type for all engines");
  Opened& opened = Opened::get();
  const MutexLock lock(opened.mutex);
  opened.devices.push_back(device);
  return device;
}

std::vector<at::Device> devices_in_use() {
  Opened& opened = Opened::get();
  const MutexLock lock(opened.mutex);
  return opened.devices;
}

DeviceBytes device_bytes(at::Device device) {
  c10::DeviceAllocator* const allocator = allocator_of(device);
  if (!allocator) return {};
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator->getDeviceStats(device.index());
  Opened& opened = Opened::get();
  const MutexLock lock(opened.mutex);
  return {stats.allocated_bytes[kAll].current, stats.allocated_bytes[kAll].peak, opened.engine_bytes[device], true};
}

void add_engine_bytes(at::Device device, int64_t bytes) {
  Opened& opened = Opened::get();
  const MutexLock lock(opened.mutex);
  opened.engine_bytes[device] += bytes;
}

void reset_peak(at::Device device) {
  if (c10::DeviceAllocator* const allocator = allocator_of(device)) allocator->resetPeakStats(device.index());
}

RandomState RandomState::current(const std::vector<at::Device>& devices) {
  RandomState state;
  for (const at::Device& device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());  // libtorch's mutex
    state.states_.emplace_back(device, generator.get_state());
  }
  return state;
}

void RandomState::restore() const {
  for (const auto& [device, values] : states_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(values);
  }
}

void seed_generators(uint64_t seed) {
  for (const at::Device& device : devices_in_use()) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

}  // namespace zr::host::model
