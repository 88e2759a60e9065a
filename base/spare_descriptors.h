// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_SPARE_DESCRIPTORS_H_
#define TENSORMOUNT_BASE_SPARE_DESCRIPTORS_H_

#include <cerrno>
#include <functional>
#include <sys/types.h>

namespace tensormount {

// Registers a cache of open descriptors. If the process runs out of descriptors (EMFILE, ENFILE),
// all registered caches are asked to close theirs, and the failed open is retried. Thread-safe.
//
// Why no fixed limit: a checkpoint of thousands of files is read fastest with all of them open, and
// the descriptor limit of a process varies from 1,024 to a million, most of which a training job
// may need elsewhere. So the caches (index/read/file_cache.h) are unlimited, and give descriptors
// back when any code that uses OpenDescriptor needs one.
class SpareDescriptors {
 public:
  // `close_spare` is called on any thread that opens a file, while the lock over all registered
  // caches is held: it must not open files, nor create or destroy a SpareDescriptors, and no caller
  // of OpenDescriptor may hold a lock that some `close_spare` takes. In a forked child the caches
  // that the parent registered are asked with `may_wait` false, because a thread that does not
  // exist in the child might hold their lock.
  explicit SpareDescriptors(std::function<void(bool may_wait)> close_spare);
  ~SpareDescriptors();
  SpareDescriptors(const SpareDescriptors&) = delete;
  SpareDescriptors& operator=(const SpareDescriptors&) = delete;
  // Asks all registered caches to close descriptors. False: there are no caches.
  static bool CloseSpare();

 private:
  const pid_t process_;
  const std::function<void(bool may_wait)> close_spare_;
};

// Calls `open`, which returns a descriptor, or -1 with errno. Retries after EINTR. If no descriptor
// is free (EMFILE, ENFILE), asks the registered caches to close some and tries again.
template <typename Open>
int OpenDescriptor(const Open& open) {
  // EINTR does not count: an open on a network filesystem may be interrupted any number of times.
  constexpr int kTries = 3;  // Other threads compete for released descriptors.
  for (int tries = 0;;) {
    const int fd = static_cast<int>(open());
    if (fd >= 0) return fd;
    if (errno == EINTR) continue;
    const int error = errno;
    if ((error == EMFILE || error == ENFILE) && ++tries < kTries &&
        SpareDescriptors::CloseSpare()) {
      continue;
    }
    errno = error;
    return -1;
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_SPARE_DESCRIPTORS_H_
