// One rank of BoundaryTest: calls that are rejected between backward and step or inside a zr::gather scope, after which
// training continues. boundary_case CASE TOML [path=value ...]
#include <algorithm>

#include "multirank/engine_run.hpp"
#include "zr/parameters.hpp"

namespace {

using engine_tests::require;
using engine_tests::Run;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void print_result(Run& run) {
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "result " << run.engine->last_loss() << " " << hash << std::endl;
}

void trains(Run& run) {
  run.build();
  run.train();
  print_result(run);
}

// Every call that reads or writes weights is rejected inside a zr::gather scope of one parameter; the step follows.
void calls_inside_scope(Run& run) {
  run.build();
  run.micro_step();
  while (!run.engine->done()) {
    run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
    {
      const auto scope = zr::gather(run.model->named_parameters()["twice.weight"]);
      for (const auto& [name, call] : std::map<std::string, std::function<void()>>{
               {"engine.step()", [&] { run.engine->step(); }},
               {"engine.get('twice.weight')", [&] { run.engine->get("twice.weight"); }},
               {"engine.set('scalar')", [&] { run.engine->set("scalar", zr::TensorKind::value, torch::ones({})); }},
               {"engine.weights_hash()", [&] { run.engine->weights_hash(); }}})
        require(error_of(call) == name +
                                      " was called inside a zr::gather scope of 'twice.weight'; nothing was changed; "
                                      "end the scope before the call",
                name + " throws: " + error_of(call));
    }
    run.engine->step();
  }
  print_result(run);
}

void steps_inside_scope(Run& run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  const auto scope = zr::gather(run.model->parameters());
  run.engine->step();
}

void saves_inside_scope(Run& run) {
  run.build();
  const auto scope = zr::gather(run.model->parameters());
  run.engine->save("never");
}

void loads_inside_scope(Run& run) {
  run.build();
  const auto scope = zr::gather(run.model->parameters());
  run.engine->load("never");
}

// The gradient is readable on every rank between a step and the next backward; at any other time get() throws.
void reads_gradients(Run& run) {
  run.build();
  const auto gradient = [&] { return run.engine->get("twice.weight", zr::TensorKind::gradient); };
  const std::string none =
      "engine.get('twice.weight', zr::TensorKind::gradient): this engine has no gradient yet; call engine.get() after "
      "engine.backward() and engine.step()";
  const std::string early =
      "engine.get('twice.weight', zr::TensorKind::gradient): the gradient is not reduced over ranks and micro-batches "
      "until engine.step() ends the step; call engine.get() after engine.step(), which keeps the gradient until the "
      "next engine.backward()";
  require(error_of(gradient) == none, "before the first step: " + error_of(gradient));
  while (!run.engine->done()) {
    const int64_t micro = run.engine->micro_index();
    run.engine->backward(run.model->loss(run.engine->step_index(), micro));
    require(error_of(gradient) == early, "after backward: " + error_of(gradient));
    if (!run.engine->step()) {
      require(error_of(gradient) == early, "between micro-steps: " + error_of(gradient));
      continue;
    }
    const torch::Tensor all = gradient();
    require(torch::isfinite(all).all().item<bool>() && all.abs().sum().item<double>() > 0,
            "the gradient is finite and not zero");
    require(std::abs(run.engine->mean(all.sum().item<double>()) - all.sum().item<double>()) == 0,
            "every rank gets the same gradient");
  }
  const double sum = gradient().sum().item<double>();
  if (run.engine->rank() == 0) std::cout << "gradient " << std::hexfloat << sum << std::endl;
  print_result(run);
}

void reads_gradient_before_step(Run& run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  run.engine->get("twice.weight", zr::TensorKind::gradient);
}

void reads_gradient_at_start(Run& run) {
  run.build();
  run.engine->get("twice.weight", zr::TensorKind::gradient);
}

// Only the last rank changes a weight, with an operator; hash and save then read the weights before another step.
void write_on_last_rank(Run& run) {
  run.build();
  run.micro_step();
  const torch::NoGradGuard no_grad;
  if (run.engine->rank() == run.engine->world() - 1) run.model->named_parameters()["twice.weight"].mul_(1.5);
}
void hashes_after_a_write(Run& run) {
  write_on_last_rank(run);
  run.engine->weights_hash();
}
void saves_after_a_write(Run& run) {
  write_on_last_rank(run);
  run.engine->save(run.program.text("job.runs") + "/never");
}
// Each rank writes different values before the first step.
void fills_per_rank(Run& run) {
  run.build();
  {
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.weight"].fill_(0.5 + run.engine->rank());
  }
  run.train();
}

// Has more parameters with a dtype other than fp32 than one log line lists; one of them is tied.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    for (const char* name : {"a", "b", "c", "d", "e"}) register_parameter(name, torch::ones({4}, torch::kDouble));
    register_parameter("half", torch::ones({4}, torch::kHalf));
    register_parameter("single", torch::ones({4}));
    register_parameter("tied", named_parameters()["a"]);
  }
};

void has_mixed_types(Run& run) {
  const auto model = std::make_shared<MixedImpl>();
  zr::Engine engine(run.program, *model);
  require(model->named_parameters()["a"].scalar_type() != torch::kDouble, "a double parameter is converted");
}

struct TransposedImpl : torch::nn::Module {
  TransposedImpl() { register_parameter("weight", torch::ones({4, 8}).t()); }
};

void has_another_layout(Run& run) {
  const auto model = std::make_shared<TransposedImpl>();
  zr::Engine engine(run.program, *model);
  require(model->named_parameters()["weight"].is_contiguous(), "the parameter is row-major");
}

struct OneDoubleImpl : torch::nn::Module {
  OneDoubleImpl() { register_parameter("weight", torch::ones({4}, torch::kDouble)); }
};

void has_one_double(Run& run) {
  const auto model = std::make_shared<OneDoubleImpl>();
  zr::Engine engine(run.program, *model);
}

}  // namespace

int main(int argc, char** argv) {
  return engine_tests::run_case(argc, argv,
                                {{"trains", trains},
                                 {"calls_inside_scope", calls_inside_scope},
                                 {"steps_inside_scope", steps_inside_scope},
                                 {"saves_inside_scope", saves_inside_scope},
                                 {"loads_inside_scope", loads_inside_scope},
                                 {"reads_gradients", reads_gradients},
                                 {"reads_gradient_before_step", reads_gradient_before_step},
                                 {"reads_gradient_at_start", reads_gradient_at_start},
                                 {"has_mixed_types", has_mixed_types},
                                 {"has_one_double", has_one_double},
                                 {"has_another_layout", has_another_layout},
                                 {"hashes_after_a_write", hashes_after_a_write},
                                 {"saves_after_a_write", saves_after_a_write},
                                 {"fills_per_rank", fills_per_rank}});
}
