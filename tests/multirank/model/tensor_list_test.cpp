// An engine over a list of named tensors, as a module of another language gives them, beside an engine over the module.
#include <filesystem>
#include <stdexcept>

#include "multirank/model/refresh_run.hpp"
#include "support/layouts.hpp"

namespace model_tests {
namespace {

zr::ModelTensors tensors_of(const torch::nn::Module& module) {
  zr::ModelTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.parameters.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.buffers.emplace_back(item.key(), item.value());
  return tensors;
}

// The weights hash and the parameters after training, with an engine over the module or over its tensors.
std::pair<std::string, std::vector<std::string>> result(Run& run, bool by_list) {
  run.model = parity::make(run.program.text("parity.model"), 7);
  const auto list = [&] { return tensors_of(*run.model); };
  run.engine = by_list ? std::make_unique<zr::Engine>(run.program, list, "list")
                       : std::make_unique<zr::Engine>(run.program, *run.model, "module");
  run.train();
  std::vector<std::string> names;
  for (const zr::ParameterInfo& info : run.engine->parameters()) names.push_back(info.name);
  const std::string hash = run.engine->weights_hash();
  run.engine.reset();
  return {hash, names};
}

// The model has tied, frozen and unused parameters.
MULTIRANK_TEST(EngineModelTest, AListOfTensorsTrainsAsItsModule, {1, 2}, zr::test::kLayouts) {
  const auto module = result(run, false);
  EXPECT_EQ(result(run, true), module);
}

// Parameters that the list gains and loses are noticed as those of a module.
MULTIRANK_TEST(EngineModelTest, AListOfTensorsIsReadAgain, {2}, {"strategy=zero1"}) {
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    const auto train = [&](bool by_list) {
      Training training(run, how, {});
      training.net.add("a");
      if (by_list)
        training.engine = std::make_unique<zr::Engine>(
            *training.program, std::function<zr::ModelTensors()>([&] { return tensors_of(training.net); }));
      else
        training.start();
      training.train(0, 2);
      training.net.add("b");
      EXPECT_NE(error_of([&] { training.train(2, 3); }).find("'b.weight' was added to the model"), std::string::npos);
      training.engine->refresh();
      training.train(2, 4);
      training.net.unregister_module("a");
      training.net.parts.erase("a");
      training.engine->refresh();
      training.train(4, 6);
      return std::pair(training.engine->weights_hash(), training.losses);
    };
    EXPECT_EQ(train(true), train(false)) << how.text(run.program.world());
  }
}

// An exception of the program's function leaves the method as it is, on all ranks at the same call, and the engine can
// be used after it.
MULTIRANK_TEST(EngineModelTest, ExceptionsOfTheListArriveAsTheyAre, {2}, zr::test::kLayouts) {
  run.model = parity::make(run.program.text("parity.model"), 7);
  bool fails = false;
  const auto list = [&] {
    if (fails) throw std::out_of_range("no list");
    return tensors_of(*run.model);
  };
  fails = true;
  EXPECT_THROW(zr::Engine(run.program, list), std::out_of_range);
  fails = false;
  run.engine = std::make_unique<zr::Engine>(run.program, list);
  const std::string folder = run.program.text("job.runs") + "/saved";
  while (!run.engine->done()) {
    const torch::Tensor loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    fails = true;
    EXPECT_THROW(run.engine->backward(loss), std::out_of_range);
    EXPECT_THROW(run.engine->save(folder), std::out_of_range);
    EXPECT_THROW(run.engine->refresh(), std::out_of_range);
    EXPECT_THROW(zr::Engine::Evaluation{*run.engine}, std::out_of_range);
    EXPECT_THROW(run.engine->get("scalar"), std::out_of_range);
    fails = false;
    run.engine->backward(loss);
    run.engine->step();
  }
  EXPECT_FALSE(std::filesystem::exists(folder));
  const std::string hash = run.engine->weights_hash();
  EXPECT_THROW(run.engine.reset(new zr::Engine(run.program, std::function<zr::ModelTensors()>(), "other")),
               zr::UserError);
  run.engine.reset();
  EXPECT_EQ(result(run, false).first, hash);
}

MULTIRANK_TEST(EngineModelTest, NamesInAListOfTensorsAreDistinct, {1}) {
  const auto tensor = torch::ones({2}, torch::requires_grad());
  const auto error = [&](const zr::ModelTensors& tensors) {
    return error_of([&] { const zr::Engine engine(run.program, [&] { return tensors; }); });
  };
  const std::string begin = "zr::Engine: the list of tensors has the ";
  const std::string taken = ", whose name is taken; give each tensor a name of its own";
  EXPECT_EQ(error({{{"w", tensor}, {"w", tensor.clone()}}, {}}), begin + "parameter 'w'" + taken);
  EXPECT_EQ(error({{{"w", tensor}}, {{"w", torch::ones({})}}}), begin + "buffer 'w'" + taken);
  EXPECT_EQ(error({{{"__metadata__", tensor}}, {}}), begin + "parameter '__metadata__'" + taken);
  EXPECT_EQ(error({{{"w", tensor}}, {{"", torch::ones({})}}}), begin + "buffer '', which has no name; name it");
  EXPECT_NE(error({{{"\xff\xfe", tensor}}, {}}).find("or not UTF-8; give it another name"), std::string::npos);
  EXPECT_NE(error({{{std::string(5000, 'w'), tensor}}, {}}).find("is longer than 4096 bytes"), std::string::npos);
  EXPECT_NE(error({{{"w", torch::Tensor()}}, {}}).find("the model has no parameters"), std::string::npos);
}

}  // namespace
}  // namespace model_tests
