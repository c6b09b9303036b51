// Gradient descent with momentum, and its defects.
#include "zr/abi/optimizer.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "module.hpp"
#include "zr/float_cast.hpp"

namespace {

enum Defect {
  none,
  // of the library
  cut_off,
  every_user_can_write,
  hangs_on_load,
  throws_on_load,
  exports_more,
  exports_unique,
  text_relocations,
  executable_stack,
  needs_libcxx,
  impure_entry,
  wrong_kind_tag,
  null_function,
  reserved_in_api,
  reserved_in_component,
  invalid_id,
  default_out_of_range,
  unknown_key_flag,
  startup_once,
  create_fails,
  leaks_memory,
  leaks_descriptor,
  leaks_host_memory,
  knows_every_extension,
  one_instance,
  error_without_text,
  error_changes_self,
  // of versions, services and the process
  rejects_longer_structs,
  requires_memory_service,
  caches_service_table,
  keeps_slice,
  keeps_config,
  output_too_long,
  installs_handler,
  thread_without_mask,
  descriptor_without_cloexec,
  thread_remains,
  flushes_denormals,
  // of the optimizer
  unknown_need,
  reserved_in_desc,
  no_cpu_memory,
  description_changes,
  writes_past_view,
  writes_gradient,
  depends_on_cut,
  depends_on_time,
  depends_on_alignment,
  shares_scratch,
  truncates_weight,
  writes_no_weight,
  reads_weight,
  skips_slice_with_nan,
  resolves_twice,
  never_resolves,
  resolves_late_after_error,
  changes_before_error,
  throws_on_error,
  ignores_group,
  ignores_grad_mul,
  multiplies_twice,
  rejects_unknown_flag,
  calls_parallel_for,
  allocates_in_step,
  fuses,
  blocks_from_slice,
  differs_if_large,
  keeps_param,
  lr_of_first_slice,
  step_of_first_slice,
  group_of_first_slice,
  claims_to_ignore_norm,
  streams_without_device,
  streams_without_extension,
  clamps_overflow,
  resolves_before_work,
  updates_before_error,
  needs_newer_glibc,
  output_too_short,
  short_api,
  short_component,
  throws_in_entry,
  throws_in_create,
  throws_in_destroy,
  throws_in_add_group,
  throws_in_describe,
  throws_in_step,
  throws_in_extension,
  throws_in_startup,
  throws_in_shutdown
};
constexpr Defect kDefect = ZR_MUTANT;

struct Optimizer {
  const zr_host* host;
  std::vector<float> momentum;  // by group
  std::thread thread;
  std::atomic<bool> ends{false};
  bool stepped = false;
  int descriptor = -1;
};

std::atomic<int> created{0}, alive{0};
const zr_config_service* cached = nullptr;
const zr_update_slice* kept = nullptr;
const zr_config* kept_config = nullptr;
const char* kept_name = nullptr;
constexpr zr_slot kSlots[] = {{"velocity", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};

#if defined(ZR_MUTANT_FUSES)
#define FUSED __attribute__((target("fma")))
#define MULTIPLY_ADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

FUSED void descend(float* weight, const float* grad, float* velocity, int64_t n, float mul, float momentum, float lr) {
  for (int64_t i = 0; i < n; ++i) {
    velocity[i] = MULTIPLY_ADD(momentum, velocity[i], mul * grad[i]);
    weight[i] -= lr * velocity[i];
  }
}

zr_code read_momentum(Optimizer& o, const zr_config* config, zr_error* error) {
  const auto* current = mutant::service<zr_config_service>(o.host, "zr.host.config/1");
  if (kDefect == caches_service_table && !cached) cached = current;
  const auto* service = kDefect == caches_service_table ? cached : current;
  if (!service) return mutant::fill(error, ZR_UNSUPPORTED, "the host has no zr.host.config/1");
  if (kDefect == rejects_longer_structs && service->size > sizeof *service)
    return mutant::fill(error, ZR_UNSUPPORTED, "the config service is too long");
  if (kDefect == keeps_config) kept_config = config;
  double momentum = 0;
  if (service->get_float(config, "momentum", &momentum) != ZR_OK)
    return mutant::fill(error, ZR_INVALID, kDefect == error_without_text ? "" : "the key 'momentum' is missing");
  o.momentum.push_back(static_cast<float>(momentum));
  return ZR_OK;
}

void start_thread(Optimizer& o) {
  sigset_t all, before;
  sigfillset(&all);
  if (kDefect != thread_without_mask) pthread_sigmask(SIG_SETMASK, &all, &before);
  o.thread = std::thread([&o] {
    while (!o.ends || kDefect == thread_remains) usleep(1000);
  });
  if (kDefect != thread_without_mask) pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
  if (kDefect == create_fails) return mutant::fill(error, ZR_INTERNAL, "it fails on purpose");
  if (kDefect == one_instance && alive > 0) return mutant::fill(error, ZR_STATE, "there is an instance already");
  if (kDefect == requires_memory_service) {
    zr_view view{};
    zr_alloc request{sizeof(zr_alloc), 0, 64, 0, {ZR_DEVICE_CPU, 0}, "table"};
    const auto* memory = mutant::service<zr_memory_service>(host, "zr.host.memory/1");
    if (memory->alloc(host, &request, &view, error) == ZR_OK) memory->free(host, &view);
  }
  if (kDefect == installs_handler) signal(SIGUSR1, [](int) {});
#if defined(__x86_64__)
  if (kDefect == flushes_denormals) __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#else  // another change of the floating-point environment
  if (kDefect == flushes_denormals) std::fesetround(FE_UPWARD);
#endif
  if (kDefect == leaks_descriptor) open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (kDefect == leaks_memory) new char[100]();
  auto* o = new Optimizer{host, {}, {}, {}, false, -1};
  if (kDefect == error_changes_self) *self = o;
  if (const zr_code code = read_momentum(*o, config, error)) {
    delete o;
    return code;
  }
  if (kDefect == leaks_host_memory) {
    zr_view view{};
    zr_alloc request{sizeof(zr_alloc), 0, 64, 0, {ZR_DEVICE_CPU, 0}, "table"};
    if (const auto* memory = mutant::service<zr_memory_service>(host, "zr.host.memory/1"))
      memory->alloc(host, &request, &view, error);
  }
  if (kDefect == thread_without_mask || (kDefect == thread_remains && created == 0)) start_thread(*o);
  if (kDefect == descriptor_without_cloexec) o->descriptor = dup(0);
  ++created;
  ++alive;
  *self = o;
  return ZR_OK;
}

void destroy(void* self) {
  auto* o = static_cast<Optimizer*>(self);
  if (!o) return;
  --alive;
  o->ends = true;
  if (o->descriptor >= 0) close(o->descriptor);
  if (kDefect == thread_remains && o->thread.joinable()) return o->thread.detach();
  if (o->thread.joinable()) o->thread.join();
  delete o;
}

zr_code add_group(void* self, uint32_t, const zr_config* config, zr_error* error) {
  return read_momentum(*static_cast<Optimizer*>(self), config, error);
}

zr_code describe(void* self, const zr_param* param, zr_optimizer_desc* out, zr_error*) {
  if (kDefect == keeps_param) kept_name = param->name;
  const auto& o = *static_cast<Optimizer*>(self);
  zr_optimizer_desc desc{sizeof(zr_optimizer_desc), ZR_ELEMENTWISE, 0, 1, kSlots, 1u << ZR_DEVICE_CPU, 0, 0, 0};
  if (kDefect == unknown_need) desc.needs = 1u << 30;
  if (kDefect == reserved_in_desc) desc.rsv = 7;
  if (kDefect == no_cpu_memory) desc.device_types = 1u << ZR_DEVICE_CUDA;
  if (kDefect == description_changes && o.stepped) desc.flags = 1u << 20;
  if (kDefect == streams_without_device || kDefect == streams_without_extension) desc.flags = ZR_OPT_STREAMS;
  if (kDefect == streams_without_extension) desc.device_types |= 1u << ZR_DEVICE_CUDA;
  if (kDefect == claims_to_ignore_norm) desc.flags = ZR_OPT_IGNORES_NORM;
  mutant::write_output(out, desc);
  if (kDefect == output_too_short) out->size = 47;
  if (kDefect == output_too_long) std::memset(reinterpret_cast<char*>(out) + out->size, 0, 8);
  return ZR_OK;
}

// The rounded weight; fp16 weights of large masters are infinite.
uint16_t rounded(float value, zr_dtype dtype) {
  if (kDefect == truncates_weight && dtype == ZR_BF16) return static_cast<uint16_t>(zr::bits_of(value) >> 16);
  if (kDefect == clamps_overflow && dtype == ZR_F16) value = std::fmin(std::fmax(value, -65504.f), 65504.f);
  return dtype == ZR_BF16 ? zr::to_bf16(value) : zr::to_f16(value);
}

// `first`: the first slice of the call.
void update(const Optimizer& o, const zr_step& step, const zr_update_slice& u, const zr_update_slice& first) {
  const bool has_16bit_weight = u.weight.dtype != ZR_F32;
  auto* weight = static_cast<float*>(has_16bit_weight ? u.master.data : u.weight.data);
  auto* out = static_cast<uint16_t*>(u.weight.data);
  const auto* grad = static_cast<const float*>(u.grad.data);
  auto* velocity = static_cast<float*>(u.slots[0].data);
  const int64_t n = u.count;
  const uint32_t group = kDefect == ignores_group ? 0 : kDefect == group_of_first_slice ? first.group : u.group;
  float mul = step.grad_mul, momentum = o.momentum[group];
  // The learning rate decays with the parameter's own steps.
  const auto lr = static_cast<float>((kDefect == lr_of_first_slice ? first : u).lr /
                                     (1 + 0.01 * (kDefect == step_of_first_slice ? first : u).step));
  if (kDefect == ignores_grad_mul) mul = 1;
  if (kDefect == claims_to_ignore_norm && step.grad_norm > 100) mul /= 2;
  if (kDefect == multiplies_twice) mul *= mul;
  if (kDefect == skips_slice_with_nan)
    for (int64_t i = 0; i < n; ++i)
      if (!std::isfinite(grad[i])) return;
  if (kDefect == reads_weight && has_16bit_weight)
    for (int64_t i = 0; i < n; ++i) weight[i] += zr::from_bf16(out[i]) * 0x1p-60f;
  static float scratch[8192];
  if (kDefect == shares_scratch && n <= 8192) {
    for (int64_t i = 0; i < n; ++i) scratch[i] = mul * grad[i];
    sched_yield();
    for (int64_t i = 0; i < n; ++i) {
      velocity[i] = momentum * velocity[i] + scratch[i];
      weight[i] -= lr * velocity[i];
    }
  } else {
    descend(weight, grad, velocity, n, mul, momentum, lr);
  }
  if (kDefect == differs_if_large && n > 70000) weight[0] = std::nextafter(weight[0], 9.f);
  if (kDefect == blocks_from_slice)  // its blocks begin with the slice, not with the parameter
    for (int64_t i = 0; i < n; i += 256) weight[i] = std::nextafter(weight[i], 9.f);
  if (kDefect == depends_on_cut) weight[n - 1] = std::nextafter(weight[n - 1], 9.f);
  if (kDefect == depends_on_time && created % 3 == 0) weight[0] = std::nextafter(weight[0], 9.f);
  if (kDefect == depends_on_alignment && reinterpret_cast<uintptr_t>(weight) % 64 != 0)
    weight[0] = std::nextafter(weight[0], 9.f);
  if (kDefect == writes_past_view && n == 31) weight[31] = 0;
  if (kDefect == writes_gradient) const_cast<float*>(grad)[0] = 0;
  if (has_16bit_weight && kDefect != writes_no_weight)
    for (int64_t i = 0; i < n; ++i) out[i] = rounded(weight[i], u.weight.dtype);
}

void misuse_services(const Optimizer& o) {
  if (kDefect == calls_parallel_for)
    if (const auto* tasks = mutant::service<zr_task_service>(o.host, "zr.host.tasks/1"))
      tasks->parallel_for(
          o.host, 2, 1, [](void*, int64_t, int64_t) {}, nullptr);
  if (kDefect == allocates_in_step)
    if (const auto* memory = mutant::service<zr_memory_service>(o.host, "zr.host.memory/1")) {
      zr_view view{};
      zr_error error{};
      zr_alloc request{sizeof(zr_alloc), 0, 64, 0, {ZR_DEVICE_CPU, 0}, "scratch"};
      if (memory->alloc(o.host, &request, &view, &error) == ZR_OK) memory->free(o.host, &view);
    }
}

zr_code step(void* self, const zr_step* job, const zr_update_slice* const* slices, uint32_t n, zr_stream*,
             zr_done* done, zr_error* error) {
  auto& o = *static_cast<Optimizer*>(self);
  const auto* async = mutant::service<zr_async_service>(o.host, "zr.host.async/1");
  for (uint32_t i = 0; i < n; ++i) {
    const zr_update_slice& u = *slices[i];
    if (kDefect == rejects_unknown_flag && (u.flags & ~uint32_t{ZR_SLICE_WEIGHT_COPY}))
      return mutant::fill(error, ZR_UNSUPPORTED, "an unknown flag");
    if (u.weight.dtype == ZR_F32 || u.weight.dtype == ZR_BF16 || u.weight.dtype == ZR_F16) {
      if (kDefect == updates_before_error) update(o, *job, u, u);
      continue;
    }
    if (kDefect == changes_before_error) static_cast<float*>(u.slots[0].data)[0] = 1;
    if (kDefect == throws_on_error) throw std::runtime_error("weights of this dtype");
    if (kDefect == resolves_late_after_error && done) async->done_resolve(done, ZR_UNSUPPORTED, 0, "the dtype");
    return mutant::fill(error, ZR_UNSUPPORTED, "weights of this dtype are not supported");
  }
  if (kDefect == keeps_slice && kept) mutant::read(kept->size);
  if (kDefect == keeps_param && kept_name) mutant::read(*reinterpret_cast<const uint32_t*>(kept_name));
  if (done && kDefect == resolves_before_work) async->done_resolve(done, ZR_OK, 0, nullptr);
  for (uint32_t i = 0; i < n && kDefect != updates_before_error; ++i) update(o, *job, *slices[i], *slices[0]);
  if (kDefect == keeps_slice) kept = slices[0];
  double ignored = 0;
  if (kDefect == keeps_config)
    mutant::service<zr_config_service>(o.host, "zr.host.config/1")->get_float(kept_config, "momentum", &ignored);
  if (kDefect == description_changes) o.stepped = true;
  misuse_services(o);
  if (done && kDefect != never_resolves && kDefect != resolves_before_work)
    async->done_resolve(done, ZR_OK, 0, nullptr);
  if (done && kDefect == resolves_twice) async->done_resolve(done, ZR_OK, 0, nullptr);
  return ZR_OK;
}

constexpr zr_optimizer_api kApi{kDefect == short_api ? 24u : uint32_t{sizeof(zr_optimizer_api)},
                                kDefect == reserved_in_api ? 5u : 0u, MUTANT_SLOT(add_group), MUTANT_SLOT(describe),
                                kDefect == null_function ? nullptr : MUTANT_SLOT(step)};
constexpr zr_key kMomentum = mutant::key("momentum", ZR_KEY_FLOAT, kDefect == default_out_of_range ? "1.5" : "0.9", 0,
                                         1, ZR_KEY_PER_GROUP | (kDefect == unknown_key_flag ? 1u << 9 : 0u));
constexpr const zr_key* kKeys[] = {&kMomentum};

const void* extension(const char*) { return kDefect == knows_every_extension ? &kApi : nullptr; }

int startups = 0;
zr_code startup(zr_error* error) {
  if (kDefect == startup_once && startups++ > 0) return mutant::fill(error, ZR_STATE, "started twice");
  return ZR_OK;
}
void shutdown() {}

constexpr zr_component kComponent{kDefect == short_component ? 96u : uint32_t{sizeof(zr_component)},
                                  0,
                                  kDefect == invalid_id ? "Mutant" : "mutant",
                                  "zr.optimizer/1",
                                  "1.0.0",
                                  &kApi,
                                  MUTANT_SLOT(create),
                                  MUTANT_SLOT(destroy),
                                  MUTANT_SLOT(extension),
                                  kKeys,
                                  1,
                                  kDefect == reserved_in_component ? 1u : 0u,
                                  nullptr,
                                  nullptr,
                                  nullptr};

}  // namespace

#if defined(ZR_MUTANT_WRONG_KIND_TAG)
ZR_TAG(kind_offload_1);
#endif
MUTANT_MODULE(optimizer, MUTANT_SLOT(startup), MUTANT_SLOT(shutdown))

extern "C" ZR_EXPORT const zr_module* zr_module_v1(uint32_t host_minor) {
  static zr_module other = kModule;
  if (kDefect == throws_in_entry) throw std::runtime_error("thrown by the plug-in");
  return kDefect == impure_entry && host_minor != ZR_ABI_MINOR ? &other : &kModule;
}

#if defined(ZR_MUTANT_EXPORTS_MORE)
extern "C" ZR_EXPORT int mutant_export() { return 1; }
#endif
#if defined(ZR_MUTANT_EXPORTS_UNIQUE)
template <class T>
struct __attribute__((visibility("default"))) UniqueExport {
  static int value;
};
template <class T>
int UniqueExport<T>::value = 1;
template struct UniqueExport<int>;
#endif
#if defined(ZR_MUTANT_TEXT_RELOCATIONS)
__asm__(".text\n.p2align 3\n.quad mutant_marker\n.data\nmutant_marker: .quad 1\n.text\n");
#endif
#if defined(ZR_MUTANT_NEEDS_NEWER_GLIBC)
extern "C" int zr_mutant_of_newer_glibc();
int call_newer_glibc() { return zr_mutant_of_newer_glibc(); }
#endif
#if defined(ZR_MUTANT_HANGS_ON_LOAD) || defined(ZR_MUTANT_THROWS_ON_LOAD)
namespace {
struct AtLoad {
  AtLoad() {
    if (kDefect == hangs_on_load)
      while (true) pause();
    throw std::runtime_error("while loading");
  }
} at_load;
}  // namespace
#endif
