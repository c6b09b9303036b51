#include "conform/final_gradients.hpp"

#include <algorithm>
#include <cstring>

#include "conform/case.hpp"
#include "conform/reference_collective.hpp"
#include "zr/names.hpp"

namespace zr::conform {

FinalGradients::FinalGradients(const RankPlan& plan, const std::vector<char*>& buffers, zr_dtype dtype)
    : size_(size_of(dtype)) {
  const MutexLock lock(mutex_);
  for (const PlannedPiece& piece : plan.pieces) {
    if (piece.role != ZR_ROLE_REDUCED_GRAD) continue;
    const auto count = static_cast<std::size_t>(piece.count);
    pieces_.push_back({piece.param, piece.first, buffers[piece.buffer] + piece.offset * size_,
                       std::vector<char>(count * static_cast<std::size_t>(size_)), std::vector<char>(count)});
  }
}

void FinalGradients::begin(std::size_t first) {
  const MutexLock lock(mutex_);
  first_ = first;
  for (Piece& piece : pieces_) std::ranges::fill(piece.used, 0);
}

void FinalGradients::used(std::size_t number, const zr_coll& coll, int rank) {
  const MutexLock lock(mutex_);
  if (number < first_) return;
  const auto store = [&](const zr_view& view) ZR_REQUIRES(mutex_) {
    const char *begin = static_cast<const char*>(view.data), *end = begin + view.count * size_of(view.dtype);
    for (Piece& piece : pieces_) {
      const auto bytes = std::ssize(piece.bytes);
      const auto from = std::clamp<std::ptrdiff_t>(begin - piece.memory, 0, bytes),
                 to = std::clamp<std::ptrdiff_t>(end - piece.memory, 0, bytes);
      if (from >= to) continue;
      std::memcpy(piece.bytes.data() + from, piece.memory + from, static_cast<std::size_t>(to - from));
      std::fill(piece.used.begin() + from / size_, piece.used.begin() + to / size_, 1);
    }
  };
  if (reads_src(coll, rank)) store(coll.src);
  if (writes_dst(coll, rank)) store(coll.dst);
}

void FinalGradients::check() const {
  const MutexLock lock(mutex_);
  for (const Piece& piece : pieces_)
    for (std::size_t i = 0; i < piece.used.size(); ++i) {
      const std::size_t at = i * static_cast<std::size_t>(size_);
      require(!piece.used[i] ||
                  std::memcmp(piece.bytes.data() + at, piece.memory + at, static_cast<std::size_t>(size_)) == 0,
              "it changed element ", piece.first + static_cast<int64_t>(i), " of the reduced gradient of parameter ",
              piece.param, " after the last collective that used it");
    }
}

}  // namespace zr::conform
