// One rank of user_errors_test: runs the case named on the command line, a mistake of a program that uses zr::Engine.
//   user_errors_case CASE TOML [path=value ...]
#include <torch/torch.h>

#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "zr/engine.hpp"
#include "zr/parameters.hpp"

namespace {

int wrong = 0;
void require(bool holds, const std::string& what) {
  if (holds) return;
  std::cerr << "check failed: " << what << std::endl;
  wrong = 1;
}

struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(3);
    left = register_module("left", torch::nn::Linear(6, 7));
    right = register_module("right", torch::nn::Linear(7, 5));
    running = register_buffer("running", torch::zeros({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return right(torch::gelu(left(x))); }
  torch::Tensor loss(int64_t step, int64_t m) {
    torch::manual_seed(100 + step * 10 + m);
    const auto x = torch::randn({4, 6}).to(left->weight.scalar_type());
    return forward(x).to(torch::kFloat).square().mean();
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
  torch::Tensor running;
};

struct Run {
  Run(std::string file, std::vector<std::string> words)
      : toml(std::move(file)),
        overrides(std::move(words)),
        program(toml, overrides,
                {{"parity.model", "everything", "unused here"},
                 {"parity.weighted", false, "unused here"},
                 {"parity.overflows", false, "unused here"}}),
        net(std::make_shared<Net>()),
        engine(std::make_unique<zr::Engine>(program, *net)) {}
  torch::Tensor loss() { return net->loss(engine->step_index(), engine->micro_index()); }
  void backward() { engine->backward(loss()); }
  // Runs backward() and step() for every micro-batch of a step.
  void step() {
    do backward();
    while (!engine->step());
  }
  void make_engine(std::vector<std::string> more = {}) {
    engine.reset();
    more.insert(more.begin(), overrides.begin(), overrides.end());
    const zr::Program next(toml, more,
                           {{"parity.model", "everything", "unused here"},
                            {"parity.weighted", false, "unused here"},
                            {"parity.overflows", false, "unused here"}});
    engine = std::make_unique<zr::Engine>(next, *net);
  }
  bool first() const { return engine->rank() == 0; }
  std::string toml;
  std::vector<std::string> overrides;
  zr::Program program;
  std::shared_ptr<Net> net;
  std::unique_ptr<zr::Engine> engine;
};

using Case = std::function<void(Run&)>;

// Runs fn, which must throw, and prints the message of the exception.
template <class F>
void says(const char* name, F&& fn) {
  try {
    fn();
    require(false, std::string(name) + " throws");
  } catch (const std::exception& error) {
    std::cout << name << ": " << error.what() << std::endl;
  }
}

// ---- exceptions that the program throws
void wrong_shape(Run& run) { run.net->forward(torch::randn({4, 5}, run.net->left->weight.options())); }
void float_input(Run& run) { run.net->forward(torch::randn({4, 6})); }
void double_input(Run& run) { run.net->forward(torch::randn({4, 6}, torch::kDouble)); }
void casts_input(Run& run) {
  const auto x = torch::randn({4, 6}, torch::kDouble).to(run.engine->dtype());
  run.engine->backward(run.net->forward(x).to(torch::kFloat).mean());
  run.engine->step();
}
void reads_pointer(Run& run) { std::cout << run.net->left->weight.data_ptr<float>()[0]; }
void throws_object(Run&) { throw 5; }

// ---- keys and command lines
void tells_strategy(Run& run) {
  std::cout << run.program.text("strategy.use") << " " << run.program.text("strategy") << std::endl;
}
void unknown_key(Run& run) { run.program.integer("train.stepz"); }
void key_of_other_type(Run& run) { run.program.integer("job.name"); }
template <class... Keys>
Case declares(Keys... keys) {
  return [=](Run& run) { const zr::Program program(run.toml, {}, {keys...}); };
}
Case command_line(const char* word) {
  return [word](Run&) {
    std::string name = "/some/folder/app", argument = word;
    char* argv[] = {name.data(), argument.data(), nullptr};
    const zr::Program program(2, argv,
                              {{"model.layers", 4, "blocks of the model", 1, 64},
                               {"model.dropout", 0.1, "part of the activations left out"},
                               {"data.text", "", "the file to learn from"}});
  };
}

// ---- backward and step
void detached(Run& run) { run.engine->backward(run.loss().detach()); }
void undefined_loss(Run& run) { run.engine->backward(torch::Tensor()); }
Case weighs(double weight) {
  return [weight](Run& run) { run.engine->backward(run.loss(), weight); };
}
void backward_in_evaluation(Run& run) {
  const auto loss = run.loss();
  const zr::Engine::Evaluation evaluation(*run.engine);
  run.engine->backward(loss);
}
void step_in_evaluation(Run& run) {
  run.backward();
  const zr::Engine::Evaluation evaluation(*run.engine);
  run.engine->step();
}

// After the evaluation, the random state is that of the loaded checkpoint, as without an evaluation.
void load_in_evaluation(Run& run) {
  run.step();
  const std::string folder = run.engine->save(run.program.text("job.runs") + "/saved");
  run.step();
  {
    const zr::Engine::Evaluation outer(*run.engine);
    const zr::Engine::Evaluation inner(*run.engine);
    run.engine->load(folder);
    torch::rand({3});
  }
  const auto inside = torch::rand({5});
  run.engine->load(folder);
  require(torch::equal(torch::rand({5}), inside), "the random state is that of the checkpoint");
}

// Returns a copy of its input; its backward throws.
struct Throws : torch::autograd::Function<Throws> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("a bug in the backward of this function");
  }
};
// Mistakes during training that change nothing: the weights equal those of a run without them.
void goes_on_after_mistakes(Run& run) {
  const auto mistakes = [&] {
    int thrown = 0;
    const auto fails = [&](const std::function<void()>& fn) {
      try {
        fn();
      } catch (const std::exception&) {
        ++thrown;
      }
    };
    const auto loss = run.loss();
    fails([&] { run.engine->backward(loss.detach()); });
    fails([&] { run.engine->backward(Throws::apply(loss)); });
    fails([&] { run.engine->backward(loss, std::numeric_limits<double>::quiet_NaN()); });
    fails([&] { run.engine->set("left.weight", zr::TensorKind::value, torch::zeros({2})); });
    fails([&] { run.engine->get("none"); });
    fails([&] {
      const zr::Engine::Evaluation evaluation(*run.engine);
      run.engine->backward(torch::zeros({}));
    });
    fails([&] { run.engine->backward(loss), run.engine->backward(loss); });  // the first call frees the graph
    require(thrown == 7, "each mistake throws; thrown: " + std::to_string(thrown));
  };
  std::vector<std::string> hashes;
  for (const bool errs : {false, true}) {
    run.net = std::make_shared<Net>();
    run.make_engine();
    while (run.engine->step_index() < 3) {
      for (int micro = 0; micro < run.engine->accumulation(); ++micro) {
        if (errs && micro == 0) {
          mistakes();
          ++micro;  // the last mistake contains one correct backward()
        }
        if (micro < run.engine->accumulation()) run.backward();
      }
      run.engine->step();
    }
    hashes.push_back(run.engine->weights_hash());
  }
  require(hashes[0] == hashes[1], "mistakes change no weight");
}
// An exception after some gradients were reduced: every later call fails with an error that says so.
void throws_late(Run& run) {
  run.net->left->weight.register_hook([](const torch::Tensor&) { throw std::runtime_error("a bug in a hook"); });
  says("backward", [&] { run.backward(); });
  says("step", [&] { run.engine->step(); });
  says("backward again", [&] { run.backward(); });
}

// ---- weights of 0
// In every step, the last micro-batch of the last rank has no data, so its loss is NaN.
void empty_micro_batch(Run& run) {
  const int64_t micros = int64_t{run.engine->accumulation()} * run.engine->world();
  const bool leaves_out = micros == 3;  // the reference run, which does not have that micro-batch
  while (run.engine->step_index() < 3) {
    do {
      const bool empty = !leaves_out && run.engine->micro_index() == 3;
      // Every rank runs one forward pass, because operators on sharded parameters are collective.
      const auto nothing = torch::empty({0, 6}, run.net->left->weight.options());
      const auto loss = empty ? run.net->forward(nothing).to(torch::kFloat).mean() : run.loss();
      require(empty == loss.isnan().item<bool>(), "the mean of no elements is NaN");
      run.engine->backward(loss, empty ? 0 : 1);
    } while (!run.engine->step());
    require(std::isfinite(run.engine->last_loss()), "the loss of the step is finite");
  }
  const std::string hash = run.engine->weights_hash();
  if (run.first()) std::cout << run.engine->last_loss() << " " << hash << std::endl;
}
void nothing_weighs(Run& run) {
  const std::string before = run.engine->weights_hash();
  try {
    do run.engine->backward(run.loss(), 0);
    while (!run.engine->step());
  } catch (const std::exception& error) {
    if (run.first()) std::cout << error.what() << std::endl;
  }
  require(run.engine->weights_hash() == before && run.engine->step_index() == 0, "no step was completed");
  run.step();
  require(run.engine->step_index() == 1, "training continues");
}

// ---- collective calls on one rank only
Case on_rank_0(const std::function<void(Run&)>& call) {
  return [call](Run& run) {
    run.step();
    if (run.first()) call(run);
    run.step();
  };
}
void gathers_alone(Run& run) { const auto scope = zr::gather(run.net->left->weight); }
void evaluates_alone(Run& run) { const zr::Engine::Evaluation evaluation(*run.engine); }
void gets_at_the_end(Run& run) {
  run.step();
  if (run.first()) run.engine->get("left.weight");
}
void gets_others(Run& run) { run.engine->get(run.first() ? "left.weight" : "right.weight"); }
void calls_others(Run& run) {
  if (run.first())
    run.engine->weights_hash();
  else
    run.engine->mean(1);
}
// Rank 1 skips the first layer.
void branches(Run& run) {
  run.step();
  const auto x = torch::randn({4, 7}, run.net->left->weight.options());
  if (run.first())
    run.backward();
  else
    run.engine->backward(run.net->right(x).to(torch::kFloat).mean());
  run.engine->step();
}
void infers_alone(Run& run) {
  run.step();
  if (run.first()) {
    const torch::NoGradGuard no_grad;
    run.net->loss(0, 0);
  }
  run.step();
}
void writes_alone(Run& run) {
  run.step();
  if (run.first()) {
    const torch::NoGradGuard no_grad;
    run.net->left->weight.clamp_(-0.1, 0.1);
  }
  run.step();
}

// A transposed weight: its gradient would be added to the wrong elements.
void transposes(Run& run) {
  torch::nn::Linear square(4, 4);
  zr::Engine engine(run.program, *square, "square");
  {
    const torch::NoGradGuard no_grad;
    square->weight.t_();
  }
  engine.backward(square(torch::ones({2, 4})).square().mean());
}

// ---- get and set
void set_misuse(Run& run) {
  zr::Engine& engine = *run.engine;
  const auto set = [&](const torch::Tensor& tensor) { engine.set("left.bias", zr::TensorKind::value, tensor); };
  says("undefined", [&] { set({}); });
  says("shape", [&] { set(torch::zeros({2, 3})); });
  says("complex", [&] { set(torch::zeros({7}, torch::kComplexFloat)); });
  says("sparse", [&] { set(torch::zeros({7}).to_sparse()); });
  says("meta", [&] { set(torch::zeros({7}, torch::kMeta)); });
  says("slot", [&] { engine.set("left.bias", zr::TensorKind::value, torch::zeros({7}), "exp_avg"); });
  says("gradient", [&] { engine.set("left.bias", zr::TensorKind::gradient, torch::zeros({7})); });
  says("get slot", [&] { engine.get("left.bias", zr::TensorKind::gradient, "exp_avg"); });
  says("odd name", [&] { engine.get("left\n\x1b[31m.bias"); });
  says("no name", [&] { engine.get(""); });
  says("save", [&] { engine.save(""); });
  says("load", [&] { engine.load(""); });
  says("tokens", [&] { engine.add_tokens(-1); });
  set(torch::arange(7, torch::kDouble).flip(0));
  require(torch::equal(engine.get("left.bias"), torch::arange(7, torch::kFloat).flip(0)),
          "set() accepts a correct tensor");
  run.step();
}
void set_differs(Run& run) {
  run.engine->set("left.bias", zr::TensorKind::value, torch::full({7}, run.engine->rank() == 2 ? 1 : 0));
}

// ---- threads, hooks, lifetimes
void other_thread(Run& run) {
  std::thread([&] {
    says("get", [&] { run.engine->get("left.weight"); });
    says("backward", [&] { run.backward(); });
    says("gather", [&] { const auto scope = zr::gather(run.net->left->weight); });
  }).join();
  run.step();
}
void calls_in_hook(Run& run) {
  auto loss = run.loss();
  loss.register_hook([&](const torch::Tensor&) {
    for (const auto& [name, fn] :
         std::map<std::string, std::function<void()>>{{"backward", [&] { run.engine->backward(loss); }},
                                                      {"get", [&] { run.engine->get("left.weight"); }},
                                                      {"step", [&] { run.engine->step(); }}})
      says(name.c_str(), fn);
  });
  run.engine->backward(loss);
  run.engine->step();
}
void outlives(Run& run) {
  run.step();
  {
    const auto scope = zr::gather(run.net->left->weight);
    const zr::Engine::Evaluation evaluation(*run.engine);
    run.engine.reset();
  }
  run.net = std::make_shared<Net>();
  run.make_engine();
  run.step();
}
struct Empty : torch::nn::Module {};
void no_parameters(Run& run) {
  run.engine.reset();
  Empty model;
  zr::Engine engine(run.program, model);
}

// ---- release()
void releases(Run& run) {
  for (int i = 0; i < 3; ++i) run.step();
  const auto before = run.net->named_parameters();
  std::map<std::string, torch::Tensor> values;
  for (const auto& item : before) values[item.key()] = run.engine->get(item.key());
  double inside = 0;
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    inside = run.net->loss(7, 0).item<double>();
  }
  const auto dtype = run.engine->dtype();
  const bool master = run.program.text("job.name") == "master";
  const int rank = run.engine->rank();
  master ? run.engine->release(torch::kFloat) : run.engine->release();
  for (const auto& item : run.net->named_parameters()) {
    const auto& parameter = item.value();
    require(parameter.scalar_type() == (master ? torch::kFloat : dtype), item.key() + " has the dtype");
    require(torch::equal(parameter.detach(), values[item.key()].to(parameter.scalar_type())),
            item.key() + " has the values");
    require(!parameter.grad().defined() && parameter.requires_grad() && parameter.is_leaf(), item.key() + " is plain");
    require(parameter.data_ptr() != nullptr, item.key() + " has memory");
    require(before[item.key()].is_same(parameter), item.key() + " is the same tensor");
  }
  if (rank == 0) {  // on one rank only: after release() nothing is collective
    const double outside = run.net->loss(7, 0).item<double>();
    require(master ? std::abs(outside - inside) < 0.02 : outside == inside, "the loss equals that of the evaluation");
    run.net->loss(8, 0).backward();
    require(run.net->left->weight.grad().defined(), "plain autograd works");
    run.net->zero_grad();
    const torch::NoGradGuard no_grad;
    run.net->left->weight.add_(1).sub_(1);
  }
  // Another engine continues the training.
  run.net->zero_grad();
  for (const auto& item : run.net->named_parameters()) {
    const torch::NoGradGuard no_grad;
    item.value().copy_(values[item.key()]);
  }
  run.make_engine();
  for (int i = 0; i < 2; ++i) run.step();
  const std::string hash = run.engine->weights_hash();
  if (rank == 0) std::cout << inside << " " << hash << std::endl;
}
// Plain gradient descent over two phases of training is bit-identical without and with engines.
void follows_torch(Run& run) {
  const auto twin = std::make_shared<Net>();
  for (int phase = 0; phase < 2; ++phase) {
    const auto rate = static_cast<float>(run.program.number("optimizer.lr"));
    for (int64_t step = 0; step < 3; ++step) {
      twin->zero_grad();
      twin->loss(step, 0).backward();
      const torch::NoGradGuard no_grad;
      for (auto& parameter : twin->parameters()) parameter.sub_(parameter.grad() * rate);
      const torch::AutoGradMode grad(true);
      run.step();
    }
    for (const auto& item : twin->named_parameters())
      require(torch::equal(run.engine->get(item.key()), item.value()), item.key() + " is bit-identical to libtorch");
    run.engine->release();
    require(torch::equal(run.net->loss(5, 0), twin->loss(5, 0)), "the loss of the released model is bit-identical too");
    run.make_engine();
  }
}
void released_engine(Run& run) {
  run.step();
  const auto view = run.net->left->weight.t();
  zr::Engine& engine = *run.engine;
  const auto loss = run.loss();
  engine.release();
  says("backward", [&] { engine.backward(loss); });
  says("step", [&] { engine.step(); });
  says("get", [&] { engine.get("left.weight"); });
  says("set", [&] { engine.set("left.weight", zr::TensorKind::value, torch::zeros({7, 6})); });
  says("save", [&] { engine.save("x"); });
  says("load", [&] { engine.load("x"); });
  says("mean", [&] { engine.mean(1); });
  says("weights_hash", [&] { engine.weights_hash(); });
  says("finish", [&] { engine.finish(); });
  says("validation", [&] { engine.validation(1); });
  says("add_tokens", [&] { engine.add_tokens(1); });
  says("done", [&] { engine.done(); });
  says("rank", [&] { engine.rank(); });
  says("dtype", [&] { engine.dtype(); });
  says("validation_due", [&] { engine.validation_due(); });
  says("release", [&] { engine.release(); });
  says("Evaluation", [&] { const zr::Engine::Evaluation evaluation(engine); });
  const auto scope = zr::gather(run.net->left->weight);
}
void release_misuse(Run& run) {
  says("type", [&] { run.engine->release(torch::kDouble); });
  run.backward();
  says("within a step", [&] { run.engine->release(); });
  run.engine->step();
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    says("within an evaluation", [&] { run.engine->release(); });
  }
  says("second engine", [&] { const zr::Engine second(run.program, *run.net); });
  run.step();
  run.engine->release();
}
void destroys(Run& run) {
  run.step();
  run.engine.reset();
  says("use", [&] { std::cout << run.net->left->weight.sum().item<float>(); });
  says("engine", [&] { run.make_engine(); });
}
const std::map<std::string, Case> kCases{
    {"throws_own", [](Run&) { throw std::runtime_error("line 7 of the data is torn"); }},
    {"throws_argument", [](Run&) { throw std::invalid_argument("--epochs 0: must be above 0"); }},
    {"throws_no_memory", [](Run&) { throw std::bad_alloc(); }},
    {"throws_object", throws_object},
    {"wrong_shape", wrong_shape},
    {"float_input", float_input},
    {"double_input", double_input},
    {"casts_input", casts_input},
    {"reads_pointer", reads_pointer},
    {"tells_strategy", tells_strategy},
    {"unknown_key", unknown_key},
    {"key_of_other_type", key_of_other_type},
    {"key_without_meaning", declares(zr::Key("my.layers", 4, ""))},
    {"key_without_table", declares(zr::Key("layers", 4, "blocks of the model"))},
    {"key_out_of_range", declares(zr::Key("my.layers", 4, "blocks of the model", 5, 9))},
    {"key_twice", declares(zr::Key("my.layers", 4, "blocks"), zr::Key("my.layers", 5, "blocks"))},
    {"key_of_zeroth", declares(zr::Key("train.steps", 4, "steps"))},
    {"help", command_line("--help")},
    {"unknown_option", command_line("--verbose")},
    {"detached", detached},
    {"undefined_loss", undefined_loss},
    {"weighs_nan", weighs(std::numeric_limits<double>::quiet_NaN())},
    {"weighs_less", weighs(-0.5)},
    {"weighs_much", weighs(1e300)},
    {"weighs_little", weighs(1e-300)},
    {"weighs_too_little_for_fp16", weighs(1e-5)},
    {"transposes", transposes},
    {"weighs_infinite", weighs(std::numeric_limits<double>::infinity())},
    {"backward_in_evaluation", backward_in_evaluation},
    {"step_in_evaluation", step_in_evaluation},
    {"load_in_evaluation", load_in_evaluation},
    {"goes_on_after_mistakes", goes_on_after_mistakes},
    {"throws_late", throws_late},
    {"empty_micro_batch", empty_micro_batch},
    {"nothing_weighs", nothing_weighs},
    {"rank0_get", on_rank_0([](Run& run) { run.engine->get("left.weight", zr::TensorKind::state, "exp_avg"); })},
    {"rank0_set", on_rank_0([](Run& run) { run.engine->set("left.bias", zr::TensorKind::value, torch::zeros({7})); })},
    {"rank0_hash", on_rank_0([](Run& run) { run.engine->weights_hash(); })},
    {"rank0_mean", on_rank_0([](Run& run) { run.engine->mean(1); })},
    {"rank0_save", on_rank_0([](Run& run) { run.engine->save(run.program.text("job.runs") + "/saved"); })},
    {"rank0_finish", on_rank_0([](Run& run) { run.engine->finish(); })},
    {"rank0_release", on_rank_0([](Run& run) { run.engine->release(); })},
    {"rank0_gather", on_rank_0(gathers_alone)},
    {"rank0_evaluation", on_rank_0(evaluates_alone)},
    {"gets_at_the_end", gets_at_the_end},
    {"gets_others", gets_others},
    {"calls_others", calls_others},
    {"branches", branches},
    {"infers_alone", infers_alone},
    {"writes_alone", writes_alone},
    {"set_misuse", set_misuse},
    {"set_differs", set_differs},
    {"other_thread", other_thread},
    {"calls_in_hook", calls_in_hook},
    {"outlives", outlives},
    {"no_parameters", no_parameters},
    {"releases", releases},
    {"follows_torch", follows_torch},
    {"released_engine", released_engine},
    {"release_misuse", release_misuse},
    {"destroys", destroys}};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || !kCases.count(argv[1])) return 64;
  const int code = zr::guarded([&] {
    Run run(argv[2], {argv + 3, argv + argc});
    kCases.at(argv[1])(run);
  });
  return code ? code : wrong * 65;
}
