// Files by descriptor; every failure names the file and says what to do.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zr::host {

/// Makes a write beyond the process's limit of file sizes (ulimit -f) fail with EFBIG, whose error names file and
/// limit, instead of ending the process by SIGXFSZ without a word. Does nothing if the program handles that signal.
void report_file_size_limit();

/// One open file. Methods throw EnvironmentError. One thread at a time.
class File {
 public:
  enum class Mode { create, write, read, read_following_links };  // all but the last reject symbolic links
  /// Opens the file; Mode::create requires that it does not exist. Relative paths start at the working directory.
  /// Throws UserError, without blocking, if the path names something other than a regular file (a FIFO, a folder, a
  /// device).
  File(const std::string& path, Mode mode);
  /// Takes over an open descriptor; `path` is for messages.
  File(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  ~File();
  File(File&& other) noexcept;  // leaves `other` without a file
  File& operator=(File&&) = delete;

  /// Sets the size in bytes, without allocating disk space.
  void resize(int64_t bytes);
  /// Allocates disk space for these bytes, if the file system supports it.
  void reserve(int64_t at, int64_t bytes);
  /// Writes data[bytes] at byte offset `at`.
  void write(int64_t at, const void* data, int64_t bytes);
  /// Reads exactly `bytes` at byte offset `at`. Throws UserError if the file ends earlier.
  void read(int64_t at, void* data, int64_t bytes) const;
  int64_t size() const;
  uint32_t owner() const;  // the uid that the file system reports
  /// Hint: starts writing these bytes back to the disk.
  void begin_sync(int64_t at, int64_t bytes);
  /// Returns when written data would survive a power loss.
  void sync();
  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }  // for calls that need one; closed by this object

 private:
  std::string path_;
  int fd_ = -1;
};

/// Throws EnvironmentError with the text "path: what: text of the error; remedy". `error` is an errno.
[[noreturn]] void fail_file(const std::string& path, const std::string& what, int error);
/// What a path names that is not a regular file, by its mode in stat(2): "a folder", "a FIFO", "a socket", "a device".
std::string file_kind_text(mode_t mode);
/// Replaces a small file atomically: writes a temporary file, syncs and renames it.
void write_file(const std::string& path, const std::string& text);
std::string read_file(const std::string& path);
/// Returns when created, renamed and removed entries of a folder would survive a power loss.
void sync_folder(const std::string& path);
void rename_path(const std::string& from, const std::string& to);  // atomic; replaces `to`
void make_folder(const std::string& path);                         // and its parents
void remove_path(const std::string& path);                         // recursively; no effect if it does not exist
bool path_exists(const std::string& path);                         // false also if it cannot be accessed
/// Names in a folder, sorted; empty if there is no such folder.
std::vector<std::string> list_folder(const std::string& path);

/// Failpoints: tests end the process at a named point, or make the next call of a kind fail (ZR_FAILPOINT="name=kill",
/// "write=ENOSPC", "write=SHORT", "sync=EIO"; "@n" selects the n-th time). Compiled in if ZR_FAILPOINTS is defined.
#ifdef ZR_FAILPOINTS
void failpoint(const char* name);                          // the process may end here
int injected_error(const char* call);                      // an errno, or 0
int64_t shortened_write(const char* call, int64_t bytes);  // half of `bytes` for "write=SHORT"
int failpoints_fired();                                    // errors and short writes so far
#else
inline void failpoint(const char*) {}
inline int injected_error(const char*) { return 0; }
inline int64_t shortened_write(const char*, int64_t bytes) { return bytes; }
#endif

}  // namespace zr::host
