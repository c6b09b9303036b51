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

void TaggedOutput::packet(std::string_view text) {
  const std::string all = std::exchange(maybe_tag_, "") + std::string(text);
  bool continues = may_continue_ && !line_ended_;
  may_continue_ = text.size() >= max_packet_;
  for (std::string_view left = all; !left.empty();) {
    left = begin_line(left, std::exchange(continues, false));
    line_ended_ = true;
    if (!maybe_tag_.empty()) return;
    const auto end = left.find('\n');
    const std::string_view part = left.substr(0, end == left.npos ? end : end + 1);
    left.remove_prefix(part.size());
    line_ended_ = end != left.npos;
    pass(part);
  }
}

// Reads the tag that begins `text`, if there is one, and returns what follows it; "" if the next packet may complete
// it. continues: without a tag, the text is the rest of the last packet's line.
std::string_view TaggedOutput::begin_line(std::string_view text, bool continues) {
  const std::optional<Tag> tag = tag_of(text.substr(0, kMaxTagBytes));
  if (tag && !tag->bytes && may_continue_) {
    maybe_tag_ = text;
    return "";
  }
  if (tag && tag->bytes) {
    end_own_line();
    rank_ = tag->rank;
    error_ = tag->error;
    text.remove_prefix(tag->bytes);
  } else if (!continues) {
    rank_ = -1;
  }
  return text;
}

void TaggedOutput::end() {
  if (!maybe_tag_.empty()) rank_ = -1;
  pass(std::exchange(maybe_tag_, ""));
  end_own_line();
}

void TaggedOutput::pass(std::string_view part) {
  if (part.empty()) return;
  if (rank_ >= 0) return sink_(rank_, error_, part);
  const bool ends = part.ends_with('\n');
  own_line_ += part.substr(0, part.size() - (ends ? 1 : 0));
  if (ends) end_own_line();
}

void TaggedOutput::end_own_line() {
  if (!own_line_.empty()) sink_(-1, false, std::exchange(own_line_, ""));
}

}  // namespace zr::host::cli
