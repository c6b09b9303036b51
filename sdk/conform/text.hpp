// Text for results. This subsystem does not use {fmt}: zeroth-conform must run on machines without its library.
#pragma once

#include <sstream>
#include <string>

namespace zr::conform {

/// The parts as one text, as operator<< writes them.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// `text` on one line for a terminal: control characters become '?', and it has at most 300 bytes.
std::string one_line(const std::string& text);

/// "ZR_INVALID (1)"; "unknown code 77".
std::string code_text(int32_t code);

}  // namespace zr::conform
