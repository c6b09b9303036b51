#include "config/batch.hpp"

#include <fmt/format.h>

#include "base/text.hpp"

namespace zr::host::config {

namespace {

struct Number {
  Entry& entry;
  int64_t value = std::get<int64_t>(entry.value);
  bool given() const { return value != 0; }
  std::string text() const { return fmt::format("{} = {} ({})", entry.key.path(), value, entry.origin.text()); }
  void set(int64_t to, Origin::From from) {
    value = to;
    entry.value = to;
    entry.written = fmt::format("{}", to);
    entry.origin = {};
    entry.origin.from = from;
  }
};

std::string ranks(int64_t world) { return fmt::format("{} {}", world, world == 1 ? "rank" : "ranks"); }

// third = global / (other * world), if divisible.
std::string divide(const Number& global, Number& third, const Number& other, int64_t world) {
  const int64_t divisor = other.value * world;
  if (global.value % divisor == 0) {
    third.set(global.value / divisor, Origin::From::derived);
    return "";
  }
  const int64_t below = global.value / divisor * divisor;
  return fmt::format("{} is not a multiple of {} x {} = {}{}{}", global.text(), other.text(), ranks(world), divisor,
                     below > 0 ? fmt::format("; the nearest are {} and ", below) : "; the nearest is ",
                     below + divisor);
}

}  // namespace

std::string derive_batch(Entry& global_entry, Entry& micro_entry, Entry& accumulation_entry, int64_t world) {
  Number global{global_entry}, micro{micro_entry}, accumulation{accumulation_entry};
  if (global.given() && micro.given() && !accumulation.given()) return divide(global, accumulation, micro, world);
  if (!accumulation.given()) accumulation.set(1, Origin::From::key_default);
  if (global.given() && !micro.given()) return divide(global, micro, accumulation, world);
  if (!micro.given()) micro.set(1, Origin::From::key_default);
  const double max_samples = global.entry.key.max;
  if (double(micro.value) * double(accumulation.value) * double(world) > max_samples)
    return fmt::format("{} x {} x {} is more than {} samples per step; lower one of the three", micro.text(),
                       accumulation.text(), ranks(world), shortest(max_samples));
  const int64_t product = micro.value * accumulation.value * world;
  if (!global.given()) {
    global.set(product, Origin::From::derived);
    return "";
  }
  if (global.value == product) return "";
  return fmt::format("{} contradicts {} x {} x {} = {}; remove one of the three, and it is derived from the other two",
                     global.text(), micro.text(), accumulation.text(), ranks(world), product);
}

}  // namespace zr::host::config
