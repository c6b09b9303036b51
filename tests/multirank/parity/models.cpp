#include "multirank/parity/models.hpp"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <torch/utils.h>

#include <cstdlib>
#include <set>

#include "multirank/parity/device.hpp"
#include "multirank/parity/features.hpp"
#include "multirank/parity/networks.hpp"
#include "multirank/parity/one_feature.hpp"

namespace parity {

namespace {
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}
}  // namespace

void choose_device() {
  const std::string name = variable("ZR_PARITY_DEVICE"), library = variable("ZR_PARITY_LIBRARY");
  if (name.empty()) return;
  if (!::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(::dlerror());
  device = at::Device(name + ":0");
  at::globalContext().lazyInitDevice(device.type());
  at::globalContext().setDeterministicAlgorithms(true, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

std::string device_overrides() {
  const std::string name = variable("ZR_PARITY_DEVICE");
  if (name.empty()) return "";
  return " job.device=" + name + " job.device_library=" + variable("ZR_PARITY_LIBRARY");
}

void move(Model& model, at::ScalarType dtype) {
  std::set<const void*> seen;
  const auto move_tensor = [&](torch::Tensor& tensor) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) return;
    const torch::Tensor moved = tensor.detach().to(device, tensor.is_floating_point() ? dtype : tensor.scalar_type());
    tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());  // set_data() does not for any device
  };
  for (auto& item : model.named_parameters()) move_tensor(item.value());
  for (auto& item : model.named_buffers()) move_tensor(item.value());
}

void seed(uint64_t seed) {
  torch::manual_seed(seed);
  if (device.is_cpu()) return;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

std::shared_ptr<Model> make(const std::string& name, uint64_t seed) {
  torch::manual_seed(seed);
  if (const auto at = kOneFeature.find(name); at != kOneFeature.end()) return at->second();
  if (name == "tiny") return std::make_shared<Tiny>();
  if (name == "wide") return std::make_shared<Wide>();
  if (name == "millions") return std::make_shared<Millions>();
  if (name == "ample") return std::make_shared<Ample>();
  if (name == "recurrent") return std::make_shared<Recurrent>();
  if (name == "gpt") return std::make_shared<Gpt>();
  if (name == "convolutional") return std::make_shared<Convolutional>();
  return std::make_shared<Everything>(name == "dropout" ? 0.25 : 0.0, name == "divergent");
}

}  // namespace parity
