// The state of a zr::Engine, for the files that implement it.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "api/at_exit.hpp"
#include "api/module.hpp"
#include "api/program_state.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/session.hpp"
#include "model/device.hpp"
#include "model/torch_model.hpp"
#include "zr/engine.hpp"

namespace zr {

/// Training thread only, except life.
struct Engine::State {
  /// What the program has set and refresh() keeps.
  struct ProgramSettings {
    std::function<double(int64_t)> schedule;
    GradientEdit edit;
    std::vector<std::function<void(const StepResult&)>> callbacks;
    int accumulation = 0;  // 0: train.gradient_accumulation
  };

  /// `before`: the state that refresh() took over from the previous session.
  State(const Program& p, ProgramModulePtr m, const std::string& engine_name,
        std::unique_ptr<host::engine::RefreshState> before = nullptr);
  /// If an exception ends the engine, keeps what may explain it for the message of zr::guarded.
  ~State();
  /// Creates the state. If the process was started only to query its parameters, prints them and throws ExitRequest.
  static std::unique_ptr<State> make(const Program& program, const ProgramModulePtr& module, const std::string& name);
  /// The model's buffer of that name. Throws UserError, which suggests the nearest name.
  torch::Tensor buffer(const std::string& name);
  /// True if the tensor is in CPU memory or on the device of the engine, or undefined.
  bool holds(const torch::Tensor& tensor) const {
    return !tensor.defined() || tensor.device().is_cpu() || tensor.device() == device;
  }
  /// Waits until the weights and buffers that the engine has written are on the device, as libtorch's own copies from
  /// host memory do: then a program may use them on any stream.
  void finish_copies();
  /// Passes program_settings.schedule to the session.
  void apply_schedule();
  /// Passes program_settings.edit to the session.
  void apply_edit();
  /// Makes the engine use the buffers that the model has now.
  void adopt_buffers() {
    if (session && torch_model->has_buffers()) torch_model->adopt_buffers(module->buffers());
  }
  /// Ends the session when the process exits, as ~State() would. Not within a call of the engine: then the process ends
  /// without the rest of the call.
  void end_by_exit(int exit_code);
  /// True if neither ~State() nor the end of a scope of the engine may run: in a child of fork(), and when the process
  /// exits within a call of the engine, or while another thread may use the engine.
  bool must_leak() const { return left_to_exit || at_exit.forbids_destruction(); }
  /// The session. Throws after release(); `name` is the engine method that needs it ("step").
  host::engine::Session& session_for(const char* name) {
    if (!session)
      host::fail_user(std::string("engine.") + name + "() was called after " +
                      (ended_by_exit ? "the end of the engine, because the process exits; call it before, or in a "
                                       "function that is passed to std::atexit after the engine was made"
                                     : "engine.release(); create a new engine for the model"));
    return *session;
  }
  /// The scope of one public call: checks that it is on the training thread and not inside another call, and names the
  /// call in error reports.
  class Call {
   public:
    /// `name`: the method; `arguments`: as reports show them. Throws UserError for a wrong thread or a nested call.
    Call(State& state, const char* name, const std::string& arguments = "")
        : state_(state), text_(std::string("engine.") + name + "(" + arguments + ")") {
      host::engine::Session& session = state.session_for(name);
      if (state.at_exit.in_child())
        host::fail_user(text_ +
                        " was called in a process made by fork(); use the engine only in the process that created it");
      if (std::this_thread::get_id() != state.thread)
        host::fail_user(text_ +
                        " was called on another thread than the one that created the engine; use one thread for both");
      if (state.program_function)
        host::fail_user(text_ + " was called inside the function passed to " + state.program_function +
                        "; call it outside that function");
      if (!state.call.empty())
        host::fail_user(text_ + " was called inside " + state.call +
                        ", from a hook or an autograd function; call it after " + state.call + " returns");
      state.call = text_;
      scope_.emplace(session.comm(), text_);
    }
    ~Call() {
      scope_.reset();
      state_.call.clear();
    }
    Call(const Call&) = delete;
    const std::string& text() const { return text_; }
    /// Throws UserError inside an Evaluation scope.
    void not_in_evaluation() const {
      if (state_.evaluations > 0)
        host::fail_user(text_ + " was called inside a zr::Engine::Evaluation; end that scope first");
    }

    /// Throws UserError while a zr::Swap has replaced the weights.
    void not_in_swap() const {
      if (state_.session->swap().active())
        host::fail_user(text_ + " was called inside a zr::Swap; end that scope first");
      if (state_.session->swap().abandoned())
        host::fail_user(text_ +
                        ": an exception ended a zr::Swap, so the model has the values of the swap instead of the "
                        "weights of training; load a checkpoint with engine.load() (all parameters: with strict = "
                        "true), or catch exceptions inside the zr::Swap");
    }

   private:
    State& state_;
    std::string text_;
    std::optional<host::comm::CallScope> scope_;
  };
  /// Runs fn(session, call) in the scope of a Call, after it has checked that all ranks make the same call. Collective.
  template <class Fn>
  auto collective(const char* name, const std::string& arguments, Fn&& fn) {
    const Call call(*this, name, arguments);
    session->comm().barrier(call.text().c_str());  // names the call: a rank in another call is an error
    return with_program_functions(call, [&] { return fn(*session, call); });
  }

  /// Returns fn(), which calls a function of the program that was passed to `name`. Its exceptions pass through host
  /// code unchanged, as ProgramException, up to the public function.
  template <class Fn>
  auto call_program(const char* name, Fn&& fn) {
    program_function = name;
    struct Scope {
      const char*& running;
      ~Scope() { running = nullptr; }
    } const scope{program_function};
    try {
      return fn();
    } catch (...) {
      throw host::ProgramException{std::current_exception()};
    }
  }

  /// Returns fn(), which may call functions of the program. Their exceptions are thrown unchanged, others as those of
  /// the call.
  template <class Fn>
  static auto with_program_functions(const Call& call, Fn&& fn) {
    return as_thrown([&] { return host::guard_host_call(call.text(), fn); });
  }
  /// Returns fn(). Throws an exception of a function of the program as the function has thrown it.
  template <class Fn>
  static auto as_thrown(Fn&& fn) {
    try {
      return fn();
    } catch (const host::ProgramException& exception) {
      std::rethrow_exception(exception.cause);
    }
  }

  Program program;
  ProgramModulePtr module;
  std::string name;
  const zr_dtype dtype;
  const torch::Device device;
  std::optional<host::model::TorchModel> torch_model;  // empty after release(), like session
  std::optional<host::engine::Session> session;
  const std::thread::id thread = std::this_thread::get_id();
  std::string call;                        // the call in progress, or ""
  const char* program_function = nullptr;  // the call that set the function of the program that runs now, or null
  int evaluations = 0;                     // number of open Evaluation scopes
  ProgramSettings program_settings;
  // After a load() inside an Evaluation: the random state that its end restores.
  std::optional<host::model::RandomState> random;
  const std::shared_ptr<const void> life = std::make_shared<char>();
  bool ended_by_exit = false, left_to_exit = false;
  const AtExit at_exit{[this](int exit_code) { end_by_exit(exit_code); }};  // last: when all plug-ins are loaded
};

/// A name or path as it appears in the text of a call.
inline std::string quoted(const std::string& text) { return "\"" + host::printable(text) + "\""; }

}  // namespace zr
