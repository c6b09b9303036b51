#include "run/run_log.hpp"

#include <fmt/format.h>
#include <signal.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/log.hpp"
#include "base/operation.hpp"
#include "base/process_exit.hpp"
#include "base/text.hpp"

namespace zr::host::run {

namespace {
using Json = nlohmann::ordered_json;

// Infinite values and NaN become null. Ids of plug-ins may be invalid UTF-8. indent: -1: one line.
std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n";
}

template <class T>
Json or_null(bool known, const T& value) {
  return known ? Json(value) : Json();
}

std::optional<RunFolder> locked(const config::JobConfig& config, const std::string& engine, int rank) {
  if (rank > 0) return {};
  return std::optional<RunFolder>(std::in_place, config, engine);
}
}  // namespace

RunLog::RunLog(const config::JobConfig& config, const std::string& engine, int ranks, int rank)
    : folder_(locked(config, engine, rank)),
      ranks_(ranks),
      steps_(config.train().steps),
      config_(config.to_toml()),
      has_device_(config.job().device.value != config::kCpuDevice),
      resumes_(config.checkpoint().resume),
      can_resume_(!config.checkpoint().dir->empty() && !config.job().program->empty()),
      display_(rank == 0),
      start_(std::chrono::steady_clock::now()) {}

void RunLog::accept() {
  if (first_step_ >= steps_ && folder_->has_summary_of(first_step_)) return;
  create_folder();
}

void RunLog::create_folder() {
  folder_->begin(config_, resumes_ && first_step_ > 0 ? folder_->rows_up_to(first_step_) : "");
  has_folder_ = true;
}

// A row that cannot be written, for example because the disk is full, does not end training: it is kept, and written
// with the next one.
void RunLog::append(const std::string& row) {
  if (!has_folder_) create_folder();
  constexpr std::size_t kMaxKept = std::size_t{64} << 20;  // bytes
  if (unwritten_.size() < kMaxKept) unwritten_ += row;
  const bool failed_before = !write_failure_.empty();
  try {
    folder_->append(unwritten_);
  } catch (const EnvironmentError& failure) {
    write_failure_ = failure.what();
    if (!failed_before)
      log(ZR_LOG_ERROR, write_failure_ + "; training continues, and later rows try again to write the rows since then");
    return;
  }
  unwritten_.clear();
  write_failure_.clear();
  if (failed_before) log(ZR_LOG_INFO, fmt::format("{}/metrics.jsonl: the rows are written again", folder_->run()));
}

void RunLog::settle_rows() {
  if (write_failure_.empty()) return;
  append("");
  if (write_failure_.empty()) return;
  log(ZR_LOG_ERROR, write_failure_ + "; the rows since then are lost");
  note_unwritten_file();
}

void RunLog::resume(int64_t step) {
  first_step_ = last_.step = step;
  clear_hash();
}

void RunLog::step(const StepRow& row, const std::array<int64_t, 3>& memory) {
  last_ = row;
  tokens_ += row.tokens;
  milliseconds_ += row.step_ms;
  skipped_ += row.skipped;
  recent_rate_ = recent_rate_ == 0 ? row.tokens_per_s : 0.9 * recent_rate_ + 0.1 * row.tokens_per_s;
  ++steps_made_;
  hash_.reset();
  communication_.reset();
  if (!folder_) return;
  Json line{{"step", row.step},
            {"loss", row.loss},
            {"grad_norm", row.grad_norm},
            {"lr", row.lr},
            {"tokens", row.tokens},
            {"step_ms", row.step_ms},
            {"tokens_per_s", row.tokens_per_s},
            {"communication_bytes", row.communication_bytes}};
  if (row.loss_scale != 0) line["loss_scale"] = row.loss_scale;
  if (row.skipped) line["skipped"] = true;
  append(json_text(line));
  show(row, memory);
}

void RunLog::show(const StepRow& row, const std::array<int64_t, 3>& memory) {
  if (row.step > 1 && row.step != steps_ && !display_.due()) return;
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double left = elapsed / static_cast<double>(row.step - first_step_) * static_cast<double>(steps_ - row.step);
  int64_t written = -1;
  for (const TierRow& tier : tiers_)
    if (tier.tier == Tier::disk) written = std::max<int64_t>(written, 0) + tier.written_bytes;
  display_.show({row.step, steps_, row.loss, row.lr, recent_rate_, left, memory, waits(), written, row.skipped,
                 row.loss_scale, row.unit});
}

void RunLog::validation(int64_t step, double loss) {
  validation_loss_ = loss;
  has_validation_loss_ = true;
  if (!folder_) return;
  append(json_text({{"step", step}, {"val_loss", loss}}));
  display_.note(fmt::format("step {}/{}  validation loss {:.4f}", step, steps_, loss));
}

void RunLog::add_waits(Phase phase, double read, double write) {
  if (phase == Phase::checkpoint) return;
  read_wait_ += read;
  write_wait_ += write;
  waited_[static_cast<std::size_t>(phase)] += read + write;
}

// Seconds of training by cause; their sum is the time of all steps.
std::vector<std::pair<std::string_view, double>> RunLog::waits() const {
  const auto of = [&](Phase phase) {
    return std::max(seconds_[static_cast<std::size_t>(phase)] - waited_[static_cast<std::size_t>(phase)], 0.0);
  };
  return {{"compute", of(Phase::forward) + of(Phase::backward)},
          {"communication", of(Phase::reduce) + of(Phase::step_sync) + of(Phase::gather)},
          {"disk_read", read_wait_},
          {"disk_write", write_wait_},
          {"optimizer", of(Phase::optimizer)}};
}

void RunLog::finish(const Ledger& ledger, const Overlap& overlap) {
  if (!folder_ || !has_folder_) return;
  const auto name = [](std::string_view text) { return std::string(text); };
  Json memory = Json::object(), moved = Json::object(), waited = Json::object(), time = Json::object();
  for (const Ledger::Row& row : ledger.rows())
    memory[name(kTierNames[static_cast<std::size_t>(row.tier)])]
          [name(kMemoryKindNames[static_cast<std::size_t>(row.kind)])] = {
              {"planned", or_null(row.kind != MemoryKind::activations, row.planned)}, {"peak", row.peak}};
  for (const TierRow& tier : tiers_)
    moved[tier.id] = {{"read_bytes", tier.read_bytes}, {"written_bytes", tier.written_bytes}};
  for (const auto& [cause, seconds] : waits()) waited[name(cause)] = seconds * 1e3;
  for (std::size_t i = 0; i < kPhaseNames.size(); ++i) time[name(kPhaseNames[i])] = seconds_[i] * 1e3;
  Json communication;  // null: unknown
  if (communication_) {
    for (std::size_t i = 1; i < kOperationNames.size(); ++i)
      if (communication_->calls[i]) communication[name(kOperationNames[i])] = communication_->bytes[i];
    communication["control"] = communication_->control_bytes;
  }
  Json summary{{"steps", last_.step},
               {"ranks", ranks_},
               {"loss", or_null(steps_made_ > 0, last_.loss)},
               {"val_loss", or_null(has_validation_loss_, validation_loss_)},
               {"weights_hash", or_null(hash_.has_value(), hash_.value_or(""))},
               {"tokens", tokens_},
               {"tokens_per_s", milliseconds_ > 0 ? static_cast<double>(tokens_) / milliseconds_ * 1e3 : 0},
               {"skipped", skipped_},
               {"loss_scale", or_null(last_.loss_scale != 0, last_.loss_scale)},
               {"stopped_by", or_null(signal_ != 0, signal_ == SIGTERM ? "SIGTERM" : "SIGINT")},
               {"failed", failed_},
               {"checkpoints", {{"saved", saved_}, {"failed", failed_saves_}, {"last_step", saved_step_}}},
               {"memory", std::move(memory)},
               {"device_peak_bytes", or_null(has_device_, device_peak_)},
               {"communication_bytes", std::move(communication)},
               {"overlap",
                {{"collectives", overlap.collectives},
                 {"early", overlap.early},
                 {"norm_blocks", overlap.norm_blocks},
                 {"norm_blocks_early", overlap.norm_blocks_early},
                 {"disk_reads", overlap.disk_reads},
                 {"disk_reads_ahead", overlap.disk_reads_ahead},
                 {"gradients_early", overlap.gradients_early},
                 {"states", overlap.states},
                 {"states_early", overlap.states_early},
                 {"updates_early", overlap.updates_early},
                 {"bytes_early", overlap.bytes_early},
                 {"early_ms",
                  {{"update", overlap.update_s * 1e3},
                   {"disk_read", overlap.read_s * 1e3},
                   {"disk_write", overlap.write_s * 1e3}}}}},
               {"weight_digest",
                {{"bytes", digest_.bytes}, {"optimizer_bytes", digest_.optimizer_bytes}, {"cycles", digest_.cycles}}},
               {"tiers", std::move(moved)},
               {"waits_ms", std::move(waited)},
               {"time_ms", std::move(time)}};
  if (!last_.unit.empty()) summary["unit"] = last_.unit;
  folder_->summarise(json_text(summary, 2));
  if (steps_made_ > 0 && !std::exchange(closed_, true)) display_.note(closing_text());
}

// What a run has done, where its files are, and the next command.
std::string RunLog::closing_text() const {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  std::string text = fmt::format("trained {} step{} in {}: {} {}, {:.0f} {}/s\nrun folder: {}", steps_made_,
                                 steps_made_ == 1 ? "" : "s", duration_text(elapsed), tokens_, last_.unit,
                                 milliseconds_ > 0 ? static_cast<double>(tokens_) / milliseconds_ * 1e3 : 0, last_.unit,
                                 folder_->run());
  if (saved_ == 0)
    return text +
           "\nno weights were saved; to save them, set checkpoint.dir and checkpoint.every, or call engine.save()";
  text += "\ncheckpoint: " + saved_folder_;
  if (last_.step >= steps_)
    return text + fmt::format("\nnext: zeroth export {} weights.safetensors", shell_word(saved_folder_));
  if (!can_resume_) return text;
  return text + fmt::format("\nnext: zeroth train --resume {}", shell_word(folder_->run() + "/config.toml"));
}

}  // namespace zr::host::run
