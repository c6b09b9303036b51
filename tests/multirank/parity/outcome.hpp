// The values by which training runs are compared, and their binary file format, which is bit-exact.
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

using Weights = std::map<std::string, std::vector<float>>;  // fp32, by name

struct Step {
  double loss = 0, norm = 0, scale = 1;  // scale: the loss scale
  Weights weights;                       // after the step; only of the last step unless the run is traced
};
using Outcome = std::vector<Step>;

inline void save(const Outcome& outcome, const std::string& file) {
  std::ofstream out(file, std::ios::binary);
  const auto put = [&](const void* data, std::size_t bytes) {
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  const uint64_t steps = outcome.size();
  put(&steps, 8);
  for (const Step& step : outcome) {
    put(&step.loss, 8);
    put(&step.norm, 8);
    put(&step.scale, 8);
    const uint64_t n = step.weights.size();
    put(&n, 8);
    for (const auto& [name, values] : step.weights) {
      const uint64_t sizes[2] = {name.size(), values.size()};
      put(sizes, 16);
      put(name.data(), name.size());
      put(values.data(), values.size() * 4);
    }
  }
}

inline Outcome load(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const auto get = [&](void* data, std::size_t bytes) {
    in.read(static_cast<char*>(data), static_cast<std::streamsize>(bytes));
  };
  uint64_t steps = 0;
  get(&steps, 8);
  Outcome outcome(in ? steps : 0);
  for (Step& step : outcome) {
    get(&step.loss, 8);
    get(&step.norm, 8);
    get(&step.scale, 8);
    uint64_t n = 0;
    get(&n, 8);
    for (uint64_t i = 0; i < n && in; ++i) {
      uint64_t sizes[2];
      get(sizes, 16);
      std::string name(sizes[0], ' ');
      get(name.data(), name.size());
      auto& values = step.weights[name];
      values.resize(sizes[1]);
      get(values.data(), values.size() * 4);
    }
  }
  return outcome;
}

namespace detail {

// "loss 1.5, not 1.25" if the values differ. All NaNs are equal, because the compiler decides which of two NaNs an
// addition returns.
inline std::string number(const char* what, double a, double b) {
  if (std::memcmp(&a, &b, 8) == 0 || (std::isnan(a) && std::isnan(b))) return "";
  std::ostringstream text;
  text.precision(17);
  text << ", " << what << " " << a << ", not " << b;
  return text.str();
}

inline std::string element(const Weights& a, const Weights& b) {
  if (a.size() != b.size()) return ", " + std::to_string(a.size()) + " parameters, not " + std::to_string(b.size());
  for (const auto& [name, values] : a) {
    const auto at = b.find(name);
    if (at == b.end() || at->second.size() != values.size())
      return ", parameter " + name + " is missing or has another size";
    for (std::size_t i = 0; i < values.size(); ++i)
      if (std::memcmp(&values[i], &at->second[i], 4))
        return number((name + "[" + std::to_string(i) + "]").c_str(), values[i], at->second[i]);
  }
  return "";
}

}  // namespace detail

/// "" if bit-equal, else the first step that differs, with the first differing parameter and element.
inline std::string difference(const Outcome& a, const Outcome& b) {
  if (a.empty() || a.size() != b.size()) return std::to_string(a.size()) + " steps, not " + std::to_string(b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::string what =
        detail::number("loss scale", a[i].scale, b[i].scale) + detail::element(a[i].weights, b[i].weights) +
        detail::number("norm", a[i].norm, b[i].norm) + detail::number("loss", a[i].loss, b[i].loss);
    if (!what.empty()) return "step " + std::to_string(i + 1) + ": " + what.substr(2);
  }
  return "";
}

}  // namespace parity
