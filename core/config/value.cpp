#include "config/value.hpp"

#include <fmt/format.h>

#include <cmath>
#include <sstream>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/document_tree.hpp"

namespace zr::host::config {

namespace {

// The beginning of a long text.
std::string shortened(const std::string& text) {
  constexpr std::size_t kMax = 200;
  if (text.size() <= kMax) return text;
  return fmt::format("{}... ({} bytes)", text.substr(0, kMax), text.size());
}

std::string shown(const toml::node& node) {
  if (node.is_table()) return "a table";
  if (node.is_array()) return "an array";
  if (const auto* text = node.as_string()) return toml_quoted(shortened(text->get()));
  if (const auto* real = node.as_floating_point()) return toml_text(Value(real->get()));
  std::ostringstream out;
  node.visit([&](const auto& value) { out << value; });
  return out.str();
}

std::string expected(std::string_view what, const toml::node& node) {
  return fmt::format("expected {}, found {}", what, shown(node));
}

ParsedValue valid(Value value) {
  std::string text = toml_text(value);
  return {std::move(value), std::move(text), ""};
}
ParsedValue wrong(std::string problem) { return {{}, {}, std::move(problem)}; }

std::optional<double> number(const toml::node& node) {
  if (const auto* as_int = node.as_integer()) return static_cast<double>(as_int->get());
  if (const auto* real = node.as_floating_point()) return real->get();
  return {};
}

ParsedValue parse_bytes_value(const toml::node& node) {
  const auto* text = node.as_string();
  const auto* as_int = node.as_integer();
  const auto size = text ? parse_bytes(text->get()) : as_int ? std::optional(as_int->get()) : std::nullopt;
  if (!size) return wrong(expected("a size in whole bytes such as \"32MiB\" or 4096", node));
  return {*size, text ? toml_quoted(text->get()) : std::to_string(*size), ""};
}

ParsedValue parse_duration_value(const toml::node& node) {
  const auto* text = node.as_string();
  const auto seconds = text ? parse_duration(text->get()) : std::nullopt;
  if (!seconds) return wrong(expected("a duration such as \"30s\" or \"5min\"", node));
  return {*seconds, toml_quoted(text->get()), ""};
}

ParsedValue parse_floats_value(const toml::node& node) {
  std::vector<double> numbers;
  const auto* list = node.as_array();
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    const auto element = number(*list->get(i));
    if (!element) return wrong(expected("a number", *list->get(i)));
    numbers.push_back(*element);
  }
  return list ? valid(std::move(numbers)) : wrong(expected("an array of numbers such as [0.9, 0.999]", node));
}

ParsedValue parse_patterns_value(const toml::node& node) {
  std::vector<std::string> patterns;
  const auto* list = node.as_array();
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    const auto* text = list->get(i)->as_string();
    if (!text || text->get().empty()) return wrong(expected("a name pattern such as \"*.bias\"", *list->get(i)));
    patterns.push_back(text->get());
  }
  return list ? valid(std::move(patterns))
              : wrong(expected("an array of name patterns such as [\"*.bias\", \"norm*\"]", node));
}

ParsedValue parse_typed(const ConfigKey& key, const toml::node& node, const std::string* raw) {
  switch (key.type) {
    case ZR_KEY_BOOL:
      if (const auto* flag = node.as_boolean()) return valid(flag->get());
      return wrong(expected("true or false", node));
    case ZR_KEY_INT:
      if (const auto* as_int = node.as_integer()) return valid(as_int->get());
      return wrong(expected("an integer", node));
    case ZR_KEY_FLOAT:
      if (const auto real = number(node)) return valid(*real);
      return wrong(expected("a number", node));
    case ZR_KEY_STRING:
      if (const auto* text = node.as_string()) return valid(text->get());
      if (raw && !node.is_table() && !node.is_array()) return valid(*raw);
      return wrong(expected("a string", node));
    case ZR_KEY_BYTES: return parse_bytes_value(node);
    case ZR_KEY_DURATION: return parse_duration_value(node);
    case ZR_KEY_FLOATS: return parse_floats_value(node);
    case kPatterns: return parse_patterns_value(node);
    default: fail_internal(fmt::format("key '{}' has the unknown type {}", key.path(), key.type));
  }
}

std::string range_problem(const ConfigKey& key, const ParsedValue& got) {
  std::vector<double> numbers;
  if (const auto* as_int = std::get_if<int64_t>(&got.value)) numbers = {static_cast<double>(*as_int)};
  if (const auto* real = std::get_if<double>(&got.value)) numbers = {*real};
  if (const auto* list = std::get_if<std::vector<double>>(&got.value)) numbers = *list;
  for (const double number : numbers) {
    if (!std::isfinite(number)) return "expected a finite number, found " + got.written;
    if (number < key.min || number > key.max) return fmt::format("expected {}, found {}", range_text(key), got.written);
  }
  const auto* text = std::get_if<std::string>(&got.value);
  if (!text || key.choices.empty()) return "";
  for (const auto& choice : key.choices)
    if (choice == *text) return "";
  const std::string near = nearest(*text, key.choices);
  return fmt::format("expected one of {}, found {}{}", range_text(key), got.written,
                     near.empty() ? "" : fmt::format("; did you mean {}?", toml_quoted(near)));
}

}  // namespace

std::string source_text(const toml::node& node) {
  if (!node.is_array()) return shown(node);
  std::string text;
  for (const toml::node& element : *node.as_array()) {
    text += (text.empty() ? "" : ", ") + shown(element);
    if (text.size() > 200) return fmt::format("[{}, ...]", text);
  }
  return fmt::format("[{}]", text);
}

ParsedValue parse_value(const ConfigKey& key, const toml::node& node, const std::string* raw) {
  ParsedValue got = parse_typed(key, node, raw);
  if (const auto* text = std::get_if<std::string>(&got.value); text && text->find('\0') != text->npos)
    return wrong("expected a text without NUL characters, found " + toml_quoted(shortened(*text)));
  if (got.problem.empty()) got.problem = range_problem(key, got);
  return got;
}

ParsedValue default_value(const ConfigKey& key) {
  try {
    const toml::table parsed = toml::parse("x = " + key.def);
    return parse_value(key, *parsed.get("x"), nullptr);
  } catch (const toml::parse_error&) {
    return wrong(fmt::format("'{0}' is not a TOML value; a text has quotes of its own, in C \"\\\"{0}\\\"\"", key.def));
  }
}

std::string toml_quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += fmt::format("\\u{:04X}", static_cast<unsigned char>(c));
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

}  // namespace zr::host::config
