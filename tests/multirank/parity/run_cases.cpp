#include "multirank/parity/run_cases.hpp"

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "multirank/parity/device.hpp"
#include "multirank/parity/reference.hpp"

namespace parity {

namespace {
namespace fs = std::filesystem;

const Outcome& remembered(const Recipe& recipe) {
  static std::map<Recipe, Outcome> outcomes;
  const auto at = outcomes.find(recipe);
  return at != outcomes.end() ? at->second : outcomes.emplace(recipe, reference(recipe)).first->second;
}

// The number of hosts that the ranks pretend to be on, connected by MPI; 0: one host, without MPI.
int hosts() {
  const char* value = std::getenv("ZR_PARITY_HOSTS");
  return value ? std::atoi(value) : 0;
}

std::string start_of_ranks(int ranks) {
  const std::string n = std::to_string(ranks);
  if (ranks == 1 || hosts() == 0) return ZR_BUILD_DIR "/bin/zeroth launch -n " + n + " --";
  return "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun.openmpi --bind-to none --oversubscribe -n " +
         n + " sh -c 'ZR_HOST_ID=$((OMPI_COMM_WORLD_RANK * " + std::to_string(hosts()) + " / " + n +
         ")) exec \"$@\"' sh";
}

std::string overrides_for_hosts() {
  return hosts() == 0 ? "" : " communicator=mpi communicator.mpi.hierarchy_min_bytes=0";
}

class Ranks {
 public:
  Ranks(fs::path folder, int ranks) : folder_(std::move(folder)), ranks_(ranks) {}

  // Trains the cases in one launch; returns the output if a rank failed, else "".
  std::string train(const std::vector<const TestCase*>& cases) const {
    std::ofstream list(folder_ / "list");
    for (const TestCase* test_case : cases) {
      list << test_case->name() << " " << test_case->overrides << device_overrides() << overrides_for_hosts()
           << " job.runs=\"" << (folder_ / "runs").string() << "\"\n";
      for (int rank = 0; rank < ranks_; ++rank) fs::remove(file(*test_case, rank));
    }
    list.close();
    const std::string command =
        "ZR_PLUGIN_PATH=" ZR_BUILD_DIR "/tests/plugins OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive " +
        start_of_ranks(ranks_) +
        " " ZR_BUILD_DIR "/tests/parity_trainer " ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml " +
        (folder_ / "list").string() + " " + folder_.string() + " 2>&1";
    std::string output;
    FILE* pipe = ::popen(command.c_str(), "r");
    char buffer[4096];
    for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
    return WEXITSTATUS(::pclose(pipe)) == 0 ? "" : "the ranks failed: " + output;
  }
  bool trained(const TestCase& test_case) const {
    bool all = true;
    for (int rank = 0; rank < ranks_; ++rank) all = all && fs::exists(file(test_case, rank));
    return all;
  }
  std::string compare(const TestCase& test_case) const {
    std::string differs;
    for (int rank = 0; rank < ranks_ && differs.empty(); ++rank) {
      differs = difference(load(file(test_case, rank).string()), remembered(test_case.recipe));
      if (!differs.empty() && rank > 0) differs = "rank " + std::to_string(rank) + ", " + differs;
    }
    return differs;
  }

 private:
  fs::path file(const TestCase& test_case, int rank) const {
    return folder_ / (test_case.name() + "." + std::to_string(rank));
  }
  fs::path folder_;
  int ranks_;
};

// Launches until every test case was trained or made its ranks fail.
std::vector<std::string> train_all(const Ranks& ranks, const std::vector<const TestCase*>& cases) {
  std::vector<std::string> problems(cases.size());
  for (std::size_t next = 0; next < cases.size();) {
    const std::string ended = ranks.train({cases.begin() + static_cast<std::ptrdiff_t>(next), cases.end()});
    for (; next < cases.size() && ranks.trained(*cases[next]); ++next) problems[next] = ranks.compare(*cases[next]);
    if (next < cases.size()) problems[next++] = ended.empty() ? "the ranks wrote no results" : ended;
  }
  return problems;
}

}  // namespace

std::vector<std::string> run_cases(const std::vector<TestCase>& cases, const std::string& folder) {
  fs::create_directories(folder);
  std::vector<std::string> problems(cases.size());
  std::map<int, std::vector<std::size_t>> by_ranks;
  for (std::size_t i = 0; i < cases.size(); ++i) by_ranks[cases[i].ranks].push_back(i);
  for (const auto& [n, indices] : by_ranks) {
    const Ranks ranks(folder, n);
    std::vector<const TestCase*> list;
    for (const std::size_t i : indices) list.push_back(&cases[i]);
    const auto found = train_all(ranks, list);
    std::vector<TestCase> again;
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
    for (const TestCase& test_case : again) list.push_back(&test_case);
    const auto traced = train_all(ranks, list);
    for (std::size_t i = 0; i < traced.size(); ++i)
      if (!traced[i].empty()) problems[whose[i]] = traced[i];
  }
  return problems;
}

}  // namespace parity
