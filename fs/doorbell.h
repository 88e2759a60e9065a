// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_DOORBELL_H_
#define TENSORMOUNT_FS_DOORBELL_H_

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "tensormount/status.h"

namespace tensormount::fs {

// Lets one thread sleep until Ring() is called, an entry of one local directory changes (inotify),
// or a timeout passes. Changes that other machines make to a shared directory are not noticed.
// Ring() may be called from any thread, Wait() from one. One poll(2) waits for both events, so that
// the watching thread of an idle mount uses no processor time.
class Doorbell {
 public:
  // `path`: the directory or file to watch. If it cannot be watched, only Ring() and the timeout
  // end a wait. kResourceExhausted: no more descriptors.
  static Result<std::unique_ptr<Doorbell>> Make(const std::string& path);
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  bool watches() const { return inotify_ >= 0; }
  void Ring();
  // True if the directory changed since the last call; false after a ring without a change or when
  // `patience` has passed. Without `patience` there is no timeout.
  bool Wait(std::optional<std::chrono::milliseconds> patience);

 private:
  Doorbell(int event, int inotify) : event_(event), inotify_(inotify) {}
  const int event_;
  const int inotify_;  // -1: watches nothing.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_DOORBELL_H_
