#include "base/terminal.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace zr::host {

namespace {
constexpr int kUnknownColumns = 80;

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}
}  // namespace

bool is_terminal(int fd) { return ::isatty(fd) == 1 && variable("TERM") != "dumb"; }

bool colours_wanted() { return variable("NO_COLOR").empty() && variable("TERM") != "dumb"; }

int terminal_columns(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUnknownColumns;
}

int terminal_columns(const std::string& device) {
  const int fd = ::open(device.c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return kUnknownColumns;
  const int columns = terminal_columns(fd);
  ::close(fd);
  return columns;
}

std::string truncated(const std::string& text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  while (max_bytes > 0 && (static_cast<unsigned char>(text[max_bytes]) & 0xc0) == 0x80) --max_bytes;
  return text.substr(0, max_bytes);
}

std::string progress_bar(double fraction, int columns) {
  const int cells = std::max(columns - 2, 0);
  const double part = fraction > 0 ? std::min(fraction, 1.0) : 0;  // also 0 for NaN
  const auto done = static_cast<std::size_t>(std::floor(part * cells));
  return fmt::format("[{}{}]", std::string(done, '#'), std::string(static_cast<std::size_t>(cells) - done, '.'));
}

}  // namespace zr::host
