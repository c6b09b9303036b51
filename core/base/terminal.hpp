// What a terminal shows: its width, colours, progress bars. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace zr::host {

/// True if `fd` is a terminal that can redraw a line (TERM is not "dumb").
bool is_terminal(int fd);
/// True if text for a terminal can have colours: NO_COLOR is unset or empty, and TERM is not "dumb".
bool colours_wanted();
/// The columns of the terminal `fd`; 80 if it is not a terminal or its size is unknown.
int terminal_columns(int fd);
/// The columns of the terminal with this device file ("/dev/pts/0"); 80 if it cannot be opened.
int terminal_columns(const std::string& device);

inline constexpr std::string_view kClearLine = "\r\033[K", kGreen = "\033[32m", kYellow = "\033[33m",
                                  kPlainColour = "\033[0m";
/// Around the progress bar of a rank. They erase the line before the bar and nothing after it, but in these spellings
/// they also tell the launcher that text of the program before the bar stays, and that text after the bar replaces it.
inline constexpr std::string_view kBarBegin = "\r\033[2K\033[2K", kBarEnd = "\033[0K";

/// The first bytes of UTF-8 text, at most `max_bytes`, without a part of a character.
std::string truncated(const std::string& text, std::size_t max_bytes);
/// "[#####...............]", `columns` wide. `fraction` is clamped to 0..1.
std::string progress_bar(double fraction, int columns);

}  // namespace zr::host
