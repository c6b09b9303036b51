#include "checkpoint/metadata.hpp"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace zr::host {

using Json = nlohmann::json;

namespace {
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr std::size_t kLongestConfig = 16 << 20;  // a TOML file of 4 MiB, with a comment for each key
constexpr int64_t kMaxWorld = 1 << 20;
constexpr double kMaxScale = 0x1p64;  // as core/config/precision.hpp bounds fp16.loss_scale

std::string hex_of(const std::string& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {digits[byte >> 4], digits[byte & 15]};
  }
  return text;
}

// A loss scale multiplies exactly: it is a power of two, as the configuration demands.
double scale_of(const JsonField& field) {
  const double value = field.number();
  int exponent = 0;
  if (!std::isfinite(value) || value <= 0 || value > kMaxScale || std::frexp(value, &exponent) != 0.5)
    field.fail("a power of two, at most 2^64");
  return value;
}
}  // namespace

std::string to_text(const CheckpointMetadata& facts) {
  Json globals = Json::object();
  for (const auto& [key, bytes] : facts.globals) globals[key] = hex_of(bytes);
  Json all{{"world", facts.world},
           {"strategy", facts.strategy},
           {"optimizer", {{"id", facts.optimizer}, {"slots", facts.slots}, {"globals", globals}}},
           {"updates", facts.updates},
           {"last_step_applied", facts.last_step_applied},
           {"parameter_steps", facts.parameter_steps},
           {"loss_scale",
            {{"value", facts.loss_scale.value},
             {"good", facts.loss_scale.good},
             {"hysteresis_left", facts.loss_scale.hysteresis_left},
             {"skips", facts.loss_scale.skips},
             {"dynamic", facts.loss_scale.dynamic}}},
           {"seed", facts.seed},
           {"samples", facts.samples},
           {"config", facts.config}};
  if (!facts.engines.empty()) all["engines"] = facts.engines;
  return all.dump();
}

CheckpointMetadata parse_metadata(const JsonField& all, int64_t step, int64_t version) {
  CheckpointMetadata facts;
  facts.updates = all.at("updates").integer(0, step);
  facts.samples = all.at("samples").integer(0, kMaxSamples);
  facts.seed = all.at("seed").integer(0, kAny);
  const JsonField steps = all.at("parameter_steps");
  for (const std::string& name : steps.keys()) facts.parameter_steps[name] = steps.at(name).integer(0, facts.updates);
  const JsonField scale = all.at("loss_scale");
  facts.loss_scale.value = scale_of(scale.at("value"));
  facts.loss_scale.good = scale.at("good").integer(0, step);
  facts.loss_scale.hysteresis_left = scale.at("hysteresis_left").integer(1, kMaxSteps);
  facts.loss_scale.skips = scale.at("skips").integer(0, step);
  facts.loss_scale.dynamic = scale.at("dynamic").boolean();
  facts.last_step_applied = version == 1 ? facts.loss_scale.skips == 0 : all.at("last_step_applied").boolean();
  const JsonField optimizer = all.at("optimizer");
  facts.optimizer = optimizer.at("id").text();
  facts.slots = optimizer.at("slots").texts();
  const JsonField globals = optimizer.at("globals");
  for (const std::string& key : globals.keys()) facts.globals[key] = globals.at(key).bytes_of_hex();
  if (all.has("engines"))
    for (const JsonField engines = all.at("engines"); const std::string& name : engines.keys())
      facts.engines[name] = engines.at(name).integer(0, kMaxSteps);
  facts.world = all.at("world").integer(1, kMaxWorld);
  facts.strategy = all.at("strategy").text();
  facts.config = all.at("config").text();
  if (facts.config.size() > kLongestConfig) all.at("config").fail("at most 16 MiB of text");
  return facts;
}

}  // namespace zr::host
