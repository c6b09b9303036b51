#include "cli/traffic_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/planner.hpp"

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

std::string hosts_text(const engine::HostSizes& hosts) {
  const auto [least, most] = std::minmax_element(hosts.begin(), hosts.end());
  const std::string ranks = *least == *most ? fmt::format("{}", *least) : fmt::format("{} to {}", *least, *most);
  return fmt::format("{} {} with {} {}{}", hosts.size(), hosts.size() == 1 ? "host" : "hosts", ranks,
                     *most == 1 ? "rank" : "ranks", hosts.size() == 1 ? "" : " each");
}

class Table {
 public:
  Table(const ModelQuery& query, const engine::HostSizes& hosts, std::optional<double> link)
      : query_(query), hosts_(hosts), link_(link), ranks_(std::accumulate(hosts.begin(), hosts.end(), 0)) {}

  std::string of(const std::string& strategy) const {
    const plugin::ResolvedJob job = query_.resolved_job({"strategy=" + strategy}, ranks_);
    engine::Planner planner(job, query_.parameters(), ranks_, hosts_);
    std::string text = fmt::format("communication per step, {}: {}{}\n", hosts_text(hosts_), strategy,
                                   job.communicator ? fmt::format(", {}", job.communicator->table->id) : "");
    const engine::HostTraffic own = traffic_of(planner);
    if (!own.problem.empty()) return text + fmt::format("  unknown: {}\n", own.problem);
    text += row("[communicator]", "between hosts", "largest host", "inside hosts", link_ ? link_text() : "");
    const config::CommunicatorConfig& keys = job.config.communicator();
    for (const Choice& choice : kChoices) {
      if (is_choice_of(keys, choice)) {
        text += row(std::string(choice.text) + " (this job)", own);
      } else if (hosts_.size() == 1) {
        continue;  // the choices are about bytes between hosts
      } else if (const auto traffic = of_choice(strategy, choice)) {
        text += row(choice.text, *traffic);
      }
    }
    if (std::none_of(std::begin(kChoices), std::end(kChoices),
                     [&](const Choice& choice) { return is_choice_of(keys, choice); }))
      text += row("this job", own);
    if (planner.plan(0).communication().local > 0) text += "  steps with local gradients are not included\n";
    return text;
  }

 private:
  // The next strategies and the rest of the plan are printed even if a plug-in fails.
  static engine::HostTraffic traffic_of(engine::Planner& planner) try {
    return planner.traffic();
  } catch (const Error& failure) {
    engine::HostTraffic unknown;
    unknown.problem = failure.what();
    return unknown;
  }
  // nullopt: the job does not permit the choice.
  std::optional<engine::HostTraffic> of_choice(const std::string& strategy, const Choice& choice) const try {
    const plugin::ResolvedJob job =
        query_.resolved_job({"strategy=" + strategy, fmt::format("communicator.exact={}", choice.exact),
                             fmt::format("communicator.gradients={}", name_of(choice.gradients)),
                             fmt::format("communicator.weights={}", name_of(choice.weights))},
                            ranks_);
    const engine::HostTraffic traffic = engine::Planner(job, query_.parameters(), ranks_, hosts_).traffic();
    return traffic.problem.empty() ? std::optional(traffic) : std::nullopt;
  } catch (const UserError&) {
    return {};
  }

  std::string link_text() const {
    return *link_ >= 1e9 ? fmt::format("at {} Gbit/s", *link_ / 1e9) : fmt::format("at {} Mbit/s", *link_ / 1e6);
  }
  std::string row(const std::string& choice, const engine::HostTraffic& traffic) const {
    const auto bytes = [](uint64_t count) { return bytes_text(static_cast<int64_t>(count)); };
    return row(choice, bytes(traffic.between()), bytes(traffic.largest()), bytes(traffic.inside),
               link_ ? time_text(8 * static_cast<double>(traffic.largest()) / *link_) : "");
  }
  static std::string row(const std::string& choice, const std::string& between, const std::string& largest,
                         const std::string& inside, const std::string& time) {
    return fmt::format("  {:<42} {:>13} {:>13} {:>13}{}\n", choice, between, largest, inside,
                       time.empty() ? "" : fmt::format(" {:>14}", time));
  }

  const ModelQuery& query_;
  const engine::HostSizes hosts_;
  const std::optional<double> link_;
  const int ranks_;
};

}  // namespace

double bits_per_second(const std::string& command, const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const double scale = unit == "Gbit" ? 1e9 : unit == "Mbit" ? 1e6 : 0;
  if (scale == 0 || !(number > 0) || number * scale > 1e15)
    fail_user(fmt::format("{}: --link {}: must be a speed, such as 10Gbit or 100Mbit (per second)", command,
                          printable(text)));
  return number * scale;
}

std::string traffic_table(const ModelQuery& query, const engine::HostSizes& hosts, std::optional<double> link,
                          const std::vector<std::string>& strategies) {
  const Table table(query, hosts, link);
  std::string text;
  for (const std::string& strategy : strategies) text += table.of(strategy);
  return text;
}

}  // namespace zr::host::cli
