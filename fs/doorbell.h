// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_DOORBELL_H_
#define TENSORMOUNT_FS_DOORBELL_H_

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "tensormount/status.h"

namespace tensormount::fs {

// A mount that nobody uses shall use no processor time, so its looking thread must not poll. It
// waits in one poll(2) for both kinds of news.
// What lets one thread sleep until it is needed: until somebody rings, names come or go in one
// folder of this machine (inotify), or time is over. What other machines do to a shared folder
// rings nothing. Ring() from any thread, Wait() from one.
class Doorbell {
 public:
  // `path`: the folder or file to watch. Where it cannot be watched there is only Ring().
  // kResourceExhausted: no more descriptors.
  static Result<std::unique_ptr<Doorbell>> Make(const std::string& path);
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  bool watches() const { return inotify_ >= 0; }
  void Ring();
  // True: something changed in the folder since the last call. Without `patience` it waits for
  // ever.
  // False after a ring without a change, and when the patience is over.
  bool Wait(std::optional<std::chrono::milliseconds> patience);

 private:
  Doorbell(int event, int inotify) : event_(event), inotify_(inotify) {}
  const int event_;
  const int inotify_;  // -1: watches nothing.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_DOORBELL_H_
