// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_CALLBACK_COMMUNICATOR_H_
#define TENSORMOUNT_CALLBACK_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "tensormount/communicator.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Wraps the host program's own process group (isend and irecv of PyTorch's gloo, a transport
// written in Java or Rust), given as three functions. The library builds the other properties of a
// Communicator on them: tags, any sizes, unexpected messages, size mismatches, cancellation,
// heartbeats.
//
// Small messages are sent in packets of at least 512 bytes, about 3 KiB per rank for a save with a
// reused plan. gloo completes a request only while a thread waits for it, so its host gives each
// request a thread, and `test` asks whether that thread has finished.
//
// What the host must guarantee:
//   Order    Messages from one rank to another match the receives for them in the order in which
//            both were started. A receive always has exactly the size of its message.
//   Tag      All messages carry CallbackOptions::tag. Nothing else may use that tag between these
//            ranks while the communicator lives (a host without tags needs a separate group).
//   Sizes    1 byte to kMaxCallbackMessage. A message to the rank itself never occurs.
//   Requests At most one receive and 9 sends per other rank are in progress at a time. A send may
//            block on its receive for any length of time; it need not be buffered.
//   Progress Nothing may wait for another rank: `send` and `receive` only start a request, `test`
//            only checks it (and moves data if the host needs that).
//   Memory   `data` stays valid until `test` reports its request done or failed, or `cancel`
//            returns. It belongs to the communicator, never to the caller.
//   Threads  Calls come from several threads (of the caller, and one that sends heartbeats while
//            a job is in progress), but one at a time: a mutex of the communicator is held, so the
//            callbacks must not call the communicator.
//   Failure  A failed request means that the peer is gone; it is not retried.
struct CommunicatorCallbacks {
  // Passed to each call.
  void* context = nullptr;
  // Start a request. Return 0 and store the host's number of the request in *request, or return
  // another number on failure.
  int (*send)(void* context, int to, std::uint32_t tag, const void* data, std::uint64_t size,
              std::uint64_t* request) = nullptr;
  int (*receive)(void* context, int from, std::uint32_t tag, void* data, std::uint64_t size,
                 std::uint64_t* request) = nullptr;
  // Returns 0 while the request is in progress, 1 when it is done, a negative number if it failed.
  // After 1 or a failure the request is not used again.
  int (*test)(void* context, std::uint64_t request) = nullptr;
  // Optional. Ends a request, whose `data` must not be accessed afterwards. Called only for
  // requests that are in progress when the communicator is destroyed; without `cancel` their memory
  // leaks.
  void (*cancel)(void* context, std::uint64_t request) = nullptr;
};

inline constexpr std::uint64_t kMaxCallbackMessage = std::uint64_t{1} << 20;

struct CallbackOptions {
  std::uint32_t tag = 0;
  std::string kind = "callbacks";  // Communicator::kind(), for reports.
  // How long destroying the communicator waits until the other ranks destroy theirs. The callbacks
  // must work until then.
  std::chrono::milliseconds leave_wait{5000};
};

// Makes a communicator from callbacks. Sends nothing before the first use. kInvalidArgument: a
// callback is missing, or rank is not in [0, size).
TENSORMOUNT_EXPORT Result<std::unique_ptr<Communicator>> MakeCallbackCommunicator(
    const CommunicatorCallbacks& callbacks, int rank, int size,
    const CallbackOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_CALLBACK_COMMUNICATOR_H_
