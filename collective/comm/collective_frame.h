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

// Messages of a Collective: a frame of fixed size and, if the payload does not fit into the frame,
// a second message with the payload, whose size the frame announces. The frame's size is fixed
// because a receive must be posted with its memory before anything is known of the sender. A frame
// carries its job, its number among the job's frames from that rank on that tag, and checksums of
// itself and of the payload.
//
//   u32 magic, u16 version, u8 kind, u8 op, job (2 u64), u32 sequence, u32 round, u64 phase hash,
//   u32 status code, u32 errno, u64 payload size, u64 payload hash, u8 fatal, u8 length of the
//   phase, u16 0, 40 bytes of phase text, the payload if it fits, and in the last 8 bytes XXH3-64
//   of the rest
//
// A damaged frame, or one of another program that uses the same tags, fails a check; a frame of an
// earlier job is recognized by its job number and dropped.

namespace tensormount {

struct Frame {
  enum Kind : std::uint8_t {
    kHello = 1,         // "this job runs here": from now on silence of this rank counts
    kContribution = 2,  // to rank 0: the sender has reached this call, with this status or payload
    kWaiting = 3,       // from rank 0: keep waiting, not all ranks have contributed yet
    kVerdict = 4,       // from rank 0: the outcome
    kGaveUp = 5,        // to rank 0: this rank failed alone and leaves the job
    kLetter = 6,        // between any two: data of an exchange
  };
  Kind kind = kHello;
  // Whether the receiver's Collective is unusable after this failure: after a failure that a caller
  // passed in (Agree) the ranks are still in step, after a missing rank they are not.
  bool fatal = false;
  Communicator::Job job;
  // Counts from zero for each peer and tag: a gap means a lost message, a repetition is dropped.
  std::uint32_t sequence = 0;
  // Round, op and phase together show whether both ranks are in the same call.
  std::uint32_t round = 0;
  std::uint8_t op = 0;
  std::uint64_t phase_hash = 0;
  std::string phase;  // For error messages; cut to what fits.
  Status status;      // The frame has the code; message and fields are the payload (ToPayload).
  std::uint64_t payload_size = 0;
  std::uint64_t payload_hash = 0;
};

inline constexpr std::size_t kFrameBytes = 256;
// Largest payload, in bytes, that fits into the frame.
inline constexpr std::size_t kInlinePayload = 140;
// Maximum size of a payload: more than any gathered plan, so that a larger size means a damaged
// frame.
inline constexpr std::uint64_t kMaxPayload = std::uint64_t{1} << 36;

using FrameBytes = std::array<char, kFrameBytes>;

// The bytes of a message and their checksum, computed once for all receivers.
struct Payload {
  Payload() : Payload(std::string_view()) {}
  explicit Payload(std::string_view b);
  std::string_view bytes;
  std::uint64_t hash;
};

// Encodes a failure as the payload of a frame.
std::string ToPayload(const Status& failure);

// Copies `payload` into the frame if it fits; sets its size and hash in any case.
FrameBytes EncodeFrame(const Frame& frame, const Payload& payload);
// Decodes a frame. Fails with kDataLoss if magic, version, checksum, sizes or kinds are wrong. Sets
// `inline_payload` to the payload's inline part, if any.
Result<Frame> DecodeFrame(const FrameBytes& bytes, std::string* inline_payload);

// Receives frames with their payloads from one peer, one after the other.
//
//   kIdle -- Poll posts a receive of kFrameBytes --> kFrame -- it came --> kPayload or kReady
//   kPayload -- its bytes came, checksum right --> kReady -- Take --> kIdle
//
// Later jobs reuse tags, so frames of a failed job may arrive before the first frame of this one:
// they are dropped (up to a limit), and so are repeated frames. From the first frame of this job
// on, order and checksums must be right.
class FrameReceiver {
 public:
  FrameReceiver(Communicator& comm, Communicator::Job job, int peer, std::uint32_t tag)
      : comm_(comm), job_(job), peer_(peer), tag_(tag) {}
  ~FrameReceiver() { Cancel(); }
  FrameReceiver(const FrameReceiver&) = delete;
  FrameReceiver& operator=(const FrameReceiver&) = delete;

  // Returns true once a whole frame has arrived; the frame stays until Take. Starts a receive if
  // none is posted. Fails with kDataLoss if bytes changed on the way or a frame is missing, with
  // kUnavailable if the peer is gone or in a later job.
  Result<bool> Poll();
  struct Received {
    Frame frame;
    std::string payload;
  };
  Received Take();
  // Size of the payload that is still arriving; 0 if none is.
  std::uint64_t PayloadComing() const {
    return stage_ == Stage::kPayload ? received_.frame.payload_size : 0;
  }
  // Makes payloads of more than `most` bytes fail with kDataLoss, before memory is allocated for
  // them.
  void LimitPayload(std::uint64_t most) { most_ = most; }
  void Cancel();

 private:
  enum class Stage { kIdle, kFrame, kPayload, kReady };
  // True if `frame` is the expected one, false if it is to be dropped.
  Result<bool> IsNext(const Frame& frame);
  Result<bool> OnFrame();
  Status ReceivePayload();
  Status CheckPayload();
  // Counts dropped frames; returns `why` if there are too many.
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
  bool begun_ = false;  // A frame of this job arrived.
  std::uint32_t next_ = 0;
  std::uint32_t dropped_ = 0;
};

// Sends frames of one job on one tag and keeps their memory until they are sent. Send starts a
// send, Poll tests it. Frames stand in a list because the communicator holds pointers into them.
// Not thread-safe.
class FrameSender {
 public:
  FrameSender(Communicator& comm, Communicator::Job job, std::uint32_t tag)
      : comm_(comm), job_(job), tag_(tag), next_(static_cast<std::size_t>(comm.size())) {}
  ~FrameSender() { CancelAll(); }
  FrameSender(const FrameSender&) = delete;
  FrameSender& operator=(const FrameSender&) = delete;

  // Sets job and sequence of `frame`. The bytes of `payload` must stay until nothing is unsent to
  // `peer`, unless `keep` owns them.
  void Send(int peer, Frame frame, const Payload& payload = {},
            std::shared_ptr<const std::string> keep = nullptr);
  // Tests the sends in progress. Returns true if none is left.
  bool Poll();
  std::vector<int> Unsent() const;
  void CancelFor(int peer);
  void CancelAll();
  // The first failure of a send. Callers need not check it: a peer that did not get its frame fails
  // or is found missing.
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
  std::vector<std::uint32_t> next_;  // By rank: number of the next frame.
  std::list<Item> items_;
  Status failure_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_FRAME_H_
