// Formulas for the memory of each kind and for the communication per step, in bytes.
#include "support/engine_test.hpp"
#include "support/name_by_ranks.hpp"

namespace {

using namespace engine_tests;

struct FormulaCase {
  // reduce, reduce_dtype and gradient_dtype are gradients.reduce, gradients.reduce_dtype and gradients.dtype.
  std::string strategy, dtype, reduce, reduce_dtype, gradient_dtype;
  int ranks, A;
  std::string name() const {
    return strategy + "-" + dtype + "-" + reduce + "-" + reduce_dtype + "-" + gradient_dtype + "-n" +
           std::to_string(ranks) + "-a" + std::to_string(A);
  }
  bool last() const { return reduce == "last_micro_step"; }
  static int64_t bytes(const std::string& type) { return type == "fp32" ? 4 : 2; }
  int64_t w() const { return bytes(dtype); }           // bytes per weight
  int64_t g() const { return bytes(gradient_dtype); }  // bytes per accumulated gradient element
  // Bytes per communicated gradient element; deferred gradients are communicated in their accumulation type.
  int64_t r() const {
    return last() ? g()
                  : bytes(reduce_dtype != "auto"     ? reduce_dtype
                          : gradient_dtype == "fp32" ? dtype
                                                     : gradient_dtype);
  }
  bool one_type() const {
    return reduce_dtype == "auto" ? gradient_dtype == (gradient_dtype == "fp32" ? dtype : gradient_dtype)
                                  : reduce_dtype == gradient_dtype;
  }
};

// The test cases of one world size; one launch trains each of them for two steps.
std::vector<FormulaCase> cases_of(int ranks) {
  std::vector<FormulaCase> cases;
  for (const int A : {1, 4})
    for (const std::string strategy : {"zero0", "zero1", "zero2"}) {
      for (const std::string dtype : {"fp32", "bf16", "fp16"})
        for (const std::string gradient_dtype : {"fp32", "bf16"})
          for (const std::string reduce : {"each_micro_step", "last_micro_step"})
            cases.push_back({strategy, dtype, reduce, "auto", gradient_dtype, ranks, A});
      cases.push_back({strategy, "fp32", "each_micro_step", "bf16", "fp32", ranks, A});
      cases.push_back({strategy, "bf16", "each_micro_step", "fp32", "fp32", ranks, A});
    }
  return cases;
}
std::vector<std::string> lines_of(const std::vector<FormulaCase>& cases) {
  std::vector<std::string> lines;
  for (const FormulaCase& c : cases)
    lines.push_back("job.name=" + c.name() + " train.steps=2 train.gradient_accumulation=" + std::to_string(c.A) +
                    " train.dtype=" + c.dtype + " gradients.reduce_dtype=" + c.reduce_dtype +
                    " gradients.dtype=" + c.gradient_dtype + " strategy=" + c.strategy +
                    " gradients.reduce=" + c.reduce + " communicator.share_weights=false");
  return lines;
}

class EngineFormulasTest : public EngineTest, public testing::WithParamInterface<int> {};
class EngineCommunicationTest : public EngineFormulasTest {};

TEST_P(EngineCommunicationTest, CommunicationAndLedgerBytesMatchFormulas) {
  const int N = GetParam();
  const auto cases = cases_of(N);
  const Result result = run_all(N, lines_of(cases));
  ASSERT_EQ(result.code, 0) << result.output;
  const Sizes sizes;
  const int64_t P = Sizes::sum(sizes.trainable), padded = Sizes::aligned(sizes.trainable),
                full = padded + Sizes::aligned(sizes.frozen);
  // A shard differs from the mean by less than a norm block in each of the (at most five) buckets, alignment included.
  const int64_t norm_blocks = 5 * (1024 + 32 * 15);
  for (const FormulaCase& c : cases) {
    const int64_t gradients = (c.last() ? 1 : c.A) * c.r() * P;  // deferred gradients are reduced once per step
    const int64_t step = (gradients + (c.strategy == "zero0" ? c.g() : c.w()) * P) * (N - 1);
    // A step that overflows (fp16, at the first loss scales) is skipped: it gathers no weights.
    const auto skipped_bytes = [&](const Json& row) {
      return row.contains("skipped") && c.strategy != "zero0" ? c.w() * P * (N - 1) : 0;
    };
    int64_t skipped = 0;
    for (const Json& row : metrics(c.name())) {
      EXPECT_EQ(row["communication_bytes"], step - skipped_bytes(row)) << c.name();
      skipped += skipped_bytes(row);
    }
    const Json s = summary(c.name()), memory = s["memory"]["device"];
    int64_t communicated = 0;
    for (const auto& [operation, bytes] : s["communication_bytes"].items())
      communicated += operation == "control" ? 0 : bytes.get<int64_t>();
    EXPECT_EQ(communicated, 2 * step - skipped) << c.name();

    const std::string where = c.name() + "\n" + memory.dump(2);
    for (const auto& [tier, kinds] : s["memory"].items())
      for (const auto& [kind, bytes] : kinds.items())
        if (kind != "activations") {
          EXPECT_EQ(bytes["planned"], bytes["peak"]) << tier << " " << kind << " " << where;
        }
    const bool sharded = c.strategy != "zero0";
    const int64_t share = sharded ? padded / N : padded, slack = sharded && N > 1 ? norm_blocks : 32 * 15;
    EXPECT_EQ(memory["weights"]["peak"], c.w() * full) << where;
    EXPECT_NEAR(memory["optimizer"]["peak"], 8 * share, 8 * slack) << where;
    EXPECT_EQ(memory.contains("master"), c.w() == 2) << where;
    if (c.w() == 2) {
      EXPECT_NEAR(memory["master"]["peak"], 4 * share, 4 * slack) << where;
    }
    const bool buckets = c.strategy != "zero1" && !c.last();
    EXPECT_EQ(memory.contains("buckets"), buckets) << where;
    if (buckets) {
      EXPECT_LE(memory["buckets"]["peak"], 2 * 65536) << where;
    }
    if (!sharded || c.last() || (c.strategy == "zero1" && c.one_type() && c.A == 1)) {
      EXPECT_EQ(memory["gradients"]["peak"], c.g() * padded) << where;
    } else {
      EXPECT_NEAR(memory["gradients"]["peak"], (buckets ? 0 : c.r() * padded) + c.g() * share, c.g() * slack) << where;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, EngineFormulasTest, testing::Values(2, 4), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, EngineFormulasTest, testing::Values(1, 3), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(Ranks, EngineCommunicationTest, testing::Values(2), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, EngineCommunicationTest, testing::Values(1, 3, 4), zr::test::NameByRanks());

TEST_F(EngineTest, ReducesAllBucketsButLastBeforeLastGradient) {
  for (const std::string strategy : {"zero0", "zero1", "zero2"}) {
    const Result result = run(2, trains, "parity.model=wide train.steps=3 strategy=" + strategy);
    ASSERT_EQ(result.code, 0) << result.output;
    const Json overlap = summary()["overlap"];
    const int64_t buckets = overlap["collectives"].get<int64_t>() / 3;
    EXPECT_GT(buckets, 3);
    EXPECT_EQ(overlap["early"], 3 * (buckets - 1)) << overlap;
  }
}

// With two micro-steps, zero0 also all-gathers each bucket in the second one, before the second bucket after it is
// sent.
TEST_F(EngineTest, GathersAllBucketsButThreeBeforeLastGradient) {
  const Result result = run(2, trains, "parity.model=wide train.steps=3 strategy=zero0 train.gradient_accumulation=2");
  ASSERT_EQ(result.code, 0) << result.output;
  const Json overlap = summary()["overlap"];
  const int64_t buckets = overlap["collectives"].get<int64_t>() / 3 / 3;
  EXPECT_GT(buckets, 3);
  EXPECT_EQ(overlap["early"], 3 * (2 * (buckets - 1) + buckets - 3)) << overlap;
}

TEST_P(EngineFormulasTest, ShardedWeightBytesMatchFormulas) {
  const int N = GetParam();
  const Sizes sizes;
  const int64_t P = Sizes::sum(sizes.trainable);
  const int64_t padded = Sizes::aligned(sizes.trainable), full = padded + Sizes::aligned(sizes.frozen);
  std::vector<std::string> lines;
  for (const std::string dtype : {"fp32", "bf16"})
    for (const int A : {1, 4})
      for (const std::string reduce : {"each_micro_step", "last_micro_step"})
        lines.push_back("job.name=" + dtype + std::to_string(A) + reduce + " train.steps=3 train.dtype=" + dtype +
                        " train.gradient_accumulation=" + std::to_string(A) + " gradients.reduce=" + reduce +
                        " strategy=zero3 communicator.share_weights=false strategy.zero3.prefetch_bytes=16KiB");
  const Result result = run_all(N, lines);
  ASSERT_EQ(result.code, 0) << result.output;
  for (const std::string dtype : {"fp32", "bf16"})
    for (const int A : {1, 4})
      for (const std::string reduce : {"each_micro_step", "last_micro_step"}) {
        const std::string name = dtype + std::to_string(A) + reduce;
        const int64_t w = dtype == "fp32" ? 4 : 2;
        const Json s = summary(name), memory = s["memory"]["device"];
        const std::string where = name + "\n" + s.dump(2);
        for (const auto& [tier, kinds] : s["memory"].items())
          for (const auto& [kind, bytes] : kinds.items())
            if (kind != "activations") {
              EXPECT_EQ(bytes["planned"], bytes["peak"]) << tier << " " << kind << " " << where;
            }
        if (N == 1) {
          EXPECT_EQ(memory["weights"]["peak"], w * full) << where;
          continue;
        }
        // A shard boundary within an all-gather group is off by less than a norm block, and few groups are split; the
        // slack includes alignment.
        const int64_t slack = 8 * 1024 + 32 * 20;
        EXPECT_NEAR(memory["weights"]["peak"], w * full / N, w * slack) << where;
        EXPECT_NEAR(memory["optimizer"]["peak"], 8 * padded / N, 8 * slack) << where;
        EXPECT_LE(memory["all_gather"]["peak"], 16384 + w * (577 * 36 + 32 + 577 + 32)) << where;
        EXPECT_EQ(s["communication_bytes"]["reduce_scatter"],
                  3 * (reduce == "last_micro_step" ? 4 : A * w) * P * (N - 1))
            << where;
      }
}

TEST_P(EngineFormulasTest, GatherBytesMatchFormulas) {
  const int N = GetParam();
  if (N == 1) return;  // one rank gathers nothing
  const int64_t P = (128 * 16 + 16) + (16 * 128 + 128) + 5 * (128 * 128 + 128);
  std::vector<std::string> lines;
  for (const int A : {1, 4})
    lines.push_back("job.name=wide" + std::to_string(A) +
                    " parity.model=wide train.steps=4 train.gradient_accumulation=" + std::to_string(A) +
                    " strategy=zero3 communicator.share_weights=false");
  const Result result = run_all(N, lines);
  ASSERT_EQ(result.code, 0) << result.output;
  for (const int A : {1, 4}) {
    const int64_t pass = A * 4 * P * (N - 1);
    const auto rows = metrics("wide" + std::to_string(A));
    for (std::size_t step = 1; step < rows.size(); ++step) {
      const int64_t gathers = rows[step]["communication_bytes"].get<int64_t>() - pass;
      EXPECT_LE(gathers, 2 * pass) << "forward and backward each gather every weight at most once";
      EXPECT_GE(gathers, pass) << "forward must gather every weight";
      EXPECT_EQ(gathers, rows[1]["communication_bytes"].get<int64_t>() - pass)
          << "every step must gather the same number of bytes";
    }
  }
}

TEST_F(EngineTest, RanksOfOneHostShareWeightsWithoutCommunication) {
  ONE_HOST_ONLY("all ranks share one copy of the weights");
  const Sizes sizes;
  const int64_t P = Sizes::sum(sizes.trainable), full = Sizes::aligned(sizes.trainable) + Sizes::aligned(sizes.frozen);
  for (const int N : {2, 3}) {
    std::vector<std::string> lines;
    for (const std::string strategy : {"zero1", "zero2", "zero3"})
      for (const std::string dtype : {"fp32", "bf16"})
        lines.push_back("job.name=" + strategy + dtype +
                        " train.steps=2 train.gradient_accumulation=1 train.dtype=" + dtype + " strategy=" + strategy);
    const Result result = run_all(N, lines);
    ASSERT_EQ(result.code, 0) << result.output;
    for (const std::string strategy : {"zero1", "zero2", "zero3"})
      for (const std::string dtype : {"fp32", "bf16"}) {
        const int64_t w = dtype == "fp32" ? 4 : 2;
        for (const Json& row : metrics(strategy + dtype))
          EXPECT_EQ(row["communication_bytes"], w * P * (N - 1))
              << strategy << dtype << ": only gradients may be communicated";
        const Json memory = summary(strategy + dtype)["memory"]["device"];
        EXPECT_NEAR(memory["weights"]["peak"], w * full / N, w)
            << "each rank's ledger must count its part of the shared weights";
        EXPECT_EQ(memory["weights"]["planned"], memory["weights"]["peak"]);
      }
  }
}

}  // namespace
