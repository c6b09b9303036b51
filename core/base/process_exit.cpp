#include "base/process_exit.hpp"

#include <atomic>

namespace zr::host {

namespace {
std::atomic<bool> g_exits{false}, g_failed{false}, g_interrupted{false}, g_unwritten{false};
std::atomic<ExitFunction> g_end{nullptr};
}  // namespace

bool process_exits() { return g_exits.load(std::memory_order_relaxed); }
void note_process_exit() { g_exits.store(true, std::memory_order_relaxed); }
bool has_failed() { return g_failed.load(std::memory_order_relaxed); }
void note_failure() { g_failed.store(true, std::memory_order_relaxed); }
void note_interrupt() { g_interrupted.store(true, std::memory_order_relaxed); }
bool take_interrupt() { return g_interrupted.exchange(false, std::memory_order_relaxed); }
ExitFunction set_exit_function(ExitFunction end) { return g_end.exchange(end); }
ExitFunction exit_function() { return g_end; }
void note_unwritten_file() { g_unwritten = true; }
bool has_unwritten_file() { return g_unwritten; }
bool take_unwritten_file() { return g_unwritten.exchange(false); }

}  // namespace zr::host
