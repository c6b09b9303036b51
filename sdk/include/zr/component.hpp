// Keys, components and the module of a plug-in library, as compile-time constants.
#pragma once

#include <array>
#include <limits>
#include <type_traits>
#include <utility>

#include "zr/base.hpp"
#include "zr/multiply_add.h"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

// ---- keys ----
// `static constexpr zr_key keys[] = {zr::key_float("eps", "1e-8", 0, 1, "Keeps the denominator from zero")};` in a
// class. def is TOML text; if it is null, the user must set the key. meaning is one line without a full stop.

inline constexpr double kNoBound = std::numeric_limits<double>::infinity();

/// A key of any type. Each type also has its own function.
constexpr zr_key key_of(uint32_t type, const char* name, const char* def, double min, double max, const char* choices,
                        const char* meaning) {
  return zr_key{static_cast<uint32_t>(sizeof(zr_key)), type, 0, 0, name, def, min, max, choices, meaning};
}
/// A boolean.
constexpr zr_key key_bool(const char* name, const char* def, const char* meaning) {
  return key_of(ZR_KEY_BOOL, name, def, -kNoBound, kNoBound, nullptr, meaning);
}
/// An integer from min to max.
constexpr zr_key key_int(const char* name, const char* def, double min, double max, const char* meaning) {
  return key_of(ZR_KEY_INT, name, def, min, max, nullptr, meaning);
}
/// A floating-point number from min to max.
constexpr zr_key key_float(const char* name, const char* def, double min, double max, const char* meaning) {
  return key_of(ZR_KEY_FLOAT, name, def, min, max, nullptr, meaning);
}
/// A string. choices: "a|b|c", or null for any text.
constexpr zr_key key_text(const char* name, const char* def, const char* choices, const char* meaning) {
  return key_of(ZR_KEY_STRING, name, def, -kNoBound, kNoBound, choices, meaning);
}
/// A size, such as "32MiB", from min to max bytes.
constexpr zr_key key_bytes(const char* name, const char* def, double min, double max, const char* meaning) {
  return key_of(ZR_KEY_BYTES, name, def, min, max, nullptr, meaning);
}
/// A duration, such as "5min", from min to max seconds.
constexpr zr_key key_duration(const char* name, const char* def, double min, double max, const char* meaning) {
  return key_of(ZR_KEY_DURATION, name, def, min, max, nullptr, meaning);
}
/// An array of numbers, each from min to max.
constexpr zr_key key_floats(const char* name, const char* def, double min, double max, const char* meaning) {
  return key_of(ZR_KEY_FLOATS, name, def, min, max, nullptr, meaning);
}
/// Optimizers: the same key, which a parameter group may override.
constexpr zr_key per_group(zr_key key) {
  key.flags |= ZR_KEY_PER_GROUP;
  return key;
}

// ---- components and the module ----
//
// A class of any role may have three static methods:
//
//   static const void* extension(const char* id) noexcept;  // [any] zr_component::extension: a table, or null
//   static void startup();                                  // [control] zr_module::startup: before the first create()
//   static void shutdown() noexcept;                        // [control] zr_module::shutdown: after the last destroy()
//
// and three texts for `zeroth plugins`:
//
//   static constexpr const char* description = "..."  // zr_component::description: what it is, no full stop
//   static constexpr const char* url = "..."          // zr_component::url: of its documentation or its source
//   static constexpr const char* license = "MIT"      // zr_component::license: an SPDX expression

// Defines trait<T>: true if the class T has the optional member. A member that the layer could not use, because it is
// private or overloaded, is a compile error: without it, the layer would count the member as absent.
#define ZR_DETECT(trait, member)                                                                           \
  struct trait##_name {                                                                                    \
    int member;                                                                                            \
  };                                                                                                       \
  template <class T>                                                                                       \
  struct trait##_either : T, trait##_name {};                                                              \
  template <class T, class = void>                                                                         \
  inline constexpr bool trait##_named = true; /* the name is ambiguous in trait_either: T has it too */    \
  template <class T>                                                                                       \
  inline constexpr bool trait##_named<T, std::void_t<decltype(&trait##_either<T>::member)>> = false;       \
  template <class T, class = void>                                                                         \
  inline constexpr bool trait##_usable = false;                                                            \
  template <class T>                                                                                       \
  inline constexpr bool trait##_usable<T, std::void_t<decltype(&T::member)>> = true;                       \
  template <class T>                                                                                       \
  constexpr bool trait##_checked() {                                                                       \
    static_assert(!std::is_final_v<T>, "a class that a layer uses must not be final");                     \
    if constexpr (!std::is_final_v<T>)                                                                     \
      static_assert(trait##_usable<T> == trait##_named<T>,                                                 \
                    "the member '" #member                                                                 \
                    "' is private, overloaded or a type; make it public, with one meaning, or rename it"); \
    return trait##_usable<T>;                                                                              \
  }                                                                                                        \
  template <class T>                                                                                       \
  inline constexpr bool trait = trait##_checked<T>()
/// Defines trait<T>: true if the expression, in which T is the author's class, compiles. For methods that a class must
/// have: the layer names a missing one in one sentence and leaves out the tables, so that no other error follows.
#define ZR_REQUIRE_CALL(trait, ...)    \
  template <class T, class = void>     \
  inline constexpr bool trait = false; \
  template <class T>                   \
  inline constexpr bool trait<T, std::void_t<decltype(__VA_ARGS__)>> = true

ZR_DETECT(has_keys, keys);
ZR_DETECT(has_extension, extension);
ZR_DETECT(has_startup, startup);
ZR_DETECT(has_shutdown, shutdown);
ZR_DETECT(has_description, description);
ZR_DETECT(has_url, url);
ZR_DETECT(has_license, license);

/// Defines trait<T>: true if T has an array of this name with elements of this type. For misspelled names of `keys` and
/// `slots`; others are known only by list, below.
#define ZR_DETECT_ARRAY(trait, member, element)                                                                    \
  template <class T, class = void>                                                                                 \
  inline constexpr bool trait = false;                                                                             \
  template <class T>                                                                                               \
  inline constexpr bool trait<                                                                                     \
      T, std::enable_if_t<std::is_same_v<std::remove_cv_t<std::remove_extent_t<decltype(T::member)>>, element>>> = \
      true
ZR_DETECT_ARRAY(has_key_array, key, zr_key);
ZR_DETECT_ARRAY(has_options_array, options, zr_key);
ZR_DETECT_ARRAY(has_params_array, params, zr_key);

/// Defines trait<T>: true if T has a public member of this name. For likely misspellings of optional members.
#define ZR_DETECT_NAME(trait, member)  \
  template <class T, class = void>     \
  inline constexpr bool trait = false; \
  template <class T>                   \
  inline constexpr bool trait<T, std::void_t<decltype(&T::member)>> = true
ZR_DETECT_NAME(has_extensions, extensions);
ZR_DETECT_NAME(has_extention, extention);
ZR_DETECT_NAME(has_start_up, start_up);
ZR_DETECT_NAME(has_shut_down, shut_down);
ZR_DETECT_NAME(has_licence, licence);

/// The requirements for an author's class of any role; each failure is one sentence.
template <class D>
constexpr void check_class() {
  static_assert(std::is_nothrow_destructible_v<D>, "a destructor must not throw: the host cannot receive an error");
  static_assert(has_keys<D> || !(has_key_array<D> || has_options_array<D> || has_params_array<D>),
                "the array of a component's keys is named `keys`");
  static_assert(!has_extensions<D> && !has_extention<D>, "the member is named `extension`");
  static_assert(!has_start_up<D> && !has_shut_down<D>, "the members are named `startup` and `shutdown`");
  static_assert(!has_licence<D>, "the member is named `license`");
  if constexpr (has_keys<D>)
    static_assert(std::is_array_v<decltype(D::keys)>, "keys is an array: static constexpr zr_key keys[] = {...};");
  if constexpr (has_extension<D>)
    static_assert(std::is_nothrow_invocable_r_v<const void*, decltype(&D::extension), const char*>,
                  "extension is: static const void* extension(const char* id) noexcept");
  if constexpr (has_startup<D>)
    static_assert(std::is_invocable_r_v<void, decltype(&D::startup)>, "startup is: static void startup()");
  if constexpr (has_shutdown<D>)
    static_assert(std::is_nothrow_invocable_r_v<void, decltype(&D::shutdown)>,
                  "shutdown is: static void shutdown() noexcept");
  if constexpr (has_description<D>)
    static_assert(std::is_same_v<decltype(&D::description), const char* const*>,
                  "description is: static constexpr const char* description = \"...\"");
  if constexpr (has_url<D>)
    static_assert(std::is_same_v<decltype(&D::url), const char* const*>,
                  "url is: static constexpr const char* url = \"...\"");
  if constexpr (has_license<D>)
    static_assert(std::is_same_v<decltype(&D::license), const char* const*>,
                  "license is: static constexpr const char* license = \"...\"");
}

/// Calls use(arguments...) with the arguments that the constructor of the author's class D takes: (Config, Host),
/// (Config), (Host) or nothing.
template <class D, class Use>
auto with_arguments(const Config& config, const Host& host, Use&& use) {
  if constexpr (std::is_constructible_v<D, const Config&, const Host&>) {
    return use(config, host);
  } else if constexpr (std::is_constructible_v<D, const Config&>) {
    return use(config);
  } else if constexpr (std::is_constructible_v<D, const Host&>) {
    return use(host);
  } else {
    static_assert(std::is_default_constructible_v<D>,
                  "the constructor of a component takes (zr::Config, zr::Host), one of them, or nothing");
    return use();
  }
}

/// The addresses of the keys of class D, for zr_component::keys.
template <class D, std::size_t... I>
constexpr auto key_pointers(std::index_sequence<I...>) {
  return std::array<const zr_key*, sizeof...(I)>{&D::keys[I]...};
}
/// The schema of class D in the form of zr_component::keys.
template <class D>
struct Keys {
  /// One pointer per entry of D::keys; static.
  static constexpr auto list = key_pointers<D>(std::make_index_sequence<std::extent_v<decltype(D::keys)>>());
};

/// The extension table of D or of its layer; see zr_component::extension.
template <class D>
const void* extension_of(const char* id) noexcept {
  if constexpr (has_extension<typename D::Layer>)
    if (const void* table = D::Layer::extension(id)) return table;
  if constexpr (has_extension<D>) return D::extension(id);
  (void)id;
  return nullptr;
}

/// zr_module::startup of a library whose only component is D; null if D has no static method startup().
template <class D>
constexpr auto startup_of() -> zr_code (*)(zr_error*) {
  if constexpr (has_startup<D>)
    return [](zr_error* error) noexcept { return guard(error, [] { D::startup(); }); };
  else
    return nullptr;
}
/// zr_module::shutdown of a library whose only component is D; null if D has no static method shutdown().
template <class D>
constexpr auto shutdown_of() -> void (*)() {
  if constexpr (has_shutdown<D>)
    return [] { D::shutdown(); };
  else
    return nullptr;
}

/// The zr_component of an author's class D, which is derived from zr::Strategy<D>, zr::Optimizer<D>, zr::Offload<D> or
/// zr::Communicator<D, Opened>. D::Layer comes from that base: the type of the object behind `self`, with its kind and
/// api. For ZR_OPTIMIZER and so on; ZR_MODULE uses component().
template <class D>
constexpr zr_component only_component(const char* id, const char* version) {
  using Layer = typename D::Layer;
  check_class<D>();
  Layer::check_class();
  zr_component c{};
  c.size = sizeof c;
  c.id = id;
  c.kind = Layer::kind;
  c.version = version;
  if constexpr (Layer::complete) {  // else Layer::check_class() has failed
    c.api = &Layer::api;
    c.create = [](const zr_host* abi, const zr_config* config, void** self, zr_error* error) noexcept {
      return guard(error, [&] {
        const Host host(abi);
        *self = new Layer(Config(host, config), host);
      });
    };
    c.destroy = [](void* self) noexcept { delete static_cast<Layer*>(self); };
    if constexpr (has_extension<Layer> || has_extension<D>) c.extension = extension_of<D>;
  }
  if constexpr (has_keys<D>) {
    c.keys = Keys<D>::list.data();
    c.n_keys = static_cast<uint32_t>(Keys<D>::list.size());
  }
  if constexpr (has_description<D>) c.description = D::description;
  if constexpr (has_url<D>) c.url = D::url;
  if constexpr (has_license<D>) c.license = D::license;
  return c;
}

/// The zr_component of one of several classes of a library.
template <class D>
constexpr zr_component component(const char* id, const char* version) {
  static_assert(!has_startup<D> && !has_shutdown<D>,
                "in a library of several components, startup and shutdown belong to the module: ZR_MODULE_WITH");
  return only_component<D>(id, version);
}

/// The addresses of a module's components, for zr_module::components.
template <std::size_t N, std::size_t... I>
constexpr std::array<const zr_component*, N> pointers_to(const zr_component (&list)[N], std::index_sequence<I...>) {
  return {&list[I]...};
}

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop

/// Defines the library's one exported function and its ABI tag, for any number of components: ZR_MODULE("name",
/// "vendor", "1.0", zr::component<A>("a", "1.0"), ...); add ZR_TAG(kind_<role>_1); for each kind of component. Use it
/// once, at namespace scope.
#define ZR_MODULE(NAME, VENDOR, VERSION, ...) ZR_MODULE_WITH(NAME, VENDOR, VERSION, nullptr, nullptr, __VA_ARGS__)
/// ZR_MODULE with zr_module::startup and zr_module::shutdown, which may be nullptr.
#define ZR_MODULE_WITH(NAME, VENDOR, VERSION, STARTUP, SHUTDOWN, ...)                                           \
  ZR_TAG(ZR_ABI_TAG);                                                                                           \
  ZR_MULTIPLY_ADD_TAG;                                                                                          \
  static constexpr zr_component zr_components[] = {__VA_ARGS__};                                                \
  static constexpr auto zr_component_list =                                                                     \
      zr::pointers_to(zr_components, std::make_index_sequence<sizeof zr_components / sizeof *zr_components>()); \
  extern "C" const zr_module* zr_module_v1(uint32_t) {                                                          \
    static constexpr zr_module module{sizeof(zr_module),                                                        \
                                      ZR_ABI_MINOR,                                                             \
                                      ZR_TARGET_MINOR,                                                          \
                                      NAME,                                                                     \
                                      VENDOR,                                                                   \
                                      VERSION,                                                                  \
                                      __VERSION__,                                                              \
                                      zr_component_list.data(),                                                 \
                                      static_cast<uint32_t>(zr_component_list.size()),                          \
                                      0,                                                                        \
                                      STARTUP,                                                                  \
                                      SHUTDOWN};                                                                \
    return &module;                                                                                             \
  }                                                                                                             \
  static_assert(true, "")
