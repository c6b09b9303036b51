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

/// Number formats of the operands and results of the matrix products.
enum class Precision { fp32, bf16 };

/// Thread-safe.
class NewtonSchulz {
 public:
  /// Throws zr::PluginError if oneDNN has no products for this processor. `host` counts the memory; the first update
  /// logs a line if the processor has no bf16 products: they are then calculated in fp32 and rounded.
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
  // Products are calculated in fp32 and rounded.
  bool emulates_bf16() const { return precision_ == Precision::bf16 && !stores_bf16_; }
  void count_memory(int64_t bytes) const;
  void report_missing_instructions() const;
  void normalize(float* matrix, int64_t count, double least_norm) const;
  void round_result(void* result, int64_t count) const;

  const zr::Host host_;
  const Precision precision_;
  const int iterations_;
  bool stores_bf16_ = false;  // operands and results in memory; fp32 otherwise
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, Pool> pools_;  // by rows and columns
  int64_t bytes_ = 0;                                  // of all workspaces
};

}  // namespace muon
