// "zr.host.config/1": the validated values of a component.
#include "plugin/services.hpp"

struct zr_config_s {
  std::vector<const zr::host::config::Entry*> entries;
};

namespace zr::host::plugin {

namespace {

template <class T>
const T* value(const zr_config* config, const char* key) {
  for (const config::Entry* entry : config->entries)
    if (entry->key.name == key) return std::get_if<T>(&entry->value);
  return nullptr;
}

zr_code get_bool(const zr_config* config, const char* key, int32_t* out) {
  const bool* found = value<bool>(config, key);
  if (!found) return ZR_INVALID;
  *out = *found;
  return ZR_OK;
}

zr_code get_int(const zr_config* config, const char* key, int64_t* out) {
  const int64_t* found = value<int64_t>(config, key);
  if (!found) return ZR_INVALID;
  *out = *found;
  return ZR_OK;
}

zr_code get_float(const zr_config* config, const char* key, double* out) {
  const double* found = value<double>(config, key);
  if (!found) return ZR_INVALID;
  *out = *found;
  return ZR_OK;
}

zr_code get_string(const zr_config* config, const char* key, const char** out) {
  const std::string* found = value<std::string>(config, key);
  if (!found) return ZR_INVALID;
  *out = found->c_str();
  return ZR_OK;
}

zr_code get_floats(const zr_config* config, const char* key, const double** out, uint32_t* n) {
  const auto* found = value<std::vector<double>>(config, key);
  if (!found) return ZR_INVALID;
  *out = found->data();
  *n = static_cast<uint32_t>(found->size());
  return ZR_OK;
}

}  // namespace

const zr_config_service kConfigService{
    sizeof(zr_config_service), 0, get_bool, get_int, get_float, get_string, get_floats};

struct ConfigView::State {
  zr_config_s config;
};

ConfigView::ConfigView(std::vector<const config::Entry*> entries) : state_(new State{{std::move(entries)}}) {}
ConfigView::~ConfigView() = default;
const zr_config* ConfigView::abi() const { return &state_->config; }

}  // namespace zr::host::plugin
