// One rank of the checkpoint tests: runs the case named on the command line, prints what is wrong and exits 1, or exits
// 0.
//   checkpoint_case CASE TOML [path=value ...]
// CHECKPOINT names the folder that a case saves in or loads from.
#include <dlfcn.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>

#include "multirank/engine_run.hpp"

namespace {

using engine_tests::require;
using engine_tests::Run;

std::string place() { return std::getenv("CHECKPOINT"); }

void say(const Run& run, const std::string& text) {
  if (run.program.rank() == 0) std::cout << text << std::endl;
}

// What the call throws; empty: nothing.
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

// An epoch is two steps long: the third step reads what the first did.
void trains_epochs(Run& run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->backward(run.model->loss(run.engine->step_index() % 2, run.engine->micro_index()));
    run.engine->step();
  }
}

// A checkpoint becomes another without a step between.
void resaves(Run& run) {
  run.build(11);
  run.engine->load(place());
  say(run, run.engine->save(place() + "-again"));
}

void saves_midway(Run& run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  const std::string midway = thrown_by([&] { run.engine->save(place()); });
  run.engine->step();  // of the first of two micro-steps
  say(run, midway + "\n" + thrown_by([&] { run.engine->save(place()); }));
  run.micro_step();
  say(run, run.engine->save(place()));
}

void loads_what_fits(Run& run) {
  run.build();
  const zr::LoadReport loaded = run.engine->load(place(), {false, false, false, false});
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

// CHECKPOINT's newest is damaged between two loads by a model in training.
void keeps_training(Run& run) {
  run.build();
  for (int i = 0; i < 2; ++i) {
    run.micro_step();
    run.engine->save(place());
  }
  run.micro_step();
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) {
    std::fstream file(place() + "/step-00000002/exp_avg-00001-of-00001.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-9, std::ios::end);
    const char byte = static_cast<char>(file.peek() ^ 4);
    file.seekp(-9, std::ios::end);
    file.put(byte);
  }
  run.engine->mean(0);
  const std::string refusal = thrown_by([&] { run.engine->load(place()); });
  say(run, refusal);
  require(refusal.find("exp_avg-00001-of-00001.safetensors: state.exp_avg '") != refusal.npos,
          "the refusal names file and tensor");
  require(run.engine->weights_hash() == hash && run.engine->step_index() == 3, "a refused load leaves the model alone");
  zr::LoadOptions how;
  how.fallback = true;
  const zr::LoadReport loaded = run.engine->load(place(), how);
  require(loaded.folder == place() + "/step-00000001" && run.engine->step_index() == 1, "the one before is taken");
  run.train();
}

// checkpoint.async: the first save goes where nothing can be written.
void hears_of_a_failure(Run& run) {
  run.build();
  run.micro_step();
  require(thrown_by([&] { run.engine->save(place() + "/file/below"); }).empty(),
          "the save returns before it is written");
  std::string said;
  for (int i = 0; i < 200 && said.empty(); ++i) said = thrown_by([&] { run.micro_step(); });
  say(run, said);
  const int64_t step = run.engine->step_index();
  run.micro_step();
  require(run.engine->step_index() == step + 1, "training goes on");
  const std::string folder = run.engine->save(place() + "/good");
  require(folder == place() + "/good/step-0000000" + std::to_string(step + 1), "the next save is made");
}

// tests/multirank/plugins/file_calls.cpp counts what this thread asks of the file system.
void touches_no_file(Run& run) {
  const auto calls = reinterpret_cast<int64_t (*)()>(::dlsym(RTLD_DEFAULT, "zr_file_calls_of_this_thread"));
  require(calls != nullptr, "the counter is loaded (LD_PRELOAD)");
  run.build();
  run.micro_step();
  const int64_t before = calls();
  std::ofstream(place() + "-own" + std::to_string(run.program.rank())) << "one";
  require(calls() > before, "and counts");
  const int64_t start = calls();
  run.engine->save(place());
  const int64_t of_save = calls() - start;
  require(of_save == 0, "saving aside makes no call of the file system, but made " + std::to_string(of_save));
  run.engine->save(place());  // waits for the first
  require(calls() == start, "nor does waiting for the one before");
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
