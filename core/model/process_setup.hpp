// Everything that the engine installs for the whole process. libtorch keeps what it gets, so nothing here is removed
// before the process ends, and all other users of libtorch in the process, such as Python, have it too. Each function
// says what they see of it.
#pragma once

namespace at {
class TensorBase;
}

namespace zr::host::model {

/// Each function installs its part once; later calls have no effect, unless stated otherwise. In the order in which a
/// job calls them. [any], unless stated otherwise.
struct ProcessSetup {
  /// When a model is listed: libtorch's CPU memory is counted (allocator.hpp). Others: the same memory, from
  /// libtorch's own functions; one addition per allocation. An allocator that they set later replaces the count.
  static void count_cpu_memory();
  /// Before the first placeholder: operators on parameters without memory reach the engine (intercept.hpp). Others:
  /// nothing; the dispatch key DeferredInit, which libtorch leaves to external libraries, is then in use.
  static void intercept_placeholders();
  /// When the backend of a device has been loaded: starts autograd's threads for the devices that libtorch knows now,
  /// with one small backward. No backward may run meanwhile. Others: the threads that their first backward starts.
  static void start_autograd_threads();
  /// When a parameter is bound: made() is called for each tensor that data() makes (data_views.hpp). Others: nothing;
  /// libtorch's hooks, or those that they have installed, do the rest.
  static void watch_tensor_data(void (*made)(const at::TensorBase&));
  /// Before saved tensors are dropped or offloaded: backward begins in the engine of autograd_engine.hpp. Others: their
  /// own autograd engine, such as Python's, still runs every backward, and gives its hooks for saved tensors outside
  /// the scopes of saved_tensor_scope.hpp. Called again when another engine has been made libtorch's default since. No
  /// backward may run on another thread.
  static void begin_backward_here();
  /// With each engine: the number of threads of libtorch's operators is that of the rank. Others: their operators use
  /// as many. Each call sets it. Training thread.
  static void use_threads(int threads);
  /// With an engine for a TorchScript module: TorchScript neither fuses nor respecializes graphs, which changes results
  /// and depends on how often a rank has run them. Others: the same for their TorchScript, which may be slower.
  static void run_torchscript_as_written();
};

}  // namespace zr::host::model
