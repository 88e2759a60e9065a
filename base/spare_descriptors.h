// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_SPARE_DESCRIPTORS_H_
#define TENSORMOUNT_BASE_SPARE_DESCRIPTORS_H_

#include <cerrno>
#include <functional>
#include <sys/types.h>

namespace tensormount {

// Says, as long as it lives, that somebody keeps descriptors open only to spare opening them again.
// Where the process has no more of them (EMFILE, ENFILE), all who said so are asked to let go, and
// the open that failed is tried again. Thread-safe.
//
// Why not a limit on what is kept: a checkpoint of thousands of files is read fastest with all of
// them open, the process may be allowed a million descriptors or 1,024, and in a training job most
// of them belong to others. So the caches (index/read/file_cache.h) keep what they like, and give
// it back when somebody, anybody in this process that opens through OpenDescriptor, needs it.
class SpareDescriptors {
 public:
  // `let_go` is called on any thread that opens something; it must not open anything itself, nor
  // make or destroy a SpareDescriptors: the lock over all of them is held meanwhile. For the same
  // reason no caller of OpenDescriptor may hold a lock that some `let_go` takes. In a forked child
  // the keepers of its parent are asked too, and may not wait for a lock: a thread that is not
  // there might hold it.
  explicit SpareDescriptors(std::function<void(bool may_wait)> let_go);
  ~SpareDescriptors();
  SpareDescriptors(const SpareDescriptors&) = delete;
  SpareDescriptors& operator=(const SpareDescriptors&) = delete;
  // Asks all. False: nobody keeps any.
  static bool LetGo();

 private:
  const pid_t process_;
  const std::function<void(bool may_wait)> let_go_;
};

// A descriptor by `open`, which answers -1 and errno where it fails; called again where a signal
// came in between, or where there were descriptors to spare.
template <typename Open>
int OpenDescriptor(const Open& open) {
  // EINTR does not count as a try: opening a file on a network filesystem may be interrupted at
  // will.
  constexpr int kTries = 3;  // Other threads take what becomes free, too.
  for (int tries = 0;;) {
    const int fd = static_cast<int>(open());
    if (fd >= 0) return fd;
    if (errno == EINTR) continue;
    const int error = errno;
    if ((error == EMFILE || error == ENFILE) && ++tries < kTries && SpareDescriptors::LetGo()) {
      continue;
    }
    errno = error;
    return -1;
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_SPARE_DESCRIPTORS_H_
