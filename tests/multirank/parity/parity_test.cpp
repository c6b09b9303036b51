// DESIGN.md 6 for the strategies there are: every cell equals plain libtorch, bit for bit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "multirank/parity/reference.hpp"

namespace {

using parity::Outcome;
using parity::Recipe;

struct Cell {
  std::string name, overrides;
  Recipe recipe;
};

std::string cell_name(std::initializer_list<std::string> words) {
  std::string name;
  for (const auto& word : words) name += (name.empty() ? "" : "-") + word;
  return name;
}

Cell cell(const std::string& strategy, const std::string& model, const std::string& optimizer, const std::string& dtype,
          int ranks, int accumulation, double clip, bool weighted = false, bool last = false) {
  Cell c;
  c.name =
      cell_name({strategy, model, optimizer, dtype, "n" + std::to_string(ranks), "a" + std::to_string(accumulation),
                 clip > 0 ? "clip" : "free", weighted ? "weighted" : "even", last ? "last" : "each"});
  Recipe& r = c.recipe;
  r.model = model;
  r.optimizer = optimizer;
  r.dtype = dtype;
  r.micro_batches = ranks * accumulation;
  r.ranks = ranks;
  r.clip = clip;
  r.weighted = weighted;
  r.last = last;
  c.overrides = "strategy=" + strategy + " optimizer=" + optimizer + " parity.model=" + model +
                " train.dtype=" + dtype + " train.accumulation=" + std::to_string(accumulation) +
                " train.clip=" + std::to_string(clip) + " parity.weighted=" + (weighted ? "true" : "false") +
                " gradients.reduce=" + (last ? "last" : "each");
  return c;
}

// The cell with gradients that travel and are summed in other types.
Cell with_types(Cell c, const std::string& travels, const std::string& sums) {
  c.name += "-" + travels + "-in-" + sums;
  c.overrides += " gradients.reduce_dtype=" + travels + " gradients.dtype=" + sums;
  c.recipe.travels = travels == "auto" ? (sums == "fp32" ? "" : sums) : travels;
  c.recipe.sums = sums;
  return c;
}

// The cell with so large a loss scale that its first steps overflow.
Cell that_overflows(Cell c) {
  c.name += "-overflows";
  c.overrides += " train.steps=10 fp16.loss_scale_window=2";
  c.recipe.steps = 10;
  c.recipe.window = 2;
  return c;
}

class Parity : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    folder_ = std::filesystem::path(testing::TempDir()) / ("parity-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Trains all cells in one launch; returns what each gave.
  std::vector<Outcome> train(int ranks, const std::vector<Cell>& cells) {
    std::ofstream list(folder_ / "list");
    for (const Cell& c : cells)
      list << c.name << " " << c.overrides << " job.ranks=" << ranks << " job.runs=\"" << (folder_ / "runs").string()
           << "\"\n";
    list.close();
    const std::string command = std::string("ZR_PLUGIN_PATH=" ZR_BUILD_DIR "/tests/plugins OMP_NUM_THREADS=1 ") +
                                ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(ranks) +
                                " -- " ZR_BUILD_DIR "/tests/parity_trainer " ZR_SOURCE_DIR
                                "/tests/multirank/parity/parity.toml " +
                                (folder_ / "list").string() + " " + folder_.string();
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    std::vector<Outcome> outcomes;
    for (const Cell& c : cells) {
      outcomes.push_back(parity::load((folder_ / (c.name + ".0")).string()));
      for (int rank = 1; rank < ranks; ++rank)
        EXPECT_EQ(difference(outcomes.back(), parity::load((folder_ / (c.name + "." + std::to_string(rank))).string())),
                  "")
            << c.name << ": rank " << rank << " beside rank 0";
    }
    return outcomes;
  }

  std::filesystem::path folder_;
};

const std::vector<std::string> kStrategies{"zero0", "zero1", "zero2", "zero3", "dealt"};

std::vector<Cell> cells_of(int ranks) {
  std::vector<Cell> cells;
  for (const std::string& strategy : kStrategies)
    for (const int accumulation : {1, 4})
      for (const std::string dtype : {"fp32", "bf16", "fp16"})
        for (const std::string optimizer : {"adamw", "sgd"})
          for (const double clip : {0.0, 0.5})
            cells.push_back(cell(strategy, "everything", optimizer, dtype, ranks, accumulation, clip));
  for (const std::string& strategy : kStrategies) {
    for (const std::string dtype : {"fp32", "bf16"})
      cells.push_back(cell(strategy, "dropout", "adamw", dtype, ranks, 4, 0.5));
    for (const int accumulation : {1, 4})
      cells.push_back(cell(strategy, "tiny", "adamw", "fp32", ranks, accumulation, 0));
    cells.push_back(cell(strategy, "recurrent", "adamw", "fp32", ranks, 2, 0.5));
    cells.push_back(cell(strategy, "everything", "sgd", "fp32", ranks, 3, 0, true));
    cells.push_back(cell(strategy, "everything", "adamw", "bf16", ranks, 2, 0.5, true));
    cells.push_back(cell(strategy, "recurrent", "sgd", "bf16", ranks, 1, 0));
    // Ranks that use different parameters cannot gather them together.
    if (strategy != "zero3")
      for (const int accumulation : {1, 4})
        cells.push_back(cell(strategy, "divergent", "adamw", "fp32", ranks, accumulation, 0.5));
    cells.push_back(cell(strategy, "tiny", "sgd", "bf16", ranks, 4, 0.5));
    for (const std::string dtype : {"fp32", "bf16"}) {
      for (const int accumulation : {1, 4})
        cells.push_back(cell(strategy, "everything", "adamw", dtype, ranks, accumulation, 0.5, false, true));
      cells.push_back(cell(strategy, "dropout", "sgd", dtype, ranks, 3, 0, true, true));
    }
    cells.push_back(cell(strategy, "tiny", "adamw", "fp32", ranks, 2, 0, false, true));
    cells.push_back(cell(strategy, "recurrent", "adamw", "bf16", ranks, 2, 0.5, false, true));
    cells.push_back(cell(strategy, "recurrent", "adamw", "fp16", ranks, 2, 0.5));
    cells.push_back(cell(strategy, "dropout", "adamw", "fp16", ranks, 4, 0.5));
    for (const int accumulation : {1, 4}) {
      for (const std::string dtype : {"fp32", "bf16", "fp16"})
        cells.push_back(
            with_types(cell(strategy, "everything", "adamw", dtype, ranks, accumulation, 0.5), "auto", "bf16"));
      cells.push_back(with_types(cell(strategy, "everything", "adamw", "bf16", ranks, accumulation, 0.5, false, true),
                                 "auto", "bf16"));
      for (const std::string travels : {"bf16", "fp16"})
        cells.push_back(
            with_types(cell(strategy, "everything", "sgd", "fp32", ranks, accumulation, 0.5), travels, "fp32"));
      cells.push_back(with_types(cell(strategy, "everything", "sgd", "bf16", ranks, accumulation, 0), "fp32", "fp32"));
      for (const std::string optimizer : {"adamw", "sgd"})
        cells.push_back(that_overflows(cell(strategy, "everything", optimizer, "fp16", ranks, accumulation, 0.5)));
    }
    cells.push_back(that_overflows(cell(strategy, "everything", "adamw", "fp16", ranks, 2, 0, true)));
    cells.push_back(that_overflows(cell(strategy, "everything", "sgd", "fp16", ranks, 2, 0.5, false, true)));
  }
  return cells;
}

TEST_P(Parity, EveryStrategyEqualsPlainLibtorchBitForBit) {
  const auto cells = cells_of(GetParam());
  const auto outcomes = train(GetParam(), cells);
  for (std::size_t i = 0; i < cells.size(); ++i)
    EXPECT_EQ(difference(outcomes[i], parity::reference(cells[i].recipe)), "") << cells[i].name;
}
INSTANTIATE_TEST_SUITE_P(Ranks, Parity, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return "On" + std::to_string(info.param); });

TEST_F(Parity, ACellThatOverflowsSkipsStepsAndMakesOthers) {
  const Outcome outcome =
      parity::reference(that_overflows(cell("zero0", "everything", "adamw", "fp16", 1, 1, 0)).recipe);
  int skipped = 0, doubled = 0;
  for (std::size_t i = 0; i < outcome.scales.size(); ++i) {
    skipped += !std::isfinite(outcome.norms[i]);
    doubled += i > 0 && outcome.scales[i] > outcome.scales[i - 1];
  }
  EXPECT_GT(skipped, 2);
  EXPECT_GT(static_cast<int>(outcome.scales.size()) - skipped, 2);
  EXPECT_GT(doubled, 0);
}

TEST_F(Parity, HoldsWithTwoThreadsARankToo) {
  std::vector<Cell> cells;
  for (const std::string& strategy : kStrategies)
    for (const std::string dtype : {"fp32", "bf16"}) {
      cells.push_back(cell(strategy, "everything", "adamw", dtype, 2, 2, 0.5));
      cells.back().overrides += " job.threads=2";
    }
  const auto outcomes = train(2, cells);
  at::set_num_threads(2);
  for (std::size_t i = 0; i < cells.size(); ++i)
    EXPECT_EQ(difference(outcomes[i], parity::reference(cells[i].recipe)), "") << cells[i].name;
}

TEST_F(Parity, RanksTimesAccumulationIsWhatCounts) {
  std::vector<Outcome> outcomes;
  for (const int ranks : {4, 2, 1})
    for (const std::string& strategy : kStrategies)
      outcomes.push_back(train(ranks, {cell(strategy, "dropout", "adamw", "fp32", ranks, 4 / ranks, 0.5)})[0]);
  for (std::size_t i = 1; i < outcomes.size(); ++i) EXPECT_EQ(difference(outcomes[0], outcomes[i]), "") << i;
}

TEST_F(Parity, ReducingLastIsAnotherOrderOfAddition) {
  Recipe recipe = cell("zero0", "everything", "sgd", "fp32", 2, 4, 0).recipe;
  const Outcome each = parity::reference(recipe);
  recipe.last = true;
  EXPECT_NE(difference(each, parity::reference(recipe)), "");
}

TEST_F(Parity, AnotherOrderOfAdditionShows) {
  // Proof that a cell can turn red: at fp32 and three micro-batches, folding from the last gives other weights.
  Recipe recipe = cell("zero0", "everything", "sgd", "fp32", 3, 1, 0).recipe;
  const Outcome straight = parity::reference(recipe);
  recipe.backwards = true;
  EXPECT_NE(difference(straight, parity::reference(recipe)), "");
}

}  // namespace
