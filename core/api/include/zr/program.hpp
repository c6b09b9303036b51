// zr::Program: the command line and the TOML file of a training program (`gpt gpt.toml train.steps=20`), and the keys
// that the program declares for itself.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zr/error.hpp"
#include "zr/rendezvous.hpp"

namespace zr {

/// A key in one of the program's own TOML tables. The type of the default value is the type of the key.
struct Key {
  /// A boolean key. `path` is "table.key"; `meaning` is the description that `zeroth explain` and --help print.
  Key(std::string path, bool def, std::string meaning);
  /// An integer key with values from `min` to `max`.
  Key(std::string path, int def, std::string meaning, double min = -1e18, double max = 1e18);
  /// A floating-point key with values from `min` to `max`.
  Key(std::string path, double def, std::string meaning, double min = -1e300, double max = 1e300);
  /// A string key. If `choices` is not empty, the value must be one of them.
  Key(std::string path, const char* def, std::string meaning, std::vector<std::string> choices = {});
  /// A string key whose value is the path of a file or folder. A relative value in a TOML file is relative to the
  /// file's folder, any other one to the working directory; "~/" is the home folder. text() returns it absolute; ""
  /// stays "".
  static Key of_path(std::string path, const char* def, std::string meaning);
  std::string path;                  // "model.layers"
  std::string def;                   // the default value as TOML text
  uint32_t type;                     // ZR_KEY_*
  std::string meaning;               // one line, no full stop
  double min = -1e300, max = 1e300;  // inclusive bounds of numbers
  std::vector<std::string> choices;  // of a string; empty: any text
  bool is_path = false;              // made by of_path()
};

/// A configuration that the program composes, for programs without a TOML file, or from a file and keys of its own. One
/// thread at a time.
class Configuration {
 public:
  Configuration() = default;
  /// From TOML text, such as a file has.
  explicit Configuration(const std::string& toml) : toml_(toml) {}
  /// From a TOML file, whose keys those of set() replace.
  static Configuration of_file(const std::string& path);
  /// Sets one key: "train.steps", "strategy", "optimizer.lr". Sizes and durations are texts, "32MiB". A later
  /// call replaces an earlier one, and the TOML text. Throws UserError if `path` is not names of letters, digits, '-'
  /// and '_' with dots between them; zr::Program checks that the key exists.
  Configuration& set(const std::string& path, bool value);
  /// Sets an integer key.
  Configuration& set(const std::string& path, int64_t value);
  /// Sets an integer key.
  Configuration& set(const std::string& path, int value) { return set(path, int64_t{value}); }
  /// Sets a floating-point key.
  Configuration& set(const std::string& path, double value);
  /// Sets a string key, a size or a duration.
  Configuration& set(const std::string& path, const std::string& value);
  /// Sets a string key, a size or a duration.
  Configuration& set(const std::string& path, const char* value) { return set(path, std::string(value)); }
  /// Appends one [[optimizer.groups]]: parameters whose name matches one of the patterns `match` get these values of
  /// optimizer keys, or of lr_scale. `use`: the id of the optimizer that updates them; empty: the job's. The TOML
  /// text, if any, must not name the optimizer as optimizer = "id" then; use set("optimizer", "id"). Throws UserError
  /// if a key is not a name of letters, digits, '-' and '_'.
  Configuration& add_group(const std::vector<std::string>& match, const std::map<std::string, double>& values,
                           const std::string& use = "");

  /// Sets the name of the run folder of a job without job.name and without a file, instead of the file name of the
  /// executable: for a program that an interpreter runs.
  Configuration& set_program_name(const std::string& name);

  /// The TOML text with the groups, without the keys of set().
  const std::string& toml() const { return toml_; }
  /// The path of of_file(); "" without a file.
  const std::string& file() const { return file_; }
  /// The name of set_program_name(), or "".
  const std::string& program_name() const { return program_name_; }
  /// The keys of set(), as "path=value", in the order of the calls.
  const std::vector<std::string>& values() const { return values_; }

 private:
  std::string toml_, file_, program_name_;
  std::vector<std::string> values_;
};

/// The configuration of a job. Construct it first in main(), inside zr::guarded. Immutable: any thread may read it.
/// Copies share one state.
class Program {
 public:
  /// Reads argv: FILE [path=value ...]. Connects to the other ranks of the job. Throws UserError if an argument, the
  /// file, a key, or a declaration in `keys` is wrong; EnvironmentError or PeerLostError if the ranks cannot connect.
  /// With --help it prints the usage and `keys`, and throws ExitRequest. If `zeroth train`, `plan`, `explain` or `tune`
  /// has started the process to query its keys, it prints them and throws ExitRequest.
  Program(int argc, char** argv, const std::vector<Key>& keys = {});
  /// Reads a file and overrides ("train.steps=20"), for a main() that parses its own command line. Otherwise as the
  /// constructor with argv, without --help. `where`: which rank this process is, if no launcher's variables say it;
  /// the same for each zr::Program of the process. Under `zeroth launch` it must agree with the launcher.
  explicit Program(const std::string& file, const std::vector<std::string>& overrides = {},
                   const std::vector<Key>& keys = {}, const std::optional<Rendezvous>& where = {});
  /// Takes a configuration that the program has composed; errors name keys of Configuration::set() as
  /// "zr::Configuration", and the TOML text as "zr::Configuration:line:column". Relative paths are relative to the
  /// working directory. Without job.name, the run folder has the file name of the program.
  explicit Program(const Configuration& config, const std::vector<std::string>& overrides = {},
                   const std::vector<Key>& keys = {}, const std::optional<Rendezvous>& where = {});
  ~Program();

  /// The effective value of a boolean key of the program, of Zeroth or of a plug-in. Throws UserError if the key
  /// is unknown or has another type.
  bool boolean(const std::string& path) const;
  /// The effective value of an integer key, such as "model.layers" or "train.steps".
  int64_t integer(const std::string& path) const;
  /// The effective value of a floating-point or integer key.
  double number(const std::string& path) const;
  /// The effective value of a string key. "strategy" and "strategy.use" are the id of the strategy plug-in; other roles
  /// alike.
  std::string text(const std::string& path) const;
  /// Where the value of a key was set, for error messages: "gpt.toml:35:10", "command line", "zr::Configuration" or
  /// "default".
  std::string origin(const std::string& path) const;
  /// The absolute path of the folder of the TOML file. text() of a key made by Key::of_path() is absolute already.
  std::string folder() const;
  /// The rank of this process in the job. 0 under `zeroth plan`.
  int rank() const;
  /// The number of ranks of the job. job.ranks under `zeroth plan`.
  int world() const;

  struct State;
  /// For internal use by zr::Engine.
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  static std::shared_ptr<State> state_of(const std::string& file, const std::vector<std::string>& overrides,
                                         const std::vector<Key>& keys, const std::optional<Rendezvous>& where = {});
  std::shared_ptr<State> state_;
};

/// Calls `call(ctx)` and returns the exit code for the process. If the call throws, prints the exception to stderr as
/// `zeroth: error: ...`; no exception leaves this function. If the job fails while the calling thread computes or
/// blocks for more than 2 s, so that it does not notice, another thread calls `end(4)`; null: nothing. While the call
/// runs, an exception that nothing can catch, such as one of a destructor or of a thread of the program, is printed
/// too, and `end` is called with its code, so the process leaves no core file. If the call throws in a program with a
/// device, a process that exits with another code than 0 calls `end` before its exit handlers and the destructors of
/// static objects: they may wait for a device that is lost. Use zr::guarded.
///   0   the call returned, or threw an ExitRequest of code 0
///   1   an exception of the program or of libtorch; its type and what() are printed (libtorch's C++ stack trace only
///       with TORCH_SHOW_CPP_STACKTRACES=1)
///   2   wrong input: file, key, argument or use of zr::Engine; also std::invalid_argument, which the program can throw
///       for errors of its own users
///   3   the environment: memory, disk, a missing plug-in; also if the call returned, but rows of metrics.jsonl or
///       summary.json could not be written
///   4   another rank was lost or failed, or ranks made different calls
///   70  a bug in Zeroth or in a plug-in
int guarded_run(void (*call)(void*), void* ctx, void (*end)(int exit_code));
/// Calls fn() and returns the exit code of guarded_run: `int main(...) { return zr::guarded([&] { ... }); }`. A rank of
/// a failed job does not outlive it: the process ends after 2 s, also inside a long computation. A program that
/// must continue, for example to save its own state, catches zr::PeerLostError in a main() without zr::guarded; the
/// launcher ends it 10 minutes after the failure.
template <class F>
int guarded(F&& fn) {
  auto call = [&fn] { std::forward<F>(fn)(); };
  return guarded_run([](void* ctx) { (*static_cast<decltype(call)*>(ctx))(); }, &call,
                     [](int exit_code) { std::_Exit(exit_code); });
}

/// Sets a function that returns a message in the words of another language, for a binding to it: "zr::gather" may be
/// called otherwise there. It gets the message of each error that Zeroth throws and of each line that it logs, from any
/// thread, and must not throw. Null, the initial value: messages are unchanged. Any thread.
void set_wording(std::string (*wording)(const std::string& message));

/// Notes that this process is about to end because of a failure that is no C++ exception in zr::guarded, such as an
/// exception of another language. Call it before the engines are destroyed: they then end as by an exception, so that
/// the other ranks name this rank, and summary.json does not claim a run without a failure. Prints nothing and does not
/// end the process, whose exit code should be 1. Any thread.
void report_failure();

/// Ends the wait for other ranks that a call of this process is in, within a second, because the user has interrupted
/// it: the call throws PeerLostError, as on the other ranks, whose reports say so. Without such a wait it has no
/// effect. For a language whose programs react to Ctrl-C with an exception. Any thread; also in a signal handler.
void note_interrupt();

}  // namespace zr
