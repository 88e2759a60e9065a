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

// One load that goes on in the background. Thread-safe. A process that is forked has none of it:
// what it inherited answers kUnsupported.
class TENSORMOUNT_EXPORT LoadHandle {
 public:
  // Cancels the load and waits for its end, since it writes to the caller's memory.
  ~LoadHandle();
  LoadHandle(LoadHandle&&) noexcept;
  LoadHandle& operator=(LoadHandle&&) noexcept;

  // Until the verdict, which is that of Load. Bounded by the load's own time-outs.
  Result<LoadReport> Wait();
  // Nothing: it is not there after `most`.
  std::optional<Result<LoadReport>> WaitFor(std::chrono::milliseconds most);
  // For event loops: an eventfd(2) that is readable once the verdict is there, and stays so. It
  // belongs to the handle: not to be read or closed.
  Result<int> EventFd();
  // Read from storage by this rank so far. Never waits.
  std::uint64_t bytes_read() const;
  // Asks for the end of the load, which fails with kCancelled on all ranks if the request is in
  // time. Does not wait: the buffers are the load's until the verdict.
  void Cancel();

  struct Rep;  // Of the library alone.

 private:
  friend Result<LoadHandle> AsyncLoad(const StateDict&, std::string_view, Communicator&,
                                      const LoadOptions&);
  explicit LoadHandle(std::shared_ptr<Rep> rep);
  std::shared_ptr<Rep> rep_;
};

// Load of tensormount/load.h on a thread of its own. Collective: every rank calls it, in the same
// order as other calls. `request` may go when this returns, its buffers and `comm` must stay until
// the verdict. Until then `comm` is the load's: other jobs need channels of it (MakeChannel), but
// loads in the background, which run one after the other, in the order of the calls. Where
// options.events is set it is called on that thread. The end of the process cancels what is under
// way.
// A failure that only this rank sees is told to the others, and is the verdict on all of them: it
// is in the handle.
TENSORMOUNT_EXPORT Result<LoadHandle> AsyncLoad(const StateDict& request, std::string_view path,
                                                Communicator& comm,
                                                const LoadOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_ASYNC_LOAD_H_
