// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_STREAM_PEER_H_
#define TENSORMOUNT_COLLECTIVE_COMM_STREAM_PEER_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "collective/comm/byte_stream.h"

namespace tensormount {

// One end of a connection between two ranks: messages in frames over a stream of bytes.
//
// Small messages travel at once and are kept by the receiver until asked for, as many bytes as
// the sender has credit for. Large ones, and small ones without credit, are announced (kAnnounce),
// asked for (kReady) and sent in pieces straight from the sender's memory to the receiver's, so
// that nothing unexpected has to be stored and nothing blocks what stands behind it. Heartbeats go
// between the pieces.
//
//   sender                       receiver
//   kMessage + bytes  ---------> kept in early_ until Receive   (up to kCredit bytes of them)
//                     <--------- kCreditBack, once taken
//   kAnnounce(id, size) -------> waits for a Receive of that tag
//                     <--------- kReady(id)
//   kData(id) + piece ---------> straight into the receiver's memory, piece by piece
//   kAbandon(id)      ---------> a send was cancelled: the receive fails
//
// A stream that ends, or says something that no rank of ours would, finishes all messages of this
// pair with the reason (kUnavailable, kDataLoss); nothing is sent or waited for afterwards.
//
// Not thread-safe: its communicator holds one mutex.
class StreamPeer {
 public:
  using Clock = std::chrono::steady_clock;
  // Messages up to kSmall are sent without being asked for, while there is credit; all others are
  // announced.
  static constexpr std::size_t kSmall = 4096;
  // Bytes of small messages, with their headers, that the other end keeps for us before it has been
  // asked for them. What this bounds is memory: a rank that never receives cannot be filled up.
  static constexpr std::size_t kCredit = 256 << 10;
  // Large messages are sent in parts of this, in turns, so that none holds up the others, and a
  // heartbeat is never later than one part.
  static constexpr std::size_t kPiece = 256 << 10;

  // One request, shared with the communicator's table.
  struct Message {
    std::uint32_t tag = 0;
    std::byte* data = nullptr;
    std::size_t size = 0;
    std::size_t moved = 0;  // Bytes handed to the stream, or filled.
    std::uint64_t id = 0;   // Of a large send, chosen by the sender.
    bool done = false;
    Status status;  // Once done.

    void Finish(Status s) {
      status = std::move(s);
      done = true;
    }
  };
  using MessagePtr = std::shared_ptr<Message>;

  // `changes` counts each time something moves that is no heartbeat; outlives this.
  StreamPeer(int rank, std::unique_ptr<ByteStream> stream, std::atomic<std::uint64_t>& changes);
  StreamPeer(const StreamPeer&) = delete;
  StreamPeer& operator=(const StreamPeer&) = delete;

  // Queue a message; Advance moves it. Its memory must stay until it is done or cancelled. Where
  // the stream has ended they finish it at once, with why.
  void Send(const MessagePtr& m);
  // The next message of its tag that is not taken yet, in the order in which they were sent.
  void Receive(const MessagePtr& m);
  // After these the message's memory is not touched any more.
  void CancelSend(const MessagePtr& m);
  void CancelReceive(const MessagePtr& m);

  // Reads and writes what can be without waiting, a bounded amount. True if bytes moved.
  bool Advance();
  // Queues a heartbeat where nothing else was sent for `interval`.
  void Beat(Clock::duration interval);

  // See ByteStream.
  void Want() { stream_->Want(); }
  // Takes leave of the other end: see ByteStream::Leave.
  bool Leave() { return stream_->Leave(); }

  int fd() const { return stream_->fd(); }
  bool closed() const { return read_closed_; }  // Both directions.
  bool wants_write() const { return !write_closed_ && HasOutput(); }
  // When the last byte came: what tells a rank that works from one that is gone.
  Clock::time_point heard() const { return heard_; }

 private:
  enum Kind : std::uint32_t {
    kHeartbeat = 1,
    kMessage = 2,     // tag, size: a whole small message follows.
    kAnnounce = 3,    // tag, id, size: of a large one.
    kReady = 4,       // id; aux 0: send it, 1: its size is wrong, consider it delivered.
    kData = 5,        // id, size: the next piece follows.
    kCreditBack = 6,  // size: bytes of small messages that were taken.
    kAbandon = 7,     // id: the sender cancelled.
  };
  struct Header {
    // A checksum of the fields behind it (HeaderCheck). TCP's own of 16 bits misses one damage in
    // 65,536, after which both ends would wait for each other while heartbeats go on.
    std::uint32_t check = 0;
    std::uint32_t kind = 0;
    std::uint32_t tag = 0;
    std::uint32_t aux = 0;
    std::uint64_t id = 0;
    std::uint64_t size = 0;
  };
  static_assert(sizeof(Header) == 32);
  static std::uint32_t HeaderCheck(const Header& header);

  // A frame on its way out: a header and perhaps a payload.
  struct Out {
    Header header;
    const std::byte* payload = nullptr;
    std::size_t payload_size = 0;
    std::vector<std::byte> owned;  // Where payload points after a cancel.
    std::size_t written = 0;
    MessagePtr message;  // Done when this is out, if `last`.
    bool last = false;
  };
  // A message that came, or was announced, before it was asked for.
  struct Early {
    bool small = false;
    std::vector<std::byte> bytes;
    std::uint64_t id = 0;
    std::size_t size = 0;
  };

  bool HasOutput() const { return !out_.empty() || !streaming_.empty(); }
  void Queue(Kind kind, std::uint32_t tag, std::uint32_t aux, std::uint64_t id, std::uint64_t size);
  bool Write();
  bool Read();
  void NextPiece();
  void OnHeader();
  void OnSmall();
  void OnPayloadEnd();
  MessagePtr TakePosted(std::uint32_t tag);
  bool Broken(const std::string& what);
  void Accept(const MessagePtr& m, std::uint64_t id, std::size_t size);
  void GiveCredit(std::size_t size);
  void CloseWrite(const Status& gone);
  void Close(const Status& why);
  static std::size_t Cost(std::size_t size) { return size + sizeof(Header); }

  const int rank_;
  const std::unique_ptr<ByteStream> stream_;
  std::atomic<std::uint64_t>& changes_;
  bool write_closed_ = false;
  bool read_closed_ = false;
  Status why_;        // Once read_closed_,
  Status write_why_;  // once write_closed_.
  Clock::time_point heard_;
  Clock::time_point sent_;

  // Out. A large message is in announced_ until the other end is ready for it, then in streaming_
  // until its last part is queued.
  std::deque<Out> out_;
  std::map<std::uint64_t, MessagePtr> announced_;
  std::deque<MessagePtr> streaming_;  // Asked for; served in turns.
  std::size_t credit_ = kCredit;      // What is left of it.
  std::uint64_t next_id_ = 1;

  // In: the frame that is being read.
  Header in_;
  std::size_t in_have_ = 0;  // Bytes of the header.
  bool in_payload_ = false;
  std::size_t in_left_ = 0;
  std::byte* in_dest_ = nullptr;  // Null: thrown away.
  MessagePtr in_message_;
  std::vector<std::byte> in_owned_;
  // By tag: what came before it was asked for, and receives that wait. Of one tag never both.
  std::map<std::uint32_t, std::deque<Early>> early_;
  std::map<std::uint32_t, std::deque<MessagePtr>> posted_;
  std::map<std::uint64_t, MessagePtr> filling_;  // Large ones under way, by the sender's id.
  std::size_t early_bytes_ = 0;
  std::size_t early_announced_ = 0;  // How many of early_ are announcements.
  std::size_t credit_owed_ = 0;      // Taken, and not given back yet.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STREAM_PEER_H_
