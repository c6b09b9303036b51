#include "engine/record.hpp"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/failure.hpp"
#include "base/text.hpp"

namespace zr::host {

using Json = nlohmann::ordered_json;

namespace {
// JSON has no infinities: they become text, so that a diverged run still has a row.
Json number(double value) {
  if (std::isfinite(value)) return value;
  return shortest(value);
}

constexpr std::array<std::string_view, 12> kOperations{"",           "all_reduce", "reduce_scatter", "all_gather",
                                                       "broadcast",  "reduce",     "gather",         "scatter",
                                                       "all_to_all", "send",       "recv",           "barrier"};

void write_file(const std::string& file, const std::string& text) {
  const std::string aside = file + ".part";
  std::ofstream out(aside, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out || std::rename(aside.c_str(), file.c_str()) != 0)
    fail_environment("cannot write " + file + ": " + std::strerror(errno) +
                     "; free space or set job.runs to another folder");
}
}  // namespace

std::string run_folder(const Config& config) {
  return (std::filesystem::absolute(config.text("job.runs")) / config.text("job.name")).string();
}

Record::Record(const Config& config, int ranks, bool writes)
    : folder_(run_folder(config)),
      ranks_(ranks),
      writes_(writes),
      steps_(config.integer("train.steps")),
      start_(std::chrono::steady_clock::now()) {
  if (!writes_) return;
  const char* progress = std::getenv("ZR_PROGRESS");
  if (progress) progress_ = std::string_view(progress) == "tty" ? Progress::terminal : Progress::plain;
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error)
    fail_environment("cannot make the run folder " + folder_ + ": " + error.message() +
                     "; set job.runs to a folder that can be written");
  std::filesystem::remove(folder_ + "/summary.json", error);
  write_file(folder_ + "/config.toml", config.to_toml());
  metrics_.open(folder_ + "/metrics.jsonl", std::ios::trunc);
}

Record::~Record() {
  if (progress_ == Progress::terminal && last_.step) std::fputc('\n', stdout);
}

void Record::step(const StepRow& row, int64_t memory_bytes) {
  last_ = row;
  tokens_ += row.tokens;
  milliseconds_ += row.step_ms;
  skipped_ += row.skipped;
  recent_rate_ = recent_rate_ == 0 ? row.tokens_per_s : 0.9 * recent_rate_ + 0.1 * row.tokens_per_s;
  if (!writes_) return;
  Json json{{"step", row.step},
            {"loss", number(row.loss)},
            {"grad_norm", number(row.grad_norm)},
            {"lr", row.lr},
            {"tokens", row.tokens},
            {"step_ms", row.step_ms},
            {"tokens_per_s", row.tokens_per_s},
            {"wire_bytes", row.wire_bytes}};
  if (row.skipped) json["skipped"] = true;
  metrics_ << json.dump() << "\n";
  metrics_.flush();
  show(row, memory_bytes);
}

void Record::show(const StepRow& row, int64_t memory_bytes) {
  if (progress_ == Progress::none) return;
  const auto now = std::chrono::steady_clock::now();
  const bool last = row.step == steps_;
  const double pause = progress_ == Progress::terminal ? 0.1 : 5.0;
  if (row.step > 1 && !last && std::chrono::duration<double>(now - shown_).count() < pause) return;
  shown_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double left = elapsed / static_cast<double>(row.step) * static_cast<double>(steps_ - row.step);
  char line[200];
  std::snprintf(line, sizeof line, "step %lld/%lld  loss %.4f  lr %.2e  %.0f tokens/s  left %s  memory %s%s",
                static_cast<long long>(row.step), static_cast<long long>(steps_), row.loss, row.lr, recent_rate_,
                duration_text(left).c_str(), bytes_text(memory_bytes).c_str(),
                row.skipped ? "  (skipped: gradients not finite)" : "");
  std::printf(progress_ == Progress::terminal ? "\r\033[K%s" : "%s\n", line);
  std::fflush(stdout);
}

void Record::validation(int64_t step, double loss) {
  val_loss_ = loss;
  has_val_ = true;
  if (!writes_) return;
  metrics_ << Json{{"step", step}, {"val_loss", number(loss)}}.dump() << "\n";
  metrics_.flush();
  if (progress_ == Progress::none) return;
  std::printf("%sstep %lld/%lld  validation loss %.4f\n", progress_ == Progress::terminal ? "\r\033[K" : "",
              static_cast<long long>(step), static_cast<long long>(steps_), loss);
  std::fflush(stdout);
}

void Record::finish(const Ledger& ledger, int64_t collectives, int64_t early) {
  if (!writes_) return;
  Json json{{"steps", last_.step}, {"ranks", ranks_}, {"loss", number(last_.loss)}};
  json["val_loss"] = has_val_ ? number(val_loss_) : Json();
  json["weights_hash"] = hash_.empty() ? Json() : Json(hash_);
  json["tokens"] = tokens_;
  json["tokens_per_s"] = milliseconds_ > 0 ? static_cast<double>(tokens_) / milliseconds_ * 1e3 : 0;
  json["skipped"] = skipped_;
  for (const Ledger::Row& row : ledger.rows())
    json["memory"][kTierNames[static_cast<std::size_t>(row.tier)]][kKindNames[static_cast<std::size_t>(row.kind)]] = {
        {"planned", row.planned}, {"peak", row.peak}};
  json["wire_bytes"] = Json::object();
  for (std::size_t i = 1; i < kOperations.size(); ++i)
    if (wire_.calls[i]) json["wire_bytes"][kOperations[i]] = wire_.bytes[i];
  json["wire_bytes"]["control"] = wire_.control_bytes;
  json["overlap"] = {{"collectives", collectives}, {"early", early}};
  for (std::size_t i = 0; i < kPhaseNames.size(); ++i) json["time_ms"][kPhaseNames[i]] = seconds_[i] * 1e3;
  write_file(folder_ + "/summary.json", json.dump(2) + "\n");
}

}  // namespace zr::host
