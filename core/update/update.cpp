#include "update/update.hpp"

#include <algorithm>
#include <cstring>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "update/rounding.hpp"
#include "zr/fold.hpp"

namespace zr::host {

namespace {
constexpr int64_t kTile = 64 * kLeaf;
constexpr int64_t kCopiedTile = 16 * kLeaf;  // the copies stay in a core's cache
constexpr int64_t kLine = 64;                // bytes
constexpr int64_t kAhead = 4096;             // bytes that are on their way to a copy

struct Tile {
  const Unit* unit;
  int64_t begin, count;
};

std::vector<Tile> cut(const std::vector<Unit>& units, const UpdateInput& input, bool elementwise) {
  std::vector<Tile> tiles;
  for (const Unit& unit : units) {
    if (!(*input.touched)[unit.param]) continue;
    const bool copied = input.staged || unit.sum.dtype != ZR_F32;
    const int64_t size = !elementwise ? unit.count : copied ? kCopiedTile : kTile;
    for (int64_t begin = 0; begin < unit.count; begin += size)
      tiles.push_back({&unit, begin, std::min(size, unit.count - begin)});
  }
  return tiles;
}

struct Copy {
  const void* from;
  void* to;
  int64_t bytes;
};

// Both at once, with what comes next fetched along: one after the other, each would wait for memory alone, and the
// hardware's own fetching stops at every page.
void copy(const Copy& one, const Copy& two) {
  const auto line = [](const Copy& of, int64_t at) {
    const char* from = static_cast<const char*>(of.from) + at;
    __builtin_prefetch(from + kAhead);  // of no memory at all, it does nothing
    std::memcpy(static_cast<char*>(of.to) + at, from, kLine);
  };
  const auto rest = [](const Copy& of, int64_t at) {
    if (at < of.bytes)
      std::memcpy(static_cast<char*>(of.to) + at, static_cast<const char*>(of.from) + at,
                  static_cast<std::size_t>(of.bytes - at));
  };
  int64_t at = 0;
  for (const int64_t both = std::min(one.bytes, two.bytes) / kLine * kLine; at < both; at += kLine) {
    line(one, at);
    line(two, at);
  }
  int64_t alone = at;
  for (; alone + kLine <= one.bytes; alone += kLine) line(one, alone);
  rest(one, alone);
  rest(two, at);
}

// The tile's sums and weights as the optimizer reads and writes them; copies, where need be, until the next call.
class Operands {
 public:
  Operands(const Tile& tile, bool staged, std::vector<float>& wide, std::vector<char>& narrow)
      : sums(part_of(tile.unit->sum, tile.begin, tile.count)),
        weights(part_of(tile.unit->weight, tile.begin, tile.count)),
        own_(weights),
        staged_(staged) {
    if (!staged && sums.dtype == ZR_F32) return;
    wide.resize(std::max(wide.size(), static_cast<std::size_t>(tile.count)));
    const bool widens = sums.dtype != ZR_F32;
    if (widens) widen(sums.data, sums.dtype, sums.count, wide.data());
    const Copy of_sums{sums.data, wide.data(), widens ? 0 : 4 * sums.count};
    sums = {wide.data(), sums.count, ZR_F32, 0, sums.device};
    if (!staged) return;
    narrow.resize(std::max(narrow.size(), bytes()));
    weights.data = narrow.data();
    const bool own_master = !tile.unit->master.count;  // else weights are only written
    copy(of_sums, {own_.data, narrow.data(), own_master ? static_cast<int64_t>(bytes()) : 0});
  }
  // New weights to where they stand; past the cache, if nobody read them there.
  void give_back() const {
    if (staged_) copy_bytes(own_.data, weights.data, static_cast<int64_t>(bytes()), weights.dtype != ZR_F32);
  }
  zr_view sums, weights;

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(own_.count * size_of(own_.dtype)); }
  zr_view own_;
  bool staged_;
};

zr_opt_unit describe(const Tile& tile, const Plan& plan, const UpdateInput& input, const Operands& operands,
                     zr_view* slots) {
  const Unit& unit = *tile.unit;
  const Parameter& parameter = plan.input.parameters[unit.param];
  for (std::size_t i = 0; i < unit.slots.size(); ++i) slots[i] = part_of(unit.slots[i], tile.begin, tile.count);
  return {sizeof(zr_opt_unit),
          parameter.group,
          parameter.name.c_str(),
          parameter.shape.data(),
          static_cast<int32_t>(parameter.shape.size()),
          unit.param,
          unit.first + tile.begin,
          tile.count,
          unit.first + tile.begin,
          tile.count,
          (*input.steps)[unit.param],
          (*input.rates)[unit.param],
          operands.weights,
          unit.master.count ? part_of(unit.master, tile.begin, tile.count) : unit.master,
          operands.sums,
          slots,
          input.staged ? uint32_t{ZR_UNIT_COPY} : 0,
          0};
}
}  // namespace

void update(const Instance& optimizer, uint32_t granularity, Pool& pool, const Plan& plan,
            const std::vector<Unit>& units, const UpdateInput& input) {
  const std::vector<Tile> tiles = cut(units, input, granularity == ZR_ELEMENTWISE);
  const zr_step step{sizeof(zr_step), input.grad_mul, input.step, input.grad_norm};
  const auto* api = optimizer.api<zr_optimizer_api>();
  pool.parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<zr_view> slots(plan.input.slots.size());
    std::vector<float> wide;
    std::vector<char> narrow;
    for (int64_t i = begin; i < end; ++i) {
      const Tile& tile = tiles[static_cast<std::size_t>(i)];
      const Operands operands(tile, input.staged, wide, narrow);
      const zr_opt_unit unit = describe(tile, plan, input, operands, slots.data());
      const zr_opt_unit* pointer = &unit;
      CallError error;
      check(api->step(optimizer.self(), &step, &pointer, 1, nullptr, nullptr, &error), error, optimizer.who("step"));
      operands.give_back();
    }
  });
}

}  // namespace zr::host
