// SPDX-License-Identifier: Apache-2.0
// MpiSession of tensormount/mpi.h: ranks as MPI processes. No header of its own, so that nothing
// else can come to depend on MPI.
//
// MPI never sees the caller's memory: messages go in pieces through buffers that this file owns.
// That costs one copy on each side and buys the rest: Cancel only forgets (a send that MPI has
// begun cannot be called back, and a piece under way may still be written), no count passes
// 2^31, a message of the wrong size is found before its bytes are anywhere, and what is in
// flight is bounded. Pieces of one message are shorter than kPiece only at its end, so that its
// end is known even when the sizes differ.
//
// Nothing here blocks: only MPI_I... calls, probes and tests, and one mutex around them.
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
#include "collective/comm/host_bytes.h"

namespace tensormount {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPiece = 512 << 10;
// Each stream may have one piece in flight, and more while all together have less than this.
constexpr std::size_t kInFlight = 64 << 20;
constexpr std::size_t kPiecesPerStream = 4;
// Small messages that were taken over and are not out yet, for one peer.
constexpr std::size_t kSmall = 4096;
constexpr std::size_t kSmallTotal = 256 << 10;
// For setting up, in which every process takes part at once, and for leaving, which one may do long
// after another (as long as `Timeouts::arrival`): leaving alone would make mpirun end the others.
constexpr std::chrono::seconds kSetUpLimit{300};
constexpr std::chrono::seconds kLeaveLimit{1800};
constexpr std::chrono::milliseconds kTidyLimit{200};

// The heartbeat, sent on a communicator of its own; its memory outlives every send of it.
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

// A piece that MPI reads from or writes to. Its memory stays until MPI is done with it.
struct Flight {
  MPI_Request request = MPI_REQUEST_NULL;
  Bytes bytes;
  std::size_t size = 0;
};

struct Message {
  std::byte* data = nullptr;
  std::size_t size = 0;
  std::size_t moved = 0;  // Bytes handed to MPI, or received.
  bool ended = false;     // The last piece was handed over, or came.
  bool done = false;
  bool cancelled = false;
  bool wrong_size = false;
  Bytes owned;  // The bytes themselves, of a small send that was taken over.
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
  std::deque<MessagePtr> queue;  // Not ended yet; the first one moves.
  struct Moving {
    Flight flight;
    MessagePtr message;
    std::size_t offset = 0;
    bool last = false;
  };
  std::deque<Moving> moving;  // Completes in order.
};

// One direction between two ranks for one tag.
struct Key {
  int peer;
  std::uint32_t tag;
  bool is_send;
  auto operator<=>(const Key&) const = default;
};

// All processes over two communicators of MPI, one for heartbeats. Never destroyed: MPI has no way
// to say that it will not touch a buffer any more, and to free a communicator is a call of all
// processes, which let go of theirs at different times. So it is used again (MpiWorlds), and its
// jobs go on counting: what its last use left on the way is older than the next one's.
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, MPI_Comm beats) : comm_(comm), beats_(beats) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    const Clock::time_point now = Clock::now();
    heard_.assign(static_cast<std::size_t>(size_), now);
    beating_.assign(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
    for (int r = rank_ == 0 ? 1 : 0; r < (rank_ == 0 ? size_ : 1); ++r) beat_to_[r] = 1;
    small_.assign(static_cast<std::size_t>(size_), 0);
    last_beat_ = now;
    // With thousands of ranks, rank 0 tells each of them less often.
    interval_ = std::chrono::milliseconds(100) + std::chrono::microseconds(100) * size_;
  }

  // Between these it beats by itself: a rank that dies between two calls is missed as one that
  // dies within.
  void Use() {
    std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    heard_.assign(static_cast<std::size_t>(size_), now);
    if (size_ == 1) return;
    pulse_ = std::jthread([this](const std::stop_token& stop) {
      std::mutex mutex;
      std::condition_variable_any stopped;
      std::unique_lock sleeping(mutex);
      while (!stop.stop_requested()) {
        (void)Progress();  // What fails fails again where the owner looks.
        (void)stopped.wait_for(sleeping, stop, interval_, [] { return false; });
      }
    });
  }
  // What is under way gets a moment. False where MPI holds something longer, which is left to it,
  // memory included: this is not to be used again.
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
    while (!Tidy()) {
      if (deadline.Passed()) return false;
      (void)Turn();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return graveyard_.empty() && !broken_;
  }
  // No call of MPI is made by itself after this.
  void StopPulse() {
    std::jthread pulse;  // Joined without the mutex, for which it may wait.
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
    // A message of which nothing moved yet just leaves the queue. One that has begun stays there:
    // as a receive to read past the rest, as a send to be cut short.
    if (m->moved == 0) std::erase(found->second.queue, m);
  }

  Status Progress() override {
    std::lock_guard lock(mutex_);
    return Turn();
  }

  std::chrono::nanoseconds SilentFor(int rank) const override {
    std::lock_guard lock(mutex_);
    if (rank == rank_) return std::chrono::nanoseconds(0);
    return Clock::now() - heard_.at(static_cast<std::size_t>(rank));
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
    TakeOver(peer, m, is_send);
    const Request request = next_++;
    requests_.emplace(request, Entry{key, m});
    return request;
  }

  // A small send is done at once, from a copy, while its peer has not too many of them.
  void TakeOver(int peer, const MessagePtr& m, bool is_send) {
    std::size_t& used = small_[static_cast<std::size_t>(peer)];
    if (!is_send || m->done || m->size > kSmall || used + m->size > kSmallTotal) return;
    used += m->size;
    m->owned.assign(m->data, m->data + m->size);
    m->data = m->owned.data();
    m->Finish({});
  }

  // Whether MPI holds nothing of ours.
  bool Tidy() {
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

  // One round over everything. Errors belong to requests and are told there.
  Status Turn() {
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
    // Twice: what became free is used at once.
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

  bool Room(const Stream& stream) const {
    return stream.moving.empty() ||
           (stream.moving.size() < kPiecesPerStream && in_flight_ < kInFlight);
  }

  void BeginSends(Stream& stream) {
    while (!stream.queue.empty() && Room(stream)) {
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
      Give(std::move(moving.flight));
      stream.moving.pop_front();
    }
  }

  // Takes pieces that are there: memory is only bound by what a sender has really sent.
  void BeginReceives(Stream& stream) {
    while (!stream.queue.empty() && Room(stream)) {
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
                                               ": a piece has an impossible size"));
        return;
      }
      Heard(stream.peer);
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
      Heard(stream.peer);
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
      Give(std::move(moving.flight));
      stream.moving.pop_front();
    }
  }

  // The stream is broken: everything on it fails, and what MPI holds stays until the end.
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

  // Large buffers go round, so that they stay in the cache; the others are no larger than they must
  // be, as rank 0 may have one of each of thousands of ranks.
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
  void Give(Flight f) {
    in_flight_ -= f.size;
    if (f.bytes.size() == kPiece && spare_.size() < 16) spare_.push_back(std::move(f.bytes));
  }

  void Heard(int peer) { heard_[static_cast<std::size_t>(peer)] = Clock::now(); }

  // Rank 0 tells all, all tell rank 0, and who else asked for it; never a second time before the
  // first is out.
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
      // One byte that was matched: it is here, this does not wait.
      char byte = 0;
      if (MPI_Mrecv(&byte, 1, MPI_BYTE, &handle, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
      if (from >= 0 && from < size_) Heard(from);
    }
  }

  const MPI_Comm comm_;
  const MPI_Comm beats_;
  int rank_ = 0;
  int size_ = 1;
  std::atomic<std::uint64_t> changes_{0};  // Pieces that moved.
  mutable std::mutex mutex_;
  std::map<Key, Stream> streams_;
  std::unordered_map<Request, Entry> requests_;
  Request next_ = 1;
  std::size_t in_flight_ = 0;
  std::vector<Bytes> spare_;
  bool broken_ = false;
  std::deque<Flight> graveyard_;
  std::vector<std::size_t> small_;  // Bytes of small sends taken over, by peer.
  std::vector<Clock::time_point> heard_;
  std::vector<MPI_Request> beating_;
  std::map<int, int> beat_to_;  // Peer and how often that was asked for.
  Clock::time_point last_beat_;
  Clock::duration interval_{};
  std::jthread pulse_;
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

// The communicators of this process, of all its sessions: MPI has few of them (32,766 of Open MPI),
// and each World() would take two. The n-th is the same on all processes, since all make it
// together. Thread-safe.
class MpiWorlds {
 public:
  static MpiWorlds& All() {
    static auto* const all = new MpiWorlds;  // Never destroyed, as what it holds.
    return *all;
  }

  // Something under way was given up: MPI_Finalize would wait for it.
  bool untidy() const { return untidy_; }

  // All processes at once. Given back by Release.
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
                      "duplicate MPI_COMM_WORLD: not all processes came within 300 s");
      }
      if (!made.ok()) break;
      MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    }
    std::lock_guard lock(mutex_);
    // Also where it failed, so that the numbers of the others go on being the same everywhere.
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
  // Of which World() knows whether they are free. What is made besides is used once.
  static constexpr std::size_t kKept = 64;
  struct World {
    MpiCommunicator* comm = nullptr;
    bool used = false;
  };

  // A bit for each of the first kKept that no process uses.
  Result<std::uint64_t> AgreeOnFree() {
    std::uint64_t mine = 0;
    {
      std::lock_guard lock(mutex_);
      for (std::size_t i = 0; i < std::min(kKept, worlds_.size()); ++i) {
        if (!worlds_[i].used) mine |= std::uint64_t{1} << i;
      }
    }
    // MPI may write into it after this has given up.
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
                    "agree on a communicator: not all processes came within 300 s");
    }
    return (*all)[1];
  }

  // MPI_Finalize deletes the attributes of MPI_COMM_SELF before anything else: an application that
  // calls it while a communicator of ours exists finds no thread of ours within MPI.
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

// What World() hands out: gives it back when it is destroyed.
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
      Log(LogLevel::kWarning, "MPI: left without MPI_Finalize, because messages were given up");
      return;
    }
    // MPI_Finalize waits for everybody without limit: first see whether they come.
    MPI_Request barrier = MPI_REQUEST_NULL;
    if (MPI_Ibarrier(MPI_COMM_WORLD, &barrier) != MPI_SUCCESS || !Await(&barrier, kLeaveLimit)) {
      Log(LogLevel::kWarning, "MPI: left without MPI_Finalize, because not all processes came");
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
    return Status(Code::kUnsupported, "MPI: the program has finalised it already");
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
    return Status(Code::kUnsupported, "MPI gives no MPI_THREAD_MULTIPLE");
  }
  return std::unique_ptr<MpiSession>(std::make_unique<Session>(initialized == 0));
}

}  // namespace tensormount
