// Checks the names in a file: each is a key, a table, or a table of a plug-in that was not loaded. Internal to
// core/config.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "config/document_tree.hpp"
#include "config/problems.hpp"

namespace zr::host::config {

class Names {
 public:
  /// `chosen`: the id of the plug-in of each role. `not_loaded`: the plug-ins whose tables are skipped. `unchecked`: if
  /// not null, receives the values of unknown keys, which are then no problem.
  Names(const Document::Tree& tree, const std::map<std::string, std::string>& chosen, const PluginIds& not_loaded,
        std::vector<UncheckedValue>* unchecked, Problems& problems);
  /// Declares a key. InternalError if its declaration is invalid, or the key was declared before.
  void declare(const ConfigKey& key);
  /// Declares the table [role.<id>] of a plug-in, which may have no keys.
  void declare_table(const std::string& role, const std::string& id);
  /// Adds a problem for each unknown name in the file.
  void check() { check(tree_.root, ""); }

 private:
  void check(const toml::table& table, const std::string& path);
  bool is_not_loaded(const std::string& path) const;
  bool contains_not_loaded(const std::string& path) const;  // a table with the table of a plug-in that is not loaded
  void insert_table(std::string table);
  void gather_unchecked(const toml::key& key, const toml::node& node, const std::string& path);
  void unknown(const toml::key& key, const toml::node& node, const std::string& path);

  const Document::Tree& tree_;
  const std::map<std::string, std::string>& chosen_;
  const PluginIds& not_loaded_;
  std::vector<UncheckedValue>* const unchecked_;
  Problems& problems_;
  std::set<std::string> paths_, tables_;
};

}  // namespace zr::host::config
