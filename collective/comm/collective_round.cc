// SPDX-License-Identifier: Apache-2.0
// CollectiveEngine: one round of messages to rank 0 and back. Rank 0 keeps a list of the ranks that
// have not come and reminds those that did, so that a wait ends with the name of the missing rank
// and not with a guess.
//
// One round among N ranks, on two tags (members send on tag_, rank 0 on tag_ + 1):
//
//   member r                                  rank 0
//   kContribution(status | payload)  ------>  Collect: marks r as arrived, keeps the payload
//                                             (rank 0's own work runs beside, step by step)
//                  <-- kWaiting, again -----  Remind: after 50 ms, to ranks that came (in a round
//                                             with work to all)
//                                             CheckRanksAlive, MakeVerdict: the verdict
//              <-- kVerdict(status|payload)-  SendVerdict, Drain
//
// A round costs N - 1 contributions and N - 1 verdicts, and rank 0 holds all payloads at once.
// Reminders come on top, only in rounds that take longer than 50 ms.
//
// What happens when a rank dies:
//   a member before its contribution: rank 0 sees its stream closed (kUnavailable) or its silence
//     (kDeadlineExceeded; after `liveness` if the member sent something in this job or its
//     communicator BeatsAlways, at once if it was lost in an earlier job, if not after `arrival`),
//     and sends all others one fatal verdict;
//   a member after its contribution: the verdict may be ok; the next round misses the member;
//   rank 0: every member gives up by itself, by closed stream, liveness or deadline.
// Only rank 0 decides, so all members that receive a verdict of one round receive the same one.
#include "collective/comm/collective_round.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/deadline.h"
#include "base/hash.h"
#include "base/parallel.h"
#include "base/thread.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// Tags of Collective: four for each job, from the upper half of the tags, in rotation; each channel
// has its own. On one channel a tag is used again after 64 jobs, and other groups may use the same
// tags, so frames carry their job and FrameReceiver drops frames of earlier jobs.
constexpr std::uint32_t kFirstTag = 16384;
constexpr std::uint32_t kTagTurns = 64;
constexpr std::uint32_t kAllChannels = Communicator::kChannels * Communicator::kChannels;
static_assert(kFirstTag + 4 * kTagTurns * kAllChannels - 1 <= Communicator::kMaxTag);

std::uint32_t TagOf(const Communicator& comm, const Communicator::Job& job) {
  const auto turn = static_cast<std::uint32_t>(job.number % kTagTurns);
  return kFirstTag + 4 * (turn * kAllChannels + comm.channel());
}

// Limits, in bytes, of the message and of each text field of a failure (ShortenFailure), so that
// communicators can send it without waiting for the receiver.
constexpr std::size_t kMaxVerdictMessage = 2000;
constexpr std::size_t kMaxVerdictField = 500;
// Time after which rank 0 tells the other ranks that it still waits.
constexpr milliseconds kRemindAfter{50};
// Time limit for sending a failure to the other ranks; ranks that can be reached receive it at
// once.
constexpr milliseconds kFailureSendLimit{200};

std::string SecondsText(nanoseconds d) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s",
                static_cast<double>(duration_cast<milliseconds>(d).count()) / 1000.0);
  return text;
}

// Ranks as text in messages: "rank 2", or "ranks 1, 4 and 2 more".
std::string NamesOfRanks(const std::vector<int>& ranks) {
  constexpr std::size_t kNamed = 16;
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kNamed); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kNamed) out += " and " + std::to_string(ranks.size() - kNamed) + " more";
  return out;
}

std::string WaitingText(const CollectiveEngine::Round& round) {
  return "waiting for '" + std::string(round.phase) + "'";
}

// A failure that names rank 0 as its cause.
Status RankZeroFailure(Code code, std::string message) {
  return Status(code, std::move(message)).With({.rank = 0});
}

Status GaveUpFailure(int rank, const Status& why) {
  return why.WithContext("rank " + std::to_string(rank) + " gave up").With({.rank = rank});
}

// Shortens a failure so that it is sent at once. A field that is too long is dropped, because a
// part of a key would be a different key.
Status ShortenFailure(const Status& status) {
  if (status.ok()) return status;
  ErrorFields fields = status.fields();
  for (std::string* field : {&fields.key, &fields.file, &fields.cause, &fields.device}) {
    if (field->size() > kMaxVerdictField) field->clear();
  }
  const bool whole = status.message().size() <= kMaxVerdictMessage;
  return Status::FromParts(status.code(), status.ToErrno(),
                           whole
                               ? status.message()
                               : std::string(CutUtf8(status.message(), kMaxVerdictMessage)) + "...")
      .With(fields);
}

nanoseconds BeatInterval(nanoseconds liveness) {
  return std::clamp<nanoseconds>(liveness / 4, milliseconds(1), milliseconds(250));
}

// The pauses of a loop that polls for messages. If the communicator reports changes, Pause sleeps
// until the next change. If not, it sleeps for a fixed share of the time waited so far, which
// bounds both the delay and the cost of a long wait.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;
  Backoff(Communicator& comm, const Timeouts& timeouts)
      : comm_(comm),
        hears_(comm.HearsChanges()),
        longest_(std::clamp<nanoseconds>(
            std::min({timeouts.liveness, timeouts.arrival, timeouts.total}) / 16, kShortest,
            milliseconds(hears_ ? 100 : 10))),
        // With many more ranks than cores, spinning takes the time that other ranks need.
        spins_(comm.size() <= static_cast<int>(2 * HostCores())) {}

  // Call RecordChanges before checking for messages and Pause if none was found.
  void RecordChanges() { seen_ = comm_.Changes(); }
  void Reset() { since_ = Clock::now(); }
  // `alone`: the caller also waits for work whose progress the communicator does not report, so the
  // pause is short.
  void Pause(bool alone = false) {
    if (comm_.Changes() != seen_) Reset();
    const nanoseconds waited = Clock::now() - since_;
    if (spins_ && waited < kSpin) {
      std::this_thread::yield();
      return;
    }
    constexpr int kShare = 64;
    const nanoseconds longest = alone ? std::min<nanoseconds>(longest_, kAlone) : longest_;
    const nanoseconds share = waited / kShare;
    const bool until_change = hears_ && !alone;
    comm_.WaitForChange(seen_, until_change ? longest : std::clamp(share, kShortest, longest));
  }

 private:
  static constexpr nanoseconds kShortest{50'000};
  // Time of spinning before the first sleep: about as long as it takes to wake a thread. Most
  // answers come sooner.
  static constexpr nanoseconds kSpin{200'000};
  static constexpr milliseconds kAlone{1};
  Communicator& comm_;
  const bool hears_;
  const nanoseconds longest_;
  const bool spins_;
  std::uint64_t seen_ = 0;
  Clock::time_point since_ = Clock::now();
};

// Interval of checks for deadlines and reminders, which look at every rank.
constexpr milliseconds kLookAfterMissing{5};

}  // namespace

Heartbeat::Heartbeat(Communicator& comm, nanoseconds interval) {
  thread_ = Thread([this, &comm, interval] {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      lock.unlock();
      (void)comm.Progress();  // The owner's calls report the failure.
      lock.lock();
      stop_changed_.wait_for(lock, interval, [this] { return stop_; });
    }
  });
}

Heartbeat::~Heartbeat() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
}

void LostRanks::Add(int rank, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  since_.emplace(rank, now);
}

void LostRanks::Remove(int rank) {
  std::lock_guard lock(mutex_);
  since_.erase(rank);
}

std::map<int, LostRanks::Clock::time_point> LostRanks::All() const {
  std::lock_guard lock(mutex_);
  return since_;
}

LivenessWatch::LivenessWatch(Communicator& comm, nanoseconds liveness)
    : comm_(comm),
      liveness_(liveness),
      confirm_(BeatInterval(liveness)),
      seats_(static_cast<std::size_t>(comm.size())),
      lost_(std::static_pointer_cast<LostRanks>(
          comm.KeptByRanks("lost ranks", [] { return std::make_shared<LostRanks>(); }))) {
  for (const auto& [rank, since] : lost_->All()) {
    seats_[static_cast<std::size_t>(rank)].lost_since = since;
  }
  for (Seat& seat : seats_) seat.joined = comm.BeatsAlways();
  Start(Clock::now());
  base_ = last_iteration_;
}

void LivenessWatch::Start(Clock::time_point now) {
  last_iteration_ = now;
  for (Seat& seat : seats_) seat.suspected = false;
}

void LivenessWatch::DetectPause(Clock::time_point now) {
  if (now - last_iteration_ > liveness_ / 2) {
    Start(now);
    base_ = now;
  }
  last_iteration_ = now;
}

bool LivenessWatch::IsLost(int rank, Clock::time_point now) {
  Seat& seat = seats_[static_cast<std::size_t>(rank)];
  if (seat.lost_since) {
    if (comm_.SilentFor(rank) >= now - *seat.lost_since) return true;
    seat.lost_since.reset();
    lost_->Remove(rank);
  }
  if (!seat.joined) return false;
  if (std::min<nanoseconds>(comm_.SilentFor(rank), now - base_) <= liveness_) {
    seat.suspected = false;
    return false;
  }
  if (!seat.suspected) {
    seat.suspected = true;
    seat.since = now;
  }
  if (now - seat.since < confirm_) return false;
  lost_->Add(rank, now);
  return true;
}

// Whether a failure may be the cause of other ranks' failures. kCancelled is not: a rank whose work
// fails withdraws its messages, so other ranks may fail with kCancelled before that rank reports
// the cause.
bool IsCause(const Status& status) { return !status.ok() && status.code() != Code::kCancelled; }

struct CollectiveEngine::Gathered {
  struct Seat {
    bool arrived = false;
    Status status;
    Clock::time_point reminded{};
    std::optional<Clock::time_point> payload_deadline;
  };
  explicit Gathered(int ranks)
      : seats(static_cast<std::size_t>(ranks)),
        parts(static_cast<std::size_t>(ranks)),
        missing(ranks) {}

  std::vector<Seat> seats;
  std::vector<std::string> parts;
  int missing;
  bool failed = false;  // Whether some status is a cause (IsCause).
  Clock::time_point start = Clock::now();
};

namespace {

// Clamps the limits to [1 ms, kLongestWait], so that even milliseconds::max() ("no limit") can be
// added to a point in time without overflow.
Timeouts ClampTimeouts(const Timeouts& given) {
  constexpr milliseconds kShortest{1};
  const milliseconds total = given.total > milliseconds(0) ? given.total : kLongestWait;
  return {.liveness = std::clamp(given.liveness, kShortest, kLongestWait),
          .arrival = std::clamp(given.arrival, kShortest, kLongestWait),
          .total = std::clamp(total, kShortest, kLongestWait)};
}

}  // namespace

CollectiveEngine::CollectiveEngine(Communicator& comm, const Timeouts& timeouts,
                                   const std::atomic<bool>* cancel)
    : comm_(comm),
      timeouts_(ClampTimeouts(timeouts)),
      end_(Clock::now() + timeouts_.total),
      cancel_(cancel),
      job_(comm.BeginJob()),
      tag_(TagOf(comm, job_)),
      watch_(comm, timeouts_.liveness),
      sender_(comm, job_, comm.rank() == 0 ? tag_ + 1 : tag_),
      data_out_(comm, job_, data_tag()),
      data_in_(static_cast<std::size_t>(comm.size())) {
  const int peers = comm.rank() == 0 ? comm.size() : 1;
  Round nothing;
  for (int r = 0; r < peers; ++r) {
    if (r == comm.rank()) {
      from_.push_back(nullptr);
      continue;
    }
    from_.push_back(
        std::make_unique<FrameReceiver>(comm, job_, r, comm.rank() == 0 ? tag_ : tag_ + 1));
    sender_.Send(r, MakeFrame(nothing, Frame::kHello));
  }
  if (comm.size() > 1) {
    heartbeat_ = std::make_unique<Heartbeat>(comm, BeatInterval(timeouts_.liveness));
  }
}

CollectiveEngine::~CollectiveEngine() = default;

FrameReceiver& CollectiveEngine::data_in(int from) {
  std::unique_ptr<FrameReceiver>& in = data_in_[static_cast<std::size_t>(from)];
  if (in == nullptr) in = std::make_unique<FrameReceiver>(comm_, job_, from, data_tag());
  return *in;
}

nanoseconds CollectiveEngine::AllowanceFor(std::uint64_t bytes) {
  constexpr std::uint64_t kBytesPerMillisecond = 8000;
  return std::min(milliseconds(bytes / kBytesPerMillisecond), kLongestWait);
}

Frame CollectiveEngine::MakeFrame(const Round& round, Frame::Kind kind) const {
  Frame f;
  f.kind = kind;
  f.round = round_;
  f.op = static_cast<std::uint8_t>(round.op);
  f.phase_hash = Xxh3Low64(round.phase);
  f.phase = std::string(round.phase);
  return f;
}

Result<CollectiveEngine::VerdictPayload> CollectiveEngine::Run(const Round& round) {
  if (!spent_.ok()) {
    if (round.work != nullptr) round.work->Cancel();
    return spent_;
  }
  ++round_;
  watch_.Start(Clock::now());
  Result<VerdictPayload> out = comm_.rank() == 0 ? RunRoot(round) : RunMember(round);
  if (!out.ok() && round.work != nullptr) round.work->Cancel();
  return out;
}

Status CollectiveEngine::Spend(const Status& why) {
  spent_ = why;
  sender_.CancelAll();
  data_out_.CancelAll();
  for (const auto* receivers : {&from_, &data_in_}) {
    for (const auto& receiver : *receivers) {
      if (receiver) receiver->Cancel();
    }
  }
  return why;
}

Result<CollectiveEngine::VerdictPayload> CollectiveEngine::RunRoot(const Round& round) {
  Gathered g(comm_.size());
  bool working = round.work != nullptr;
  const auto self_came = [&](const Status& status) {
    g.seats[0].arrived = true;
    g.seats[0].status = status;
    g.failed |= IsCause(status);
    --g.missing;
  };
  if (!working) self_came(round.mine);
  if (round.mine.ok()) g.parts[0] = std::string(round.payload);

  Backoff backoff(comm_, timeouts_);
  Clock::time_point looked{};
  while (true) {
    backoff.RecordChanges();
    (void)comm_.Progress();
    const Clock::time_point now = Clock::now();
    watch_.DetectPause(now);
    bool moved = false;
    if (Status broken = Collect(round, g, &moved); !broken.ok()) {
      return SendVerdict(round, broken, /*fatal=*/true, {});
    }
    if (working) {
      round.work->moved = false;
      const Result<bool> done = round.work->Step();
      moved |= round.work->moved;
      if (!done.ok() || done.value()) {
        working = false;
        self_came(done.status());
      }
    }
    if (g.missing == 0) break;
    // After a failed transfer other ranks may wait forever, so rank 0 does not wait for them.
    // MakeVerdict treats ranks that have not come as ok.
    if (g.failed && round.work != nullptr) break;
    if (now - looked >= std::min<nanoseconds>(kLookAfterMissing, timeouts_.liveness / 16)) {
      looked = now;
      Status missing = CheckArrivals(round, g, now);
      if (missing.ok()) missing = CancelledWait(round, now);
      if (!missing.ok()) return SendVerdict(round, missing, /*fatal=*/true, {});
      Remind(round, g, now);
    }
    (void)sender_.Poll();
    if (moved) {
      backoff.Reset();
    } else {
      backoff.Pause(working && round.work->progresses_alone);
    }
  }
  if (Status gone = CheckRanksAlive(round, g); !gone.ok()) {
    return SendVerdict(round, gone, /*fatal=*/true, {});
  }
  std::string verdict;
  const Status failure = MakeVerdict(round, g, &verdict);
  return SendVerdict(round, failure, /*fatal=*/!failure.ok() && round.work != nullptr,
                     std::move(verdict));
}

Status CollectiveEngine::Collect(const Round& round, Gathered& g, bool* moved) {
  std::vector<int> lost;
  Status why;
  for (std::size_t r = 1; r < g.seats.size(); ++r) {
    Gathered::Seat& seat = g.seats[r];
    while (!seat.arrived) {
      const Result<bool> got = from_[r]->Poll();
      if (!got.ok()) {
        lost.push_back(static_cast<int>(r));
        why = got.status();
        break;
      }
      if (!got.value()) {
        const std::uint64_t coming = from_[r]->PayloadComing();
        if (coming != 0 && !seat.payload_deadline) {
          seat.payload_deadline = Clock::now() + timeouts_.arrival + AllowanceFor(coming);
        }
        break;
      }
      *moved = true;
      watch_.Join(static_cast<int>(r));
      TENSORMOUNT_RETURN_IF_ERROR(OnContribution(round, g, static_cast<int>(r), from_[r]->Take()));
    }
  }
  if (lost.size() > 1 && why.code() == Code::kUnavailable) {
    why = Status(Code::kUnavailable, NamesOfRanks(lost) + " are gone").With({.rank = lost[0]});
  }
  return why.WithContext(WaitingText(round));
}

Status CollectiveEngine::OnContribution(const Round& round, Gathered& g, int from,
                                        FrameReceiver::Received in) {
  const Frame& f = in.frame;
  if (f.kind == Frame::kHello) return {};
  if (f.kind == Frame::kGaveUp) return GaveUpFailure(from, f.status);
  const Frame mine = MakeFrame(round, Frame::kContribution);
  if (f.kind != Frame::kContribution || f.round != mine.round || f.op != mine.op ||
      f.phase_hash != mine.phase_hash) {
    return Status(Code::kInternal, "ranks are in different phases: rank " + std::to_string(from) +
                                       " is in '" + f.phase + "' (call " + std::to_string(f.round) +
                                       "), rank 0 in '" + std::string(round.phase) + "' (call " +
                                       std::to_string(round_) + ")")
        .With({.rank = from});
  }
  Gathered::Seat& seat = g.seats[static_cast<std::size_t>(from)];
  seat.arrived = true;
  seat.status = f.status;
  g.failed |= IsCause(f.status);
  --g.missing;
  if (f.status.ok()) g.parts[static_cast<std::size_t>(from)] = std::move(in.payload);
  return {};
}

// Checks that the ranks that came still wait for the verdict: if rank 0 itself was stopped
// meanwhile, they may have given up, and an ok verdict is impossible. Between its contribution and
// the verdict a member sends only "gave up", so any other frame here is out of order.
Status CollectiveEngine::CheckRanksAlive(const Round& round, const Gathered& g) {
  for (std::size_t r = 1; r < g.seats.size(); ++r) {
    if (!g.seats[r].arrived) continue;
    const Result<bool> got = from_[r]->Poll();
    if (!got.ok()) return got.status().WithContext(WaitingText(round));
    if (!got.value()) continue;
    const Frame f = from_[r]->Take().frame;
    if (f.kind == Frame::kGaveUp) return GaveUpFailure(static_cast<int>(r), f.status);
    return Status(Code::kInternal,
                  "rank " + std::to_string(r) + " sent its next message before rank 0 answered")
        .With({.rank = static_cast<int>(r)});
  }
  return {};
}

// Returns a failure that names the ranks for which rank 0 no longer waits; ok if there are none. A
// rank whose payload has begun to arrive has a deadline of its own, longer by the payload's size.
Status CollectiveEngine::CheckArrivals(const Round& round, const Gathered& g,
                                       Clock::time_point now) {
  std::vector<int> silent;
  std::vector<int> late;
  const bool ended = now > end_;
  const bool over = ended || now - g.start > timeouts_.arrival + round.allowance;
  for (std::size_t r = 0; r < g.seats.size(); ++r) {
    const Gathered::Seat& seat = g.seats[r];
    const int rank = static_cast<int>(r);
    // During an exchange other ranks may still need messages of a rank that came, so its silence
    // counts, too.
    if ((!seat.arrived || round.work != nullptr) && r != 0 && watch_.IsLost(rank, now)) {
      silent.push_back(rank);
    } else if (!seat.arrived &&
               (seat.payload_deadline && !ended ? now > *seat.payload_deadline : over)) {
      late.push_back(rank);
    }
  }
  if (silent.empty() && late.empty()) return {};
  std::string what = WaitingText(round);
  if (!silent.empty()) {
    what += ": no heartbeat from " + NamesOfRanks(silent) + " for " +
            SecondsText(timeouts_.liveness) + " (liveness timeout)";
  }
  if (!late.empty()) {
    what += (silent.empty() ? ": " : "; ") + NamesOfRanks(late) + " did not arrive within " +
            (ended ? SecondsText(timeouts_.total) + " (total timeout)"
                   : SecondsText(timeouts_.arrival + round.allowance) + " (arrival timeout)");
  }
  return Status(Code::kDeadlineExceeded, what)
      .With({.rank = silent.empty() ? late.front() : silent.front()});
}

void CollectiveEngine::Remind(const Round& round, Gathered& g, Clock::time_point now) {
  if (now - g.start < kRemindAfter) return;
  const nanoseconds again = std::min<nanoseconds>(timeouts_.arrival / 3, std::chrono::seconds(10));
  for (std::size_t r = 1; r < g.seats.size(); ++r) {
    Gathered::Seat& seat = g.seats[r];
    if (!seat.arrived && round.work == nullptr) continue;
    if (seat.reminded != Clock::time_point{} && now - seat.reminded < again) continue;
    seat.reminded = now;
    sender_.Send(static_cast<int>(r), MakeFrame(round, Frame::kWaiting));
  }
}

Status CollectiveEngine::MakeVerdict(const Round& round, Gathered& g, std::string* verdict) {
  // From the highest rank down, so that `first` ends as the lowest failing one. In a round with
  // work, causes go before their consequences (IsCause).
  int failed = 0;
  std::size_t first = 0;
  for (std::size_t r = g.seats.size(); r-- > 0;) {
    const Status& status = g.seats[r].status;
    if (status.ok()) continue;
    ++failed;
    if (failed == 1 || round.work == nullptr || IsCause(status) ||
        !IsCause(g.seats[first].status)) {
      first = r;
    }
  }
  if (failed == 0) {
    return round.decide ? Guarded([&] { return round.decide(g.parts, verdict); }) : Status();
  }
  const Status& status = g.seats[first].status;
  if (round.op == CollectiveOp::kBroadcast) return status;
  const Status out = FromRank(static_cast<int>(first), status);
  if (failed == 1) return out;
  const std::string others = failed == 2
                                 ? " (1 other rank failed too)"
                                 : " (" + std::to_string(failed - 1) + " other ranks failed too)";
  return out.WithMessage(std::string(CutUtf8(out.message(), kMaxVerdictMessage)) + others);
}

Result<CollectiveEngine::VerdictPayload> CollectiveEngine::SendVerdict(const Round& round,
                                                                       const Status& failure,
                                                                       bool fatal,
                                                                       std::string verdict) {
  const Status cut = failure.ok() ? failure : ShortenFailure(failure);
  Frame frame = MakeFrame(round, Frame::kVerdict);
  frame.status = cut;
  frame.fatal = fatal;
  auto text = std::make_shared<const std::string>(cut.ok() ? std::move(verdict) : ToPayload(cut));
  const Payload payload(*text);
  for (int r = 1; r < comm_.size(); ++r) sender_.Send(r, frame, payload, text);
  const Clock::duration patience = timeouts_.arrival + AllowanceFor(text->size());
  Drain(fatal ? Clock::duration(kFailureSendLimit)
              : std::max<Clock::duration>(kFailureSendLimit,
                                          std::min(patience, end_ - Clock::now())));
  if (fatal) return Spend(cut);
  if (!cut.ok()) return cut;
  return text;
}

void CollectiveEngine::Drain(Clock::duration limit) {
  Backoff backoff(comm_, timeouts_);
  const Clock::time_point start = Clock::now();
  watch_.Start(start);
  while (true) {
    backoff.RecordChanges();
    (void)comm_.Progress();
    if (sender_.Poll()) return;
    const Clock::time_point now = Clock::now();
    watch_.DetectPause(now);
    const bool over = now - start > limit;
    for (const int peer : sender_.Unsent()) {
      // A rank that did not receive the frame is found missing in the next round.
      if (over || watch_.IsLost(peer, now)) sender_.CancelFor(peer);
    }
    backoff.Pause();
  }
}

void CollectiveEngine::Contribute(const Round& round, const Status& mine) {
  Frame frame = MakeFrame(round, Frame::kContribution);
  if (mine.ok()) {
    sender_.Send(0, frame, Payload(round.payload));
    return;
  }
  SendFailure(std::move(frame), mine);
}

void CollectiveEngine::SendFailure(Frame frame, const Status& why) {
  frame.status = ShortenFailure(why);
  const auto told = std::make_shared<const std::string>(ToPayload(frame.status));
  sender_.Send(0, std::move(frame), Payload(*told), told);
}

Result<CollectiveEngine::VerdictPayload> CollectiveEngine::RunMember(const Round& round) {
  bool working = round.work != nullptr;
  if (!working) Contribute(round, round.mine);

  // Rank 0 may come as late as `arrival` and then sends its verdict, so this rank waits a little
  // longer.
  const nanoseconds slack =
      std::min<nanoseconds>({timeouts_.liveness, timeouts_.arrival / 2, std::chrono::seconds(5)});
  const nanoseconds patience = timeouts_.arrival + round.allowance + slack;
  const auto until = [&](nanoseconds from_now) {
    return std::min(Clock::now() + from_now, end_ + slack);
  };
  Clock::time_point deadline = until(patience);
  bool payload_seen = false;
  Backoff backoff(comm_, timeouts_);
  while (true) {
    backoff.RecordChanges();
    (void)comm_.Progress();
    const Clock::time_point now = Clock::now();
    watch_.DetectPause(now);
    const Result<bool> got = from_[0]->Poll();
    if (!got.ok()) return GiveUp(round, got.status().WithContext(WaitingText(round)));
    if (got.value()) {
      backoff.Reset();
      watch_.Join(0);
      FrameReceiver::Received in = from_[0]->Take();
      const Frame& f = in.frame;
      if (f.kind == Frame::kHello) continue;
      if (f.kind == Frame::kWaiting) {
        // Rank 0 lives and waits for another rank up to its own limit, so this rank's limit starts
        // again.
        if (f.round == round_) deadline = until(patience);
        continue;
      }
      if (f.kind != Frame::kVerdict || (f.round != round_ && !f.fatal)) {
        return GiveUp(round, RankZeroFailure(Code::kInternal, "rank 0 answered phase '" + f.phase +
                                                                  "' instead of '" +
                                                                  std::string(round.phase) + "'"));
      }
      if (f.fatal) return Spend(f.status);
      // A non-fatal verdict means that rank 0 has this rank's contribution; Drain only waits until
      // the communicator no longer uses its memory.
      Drain(std::max<Clock::duration>(
          kFailureSendLimit,
          std::min<Clock::duration>(timeouts_.liveness + AllowanceFor(round.payload.size()),
                                    end_ - now)));
      if (!f.status.ok()) return f.status;
      return std::make_shared<const std::string>(std::move(in.payload));
    }
    if (const std::uint64_t coming = from_[0]->PayloadComing(); coming != 0 && !payload_seen) {
      payload_seen = true;
      deadline = until(patience + AllowanceFor(coming));
    }
    if (working) {
      round.work->moved = false;
      const Result<bool> done = round.work->Step();
      if (round.work->moved) backoff.Reset();
      if (!done.ok() || done.value()) {
        working = false;
        Contribute(round, done.status());
      }
    }
    (void)sender_.Poll();
    if (watch_.IsLost(0, now)) {
      return GiveUp(round,
                    RankZeroFailure(Code::kDeadlineExceeded,
                                    WaitingText(round) + ": no heartbeat from rank 0 for " +
                                        SecondsText(timeouts_.liveness) + " (liveness timeout)"));
    }
    if (const Status cancelled = CancelledWait(round, now); !cancelled.ok()) {
      return GiveUp(round, cancelled);
    }
    if (now > deadline) {
      return GiveUp(
          round, RankZeroFailure(Code::kDeadlineExceeded,
                                 WaitingText(round) + ": rank 0 did not arrive within " +
                                     (now > end_ ? SecondsText(timeouts_.total) + " (total timeout)"
                                                 : SecondsText(patience) + " (arrival timeout)")));
    }
    backoff.Pause(working && round.work->progresses_alone);
  }
}

Status CollectiveEngine::CancelledWait(const Round& round, Clock::time_point now) {
  if (cancel_ == nullptr || !cancel_->load()) return {};
  if (!cancel_seen_) cancel_seen_ = now;
  if (now - *cancel_seen_ < kCancelPatience) return {};
  return Status(Code::kCancelled,
                WaitingText(round) + ": cancelled by rank " + std::to_string(comm_.rank()))
      .With({.rank = comm_.rank()});
}

Status CollectiveEngine::GiveUp(const Round& round, const Status& why) {
  // Best effort: tells rank 0, which would wait for this rank in the next round. This rank returns
  // its failure whether or not rank 0 receives the frame.
  Frame frame = MakeFrame(round, Frame::kGaveUp);
  SendFailure(std::move(frame), why);
  Drain(kFailureSendLimit);
  return Spend(why);
}

}  // namespace tensormount
