#include "cli/tagged_output.hpp"

#include <charconv>
#include <optional>
#include <utility>

namespace zr::host::cli {

namespace {
constexpr std::size_t kMaxTagBytes = 40;

struct Tag {
  std::size_t bytes = 0;  // 0: more bytes are needed to tell
  int rank = 0;
  bool error = false;
};

// The tag that begins `text`; nothing if `text` begins with other bytes.
std::optional<Tag> tag_of(std::string_view text) {
  std::size_t at = 0;
  const auto is_next = [&](std::string_view expected) {  // true also where `text` ends
    const std::string_view next = text.substr(at, expected.size());
    at += next.size();
    return next == expected.substr(0, next.size());
  };
  const auto digits = [&] {
    const std::size_t begin = at;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
    return at == text.size() || at > begin;
  };
  if (!is_next("[") || !digits() || !is_next(",")) return {};
  const std::size_t number = at;
  if (!digits()) return {};
  const std::size_t number_end = at;
  if (!is_next("]<std")) return {};
  const std::string_view stream = text.substr(at, 3);
  for (const std::string_view name : {"out>:", "err>:", "diag>:"}) {
    if (stream != name.substr(0, stream.size())) continue;
    if (!is_next(name)) return {};
    if (at == text.size() && !text.ends_with(name)) return Tag{};
    Tag tag{at, 0, name != "out>:"};
    const auto [end, error] = std::from_chars(text.data() + number, text.data() + number_end, tag.rank);
    if (error != std::errc() || end != text.data() + number_end) return {};
    return tag;
  }
  return {};
}
}  // namespace

void TaggedOutput::bytes(std::string_view text) {
  const std::string all = std::exchange(maybe_tag_, "") + std::string(text);
  std::string_view left = all;
  std::size_t checked = 0;  // no tag begins before
  for (std::size_t at; (at = left.find('[', checked)) != left.npos;) {
    const std::optional<Tag> tag = tag_of(left.substr(at, kMaxTagBytes));
    if (!tag) {
      checked = at + 1;
      continue;
    }
    pass(left.substr(0, at));
    left.remove_prefix(at);
    if (!tag->bytes) {
      maybe_tag_ = left;
      return;
    }
    end_own_line();
    rank_ = tag->rank;
    error_ = tag->error;
    left.remove_prefix(tag->bytes);
    checked = 0;
  }
  pass(left);
}

void TaggedOutput::end() {
  pass(std::exchange(maybe_tag_, ""));
  end_own_line();
}

void TaggedOutput::pass(std::string_view text) {
  while (!text.empty()) {
    const auto end = text.find('\n');
    const std::string_view part = text.substr(0, end == text.npos ? end : end + 1);
    text.remove_prefix(part.size());
    if (rank_ >= 0) {
      sink_(rank_, error_, part);
    } else {
      own_line_ += part.substr(0, end);
    }
    if (end == part.npos) continue;
    if (rank_ < 0) end_own_line();
    rank_ = -1;
  }
}

void TaggedOutput::end_own_line() {
  if (!own_line_.empty()) sink_(-1, false, std::exchange(own_line_, ""));
}

}  // namespace zr::host::cli
