#include "conform/optimizer_parameter.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/names.hpp"

namespace zr::conform {

namespace {

constexpr std::size_t kAlign = 64;

std::size_t bytes_of(int64_t count, zr_dtype dtype) { return static_cast<std::size_t>(count * size_of(dtype)); }

// The least common multiple; `limit` if it is larger.
int64_t common_multiple(int64_t a, int64_t b, int64_t limit) {
  const int64_t factor = b / std::gcd(a, b);
  return a > limit / factor ? limit : std::min(a * factor, limit);
}

int64_t row_elements(const Shape& shape) {
  return shape.empty() ? 1 : elements_of(shape) / std::max<int64_t>(shape[0], 1);
}

zr_view part_of(const Array& array, int64_t first, int64_t n, zr_dtype dtype) {
  return view_of(array.data() + bytes_of(first, dtype), n, dtype);
}

}  // namespace

int64_t elements_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

std::string text_of(const Shape& shape) {
  std::string text;
  for (const int64_t size : shape) text += concat(text.empty() ? "[" : ", ", size);
  return text.empty() ? "[]" : text + "]";
}

int64_t Description::cut_block() const {
  const int64_t limit = std::max(elements_of(shape), kNormBlock);
  if (desc.granularity == ZR_TENSORWISE) return limit;
  int64_t block = kNormBlock;
  if (desc.granularity == ZR_ROWWISE) block = common_multiple(block, std::max<int64_t>(row_elements(shape), 1), limit);
  for (const zr_slot& slot : slots)
    if (slot.block > 0) block = common_multiple(block, slot.block, limit);
  return block;
}

bool Description::is_elementwise() const {
  return desc.granularity == ZR_ELEMENTWISE && sums.empty() &&
         std::all_of(slots.begin(), slots.end(), [](const zr_slot& slot) { return slot.shape == ZR_SLOT_LIKE_PARAM; });
}

int64_t Description::state_elements(const zr_slot& slot, int64_t elements) const {
  if (slot.shape == ZR_SLOT_LIKE_PARAM || slot.block == 0) return elements;
  return (elements + slot.block - 1) / slot.block * (slot.shape == ZR_SLOT_PER_COLUMN ? row_elements(shape) : 1);
}

std::string Description::text() const {
  std::string text = concat("granularity ", desc.granularity, ", needs ", desc.needs, ", device_types ",
                            desc.device_types, ", flags ", desc.flags, ", cost ", desc.cost);
  for (const zr_slot& slot : slots)
    text += concat(", state ", slot.name, " ", slot.dtype, " ", slot.shape, " ", slot.flags, " ", slot.block);
  return text;
}

Cuts Description::random_cuts(std::mt19937_64& random) const {
  const int64_t count = elements_of(shape), block = is_elementwise() && random() % 2 ? 1 : cut_block();
  std::vector<int64_t> edges{0, count};
  for (int i = 0; i < 6 && count > block; ++i)
    edges.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(count)) / block * block);
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  Cuts cuts;
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) cuts.emplace_back(edges[i], edges[i + 1] - edges[i]);
  return cuts;
}

ParameterArrays::ParameterArrays(const Layout& of, const Description& reported, std::mt19937_64 random)
    : layout(of),
      count(elements_of(of.shape)),
      description(reported),
      master(bytes_of(count, ZR_F32), kAlign, of.shift),
      weight16(of.weight_dtype == ZR_F32 ? 0 : bytes_of(count, of.weight_dtype), kAlign, of.shift / 2),
      grad(bytes_of(count, ZR_F32), kAlign, of.shift),
      random_(random) {
  for (const zr_slot& slot : description.slots) {
    const auto size = static_cast<std::size_t>(size_of(slot.dtype));
    const Array& state =
        states.emplace_back(bytes_of(description.state_elements(slot, count), slot.dtype), kAlign, of.shift / 4 * size);
    std::memset(state.data(), 0, state.size());
  }
  std::memset(weight16.data(), of.undefined, weight16.size());
  // Weights of both signs, some zero, some tiny, as after initialization.
  for (int64_t i = 0; i < count; ++i)
    master.as<float>()[i] = i % 11 == 0 ? 0.f : number() * (i % 7 == 0 ? 1e-6f : 0.5f);
  new_gradient();
}

// In (-1, 1).
float ParameterArrays::number() { return static_cast<float>(static_cast<int32_t>(random_() >> 32)) * 0x1p-31f; }

void ParameterArrays::new_gradient() {  // over eight decades
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::pow(10.f, -4 + 4 * number());
    grad.as<float>()[i] = number() * size;
  }
}

std::vector<std::string> ParameterArrays::contents() const {
  std::vector<std::string> all{weight16.content(), master.content()};
  for (const Array& state : states) all.push_back(state.content());
  return all;
}

std::string ParameterArrays::bits() const {
  std::string all;
  for (const std::string& content : contents()) all += content;
  return all;
}

void ParameterArrays::check_surroundings(const std::string& gradient_before) const {
  require(master.surroundings_are_intact(), "it wrote outside the view of the ",
          has_16bit_weights() ? "master weight" : "weight");
  require(weight16.surroundings_are_intact(), "it wrote outside the view of the weight");
  require(grad.surroundings_are_intact() && grad.content() == gradient_before, "it wrote to the gradient");
  for (std::size_t i = 0; i < states.size(); ++i)
    require(states[i].surroundings_are_intact(), "it wrote outside the view of state '", description.slots[i].name,
            "'");
}

void ParameterArrays::check_rest(const std::vector<std::string>& before,
                                 const std::pair<int64_t, int64_t>& range) const {
  const std::vector<std::string> now = contents();
  const auto same_rest = [&](std::size_t i, int64_t first, int64_t last, int64_t size) {
    if (now[i].empty()) return true;
    const auto begin = static_cast<std::size_t>(first * size), end = static_cast<std::size_t>(last * size);
    return now[i].compare(0, begin, before[i], 0, begin) == 0 &&
           now[i].compare(end, std::string::npos, before[i], end, std::string::npos) == 0;
  };
  const int64_t first = range.first, last = range.first + range.second;
  require(same_rest(0, first, last, 2) && same_rest(1, first, last, 4), "it wrote weights outside its slice");
  for (std::size_t i = 0; i < states.size(); ++i) {
    const zr_slot& slot = description.slots[i];
    require(same_rest(i + 2, description.state_elements(slot, first), description.state_elements(slot, last),
                      size_of(slot.dtype)),
            "it wrote elements of state '", slot.name, "' outside its slice");
  }
}

zr_view ParameterArrays::weight_view(int64_t first, int64_t n) const {
  return has_16bit_weights() ? part_of(weight16, first, n, layout.weight_dtype) : part_of(master, first, n, ZR_F32);
}
zr_view ParameterArrays::master_view(int64_t first, int64_t n) const {
  return has_16bit_weights() ? part_of(master, first, n, ZR_F32) : zr_view{};
}
zr_view ParameterArrays::grad_view(int64_t first, int64_t n) const { return part_of(grad, first, n, ZR_F32); }
std::vector<zr_view> ParameterArrays::state_views(int64_t first, int64_t n) const {
  std::vector<zr_view> views;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const zr_slot& slot = description.slots[i];
    const int64_t begin = description.state_elements(slot, first);
    views.push_back(part_of(states[i], begin, description.state_elements(slot, first + n) - begin, slot.dtype));
  }
  return views;
}

}  // namespace zr::conform
