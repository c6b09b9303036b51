// Numbers, sizes, durations and untrusted text as text; parsing of sizes and durations; glob patterns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace zr::host {

/// Shortest text that reads back as the same double ("0.1", "1e-08", "nan", "inf").
std::string shortest(double value);
/// "1.50 GiB", "640 B".
std::string bytes_text(int64_t bytes);
/// bytes_text(), with the exact number if the text of `other` is the same: "1.00 MiB (1048577 bytes)".
std::string bytes_text_beside(int64_t bytes, int64_t other);
/// "1m 05s", "2h 03m", "4.2s".
std::string duration_text(double seconds);
/// "64KiB", "1.5 GiB", "100MB", "4096" -> bytes; nullopt if it is not a size.
std::optional<int64_t> parse_bytes(std::string_view text);
/// "250ms", "30s", "5min", "2h" -> seconds; nullopt if it is not a duration.
std::optional<double> parse_duration(std::string_view text);
/// `word` as one word of a shell: in quotes if it has other characters than those of
/// usual paths, and without control characters. Any thread.
std::string shell_word(std::string_view word);
/// The text up to its first newline: messages of libtorch have a stack trace after it. Any thread.
inline std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

/// `text` for a terminal or a log: control characters, Unicode line separators and direction marks, and bytes that are
/// not UTF-8 become escapes (\n, \x1b, \u202e), so that text from a file, a key or a peer can neither move the cursor
/// nor imitate another line. Characters in `keep` stay as they are; all other text is unchanged. Any thread.
std::string printable(std::string_view text, std::string_view keep = "");
/// The position of the first byte that is not part of a well-formed UTF-8 character; npos if all text is UTF-8.
std::size_t find_not_utf8(std::string_view text);
/// True if `text` matches `pattern`, in which `*` matches any sequence of characters.
bool matches_glob(std::string_view text, std::string_view pattern);
/// Rewrites `text`, which matches the pattern `from`, to the pattern `to`: the n-th `*` of `to` becomes the characters
/// that the n-th `*` of `from` matches, the shortest possible match. nullopt if `text` does not match.
std::optional<std::string> rewrite_glob(std::string_view text, std::string_view from, std::string_view to);

}  // namespace zr::host
