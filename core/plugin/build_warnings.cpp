// Warnings about how a loaded library was built.
#include <fmt/format.h>

#include <algorithm>
#include <boost/core/demangle.hpp>
#include <cmath>

#include "base/text.hpp"
#include "plugin/elf.hpp"
#include "plugin/library_loader.hpp"

namespace zr::host::plugin {

namespace {

constexpr std::size_t kShownNames = 3, kShownLength = 60;

bool is_expected(const std::string& name) { return name == "zr_module_v1" || name.rfind("zr_tag_", 0) == 0; }

// A symbol's name in C++, cut after kShownLength bytes.
std::string shown(const ExportedSymbol& symbol) {
  const std::string name = printable(boost::core::demangle(symbol.name.c_str()));
  return name.size() <= kShownLength ? name : fmt::format("{}...", name.substr(0, kShownLength));
}

std::string count_text(std::size_t n, const char* singular, const char* plural) {
  return fmt::format("{} {}", n, n == 1 ? singular : plural);
}

}  // namespace

std::string exports_warning(const std::filesystem::path& file) {
  std::vector<ExportedSymbol> extra = all_exports(file);
  std::erase_if(extra, [](const ExportedSymbol& symbol) { return is_expected(symbol.name); });
  if (extra.empty()) return "";
  std::sort(extra.begin(), extra.end(), [](const auto& a, const auto& b) {
    return a.unique != b.unique ? a.unique : a.name < b.name;  // unique ones first: they are the worst
  });
  std::string names;
  for (std::size_t i = 0; i < std::min(extra.size(), kShownNames); ++i)
    names += (names.empty() ? "" : ", ") + shown(extra[i]);
  if (extra.size() > kShownNames) names += ", ...";
  const auto unique = std::count_if(extra.begin(), extra.end(), [](const auto& symbol) { return symbol.unique; });
  const std::string shared = unique == 0 ? ""
                                         : fmt::format("; {} STB_GNU_UNIQUE, which all libraries of the process share",
                                                       count_text(static_cast<std::size_t>(unique), "is", "are"));
  return fmt::format(
      "it exports {} in addition to zr_module_v1 and its tags ({}){}; link it with -Wl,--version-script=zr.map, as "
      "zr_add_plugin() and `pkg-config --libs zeroth-sdk` do",
      count_text(extra.size(), "symbol", "symbols"), names, shared);
}

std::string multiply_add_warning(zr_multiply_add multiply_add) {
  // a * a is 1 + 2^-11 + 2^-24, and 1 + 2^-11 once rounded to fp32.
  const float a = 1 + std::ldexp(1.0f, -12), rounded = 1 + std::ldexp(1.0f, -11);
  if (!multiply_add || multiply_add(a, a, -rounded) == 0) return "";
  return "it is compiled with fused multiply-add, so its updates differ from those of machines without it; compile it "
         "with -ffp-contract=off, as zr_add_plugin() and `pkg-config --cflags zeroth-sdk` do";
}

}  // namespace zr::host::plugin
