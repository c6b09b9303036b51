// Sample keys for tests: those of a strategy, an optimizer, a communicator and a program. No plug-in is loaded.
#pragma once

#include <string>
#include <vector>

#include "config/config.hpp"

namespace zr::sample {

inline std::vector<host::config::ConfigKey> keys() {
  std::vector<host::config::ConfigKey> keys{
      {"strategy.flat", "bucket_bytes", ZR_KEY_BYTES, "\"16MiB\"", "gradients that leave together"},
      {"optimizer.adam", "betas", ZR_KEY_FLOATS, "[0.9, 0.999]", "decay of the two moments"},
      {"optimizer.adam", "weight_decay", ZR_KEY_FLOAT, "0.01", "decoupled decay"},
      {"optimizer.adam", "fused", ZR_KEY_BOOL, "true", "one pass over memory"},
      {"model", "layers", ZR_KEY_INT, "4", "blocks of the model"},
      {"model", "kind", ZR_KEY_STRING, "\"gpt\"", "which model"},
      {"data", "text", ZR_KEY_STRING, "", "the file to learn"},
  };
  keys[0].min = 4096;
  keys[0].max = 1 << 30;
  keys[1].min = 0;
  keys[1].max = 1;
  keys[2].per_group = true;
  keys[4].min = 1;
  keys[5].choices = {"gpt", "mlp"};
  return keys;
}

/// Plug-ins that exist but are not chosen.
inline host::config::PluginIds others() {
  return {{"strategy", {"cut"}}, {"optimizer", {"sgd"}}, {"communicator", {"shm"}}};
}

/// A plug-in whose keys are known, and that is not chosen.
inline std::vector<host::config::UnselectedPlugin> unselected() {
  host::config::ConfigKey momentum{"optimizer.sgd", "momentum", ZR_KEY_FLOAT, "0.0", "decay of the sum of gradients"};
  momentum.min = 0;
  momentum.max = 1;
  return {{"optimizer", "sgd", {momentum, {"optimizer.sgd", "start", ZR_KEY_STRING, "", "a required key"}}}};
}

inline host::config::JobConfig check(const std::string& toml, const std::vector<std::string>& overrides = {},
                                     int world = 0) {
  const std::string start = "strategy = \"flat\"\n[optimizer]\nuse = \"adam\"\n[data]\ntext = \"a.txt\"\n";
  return host::config::Document::parse(start + toml, "job.toml", overrides).check(keys(), world, others());
}

}  // namespace zr::sample
