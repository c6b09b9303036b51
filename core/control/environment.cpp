#include "control/environment.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host::control {

namespace {
constexpr int kMaxRanks = 4096;
constexpr int kPortsTried = 8;

// Reads the variables of one launcher; error messages name the launcher.
struct LauncherVariables {
  const Variables& variables;
  std::string launcher;

  std::string optional(const char* name) const {
    const char* value = variables(name);
    return value ? value : "";
  }
  std::string text(const char* name, const char* remedy) const {
    const char* value = variables(name);
    if (!value || !*value)
      fail_environment(fmt::format("{} is not set, but {}'s other variables are: {}", name, launcher, remedy));
    return value;
  }
  int number(const char* name, int minimum, int maximum, const char* remedy) const {
    const std::string value = text(name, remedy);
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < minimum || result > maximum)
      fail_environment(fmt::format("{}={} is not a number from {} to {}: {}", name, value, minimum, maximum, remedy));
    return result;
  }
  int number_or(const char* name, int minimum, int maximum, int fallback, const char* remedy) const {
    return optional(name).empty() ? fallback : number(name, minimum, maximum, remedy);
  }
};

uint16_t port_of_job(std::string_view job) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return static_cast<uint16_t>(20000 + hash % 8000);  // below the range of ephemeral ports
}

std::vector<uint16_t> ports_from(int first) {
  std::vector<uint16_t> ports;
  for (int port = first; port < first + kPortsTried && port <= 65535; ++port)
    ports.push_back(static_cast<uint16_t>(port));
  return ports;
}

// Whether ranks that use this address are all on this node.
bool is_this_host(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

// Reads ZR_STORE=host:port, which users may set under any launcher.
bool read_store_address(const LauncherVariables& variables, RankInfo& rank_info) {
  const std::string store = variables.optional("ZR_STORE");
  if (store.empty()) return false;
  const HostPort address = parse_store_address(store);
  rank_info.address = address.host;
  rank_info.ports = {address.port};
  return true;
}

RankInfo ranks(const LauncherVariables& variables, const char* rank, const char* world, const char* remedy) {
  RankInfo rank_info;
  rank_info.launcher = variables.launcher;
  rank_info.world = variables.number(world, 1, kMaxRanks, remedy);
  rank_info.rank = variables.number(rank, 0, rank_info.world - 1, remedy);
  rank_info.hosts_store = rank_info.rank == 0;
  return rank_info;
}

void read_local_ranks(const LauncherVariables& variables, RankInfo& rank_info, const char* rank, const char* world,
                      const char* remedy) {
  rank_info.local_world = variables.number_or(world, 1, rank_info.world, -1, remedy);
  rank_info.local_rank = variables.number_or(
      rank, 0, (rank_info.local_world < 0 ? rank_info.world : rank_info.local_world) - 1, -1, remedy);
}

// Reads what `zeroth launch` tells the ranks about the store, which it runs.
void read_launch(const LauncherVariables& variables, RankInfo& rank_info, const char* remedy) {
  rank_info.launched = true;
  rank_info.hosts_store = false;
  if (!read_store_address(variables, rank_info)) variables.text("ZR_STORE", remedy);
  rank_info.job = variables.text("ZR_JOB", remedy);
  rank_info.token = variables.text("ZR_TOKEN", remedy);
}

RankInfo from_zeroth(const LauncherVariables& variables) {
  const char* remedy = "start the program with `zeroth launch -n N -- PROGRAM`, or unset ZR_RANK";
  RankInfo rank_info = ranks(variables, "ZR_RANK", "ZR_WORLD", remedy);
  read_local_ranks(variables, rank_info, "ZR_LOCAL_RANK", "ZR_LOCAL_WORLD", remedy);
  read_launch(variables, rank_info, remedy);
  return rank_info;
}

RankInfo from_torchrun(const LauncherVariables& variables) {
  const char* remedy = "start the program with torchrun or `zeroth launch`, or unset RANK and WORLD_SIZE";
  RankInfo rank_info = ranks(variables, "RANK", "WORLD_SIZE", remedy);
  read_local_ranks(variables, rank_info, "LOCAL_RANK", "LOCAL_WORLD_SIZE", remedy);
  if (rank_info.world == 1) {
    rank_info.job = "torchrun";
    return rank_info;
  }
  rank_info.address = variables.text("MASTER_ADDR", remedy);
  const int port = variables.number("MASTER_PORT", 1, 65534, remedy);
  rank_info.ports = ports_from(port + 1);  // MASTER_PORT itself is used by the store of torchrun
  rank_info.job = fmt::format("torchrun-{}-{}-{}-{}", variables.optional("TORCHELASTIC_RUN_ID"), rank_info.address,
                              port, variables.optional("TORCHELASTIC_RESTART_COUNT"));
  return rank_info;
}

RankInfo from_openmpi(const LauncherVariables& variables) {
  const char* remedy = "start the program with mpirun or `zeroth launch`, or unset OMPI_COMM_WORLD_RANK";
  RankInfo rank_info = ranks(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", remedy);
  read_local_ranks(variables, rank_info, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", remedy);
  if (variables.variables("ZR_JOB")) {  // `zeroth launch --hosts` has started mpirun, and runs the store
    rank_info.launcher = "zeroth launch";
    read_launch(variables, rank_info, "start the program with `zeroth launch --hosts`, or unset ZR_JOB");
    return rank_info;
  }
  rank_info.job = "mpirun-" + variables.text(variables.optional("PMIX_NAMESPACE").empty() ? "OMPI_MCA_ess_base_jobid"
                                                                                          : "PMIX_NAMESPACE",
                                             remedy);
  rank_info.token = variables.optional("OMPI_MCA_orte_precondition_transports");
  if (rank_info.local_world == rank_info.world) {
    rank_info.address = "127.0.0.1";
    rank_info.ports = ports_from(port_of_job(rank_info.job));
  } else if (!read_store_address(variables, rank_info)) {
    fail_environment(
        "mpirun started ranks on several nodes and does not report which node has rank 0: pass its host name and a "
        "free port, mpirun -x ZR_STORE=host:port ...");
  }
  return rank_info;
}

RankInfo from_pmi(const LauncherVariables& variables, int64_t parent) {
  const char* remedy = "start the program with mpiexec or `zeroth launch`, or unset PMI_RANK";
  RankInfo rank_info = ranks(variables, "PMI_RANK", "PMI_SIZE", remedy);
  read_local_ranks(variables, rank_info, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", remedy);
  if (rank_info.local_world == rank_info.world) {  // one proxy process is the parent of all ranks
    rank_info.job = fmt::format("mpiexec-{}", parent);
    rank_info.address = "127.0.0.1";
    rank_info.ports = ports_from(port_of_job(rank_info.job));
  } else if (rank_info.world > 1 && !read_store_address(variables, rank_info)) {
    fail_environment(
        "mpiexec does not give its ranks a common rendezvous address: pass rank 0's host name and a free port, "
        "mpiexec -env ZR_STORE host:port ...");
  }
  if (rank_info.job.empty()) rank_info.job = "mpiexec-" + variables.optional("ZR_STORE");
  return rank_info;
}

RankInfo from_slurm(const LauncherVariables& variables) {
  const char* remedy = "start the program with srun or `zeroth launch`, or unset SLURM_PROCID";
  RankInfo rank_info = ranks(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", remedy);
  rank_info.local_rank = variables.number_or("SLURM_LOCALID", 0, rank_info.world - 1, -1, remedy);
  rank_info.job =
      fmt::format("srun-{}.{}", variables.text("SLURM_JOB_ID", remedy), variables.text("SLURM_STEP_ID", remedy));
  const std::string count = variables.optional("SLURM_STEP_NUM_NODES");
  const std::string nodes = count == "1" ? "" : variables.text("SLURM_STEP_NODELIST", remedy);
  if (count == "1" || (count.empty() && nodes.find_first_of("[,") == std::string::npos)) {
    rank_info.address = "127.0.0.1";
  } else {
    rank_info.address = first_host(nodes);
    if (rank_info.address.empty() && variables.optional("ZR_STORE").empty())
      fail_environment(
          fmt::format("SLURM_STEP_NODELIST={} is not a list of nodes such as node[01-04],login: {}, or set "
                      "ZR_STORE=host:port for srun, with the host of rank 0 and a free port",
                      nodes, remedy));
    const std::string node = variables.optional("SLURM_NODEID");
    if (rank_info.rank == 0 && !node.empty() && node != "0" && variables.optional("ZR_STORE").empty()) {
      const std::string name = variables.text("SLURMD_NODENAME", remedy);
      fail_environment(
          fmt::format("srun has started rank 0 on {}, but all ranks look for the job's store on {}, the first node: "
                      "set ZR_STORE=host:port for srun, for example ZR_STORE={}:29600",
                      name, rank_info.address, name));
    }
  }
  rank_info.ports = ports_from(port_of_job(rank_info.job));
  return rank_info;
}

RankInfo from_rendezvous(const LauncherVariables& variables, const Rendezvous& given) {
  if (given.world < 1 || given.world > kMaxRanks || given.rank < 0 || given.rank >= given.world)
    fail_user(fmt::format("zr::Rendezvous: rank {} of {} ranks: world must be 1 to {}, and rank 0 to world - 1",
                          given.rank, given.world, kMaxRanks));
  if (given.world > 1 && !parse_address(given.address))
    fail_user(
        fmt::format("zr::Rendezvous: the address '{}' is not of the form host:port; pass the host of rank 0 and a free "
                    "port, such as node01:29600 or [fd00::1]:29600",
                    printable(given.address)));
  RankInfo rank_info;
  rank_info.launcher = variables.launcher;
  rank_info.rank = given.rank;
  rank_info.world = given.world;
  rank_info.hosts_store = given.rank == 0;
  rank_info.job = "rendezvous";
  if (given.world == 1) return rank_info;
  const HostPort address = *parse_address(given.address);
  rank_info.job += "-" + address.text();
  if (!read_store_address(variables, rank_info)) {
    rank_info.address = address.host;
    rank_info.ports = {address.port};
  }
  rank_info.token = given.token.empty() ? variables.optional("ZR_TOKEN") : given.token;
  if (!rank_info.token.empty()) return rank_info;
  rank_info.shares_secret = is_this_host(rank_info.address);
  rank_info.guessable = !rank_info.shares_secret;
  if (rank_info.guessable) rank_info.token = rank_info.job;
  return rank_info;
}

enum class Launcher { none, zeroth, torchrun, openmpi, pmi, slurm };

Launcher launcher_of(const Variables& variables) {
  const auto has = [&](const char* name) { return variables(name) != nullptr; };
  const bool is_srun = has("SLURM_PROCID") && has("SLURM_STEP_NUM_TASKS");  // a batch script has only the first one
  if (has("ZR_RANK")) return Launcher::zeroth;
  if (has("RANK") && has("WORLD_SIZE")) return Launcher::torchrun;
  if (has("OMPI_COMM_WORLD_RANK")) return Launcher::openmpi;
  // srun with PMI-2 sets PMI_RANK and PMI_SIZE too, but no variables of local ranks.
  if (has("PMI_RANK") && (has("MPI_LOCALRANKID") || !is_srun)) return Launcher::pmi;
  return is_srun ? Launcher::slurm : Launcher::none;
}

struct OfLauncher {
  const char *launcher = "", *rank = "", *world = "";  // its name, and those of its variables of ranks
};

// Empty names for `zeroth` itself, which is never started several times.
OfLauncher names_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::none:
    case Launcher::zeroth: return {};
    case Launcher::torchrun: return {"torchrun", "RANK and LOCAL_RANK", "WORLD_SIZE"};
    case Launcher::openmpi: return {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"};
    case Launcher::pmi: return {"mpiexec", "PMI_RANK", "PMI_SIZE"};
    case Launcher::slurm: return {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
  }
  return {};
}

// Fails if some of torchrun's variables are set, but not the rank or the number of ranks: a rank of a job would train
// alone. Those of mpirun and srun are never set by hand; who unsets the rank wants jobs of their own.
void check_incomplete(const Variables& variables) {
  const auto has = [&](const char* name) { return variables(name) != nullptr; };
  if (has("LOCAL_RANK") && (has("RANK") || has("WORLD_SIZE"))) from_torchrun({variables, "torchrun"});
}
}  // namespace

std::string first_host(const std::string& nodes) {
  std::string host;
  for (std::size_t at = 0; at < nodes.size() && nodes[at] != ','; ++at) {
    if (nodes[at] == ']') return "";
    if (nodes[at] != '[') {
      host += nodes[at];
      continue;
    }
    const auto end = nodes.find_first_of("-,]", at), close = nodes.find(']', at);
    if (close == std::string::npos || end == at + 1) return "";
    host += nodes.substr(at + 1, end - at - 1);
    at = close;
  }
  return host;
}

std::string HostPort::text() const {
  return host.find(':') == host.npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

std::optional<HostPort> parse_address(const std::string& text) {
  HostPort address;
  const auto colon = text.rfind(':');
  const std::string port = colon == text.npos ? "" : text.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  address.host = text.substr(0, std::min(colon, text.size()));
  const bool opens = address.host.starts_with('['), closes = address.host.ends_with(']');
  if (opens && closes) address.host = address.host.substr(1, address.host.size() - 2);
  if (address.host.empty() || opens != closes || error != std::errc() || end != port.data() + port.size() ||
      address.port == 0)
    return {};
  return address;
}

HostPort parse_store_address(const std::string& text) {
  const std::optional<HostPort> address = parse_address(text);
  if (!address)
    fail_environment(fmt::format(
        "ZR_STORE={} is not of the form host:port; example: ZR_STORE=node01:29600, or ZR_STORE=[fd00::1]:29600", text));
  return *address;
}

std::optional<RankInfo> find_rank_info(const Variables& variables, int64_t parent, const Rendezvous* given) {
  const auto has = [&](const char* name) { return variables(name) != nullptr; };
  RankInfo rank_info;
  const Launcher launcher = launcher_of(variables);
  if (given && launcher != Launcher::zeroth) return from_rendezvous({variables, "zr::Rendezvous"}, *given);
  if (given) {
    rank_info = from_zeroth({variables, "zeroth launch"});
    if (given->rank != rank_info.rank || given->world != rank_info.world)
      fail_user(fmt::format(
          "zr::Rendezvous: it has rank {} of {}, but `zeroth launch` has started this process as rank {} of "
          "{}: pass no zr::Rendezvous, or start the program without `zeroth launch`",
          given->rank, given->world, rank_info.rank, rank_info.world));
    return rank_info;
  }
  switch (launcher) {
    case Launcher::none: check_incomplete(variables); return {};
    case Launcher::zeroth: rank_info = from_zeroth({variables, "zeroth launch"}); break;
    case Launcher::torchrun: rank_info = from_torchrun({variables, "torchrun"}); break;
    case Launcher::openmpi: rank_info = from_openmpi({variables, "mpirun"}); break;
    case Launcher::pmi: rank_info = from_pmi({variables, "mpiexec"}, parent); break;
    case Launcher::slurm: rank_info = from_slurm({variables, "srun"}); break;
  }
  if (rank_info.launched) return rank_info;
  // An address and a secret that the user sets override the derived ones.
  const LauncherVariables from_user{variables, rank_info.launcher};
  const bool one_host = rank_info.local_world == rank_info.world || is_this_host(rank_info.address);
  if (!read_store_address(from_user, rank_info) && one_host && rank_info.world > 1) rank_info.address = "127.0.0.1";
  if (has("ZR_TOKEN")) rank_info.token = from_user.optional("ZR_TOKEN");
  if (!rank_info.token.empty() || rank_info.world == 1) return rank_info;
  rank_info.shares_secret = one_host;
  rank_info.guessable = !one_host;
  if (rank_info.guessable && launcher == Launcher::slurm)
    fail_environment(
        "srun starts ranks on several nodes, and they have no secret (ZR_TOKEN): any process that reaches the job's "
        "store could join the job or end it. Set one before srun, export ZR_TOKEN=$(openssl rand -hex 16), and let "
        "srun pass it to all ranks (--export=ALL, the default unless SLURM_EXPORT_ENV is set) (SECURITY.md)");
  if (rank_info.guessable) rank_info.token = rank_info.job;
  return rank_info;
}

std::string launcher_of_several(const Variables& variables, int64_t pid) {
  const Launcher launcher = launcher_of(variables);
  const OfLauncher names = names_of(launcher);
  const LauncherVariables from_launcher{variables, names.launcher};
  const std::string count = from_launcher.optional(names.world);
  // A shell that `srun --pty` has started ends in all tasks but the first, which has a terminal.
  const bool is_in_shell = launcher == Launcher::slurm && !from_launcher.optional("SLURM_PTY_PORT").empty() &&
                           from_launcher.optional("SLURM_TASK_PID") != std::to_string(pid);
  return count.empty() || count == "1" || is_in_shell ? "" : names.launcher;
}

bool tells_own_rank(const Variables& variables, std::string_view name) {
  constexpr std::array kRanks{"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
  if (std::ranges::none_of(kRanks, variables)) return false;
  // What mpirun of OpenMPI 4 sets itself; other variables that begin with OMPI_ are the user's.
  constexpr std::array<std::string_view, 24> kNames{"OMPI_APP_CTX_NUM_PROCS",
                                                    "OMPI_ARGV",
                                                    "OMPI_COMMAND",
                                                    "OMPI_FILE_LOCATION",
                                                    "OMPI_FIRST_RANKS",
                                                    "OMPI_NUM_APP_CTX",
                                                    "OMPI_UNIVERSE_SIZE",
                                                    "OMPI_MCA_ess",
                                                    "OMPI_MCA_ess_base_jobid",
                                                    "OMPI_MCA_ess_base_vpid",
                                                    "OMPI_MCA_initial_wdir",
                                                    "OMPI_MCA_pmix",
                                                    "OMPI_MCA_orte_app_num",
                                                    "OMPI_MCA_orte_bound_at_launch",
                                                    "OMPI_MCA_orte_ess_node_rank",
                                                    "OMPI_MCA_orte_ess_num_procs",
                                                    "OMPI_MCA_orte_hnp_uri",
                                                    "OMPI_MCA_orte_jobfam_session_dir",
                                                    "OMPI_MCA_orte_launch",
                                                    "OMPI_MCA_orte_local_daemon_uri",
                                                    "OMPI_MCA_orte_num_nodes",
                                                    "OMPI_MCA_orte_precondition_transports",
                                                    "OMPI_MCA_orte_tmpdir_base",
                                                    "OMPI_MCA_orte_top_session_dir"};
  constexpr std::array<std::string_view, 3> kBegins{"OMPI_COMM_WORLD_", "PMIX_", "PMI_"};
  const bool begins = std::ranges::any_of(kBegins, [&](std::string_view begin) { return name.starts_with(begin); });
  return (begins && !name.starts_with("PMIX_MCA_")) || std::ranges::find(kNames, name) != kNames.end();
}

void check_launched_once(const Variables& variables, int64_t pid) {
  const std::string launcher = launcher_of_several(variables, pid);
  if (launcher.empty()) return;
  const OfLauncher names = names_of(launcher_of(variables));
  fail_user(
      fmt::format("{0} has started this command {1} times, and each would start all ranks of a job: start the program "
                  "with {0} instead, or this command without it; if each is to start a job of its own, unset {2}",
                  launcher, variables(names.world), names.rank));
}

}  // namespace zr::host::control
