// Values for the keys of a component: their defaults, and what the command line gives.
#pragma once

#include <optional>
#include <string>

#include "conform/case.hpp"
#include "conform/test_host.hpp"
#include "zr/abi/module.h"

namespace zr::conform {

/// Reads TOML text ("0.9", "\"32MiB\"", "[0.9, 0.999]") as a value of the key's type; nothing if it is not one.
std::optional<KeyValue> parse_value(const zr_key& key, const std::string& text);

/// Why TOML text is no value of the key: "\"fast\" is not a number", "2 is not from 0 to 1"; "" if it is one.
std::string value_problem(const zr_key& key, const std::string& text);

/// Why the declaration of a key is invalid; "" if it is valid.
std::string problem_of(const zr_key& key);

/// A value for every key: from `texts`, else the default. A key that the user must set gets the path of a temporary
/// folder if it is a string, else its smallest value. Throws Failure if a value is invalid.
KeyValues values_of(const zr_component& component, const KeyTexts& texts);

/// The values, with every size and integer that has a smallest value at that value.
KeyValues smallest_sizes(const zr_component& component, KeyValues values);

/// A new empty folder, removed when the program ends.
std::string temporary_folder();
/// Removes the folders of temporary_folder(), of this process and of its children.
void remove_temporary_folders();

}  // namespace zr::conform
