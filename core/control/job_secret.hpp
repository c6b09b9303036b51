// A job's secret in a file that only this user can read. With it the ranks on one node keep other processes out of
// their store when the launcher does not pass a secret.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace zr::host::control {

/// `bytes` random bytes as hexadecimal digits. Throws EnvironmentError if the system provides none. Any thread.
std::string random_hex(std::size_t bytes);

/// Returns a token that cannot be guessed.
std::string new_secret();

/// One thread at a time. The file is in $XDG_RUNTIME_DIR/zeroth, or in /tmp/zeroth-UID if that variable does not name a
/// folder that only this user can access.
class JobSecret {
 public:
  /// Every rank passes the same `job`. Creates the folder. Throws EnvironmentError if other users can access it.
  explicit JobSecret(const std::string& job);
  ~JobSecret();
  JobSecret(const JobSecret&) = delete;

  /// The contents of the file. The port is included because another user's process may listen on the ports that rank 0
  /// found in use.
  struct Shared {
    std::string token;  // from new_secret()
    uint16_t port = 0;  // where rank 0 listens
    bool operator==(const Shared&) const = default;
  };
  /// Called by rank 0 once it listens. Writes the file and replaces the file of an earlier job with the same name;
  /// removes this user's files that are older than a day. Throws EnvironmentError.
  void create(const Shared& shared);
  /// Called by the other ranks. Returns nothing while this user has no such file. The secret may be that of an earlier
  /// job: read the file again after the store has rejected the secret.
  std::optional<Shared> read() const;
  /// Removes the file that create() made, unless another job has replaced it.
  void remove();
  const std::string& path() const { return path_; }

 private:
  void remove_old() const;

  std::string folder_, name_, path_;
  std::optional<Shared> created_;
  int fd_ = -1;  // descriptor of the folder
};

}  // namespace zr::host::control
