// One rank of the checkpoint tests: runs the case named on the command line. If a check fails, it prints the check and
// exits with 1.
//   checkpoint_case CASE TOML [path=value ...]
// The environment variable CHECKPOINT names the folder that a case saves to or loads from.
#include <dlfcn.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>

#include "multirank/engine_run.hpp"

namespace {

using engine_tests::require;
using engine_tests::Run;

std::string checkpoint_folder() { return std::getenv("CHECKPOINT"); }

void say(const Run& run, const std::string& text) {
  if (run.program.rank() == 0) std::cout << text << std::endl;
}

// The message of the exception that the call throws; empty if it throws nothing.
std::string thrown_by(const std::function<void()>& call) try {
  call();
  return "";
} catch (const std::exception& error) {
  return error.what();
}

void says_hash(Run& run) {
  run.build();
  const std::string hash = run.engine->weights_hash();
  say(run, "step " + std::to_string(run.engine->step_index()) + " hash " + hash);
}

// An epoch is two steps long: step 3 reads the same data as step 1.
void trains_epochs(Run& run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->backward(run.model->loss(run.engine->step_index() % 2, run.engine->micro_index()));
    run.engine->step();
  }
}

// Loads a checkpoint and saves it to another folder without a step in between.
void resaves(Run& run) {
  run.build(11);
  run.engine->load(checkpoint_folder());
  say(run, run.engine->save(checkpoint_folder() + "-again"));
}

void saves_midway(Run& run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  const std::string midway = thrown_by([&] { run.engine->save(checkpoint_folder()); });
  run.engine->step();  // ends the first of two micro-steps
  say(run, midway + "\n" + thrown_by([&] { run.engine->save(checkpoint_folder()); }));
  run.micro_step();
  say(run, run.engine->save(checkpoint_folder()));
}

void loads_what_fits(Run& run) {
  run.build();
  const zr::LoadReport loaded = run.engine->load(checkpoint_folder(), {false, false, false, false});
  const auto all = [&](const std::string& what, const std::vector<std::string>& names) {
    std::string text = what + ":";
    for (const std::string& name : names) text += " " + name;
    say(run, text);
  };
  all("missing", loaded.missing);
  all("unexpected", loaded.unexpected);
  all("other shape", loaded.other_shape);
  all("fresh", loaded.fresh);
}

// Damages the newest checkpoint in CHECKPOINT during training: load() fails and changes nothing; with fallback, it
// loads the previous checkpoint.
void keeps_training(Run& run) {
  run.build();
  for (int i = 0; i < 2; ++i) {
    run.micro_step();
    run.engine->save(checkpoint_folder());
  }
  run.micro_step();
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) {
    std::fstream file(checkpoint_folder() + "/step-00000002/exp_avg-00001-of-00001.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-9, std::ios::end);
    const char byte = static_cast<char>(file.peek() ^ 4);
    file.seekp(-9, std::ios::end);
    file.put(byte);
  }
  run.engine->mean(0);
  const std::string error = thrown_by([&] { run.engine->load(checkpoint_folder()); });
  say(run, error);
  require(error.find("exp_avg-00001-of-00001.safetensors: state.exp_avg '") != error.npos,
          "the error names file and tensor");
  require(run.engine->weights_hash() == hash && run.engine->step_index() == 3,
          "a failed load changes nothing in the model");
  zr::LoadOptions how;
  how.fallback = true;
  const zr::LoadReport loaded = run.engine->load(checkpoint_folder(), how);
  require(loaded.folder == checkpoint_folder() + "/step-00000001" && run.engine->step_index() == 1,
          "fallback loads the previous checkpoint");
  run.train();
}

// With checkpoint.async, the first save goes to a folder that cannot be created; a later step reports the failure.
void hears_of_a_failure(Run& run) {
  run.build();
  run.micro_step();
  require(thrown_by([&] { run.engine->save(checkpoint_folder() + "/file/below"); }).empty(),
          "save() returns before the checkpoint is written");
  std::string error;
  for (int i = 0; i < 200 && error.empty(); ++i) error = thrown_by([&] { run.micro_step(); });
  say(run, error);
  const int64_t step = run.engine->step_index();
  run.micro_step();
  require(run.engine->step_index() == step + 1, "training continues");
  const std::string folder = run.engine->save(checkpoint_folder() + "/good");
  require(folder == checkpoint_folder() + "/good/step-0000000" + std::to_string(step + 1), "the next save succeeds");
}

// tests/multirank/plugins/file_calls.cpp counts the file-system calls of this thread.
void touches_no_file(Run& run) {
  const auto calls = reinterpret_cast<int64_t (*)()>(::dlsym(RTLD_DEFAULT, "zr_file_calls_of_this_thread"));
  require(calls != nullptr, "the counter library is loaded (LD_PRELOAD)");
  run.build();
  run.micro_step();
  const int64_t before = calls();
  std::ofstream(checkpoint_folder() + "-own" + std::to_string(run.program.rank())) << "one";
  require(calls() > before, "the counter counts a file that this thread writes");
  const int64_t start = calls();
  run.engine->save(checkpoint_folder());
  const int64_t of_save = calls() - start;
  require(of_save == 0,
          "an asynchronous save makes no file-system call on this thread, but made " + std::to_string(of_save));
  run.engine->save(checkpoint_folder());  // waits for the first save
  require(calls() == start, "waiting for the previous save makes no file-system call");
}

const engine_tests::Cases kCases{{"says_hash", says_hash},
                                 {"trains_epochs", trains_epochs},
                                 {"resaves", resaves},
                                 {"saves_midway", saves_midway},
                                 {"loads_what_fits", loads_what_fits},
                                 {"keeps_training", keeps_training},
                                 {"hears_of_a_failure", hears_of_a_failure},
                                 {"touches_no_file", touches_no_file}};

}  // namespace

int main(int argc, char** argv) { return engine_tests::run_case(argc, argv, kCases); }
