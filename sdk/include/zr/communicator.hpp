// Communicators in C++: how flat buffers move between ranks.
//
// clang-format off
//   class Ring {                                                          // an open communicator; destructor: close
//    public:
//     void submit(const zr_coll&, zr_stream*, zr_done*);                  // [use]
//     void progress();                                                    // [use], optional
//     zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags);  // [use], optional, together with mem_free
//     void mem_free(const zr_view& memory) noexcept;                      // [use]
//     void shared_alloc(uint64_t bytes, void** writer, const void** reader); // [use], optional, collective, together
//     void shared_free(void* writer) noexcept;                            // [use]; with shared_free; never null
//     void abort() noexcept;                                              // [any]: concurrent with any other call
//   };
//   class Mine : public zr::Communicator<Mine, Ring> {
//    public:
//     static constexpr zr_key keys[] = {...};                             // optional
//     explicit Mine(const zr::Config&, const zr::Host&);                  // or (Config), (Host), ()
//     zr_comm_caps caps() const;                                          // [any]; `size` is filled by the layer
//     std::unique_ptr<Ring> open(const zr_comm_open&);                    // [control], collective over the job
//     uint64_t open_bytes(int32_t world) const noexcept;                  // [control], optional: for plans
//     void traffic(const zr_coll&, zr_traffic&) const;                    // [control], optional, with open_bytes
//     void can_share(const std::vector<int>& hosts) const;                // [control], optional, with shared_alloc:
//                                                                         // throws if these cannot; else one host only
//   };
//   ZR_COMMUNICATOR(Mine, "mine", "example", "1.0.0");
// clang-format on
//
// submit with a null done: the operation is complete on return. With a completion: start the operation and return. The
// memory of the views stays valid until the completion is resolved. All other arguments (counts, recv_counts, label,
// the zr_coll) are valid only until submit returns, so copy them. Keep the completion as zr::Done::retained(host, done)
// and resolve it once, in submission order. A submit that throws must not resolve it. A call that waits must check
// whether abort() was called; it then throws zr::PluginError(ZR_CANCELLED, ...), and so does every later call that
// waits. The destructor of Ring resolves completions that are not resolved yet, with ZR_CANCELLED.
//
// The Mine that opened a Ring outlives the Ring.
//
// Optional static methods of every role (zr/component.hpp): `const void* extension(const char* id) noexcept` returns a
// table of optional functions; `void startup()` is called before the first instance is created and may throw, `void
// shutdown() noexcept` after the last one was destroyed, and both may be called again.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"
#include "zr/component.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

ZR_DETECT(has_progress, progress);
ZR_DETECT(has_mem_alloc, mem_alloc);
ZR_DETECT(has_mem_free, mem_free);
ZR_DETECT(has_shared_alloc, shared_alloc);
ZR_DETECT(has_shared_free, shared_free);
ZR_DETECT(has_open_bytes, open_bytes);
ZR_DETECT(has_traffic, traffic);
ZR_DETECT(has_can_share, can_share);
ZR_REQUIRE_CALL(can_submit, std::declval<T&>().submit(std::declval<const zr_coll&>(), std::declval<zr_stream*>(),
                                                      std::declval<zr_done*>()));
ZR_REQUIRE_CALL(can_abort, std::declval<T&>().abort());
ZR_REQUIRE_CALL(has_comm_caps, zr_comm_caps(std::declval<const T&>().caps()));
ZR_REQUIRE_CALL(can_open_comm, std::declval<T&>().open(std::declval<const zr_comm_open&>()));

template <class D, class Opened>
class CommunicatorLayer {
 public:
  static constexpr const char* kind = "zr.communicator/1";
  // The classes have the methods that every communicator has.
  static constexpr bool complete = has_comm_caps<D> && can_open_comm<D> && can_submit<Opened> && can_abort<Opened> &&
                                   has_mem_alloc<Opened> == has_mem_free<Opened> &&
                                   has_shared_alloc<Opened> == has_shared_free<Opened>;
  CommunicatorLayer(const Config& config, const Host& host)
      : plugin_(with_arguments<D>(config, host,
                                  [](const auto&... arguments) { return std::make_unique<D>(arguments...); })) {}

  static zr_code open(void* self, const zr_comm_open* options, void** comm, zr_error* error) noexcept {
    return guard(error, [&] {
      std::unique_ptr<Opened> opened = plugin_of(self).open(taken(*options));
      *comm = opened.release();
    });
  }
  static void close(void* comm) noexcept { delete static_cast<Opened*>(comm); }
  static zr_code caps(void* self, zr_comm_caps* out, zr_error* error) noexcept {
    return guard(error, [&] { write_output(out, const_cast<const D&>(plugin_of(self)).caps()); });
  }
  static zr_code submit(void* comm, const zr_coll* coll, zr_stream* stream, zr_done* done, zr_error* error) noexcept {
    return guard(error, [&] { static_cast<Opened*>(comm)->submit(taken(*coll), stream, done); });
  }
  static zr_code progress(void* comm, zr_error* error) noexcept {
    return guard(error, [&] { static_cast<Opened*>(comm)->progress(); });
  }
  static zr_code mem_alloc(void* comm, uint64_t bytes, uint64_t align, uint32_t flags, zr_view* out,
                           zr_error* error) noexcept {
    return guard(error, [&] { *out = static_cast<Opened*>(comm)->mem_alloc(bytes, align, flags); });
  }
  static void mem_free(void* comm, const zr_view* memory) noexcept {
    static_assert(noexcept(static_cast<Opened*>(comm)->mem_free(*memory)),
                  "mem_free must be noexcept: the host cannot receive an error");
    static_cast<Opened*>(comm)->mem_free(*memory);
  }
  static zr_code shared_alloc(void* comm, uint64_t bytes, void** writer, const void** reader,
                              zr_error* error) noexcept {
    return guard(error, [&] { static_cast<Opened*>(comm)->shared_alloc(bytes, writer, reader); });
  }
  static void shared_free(void* comm, void* writer) noexcept {
    static_assert(noexcept(static_cast<Opened*>(comm)->shared_free(writer)),
                  "shared_free must be noexcept: the host cannot receive an error");
    if (writer) static_cast<Opened*>(comm)->shared_free(writer);
  }
  static void abort(void* comm) noexcept {
    static_assert(noexcept(static_cast<Opened*>(comm)->abort()),
                  "abort must be noexcept: the host cannot receive an error");
    static_cast<Opened*>(comm)->abort();
  }

  static constexpr zr_communicator_api table() {
    zr_communicator_api t{};
    t.size = sizeof t;
    t.open = open;
    t.close = close;
    t.caps = caps;
    t.submit = submit;
    t.abort = abort;
    if constexpr (has_progress<Opened>) t.progress = progress;
    if constexpr (has_mem_alloc<Opened>) {
      t.mem_alloc = mem_alloc;
      t.mem_free = mem_free;
    }
    return t;
  }
  static constexpr zr_communicator_api api = table();

  static uint64_t open_bytes(void* self, int32_t world) noexcept {
    if constexpr (has_open_bytes<D>) {
      static_assert(noexcept(std::declval<D&>().open_bytes(world)),
                    "open_bytes must be noexcept: the host cannot receive an error");
      return plugin_of(self).open_bytes(world);
    }
    return 0;
  }
  static zr_code traffic(void* self, const zr_coll* coll, zr_traffic* sum, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_traffic<D>) const_cast<const D&>(plugin_of(self)).traffic(taken(*coll), *sum);
    });
  }
  static zr_code can_share(void* self, uint32_t n_hosts, const int32_t* ranks, zr_error* error) noexcept {
    return guard(error, [&] {
      if constexpr (has_can_share<D>)
        const_cast<const D&>(plugin_of(self)).can_share(std::vector<int>(ranks, ranks + n_hosts));
    });
  }
  /// The component's extension tables, by id.
  static const void* extension(const char* id) noexcept {
    static constexpr zr_communicator_plan plan{sizeof(zr_communicator_plan), 0, open_bytes,
                                               has_traffic<D> ? traffic : nullptr};
    if (has_open_bytes<D> && std::strcmp(id, "zr.communicator.plan/1") == 0) return &plan;
    if constexpr (has_shared_alloc<Opened>) {
      static constexpr zr_shared_weights_api shared_weights{sizeof(zr_shared_weights_api), 0, shared_alloc, shared_free,
                                                            has_can_share<D> ? can_share : nullptr};
      if (std::strcmp(id, "zr.communicator.shared_weights/1") == 0) return &shared_weights;
    }
    return nullptr;
  }

  // One sentence for each requirement that the author's class does not meet.
  static constexpr void check_class() {
    static_assert(has_comm_caps<D>, "a communicator has the public method: zr_comm_caps caps() const");
    static_assert(can_open_comm<D>,
                  "a communicator has the public method: std::unique_ptr<Opened> open(const zr_comm_open&)");
    static_assert(can_submit<Opened>,
                  "an open communicator has the public method: void submit(const zr_coll&, zr_stream*, zr_done*)");
    static_assert(can_abort<Opened>, "an open communicator has the public method: void abort() noexcept");
    static_assert(std::is_nothrow_destructible_v<Opened>,
                  "the destructor of an open communicator must not throw: the host cannot receive an error");
    static_assert(has_mem_alloc<Opened> == has_mem_free<Opened>,
                  "a communicator has both mem_alloc and mem_free, or neither");
    static_assert(has_open_bytes<D> || !has_traffic<D>, "a communicator with traffic has open_bytes too");
    static_assert(has_shared_alloc<Opened> == has_shared_free<Opened>,
                  "a communicator has both shared_alloc and shared_free, or neither");
    static_assert(has_shared_alloc<Opened> || !has_can_share<D>, "a communicator with can_share has shared_alloc too");
  }

 private:
  static D& plugin_of(void* self) { return *static_cast<CommunicatorLayer*>(self)->plugin_; }
  std::unique_ptr<D> plugin_;
};

/// Base class of an author's communicator; Opened is the class of the objects that open() returns.
template <class D, class Opened>
struct ZR_EXPORT Communicator {
  using Layer = CommunicatorLayer<D, Opened>;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop

// Exports class CLASS as a communicator with the id ID, as the only component of this library. Once per library, at
// namespace scope.
#define ZR_COMMUNICATOR(CLASS, ID, VENDOR, VERSION)                                      \
  ZR_TAG(kind_communicator_1);                                                           \
  ZR_ID_TAG(communicator, ID);                                                           \
  ZR_MODULE_WITH(ID, VENDOR, VERSION, zr::startup_of<CLASS>(), zr::shutdown_of<CLASS>(), \
                 zr::only_component<CLASS>(ID, VERSION))
