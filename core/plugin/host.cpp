#include "plugin/host.hpp"

#include <mutex>
#include <set>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "plugin/services.hpp"

namespace zr::host {

namespace {

uint32_t width(const zr_host* abi) { return abi->ctx ? static_cast<uint32_t>(Host::from_abi(abi).pool().width()) : 1; }

void parallel_for(const zr_host* abi, int64_t n, int64_t grain, void (*fn)(void*, int64_t, int64_t), void* ctx) {
  if (!abi->ctx) return fn(ctx, 0, n);
  Host::from_abi(abi).pool().parallel_for(n, grain, [&](int64_t begin, int64_t end) { fn(ctx, begin, end); });
}

const zr_task_service kTaskService{sizeof(zr_task_service), 0, width, parallel_for};

void log_for_plugin(const zr_host*, int32_t level, const char* text) { log(level, text); }

// Every zr_host of this process: plug-ins may keep theirs for good.
zr_host* make_abi() {
  static std::mutex mutex;
  static auto* all = new std::vector<std::unique_ptr<zr_host>>;
  const std::lock_guard lock(mutex);
  return all->emplace_back(std::make_unique<zr_host>()).get();
}

}  // namespace

struct Host::State {
  State(Ledger& l, Pool& p) : ledger(l), pool(p) {}
  Ledger& ledger;
  Pool& pool;
  Memory memory;
  zr_host* abi = nullptr;
  mutable std::mutex mutex;
  std::map<std::string, const void*> services;
  std::map<std::string, void*> contexts;
  std::set<std::string> missed;

  static const void* service(const zr_host* abi, const char* id) {
    if (!abi->ctx) return nullptr;
    State& state = *Host::from_abi(abi).state_;
    const std::lock_guard lock(state.mutex);
    const auto at = state.services.find(id);
    if (at != state.services.end()) return at->second;
    state.missed.insert(id);
    return nullptr;
  }
};

Host::Host(Ledger& ledger, Pool& pool) : state_(std::make_unique<State>(ledger, pool)) {
  state_->abi = make_abi();
  *state_->abi = {sizeof(zr_host), ZR_ABI_MINOR, this, State::service, log_for_plugin};
  offer("zr.host.config/1", &kConfigService);
  offer("zr.host.memory/1", &kMemoryService);
  offer("zr.host.tasks/1", &kTaskService);
}

Host::~Host() {
  state_->abi->ctx = nullptr;
  if (const int64_t left = state_->memory.clear(state_->ledger))
    log(ZR_LOG_WARN, "plug-ins did not give back " + bytes_text(left) + " of host memory; it is freed now");
}

void Host::offer(const std::string& id, const void* table) {
  const std::lock_guard lock(state_->mutex);
  state_->services[id] = table;
}

const zr_host* Host::abi() const { return state_->abi; }
Host& Host::from_abi(const zr_host* host) { return *static_cast<Host*>(host->ctx); }

void* Host::context(const std::string& id) const {
  const std::lock_guard lock(state_->mutex);
  const auto at = state_->contexts.find(id);
  return at == state_->contexts.end() ? nullptr : at->second;
}

void Host::set_context(const std::string& id, void* context) {
  const std::lock_guard lock(state_->mutex);
  state_->contexts[id] = context;
}

Ledger& Host::ledger() { return state_->ledger; }
Pool& Host::pool() { return state_->pool; }
Host::Memory& Host::memory() { return state_->memory; }

std::vector<std::string> Host::take_missed() {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::string> all(state_->missed.begin(), state_->missed.end());
  state_->missed.clear();
  return all;
}

}  // namespace zr::host
