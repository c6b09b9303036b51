// What a training run is compared by, and how it travels between processes: bits, not digits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace parity {

struct Outcome {
  std::vector<double> losses, norms, scales;          // by step; scales: of the loss
  std::map<std::string, std::vector<float>> weights;  // fp32, by name, after the last step
};

inline void save(const Outcome& outcome, const std::string& file) {
  std::ofstream out(file, std::ios::binary);
  const auto put = [&](const void* data, std::size_t bytes) {
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  const uint64_t steps = outcome.losses.size(), n = outcome.weights.size();
  put(&steps, 8);
  put(outcome.losses.data(), steps * 8);
  put(outcome.norms.data(), steps * 8);
  put(outcome.scales.data(), steps * 8);
  put(&n, 8);
  for (const auto& [name, values] : outcome.weights) {
    const uint64_t sizes[2] = {name.size(), values.size()};
    put(sizes, 16);
    put(name.data(), name.size());
    put(values.data(), values.size() * 4);
  }
}

inline Outcome load(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const auto get = [&](void* data, std::size_t bytes) {
    in.read(static_cast<char*>(data), static_cast<std::streamsize>(bytes));
  };
  Outcome outcome;
  uint64_t steps = 0, n = 0;
  get(&steps, 8);
  if (!in) return outcome;
  outcome.losses.resize(steps);
  outcome.norms.resize(steps);
  outcome.scales.resize(steps);
  get(outcome.losses.data(), steps * 8);
  get(outcome.norms.data(), steps * 8);
  get(outcome.scales.data(), steps * 8);
  get(&n, 8);
  for (uint64_t i = 0; i < n && in; ++i) {
    uint64_t sizes[2];
    get(sizes, 16);
    std::string name(sizes[0], ' ');
    get(name.data(), name.size());
    auto& values = outcome.weights[name];
    values.resize(sizes[1]);
    get(values.data(), values.size() * 4);
  }
  return outcome;
}

/// "" if bit-equal, else the first differing step, parameter and element.
inline std::string difference(const Outcome& a, const Outcome& b) {
  std::ostringstream text;
  text.precision(17);
  if (a.losses.empty() || a.losses.size() != b.losses.size()) {
    text << "steps: " << a.losses.size() << " and " << b.losses.size();
    return text.str();
  }
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    if (std::memcmp(&a.losses[i], &b.losses[i], 8)) {
      text << "step " << i + 1 << ": loss " << a.losses[i] << " and " << b.losses[i];
      return text.str();
    }
    // A NaN is one as good as another: which of two an addition keeps, the compiler decides.
    if (std::memcmp(&a.norms[i], &b.norms[i], 8) && !(std::isnan(a.norms[i]) && std::isnan(b.norms[i]))) {
      text << "step " << i + 1 << ": norm " << a.norms[i] << " and " << b.norms[i];
      return text.str();
    }
    if (a.scales[i] != b.scales[i]) {
      text << "step " << i + 1 << ": loss scale " << a.scales[i] << " and " << b.scales[i];
      return text.str();
    }
  }
  if (a.weights.size() != b.weights.size()) return "number of parameters";
  for (const auto& [name, values] : a.weights) {
    const auto at = b.weights.find(name);
    if (at == b.weights.end() || at->second.size() != values.size())
      return "parameter " + name + " is missing or of another size";
    for (std::size_t i = 0; i < values.size(); ++i)
      if (std::memcmp(&values[i], &at->second[i], 4)) {
        text << name << "[" << i << "]: " << values[i] << " and " << at->second[i];
        return text.str();
      }
  }
  return "";
}

}  // namespace parity
