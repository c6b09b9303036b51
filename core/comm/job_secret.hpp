// A job's secret in a file that this user alone can read: how the ranks of one host, started by a launcher that passes
// no secret on, keep other processes out of their store.
#pragma once

#include <optional>
#include <string>

namespace zr::host {

/// `bytes` random bytes as hexadecimal digits. Throws Failure(environment) if the system has none. Any thread.
std::string random_hex(std::size_t bytes);

/// One thread at a time. The file is in $XDG_RUNTIME_DIR/zeroth, or in /tmp/zeroth-UID where that variable names no
/// private folder of this user.
class JobSecret {
 public:
  /// Every rank names the same `job`. Makes the folder. Throws Failure(environment) if no folder is this user's alone.
  explicit JobSecret(const std::string& job);
  ~JobSecret();
  JobSecret(const JobSecret&) = delete;

  /// Rank 0: a new secret, in the file from now on, in place of what an earlier job of the same name left. Throws
  /// Failure(environment).
  std::string create();
  /// The other ranks: the secret, or nothing while there is no such file of this user's. It may be an earlier job's:
  /// read again after the store has rejected it.
  std::optional<std::string> read() const;
  /// Removes the file that create() made, unless another job has replaced it.
  void remove();
  const std::string& path() const { return path_; }

 private:
  std::string folder_, name_, path_, created_;
  int fd_ = -1;  // of the folder
};

}  // namespace zr::host
