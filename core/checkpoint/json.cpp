#include "checkpoint/json.hpp"

#include <unordered_set>

namespace zr::host {

namespace {
// Remembers the keys of the objects that are open.
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
}  // namespace

std::optional<std::string> repeated_key(const std::string& text) {
  RepeatedKeys keys;
  nlohmann::json::sax_parse(text, &keys);
  return keys.found;
}

}  // namespace zr::host
