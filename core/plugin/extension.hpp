// Optional tables of a component, checked as its main table is.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>

#include "base/error.hpp"
#include "plugin/plugin.hpp"

namespace zr::host::plugin {

/// The extension `id` of a component; null if it has none. Throws InternalError if the table has fewer than
/// `least_size` bytes, reserved members that are not 0, or a null function at one of the offsets `functions`.
template <class Table>
const Table* extension_of(const Component& component, const char* id, std::size_t least_size,
                          std::initializer_list<std::size_t> functions) {
  const void* table = nullptr;
  if (component.table->extension) {
    call_and_check(fmt::format("{}: extension(\"{}\")", component.file.string(), id),
                   [&](zr_error*) { return table = component.table->extension(id), zr_code{ZR_OK}; });
  }
  if (!table) return nullptr;
  struct Head {
    uint32_t size, rsv;
  } head;
  std::memcpy(&head, table, sizeof head);
  const auto is_null = [&](std::size_t offset) {
    const void* function = nullptr;
    std::memcpy(static_cast<void*>(&function), static_cast<const char*>(table) + offset, sizeof function);
    return !function;
  };
  if (head.size < least_size || head.rsv != 0 || std::any_of(functions.begin(), functions.end(), is_null))
    fail_internal(fmt::format(
        "{}: its extension \"{}\" is shorter than {} bytes, has a null function, or a reserved member that is not 0: "
        "the plug-in was compiled with other headers, or has a bug; compile it with the headers of this version",
        component.file.string(), id, least_size));
  return static_cast<const Table*>(table);
}

}  // namespace zr::host::plugin
