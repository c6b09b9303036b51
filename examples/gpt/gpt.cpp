// Trains the GPT of model.hpp on text with Zeroth: `zeroth train gpt.toml`. plain.cpp is the same without Zeroth.
#include <algorithm>
#include <filesystem>
#include <iostream>

#include "data.hpp"
#include "model.hpp"
#include "zr/engine.hpp"
#include "zr/parameters.hpp"
#include "zr/recompute.hpp"

namespace {

std::vector<zr::Key> keys() {
  return {
      {"model.layers", 4, "transformer blocks", 1, 1000},
      {"model.width", 192, "channels of the residual stream, a multiple of heads", 1, 65536},
      {"model.heads", 6, "attention heads", 1, 1024},
      {"model.context", 128, "context length in bytes", 1, 65536},
      {"model.dropout", 0.0, "fraction of activations dropped in training", 0, 0.99},
      {"model.recompute", false, "drop the activations of each block and recompute them in backward"},
      zr::Key::of_path("data.text", ZR_DATA_DIR "/jargon.txt.gz", "training text, plain or .gz"),
      {"sample.length", 400, "bytes to sample after training; 0: none", 0, 1000000},
      {"sample.temperature", 0.8, "sampling temperature; below 1 prefers likely bytes", 0.01, 10},
  };
}

// Rank i % world evaluates chunk i of the validation windows. All ranks run the model equally often, because a sharded
// model requires it; the results of surplus runs are discarded.
double validate(zr::Engine& engine, gpt::Model& model, const gpt::Text& text, int64_t context) {
  const zr::Engine::Evaluation evaluation(engine);
  model->eval();
  const auto chunks = text.validation_chunks(context);
  double sum = 0;
  for (int64_t first = 0; first < chunks; first += engine.world()) {
    const auto i = first + engine.rank();
    const auto batch = text.validation(std::min(i, chunks - 1), context).to(engine.device());
    const auto loss = model->loss(batch.bytes, batch.next).item<double>();
    sum += i < chunks ? loss : 0;
  }
  model->train();
  return engine.mean(sum) * engine.world() / static_cast<double>(chunks);
}

void train(const zr::Program& program) {
  const gpt::Shape shape{program.integer("model.layers"), program.integer("model.width"),
                         program.integer("model.heads"), program.integer("model.context"),
                         program.number("model.dropout")};
  if (shape.width % shape.heads != 0) {  // checked here, where the position in the file is known
    throw std::invalid_argument(program.origin("model.width") + ": model.width = " + std::to_string(shape.width) +
                                " is not a multiple of model.heads = " + std::to_string(shape.heads) + " (" +
                                program.origin("model.heads") + ")");
  }
  const gpt::Text text(program.text("data.text"));
  torch::manual_seed(static_cast<uint64_t>(program.integer("train.seed")));
  auto model = zr::deferred([&] { return gpt::Model(shape); });  // gets memory when the engine is made
  if (program.boolean("model.recompute")) {
    model->around_block = [](const auto& block, const auto& x) { return zr::checkpoint(block, x); };
  }
  zr::Engine engine(program, *model);

  while (!engine.done()) {
    const auto batch =
        text.training(engine.seed(), engine.step_index(), engine.micro_index(), engine.micro_batch(), shape.context)
            .to(engine.device());
    engine.backward(model->loss(batch.bytes, batch.next));
    engine.add_tokens(batch.bytes.numel());
    if (engine.step() && engine.validation_due()) {
      engine.validation(validate(engine, model, text, shape.context));
    }
  }

  if (const auto length = program.integer("sample.length"); length > 0) {
    const zr::Engine::Evaluation evaluation(engine);
    model->eval();
    const auto sample = model->sample("\n   ", length, engine.seed(), program.number("sample.temperature"));
    if (engine.rank() == 0) {
      std::cout << "--- a sample ---" << sample << "\n----------------" << std::endl;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return zr::guarded([&] { train(zr::Program(argc, argv, keys())); });
}
