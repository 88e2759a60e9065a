// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_FRAME_H_
#define TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_FRAME_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

// How the ranks of a Collective talk: a frame of fixed size, and after it, where the payload does
// not fit in, a message with the payload. Everything in a frame is checked before it is believed.

namespace tensormount {

struct Frame {
  enum Kind : std::uint8_t {
    kHello = 1,         // "this job runs here": from now on silence counts
    kContribution = 2,  // to rank 0: this rank came, with this status or payload
    kWaiting = 3,       // from rank 0: it came, others have not
    kVerdict = 4,       // from rank 0: the outcome
    kGaveUp = 5,        // to rank 0: this rank failed alone and takes part no more
  };
  Kind kind = kHello;
  bool fatal = false;  // Of a failure: the object is spent.
  std::uint32_t job = 0;
  std::uint32_t round = 0;
  std::uint8_t op = 0;
  std::uint64_t phase_hash = 0;
  std::string phase;  // Cut to what fits; for messages.
  Status status;      // A failure; its message travels as the payload.
  std::uint64_t payload_size = 0;
};

inline constexpr std::size_t kFrameBytes = 256;
// What fits into the frame itself.
inline constexpr std::size_t kInlinePayload = 160;
// More than any gathered plan; a size over it is a damaged frame.
inline constexpr std::uint64_t kMaxPayload = std::uint64_t{1} << 36;

using FrameBytes = std::array<char, kFrameBytes>;

// `payload` is put in where it fits.
FrameBytes EncodeFrame(const Frame& frame, std::string_view payload);
// kDataLoss where magic, version, checksum, sizes or kinds are not as they must be. The payload's
// inline part, if any, is put into `inline_payload`.
Result<Frame> DecodeFrame(const FrameBytes& bytes, std::string* inline_payload);

// Receives frames with their payloads from one peer, one after the other.
class FrameReceiver {
 public:
  FrameReceiver(Communicator& comm, int peer, std::uint32_t tag)
      : comm_(comm), peer_(peer), tag_(tag) {}
  ~FrameReceiver() { Cancel(); }
  FrameReceiver(const FrameReceiver&) = delete;
  FrameReceiver& operator=(const FrameReceiver&) = delete;

  // True once a whole frame is there; it stays until Take. Starts to receive where it has not.
  Result<bool> Poll();
  struct Received {
    Frame frame;
    std::string payload;
  };
  Received Take();
  // Of a frame that came and whose payload is still on its way; otherwise 0.
  std::uint64_t PayloadComing() const {
    return stage_ == Stage::kPayload ? received_.frame.payload_size : 0;
  }
  void Cancel();

 private:
  enum class Stage { kIdle, kFrame, kPayload, kReady };
  Status OnFrame();

  Communicator& comm_;
  const int peer_;
  const std::uint32_t tag_;
  Stage stage_ = Stage::kIdle;
  Communicator::Request request_ = 0;
  FrameBytes bytes_{};
  Received received_;
};

// Sends frames and keeps what they need until they are out.
class FrameSender {
 public:
  FrameSender(Communicator& comm, std::uint32_t tag) : comm_(comm), tag_(tag) {}
  ~FrameSender() { CancelAll(); }
  FrameSender(const FrameSender&) = delete;
  FrameSender& operator=(const FrameSender&) = delete;

  // `payload` is the caller's, until nothing is left unsent to `peer`; or shared.
  void Send(int peer, const Frame& frame, std::string_view payload,
            std::shared_ptr<const std::string> keep = nullptr);
  // Tests what is out. True where nothing is left.
  bool Poll();
  // Peers with something unsent.
  std::vector<int> Unsent() const;
  void CancelFor(int peer);
  void CancelAll();

 private:
  struct Item {
    int peer = 0;
    FrameBytes frame{};
    std::shared_ptr<const std::string> keep;
    std::optional<Communicator::Request> frame_request;
    std::optional<Communicator::Request> payload_request;
  };
  // A failed send needs no report: whoever did not get it fails, or is gone, and is noticed.
  void Finish(std::optional<Communicator::Request>& request);
  void Cancel(Item& item);

  Communicator& comm_;
  const std::uint32_t tag_;
  std::list<Item> items_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_FRAME_H_
