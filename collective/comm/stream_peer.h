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
// Small messages are sent at once, up to the sender's credit (bytes that the receiver agrees to
// keep), and the receiver keeps them until a receive is posted. Large messages, and small ones
// without credit, are announced (kAnnounce), asked for (kReady) and sent in pieces from the
// sender's memory straight to the receiver's, so that the receiver stores nothing unexpected and a
// waiting message blocks none behind it. All bytes count as signs of life, so heartbeats are sent
// only while nothing else is.
//
//   sender                       receiver
//   kMessage + bytes  ---------> kept in early_ until Receive   (up to kCredit bytes of them)
//                     <--------- kCreditBack, once taken
//   kAnnounce(id, size) -------> waits for a Receive of that tag
//                     <--------- kReady(id)
//   kData(id) + piece ---------> straight into the receiver's memory, piece by piece
//   kAbandon(id)      ---------> a send was cancelled: its receive, if posted, fails
//
// If the stream can no longer be read, or the other end breaks the protocol, all messages of this
// pair finish with the reason (kUnavailable, kDataLoss); afterwards only messages in early_ can
// still be received. If only writing fails, only sends finish.
//
// Not thread-safe: the communicator's mutex protects it.
class StreamPeer {
 public:
  using Clock = std::chrono::steady_clock;
  // Messages up to this size are sent without an announcement while there is credit; larger
  // messages are announced.
  static constexpr std::size_t kSmall = 4096;
  // Bytes of small messages, with headers, that a receiver keeps for one sender while no receive is
  // posted for them. With the limit of announcements (kMaxAnnounced) it bounds the memory that a
  // sender can fill at a rank that never receives.
  static constexpr std::size_t kCredit = 256 << 10;
  // Size of the pieces in which large messages are sent. Messages take turns, so that one delays
  // the others by at most a piece at a time.
  static constexpr std::size_t kPiece = 256 << 10;

  // One send or receive, shared with the request table of StreamCommunicator.
  struct Message {
    std::uint32_t tag = 0;
    std::byte* data = nullptr;
    std::size_t size = 0;
    std::size_t moved = 0;  // For announced messages: bytes queued for writing, or received.
    std::uint64_t id = 0;   // Set by the sender, for announced messages.
    bool done = false;
    Status status;  // Set once done.

    void Finish(Status s) {
      status = std::move(s);
      done = true;
    }
  };
  using MessagePtr = std::shared_ptr<Message>;

  // `changes` counts movements of bytes, except heartbeats. It must outlive this object.
  StreamPeer(int rank, std::unique_ptr<ByteStream> stream, std::atomic<std::uint64_t>& changes);
  StreamPeer(const StreamPeer&) = delete;
  StreamPeer& operator=(const StreamPeer&) = delete;

  // Send and Receive queue a message; Advance moves it. The memory of a message must stay until the
  // message is done or cancelled. On an ended stream a message finishes at once, with the reason.
  void Send(const MessagePtr& m);
  // Takes the oldest unreceived message of its tag.
  void Receive(const MessagePtr& m);
  // After a cancel the message's memory is not touched any more.
  void CancelSend(const MessagePtr& m);
  void CancelReceive(const MessagePtr& m);

  // Reads and writes a bounded amount without waiting. True if bytes moved.
  bool Advance();
  // Queues a heartbeat if nothing was sent for `interval` and nothing waits to be sent.
  void Beat(Clock::duration interval);

  void RequestOpen() { stream_->RequestOpen(); }
  bool TryClose() { return stream_->TryClose(); }

  int fd() const { return stream_->fd(); }
  bool closed() const { return read_closed_; }  // Whether both directions are closed.
  bool wants_write() const { return !write_closed_ && HasOutput(); }
  // Time at which the last byte arrived, by which a working rank is told from a dead one.
  Clock::time_point last_heard() const { return last_heard_; }

 private:
  enum Kind : std::uint32_t {
    kHeartbeat = 1,
    kMessage = 2,   // Fields tag and size; the bytes of a small message follow.
    kAnnounce = 3,  // Fields tag, id and size: announces a message.
    // Field id; with aux 0 asks for the message, with 1 says that it is empty or of a wrong size
    // and counts as delivered.
    kReady = 4,
    kData = 5,        // Fields id and size; the next piece of the message follows.
    kCreditBack = 6,  // Field size: bytes of small messages, with headers, that the receiver took.
    kAbandon = 7,     // Field id: the sender cancelled the message.
  };
  struct Header {
    // A checksum of the following fields (HeaderCheck). TCP's own checksum of 16 bits misses one
    // damaged header in 65,536, after which both ends would wait for each other while heartbeats go
    // on.
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
    std::vector<std::byte> owned;  // The payload, copied when the message is cancelled.
    std::size_t written = 0;
    MessagePtr message;  // Finished when this frame is written, if `last`.
    bool last = false;
  };
  // A message that arrived, or was announced, before a receive was posted for it.
  struct UnexpectedMessage {
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
  bool BreakStream(const std::string& what);
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
  Status why_;        // Why reading ended; set with read_closed_.
  Status write_why_;  // Why writing ended; set with write_closed_.
  Clock::time_point last_heard_;
  Clock::time_point sent_;

  // Output. A large message is in announced_ until the other end asks for it, then in streaming_
  // until its last part is queued.
  std::deque<Out> out_;
  std::map<std::uint64_t, MessagePtr> announced_;
  // Messages for which the other end sent kReady; sent in turns.
  std::deque<MessagePtr> streaming_;
  // Bytes of small messages that may still be sent without an announcement.
  std::size_t credit_ = kCredit;
  std::uint64_t next_id_ = 1;

  // Input: the frame that is being read.
  Header in_;
  std::size_t in_have_ = 0;  // Bytes of the header that were read.
  bool in_payload_ = false;
  std::size_t in_left_ = 0;
  std::byte* in_dest_ = nullptr;  // Null: the bytes are dropped.
  MessagePtr in_message_;
  std::vector<std::byte> in_owned_;
  // By tag: messages that came before a receive was posted (early_), and receives that wait for a
  // message (posted_). A tag is never in both.
  std::map<std::uint32_t, std::deque<UnexpectedMessage>> early_;
  std::map<std::uint32_t, std::deque<MessagePtr>> posted_;
  // Announced messages that are being received, by the id that the sender gave.
  std::map<std::uint64_t, MessagePtr> filling_;
  std::size_t early_bytes_ = 0;
  std::size_t early_announced_ = 0;  // Number of announcements in early_.
  std::size_t credit_owed_ = 0;      // Credit that is not given back yet.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STREAM_PEER_H_
