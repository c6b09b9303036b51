// A library for LD_PRELOAD that counts the calls on files, per thread.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>

namespace {
thread_local int64_t t_calls = 0;
template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name));
}
bool is_file(int fd) {
  struct stat about {};
  return ::fstat(fd, &about) == 0 && (S_ISREG(about.st_mode) || S_ISDIR(about.st_mode));
}
}  // namespace

#define COUNTED(result, name, arguments, values, counts)                    \
  extern "C" __attribute__((visibility("default"))) result name arguments { \
    static const auto real = next<result(*) arguments>(#name);              \
    t_calls += (counts) ? 1 : 0;                                            \
    return real values;                                                     \
  }

#define OPENS(name, ...)                                        \
  {                                                             \
    mode_t mode = 0;                                            \
    if (flags & (O_CREAT | O_TMPFILE)) {                        \
      va_list rest;                                             \
      va_start(rest, flags);                                    \
      mode = va_arg(rest, mode_t);                              \
      va_end(rest);                                             \
    }                                                           \
    static const auto real = next<int (*)(__VA_ARGS__)>(#name); \
    ++t_calls;

extern "C" {
__attribute__((visibility("default"))) int64_t zr_file_calls_of_this_thread() { return t_calls; }
__attribute__((visibility("default"))) int open(const char* path, int flags, ...)
    OPENS(open, const char*, int, mode_t) return real(path, flags, mode);
}
__attribute__((visibility("default"))) int open64(const char* path, int flags, ...)
    OPENS(open64, const char*, int, mode_t) return real(path, flags, mode);
}
__attribute__((visibility("default"))) int openat(int fd, const char* path, int flags, ...)
    OPENS(openat, int, const char*, int, mode_t) return real(fd, path, flags, mode);
}
}
COUNTED(FILE*, fopen, (const char* path, const char* mode), (path, mode), true)
COUNTED(FILE*, fopen64, (const char* path, const char* mode), (path, mode), true)
COUNTED(ssize_t, write, (int fd, const void* data, size_t n), (fd, data, n), is_file(fd))
COUNTED(ssize_t, pwrite, (int fd, const void* data, size_t n, off_t at), (fd, data, n, at), true)
COUNTED(ssize_t, pwrite64, (int fd, const void* data, size_t n, off64_t at), (fd, data, n, at), true)
COUNTED(ssize_t, read, (int fd, void* data, size_t n), (fd, data, n), is_file(fd))
COUNTED(ssize_t, pread, (int fd, void* data, size_t n, off_t at), (fd, data, n, at), true)
COUNTED(ssize_t, pread64, (int fd, void* data, size_t n, off64_t at), (fd, data, n, at), true)
COUNTED(int, ftruncate, (int fd, off_t n), (fd, n), true)
COUNTED(int, ftruncate64, (int fd, off64_t n), (fd, n), true)
COUNTED(int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n), true)
COUNTED(int, fallocate64, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n), true)
COUNTED(int, fsync, (int fd), (fd), true)
COUNTED(int, fdatasync, (int fd), (fd), true)
COUNTED(int, rename, (const char* from, const char* to), (from, to), true)
COUNTED(int, mkdir, (const char* path, mode_t mode), (path, mode), true)
COUNTED(int, unlink, (const char* path), (path), true)
COUNTED(int, unlinkat, (int fd, const char* path, int flags), (fd, path, flags), true)
COUNTED(int, rmdir, (const char* path), (path), true)
COUNTED(int, flock, (int fd, int how), (fd, how), true)
