// SGD whose rate grows with the number of steps since the optimizer's first one, which no parameter has: a value that
// checkpoints must keep.
#include <atomic>
#include <cstring>
#include <string>

#include "zr/optimizer.hpp"
#include "zr/optimizer_globals.hpp"

namespace {

struct Aged : zr::Optimizer<Aged> {
  static constexpr zr_key keys[] = {
      zr::key_text("defect", "\"none\"", "none|ranks|twice", "what is wrong when the value is saved")};
  static constexpr bool ignores_norm = true;
  Aged(const zr::Config& config, const zr::Host& host)
      : differs(config.text("defect") == std::string("ranks") ? host.need<zr_job_service>().rank : 0),
        saves_twice(config.text("defect") == std::string("twice")) {}
  void update(const zr::Update& u) const {
    std::atomic<int64_t>& first = first_group().first;
    int64_t unknown = 0;
    first.compare_exchange_strong(unknown, u.step);
    const float rate = static_cast<float>(u.lr * (1 + 0.25 * static_cast<double>(u.step - first)));
    for (int64_t i = 0; i < u.count; ++i) u.weight[i] = u.weight[i] - rate * (u.grad[i] * u.mul);
  }
  void save_globals(const zr::GlobalSink& save) const {
    save("constant", kConstant);
    save("first", first.load() + differs);
    if (saves_twice) save("first", first.load());
  }
  void load_global(const char* key, const void* value, uint64_t bytes) {
    int64_t saved = 0;
    const std::string name = key;
    if ((name != "first" && name != "constant") || bytes != sizeof saved)
      throw zr::PluginError(ZR_INVALID, "unknown value '" + name + "'");
    std::memcpy(&saved, value, sizeof saved);
    if (name == "first") first = saved;
    if (name == "constant" && saved != kConstant) throw zr::PluginError(ZR_INVALID, "another constant");
  }
  static constexpr int64_t kConstant = 7;
  int64_t differs;
  bool saves_twice;
  mutable std::atomic<int64_t> first{0};  // 0: no step yet; only that of the first group is used
};

}  // namespace

ZR_OPTIMIZER(Aged, "aged", "tests", "1.0.0");
