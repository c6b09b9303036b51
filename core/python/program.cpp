#include "python/program.hpp"

#include <csignal>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "python/boundary.hpp"

namespace zr::python {

namespace {
template <class T>
using Values = std::vector<std::tuple<std::string, T>>;

// The keys of a program. One thread.
struct KeyList : torch::CustomClassHolder {
  std::vector<zr::Key> keys;
  // `type`: "bool", "int", "float", "str" or "path"; `value`: the default as text.
  void add(std::string path, const std::string& type, const std::string& value, std::string meaning, double min,
           double max, std::vector<std::string> choices) {
    if (type == "bool")
      keys.emplace_back(std::move(path), value == "true", std::move(meaning));
    else if (type == "int")
      keys.emplace_back(std::move(path), std::stoi(value), std::move(meaning), min, max);
    else if (type == "float")
      keys.emplace_back(std::move(path), std::stod(value), std::move(meaning), min, max);
    else if (type == "path")
      keys.push_back(zr::Key::of_path(std::move(path), value.c_str(), std::move(meaning)));
    else
      keys.emplace_back(std::move(path), value.c_str(), std::move(meaning), std::move(choices));
  }
};

// `where`: rank, world, address, token; or nothing.
using RendezvousTuple = std::tuple<int64_t, int64_t, std::string, std::string>;
std::optional<zr::Rendezvous> rendezvous_of(const std::optional<RendezvousTuple>& where) {
  if (!where) return {};
  const auto& [rank, world, address, token] = *where;
  return zr::Rendezvous{static_cast<int>(rank), static_cast<int>(world), address, token};
}

// `file`: the TOML file, or ""; `name`: of the program, for the run folder of a job without a file.
c10::intrusive_ptr<ProgramHolder> make(const std::string& file, const std::string& toml, const std::string& name,
                                       const Values<bool>& bools, const Values<int64_t>& integers,
                                       const Values<double>& numbers, const Values<std::string>& texts,
                                       const c10::intrusive_ptr<KeyList>& keys,
                                       const std::optional<RendezvousTuple>& where) {
  return cross([&] {
    zr::Configuration config = file.empty() ? zr::Configuration(toml) : zr::Configuration::of_file(file);
    config.set_program_name(name);
    for (const auto& [path, value] : bools) config.set(path, value);
    for (const auto& [path, value] : integers) config.set(path, value);
    for (const auto& [path, value] : numbers) config.set(path, value);
    for (const auto& [path, value] : texts) config.set(path, value);
    return c10::make_intrusive<ProgramHolder>(zr::Program(config, {}, keys->keys, rendezvous_of(where)));
  });
}

// From the command line of a script: FILE [path=value ...].
c10::intrusive_ptr<ProgramHolder> from_arguments(const std::vector<std::string>& arguments,
                                                 const c10::intrusive_ptr<KeyList>& keys) {
  return cross([&] {
    std::vector<std::string> words = arguments;
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    return c10::make_intrusive<ProgramHolder>(zr::Program(static_cast<int>(words.size()), argv.data(), keys->keys));
  });
}

struct sigaction interpreter_action {};  // of SIGINT

void note_and_pass(int signal, siginfo_t* info, void* context) {
  zr::note_interrupt();
  if (interpreter_action.sa_flags & SA_SIGINFO)
    interpreter_action.sa_sigaction(signal, info, context);
  else if (interpreter_action.sa_handler != SIG_IGN && interpreter_action.sa_handler != SIG_DFL)
    interpreter_action.sa_handler(signal);
}

// Begins or ends to note each SIGINT before the handler of the interpreter gets it. Main thread.
void watch_interrupts(bool watch) {
  struct sigaction current {};
  ::sigaction(SIGINT, nullptr, &current);
  const bool watches = (current.sa_flags & SA_SIGINFO) && current.sa_sigaction == note_and_pass;
  if (watch == watches) return;
  if (!watch) {
    ::sigaction(SIGINT, &interpreter_action, nullptr);
    return;
  }
  interpreter_action = current;
  current.sa_sigaction = note_and_pass;
  current.sa_flags |= SA_SIGINFO;
  ::sigaction(SIGINT, &current, nullptr);
}
}  // namespace

void define_program(torch::Library& m) {
  using Self = c10::intrusive_ptr<ProgramHolder>;
  m.class_<KeyList>("Keys")
      .def(torch::init<>())
      .def("add",
           [](const c10::intrusive_ptr<KeyList>& self, std::string path, const std::string& type,
              const std::string& value, std::string meaning, double min, double max, std::vector<std::string> choices) {
             self->add(std::move(path), type, value, std::move(meaning), min, max, std::move(choices));
           });
  m.class_<ProgramHolder>("Program")
      .def_static("make", &make)
      .def_static("from_arguments", &from_arguments)
      .def_static("watch_interrupts", &watch_interrupts)
      .def_static("report_failure", [] { zr::report_failure(); })
      .def_static("use_python_words", [] { zr::set_wording(&in_python); })
      .def("rank", [](const Self& self) -> int64_t { return self->program.rank(); })
      .def("world", [](const Self& self) -> int64_t { return self->program.world(); })
      .def("folder", [](const Self& self) { return self->program.folder(); })
      .def("boolean",
           [](const Self& self, std::string path) { return cross([&] { return self->program.boolean(path); }); })
      .def("integer",
           [](const Self& self, std::string path) { return cross([&] { return self->program.integer(path); }); })
      .def("number",
           [](const Self& self, std::string path) { return cross([&] { return self->program.number(path); }); })
      .def("text", [](const Self& self, std::string path) { return cross([&] { return self->program.text(path); }); })
      .def("origin",
           [](const Self& self, std::string path) { return cross([&] { return self->program.origin(path); }); });
}

}  // namespace zr::python
