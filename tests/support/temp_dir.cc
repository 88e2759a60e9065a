// SPDX-License-Identifier: Apache-2.0
#include "tests/support/temp_dir.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace tensormount {
namespace {

[[noreturn]] void Die(const char* action, const std::string& path) {
  std::fprintf(stderr, "%s %s: %s\n", action, path.c_str(), std::strerror(errno));
  std::abort();
}

std::string BaseFolder() {
  for (const char* name : {"TENSORMOUNT_TEST_TMPDIR", "TMPDIR"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "/tmp";
}

// Empties the folder behind `fd` (which it closes); entries on other devices stay.
void Empty(int fd, dev_t device) {
  DIR* dir = fdopendir(fd);
  if (dir == nullptr) {
    close(fd);
    return;
  }
  while (const dirent* entry = readdir(dir)) {
    const char* name = entry->d_name;
    if (std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0) continue;
    struct stat st;
    if (fstatat(fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0 || st.st_dev != device) continue;
    if (!S_ISDIR(st.st_mode)) {
      (void)unlinkat(fd, name, 0);  // What stays is reported by the rmdir of the top folder.
      continue;
    }
    if ((st.st_mode & 0700) != 0700) (void)fchmodat(fd, name, 0700, 0);  // Likewise.
    const int child = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (child >= 0) Empty(child, device);
    (void)unlinkat(fd, name, AT_REMOVEDIR);  // Likewise.
  }
  closedir(dir);
}

}  // namespace

TempDir::TempDir() {
  std::string pattern = BaseFolder() + "/tensormount-test-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) Die("mkdtemp", pattern);
  path_ = pattern;
}

TempDir::~TempDir() {
  const testing::UnitTest* unit_test = testing::UnitTest::GetInstance();
  const bool failed = unit_test->current_test_info() != nullptr &&
                      unit_test->current_test_info()->result()->Failed();
  if (failed && std::getenv("TENSORMOUNT_TEST_KEEP") != nullptr) {
    std::fprintf(stderr, "kept %s\n", path_.c_str());
    return;
  }
  RemoveTree(path_);
}

std::string TempDir::Join(std::string_view name) const {
  std::string path = path_;
  path += '/';
  path += name;
  return path;
}

std::string ReadWholeFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) Die("open", path);
  std::string bytes;
  std::string buffer(std::size_t{1} << 16, '\0');
  for (;;) {
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n < 0) Die("read", path);
    if (n == 0) break;
    bytes.append(buffer.data(), static_cast<std::size_t>(n));
  }
  close(fd);
  return bytes;
}

void WriteWholeFile(const std::string& path, std::string_view bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) Die("open", path);
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0) Die("write", path);
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  if (close(fd) != 0) Die("close", path);
}

void FlipByte(const std::string& path, std::uint64_t offset) {
  struct stat before;
  if (stat(path.c_str(), &before) != 0 || chmod(path.c_str(), 0600) != 0) Die("chmod", path);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) Die("open", path);
  char byte = 0;
  if (pread(fd, &byte, 1, static_cast<off_t>(offset)) != 1) Die("read", path);
  byte = static_cast<char>(byte ^ 0x40);
  if (pwrite(fd, &byte, 1, static_cast<off_t>(offset)) != 1) Die("write", path);
  const timespec times[2] = {before.st_atim, before.st_mtim};
  if (fchmod(fd, before.st_mode & 07777) != 0 || futimens(fd, times) != 0) Die("restore", path);
  if (close(fd) != 0) Die("close", path);
}

void RemoveTree(const std::string& path) {
  struct stat st;
  if (lstat(path.c_str(), &st) != 0) return;
  if (!S_ISDIR(st.st_mode)) {
    if (unlink(path.c_str()) != 0) std::perror(path.c_str());
    return;
  }
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd >= 0) Empty(fd, st.st_dev);
  if (rmdir(path.c_str()) != 0) std::perror(path.c_str());
}

}  // namespace tensormount
