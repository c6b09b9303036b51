#include "shard/update.hpp"

#include <algorithm>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "shard/rounding.hpp"

namespace zr::host {

namespace {
constexpr int64_t kTile = 64 * kLeaf;
constexpr int64_t kWidenedTile = 16 * kLeaf;  // its fp32 copy stays in a core's cache

struct Tile {
  const Unit* unit;
  int64_t begin, count;
};

std::vector<Tile> cut(const std::vector<Unit>& units, const std::vector<char>& touched, bool elementwise) {
  std::vector<Tile> tiles;
  for (const Unit& unit : units) {
    if (!touched[unit.param]) continue;
    const int64_t size = !elementwise ? unit.count : unit.sum.dtype == ZR_F32 ? kTile : kWidenedTile;
    for (int64_t begin = 0; begin < unit.count; begin += size)
      tiles.push_back({&unit, begin, std::min(size, unit.count - begin)});
  }
  return tiles;
}

// The tile's sums as the optimizer reads them; `wide` holds them until the next call.
zr_view fp32_sums(const Tile& tile, std::vector<float>& wide) {
  const zr_view sums = part_of(tile.unit->sum, tile.begin, tile.count);
  if (sums.dtype == ZR_F32) return sums;
  wide.resize(std::max(wide.size(), static_cast<std::size_t>(tile.count)));
  widen(sums.data, sums.dtype, sums.count, wide.data());
  return {wide.data(), sums.count, ZR_F32, 0, sums.device};
}

zr_opt_unit describe(const Tile& tile, const Plan& plan, const UpdateInput& input, const zr_view& sums,
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
          part_of(unit.weight, tile.begin, tile.count),
          unit.master.count ? part_of(unit.master, tile.begin, tile.count) : unit.master,
          sums,
          slots};
}
}  // namespace

void update(const Instance& optimizer, uint32_t granularity, Pool& pool, const Plan& plan,
            const std::vector<Unit>& units, const UpdateInput& input) {
  const std::vector<Tile> tiles = cut(units, *input.touched, granularity == ZR_ELEMENTWISE);
  const zr_step step{sizeof(zr_step), input.grad_mul, input.step, input.grad_norm};
  const auto* api = optimizer.api<zr_optimizer_api>();
  pool.parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<zr_view> slots(plan.input.slots.size());
    std::vector<float> wide;
    for (int64_t i = begin; i < end; ++i) {
      const Tile& tile = tiles[static_cast<std::size_t>(i)];
      const zr_opt_unit unit = describe(tile, plan, input, fp32_sums(tile, wide), slots.data());
      const zr_opt_unit* pointer = &unit;
      CallError error;
      check(api->step(optimizer.self(), &step, &pointer, 1, nullptr, nullptr, &error), error, optimizer.who("step"));
    }
  });
}

}  // namespace zr::host
