// SPDX-License-Identifier: Apache-2.0
// Messages of one pair of ranks over a stream of bytes. Short messages are sent at once, and the
// receiving rank keeps them until a receive is posted. Long messages are announced, and sent when
// the other side has posted a receive, so that nothing large is buffered and the order of receives
// does not matter.
#include "collective/comm/stream_peer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/hash.h"
#include "collective/comm/host_bytes.h"

namespace tensormount {
namespace {

constexpr std::uint32_t kStreamMagic = 0x50534d54;  // The bytes "TMSP".
// Limits of one Advance in each direction, so that the mutex is not held for long.
constexpr std::size_t kBytesPerTurn = 1 << 20;
constexpr int kCallsPerTurn = 64;
// Limit of announcements from a peer without a receive: some 700 bytes of memory for each if all
// have different tags.
constexpr std::size_t kMaxAnnounced = 1 << 16;

template <typename Map>
void FinishAll(Map& map, const Status& status) {
  for (auto& [id, m] : map) m->Finish(status);
  map.clear();
}

}  // namespace

StreamPeer::StreamPeer(int rank, std::unique_ptr<ByteStream> stream,
                       std::atomic<std::uint64_t>& changes)
    : rank_(rank),
      stream_(std::move(stream)),
      changes_(changes),
      last_heard_(Clock::now()),
      sent_(Clock::now()) {}

std::uint32_t StreamPeer::HeaderCheck(const Header& header) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&header) + sizeof(header.check);
  return static_cast<std::uint32_t>(Xxh3(bytes, sizeof(header) - sizeof(header.check)).low ^
                                    kStreamMagic);
}

void StreamPeer::Queue(Kind kind, std::uint32_t tag, std::uint32_t aux, std::uint64_t id,
                       std::uint64_t size) {
  if (write_closed_) return;
  Out out;
  out.header = {0, kind, tag, aux, id, size};
  out.header.check = HeaderCheck(out.header);
  out_.push_back(std::move(out));
}

void StreamPeer::Send(const MessagePtr& m) {
  if (write_closed_) {
    m->Finish(why_.ok() ? write_why_ : why_);
    return;
  }
  if (m->size <= kSmall && Cost(m->size) <= credit_) {
    credit_ -= Cost(m->size);
    Queue(kMessage, m->tag, 0, 0, m->size);
    Out& out = out_.back();
    out.payload = m->data;
    out.payload_size = m->size;
    out.message = m;
    out.last = true;
  } else {
    m->id = next_id_++;
    announced_.emplace(m->id, m);
    Queue(kAnnounce, m->tag, 0, m->id, m->size);
  }
  Write();
}

void StreamPeer::Receive(const MessagePtr& m) {
  const auto it = early_.find(m->tag);
  if (it != early_.end()) {
    UnexpectedMessage early = std::move(it->second.front());
    it->second.pop_front();
    if (it->second.empty()) early_.erase(it);
    if (!early.small) {
      --early_announced_;
      if (read_closed_) {
        m->Finish(why_);
      } else {
        Accept(m, early.id, early.size);
        Write();
      }
      return;
    }
    early_bytes_ -= Cost(early.size);
    if (early.size != m->size) {
      m->Finish(SizeDiffers(rank_, m->tag, early.size, m->size));
    } else {
      if (m->size != 0) std::memcpy(m->data, early.bytes.data(), m->size);
      m->Finish({});
    }
    GiveCredit(early.size);
    return;
  }
  if (read_closed_) {
    m->Finish(why_);
    return;
  }
  posted_[m->tag].push_back(m);
}

void StreamPeer::CancelSend(const MessagePtr& m) {
  if (m->done) return;
  if (announced_.erase(m->id) != 0) Queue(kAbandon, 0, 0, m->id, 0);
  if (std::erase(streaming_, m) != 0) Queue(kAbandon, 0, 0, m->id, 0);
  for (auto it = out_.begin(); it != out_.end();) {
    if (it->message != m) {
      ++it;
    } else if (it->header.kind == kMessage && it->written == 0) {
      credit_ += Cost(m->size);
      it = out_.erase(it);
    } else {
      // The frame has begun, or the receiver waits for it: the frame continues from a copy of its
      // bytes.
      it->owned.assign(it->payload, it->payload + it->payload_size);
      it->payload = it->owned.data();
      it->message.reset();
      ++it;
    }
  }
  m->Finish(Status(Code::kCancelled, "cancelled"));
}

void StreamPeer::CancelReceive(const MessagePtr& m) {
  if (m->done) return;
  const auto it = posted_.find(m->tag);
  if (it != posted_.end()) {
    std::erase(it->second, m);
    if (it->second.empty()) posted_.erase(it);
  }
  std::erase_if(filling_, [&](const auto& entry) { return entry.second == m; });
  if (in_message_ == m) {
    in_message_.reset();
    in_dest_ = nullptr;
  }
  m->Finish(Status(Code::kCancelled, "cancelled"));
}

void StreamPeer::Beat(Clock::duration interval) {
  if (write_closed_ || HasOutput() || !stream_->open()) return;
  if (Clock::now() - sent_ < interval) return;
  Queue(kHeartbeat, 0, 0, 0, 0);
  Write();
}

bool StreamPeer::Advance() {
  if (read_closed_) return false;
  const bool read = Read();
  const bool written = Write();
  return read || written;
}

void StreamPeer::NextPiece() {
  if (streaming_.empty()) return;
  const MessagePtr m = streaming_.front();
  streaming_.pop_front();
  const std::size_t piece = std::min(kPiece, m->size - m->moved);
  Queue(kData, 0, 0, m->id, piece);
  Out& out = out_.back();
  out.payload = m->data + m->moved;
  out.payload_size = piece;
  out.message = m;
  m->moved += piece;
  out.last = m->moved == m->size;
  if (!out.last) streaming_.push_back(m);
}

bool StreamPeer::Write() {
  std::size_t moved = 0;
  for (int call = 0; call < kCallsPerTurn && moved < kBytesPerTurn && !write_closed_; ++call) {
    if (out_.empty()) NextPiece();
    if (out_.empty()) break;
    Out& out = out_.front();
    const std::size_t header_at = std::min(out.written, sizeof(Header));
    const std::size_t payload_at = out.written - header_at;
    const Result<std::size_t> n = stream_->Write(
        reinterpret_cast<const char*>(&out.header) + header_at, sizeof(Header) - header_at,
        out.payload_size == 0 ? nullptr : out.payload + payload_at, out.payload_size - payload_at);
    if (!n.ok()) CloseWrite(n.status());
    if (!n.ok() || n.value() == 0) break;
    sent_ = Clock::now();
    moved += n.value();
    out.written += n.value();
    if (out.header.kind != kHeartbeat) ++changes_;
    if (out.written < sizeof(Header) + out.payload_size) continue;
    if (out.last && out.message) out.message->Finish({});
    out_.pop_front();
  }
  if (!write_closed_) stream_->Flush();
  if (wants_write()) stream_->WantWrite();
  return moved != 0;
}

bool StreamPeer::Read() {
  // Destination of bytes that are dropped (cancelled, or of a wrong size).
  static thread_local std::byte scratch[64 << 10];
  std::size_t moved = 0;
  bool more = true;
  for (int call = 0; call < kCallsPerTurn && moved < kBytesPerTurn && !read_closed_; ++call) {
    std::byte* to;
    std::size_t room;
    if (!in_payload_) {
      to = reinterpret_cast<std::byte*>(&in_) + in_have_;
      room = sizeof(Header) - in_have_;
    } else if (in_dest_ != nullptr) {
      to = in_dest_;
      room = in_left_;
    } else {
      to = scratch;
      room = std::min(sizeof(scratch), in_left_);
    }
    const Result<std::size_t> n = stream_->Read(to, room);
    if (!n.ok()) Close(n.status());
    more = n.ok() && n.value() != 0;
    if (!more) break;
    const std::size_t got = n.value();
    last_heard_ = Clock::now();
    moved += got;
    if (!in_payload_) {
      in_have_ += got;
      if (in_have_ == sizeof(Header)) {
        in_have_ = 0;
        if (in_.kind != kHeartbeat) ++changes_;
        OnHeader();
      }
      continue;
    }
    ++changes_;
    in_left_ -= got;
    if (in_dest_ != nullptr) in_dest_ += got;
    if (in_left_ == 0) OnPayloadEnd();
  }
  if (more && !read_closed_) stream_->WantRead();
  return moved != 0;
}

bool StreamPeer::BreakStream(const std::string& what) {
  Close(Status(Code::kDataLoss, "connection to rank " + std::to_string(rank_) +
                                    stream_->peer_suffix() + ": " + what));
  return false;
}

StreamPeer::MessagePtr StreamPeer::TakePosted(std::uint32_t tag) {
  const auto it = posted_.find(tag);
  if (it == posted_.end()) return nullptr;
  MessagePtr m = std::move(it->second.front());
  it->second.pop_front();
  if (it->second.empty()) posted_.erase(it);
  return m;
}

void StreamPeer::OnHeader() {
  if (in_.check != HeaderCheck(in_)) {
    BreakStream(
        "checksum mismatch in a frame header: it was corrupted in transit, or sent by another "
        "version of tensormount");
    return;
  }
  switch (in_.kind) {
    case kHeartbeat:
      return;
    case kMessage:
      OnSmall();
      return;
    case kAnnounce: {
      if (const MessagePtr m = TakePosted(in_.tag)) {
        Accept(m, in_.id, static_cast<std::size_t>(in_.size));
        return;
      }
      if (early_announced_ >= kMaxAnnounced) {
        BreakStream("that rank announced too many messages");
        return;
      }
      ++early_announced_;
      early_[in_.tag].push_back(
          UnexpectedMessage{false, {}, in_.id, static_cast<std::size_t>(in_.size)});
      return;
    }
    case kReady: {
      const auto it = announced_.find(in_.id);
      if (it == announced_.end()) return;  // The send was cancelled meanwhile.
      const MessagePtr m = std::move(it->second);
      announced_.erase(it);
      if (in_.aux != 0) {
        m->Finish({});
      } else {
        streaming_.push_back(m);
      }
      return;
    }
    case kData: {
      if (in_.size == 0 || in_.size > kPiece) {
        BreakStream("a part of a message has an invalid size");
        return;
      }
      const auto it = filling_.find(in_.id);
      in_payload_ = true;
      in_left_ = static_cast<std::size_t>(in_.size);
      in_dest_ = nullptr;
      in_message_.reset();
      if (it == filling_.end()) return;  // The receive was cancelled: the bytes are skipped.
      if (in_left_ > it->second->size - it->second->moved) {
        in_payload_ = false;
        BreakStream("a message is longer than announced");
        return;
      }
      in_message_ = it->second;
      in_dest_ = in_message_->data + in_message_->moved;
      return;
    }
    case kCreditBack:
      credit_ =
          std::min<std::uint64_t>(kCredit, credit_ + std::min<std::uint64_t>(in_.size, kCredit));
      return;
    case kAbandon: {
      const auto it = filling_.find(in_.id);
      if (it != filling_.end()) {
        it->second->Finish(Status(
            Code::kCancelled,
            "rank " + std::to_string(rank_) + " withdrew a message that it had begun to send"));
        filling_.erase(it);
        return;
      }
      for (auto queue = early_.begin(); queue != early_.end(); ++queue) {
        const auto gone = std::erase_if(
            queue->second, [&](const UnexpectedMessage& e) { return !e.small && e.id == in_.id; });
        if (gone == 0) continue;
        early_announced_ -= gone;
        if (queue->second.empty()) early_.erase(queue);
        return;
      }
      return;
    }
    default:
      BreakStream("a frame of unknown kind " + std::to_string(in_.kind));
  }
}

void StreamPeer::OnSmall() {
  if (in_.size > kSmall) {
    BreakStream("a short message has " + std::to_string(in_.size) + " bytes, the limit is " +
                std::to_string(kSmall));
    return;
  }
  const auto size = static_cast<std::size_t>(in_.size);
  in_payload_ = true;
  in_left_ = size;
  in_dest_ = nullptr;
  in_owned_.clear();
  in_message_ = TakePosted(in_.tag);
  if (in_message_ && in_message_->size != size) {
    in_message_->Finish(SizeDiffers(rank_, in_.tag, size, in_message_->size));
    in_message_.reset();
  } else if (in_message_) {
    in_dest_ = in_message_->data;
  } else {
    if (early_bytes_ + Cost(size) > kCredit) {
      in_payload_ = false;
      BreakStream("that rank sent more bytes than flow control allows");
      return;
    }
    early_bytes_ += Cost(size);
    // At least one byte: OnPayloadEnd takes a non-empty in_owned_ for a message without a receive.
    in_owned_.resize(std::max<std::size_t>(size, 1));
    in_dest_ = in_owned_.data();
  }
  if (size == 0) OnPayloadEnd();
}

void StreamPeer::OnPayloadEnd() {
  in_payload_ = false;
  in_dest_ = nullptr;
  const MessagePtr m = std::exchange(in_message_, nullptr);
  const auto size = static_cast<std::size_t>(in_.size);
  if (in_.kind == kData) {
    if (!m) return;
    m->moved += size;
    if (m->moved != m->size) return;
    filling_.erase(in_.id);
    m->Finish({});
    return;
  }
  if (!in_owned_.empty()) {
    // No receive was posted when the message began to arrive; one may be posted now.
    const MessagePtr late = TakePosted(in_.tag);
    if (!late) {
      early_[in_.tag].push_back(UnexpectedMessage{true, std::move(in_owned_), 0, size});
      in_owned_.clear();
      return;
    }
    early_bytes_ -= Cost(size);
    if (late->size != size) {
      late->Finish(SizeDiffers(rank_, in_.tag, size, late->size));
    } else {
      if (size != 0) std::memcpy(late->data, in_owned_.data(), size);
      late->Finish({});
    }
    in_owned_.clear();
  } else if (m) {
    m->Finish({});
  }
  GiveCredit(size);
}

void StreamPeer::Accept(const MessagePtr& m, std::uint64_t id, std::size_t size) {
  if (size != m->size) {
    Queue(kReady, 0, 1, id, 0);
    m->Finish(SizeDiffers(rank_, m->tag, size, m->size));
  } else if (size == 0) {
    Queue(kReady, 0, 1, id, 0);
    m->Finish({});
  } else {
    filling_[id] = m;
    Queue(kReady, 0, 0, id, 0);
  }
}

void StreamPeer::GiveCredit(std::size_t size) {
  credit_owed_ += Cost(size);
  if (credit_owed_ < kCredit / 4) return;
  Queue(kCreditBack, 0, 0, 0, credit_owed_);
  credit_owed_ = 0;
}

void StreamPeer::CloseWrite(const Status& gone) {
  ++changes_;  // Other threads may wait for the sends that finish here.
  write_closed_ = true;
  write_why_ = gone;
  for (const Out& out : out_) {
    if (out.message && !out.message->done) out.message->Finish(gone);
  }
  for (const MessagePtr& m : streaming_) m->Finish(gone);
  out_.clear();
  streaming_.clear();
  FinishAll(announced_, gone);
}

void StreamPeer::Close(const Status& why) {
  ++changes_;
  if (read_closed_) return;
  read_closed_ = true;
  why_ = why;
  // If received bytes are damaged, this rank's sends fail with kUnavailable, because their bytes
  // are not damaged.
  CloseWrite(why.code() == Code::kDataLoss ? PeerGone(rank_, stream_->peer_suffix()) : why);
  for (auto& [tag, queue] : posted_) {
    for (const MessagePtr& m : queue) m->Finish(why);
  }
  posted_.clear();
  FinishAll(filling_, why);
  if (in_message_ && !in_message_->done) in_message_->Finish(why);
  in_message_.reset();
  in_dest_ = nullptr;
  stream_->Shut();
}

}  // namespace tensormount
