// Session's start: from a configuration and a model to bound memory that equals rank 0's.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/directory.hpp"
#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "engine/machine_profile.hpp"
#include "engine/planning.hpp"
#include "engine/session.hpp"

namespace zr::host {

namespace {
// job.threads, else what `zeroth launch` gave this rank, else its share of the cores this process may use.
int threads_of(const JobConfig& config, const Control& control) {
  if (const int64_t set = config.integer("job.threads"); set > 0) return static_cast<int>(set);
  if (const char* launched = std::getenv("ZR_THREADS"); launched && std::atoi(launched) > 0) return std::atoi(launched);
  cpu_set_t set;
  const int cores = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::max(1, cores / control.local_world());
}

std::vector<LiveRuns> live_runs(const MemoryPlan& plan, const std::vector<void*>& buffers) {
  std::vector<LiveRuns> live;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& buffer = plan.mine.buffers[i];
    LiveRuns runs{static_cast<const char*>(buffers[i]), buffer.dtype, buffer.elements, {}};
    for (const auto* pieces : {&plan.mine.weights, &plan.mine.reduced_gradients})
      for (const Piece& piece : *pieces)
        if (piece.buffer == i) runs.runs.emplace_back(piece.offset, piece.offset + piece.count);
    std::sort(runs.runs.begin(), runs.runs.end());
    if (!runs.runs.empty()) live.push_back(std::move(runs));
  }
  return live;
}
}  // namespace

Session::Session(Setup setup, Model& model, std::unique_ptr<RefreshState> before)
    : setup_(std::move(setup)),
      name_(setup_.engine, run_folder(config(), setup_.engine), config().text("checkpoint.dir")),
      model_(model),
      control_(setup_.control),
      accumulation_(static_cast<int>(config().integer("train.gradient_accumulation"))),
      loss_scale_(LossScaleKeys::of(config())),
      model_buffers_(model, buffer_rule(config())),
      pool_(threads_of(config(), *control_)),
      host_(ledger_, pool_) {
  const std::chrono::milliseconds timeout(static_cast<int64_t>(config().number("communicator.timeout") * 1e3));
  services_ = std::make_unique<JobServices>(host_, *control_, run_folder(config(), setup_.engine), timeout);
  strategy_ = std::make_unique<Instance>(host_, setup_.strategy, config(), table_of(setup_.strategy));
  optimizer_ = std::make_unique<Instance>(host_, setup_.optimizer, config(), table_of(setup_.optimizer));
  if (setup_.communicator)
    communicator_ = std::make_unique<Instance>(host_, *setup_.communicator, config(), table_of(*setup_.communicator));

  offer_async(host_);
  offer_machine_profile(host_);
  std::vector<std::unique_ptr<Instance>> tiers;
  for (const Component& tier : setup_.tiers)
    tiers.push_back(std::make_unique<Instance>(host_, tier, config(), table_of(tier)));

  PlanInput input = plan_input(config(), *optimizer_, model_.parameters(), world());
  add_tiers(input, setup_, tiers, control_->local_world(), communicator_bytes(communicator_.get(), world()).value_or(0),
            granularity_of(*optimizer_) == ZR_ELEMENTWISE);
  input.alias = control_->local_world() == world() && shares_weights(config(), setup_.communicator, world());
  group_rates_.assign(1, 1.0);
  for (const GroupConfig& group : config().groups()) group_rates_.push_back(group.lr_scale);
  plan_ = make_plan(input, rank(), strategy_plan(*strategy_));
  for (uint32_t i = 0; i < plan_.input.parameters.size(); ++i) {
    index_.emplace(plan_.input.parameters[i].name, i);
    for (const std::string& alias : plan_.input.parameters[i].aliases) index_.emplace(alias, i);
  }
  check_strategy();
  check_optimizer();
  check_offload(config(), plan_, setup_.strategy.table->id);
  check_budget();
  plan_.add_to(ledger_);
  if (rank() == 0 && std::getenv("ZR_PROGRESS")) {
    const PlanContext context = plan_context_of(setup_, communicator_.get(), world());
    const std::string title = "plan: " + std::string(setup_.strategy.table->id) + " + " + setup_.optimizer.table->id;
    std::fputs(plan_.text(title, context).c_str(), stdout);
    std::fflush(stdout);
  }

  CommRuntime::Options options;
  options.timeout = timeout;
  comm_ = std::make_unique<CommRuntime>(host_, control_, communicator_.get(), options);
  compare_ranks();
  saver_ = std::make_unique<Saver>(control_, ledger_);
  if (before) {
    recorder_ = std::move(before->recorder);
    trace_ = std::move(before->trace);
  } else {
    run_on_all_ranks(saver_->peers(),
                     [&] { recorder_ = std::make_unique<RunRecorder>(config(), setup_.engine, world(), rank()); });
    if (config().boolean("job.trace")) trace_ = std::make_unique<Trace>(rank());
  }
  if (trace_) comm_->set_trace(trace_.get());
  comm_->on_end([this](const zr_coll& coll, const void* dst) {
    if (step_sync_) step_sync_->norm().arrived(coll.dst, dst);
  });
  if (config().text("checkpoint.on_signal") == "save")
    stop_signal_ = before ? std::move(before->stop_signal) : std::make_unique<StopSignal>(control_);
  try {
    watch_budget();
    tiers_.resize(1);  // the device
    for (auto& tier : tiers)
      tiers_.push_back(std::make_unique<TierStore>(host_, std::move(tier), static_cast<int>(tiers_.size())));
    allocate();
    const CallCheck check_call = [this](zr_code code, const zr_error& e, const std::string& who) {
      call(code, e, who);
    };
    weight_flow_ = std::make_unique<WeightFlow>(model_, *strategy_, plan_, *comm_, use_, check_call,
                                                [this](uint32_t param, const void* full) { store_full(param, full); });
    take_rank_zero();
    weight_digest_ = std::make_unique<WeightDigest>(plan_, buffers_, readers_, world());
    step_sync_ = std::make_unique<StepSync>(*comm_, pool_, plan_, slices_, ledger_, disk_buffers_.get());
    gradients_ =
        std::make_unique<GradientFlow>(model_, *strategy_, plan_, *comm_, config().boolean("gradients.overlap"), use_,
                                       check_call, disk_buffers_.get());
    gradients_->watch(loss_scale_.watches());
  } catch (...) {
    release();
    throw;
  }
  model_.forget_peak();
  param_steps_.assign(plan_.input.parameters.size(), 0);
  reseed();
  restart_clock();
  try {
    prepare_saving(!before);
    before ? continue_from(*before) : begin();
    keep_activations();
    if (!before) accept();
  } catch (...) {
    release();
    throw;
  }
}

Session::~Session() {
  if (!comm_) return;
  const bool failed = std::uncaught_exceptions() > exceptions_;
  try {
    if (saver_) settle();  // what is being written
  } catch (const std::exception& failure) {
    log(ZR_LOG_ERROR, failure.what());
  }
  saver_.reset();
  // A failure after the last step, such as that of a last save, leaves the record of the steps complete.
  if (recorder_ && (!failed || done())) try {
      write_summary();
    } catch (const std::exception& failure) {
      log(ZR_LOG_ERROR, failure.what());
    }
  stop_signal_.reset();
  if (recorder_) control_->leave(step_, failed);  // else the next session continues the job
  release();
}

// Every check passed: from here on this run has a folder of its own.
void Session::accept() {
  const CheckpointComm peers = saver_->peers();
  run_on_all_ranks(peers, [&] {
    if (rank() == 0) recorder_->accept();
  });
  if (trace_) {
    const std::string folder = peers.broadcast(recorder_->folder());
    run_on_all_ranks(peers, [&] {
      trace_->open(Directory::open(folder, true).create("trace-" + std::to_string(rank()) + ".json"));
    });
  }
  const int64_t steps = config().integer("train.steps");
  if (step_ < steps) return;
  if (rank() == 0)
    log(ZR_LOG_INFO, "nothing is left to train: " + std::to_string(step_) + " steps are done, and train.steps is " +
                         std::to_string(steps) + " (" + config().origin("train.steps").text() +
                         "); raise train.steps to continue");
  write_totals();
}

Overlap Session::overlap() const {
  const NormBlocks& norm = step_sync_->norm();
  Overlap all = overlap_before_;
  all.collectives += gradients_->collectives();
  all.early += gradients_->collectives_early();
  all.norm_blocks += norm.own();
  all.norm_blocks_early += norm.early();
  all.paged_reads += disk_buffers_ ? disk_buffers_->reads() : 0;
  all.paged_reads_ahead += disk_buffers_ ? disk_buffers_->reads_ahead() : 0;
  return all;
}

// The parameters outlive the arena they stand in.
void Session::release() {
  saver_.reset();
  ledger_.on_change(Tier::device, {});
  ledger_.on_change(Tier::host, {});
  model_.offload_saved_tensors({});
  activations_.reset();
  comm_->on_end({});
  model_.limit_temporaries(0, {});
  model_.on_gradient({});
  gradients_.reset();
  step_sync_.reset();
  states_.reset();
  comm_->set_collective_staging(nullptr);
  disk_buffers_.reset();
  // The model takes memory of its own for its weights: what they did not stand in goes before.
  const auto holds_weights = [&](std::size_t i) {
    const uint32_t role = plan_.mine.buffers[i].role;
    return role == ZR_ROLE_WEIGHT || role == ZR_ROLE_WEIGHT_SHARD || role == ZR_ROLE_ALL_GATHER;
  };
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (!holds_weights(i)) comm_->free(buffers_[i]);
  model_.release();
  weight_flow_.reset();
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (holds_weights(i)) comm_->free(buffers_[i]);
}

void Session::keep_activations() {
  const int place = plan_.placement.activations;
  if (place == 0) return;
  activations_ = std::make_unique<ActivationStore>(*tiers_[static_cast<std::size_t>(place)], ledger_,
                                                   plan_.activation_staging_bytes());
  ActivationStore& tier = *activations_;
  model_.offload_saved_tensors({config().integer("offload.activation_bytes"),
                                [&tier](const void* data, int64_t bytes) { return tier.put(data, bytes); },
                                [&tier](uint64_t record, void* to) { tier.get(record, to); },
                                [&tier](const std::vector<uint64_t>& records) { tier.prefetch(records); },
                                [&tier](uint64_t record) { tier.drop(record); }});
}

void Session::allocate() {
  const auto kind = [](uint32_t role) {
    return role == ZR_ROLE_WEIGHT || role == ZR_ROLE_WEIGHT_SHARD ? MemoryKind::weights
           : role == ZR_ROLE_BUCKET                               ? MemoryKind::buckets
           : role == ZR_ROLE_ALL_GATHER                           ? MemoryKind::gather_buffer
                                                                  : MemoryKind::gradients;
  };
  if (plan_disk_staging(plan_).any) {
    disk_buffers_ = std::make_unique<DiskBackedBuffers>(plan_, tiers_, *comm_, ledger_);
    comm_->set_collective_staging(disk_buffers_.get());
  }
  std::vector<zr_view> views;
  for (const Buffer& b : plan_.mine.buffers) {
    const int64_t bytes = b.elements * size_of(b.dtype);
    if (void* paged = disk_buffers_ ? disk_buffers_->base(views.size()) : nullptr) {
      buffers_.push_back(paged);
      readers_.push_back(nullptr);
    } else if (b.alias) {
      const auto [writer, reader] =
          comm_->allocate_shared(bytes, b.bytes(rank(), world()), Tier::device, kind(b.role), b.tag);
      buffers_.push_back(writer);
      readers_.push_back(reader);
    } else {
      const TierInfo& place = plan_.input.tiers[static_cast<std::size_t>(plan_.tier_of(b))];
      buffers_.push_back(comm_->allocate(bytes, 64, place.tier, kind(b.role), b.tag));
      readers_.push_back(nullptr);
    }
    views.push_back({buffers_.back(), b.elements, b.dtype, 0, {1, 0}});
  }
  for (LiveRuns& live : live_runs(plan_, buffers_)) comm_->set_live(std::move(live));
  if (trace_)
    for (const auto& tier : tiers_)
      if (tier) tier->set_trace(trace_.get());
  states_ = std::make_unique<OptimizerStates>(plan_, tiers_, ledger_);
  if (trace_)
    states_->on_wait([this](const char* what, Trace::Time begin) {
      trace_->span("training", what, begin, Trace::Time::clock::now());
    });
  make_slices(views);
  plan_view_ = std::make_unique<PlanInputView>(plan_.input, rank());
  const zr_bind bind{sizeof(zr_bind), static_cast<uint32_t>(views.size()), views.data(), comm_->ref()};
  CallError error;
  call(strategy_->api<zr_strategy_api>()->bind(strategy_->self(), &plan_view_->in(), &bind, &error), error,
       strategy_->who("bind"));
}

// One for each piece of sums, or each part of it whose states stand on one place.
void Session::make_slices(const std::vector<zr_view>& views) {
  const RankPlan& mine = plan_.mine;
  const std::size_t arrays = plan_.state_arrays().size(), params = plan_.input.parameters.size();
  weights_of_ = ByParam(mine.weights, params);
  for (std::size_t i = 0; i < mine.reduced_gradients.size(); ++i) {
    const Piece& sum = mine.reduced_gradients[i];
    const Piece* weight = nullptr;
    for (const uint32_t w : weights_of_[sum.param]) {
      const Piece& one = mine.weights[w];
      if (!weight && one.first <= sum.first && sum.first + sum.count <= one.first + one.count) weight = &one;
    }
    if (!weight)
      fail_bug(strategy_->who("plan") + " updates '" + plan_.input.parameters[sum.param].name +
               "' where it has no weights");
    for (const StateRun& run : states_->runs(mine.state_offset[i], sum.count)) {
      const int64_t skip = run.first - mine.state_offset[i], first = sum.first + skip;
      UpdateSlice slice{sum.param, first,
                        run.count, part_of(views[weight->buffer], weight->offset + first - weight->first, run.count),
                        {},        part_of(views[sum.buffer], sum.offset + skip, run.count),
                        {},        run.first,
                        run.tier};
      for (std::size_t a = 0; a < arrays; ++a) {
        const zr_view view = states_->view(a, run.first, run.count);
        if (plan_.has_master && a == 0)
          slice.master = view;
        else
          slice.slots.push_back(view);
      }
      if (states_->in_memory(run.tier)) (run.tier == 0 ? direct_ : staged_).push_back(slice);
      slices_.push_back(std::move(slice));
    }
  }
  slices_of_ = ByParam(slices_, params);
}

void Session::take_rank_zero() {
  const RankPlan& mine = plan_.mine;
  int64_t largest = 0;
  for (const Parameter& p : plan_.input.parameters) largest = std::max(largest, p.count);
  auto* values =
      static_cast<float*>(comm_->allocate(largest * 4, 64, Tier::device, MemoryKind::other, "start of training"));
  // `own` is rank 0's; to every rank, by way of memory that peers can read.
  const auto take = [&](uint32_t param, const float* own) {
    const int64_t count = plan_.input.parameters[param].count;
    if (rank() == 0 && own != values) std::memcpy(values, own, static_cast<std::size_t>(count) * 4);
    zr_coll broadcast{};
    broadcast.op = ZR_BROADCAST;
    broadcast.src = broadcast.dst = {values, count, ZR_F32, 0, {1, 0}};
    broadcast.label = "rank 0's parameters";
    comm_->run_control(broadcast);
    store(param, values);
  };
  if (model_.deferred() > 0) {
    model_.construct({values, take, [&](uint32_t param, float* out) { read(param, LogicalRole::value, "", out); },
                      [&](int64_t bytes) { ledger_.add(Tier::device, MemoryKind::other, "start of training", bytes); }},
                     rank() == 0);
  } else {
    for (uint32_t param = 0; param < plan_.input.parameters.size(); ++param) {
      if (rank() == 0) model_.read(param, values);
      take(param, values);
    }
  }
  comm_->free(values);
  for (const ModelBuffer& buffer : model_.buffers()) {
    const std::string bytes = comm_->broadcast_bytes(
        std::string(static_cast<const char*>(buffer.data), static_cast<std::size_t>(buffer.bytes)), 0,
        "rank 0's buffers");
    std::memcpy(buffer.data, bytes.data(), bytes.size());
  }
  comm_->barrier("start of training");  // shared weights are written by their owners
  const zr_dtype dtype = plan_.input.weight_dtype;
  for (const Piece& piece : mine.weights) {
    if (piece.shard || piece.count != plan_.input.parameters[piece.param].count) continue;
    const int64_t offset = piece.offset * size_of(dtype);
    if (const void* reader = readers_[piece.buffer])
      model_.bind_shared(piece.param, static_cast<const char*>(reader) + offset, dtype);
    else
      model_.bind(piece.param, static_cast<char*>(buffers_[piece.buffer]) + offset, dtype);
  }
  weight_flow_->start();
  if (!plan_.has_master) return;
  std::vector<const UpdateSlice*> bound;  // of weights that the program can point to
  for (const UpdateSlice& slice : slices_)
    for (const uint32_t w : weights_of_[slice.param])
      if (const Piece& piece = mine.weights[w];
          !piece.shard && piece.count == plan_.input.parameters[slice.param].count && !readers_[piece.buffer])
        bound.push_back(&slice);
  weight_samples_ = WeightSamples(std::move(bound));
}

}  // namespace zr::host
