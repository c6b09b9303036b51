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
#if defined(BAD_DRAFT)
#include "zr/abi/draft/optimizer_shapes.h"
#elif defined(BAD_DRAFT_OLDER)
ZR_TAG(draft_0_8);
#endif

#if defined(BAD_ABI_MINOR)
ZR_TAG(abi_0_99);
#elif defined(BAD_ABI_MAJOR)
ZR_TAG(abi_7_0);
#elif defined(BAD_ABI_OLDER)
ZR_TAG(abi_0_3);
#elif !defined(BAD_FOREIGN)
ZR_TAG(ZR_ABI_TAG);
#endif
#if defined(BAD_KIND)
ZR_TAG(kind_strategy_1);
#elif defined(BAD_KIND_TAG)
ZR_TAG(kind_communicator_1);
#elif defined(BAD_UNKNOWN_KIND)
ZR_TAG(kind_scheduler_1);
#elif defined(BAD_KIND_REVISION)
ZR_TAG(kind_optimizer_2);
#elif !defined(BAD_FOREIGN)
ZR_TAG(kind_optimizer_1);
#endif
#if defined(BAD_PROMISE)
ZR_TAG(kind_offload_1);
#endif
#if defined(BAD_ID_TAG)
ZR_ID_TAG(optimizer, "other");
#elif defined(BAD_COLLECTION)
ZR_ID_TAG(optimizer, "bad");
ZR_ID_TAG(optimizer, "acme.bad");
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
  const zr_alloc request{sizeof(zr_alloc), 0, 3 << 20, 64, {ZR_DEVICE_CPU, 0}, "all_gather: forgotten"};
  zr_view view;
  lender->alloc(host, &request, &view, error);
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
[[maybe_unused]] zr_code startup([[maybe_unused]] zr_error* error) {
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

zr_code describe(void*, const zr_param*, zr_optimizer_desc* out, zr_error*) {
  zr_optimizer_desc desc{};
  desc.size = sizeof desc;
  desc.granularity = ZR_ELEMENTWISE;
  desc.device_types = 1u << ZR_DEVICE_CPU;
  zr_take(out, out->size, &desc);
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

#if defined(BAD_API_LONGER)
struct LongerApi {  // of headers that are newer than the host
  zr_optimizer_api known;
  zr_code (*unknown)(void* self, zr_error*);
};
const LongerApi api{{sizeof(LongerApi), 0, add_group, describe, step}, nullptr};
#elif defined(BAD_API_SIZE)
const zr_optimizer_api api{16, 0, add_group, describe, step};
#elif defined(BAD_API_RSV)
const zr_optimizer_api api{sizeof(zr_optimizer_api), 2, add_group, describe, step};
#else
const zr_optimizer_api api{sizeof(zr_optimizer_api), 0, add_group, describe, step};
#endif

#if defined(BAD_DEFAULT)
constexpr const char* kDefault = "1.5";
#elif defined(BAD_DEVICE_DEFAULT)
constexpr const char* kDefault = "0.25";
#else
constexpr const char* kDefault = "0.5";
#endif
#if defined(BAD_KEY_FLAGS)
constexpr uint32_t kKeyFlags = ZR_KEY_PER_GROUP | 4;
#else
constexpr uint32_t kKeyFlags = ZR_KEY_PER_GROUP;
#endif
#if defined(BAD_KEY_TEXT)
constexpr const char* kMeaning = "how \xe9 fast";
#else
constexpr const char* kMeaning = "how fast";
#endif
#if defined(BAD_KEY_GROUP)
constexpr const char* kKey = "lr_scale";
#else
constexpr const char* kKey = "rate";
#endif
const zr_key rate{sizeof(zr_key), ZR_KEY_FLOAT, kKeyFlags, 0, kKey, kDefault, 0, 1, nullptr, kMeaning};
#if defined(BAD_KEY_TWICE)
const zr_key* const keys[] = {&rate, &rate};
#else
const zr_key* const keys[] = {&rate};
#endif

#if defined(BAD_ID)
constexpr const char* kId = "good";
#elif defined(BAD_ID_RESERVED)
constexpr const char* kId = "groups.bad";
#elif defined(BAD_ID_KEY)
constexpr const char* kId = "lr";
#elif defined(BAD_ID_USE)
constexpr const char* kId = "use";
#elif defined(BAD_ID_TEXT)
constexpr const char* kId = "Bad Optimizer";
#else
constexpr const char* kId = "bad";
#endif
#if defined(BAD_COMPONENT_FLAGS)
constexpr uint32_t kFlags = 8;
#else
constexpr uint32_t kFlags = 0;
#endif
const zr_component component{
    sizeof(zr_component),       kFlags, kId,     "zr.optimizer/1", "1.0",  &api, create, destroy, nullptr, keys,
    sizeof keys / sizeof *keys, 0,      nullptr, nullptr,          nullptr};
#if defined(BAD_TWICE)
const zr_component* const components[] = {&component, &component};
#elif defined(BAD_COLLECTION)
const zr_component second{
    sizeof(zr_component),       0, "acme.bad", "zr.optimizer/1", "1.0",  &api, create, destroy, nullptr, keys,
    sizeof keys / sizeof *keys, 0, nullptr,    nullptr,          nullptr};
const zr_component* const components[] = {&component, &second};
#else
const zr_component* const components[] = {&component};
#endif

#if defined(BAD_NEED_MINOR)
constexpr uint16_t kNeed = 98;
#else
constexpr uint16_t kNeed = ZR_TARGET_MINOR;
#endif
#if defined(BAD_TEXT)
constexpr const char* kVendor = "caf\xe9";
#else
constexpr const char* kVendor = "tests";
#endif
const zr_module module{sizeof(zr_module),
                       ZR_ABI_MINOR,
                       kNeed,
                       "bad",
                       kVendor,
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
#elif defined(BAD_FLUSHES)
__attribute__((constructor)) static void at_load() {  // as what gcc and clang link with -ffast-math
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | 1u << 24));
#endif
}
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
