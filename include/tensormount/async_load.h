// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_ASYNC_LOAD_H_
#define TENSORMOUNT_ASYNC_LOAD_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "tensormount/communicator.h"
#include "tensormount/load.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// One load in the background. Thread-safe. In a forked child inherited handles return kUnsupported.
class TENSORMOUNT_EXPORT LoadHandle {
 public:
  // Cancels the load and waits until it has ended, because the load writes to the caller's memory.
  ~LoadHandle();
  LoadHandle(LoadHandle&&) noexcept;
  LoadHandle& operator=(LoadHandle&&) noexcept;

  // Waits until the load has ended, within the load's own timeouts, and returns the result of Load.
  Result<LoadReport> Wait();
  // Like Wait, with a limit: nullopt if `most` passes before the load has ended.
  std::optional<Result<LoadReport>> WaitFor(std::chrono::milliseconds most);
  // An eventfd(2) for event loops, readable from the moment that the load has ended. The handle
  // owns it: do not read or close it.
  Result<int> EventFd();
  // Bytes that this rank has read from storage so far. Never blocks.
  std::uint64_t bytes_read() const;
  // Requests cancellation and returns at once. If the request is in time, the load fails with
  // kCancelled on all ranks. The buffers must stay valid until the load has ended.
  void Cancel();

  struct Rep;  // Internal.

 private:
  friend Result<LoadHandle> AsyncLoad(const StateDict&, std::string_view, Communicator&,
                                      const LoadOptions&);
  explicit LoadHandle(std::shared_ptr<Rep> rep);
  std::shared_ptr<Rep> rep_;
};

// Runs Load (tensormount/load.h) on a thread of its own, which also calls options.events.
// Collective: every rank calls AsyncLoad, in the same order as other calls. `request` may be
// destroyed after the return; its buffers and `comm` must stay until the load has ended. Until then
// `comm` serves only background loads, which run one after the other in the order of the calls;
// other jobs need a channel of `comm` (MakeChannel). When the process exits, running loads are
// cancelled. An error on one rank fails the load on all ranks, and the handle returns that error.
TENSORMOUNT_EXPORT Result<LoadHandle> AsyncLoad(const StateDict& request, std::string_view path,
                                                Communicator& comm,
                                                const LoadOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_ASYNC_LOAD_H_
