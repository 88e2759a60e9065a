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
// not fit in, a message with the payload. A frame says of which job it is, which number it has
// among those of this job from that rank on that tag, and the checksums of itself and of the
// payload. Everything is checked before it is believed.
// A small message (a vote, a verdict without text) is one message of kFrameBytes; a payload over
// kInlinePayload costs a second one, whose size the frame announced. The size of the first is
// fixed because a receive must be posted with its memory before anything is known of the sender.

//
//   u32 magic, u16 version, u8 kind, u8 op, job (2 u64), u32 sequence, u32 round, u64 phase hash,
//   u32 status code, u32 errno, u64 payload size, u64 payload hash, u8 fatal, u8 length of the
//   phase, the phase in words, the payload where it fits, and in the last 8 bytes XXH3-64 of the
//   rest
//
// A frame that was damaged, or is of another program that uses the same tags, fails one of these;
// one of an earlier job that failed is told by its job number and dropped.

namespace tensormount {

// One message as its fields.
struct Frame {
  enum Kind : std::uint8_t {
    kHello = 1,         // "this job runs here": from now on silence counts
    kContribution = 2,  // to rank 0: this rank came, with this status or payload
    kWaiting = 3,       // from rank 0: it came, others have not
    kVerdict = 4,       // from rank 0: the outcome
    kGaveUp = 5,        // to rank 0: this rank failed alone and takes part no more
    kLetter = 6,        // between any two: data of an exchange
  };
  Kind kind = kHello;
  // No other field tells whether the ranks may go on after a failure: one that a caller put in
  // (Agree) leaves them in step, a missing rank does not.
  bool fatal = false;  // Of a failure: the object is spent.
  Communicator::Job job;
  // From zero for each peer and tag: a gap means a lost message, a repetition is dropped.
  std::uint32_t sequence = 0;
  // Round, op and phase together prove that both ranks are in the same call.
  std::uint32_t round = 0;
  std::uint8_t op = 0;
  std::uint64_t phase_hash = 0;
  std::string phase;  // Cut to what fits; for messages.
  Status status;      // A failure; its words and fields travel as the payload (ToPayload).
  std::uint64_t payload_size = 0;
  std::uint64_t payload_hash = 0;
};

inline constexpr std::size_t kFrameBytes = 256;
// What fits into the frame itself.
inline constexpr std::size_t kInlinePayload = 140;
// More than any gathered plan; a size over it is a damaged frame.
inline constexpr std::uint64_t kMaxPayload = std::uint64_t{1} << 36;

using FrameBytes = std::array<char, kFrameBytes>;

// Bytes and their checksum, which is computed once for all whom they are sent to.
struct Payload {
  Payload() : Payload(std::string_view()) {}
  explicit Payload(std::string_view b);
  std::string_view bytes;
  std::uint64_t hash;
};

// The payload of a frame with this failure.
std::string ToPayload(const Status& failure);

// `payload` is put in where it fits; its size and hash in any case.
FrameBytes EncodeFrame(const Frame& frame, const Payload& payload);
// kDataLoss where magic, version, checksum, sizes or kinds are not as they must be. The payload's
// inline part, if any, is put into `inline_payload`.
Result<Frame> DecodeFrame(const FrameBytes& bytes, std::string* inline_payload);

// Receives frames with their payloads from one peer, one after the other.
//
//   kIdle -- Poll posts a receive of kFrameBytes --> kFrame -- it came --> kPayload or kReady
//   kPayload -- its bytes came, checksum right --> kReady -- Take --> kIdle
//
// Tags are used again by later jobs (there are not that many), so what a failed job left behind may
// stand before the first frame of this one: all of it is dropped. So is a frame that comes twice.
// From the first frame of this job on, order and checksums must hold.
class FrameReceiver {
 public:
  FrameReceiver(Communicator& comm, Communicator::Job job, int peer, std::uint32_t tag)
      : comm_(comm), job_(job), peer_(peer), tag_(tag) {}
  ~FrameReceiver() { Cancel(); }
  FrameReceiver(const FrameReceiver&) = delete;
  FrameReceiver& operator=(const FrameReceiver&) = delete;

  // True once a whole frame is there; it stays until Take. Starts to receive where it has not.
  // kDataLoss: bytes changed on the way, or a frame is missing.
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
  // A payload that is larger is kDataLoss, before there is memory for it.
  void LimitPayload(std::uint64_t most) { most_ = most; }
  // Withdraws the receive that is under way.
  void Cancel();

 private:
  enum class Stage { kIdle, kFrame, kPayload, kReady };
  // True where the frame is the one that is waited for, false where it is to be dropped.
  Result<bool> IsNext(const Frame& frame);
  Result<bool> OnFrame();
  Status ReceivePayload();
  Status CheckPayload();
  // Counts what is dropped; `why` itself where it was too much.
  Status Drop(const Status& why);
  Status Damaged(const std::string& what) const;

  Communicator& comm_;
  const Communicator::Job job_;
  const int peer_;
  const std::uint32_t tag_;
  std::uint64_t most_ = kMaxPayload;
  Stage stage_ = Stage::kIdle;
  Communicator::Request request_ = 0;
  FrameBytes bytes_{};
  Received received_;
  bool begun_ = false;  // A frame of this job came.
  std::uint32_t next_ = 0;
  std::uint32_t dropped_ = 0;
};

// Sends frames of one job on one tag, and keeps what they need until they are out.
// Sends complete in the background: Send starts one, Poll tests it. Frames stand in a list because
// the communicator holds pointers into them, which must not move. Not thread-safe.
class FrameSender {
 public:
  FrameSender(Communicator& comm, Communicator::Job job, std::uint32_t tag)
      : comm_(comm), job_(job), tag_(tag), next_(static_cast<std::size_t>(comm.size())) {}
  ~FrameSender() { CancelAll(); }
  FrameSender(const FrameSender&) = delete;
  FrameSender& operator=(const FrameSender&) = delete;

  // The bytes of `payload` are the caller's, until nothing is left unsent to `peer`; or shared.
  // Job and sequence of `frame` are set here.
  void Send(int peer, Frame frame, const Payload& payload = {},
            std::shared_ptr<const std::string> keep = nullptr);
  // Tests what is out. True where nothing is left.
  bool Poll();
  // Peers with something unsent.
  std::vector<int> Unsent() const;
  void CancelFor(int peer);
  void CancelAll();
  // The first failure of a send. Whoever did not get a frame fails, or is gone, and is noticed:
  // only who needs the cause looks.
  const Status& failure() const { return failure_; }

 private:
  struct Item {
    int peer = 0;
    FrameBytes frame{};
    std::shared_ptr<const std::string> keep;
    std::optional<Communicator::Request> frame_request;
    std::optional<Communicator::Request> payload_request;
  };
  void Start(const Result<Communicator::Request>& sent,
             std::optional<Communicator::Request>* request);
  void Finish(std::optional<Communicator::Request>& request);
  void Cancel(Item& item);

  Communicator& comm_;
  const Communicator::Job job_;
  const std::uint32_t tag_;
  std::vector<std::uint32_t> next_;  // By rank.
  std::list<Item> items_;
  Status failure_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_FRAME_H_
