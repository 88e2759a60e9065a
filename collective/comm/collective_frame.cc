// SPDX-License-Identifier: Apache-2.0
#include "collective/comm/collective_frame.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "base/coding.h"
#include "base/hash.h"

namespace tensormount {
namespace {

constexpr std::uint32_t kFrameMagic = 0x43434d54;  // "TMCC"
constexpr std::uint16_t kFrameVersion = 1;
constexpr std::size_t kPhaseBytes = 40;
// magic 4, version 2, kind 1, op 1, job 4, round 4, phase hash 8, code 4, errno 4, payload 8,
// fatal 1, phase length 1, zero 6.
constexpr std::size_t kFixedBytes = 48;
constexpr std::size_t kChecksumAt = kFrameBytes - 8;
static_assert(kFixedBytes + kPhaseBytes + kInlinePayload == kChecksumAt);

BufferView BytesView(const void* data, std::size_t size) {
  return BufferView::Host(DType::kU8, data, Dims{static_cast<std::int64_t>(size)});
}
BufferView BytesView(void* data, std::size_t size) {
  return BufferView::Host(DType::kU8, data, Dims{static_cast<std::int64_t>(size)});
}

bool CodeKnown(std::uint32_t code) { return code <= static_cast<std::uint32_t>(Code::kInternal); }

}  // namespace

FrameBytes EncodeFrame(const Frame& frame, std::string_view payload) {
  ByteWriter w;
  w.U32(kFrameMagic);
  w.U16(kFrameVersion);
  w.U8(frame.kind);
  w.U8(frame.op);
  w.U32(frame.job);
  w.U32(frame.round);
  w.U64(frame.phase_hash);
  w.U32(static_cast<std::uint32_t>(frame.status.code()));
  w.U32(frame.status.ok() ? 0 : static_cast<std::uint32_t>(frame.status.ToErrno()));
  w.U64(payload.size());
  w.U8(frame.fatal ? 1 : 0);
  const std::size_t phase = std::min(frame.phase.size(), kPhaseBytes);
  w.U8(static_cast<std::uint8_t>(phase));
  w.Raw("\0\0\0\0\0\0", 6);
  w.Raw(frame.phase.data(), phase);
  w.bytes().resize(kFixedBytes + kPhaseBytes);
  if (payload.size() <= kInlinePayload) w.Raw(payload.data(), payload.size());
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
  if (r.U32() != kFrameMagic) return damaged("does not begin with its magic number");
  if (r.U16() != kFrameVersion) return damaged("of another version of tensormount");
  if (LoadLittle<std::uint64_t>(bytes.data() + kChecksumAt) !=
      Xxh3Low64(all.substr(0, kChecksumAt))) {
    return damaged("checksum differs");
  }
  Frame frame;
  const std::uint8_t kind = r.U8();
  if (kind < Frame::kHello || kind > Frame::kGaveUp) return damaged("of unknown kind");
  frame.kind = static_cast<Frame::Kind>(kind);
  frame.op = r.U8();
  frame.job = r.U32();
  frame.round = r.U32();
  frame.phase_hash = r.U64();
  const std::uint32_t code = r.U32();
  const std::uint32_t err = r.U32();
  frame.payload_size = r.U64();
  frame.fatal = r.U8() != 0;
  const std::size_t phase = r.U8();
  if (!CodeKnown(code)) return damaged("with an unknown error code");
  if (phase > kPhaseBytes) return damaged("with an impossible phase name");
  if (frame.payload_size > kMaxPayload) return damaged("with an impossible payload size");
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
  if (stage_ == Stage::kReady) return true;
  if (stage_ == Stage::kIdle) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        request_, comm_.Receive(peer_, tag_, BytesView(bytes_.data(), bytes_.size())));
    stage_ = Stage::kFrame;
  }
  if (stage_ == Stage::kFrame) {
    const Result<bool> done = comm_.Test(request_);
    if (!done.ok()) {
      stage_ = Stage::kIdle;
      return done;
    }
    if (!done.value()) return false;
    stage_ = Stage::kIdle;
    TENSORMOUNT_RETURN_IF_ERROR(OnFrame());
    if (stage_ == Stage::kReady) return true;
  }
  const Result<bool> done = comm_.Test(request_);
  if (!done.ok()) {
    stage_ = Stage::kIdle;
    return done;
  }
  if (done.value()) stage_ = Stage::kReady;
  return done.value();
}

Status FrameReceiver::OnFrame() {
  TENSORMOUNT_ASSIGN_OR_RETURN(received_.frame, DecodeFrame(bytes_, &received_.payload));
  const auto size = static_cast<std::size_t>(received_.frame.payload_size);
  if (size <= kInlinePayload) {
    stage_ = Stage::kReady;
    return {};
  }
  try {
    received_.payload.resize(size);
  } catch (const std::exception&) {
    return {Code::kResourceExhausted,
            "no memory for " + std::to_string(size) + " bytes of rank " + std::to_string(peer_)};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(
      request_, comm_.Receive(peer_, tag_, BytesView(received_.payload.data(), size)));
  stage_ = Stage::kPayload;
  return {};
}

FrameReceiver::Received FrameReceiver::Take() {
  stage_ = Stage::kIdle;
  Received out = std::exchange(received_, {});
  if (!out.frame.status.ok()) {
    out.frame.status = Status::FromParts(out.frame.status.code(), out.frame.status.ToErrno(),
                                         std::exchange(out.payload, {}));
  }
  return out;
}

void FrameReceiver::Cancel() {
  if (stage_ == Stage::kFrame || stage_ == Stage::kPayload) comm_.Cancel(request_);
  stage_ = Stage::kIdle;
}

void FrameSender::Send(int peer, const Frame& frame, std::string_view payload,
                       std::shared_ptr<const std::string> keep) {
  Item& item = items_.emplace_back();
  item.peer = peer;
  item.frame = EncodeFrame(frame, payload);
  item.keep = std::move(keep);
  const FrameBytes& bytes = item.frame;
  Result<Communicator::Request> sent =
      comm_.Send(peer, tag_, BytesView(bytes.data(), bytes.size()));
  if (sent.ok()) item.frame_request = sent.value();
  if (sent.ok() && payload.size() > kInlinePayload) {
    sent = comm_.Send(peer, tag_, BytesView(payload.data(), payload.size()));
    if (sent.ok()) item.payload_request = sent.value();
  }
}

void FrameSender::Finish(std::optional<Communicator::Request>& request) {
  if (!request) return;
  const Result<bool> done = comm_.Test(*request);
  if (!done.ok() || done.value()) request.reset();
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
