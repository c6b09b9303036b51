// A job's secret in a file that this user alone can read: how the ranks of one host, started by a launcher that passes
// no secret on, keep other processes out of their store.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace zr::host {

/// `bytes` random bytes as hexadecimal digits. Throws Failure(environment) if the system has none. Any thread.
std::string random_hex(std::size_t bytes);

/// A token that cannot be guessed.
std::string new_secret();

/// One thread at a time. The file is in $XDG_RUNTIME_DIR/zeroth, or in /tmp/zeroth-UID where that variable names no
/// private folder of this user.
class JobSecret {
 public:
  /// Every rank names the same `job`. Makes the folder. Throws Failure(environment) if no folder is this user's alone.
  explicit JobSecret(const std::string& job);
  ~JobSecret();
  JobSecret(const JobSecret&) = delete;

  /// What the ranks share: another user's process may listen on the ports that rank 0 found taken.
  struct Shared {
    std::string token;  // of new_secret()
    uint16_t port = 0;  // where rank 0 listens
    bool operator==(const Shared&) const = default;
  };
  /// Rank 0, which listens already: in the file from now on, in place of what an earlier job of the same name left.
  /// Throws Failure(environment).
  void create(const Shared& shared);
  /// The other ranks: the secret, or nothing while there is no such file of this user's. It may be an earlier job's:
  /// read again after the store has rejected it.
  std::optional<Shared> read() const;
  /// Removes the file that create() made, unless another job has replaced it.
  void remove();
  const std::string& path() const { return path_; }

 private:
  std::string folder_, name_, path_;
  std::optional<Shared> created_;
  int fd_ = -1;  // of the folder
};

}  // namespace zr::host
