// A search for the largest number for which a program succeeds, within a time.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace zr::testing {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct Try {
  bool fits = false, cut_off = false;
  std::string last_line;  // of the output: the result, or what failed
};

inline std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

// Runs the program in a process of its own, which ends after `limit` at the latest.
inline Try run_try(const std::vector<std::string>& program, Seconds limit) {
  const int64_t seconds = std::max<int64_t>(1, std::llround(std::min(limit.count(), 1e6)));
  // A process that is killed leaves its files.
  const auto folder = std::filesystem::temp_directory_path() / ("gpu_largest_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  std::string command =
      "TMPDIR=" + quoted(folder) + " timeout --foreground --kill-after=5 " + std::to_string(seconds) + " ";
  for (const std::string& word : program) command += quoted(word) + " ";
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  FILE* const output = ::popen((command + "2>&1").c_str(), "r");
  if (!output) throw std::runtime_error("cannot start " + command);
  Try result;
  std::array<char, 4096> line{};
  while (std::fgets(line.data(), line.size(), output)) {
    const std::string text(line.data(), std::string(line.data()).find_last_not_of('\n') + 1);
    const bool is_kept = result.last_line.find("error: ") != std::string::npos || result.last_line.starts_with("{\"");
    if (!text.empty() && !is_kept) result.last_line = text;
  }
  const int status = ::pclose(output);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  result.fits = code == 0;
  result.cut_off = (code == 124 || code == 137) && Clock::now() >= end;
  if (code > 128) result.last_line = "ended by signal " + std::to_string(code - 128);
  return result;
}

inline std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text)
    if (c == '"' || c == '\\')
      (result += '\\') += c;
    else if (static_cast<unsigned char>(c) >= ' ')
      result += c;
  return result;
}

struct Found {
  int64_t number = 0;  // 0: none
  std::string result;  // what the program printed
  bool complete = false;
};

// Searches the largest number from 1 to `most` that fits, within a fortieth.
struct Search {
  std::string row;
  std::string way;
  int64_t first, most;
  std::function<Try(int64_t, Seconds)> attempt;
  Clock::time_point end;

  // Prints the result with the first number that does not fit.
  Found run() const {
    const auto seconds_left = [&] { return Seconds(end - Clock::now()); };
    int64_t fits = 0, fails = most + 1;
    Try best, worst;
    bool complete = false;
    for (int64_t n = std::min(first, most); seconds_left().count() > 0;) {
      const auto begin = Clock::now();
      const Try tried = attempt(n, seconds_left());
      std::printf("{\"try\": %ld, \"way\": \"%s\", \"fits\": %s, \"seconds\": %.1f}\n", static_cast<long>(n),
                  way.c_str(),
                  tried.fits      ? "true"
                  : tried.cut_off ? "null"
                                  : "false",
                  Seconds(Clock::now() - begin).count());
      if (tried.cut_off) break;
      (tried.fits ? fits : fails) = n;
      (tried.fits ? best : worst) = tried;
      complete = fits + 1 >= fails || fails - fits <= std::max<int64_t>(1, fits / 40);
      if (complete) break;
      n = fails > most ? std::min(2 * n, most) : (fits + fails) / 2;
    }
    if (!complete) worst.last_line = "the time of the search is over; " + worst.last_line;
    std::printf(
        "{\"row\": \"%s\", \"way\": \"%s\", \"largest\": %ld, \"result\": %s, \"fails\": %ld, \"complete\": %s, "
        "\"reason\": \"%s\"}\n",
        row.c_str(), way.c_str(), static_cast<long>(fits), fits > 0 ? best.last_line.c_str() : "null",
        static_cast<long>(fails > most ? 0 : fails), complete ? "true" : "false", escaped(worst.last_line).c_str());
    return {fits, best.last_line, complete};
  }
};

}  // namespace zr::testing
