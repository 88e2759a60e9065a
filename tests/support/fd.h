// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_FD_H_
#define TENSORMOUNT_TESTS_SUPPORT_FD_H_

#include <unistd.h>

namespace tensormount {

// Closes on the way out.
struct Fd {
  explicit Fd(int f) : fd(f) {}
  ~Fd() {
    if (fd >= 0) close(fd);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  operator int() const { return fd; }  // NOLINT(google-explicit-constructor)
  int fd;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_FD_H_
