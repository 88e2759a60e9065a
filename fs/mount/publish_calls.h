// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_PUBLISH_CALLS_H_
#define TENSORMOUNT_FS_MOUNT_PUBLISH_CALLS_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

#include "tensormount/status.h"

#include "fs/vfs.h"

namespace tensormount::fs {

class NodeReference;  // Of fuse_bridge_internal.h.

// Calls of rename(2) that publish, without the kernel's locks for as long as publishing takes.
//
// While a RENAME is unanswered the kernel holds both folders locked. Of the root of a mount that
// stops every listing, and every lookup of a name that it does not know yet, in a state that no
// signal ends; and publishing takes as long as storage does. But a rename(2) that is answered
// ESTALE gives its locks back, walks its paths again, asking for each name on them, and tries once
// more (retry_estale in Linux's fs/namei.c, since 3.8). So:
//
//   1. RENAME      the work begins; where it is not over soon, the answer is ESTALE
//   2. LOOKUP      of .staging in the root, by the same thread: answered when the work is over.
//                  Nothing is locked meanwhile, and a caller that is killed is let go
//   3. LOOKUP      of both last names, with their folders locked: answered as before the work, or
//                  the kernel would find nothing to rename, or something in its place
//   4. RENAME      the result
//
// Where the path does not lead over the name .staging (`cd .staging; mv x ../x`) there is no step
// 2, and 4 waits for the work with the folders locked.
// Thread-safe. Threads are named as by the kernel; 0, one that cannot be seen, is nobody's name.
class PublishCalls {
 public:
  // So long after the end its thread is told what was before. Steps 2 to 4 are microseconds apart.
  static constexpr std::chrono::seconds kExpectedFor{2};

  struct Names {
    NodeId folder = 0;
    std::string name;  // Of the staging, in `folder`.
    std::string as;    // In the root.
    friend bool operator==(const Names&, const Names&) = default;
  };
  // One publish, from step 1 to 4. The rest is PublishCalls'.
  struct Call {
    explicit Call(Names n) : names(std::move(n)) {}
    const Names names;
    // It was answered ESTALE, before the result was there. Else nobody will ask for that.
    std::atomic<bool> comes_back = false;
    std::optional<Status> result;  // Once it is over.
    std::chrono::steady_clock::time_point ended;
    // What step 3 answers for the staging, once: with a reference of the node that is counted.
    std::optional<Vfs::Entry> staging;
    std::shared_ptr<NodeReference> reference;
    std::vector<std::function<void()>> waiting;
  };
  using CallPtr = std::shared_ptr<Call>;

  // What this thread has begun with these names, and comes back for; null: nothing.
  CallPtr Find(pid_t thread, const Names& names);
  CallPtr Add(pid_t thread, Names names);
  // The work is over, or will not be done. Wakes who waits for it.
  void End(Call& call, Status result, std::optional<Vfs::Entry> staging = std::nullopt,
           std::shared_ptr<NodeReference> reference = nullptr);
  // Whether the work is not over; then what `again` gives is called when it is.
  bool Waits(Call& call, const std::function<std::function<void()>()>& again);
  // Its thread has heard of the result.
  void Remove(pid_t thread, const CallPtr& call);

  // What `thread` comes back for, whatever the names: steps 2 and 3; null: nothing. Costs nothing
  // where nobody publishes.
  CallPtr Of(pid_t thread);
  // Whether it is over, was a success, and step 4 is still to be expected.
  bool Succeeded(Call& call);
  // The entry for step 3, and its reference; only once.
  std::optional<Vfs::Entry> TakeStaging(Call& call, std::shared_ptr<NodeReference>& reference);

 private:
  void DropOld();

  std::mutex mutex_;
  std::atomic<int> count_ = 0;  // Of calls_.
  std::map<pid_t, CallPtr> calls_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_PUBLISH_CALLS_H_
