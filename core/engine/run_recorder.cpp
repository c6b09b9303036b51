#include "engine/run_recorder.hpp"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "base/operation.hpp"
#include "base/text.hpp"

namespace zr::host::engine {

namespace {
// Writes JSON without nlohmann, which does not always write the shortest text of a number.
using Fields = std::vector<std::pair<std::string, std::string>>;

// JSON has no infinities or NaN: they become null.
std::string number(double value) { return std::isfinite(value) ? shortest(value) : "null"; }

std::string number(int64_t value) { return std::to_string(value); }

// A JSON object, on one line or with one line per field.
std::string object(const Fields& fields, bool lines = false) {
  std::string text, between = lines ? "\n  " : "";
  for (const auto& [name, value] : fields) {
    text += fmt::format("{}\"{}\": {}", between, name, value);
    between = lines ? ",\n  " : ", ";
  }
  return fmt::format("{{{}{}", text, lines ? "\n}" : "}");
}

std::optional<RunFolder> locked(const config::JobConfig& config, const std::string& engine, int rank) {
  if (rank > 0) return {};
  return std::optional<RunFolder>(std::in_place, config, engine);
}
}  // namespace

RunRecorder::RunRecorder(const config::JobConfig& config, const std::string& engine, int ranks, int rank)
    : folder_(locked(config, engine, rank)),
      ranks_(ranks),
      steps_(config.train().steps),
      config_(config.to_toml()),
      resumes_(config.checkpoint().resume),
      display_(rank == 0),
      start_(std::chrono::steady_clock::now()) {}

void RunRecorder::accept() {
  if (first_step_ >= steps_ && folder_->has_summary_of(first_step_)) return;
  create_folder();
}

void RunRecorder::create_folder() {
  folder_->begin(config_, resumes_ && first_step_ > 0 ? folder_->rows_up_to(first_step_) : "");
  has_folder_ = true;
}

void RunRecorder::append(const std::string& row) {
  if (!has_folder_) create_folder();
  folder_->append(row);
}

void RunRecorder::resume(int64_t step) {
  first_step_ = last_.step = step;
  clear_hash();
}

void RunRecorder::step(const StepRow& row, const std::array<int64_t, 3>& memory) {
  last_ = row;
  tokens_ += row.tokens;
  milliseconds_ += row.step_ms;
  skipped_ += row.skipped;
  recent_rate_ = recent_rate_ == 0 ? row.tokens_per_s : 0.9 * recent_rate_ + 0.1 * row.tokens_per_s;
  ++steps_made_;
  hash_.reset();
  communication_.reset();
  if (!folder_) return;
  Fields fields{{"step", number(row.step)},
                {"loss", number(row.loss)},
                {"grad_norm", number(row.grad_norm)},
                {"lr", number(row.lr)},
                {"tokens", number(row.tokens)},
                {"step_ms", number(row.step_ms)},
                {"tokens_per_s", number(row.tokens_per_s)},
                {"communication_bytes", number(row.communication_bytes)}};
  if (row.loss_scale != 0) fields.emplace_back("loss_scale", number(row.loss_scale));
  if (row.skipped) fields.emplace_back("skipped", "true");
  append(object(fields) + "\n");
  show(row, memory);
}

void RunRecorder::show(const StepRow& row, const std::array<int64_t, 3>& memory) {
  if (row.step > 1 && row.step != steps_ && !display_.due()) return;
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double left = elapsed / static_cast<double>(row.step - first_step_) * static_cast<double>(steps_ - row.step);
  int64_t written = -1;
  for (const TierRow& tier : tiers_)
    if (tier.tier == Tier::disk) written = std::max<int64_t>(written, 0) + tier.written_bytes;
  display_.show(
      {row.step, steps_, row.loss, row.lr, recent_rate_, left, memory, waits(), written, row.skipped, row.loss_scale});
}

void RunRecorder::validation(int64_t step, double loss) {
  validation_loss_ = loss;
  has_validation_loss_ = true;
  if (!folder_) return;
  append(object({{"step", number(step)}, {"val_loss", number(loss)}}) + "\n");
  display_.note(fmt::format("step {}/{}  validation loss {:.4f}", step, steps_, loss));
}

void RunRecorder::add_waits(Phase phase, double read, double write) {
  if (phase == Phase::checkpoint) return;
  read_wait_ += read;
  write_wait_ += write;
  waited_[static_cast<std::size_t>(phase)] += read + write;
}

// Seconds of training by cause; their sum is the time of all steps.
std::vector<std::pair<std::string_view, double>> RunRecorder::waits() const {
  const auto of = [&](Phase phase) {
    return std::max(seconds_[static_cast<std::size_t>(phase)] - waited_[static_cast<std::size_t>(phase)], 0.0);
  };
  return {{"compute", of(Phase::forward) + of(Phase::backward)},
          {"communication", of(Phase::reduce) + of(Phase::step_sync) + of(Phase::gather)},
          {"disk_read", read_wait_},
          {"disk_write", write_wait_},
          {"optimizer", of(Phase::optimizer)}};
}

void RunRecorder::finish(const Ledger& ledger, const Overlap& overlap) {
  if (!folder_ || !has_folder_) return;
  std::map<std::string_view, Fields> tiers;
  for (const Ledger::Row& row : ledger.rows())
    tiers[kTierNames[static_cast<std::size_t>(row.tier)]].emplace_back(
        kMemoryKindNames[static_cast<std::size_t>(row.kind)],
        object({{"planned", row.kind == MemoryKind::activations ? "null" : number(row.planned)},
                {"peak", number(row.peak)}}));
  Fields memory, communication, time, moved, waited;
  for (const TierRow& tier : tiers_)
    moved.emplace_back(
        tier.id, object({{"read_bytes", number(tier.read_bytes)}, {"written_bytes", number(tier.written_bytes)}}));
  for (const auto& [cause, seconds] : waits()) waited.emplace_back(cause, number(seconds * 1e3));
  for (const auto& [tier, kinds] : tiers) memory.emplace_back(tier, object(kinds));
  if (communication_) {
    for (std::size_t i = 1; i < kOperationNames.size(); ++i)
      if (communication_->calls[i]) communication.emplace_back(kOperationNames[i], number(communication_->bytes[i]));
    communication.emplace_back("control", number(communication_->control_bytes));
  }
  for (std::size_t i = 0; i < kPhaseNames.size(); ++i) time.emplace_back(kPhaseNames[i], number(seconds_[i] * 1e3));
  const Fields fields{
      {"steps", number(last_.step)},
      {"ranks", number(int64_t{ranks_})},
      {"loss", steps_made_ > 0 ? number(last_.loss) : "null"},
      {"val_loss", has_validation_loss_ ? number(validation_loss_) : "null"},
      {"weights_hash", hash_ ? '"' + *hash_ + '"' : "null"},
      {"tokens", number(tokens_)},
      {"tokens_per_s", number(milliseconds_ > 0 ? static_cast<double>(tokens_) / milliseconds_ * 1e3 : 0)},
      {"skipped", number(skipped_)},
      {"loss_scale", last_.loss_scale != 0 ? number(last_.loss_scale) : "null"},
      {"stopped_by", signal_ ? '"' + std::string(signal_ == SIGTERM ? "SIGTERM" : "SIGINT") + '"' : "null"},
      {"checkpoints",
       object({{"saved", number(saved_)}, {"failed", number(failed_saves_)}, {"last_step", number(saved_step_)}})},
      {"memory", object(memory)},
      {"communication_bytes", communication_ ? object(communication) : "null"},
      {"overlap", object({{"collectives", number(overlap.collectives)},
                          {"early", number(overlap.early)},
                          {"norm_blocks", number(overlap.norm_blocks)},
                          {"norm_blocks_early", number(overlap.norm_blocks_early)},
                          {"disk_reads", number(overlap.disk_reads)},
                          {"disk_reads_ahead", number(overlap.disk_reads_ahead)}})},
      {"weight_digest", object({{"bytes", number(digest_.bytes)},
                                {"optimizer_bytes", number(digest_.optimizer_bytes)},
                                {"cycles", number(digest_.cycles)}})},
      {"tiers", object(moved)},
      {"waits_ms", object(waited)},
      {"time_ms", object(time)}};
  folder_->summarise(object(fields, true) + "\n");
}

}  // namespace zr::host::engine
