#include "api/state_dict.hpp"

#include <algorithm>

#include "checkpoint/state_dict_pickle.hpp"
#include "control/protocol.hpp"

namespace zr {

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
  const std::vector<std::string> machines = peers_.gather(host::control::protocol::this_peer().machine);
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
