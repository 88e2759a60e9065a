// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_ASYNC_SAVE_H_
#define TENSORMOUNT_ASYNC_SAVE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "tensormount/communicator.h"
#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

struct AsyncOptions {
  // Limit of this rank's host memory for copies of shards, for all saves in progress together
  // (copies of objects and common values are not counted). A save that does not fit waits until an
  // earlier save releases memory (SaveProgress::stalled); a save that can never fit fails with
  // kResourceExhausted. Between saves the memory is kept and stays resident. 0: no limit.
  std::uint64_t staging_bytes = 0;
  // False: AsyncSaver::Save returns when the data are staged (copied). True: it returns at once,
  // and the caller must leave its buffers unchanged until SaveHandle::WaitStaged has returned.
  bool stage_in_background = false;
  // Limit of memory on each device for copies of that device's shards, for all saves in progress
  // together. If the shards fit and the device has that much memory, they are staged by a copy
  // within the device, and move to the host while the save writes; otherwise they are staged in
  // host memory. The device memory is kept between saves. 0: no device memory is used.
  std::uint64_t device_staging_bytes = 0;
  // What the destructor of a SaveHandle does while its save is in progress: wait for the result, or
  // cancel the save. kCancel still waits until the data are staged (after SaveInPlace: until the
  // save has ended), because the caller may free its buffers afterwards.
  enum class OnDrop { kWait, kCancel } on_drop = OnDrop::kWait;
};

// Progress of a save; all numbers are of this rank.
struct SaveProgress {
  enum class State { kStaging, kSaving, kCommitted, kFailed, kCancelled };
  State state = State::kStaging;
  std::uint64_t bytes_total = 0;  // Size of this rank's shards and objects.
  std::uint64_t bytes_staged = 0;
  std::uint64_t bytes_written = 0;
  std::chrono::nanoseconds stalled{0};  // Time spent waiting for staging memory.
};

class AsyncSaver;

// One save in the background. The memory of the state dict may be freed as soon as the data are
// staged. Thread-safe.
class TENSORMOUNT_EXPORT SaveHandle {
 public:
  // Waits for the save or cancels it (AsyncOptions::on_drop).
  ~SaveHandle();
  SaveHandle(SaveHandle&&) noexcept;
  SaveHandle& operator=(SaveHandle&&) noexcept;

  // Waits until the data are staged, so that the caller may overwrite its buffers. Returns the
  // error if the save failed before its data were staged.
  Status WaitStaged();
  // Waits until the save has ended, within the save's own timeouts, and returns the result of Save.
  Result<SaveReport> WaitCommitted();
  // Like WaitStaged and WaitCommitted, with a limit: if `most` passes first, WaitStagedFor returns
  // false and WaitCommittedFor nullopt.
  Result<bool> WaitStagedFor(std::chrono::milliseconds most);
  std::optional<Result<SaveReport>> WaitCommittedFor(std::chrono::milliseconds most);
  // Eventfds (eventfd(2)) for event loops. StagedFd is readable from the moment that the data are
  // staged, CommittedFd from the moment that the save has ended. The handle owns both: do not read
  // or close them.
  Result<int> StagedFd();
  Result<int> CommittedFd();
  // The progress of this rank. Never blocks.
  SaveProgress progress() const;
  // Requests cancellation and returns at once. The ranks vote: if the request is in time, the save
  // fails on all ranks with kCancelled and the rank that asked; if the request is too late, it has
  // no effect on any rank.
  void Cancel();

  struct Rep;  // Internal.

 private:
  friend class AsyncSaver;
  friend Result<SaveHandle> AsyncSave(const StateDict&, std::string_view, Communicator&,
                                      const SaveOptions&);
  explicit SaveHandle(std::shared_ptr<Rep> rep);
  std::shared_ptr<AsyncSaver> saver_;  // Set by AsyncSave; destroyed after the save that uses it.
  std::shared_ptr<Rep> rep_;
};

// Saves in the background over channels of a communicator, with staging memory that is reused. Make
// one saver per job and keep it. Save waits for no other rank, except that while two saves are in
// progress a third call waits for the first of them to end (with AsyncOptions::stage_in_background
// the third save is queued instead), and a call that exceeds AsyncOptions::staging_bytes waits for
// an earlier save. Generations follow the order of the calls: `latest` never moves back, and of
// several saves that replace one name the last one stays. Every rank calls Save in the same order,
// from one thread at a time. After fork(), inherited savers and handles return kUnsupported in the
// child, and the child's exit waits for no save.
//
// Example:
//
//   auto saver = AsyncSaver::Make(comm);
//   auto handle = saver.value()->Save(state, "STORE/step-1000");  // Bytes are copied.
//   // Training goes on: the buffers may change.
//   auto verdict = handle.value().WaitCommitted();
class TENSORMOUNT_EXPORT AsyncSaver {
 public:
  // `comm` must outlive the saver, and the ranks of `comm` must make their savers in the same
  // order. Each saver takes two of the channels 1 to 4, in turn (MakeChannel; channel 7 stays
  // free). kResourceExhausted: the saver made two calls before, which has the same channels, still
  // exists. kInvalidArgument: `comm` is a channel itself.
  static Result<std::unique_ptr<AsyncSaver>> Make(Communicator& comm,
                                                  const AsyncOptions& options = {});
  // The default saver of a communicator, on channels 5 and 6, with default options. The first
  // caller creates it, and it exists as long as anyone keeps it. Ranks may release it at different
  // times. The requirements are those of Make.
  static Result<std::shared_ptr<AsyncSaver>> Of(Communicator& comm);
  // Waits for the saves in progress. The exit of the process also waits for the saves of savers
  // that still exist.
  ~AsyncSaver();

  // Like tensormount::Save, but returns when the data are staged. `state` may be changed or
  // destroyed after the return. With AsyncOptions::stage_in_background the call returns at once,
  // and the buffers, and a `state` that owns them (StateDict::AllocateData), must stay until
  // WaitStaged has returned. An error on one rank fails the save on all ranks; the handle returns
  // it. options.events and the callbacks run on a thread of the saver and must not wait for its
  // saves. The targets of options.layout and options.progress must belong to this save only and
  // stay until it has ended.
  Result<SaveHandle> Save(const StateDict& state, std::string_view path,
                          const SaveOptions& options = {});
  // Like Save, but without a copy, for callers that wait for the result anyway. The buffers must
  // stay unchanged until the save has ended; WaitStaged waits for that. The save is queued behind
  // earlier saves, and the call does not wait for them.
  Result<SaveHandle> SaveInPlace(const StateDict& state, std::string_view path,
                                 const SaveOptions& options = {});

  struct Rep;  // Internal.

 private:
  explicit AsyncSaver(std::unique_ptr<Rep> rep);
  enum class Staging { kNow, kInBackground, kNone };
  Result<SaveHandle> Start(const StateDict& state, std::string_view path,
                           const SaveOptions& options, Staging staging);
  std::unique_ptr<Rep> rep_;
};

// Saves in the background with the communicator's default saver (AsyncSaver::Of), for occasional
// saves. The handle keeps the saver alive. When no handle and no caller of Of keeps the saver, its
// staging memory is freed, so programs that save often keep an AsyncSaver.
TENSORMOUNT_EXPORT Result<SaveHandle> AsyncSave(const StateDict& state, std::string_view path,
                                                Communicator& comm,
                                                const SaveOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_ASYNC_SAVE_H_
