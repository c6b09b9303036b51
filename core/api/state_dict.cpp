#include "state_dict.hpp"

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "checkpoint/state_dict_pickle.hpp"

namespace zr {

namespace {
// Processes with the same text run on the same machine.
std::string machine() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return boot;
}
}  // namespace

Engine::StateDictFile::StateDictFile(host::engine::Session& session, const std::string& file)
    : peers_(session.checkpointer().checkpoint_comm()), path_(file) {
  std::string converted;  // rank 0 alone decides, because it alone may see the file
  host::checkpoint::run_on_all_ranks(peers_, [&] {
    if (session.rank() != 0 || !host::checkpoint::is_state_dict_file(file)) return;
    conversion_ = std::make_unique<StateDictConversion>(file);
    converted = conversion_->path();
  });
  converted = peers_.broadcast(converted);
  if (converted.empty()) return;
  path_ = converted;
  // A network file system gives a rank only what was written before the rank opened the file.
  const std::vector<std::string> machines = peers_.gather(machine());
  host::checkpoint::run_on_all_ranks(peers_, [&] {
    if (!conversion_ || std::count(machines.begin(), machines.end(), machines[0]) == peers_.world) return;
    conversion_->write_all();
    complete_ = true;
  });
}

Engine::StateDictFile::~StateDictFile() = default;

void Engine::StateDictFile::provide(const std::vector<std::string>& names) {
  host::checkpoint::run_on_all_ranks(peers_, [&] {
    if (!conversion_ || complete_) return;
    conversion_->remove_name();
    conversion_->write(names);
  });
}

}  // namespace zr
