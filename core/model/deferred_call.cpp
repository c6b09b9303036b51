#include "model/deferred_call.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace zr::host::model {

namespace {
bool is_tensor_type(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  if (type->kind() == c10::TypeKind::ListType || type->kind() == c10::TypeKind::OptionalType)
    return is_tensor_type(type->containedType(0));
  return false;
}
}  // namespace

Construction::Traits::Traits(const c10::OperatorHandle& op) {
  static const auto& fill = *new std::unordered_set<std::string>{"aten::zeros", "aten::ones",  "aten::full",
                                                                 "aten::rand",  "aten::randn", "aten::randint"};
  static const auto& empties = *new std::unordered_set<std::string>{
      "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"};
  const auto& schema = op.schema();
  const auto is_written = [](const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); };
  view = is_view(schema);
  metadata = op.hasTag(at::Tag::inplace_view);
  writes = std::any_of(schema.arguments().begin(), schema.arguments().end(), is_written);
  makes_tensors = std::any_of(schema.returns().begin(), schema.returns().end(),
                              [](const c10::Argument& result) { return is_tensor_type(result.type()); });
  empty = empties.count(schema.name()) > 0;
  // A factory that fills what at::empty made needs the memory of one tensor then, not of two.
  composite = !empty &&
              (fill.count(schema.name()) || (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                                             !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)));
}

const Construction::Traits& Construction::Traits::of(const c10::OperatorHandle& op) {
  thread_local auto& known = *new std::unordered_map<const c10::FunctionSchema*, Traits>;  // never destroyed
  const auto found = known.find(&op.schema());
  return found != known.end() ? found->second : known.emplace(&op.schema(), Traits(op)).first->second;
}

void check_leaf(const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return;
  TORCH_CHECK(!tensor.is_leaf(), "a leaf Variable that requires grad is being used in an in-place operation.");
  TORCH_CHECK(!tensor.is_view() || !tensor._base().is_leaf(),
              "a view of a leaf Variable that requires grad is being used in an in-place operation.");
}

}  // namespace zr::host::model
