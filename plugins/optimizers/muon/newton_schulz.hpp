// The Newton-Schulz iteration of Muon: replaces the singular values of a matrix by values near 1. The matrix products
// are oneDNN's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "zr/base.hpp"

namespace muon {

/// Number formats of the matrix products.
enum class Precision { fp32, bf16 };

/// Thread-safe.
class NewtonSchulz {
 public:
  /// Throws zr::PluginError if oneDNN has no products of this precision on this processor. `host` counts the memory.
  NewtonSchulz(const zr::Host& host, Precision precision, int iterations);
  ~NewtonSchulz();
  NewtonSchulz(const NewtonSchulz&) = delete;

  /// A matrix of at most as many rows as columns, row by row, and the memory of the iteration. Allocated at the first
  /// use of a size by one thread more than before; kept until the NewtonSchulz is destroyed.
  class Workspace;
  /// Takes a workspace for a matrix; give() returns it.
  Workspace* take(int64_t rows, int64_t columns);
  void give(Workspace* workspace) noexcept;
  /// The elements of the matrix, in and out.
  static float* matrix(Workspace& workspace);
  /// Divides the matrix by its Frobenius norm, or by `least_norm` if that is larger, and iterates. One thread.
  void run(Workspace& workspace, double least_norm) const;

 private:
  struct Pool {
    std::vector<std::unique_ptr<Workspace>> idle;
    std::size_t made = 0;
  };
  void count_memory(int64_t bytes) const;

  const zr::Host host_;
  const Precision precision_;
  const int iterations_;
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, Pool> pools_;  // by rows and columns
  int64_t bytes_ = 0;                                  // of all workspaces
};

}  // namespace muon
