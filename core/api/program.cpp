#include "zr/program.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "config/key_json.hpp"
#include "plugin/choice.hpp"
#include "program_state.hpp"

namespace zr {

void (*build_without_memory)() = nullptr;

namespace {

bool asked(std::string_view what) {
  const char* ask = std::getenv("ZR_ASK");
  return ask && what == ask;
}

std::vector<host::Key> host_keys_of(const std::vector<Key>& keys) {
  const auto bound = [](double value) { return std::fabs(value) >= 1e18 ? std::copysign(INFINITY, value) : value; };
  std::vector<host::Key> all;
  for (const Key& key : keys) {
    const auto dot = key.path.rfind('.');
    const std::string table = dot == key.path.npos ? "" : key.path.substr(0, dot);
    all.push_back({table, key.path.substr(table.empty() ? 0 : dot + 1), key.type, key.def, key.meaning, bound(key.min),
                   bound(key.max), key.choices});
  }
  return all;
}

// A program started by hand, or by another launcher, may have other ranks than its file asks `zeroth train` for.
void tell_ranks(const host::Entry& ranks, int world) {
  if (ranks.origin.from == host::Origin::From::standard || std::get<int64_t>(ranks.value) == world) return;
  host::log(ZR_LOG_INFO, ranks.origin.text() + ": job.ranks is " + ranks.written + ", but " + std::to_string(world) +
                             (world == 1 ? " rank was" : " ranks were") +
                             " started; `zeroth train` starts what the file asks for");
}

}  // namespace

Key::Key(std::string p, bool d, std::string m)
    : path(std::move(p)), def(d ? "true" : "false"), type(ZR_KEY_BOOL), meaning(std::move(m)) {}
Key::Key(std::string p, int d, std::string m, double low, double high)
    : path(std::move(p)), def(std::to_string(d)), type(ZR_KEY_INT), meaning(std::move(m)), min(low), max(high) {}
Key::Key(std::string p, double d, std::string m, double low, double high)
    : path(std::move(p)), def(host::toml_text(d)), type(ZR_KEY_FLOAT), meaning(std::move(m)), min(low), max(high) {}
Key::Key(std::string p, const char* d, std::string m, std::vector<std::string> c)
    : path(std::move(p)),
      def(host::toml_text(std::string(d))),
      type(ZR_KEY_STRING),
      meaning(std::move(m)),
      choices(std::move(c)) {}

Program::State::State(const std::string& file, const std::vector<std::string>& overrides,
                      const std::vector<Key>& keys) {
  const auto own = host_keys_of(keys);
  if (asked("schema")) {
    std::puts(host::to_json(own).c_str());
    std::exit(0);
  }
  folder_ = std::filesystem::absolute(file).parent_path();
  const bool without_memory = asked("parameters");
  tells_parameters_ = without_memory || asked("parameters_in_memory");
  if (without_memory && build_without_memory) build_without_memory();
  const host::Entry ranks = host::Document::load(file, overrides).early("job.ranks");
  setup_.control = host::Control::join();
  const int world = tells_parameters_ ? 0 : setup_.control->world();
  host::log_as_rank(setup_.control->rank());
  setup_.rejudge = [file, overrides, own](const std::vector<std::string>& more, int of) {
    std::vector<std::string> all = overrides;
    all.insert(all.end(), more.begin(), more.end());
    return host::judge(host::Document::load(file, all), host::Registry(), own, of);
  };
  static_cast<host::JudgedJob&>(setup_) = setup_.rejudge({}, world);
  if (!tells_parameters_) tell_ranks(ranks, world);
}

Program::Program(int argc, char** argv, const std::vector<Key>& keys) {
  const int code = guarded([&] {
    const char* name = argc > 0 ? argv[0] : "program";
    if (argc < 2 && !asked("schema"))
      host::fail_user(std::string("which file? usage: ") + name + " FILE.toml [table.key=value ...]");
    state_ = std::make_shared<State>(argc < 2 ? "" : argv[1],
                                     std::vector<std::string>(argv + std::min(argc, 2), argv + argc), keys);
  });
  if (code != 0) std::exit(code);
}

Program::Program(const std::string& file, const std::vector<std::string>& overrides, const std::vector<Key>& keys)
    : state_(std::make_shared<State>(file, overrides, keys)) {}

Program::~Program() = default;

bool Program::boolean(const std::string& path) const { return state_->setup().config.boolean(path); }
int64_t Program::integer(const std::string& path) const { return state_->setup().config.integer(path); }
double Program::number(const std::string& path) const { return state_->setup().config.number(path); }
std::string Program::text(const std::string& path) const { return state_->setup().config.text(path); }
std::string Program::origin(const std::string& path) const { return state_->setup().config.origin(path).text(); }
std::string Program::folder() const { return state_->folder().string(); }
int Program::rank() const { return state_->setup().control->rank(); }
int Program::world() const { return static_cast<int>(state_->setup().config.integer("job.ranks")); }

int guarded_run(void (*call)(void*), void* ctx) {
  try {
    call(ctx);
    return 0;
  } catch (...) {
    return host::report_exception();
  }
}

}  // namespace zr
