#include "model/operator_observer.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <set>
#include <string>
#include <unordered_map>

namespace zr::host::model {

namespace {
thread_local OperatorObserver* innermost_observer = nullptr;
thread_local int running_operators = 0;   // observed operators of this thread that are running
thread_local bool observers_run = false;  // an observer runs operators
thread_local int filling_operators = 0;   // that are running

// In destructors of static objects, the thread-local objects of the main thread, libtorch's too, exist no longer.
thread_local bool thread_ends = false;
struct ThreadEnd {
  ~ThreadEnd() { thread_ends = true; }
};
thread_local ThreadEnd thread_end;

// Their kernels write running statistics, but their schemas do not say so.
const std::set<std::string> kUpdateStatistics{"aten::batch_norm",        "aten::_batch_norm_impl_index",
                                              "aten::native_batch_norm", "aten::cudnn_batch_norm",
                                              "aten::miopen_batch_norm", "aten::instance_norm"};

bool takes_generator(const c10::OperatorHandle& op) {
  for (const c10::Argument& argument : op.schema().arguments())
    if (argument.type()->str().find("Generator") != std::string::npos) return true;
  return false;
}

bool is_drawing(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;  // the operators it calls
  return op.hasTag(at::Tag::nondeterministic_seeded) || takes_generator(op);
}

ObservedOperator examine_operator(const at::RecordFunction& call) {
  ObservedOperator traits;
  traits.name = call.name();
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!op) return traits;
  const auto& arguments = op->schema().arguments();
  traits.arguments = arguments.size();
  const bool generator = takes_generator(*op);  // bernoulli_(0.0, generator) advances the generator
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i].name();
    traits.writes.push_back(arguments[i].alias_info() && arguments[i].alias_info()->isWrite());
    if (!generator && (argument == "dropout_p" || argument == "p" || argument == "dropout"))
      traits.probability = static_cast<int>(i);
    if (argument == "training" || argument == "train" || argument == "use_input_stats")
      traits.training = static_cast<int>(i);
  }
  for (std::size_t i = 1; i < arguments.size(); ++i)
    traits.fills |= traits.writes[i] && !arguments[i].kwarg_only() && arguments[i].name().rfind("running_", 0) != 0;
  traits.draws = is_drawing(*op);
  traits.reshapes = op->hasTag(at::Tag::inplace_view);
  for (std::size_t i = 0; i < arguments.size(); ++i) traits.reshapes |= traits.writes[i] && arguments[i].kwarg_only();
  traits.statistics = kUpdateStatistics.count(name->name) > 0;
  traits.casts = name->name == "aten::to" || name->name == "aten::_to_copy";
  if (traits.statistics)
    for (std::size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "running_mean" || arguments[i].name() == "running_var") traits.writes[i] = true;
  return traits;
}

// By the address of the schema's name: each schema has its own.
const ObservedOperator& observed_operator(const at::RecordFunction& call) {
  thread_local auto& known = *new std::unordered_map<const char*, ObservedOperator>;  // never destroyed
  const auto at = known.find(call.name());
  return at != known.end() ? at->second : known.emplace(call.name(), examine_operator(call)).first->second;
}

struct ObserversRun {
  ObserversRun() { observers_run = true; }
  ~ObserversRun() { observers_run = false; }
};
}  // namespace

bool OperatorCall::in_training() const {
  if (traits.training < 0) return true;
  const c10::IValue& value = arguments[static_cast<std::size_t>(traits.training)];
  return !value.isBool() || value.toBool();
}

bool OperatorCall::draws() const {
  if (!traits.draws || !in_training()) return false;
  if (traits.probability < 0) return true;
  const c10::IValue& value = arguments[static_cast<std::size_t>(traits.probability)];
  return !value.isDouble() || value.toDouble() != 0;
}

bool OperatorCall::writes(std::size_t argument) const {
  return traits.writes[argument] && (!traits.statistics || in_training());
}

struct OperatorObserver::Callbacks {
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    ++running_operators;
    if (observers_run || !innermost_observer) return nullptr;
    const ObserversRun pause;
    const ObservedOperator& traits = observed_operator(function);
    auto arguments = function.inputs();  // of a boxed call: the whole stack, whose last elements they are
    if (arguments.size() < traits.arguments) return nullptr;
    arguments = arguments.slice(arguments.size() - traits.arguments);
    for (OperatorObserver* observer = innermost_observer; observer; observer = observer->outer_)
      observer->begins({traits, arguments, running_operators - observer->depth_});
    return nullptr;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext*) {
    if (!observers_run && !function.outputs().empty()) {
      const ObserversRun pause;
      for (OperatorObserver* observer = innermost_observer; observer; observer = observer->outer_)
        if (running_operators - observer->depth_ == 1) observer->ended(function.outputs());
    }
    --running_operators;
  }
};

OperatorObserver::OperatorObserver() : outer_(innermost_observer), depth_(running_operators) {
  if (!outer_)
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&Callbacks::begin, &Callbacks::end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  innermost_observer = this;
}

OperatorObserver::~OperatorObserver() {
  innermost_observer = outer_;
  if (!outer_) at::removeCallback(handle_);
}

FillingOperators::FillingOperators()
    : handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(
              [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
                if (!thread_ends && observed_operator(function).fills) ++filling_operators;
                return nullptr;
              },
              [](const at::RecordFunction& function, at::ObserverContext*) {
                if (!thread_ends && observed_operator(function).fills) --filling_operators;
              })
              .scopes({at::RecordScope::FUNCTION}))) {
  (void)&thread_end;  // made after libtorch's object, so it ends before that
}

FillingOperators::~FillingOperators() {
  if (!thread_ends) at::removeCallback(handle_);
}

bool FillingOperators::running() { return filling_operators > 0; }

}  // namespace zr::host::model
