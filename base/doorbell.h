// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_DOORBELL_H_
#define TENSORMOUNT_BASE_DOORBELL_H_

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

namespace tensormount {

// Lets one thread sleep until Ring() is called, a name in a watched local directory is added or
// removed (inotify), or a timeout passes. Changes that other machines make to a shared directory
// are not noticed. Any thread may call Ring(), one thread the other functions. One poll(2) waits
// for all of this, so that the watching thread of an idle mount uses no processor time.
class Doorbell {
 public:
  // `path`: the directory or file to watch. If inotify cannot watch it, only Ring() and the timeout
  // end a wait. kResourceExhausted if the process has no free descriptor.
  static Result<std::unique_ptr<Doorbell>> Make(const std::string& path);
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  bool watches() const { return inotify_ >= 0; }
  // Watches another directory too, of which Wait() also returns the names that are moved there. A
  // second call for the same directory does nothing. False if inotify cannot watch it.
  bool WatchMoves(const std::string& directory);
  void Ring();
  // Returns true if a directory changed since the last call, false after a Ring() without a change
  // or when `patience` has passed. Without `patience` there is no timeout. Appends to `moved`, if
  // it is not null, the names of directories that were moved to the directory of WatchMoves. The
  // kernel may drop names if very many change at once.
  bool Wait(std::optional<std::chrono::milliseconds> patience,
            std::vector<std::string>* moved = nullptr);

 private:
  Doorbell(int event, int inotify) : event_(event), inotify_(inotify) {}
  const int event_;
  const int inotify_;  // Descriptor; -1: nothing is watched.
  int moves_ = -1;     // The watch of WatchMoves; -1: none.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_DOORBELL_H_
