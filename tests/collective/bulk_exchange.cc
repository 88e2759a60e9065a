// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/bulk_exchange.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <string>

#include "collective/comm/collective_frame.h"
#include "collective/comm/collective_round.h"

namespace tensormount {
namespace {

class BulkTransfers final : public LocalWork {
 public:
  BulkTransfers(Collective& collective, std::span<const BulkTransfer> sends,
                std::span<const BulkTransfer> receives)
      : collective_(collective), sends_(sends) {
    for (const BulkTransfer& t : receives) {
      if (t.size == 0 || !CheckPeer(t.peer)) continue;
      coming_[t.peer].emplace_back(static_cast<std::byte*>(t.data),
                                   static_cast<std::size_t>(t.size));
    }
  }
  ~BulkTransfers() override { Cancel(); }

  // The first one comes when all ranks have arrived.
  Result<bool> Step() override {
    for (const BulkTransfer& t : sends_) {
      if (t.size == 0 || !CheckPeer(t.peer)) continue;
      Frame letter;
      letter.kind = Frame::kLetter;
      const std::string_view bytes(static_cast<const char*>(t.data),
                                   static_cast<std::size_t>(t.size));
      collective_.data_out().Send(t.peer, letter, Payload(bytes));
    }
    sends_ = {};
    if (failure_.ok()) failure_ = Receive();
    const bool sent = collective_.data_out().Poll();
    if (failure_.ok()) failure_ = collective_.data_out().failure();
    if (!failure_.ok()) {
      Cancel();
      return failure_;
    }
    return sent && coming_.empty();
  }

  void Cancel() override {
    collective_.data_out().CancelAll();
    for (const auto& [peer, rooms] : coming_) collective_.data_in(peer).Cancel();
    coming_.clear();
  }

 private:
  bool CheckPeer(int peer) {
    const bool good = peer >= 0 && peer < collective_.size();
    if (!good && failure_.ok()) {
      failure_ = Status(Code::kInvalidArgument, "exchange: rank " + std::to_string(peer) +
                                                    " is outside [0, " +
                                                    std::to_string(collective_.size()) + ")");
    }
    return good;
  }

  static Status CheckLetter(const FrameReceiver::Received& letter, int peer, std::size_t size) {
    if (letter.frame.kind == Frame::kLetter && letter.payload.size() == size) return {};
    return {Code::kDataLoss, "message of rank " + std::to_string(peer) + ": " +
                                 std::to_string(letter.payload.size()) + " bytes came where " +
                                 std::to_string(size) + " were expected"};
  }

  Status Receive() {
    for (auto it = coming_.begin(); it != coming_.end();) {
      auto& [peer, rooms] = *it;
      FrameReceiver& in = collective_.data_in(peer);
      while (!rooms.empty()) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool came, in.Poll());
        if (!came) break;
        const FrameReceiver::Received letter = in.Take();
        TENSORMOUNT_RETURN_IF_ERROR(CheckLetter(letter, peer, rooms.front().size()));
        std::memcpy(rooms.front().data(), letter.payload.data(), letter.payload.size());
        rooms.pop_front();
        moved = true;
      }
      it = rooms.empty() ? coming_.erase(it) : std::next(it);
    }
    return {};
  }

  Collective& collective_;
  std::span<const BulkTransfer> sends_;                     // Not yet begun.
  std::map<int, std::deque<std::span<std::byte>>> coming_;  // By peer, in order.
  Status failure_;
};

}  // namespace

Status ExchangeBulk(Collective& collective, std::span<const BulkTransfer> sends,
                    std::span<const BulkTransfer> receives, std::string_view phase) {
  std::uint64_t bytes = 0;
  for (const auto& transfers : {sends, receives}) {
    for (const BulkTransfer& t : transfers) bytes += t.size;
  }
  BulkTransfers work(collective, sends, receives);
  return collective.Run(work, bytes, phase);
}

}  // namespace tensormount
