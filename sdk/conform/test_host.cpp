#include "conform/test_host.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/device.h"

namespace zr::conform {

thread_local bool TestHost::in_worker_call = false;

namespace {
constexpr double kHostLimitSeconds = 30;  // of waits without a limit of their own
constexpr uint64_t kLargestAllocation = uint64_t{1} << 33;

TestHost& host_of(const zr_host* abi) { return *static_cast<TestHost*>(abi->ctx); }

zr_code fill(zr_error* error, zr_code code, const std::string& text) {
  error->code = code;
  error->native = 0;
  std::snprintf(error->msg, sizeof error->msg, "%s", text.c_str());
  return code;
}

template <class Use>
zr_code read(const zr_config* config, const char* key, Use&& use) {
  const auto& table = *reinterpret_cast<const ConfigTable*>(config);
  if (table.ended)
    table.host->report("it read the configuration after the call that got it had returned", TestHost::Misuse::argument);
  const auto found = table.values.find(key);
  return found != table.values.end() && use(found->second) ? ZR_OK : ZR_INVALID;
}
template <class T, class Out>
zr_code read_as(const zr_config* config, const char* key, Out* out) {
  return read(config, key, [&](const KeyValue& value) {
    const T* typed = std::get_if<T>(&value);
    if (typed) *out = static_cast<Out>(*typed);
    return typed != nullptr;
  });
}
}  // namespace

// The functions of the services.
struct Services {
  static constexpr zr_config_service config{
      sizeof(zr_config_service),
      0,
      read_as<bool, int32_t>,
      read_as<int64_t, int64_t>,
      read_as<double, double>,
      [](const zr_config* config, const char* key, const char** out) -> zr_code {
        return read(config, key, [&](const KeyValue& value) {
          const auto* text = std::get_if<std::string>(&value);
          if (text) *out = text->c_str();
          return text != nullptr;
        });
      },
      [](const zr_config* config, const char* key, const double** out, uint32_t* n) -> zr_code {
        return read(config, key, [&](const KeyValue& value) {
          const auto* list = std::get_if<std::vector<double>>(&value);
          if (list) *out = list->data(), *n = static_cast<uint32_t>(list->size());
          return list != nullptr;
        });
      }};

  static zr_done* done_new(const zr_host* abi) { return host_of(abi).new_completion().abi(); }
  static void done_retain(zr_done* done) { ++Completion::from(done).references; }
  static void done_release(zr_done* done) {
    if (done && --Completion::from(done).references < 0)
      Completion::from(done).owner().report("it released a completion more often than it retained it");
  }
  static void done_resolve(zr_done* done, zr_code code, int64_t native, const char* text) {
    Completion::from(done).resolve(code, native, text);
  }
  static zr_code done_poll(zr_done* done, zr_error* error) {
    const Completion& completion = Completion::from(done);
    const zr_code code = completion.code();
    if (code == ZR_OK || code == ZR_AGAIN) return code;
    fill(error, code, completion.text());
    error->native = completion.native();
    return code;
  }
  static zr_code done_wait(zr_done* done, int64_t timeout_ns, zr_error* error) {
    Completion& completion = Completion::from(done);
    if (TestHost::in_worker_call) completion.owner().report("step() called done_wait()", TestHost::Misuse::worker);
    const double seconds = timeout_ns < 0 ? kHostLimitSeconds : static_cast<double>(timeout_ns) * 1e-9;
    if (!completion.owner().wait(completion, seconds)) return fill(error, ZR_TIMEOUT, "the limit has passed");
    return done_poll(done, error);
  }

  static zr_code alloc(const zr_host* abi, const zr_alloc* given, zr_view* out, zr_error* error) {
    TestHost& host = host_of(abi);
    zr_alloc request;
    ZR_TAKE(&request, given);
    if (TestHost::in_worker_call) host.report("step() allocated host memory", TestHost::Misuse::worker);
    if (given->size < ZR_SIZE_0_9(zr_alloc) || request.flags != 0 || (request.align & (request.align - 1)) != 0) {
      host.report("it requested memory with a short zr_alloc, unknown flags, or an alignment that is no power of two");
      return fill(error, ZR_INVALID, "the request is invalid");
    }
    SimulatedDevice* const device = host.options_.device;
    const bool on_device = device && device->is(request.device);
    if (request.device.type != ZR_DEVICE_CPU && !on_device)
      return fill(error, ZR_UNSUPPORTED, device ? "the host has no such device" : "only CPU memory is offered");
    if (request.bytes > kLargestAllocation) return fill(error, ZR_NOMEM, "more memory than this host has");
    if (on_device) {
      *out = {device->allocate(request.bytes), static_cast<int64_t>(request.bytes), ZR_U8, 0, device->device()};
      return ZR_OK;
    }
    auto memory = std::make_unique<Array>(request.bytes, std::max<uint64_t>(request.align, 64));
    std::memset(memory->data(), 0, memory->size());
    *out = view_of(memory->data(), static_cast<int64_t>(request.bytes), ZR_U8);
    const MutexLock lock(host.mutex_);
    host.memory_[out->data] = {std::move(memory), static_cast<int64_t>(request.bytes)};
    return ZR_OK;
  }
  static void free(const zr_host* abi, const zr_view* view) {
    if (!view->data) return;
    TestHost& host = host_of(abi);
    if (SimulatedDevice* const device = host.options_.device; device && device->free(view->data)) return;
    bool known = false, intact = true;
    {
      const MutexLock lock(host.mutex_);
      const auto found = host.memory_.find(view->data);
      known = found != host.memory_.end();
      if (known) {
        intact = found->second.first->surroundings_are_intact();
        host.memory_.erase(found);
      }
    }
    if (!known) host.report("it freed memory that the host did not allocate");
    if (!intact) host.report("it wrote outside memory of zr.host.memory/1");
  }
  static void account(const zr_host*, const char*, int64_t) {}

  static uint32_t width(const zr_host*) { return 3; }
  static void parallel_for(const zr_host* abi, int64_t n, int64_t grain, void (*fn)(void*, int64_t, int64_t),
                           void* ctx) {
    if (TestHost::in_worker_call) host_of(abi).report("step() called parallel_for()", TestHost::Misuse::worker);
    const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, 3);
    std::vector<std::thread> threads;
    for (int64_t part = 1; part < parts && n > 0; ++part)
      threads.emplace_back([=] {
        TestHost::in_worker_call = true;
        fn(ctx, n * part / parts, n * (part + 1) / parts);
      });
    if (n > 0) fn(ctx, 0, n / parts);
    for (std::thread& thread : threads) thread.join();
  }

  static zr_code put(const zr_host* abi, const char* key, const void* value, uint64_t bytes, zr_error* error) {
    if (std::strlen(key) > 4096 || bytes > uint64_t{1} << 20)
      return fill(error, ZR_INVALID, "the key or value is long");
    host_of(abi).options_.store->put(key, {static_cast<const char*>(value), bytes});
    return ZR_OK;
  }
  static zr_code get(const zr_host* abi, const char* key, int64_t timeout_ns, void* out, uint64_t* bytes,
                     zr_error* error) {
    std::string value;
    const auto limit = timeout_ns < 0 ? std::chrono::seconds(30) : std::chrono::nanoseconds(timeout_ns);
    if (!host_of(abi).options_.store->get(key, limit, value))
      return fill(error, ZR_COMM, concat("no rank has put '", key, "'"));
    if (value.size() > *bytes) return fill(error, ZR_INVALID, "the value is longer than the buffer");
    std::memcpy(out, value.data(), value.size());
    *bytes = value.size();
    return ZR_OK;
  }
  static zr_code disk(const zr_host*, const char*, uint64_t*, uint32_t*) { return ZR_UNSUPPORTED; }

  static const void* service(const zr_host* abi, const char* id) {
    const auto& services = host_of(abi).services_;
    const auto found = services.find(id);
    return found == services.end() ? nullptr : found->second;
  }
};

void Completion::resolve(zr_code code, int64_t native, const char* text) {
  if (++times_ > 1) return owner_.report("it resolved a completion twice");
  if (on_resolve) on_resolve();
  if (forbidden_) owner_.report("it resolved a completion of a call that had returned an error");
  native_ = native;
  text_ = text ? text : "";
  code_.store(code == ZR_AGAIN ? zr_code{ZR_INTERNAL} : code, std::memory_order_release);
}

template <class T>
void TestHost::offer(const std::string& id, T table) {
  if (options_.absent.count(id)) return;
  Pages& pages = tables_.emplace_back(sizeof table + ArgumentMemory::kUnknownBytes);
  const std::size_t extra = options_.mode.longer_structs ? ArgumentMemory::kUnknownBytes : 0;
  table.size = static_cast<uint32_t>(sizeof table + extra);
  std::memcpy(pages.data(), &table, sizeof table);
  std::memset(pages.data() + sizeof table, 0xa5, extra);
  services_[id] = pages.data();
}

TestHost::TestHost(HostOptions options) : options_(std::move(options)) {
  if (!options_.store) {
    own_store_ = std::make_unique<Store>();
    options_.store = own_store_.get();
  }
  job_id_ = concat("conform-", ::getpid());
  offer("zr.host.config/1", Services::config);
  offer("zr.host.async/1",
        zr_async_service{sizeof(zr_async_service), 0, Services::done_new, Services::done_retain, Services::done_release,
                         Services::done_resolve, Services::done_poll, Services::done_wait});
  offer("zr.host.memory/1",
        zr_memory_service{sizeof(zr_memory_service), 0, Services::alloc, Services::free, Services::account});
  offer("zr.host.tasks/1", zr_task_service{sizeof(zr_task_service), 0, Services::width, Services::parallel_for});
  offer("zr.host.store/1", zr_store_service{sizeof(zr_store_service), 0, Services::put, Services::get});
  offer("zr.host.job/1", zr_job_service{sizeof(zr_job_service), options_.rank, options_.world, options_.rank,
                                        options_.world, 0, job_id_.c_str(), ""});
  offer("zr.host.machine/1", zr_machine_service{sizeof(zr_machine_service), 0, Services::disk});
  if (options_.device) offer("zr.host.stream/1", SimulatedDevice::service());
  Pages& pages = tables_.emplace_back(sizeof(zr_host) + ArgumentMemory::kUnknownBytes);
  abi_ = reinterpret_cast<zr_host*>(pages.data());
  const std::size_t extra = options_.mode.longer_structs ? ArgumentMemory::kUnknownBytes : 0;
  *abi_ = {static_cast<uint32_t>(sizeof(zr_host) + extra), ZR_ABI_MINOR, this, Services::service,
           [](const zr_host*, int32_t, const char*) {}};
  std::memset(pages.data() + sizeof(zr_host), 0xa5, extra);
  for (const Pages& table : tables_) table.make_read_only();
}

TestHost::~TestHost() {
  // A plug-in that keeps a table must fail in the rule about that only, so that tables stay readable.
  static Mutex mutex;
  static auto* ended = new std::vector<Pages>;
  const MutexLock lock(mutex);
  for (Pages& table : tables_) ended->push_back(std::move(table));
}

Completion& TestHost::new_completion() {
  const MutexLock lock(mutex_);
  return *completions_.emplace_back(std::make_unique<Completion>(*this));
}

ConfigTable& TestHost::new_table(const KeyValues& values) {
  const MutexLock lock(mutex_);
  return configs_.emplace_back(ConfigTable{values, this, false});
}

bool TestHost::wait(Completion& completion, double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!completion.is_resolved()) {
    if (on_wait) {
      if (on_wait(completion) != ZR_OK) return completion.is_resolved();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (std::chrono::steady_clock::now() > deadline) return completion.is_resolved();
  }
  return true;
}

std::string TestHost::problem(Misuse kind) const {
  const MutexLock lock(mutex_);
  return problems_[static_cast<std::size_t>(kind)];
}
void TestHost::report(const std::string& problem, Misuse kind) {
  const MutexLock lock(mutex_);
  std::string& first = problems_[static_cast<std::size_t>(kind)];
  if (first.empty()) first = problem;
}

int64_t TestHost::allocated_bytes() const {
  const MutexLock lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [data, block] : memory_) bytes += block.second;
  return bytes;
}

void TestHost::withdraw_tables() {
  for (const Pages& table : tables_) table.withdraw();
}

}  // namespace zr::conform
