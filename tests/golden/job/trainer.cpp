// A zr::Program without a model that prints its settings. For the golden cases of the command line.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "zr/program.hpp"

namespace {

void run(const zr::Program& program) {
  const char* request = std::getenv("ZR_REQUEST");
  if (program.text("model.kind") == "unruly") throw std::runtime_error("a model of this kind cannot be");
  if (request) {
    // The answer that zr::Engine would give for a model with a tied embedding and one matrix per layer.
    std::printf(
        "{\"zeroth_parameters\":1,\"parameters\":[{\"name\":\"embedding.weight\",\"aliases\":[\"head.weight\"],"
        "\"shape\":[1000,64],\"frozen\":false},{\"name\":\"norm.bias\",\"aliases\":[],\"shape\":[64],\"frozen\":"
        "false}");
    for (long long layer = 0; layer < static_cast<long long>(program.integer("model.layers")); ++layer)
      std::printf(",{\"name\":\"blocks.%lld.weight\",\"aliases\":[],\"shape\":[64,256],\"frozen\":%s}", layer,
                  layer == 0 ? "true" : "false");
    std::printf("]}\n");
    return;
  }
  std::printf("%lld layers, %g dropout, %s, text %s in %s, %lld steps, rank %d of %d\n",
              static_cast<long long>(program.integer("model.layers")), program.number("model.dropout"),
              program.boolean("model.tied") ? "tied" : "untied", program.text("data.text").c_str(),
              program.folder().substr(program.folder().rfind('/') + 1).c_str(),
              static_cast<long long>(program.integer("train.steps")), program.rank(), program.world());
}

}  // namespace

int main(int argc, char** argv) {
  return zr::guarded([&] {
    run(zr::Program(argc, argv,
                    {{"model.layers", 4, "blocks of the model", 1, 64},
                     {"model.dropout", 0.1, "part of the activations left out", 0, 1},
                     {"model.tied", true, "the head is the embedding"},
                     {"model.kind", "gpt", "which model", {"gpt", "mlp", "unruly"}},
                     {"data.text", "", "the file to learn"},
                     {"eval.batches", 8, "batches of a validation", 1}}));
  });
}
