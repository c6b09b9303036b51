#include "conform/fused_multiply_add.hpp"

#if defined(__x86_64__)
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace zr::conform {

#if defined(__x86_64__)
namespace {

// VFMADD132PS and its relatives: opcodes 0x96 to 0x9f, 0xa6 to 0xaf and 0xb6 to 0xbf of the map 0F38 with prefix 66.
bool is_fused_opcode(unsigned char opcode) {
  const unsigned high = opcode >> 4, low = opcode & 0xf;
  return high >= 0x9 && high <= 0xb && low >= 6;
}
bool is_fused_multiply_add(const unsigned char* at) {
  if (at[0] == 0xc4) return (at[1] & 0x1f) == 2 && (at[2] & 3) == 1 && is_fused_opcode(at[3]);  // VEX
  if (at[0] == 0x62) return (at[1] & 0x0f) == 2 && (at[2] & 7) == 5 && is_fused_opcode(at[4]);  // EVEX
  return false;
}

// Steps through the child until it ends. The library has the same addresses in both processes.
std::string step_through(pid_t child, const Library& library) {
  int status = 0;
  while (::waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    user_regs_struct registers{};
    if (::ptrace(PTRACE_GETREGS, child, nullptr, &registers) != 0) break;
    const auto* at = reinterpret_cast<const unsigned char*>(registers.rip);
    if (library.contains(at) && is_fused_multiply_add(at))
      return concat("it executes a fused multiply-add at offset 0x", std::hex, registers.rip - library.first_address(),
                    " of its code; compile it with -ffp-contract=off");
    const int signal = WSTOPSIG(status) == SIGTRAP || WSTOPSIG(status) == SIGSTOP ? 0 : WSTOPSIG(status);
    if (::ptrace(PTRACE_SINGLESTEP, child, nullptr, signal) != 0) break;
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) skip("this machine does not permit ptrace()");
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  return "the traced call did not end normally";
}

}  // namespace

std::string find_fused_multiply_add(const Library& library, const std::function<void()>& fn) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(77);
    ::raise(SIGSTOP);
    try {
      fn();
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  if (child < 0) skip("the machine has no process for tracing");
  const std::string found = step_through(child, library);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return found;
}
#else
std::string find_fused_multiply_add(const Library&, const std::function<void()>&) {
  skip("fused multiply-add instructions are found on x86-64 only");
}
#endif

}  // namespace zr::conform
