#include "control/environment.hpp"

#include <charconv>
#include <string_view>

#include "base/failure.hpp"

namespace zr::host {

namespace {
constexpr int kMostRanks = 4096;
constexpr int kPortsTried = 8;

// One launcher's variables: reads them and complains in its name.
struct From {
  const Variables& variables;
  std::string launcher;

  std::string optional(const char* name) const {
    const char* value = variables(name);
    return value ? value : "";
  }
  std::string text(const char* name, const char* remedy) const {
    const char* value = variables(name);
    if (!value || !*value)
      fail_environment(std::string(name) + " is not set, but " + launcher + "'s other variables are: " + remedy);
    return value;
  }
  int number(const char* name, int least, int most, const char* remedy) const {
    const std::string value = text(name, remedy);
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < least || result > most)
      fail_environment(std::string(name) + "=" + value + " is not a number from " + std::to_string(least) + " to " +
                       std::to_string(most) + ": " + remedy);
    return result;
  }
  int number_or(const char* name, int least, int most, int otherwise, const char* remedy) const {
    return optional(name).empty() ? otherwise : number(name, least, most, remedy);
  }
};

uint16_t port_of_job(std::string_view job) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return static_cast<uint16_t>(20000 + hash % 8000);  // below the range from which systems pick ports by themselves
}

std::vector<uint16_t> ports_from(int first) {
  std::vector<uint16_t> ports;
  for (int port = first; port < first + kPortsTried && port <= 65535; ++port)
    ports.push_back(static_cast<uint16_t>(port));
  return ports;
}

// Every rank that meets the others there is on the same host.
bool is_this_host(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

// ZR_STORE=host:port, which any launcher's user may set.
bool take_store(const From& from, Place& place) {
  const std::string store = from.optional("ZR_STORE");
  if (store.empty()) return false;
  const auto colon = store.rfind(':');
  int port = 0;
  if (colon != std::string::npos) std::from_chars(store.data() + colon + 1, store.data() + store.size(), port);
  if (colon == 0 || port < 1 || port > 65535)
    fail_environment("ZR_STORE=" + store + " is not host:port: set it as in ZR_STORE=node01:29600");
  place.address = store.substr(0, colon);
  place.ports = {static_cast<uint16_t>(port)};
  return true;
}

Place ranks(const From& from, const char* rank, const char* world, const char* remedy) {
  Place place;
  place.launcher = from.launcher;
  place.world = from.number(world, 1, kMostRanks, remedy);
  place.rank = from.number(rank, 0, place.world - 1, remedy);
  place.serves = place.rank == 0;
  return place;
}

void take_locals(const From& from, Place& place, const char* rank, const char* world, const char* remedy) {
  place.local_world = from.number_or(world, 1, place.world, -1, remedy);
  place.local_rank = from.number_or(rank, 0, (place.local_world < 0 ? place.world : place.local_world) - 1, -1, remedy);
}

Place from_zeroth(const From& from) {
  const char* remedy = "start the program by `zeroth launch -n N -- PROGRAM`, or unset ZR_RANK";
  Place place = ranks(from, "ZR_RANK", "ZR_WORLD", remedy);
  place.launched = true;
  place.serves = false;
  take_locals(from, place, "ZR_LOCAL_RANK", "ZR_LOCAL_WORLD", remedy);
  if (!take_store(from, place)) from.text("ZR_STORE", remedy);
  place.job = from.text("ZR_JOB", remedy);
  place.token = from.text("ZR_TOKEN", remedy);
  return place;
}

Place from_torchrun(const From& from) {
  const char* remedy = "start the program by torchrun or `zeroth launch`, or unset RANK and WORLD_SIZE";
  Place place = ranks(from, "RANK", "WORLD_SIZE", remedy);
  take_locals(from, place, "LOCAL_RANK", "LOCAL_WORLD_SIZE", remedy);
  if (place.world == 1) {
    place.job = "torchrun";
    return place;
  }
  place.address = from.text("MASTER_ADDR", remedy);
  const int port = from.number("MASTER_PORT", 1, 65534, remedy);
  place.ports = ports_from(port + 1);  // MASTER_PORT itself is the launcher's own store
  place.job = "torchrun-" + from.optional("TORCHELASTIC_RUN_ID") + "-" + place.address + "-" + std::to_string(port) +
              "-" + from.optional("TORCHELASTIC_RESTART_COUNT");
  return place;
}

Place from_openmpi(const From& from) {
  const char* remedy = "start the program by mpirun or `zeroth launch`, or unset OMPI_COMM_WORLD_RANK";
  Place place = ranks(from, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", remedy);
  take_locals(from, place, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", remedy);
  place.job = "mpirun-" +
              from.text(from.optional("PMIX_NAMESPACE").empty() ? "OMPI_MCA_ess_base_jobid" : "PMIX_NAMESPACE", remedy);
  place.token = from.optional("OMPI_MCA_orte_precondition_transports");
  if (place.local_world == place.world) {
    place.address = "127.0.0.1";
    place.ports = ports_from(port_of_job(place.job));
  } else if (!take_store(from, place)) {
    fail_environment(
        "mpirun started ranks on several hosts and does not tell which has rank 0: name it and a free port, "
        "mpirun -x ZR_STORE=host:port ...");
  }
  return place;
}

Place from_pmi(const From& from, int64_t parent) {
  const char* remedy = "start the program by mpiexec or `zeroth launch`, or unset PMI_RANK";
  Place place = ranks(from, "PMI_RANK", "PMI_SIZE", remedy);
  take_locals(from, place, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", remedy);
  if (place.local_world == place.world) {  // one proxy process is the parent of all
    place.job = "mpiexec-" + std::to_string(parent);
    place.address = "127.0.0.1";
    place.ports = ports_from(port_of_job(place.job));
  } else if (place.world > 1 && !take_store(from, place)) {
    fail_environment(
        "mpiexec gives its ranks no common address to meet at: name rank 0's host and a free port, "
        "mpiexec -env ZR_STORE host:port ...");
  }
  if (place.job.empty()) place.job = "mpiexec-" + from.optional("ZR_STORE");
  return place;
}

Place from_slurm(const From& from) {
  const char* remedy = "start the program by srun or `zeroth launch`, or unset SLURM_PROCID";
  Place place = ranks(from, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", remedy);
  place.local_rank = from.number_or("SLURM_LOCALID", 0, place.world - 1, -1, remedy);
  place.job = "srun-" + from.text("SLURM_JOB_ID", remedy) + "." + from.text("SLURM_STEP_ID", remedy);
  if (from.optional("SLURM_STEP_NUM_NODES") == "1") {
    place.address = "127.0.0.1";
  } else {
    place.address = first_host(from.text("SLURM_STEP_NODELIST", remedy));
  }
  place.ports = ports_from(port_of_job(place.job));
  return place;
}
}  // namespace

std::string first_host(const std::string& nodes) {
  const auto bracket = nodes.find_first_of("[,");
  if (bracket == std::string::npos || nodes[bracket] == ',') return nodes.substr(0, bracket);
  const auto number_end = nodes.find_first_of("-,]", bracket);
  const auto close = nodes.find(']', bracket);
  if (number_end == std::string::npos || close == std::string::npos) return nodes;
  const auto next = nodes.find(',', close);
  return nodes.substr(0, bracket) + nodes.substr(bracket + 1, number_end - bracket - 1) +
         nodes.substr(close + 1, next == std::string::npos ? next : next - close - 1);
}

std::optional<Place> place_of(const Variables& variables, int64_t parent) {
  const auto has = [&](const char* name) { return variables(name) != nullptr; };
  if (has("ZR_RANK")) return from_zeroth({variables, "zeroth launch"});
  Place place;
  if (has("RANK") && has("WORLD_SIZE")) {
    place = from_torchrun({variables, "torchrun"});
  } else if (has("OMPI_COMM_WORLD_RANK")) {
    place = from_openmpi({variables, "mpirun"});
  } else if (has("PMI_RANK")) {
    place = from_pmi({variables, "mpiexec"}, parent);
  } else if (has("SLURM_PROCID") && has("SLURM_STEP_NUM_TASKS")) {  // a batch script has the first, its srun steps both
    place = from_slurm({variables, "srun"});
  } else {
    return {};
  }
  // The user's own meeting place and secret go before what was derived.
  const From from{variables, place.launcher};
  const bool one_host = place.local_world == place.world || is_this_host(place.address);
  if (!take_store(from, place) && one_host && place.world > 1) place.address = "127.0.0.1";
  if (has("ZR_TOKEN")) place.token = from.optional("ZR_TOKEN");
  if (!place.token.empty() || place.world == 1) return place;
  place.shares_secret = one_host;
  place.guessable = !one_host;
  if (place.guessable) place.token = place.job;
  return place;
}

}  // namespace zr::host
