#include "checkpoint/metadata.hpp"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/hex.hpp"

namespace zr::host::checkpoint {

using Json = nlohmann::json;

namespace {
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr std::size_t kLongestConfig = 16 << 20;  // a TOML file of 4 MiB and a comment for each key
constexpr int64_t kMaxWorld = 1 << 20;

// Multiplying by a loss scale must be exact, so it is a power of two, as the configuration requires.
double scale_of(const JsonField& field) {
  const double value = field.number();
  int exponent = 0;
  if (!std::isfinite(value) || value <= 0 || value > kMaxLossScale || std::frexp(value, &exponent) != 0.5)
    field.fail("a power of two, at most 2^64");
  return value;
}
}  // namespace

std::string to_text(const CheckpointMetadata& metadata) {
  Json globals = Json::object();
  for (const auto& [key, bytes] : metadata.globals) globals[key] = hex_of_bytes(bytes);
  Json json{{"world", metadata.world},
            {"strategy", metadata.strategy},
            {"optimizer", {{"id", metadata.optimizer}, {"slots", metadata.slots}, {"globals", globals}}},
            {"updates", metadata.updates},
            {"last_step_applied", metadata.last_step_applied},
            {"parameter_steps", metadata.parameter_steps},
            {"loss_scale",
             {{"value", metadata.loss_scale.value},
              {"good", metadata.loss_scale.good},
              {"hysteresis_left", metadata.loss_scale.hysteresis_left},
              {"skips", metadata.loss_scale.skips},
              {"dynamic", metadata.loss_scale.dynamic}}},
            {"seed", metadata.seed},
            {"samples", metadata.samples},
            {"config", metadata.config}};
  if (!metadata.parameter_local_steps.empty()) json["parameter_local_steps"] = metadata.parameter_local_steps;
  if (!metadata.engines.empty()) json["engines"] = metadata.engines;
  return json.dump();
}

CheckpointMetadata parse_metadata(const JsonField& root, int64_t step) {
  CheckpointMetadata metadata;
  metadata.updates = root.at("updates").integer(0, step);
  metadata.samples = root.at("samples").integer(0, kMaxSamples);
  metadata.seed = root.at("seed").integer(0, kAny);
  const JsonField steps = root.at("parameter_steps");
  for (const std::string& name : steps.keys())
    metadata.parameter_steps[name] = steps.at(name).integer(0, metadata.updates);
  if (root.has("parameter_local_steps"))
    for (const JsonField local = root.at("parameter_local_steps"); const std::string& name : local.keys()) {
      const auto all = metadata.parameter_steps.find(name);
      metadata.parameter_local_steps[name] =
          local.at(name).integer(0, all == metadata.parameter_steps.end() ? 0 : all->second);
    }
  const JsonField scale = root.at("loss_scale");
  metadata.loss_scale.value = scale_of(scale.at("value"));
  metadata.loss_scale.good = scale.at("good").integer(0, step);
  metadata.loss_scale.hysteresis_left = scale.at("hysteresis_left").integer(1, kMaxSteps);
  metadata.loss_scale.skips = scale.at("skips").integer(0, step);
  metadata.loss_scale.dynamic = scale.at("dynamic").boolean();
  metadata.last_step_applied = root.at("last_step_applied").boolean();
  const JsonField optimizer = root.at("optimizer");
  metadata.optimizer = optimizer.at("id").text();
  metadata.slots = optimizer.at("slots").texts();
  const JsonField globals = optimizer.at("globals");
  for (const std::string& key : globals.keys()) metadata.globals[key] = globals.at(key).bytes_of_hex();
  if (root.has("engines"))
    for (const JsonField engines = root.at("engines"); const std::string& name : engines.keys())
      metadata.engines[name] = engines.at(name).integer(0, kMaxSteps);
  metadata.world = root.at("world").integer(1, kMaxWorld);
  metadata.strategy = root.at("strategy").text();
  metadata.config = root.at("config").text();
  if (metadata.config.size() > kLongestConfig) root.at("config").fail("at most 16 MiB of text");
  return metadata;
}

}  // namespace zr::host::checkpoint
