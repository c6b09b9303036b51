// Tiers in C++: memory or disk that stores bytes in allocations.
//
// clang-format off
//   class Mine : public zr::Offload<Mine> {
//    public:
//     static constexpr zr_key keys[] = {...};                             // optional
//     explicit Mine(const zr::Config&, const zr::Host&);                  // or (Config), (Host), ()
//     zr_offload_caps caps() const;                                       // [io], also before open()
//     void open();                                                        // [control], once, optional
//     uint64_t reserve(uint64_t bytes, const char* tag);                  // [step], returns the allocation
//     void release(uint64_t allocation) noexcept;                         // [step]
//     void write(const zr_transfer*, uint32_t n, zr_stream*, zr_done*);   // [io]
//     void read(const zr_transfer*, uint32_t n, zr_stream*, zr_done*);    // [io]
//     zr_view map(uint64_t allocation);                                   // [step], optional: its own memory
//     void unmap(uint64_t allocation) noexcept;                           // [step], together with map
//     void reg(const zr_view&);                                           // [step], optional
//     void unreg(const zr_view&) noexcept;                                // [step], together with reg
//   };
//   ZR_OFFLOAD(Mine, "mine", "example", "1.0.0");
// clang-format on
//
// write and read with a null done: the transfers are complete on return. With a completion: start the transfers and
// return. The list of transfers is valid only until the call returns, so copy it. Keep the completion as
// zr::Done::retained(host, done) and resolve it once, when all n transfers have ended. A call that throws must not
// resolve it. The layer sets ZR_TIER_MAPPABLE if the class has map().
//
// Optional static methods of every role (zr/component.hpp): `const void* extension(const char* id) noexcept` returns a
// table of optional functions; `void startup()` is called before the first instance is created and may throw, `void
// shutdown() noexcept` after the last one was destroyed, and both may be called again.
#pragma once

#include <memory>

#include "zr/abi/offload.h"
#include "zr/component.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

ZR_DETECT(has_open, open);
ZR_DETECT(has_map, map);
ZR_DETECT(has_unmap, unmap);
ZR_DETECT(has_reg, reg);
ZR_DETECT(has_unreg, unreg);
ZR_REQUIRE_CALL(has_tier_caps, zr_offload_caps(std::declval<const T&>().caps()));
ZR_REQUIRE_CALL(can_reserve, uint64_t{std::declval<T&>().reserve(uint64_t{}, std::declval<const char*>())});
ZR_REQUIRE_CALL(can_release, std::declval<T&>().release(uint64_t{}));
ZR_REQUIRE_CALL(can_write, std::declval<T&>().write(std::declval<const zr_transfer*>(), uint32_t{},
                                                    std::declval<zr_stream*>(), std::declval<zr_done*>()));
ZR_REQUIRE_CALL(can_read, std::declval<T&>().read(std::declval<const zr_transfer*>(), uint32_t{},
                                                  std::declval<zr_stream*>(), std::declval<zr_done*>()));

template <class D>
class OffloadLayer {
 public:
  static constexpr const char* kind = "zr.offload/1";
  // The class has the methods that every tier has.
  static constexpr bool complete = has_tier_caps<D> && can_reserve<D> && can_release<D> && can_write<D> &&
                                   can_read<D> && has_map<D> == has_unmap<D> && has_reg<D> == has_unreg<D>;
  OffloadLayer(const Config& config, const Host& host)
      : plugin_(with_arguments<D>(config, host,
                                  [](const auto&... arguments) { return std::make_unique<D>(arguments...); })) {}

  static zr_code open(void* self, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_open<D>) plugin_of(self).open();
    });
  }
  static zr_code caps(void* self, zr_offload_caps* out, zr_error* error) noexcept {
    return guard(error, [&] {
      zr_offload_caps caps = plugin_of(self).caps();
      if constexpr (has_map<D>) caps.flags |= ZR_TIER_MAPPABLE;
      write_output(out, caps);
    });
  }
  static zr_code reserve(void* self, uint64_t bytes, const char* tag, uint64_t* allocation, zr_error* error) noexcept {
    return guard(error, [&] { *allocation = plugin_of(self).reserve(bytes, tag); });
  }
  static void release(void* self, uint64_t allocation) noexcept {
    static_assert(noexcept(std::declval<D&>().release(allocation)),
                  "release must be noexcept: the host cannot receive an error");
    plugin_of(self).release(allocation);
  }
  static zr_code write(void* self, const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done,
                       zr_error* error) noexcept {
    return guard(error, [&] { plugin_of(self).write(transfers, n, stream, done); });
  }
  static zr_code read(void* self, const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done,
                      zr_error* error) noexcept {
    return guard(error, [&] { plugin_of(self).read(transfers, n, stream, done); });
  }
  static zr_code map(void* self, uint64_t allocation, zr_view* out, zr_error* error) noexcept {
    return guard(error, [&] { *out = plugin_of(self).map(allocation); });
  }
  static void unmap(void* self, uint64_t allocation) noexcept {
    static_assert(noexcept(std::declval<D&>().unmap(allocation)),
                  "unmap must be noexcept: the host cannot receive an error");
    plugin_of(self).unmap(allocation);
  }
  static zr_code reg(void* self, const zr_view* memory, zr_error* error) noexcept {
    return guard(error, [&] { plugin_of(self).reg(*memory); });
  }
  static void unreg(void* self, const zr_view* memory) noexcept {
    static_assert(noexcept(std::declval<D&>().unreg(*memory)),
                  "unreg must be noexcept: the host cannot receive an error");
    plugin_of(self).unreg(*memory);
  }

  static constexpr zr_offload_api table() {
    zr_offload_api t{};
    t.size = sizeof t;
    t.open = open;
    t.caps = caps;
    t.reserve = reserve;
    t.release = release;
    t.write = write;
    t.read = read;
    if constexpr (has_map<D>) {
      t.map = map;
      t.unmap = unmap;
    }
    if constexpr (has_reg<D>) {
      t.reg = reg;
      t.unreg = unreg;
    }
    return t;
  }
  static constexpr zr_offload_api api = table();

  // One sentence for each requirement that the author's class does not meet.
  static constexpr void check_class() {
    static_assert(has_tier_caps<D>, "a tier has the public method: zr_offload_caps caps() const");
    static_assert(can_reserve<D>, "a tier has the public method: uint64_t reserve(uint64_t bytes, const char* tag)");
    static_assert(can_release<D>, "a tier has the public method: void release(uint64_t allocation) noexcept");
    static_assert(can_write<D>,
                  "a tier has the public method: void write(const zr_transfer*, uint32_t n, zr_stream*, zr_done*)");
    static_assert(can_read<D>,
                  "a tier has the public method: void read(const zr_transfer*, uint32_t n, zr_stream*, zr_done*)");
    static_assert(has_map<D> == has_unmap<D>, "a tier has both map and unmap, or neither");
    static_assert(has_reg<D> == has_unreg<D>, "a tier has both reg and unreg, or neither");
  }

 private:
  static D& plugin_of(void* self) { return *static_cast<OffloadLayer*>(self)->plugin_; }
  std::unique_ptr<D> plugin_;
};

/// Base class of an author's tier.
template <class D>
struct ZR_EXPORT Offload {
  using Layer = OffloadLayer<D>;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop

// Exports class CLASS as an offload tier with the id ID, as the only component of this library. Once per library, at
// namespace scope.
#define ZR_OFFLOAD(CLASS, ID, VENDOR, VERSION)                                           \
  ZR_TAG(kind_offload_1);                                                                \
  ZR_ID_TAG(offload, ID);                                                                \
  ZR_MODULE_WITH(ID, VENDOR, VERSION, zr::startup_of<CLASS>(), zr::shutdown_of<CLASS>(), \
                 zr::only_component<CLASS>(ID, VERSION))
