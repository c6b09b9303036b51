// The timing of a collective, the same for every engine: each rank writes its full tensor, all ranks enter a barrier,
// then one call is timed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace zr::bench {

/// One test case on two ranks, in place except for reduce_scatter; `bytes` is the size of the full fp32 tensor.
struct Case {
  const char* op;
  int64_t bytes;
  int calls;      // per round
  double target;  // required ratio to the faster peer; 0: none
  int64_t elements() const { return bytes / 4; }
};
inline constexpr Case kCases[] = {
    {"all_reduce", 4 << 10, 100, 0}, {"reduce_scatter", 4 << 10, 100, 0}, {"all_gather", 4 << 10, 100, 0},
    {"all_reduce", 1 << 20, 40, 0},  {"reduce_scatter", 1 << 20, 40, 0},  {"all_gather", 1 << 20, 40, 0},
    {"all_reduce", 64 << 20, 9, 4},  {"reduce_scatter", 64 << 20, 9, 4},  {"all_gather", 64 << 20, 9, 1.5},
};

/// Seconds of each call on this rank. meet() blocks until every rank has entered.
template <class Meet, class Call>
std::vector<double> time_calls(const Case& test_case, float* tensor, Meet&& meet, Call&& call) {
  std::vector<double> seconds;
  for (int i = 0; i < test_case.calls + 2; ++i) {
    for (int64_t e = 0; e < test_case.elements(); ++e) tensor[e] = static_cast<float>((e & 1023) + i);
    meet();
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (i >= 2) seconds.push_back(took.count());
  }
  return seconds;
}

}  // namespace zr::bench
