// The words of Python for names of C++ in messages.
#include <array>
#include <string_view>

#include "python/boundary.hpp"

namespace zr::python {

namespace {
struct Word {
  std::string_view cpp, python;
};
// In this order: longer names before those that they begin with.
constexpr std::array kWords{
    Word{"zr::Engine::Evaluation", "engine.evaluation()"},
    Word{"zr::TensorKind::value", "\"value\""},
    Word{"zr::TensorKind::gradient", "\"gradient\""},
    Word{"zr::TensorKind::state", "\"state\""},
    Word{"zr::Configuration::set", "zeroth.Program"},
    Word{"zr::Configuration", "zeroth.Program"},
    Word{"zr::Engine(program, model, ", "zeroth.Engine(model, program, name="},
    Word{"a zr::Swap", "an engine.swap()"},
    Word{"zr::Swap", "engine.swap()"},
    Word{"zr::MicroBatchSampler", "engine.loader()"},
    Word{"the function that is passed to std::atexit", "the function that is passed to atexit.register"},
    Word{"a function that is passed to std::atexit", "a function that is passed to atexit.register"},
    Word{"construct zr::Program first in its main()", "construct zeroth.Program before the model"},
    Word{"torch::jit::setGraphExecutorOptimize(false)", "torch._C._set_graph_executor_optimize(False)"},
    Word{"torch::NoGradGuard", "torch.no_grad()"},
    Word{"c10::InferenceMode", "torch.inference_mode()"},
    Word{"torch::autograd::grad", "torch.autograd.grad"},
    Word{"torch::kFloat", "torch.float32"},
    Word{"torch::kLong", "torch.int64"},
    Word{"torch::load(", "model.load_state_dict("},
    Word{"zr::", "zeroth."},
    Word{"torch::", "torch."},
    Word{"engine.dtype()", "engine.dtype"},
    Word{"engine.device()", "engine.device"},
    Word{"engine.done()", "engine.done"},
    Word{"engine.micro_batch()", "engine.micro_batch"},
    Word{"->", "."},
};
}  // namespace

std::string in_python(const std::string& text) {
  std::string words;
  words.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view rest = std::string_view(text).substr(at);
    const Word* found = nullptr;
    for (const Word& word : kWords)
      if (rest.starts_with(word.cpp)) {
        found = &word;
        break;
      }
    if (found) {
      words += found->python;
      at += found->cpp.size();
    } else {
      words += text[at++];
    }
  }
  return words;
}

}  // namespace zr::python
