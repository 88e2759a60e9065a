// SPDX-License-Identifier: Apache-2.0
// Encodes, decodes and checks frames (collective_frame.h). Leftovers of a failed job are recognized
// by the job number and dropped; a frame of this job that changed on the way is reported as damage.
#include "collective/comm/collective_frame.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "base/coding.h"
#include "base/hash.h"
#include "collective/comm/status_wire.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

constexpr std::uint32_t kFrameMagic = 0x43434d54;  // The bytes "TMCC".
constexpr std::uint16_t kFrameVersion = 3;
constexpr std::size_t kPhaseBytes = 40;
// Size of the fields before the phase: magic 4, version 2, kind 1, op 1, job 16, sequence 4, round
// 4, phase hash 8, code 4, errno 4, payload size 8 and hash 8, fatal 1, phase length 1, zero 2.
constexpr std::size_t kFixedBytes = 68;
constexpr std::size_t kChecksumAt = kFrameBytes - 8;
static_assert(kFixedBytes + kPhaseBytes + kInlinePayload == kChecksumAt);
// Maximum number of dropped messages. Failed jobs leave only a few on a tag, so more means a flood,
// or a connection that fails at each call.
constexpr std::uint32_t kMostDropped = 1 << 16;

// The phase as a frame has it: "..." marks a name that was cut.
std::string PhaseInFrame(const std::string& phase) {
  if (phase.size() <= kPhaseBytes) return phase;
  return std::string(CutUtf8(phase, kPhaseBytes - 3)) + "...";
}

BufferView BytesView(const void* data, std::size_t size) {
  return BufferView::Host(DType::kU8, data, Dims{static_cast<std::int64_t>(size)});
}
BufferView BytesView(void* data, std::size_t size) {
  return BufferView::Host(DType::kU8, data, Dims{static_cast<std::int64_t>(size)});
}

// Whether bytes that are not a valid frame were probably a frame of this job that changed in
// transit: most bytes of the fields whose values are known in advance are right.
bool IsFrameOf(const FrameBytes& bytes, const Communicator::Job& job) {
  ByteWriter w;
  w.U32(kFrameMagic);
  w.U16(kFrameVersion);
  w.U8(bytes[6]);
  w.U8(bytes[7]);
  w.U64(job.number);
  w.U64(job.group);
  std::size_t equal = 0;
  for (std::size_t i = 0; i < w.bytes().size(); ++i) equal += w.bytes()[i] == bytes[i] ? 1 : 0;
  return equal > w.bytes().size() / 2 + 4;
}

bool IsKnownCode(std::uint32_t code) { return code <= static_cast<std::uint32_t>(Code::kInternal); }

}  // namespace

std::string ToPayload(const Status& failure) {
  ByteWriter out;
  WriteStatus(out, failure);
  return std::move(out.bytes());
}

Payload::Payload(std::string_view b) : bytes(b), hash(Xxh3Low64(b)) {}

FrameBytes EncodeFrame(const Frame& frame, const Payload& payload) {
  ByteWriter w;
  w.U32(kFrameMagic);
  w.U16(kFrameVersion);
  w.U8(frame.kind);
  w.U8(frame.op);
  w.U64(frame.job.number);
  w.U64(frame.job.group);
  w.U32(frame.sequence);
  w.U32(frame.round);
  w.U64(frame.phase_hash);
  w.U32(static_cast<std::uint32_t>(frame.status.code()));
  w.U32(frame.status.ok() ? 0 : static_cast<std::uint32_t>(frame.status.ToErrno()));
  w.U64(payload.bytes.size());
  w.U64(payload.hash);
  w.U8(frame.fatal ? 1 : 0);
  const std::string phase = PhaseInFrame(frame.phase);
  w.U8(static_cast<std::uint8_t>(phase.size()));
  w.Raw("\0\0", 2);
  w.Raw(phase.data(), phase.size());
  w.bytes().resize(kFixedBytes + kPhaseBytes);
  if (payload.bytes.size() <= kInlinePayload) w.Raw(payload.bytes.data(), payload.bytes.size());
  w.bytes().resize(kChecksumAt);
  w.U64(Xxh3Low64(std::string_view(w.bytes())));
  FrameBytes out;
  std::memcpy(out.data(), w.bytes().data(), kFrameBytes);
  return out;
}

Result<Frame> DecodeFrame(const FrameBytes& bytes, std::string* inline_payload) {
  const auto damaged = [](const char* what) {
    return Status(Code::kDataLoss, std::string("message between ranks: ") + what);
  };
  const std::string_view all(bytes.data(), bytes.size());
  ByteReader r(all.substr(0, kChecksumAt), "message between ranks");
  if (r.U32() != kFrameMagic) return damaged("wrong magic number");
  if (r.U16() != kFrameVersion) return damaged("sent by another version of tensormount");
  if (LoadLittle<std::uint64_t>(bytes.data() + kChecksumAt) !=
      Xxh3Low64(all.substr(0, kChecksumAt))) {
    return damaged("checksum mismatch");
  }
  Frame frame;
  const std::uint8_t kind = r.U8();
  if (kind < Frame::kHello || kind > Frame::kLetter) return damaged("unknown kind");
  frame.kind = static_cast<Frame::Kind>(kind);
  frame.op = r.U8();
  frame.job.number = r.U64();
  frame.job.group = r.U64();
  frame.sequence = r.U32();
  frame.round = r.U32();
  frame.phase_hash = r.U64();
  const std::uint32_t code = r.U32();
  const std::uint32_t err = r.U32();
  frame.payload_size = r.U64();
  frame.payload_hash = r.U64();
  frame.fatal = r.U8() != 0;
  const std::size_t phase = r.U8();
  if (!IsKnownCode(code)) return damaged("unknown error code");
  if (phase > kPhaseBytes) return damaged("phase name too long");
  if (frame.payload_size > kMaxPayload) return damaged("payload too large");
  frame.phase.assign(all.substr(kFixedBytes, phase));
  if (code != 0) {
    frame.status = Status::FromParts(static_cast<Code>(code), static_cast<int>(err), "");
  }
  inline_payload->clear();
  if (frame.payload_size <= kInlinePayload) {
    inline_payload->assign(
        all.substr(kFixedBytes + kPhaseBytes, static_cast<std::size_t>(frame.payload_size)));
  }
  return frame;
}

Result<bool> FrameReceiver::Poll() {
  while (true) {
    if (stage_ == Stage::kReady) return true;
    if (stage_ == Stage::kIdle) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          request_, comm_.Receive(peer_, tag_, BytesView(bytes_.data(), bytes_.size())));
      stage_ = Stage::kFrame;
    }
    const Result<bool> done = comm_.Test(request_);
    if (done.ok() && !done.value()) return false;
    if (stage_ == Stage::kPayload) {
      stage_ = Stage::kIdle;
      if (!done.ok()) return done;
      TENSORMOUNT_RETURN_IF_ERROR(CheckPayload());
      continue;
    }
    stage_ = Stage::kIdle;
    const Result<bool> next = done.ok() ? OnFrame() : done;
    if (!next.ok()) {
      // An earlier job may have left a message of another size, a withdrawn send, or bytes that are
      // no frame; these are dropped.
      const Code code = next.status().code();
      const bool left = code == Code::kCancelled || code == Code::kDataLoss;
      if (begun_ || !left || (done.ok() && IsFrameOf(bytes_, job_))) return next;
      TENSORMOUNT_RETURN_IF_ERROR(Drop(next.status()));
    } else if (!next.value()) {
      TENSORMOUNT_RETURN_IF_ERROR(
          Drop(Damaged("too many messages of earlier saves and loads arrived")));
    }
  }
}

Status FrameReceiver::Drop(const Status& why) {
  received_ = {};
  return ++dropped_ <= kMostDropped ? Status() : why;
}

Status FrameReceiver::Damaged(const std::string& what) const {
  return Status(Code::kDataLoss, "message of rank " + std::to_string(peer_) + ": " + what)
      .With({.rank = peer_});
}

Result<bool> FrameReceiver::IsNext(const Frame& frame) {
  if (frame.job.group != job_.group || frame.job.number < job_.number) return false;
  if (frame.job.number > job_.number) {
    return Status(Code::kUnavailable,
                  "rank " + std::to_string(peer_) + " is in a later collective call (job " +
                      std::to_string(frame.job.number) + ") than this rank (job " +
                      std::to_string(job_.number) + ")")
        .With({.rank = peer_});
  }
  if (frame.sequence < next_) return false;
  if (frame.sequence > next_) {
    return Damaged("the message has number " + std::to_string(frame.sequence) +
                   ", expected was number " + std::to_string(next_));
  }
  begun_ = true;
  ++next_;
  return true;
}

// Handles received frame bytes. Returns true if they are the next frame of this job; its payload
// has arrived, too, or is on its way.
Result<bool> FrameReceiver::OnFrame() {
  TENSORMOUNT_ASSIGN_OR_RETURN(received_.frame, DecodeFrame(bytes_, &received_.payload));
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool next, IsNext(received_.frame));
  if (!next) return false;
  const std::uint64_t size = received_.frame.payload_size;
  if (size > most_) {
    return Damaged("the message has " + std::to_string(size) + " bytes, the limit is " +
                   std::to_string(most_));
  }
  if (size > kInlinePayload) {
    TENSORMOUNT_RETURN_IF_ERROR(ReceivePayload());
  } else {
    stage_ = Stage::kReady;
  }
  return true;
}

Status FrameReceiver::ReceivePayload() {
  const auto size = static_cast<std::size_t>(received_.frame.payload_size);
  try {
    received_.payload.resize(size);
  } catch (const std::exception&) {
    return {Code::kResourceExhausted, "message of rank " + std::to_string(peer_) +
                                          ": not enough memory for the " + std::to_string(size) +
                                          " bytes of the message"};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(
      request_, comm_.Receive(peer_, tag_, BytesView(received_.payload.data(), size)));
  stage_ = Stage::kPayload;
  return {};
}

Status FrameReceiver::CheckPayload() {
  if (Xxh3Low64(received_.payload) != received_.frame.payload_hash) {
    return Damaged("checksum mismatch: its bytes changed in transit");
  }
  stage_ = Stage::kReady;
  return {};
}

FrameReceiver::Received FrameReceiver::Take() {
  stage_ = Stage::kIdle;
  Received out = std::exchange(received_, {});
  if (out.frame.status.ok()) return out;
  const std::string told = std::exchange(out.payload, {});
  ByteReader in(told, "failure report of another rank");
  const Status status = ReadStatus(in);
  // A failure that cannot be decoded is still a failure.
  out.frame.status = status.ok() || !in.Finish().ok()
                         ? Damaged("the message reports a failure, but the report is malformed")
                         : status;
  return out;
}

void FrameReceiver::Cancel() {
  if (stage_ == Stage::kFrame || stage_ == Stage::kPayload) comm_.Cancel(request_);
  stage_ = Stage::kIdle;
}

void FrameSender::Send(int peer, Frame frame, const Payload& payload,
                       std::shared_ptr<const std::string> keep) {
  frame.job = job_;
  frame.sequence = next_[static_cast<std::size_t>(peer)]++;
  Item& item = items_.emplace_back();
  item.peer = peer;
  item.frame = EncodeFrame(frame, payload);
  item.keep = std::move(keep);
  const FrameBytes& bytes = item.frame;
  Start(comm_.Send(peer, tag_, BytesView(bytes.data(), bytes.size())), &item.frame_request);
  if (item.frame_request && payload.bytes.size() > kInlinePayload) {
    Start(comm_.Send(peer, tag_, BytesView(payload.bytes.data(), payload.bytes.size())),
          &item.payload_request);
  }
}

void FrameSender::Start(const Result<Communicator::Request>& sent,
                        std::optional<Communicator::Request>* request) {
  if (sent.ok()) {
    *request = sent.value();
  } else if (failure_.ok()) {
    failure_ = sent.status();
  }
}

void FrameSender::Finish(std::optional<Communicator::Request>& request) {
  if (!request) return;
  const Result<bool> done = comm_.Test(*request);
  if (!done.ok() || done.value()) request.reset();
  if (!done.ok() && failure_.ok()) failure_ = done.status();
}

bool FrameSender::Poll() {
  for (Item& item : items_) {
    Finish(item.frame_request);
    Finish(item.payload_request);
  }
  items_.remove_if([](const Item& i) { return !i.frame_request && !i.payload_request; });
  return items_.empty();
}

std::vector<int> FrameSender::Unsent() const {
  std::vector<int> peers;
  for (const Item& item : items_) peers.push_back(item.peer);
  return peers;
}

void FrameSender::Cancel(Item& item) {
  if (item.payload_request) comm_.Cancel(*item.payload_request);
  if (item.frame_request) comm_.Cancel(*item.frame_request);
  item.payload_request.reset();
  item.frame_request.reset();
}

void FrameSender::CancelFor(int peer) {
  for (Item& item : items_) {
    if (item.peer == peer) Cancel(item);
  }
  items_.remove_if([&](const Item& i) { return i.peer == peer; });
}

void FrameSender::CancelAll() {
  for (Item& item : items_) Cancel(item);
  items_.clear();
}

}  // namespace tensormount
