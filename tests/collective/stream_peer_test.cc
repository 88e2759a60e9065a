// SPDX-License-Identifier: Apache-2.0
// StreamPeer over a stream in memory: whatever flips on the way, and however much a peer announces,
// ends in a named failure, never in a wait of both. StreamCommunicator over a hub of such streams:
// which of them it opens, and where heartbeats go.
#include "collective/comm/stream_peer.h"

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "collective/comm/stream_communicator.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

// Both directions of a connection. One bit of one of them may be flipped.
struct Wire {
  std::string bytes[2];
  std::size_t taken[2] = {0, 0};
  bool shut[2] = {false, false};
  bool refuses_writes = false;
  int flip_direction = -1;
  std::size_t flip_byte = 0;
  int flip_bit = 0;
};

class WireEnd final : public ByteStream {
 public:
  WireEnd(Wire& wire, int end) : wire_(wire), out_(end), in_(1 - end) {}
  Result<std::size_t> Write(const void* head, std::size_t head_size, const void* body,
                            std::size_t body_size) override {
    if (wire_.shut[out_] || wire_.shut[in_] || wire_.refuses_writes) {
      return Status(Code::kUnavailable, "shut");
    }
    std::string& out = wire_.bytes[out_];
    const std::size_t before = out.size();
    out.append(static_cast<const char*>(head), head_size);
    if (body_size > 0) out.append(static_cast<const char*>(body), body_size);
    if (wire_.flip_direction == out_ && wire_.flip_byte >= before && wire_.flip_byte < out.size()) {
      out[wire_.flip_byte] = static_cast<char>(out[wire_.flip_byte] ^ (1 << wire_.flip_bit));
    }
    return head_size + body_size;
  }
  Result<std::size_t> Read(void* to, std::size_t size) override {
    std::string& in = wire_.bytes[in_];
    const std::size_t n = std::min(size, in.size() - wire_.taken[in_]);
    if (n == 0 && wire_.shut[in_]) return Status(Code::kUnavailable, "shut");
    std::memcpy(to, in.data() + wire_.taken[in_], n);
    wire_.taken[in_] += n;
    return n;
  }
  void Shut() override { wire_.shut[out_] = true; }

 private:
  Wire& wire_;
  const int out_;
  const int in_;
};

struct Pair {
  explicit Pair(Wire& w)
      : a(1, std::make_unique<WireEnd>(w, 0), changes),
        b(0, std::make_unique<WireEnd>(w, 1), changes) {}
  // Until nothing moves any more.
  void Settle() {
    for (bool moved = true; moved;) {
      moved = a.Advance();
      moved = b.Advance() || moved;
    }
  }
  std::atomic<std::uint64_t> changes{0};
  StreamPeer a;
  StreamPeer b;
};

StreamPeer::MessagePtr MessageOf(std::uint32_t tag, std::string& bytes) {
  auto m = std::make_shared<StreamPeer::Message>();
  m->tag = tag;
  m->data = reinterpret_cast<std::byte*>(bytes.data());
  m->size = bytes.size();
  return m;
}

// Small and large messages in both directions, some before they are asked for.
struct Talk {
  explicit Talk(Wire& wire) : pair(wire) {
    for (std::size_t i = 0; i < 6; ++i) {
      sent[i] = Random(i).Bytes(i % 2 == 0 ? 40 : 6000);
      got[i].assign(sent[i].size(), '\0');
      StreamPeer& from = i < 3 ? pair.a : pair.b;
      StreamPeer& to = i < 3 ? pair.b : pair.a;
      const auto tag = static_cast<std::uint32_t>(i);
      messages.push_back(MessageOf(tag, sent[i]));
      from.Send(messages.back());
      if (i % 3 == 1) pair.Settle();
      messages.push_back(MessageOf(tag, got[i]));
      to.Receive(messages.back());
    }
    pair.Settle();
  }
  std::string sent[6];
  std::string got[6];
  std::vector<StreamPeer::MessagePtr> messages;
  Pair pair;
};

TEST(StreamPeerTest, FlippedBitIsDetectedOutsidePayloads) {
  std::size_t lengths[2];
  {
    Wire wire;
    Talk talk(wire);
    for (const auto& m : talk.messages) ASSERT_OK(m->done ? m->status : Status(Code::kBusy, ""));
    for (int i = 0; i < 6; ++i) ASSERT_EQ(talk.got[i], talk.sent[i]);
    for (int d : {0, 1}) lengths[d] = wire.bytes[d].size();
  }
  int in_headers = 0;
  Random random(TestSeed());
  for (const int direction : {0, 1}) {
    for (std::size_t at = 0; at < lengths[direction]; ++at) {
      // Every bit of what is no large payload, about.
      if (random.Int(0, 9) != 0 && at > 600) continue;
      Wire wire;
      wire.flip_direction = direction;
      wire.flip_byte = at;
      wire.flip_bit = static_cast<int>(random.Int(0, 7));
      Talk talk(wire);
      SCOPED_TRACE("direction " + std::to_string(direction) + ", byte " + std::to_string(at));
      bool failed = false;
      bool named = false;
      for (const auto& m : talk.messages) {
        ASSERT_TRUE(m->done) << "nobody would ever end it";
        failed = failed || !m->status.ok();
        named = named || m->status.code() == Code::kDataLoss;
      }
      if (failed) {
        // Whoever saw it says so, of what it is asked from then on, too.
        for (StreamPeer* end : {&talk.pair.a, &talk.pair.b}) {
          std::string bytes(8, '\0');
          const auto late = MessageOf(99, bytes);
          end->Receive(late);
          ASSERT_TRUE(late->done);
          named = named || late->status.code() == Code::kDataLoss;
        }
        EXPECT_TRUE(named);
        ++in_headers;
        continue;
      }
      // One byte of one payload, which those above compare with their own checksums.
      int differ = 0;
      for (int i = 0; i < 6; ++i) {
        for (std::size_t k = 0; k < talk.sent[i].size(); ++k)
          differ += talk.sent[i][k] != talk.got[i][k];
      }
      EXPECT_LE(differ, 1);
    }
  }
  EXPECT_GT(in_headers, 300);
}

// A thread that waits for its send is woken when another thread's call finds that writing fails.
TEST(StreamPeerTest, FailedWriteCountsAsAChange) {
  Wire wire;
  Pair pair(wire);
  std::string bytes(8192, 'x');
  const auto waiting = MessageOf(1, bytes);
  pair.a.Send(waiting);
  ASSERT_FALSE(waiting->done);
  const std::uint64_t seen = pair.changes;
  wire.refuses_writes = true;
  pair.a.Send(MessageOf(2, bytes));
  ASSERT_TRUE(waiting->done);
  EXPECT_THAT(waiting->status, HasCode(Code::kUnavailable));
  EXPECT_NE(pair.changes, seen);
}

TEST(StreamPeerTest, UnreceivedAnnouncementsOfAPeerAreBounded) {
  Wire wire;
  Pair pair(wire);
  std::string bytes(8192, 'x');
  std::vector<StreamPeer::MessagePtr> messages;
  for (std::uint32_t tag = 0; tag < 70'000 && !pair.b.closed(); ++tag) {
    messages.push_back(MessageOf(tag, bytes));
    pair.a.Send(messages.back());
    if (tag % 1000 == 0) pair.Settle();
  }
  pair.Settle();
  EXPECT_TRUE(pair.b.closed());
  std::string got(8192, '\0');
  const auto late = MessageOf(1'000'000, got);
  pair.b.Receive(late);
  ASSERT_TRUE(late->done);
  EXPECT_THAT(late->status, HasCode(Code::kDataLoss));
}

// What was asked for, or withdrawn, counts no more.
TEST(StreamPeerTest, ReceivedAnnouncementsFreeTheirSlots) {
  Wire wire;
  Pair pair(wire);
  std::string bytes(8192, 'x');
  std::string got(8192, '\0');
  for (std::uint32_t tag = 0; tag < 70'000; ++tag) {
    const auto sent = MessageOf(tag, bytes);
    pair.a.Send(sent);
    pair.Settle();
    if (tag % 64 != 0) {
      pair.a.CancelSend(sent);
    } else {
      const auto late = MessageOf(tag, got);
      pair.b.Receive(late);
      pair.Settle();
      ASSERT_TRUE(late->done);
    }
    wire.bytes[0].erase(0, wire.taken[0]);
    wire.bytes[1].erase(0, wire.taken[1]);
    wire.taken[0] = wire.taken[1] = 0;
  }
  pair.Settle();
  EXPECT_FALSE(pair.b.closed());
}

// What a communicator did with the stream to one rank. Nobody is at the other end.
struct WatchedStream {
  int wants = 0;
  std::size_t written = 0;  // Bytes.
};

class WatchedEnd final : public ByteStream {
 public:
  explicit WatchedEnd(WatchedStream& seen) : seen_(seen) {}
  Result<std::size_t> Write(const void*, std::size_t head_size, const void*,
                            std::size_t body_size) override {
    seen_.written += head_size + body_size;
    return head_size + body_size;
  }
  Result<std::size_t> Read(void*, std::size_t) override { return std::size_t{0}; }
  void Shut() override {}
  void RequestOpen() override { ++seen_.wants; }

 private:
  WatchedStream& seen_;
};

class WatchedHub final : public StreamHub {
 public:
  explicit WatchedHub(std::map<int, WatchedStream>& streams) : streams_(streams) {}
  std::unique_ptr<ByteStream> Open(int peer) override {
    return std::make_unique<WatchedEnd>(streams_[peer]);
  }
  void Poll(std::vector<int>*) override {}
  void Wait(std::chrono::nanoseconds, const std::function<bool()>&) override {}
  void Wake() override {}

 private:
  std::map<int, WatchedStream>& streams_;
};

struct WatchedGroup {
  std::map<int, WatchedStream> streams;  // By rank; outlives the communicator.
  StreamCommunicator one_of_four{1, 4, std::make_unique<WatchedHub>(streams), {.kind = "watched"}};
};

// A heartbeat needs an open connection, so asking for heartbeats opens it.
TEST(StreamCommunicatorTest, RequestingHeartbeatsOpensTheConnection) {
  WatchedGroup group;
  ASSERT_EQ(group.streams.size(), 1u);
  EXPECT_EQ(group.streams.at(0).wants, 1) << "rank 0 keeps up with all";
  group.one_of_four.KeepUp(3, true);
  ASSERT_EQ(group.streams.size(), 2u);
  EXPECT_EQ(group.streams.at(3).wants, 1);
  group.one_of_four.KeepUp(3, false);
  EXPECT_EQ(group.streams.at(3).wants, 1);
}

// Heartbeats to every rank that was ever sent to would keep a large group busy.
TEST(StreamCommunicatorTest, HeartbeatsAreSentOnlyWhereRequested) {
  WatchedGroup group;
  Communicator& comm = group.one_of_four;
  const auto send = [&](int to) {
    std::string byte = "x";
    ASSERT_OK_AND_ASSIGN(const auto request,
                         comm.Send(to, 7, BufferView::Host(DType::kU8, byte.data(), {1})));
    ASSERT_OK_AND_ASSIGN(const bool done, comm.Test(request));
    ASSERT_TRUE(done);
  };
  comm.KeepUp(2, true);
  comm.KeepUp(2, false);
  for (const int rank : {2, 3, 0}) send(rank);
  const std::size_t message = group.streams.at(3).written;
  ASSERT_GT(message, 0u);
  // Rank 0 was written to last, so its heartbeat is due last.
  while (group.streams.at(0).written == message) {
    ASSERT_OK(comm.Progress());
    std::this_thread::yield();
  }
  EXPECT_GT(group.streams.at(0).written, message);
  EXPECT_EQ(group.streams.at(2).written, message);
  EXPECT_EQ(group.streams.at(3).written, message);
}

}  // namespace
}  // namespace tensormount
