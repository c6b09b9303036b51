// A trainer's command line and TOML file: `gpt gpt.toml train.steps=20`. Declares the program's own keys.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace zr {

/// A key of the program's own tables. The default's type is the key's type.
struct Key {
  Key(std::string path, bool def, std::string meaning);
  Key(std::string path, int def, std::string meaning, double min = -1e18, double max = 1e18);
  Key(std::string path, double def, std::string meaning, double min = -1e300, double max = 1e300);
  Key(std::string path, const char* def, std::string meaning, std::vector<std::string> choices = {});
  std::string path;  // "model.layers"
  std::string def;   // as TOML text
  uint32_t type;     // ZR_KEY_*
  std::string meaning;
  double min = -1e300, max = 1e300;
  std::vector<std::string> choices;
};

/// Construct it first in main(). Immutable; any thread may read.
class Program {
 public:
  /// argv: FILE [path=value ...], or --help, which prints usage and `keys` and exits with 0. Exits (code 2, message on
  /// stderr) if an argument, the file, a key or its declaration in `keys` is wrong. Under `zeroth
  /// train`, `explain` and `plan` it answers their questions and exits before any work is done.
  Program(int argc, char** argv, const std::vector<Key>& keys = {});
  /// The same from a file, for a main() with its own command line. Throws std::runtime_error.
  explicit Program(const std::string& file, const std::vector<std::string>& overrides = {},
                   const std::vector<Key>& keys = {});
  ~Program();

  /// The effective value of any key, the program's, the host's or a plug-in's: "model.layers", "train.steps"; the
  /// plug-in of a role is "strategy" or "strategy.use". An unknown key or a value of another type: std::runtime_error.
  bool boolean(const std::string& path) const;
  int64_t integer(const std::string& path) const;
  double number(const std::string& path) const;
  std::string text(const std::string& path) const;
  /// Where that value was written, to begin a message about it: "gpt.toml:35:10", "command line", "default".
  std::string origin(const std::string& path) const;
  /// The folder of the TOML file, for paths written relative to it.
  std::string folder() const;
  /// Who this process is among how many. Under `zeroth plan`: rank 0 of job.ranks.
  int rank() const;
  int world() const;

  struct State;
  /// For zr::Engine; nothing of it is for others.
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

/// Runs fn and returns the exit code for the process: 0, or the class of the exception that ended fn, which is printed
/// as `zeroth: error: ...` on stderr: `int main(...) { return zr::guarded([&] { ... }); }`.
///   1 an exception of the program's own code or of libtorch (a std::exception that Zeroth did not throw; its type and
///     what() are printed, libtorch's C++ stack only with TORCH_SHOW_CPP_STACKTRACES=1)
///   2 wrong input: file, key, argument, misuse of zr::Engine; also std::invalid_argument, for what a user of the
///   program
///     wrote wrong
///   3 the environment: memory, disk, a missing plug-in     4 a peer is lost     70 a bug of Zeroth or of a plug-in
int guarded_run(void (*call)(void*), void* ctx);
/// The same for any callable.
template <class F>
int guarded(F&& fn) {
  return guarded_run([](void* f) { (*static_cast<F*>(f))(); }, const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace zr
