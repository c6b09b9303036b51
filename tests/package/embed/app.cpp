#include <torch/torch.h>

#include <zr/engine.hpp>

int main(int argc, char** argv) {
  int unused;
  torch::nn::Linear model(4, 1);
  zr::Engine engine(zr::Program(argc, argv), *model);
  while (!engine.done()) {
    engine.backward(model->forward(torch::ones({2, 4})).square().mean());
    engine.step();
  }
  return 0;
}
