#include "arch/declarations.hpp"

#include <algorithm>
#include <regex>

namespace zr::arch {

namespace {

constexpr std::size_t kParagraph = 4;  // declarations that one comment can describe

// A header's lines with comments, quoted text and preprocessor lines blanked, and the positions of the comments.
struct Source {
  std::vector<std::string> code, comment;
  explicit Source(const std::vector<std::string>& lines);
  bool blank(std::size_t i) const { return i >= code.size() || (empty(code[i]) && comment[i].empty()); }
  bool only_comment(std::size_t i) const { return i < code.size() && empty(code[i]) && !comment[i].empty(); }
  static bool empty(const std::string& text) { return text.find_first_not_of(" \t\\") == std::string::npos; }
};

Source::Source(const std::vector<std::string>& lines) : code(lines.size()), comment(lines.size()) {
  bool in_comment = false, in_macro = false;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    if (!in_comment && line.find_first_not_of(" \t") != line.npos && line[line.find_first_not_of(" \t")] == '#')
      in_macro = true;
    char quote = 0;
    for (std::size_t at = 0; at < line.size(); ++at) {
      const std::string two = line.substr(at, 2);
      if (in_comment) {
        comment[i] += line[at];
        if (two == "*/") in_comment = false, comment[i] += line[++at];
      } else if (quote) {
        if (line[at] == '\\') ++at;
        if (line[at] == quote) quote = 0;
      } else if (two == "//") {
        comment[i] += line.substr(at);
        break;
      } else if (two == "/*") {
        in_comment = true;
        comment[i] += two;
        ++at;
      } else if (line[at] == '"' || (line[at] == '\'' && (at == 0 || !std::isalnum(line[at - 1])))) {
        quote = line[at];
      } else if (!in_macro) {
        code[i] += line[at];
      }
    }
    if (in_macro && (line.empty() || line.back() != '\\')) in_macro = false;
  }
}

std::string squeezed(const std::string& text) {
  std::string out = std::regex_replace(text, std::regex("\\s+"), " ");
  out.erase(0, out.find_first_not_of(' '));
  out.erase(out.find_last_not_of(' ') + 1);
  return out;
}

std::string without_template(std::string text) {
  static const std::regex start("^(template|requires)\\s*<");
  while (std::regex_search(text, start)) {
    int depth = 0;
    std::size_t at = text.find('<');
    do {
      depth += text[at] == '<' ? 1 : text[at] == '>' ? -1 : 0;
    } while (++at < text.size() && depth > 0);
    text = squeezed(text.substr(at));
  }
  return text;
}

// The name of the function that the statement declares, if that function needs a comment; else "".
std::string function_name(const std::string& statement) {
  static const std::regex other("^(using|typedef|static_assert|friend|extern template|return|goto)\\b");
  static const std::regex explained("= (delete|default)|\\boverride\\b|\\bfinal\\b(?=[^(]*$)");
  static const std::regex called("(~?[A-Za-z_]\\w*|operator ?[^\\w\\s(]+|operator ?\\(\\)|operator [\\w:]+) ?\\(");
  const std::string text = without_template(statement);
  std::smatch match;
  if (std::regex_search(text, other) || std::regex_search(text, explained)) return "";
  if (!std::regex_search(text, match, called)) return "";
  const std::string before = match.prefix(), name = match[1];
  const bool macro = std::none_of(name.begin(), name.end(), [](unsigned char c) { return std::islower(c); });
  const auto open = std::count(before.begin(), before.end(), '<'), shut = std::count(before.begin(), before.end(), '>');
  const std::string after = match.suffix();
  if (name[0] == '~' || macro || before.find('=') != before.npos || open != shut) return "";
  if (before.size() >= 2 && before.substr(before.size() - 2) == "::") return "";  // defined out of its class
  if (!after.empty() && after[0] == '*') return "";                               // a function pointer
  if (name == "alignas" || name == "decltype" || name == "__attribute__" || name == "noexcept") return "";
  return name;
}

class Reader {
 public:
  explicit Reader(const Source& source) : source_(source) {}
  std::vector<Declaration> read() {
    for (line_ = 0; line_ < source_.code.size(); ++line_) {
      const std::string& text = source_.code[line_];
      for (std::size_t at = 0; at < text.size(); ++at) take(text[at], at + 1 < text.size() ? text[at + 1] : ' ');
      if (!statement_.empty()) statement_ += ' ';
    }
    if (after_body_ && is_function_) end();
    return std::move(found_);
  }

 private:
  struct Scope {
    bool is_class, open;  // open: functions declared here can be called from outside
  };

  void take(char c, char next) {
    if (body_ > 0) {
      body_ += c == '{' ? 1 : c == '}' ? -1 : 0;
      if (body_ == 0) after_body_ = true, body_end_ = line_;
      return;
    }
    if (after_body_ && !std::isspace(static_cast<unsigned char>(c))) {
      after_body_ = false;
      if (is_function_ && c != ',' && c != '{' && c != ';') end();  // else: one of a constructor's initialisers
    }
    parentheses_ += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (statement_.empty()) {
      if (std::isspace(static_cast<unsigned char>(c))) return;
      first_ = line_;
    }
    if (parentheses_ > 0 || (c != ';' && c != '{' && c != '}' && c != ':')) {
      statement_ += c;
    } else if (c == ';') {
      end();
    } else if (c == '}') {
      if (!scopes_.empty()) scopes_.pop_back();
      statement_.clear();
    } else if (c == ':') {
      label(next);
    } else {
      brace();
    }
  }

  void label(char next) {
    const std::string text = squeezed(statement_);
    const bool access = text == "public" || text == "private" || text == "protected";
    if (!access || next == ':' || scopes_.empty()) {
      statement_ += ':';
      return;
    }
    scopes_.back().open = text == "public" && outer_open();
    statement_.clear();
  }

  void brace() {
    static const std::regex space("^(inline )?namespace\\b|^extern\\s*$"), type("\\b(class|struct|union)\\b");
    const std::string text = squeezed(statement_), bare = without_template(text);
    if (std::regex_search(text, space)) {
      scopes_.push_back({false, open()});
      statement_.clear();
    } else if (bare.find('(') == bare.npos && bare.find('=') == bare.npos && std::regex_search(bare, type) &&
               bare.rfind("enum", 0) != 0) {
      // A layer connects an author's class with a function table; no code calls it by name.
      const bool glue = std::regex_search(bare, std::regex("\\w+Layer\\b"));
      scopes_.push_back({true, open() && !glue && bare.find("class ") == bare.npos});
      scopes_.back().is_class = !glue;
      statement_.clear();
    } else {
      is_function_ = !function_name(text).empty();
      body_ = 1;
      head_ = line_;
    }
  }

  bool open() const { return scopes_.empty() || scopes_.back().open; }
  bool outer_open() const {
    if (!scopes_.back().is_class) return false;  // glue
    for (std::size_t i = 0; i + 1 < scopes_.size(); ++i)
      if (!scopes_[i].open) return false;
    return true;
  }

  void end() {
    const std::string text = squeezed(statement_), name = function_name(text);
    if (!name.empty() && open()) {
      const bool body = is_function_;
      const std::size_t head = body ? head_ : line_, last = body ? body_end_ : line_;
      const bool getter = std::regex_search(text, std::regex("\\(\\) const( = 0)?$"));
      found_.push_back({name, text, first_, head, last, (body && first_ == last) || getter});
    }
    statement_.clear();
    is_function_ = false;
  }

  const Source& source_;
  std::vector<Declaration> found_;
  std::vector<Scope> scopes_;
  std::string statement_;
  std::size_t line_ = 0, first_ = 0, head_ = 0, body_end_ = 0;
  int parentheses_ = 0, body_ = 0;
  bool after_body_ = false, is_function_ = false;
};

// True if a comment is directly above, or above the type whose first line is directly above, or above a row of such
// types.
bool headed(const Source& source, std::size_t line) {
  static const std::regex type_begins(
      "^\\s*(public:|using\\b.*;|template\\b.*>|(class|struct|union)\\b[^;]*\\{?)\\s*$");
  const auto above = [&](std::size_t at) { return at > 0 && std::regex_match(source.code[at - 1], type_begins); };
  if (above(line))
    while (line > 0 && !source.blank(line - 1) && source.comment[line - 1].empty()) --line;
  return line > 0 && source.only_comment(line - 1);
}

std::string at_line(const Declaration& one) { return std::to_string(one.first + 1) + ": " + one.text; }

}  // namespace

std::vector<Declaration> functions_of(const std::vector<std::string>& lines) { return Reader(Source(lines)).read(); }

std::vector<std::string> undocumented(const std::vector<std::string>& lines, bool inside) {
  const Source source(lines);
  const auto all = Reader(source).read();
  std::vector<std::string> wrong;
  std::vector<bool> commented(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Declaration& one = all[i];
    for (std::size_t line = one.first; line <= one.head; ++line)
      commented[i] = commented[i] || !source.comment[line].empty();
    if (one.first > 0 && source.only_comment(one.first - 1)) commented[i] = true;
    if (i > 0 && all[i - 1].last + 1 == one.first && all[i - 1].name == one.name && commented[i - 1])
      commented[i] = true;
    if (inside && one.says_itself) commented[i] = true;
  }
  // Paragraphs: a comment, then a few declarations without another comment between them.
  for (std::size_t i = 0; i < all.size();) {
    std::size_t end = i + 1;
    while (end < all.size() && all[end].first == all[end - 1].last + 1) ++end;
    const std::size_t after = all[end - 1].last + 1;
    bool plain = end - i <= kParagraph && headed(source, all[i].first);
    for (std::size_t line = all[i].first; line < after; ++line) plain = plain && source.comment[line].empty();
    for (std::size_t k = i; k < end; ++k) {
      if (plain && all[k].last - all[k].first < 4) commented[k] = true;
      if (!commented[k]) wrong.push_back(at_line(all[k]));
    }
    i = end;
  }
  return wrong;
}

std::vector<std::string> untagged(const std::vector<std::string>& lines) {
  static const std::regex pointer("\\(\\s*\\*\\s*([A-Za-z_]\\w*)\\s*\\)\\s*\\(");
  static const std::string tags = "\\[(control|step|use|worker|io|any)\\]";
  const Source source(lines);
  std::vector<std::string> wrong;
  std::string statement, comment;
  std::size_t first = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (Source::empty(statement)) {
      statement.clear();
      first = i;
      if (source.blank(i)) comment.clear();
    }
    comment += source.comment[i] + " ";
    statement += source.code[i] + " ";
    const auto brace = statement.find_last_of("{}");
    if (brace != statement.npos) {  // a function table begins or ends
      statement.erase(0, brace + 1);
      if (Source::empty(statement)) {
        comment.clear();
        continue;
      }
    }
    const auto end = statement.find_last_not_of(" \t");
    if (end == statement.npos || statement[end] != ';') continue;
    bool slot = true;
    for (std::sregex_iterator at(statement.begin(), statement.end(), pointer), none; at != none; ++at) {
      // A comment describes its own function pointer; the comment for a callback parameter names that parameter.
      const std::string name = (*at)[1], need = slot ? tags : "\\b" + name + "\\b[^.]*" + tags;
      if (!std::regex_search(comment, std::regex(need)))
        wrong.push_back(std::to_string(first + 1) + ": " + name + " in " + squeezed(statement));
      slot = false;
    }
    statement.clear();
    comment.clear();
  }
  return wrong;
}

}  // namespace zr::arch
