#include "model/reads_again.hpp"

#include <algorithm>

#include "model/placeholder.hpp"

namespace zr::host::model {

namespace {
// Something else than the saved tensors has the memory.
bool is_in_use(const WeakMemory& memory, const std::vector<torch::Tensor>& saved) {
  std::size_t count = 0;
  const void* const identity = memory._unsafe_get_target();
  for (const torch::Tensor& tensor : saved) count += memory_identity(tensor) == identity;
  return memory.use_count() > count;
}
}  // namespace

ReadsAgain::ReadsAgain(const MetMemories& first, const std::vector<torch::Tensor>& inputs) : first_(first) {
  for (const torch::Tensor& input : inputs)
    if (input.defined()) known_.emplace(memory_identity(input), false);
}

void ReadsAgain::begins(const OperatorCall& call) {
  if (call.depth != 1) return;
  for (const c10::IValue& argument : call.arguments)
    each_tensor(argument, [&](const torch::Tensor& tensor) { sees(tensor); });
}

void ReadsAgain::sees(const torch::Tensor& tensor) {
  c10::intrusive_ptr_target* const memory = memory_identity(tensor);
  if (known_.find(memory) != known_.end()) return;
  const auto met = first_.find(memory);
  const bool own = met != first_.end() && met->second.own;
  if ((met != first_.end() && !own) || tensor.is_inference() || Placeholder::find(tensor)) return;
  const bool temporary = tensor.dim() == 0 || !tensor.has_storage() || !tensor.storage().resizable();
  suspects_.push_back({weak_memory(memory), TensorVersion(tensor), tensor.scalar_type(), own, temporary});
  known_.emplace(memory, false);
}

void ReadsAgain::ended(const std::vector<c10::IValue>& results) {
  for (const c10::IValue& result : results)
    each_tensor(result, [&](const torch::Tensor& tensor) {
      c10::intrusive_ptr_target* const memory = memory_identity(tensor);
      const bool own = known_.emplace(memory, true).first->second;
      if (own && !suspects_.empty() && !first_.contains(memory))
        made_.push_back({weak_memory(memory), sizes_of(tensor), tensor.scalar_type()});
    });
}

std::string ReadsAgain::fault(const std::vector<torch::Tensor>& saved) const {
  for (const Suspect& suspect : suspects_) {
    if (!suspect.own && is_in_use(suspect.memory, saved))
      return "the block of zr::checkpoint uses " + suspect.tensor.tensor() +
             " when it is recomputed, which it did not use in its first run: a variable that it reads was assigned "
             "another tensor after the block had run, or set_data() gave a tensor other memory; do this after "
             "backward, or pass the tensor as an input";
    if (!suspect.own && suspect.temporary) continue;
    const bool replaced = std::ranges::any_of(made_, [&](const Made& made) {
      return made.sizes == suspect.tensor.sizes() && made.dtype == suspect.dtype && is_in_use(made.memory, saved);
    });
    if (replaced)
      return "the block of zr::checkpoint reads " + suspect.tensor.tensor() +
             " from a variable and assigns a new tensor to it, so it would continue from the result of its first "
             "run when it is recomputed; change the tensor in place, such as with copy_() under torch::NoGradGuard, "
             "or assign it outside the block";
  }
  return {};
}

}  // namespace zr::host::model
