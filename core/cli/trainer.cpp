#include "cli/trainer.hpp"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <optional>
#include <thread>

#include "base/failure.hpp"
#include "cli/launch_process.hpp"
#include "cli/program_libraries.hpp"
#include "config/key_json.hpp"
#include "plan/parameter_list.hpp"

namespace zr::host {

namespace fs = std::filesystem;

namespace {

constexpr auto kPatience = std::chrono::seconds(60);

bool is_program(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
}

// A process of ours, until its end.
class Asked {
 public:
  explicit Asked(const ProcessOptions& options)
      : process_(start_process(options)), pipes_{process_.out, process_.err} {}
  ~Asked() {
    for (const int pipe : pipes_)
      if (pipe >= 0) ::close(pipe);
    if (fate_) return;
    ::kill(-process_.pid, SIGKILL);
    while (!reap(process_.pid)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Asked(const Asked&) = delete;

  /// False: it did not end in time.
  bool wait(std::chrono::steady_clock::time_point until) {
    while (pipes_[0] >= 0 || pipes_[1] >= 0 || !(fate_ = reap(process_.pid))) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
      if (left <= 0) return false;
      const bool open = pipes_[0] >= 0 || pipes_[1] >= 0;
      read_some(open ? static_cast<int>(left) : 5);
    }
    return true;
  }
  const std::string& out() const { return text_[0]; }
  const std::string& err() const { return text_[1]; }
  const Fate& fate() const { return *fate_; }

 private:
  void read_some(int milliseconds) {
    std::array<pollfd, 2> waits{pollfd{pipes_[0], POLLIN, 0}, pollfd{pipes_[1], POLLIN, 0}};
    ::poll(waits.data(), waits.size(), milliseconds);
    for (std::size_t i = 0; i < waits.size(); ++i) {
      if (pipes_[i] < 0 || !waits[i].revents) continue;
      std::array<char, 4096> buffer;
      const ssize_t got = ::read(pipes_[i], buffer.data(), buffer.size());
      if (got > 0) {
        text_[i].append(buffer.data(), static_cast<std::size_t>(got));
      } else {
        ::close(std::exchange(pipes_[i], -1));
      }
    }
  }

  Process process_;
  std::array<int, 2> pipes_;
  std::array<std::string, 2> text_;
  std::optional<Fate> fate_;
};

}  // namespace

fs::path find_trainer(const Entry& program, const fs::path& toml, const fs::path& bin) {
  const std::string name = std::get<std::string>(program.value);
  if (name.empty())
    fail_user(toml.string() +
              ": job.program is missing: name the trainer, an executable that constructs zr::Engine, in [job]");
  const fs::path given(name);
  const std::vector<fs::path> places =
      given.is_absolute() ? std::vector{given} : std::vector{fs::absolute(toml).parent_path() / given, bin / given};
  std::string looked;
  for (const fs::path& place : places) {
    if (is_program(place)) return place;
    std::error_code error;
    const bool there = fs::is_regular_file(place, error);
    looked += (looked.empty() ? "" : " and ") + place.string() + (there ? " (not executable: chmod +x it)" : "");
  }
  fail_user(program.origin.text() + ": job.program '" + name + "' was not found: looked for " + looked +
            "; build it, or write its absolute path");
}

std::vector<std::string> clean_environment(const std::vector<std::string>& extra) {
  std::vector<std::string> all = extra;
  for (char** one = environ; *one; ++one) {
    const std::string text = *one;
    bool told = false;
    for (const char* name :
         {"ZR_RANK=", "ZR_WORLD=", "ZR_LOCAL_RANK=", "ZR_LOCAL_WORLD=", "ZR_STORE=", "ZR_JOB=", "ZR_TOKEN=", "ZR_ASK="})
      told = told || text.rfind(name, 0) == 0;
    if (!told) all.push_back(text);
  }
  return all;
}

std::vector<Key> ask_keys(const fs::path& program, const std::string& toml) {
  provide_libraries(program.string());
  ProcessOptions options;
  options.file = program.string();
  options.arguments = {program.string(), toml};
  options.environment = clean_environment({"ZR_ASK=schema"});
  Asked asked(options);
  const std::string who = "the program " + program.string();
  if (!asked.wait(std::chrono::steady_clock::now() + kPatience))
    fail_user(who + " did not say within a minute which keys it reads: construct zr::Program first in its main()");
  const std::string said = asked.err().empty() ? "" : "; it said:\n" + asked.err();
  if (!asked.fate().good())
    fail_environment(who + " " + fate_text(asked.fate()) +
                     " when asked which keys it reads: run it by hand to see why" + said);
  return keys_from_json(asked.out(), who);
}

Answer ask_parameters(const std::vector<std::string>& argv) {
  Answer answer{};
  // A program that reads its model's memory, or loads its data as tensors, needs memory for both.
  for (const char* how : {"ZR_ASK=parameters", "ZR_ASK=parameters_in_memory"}) {
    ProcessOptions options;
    options.file = argv[0];
    options.arguments = argv;
    options.environment = clean_environment({how});
    Asked asked(options);
    while (!asked.wait(std::chrono::steady_clock::now() + kPatience)) {
    }
    const Fate& fate = asked.fate();
    answer = {fate.signal ? 128 + fate.signal : fate.code, {}, asked.err()};
    if (!fate.good()) continue;
    answer.parameters = parameters_from_json(asked.out(), "the program " + argv[0]);
    break;
  }
  return answer;
}

}  // namespace zr::host
