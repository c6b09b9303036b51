// One rank of sharded_test: runs the case named on the command line, and prints the message of an exception.
//   sharded_case CASE TOML [path=value ...]
#include <algorithm>
#include <iostream>
#include <sstream>

#include "multirank/parity/models.hpp"
#include "multirank/sharded_run.hpp"
#include "zr/parameters.hpp"

namespace {

using sharded_tests::Cases;
using sharded_tests::Net;
using sharded_tests::require;
using sharded_tests::Run;

void saves_module(Run& run) {
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  run.net->save(archive);
  archive.save_to(out);
}
void saves_gathered_module(Run& run) {
  const auto scope = zr::gather(run.net->parameters());
  saves_module(run);
}
void reads_pointer(Run& run) { std::cout << run.net->in->weight.data_ptr<float>()[3]; }
void reads_accessor(Run& run) { std::cout << run.net->in->weight.accessor<float, 2>()[0][0]; }
void aliases_storage(Run& run) {
  const torch::NoGradGuard no_grad;
  auto alias = torch::empty({0});
  alias.set_(run.net->in->weight.storage(), 0, {64, 48}, {48, 1});
  std::cout << alias.sum().item<float>();
}
void converts_module(Run& run) {
  run.net->to(torch::kDouble);
  run.step();
}
void loads_module(Run& run) {
  Net other;
  std::stringstream file;
  torch::serialize::OutputArchive out;
  other.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  run.net->load(in);
  run.step();
}
void own_optimizer(Run& run) {
  torch::optim::SGD optimizer(run.net->parameters(), torch::optim::SGDOptions(0.1));
  run.backward();
  optimizer.step();
}
void clips_itself(Run& run) {
  run.backward();
  torch::nn::utils::clip_grad_norm_(run.net->parameters(), 1.0);
}
void plain_backward(Run& run) {
  run.step();
  run.net->loss(torch::randn({4, 48})).backward();
}
void zeroes_gradients(Run& run) {
  run.step();
  run.net->zero_grad();
  run.step();
}
void two_engines(Run& run) { const zr::Engine second(run.program, *run.net); }
void one_engine_after_another(Run& run) {
  run.step();
  run.engine.reset();
  run.net = std::make_shared<Net>();
  run.engine = std::make_unique<zr::Engine>(run.program, *run.net);
  run.step();
}
void outlives_engine(Run& run) {
  run.step();
  run.engine.reset();
  std::cout << run.net->in->weight.sum().item<float>();
}
// One scope over the parameters of two engines, then again with the list of the last rank in reverse order.
void gathers_of_two_engines(Run& run) {
  const int rank = run.engine->rank(), last = run.engine->world() - 1;
  run.engine.reset();
  Net nets[2];
  std::vector<std::unique_ptr<zr::Engine>> engines;
  for (const char* name : {"generator", "critic"}) {
    engines.push_back(std::make_unique<zr::Engine>(run.program, nets[engines.size()], name));
  }
  for (const bool backwards : {false, rank == last}) {
    std::vector<torch::Tensor> all = nets[0].parameters();
    for (const auto& parameter : nets[1].parameters()) all.push_back(parameter);
    if (backwards) std::reverse(all.begin(), all.end());
    {
      const auto scope = zr::gather(all);
      for (const Net& net : nets)
        for (const auto& parameter : net.parameters()) {
          float* const values = parameter.data_ptr<float>();
          for (int64_t i = 0; i < parameter.numel(); ++i) values[i] = values[i] * 2 + (&net == nets ? 1 : 2);
        }
    }
    for (int i = 0; i < 2; ++i)
      for (const auto& item : nets[i].named_parameters()) {
        const torch::Tensor value = engines[static_cast<std::size_t>(i)]->get(item.key());
        std::cout << (rank == 0 ? item.key() + " " + std::to_string(value.sum().item<double>()) + "\n" : "");
      }
  }
}
// Scopes may be nested, and operators may write inside them.
void nests_scopes(Run& run) {
  run.step();
  const auto& weight = run.net->in->weight;
  {
    const auto outer = zr::gather({weight, weight, run.net->out->weight});
    const torch::NoGradGuard no_grad;
    weight.fill_(0.5);
    {
      const auto inner = zr::gather(weight);
      weight.mul_(0.5);
    }
    weight.view(-1).slice(0, 0, 1).fill_(0.125);
  }
  const auto value = run.engine->get("first.weight").view(-1);
  require(value[0].item<float>() == 0.125f && value[1].item<float>() == 0.25f, "all writes are kept");
  try {
    const auto scope = zr::gather(weight);
    throw std::invalid_argument("no file");
  } catch (const std::invalid_argument&) {
  }
  run.step();
  std::cout << run.engine->weights_hash() << std::endl;
}
void goes_on_after_failure(Run& run) {
  run.net->in->weight.register_hook([](const torch::Tensor&) { throw std::runtime_error("a bug in a hook"); });
  try {
    run.backward();  // throws after the gradients of the last layer were reduced
  } catch (const std::exception&) {
  }
  run.step();
}
void steps_within_scope(Run& run) {
  const auto scope = zr::gather(run.net->in->weight);
  run.step();
}
// Rank 1 skips a layer.
void other_order(Run& run) {
  run.step();
  const auto x = torch::randn({4, 48});
  if (run.engine->rank() == 1)
    run.engine->backward(torch::gelu(run.net->in(x)).square().mean());
  else
    run.engine->backward(run.net->loss(x));
  run.engine->step();
}

// Values that a program writes in place or by pointer reach every rank, and the optimizer continues from them.
void writes(Run& run) {
  run.step();
  {
    const torch::NoGradGuard no_grad;
    run.net->in->weight.fill_(0.25);
  }
  {
    const auto scope = zr::gather(run.net->out->weight);
    if (run.net->out->weight.scalar_type() == torch::kFloat)
      run.net->out->weight.data_ptr<float>()[7] = 0.5;
    else
      run.net->out->weight.data_ptr<at::BFloat16>()[7] = 0.5f;
  }
  require(run.engine->get("first.weight").eq(0.25).all().item<bool>(), "the fill is in the fp32 weights");
  run.step();
  const auto in = run.engine->get("first.weight"), out = run.engine->get("last.weight");
  require((in - 0.25).abs().max().item<float>() < 0.02, "the update starts from the filled value");
  require(std::abs(out.view(-1)[7].item<float>() - 0.5f) < 0.02f,
          "the update starts from the value written by pointer");
  std::cout << run.engine->weights_hash() << std::endl;
}
// Reading by pointer changes nothing, not even the part of the master that the weights do not show.
void reads_gathered(Run& run) {
  run.step();
  const auto before = run.engine->weights_hash();
  double sum = 0;
  {
    const auto scope = zr::gather(run.net->parameters());
    for (const auto& parameter : run.net->parameters()) sum += parameter.to(torch::kDouble).sum().item<double>();
  }
  require(run.engine->weights_hash() == before, "reading changes nothing");
  run.step();
  std::cout << run.engine->weights_hash() << " " << sum << std::endl;
}
// Inference inside a step, without and with zr::Engine::Evaluation.
void infers(Run& run) {
  run.step();
  run.backward();
  const auto x = torch::ones({2, 48}, run.net->in->weight.options());
  {
    const c10::InferenceMode inference;
    std::cout << run.net->loss(x).item<float>() << " ";
  }
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    std::cout << run.net->loss(x).item<float>() << " ";
  }
  run.engine->step();
  run.step();
  std::cout << run.engine->weights_hash() << std::endl;
}

// A deferred model, built without memory and trained, is bit-identical to one built normally.
void builds_deferred(Run& run) {
  run.engine.reset();
  for (const std::string name : {"everything", "dropout", "recurrent", "tiny", "wide"}) {
    const auto plain = parity::make(name, 11);
    torch::manual_seed(12);  // the constructor seeds itself
    auto model = zr::deferred([&] { return parity::make(name, 11); });
    const auto plain_parameters = plain->named_parameters();
    zr::Engine engine(run.program, *model);
    for (const auto& item : plain_parameters)
      require(torch::equal(engine.get(item.key()), item.value().detach()) || run.program.text("train.dtype") != "fp32",
              name + ": " + item.key() + " is built the same");
    for (const auto& item : plain->named_buffers())
      require(torch::equal(model->named_buffers()[item.key()].to(torch::kFloat), item.value().to(torch::kFloat)),
              name + ": buffer " + item.key() + " is built the same");
    const std::string hash = engine.weights_hash();
    for (int i = 0; i < 2; ++i) {
      engine.backward(model->loss(engine.step_index(), engine.micro_index()));
      engine.step();
    }
    std::cout << name << " " << hash << " " << engine.weights_hash() << std::endl;
  }
}
void builds_plainly(Run& run) {
  run.engine.reset();
  for (const std::string name : {"everything", "dropout", "recurrent", "tiny", "wide"}) {
    auto model = parity::make(name, 11);
    zr::Engine engine(run.program, *model);
    const std::string hash = engine.weights_hash();
    for (int i = 0; i < 2; ++i) {
      engine.backward(model->loss(engine.step_index(), engine.micro_index()));
      engine.step();
    }
    std::cout << name << " " << hash << " " << engine.weights_hash() << std::endl;
  }
}
// Initialisers that compute with more than one tensor, and write through views.
struct Initialised : torch::nn::Module {
  Initialised() {
    a = register_module("a", torch::nn::Linear(40, 60));
    b = register_module("b", torch::nn::Conv2d(torch::nn::Conv2dOptions(6, 6, 3)));
    torch::NoGradGuard no_grad;
    torch::nn::init::orthogonal_(a->weight);
    torch::nn::init::dirac_(b->weight);
    a->weight.mul_(0.5).add_(torch::randn({60, 40}), 0.1);
    a->bias.copy_(a->weight.select(1, 3));
    a->weight.t().select(0, 2).fill_(3);
    for (auto& p : b->parameters()) p.copy_(p.to(torch::kBFloat16));
    a->weight.mul_(a->weight.t().contiguous().flatten().view({60, 40}).reshape({2, 30, 40}).sum(0).mean());
    turned = register_buffer("turned", torch::arange(6).view({2, 3}).t().to(torch::kDouble).reshape({6}));
    table = register_buffer("table", torch::outer(torch::arange(5), torch::pow(2.0, torch::arange(4))).sin());
  }
  torch::nn::Linear a{nullptr};
  torch::nn::Conv2d b{nullptr};
  torch::Tensor table, turned;
};
void builds_initialised(Run& run) {
  run.engine.reset();
  torch::manual_seed(3);
  const Initialised plain;
  torch::manual_seed(3);
  auto model = zr::deferred([] { return std::make_shared<Initialised>(); });
  zr::Engine engine(run.program, *model);
  for (const auto& item : plain.named_parameters())
    require(torch::equal(engine.get(item.key()), item.value().detach()), item.key() + " is initialised the same");
  require(torch::equal(model->table, plain.table), "the table is computed the same");
  require(torch::equal(model->turned, plain.turned), "the copy of another shape and dtype is computed the same");
}
void uses_deferred(Run&) {
  auto model = zr::deferred([] { return std::make_shared<Net>(); });
  model->loss(torch::randn({4, 48}));
}
void builds_by_value(Run&) {
  auto model = zr::deferred([] {
    auto net = std::make_shared<Net>();
    if (net->in->weight.sum().item<float>() > 0) net->in->reset_parameters();
    return net;
  });
}

// An operator on one rank that throws before it writes.
void throws_in_place(Run& run) {
  run.step();
  if (run.engine->rank() == 1) {
    const torch::NoGradGuard no_grad;
    bool thrown = false;
    try {
      run.net->in->weight.copy_(torch::zeros({3, 5}));
    } catch (const c10::Error&) {
      thrown = true;
    }
    require(thrown, "a copy of another shape is rejected");
  }
  run.step();
  std::cout << run.engine->weights_hash() << std::endl;
}
const Cases kCases{{"saves_module", saves_module},
                   {"saves_gathered_module", saves_gathered_module},
                   {"reads_pointer", reads_pointer},
                   {"reads_accessor", reads_accessor},
                   {"aliases_storage", aliases_storage},
                   {"converts_module", converts_module},
                   {"loads_module", loads_module},
                   {"own_optimizer", own_optimizer},
                   {"clips_itself", clips_itself},
                   {"plain_backward", plain_backward},
                   {"zeroes_gradients", zeroes_gradients},
                   {"two_engines", two_engines},
                   {"one_engine_after_another", one_engine_after_another},
                   {"outlives_engine", outlives_engine},
                   {"gathers_of_two_engines", gathers_of_two_engines},
                   {"steps_within_scope", steps_within_scope},
                   {"nests_scopes", nests_scopes},
                   {"goes_on_after_failure", goes_on_after_failure},
                   {"other_order", other_order},
                   {"writes", writes},
                   {"reads_gathered", reads_gathered},
                   {"infers", infers},
                   {"throws_in_place", throws_in_place},
                   {"builds_deferred", builds_deferred},
                   {"builds_plainly", builds_plainly},
                   {"builds_initialised", builds_initialised},
                   {"uses_deferred", uses_deferred},
                   {"builds_by_value", builds_by_value}};

}  // namespace

int main(int argc, char** argv) {
  const Cases& cases = argc > 1 && kCases.count(argv[1]) ? kCases : sharded_tests::memory_cases();
  if (argc < 3 || !cases.count(argv[1])) return 2;
  return zr::guarded([&] {
    const zr::Program program(argv[2], {argv + 3, argv + argc});
    Run run(program);
    cases.at(argv[1])(run);
  });
}
