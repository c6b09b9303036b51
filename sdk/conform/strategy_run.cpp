#include "conform/strategy_run.hpp"

#include <algorithm>
#include <future>
#include <thread>

#include "conform/use.hpp"
#include "zr/float_cast.hpp"
#include "zr/names.hpp"

namespace zr::conform {

namespace {

constexpr double kWaitSeconds = 5;
constexpr uint32_t kUnknownPhase = 99;
constexpr const char* kOtherRank = "another rank has failed";

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// In (-1, 1), over several decades; representable in bf16 if `is_bf16`.
float number(uint64_t seed, bool is_bf16) {
  static constexpr float kScales[] = {1, 0.1f, 1e-2f, 1e-3f, 30};
  const uint64_t x = mix(seed + 0x9e3779b97f4a7c15u);
  const float value = static_cast<float>(static_cast<int32_t>(x >> 32)) * 0x1p-31f * kScales[x % 5];
  return is_bf16 ? from_bf16(to_bf16(value)) : value;
}

std::size_t bytes_of(int64_t count, zr_dtype dtype) { return static_cast<std::size_t>(count * size_of(dtype)); }
float load(const char* data, int64_t i, zr_dtype dtype) {
  if (dtype == ZR_F32) return reinterpret_cast<const float*>(data)[i];
  return from_bf16(reinterpret_cast<const uint16_t*>(data)[i]);
}
void store(char* data, int64_t i, zr_dtype dtype, float value) {
  if (dtype == ZR_F32)
    reinterpret_cast<float*>(data)[i] = value;
  else
    reinterpret_cast<uint16_t*>(data)[i] = to_bf16(value);
}

float gradient(const StrategyOptions& options, int number_of_step, int micro, int rank, uint32_t param, int64_t i) {
  const uint64_t where = static_cast<uint64_t>((number_of_step * 64 + micro) * 64 + rank) << 40;
  return number(options.seed + where + (static_cast<uint64_t>(param) << 24) + static_cast<uint64_t>(i),
                options.request.grad_dtype == ZR_BF16);
}

StepShape shape_of(const PlanRequest& request) {
  StepShape shape{.accumulation = request.accumulation, .holds = request.holds()};
  for (const ModelParameter& parameter : request.params) shape.params.push_back({parameter.count, parameter.frozen});
  return shape;
}

}  // namespace

SharedRun::SharedRun(const StrategyOptions& run_options, int ranks)
    : options(run_options),
      device(run_options.device_type == ZR_DEVICE_CPU ? nullptr
                                                      : std::make_unique<SimulatedDevice>(run_options.device_type)),
      world({ranks, run_options.lazy, run_options.mode.longer_structs, run_options.fail_at.value_or(~uint64_t{0}),
             run_options.code, device.get()}),
      barrier(ranks) {}

StrategyRank::StrategyRank(SharedRun& shared, Instance& instance, int rank)
    : StrategyStep(shape_of(shared.options.request)),
      shared_(shared),
      options_(shared.options),
      instance_(instance),
      api_(instance.api<zr_strategy_api>()),
      request_(shared.options.request),
      bound_loan_(shared.options.mode) {
  request_.rank = rank;
  for (uint32_t p = 0; p < request_.params.size(); ++p) {
    std::vector<float>& values = weights_.emplace_back(static_cast<std::size_t>(request_.params[p].count));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = number(options_.seed * 77 + (uint64_t{p} << 32) + i, request_.weight_dtype == ZR_BF16);
  }
}

// ---- calls

template <class F>
Answer StrategyRank::call_from_any_thread(const std::string& name, F&& fn) {
  if (!options_.other_threads) return call(name, fn);
  return std::async(std::launch::async, [&] { return call(name, fn); }).get();
}

void StrategyRank::check(const std::string& name, const Answer& answer) const {
  if (answer.ok()) return;
  if (options_.fail_at) throw FailedCall{name, answer.code};
  fail(name, " ", answer.said());
}

template <class F>
void StrategyRank::call_with_use(const std::string& name, Tag tag, const zr_use& use, bool may_complete, F&& fn) {
  ArgumentMemory arguments(options_.mode);
  zr_use given = completed(use);
  Completion* done = nullptr;
  if (may_complete && options_.completions) {
    done = &instance_.host().new_completion();
    given.done = done->abi();
  }
  const zr_use* passed = arguments.sized(given);
  const auto with_use = [&](zr_error* error) { return fn(passed, error); };
  check(name, tag == Tag::use ? call_from_any_thread(name, with_use) : call(name, with_use));
  if (!done) return;
  require(instance_.host().wait(*done, kWaitSeconds), name, " with a completion never resolves it");
  require(done->code() == ZR_OK, "the completion of ", name, " was resolved with ", code_text(done->code()));
}

zr_use StrategyRank::completed(zr_use use) const {
  if (options_.unknown) use.flags |= 1u << 30;
  if (shared_.device) use.stream = shared_.device->stream(request_.rank);
  return use;
}

void StrategyRank::event(uint32_t kind, const zr_use& use) {
  call_with_use("event()", Tag::use, use, false, [&](const zr_use* passed, zr_error* error) {
    return api_.event(instance_.self(), kind, passed, error);
  });
}

// ---- memory

char* StrategyRank::make_buffer(std::size_t bytes, char*& address) {
  if (shared_.device) {
    address = shared_.device->allocate(bytes);
    return shared_.device->backing(address);
  }
  auto memory = std::make_unique<Array>(bytes, 4096);
  std::memset(memory->data(), 0, memory->size());
  address = memory->data();
  own_buffers_.push_back(std::move(memory));
  return address;
}

void StrategyRank::on_memory(std::function<void()> work) {
  shared_.device ? shared_.world.enqueue(request_.rank, std::move(work)) : work();
}

void StrategyRank::synchronize() {
  if (shared_.device) shared_.world.synchronize(request_.rank);
}

// ---- start

void StrategyRank::bind() {
  const MutexLock lock(shared_.control);
  plan_ = plan_rank(api_, instance_.self(), request_, options_.mode);
  if (const std::string problem = problem_of(plan_, request_); !problem.empty())
    skip("it cannot be checked, because the plan is invalid (ZR-S02): ", problem);
  std::vector<zr_view> views;
  for (std::size_t i = 0; i < plan_.buffers.size(); ++i) {
    const PlannedBuffer& buffer = plan_.buffers[i];
    char* address = nullptr;
    if (buffer.flags & ZR_BUFFER_SHARED) {
      const MutexLock shared_lock(shared_.mutex);
      const bool several = request_.flags & ZR_PLAN_SHARE_ON_HOSTS;
      auto& memory = shared_.shared_buffers[{several ? host_of_rank(request_.rank, request_.world) : 0, i}];
      if (!memory) {
        memory = std::make_unique<Array>(bytes_of(buffer.elements, buffer.dtype), 4096);
        std::memset(memory->data(), 0, memory->size());
      }
      buffers_.push_back(address = memory->data());
    } else {
      buffers_.push_back(make_buffer(bytes_of(buffer.elements, buffer.dtype), address));
    }
    views.push_back({address, buffer.elements, buffer.dtype, 0, device()});
  }
  for (uint32_t p = 0; p < request_.params.size(); ++p)
    if (request_.params[p].count > 0 && !plan_.is_full_weight(request_.params[p], p)) gathered_.push_back(p);
  if (!gathered_.empty() && (!api_.acquire || !api_.release))
    skip("it cannot be checked, because a rank does not hold all weights, but acquire or release is NULL (ZR-S06)");
  ArgumentMemory arguments(options_.mode);
  const zr_plan_in* in = plan_in_of(bound_loan_, request_);  // valid until destroy()
  zr_bind bound{};
  bound.n_buffers = static_cast<uint32_t>(views.size());
  bound.buffers = arguments.list(views);
  bound.comm = shared_.world.ref(request_.rank);
  const zr_bind* passed = arguments.sized(bound);
  if (options_.checks_last_use) {
    final_.emplace(plan_, buffers_, request_.reduced_grad_dtype);
    shared_.world.observe(
        request_.rank, [this](std::size_t number, const zr_coll& coll) { final_->used(number, coll, request_.rank); });
  }
  check("bind()", call("bind()", [&](zr_error* error) { return api_.bind(instance_.self(), in, passed, error); }));
}

void StrategyRank::run() {
  bind();
  publish(true);
  check_weights("after the weights were set");
  for (number_ = 0; number_ < options_.steps; ++number_) step();
  synchronize();
  for (const auto& buffer : own_buffers_)
    require(buffer->surroundings_are_intact(), "it wrote outside a buffer of its plan");
}

// ---- weights

// Writes the weights of this rank's REDUCED_GRAD pieces; with frozen_too, those of frozen parameters too.
void StrategyRank::set_own_weights(bool frozen_too) {
  for (const PlannedPiece& weight : plan_.pieces) {
    if (weight.role == ZR_ROLE_REDUCED_GRAD) continue;
    char* data = buffers_[weight.buffer];
    const std::vector<float>& values = weights_[weight.param];
    const auto set = [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i)
        store(data, weight.offset + i - weight.first, request_.weight_dtype, values[static_cast<std::size_t>(i)]);
    };
    if (request_.params[weight.param].frozen) {
      if (frozen_too) set(weight.first, weight.end());
      continue;
    }
    for (const PlannedPiece& own : plan_.pieces)
      if (own.role == ZR_ROLE_REDUCED_GRAD && own.param == weight.param)
        set(std::max(weight.first, own.first), std::min(weight.end(), own.end()));
  }
}

void StrategyRank::publish(bool frozen_too) {
  shared_.barrier.arrive_and_wait();  // no rank reads shared weights while others write them
  on_memory([this, frozen_too] { set_own_weights(frozen_too); });
  call_with_use("updated()", Tag::step, use_outside_steps(ZR_UPDATE_PHASE), true,
                [&](const zr_use* use, zr_error* error) { return api_.updated(instance_.self(), use, error); });
}

void StrategyRank::check_full(uint32_t param, const void* data, const char* when) const {
  if (!options_.checks_weights) return;
  const std::vector<float>& values = weights_[param];
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float actual = load(static_cast<const char*>(data), static_cast<int64_t>(i), request_.weight_dtype);
    require(bits_of(actual) == bits_of(values[i]), when, ", weight ", i, " of parameter ", param, " is ", actual,
            " on rank ", request_.rank, ", not ", values[i]);
  }
}

void StrategyRank::check_weights(const char* when) {
  for (const PlannedPiece& piece : plan_.pieces)
    if (piece.role == ZR_ROLE_WEIGHT)
      on_memory([this, &piece, when] {
        check_full(piece.param, buffers_[piece.buffer] + bytes_of(piece.offset, request_.weight_dtype), when);
      });
}

// A frozen parameter too; every rank acquires the same parameters in the same order.
void StrategyRank::acquire(const std::vector<uint32_t>& params, zr_use use) {
  std::vector<zr_view> full(params.size());
  ArgumentMemory arguments(options_.mode);
  const uint32_t* list = arguments.list(params);
  if (options_.unknown) use.phase = kUnknownPhase;
  call_with_use("acquire()", Tag::use, use, true, [&](const zr_use* passed, zr_error* error) {
    return api_.acquire(instance_.self(), list, static_cast<uint32_t>(params.size()), passed, full.data(), error);
  });
  for (std::size_t i = 0; i < params.size(); ++i) {
    const char* const memory = memory_at(full[i].data);
    require(memory && full[i].count == request_.params[params[i]].count && full[i].dtype == request_.weight_dtype &&
                full[i].flags == 0 && full[i].device.type == device().type,
            "acquire() returned an invalid view of parameter ", params[i]);
    on_memory([this, param = params[i], memory] { check_full(param, memory, "after acquire()"); });
  }
}

void StrategyRank::release(const std::vector<uint32_t>& params, zr_use use) {
  ArgumentMemory arguments(options_.mode);
  const uint32_t* list = arguments.list(params);
  if (options_.unknown) use.phase = kUnknownPhase;
  call_with_use("release()", Tag::use, use, false, [&](const zr_use* passed, zr_error* error) {
    return api_.release(instance_.self(), list, static_cast<uint32_t>(params.size()), passed, error);
  });
}

// Uses the parameters one after another: each while the one before is still in use, and the last three together.
void StrategyRank::use_in_order(const zr_use& use) {
  const std::size_t n = gathered_.size();
  for (std::size_t i = 0; i < n; ++i) {
    acquire({gathered_[i]}, use);
    if (i > 0) release({gathered_[i - 1]}, use);
  }
  if (n > 0) release({gathered_[n - 1]}, use);
  if (n < 3) return;
  const std::vector<uint32_t> last(gathered_.end() - 3, gathered_.end());
  acquire(last, use);
  release(last, use);
}

void StrategyRank::use_weights(const zr_use& use) {
  if (use.phase == ZR_FORWARD) return use_in_order(use);
  if (final_ && is_last_micro()) final_->begin(shared_.world.submitted(request_.rank));
  for (std::size_t i = gathered_.size(); i-- > 0;) {
    acquire({gathered_[i]}, use);
    release({gathered_[i]}, use);
  }
}

// ---- gradients

std::vector<uint32_t> StrategyRank::gradient_order(uint32_t part) const {
  std::vector<uint32_t> order = StrategyStep::gradient_order(part);
  if (options_.order == 0) return order;
  std::mt19937_64 random(mix(options_.order + static_cast<uint64_t>(number_ * 1000 + micro() * 100 + request_.rank)));
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

zr_code StrategyRank::grad_destination(uint32_t param, int64_t* first, const zr_use& use, zr_view* dst) {
  const int64_t from = *first;
  ArgumentMemory arguments(options_.mode);
  const zr_use* passed = arguments.sized(completed(use));
  const Answer answer = call_from_any_thread("grad_destination()", [&](zr_error* error) {
    return api_.grad_destination(instance_.self(), param, first, passed, dst, error);
  });
  if (answer.code == ZR_AGAIN) {
    if (request_.holds()) fail("grad_destination() returned ZR_AGAIN with ZR_PLAN_HOLD_GRADS");
    require(*first == from && !dst->data, "grad_destination() returned ZR_AGAIN, but changed its outputs");
    return ZR_AGAIN;
  }
  check("grad_destination()", answer);
  if (!memory_at(dst->data) || dst->dtype != request_.grad_dtype || dst->flags != 0)
    fail_destination("returned a destination of another dtype, at address 0 or of another device for " +
                     text_of(param));
  return ZR_OK;
}

void StrategyRank::write_gradient(uint32_t param, int64_t first, const zr_view& dst) {
  const Destination destination{memory_at(dst.data), dst.count};
  if (request_.holds()) {
    const auto [at, is_new] = held_.try_emplace({param, first}, destination);
    require(at->second.data == destination.data && at->second.count == dst.count &&
                is_new == (micro() == 0 && number_ == 0),
            "with ZR_PLAN_HOLD_GRADS, the destination of parameter ", param, " changed between micro-steps");
  }
  on_memory([this, param, step = number_, micro = micro(), first, destination] {
    write_values(param, step, micro, first, destination);
  });
}

void StrategyRank::write_values(uint32_t param, int step, int micro, int64_t first, const Destination& to) const {
  auto* data = static_cast<char*>(to.data);
  for (int64_t i = 0; i < to.count; ++i) {
    float value = gradient(options_, step, micro, request_.rank, param, first + i);
    if (request_.holds() && micro > 0) {
      float before = gradient(options_, step, 0, request_.rank, param, first + i);
      for (int m = 1; m < micro; ++m) before += gradient(options_, step, m, request_.rank, param, first + i);
      require(bits_of(load(data, i, request_.grad_dtype)) == bits_of(before),
              "it changed a held gradient of parameter ", param, " between micro-steps");
      value = before + value;
    }
    store(data, i, request_.grad_dtype, value);
  }
}

void StrategyRank::grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) {
  call_with_use("grad_ready()", Tag::use, use, false, [&](const zr_use* passed, zr_error* error) {
    return api_.grad_ready(instance_.self(), param, first, count, passed, error);
  });
}

void StrategyRank::step_begin(const zr_use& use) {
  event(ZR_STEP_BEGIN, use);
  if (options_.unknown) event(kUnknownPhase, use_outside_steps(kUnknownPhase));
}

void StrategyRank::backward_end(uint32_t, const zr_use& use) { event(ZR_BACKWARD_END, use); }

void StrategyRank::grads_finish(const zr_use& use) {
  call_with_use("grads_finish()", Tag::step, use, true, [&](const zr_use* passed, zr_error* error) {
    return api_.grads_finish(instance_.self(), passed, error);
  });
}

void StrategyRank::fail_destination(const std::string& problem) const { fail("grad_destination() ", problem); }

std::vector<float> StrategyRank::sum_of(uint32_t param) const {
  std::vector<float> sums(static_cast<std::size_t>(request_.params[param].count), 0.0f);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto value = [&](int micro, int rank) {
      return gradient(options_, number_, micro, rank, param, static_cast<int64_t>(i));
    };
    if (request_.holds()) {
      for (int rank = 0; rank < request_.world; ++rank) {
        float local = value(0, rank);
        for (int micro = 1; micro < request_.accumulation; ++micro) local += value(micro, rank);
        sums[i] += local;
      }
    } else {
      for (int micro = 0; micro < request_.accumulation; ++micro)
        for (int rank = 0; rank < request_.world; ++rank) sums[i] += value(micro, rank);
    }
  }
  return sums;
}

void StrategyRank::check_sums() {
  for (const PlannedPiece& piece : plan_.pieces) {
    if (piece.role != ZR_ROLE_REDUCED_GRAD || !options_.checks_sums) continue;
    const std::vector<float> sums = sum_of(piece.param);
    for (int64_t i = 0; i < piece.count; ++i) {
      const float actual = load(buffers_[piece.buffer], piece.offset + i, request_.reduced_grad_dtype);
      const float expected = sums[static_cast<std::size_t>(piece.first + i)];
      require(bits_of(actual) == bits_of(expected), "element ", piece.first + i,
              " of the reduced gradient of parameter ", piece.param, " is ", actual, " on rank ", request_.rank,
              ", not ", expected, " (the sum over micro-steps and ranks, in rank order)");
    }
  }
}

void StrategyRank::step() {
  reduce_gradients();
  if (final_) final_->check();
  synchronize();
  check_sums();
  if (!options_.skips || number_ != 1) {
    for (uint32_t p = 0; p < request_.params.size(); ++p) {
      if (request_.params[p].frozen) continue;
      const std::vector<float> sums = sum_of(p);
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const float value = weights_[p][i] - 0.125f * sums[i];
        weights_[p][i] = request_.weight_dtype == ZR_BF16 ? from_bf16(to_bf16(value)) : value;
      }
    }
    publish(false);
  }
  event(ZR_STEP_END, update_use());
  check_weights(options_.skips ? "after a step" : "after updated()");
  if (!options_.evaluates) return;
  event(ZR_EVAL_BEGIN, use_outside_steps(ZR_EVAL));
  use_in_order(use_outside_steps(ZR_EVAL));
  event(ZR_EVAL_END, use_outside_steps(ZR_EVAL));
}

// ---- jobs

namespace {
// Skips the rule if the plans of the job are invalid, or do not cover the model: other rules are about that.
void check_plans(Case& test, PlanRequest request, const KeyValues& values) {
  TestHost host;
  Instance instance(test, host, values);
  std::vector<RankPlan> plans;
  std::string problem;
  for (request.rank = 0; request.rank < request.world; ++request.rank) {
    plans.push_back(plan_rank(instance.api<zr_strategy_api>(), instance.self(), request, {}));
    if (problem.empty()) problem = problem_of(plans.back(), request);
  }
  if (problem.empty()) problem = coverage_problem(plans, request);
  if (!problem.empty()) skip("it cannot be checked, because a plan is invalid (ZR-S02, ZR-S03): ", problem);
}
}  // namespace

StrategyResult run_strategy(Case& test, const StrategyOptions& options) {
  const int ranks = options.request.world;
  SharedRun shared(options, ranks);
  StrategyResult result;
  result.failed_calls.resize(static_cast<std::size_t>(ranks));
  const Store store;
  KeyValues values = Instance::values_for(test);
  if (options.smallest_sizes) values = smallest_sizes(test.library().component(test.role(), test.id()), values);
  check_plans(test, options.request, values);
  const auto run_rank = [&](int rank) {
    TestHost host({.mode = options.mode, .rank = rank, .world = ranks, .store = &store, .device = shared.device.get()});
    host.on_wait = [&](Completion& completion) { return shared.world.wait(completion); };
    std::optional<Instance> instance;
    try {
      {
        const MutexLock lock(shared.control);
        instance.emplace(test, host, values);
      }
      StrategyRank(shared, *instance, rank).run();
      instance->check_host();
    } catch (const FailedCall& failed) {
      result.failed_calls[static_cast<std::size_t>(rank)] = failed;
    } catch (const Failure& failure) {
      const MutexLock lock(shared.mutex);
      if (shared.problem.empty()) shared.problem = failure.reason;
      shared.world.stop(kOtherRank);
    } catch (const Skipped& skipped) {
      const MutexLock lock(shared.mutex);
      shared.skipped = skipped.reason;
      shared.world.stop(kOtherRank);
    }
    shared.barrier.arrive_and_drop();
    shared.world.leave(rank);
    const MutexLock lock(shared.control);
    instance.reset();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run_rank, rank);
  for (std::thread& thread : threads) thread.join();
  const std::string problem = shared.world.problem();
  if (!problem.empty() && problem != kOtherRank) fail(problem);
  {
    const MutexLock lock(shared.mutex);
    if (!shared.problem.empty()) fail(shared.problem);
    if (!shared.skipped.empty()) throw Skipped{shared.skipped};
  }
  for (int rank = 0; rank < ranks; ++rank) result.traces.push_back(shared.world.trace(rank));
  return result;
}

void use_strategy(Instance& instance, const Mode& mode) {
  StrategyOptions options;
  options.mode = mode;
  options.request.params = {
      {"a", {2, 1000}, 2000, false}, {"b", {0}, 0, false}, {"c", {1025}, 1025, false}, {"d", {64}, 64, true}};
  options.request.accumulation = 2;
  options.checks_sums = options.checks_weights = false;  // the subjects of other rules
  SharedRun shared(options, 1);
  instance.host().on_wait = [&](Completion& completion) { return shared.world.wait(completion); };
  StrategyRank(shared, instance, 0).run();
}

}  // namespace zr::conform
