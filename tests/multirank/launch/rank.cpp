// Emulates a trainer with only the control plane: in every step it computes and meets the other ranks in an emulated
// "all_reduce". Usage: launch_rank key=value..., with the keys of Script.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "control/control.hpp"
#include "support/launch_page.hpp"

using namespace zr::host;
using namespace zr::test;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using zr::PeerLostError;

namespace {
struct Script {
  std::map<std::string, int64_t> values{
      {"steps", 1000000},    {"compute_ms", 1},  {"timeout_ms", 60000}, {"join_timeout_ms", 60000},
      {"late_rank", -1},     {"late_ms", 0},                        // sleeps late_ms before it joins
      {"short_rank", -1},    {"short_steps", 0},                    // runs out of data after short_steps
      {"busy_rank", -1},     {"busy_step", 0},                      // computes forever from busy_step on
      {"odd_rank", -1},      {"odd_step", 0},                       // issues a different collective in odd_step
      {"fail_rank", -1},     {"fail_step", 0},   {"fail_code", 2},  // throws in fail_step with exit code fail_code
      {"quit_rank", -1},     {"quit_step", 0},  // calls _exit(0) in quit_step: neither leaves nor fails
      {"exit_rank", -1},                        // calls exit(0) after its steps without leave()
      {"fork_rank", -1},     {"fork_step", 0},  // forks in fork_step; the child exits after fork_ms
      {"fork_ms", 0},        {"get_rank", -1},   {"get_ms", 60000},  // waits get_ms for a key that no rank puts
      {"silence_ms", 0},                                             // set_silence_limit()
      {"save_on_signal", 0},  // catches SIGTERM and SIGINT; announces it in the store 1: at once, 2: after a signal
      {"reacts", 0},          // 1: continues after a failure of the job, like a program without zr::guarded
      {"saves_ms", 0},        // how long it then continues
      {"early_rank", -1},     // exits with code 0 after it has joined, before its first step
      {"ahead_rank", -1},     // leaves when it has issued a last collective, in which the others wait longer
      {"engines", 1}};        // number of Engines that train one after another
  int64_t operator[](const std::string& key) const { return values.at(key); }
  bool is(const char* what, int rank) const { return values.at(std::string(what) + "_rank") == rank; }
};

volatile sig_atomic_t g_signal = 0;

struct Trainer {
  const Script& plan;
  control::Control& control;
  Page& page;
  int64_t step = 0;
  uint64_t sequence = 0;
  std::atomic<bool>& notified;  // set by the on_broken callback, on another thread

  Page::Rank& mine() { return page.ranks[size_t(control.rank())]; }

  void compute(bool forever) {
    mine().phase = Phase::computing;
    control.set_activity({sequence, 0, "computing", false, step});
    do std::this_thread::sleep_for(milliseconds(plan["compute_ms"]));
    while (forever && !page.stop_computing);
  }

  void all_reduce(int bucket) {
    const bool odd = plan.is("odd", control.rank()) && step == plan["odd_step"];
    const std::string what =
        (odd ? "all_gather 'weights " : "all_reduce 'gradient bucket ") + std::to_string(bucket) + "' (fp32, 4096)";
    control.set_activity({++sequence, odd ? 99u : uint64_t(7 + bucket), what, true, step});
    mine().phase = Phase::collective;
    mine().sequence.fetch_add(1);
    const auto begin = steady_clock::now();
    for (int rank = 0; rank < control.world();) {
      if (!odd && page.ranks[size_t(rank)].sequence >= mine().sequence) {
        ++rank;
        continue;
      }
      if (control.broken()) {
        for (const auto since = steady_clock::now(); !notified;)
          if (steady_clock::now() - since > milliseconds(500))
            fail_internal("the job is broken, but the on_broken callback was not called");
        throw PeerLostError(control.report(what + " was interrupted"));
      }
      if (steady_clock::now() - begin > milliseconds(plan["timeout_ms"]))
        throw PeerLostError(
            control.report(what + " has not completed within " + std::to_string(plan["timeout_ms"]) + "ms"));
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    mine().phase = Phase::computing;
  }

  // The rank that is ahead issued it before it waited for the collective before it, as prefetched gathers are.
  void last_collective() {
    const std::string what = "all_gather 'prefetched weights' (fp32, 4096)";
    if (plan.is("ahead", control.rank())) {
      control.set_activity({sequence + 1, 9, what, false, step});
      return control.set_activity({sequence, 8, "all_reduce 'gradient bucket 1' (fp32, 4096)", false, step});
    }
    control.set_activity({++sequence, 9, what, true, step});
    std::this_thread::sleep_for(milliseconds(500));
    if (control.broken()) throw PeerLostError(control.report(what + " was interrupted"));
  }

  void train() {
    const int rank = control.rank();
    const int64_t steps = plan.is("short", rank) ? plan["short_steps"] : plan["steps"];
    for (step = 0; step < steps; ++step) {
      mine().step = step;
      if (g_signal && page.stop_step == 0) {
        if (plan["save_on_signal"] == 2) control.put(control::saves_on_signal_key(rank), "yes");
        page.stop_step = step + 2;  // no rank is more than one step ahead
      }
      if (page.stop_step && step >= page.stop_step) break;
      if (plan.is("fail", rank) && step == plan["fail_step"])
        fail_with(static_cast<int>(plan["fail_code"]), "the data of this rank is invalid");
      if (plan.is("fork", rank) && step == plan["fork_step"] && fork() == 0) {
        std::this_thread::sleep_for(milliseconds(plan["fork_ms"]));
        std::exit(0);
      }
      if (plan.is("quit", rank) && step == plan["quit_step"]) _exit(0);
      compute(plan.is("busy", rank) && step == plan["busy_step"]);
      for (int bucket = 0; bucket < 2; ++bucket) all_reduce(bucket);
    }
    if (plan["ahead_rank"] >= 0) last_collective();
    if (plan.is("exit", rank)) std::exit(0);
    mine().phase = Phase::left;
    control.leave(step, false);
  }
};

int run(int argc, char** argv, Script& plan) {
  for (int i = 1; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    const std::string key(argv[i], equals ? size_t(equals - argv[i]) : std::strlen(argv[i]));
    if (!equals || !plan.values.count(key))
      fail_user("launch_rank: unknown argument " + std::string(argv[i]) + "; give key=value with a key of Script");
    plan.values[key] = std::atoll(equals + 1);
  }
  if (!plan["reacts"]) control::set_exit_function([](int exit_code) { std::_Exit(exit_code); });
  Page& page = *map_page(std::getenv("ZR_TEST_PAGE"));
  // Find the rank from the environment, because its entry in the page is needed before join() returns.
  int env_rank = 0;
  for (const char* name : {"SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "ZR_RANK"})
    if (const char* value = std::getenv(name)) env_rank = std::atoi(value);
  Page::Rank& mine = page.ranks[size_t(env_rank)];
  if (const char* store = std::getenv("ZR_STORE")) std::snprintf(mine.store.data(), mine.store.size(), "%s", store);
  mine.pid = getpid();
  mine.phase = Phase::before_join;
  if (plan.is("late", env_rank)) std::this_thread::sleep_for(milliseconds(plan["late_ms"]));
  mine.phase = Phase::joining;
  const auto begin = steady_clock::now();
  const auto control = control::Control::join(milliseconds(plan["join_timeout_ms"]));
  mine.join_us = std::chrono::duration_cast<std::chrono::microseconds>(steady_clock::now() - begin).count();
  control->put("greeting/" + std::to_string(control->rank()), std::string(size_t(control->rank()) * 1000, 'x'));
  for (int rank = 0; rank < control->world(); ++rank)
    if (control->get("greeting/" + std::to_string(rank), milliseconds(5000)).size() != size_t(rank) * 1000)
      fail_internal("get() returned another value than was put");
  if (plan["silence_ms"]) control->set_silence_limit(milliseconds(plan["silence_ms"]));
  if (plan.is("early", control->rank())) std::exit(0);
  if (plan.is("get", control->rank())) control->get("a key that no rank puts", milliseconds(plan["get_ms"]));
  if (plan["save_on_signal"]) {
    for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2}) std::signal(signal, [](int came) { g_signal = came; });
    if (plan["save_on_signal"] == 1) control->put(control::saves_on_signal_key(control->rank()), "yes");
  }
  static std::atomic<bool> broken{false};  // static: the callback may run after a failure has left this function
  control->on_broken(&broken, [] { broken = true; });
  for (int64_t i = 0; i < plan["engines"]; ++i) Trainer{plan, *control, page, 0, 0, broken}.train();
  control->on_broken(&broken, {});
  std::printf("rank %d of %d, local %d of %d, done\n", control->rank(), control->world(), control->local_rank(),
              control->local_world());
  return 0;
}
}  // namespace

int main(int argc, char** argv) {
  Script plan;
  try {
    return run(argc, argv, plan);
  } catch (const zr::PeerLostError& failure) {
    std::this_thread::sleep_for(milliseconds(plan["saves_ms"]));
    std::puts("the program reacts to the loss of a peer");
    log_failure(failure.what());
    return failure.exit_code();
  } catch (const zr::Error& failure) {
    log_failure(failure.what());
    return failure.exit_code();
  }
}
