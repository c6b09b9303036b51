#include "model/process_setup.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/VariableHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/library.h>

#include "model/allocator.hpp"
#include "model/autograd_engine.hpp"
#include "model/intercept.hpp"
#include "model/variable_hooks.hpp"

namespace zr::host::model {

void ProcessSetup::intercept_placeholders() {
  static auto* const library = [] {  // never destroyed: operators may run after static objects are destroyed
    auto* const fallbacks = new torch::Library(torch::Library::IMPL, "_", kPlaceholderKey, __FILE__, __LINE__);
    fallbacks->fallback(torch::CppFunction::makeFromBoxedFunction<&run_with_memory>());
    return fallbacks;
  }();
  static_cast<void>(library);
}

void ProcessSetup::run_torchscript_as_written() {
  torch::jit::setTensorExprFuserEnabled(false);
  torch::jit::getProfilingMode() = false;
}

void ProcessSetup::start_autograd_threads() {
  SavingEngine::start_threads();
  begin_backward_here();
}

void ProcessSetup::count_cpu_memory() {
  static const bool once = (c10::SetCPUAllocator(new CountingAllocator), true);
  static_cast<void>(once);
}

void ProcessSetup::watch_tensor_data(void (*made)(const at::TensorBase&)) {
  static const bool once =
      (at::impl::SetVariableHooks(new WatchingHooks(at::impl::GetVariableHooks(), made)), true);  // NOLINT: never freed
  static_cast<void>(once);
}

void ProcessSetup::use_threads(int threads) { at::set_num_threads(threads); }

void ProcessSetup::begin_backward_here() { SavingEngine::make_default(); }

}  // namespace zr::host::model
