// SPDX-License-Identifier: Apache-2.0
// Fails the n-th call of one file operation below a folder, in a program that knows nothing of it:
// LD_PRELOAD. By the environment:
//   TORTURE_ROOT   the folder, an absolute path without links
//   TORTURE_OP     which operation fails (the names below); none: calls are counted only
//   TORTURE_N      the n-th call, from 0; TORTURE_REPEAT=1: that one and all after it
//   TORTURE_HOW    an errno as a number; "short": half of the bytes; "kill": SIGKILL before the call;
//                  "lie": nothing is done, and that is called success (what a family must find)
//   TORTURE_COUNTS a file that gets a u32 of calls for each operation, then how many failed
// The counts are a shared mapping, so that they are there after a kill and hold for all processes.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum Op { kOpen, kRead, kWrite, kSync, kRename, kUnlink, kMkdir, kStat, kClose, kStatfs, kReaddir, kFlock,
          kCopy, kTruncate, kLink, kMmap, kChmod, kPopulate, kOps };
static const char* const kNames[kOps] = {
    "open", "read", "write", "sync", "rename", "unlink", "mkdir", "stat", "close", "statfs", "readdir",
    "flock", "copy", "truncate", "link", "mmap", "chmod", "populate"};
enum How { kGo, kFail, kShort, kLie };

static char root[PATH_MAX];
static size_t root_length;
static int chosen = -1, repeat, failure;
static long chosen_n;
static enum How how = kFail;
static int killing;
static _Atomic uint32_t private_counts[kOps + 1];
static _Atomic uint32_t* counts = private_counts;

#define REAL(name)                                                      \
  static __typeof__(&name) real;                                        \
  if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void Begin(void) {
  const char* at = getenv("TORTURE_ROOT");
  if (at == NULL) return;
  root_length = strlen(at);
  if (root_length >= sizeof root) abort();
  memcpy(root, at, root_length + 1);
  const char* op = getenv("TORTURE_OP");
  for (int i = 0; op != NULL && i < kOps; ++i) {
    if (strcmp(op, kNames[i]) == 0) chosen = i;
  }
  const char* n = getenv("TORTURE_N");
  chosen_n = n == NULL ? 0 : atol(n);
  repeat = getenv("TORTURE_REPEAT") != NULL;
  const char* what = getenv("TORTURE_HOW");
  if (what != NULL && strcmp(what, "short") == 0) how = kShort;
  else if (what != NULL && strcmp(what, "lie") == 0) how = kLie;
  else if (what != NULL && strcmp(what, "kill") == 0) killing = 1;
  else failure = what == NULL ? EIO : atoi(what);
  const char* file = getenv("TORTURE_COUNTS");
  if (file == NULL) return;
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0 || syscall(SYS_ftruncate, fd, sizeof private_counts) != 0) abort();
  void* shared = (void*)syscall(SYS_mmap, NULL, sizeof private_counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (shared == MAP_FAILED) abort();
  counts = shared;
  syscall(SYS_close, fd);
}

static int IsBelow(const char* path) {
  return strncmp(path, root, root_length) == 0 && (path[root_length] == '\0' || path[root_length] == '/' || path[root_length] == ' ');
}

static int FdIsBelow(int fd) {
  if (root_length == 0 || fd < 0) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const int saved = errno;
  const long n = syscall(SYS_readlink, link, path, sizeof path - 1);
  errno = saved;
  if (n <= 0) return 0;
  path[n] = '\0';
  return IsBelow(path);
}

static int AtIsBelow(int folder, const char* path) {
  if (root_length == 0 || path == NULL) return 0;
  int fd;
  if (sscanf(path, "/proc/self/fd/%d", &fd) == 1) return FdIsBelow(fd);
  return path[0] == '/' ? IsBelow(path) : FdIsBelow(folder);
}

// What is to be done with this call; sets errno where it fails.
static enum How Count(enum Op op, int is_below) {
  if (!is_below) return kGo;
  const uint32_t n = atomic_fetch_add(&counts[op], 1);
  if ((int)op != chosen || (n != chosen_n && !(repeat && n > chosen_n))) return kGo;
  atomic_fetch_add(&counts[kOps], 1);
  if (killing) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  errno = failure;
  return how;
}

#define FAIL_IF(op, below, otherwise)                  \
  do {                                                 \
    const enum How verdict = Count(op, below);         \
    if (verdict == kFail) return otherwise;            \
    if (verdict == kLie) return 0;                     \
  } while (0)

int open(const char* path, int flags, ...) {
  REAL(open);
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  FAIL_IF(kOpen, AtIsBelow(-1, path), -1);
  return real(path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
  REAL(openat);
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  FAIL_IF(kOpen, AtIsBelow(folder, path), -1);
  return real(folder, path, flags, mode);
}

FILE* fopen(const char* path, const char* mode) {
  REAL(fopen);
  FAIL_IF(kOpen, AtIsBelow(-1, path), NULL);
  return real(path, mode);
}

DIR* opendir(const char* path) {
  REAL(opendir);
  FAIL_IF(kOpen, AtIsBelow(-1, path), NULL);
  return real(path);
}

// What the C library has no function for, or had none for long.
long syscall(long number, ...) {
  REAL(syscall);
  long a[6];
  va_list more;
  va_start(more, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(more, long);
  va_end(more);
  if (root_length > 0) {
    if (number == SYS_openat2) FAIL_IF(kOpen, AtIsBelow((int)a[0], (const char*)a[1]), -1);
    if (number == SYS_statx) FAIL_IF(kStat, AtIsBelow((int)a[0], (const char*)a[1]), -1);
    if (number == SYS_renameat2) FAIL_IF(kRename, AtIsBelow((int)a[2], (const char*)a[3]), -1);
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#define TRANSFER(name, op, buffer, signature, whole, half) \
  ssize_t name signature {                                 \
    REAL(name);                                            \
    switch (Count(op, FdIsBelow(fd))) {                    \
      case kFail: return -1;                               \
      case kLie: return (ssize_t)size;                     \
      case kShort: if (size > 1) return half;              \
      default: return whole;                               \
    }                                                      \
  }

TRANSFER(read, kRead, out, (int fd, void* out, size_t size), real(fd, out, size), real(fd, out, size / 2))
TRANSFER(pread, kRead, out, (int fd, void* out, size_t size, off_t at), real(fd, out, size, at), real(fd, out, size / 2, at))
TRANSFER(write, kWrite, in, (int fd, const void* in, size_t size), real(fd, in, size), real(fd, in, size / 2))
TRANSFER(pwrite, kWrite, in, (int fd, const void* in, size_t size, off_t at), real(fd, in, size, at), real(fd, in, size / 2, at))

static size_t Total(const struct iovec* pieces, int n) {
  size_t all = 0;
  for (int i = 0; i < n; ++i) all += pieces[i].iov_len;
  return all;
}

// A short one: only the first piece.
#define VECTORED(name, op, signature, whole, part)                \
  ssize_t name signature {                                        \
    REAL(name);                                                   \
    switch (Count(op, FdIsBelow(fd))) {                           \
      case kFail: return -1;                                      \
      case kLie: return (ssize_t)Total(pieces, n);                \
      case kShort: if (n > 1) return part;                        \
      default: return whole;                                      \
    }                                                             \
  }

VECTORED(preadv, kRead, (int fd, const struct iovec* pieces, int n, off_t at), real(fd, pieces, n, at), real(fd, pieces, 1, at))
VECTORED(pwritev, kWrite, (int fd, const struct iovec* pieces, int n, off_t at), real(fd, pieces, n, at), real(fd, pieces, 1, at))
VECTORED(writev, kWrite, (int fd, const struct iovec* pieces, int n), real(fd, pieces, n), real(fd, pieces, 1))

#define OF_FD(type, name, op, signature, ...)     \
  type name signature {                           \
    REAL(name);                                   \
    FAIL_IF(op, FdIsBelow(fd), -1);               \
    return real(__VA_ARGS__);                     \
  }

OF_FD(int, fsync, kSync, (int fd), fd)
OF_FD(int, fdatasync, kSync, (int fd), fd)
OF_FD(int, syncfs, kSync, (int fd), fd)
OF_FD(int, ftruncate, kTruncate, (int fd, off_t size), fd, size)
OF_FD(int, fallocate, kTruncate, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
OF_FD(int, flock, kFlock, (int fd, int what), fd, what)
OF_FD(int, fstat, kStat, (int fd, struct stat* out), fd, out)
OF_FD(int, fstatfs, kStatfs, (int fd, struct statfs* out), fd, out)
OF_FD(int, fstatvfs, kStatfs, (int fd, struct statvfs* out), fd, out)
OF_FD(int, fchmod, kChmod, (int fd, mode_t mode), fd, mode)

int posix_fallocate(int fd, off_t at, off_t size) {
  REAL(posix_fallocate);
  FAIL_IF(kTruncate, FdIsBelow(fd), failure);
  return real(fd, at, size);
}

// The descriptor is gone whatever close answers.
int close(int fd) {
  REAL(close);
  const enum How verdict = Count(kClose, FdIsBelow(fd));
  const int why = errno, result = real(fd);
  if (verdict != kFail) return result;
  errno = why;
  return -1;
}

ssize_t copy_file_range(int in, off_t* from, int out, off_t* to, size_t size, unsigned flags) {
  REAL(copy_file_range);
  switch (Count(kCopy, FdIsBelow(in) || FdIsBelow(out))) {
    case kFail: return -1;
    case kLie: return (ssize_t)size;
    case kShort: if (size > 1) size /= 2;
    default: return real(in, from, out, to, size, flags);
  }
}

int ioctl(int fd, unsigned long request, ...) {
  REAL(ioctl);
  va_list more;
  va_start(more, request);
  void* argument = va_arg(more, void*);
  va_end(more);
  if (request == FICLONE || request == FICLONERANGE) FAIL_IF(kCopy, FdIsBelow(fd), -1);
  return real(fd, request, argument);
}

#define OF_PATH(type, name, op, signature, folder, path, ...)  \
  type name signature {                                        \
    REAL(name);                                                \
    FAIL_IF(op, AtIsBelow(folder, path), -1);                  \
    return real(__VA_ARGS__);                                  \
  }

OF_PATH(int, rename, kRename, (const char* from, const char* to), -1, to, from, to)
OF_PATH(int, renameat, kRename, (int a, const char* from, int b, const char* to), b, to, a, from, b, to)
OF_PATH(int, renameat2, kRename, (int a, const char* from, int b, const char* to, unsigned flags), b, to, a, from, b, to, flags)
OF_PATH(int, link, kLink, (const char* from, const char* to), -1, to, from, to)
OF_PATH(int, linkat, kLink, (int a, const char* from, int b, const char* to, int flags), b, to, a, from, b, to, flags)
OF_PATH(int, unlink, kUnlink, (const char* path), -1, path, path)
OF_PATH(int, unlinkat, kUnlink, (int folder, const char* path, int flags), folder, path, folder, path, flags)
OF_PATH(int, rmdir, kUnlink, (const char* path), -1, path, path)
OF_PATH(int, mkdir, kMkdir, (const char* path, mode_t mode), -1, path, path, mode)
OF_PATH(int, mkdirat, kMkdir, (int folder, const char* path, mode_t mode), folder, path, folder, path, mode)
OF_PATH(int, chmod, kChmod, (const char* path, mode_t mode), -1, path, path, mode)
OF_PATH(int, stat, kStat, (const char* path, struct stat* out), -1, path, path, out)
OF_PATH(int, lstat, kStat, (const char* path, struct stat* out), -1, path, path, out)
OF_PATH(int, fstatat, kStat, (int folder, const char* path, struct stat* out, int flags), folder, path, folder, path, out, flags)
OF_PATH(int, statx, kStat, (int folder, const char* path, int flags, unsigned mask, struct statx* out), folder, path, folder, path, flags, mask, out)
OF_PATH(int, statfs, kStatfs, (const char* path, struct statfs* out), -1, path, path, out)
OF_PATH(int, statvfs, kStatfs, (const char* path, struct statvfs* out), -1, path, path, out)
OF_PATH(int, access, kStat, (const char* path, int mode), -1, path, path, mode)
OF_PATH(int, faccessat, kStat, (int folder, const char* path, int mode, int flags), folder, path, folder, path, mode, flags)

struct dirent* readdir(DIR* folder) {
  REAL(readdir);
  FAIL_IF(kReaddir, FdIsBelow(dirfd(folder)), NULL);
  return real(folder);
}

void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) {
  REAL(mmap);
  FAIL_IF(kMmap, (flags & MAP_ANONYMOUS) == 0 && FdIsBelow(fd), MAP_FAILED);
  return real(at, size, protection, flags, fd, offset);
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

// An address does not tell its file: all of them count.
int madvise(void* at, size_t size, int advice) {
  REAL(madvise);
  FAIL_IF(kPopulate, root_length > 0 && advice == MADV_POPULATE_READ, -1);
  return real(at, size, advice);
}
