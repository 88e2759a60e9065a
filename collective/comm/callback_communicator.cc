// SPDX-License-Identifier: Apache-2.0
// Ranks that communicate through a host program's callbacks: the protocol of StreamPeer over
// streams of packets.
//
// A packet is a head of fixed size and perhaps a bulk message. The head contains either a few
// bytes, such as a frame of a collective job, or the size of the bulk message that follows. Each
// stream has at most one receive posted: for a head, or for the bulk message that the last head
// announced. The host only reads and writes buffers that this file owns, never the caller's memory,
// so that Cancel can forget a message at once; the price is a copy on each side. A side that leaves
// sends a last packet and reads until the other side's last one, for at most
// CallbackOptions::leave_wait; then no packet is left that a later communicator could receive.
#include "tensormount/callback_communicator.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "collective/comm/host_bytes.h"
#include "collective/comm/stream_communicator.h"

namespace tensormount {
namespace {

constexpr std::uint32_t kCallbackMagic = 0x50434d54;  // The bytes "TMCP".
// Size of a head's fixed fields: magic 4, flags 4, bytes in the head 4, bytes in the bulk message
// 4. The bytes follow.
constexpr std::size_t kHeadFixed = 16;
constexpr std::size_t kHead = 512;
constexpr std::size_t kInHead = kHead - kHeadFixed;
constexpr std::uint32_t kFlagBye = 1;
constexpr std::size_t kBulk = kMaxCallbackMessage;
// A packet is sent only while fewer heads and bulk messages than this number are unsent. The last
// packet is a head only.
constexpr std::size_t kMaxSends = 8;

// Keeps memory until the process ends, because a host without cancel may still access it after its
// communicator is gone. The static list keeps the memory reachable for leak checkers.
void KeepForHost(std::vector<std::byte> bytes) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::vector<std::byte>>;
  std::lock_guard lock(mutex);
  kept->push_back(std::move(bytes));
}

class CallbackStream final : public ByteStream {
 public:
  CallbackStream(const CommunicatorCallbacks& host, std::uint32_t tag, int peer)
      : host_(host), tag_(tag), peer_(peer) {}

  ~CallbackStream() override {
    const auto give_up = [&](Flight& flight) {
      if (host_.cancel == nullptr) {
        KeepForHost(std::move(flight.bytes));
        return;
      }
      try {
        host_.cancel(host_.context, flight.request);
      } catch (...) {
        KeepForHost(std::move(flight.bytes));
      }
    };
    for (Flight& flight : sends_) give_up(flight);
    if (receiving_ != kNothing) give_up(incoming_);
  }
  CallbackStream(const CallbackStream&) = delete;
  CallbackStream& operator=(const CallbackStream&) = delete;

  Result<std::size_t> Write(const void* head, std::size_t head_size, const void* body,
                            std::size_t body_size) override {
    if (!failure_.ok()) return failure_;
    std::size_t taken = Append(head, head_size);
    if (taken == head_size) taken += Append(body, body_size);
    if (!failure_.ok()) return failure_;
    return taken;
  }

  void Flush() override {
    TestSends();
    if (!packet_.empty() && sends_.size() < kMaxSends) SendPacket(0);
  }

  Result<std::size_t> Read(void* to, std::size_t size) override {
    while (failure_.ok()) {
      if (at_ < end_) {
        const std::size_t n = std::min(size, end_ - at_);
        std::memcpy(to, incoming_.bytes.data() + at_, n);
        at_ += n;
        return n;
      }
      if (!Advance()) break;
    }
    if (!failure_.ok()) return failure_;
    if (peer_left_) return PeerGone(peer_);
    return std::size_t{0};
  }

  void Shut() override {}

  bool TryClose() override {
    TestSends();
    if (!failure_.ok()) return true;
    if (!goodbye_sent_) {
      // The last packet is a packet of its own, after all bytes that are still to be sent.
      if (!packet_.empty() && sends_.size() < kMaxSends) SendPacket(0);
      if (packet_.empty() && sends_.size() < kMaxSends) goodbye_sent_ = SendPacket(kFlagBye);
    }
    // Bytes that arrive from now on are dropped.
    do {
      at_ = end_;
    } while (Advance());
    return !failure_.ok() || (goodbye_sent_ && sends_.empty() && peer_left_);
  }

 private:
  struct Flight {
    std::uint64_t request = 0;
    std::vector<std::byte> bytes;
  };
  enum Receiving { kNothing, kPacketHeader, kPacketBody };

  void Fail(const char* action, int code) {
    if (!failure_.ok()) return;
    failure_ = Status(Code::kUnavailable, "rank " + std::to_string(peer_) + " is gone: " + action +
                                              " failed in the communicator's callbacks (" +
                                              std::to_string(code) + ")");
  }
  // A host written in C++ may throw; an exception counts as a failure.
  template <typename Call>
  int Guard(Call call) const {
    try {
      return call();
    } catch (...) {
      return -1;
    }
  }

  std::size_t Append(const void* data, std::size_t size) {
    std::size_t taken = 0;
    while (taken < size) {
      if (packet_.size() == kBulk) {
        TestSends();
        if (sends_.size() >= kMaxSends || !SendPacket(0)) break;
      }
      const std::size_t n = std::min(size - taken, kBulk - packet_.size());
      const auto* from = static_cast<const std::byte*>(data) + taken;
      packet_.insert(packet_.end(), from, from + n);
      taken += n;
    }
    return taken;
  }

  bool SendPacket(std::uint32_t flags) {
    const bool in_head = packet_.size() <= kInHead;
    std::vector<std::byte> head(kHead);
    StoreLittle(head.data(), kCallbackMagic);
    StoreLittle(head.data() + 4, flags);
    StoreLittle(head.data() + 8, static_cast<std::uint32_t>(in_head ? packet_.size() : 0));
    StoreLittle(head.data() + 12, static_cast<std::uint32_t>(in_head ? 0 : packet_.size()));
    if (in_head && !packet_.empty()) {
      std::memcpy(head.data() + kHeadFixed, packet_.data(), packet_.size());
    }
    std::vector<std::byte> bulk;
    if (!in_head) bulk.swap(packet_);
    packet_.clear();
    return SendMessage(std::move(head)) && (in_head || SendMessage(std::move(bulk)));
  }

  bool SendMessage(std::vector<std::byte> bytes) {
    Flight& flight = sends_.emplace_back();
    flight.bytes = std::move(bytes);
    const int code = Guard([&] {
      return host_.send(host_.context, peer_, tag_, flight.bytes.data(), flight.bytes.size(),
                        &flight.request);
    });
    if (code == 0) return true;
    sends_.pop_back();
    Fail("send", code);
    return false;
  }

  void TestSends() {
    for (auto it = sends_.begin(); it != sends_.end();) {
      const int code = Guard([&] { return host_.test(host_.context, it->request); });
      if (code == 0) {
        ++it;
        continue;
      }
      if (code < 0) Fail("send", code);
      it = sends_.erase(it);
    }
  }

  bool Receive(Receiving what, std::size_t size) {
    if (incoming_.bytes.size() < size) incoming_.bytes.resize(size);
    const int code = Guard([&] {
      return host_.receive(host_.context, peer_, tag_, incoming_.bytes.data(), size,
                           &incoming_.request);
    });
    if (code != 0) {
      Fail("receive", code);
      return false;
    }
    receiving_ = what;
    return true;
  }

  // Call when all received bytes are read. Returns true if more bytes may have arrived.
  bool Advance() {
    if (receiving_ == kNothing) {
      if (peer_left_ || !failure_.ok()) return false;
      if (!Receive(bulk_ != 0 ? kPacketBody : kPacketHeader, bulk_ != 0 ? bulk_ : kHead)) {
        return false;
      }
    }
    const int code = Guard([&] { return host_.test(host_.context, incoming_.request); });
    if (code == 0) return false;
    const Receiving what = std::exchange(receiving_, kNothing);
    if (code < 0) {
      Fail("receive", code);
      return false;
    }
    if (what == kPacketBody) {
      at_ = 0;
      end_ = std::exchange(bulk_, 0);
      return true;
    }
    return OnHead();
  }

  bool OnHead() {
    const std::byte* head = incoming_.bytes.data();
    const auto flags = LoadLittle<std::uint32_t>(head + 4);
    const auto in_head = LoadLittle<std::uint32_t>(head + 8);
    const auto bulk = LoadLittle<std::uint32_t>(head + 12);
    if (LoadLittle<std::uint32_t>(head) != kCallbackMagic || in_head > kInHead || bulk > kBulk ||
        (in_head != 0 && bulk != 0) || flags > kFlagBye) {
      failure_ = Status(Code::kDataLoss, "connection to rank " + std::to_string(peer_) +
                                             ": a packet has an invalid header");
      return false;
    }
    at_ = kHeadFixed;
    end_ = kHeadFixed + in_head;
    bulk_ = bulk;
    peer_left_ = (flags & kFlagBye) != 0;
    return !peer_left_;
  }

  const CommunicatorCallbacks host_;
  const std::uint32_t tag_;
  const int peer_;
  Status failure_;

  std::vector<std::byte> packet_;  // Bytes accepted by Write and not sent yet.
  std::deque<Flight> sends_;
  bool goodbye_sent_ = false;

  Flight incoming_;
  Receiving receiving_ = kNothing;
  std::size_t at_ = 0;  // Position of the first unread byte in incoming_.
  std::size_t end_ = 0;
  std::size_t bulk_ = 0;  // Size of the bulk message that follows the head.
  bool peer_left_ = false;
};

}  // namespace

Result<std::unique_ptr<Communicator>> MakeCallbackCommunicator(
    const CommunicatorCallbacks& callbacks, int rank, int size, const CallbackOptions& options) {
  if (callbacks.send == nullptr || callbacks.receive == nullptr || callbacks.test == nullptr) {
    return Status(Code::kInvalidArgument,
                  "make a communicator of callbacks: send, receive and test must be given");
  }
  if (size < 1 || rank < 0 || rank >= size) {
    return Status(Code::kInvalidArgument, "make a communicator of callbacks: rank " +
                                              std::to_string(rank) + " is outside [0, " +
                                              std::to_string(size) + ")");
  }
  std::vector<std::unique_ptr<ByteStream>> streams;
  for (int peer = 0; peer < size; ++peer) {
    streams.push_back(
        peer == rank ? nullptr : std::make_unique<CallbackStream>(callbacks, options.tag, peer));
  }
  return std::unique_ptr<Communicator>(std::make_unique<StreamCommunicator>(
      rank, std::move(streams),
      StreamCommunicator::Options{.kind = options.kind, .leave_wait = options.leave_wait}));
}

}  // namespace tensormount
