// What crosses the boundary to Python: errors as text, functions of Python as C function pointers, and scopes.
#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zr/error.hpp"

namespace zr::python {

/// The text of an error in the words of Python: "zr::gather(model->parameters())" is
/// "zeroth.gather(model.parameters())". The same for a text that is in them already. [any]
std::string in_python(const std::string& text);

/// An error on its way to Python. TorchBind makes a RuntimeError of every std::exception; the package finds the class
/// in the text, "\x1fzeroth:UserError\x1f...", and raises that (zeroth/_errors.py). [any]
class BoundaryError : public std::exception {
 public:
  /// `kind`: the name of a class of zeroth/_errors.py, "exit" (text: the code) or "callback".
  BoundaryError(const std::string& kind, const std::string& text) : text_("\x1fzeroth:" + kind + "\x1f" + text) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// A function of Python has raised an exception, which the package keeps and raises again.
struct CallbackFailed : std::exception {
  const char* what() const noexcept override { return "a Python function that Zeroth has called raised an exception"; }
};

/// Returns fn(), with errors as BoundaryError. Those of libtorch, and Python exceptions of hooks, pass unchanged.
template <class Fn>
auto cross(Fn&& fn) {
  try {
    return fn();
  } catch (const ExitRequest& request) {
    throw BoundaryError("exit", std::to_string(request.exit_code));
  } catch (const CallbackFailed&) {
    throw BoundaryError("callback", "");
  } catch (const UserError& error) {
    throw BoundaryError("UserError", in_python(error.what()));
  } catch (const EnvironmentError& error) {
    throw BoundaryError("EnvironmentError", in_python(error.what()));
  } catch (const PeerFailedError& error) {
    throw BoundaryError("PeerFailedError", in_python(error.what()));
  } catch (const PeerLostError& error) {
    throw BoundaryError("PeerLostError", in_python(error.what()));
  } catch (const InternalError& error) {
    throw BoundaryError("InternalError", in_python(error.what()));
  }
}

/// Tensors that a function of Python receives, and the one that it returns: C function pointers of ctypes have none.
/// The function reads them while it runs. Training thread.
struct Mailbox : torch::CustomClassHolder {
  std::vector<torch::Tensor> arguments;
  torch::Tensor result;
  /// The result, which is undefined afterwards.
  torch::Tensor take() { return std::exchange(result, torch::Tensor()); }
};

/// The function of Python at an address that ctypes gives. It returns 0, or 1 if it has raised an exception.
template <class... Arguments>
std::function<void(Arguments...)> function_at(int64_t address) {
  using Function = int32_t (*)(Arguments...);
  return [function = reinterpret_cast<Function>(address)](Arguments... arguments) {
    if (function(arguments...) != 0) throw CallbackFailed();
  };
}

/// A scope of the C++ API that a `with` block of Python ends. Training thread.
class Scope : public torch::CustomClassHolder {
 public:
  /// `destroy`: ends the scope by destroying its object.
  explicit Scope(std::function<void()> destroy) : destroy_(std::move(destroy)) {}
  /// Ends a scope that Python has forgotten as an exception would.
  ~Scope() override { end(true); }
  /// Ends the scope; as an exception that unwinds the stack does if `unwinds`. Again: no effect. May throw
  /// BoundaryError.
  void end(bool unwinds);

 private:
  std::function<void()> destroy_;
};

/// A Scope of T(arguments...), whose destructor may throw.
template <class T, class... Arguments>
c10::intrusive_ptr<Scope> make_scope(Arguments&&... arguments) {
  T* const object = cross([&] { return new T(std::forward<Arguments>(arguments)...); });
  return c10::make_intrusive<Scope>([object] { delete object; });
}

/// Define the classes of one file.
void define_scopes(torch::Library& m);
void define_program(torch::Library& m);
void define_engine(torch::Library& m);

/// Calls fn() while an exception unwinds the stack, so that destructors in it act as for one.
void while_unwinding(const std::function<void()>& fn);

}  // namespace zr::python
