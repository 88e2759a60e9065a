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

// Where the streams of a group come from that are made when they are first used, and who knows
// which of them have something: so that a rank with thousands of peers touches those few, and
// waits for all of them at once.
// One thread at a time but for Wait and Wake. Outlives its streams.
class StreamHub {
 public:
  virtual ~StreamHub() = default;

  // The stream to `peer`, once.
  virtual std::unique_ptr<ByteStream> Open(int peer) = 0;
  // Does what belongs to no stream (accepting, introducing), and appends to `ready` each rank whose
  // stream may be read or written, or has ended. Never waits.
  virtual void Turn(std::vector<int>* ready) = 0;

  // Returns once a Turn would find something, after Wake, or after `most`; at once where `changed`,
  // which is asked after Wake reaches this call.
  virtual void Wait(std::chrono::nanoseconds most, const std::function<bool()>& changed) = 0;
  // Ends the Waits of other threads.
  virtual void Wake() = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STREAM_HUB_H_
