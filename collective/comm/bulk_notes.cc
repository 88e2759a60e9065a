// SPDX-License-Identifier: Apache-2.0
// Encodes, sends and receives the notes of a BulkTransport. A note has a fixed size and a checksum,
// because messages of an earlier transport may be left on the tag.
#include "collective/comm/bulk_notes.h"

#include <cstring>
#include <utility>

#include "base/coding.h"
#include "base/hash.h"
#include "collective/comm/status_wire.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

constexpr std::uint32_t kNoteMagic = 0x6b6c4254;  // The bytes "TBlk".
constexpr std::size_t kMaxNoteMessage = 600;
constexpr std::uint32_t kAllBulkChannels = Communicator::kChannels * Communicator::kChannels;
// Notes use tags at the end of the lower half, because other users take tags from 0 up.
constexpr std::uint32_t kFirstBulkTag = 16384 - 2 * kAllBulkChannels;

BufferView ViewOfNote(char* bytes, std::size_t size) {
  return BufferView::Host(DType::kU8, bytes, Dims{static_cast<std::int64_t>(size)});
}

constexpr std::size_t kMaxNoteDevice = 64;

// Limit of messages of one rank that one Poll drops because they are not notes of this group: each
// rank's earlier transports leave only a few, and without a limit a rank that sends more and more
// of them would keep its receiver in Poll past all deadlines.
constexpr int kMaxDropped = 64;

// The name of a device in a note: "cuda:0 (NVIDIA ...)", without the model if it is too long.
std::string DeviceInNote(const std::string& device) {
  return device.size() <= kMaxNoteDevice
             ? device
             : std::string(CutUtf8(device.substr(0, device.find(' ')), kMaxNoteDevice));
}

// The part of a status that fits into a note: code, errno, rank, device and a cut message.
Status CutToNote(const Status& status) {
  if (status.ok()) return status;
  return Status::FromParts(status.code(), status.ToErrno(),
                           std::string(CutUtf8(status.message(), kMaxNoteMessage)))
      .With({.rank = status.fields().rank, .device = DeviceInNote(status.fields().device)});
}

}  // namespace

BulkNotes::BulkNotes(Communicator& comm, std::uint64_t group)
    : comm_(comm), group_(group), tag_(TagOf(comm)) {
  for (int r = 0; r < comm.size(); ++r) {
    if (r != comm.rank() && (comm.rank() == 0 || r == 0)) seats_.push_back(Seat{.rank = r});
  }
}

BulkNotes::~BulkNotes() {
  for (Seat& seat : seats_) {
    if (seat.request) comm_.Cancel(*seat.request);
  }
  for (const Outgoing& out : sent_) comm_.Cancel(out.request);
}

std::uint32_t BulkNotes::TagOf(const Communicator& comm) {
  return kFirstBulkTag + 2 * comm.channel();
}

void BulkNotes::SendToAll(BulkNote note) { SendToAllExcept(comm_.rank(), std::move(note)); }

void BulkNotes::SendToAllExcept(int rank, BulkNote note) {
  const Bytes bytes = Encode(note);
  std::lock_guard lock(mutex_);
  DropSent();
  for (const Seat& seat : seats_) {
    if (seat.rank != rank) SendTo(seat.rank, bytes);
  }
}

Result<std::optional<BulkNote>> BulkNotes::Poll() {
  for (Seat& seat : seats_) {
    for (int dropped = 0; !seat.gone && dropped < kMaxDropped; ++dropped) {
      if (!seat.request) {
        const auto asked =
            comm_.Receive(seat.rank, tag_, ViewOfNote(seat.bytes.data(), seat.bytes.size()));
        if (!asked.ok()) return asked.status().With({.rank = seat.rank});
        seat.request = asked.value();
      }
      const Result<bool> came = comm_.Test(*seat.request);
      if (came.ok() && !came.value()) break;
      seat.request.reset();
      if (came.ok()) {
        std::optional<BulkNote> note = Decode(seat.bytes, seat.rank);
        if (note) return note;
        continue;
      }
      // A message of an earlier user of the tag may have another size.
      if (came.status().code() == Code::kDataLoss) continue;
      seat.gone = true;
      return came.status().With({.rank = seat.rank});
    }
  }
  return std::optional<BulkNote>();
}

BulkNotes::Bytes BulkNotes::Encode(const BulkNote& note) const {
  ByteWriter out;
  out.U32(kNoteMagic);
  out.U8(note.kind);
  out.U64(group_);
  out.U64(note.exchange);
  out.U64(note.plan);
  WriteStatus(out, CutToNote(note.status));
  out.String(std::string_view(note.mover_message).substr(0, BulkNote::kMaxMoverMessage));
  Bytes bytes{};
  std::memcpy(bytes.data(), out.bytes().data(), out.bytes().size());
  StoreLittle(bytes.data() + bytes.size() - 8,
              Xxh3Low64(std::string_view(bytes.data(), bytes.size() - 8)));
  return bytes;
}

std::optional<BulkNote> BulkNotes::Decode(const Bytes& bytes, int from) const {
  const std::string_view body(bytes.data(), bytes.size() - 8);
  if (LoadLittle<std::uint64_t>(bytes.data() + body.size()) != Xxh3Low64(body)) return {};
  ByteReader in(body, "a control message between ranks");
  if (in.U32() != kNoteMagic) return {};
  BulkNote note;
  note.from = from;
  note.kind = static_cast<BulkNote::Kind>(in.U8());
  if (in.U64() != group_) return {};
  note.exchange = in.U64();
  note.plan = in.U64();
  note.status = ReadStatus(in);
  note.mover_message = std::string(in.String(BulkNote::kMaxMoverMessage));
  if (!in.status().ok()) return {};
  return note;
}

void BulkNotes::SendTo(int rank, const Bytes& bytes) {
  Outgoing& out = sent_.emplace_back(Outgoing{bytes, 0});
  const auto sent = comm_.Send(rank, tag_, ViewOfNote(out.bytes.data(), out.bytes.size()));
  if (sent.ok()) {
    out.request = sent.value();
  } else {
    sent_.pop_back();
  }
}

void BulkNotes::DropSent() {
  sent_.remove_if([&](const Outgoing& out) {
    const Result<bool> done = comm_.Test(out.request);
    return !done.ok() || done.value();
  });
}

}  // namespace tensormount
