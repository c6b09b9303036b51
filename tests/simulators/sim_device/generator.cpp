// Random numbers: a generator is a seed and a count of draws on the host; each random operator draws one seed.
#include <cstring>
#include <random>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  // 16 bytes on the CPU: seed, offset.
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.numel() == 16 &&
                    state.is_contiguous(),
                "sim: the state of a generator is a CPU tensor of 16 bytes");
    const auto* const bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::empty({16}, at::device(at::kCPU).dtype(at::kByte));
    auto* const bytes = static_cast<char*>(state.data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() { return kSim; }
  uint64_t draw() { return mix(seed_ ^ mix(offset_++)); }

 private:
  SimGenerator* clone_impl() const override {
    auto* const copy = new SimGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<SimGenerator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* const all = [] {
    auto* const each = new std::vector<at::Generator>;
    for (c10::DeviceIndex d = 0; d < device_count(); ++d) each->push_back(new_generator(d));
    return each;
  }();
  return all->at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

uint64_t draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  at::Generator from = generator.has_value() && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(from.device().type() == kSim, "sim: expected a '", c10::Device(kSim),
              "' device type for generator but found '", from.device(), "'");
  const std::lock_guard lock(from.mutex());
  return static_cast<SimGenerator*>(from.unsafeGetGeneratorImpl())->draw();
}

}  // namespace zr::test::sim
