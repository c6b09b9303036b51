#include "config/foreign_keys.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>

namespace zr::host::config {

namespace {

constexpr std::array<ForeignKey, 33> kForeignKeys{{
    {"epochs num_epochs max_epochs num_train_epochs",
     "a job counts optimizer steps: set train.steps = samples x epochs / train.global_batch"},
    {"max_steps num_steps max_iters total_steps", "set train.steps"},
    {"batch_size", "set train.micro_batch (samples per backward and rank) or train.global_batch (samples per step)"},
    {"train_batch_size global_batch_size", "set train.global_batch"},
    {"train_micro_batch_size_per_gpu per_device_train_batch_size micro_batch_size", "set train.micro_batch"},
    {"gradient_accumulation_steps accumulate_grad_batches accumulation_steps", "set train.gradient_accumulation"},
    {"max_grad_norm gradient_clip_val grad_clip clip_grad_norm", "set train.gradient_clipping"},
    {"precision mixed_precision amp bf16 torch_dtype", "set train.dtype = \"fp32\", \"bf16\" or \"fp16\""},
    {"random_seed manual_seed", "set train.seed"},
    {"learning_rate max_lr", "set optimizer.lr"},
    {"betas adam_beta1 adam_beta2", "set beta1 and beta2 in the table of the optimizer: [optimizer.adamw]"},
    {"adam_epsilon epsilon", "set eps in the table of the optimizer: [optimizer.adamw]"},
    {"param_groups", "write [[optimizer.groups]] with match = [patterns of parameter names]"},
    {"scheduler lr_scheduler lr_scheduler_type", "set schedule.use"},
    {"warmup_steps num_warmup_steps warmup_ratio",
     "set warmup (in steps) in the table of the schedule: [schedule.cosine]"},
    {"stage zero_stage zero_optimization sharding_strategy",
     "set strategy = \"zero0\", \"zero1\", \"zero2\" or \"zero3\""},
    {"reduce_bucket_size allgather_bucket_size bucket_cap_mb",
     "set bucket_bytes (in bytes) in the table of the strategy: [strategy.zero2]"},
    {"stage3_prefetch_bucket_size", "set strategy.zero3.prefetch_bytes (in bytes)"},
    {"stage3_param_persistence_threshold", "set strategy.zero3.persistence_threshold"},
    {"stage3_max_live_parameters", "set strategy.zero3.max_live_bytes (in bytes)"},
    {"stage3_max_reuse_distance", "set strategy.zero3.max_reuse_bytes (in bytes)"},
    {"overlap_comm", "set gradients.overlap"},
    {"communication_data_type", "set gradients.reduce_dtype"},
    {"grad_accum_dtype", "set gradients.dtype"},
    {"offload_optimizer cpu_offload", "set offload.optimizer = \"cpu\" or \"nvme\""},
    {"offload_param", "set offload.parameters, with strategy = \"zero3\""},
    {"nvme_path", "set offload.nvme.path"},
    {"backend", "set communicator"},
    {"nproc_per_node num_processes num_gpus world_size", "set job.ranks"},
    {"output_dir save_dir ckpt_dir", "set checkpoint.dir (checkpoints) or job.runs (metrics)"},
    {"save_steps save_interval save_total_limit", "set checkpoint.every (steps) and checkpoint.keep (checkpoints)"},
    {"resume_from_checkpoint pretrained load_from",
     "set checkpoint.resume = true (the job) or checkpoint.init (weights only)"},
    {"eval_steps eval_interval", "set eval.every"},
}};

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

}  // namespace

std::span<const ForeignKey> foreign_keys() { return kForeignKeys; }

std::string_view foreign_remedy(std::string_view path) {
  const std::string name = lower(path.substr(path.rfind('.') + 1));
  for (const ForeignKey& key : kForeignKeys) {
    std::istringstream names{std::string(key.names)};
    for (std::string one; names >> one;)
      if (one == name) return key.remedy;
  }
  return "";
}

}  // namespace zr::host::config
