// Floating-point buffers of 16-bit models: they keep their types unless train.cast_buffers converts them.
#include <gmock/gmock.h>

#include "support/engine_test.hpp"
#include "support/user_error.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class BufferTypesTest : public EngineTest {};

// Rotary tables at far positions, which 16 bits cannot hold; a double buffer; statistics; an integer buffer.
struct Rotary : torch::nn::Module {
  static constexpr int64_t kWidth = 8, kPositions = 4100;
  Rotary() {
    line = register_module("line", torch::nn::Linear(kWidth, kWidth));
    const auto angles = torch::outer(torch::arange(kPositions).to(torch::kFloat),
                                     torch::pow(10000.0, -torch::arange(kWidth).to(torch::kFloat) / kWidth));
    angle = register_module("rope", std::make_shared<torch::nn::Module>())->register_buffer("angle", angles);
    scale = register_buffer("scale", torch::full({1}, 1.0 / 3, torch::kDouble));
    count = register_buffer("count", torch::arange(3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto at = angle.slice(0, kPositions - x.size(0));
    return (line(x) * (at.cos() * scale).to(x.scalar_type())).to(torch::kFloat);
  }
  torch::nn::Linear line{nullptr};
  torch::Tensor angle, scale, count;
};

torch::Tensor batch(torch::ScalarType type) { return (torch::arange(40).view({5, 8}) / 20.0).to(type); }

// The output of plain libtorch with parameters of this type, and with buffers of another.
torch::Tensor plain_output(const Rotary& model, torch::ScalarType type, bool rounds_angles) {
  torch::manual_seed(7);
  Rotary plain;
  for (auto& parameter : plain.parameters()) parameter.set_data(parameter.to(type));
  if (rounds_angles) plain.angle.set_data(plain.angle.to(type));
  EXPECT_EQ(model.angle.scalar_type(), rounds_angles ? type : torch::kFloat);
  EXPECT_TRUE(torch::equal(model.angle, plain.angle));
  EXPECT_TRUE(torch::equal(model.scale, plain.scale));
  return plain.forward(batch(type)).detach();
}

RANK_BODY(keeps_buffers, Run) {
  const bool casts = run.program.boolean("parity.weighted"), deferred = run.program.boolean("parity.overflows");
  torch::manual_seed(7);
  const auto model = deferred ? zr::deferred([] { return std::make_shared<Rotary>(); }) : std::make_shared<Rotary>();
  zr::Engine engine(run.program, *model);
  const auto output = model->forward(batch(engine.dtype()));
  EXPECT_TRUE(torch::equal(output.detach(), plain_output(*model, engine.dtype(), casts)));
  EXPECT_EQ(engine.buffer("rope.angle").scalar_type(), casts ? engine.dtype() : torch::kFloat);
  engine.backward(output.square().mean());
  engine.step();
  engine.release(torch::kFloat);
  EXPECT_EQ(model->angle.scalar_type(), torch::kFloat);
  EXPECT_EQ(model->scale.scalar_type(), torch::kDouble);
}

const std::string kTwoRanks = "train.cast_buffers=[] strategy=";

TEST_F(BufferTypesTest, BuffersKeepTheirTypesUnlessTheyAreCast) {
  struct Case {
    std::string strategy, dtype, deferred;
  };
  for (const auto& [strategy, dtype, deferred] : {Case{"zero0", "fp16", "false"}, Case{"zero1", "bf16", "false"},
                                                  Case{"zero3", "fp16", "true"}, Case{"zero0", "bf16", "true"}}) {
    const std::string how = kTwoRanks + strategy + " train.dtype=" + dtype + " parity.overflows=" + deferred;
    const Result kept = run(2, keeps_buffers, how);
    EXPECT_EQ(kept.code, 0) << how << "\n" << kept.output;
    EXPECT_THAT(kept.output, HasSubstr("zeroth: buffers 'scale' (double), 'rope.angle' (fp32) keep their type, because "
                                       "train.dtype = \"" +
                                       dtype +
                                       "\" rounds parameters only; "
                                       "train.cast_buffers = [\"*\"] rounds buffers too\n"));
    const Result cast = run(2, keeps_buffers, how + " parity.weighted=true 'train.cast_buffers=[\"rope.*\"]'");
    EXPECT_EQ(cast.code, 0) << how << "\n" << cast.output;
    EXPECT_THAT(cast.output, HasSubstr("zeroth: buffer 'scale' (double) keeps its type, because"));
  }
  const Result fp32 = run(1, keeps_buffers, kTwoRanks + "zero0 train.dtype=fp32");
  EXPECT_EQ(fp32.code, 0) << fp32.output;
  EXPECT_THAT(fp32.output, Not(HasSubstr("keep their type")));
}

RANK_BODY(names_a_pattern, Run) {
  Rotary model;
  EXPECT_EQ(zr::test::user_error_of([&] { zr::Engine(run.program, model); }),
            "command line: train.cast_buffers: 'rope.angel' matches no floating-point buffer of the model; the nearest "
            "is 'rope.angle'; `*` matches any sequence of characters");
}

TEST_F(BufferTypesTest, APatternWithoutABufferIsAnError) {
  const Result result = run(1, names_a_pattern, "train.dtype=bf16 'train.cast_buffers=[\"rope.angel\"]'");
  EXPECT_EQ(result.code, 0) << result.output;
}

// An operator that does not accept the two types names the buffer and the key, under every way to store weights.
RANK_BODY(mixes_types, Run) {
  Rotary model;
  zr::Engine engine(run.program, model);
  const std::string remedy =
      ": buffer 'rope.angle' (fp32) keeps its type with train.dtype = \"bf16\"; cast it where forward() uses it, or "
      "round it with train.cast_buffers = [\"rope.angle\"]";
  const std::string with_input =
      zr::test::user_error_of([&] { torch::mm(batch(torch::kBFloat16), model.angle.slice(0, 0, 8)); });
  EXPECT_THAT(with_input, AllOf(HasSubstr("aten::mm: "), HasSubstr("dtype"), HasSubstr(remedy)));
  const std::string with_weight = zr::test::user_error_of([&] { torch::linear(model.angle, model.line->weight); });
  EXPECT_THAT(with_weight, AllOf(HasSubstr("dtype"), HasSubstr(remedy)));
  torch::Tensor mixed = torch::cat({model.angle, model.angle.to(torch::kBFloat16)});  // what libtorch promotes works
  EXPECT_EQ(mixed.scalar_type(), torch::kFloat);
  EXPECT_THROW(torch::mm(batch(torch::kFloat), torch::ones({3, 3})), c10::Error) << "other errors are libtorch's own";
  EXPECT_THROW(torch::mm(model.angle, torch::ones({3, 3})), c10::Error);
}

// What is computed from a buffer: the program ends with libtorch's message, and the remedy.
RANK_BODY(mixes_later, Run) {
  Rotary model;
  zr::Engine engine(run.program, model);
  torch::linear(model.angle * 2, model.line->weight);
}

TEST_F(BufferTypesTest, AnOperatorThatDoesNotAcceptTheMixNamesTheBuffer) {
  for (const std::string how : {"zero0", "zero2", "zero3 communicator.share_weights=false"}) {
    const Result result = run(2, mixes_types, kTwoRanks + how + " train.dtype=bf16");
    EXPECT_EQ(result.code, 0) << how << "\n" << result.output;
  }
  const Result later = run(1, mixes_later, kTwoRanks + "zero0 train.dtype=bf16");
  EXPECT_EQ(later.code, 1) << later.output;
  EXPECT_THAT(later.output,
              HasSubstr("cast the inputs of the model to that type with x.to(engine.dtype()); buffers 'rope.angle' "
                        "(fp32), 'scale' (double) keep their type with train.dtype = \"bf16\"; cast them where "
                        "forward() uses them, or round them with train.cast_buffers = [\"rope.angle\", \"scale\"]"));
}

// A checkpoint of a job that rounded its buffers, as all 16-bit jobs did once, loads into fp32 buffers, and resumes.
RANK_BODY(saves_buffers, Run) {
  torch::manual_seed(7);
  Rotary model;
  zr::Engine engine(run.program, model);
  engine.save(run.program.text("checkpoint.dir"));
}
RANK_BODY(loads_buffers, Run) {
  torch::manual_seed(7);
  Rotary model, plain;
  torch::manual_seed(7);
  zr::Engine engine(run.program, model);
  engine.load(run.program.text("checkpoint.dir"));
  EXPECT_EQ(model.angle.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(model.angle, plain.angle.to(torch::kBFloat16).to(torch::kFloat)));
}
RANK_BODY(loads_into_rounded_buffers, Run) {
  Rotary model;
  zr::Engine engine(run.program, model);
  EXPECT_THAT(zr::test::user_error_of([&] { engine.load(run.program.text("checkpoint.dir")); }),
              HasSubstr("buffer 'rope.angle' is F32, but with train.cast_buffers this job has the buffer as BF16; set "
                        "train.cast_buffers and train.dtype as in the job that saved the checkpoint, or"));
}

TEST_F(BufferTypesTest, CheckpointsWithRoundedBuffersLoad) {
  const std::string folder = " checkpoint.dir=" + (folder_ / "saved").string();
  const std::string cast = "train.dtype=bf16 'train.cast_buffers=[\"rope.*\"]'" + folder;
  ASSERT_EQ(run(2, saves_buffers, "strategy=zero2 " + cast).code, 0);
  const Result loaded = run(2, loads_buffers, kTwoRanks + "zero1 train.dtype=bf16" + folder);
  EXPECT_EQ(loaded.code, 0) << loaded.output;
  EXPECT_THAT(loaded.output,
              HasSubstr(": these buffers are saved in a narrower type than the model has them in, and keep the "
                        "rounded values; rounded: 'rope.angle' (BF16); if the model computes them"));
  ASSERT_EQ(run(1, saves_buffers, kTwoRanks + "zero0 train.dtype=bf16" + folder).code, 0);
  const Result rejected = run(1, loads_into_rounded_buffers, cast);
  EXPECT_EQ(rejected.code, 0) << rejected.output;
}

}  // namespace
