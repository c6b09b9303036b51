// Loads, configures and steps an optimizer's library with a minimal host. For tests and benchmarks.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "zr/abi/module.h"
#include "zr/abi/optimizer.h"

struct zr_config_s {
  std::map<std::string, double> values;  // booleans as 0 and 1
  std::map<std::string, std::string> texts;
};
struct zr_done_s {
  int references = 1, resolved = 0;
  zr_code code = ZR_AGAIN;
};

namespace zr::testing {

using Values = std::map<std::string, double>;

inline zr_code read_double(const zr_config* config, const char* key, double* out) {
  const auto found = config->values.find(key);
  if (found == config->values.end()) return ZR_INVALID;
  *out = found->second;
  return ZR_OK;
}
inline const zr_config_service kConfigService = {
    sizeof(zr_config_service),
    0,
    [](const zr_config* config, const char* key, int32_t* out) {
      double value = 0;
      const zr_code code = read_double(config, key, &value);
      if (code == ZR_OK) *out = value != 0;
      return code;
    },
    [](const zr_config* config, const char* key, int64_t* out) {
      double value = 0;
      const zr_code code = read_double(config, key, &value);
      if (code == ZR_OK) *out = static_cast<int64_t>(value);
      return code;
    },
    read_double,
    [](const zr_config* config, const char* key, const char** out) -> zr_code {
      const auto found = config->texts.find(key);
      if (found == config->texts.end()) return ZR_INVALID;
      *out = found->second.c_str();
      return ZR_OK;
    },
    [](const zr_config*, const char*, const double**, uint32_t*) -> zr_code { return ZR_INVALID; }};

inline const zr_async_service kAsyncService = {sizeof(zr_async_service),
                                               0,
                                               [](const zr_host*) { return new zr_done_s; },
                                               [](zr_done* done) { ++done->references; },
                                               [](zr_done* done) {
                                                 if (done && --done->references == 0) delete done;
                                               },
                                               [](zr_done* done, zr_code code, int64_t, const char*) {
                                                 ++done->resolved;
                                                 done->code = code;
                                               },
                                               [](zr_done* done, zr_error*) { return done->code; },
                                               [](zr_done* done, int64_t, zr_error*) { return done->code; }};

/// A host that offers the config and async services, or no service.
inline zr_host make_host(bool services = true) {
  zr_host host{};
  host.size = sizeof host;
  host.abi_minor = ZR_ABI_MINOR;
  host.service = services ? [](const zr_host*, const char* id) -> const void* {
    if (std::string(id) == "zr.host.config/1") return &kConfigService;
    if (std::string(id) == "zr.host.async/1") return &kAsyncService;
    return nullptr;
  }
  : [](const zr_host*, const char*) -> const void* { return nullptr; };
  host.log = [](const zr_host*, int32_t, const char*) {};
  return host;
}

struct Rejection : std::runtime_error {
  Rejection(zr_code code, const char* text) : std::runtime_error(text), code(code) {}
  zr_code code;
};

class OptimizerUnderTest {
 public:
  /// `folder` holds zr_optimizer_<id>.so. Keys not in `values` have their defaults. host: null: make_host(). Throws
  /// Rejection.
  OptimizerUnderTest(const std::string& folder, const std::string& id, const Values& values = {},
                     const std::map<std::string, std::string>& texts = {}, const zr_host* host = nullptr)
      : host_(host ? *host : make_host()) {
    const std::string file = folder + "/zr_optimizer_" + id + ".so";
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    const auto entry = reinterpret_cast<const zr_module* (*)(uint32_t)>(dlsym(library, "zr_module_v1"));
    module_ = entry(ZR_ABI_MINOR);
    component_ = module_->components[0];
    api_ = static_cast<const zr_optimizer_api*>(component_->api);
    zr_config_s config = configured(values);
    for (const auto& [key, text] : texts) config.texts[key] = text;
    zr_error error = no_error();
    check(component_->create(&host_, &config, &self_, &error), error);
  }
  OptimizerUnderTest(const OptimizerUnderTest&) = delete;
  ~OptimizerUnderTest() { component_->destroy(self_); }

  const zr_module& module() const { return *module_; }
  const zr_component& component() const { return *component_; }
  const zr_optimizer_api& api() const { return *api_; }
  void* self() const { return self_; }
  /// The description of a parameter of one element; it is the same for all parameters.
  zr_optimizer_desc describe() const { return describe(a_parameter()); }
  zr_optimizer_desc describe(const zr_param& param) const {
    zr_optimizer_desc desc{};
    desc.size = sizeof desc;
    zr_error error = no_error();
    check(api_->describe(self_, &param, &desc, &error), error);
    return desc;
  }
  void add_group(uint32_t group, const Values& values) {
    const zr_config_s config = configured(values);
    zr_error error = no_error();
    check(api_->add_group(self_, group, &config, &error), error);
  }
  void step(const zr_step& step, const std::vector<const zr_update_slice*>& units, zr_done* done = nullptr) const {
    zr_error error = no_error();
    check(api_->step(self_, &step, units.data(), static_cast<uint32_t>(units.size()), nullptr, done, &error), error);
  }
  static zr_error no_error() { return {}; }
  static zr_param a_parameter() {
    static constexpr int64_t kShape[] = {1};
    return {sizeof(zr_param), 0, "weight", kShape, 1, 0, 1, 0, 0};
  }

 private:
  zr_config_s configured(const Values& values) const {
    zr_config_s config;
    for (uint32_t i = 0; i < component_->n_keys; ++i) {
      const zr_key& key = *component_->keys[i];
      if (key.type == ZR_KEY_STRING) {
        const std::string quoted = key.def;
        config.texts[key.name] = quoted.substr(1, quoted.size() - 2);
        continue;
      }
      const auto found = values.find(key.name);
      config.values[key.name] = found != values.end()     ? found->second
                                : key.type == ZR_KEY_BOOL ? std::string(key.def) == "true"
                                                          : std::strtod(key.def, nullptr);
    }
    return config;
  }
  static void check(zr_code code, const zr_error& error) {
    if (code != ZR_OK) throw Rejection(code, error.msg);
  }
  zr_host host_;
  const zr_module* module_ = nullptr;
  const zr_component* component_ = nullptr;
  const zr_optimizer_api* api_ = nullptr;
  void* self_ = nullptr;
};

/// A view of fp32 memory, or of bf16 or fp16 memory stored as 16-bit integers.
inline zr_view view_of(void* data, int64_t count, zr_dtype dtype = ZR_F32) {
  return zr_view{data, count, dtype, 0, {ZR_DEVICE_CPU, 0}};
}

}  // namespace zr::testing
