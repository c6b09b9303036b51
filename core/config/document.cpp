#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/path.hpp"
#include "base/text.hpp"
#include "config/config.hpp"
#include "config/document_tree.hpp"
#include "config/path_value.hpp"
#include "config/setting_of.hpp"

namespace zr::host::config {

namespace {

constexpr std::string_view kCommandLine = "command line", kProgram = "zr::Configuration::set";

constexpr std::size_t kMaxBytes = 4u << 20;  // of a TOML file
constexpr std::size_t kMaxDepth = 32;        // nesting of tables and arrays: their readers are recursive

// Ranks read the file again, so it must be a regular file. With O_NONBLOCK, opening a pipe does not wait for a writer.
std::string read_toml(const std::string& file) {
  const int fd = ::open(file.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  struct stat status {};
  const bool opened = fd >= 0 && ::fstat(fd, &status) == 0;
  const int error = errno;
  std::string text, problem;
  if (!opened) {
    problem = std::string("cannot be read: ") + std::strerror(error);
  } else if (!S_ISREG(status.st_mode)) {
    problem = fmt::format("is {}, not a regular file", file_kind_text(status.st_mode));
  } else {
    std::array<char, 65536> buffer;
    ssize_t got = 0;
    while (text.size() <= kMaxBytes && (got = ::read(fd, buffer.data(), buffer.size())) > 0)
      text.append(buffer.data(), static_cast<std::size_t>(got));
    if (got < 0) problem = std::string("cannot be read: ") + std::strerror(errno);
    if (text.size() > kMaxBytes) problem = "is larger than " + bytes_text(kMaxBytes);
  }
  if (fd >= 0) ::close(fd);
  if (!problem.empty()) fail_user(fmt::format("{}: {}; name a TOML file", file, problem));
  return text;
}

// Finds nesting that is too deep. toml++ limits only the brackets of values, and frees its tree recursively. Skips
// strings and comments, and leaves text that is not TOML to the parser.
class NestingCheck {
 public:
  explicit NestingCheck(std::string_view text) : text_(text) {}

  // The first position, as "line:column", where brackets or the parts of a dotted key nest too deep; "" if they do not.
  std::string too_deep_at() {
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '#') {
        skip_comment();
      } else if (c == '"' || c == '\'') {
        skip_string(c);
      } else {
        count(c);
      }
      if (brackets_ > kMaxDepth || dots_ >= kMaxDepth)
        return fmt::format("{}:{}", line_, at_ - std::min(at_, line_begin_) + 1);
    }
    return "";
  }

 private:
  bool starts(std::string_view what) const { return text_.substr(at_, what.size()) == what; }

  void begin_line() {
    ++line_;
    line_begin_ = at_ + 1;
  }

  // Ends on the last character of the line.
  void skip_comment() {
    while (at_ + 1 < text_.size() && text_[at_ + 1] != '\n') ++at_;
  }

  // Ends on the last character of the string, or before the end of the line that does not end it.
  void skip_string(char quote) {
    const bool block = starts(quote == '"' ? "\"\"\"" : "'''");
    const std::string end(block ? 3 : 1, quote);
    for (at_ += end.size(); at_ < text_.size() && !starts(end); ++at_) {
      if (text_[at_] == '\n') {
        if (!block) break;
        begin_line();
      }
      if (quote == '"' && text_[at_] == '\\') ++at_;
    }
    if (at_ < text_.size() && starts(end))
      at_ += end.size() - 1;
    else
      --at_;
  }

  void count(char c) {
    switch (c) {
      case '.': ++dots_; return;
      case '[':
      case '{': ++brackets_; break;
      case ']':
      case '}': brackets_ -= brackets_ > 0 ? 1 : 0; break;
      case '\n': begin_line(); break;
      case ',':
      case '=': break;
      default: return;
    }
    dots_ = 0;  // the character ends a key
  }

  const std::string_view text_;
  std::size_t at_ = 0, brackets_ = 0, dots_ = 0, line_ = 1, line_begin_ = 0;
};

std::string too_deep_at(std::string_view text) { return NestingCheck(text).too_deep_at(); }

std::vector<std::string> parts_of(const std::string& path) {
  std::vector<std::string> parts;
  std::string part;
  for (std::istringstream in(path + "."); std::getline(in, part, '.');) parts.push_back(part);
  return parts;
}

// "20" -> an integer, "5min" -> a string: text that is not a TOML value is a bare word.
toml::table parsed_override(const std::string& text, std::string_view from) {
  if (text.size() <= kMaxBytes && too_deep_at(text).empty()) try {
      toml::table table = toml::parse("x = " + text, from);
      if (table.size() == 1) return table;
    } catch (const toml::parse_error&) {  // not a TOML value: a text without quotes
    }
  return toml::parse("x = " + toml_quoted(text), from);
}

void move_in(toml::table& table, const std::string& name, toml::node& node) {
  node.visit([&](auto& value) { table.insert_or_assign(name, std::move(value)); });
}

bool is_role(const std::string& name) {
  for (const auto& role : roles())
    if (role == name) return true;
  return false;
}

// `strategy = "id"` becomes [strategy] use = "id".
toml::table& as_role_table(toml::table& root, const std::string& role) {
  toml::node* node = root.get(role);
  if (!node || !node->is_table()) {
    toml::table table;
    if (node) move_in(table, "use", *node);
    root.insert_or_assign(role, std::move(table));
  }
  return *root.get_as<toml::table>(role);
}

// The remedy if toml++ reports that a role is both a string and a table.
std::string remedy(std::string_view parser_message) {
  for (const auto& role : roles())
    if (parser_message.find(fmt::format("existing string '{}.", role)) != parser_message.npos)
      return fmt::format("; write [{}] with use = \"...\" in it instead of {} = \"...\"", role, role);
  return "";
}

// The group `number` (0 is the first) of optimizer.groups, or a new one after the last. `where`: the override, for
// messages.
toml::table& group_table(toml::table& optimizer, const std::string& number, const std::string& where) {
  if (!optimizer.get("groups")) optimizer.insert("groups", toml::array{});
  toml::array* groups = optimizer.get_as<toml::array>("groups");
  if (!groups || !groups->is_homogeneous(toml::node_type::table))
    if (!groups || !groups->empty()) fail_user(where + ": optimizer.groups is not an array of tables");
  std::size_t index = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
  if (error != std::errc() || end != number.data() + number.size() || index > groups->size())
    fail_user(fmt::format("{}: '{}' is not the number of a group; there {} {}, and 0 is the first", where, number,
                          groups->size() == 1 ? "is" : "are",
                          groups->size() == 1 ? "1 group" : fmt::format("{} groups", groups->size())));
  if (index == groups->size()) groups->push_back(toml::table{});
  return *(*groups)[index].as_table();
}

// The table of the value at `parts`; makes those that do not exist.
toml::table& table_of(toml::table& root, const std::vector<std::string>& parts, const std::string& where) {
  toml::table* table = &root;
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
    if (i == 0 && is_role(parts[0])) {
      table = &as_role_table(root, parts[0]);
      continue;
    }
    if (i == 1 && parts[0] == "optimizer" && parts[1] == "groups") {
      if (parts.size() != 4)
        fail_user(where + ": a key of a group is optimizer.groups.NUMBER.KEY; 0 is the first group");
      return group_table(*table, parts[2], where);
    }
    if (!table->get(parts[i])) table->insert(parts[i], toml::table{});
    toml::node* next = table->get(parts[i]);
    if (!next->is_table()) fail_user(fmt::format("{}: '{}' is a value, not a table", where, parts[i]));
    table = next->as_table();
  }
  return *table;
}

// from: kCommandLine or kProgram.
void apply_override(toml::table& root, const std::string& text, std::string_view from,
                    std::map<std::string, std::string>& raw) {
  const std::string prefix = std::string(from) + ": ";
  const auto equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    fail_user(fmt::format("{}'{}' is not an override; write path=value, as in train.steps=20", prefix, text));
  std::string path = text.substr(0, equals);
  auto parts = parts_of(path);
  if (parts.size() > kMaxDepth)
    fail_user(fmt::format("{}'{}...' has {} parts; a key has at most {}", prefix, path.substr(0, 60), parts.size(),
                          kMaxDepth));
  for (const auto& part : parts)
    if (part.empty() || part.find_first_of(" \t\"'[]") != std::string::npos || find_not_utf8(part) != part.npos)
      fail_user(fmt::format("{}'{}' is not a dotted path of bare keys such as train.steps", prefix, path));
  const std::string value_text = text.substr(equals + 1);
  if (const auto at = find_not_utf8(value_text); at != value_text.npos)
    fail_user(
        fmt::format("{}{}: byte {} of the value is not UTF-8: '{}'; write the value as UTF-8, and rename a file "
                    "or folder whose name is not UTF-8",
                    prefix, path, at + 1, printable(value_text.substr(0, 200))));
  toml::table value = parsed_override(value_text, from);
  const bool names_role = parts.size() == 1 && is_role(parts[0]) && !value.get("x")->is_table();
  if (names_role) {
    parts.push_back("use");
    path += ".use";
  }
  move_in(table_of(root, parts, prefix + path), parts.back(), *value.get("x"));
  raw[path] = value_text;
}

}  // namespace

Origin origin_of(const toml::source_region& region) {
  Origin origin;
  if (!region.path) return origin;
  origin.file = *region.path;
  origin.from = origin.file == kCommandLine ? Origin::From::command_line
                : origin.file == kProgram   ? Origin::From::program
                                            : Origin::From::file;
  origin.line = static_cast<int>(region.begin.line);
  origin.column = static_cast<int>(region.begin.column);
  return origin;
}

Origin node_origin(const toml::node& node) {
  const Origin origin = origin_of(node.source());
  const toml::table* table = node.as_table();
  return origin.from == Origin::From::key_default && table && !table->empty() ? node_origin(table->begin()->second)
                                                                              : origin;
}

Origin key_origin(const toml::key& key, const toml::node& node) {
  const Origin origin = origin_of(key.source());
  const Origin value = node_origin(node);
  return origin.from == Origin::From::file && value.from == Origin::From::file ? origin : value;
}

const toml::node* node_at(const toml::table& root, std::string_view path) {
  const toml::table* table = &root;
  for (;;) {
    const auto dot = path.find('.');
    const toml::node* node = table->get(path.substr(0, dot));
    if (dot == path.npos || !node) return node;
    if (!node->is_table()) return nullptr;
    table = node->as_table();
    path.remove_prefix(dot + 1);
  }
}

Document Document::load(const std::string& file, const std::vector<std::string>& overrides,
                        const std::vector<std::string>& values) {
  return parsed(read_toml(file), {file, folder_of(file), ""}, values, overrides);
}

Document Document::parse(const std::string& toml, const std::string& file, const std::vector<std::string>& overrides,
                         const std::vector<std::string>& values, const std::string& run_name) {
  std::error_code error;
  return parsed(toml, {file, std::filesystem::current_path(error).string(), run_name}, values, overrides);
}

Document Document::parsed(const std::string& toml, const Source& source, const std::vector<std::string>& values,
                          const std::vector<std::string>& overrides) {
  auto tree = std::make_shared<Tree>();
  static_cast<Source&>(*tree) = source;
  if (const std::string at = too_deep_at(toml); !at.empty())
    fail_user(fmt::format("{}:{}: tables and arrays are nested deeper than {} levels", source.file, at, kMaxDepth));
  try {
    tree->root = toml::parse(toml, source.file);
  } catch (const toml::parse_error& error) {
    fail_user(
        fmt::format("{}: {}{}", origin_of(error.source()).text(), error.description(), remedy(error.description())));
  }
  for (const auto& assignment : values) apply_override(tree->root, assignment, kProgram, tree->overrides);
  for (const auto& assignment : overrides) apply_override(tree->root, assignment, kCommandLine, tree->overrides);
  Document document;
  document.tree_ = std::move(tree);
  return document;
}

const std::string& Document::file() const { return tree_->file; }

std::string Document::chosen(const std::string& role, Origin* origin) const {
  const Entry entry = host_entry(role);
  if (origin) *origin = entry.origin;
  std::string id = std::get<std::string>(entry.value);
  if (role != "communicator" || id != kAutomatic) return id;
  if (!automatic_communicator_.empty()) return automatic_communicator_;
  return several_hosts_ ? ZR_HOSTS_COMMUNICATOR : ZR_HOST_COMMUNICATOR;
}

bool Document::has_table(const std::string& role, const std::string& id) const {
  return node_at(tree_->root, fmt::format("{}.{}", role, id)) != nullptr;
}

std::string Document::misspelt(const std::string& role) const {
  const auto message = [](const toml::key& key, const std::string& path, const std::string& right) {
    return fmt::format("{}: unknown key '{}'; did you mean '{}'?", origin_of(key.source()).text(), path, right);
  };
  for (const auto& [key, node] : tree_->root)
    if (const std::string name(key.str()); !is_role(name) && nearest(name, roles()) == role)
      return message(key, name, role);
  if (const toml::table* table = tree_->root[role].as_table())
    for (const auto& [key, node] : *table)
      if (!node.is_table() && !nearest(key.str(), {"use"}).empty())
        return message(key, fmt::format("{}.{}", role, key.str()), role + ".use");
  return "";
}

Entry Document::host_entry(const std::string& path) const {
  for (const ConfigKey& key : host_keys()) {
    if (key.path() != path) continue;
    std::string at = path;
    const toml::node* node = node_at(tree_->root, at);
    if (node && node->is_table() && is_role(path)) node = node_at(tree_->root, at += ".use");
    if (!node) {
      ParsedValue standard = default_value(key);
      Entry entry{key, std::move(standard.value), std::move(standard.written), {}};
      resolve_path_value(entry, tree_->folder);
      return entry;
    }
    const auto raw = tree_->overrides.find(at);
    ParsedValue got = parse_value(key, *node, raw == tree_->overrides.end() ? nullptr : &raw->second);
    const Origin origin = origin_of(node->source());
    if (!got.problem.empty()) fail_user(fmt::format("{}: {}: {}", origin.text(), at, got.problem));
    Entry entry{key, std::move(got.value), std::move(got.written), origin};
    if (const std::string problem = resolve_path_value(entry, tree_->folder); !problem.empty())
      fail_user(fmt::format("{}: {}: {}", origin.text(), at, problem));
    return entry;
  }
  fail_internal(fmt::format("the engine declares no key '{}'", path));
}

std::vector<Setting<std::string>> Document::group_optimizers() const {
  std::vector<Setting<std::string>> list;
  const toml::node* groups = node_at(tree_->root, "optimizer.groups");
  if (!groups || !groups->is_array_of_tables()) return list;
  for (const auto& table : *groups->as_array()) {
    const auto* use = table.as_table()->get_as<std::string>("use");
    if (use && std::none_of(list.begin(), list.end(), [&](const auto& one) { return one.value == use->get(); }))
      list.push_back({use->get(), "optimizer.groups.use", toml_text(use->get()), origin_of(use->source())});
  }
  return list;
}

Setting<std::string> Document::program() const { return setting_of<std::string>(host_entry("job.program")); }

Setting<std::string> Document::device() const { return setting_of<std::string>(host_entry("job.device")); }

bool Document::chooses_communicator() const {
  return std::get<std::string>(host_entry("communicator").value) == kAutomatic;
}

std::vector<std::string> Document::inexact_collectives() const {
  std::vector<std::string> settings;
  for (const char* path : {"communicator.exact", "communicator.gradients", "communicator.weights"})
    if (const Entry entry = host_entry(path); entry.value != default_value(entry.key).value)
      settings.push_back(fmt::format("{} = {}", path, entry.written));
  return settings;
}

Setting<int> Document::ranks() const { return setting_of<int>(host_entry("job.ranks")); }

Setting<std::chrono::milliseconds> Document::timeout() const {
  return setting_of<std::chrono::milliseconds>(host_entry("communicator.timeout"));
}

std::vector<Setting<TierChoice>> Document::tier_choices() const {
  std::vector<Setting<TierChoice>> choices;
  for (const char* path : {"offload.optimizer", "offload.gradients", "offload.parameters", "offload.activations"})
    choices.push_back(setting_of<TierChoice>(host_entry(path)));
  return choices;
}

Setting<std::vector<std::string>> Document::tiers() const {
  return setting_of<std::vector<std::string>>(host_entry("offload.tiers"));
}

}  // namespace zr::host::config
