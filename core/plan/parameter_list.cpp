#include "plan/parameter_list.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/failure.hpp"
#include "base/text.hpp"

namespace zr::host {

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
}  // namespace

std::string to_json(const std::vector<Parameter>& parameters) {
  Json list = Json::array();
  for (const Parameter& p : parameters)
    list.push_back({{"name", p.name}, {"aliases", p.aliases}, {"shape", p.shape}, {"frozen", p.frozen}});
  return std::string(kMark) + "\"parameters\":" + list.dump() + "}";
}

std::vector<Parameter> parameters_from_json(const std::string& output, const std::string& who) {
  const auto at = output.rfind(kMark);
  if (at == std::string::npos || (at > 0 && output[at - 1] != '\n'))
    fail_user(who + " did not say what it trains: its main() must construct a zr::Engine from its zr::Program");
  try {
    const Json line = Json::parse(output.substr(at, output.find('\n', at) - at));
    std::vector<Parameter> parameters;
    for (const Json& one : line.at("parameters")) {
      Parameter p = parameter_of(one.at("name"), one.at("shape").get<std::vector<int64_t>>());
      p.aliases = one.at("aliases").get<std::vector<std::string>>();
      p.frozen = one.at("frozen");
      parameters.push_back(std::move(p));
    }
    return parameters;
  } catch (const Json::exception& error) {
    fail_user(who + " describes its parameters in a form this zeroth does not read (" + error.what() +
              "): build both from the same release");
  }
}

namespace {
constexpr uint64_t kLargestHeader = 100'000'000;  // as the format's own reader has it

[[noreturn]] void no_safetensors(const std::string& file, const std::string& why) {
  fail_user(file + ": is no safetensors file: " + why + "; name one (model.safetensors)");
}

Json header_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  const auto size = in ? static_cast<int64_t>(in.tellg()) : -1;
  if (size < 0) fail_user(file + ": cannot be read: " + std::strerror(errno) + "; name a safetensors file");
  unsigned char bytes[8] = {};
  in.seekg(0).read(reinterpret_cast<char*>(bytes), 8);
  uint64_t length = 0;
  for (int i = 8; i-- > 0;) length = length << 8 | bytes[i];
  if (!in || length > kLargestHeader || static_cast<int64_t>(length) + 8 > size)
    no_safetensors(file, "its first eight bytes are not the length of a header");
  std::string text(length, '\0');
  in.read(text.data(), static_cast<std::streamsize>(length));
  Json header = Json::parse(text, nullptr, false);
  if (!in || !header.is_object()) no_safetensors(file, "its header is no JSON object");
  return header;
}

// ZR_NONE: a floating-point type that is no weight's here; nothing: an integer.
std::optional<zr_dtype> float_type(const std::string& name) {
  if (name == "F32") return ZR_F32;
  if (name == "BF16") return ZR_BF16;
  if (name == "F16") return ZR_F16;
  if (name.rfind('F', 0) == 0) return ZR_NONE;  // F64, F8_E4M3, ...
  return {};
}
}  // namespace

TensorFile read_safetensors(const std::vector<std::string>& files) {
  TensorFile result;
  std::vector<zr_dtype> types;
  for (const std::string& file : files) {
    std::vector<std::pair<int64_t, Parameter>> found;
    const Json header = header_of(file);
    for (const auto& [name, tensor] : header.items()) {
      if (name == "__metadata__") continue;
      try {
        const std::optional<zr_dtype> type = float_type(tensor.at("dtype"));
        Parameter p = parameter_of(name, tensor.at("shape").get<std::vector<int64_t>>());
        if (p.count < 0) no_safetensors(file, "the shape of '" + name + "' is none");
        if (!type) continue;  // a buffer, such as positions
        types.push_back(*type);
        found.emplace_back(tensor.at("data_offsets").at(0).get<int64_t>(), std::move(p));
      } catch (const Json::exception&) {
        no_safetensors(file, "its header does not give '" + name + "' a dtype, a shape and offsets");
      }
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (auto& [offset, parameter] : found) result.parameters.push_back(std::move(parameter));
  }
  if (result.parameters.empty()) fail_user(files.front() + ": holds no floating-point tensor; name a model's file");
  if (std::all_of(types.begin(), types.end(), [&](zr_dtype type) { return type == types.front(); }))
    result.dtype = types.front();
  return result;
}

namespace {
int64_t of_block(int64_t width) { return 12 * width * width + 13 * width; }
}  // namespace

Sizes complete(Sizes s) {
  const auto blocks_at_most = [&](int64_t width) { return std::max<int64_t>(1, s.parameters / of_block(width)); };
  if (s.layers > 0 && s.width > 0 && s.parameters == 0) s.parameters = s.layers * of_block(s.width);
  if (s.parameters == 0)
    fail_user("zeroth plan: give --params, or both --layers and --hidden: with less the model's size is not known");
  if (s.layers == 0 && s.width == 0 && s.parameters < of_block(1)) {
    s.width = 1;
  } else if (s.layers == 0 && s.width == 0) {  // as wide as 128 times its depth
    s.layers = std::max<int64_t>(1, std::llround(std::cbrt(static_cast<double>(s.parameters) / (12 * 128 * 128))));
    s.width = 128 * s.layers;
    while (s.layers > 1 && s.layers * of_block(s.width) > s.parameters) --s.layers;
    while (s.width > 1 && of_block(s.width) > s.parameters) s.width /= 2;
  } else if (s.width == 0) {
    const double per_block = static_cast<double>(s.parameters) / static_cast<double>(12 * s.layers);
    s.width = std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(per_block)));
    while (s.width > 1 && s.layers * of_block(s.width) > s.parameters) --s.width;
  } else if (s.layers == 0) {
    s.layers = blocks_at_most(s.width);
  }
  if (s.layers * of_block(s.width) > s.parameters)
    fail_user("zeroth plan: " + std::to_string(s.layers) + " layers of width " + std::to_string(s.width) +
              " alone have " + std::to_string(s.layers * of_block(s.width)) + " parameters, more than the " +
              std::to_string(s.parameters) + " of --params; leave one of the three out");
  return s;
}

std::vector<Parameter> parameters_of(const Sizes& s) {
  std::vector<Parameter> all;
  const int64_t w = s.width, rest = s.parameters - s.layers * of_block(w);
  if (rest >= w) all.push_back(parameter_of("embedding", {rest / w, w}));
  if (rest % w > 0) all.push_back(parameter_of("other", {rest % w}));
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string block = "blocks." + std::to_string(layer) + ".";
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
      all.push_back(parameter_of(block + name, shape));
  }
  return all;
}

}  // namespace zr::host
