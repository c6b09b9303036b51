// Statements about random numbers, initialisers and what the model registers.
#include <ATen/CPUGeneratorImpl.h>

#include "search/deferred_language.hpp"

namespace deferred_search {

namespace {
using at::Tensor;

at::Generator default_generator() { return at::detail::getDefaultCPUGenerator(); }
uint64_t draw_from(const at::Generator& generator) {
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random();
}
}  // namespace

void add_random(Rows& rows) {
  rows.push_back({"manual_seed", 4, false, [](auto& e, auto& s) {
                    if (e.planted != Planted::no_reseed) torch::manual_seed(s.a % 3);
                  }});
  rows.push_back({"save_state", 2, false, [](auto& e, auto&) { e.states.push_back(default_generator().get_state()); }});
  rows.push_back({"restore_state", 2, false, [](auto& e, auto& s) {
                    if (!e.states.empty() && e.planted != Planted::no_restore)
                      default_generator().set_state(e.states[s.a % e.states.size()]);
                  }});
  rows.push_back({"generator", 2, false,
                  [](auto& e, auto& s) { e.generators.push_back(at::make_generator<at::CPUGeneratorImpl>(s.a % 5)); }});
  rows.push_back({"clone_generator", 2, false, [](auto& e, auto& s) {
                    const at::Generator of = s.a % 3 ? e.generator(s.b) : default_generator();
                    e.generators.push_back(e.planted == Planted::shared_clone ? of : of.clone());
                  }});
  rows.push_back({"seed_generator", 1, false, [](auto& e, auto& s) { e.generator(s.a).set_current_seed(s.b % 5); }});
  rows.push_back({"normal_by_generator_", 4, false, [](auto& e, auto& s) {
                    const std::optional<at::Generator> generator =
                        e.planted == Planted::default_for_own ? std::optional<at::Generator>() : e.generator(s.b);
                    e.tensor(s.a).normal_(0, 1, generator);
                  }});
  rows.push_back({"rand_by_generator", 2, false, [](auto& e, auto& s) {
                    if (e.planted == Planted::default_for_own)
                      e.push(torch::rand({3, 5}));
                    else
                      e.push(torch::rand({3, 5}, e.generator(s.a)));
                  }});
  rows.push_back({"draw_by_hand", 3, false, [](auto& e, auto&) {
                    const bool free = e.planted == Planted::free_hand_draw;
                    e.drawn.push_back(draw_from(free ? default_generator().clone() : default_generator()));
                  }});
  rows.push_back({"draw_by_hand_from_generator", 2, false, [](auto& e, auto& s) {
                    const bool free = e.planted == Planted::free_hand_draw;
                    e.drawn.push_back(draw_from(free ? e.generator(s.a).clone() : e.generator(s.a)));
                  }});
  rows.push_back({"draw_outside", 2, false, [](auto& e, auto& s) { e.ordinary[s.a % e.ordinary.size()].normal_(); }});
  rows.push_back({"like_outside", 1, false,
                  [](auto& e, auto& s) { e.push(torch::rand_like(e.ordinary[s.a % e.ordinary.size()])); }});
  rows.push_back({"read_outside", 2, false, [](auto& e, auto& s) {
                    e.drawn.push_back(static_cast<uint64_t>(
                        1e3 * std::abs(e.ordinary[s.a % e.ordinary.size()].sum().template item<double>())));
                  }});
  rows.push_back({"default_dtype", 1, false, [](auto& e, auto& s) {
                    if (e.planted != Planted::fixed_dtype)
                      torch::set_default_dtype(c10::scalarTypeToTypeMeta(s.a % 2 ? at::kDouble : at::kFloat));
                  }});
}

namespace {
void add_initialisers(Rows& rows) {
  const auto row = [&rows](const std::string& name, auto fn) {
    rows.push_back({name, 1, false, [fn](Execution& e, const Statement& s) {
                      // libtorch's orthogonal_ crashes without rows.
                      if (e.tensor(s.a).numel() > 0) fn(e.tensor(s.a));
                    }});
  };
  row("init_xavier_uniform_", [](const Tensor& a) { torch::nn::init::xavier_uniform_(a); });
  row("init_kaiming_normal_", [](const Tensor& a) { torch::nn::init::kaiming_normal_(a); });
  row("init_kaiming_uniform_", [](const Tensor& a) { torch::nn::init::kaiming_uniform_(a, 2.2); });
  row("init_orthogonal_", [](const Tensor& a) { torch::nn::init::orthogonal_(a); });
  row("init_sparse_", [](const Tensor& a) { torch::nn::init::sparse_(a, 0.4); });
  row("init_eye_", [](const Tensor& a) { torch::nn::init::eye_(a); });
  row("init_dirac_", [](const Tensor& a) { torch::nn::init::dirac_(a); });
  row("init_constant_", [](const Tensor& a) { torch::nn::init::constant_(a, 0.3); });
  row("init_normal_", [](const Tensor& a) { torch::nn::init::normal_(a); });
}
}  // namespace

void add_registrations(Rows& rows) {
  add_initialisers(rows);
  const auto name = [](const char* prefix, const auto& list) { return prefix + std::to_string(list.size()); };
  rows.push_back({"parameter", 8, false, [name](auto& e, auto& s) {
                    const Tensor made = e.tensor(s.a);
                    made.set_requires_grad(s.b % 4 != 0);
                    e.parameters.emplace_back(name("p", e.parameters), made);
                  }});
  rows.push_back({"parameter_of_copy", 5, false, [name](auto& e, auto& s) {
                    const Tensor made = e.tensor(s.a).clone();
                    made.set_requires_grad(s.b % 4 != 0);
                    e.push(made);
                    e.parameters.emplace_back(name("p", e.parameters), made);
                  }});
  rows.push_back(
      {"buffer", 4, false, [name](auto& e, auto& s) { e.buffers.emplace_back(name("b", e.buffers), e.tensor(s.a)); }});
  rows.push_back({"linear", 2, false, [name](auto& e, auto& s) {
                    const torch::nn::Linear module(1 + s.a % 9, 1 + s.b % 9);
                    for (const Tensor& made : module->parameters()) {
                      e.push(made);
                      e.parameters.emplace_back(name("p", e.parameters), made);
                    }
                  }});
  rows.push_back({"clone_module", 1, false, [name](auto& e, auto& s) {
                    const torch::nn::Linear module(1 + s.a % 9, 1 + s.b % 9);
                    for (const Tensor& made : module->clone()->parameters()) {
                      e.push(made);
                      e.parameters.emplace_back(name("p", e.parameters), made);
                    }
                  }});
}

}  // namespace deferred_search
