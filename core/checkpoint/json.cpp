#include "checkpoint/json.hpp"

#include <algorithm>
#include <unordered_set>

namespace zr::host::checkpoint {

namespace {
// Records the keys of all open objects.
class RepeatedKeys final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::optional<std::string> found;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    open_.emplace_back();
    return true;
  }
  bool key(string_t& name) override {
    if (!open_.back().insert(name).second) found = name;
    return !found;
  }
  bool end_object() override {
    open_.pop_back();
    return true;
  }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  std::vector<std::unordered_set<std::string>> open_;
};

// Builds one member of the outermost object at a time.
class Members final : public nlohmann::json_sax<nlohmann::json> {
 public:
  using Fn = std::function<void(const std::string&, const nlohmann::json&)>;
  explicit Members(const Fn& fn) : fn_(fn) {}
  std::optional<std::string> twice;
  bool is_object = false;

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override {
    if (is_object) return open(nlohmann::json::object());
    return is_object = true;
  }
  bool start_array(std::size_t) override { return open(nlohmann::json::array()); }
  bool key(string_t& name) override {
    if (open_.empty()) {
      names_.push_back(std::hash<std::string>()(name));
    } else if (open_.back()->contains(name)) {
      twice = std::move(name);
      return false;
    }
    key_ = std::move(name);
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }
  /// Whether two members may have the same name (their hashes are equal). Call it once, at the end.
  bool may_repeat() {
    std::sort(names_.begin(), names_.end());
    return std::adjacent_find(names_.begin(), names_.end()) != names_.end();
  }

 private:
  nlohmann::json* insert(nlohmann::json value) {
    if (open_.empty()) {
      name_ = key_;
      value_ = std::move(value);
      return &value_;
    }
    nlohmann::json& parent = *open_.back();
    if (parent.is_object()) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }
  bool add(nlohmann::json value) {
    if (!is_object) return false;
    insert(std::move(value));
    if (open_.empty()) fn_(name_, value_);
    return true;
  }
  bool open(nlohmann::json value) {
    if (!is_object) return false;
    open_.push_back(insert(std::move(value)));  // valid until close(): the parent does not grow before
    return true;
  }
  bool close() {
    if (open_.empty()) return true;  // the outermost object ends
    open_.pop_back();
    if (open_.empty()) fn_(name_, value_);
    return true;
  }

  const Fn& fn_;
  std::vector<std::size_t> names_;  // hashes, because a set of strings would cost more time than parsing
  std::string key_, name_;
  nlohmann::json value_;
  std::vector<nlohmann::json*> open_;
};
}  // namespace

bool for_each_member(const std::string& text, std::optional<std::string>& twice, const Members::Fn& fn) {
  if (!is_shallow(text)) return false;
  Members members(fn);
  const bool complete = nlohmann::json::sax_parse(text, &members);
  twice = std::move(members.twice);
  if (!twice && members.may_repeat()) twice = repeated_key(text);
  return members.is_object && (complete || twice);
}

std::optional<std::string> repeated_key(const std::string& text) {
  RepeatedKeys keys;
  nlohmann::json::sax_parse(text, &keys);
  return keys.found;
}

}  // namespace zr::host::checkpoint
