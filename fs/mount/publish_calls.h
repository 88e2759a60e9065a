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

class NodeReference;  // Declared in fuse_bridge_internal.h.

// Lets a rename(2) that publishes run without the kernel's directory locks.
//
// While RENAME is unanswered the kernel holds both directories locked. For the root of a mount that
// blocks every listing, and every lookup of an uncached name, uninterruptibly, for as long as
// storage takes. But after ESTALE rename(2) drops its locks, resolves its paths again with a LOOKUP
// for each name, and retries once (retry_estale in Linux's fs/namei.c, since 3.8). So:
//
//   1. RENAME      the work begins; if it does not end soon, the answer is ESTALE
//   2. LOOKUP      of .staging in the root, by the same thread: answered when the work has ended.
//                  Nothing is locked meanwhile, and a killed caller is answered
//   3. LOOKUP      of both last names, with their directories locked: answered as if
//                  the work had not begun; otherwise the kernel would find no source, or
//                  an existing target
//   4. RENAME      the result
//
// If the path does not contain .staging (`cd .staging; mv x ../x`) there is no step 2, and step 4
// waits for the work with the directories locked.
// Thread-safe. Threads have the kernel's ids; 0, a thread that is not visible, never matches.
class PublishCalls {
 public:
  // How long after the end of the work the thread of the call gets the answers of step 3. Steps 2
  // to 4 are microseconds apart.
  static constexpr std::chrono::seconds kExpectedFor{2};

  struct Names {
    NodeId folder = 0;
    std::string name;  // The staging's name in `folder`.
    std::string as;    // The checkpoint's name in the root.
    friend bool operator==(const Names&, const Names&) = default;
  };
  // One publish, from step 1 to 4. PublishCalls sets `result` and the members after it, under its
  // lock.
  struct Call {
    explicit Call(Names n) : names(std::move(n)) {}
    const Names names;
    // Whether RENAME was answered with ESTALE before the result existed; only then the kernel
    // retries.
    std::atomic<bool> kernel_retries = false;
    std::optional<Status> result;  // Set when the work has ended.
    std::chrono::steady_clock::time_point ended;
    // The answer of step 3 for the staging, to be used once, with its counted node reference.
    std::optional<Vfs::Entry> staging;
    std::shared_ptr<NodeReference> reference;
    std::vector<std::function<void()>> waiting;
  };
  using CallPtr = std::shared_ptr<Call>;

  // The call of this thread and these names that the kernel will retry; null if none.
  CallPtr Find(pid_t thread, const Names& names);
  CallPtr Add(pid_t thread, Names names);
  // Ends the call: the work has finished or will not be done. Wakes waiting requests.
  void End(Call& call, Status result, std::optional<Vfs::Entry> staging = std::nullopt,
           std::shared_ptr<NodeReference> reference = nullptr);
  // Whether the work has not ended; if so, the function that `again` returns is called when it
  // ends.
  bool WaitForEnd(Call& call, const std::function<std::function<void()>()>& again);
  // Forgets the call; its thread has got the result.
  void Remove(pid_t thread, const CallPtr& call);

  // The call that `thread` retries, for steps 2 and 3, whatever the names; null if none. Costs one
  // atomic load while nobody publishes.
  CallPtr FindByThread(pid_t thread);
  // Whether the work has succeeded and step 4 is still expected.
  bool Succeeded(Call& call);
  // Takes the entry for step 3 with its reference; nullopt if it was taken already.
  std::optional<Vfs::Entry> TakeStaging(Call& call, std::shared_ptr<NodeReference>& reference);

 private:
  void DropOld();

  std::mutex mutex_;
  std::atomic<int> count_ = 0;  // Size of calls_.
  std::map<pid_t, CallPtr> calls_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_PUBLISH_CALLS_H_
