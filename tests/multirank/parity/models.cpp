#include "multirank/parity/models.hpp"

#include "multirank/parity/features.hpp"
#include "multirank/parity/one_feature.hpp"

namespace parity {

std::shared_ptr<Model> make(const std::string& name, uint64_t seed) {
  torch::manual_seed(seed);
  if (const auto at = kOneFeature.find(name); at != kOneFeature.end()) return at->second();
  if (name == "tiny") return std::make_shared<Tiny>();
  if (name == "wide") return std::make_shared<Wide>();
  if (name == "ample") return std::make_shared<Ample>();
  if (name == "recurrent") return std::make_shared<Recurrent>();
  return std::make_shared<Everything>(name == "dropout" ? 0.25 : 0.0, name == "divergent");
}

}  // namespace parity
