#include "base/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <vector>

namespace zr::host {

std::string shortest(double value) {
  std::array<char, 40> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

std::string bytes_text(int64_t bytes) {
  static constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; std::fabs(value) >= 1024 && unit + 1 < units.size(); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{:.0f} {}", value, units[unit]) : fmt::format("{:.2f} {}", value, units[unit]);
}

std::string bytes_text_beside(int64_t bytes, int64_t other) {
  const std::string text = bytes_text(bytes);
  return text == bytes_text(other) ? fmt::format("{} ({} bytes)", text, bytes) : text;
}

std::string duration_text(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f}s", seconds);
  const auto rounded = static_cast<int64_t>(seconds + 0.5);
  if (rounded < 3600) return fmt::format("{}m {:02}s", rounded / 60, rounded % 60);
  return fmt::format("{}h {:02}m", rounded / 3600, rounded % 3600 / 60);
}

namespace {
struct Unit {
  std::string_view name;
  double factor;
};

template <std::size_t N>
std::optional<double> parse_with(std::string_view text, const std::array<Unit, N>& units, bool unit_needed) {
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value) || value < 0) return {};
  std::string_view unit(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  if (unit.empty() && !unit_needed) return value;
  for (const auto& [name, factor] : units)
    if (unit == name) return value * factor;
  return {};
}
}  // namespace

std::optional<int64_t> parse_bytes(std::string_view text) {
  static constexpr std::array<Unit, 9> units{{{"B", 1},
                                              {"KiB", 1024.0},
                                              {"MiB", 1048576.0},
                                              {"GiB", 1073741824.0},
                                              {"TiB", 1099511627776.0},
                                              {"KB", 1e3},
                                              {"MB", 1e6},
                                              {"GB", 1e9},
                                              {"TB", 1e12}}};
  const auto value = parse_with(text, units, false);
  if (!value || *value != std::floor(*value) || *value > 9e18) return {};
  return static_cast<int64_t>(*value);
}

std::optional<double> parse_duration(std::string_view text) {
  static constexpr std::array<Unit, 5> units{{{"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}, {"d", 86400}}};
  return parse_with(text, units, true);
}

namespace {
// Length of the well-formed UTF-8 character at the start of `text`, its code point in `code`; 0: the byte is not UTF-8.
std::size_t utf8_character(std::string_view text, uint32_t& code) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  code = byte(0);
  if (code < 0x80) return 1;
  const std::size_t length = code >= 0xf0 ? 4 : code >= 0xe0 ? 3 : 2;
  if (code < 0xc2 || code > 0xf4 || text.size() < length) return 0;
  code &= 0x7fu >> length;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  static constexpr std::array<uint32_t, 5> smallest_code{0, 0, 0x80, 0x800, 0x10000};
  return code < smallest_code[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : length;
}

// Line and paragraph separators, and marks that change the direction of the text around them.
bool is_layout_mark(uint32_t code) {
  return code == 0x61c || (code >= 0x200e && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069);
}
}  // namespace

std::string printable(std::string_view text, std::string_view keep) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    uint32_t code = 0;
    const std::size_t length = utf8_character(text.substr(at), code);
    const std::string_view character = text.substr(at, std::max<std::size_t>(length, 1));
    at += character.size();
    if (length == 0) code = static_cast<unsigned char>(character[0]);
    const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
    if (length > 0 && ((!control && !is_layout_mark(code)) || (length == 1 && keep.find(character[0]) != keep.npos))) {
      out += character;
      continue;
    }
    if (code == '\n' || code == '\r' || code == '\t') {
      out += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
      continue;
    }
    out += length > 1 ? fmt::format("\\u{:04x}", code) : fmt::format("\\x{:02x}", code);
  }
  return out;
}

std::size_t find_not_utf8(std::string_view text) {
  uint32_t code = 0;
  for (std::size_t at = 0, length = 0; at < text.size(); at += length) {
    length = utf8_character(text.substr(at), code);
    if (length == 0) return at;
  }
  return std::string_view::npos;
}

bool matches_glob(std::string_view text, std::string_view pattern) {
  std::size_t t = 0, p = 0, star = std::string_view::npos, mark = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      mark = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++mark;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::optional<std::string> rewrite_glob(std::string_view text, std::string_view from, std::string_view to) {
  std::vector<std::string_view> matched;  // by each `*`
  const std::function<bool(std::string_view, std::string_view)> fits = [&](std::string_view t, std::string_view f) {
    if (f.empty()) return t.empty();
    if (f[0] != '*') return !t.empty() && t[0] == f[0] && fits(t.substr(1), f.substr(1));
    for (std::size_t n = 0; n <= t.size(); ++n) {
      matched.push_back(t.substr(0, n));
      if (fits(t.substr(n), f.substr(1))) return true;
      matched.pop_back();
    }
    return false;
  };
  if (!fits(text, from)) return {};
  std::string out;
  std::size_t next = 0;
  for (const char c : to) {
    if (c == '*' && next < matched.size())
      out += matched[next++];
    else
      out += c;
  }
  return out;
}

std::string shell_word(std::string_view word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=+,@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == word.npos) return std::string(word);
  const bool escapes = printable(word) != word;
  std::string text = escapes ? "$'" : "'";
  for (const char c : word) {
    const auto byte = static_cast<unsigned char>(c);
    if (escapes && (byte < 0x20 || byte >= 0x7f))
      text += fmt::format("\\x{:02x}", byte);
    else if (escapes && (c == '\'' || c == '\\'))
      text += fmt::format("\\{}", c);
    else
      text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return text + "'";
}

}  // namespace zr::host
