// The key-value store of a job, in memory that forked ranks share. No server: a rank that waits polls.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace zr::conform {

class Store {
 public:
  /// Create it before the ranks are forked.
  Store();
  ~Store();
  Store(const Store&) = delete;
  /// Stores a value; a later one of the same key replaces it.
  void put(const std::string& key, const std::string& value) const;
  /// False if the time passes, or the job fails (see fail_job), before some rank has put the key.
  bool get(const std::string& key, std::chrono::nanoseconds timeout, std::string& value) const;
  /// From now on waits for keys end on every rank.
  void fail_job() const;
  /// The keys that were put, each once.
  std::vector<std::string> keys() const;

 private:
  struct Page;
  Page* page_;
};

}  // namespace zr::conform
