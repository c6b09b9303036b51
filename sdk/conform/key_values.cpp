#include "conform/key_values.hpp"

#include <stdlib.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <system_error>

namespace zr::conform {

namespace {

std::optional<double> number(const std::string& text, std::string* unit = nullptr) {
  std::string digits;
  for (const char c : text)
    if (c != '_') digits += c;
  char* end = nullptr;
  const double value = std::strtod(digits.c_str(), &end);
  if (end == digits.c_str()) return {};
  if (unit) {
    *unit = end;
    while (!unit->empty() && unit->front() == ' ') unit->erase(0, 1);
  } else if (*end != 0) {
    return {};
  }
  return value;
}

struct Unit {
  std::string_view name;
  double factor;
};
constexpr std::array kSizes{
    Unit{"", 1},      Unit{"B", 1},      Unit{"KB", 1e3},      Unit{"MB", 1e6},      Unit{"GB", 1e9},
    Unit{"TB", 1e12}, Unit{"KiB", 1024}, Unit{"MiB", 1 << 20}, Unit{"GiB", 1 << 30}, Unit{"TiB", 1024.0 * (1 << 30)}};
constexpr std::array kTimes{Unit{"", 1}, Unit{"ms", 1e-3}, Unit{"s", 1}, Unit{"min", 60}, Unit{"h", 3600}};

template <std::size_t N>
std::optional<double> with_unit(const std::string& text, const std::array<Unit, N>& units) {
  std::string name;
  const auto value = number(text, &name);
  for (const Unit& unit : units)
    if (value && unit.name == name) return *value * unit.factor;
  return {};
}

std::optional<std::string> unquoted(const std::string& text) {
  if (text.size() < 2 || (text[0] != '"' && text[0] != '\'') || text.back() != text[0]) return {};
  return text.substr(1, text.size() - 2);
}

std::optional<std::vector<double>> numbers(const std::string& text) {
  if (text.size() < 2 || text[0] != '[' || text.back() != ']') return {};
  std::vector<double> values;
  std::istringstream items(text.substr(1, text.size() - 2));
  for (std::string item; std::getline(items, item, ',');) {
    while (!item.empty() && item.front() == ' ') item.erase(0, 1);
    while (!item.empty() && item.back() == ' ') item.pop_back();
    if (item.empty()) continue;
    const auto value = number(item);
    if (!value) return {};
    values.push_back(*value);
  }
  return values;
}

bool is_choice(const zr_key& key, const std::string& text) {
  std::istringstream choices(key.choices ? key.choices : "");
  for (std::string choice; std::getline(choices, choice, '|');)
    if (choice == text) return true;
  return !key.choices;
}

bool in_range(const zr_key& key, const KeyValue& value) {
  const auto inside = [&](double number) { return number >= key.min && number <= key.max; };
  if (const auto* text = std::get_if<std::string>(&value)) return is_choice(key, *text);
  if (const auto* integer = std::get_if<int64_t>(&value)) return inside(static_cast<double>(*integer));
  if (const auto* real = std::get_if<double>(&value)) return inside(*real);
  if (const auto* list = std::get_if<std::vector<double>>(&value))
    for (const double one : *list)
      if (!inside(one)) return false;
  return true;
}

// The value of a key that the user must set.
KeyValue invented_value(const zr_key& key) {
  const double smallest = std::isfinite(key.min) ? key.min : 1;
  switch (key.type) {
    case ZR_KEY_BOOL: return false;
    case ZR_KEY_INT:
    case ZR_KEY_BYTES: return static_cast<int64_t>(smallest);
    case ZR_KEY_FLOATS: return std::vector<double>{smallest};
    case ZR_KEY_STRING: break;
    default: return smallest;
  }
  const std::string choices = key.choices ? key.choices : "";
  return choices.empty() ? temporary_folder() : choices.substr(0, choices.find('|'));
}

const std::string& folder_of_all() {
  static const auto* folder = [] {  // never destroyed
    const char* base = ::secure_getenv("TMPDIR");
    std::string pattern = concat(base && *base == '/' ? base : "/tmp", "/zeroth-conform-XXXXXX");
    if (!::mkdtemp(pattern.data())) throw std::system_error(errno, std::generic_category(), pattern);
    return new std::string(pattern);
  }();
  return *folder;
}

}  // namespace

std::string temporary_folder() {
  std::string pattern = folder_of_all() + "/XXXXXX";
  if (!::mkdtemp(pattern.data())) throw std::system_error(errno, std::generic_category(), pattern);
  return pattern;
}

void remove_temporary_folders() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_of_all(), ignored);
}

std::optional<KeyValue> parse_value(const zr_key& key, const std::string& text) {
  switch (key.type) {
    case ZR_KEY_BOOL:
      if (text == "true" || text == "false") return KeyValue(text == "true");
      return {};
    case ZR_KEY_INT:
      if (const auto value = number(text); value && *value == std::floor(*value)) return static_cast<int64_t>(*value);
      return {};
    case ZR_KEY_FLOAT:
      if (const auto value = number(text)) return *value;
      return {};
    case ZR_KEY_STRING:
      if (const auto value = unquoted(text)) return *value;
      return {};
    case ZR_KEY_BYTES:
      if (const auto value = with_unit(unquoted(text).value_or(text), kSizes)) return static_cast<int64_t>(*value);
      return {};
    case ZR_KEY_DURATION:
      if (const auto value = with_unit(unquoted(text).value_or(text), kTimes)) return *value;
      return {};
    case ZR_KEY_FLOATS:
      if (const auto value = numbers(text)) return *value;
      return {};
    default: return {};
  }
}

std::string problem_of(const zr_key& key) {
  if (key.size < ZR_SIZE_0_9(zr_key)) return concat("its size is ", key.size, ", fewer bytes than in ABI 0.9");
  if (!key.name || !*key.name) return "it has no name";
  if (key.type < ZR_KEY_BOOL || key.type > ZR_KEY_FLOATS) return concat("its type is ", key.type);
  if (key.flags & ~uint32_t{ZR_KEY_PER_GROUP}) return concat("flags is ", key.flags, ", with unknown bits");
  if (key.rsv != 0) return concat("rsv is ", key.rsv, ", not 0");
  if (!key.meaning || !*key.meaning) return "it has no meaning";
  if (!(key.min <= key.max)) return concat("its range is from ", key.min, " to ", key.max);
  if (key.choices && key.type != ZR_KEY_STRING) return "it has choices, but is not a string";
  if (!key.def) return "";
  const auto value = parse_value(key, key.def);
  if (!value) return concat("its default is ", key.def, ", which is not a value of its type");
  return in_range(key, *value) ? "" : concat("its default ", key.def, " is outside its range or choices");
}

std::string value_problem(const zr_key& key, const std::string& text) {
  static constexpr std::array<const char*, 8> kTypes{"",       "true or false",     "an integer", "a number",
                                                     "a text", "a number of bytes", "a duration", "a list of numbers"};
  auto value = parse_value(key, text);
  if (!value && key.type == ZR_KEY_STRING) value = text;  // the command line need not quote
  if (!value) return concat(text, " is not ", key.type < kTypes.size() ? kTypes[key.type] : "a value of its type");
  if (in_range(key, *value)) return "";
  return key.choices ? concat(text, " is not one of ", key.choices)
                     : concat(text, " is not from ", key.min, " to ", key.max);
}

KeyValues values_of(const zr_component& component, const KeyTexts& texts) {
  KeyValues values;
  for (uint32_t i = 0; i < component.n_keys; ++i) {
    const zr_key& key = *component.keys[i];
    const auto given = texts.find(key.name);
    if (given == texts.end() && !key.def) {
      values[key.name] = invented_value(key);
      continue;
    }
    const std::string text = given != texts.end() ? given->second : key.def;
    auto value = parse_value(key, text);
    if (!value && key.type == ZR_KEY_STRING) value = text;  // the command line need not quote
    if (!value) fail("key '", key.name, "': ", text, " is not a value of its type");
    values[key.name] = *value;
  }
  return values;
}

KeyValues smallest_sizes(const zr_component& component, KeyValues values) {
  for (uint32_t i = 0; i < component.n_keys; ++i) {
    const zr_key& key = *component.keys[i];
    if ((key.type == ZR_KEY_BYTES || key.type == ZR_KEY_INT) && std::isfinite(key.min))
      values[key.name] = static_cast<int64_t>(key.min);
  }
  return values;
}

}  // namespace zr::conform
