// zr::Error: what zr::Program and zr::Engine throw. Its subclass says who can remedy the failure, so that a program can
// react: save its own state when another rank is lost, or try a smaller job when memory is short.
#pragma once

#include <stdexcept>
#include <string>

#pragma GCC visibility push(default)
namespace zr {

/// The exit codes of programs that use zr::guarded, and of the command `zeroth`. 0 is success.
namespace exit_code {
inline constexpr int program = 1;      // an exception of the program itself or of libtorch
inline constexpr int user = 2;         // zr::UserError, and std::invalid_argument of a program
inline constexpr int environment = 3;  // zr::EnvironmentError
inline constexpr int peer_lost = 4;    // zr::PeerLostError, zr::PeerFailedError
inline constexpr int internal = 70;    // zr::InternalError
}  // namespace exit_code

/// A failure. what() says what failed, where, why, and what to do.
///
/// Threads: any thread may read an object.
class Error : public std::runtime_error {
 public:
  /// The code of exit_code:: for this failure.
  int exit_code() const noexcept { return exit_code_; }

 protected:
  /// For subclasses: one of exit_code::, and the message.
  Error(int exit_code, const std::string& text) : std::runtime_error(text), exit_code_(exit_code) {}
  Error(const Error&) = default;             // a copy of this class alone would lose the subclass
  Error& operator=(const Error&) = default;  // for subclasses

 private:
  int exit_code_;
};

/// Wrong input: a file, key, argument, or a call that the documentation forbids. A rejected call has no effect,
/// unless its comment says otherwise.
class UserError : public Error {
 public:
  /// `text`: what failed, where, why, and what to do.
  explicit UserError(const std::string& text) : Error(exit_code::user, text) {}
};

/// The machine lacks a resource or a file: memory, disk space, a plug-in, a permission.
class EnvironmentError : public Error {
 public:
  /// `text`: what failed, where, why, and what to do.
  explicit EnvironmentError(const std::string& text) : Error(exit_code::environment, text) {}
};

/// Another rank ended or does not answer, or ranks made different calls. No collective method of the job's engines can
/// succeed after it; a program may still use its own data, and resume from a checkpoint in a new job.
class PeerLostError : public Error {
 public:
  /// `text`: what failed, where, why, and what to do.
  explicit PeerLostError(const std::string& text) : Error(exit_code::peer_lost, text) {}
};

/// A collective call failed on another rank, which has the exception, for example that of a function of the program.
/// The model is unchanged, and the engine can be used as after that exception. If this error ends the program, the
/// launcher reports the other rank's error.
class PeerFailedError : public Error {
 public:
  /// `text`: what failed, where, why, and what to do.
  explicit PeerFailedError(const std::string& text) : Error(exit_code::peer_lost, text) {}
};

/// A bug in Zeroth or in a plug-in.
class InternalError : public Error {
 public:
  /// `text`: what failed, where, why, and what to do.
  explicit InternalError(const std::string& text) : Error(exit_code::internal, text) {}
};

/// Thrown by the constructors of zr::Program and zr::Engine when the process has done what it was started for: --help,
/// or a query by `zeroth plan`, `explain`, `train` or `tune`. Not an error and not a std::exception. zr::guarded
/// returns its code; a main() without zr::guarded catches it and returns the code.
struct ExitRequest {
  int exit_code;  // 0, or one of exit_code::
};

}  // namespace zr
#pragma GCC visibility pop
