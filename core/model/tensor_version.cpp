#include "model/tensor_version.hpp"

#include <sstream>

#include "base/error.hpp"
#include "model/saved_tensor_scope.hpp"

namespace zr::host::model {

namespace {
// libtorch has no public identity of a counter; an explicit instantiation may name a private member.
const void* counter_of(const c10::VariableVersion& version);
template <auto Member>
struct PrivateMember {
  friend const void* counter_of(const c10::VariableVersion& version) { return (version.*Member).get(); }
};
template struct PrivateMember<&c10::VariableVersion::version_counter_>;
}  // namespace

std::vector<int64_t> sizes_of(const torch::Tensor& tensor) {
  return tensor.is_nested() ? std::vector<int64_t>{tensor.numel()} : tensor.sizes().vec();
}

const void* TensorVersion::identity(const c10::VariableVersion& counter) { return counter_of(counter); }

int64_t TensorVersion::number(const c10::VariableVersion& counter) {
  return counter.enabled() ? counter.current_version() : 0;
}

TensorVersion::TensorVersion(const torch::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      number_(number(counter_)),
      parameter_(is_free_to_save(tensor)),
      sizes_(sizes_of(tensor)) {}

TensorVersion TensorVersion::now() const {
  TensorVersion version = *this;
  version.number_ = number(counter_);
  return version;
}

void TensorVersion::restore() const {
  if (!counter_.enabled()) return;
  c10::VariableVersion shared = counter_;
  shared.set_version(number_);
}

std::string TensorVersion::tensor() const {
  std::ostringstream text;
  text << (parameter_ ? "a parameter " : "a tensor ") << at::IntArrayRef(sizes_);
  return text.str();
}

void TensorVersion::check_saved() const {
  if (is_current()) return;
  fail_user("backward needs " + tensor() + " that was changed in place after forward had saved it; " +
            (parameter_ ? "change it after backward" : "change a copy"));
}

}  // namespace zr::host::model
