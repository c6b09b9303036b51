// Trains the GPT of model.hpp on text with Zeroth: `zeroth train gpt.toml`. The comparison is plain.cpp.
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
      {"model.context", 128, "bytes the model looks at", 1, 65536},
      {"model.dropout", 0.0, "share of activations dropped in training", 0, 0.99},
      {"model.recompute", false, "blocks keep nothing for backward and run again there"},
      {"data.text", ZR_DATA_DIR "/jargon.txt.gz", "text to learn, plain or .gz; relative to this file's folder"},
      {"sample.length", 400, "bytes written after training; 0 for none", 0, 1000000},
      {"sample.temperature", 0.8, "below 1 the likely bytes are preferred", 0.01, 10},
  };
}

// Chunk i of the validation windows belongs to rank i modulo world. All ranks run the model equally often, as a sharded
// one needs; what is over counts for nothing.
double validate(zr::Engine& engine, gpt::Model& model, const gpt::Text& text, int64_t context) {
  const zr::Engine::Evaluation evaluation(engine);
  model->eval();
  const auto chunks = text.validation_chunks(context);
  double sum = 0;
  for (int64_t first = 0; first < chunks; first += engine.world()) {
    const auto i = first + engine.rank();
    const auto batch = text.validation(std::min(i, chunks - 1), context);
    const auto loss = model->loss(batch.bytes, batch.next).item<double>();
    sum += i < chunks ? loss : 0;
  }
  model->train();
  return engine.mean(sum) * engine.world() / static_cast<double>(chunks);
}

void train(const zr::Program& program) {
  const gpt::Config config{program.integer("model.layers"), program.integer("model.width"),
                           program.integer("model.heads"), program.integer("model.context"),
                           program.number("model.dropout")};
  if (config.width % config.heads != 0) {  // here, where the place in the file is known
    throw std::invalid_argument(program.origin("model.width") + ": model.width = " + std::to_string(config.width) +
                                " is not a multiple of model.heads = " + std::to_string(config.heads) + " (" +
                                program.origin("model.heads") + ")");
  }
  const gpt::Text text(std::filesystem::path(program.folder()) / program.text("data.text"));
  torch::manual_seed(static_cast<uint64_t>(program.integer("train.seed")));
  auto model = zr::deferred([&] { return gpt::Model(config); });  // has memory when the engine is made
  if (program.boolean("model.recompute")) {
    model->around_block = [](const auto& block, const auto& x) { return zr::checkpoint(block, x); };
  }
  zr::Engine engine(program, *model);

  while (!engine.done()) {
    const auto batch =
        text.training(engine.seed(), engine.step_index(), engine.micro_index(), engine.micro_batch(), config.context);
    engine.backward(model->loss(batch.bytes, batch.next));
    engine.add_tokens(batch.bytes.numel());
    if (engine.step() && engine.validation_due()) {
      engine.validation(validate(engine, model, text, config.context));
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
