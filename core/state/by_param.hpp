// Index of a list by parameter: finds a parameter's elements without a scan of the list.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zr::host::state {

/// Maps a parameter to the indices of the list elements whose `param` it is, in the list's order. The list must not
/// change afterwards.
class ByParam {
 public:
  ByParam() = default;
  /// `params`: number of parameters; every element's `param` is less than it.
  template <class T>
  ByParam(const std::vector<T>& list, std::size_t params) : begin_(params + 1), index_(list.size()) {
    for (const T& element : list) ++begin_[element.param + 1];
    for (std::size_t i = 0; i < params; ++i) begin_[i + 1] += begin_[i];
    std::vector<uint32_t> next(begin_.begin(), begin_.end() - 1);
    for (uint32_t i = 0; i < list.size(); ++i) index_[next[list[i].param]++] = i;
  }
  std::span<const uint32_t> operator[](uint32_t param) const {
    return std::span(index_).subspan(begin_[param], begin_[param + 1] - begin_[param]);
  }

 private:
  std::vector<uint32_t> begin_, index_;
};

}  // namespace zr::host::state
