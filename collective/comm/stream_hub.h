// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_STREAM_HUB_H_
#define TENSORMOUNT_COLLECTIVE_COMM_STREAM_HUB_H_

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "tensormount/status.h"

#include "collective/comm/byte_stream.h"

namespace tensormount {

// Makes the streams of a group on first use and reports which of them have events, so that a rank
// with thousands of peers touches only a few streams and waits for all of them at once. For one
// thread at a time, except Wait and Wake. Must outlive its streams.
class StreamHub {
 public:
  virtual ~StreamHub() = default;

  // The stream to `peer`. Call at most once for each peer.
  virtual std::unique_ptr<ByteStream> Open(int peer) = 0;
  // Accepts connections and does handshakes; appends to `ready` each rank whose stream can be read
  // or written, or has ended. Never waits.
  virtual void Poll(std::vector<int>* ready) = 0;

  // Returns once a Poll would find something, after Wake, or after `most`. Returns at once if
  // `changed()` is true; it is called when Wake can already end this call, so that no change is
  // missed.
  virtual void Wait(std::chrono::nanoseconds most, const std::function<bool()>& changed) = 0;
  // Ends the Waits of other threads.
  virtual void Wake() = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STREAM_HUB_H_
