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

// A host's own process group (isend and irecv of PyTorch's gloo, a transport written in Java or
// Rust) in three functions. Everything else that a Communicator promises is made on top of them:
// tags, any sizes, messages nobody asked for yet, wrong sizes, cancellation, heartbeats.
//
// Small ones travel in packets of 512 bytes at least, about 3 KiB a rank for a save with its plan
// at hand. gloo's Work is done only while somebody waits for it, so that its host gives each
// request a thread that does, and `test` asks whether that has returned.
//
// What the host must guarantee:
//   Order    Messages from one rank to another meet the receives for them in the order in which
//            both were started. A receive always has exactly the size of the message that it meets.
//   Tag      All of them carry CallbackOptions::tag. Between these ranks nothing else may use that
//            tag while the communicator lives (a host without tags needs a group of its own).
//   Sizes    1 byte to kMaxCallbackMessage. A message to the rank itself never occurs.
//   Requests At most one receive and 9 sends for each other rank are under way at a time. A send
//            may wait for its receive, as long as it likes; it need not be taken over.
//   Progress Nothing may wait for another rank: `send` and `receive` only start, `test` only looks
//            (and moves what the host has to move).
//   Memory   `data` stays as it is until `test` said that its request is done or failed, or
//            `cancel` returned. It is never the caller's own memory, always the communicator's.
//   Threads  Calls come from several threads (of the caller, and one that sends heartbeats while
//            a job is under way), but one at a time: a mutex of the communicator is held, so they
//            must not call it.
//   Failure  A request that failed says that the peer is gone: there is no second try.
struct CommunicatorCallbacks {
  // Handed to each call.
  void* context = nullptr;
  // Start to send or receive; 0, with the host's number of the request in *request, or another
  // number where that cannot be.
  int (*send)(void* context, int to, std::uint32_t tag, const void* data, std::uint64_t size,
              std::uint64_t* request) = nullptr;
  int (*receive)(void* context, int from, std::uint32_t tag, void* data, std::uint64_t size,
                 std::uint64_t* request) = nullptr;
  // 0: under way. 1: done. Negative: failed. After the last two the request is not named again.
  int (*test)(void* context, std::uint64_t request) = nullptr;
  // Optional: ends a request, after which its memory is not touched. Only called when the
  // communicator is destroyed and the other side did not come; without it the memory of such a
  // request is never freed.
  void (*cancel)(void* context, std::uint64_t request) = nullptr;
};

inline constexpr std::uint64_t kMaxCallbackMessage = std::uint64_t{1} << 20;

struct CallbackOptions {
  std::uint32_t tag = 0;
  std::string kind = "callbacks";  // For reports.
  // Ranks take leave of each other when they destroy their communicators: how long the first waits
  // for the last. The callbacks must work until then.
  std::chrono::milliseconds leave_wait{5000};
};

// Local: nothing is sent before the communicator is used.
// kInvalidArgument: a callback is missing, or rank is not in [0, size).
TENSORMOUNT_EXPORT Result<std::unique_ptr<Communicator>> MakeCallbackCommunicator(
    const CommunicatorCallbacks& callbacks, int rank, int size,
    const CallbackOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_CALLBACK_COMMUNICATOR_H_
