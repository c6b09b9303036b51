// Optimizers in C++ with state that does not belong to a parameter. This is a draft: the library loads only on a host
// of this version (zr/abi/draft/optimizer_globals.h).
//
// A class with this header included has both of
//
//   void save_globals(const zr::GlobalSink& save) const;  // [step] save("key", value) for each value
//   void load_global(const char* key, const void* value, uint64_t bytes);  // [step] before the first step; throws
//                                                         // zr::PluginError(ZR_INVALID, ...) for an unknown key
//
// They are called for the object of group 0. Every group has an object of its own, so update() reads and changes such
// values in first_group(). All ranks must have the same values when a checkpoint is saved.
#pragma once

#include "zr/abi/draft/optimizer_globals.h"
#include "zr/optimizer.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// Receives the values that save_globals() saves, which it copies.
class GlobalSink {
 public:
  /// `ctx` is the first argument of `sink`.
  GlobalSink(zr_global_sink sink, void* ctx) : sink_(sink), ctx_(ctx) {}
  /// Saves `bytes` bytes.
  void operator()(const char* key, const void* value, uint64_t bytes) const { sink_(ctx_, key, value, bytes); }
  /// Saves a value that can be copied byte by byte.
  template <class T>
  void operator()(const char* key, const T& value) const {
    static_assert(std::is_trivially_copyable_v<T>, "save such a value as bytes");
    sink_(ctx_, key, &value, sizeof value);
  }

 private:
  zr_global_sink sink_;
  void* ctx_;
};

template <class D>
struct GlobalsLayer {
  static constexpr const char* id = "zr.optimizer.globals/1";  // of the extension
  static zr_code save_globals(void* self, zr_global_sink sink, void* ctx, zr_error* error) noexcept {
    return guard(error, [&] { D::Layer::first_group(self).save_globals(GlobalSink(sink, ctx)); });
  }
  static zr_code load_global(void* self, const char* key, const void* value, uint64_t bytes, zr_error* error) noexcept {
    return guard(error, [&] { D::Layer::first_group(self).load_global(key, value, bytes); });
  }
  static constexpr zr_optimizer_globals_api api{sizeof(zr_optimizer_globals_api), 0, save_globals, load_global};
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
