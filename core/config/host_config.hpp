// The values of the engine's keys as typed structs, one per table. core/config fills them once, after all values were
// validated; the fields have the names of the keys (keys.cpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "config/setting.hpp"
#include "zr/abi/base.h"

namespace zr::host::config {

/// libtorch's name of the CPU as a device.
inline constexpr const char* kCpuDevice = "cpu";

/// [job]
struct RunConfig {
  Setting<std::string> program;         // "": none
  Setting<int> ranks;                   // as started by the launcher
  Setting<int> threads;                 // per rank; 0: the usable cores divided by the ranks of the node
  Setting<std::string> name;            // of the run folder in `runs`; never empty
  Setting<std::string> device;          // kCpuDevice, another type of libtorch, or a type with a number
  Setting<std::string> device_library;  // with libtorch's backend for the device; "": part of libtorch
  Setting<bool> trace;
  Setting<std::string> runs;  // folder, absolute
};

/// What happens to parameters that are neither fp32 nor of train.dtype.
enum class ParamDtypeRule { convert, reject };
/// What a step with non-finite gradients does: it is skipped, or it ends the job.
enum class NonFiniteRule { skip, stop };
/// How values pass between hosts: as they are, or rounded to integers of 8 or 4 bits with a scale per block.
enum class ValueForm { exact, int8, int4 };
/// The values of the model's buffers outside training: rank 0's; the mean over ranks (floating-point buffers; integer
/// ones are rank 0's); or each rank's own.
enum class BufferRule { rank0, mean, per_rank };

/// [train]
struct TrainConfig {
  Setting<int64_t> steps;
  Setting<int64_t> seed;
  Setting<zr_dtype> dtype;  // of weights and activations: ZR_F32, ZR_BF16 or ZR_F16
  Setting<ParamDtypeRule> param_dtype;
  Setting<int64_t> global_batch;       // samples per step; at least 1, as the next two
  Setting<int64_t> micro_batch;        // samples per backward and rank
  Setting<int> gradient_accumulation;  // micro-batches per step and rank
  Setting<double> gradient_clipping;   // maximum global norm; 0: no clipping
  Setting<NonFiniteRule> nonfinite;    // what a step with non-finite gradients does
  Setting<int64_t> max_skipped_steps;  // consecutive ones
  Setting<BufferRule> buffers;
  Setting<std::vector<std::string>> keep_fp32;     // patterns of parameters whose weights stay fp32
  Setting<std::vector<std::string>> cast_buffers;  // patterns of buffers that are rounded to `dtype`
};

/// When gradients are reduced over ranks.
enum class GradientReduction { each_micro_step, last_micro_step };
/// What the sum of a step's gradients is divided by.
enum class GradientDivisor { ranks_and_micro_steps, ranks };

/// [gradients]
struct GradientsConfig {
  Setting<bool> overlap;  // reduce during backward
  Setting<GradientReduction> reduce;
  Setting<GradientDivisor> divisor;
  Setting<zr_dtype> dtype;         // of reduced gradients: ZR_F32 or ZR_BF16
  Setting<zr_dtype> reduce_dtype;  // in which gradients are communicated; ZR_NONE: auto, see Precision
};

/// Dtypes that follow from train.dtype and [gradients] (docs/numerics.md, sections 2, 4 and 10).
struct Precision {
  zr_dtype weights;            // weights, and everything that autograd computes
  zr_dtype gradients;          // gradients of one backward, as they are communicated
  zr_dtype reduced_gradients;  // sums over micro-batches and ranks
  zr_dtype fp32_gradients;     // as `gradients`, of the parameters of train.keep_fp32
};

/// [fp16]
struct Fp16Config {
  Setting<double> loss_scale;            // static scale; 0: dynamic
  Setting<int64_t> initial_scale_power;  // the initial scale is 2 to this power
  Setting<int64_t> loss_scale_window;    // steps
  Setting<int64_t> hysteresis;           // overflows before the scale is halved
  Setting<bool> consecutive_hysteresis;
  Setting<double> min_loss_scale;
};

/// [memory]
struct MemoryConfig {
  Setting<int64_t> device_budget;  // bytes per rank; 0: no limit
  Setting<int64_t> host_budget;    // bytes of all ranks of a node together; 0: no limit
};

/// [optimizer], without the plug-in's own table.
struct OptimizerConfig {
  Setting<double> lr;  // the full rate of the schedule
};

/// The value of schedule.use.
enum class ScheduleKind { constant, linear, cosine, one_cycle, range_test };
/// The shape of a rise: equal steps, or steps of the logarithm.
enum class WarmupType { linear, log };
/// [schedule.constant]
struct RiseConfig {
  Setting<int64_t> warmup, warmup_from;  // steps: the rise ends and begins; -1: it begins before step 0
  Setting<WarmupType> warmup_type;
  Setting<double> start_ratio;  // of the full rate
};
/// [schedule.linear] and [schedule.cosine]
struct RiseAndFallConfig : RiseConfig {
  Setting<int64_t> decay_from, decay_until;  // steps
  Setting<double> final_ratio;               // of the full rate
};
/// [schedule.one_cycle]
struct OneCycleConfig {
  Setting<double> rise;                      // fraction of the steps
  Setting<double> start_ratio, final_ratio;  // of the full rate
};
/// [schedule.range_test]
struct RangeTestConfig {
  Setting<double> min_lr;
  Setting<int64_t> step_size;  // steps per interval
  Setting<double> step_rate;   // growth per interval, in units of min_lr
  Setting<bool> staircase;
};
/// [schedule]; only the table that `use` names has values.
struct ScheduleConfig {
  Setting<ScheduleKind> use;
  RiseConfig constant;
  RiseAndFallConfig linear, cosine;
  OneCycleConfig one_cycle;
  RangeTestConfig range_test;
};

/// [eval]
struct EvalConfig {
  Setting<int64_t> every;  // steps between validations; 0: never
};

/// [communicator], without the plug-in's own table.
struct CommunicatorConfig {
  Setting<bool> share_weights;
  Setting<bool> exact;                         // sums of gradients are in rank order
  Setting<ValueForm> gradients, weights;       // between hosts
  Setting<std::chrono::milliseconds> timeout;  // rounded down
};

/// The action on SIGTERM and SIGINT; save: finish the step, save a checkpoint, then exit.
enum class OnSignal { end, save };

/// [checkpoint]
struct CheckpointConfig {
  Setting<std::string> dir;  // "": none
  Setting<int64_t> every;    // steps; 0: only when the program saves
  Setting<int64_t> keep;     // number of newest checkpoints; 0: all
  Setting<bool> async;
  Setting<OnSignal> on_signal;
  Setting<bool> resume;
  Setting<bool> fallback;
  Setting<std::string> init;  // a checkpoint, a safetensors file, or a folder of them; "": none
  Setting<bool> strict;
  Setting<bool> convert;
};

/// [offload], without the tables of the tiers.
struct OffloadConfig {
  Setting<TierChoice> optimizer, gradients, parameters, activations;
  Setting<bool> overlap;                    // the update of states on tiers may begin during backward
  Setting<int64_t> activation_bytes;        // smaller activations stay on the device
  Setting<double> device_fraction;          // of the optimizer states
  Setting<std::vector<std::string>> tiers;  // ids, in the order in which auto fills them
};

/// The values of all keys of the engine, except the ids of the plug-ins (see Document::chosen).
struct HostConfig {
  RunConfig job;
  TrainConfig train;
  GradientsConfig gradients;
  Precision precision{};
  Fp16Config fp16;
  MemoryConfig memory;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  EvalConfig eval;
  CommunicatorConfig communicator;
  CheckpointConfig checkpoint;
  OffloadConfig offload;
};

}  // namespace zr::host::config
