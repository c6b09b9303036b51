#include "multirank/parity/judge.hpp"

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "multirank/parity/reference.hpp"

namespace parity {

namespace {
namespace fs = std::filesystem;

const Outcome& remembered(const Recipe& recipe) {
  static std::map<Recipe, Outcome> outcomes;
  const auto at = outcomes.find(recipe);
  return at != outcomes.end() ? at->second : outcomes.emplace(recipe, reference(recipe)).first->second;
}

class Ranks {
 public:
  Ranks(fs::path folder, int ranks) : folder_(std::move(folder)), ranks_(ranks) {}

  // Trains the cells in one launch; the output of ranks that did not come to an end, else "".
  std::string train(const std::vector<const Cell*>& cells) const {
    std::ofstream list(folder_ / "list");
    for (const Cell* cell : cells) {
      list << cell->name() << " " << cell->overrides << " job.runs=\"" << (folder_ / "runs").string() << "\"\n";
      for (int rank = 0; rank < ranks_; ++rank) fs::remove(file(*cell, rank));
    }
    list.close();
    const std::string command =
        "ZR_PLUGIN_PATH=" ZR_BUILD_DIR "/tests/plugins OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive " ZR_BUILD_DIR
        "/bin/zeroth launch -n " +
        std::to_string(ranks_) +
        " -- " ZR_BUILD_DIR "/tests/parity_trainer " ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml " +
        (folder_ / "list").string() + " " + folder_.string() + " 2>&1";
    std::string output;
    FILE* pipe = ::popen(command.c_str(), "r");
    char buffer[4096];
    for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
    return WEXITSTATUS(::pclose(pipe)) == 0 ? "" : "the ranks ended: " + output;
  }
  bool trained(const Cell& cell) const {
    bool all = true;
    for (int rank = 0; rank < ranks_; ++rank) all = all && fs::exists(file(cell, rank));
    return all;
  }
  std::string compare(const Cell& cell) const {
    std::string differs;
    for (int rank = 0; rank < ranks_ && differs.empty(); ++rank) {
      differs = difference(load(file(cell, rank).string()), remembered(cell.recipe));
      if (!differs.empty() && rank > 0) differs = "rank " + std::to_string(rank) + ", " + differs;
    }
    return differs;
  }

 private:
  fs::path file(const Cell& cell, int rank) const { return folder_ / (cell.name() + "." + std::to_string(rank)); }
  fs::path folder_;
  int ranks_;
};

// Launches until every cell was trained, or ended its ranks.
std::vector<std::string> train_all(const Ranks& ranks, const std::vector<const Cell*>& cells) {
  std::vector<std::string> problems(cells.size());
  for (std::size_t next = 0; next < cells.size();) {
    const std::string ended = ranks.train({cells.begin() + static_cast<std::ptrdiff_t>(next), cells.end()});
    for (; next < cells.size() && ranks.trained(*cells[next]); ++next) problems[next] = ranks.compare(*cells[next]);
    if (next < cells.size()) problems[next++] = ended.empty() ? "the ranks wrote nothing" : ended;
  }
  return problems;
}

}  // namespace

std::vector<std::string> judge(const std::vector<Cell>& cells, const std::string& folder) {
  fs::create_directories(folder);
  std::vector<std::string> problems(cells.size());
  std::map<int, std::vector<std::size_t>> by_ranks;
  for (std::size_t i = 0; i < cells.size(); ++i) by_ranks[cells[i].ranks].push_back(i);
  for (const auto& [n, indices] : by_ranks) {
    const Ranks ranks(folder, n);
    std::vector<const Cell*> list;
    for (const std::size_t i : indices) list.push_back(&cells[i]);
    const auto found = train_all(ranks, list);
    std::vector<Cell> again;
    std::vector<std::size_t> whose;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      problems[indices[i]] = found[i];
      if (found[i].empty() || !ranks.trained(*list[i])) continue;
      again.push_back(*list[i]);
      again.back().overrides += " parity.trace=true";
      again.back().recipe.trace = true;
      whose.push_back(indices[i]);
    }
    list.clear();
    for (const Cell& cell : again) list.push_back(&cell);
    const auto traced = train_all(ranks, list);
    for (std::size_t i = 0; i < traced.size(); ++i)
      if (!traced[i].empty()) problems[whose[i]] = traced[i];
  }
  return problems;
}

}  // namespace parity
