// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_DOORBELL_H_
#define TENSORMOUNT_FS_DOORBELL_H_

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "tensormount/status.h"

namespace tensormount::fs {

// Lets one thread sleep until Ring() is called, a name in one local directory is added or removed
// (inotify), or a timeout passes. Changes that other machines make to a shared directory are not
// noticed. Any thread may call Ring(), one thread Wait(). One poll(2) waits for all of this, so
// that the watching thread of an idle mount uses no processor time.
class Doorbell {
 public:
  // `path`: the directory or file to watch. If inotify cannot watch it, only Ring() and the timeout
  // end a wait. kResourceExhausted if the process has no free descriptor.
  static Result<std::unique_ptr<Doorbell>> Make(const std::string& path);
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  bool watches() const { return inotify_ >= 0; }
  void Ring();
  // Returns true if the directory changed since the last call, false after a Ring() without a
  // change or when `patience` has passed. Without `patience` there is no timeout.
  bool Wait(std::optional<std::chrono::milliseconds> patience);

 private:
  Doorbell(int event, int inotify) : event_(event), inotify_(inotify) {}
  const int event_;
  const int inotify_;  // Descriptor; -1: nothing is watched.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_DOORBELL_H_
