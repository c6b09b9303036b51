// Files by their descriptors; every failure names the file and says what to do.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zr::host {

/// One open file. Methods throw Failure(environment), at most one thread at a time.
class File {
 public:
  enum class Mode {
    create,
    write,
    read,
    read_following_links
  };  // create: there is none yet; read_following_links: through links
  /// Opens it; relative paths are from where the process is. A path that names something other than a regular file (a
  /// FIFO, a folder, a device) is rejected at once, without waiting for it: Failure(user).
  File(const std::string& path, Mode use);
  /// Takes over an open descriptor; `path` is for messages.
  File(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  ~File();
  File(File&& other) noexcept;  // the other has no file then
  File& operator=(File&&) = delete;

  /// Gives it that many bytes, which take no room yet.
  void resize(int64_t bytes);
  /// The disk keeps room for these bytes, where the file system can promise it.
  void reserve(int64_t at, int64_t bytes);
  /// All of data[bytes] to byte `at` and behind it.
  void write(int64_t at, const void* data, int64_t bytes);
  void read(int64_t at, void* data, int64_t bytes) const;  // its end before them is a failure
  int64_t size() const;
  uint32_t owner() const;  // the user, as the file system reports it
  /// The disk may take these bytes already; a hint.
  void begin_sync(int64_t at, int64_t bytes);
  /// Returns when what was written survives a loss of power.
  void sync();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
};

/// Throws Failure(environment): "path: what: the error's text; what to do". `error` is an errno.
[[noreturn]] void fail_file(const std::string& path, const std::string& what, int error);
/// Writes a small file aside, syncs and renames it.
void write_file(const std::string& path, const std::string& text);
std::string read_file(const std::string& path);
/// What was created, renamed or removed in it survives a loss of power.
void sync_folder(const std::string& path);
void rename_path(const std::string& from, const std::string& to);  // in one step, over what was there
void make_folder(const std::string& path);                         // and those above it
void remove_path(const std::string& path);                         // whole, if it is there
bool path_exists(const std::string& path);                         // and can be seen
/// Names in a folder, sorted; none if there is no folder.
std::vector<std::string> list_folder(const std::string& path);

/// A place where tests end the process, or make the next call of a kind fail (ZR_FAILPOINT="name=kill",
/// "write=ENOSPC", "write=SHORT", "sync=EIO", each with "@n" for the n-th time). Compiled in where ZR_FAILPOINTS is
/// defined.
#ifdef ZR_FAILPOINTS
void failpoint(const char* name);                          // a place where the process may end
int injected_error(const char* call);                      // an errno, or 0
int64_t shortened_write(const char* call, int64_t bytes);  // "write=SHORT": half of them
int failpoints_fired();                                    // errors and short writes so far
#else
inline void failpoint(const char*) {}
inline int injected_error(const char*) { return 0; }
inline int64_t shortened_write(const char*, int64_t bytes) { return bytes; }
#endif

}  // namespace zr::host
