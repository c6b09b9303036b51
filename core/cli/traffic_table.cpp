#include "cli/traffic_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "job/offline_plan.hpp"

namespace zr::host::cli {

namespace {

using config::ValueForm;

struct Choice {
  const char* text;
  bool exact;
  ValueForm gradients, weights;
};
constexpr Choice kChoices[] = {
    {"exact", true, ValueForm::exact, ValueForm::exact},
    {"exact = false", false, ValueForm::exact, ValueForm::exact},
    {"gradients = \"int8\"", true, ValueForm::int8, ValueForm::exact},
    {"gradients = \"int4\"", true, ValueForm::int4, ValueForm::exact},
    {"weights = \"int8\"", true, ValueForm::exact, ValueForm::int8},
    {"gradients, weights = \"int8\"", true, ValueForm::int8, ValueForm::int8},
    {"gradients = \"int4\", weights = \"int8\"", true, ValueForm::int4, ValueForm::int8},
};

const char* name_of(ValueForm form) {
  return form == ValueForm::int8 ? "int8" : form == ValueForm::int4 ? "int4" : "exact";
}

bool is_choice_of(const config::CommunicatorConfig& keys, const Choice& choice) {
  return keys.exact == choice.exact && keys.gradients == choice.gradients && keys.weights == choice.weights;
}

std::string time_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.1f} ms", 1e3 * seconds) : fmt::format("{:.2f} s", seconds);
}

std::string hosts_text(const job::HostSizes& hosts) {
  const auto [least, most] = std::minmax_element(hosts.begin(), hosts.end());
  const std::string ranks = *least == *most ? fmt::format("{}", *least) : fmt::format("{} to {}", *least, *most);
  return fmt::format("{} {} with {} {}{}", hosts.size(), hosts.size() == 1 ? "host" : "hosts", ranks,
                     *most == 1 ? "rank" : "ranks", hosts.size() == 1 ? "" : " each");
}

class Table {
 public:
  Table(const ModelQuery& query, const job::HostSizes& hosts, std::optional<double> link)
      : query_(query), hosts_(hosts), link_(link), ranks_(std::accumulate(hosts.begin(), hosts.end(), 0)) {}

  std::string of(const std::string& strategy) const {
    const plugin::ResolvedJob job = query_.resolved_job({"strategy=" + strategy}, ranks_);
    std::string text = fmt::format("communication per step, {}: {}{}\n", hosts_text(hosts_), strategy,
                                   job.communicator ? fmt::format(", {}", job.communicator->table->id) : "");
    std::vector<Row> rows = rows_of(strategy, job);
    std::set<std::pair<std::string, bool>> kinds;
    for (const Row& row : rows) kinds.insert(row.kind());
    for (const auto& kind : kinds) count(rows, kind);
    const Row& own = *std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.is_own; });
    if (std::none_of(rows.begin(), rows.end(), [](const Row& row) { return row.traffic.problem.empty(); }))
      return text + fmt::format("  unknown: {}\n", own.traffic.problem);
    text += line("[communicator]", "between hosts", "largest host", "inside hosts", link_ ? link_text() : "");
    for (const Row& row : rows) {
      if (row.traffic.problem.empty())
        text += line(row.text + (row.is_own ? " (this job)" : ""), row.traffic);
      else if (row.is_own)
        text += fmt::format("  {} (this job): unknown: {}\n", row.text, row.traffic.problem);
    }
    if (own.offline->plan(0).communication().local > 0) text += local_line(*own.offline);
    return text;
  }

 private:
  struct Row {
    std::string text;
    bool is_own;
    std::string communicator;  // its id
    std::unique_ptr<job::OfflinePlan> offline;
    job::InexactCollectives flags;
    job::HostTraffic traffic{};
    // Rows whose strategy gathers alike, with the same communicator.
    std::pair<std::string, bool> kind() const { return {communicator, offline->rounds_weights()}; }
  };

  Row row_of(const std::string& text, bool is_own, const plugin::ResolvedJob& job) const {
    auto offline = std::make_unique<job::OfflinePlan>(job, query_.parameters(), ranks_, hosts_);
    const job::InexactCollectives flags = offline->inexact_collectives();
    const std::string communicator = job.communicator ? job.communicator->table->id : "";
    return {text, is_own, communicator, std::move(offline), flags};
  }

  // The job's own choice and, on several hosts, all others that it permits.
  std::vector<Row> rows_of(const std::string& strategy, const plugin::ResolvedJob& job) const {
    std::vector<Row> rows;
    const config::CommunicatorConfig& keys = job.config.communicator();
    for (const Choice& choice : kChoices) {
      if (is_choice_of(keys, choice)) {
        rows.push_back(row_of(choice.text, true, job));
      } else if (hosts_.size() > 1) {
        try {
          rows.push_back(row_of(choice.text, false, with_choice(strategy, choice)));
        } catch (const UserError&) {  // the strategy or the communicator does not permit it
        }
      }
    }
    if (std::none_of(rows.begin(), rows.end(), [](const Row& row) { return row.is_own; }))
      rows.push_back(row_of("as configured", true, job));
    return rows;
  }

  plugin::ResolvedJob with_choice(const std::string& strategy, const Choice& choice) const {
    return query_.resolved_job({"strategy=" + strategy, fmt::format("communicator.exact={}", choice.exact),
                                fmt::format("communicator.gradients={}", name_of(choice.gradients)),
                                fmt::format("communicator.weights={}", name_of(choice.weights))},
                               ranks_);
  }

  // The traffic of the rows of a kind. If a plug-in fails, the rest of the plan is printed too.
  static void count(std::vector<Row>& rows, const std::pair<std::string, bool>& kind) {
    std::vector<Row*> alike;
    std::vector<job::InexactCollectives> flags;
    for (Row& row : rows) {
      if (row.kind() != kind) continue;
      alike.push_back(&row);
      flags.push_back(row.flags);
    }
    try {
      const std::vector<job::HostTraffic> traffic = alike[0]->offline->traffic(flags);
      for (std::size_t i = 0; i < alike.size(); ++i) alike[i]->traffic = traffic[i];
    } catch (const Error& failure) {
      for (Row* const row : alike) row->traffic.problem = failure.what();
    }
  }

  // Of a step after the warm-up of an optimizer whose gradients are then not reduced.
  std::string local_line(job::OfflinePlan& offline) const {
    const std::string name = "step with local gradients (this job)";
    std::string problem;
    try {
      const job::HostTraffic traffic = offline.local_traffic();
      if (traffic.problem.empty()) return line(name, traffic);
      problem = traffic.problem;
    } catch (const Error& failure) {
      problem = failure.what();
    }
    return fmt::format("  {}: unknown: {}\n", name, problem);
  }

  std::string link_text() const {
    return *link_ >= 1e9 ? fmt::format("at {} Gbit/s", *link_ / 1e9) : fmt::format("at {} Mbit/s", *link_ / 1e6);
  }
  std::string line(const std::string& choice, const job::HostTraffic& traffic) const {
    const auto bytes = [](uint64_t count) { return bytes_text(static_cast<int64_t>(count)); };
    return line(choice, bytes(traffic.between()), bytes(traffic.largest()), bytes(traffic.inside),
                link_ ? time_text(8 * static_cast<double>(traffic.largest()) / *link_) : "");
  }
  static std::string line(const std::string& choice, const std::string& between, const std::string& largest,
                          const std::string& inside, const std::string& time) {
    return fmt::format("  {:<42} {:>13} {:>13} {:>13}{}\n", choice, between, largest, inside,
                       time.empty() ? "" : fmt::format(" {:>14}", time));
  }

  const ModelQuery& query_;
  const job::HostSizes hosts_;
  const std::optional<double> link_;
  const int ranks_;
};

}  // namespace

double bits_per_second(const std::string& command, const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const double scale = unit == "Gbit" ? 1e9 : unit == "Mbit" ? 1e6 : 0;
  if (scale == 0 || !(number * scale >= 1e3) || number * scale > 1e15)
    fail_user(fmt::format("zeroth {}: --link {}: must be a speed, such as 10Gbit or 100Mbit (per second)", command,
                          printable(text)));
  return number * scale;
}

std::string traffic_table(const ModelQuery& query, const job::HostSizes& hosts, std::optional<double> link,
                          const std::vector<std::string>& strategies) {
  const Table table(query, hosts, link);
  std::string text;
  for (const std::string& strategy : strategies) text += table.of(strategy);
  return text;
}

}  // namespace zr::host::cli
