// Operators that touch storages without memory: their providers are told before and after.
//
// Tensors on a placeholder carry the dispatch key DeferredInit, which libtorch leaves to libraries outside it; views
// inherit it, copies do not. Its kernel, ours alone in a process, is the boxed fallback in intercept.cpp: it finds the
// placeholders among an operator's arguments, lets their providers lend memory, runs the operator and takes the memory
// back. Operators without such an argument never come here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "model/placeholder.hpp"

namespace zr::host {

using Stack = std::vector<c10::IValue>;

/// Registers the fallback; the first call counts. Before the first placeholder is made. [any]
void intercept();

/// Appends every placeholder among the operator's arguments, the last of the stack, once each.
void find_param_uses(const c10::OperatorHandle& op, const Stack& stack, std::vector<ParamUse>& param_uses);
/// The operator's results are all views of its arguments, and it writes nothing: it reads no memory.
bool is_view(const c10::FunctionSchema& schema);

/// While one lives, the operators of this thread go to record() instead, those without tensors too.
class Recorder {
 public:
  Recorder();
  virtual ~Recorder();
  Recorder(const Recorder&) = delete;
  /// In the operator's place: arguments are taken from the stack, results left there. `below`: the keys to redispatch
  /// to.
  virtual void record(const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack* stack) = 0;

 private:
  Recorder* outer_;
};

}  // namespace zr::host
