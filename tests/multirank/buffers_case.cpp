// One rank of the buffer tests: runs the case named on the command line, prints the values that the test compares
// between ranks, and exits with 1 if a check fails.
//   buffers_case CASE TOML [path=value ...]
#include <torch/script.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <limits>
#include <sstream>

#include "multirank/buffers_model.hpp"
#include "multirank/engine_run.hpp"

namespace {

using buffers_tests::Running;
using engine_tests::require;
using engine_tests::Run;
using engine_tests::same;
using Buffers = std::map<std::string, torch::Tensor>;

std::string text_of(const torch::Tensor& tensor) {
  std::ostringstream text;
  const torch::Tensor values = tensor.to(torch::kDouble).reshape({-1});
  for (int64_t i = 0; i < values.numel(); ++i) text << (i ? " " : "") << std::hexfloat << values[i].item<double>();
  return text.str();
}

// A training run in this process, with its own program, model and engine.
struct Job {
  Job(const Run& run, const std::vector<std::string>& more, const torch::Tensor& part = {})
      : program(run.arguments[0], joined(run.arguments, more)), model(7), engine(program, with(model, part)) {}
  static Running& with(Running& model, const torch::Tensor& part) {
    if (part.defined()) model.replace_part(part);
    return model;
  }
  static std::vector<std::string> joined(const std::vector<std::string>& a, const std::vector<std::string>& b) {
    std::vector<std::string> all(a.begin() + 1, a.end());
    all.insert(all.end(), b.begin(), b.end());
    return all;
  }
  void step() {
    const int64_t before = engine.step_index();
    while (engine.step_index() == before) {
      engine.backward(model.loss(engine.step_index(), engine.micro_index()));
      engine.step();
    }
    losses.push_back(engine.last_loss());
  }
  void train() {
    while (!engine.done()) step();
  }
  Buffers buffers() const {
    Buffers all;
    for (const auto& item : model.named_buffers()) all[item.key()] = item.value().clone();
    return all;
  }
  double validation() {
    const zr::Engine::Evaluation evaluation(engine);
    model.eval();
    const double loss = model.loss(999, 0).item<double>();
    model.train();
    return loss;
  }
  zr::Program program;
  Running model;
  zr::Engine engine;
  std::vector<double> losses;
};

bool equal(const Buffers& a, const Buffers& b) {
  for (const auto& [name, tensor] : a)
    if (!b.count(name) || !same(tensor, b.at(name))) return false;
  return a.size() == b.size();
}

// An uninterrupted run and a run resumed half way give the same results on each rank, under every strategy.
void resumes_exactly(Run& run) {
  const std::string folder = std::getenv("CHECKPOINT");
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
    for (const std::string async : {"false", "true"}) {
      const std::string who = strategy + (async == "true" ? " async" : ""), dir = "checkpoint.dir=" + folder + who;
      const std::vector<std::string> how{"strategy=" + strategy, "checkpoint.async=" + async};
      const auto with = [&](std::vector<std::string> more) {
        more.insert(more.end(), how.begin(), how.end());
        return more;
      };
      std::string hash;
      std::vector<double> losses;
      Buffers buffers;
      {
        Job uninterrupted(run, with({"train.steps=6", "job.name=uninterrupted"}));
        uninterrupted.train();
        hash = uninterrupted.engine.weights_hash();
        losses = uninterrupted.losses;
        buffers = uninterrupted.buffers();
        std::cout << who << " validation " << std::hexfloat << uninterrupted.validation() << std::endl;
        require(equal(uninterrupted.buffers(), buffers), who + ": the evaluation restores the buffers");
      }
      Buffers half;
      {
        Job first(run, with({"train.steps=3", "job.name=first", "checkpoint.every=3", dir}));
        first.train();
        half = first.buffers();
      }
      Job rest(run, with({"train.steps=6", "job.name=rest", "checkpoint.resume=true", dir}));
      require(rest.engine.step_index() == 3, who + ": resumes at step 3");
      require(equal(rest.buffers(), half), who + ": the resume restores each rank's own buffers");
      rest.train();
      require(rest.losses == std::vector<double>(losses.begin() + 3, losses.end()), who + ": the same losses");
      require(rest.engine.weights_hash() == hash, who + ": the same weights");
      require(equal(rest.buffers(), buffers), who + ": the same buffers");
      std::cout << who << " validation " << std::hexfloat << rest.validation() << std::endl;
    }
}

// Trains three steps and saves a checkpoint in CHECKPOINT.
void saves(Run& run) {
  Job job(run, {"train.steps=3", "job.name=saves"});
  job.train();
  job.engine.save(std::getenv("CHECKPOINT"));
}

const std::vector<std::string> kRules{"rank0", "mean", "per_rank"};

// Loads CHECKPOINT under a train.buffers rule and prints this rank's buffers, one line per buffer.
void loads_with(Run& run, const std::string& rule) {
  Job job(run, {"train.steps=6", "job.name=loads-" + rule, "checkpoint.resume=true", "train.buffers=" + rule,
                std::string("checkpoint.dir=") + std::getenv("CHECKPOINT")});
  std::cout << "step " << job.engine.step_index() << " hash " << job.engine.weights_hash() << std::endl;
  for (const auto& [name, tensor] : job.buffers())
    std::cout << rule << " " << name << ": " << text_of(tensor) << std::endl;
  job.train();
  std::cout << "trained to " << job.engine.step_index() << std::endl;
}

void loads(Run& run) {
  for (const std::string& rule : kRules) loads_with(run, rule);
}

// Sets buffers to known values that differ by rank (level: 1 + rank, num_batches_tracked: 10 * rank) and checks them
// under a train.buffers rule.
void declares_by(Run& run, const std::string& rule) {
  const std::string folder = std::getenv("CHECKPOINT") + rule;
  Job job(run, {"train.steps=4", "job.name=declares-" + rule, "train.buffers=" + rule});
  const int rank = job.engine.rank(), world = job.engine.world();
  job.step();
  torch::Tensor batches = job.model.norm->num_batches_tracked;
  job.model.level.fill_(1 + rank);
  batches.fill_(10 * rank);
  const Buffers own = job.buffers();
  const double level = rule == "rank0" ? 1 : rule == "mean" ? (world + 1) / 2.0 : 1 + rank;
  const int64_t count = rule == "per_rank" ? 10 * rank : 0;
  const auto declared = [&](const std::string& when) {
    require(job.model.level.eq(level).all().item<bool>(), rule + ": level " + when);
    require(batches.item<int64_t>() == count, rule + ": num_batches_tracked " + when);
  };
  {
    const zr::Engine::Evaluation outer(job.engine);
    declared("in an evaluation");
    {
      const zr::Engine::Evaluation inner(job.engine);
      declared("in an evaluation within another");
    }
    declared("after the inner evaluation");
    require(job.engine.buffer("level").eq(level).all().item<bool>(), rule + ": buffer() in an evaluation");
    job.model.level.fill_(77);  // the end of the evaluation discards this write
    job.engine.save(folder);
  }
  require(equal(job.buffers(), own), rule + ": own buffers after the evaluation");
  try {
    const zr::Engine::Evaluation evaluation(job.engine);
    throw std::runtime_error("thrown within");
  } catch (const std::runtime_error&) {
  }
  require(equal(job.buffers(), own), rule + ": own buffers after an exception ended the evaluation");
  require(job.engine.buffer("level").eq(level).all().item<bool>(), rule + ": buffer()");
  require(job.engine.buffer("norm.num_batches_tracked").item<int64_t>() == count, rule + ": buffer() of integers");
  require(same(job.engine.buffer("table"), own.at("table")),
          rule + ": buffer() of a buffer that is equal on all ranks");
  job.engine.load(folder);
  require(equal(job.buffers(), own), rule + ": a checkpoint saved in an evaluation has each rank's own buffers");
  {
    const zr::Engine::Evaluation evaluation(job.engine);
    job.engine.load(folder);
    declared("after a load in an evaluation");
  }
  require(equal(job.buffers(), own), rule + ": own buffers after a load in an evaluation");
  job.engine.set_buffer("level", torch::full({Running::kHidden}, 5, torch::kDouble));
  require(job.model.level.eq(5).all().item<bool>(), rule + ": set_buffer() sets this rank's buffer");
  require(job.engine.buffer("level").eq(5).all().item<bool>(), rule + ": buffer() returns the value that was set");
}
void declares(Run& run) {
  for (const std::string& rule : kRules) declares_by(run, rule);
}

// CPU seconds to load weights from a safetensors file; the minimum of three loads.
double seconds_of_loading(Job& job, const std::string& file) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; ++i) {
    const std::clock_t begin = std::clock();
    const zr::LoadReport loaded = job.engine.load(file, {true, false, false, false});
    least = std::min(least, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    require(loaded.missing.empty() && loaded.unexpected.size() > 9000,
            "the file contains the weights and many other tensors");
  }
  return least;
}

// CHECKPOINT-few.safetensors has a tenth of the tensors of CHECKPOINT-many.safetensors.
void loads_large(Run& run) {
  Job job(run, {"train.steps=1", "job.name=loads-large"});
  const std::string folder = std::getenv("CHECKPOINT");
  const double few = seconds_of_loading(job, folder + "-few.safetensors"),
               many = seconds_of_loading(job, folder + "-many.safetensors");
  std::cout << "few " << few << " s, many " << many << " s, ratio " << many / few << std::endl;
  require(many <= 12 * few, "ten times the tensors take about ten times as long");
}

// CPU seconds to save, load and hash a model with `count` parameters.
double seconds_of_a_model(Run& run, int count) {
  torch::nn::Module model;
  for (int i = 0; i < count; ++i) model.register_parameter("p" + std::to_string(i), torch::full({4}, 0.5 * i));
  zr::Engine engine(
      zr::Program(run.arguments[0], Job::joined(run.arguments, {"job.name=many" + std::to_string(count)})), model);
  const std::clock_t begin = std::clock();
  engine.load(engine.save(run.program.text("job.runs") + "/saved" + std::to_string(count)));
  engine.weights_hash();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}
void saves_large(Run& run) {
  const double few = seconds_of_a_model(run, 3000), many = seconds_of_a_model(run, 30000);
  std::cout << "few " << few << " s, many " << many << " s, ratio " << many / few << std::endl;
  require(many <= 20 * few, "ten times the parameters take about ten times as long");
}

// A TorchScript module whose forward assigns a new tensor to its buffer: the engine saves, loads and restores the
// tensor that the module has now.
void follows_script(Run& run) {
  torch::jit::Module module("Script");
  module.register_parameter("weight", torch::linspace(-1, 1, 6).set_requires_grad(true), false);
  module.register_buffer("level", torch::zeros({6}));
  module.define(
      "def forward(self, x):\n"
      "  self.level = self.level * 0.5 + x.mean(0)\n"
      "  return (x * self.weight).square().mean()\n");
  const std::string dir = run.program.text("job.runs") + "/script-checkpoints";
  const zr::Program program(
      run.arguments[0],
      Job::joined(run.arguments, {"train.steps=8", "job.name=script", "checkpoint.dir=" + dir, "checkpoint.every=1"}));
  zr::Engine engine(program, module);
  const auto level = [&] { return module.attr("level").toTensor().clone(); };
  const auto step = [&] {
    const int64_t before = engine.step_index();
    while (engine.step_index() == before) {
      const double shift = static_cast<double>(10 * before + engine.micro_index());
      engine.backward(module.forward({torch::arange(18, torch::kFloat).view({3, 6}).add(shift).sin()}).toTensor());
      engine.step();
    }
  };
  for (int i = 0; i < 2; ++i) step();
  const torch::Tensor second = level();
  for (int i = 0; i < 2; ++i) step();
  const torch::Tensor fourth = level();
  require(!same(second, fourth), "forward changes the buffer");
  {
    const zr::Engine::Evaluation evaluation(engine);
    module.forward({torch::ones({3, 6})});
    require(!same(level(), fourth), "forward changes the buffer in an evaluation too");
  }
  require(same(level(), fourth), "the end of an evaluation restores this rank's value");
  engine.load(dir + "/step-00000002");
  require(same(level(), second), "the checkpoint of step 2 has the buffer of step 2");
  for (int i = 0; i < 2; ++i) step();
  require(same(level(), fourth), "training from that checkpoint repeats the same values");
  const torch::Tensor all = engine.buffer("level");
  if (engine.rank() == 0) require(same(all, level()), "buffer() returns the current tensor");
}

// A buffer that is empty at first and grows with every forward.
void script_grows(Run& run) {
  torch::jit::Module module("Script");
  module.register_parameter("weight", torch::linspace(-1, 1, 6).set_requires_grad(true), false);
  module.register_buffer("seen", torch::zeros({0}));
  module.define(
      "def forward(self, x):\n"
      "  self.seen = torch.cat([self.seen, x.mean(0)])\n"
      "  return (x * self.weight).square().mean()\n");
  zr::Engine engine(run.program, module);
  engine.backward(module.forward({torch::ones({3, 6})}).toTensor());
}
void retyped(Run& run) {
  Job job(run, {});
  job.step();
  job.model.level.set_data(job.model.level.to(torch::kHalf));
  job.step();
}

// Each of these calls must throw.
void no_such_buffer(Run& run) {
  Job job(run, {});
  job.engine.buffer("levle");
}
void other_shape(Run& run) {
  Job job(run, {});
  job.engine.set_buffer("level", torch::zeros({2}));
}
void other_values(Run& run) {
  Job job(run, {});
  job.engine.set_buffer("level", torch::full({Running::kHidden}, job.engine.rank()));
}
void set_in_evaluation(Run& run) {
  Job job(run, {});
  const zr::Engine::Evaluation evaluation(job.engine);
  job.engine.set_buffer("level", torch::zeros({Running::kHidden}));
}
// The module replaces a buffer with a smaller one, or registers another one, after the engine is created.
void replace(Job& job) { job.model.replace_part(torch::full({1}, 3.0 + job.engine.rank())); }
void replaced_read(Run& run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  job.engine.buffer("part.level");
}
void replaced_set(Run& run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  job.engine.set_buffer("part.level", torch::zeros({1}));
}
void replaced_saved(Run& run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  job.engine.save(run.program.text("job.runs") + "/none");
}
void replaced_evaluated(Run& run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  const zr::Engine::Evaluation evaluation(job.engine);
}
void added_read(Run& run) {
  Job job(run, {});
  job.model.register_buffer("later", torch::zeros({2}));
  job.engine.buffer("later");
}
void replaced_differently(Run& run) {
  Job job(run, {}, torch::ones({1000}));
  if (job.engine.rank() == 0) replace(job);
  job.engine.refresh();
}
// refresh() picks up the module's current buffers with rank 0's values; checkpoints then contain them.
void replaced_and_refreshed(Run& run) {
  Job job(run, {"train.steps=6"}, torch::ones({1000}));
  job.step();
  replace(job);
  job.engine.refresh();
  require(job.model.part_level.eq(3).all().item<bool>(), "a new buffer has rank 0's values");
  require(same(job.engine.buffer("part.level"), torch::full({1}, 3.0)), "buffer() returns the new buffer");
  job.engine.set_buffer("part.level", torch::full({1}, 4.0));
  const std::string saved = job.engine.save(run.program.text("job.runs") + "/refreshed");
  job.engine.set_buffer("part.level", torch::full({1}, 5.0));
  job.engine.load(saved);
  require(job.model.part_level.eq(4).all().item<bool>(), "the checkpoint contains the new buffer");
  job.step();
}
// Only rank 0 adds a parameter that the engine cannot train: refresh() throws on all ranks and changes nothing.
void refresh_fails_on_one_rank(Run& run) {
  Job job(run, {"train.steps=6"});
  job.step();
  if (job.engine.rank() == 0)
    job.model.register_module("extra", std::make_shared<torch::nn::Module>())
        ->register_parameter("sparse", torch::zeros({2}).to_sparse(), false);
  std::string error;
  try {
    job.engine.refresh();
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  const bool reported = error.find("parameter 'extra.sparse' is not a dense floating-point tensor") != error.npos;
  const bool names = error.find("engine.refresh() failed on rank 0: ") != error.npos;
  require(reported && names == (job.engine.rank() != 0), "every rank reports rank 0's error: " + error);
  if (job.engine.rank() == 0) job.model.unregister_module("extra");
  job.step();
}
// A step without any gradient throws; the next checkpoint still records the previous step as applied.
void reaches_nothing(Run& run) {
  Job job(run, {"train.steps=6"});
  job.step();
  const torch::Tensor other = torch::ones({3}, torch::requires_grad());
  bool thrown = false;
  try {
    while (true) {
      job.engine.backward(other.sum());
      if (job.engine.step()) break;
    }
  } catch (const std::exception&) {
    thrown = true;
  }
  require(thrown, "a loss that depends on no parameter throws");
  std::ifstream in(job.engine.save(run.program.text("job.runs") + "/reached") + "/manifest.json");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const auto at = text.find("last_step_applied");
  require(at != text.npos && text.substr(at, 30).find("true") != std::string::npos,
          "the checkpoint records that the last step was applied");
}
void resumes(Run& run) { Job job(run, {"checkpoint.resume=true"}); }

const engine_tests::Cases kCases{{"resumes_exactly", resumes_exactly},
                                 {"saves", saves},
                                 {"loads", loads},
                                 {"declares", declares},
                                 {"follows_script", follows_script},
                                 {"script_grows", script_grows},
                                 {"retyped", retyped},
                                 {"loads_large", loads_large},
                                 {"saves_large", saves_large},
                                 {"no_such_buffer", no_such_buffer},
                                 {"other_shape", other_shape},
                                 {"other_values", other_values},
                                 {"set_in_evaluation", set_in_evaluation},
                                 {"replaced_read", replaced_read},
                                 {"replaced_set", replaced_set},
                                 {"replaced_saved", replaced_saved},
                                 {"replaced_evaluated", replaced_evaluated},
                                 {"added_read", added_read},
                                 {"replaced_differently", replaced_differently},
                                 {"replaced_and_refreshed", replaced_and_refreshed},
                                 {"refresh_fails_on_one_rank", refresh_fails_on_one_rank},
                                 {"reaches_nothing", reaches_nothing},
                                 {"resumes", resumes}};

}  // namespace

int main(int argc, char** argv) { return engine_tests::run_case(argc, argv, kCases); }
