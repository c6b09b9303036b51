// Steps whose gradients stay on their ranks, with 1-bit Adam: results, bytes, memory, skipped steps, writes of the
// program.
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <iterator>
#include <limits>

#include "multirank/engine/onebit_reference.hpp"
#include "multirank/engine/printed_result.hpp"

namespace {

using namespace engine_tests;

// The compressed phase begins with update 3.
const std::string kOneBit = " optimizer=onebit_adam optimizer.onebit_adam.freeze_step=2 ";

class LocalGradientsTest : public PrintedResultTest {
 protected:
  // One launch of several jobs; the hashes of their weights.
  std::vector<std::string> hashes(int ranks, const std::vector<std::string>& jobs) {
    std::vector<std::string> lines, found;
    for (std::size_t i = 0; i < jobs.size(); ++i) lines.push_back("job.name=job" + std::to_string(i) + " " + jobs[i]);
    const Result result = run_all(ranks, lines);
    EXPECT_EQ(result.code, 0) << result.output;
    if (result.code != 0) return std::vector<std::string>(jobs.size());
    for (std::size_t i = 0; i < jobs.size(); ++i)
      found.push_back(summary("job" + std::to_string(i))["weights_hash"].get<std::string>());
    return found;
  }
};

const std::vector<std::string> kLocalStrategies{"strategy=zero0", "strategy=zero1",
                                                "strategy=zero1 communicator.share_weights=false", "strategy=zero2",
                                                "strategy=zero2 communicator.share_weights=false"};

onebit_reference::Options options_of(const Run& run) {
  onebit_reference::Options options;
  options.ranks = run.engine->world();
  options.freeze_step = 2;
  for (const std::string& text : run.arguments) {
    if (text == "train.dtype=bf16") options.dtype = torch::kBFloat16;
    if (text == "parity.weighted=true") options.weighted = true;
    if (text == "train.gradient_accumulation=2") options.accumulation = 2;
  }
  return options;
}

// The micro-steps of one update.
void train_step(Run& run, const onebit_reference::Options& options, int64_t step) {
  for (int a = 0; a < options.accumulation; ++a) {
    const int64_t m = run.engine->micro_index();
    run.engine->backward(run.model->loss(step, m), options.weighted ? static_cast<double>(m + 1) : 1);
    run.engine->step();
  }
}

// Trains beside the reference, and compares all masters after each step.
RANK_BODY(compares_with_reference, Run) {
  run.build();
  const onebit_reference::Options options = options_of(run);
  onebit_reference::Training reference(options, run.program.text("parity.model"), 7);
  for (int64_t step = 0; step < 6; ++step) {
    train_step(run, options, step);
    reference.step(step);
    for (std::size_t i = 0; i < reference.names.size(); ++i) {
      const torch::Tensor value = run.engine->get(reference.names[i]).contiguous().view(-1);
      const std::vector<float>& expected = reference.parameters[i].master;
      int64_t differing = 0;
      for (std::size_t e = 0; e < expected.size(); ++e) differing += value.data_ptr<float>()[e] != expected[e];
      EXPECT_EQ(differing, 0) << reference.names[i] << " after step " << step + 1 << ", of " << expected.size();
    }
  }
}

TEST_F(LocalGradientsTest, MatchesReferenceBitForBit) {
  for (const int ranks : {1, 2, 3, 4})
    for (const std::string dtype : {"train.dtype=fp32 ", "train.dtype=bf16 "}) {
      const std::string more =
          ranks % 2 == 0 ? "train.gradient_accumulation=2 parity.weighted=true strategy=zero1" : "strategy=zero0";
      const Result result = run(ranks, compares_with_reference, kOneBit + "train.steps=6 " + dtype + more);
      EXPECT_EQ(result.code, 0) << ranks << " ranks, " << dtype << "\n" << result.output;
    }
}

TEST_F(LocalGradientsTest, SLOW_LargeModelIsExchangedInPartsWithTheSameBits) {
  const Result result = run(2, compares_with_reference, kOneBit + "train.steps=6 parity.model=millions strategy=zero2");
  EXPECT_EQ(result.code, 0) << result.output;
}

// The reference in double, from the same gradients: the first three compressed steps.
RANK_BODY(compares_with_double, Run) {
  run.build();
  const onebit_reference::Options options = options_of(run);
  onebit_reference::Training reference(options, "everything", 7);
  for (int64_t step = 0; step < 5; ++step) {
    train_step(run, options, step);
    reference.step(step);
    int64_t far = 0, all = 0;
    for (std::size_t i = 0; i < reference.names.size(); ++i) {
      const torch::Tensor value = run.engine->get(reference.names[i]).contiguous().view(-1);
      const std::vector<double>& expected = reference.doubles[i].master;
      for (std::size_t e = 0; e < expected.size(); ++e, ++all)
        far += std::fabs(value.data_ptr<float>()[e] - expected[e]) > 1e-5 * (1 + std::fabs(expected[e]));
    }
    // An element far away is one whose value before compression is so close to zero that roundings decide its sign.
    EXPECT_LE(far, all / 500) << "after step " << step + 1 << ", of " << all;
  }
}

TEST_F(LocalGradientsTest, IsCloseToDoublePrecision) {
  const std::string accumulates = "train.gradient_accumulation=2 parity.weighted=true ";
  for (const auto& [ranks, more] : {std::pair<int, std::string>{2, ""},
                                    {2, "train.dtype=bf16 " + accumulates},
                                    {3, accumulates},
                                    {4, "strategy=zero2 "}}) {
    const Result result = run(ranks, compares_with_double, kOneBit + "train.steps=5 " + more);
    EXPECT_EQ(result.code, 0) << ranks << " ranks " << more << "\n" << result.output;
  }
}

TEST_F(LocalGradientsTest, SLOW_GivesTheSameWeightsUnderEveryStrategy) {
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<std::string> jobs;
    const std::vector<std::string> types{"train.dtype=fp32", "train.dtype=bf16",
                                         "train.dtype=fp16 fp16.initial_scale_power=8"},
        micro_steps{"1", "2"};
    for (const std::string& dtype : types)
      for (const std::string& micro : micro_steps)
        for (const std::string& strategy : kLocalStrategies)
          jobs.push_back(dtype + " train.steps=5 train.gradient_accumulation=" + micro + kOneBit + strategy);
    const std::vector<std::string> found = hashes(ranks, jobs);
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(found[i], found[i - i % kLocalStrategies.size()]) << ranks << " ranks, " << jobs[i];
      EXPECT_NE(found[i], "") << jobs[i];
    }
  }
}

TEST_F(LocalGradientsTest, AreSummedBeforeTheyAreExchangedWithEveryReduction) {
  const std::string job =
      "train.steps=5 train.gradient_accumulation=2 strategy=zero1 optimizer=onebit_adam "
      "optimizer.onebit_adam.freeze_step=1 ";
  const auto found = hashes(2, {job, job + "gradients.reduce=last_micro_step", job + "gradients.overlap=false",
                                job + "gradients.dtype=bf16"});
  EXPECT_EQ(found[2], found[0]);
  EXPECT_NE(found[1], "");
  EXPECT_NE(found[3], found[0]) << "the warm-up rounds reduced gradients";
}

RANK_BODY(trains_onebit, Run) {
  run.build();
  run.train();
  print_hash(run);
}

TEST_F(LocalGradientsTest, InstructionSetChangesNoBit) {
  const auto printed = [&](const std::string& more, const std::string& environment) {
    const Result done = launch(
        2, program(2, trains_onebit, "train.steps=6 parity.model=wide strategy=zero2 " + kOneBit + more), environment);
    EXPECT_EQ(done.code, 0) << done.output;
    const auto at = done.output.find("result ");
    return at == std::string::npos ? done.output : done.output.substr(at, 24);
  };
  const std::string expected = printed("job.threads=1", "");
  EXPECT_EQ(printed("job.threads=1", "ZR_ISA=portable"), expected);
  EXPECT_EQ(printed("job.threads=1", "ZR_ISA=avx2"), expected);
}

TEST_F(LocalGradientsTest, WarmUpEqualsAdamW) {
  std::vector<std::string> jobs;
  for (const std::string dtype : {"train.dtype=fp32", "train.dtype=bf16"})
    for (const std::string& strategy : kLocalStrategies)
      for (const std::string optimizer :
           {" optimizer=adamw ", " optimizer=onebit_adam optimizer.onebit_adam.freeze_step=4 "})
        jobs.push_back(dtype + " train.steps=4" + optimizer + strategy);
  const std::vector<std::string> found = hashes(3, jobs);
  for (std::size_t i = 0; i + 1 < jobs.size(); i += 2) EXPECT_EQ(found[i + 1], found[i]) << jobs[i];
}

// Blocks of 1024 elements have a scale of 4 bytes each.
int64_t compressed_bytes(const std::vector<int64_t>& counts) {
  int64_t words = 0;
  for (const int64_t n : counts)
    for (int64_t first = 0; first < n; first += 1024) words += 1 + (std::min<int64_t>(n - first, 1024) + 31) / 32;
  return 4 * words;
}
// The parameters of "everything" that get a gradient: one never does, one layer only in steps with an even index.
std::vector<int64_t> touched_in(std::size_t step) {
  std::vector<int64_t> counts = Sizes().trainable;
  counts.erase(counts.begin() + 13);
  if (step % 2) counts.erase(counts.begin() + 11, counts.begin() + 13);
  return counts;
}

TEST_F(LocalGradientsTest, CommunicatesSignsAndScales) {
  for (const int ranks : {2, 4})
    for (const std::string dtype : {"fp32", "bf16"}) {
      std::vector<std::string> jobs;
      for (const std::string& strategy : kLocalStrategies)
        jobs.push_back("train.steps=4 train.dtype=" + dtype + kOneBit + strategy);
      const std::vector<std::string> found = hashes(ranks, jobs);
      const int64_t zero0 = metrics("job0")[0]["communication_bytes"].get<int64_t>();
      for (std::size_t i = 0; i < jobs.size(); ++i)
        for (const std::size_t step : {2u, 3u}) {
          const int64_t bytes = metrics("job" + std::to_string(i))[step]["communication_bytes"].get<int64_t>();
          EXPECT_EQ(bytes, 2 * (ranks - 1) * compressed_bytes(touched_in(step))) << jobs[i];
          EXPECT_LE(bytes * (dtype == "fp32" ? 28 : 21), zero0) << jobs[i];
        }
      EXPECT_TRUE(metrics("job0")[2]["grad_norm"].is_null()) << "no rank has the mean gradient";
    }
}

TEST_F(LocalGradientsTest, MemoryMatchesPlanAndFormula) {
  ONE_HOST_ONLY("on several hosts, adamw shares weights and onebit_adam does not");
  const int ranks = 3;
  const int64_t all = Sizes::aligned(Sizes().trainable);
  for (const std::string dtype : {"fp32", "bf16"}) {
    std::vector<std::string> jobs, plain;
    for (const std::string& strategy : kLocalStrategies) {
      const std::string job = "train.steps=3 train.dtype=" + dtype + " " + strategy;
      jobs.push_back(job + kOneBit);
      jobs.push_back(job);
    }
    hashes(ranks, jobs);
    for (std::size_t i = 0; i < jobs.size(); i += 2) {
      const Json with = summary("job" + std::to_string(i))["memory"],
                 without = summary("job" + std::to_string(i + 1))["memory"]["device"];
      for (const auto& [tier, kinds] : with.items())
        for (const auto& [kind, bytes] : kinds.items())
          if (kind != "activations") {
            EXPECT_EQ(bytes["planned"], bytes["peak"]) << jobs[i] << " " << tier << " " << kind;
          }
      const auto more = [&](const std::string& kind) {
        const auto peak = [&](const Json& memory) {
          return memory.contains(kind) ? memory[kind]["peak"].get<int64_t>() : 0;
        };
        return peak(with["device"]) - peak(without);
      };
      const bool replicas = jobs[i].find("share_weights=false") != std::string::npos;
      const int64_t slack = 4 * (5 * (1024 + 32 * 15));
      EXPECT_EQ(more("weights"), 0) << jobs[i];
      EXPECT_EQ(more("gradients"), 4 * all) << jobs[i];
      const int64_t part = 4 * all / ranks;  // of a copy of all second moments, or masters, that the ranks share
      EXPECT_NEAR(more("optimizer"), 4 * all + part + (replicas ? part : 0), slack) << jobs[i];
      EXPECT_NEAR(more("master"), replicas && dtype == "bf16" ? part : 0, 8) << jobs[i];
      EXPECT_NEAR(more("buckets"), 2 * compressed_bytes(Sizes().trainable), slack) << jobs[i];
    }
  }
}

// The plan is that of the compressed phase, but a job that ends in the warm-up holds what it holds with AdamW.
TEST_F(LocalGradientsTest, WarmUpHoldsTheMemoryOfAdamW) {
  const std::string job = "train.steps=2 train.dtype=bf16 ";
  for (const std::string& strategy : kLocalStrategies) {
    hashes(2, {job + strategy + kOneBit, job + strategy, "train.steps=3 train.dtype=bf16 " + strategy + kOneBit});
    const auto memory_of = [&](int i) { return summary("job" + std::to_string(i))["memory"]["device"]; };
    const Json warm_up = memory_of(0), adamw = memory_of(1), compressed = memory_of(2);
    for (const auto& [kind, bytes] : compressed.items()) {
      if (kind == "activations") continue;
      const bool has = adamw.contains(kind);
      const int64_t peak = warm_up.contains(kind) ? warm_up[kind]["peak"].get<int64_t>() : 0;
      EXPECT_EQ(peak, has ? adamw[kind]["peak"].get<int64_t>() : 0) << strategy << " " << kind;
      EXPECT_EQ(warm_up[kind]["planned"], bytes["peak"]) << strategy << " " << kind;
    }
    EXPECT_GT(compressed["gradients"]["peak"], warm_up["gradients"]["peak"]) << strategy;
  }
}

// Files of one rank must not grow in the first compressed step: those of its shared memory are its memory.
RANK_BODY(lacks_memory_after_the_warm_up, Run) {
  run.build();
  for (int i = 0; i < 2; ++i) run.micro_step();
  const bool lacks = run.program.text("job.name") == "lacks" + std::to_string(run.program.rank());
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  std::string error;
  try {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{1 << 20, before.rlim_max};
    if (lacks) ::setrlimit(RLIMIT_FSIZE, &none);
    run.micro_step();
  } catch (const zr::Error& thrown) {
    error = thrown.what();
    EXPECT_EQ(thrown.exit_code(), 3);
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::cout << "failure " + error + "\n" << std::flush;
  EXPECT_EQ(run.engine->step_index(), 2);
  for (int i = 0; i < 3; ++i) run.micro_step();
  print_hash(run);
}

TEST_F(LocalGradientsTest, RankWithoutMemoryAfterTheWarmUpIsAnErrorOnAllRanksAndTrainingContinues) {
  ONE_HOST_ONLY("memory that ranks of different hosts exchange is not a file");
  const std::string job = "train.steps=5 parity.model=wide train.dtype=bf16" + kOneBit;
  for (const std::string& strategy : {kLocalStrategies[1], kLocalStrategies[4]}) {
    const auto expected = hashes(3, {job + strategy})[0];
    for (const std::string rank : {"0", "1"}) {
      const Result result = run(3, lacks_memory_after_the_warm_up, job + strategy + " job.name=lacks" + rank);
      EXPECT_EQ(result.code, 0) << result.output;
      const std::regex line("failure rank " + rank +
                            ": the gradients of update 3 are not reduced over ranks, for which "
                            "optimizer 'onebit_adam' needs [0-9.]+ [KM]iB per rank: [^\n]*cannot allocate [0-9]+ "
                            "bytes of shared memory[^\n]*; the step has not begun: free memory, or resume from a "
                            "checkpoint with fewer ranks per host\n");
      const auto begin = std::sregex_iterator(result.output.begin(), result.output.end(), line);
      EXPECT_EQ(std::distance(begin, std::sregex_iterator()), 3) << result.output;
      EXPECT_NE(result.output.find("result " + expected), std::string::npos) << result.output;
    }
  }
}

// A budget for the warm-up is not enough: the plan is checked at the start, and libtorch's memory is limited from the
// first step as after the warm-up.
RANK_BODY(takes_memory_in_the_warm_up, Run) {
  run.build();
  run.micro_step();
  if (run.program.rank() == 0) std::cout << "trained" << std::endl;
  std::vector<torch::Tensor> taken;
  for (int i = 0; i < 30; ++i) taken.push_back(torch::empty({1 << 20}, torch::kByte));
}

TEST_F(LocalGradientsTest, BudgetIsThatOfTheCompressedPhaseFromTheStart) {
  const std::string job =
      "train.steps=9 parity.model=millions optimizer=onebit_adam optimizer.onebit_adam.freeze_step=";
  ASSERT_EQ(run(1, trains_onebit, "job.name=plain " + job + "20").code, 0);
  int64_t planned = 0, held = 0;
  const Json memory = summary("plain")["memory"]["device"];
  for (const auto& [kind, bytes] : memory.items()) {
    if (kind == "activations") continue;
    planned += bytes["planned"].get<int64_t>();
    held += bytes["peak"].get<int64_t>();
  }
  ASSERT_GT(planned, held + (20 << 20)) << "the warm-up itself would have memory for 30 MiB";
  const auto budget = [](int64_t bytes) { return " memory.device_budget=" + std::to_string(bytes) + "B"; };
  const Result less = run(1, takes_memory_in_the_warm_up, job + "5" + budget(planned - 1));
  EXPECT_EQ(less.code, 2) << less.output;
  EXPECT_NE(less.output.find("but the plan takes up to "), std::string::npos) << less.output;
  EXPECT_EQ(less.output.find("trained"), std::string::npos) << less.output;
  const Result little = run(1, takes_memory_in_the_warm_up, job + "5" + budget(planned + (12 << 20)));
  EXPECT_NE(little.code, 0) << little.output;
  EXPECT_NE(little.output.find("trained"), std::string::npos) << little.output;
  EXPECT_NE(little.output.find(" of it is reserved for later steps"), std::string::npos) << little.output;
  const Result enough = run(1, trains_onebit, job + "5" + budget(planned + (12 << 20)));
  EXPECT_EQ(enough.code, 0) << enough.output;
}

// Rank 1's loss of one step is infinite; the data of the other steps are those of a run without that step.
RANK_BODY(skips_a_step, Run) {
  run.build();
  const bool overflows = run.program.boolean("parity.overflows");
  for (int64_t index = 0; index < 6; ++index) {
    if (index == 4 && overflows) {
      const std::string before = run.engine->weights_hash();
      const torch::Tensor moment = run.engine->get("scalar", zr::TensorKind::state, "exp_avg").clone();
      const float factor = run.engine->rank() == 1 ? std::numeric_limits<float>::infinity() : 1.0f;
      run.engine->backward(run.model->loss(17, run.engine->micro_index()) * factor);
      run.engine->step();
      EXPECT_TRUE(run.engine->last_step().skipped);
      EXPECT_EQ(run.engine->weights_hash(), before);
      EXPECT_TRUE(same(run.engine->get("scalar", zr::TensorKind::state, "exp_avg"), moment));
    }
    run.engine->backward(run.model->loss(index, run.engine->micro_index()));
    run.engine->step();
  }
  print_hash(run);
}

TEST_F(LocalGradientsTest, SkippedStepChangesNothing) {
  for (const std::string& strategy : kLocalStrategies) {
    const std::string job = "train.steps=7 " + strategy + kOneBit;
    EXPECT_EQ(result_of(2, skips_a_step, job + "parity.overflows=true"),
              result_of(2, skips_a_step, job + "parity.overflows=false"))
        << strategy;
  }
}

// The program writes to a weight, sets a value and a state between compressed steps.
RANK_BODY(writes_between_steps, Run) {
  run.build();
  for (int64_t index = 0; index < 7; ++index) {
    run.engine->backward(run.model->loss(index, run.engine->micro_index()));
    run.engine->step();
    const std::string name = run.engine->parameters()[0].name;
    const torch::Tensor value = run.engine->get(name);
    if (index == 3) run.engine->set(name, zr::TensorKind::value, value * 0.5);
    if (index == 4) run.engine->set(name, zr::TensorKind::state, value * value + 0.01, "exp_avg_sq");
    if (index == 5) {
      const torch::NoGradGuard no_grad;
      run.model->parameters()[0].mul_(0.75);
    }
  }
  print_hash(run);
}

TEST_F(LocalGradientsTest, SLOW_WritesOfTheProgramHaveTheSameEffectUnderEveryStrategy) {
  for (const std::string dtype : {"train.dtype=fp32 ", "train.dtype=bf16 "}) {
    std::set<std::string> results;
    for (const std::string& strategy : kLocalStrategies)
      results.insert(result_of(3, writes_between_steps, "train.steps=7 " + dtype + strategy + kOneBit));
    EXPECT_EQ(results.size(), 1u) << dtype;
  }
}

// What depends on reduced gradients.
RANK_BODY(reads_a_local_gradient, Run) {
  run.build();
  run.micro_step();
  run.engine->get("scalar", zr::TensorKind::gradient);
  for (int i = 0; i < 3; ++i) run.micro_step();
  run.engine->get("scalar", zr::TensorKind::gradient);
}
RANK_BODY(edits_local_gradients, Run) {
  run.build();
  run.engine->edit_gradients([](const std::string&, const torch::Tensor&, int64_t) {});
}

// What has no second moment after the warm-up.
RANK_BODY(loads_weights_after_the_warm_up, Run) {
  run.build();
  for (int i = 0; i < 3; ++i) run.micro_step();
  const std::string folder = run.engine->save(run.program.text("job.runs") + "/weights");
  run.engine->load(folder, {.weights_only = true});
  EXPECT_THROW(run.micro_step(), zr::Error);
  run.engine->load(folder);
  run.micro_step();  // the rejected step has changed nothing
  run.engine->load(folder, {.weights_only = true});
  run.micro_step();
}
// Steps with an even index use one layer more.
RANK_BODY(uses_a_layer_late, Run) {
  run.build();
  for (int64_t index = 1; index <= 4; ++index) {
    const torch::Tensor before = run.engine->get("sometimes.weight");
    run.engine->backward(run.model->loss(index, run.engine->micro_index()));
    run.engine->step();
    const float decay = index % 2 == 0 ? static_cast<float>(1 - 0.05 * 0.01) : 1.0f;
    EXPECT_TRUE(same(run.engine->get("sometimes.weight"), before * decay)) << index;
  }
}
RANK_BODY(trains_more_parameters_late, Run) {
  run.build();
  for (int i = 0; i < 3; ++i) run.micro_step();
  for (auto& item : run.model->named_parameters()) item.value().requires_grad_(true);
  run.engine->refresh();
  for (int i = 0; i < 2; ++i) run.micro_step();
}

TEST_F(LocalGradientsTest, RejectsWhatItCannotDo) { check_messages("local_gradients_errors.txt", 13); }

// Trains with freeze_step = 0 and beta2 = 0.5, and finds the end of the warm-up as docs/optimizers.md defines it.
// The data changes in the first steps only, so that the variance becomes stable.
RANK_BODY(finds_the_end_of_the_warm_up, Run) {
  run.build();
  double last = 0;
  int64_t end = 0, first_compressed = 0;
  for (int64_t update = 1; update <= 16; ++update) {
    do run.engine->backward(run.model->loss(std::min<int64_t>(update, 6), run.engine->micro_index()));
    while (!run.engine->step());
    if (std::isnan(run.engine->last_grad_norm()) && first_compressed == 0) first_compressed = update;
    if (update % 2 != 0 || end != 0) continue;
    double sum = 0;
    for (const zr::ParameterInfo& parameter : run.engine->parameters())
      if (parameter.trained)
        sum += run.engine->get(parameter.name, zr::TensorKind::state, "exp_avg_sq")
                   .to(torch::kDouble)
                   .sum()
                   .item<double>();
    const double corrected = sum / (1 - std::pow(0.5, update));
    if (std::min(corrected, last) >= 0.96 * std::max(corrected, last)) end = update;
    last = corrected;
  }
  EXPECT_GE(end, 4);
  EXPECT_EQ(first_compressed, end + 1);
  if (run.engine->rank() == 0) std::cout << "ended " << end << std::endl;
  print_hash(run);
}

const std::string kAutomatic =
    "train.steps=16 optimizer=onebit_adam optimizer.onebit_adam.freeze_step=0 optimizer.onebit_adam.beta2=0.5 "
    "optimizer.lr=1e-5 ";

TEST_F(LocalGradientsTest, WarmUpEndsWhenTheVarianceIsStable) {
  const Result result =
      run(2, finds_the_end_of_the_warm_up, kAutomatic + "strategy=zero1 communicator.share_weights=false");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(std::regex_search(
      result.output, std::regex("zeroth: optimizer 'onebit_adam': the variance is stable \\([+-][0-9.]+ % in "
                                "2 updates\\), so the warm-up ends with update [0-9]+\n")))
      << result.output;
}

TEST_F(LocalGradientsTest, SLOW_WarmUpEndsAtTheSameUpdateForEveryStrategyAndNumberOfRanks) {
  std::set<std::string> ends;
  for (const int ranks : {1, 2, 3}) {
    std::set<std::string> results;
    for (const std::string& strategy : kLocalStrategies) {
      const std::string more = "train.gradient_accumulation=" + std::to_string(6 / ranks) + " " + strategy;
      const Result result = run(ranks, finds_the_end_of_the_warm_up, kAutomatic + more);
      EXPECT_EQ(result.code, 0) << result.output;
      std::smatch end, hash;
      ASSERT_TRUE(std::regex_search(result.output, end, std::regex("ended [0-9]+"))) << result.output;
      ASSERT_TRUE(std::regex_search(result.output, hash, std::regex("result [0-9a-f]+"))) << result.output;
      ends.insert(end[0]);
      results.insert(hash[0]);
    }
    EXPECT_EQ(results.size(), 1u) << ranks << " ranks";
  }
  EXPECT_EQ(ends.size(), 1u);
}

// Rank 1 ends in the compressed phase.
RANK_BODY(loses_a_rank, Run) {
  run.build();
  for (int i = 0; i < 4; ++i) run.micro_step();
  if (run.engine->rank() == 1) ::_exit(9);
  for (int i = 0; i < 4; ++i) run.micro_step();
}

TEST_F(LocalGradientsTest, LostRankEndsTheJob) {
  const auto begin = std::chrono::steady_clock::now();
  const Result result = run(3, loses_a_rank, "train.steps=8 strategy=zero1" + kOneBit);
  EXPECT_NE(result.code, 0);
  EXPECT_NE(result.output.find("rank 1"), std::string::npos) << result.output;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

}  // namespace
