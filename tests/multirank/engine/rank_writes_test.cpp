// Writes to weights whose values differ between ranks: every way to write, under every way to store weights, ends the
// job with an error that names the parameter and the ranks, before an update uses the values.
#include <gmock/gmock.h>

#include <map>
#include <set>

#include "support/engine_test.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// A program whose ranks write to 'twice.weight' in the way that job.name names: values of the rank, or with
// parity.weighted the same on all ranks.
struct Writer {
  explicit Writer(Run& r) : run(r), way(r.program.text("job.name")) {
    run.build();
    weight = run.model->named_parameters()["twice.weight"];
    value = 1.5f + static_cast<float>(run.program.boolean("parity.weighted") ? 0 : run.engine->rank());
  }
  // Rows that one rank owns under a strategy that shards, and that it does not own.
  torch::Tensor rows() const {
    const bool first = (run.engine->rank() == 0) != run.program.boolean("parity.weighted");
    return first ? weight.slice(0, weight.size(0) / 2) : weight.slice(0, 0, weight.size(0) / 2);
  }
  void write() {
    const torch::NoGradGuard no_grad;
    if (way == "scaled") weight.mul_(value);
    if (way == "one-element") weight.view({-1}).slice(0, 25, 26).add_(value);
    if (way == "rows-of-the-other") rows().mul_(run.program.boolean("parity.weighted") ? 1.0 : 2.0);
    if (way == "row") weight[run.program.boolean("parity.weighted") ? 0 : run.engine->rank()].zero_();
    if (way == "data") weight.data().mul_(value);
    if (way == "pointer") {
      const auto scope = zr::gather(weight);
      weight.data_ptr<float>()[700] = value;
    }
    if (way == "operator-in-scope") {
      const auto scope = zr::gather(run.model->parameters());
      weight.slice(1, 7, 8).fill_(value);
    }
    if (way == "renormalized")  // what Embedding does with max_norm
      torch::embedding_renorm_(weight, torch::full({1}, value == 1.5f ? 0 : run.engine->rank(), torch::kLong), 1e-3, 2);
  }
  Run& run;
  const std::string way;
  torch::Tensor weight;
  float value = 0;
};

RANK_BODY(writes_between_steps, Run) {
  Writer writer(run);
  run.micro_step();
  writer.write();
  run.micro_step();
  std::cout << "an update used the values" << std::endl;
}

// At the beginning of forward, and in a hook of backward.
RANK_BODY(writes_in_forward, Run) {
  Writer writer(run);
  run.micro_step();
  writer.write();
  const torch::Tensor loss = run.model->loss(1, run.engine->micro_index());
  run.engine->backward(loss);
  run.engine->step();
  std::cout << "an update used the values" << std::endl;
}
RANK_BODY(writes_in_backward, Run) {
  Writer writer(run);
  writer.weight = run.model->named_parameters()["twice.bias"];  // which backward does not need
  run.micro_step();
  const torch::Tensor loss = run.model->loss(1, run.engine->micro_index());
  loss.register_hook([&](const torch::Tensor&) { writer.write(); });
  run.engine->backward(loss);
  run.engine->step();
  std::cout << "an update used the values" << std::endl;
}

const std::vector<std::string> kStorages{"strategy=zero0 communicator.share_weights=false",
                                         "strategy=zero1 communicator.share_weights=false",
                                         "strategy=zero2 communicator.share_weights=false",
                                         "strategy=zero3 communicator.share_weights=false",
                                         "strategy=zero1",
                                         "strategy=zero2",
                                         "strategy=zero3",
                                         "strategy=zero2 train.dtype=bf16 communicator.share_weights=false",
                                         "strategy=zero1 train.dtype=bf16",
                                         "strategy=zero0 train.dtype=fp16"};

class RankWritesTest : public EngineTest {
 protected:
  // Every rank has a copy of its own, whose elements can be compared.
  static bool is_copied(const std::string& storage) {
    return storage.starts_with("strategy=zero0") ||
           (storage.find("share_weights=false") != storage.npos && !storage.starts_with("strategy=zero3"));
  }
  static bool is_sharded(const std::string& storage) {
    return storage.starts_with("strategy=zero3") && storage.find("share_weights=false") != storage.npos;
  }
  static std::string elements_of(const std::string& way, const std::string& storage) {
    const std::map<std::string, std::string> some{
        {"one-element", "element 25"},        {"row", "elements 0 to 71"},
        {"pointer", "element 700"},           {"operator-in-scope", "elements 7 to 1267"},
        {"renormalized", "elements 0 to 71"}, {"older", "element 100"}};
    return "'twice.weight', " + (is_copied(storage) && some.count(way) ? some.at(way) : "elements 0 to 1295");
  }
  void expect_error(const zr::test::RankBody& body, const std::string& way, const std::string& storage,
                    const std::string& elements = "") {
    const Result result = run(2, body, storage + " job.name=" + way + " parity.weighted=false");
    EXPECT_EQ(result.code, 2) << way << " " << storage << "\n" << result.output;
    EXPECT_THAT(result.output,
                AllOf(HasSubstr("weights differ between ranks: in " +
                                (elements.empty() ? elements_of(way, storage) : elements) + ", rank 1 " +
                                (is_sharded(storage) ? "wrote" : "has") + " different values than rank 0 (found in "),
                      Not(HasSubstr("an update used the values"))))
        << way << " " << storage;
  }
  void expect_equal_accepted(const zr::test::RankBody& body, const std::string& way, const std::string& storage) {
    const Result result = run(2, body, storage + " job.name=" + way + " parity.weighted=true");
    EXPECT_EQ(result.code, 0) << way << " " << storage << "\n" << result.output;
    EXPECT_THAT(result.output, HasSubstr("an update used the values")) << way << " " << storage;
  }
  static bool is_16_bit(const std::string& storage) { return storage.find("16") != storage.npos; }
};

// Each way with one storage of each kind, and one way with every storage.
TEST_F(RankWritesTest, EveryWayToWriteIsFound) {
  const std::string copied = kStorages[1], sharded = kStorages[3], shared = kStorages[4];
  for (const std::string way :
       {"one-element", "rows-of-the-other", "row", "data", "pointer", "operator-in-scope", "renormalized"})
    for (const std::string& storage : {copied, sharded, shared}) {
      expect_error(writes_between_steps, way, storage);
      if (way == "one-element" || way == "pointer") expect_equal_accepted(writes_between_steps, way, storage);
    }
}

TEST_F(RankWritesTest, EveryStorageOfWeightsFindsThem) {
  for (const std::string& storage : kStorages) expect_error(writes_between_steps, "scaled", storage);
  for (const std::string& storage : {kStorages[0], kStorages[3], kStorages[6]}) {
    expect_error(writes_in_forward, "rows-of-the-other", storage);
    expect_error(writes_in_backward, "one-element", storage,
                 is_copied(storage) ? "'twice.bias', element 25" : "'twice.bias', elements 0 to 35");
  }
}

// Weights that are shared are compared where they are written; other ranks' weights are as before.
RANK_BODY(catches_the_error, Run) {
  Writer writer(run);
  run.micro_step();
  const torch::Tensor before = run.engine->get("twice.weight");
  EXPECT_THROW(writer.write(), zr::UserError);
  EXPECT_TRUE(torch::equal(run.engine->get("twice.weight"), before));
  run.micro_step();
  std::cout << "trained to step " << run.engine->step_index() << std::endl;
}

TEST_F(RankWritesTest, ARejectedWriteToSharedWeightsChangesNothing) {
  if (zr::test::jobs_run_on_hosts()) GTEST_SKIP() << "weights are not shared between hosts";
  for (const std::string way : {"scaled", "pointer"}) {
    const Result result = run(2, catches_the_error, "strategy=zero3 job.name=" + way);
    EXPECT_EQ(result.code, 0) << way << result.output;
    EXPECT_THAT(result.output, HasSubstr("trained to step 2")) << way;
  }
}

// A program that catches the error and continues gets it again, until the values are equal.
RANK_BODY(ignores_the_error, Run) {
  Writer writer(run);
  run.micro_step();
  writer.write();
  const std::string checkpoint = run.program.text("job.runs") + "-saved";
  EXPECT_THROW(run.engine->get("twice.weight"), zr::UserError);
  EXPECT_THROW(run.engine->get("twice.weight"), zr::UserError);
  EXPECT_THROW(run.engine->save(checkpoint), zr::UserError);
  if (writer.way == "scaled") {
    EXPECT_THROW(run.micro_step(), zr::UserError);
    EXPECT_THROW(run.engine->step(), zr::UserError);
    EXPECT_EQ(run.engine->step_index(), 1);
    return;
  }
  run.engine->set("twice.weight", zr::TensorKind::value, torch::full({36, 36}, 0.5));
  run.micro_step();
  run.engine->save(checkpoint);
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "hash " << hash << std::endl;
}

TEST_F(RankWritesTest, TheErrorIsRepeatedUntilTheValuesAreEqual) {
  std::set<std::string> hashes;
  for (const std::string& storage : {kStorages[0], kStorages[1], kStorages[2], kStorages[3]})
    for (const std::string way : {"scaled", "pointer"}) {
      const Result result = run(2, ignores_the_error, storage + " train.steps=3 job.name=" + way);
      EXPECT_EQ(result.code, 0) << way << storage << result.output;
      if (const auto at = result.output.find("hash "); at != result.output.npos)
        hashes.insert(result.output.substr(at, 21));
    }
  EXPECT_EQ(hashes.size(), 1u) << testing::PrintToString(hashes);
}

// A tensor from before the engine that writes to a weight without the weight's version counter.
RANK_BODY(writes_through_an_older_tensor, Run) {
  run.model = parity::make("everything", 7);
  const torch::Tensor older = run.model->named_parameters()["twice.weight"].data();
  run.engine = std::make_unique<zr::Engine>(run.program, *run.model);
  run.micro_step();
  older.view({-1}).slice(0, 100, 101).add_(run.engine->rank());
  run.micro_step();
  std::cout << "an update used the values" << std::endl;
}

TEST_F(RankWritesTest, WritesThroughTensorsFromBeforeTheEngineAreFound) {
  for (const std::string& storage : {kStorages[0], kStorages[1]})
    expect_error(writes_through_an_older_tensor, "older", storage);
}

// An Embedding with max_norm, whose ranks look up other words: the job's error, and the remedy that it names.
struct Words : torch::nn::Module {
  explicit Words(bool renormalizes) {
    torch::nn::EmbeddingOptions options(20, 8);
    if (renormalizes) options.max_norm(0.5);
    table = register_module("table", torch::nn::Embedding(options));
  }
  torch::nn::Embedding table{nullptr};
};

RANK_BODY(embeds, Run) {
  const bool remedy = run.program.boolean("parity.weighted");
  torch::manual_seed(3);
  Words words(!remedy);
  zr::Engine engine(run.program, words);
  while (!engine.done()) {
    if (remedy) {
      const torch::NoGradGuard no_grad;
      torch::embedding_renorm_(words.table->weight, torch::arange(20), 0.5, 2);
    }
    engine.backward(words.table(torch::arange(4) + 7 * engine.micro_index()).to(torch::kFloat).square().sum());
    engine.step();
  }
  std::cout << "hash " << engine.weights_hash() << "\n";
}

TEST_F(RankWritesTest, AnEmbeddingWithMaxNormIsAnErrorWhoseRemedyWorks) {
  std::string hash;
  for (const std::string& storage : {kStorages[0], kStorages[1], kStorages[3], kStorages[6]}) {
    const Result wrong = run(2, embeds, storage);
    EXPECT_EQ(wrong.code, 2) << storage << wrong.output;
    EXPECT_THAT(wrong.output,
                AllOf(HasSubstr("weights differ between ranks: in 'table.weight'"),
                      HasSubstr("an Embedding with max_norm writes in forward, to the rows of each rank's own batch: "
                                "build it without max_norm, and call torch::embedding_renorm_ with the same indices on "
                                "all ranks")))
        << storage;
    const Result right = run(2, embeds, storage + " parity.weighted=true");
    EXPECT_EQ(right.code, 0) << storage << right.output;
    const std::string line = right.output.substr(right.output.find("hash "), 21);
    EXPECT_TRUE(hash.empty() || hash == line) << storage;
    hash = line;
  }
}

}  // namespace
