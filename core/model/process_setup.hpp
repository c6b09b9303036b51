// Everything that the engine installs in libtorch for the whole process. libtorch holds what it gets, so nothing here
// is removed before the process ends, and all other users of libtorch in the process, such as Python, have it too.
#pragma once

namespace at {
class TensorBase;
}

namespace zr::host::model {

/// Each function installs its part once; later calls have no effect, unless stated otherwise. In the order in which a
/// process calls them that builds a deferred model and then its engine. [any], unless stated otherwise. What is set for
/// a moment and then restored is not here: while a deferred model is built, the default dtype and the number of threads
/// are those of each recorded operator (replay.cpp).
struct ProcessSetup {
  /// Called before the first placeholder. Operators on parameters without memory reach the engine (intercept.hpp).
  /// Other users see nothing of it; the dispatch key DeferredInit, which libtorch leaves to external libraries, is then
  /// in use.
  static void intercept_placeholders();
  /// Called with an engine for a TorchScript module. TorchScript neither fuses nor specializes graphs again, which
  /// changes results and depends on how often a rank has run them. The TorchScript of other users does not either, and
  /// may be slower.
  static void run_torchscript_as_written();
  /// Called when the first device other than the CPU is opened. Starts autograd's threads for the devices that libtorch
  /// knows now, with one small backward. No backward may run meanwhile. Other users get these threads in their
  /// backwards too, unless they have an engine of their own, which starts its own threads in the first backward of the
  /// process.
  static void start_autograd_threads();
  /// Called when a model is listed. Counts libtorch's CPU memory (allocator.hpp). Other users get the same memory, from
  /// libtorch's own functions, with one addition per allocation. An allocator that they set later replaces the count.
  static void count_cpu_memory();
  /// Called when a parameter is bound. Calls made() for each tensor that data() makes (data_views.hpp). Other users see
  /// nothing of it: the hooks that were installed before do the work.
  static void watch_tensor_data(void (*made)(const at::TensorBase&));
  /// Called with each engine, and sets the number each time. libtorch's operators use as many threads as the rank has,
  /// also those of other users. Training thread.
  static void use_threads(int threads);
  /// Called before saved tensors are dropped or offloaded. libtorch begins the backwards of C++ in the engine of
  /// autograd_engine.hpp. The autograd engine of other users, such as Python's, still runs every backward, and gives
  /// its hooks for saved tensors outside the scopes of saved_tensor_scope.hpp. If another engine has become libtorch's
  /// default since, the next call does the same for it.
  static void begin_backward_here();
};

}  // namespace zr::host::model
