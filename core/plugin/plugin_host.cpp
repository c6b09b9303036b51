#include "plugin/plugin_host.hpp"

#include <fmt/format.h>

#include <set>
#include <typeindex>

#include "base/log.hpp"
#include "base/text.hpp"
#include "plugin/services.hpp"
#include "zr/mutex.hpp"

namespace zr::host::plugin {

namespace {

uint32_t width(const zr_host* abi) {
  return abi->ctx ? static_cast<uint32_t>(PluginHost::from_abi(abi).pool().width()) : 1;
}

void parallel_for(const zr_host* abi, int64_t n, int64_t grain, void (*fn)(void*, int64_t, int64_t), void* ctx) {
  if (!abi->ctx) return fn(ctx, 0, n);
  PluginHost::from_abi(abi).pool().parallel_for(n, grain, [&](int64_t begin, int64_t end) { fn(ctx, begin, end); });
}

const zr_task_service kTaskService{sizeof(zr_task_service), 0, width, parallel_for};

void log_for_plugin(const zr_host*, int32_t level, const char* text) { log(level, text); }

// Creates a zr_host that lives until the process ends, because plug-ins may keep it.
zr_host* make_abi() {
  static Mutex mutex;
  static auto* hosts = new std::vector<std::unique_ptr<zr_host>>;
  const MutexLock lock(mutex);
  return hosts->emplace_back(std::make_unique<zr_host>()).get();
}

}  // namespace

struct PluginHost::State {
  State(Ledger& l, ThreadPool& p) : ledger(l), pool(p) {}
  Ledger& ledger;
  ThreadPool& pool;
  Memory memory;
  zr_host* abi = nullptr;
  Mutex mutex;
  std::map<std::string, const void*> services ZR_GUARDED_BY(mutex);
  std::map<std::type_index, void*> contexts ZR_GUARDED_BY(mutex);
  std::set<std::string> missing_services ZR_GUARDED_BY(mutex);

  static const void* service(const zr_host* abi, const char* id) {
    if (!abi->ctx) return nullptr;
    State& state = *PluginHost::from_abi(abi).state_;
    const MutexLock lock(state.mutex);
    const auto at = state.services.find(id);
    if (at != state.services.end()) return at->second;
    state.missing_services.insert(id);
    return nullptr;
  }
};

PluginHost::PluginHost(Ledger& ledger, ThreadPool& pool) : state_(std::make_unique<State>(ledger, pool)) {
  state_->abi = make_abi();
  *state_->abi = {sizeof(zr_host), ZR_ABI_MINOR, this, State::service, log_for_plugin};
  offer("zr.host.config/1", &kConfigService);
  offer("zr.host.memory/1", &kMemoryService);
  offer("zr.host.stream/1", &kStreamService);
  offer("zr.host.tasks/1", &kTaskService);
}

PluginHost::~PluginHost() {
  state_->abi->ctx = nullptr;
  if (const int64_t left = state_->memory.clear(state_->ledger))
    log(ZR_LOG_WARN, fmt::format("plug-ins did not free {} of host memory; the engine frees it now", bytes_text(left)));
}

void PluginHost::offer(const std::string& id, const void* table) {
  const MutexLock lock(state_->mutex);
  state_->services[id] = table;
}

const zr_host* PluginHost::abi() const { return state_->abi; }
PluginHost& PluginHost::from_abi(const zr_host* host) { return *static_cast<PluginHost*>(host->ctx); }

void* PluginHost::context_of(const std::type_info& type) const {
  const MutexLock lock(state_->mutex);
  const auto at = state_->contexts.find(type);
  return at == state_->contexts.end() ? nullptr : at->second;
}

void PluginHost::set_context_of(const std::type_info& type, void* object) {
  const MutexLock lock(state_->mutex);
  state_->contexts[type] = object;
}

Ledger& PluginHost::ledger() { return state_->ledger; }
ThreadPool& PluginHost::pool() { return state_->pool; }
PluginHost::Memory& PluginHost::memory() { return state_->memory; }

std::vector<std::string> PluginHost::take_missing_services() {
  const MutexLock lock(state_->mutex);
  std::vector<std::string> ids(state_->missing_services.begin(), state_->missing_services.end());
  state_->missing_services.clear();
  return ids;
}

}  // namespace zr::host::plugin
