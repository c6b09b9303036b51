#include "plan/parameter_list.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.hpp"

namespace zr::host::plan {

using Json = nlohmann::json;

namespace {
constexpr std::string_view kMark = "{\"zeroth_parameters\":1,";

int64_t product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) return -1;
  return count;
}

Parameter parameter_of(std::string name, std::vector<int64_t> shape) {
  const int64_t count = product(shape);
  return {std::move(name), {}, std::move(shape), count, false, 0};
}

constexpr int64_t kMaxRows = 1 << 20;  // of an embedding; larger than any vocabulary

int64_t block_size(int64_t width) { return 12 * width * width + 13 * width; }
}  // namespace

std::string to_json(const std::vector<Parameter>& parameters) {
  Json list = Json::array();
  for (const Parameter& p : parameters)
    list.push_back({{"name", p.name}, {"aliases", p.aliases}, {"shape", p.shape}, {"frozen", p.frozen}});
  return std::string(kMark) + "\"parameters\":" + list.dump() + "}";
}

std::vector<Parameter> parameters_from_json(const std::string& output, const std::string& program) {
  const auto at = output.rfind(kMark);
  if (at == std::string::npos || (at > 0 && output[at - 1] != '\n'))
    fail_user(program + " did not print its parameters; its main() must construct a zr::Engine from its zr::Program");
  try {
    const Json line = Json::parse(output.substr(at, output.find('\n', at) - at));
    std::vector<Parameter> parameters;
    for (const Json& entry : line.at("parameters")) {
      Parameter p = parameter_of(entry.at("name"), entry.at("shape").get<std::vector<int64_t>>());
      p.aliases = entry.at("aliases").get<std::vector<std::string>>();
      p.frozen = entry.at("frozen");
      parameters.push_back(std::move(p));
    }
    return parameters;
  } catch (const Json::exception& error) {
    fail_user(fmt::format(
        "{} printed its parameters in a format that this zeroth cannot read ({}); build both from the same release",
        program, error.what()));
  }
}

Sizes complete(Sizes s) {
  const bool all_given = s.parameters > 0 && s.layers > 0 && s.width > 0;
  const auto blocks_at_most = [&](int64_t width) { return std::max<int64_t>(1, s.parameters / block_size(width)); };
  if (s.layers > 0 && s.width > 0 && s.parameters == 0) s.parameters = s.layers * block_size(s.width);
  if (s.parameters == 0)
    fail_user("zeroth plan: give --params, or both --layers and --hidden; otherwise the size of the model is unknown");
  if (s.layers == 0 && s.width == 0 && s.parameters < block_size(1)) {
    s.width = 1;
  } else if (s.layers == 0 && s.width == 0) {  // width = 128 x layers
    s.layers = std::max<int64_t>(1, std::llround(std::cbrt(static_cast<double>(s.parameters) / (12 * 128 * 128))));
    s.width = 128 * s.layers;
    while (s.layers > 1 && s.layers * block_size(s.width) > s.parameters) --s.layers;
    while (s.width > 1 && block_size(s.width) > s.parameters) s.width /= 2;
  } else if (s.width == 0) {
    const double per_block = static_cast<double>(s.parameters) / static_cast<double>(12 * s.layers);
    s.width = std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(per_block)));
    while (s.width > 1 && s.layers * block_size(s.width) > s.parameters) --s.width;
  } else if (s.layers == 0) {
    s.layers = blocks_at_most(s.width);
  }
  if (s.layers * block_size(s.width) > s.parameters)
    fail_user(fmt::format(
        "zeroth plan: {} layers of width {} alone have {} parameters, more than the {} of --params; omit one of the "
        "three options",
        s.layers, s.width, s.layers * block_size(s.width), s.parameters));
  if (const int64_t rest = s.parameters - s.layers * block_size(s.width); all_given && rest / s.width > kMaxRows)
    fail_user(
        fmt::format("zeroth plan: --params {}, --layers {} and --hidden {} contradict each other: the layers have {} "
                    "parameters, and the rest would be an embedding of {} rows; give two of the three options",
                    s.parameters, s.layers, s.width, s.parameters - rest, rest / s.width));
  return s;
}

std::vector<Parameter> parameters_of(const Sizes& s) {
  std::vector<Parameter> parameters;
  const int64_t w = s.width, rest = s.parameters - s.layers * block_size(w);
  if (rest >= w) parameters.push_back(parameter_of("embedding", {rest / w, w}));
  if (rest % w > 0) parameters.push_back(parameter_of("other", {rest % w}));
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string block = fmt::format("blocks.{}.", layer);
    for (const auto& [name, shape] :
         std::vector<std::pair<const char*, std::vector<int64_t>>>{{"norm1.weight", {w}},
                                                                   {"norm1.bias", {w}},
                                                                   {"attention.in.weight", {3 * w, w}},
                                                                   {"attention.in.bias", {3 * w}},
                                                                   {"attention.out.weight", {w, w}},
                                                                   {"attention.out.bias", {w}},
                                                                   {"norm2.weight", {w}},
                                                                   {"norm2.bias", {w}},
                                                                   {"mlp.in.weight", {4 * w, w}},
                                                                   {"mlp.in.bias", {4 * w}},
                                                                   {"mlp.out.weight", {w, 4 * w}},
                                                                   {"mlp.out.bias", {w}}})
      parameters.push_back(parameter_of(block + name, shape));
  }
  return parameters;
}

}  // namespace zr::host::plan
