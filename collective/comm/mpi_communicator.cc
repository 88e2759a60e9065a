// SPDX-License-Identifier: Apache-2.0
// MpiSession of tensormount/mpi.h: ranks as MPI processes. No header of its own, so that no other
// file can come to depend on MPI.
//
// MPI never sees the caller's memory: messages go in pieces through buffers that this file owns.
// The price is one copy on each side. In return, Cancel only forgets a message (MPI cannot take
// back a send, and may still write a piece that is in flight), no count passes 2^31, a message of
// the wrong size never writes past the caller's buffer, and the bytes in flight are bounded.
// Only the last piece of a message is shorter than kPiece, which marks its end even if the sizes
// differ.
//
// No call of the communicator blocks: it makes only MPI_I... calls, probes, tests, and a receive of
// a probed heartbeat, under one mutex. Setting up and leaving wait (time limits below).
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mpi.h>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensormount/mpi.h"

#include "base/deadline.h"
#include "base/log.h"
#include "base/thread.h"
#include "collective/comm/host_bytes.h"

namespace tensormount {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPiece = 512 << 10;
// A stream may always have one piece in flight, and up to kPiecesPerStream while the pieces of all
// streams in flight have less than kInFlight bytes.
constexpr std::size_t kInFlight = 64 << 20;
constexpr std::size_t kPiecesPerStream = 4;
// A send of at most kSmall bytes is copied and reported done at once, while the copies that are not
// yet sent to that peer total at most kSmallTotal bytes.
constexpr std::size_t kSmall = 4096;
constexpr std::size_t kSmallTotal = 256 << 10;
// Time limits. kSetUpLimit is for setting up, which all processes do at once. kLeaveLimit is for
// leaving: one process may leave up to Timeouts::arrival after another, and mpirun would end the
// others if one left without them. kTidyLimit is for transfers that are in progress at Release.
constexpr std::chrono::seconds kSetUpLimit{300};
constexpr std::chrono::seconds kLeaveLimit{1800};
constexpr std::chrono::milliseconds kTidyLimit{200};

// The heartbeat's payload; static, because MPI reads it until a send ends.
const char kBeat = 1;

Status FromMpi(int error, const std::string& action) {
  if (error == MPI_SUCCESS) return {};
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(error, text, &length);
  return {Code::kUnavailable, action + ": " + std::string(text, static_cast<std::size_t>(length))};
}

bool Finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

using Bytes = std::vector<std::byte>;

// A piece that MPI reads or writes. Its memory stays until MPI is done with it.
struct Flight {
  MPI_Request request = MPI_REQUEST_NULL;
  Bytes bytes;
  std::size_t size = 0;
};

struct Message {
  std::byte* data = nullptr;
  std::size_t size = 0;
  std::size_t moved = 0;  // Bytes handed to MPI, or received.
  bool ended = false;     // The last piece was handed over or received.
  bool done = false;
  bool cancelled = false;
  bool wrong_size = false;
  Bytes owned;  // The copy of a small send.
  Status status;

  void Finish(Status s) {
    if (done) return;
    status = std::move(s);
    done = true;
  }
};
using MessagePtr = std::shared_ptr<Message>;

// The messages of one peer, tag and direction, in order.
struct Stream {
  int peer = 0;
  std::uint32_t tag = 0;
  bool is_send = false;
  std::deque<MessagePtr> queue;  // Messages that have not ended; the first one is being moved.
  struct Moving {
    Flight flight;
    MessagePtr message;
    std::size_t offset = 0;
    bool last = false;
  };
  std::deque<Moving> moving;  // Pieces in flight, which complete in order.
};

// One direction between two ranks for one tag.
struct Key {
  int peer;
  std::uint32_t tag;
  bool is_send;
  auto operator<=>(const Key&) const = default;
};

// All processes over two MPI communicators, one of them for heartbeats. Never destroyed: MPI cannot
// promise that it will not touch a buffer any more, and freeing a communicator is collective, while
// processes release theirs at different times. So the object is used again (MpiWorlds). Its job
// numbers continue to rise, so messages of an earlier use are recognized as old.
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, MPI_Comm beats) : comm_(comm), beats_(beats) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    const Clock::time_point now = Clock::now();
    last_heard_.assign(static_cast<std::size_t>(size_), now);
    beating_.assign(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
    for (int r = rank_ == 0 ? 1 : 0; r < (rank_ == 0 ? size_ : 1); ++r) beat_to_[r] = 1;
    small_.assign(static_cast<std::size_t>(size_), 0);
    last_beat_ = now;
    // With thousands of ranks, rank 0 sends each of them fewer heartbeats.
    interval_ = std::chrono::milliseconds(100) + std::chrono::microseconds(100) * size_;
  }

  // Begins a use. A thread sends heartbeats until Release, so that a rank that dies between two
  // calls is noticed like one that dies within a call.
  void Use() {
    std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    last_heard_.assign(static_cast<std::size_t>(size_), now);
    if (size_ == 1) return;
    pulse_ = JoiningThread([this](const std::stop_token& stop) {
      std::mutex mutex;
      std::condition_variable_any stopped;
      std::unique_lock sleeping(mutex);
      while (!stop.stop_requested()) {
        (void)Progress();  // The owner's calls report the failure.
        (void)stopped.wait_for(sleeping, stop, interval_, [] { return false; });
      }
    });
  }
  // Ends a use, after a short wait for transfers in progress. Returns false if MPI is finalized, a
  // stream has failed, or MPI has not finished a transfer: then this object keeps its memory and
  // must not be used again.
  bool Release() {
    StopPulse();
    std::vector<Request> left;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [request, entry] : requests_) left.push_back(request);
    }
    for (const Request request : left) Cancel(request);
    std::lock_guard lock(mutex_);
    if (Finalized()) return false;
    const Deadline deadline = Deadline::After(kTidyLimit);
    while (!IsIdle()) {
      if (deadline.Passed()) return false;
      (void)AdvanceAll();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return graveyard_.empty() && !broken_;
  }
  // Stops the heartbeat thread. Afterwards no thread of this object calls MPI.
  void StopPulse() {
    JoiningThread pulse;  // Joined after the mutex is unlocked, because the thread may wait for it.
    {
      std::lock_guard lock(mutex_);
      pulse.swap(pulse_);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string kind() const override { return "mpi"; }

  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    return Post(to, tag, view, /*is_send=*/true);
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    return Post(from, tag, view, /*is_send=*/false);
  }

  Result<bool> Test(Request request) override {
    std::lock_guard lock(mutex_);
    const auto it = requests_.find(request);
    if (it == requests_.end()) return NoSuchRequest(request);
    const MessagePtr m = it->second.message;
    if (!m->done) AdvanceStream(it->second.key);
    if (!m->done) return false;
    requests_.erase(request);
    if (!m->status.ok()) return m->status;
    return true;
  }

  void Cancel(Request request) override {
    std::lock_guard lock(mutex_);
    const auto it = requests_.find(request);
    if (it == requests_.end()) return;
    const MessagePtr m = it->second.message;
    const Key key = it->second.key;
    requests_.erase(it);
    if (m->done) return;
    m->Finish(Status(Code::kCancelled, "cancelled"));
    m->cancelled = true;
    m->data = nullptr;
    const auto found = streams_.find(key);
    if (found == streams_.end()) return;
    // A message of which nothing moved leaves the queue. One that has begun stays: a receive reads
    // past the rest, a send is cut short.
    if (m->moved == 0) std::erase(found->second.queue, m);
  }

  Status Progress() override {
    std::lock_guard lock(mutex_);
    return AdvanceAll();
  }

  std::chrono::nanoseconds SilentFor(int rank) const override {
    std::lock_guard lock(mutex_);
    if (rank == rank_) return std::chrono::nanoseconds(0);
    return Clock::now() - last_heard_.at(static_cast<std::size_t>(rank));
  }

  void KeepUp(int rank, bool wanted) override {
    std::lock_guard lock(mutex_);
    if (rank < 0 || rank >= size_ || rank == rank_) return;
    int& wishes = beat_to_[rank];
    wishes += wanted ? 1 : -1;
    if (wishes <= 0) beat_to_.erase(rank);
  }
  bool BeatsAlways() const override {
    std::lock_guard lock(mutex_);
    return pulse_.joinable();
  }
  std::uint64_t Changes() const override { return changes_; }

 private:
  struct Entry {
    Key key;
    MessagePtr message;
  };

  Result<Request> Post(int peer, std::uint32_t tag, const BufferView& view, bool is_send) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckEnvelope(*this, peer, tag));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, HostBytes(view));
    std::lock_guard lock(mutex_);
    auto m = std::make_shared<Message>();
    m->data = bytes.data();
    m->size = bytes.size();
    const Key key{peer, tag, is_send};
    Stream& stream = streams_[key];
    stream.peer = peer;
    stream.tag = tag;
    stream.is_send = is_send;
    stream.queue.push_back(m);
    AdvanceStream(key);
    CopySmallSend(peer, m, is_send);
    const Request request = next_++;
    requests_.emplace(request, Entry{key, m});
    return request;
  }

  // A small send is done at once, from a copy, while the copies for its peer are within
  // kSmallTotal.
  void CopySmallSend(int peer, const MessagePtr& m, bool is_send) {
    std::size_t& used = small_[static_cast<std::size_t>(peer)];
    if (!is_send || m->done || m->size > kSmall || used + m->size > kSmallTotal) return;
    used += m->size;
    m->owned.assign(m->data, m->data + m->size);
    m->data = m->owned.data();
    m->Finish({});
  }

  // Whether no send is unfinished, no receive has begun without ending, and no heartbeat is being
  // sent.
  bool IsIdle() {
    for (const auto& [key, stream] : streams_) {
      const bool waiting = key.is_send || (!stream.queue.empty() && stream.queue[0]->moved != 0);
      if (!stream.moving.empty() || (waiting && !stream.queue.empty())) return false;
    }
    for (MPI_Request& request : beating_) {
      int done = 1;
      if (request != MPI_REQUEST_NULL) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done == 0) return false;
    }
    return true;
  }

  // Moves all streams on by one step. Errors are reported by the requests.
  Status AdvanceAll() {
    Beat();
    Listen();
    for (auto it = streams_.begin(); it != streams_.end();) {
      Advance(it->second);
      const bool idle = it->second.queue.empty() && it->second.moving.empty();
      it = idle ? streams_.erase(it) : std::next(it);
    }
    return {};
  }

  void AdvanceStream(const Key& key) {
    const auto it = streams_.find(key);
    if (it == streams_.end()) return;
    Advance(it->second);
    if (it->second.queue.empty() && it->second.moving.empty()) streams_.erase(it);
  }

  void Advance(Stream& stream) {
    // Twice, so that buffers that became free are used at once.
    for (int i = 0; i < 2; ++i) {
      if (stream.is_send) {
        CompleteSends(stream);
        BeginSends(stream);
      } else {
        BeginReceives(stream);
        CompleteReceives(stream);
      }
    }
  }

  bool HasRoom(const Stream& stream) const {
    return stream.moving.empty() ||
           (stream.moving.size() < kPiecesPerStream && in_flight_ < kInFlight);
  }

  void BeginSends(Stream& stream) {
    while (!stream.queue.empty() && HasRoom(stream)) {
      const MessagePtr m = stream.queue.front();
      const std::size_t left = m->cancelled ? 0 : m->size - m->moved;
      const std::size_t size = std::min(left, kPiece);
      Stream::Moving& moving = stream.moving.emplace_back();
      moving.message = m;
      moving.last = size < kPiece;
      moving.flight = Take(size);
      if (size != 0) std::memcpy(moving.flight.bytes.data(), m->data + m->moved, size);
      m->moved += size;
      const int error =
          MPI_Isend(moving.flight.bytes.data(), static_cast<int>(size), MPI_BYTE, stream.peer,
                    static_cast<int>(stream.tag), comm_, &moving.flight.request);
      if (error != MPI_SUCCESS) {
        stream.moving.back().flight.request = MPI_REQUEST_NULL;
        Fail(stream, FromMpi(error, "send to rank " + std::to_string(stream.peer)));
        return;
      }
      if (!moving.last) continue;
      m->ended = true;
      stream.queue.pop_front();
    }
  }

  void CompleteSends(Stream& stream) {
    while (!stream.moving.empty()) {
      Stream::Moving& moving = stream.moving.front();
      int done = 0;
      const int error = MPI_Test(&moving.flight.request, &done, MPI_STATUS_IGNORE);
      if (error != MPI_SUCCESS) {
        Fail(stream, FromMpi(error, "send to rank " + std::to_string(stream.peer)));
        return;
      }
      if (done == 0) return;
      ++changes_;
      if (moving.last) {
        Message& m = *moving.message;
        if (!m.owned.empty()) small_[static_cast<std::size_t>(stream.peer)] -= m.size;
        m.Finish({});
      }
      ReturnFlight(std::move(moving.flight));
      stream.moving.pop_front();
    }
  }

  // Receives pieces that have arrived, so memory is only used for bytes that a sender has really
  // sent.
  void BeginReceives(Stream& stream) {
    while (!stream.queue.empty() && HasRoom(stream)) {
      const MessagePtr m = stream.queue.front();
      int there = 0;
      MPI_Message handle = MPI_MESSAGE_NULL;
      MPI_Status status;
      int error =
          MPI_Improbe(stream.peer, static_cast<int>(stream.tag), comm_, &there, &handle, &status);
      if (error == MPI_SUCCESS && there == 0) return;
      int count = 0;
      if (error == MPI_SUCCESS) error = MPI_Get_count(&status, MPI_BYTE, &count);
      if (error != MPI_SUCCESS || count < 0 || static_cast<std::size_t>(count) > kPiece) {
        Fail(stream,
             error != MPI_SUCCESS
                 ? FromMpi(error, "receive from rank " + std::to_string(stream.peer))
                 : Status(Code::kDataLoss, "receive from rank " + std::to_string(stream.peer) +
                                               ": a part of a message has an invalid size"));
        return;
      }
      NoteHeard(stream.peer);
      const auto size = static_cast<std::size_t>(count);
      Stream::Moving& moving = stream.moving.emplace_back();
      moving.message = m;
      moving.offset = m->moved;
      moving.last = size < kPiece;
      moving.flight = Take(size);
      m->moved += size;
      error =
          MPI_Imrecv(moving.flight.bytes.data(), count, MPI_BYTE, &handle, &moving.flight.request);
      if (error != MPI_SUCCESS) {
        Fail(stream, FromMpi(error, "receive from rank " + std::to_string(stream.peer)));
        return;
      }
      if (!moving.last) continue;
      m->ended = true;
      stream.queue.pop_front();
    }
  }

  void CompleteReceives(Stream& stream) {
    while (!stream.moving.empty()) {
      Stream::Moving& moving = stream.moving.front();
      int done = 0;
      const int error = MPI_Test(&moving.flight.request, &done, MPI_STATUS_IGNORE);
      if (error != MPI_SUCCESS) {
        Fail(stream, FromMpi(error, "receive from rank " + std::to_string(stream.peer)));
        return;
      }
      if (done == 0) return;
      ++changes_;
      NoteHeard(stream.peer);
      Message& m = *moving.message;
      const std::size_t size = moving.flight.size;
      if (!m.cancelled && !m.done) {
        if (moving.offset + size > m.size) {
          m.wrong_size = true;
        } else if (size != 0 && !m.wrong_size) {
          std::memcpy(m.data + moving.offset, moving.flight.bytes.data(), size);
        }
        if (moving.last) {
          const std::size_t sent = moving.offset + size;
          m.Finish(sent == m.size ? Status() : SizeDiffers(stream.peer, stream.tag, sent, m.size));
        }
      }
      ReturnFlight(std::move(moving.flight));
      stream.moving.pop_front();
    }
  }

  // Fails every message of a broken stream; buffers that MPI may still use stay until the process
  // ends.
  void Fail(Stream& stream, const Status& why) {
    ++changes_;
    broken_ = true;
    for (const MessagePtr& m : stream.queue) m->Finish(why);
    stream.queue.clear();
    for (Stream::Moving& moving : stream.moving) {
      moving.message->Finish(why);
      graveyard_.push_back(std::move(moving.flight));
    }
    stream.moving.clear();
  }

  // Large buffers are used again, so that they stay in the cache; small buffers have only the
  // needed size, since rank 0 may have one for each of thousands of ranks.
  Flight Take(std::size_t size) {
    Flight f;
    f.size = size;
    const bool large = size > kPiece / 8;
    if (large && !spare_.empty()) {
      f.bytes = std::move(spare_.back());
      spare_.pop_back();
    } else {
      f.bytes.resize(large ? kPiece : std::max<std::size_t>(size, 1));
    }
    in_flight_ += size;
    return f;
  }
  void ReturnFlight(Flight f) {
    in_flight_ -= f.size;
    if (f.bytes.size() == kPiece && spare_.size() < 16) spare_.push_back(std::move(f.bytes));
  }

  void NoteHeard(int peer) { last_heard_[static_cast<std::size_t>(peer)] = Clock::now(); }

  // Sends heartbeats: rank 0 to all ranks, all ranks to rank 0 and to peers of KeepUp. No heartbeat
  // is sent to a peer while the previous one to this peer is unsent.
  void Beat() {
    const Clock::time_point now = Clock::now();
    if (now - last_beat_ < interval_) return;
    last_beat_ = now;
    for (const auto& [peer, wishes] : beat_to_) {
      MPI_Request& request = beating_[static_cast<std::size_t>(peer)];
      int done = 1;
      if (request != MPI_REQUEST_NULL &&
          MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
        continue;
      }
      if (done == 0) continue;
      if (MPI_Isend(&kBeat, 1, MPI_BYTE, peer, 0, beats_, &request) != MPI_SUCCESS) {
        request = MPI_REQUEST_NULL;
      }
    }
  }

  void Listen() {
    for (int i = 0; i <= size_; ++i) {
      int there = 0;
      MPI_Message handle = MPI_MESSAGE_NULL;
      MPI_Status status;
      if (MPI_Improbe(MPI_ANY_SOURCE, 0, beats_, &there, &handle, &status) != MPI_SUCCESS ||
          there == 0) {
        return;
      }
      const int from = status.MPI_SOURCE;
      // The probe matched one byte that has arrived, so this does not wait.
      char byte = 0;
      if (MPI_Mrecv(&byte, 1, MPI_BYTE, &handle, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
      if (from >= 0 && from < size_) NoteHeard(from);
    }
  }

  const MPI_Comm comm_;
  const MPI_Comm beats_;
  int rank_ = 0;
  int size_ = 1;
  std::atomic<std::uint64_t> changes_{0};  // Number of pieces that moved, and of failures.
  mutable std::mutex mutex_;
  std::map<Key, Stream> streams_;
  std::unordered_map<Request, Entry> requests_;
  Request next_ = 1;
  std::size_t in_flight_ = 0;
  std::vector<Bytes> spare_;
  bool broken_ = false;
  std::deque<Flight> graveyard_;
  std::vector<std::size_t> small_;  // Bytes of copied small sends, by peer.
  std::vector<Clock::time_point> last_heard_;
  std::vector<MPI_Request> beating_;
  // Peers to which this rank sends heartbeats, each with its number of requests (KeepUp).
  std::map<int, int> beat_to_;
  Clock::time_point last_beat_;
  Clock::duration interval_{};
  JoiningThread pulse_;
};

bool Await(MPI_Request* request, std::chrono::seconds limit) {
  const Deadline deadline = Deadline::After(limit);
  while (true) {
    int done = 0;
    if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (done != 0) return true;
    if (deadline.Passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// The communicators of this process, for all its sessions: MPI has few of them (32,766 in Open
// MPI), and each World() would take two. All processes make the n-th communicator together, so
// number n is the same on all processes. Thread-safe.
class MpiWorlds {
 public:
  static MpiWorlds& All() {
    static auto* const all = new MpiWorlds;  // Never destroyed, like the communicators.
    return *all;
  }

  // Whether a transfer or a collective call was abandoned, for which MPI_Finalize would wait.
  bool untidy() const { return untidy_; }

  // Takes a communicator that no process uses, or makes one. Collective. Release gives the
  // communicator back.
  Result<MpiCommunicator*> Take() {
    StopPulsesBeforeFinalize();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t free, AgreeOnFree());
    for (std::size_t i = 0; i < kKept; ++i) {
      if ((free >> i & 1) == 0) continue;
      std::lock_guard lock(mutex_);
      worlds_[i].used = true;
      worlds_[i].comm->Use();
      return worlds_[i].comm;
    }
    std::array<MPI_Comm, 2> comms{MPI_COMM_NULL, MPI_COMM_NULL};
    Status made;
    for (MPI_Comm& comm : comms) {
      MPI_Request request = MPI_REQUEST_NULL;
      made = FromMpi(MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request), "duplicate MPI_COMM_WORLD");
      if (made.ok() && !Await(&request, kSetUpLimit)) {
        made = Status(Code::kDeadlineExceeded,
                      "duplicate MPI_COMM_WORLD: not all processes took part within 300 s");
      }
      if (!made.ok()) break;
      MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    }
    std::lock_guard lock(mutex_);
    // Added even after a failure, so that later communicators have the same number on all
    // processes.
    World& world = worlds_.emplace_back();
    world.used = true;
    if (!made.ok()) {
      untidy_ = true;
      return made;
    }
    world.comm = new MpiCommunicator(comms[0], comms[1]);
    world.comm->Use();
    return world.comm;
  }

  void Release(MpiCommunicator* comm) {
    const bool tidy = comm->Release();
    std::lock_guard lock(mutex_);
    if (!tidy && !Finalized()) untidy_ = true;
    for (World& world : worlds_) {
      if (world.comm == comm) world.used = !tidy;
    }
  }

 private:
  // Number of communicators that AgreeOnFree can find free. Those made beyond this number are used
  // once.
  static constexpr std::size_t kKept = 64;
  struct World {
    MpiCommunicator* comm = nullptr;
    bool used = false;
  };

  // Collective. Bit i of the result: no process uses communicator i. Covers the first kKept
  // communicators.
  Result<std::uint64_t> AgreeOnFree() {
    std::uint64_t mine = 0;
    {
      std::lock_guard lock(mutex_);
      for (std::size_t i = 0; i < std::min(kKept, worlds_.size()); ++i) {
        if (!worlds_[i].used) mine |= std::uint64_t{1} << i;
      }
    }
    // On the heap, and leaked after a timeout, because MPI may still write there.
    const auto all = std::make_shared<std::array<std::uint64_t, 2>>();
    (*all)[0] = mine;
    MPI_Request request = MPI_REQUEST_NULL;
    TENSORMOUNT_RETURN_IF_ERROR(FromMpi(
        MPI_Iallreduce(&(*all)[0], &(*all)[1], 1, MPI_UINT64_T, MPI_BAND, MPI_COMM_WORLD, &request),
        "agree on a communicator"));
    if (!Await(&request, kSetUpLimit)) {
      untidy_ = true;
      new std::shared_ptr<std::array<std::uint64_t, 2>>(all);
      return Status(Code::kDeadlineExceeded,
                    "agree on a communicator: not all processes took part within 300 s");
    }
    return (*all)[1];
  }

  // MPI_Finalize deletes the attributes of MPI_COMM_SELF first, so an application that calls
  // MPI_Finalize while a communicator of ours exists finds no heartbeat thread inside MPI.
  void StopPulsesBeforeFinalize() {
    static const bool once = [] {
      int key = MPI_KEYVAL_INVALID;
      const auto stop = [](MPI_Comm, int, void*, void*) {
        std::lock_guard lock(All().mutex_);
        for (World& world : All().worlds_) {
          if (world.comm != nullptr) world.comm->StopPulse();
        }
        return MPI_SUCCESS;
      };
      return MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, stop, &key, nullptr) == MPI_SUCCESS &&
             MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr) == MPI_SUCCESS;
    }();
    (void)once;
  }

  std::mutex mutex_;
  std::deque<World> worlds_;
  std::atomic<bool> untidy_{false};
};

// The communicator that World() returns; releases the MpiCommunicator when destroyed.
class MpiWorld final : public Communicator {
 public:
  explicit MpiWorld(MpiCommunicator* comm) : Communicator(0, comm), comm_(*comm) {}
  ~MpiWorld() override { MpiWorlds::All().Release(&comm_); }

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  std::string kind() const override { return comm_.kind(); }
  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    return comm_.Send(to, tag, view);
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    return comm_.Receive(from, tag, view);
  }
  Result<bool> Test(Request request) override { return comm_.Test(request); }
  void Cancel(Request request) override { comm_.Cancel(request); }
  Status Progress() override { return comm_.Progress(); }
  std::chrono::nanoseconds SilentFor(int rank) const override { return comm_.SilentFor(rank); }
  void KeepUp(int rank, bool wanted) override { comm_.KeepUp(rank, wanted); }
  std::uint64_t Changes() const override { return comm_.Changes(); }
  bool BeatsAlways() const override { return comm_.BeatsAlways(); }

 private:
  MpiCommunicator& comm_;
};

class Session final : public MpiSession {
 public:
  explicit Session(bool owns) : owns_(owns) {}

  ~Session() override {
    if (!owns_ || abandoned_ || Finalized()) return;
    if (MpiWorlds::All().untidy()) {
      Log(LogLevel::kWarning,
          "MPI: MPI_Finalize is not called, because unfinished messages were abandoned");
      return;
    }
    // MPI_Finalize waits for all processes without limit: first check that they come.
    MPI_Request barrier = MPI_REQUEST_NULL;
    if (MPI_Ibarrier(MPI_COMM_WORLD, &barrier) != MPI_SUCCESS || !Await(&barrier, kLeaveLimit)) {
      Log(LogLevel::kWarning,
          "MPI: MPI_Finalize is not called, because not all processes reached the final barrier");
      return;
    }
    MPI_Finalize();
  }

  void Abandon() override { abandoned_ = true; }

  Result<std::unique_ptr<Communicator>> World() override {
    TENSORMOUNT_ASSIGN_OR_RETURN(MpiCommunicator* const comm, MpiWorlds::All().Take());
    return std::unique_ptr<Communicator>(std::make_unique<MpiWorld>(comm));
  }

 private:
  const bool owns_;
  bool abandoned_ = false;
};

}  // namespace

bool MpiIsBuilt() { return true; }

Result<std::unique_ptr<MpiSession>> MpiSession::Init() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0 && Finalized()) {
    return Status(Code::kUnsupported, "MPI: the program has already called MPI_Finalize");
  }
  int provided = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    MPI_Query_thread(&provided);
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(FromMpi(
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "initialise MPI"));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  if (provided < MPI_THREAD_MULTIPLE) {
    if (initialized == 0) MPI_Finalize();
    return Status(Code::kUnsupported,
                  "MPI does not provide MPI_THREAD_MULTIPLE, which tensormount needs");
  }
  return std::unique_ptr<MpiSession>(std::make_unique<Session>(initialized == 0));
}

}  // namespace tensormount
