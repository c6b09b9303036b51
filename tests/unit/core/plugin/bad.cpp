// Optimizer 'bad': correct except for the defect that one BAD_<CASE> definition selects. Uses the plain C ABI, without
// the C++ layer.
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "zr/abi/module.h"
#include "zr/abi/optimizer.h"
#include "zr/abi/strategy.h"

#if defined(BAD_ABI_MINOR)
ZR_TAG(abi_0_99);
#elif defined(BAD_ABI_MAJOR)
ZR_TAG(abi_7_0);
#elif !defined(BAD_FOREIGN)
ZR_TAG(abi_0_1);
#endif
#if defined(BAD_KIND)
ZR_TAG(kind_strategy);
#elif defined(BAD_KIND_TAG)
ZR_TAG(kind_communicator);
#elif defined(BAD_UNKNOWN_KIND)
ZR_TAG(kind_scheduler);
#elif !defined(BAD_FOREIGN)
ZR_TAG(kind_optimizer);
#endif
#if defined(BAD_PROMISE)
ZR_TAG(kind_offload);
#endif

#if defined(BAD_UNDEFINED)
extern "C" void nobody_defines_this();
#endif

namespace {

zr_code refuse(zr_error* error, zr_code code, const char* text) {
  error->code = code;
  std::snprintf(error->msg, sizeof error->msg, "%s", text);
  return code;
}

int alive = 0, started = 0;

zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
#if defined(BAD_SERVICE)
  if (!host->service(host, "zr.host.gpu/1")) return refuse(error, ZR_UNSUPPORTED, "no GPU memory");
#elif defined(BAD_THROW)
  throw std::runtime_error("the table of twiddles is empty");
#elif defined(BAD_INVALID)
  return refuse(error, ZR_INVALID, "rate and decay exclude each other: leave one out");
#elif defined(BAD_NULL_SELF)
  return ZR_OK;
#elif defined(BAD_UNDEFINED)
  nobody_defines_this();
#elif defined(BAD_LEAK)
  const auto* lender = static_cast<const zr_memory_service*>(host->service(host, "zr.host.memory/1"));
  zr_view view;
  lender->alloc(host, 3 << 20, 64, "all_gather: forgotten", &view, error);
#endif
  const auto* values = static_cast<const zr_config_service*>(host->service(host, "zr.host.config/1"));
  double rate = 0;
  if (!values || values->get_float(config, "rate", &rate))
    return refuse(error, ZR_INTERNAL, "the key 'rate' was not given");
  if (started != 1) return refuse(error, ZR_STATE, "startup() was not called before create()");
  ++alive;
  *self = new double(rate);
  return ZR_OK;
}
void destroy(void* self) {
  if (self) --alive;
  delete static_cast<double*>(self);
}
[[maybe_unused]] zr_code startup(const zr_host*, [[maybe_unused]] zr_error* error) {
#if defined(BAD_STARTUP)
  return refuse(error, ZR_IO, "the licence server does not answer");
#else
  ++started;
  return ZR_OK;
#endif
}
void shutdown() {
  if (alive) std::abort();  // called before the last destroy()
  --started;
}

zr_code describe(void*, zr_optimizer_desc* out, zr_error*) {
  zr_optimizer_desc desc{};
  desc.size = sizeof desc;
  desc.granularity = ZR_ELEMENTWISE;
  std::memcpy(out, &desc, sizeof desc);
  return ZR_OK;
}
zr_code add_group(void*, uint32_t, const zr_config*, zr_error*) { return ZR_OK; }
#if !defined(BAD_SLOT)
zr_code step(void*, const zr_step*, const zr_update_slice* const*, uint32_t, zr_stream*, zr_done*, zr_error*) {
  return ZR_OK;
}
#else
constexpr decltype(zr_optimizer_api::step) step = nullptr;
#endif

constexpr uint32_t kApiSize =
#if defined(BAD_API_SIZE)
    16;
#else
    sizeof(zr_optimizer_api);
#endif
const zr_optimizer_api api{kApiSize, 0, describe, add_group, nullptr, step, nullptr, nullptr};

#if defined(BAD_DEFAULT)
constexpr const char* kDefault = "1.5";
#else
constexpr const char* kDefault = "0.5";
#endif
const zr_key rate{sizeof(zr_key), ZR_KEY_FLOAT, ZR_KEY_PER_GROUP, 0, "rate", kDefault, 0, 1, nullptr, "how fast"};
#if defined(BAD_KEY_TWICE)
const zr_key* const keys[] = {&rate, &rate};
#else
const zr_key* const keys[] = {&rate};
#endif

#if defined(BAD_ID)
constexpr const char* kId = "good";
#elif defined(BAD_ID_TEXT)
constexpr const char* kId = "Bad Optimizer";
#else
constexpr const char* kId = "bad";
#endif
const zr_component component{
    sizeof(zr_component),       0, kId, "zr.optimizer/1", "1.0", &api, create, destroy, nullptr, keys,
    sizeof keys / sizeof *keys, 0};
#if defined(BAD_TWICE)
const zr_component* const components[] = {&component, &component};
#else
const zr_component* const components[] = {&component};
#endif

#if defined(BAD_NEED_MINOR)
constexpr uint16_t kNeed = 98;
#else
constexpr uint16_t kNeed = 1;
#endif
const zr_module module{sizeof(zr_module),
                       1,
                       kNeed,
                       "bad",
                       "tests",
                       "1.0",
                       "by hand",
                       components,
                       sizeof components / sizeof *components,
                       0,
                       startup,
                       shutdown};

}  // namespace

// Runs while the library is being loaded.
#if defined(BAD_ABORTS)
__attribute__((constructor)) static void at_load() {
  std::fputs("starting\nno device \033[1mfound\n", stderr);
  std::abort();
}
#elif defined(BAD_FAULTS)
__attribute__((constructor)) static void at_load() { ::raise(SIGSEGV); }
#elif defined(BAD_EXITS)
__attribute__((constructor)) static void at_load() { std::_Exit(0); }
#elif defined(BAD_SLEEPS)
__attribute__((constructor)) static void at_load() {
  for (;;) ::pause();
}
#endif

#if !defined(BAD_NO_ENTRY)
extern "C" const zr_module* zr_module_v1(uint32_t) {
#if defined(BAD_NULL_MODULE)
  return nullptr;
#elif defined(BAD_WILD)
  return reinterpret_cast<const zr_module*>(4096 + 8);
#elif defined(BAD_THROW_MODULE)
  throw std::runtime_error("no module today");
#else
  return &module;
#endif
}
#endif
