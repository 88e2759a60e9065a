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
  // Memory for copies of the caller's shards, on this rank, of all saves that are under way
  // (objects and common values are copied besides, and not counted). A save that finds it taken
  // waits for an earlier one to give its part back (back-pressure, counted in
  // SaveProgress::stalled); one that would never fit alone is kResourceExhausted. It is kept, and
  // its pages stay touched, between saves. 0: no bound.
  std::uint64_t staging_bytes = 0;
  // False: AsyncSave returns when the bytes are staged. True: it returns at once, and the caller
  // must leave its buffers alone until WaitStaged.
  bool stage_in_background = false;
  // Memory of each device for copies of the shards that are on it, of all saves that are under way.
  // Where it suffices, and the device has so much, the bytes are staged by a copy within the
  // device, and cross to the host while the save writes; otherwise, as without it, they are staged
  // in host memory. It is kept between saves. 0: none.
  std::uint64_t device_staging_bytes = 0;
  // What happens where a handle is dropped before its save has ended. kCancel waits until the bytes
  // are staged, or where they are not copied for the verdict: the caller's memory may go then.
  enum class OnDrop { kWait, kCancel } on_drop = OnDrop::kWait;
};

// How far a save is. Read without waiting; the numbers are of this rank.
struct SaveProgress {
  enum class State { kStaging, kSaving, kCommitted, kFailed, kCancelled };
  State state = State::kStaging;
  std::uint64_t bytes_total = 0;  // Of this rank's shards and objects.
  std::uint64_t bytes_staged = 0;
  std::uint64_t bytes_written = 0;
  std::chrono::nanoseconds stalled{0};  // Waiting for staging memory.
};

class AsyncSaver;

// One save that goes on in the background. The memory of the state dict may go as soon as the
// bytes are staged. Thread-safe.
class TENSORMOUNT_EXPORT SaveHandle {
 public:
  // Dropping it waits for or cancels the save (AsyncOptions::on_drop).
  ~SaveHandle();
  SaveHandle(SaveHandle&&) noexcept;
  SaveHandle& operator=(SaveHandle&&) noexcept;

  // Until the caller may overwrite its buffers. Fails with what made the save fail before that.
  Status WaitStaged();
  // Until the verdict, which is that of Save. Bounded by the save's own time-outs.
  Result<SaveReport> WaitCommitted();
  // The same for a time: for threads that have other things to look after. WaitStagedFor: false
  // where it is not so far after `most`. WaitCommittedFor: nothing then.
  Result<bool> WaitStagedFor(std::chrono::milliseconds most);
  std::optional<Result<SaveReport>> WaitCommittedFor(std::chrono::milliseconds most);
  // For event loops: an eventfd(2) that is readable once the bytes are staged, or the verdict is
  // there, and stays so. It belongs to the handle: not to be read or closed.
  Result<int> StagedFd();
  Result<int> CommittedFd();
  // Local, never collective, never waits.
  SaveProgress progress() const;
  // Asks for the end of the save. The ranks vote: it is cancelled on all of them (kCancelled, names
  // who asked) if the request is in time, and commits on all of them otherwise. Does not wait.
  void Cancel();

  struct Rep;  // Of the library alone.

 private:
  friend class AsyncSaver;
  friend Result<SaveHandle> AsyncSave(const StateDict&, std::string_view, Communicator&,
                                      const SaveOptions&);
  explicit SaveHandle(std::shared_ptr<Rep> rep);
  std::shared_ptr<AsyncSaver> saver_;  // Of AsyncSave; goes after what it works on.
  std::shared_ptr<Rep> rep_;
};

// Saves in the background over channels of a communicator, with staging memory that is used again.
// Make one a job and keep it. What it does on the caller's thread is local: nothing there waits for
// another rank, but for the third save: two may be under way at a time, and a third waits for the
// first (with AsyncOptions::stage_in_background it is queued instead, whatever their number).
// Generations are in the order of the calls, so that `latest` never moves back, whichever commits
// first; of several saves that replace one name the last one stays. Every rank calls Save in the
// same order, from one thread at a time. A process that is forked has none of it: its exit waits
// for nothing, and savers and handles that it inherited answer kUnsupported.
//
// Example:
//
//   auto saver = AsyncSaver::Make(comm);
//   auto handle = saver.value()->Save(state, "STORE/step-1000");  // Bytes are copied.
//   // Training goes on: the buffers may change.
//   auto verdict = handle.value().WaitCommitted();
class TENSORMOUNT_EXPORT AsyncSaver {
 public:
  // `comm` must outlive it, and its ranks must make their savers in the same order: each takes two
  // channels of the communicator, of 1 to 4, in turns (MakeChannel's 7 stays free), whatever the
  // order in which savers are destroyed. kResourceExhausted while the one that was made two before
  // still exists; kInvalidArgument where `comm` is a channel itself.
  static Result<std::unique_ptr<AsyncSaver>> Make(Communicator& comm,
                                                  const AsyncOptions& options = {});
  // The communicator's own, on channels 5 and 6, besides those: made by whoever asks first, the
  // same as long as anybody keeps it, with the default options. Ranks may let go of it at different
  // times. Otherwise as Make.
  static Result<std::shared_ptr<AsyncSaver>> Of(Communicator& comm);
  // Waits for what is under way. So does the end of the process, for savers that still exist then.
  ~AsyncSaver();

  // As tensormount::Save, but returns when the bytes are staged (or at once:
  // AsyncOptions::stage_in_background; then `state`'s buffers must stay until WaitStaged, and with
  // them a `state` that owns them: StateDict::AllocateData). `state`
  // itself may be changed or destroyed when this returns. A failure that only this rank sees is
  // told to the others, and is the verdict on all of them: it is in the handle.
  // Where options.events and callbacks are set they are called on a thread of the saver, where they
  // must not wait for saves of it; what options.layout and options.progress name must be of this
  // save alone and stay until the verdict.
  Result<SaveHandle> Save(const StateDict& state, std::string_view path,
                          const SaveOptions& options = {});
  // The same without a copy: for callers who wait for the verdict, but not blindly. `state`'s
  // buffers are written from, and must stay as they are until the verdict; so WaitStaged waits for
  // it. Never waits for an earlier save, which it is queued behind.
  Result<SaveHandle> SaveInPlace(const StateDict& state, std::string_view path,
                                 const SaveOptions& options = {});

  struct Rep;  // Of the library alone.

 private:
  explicit AsyncSaver(std::unique_ptr<Rep> rep);
  enum class Staging { kNow, kInBackground, kNone };
  Result<SaveHandle> Start(const StateDict& state, std::string_view path,
                           const SaveOptions& options, Staging staging);
  std::unique_ptr<Rep> rep_;
};

// With AsyncSaver::Of, which the handle keeps: for one save now and then. Staging memory is used
// again only as long as somebody keeps it; programs that save often keep an AsyncSaver.
TENSORMOUNT_EXPORT Result<SaveHandle> AsyncSave(const StateDict& state, std::string_view path,
                                                Communicator& comm,
                                                const SaveOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_ASYNC_SAVE_H_
