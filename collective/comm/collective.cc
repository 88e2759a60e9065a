// SPDX-License-Identifier: Apache-2.0
// The operations of collective.h (gather, decide, broadcast, exchange), each made of rounds
// (collective_round.h). Each operation has a deadline for slow ranks and a shorter one for ranks
// that show no sign of life, and ends with one verdict: all ranks continue, or all that can be
// reached fail with the same reason.
#include "collective/comm/collective.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "base/hash.h"
#include "collective/comm/collective_frame.h"
#include "collective/comm/collective_round.h"

namespace tensormount {
namespace {

using Round = CollectiveEngine::Round;

// Encodes the parts of all ranks: u64 count, u64 size of each part, then the bytes of all parts.
std::string EncodeParts(const std::vector<std::string>& parts) {
  std::size_t total = 8 + 8 * parts.size();
  for (const std::string& p : parts) total += p.size();
  std::string out;
  out.reserve(total);
  const auto put = [&out](std::uint64_t v) {
    char bytes[8];
    StoreLittle(bytes, v);
    out.append(bytes, sizeof(bytes));
  };
  put(parts.size());
  for (const std::string& p : parts) put(p.size());
  for (const std::string& p : parts) out += p;
  return out;
}

Result<std::vector<std::string>> DecodeParts(std::string_view bytes, int ranks) {
  ByteReader r(bytes, "gathered messages of the ranks");
  std::vector<std::string> parts(static_cast<std::size_t>(ranks));
  if (r.U64() != parts.size()) {
    return Status(Code::kDataLoss, "gathered messages of the ranks: expected one per rank");
  }
  std::vector<std::uint64_t> sizes(parts.size());
  for (std::uint64_t& size : sizes) size = r.U64();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (sizes[i] > r.left())
      return Status(Code::kDataLoss, "gathered messages of the ranks: truncated");
    parts[i] = std::string(r.Raw(static_cast<std::size_t>(sizes[i])));
  }
  TENSORMOUNT_RETURN_IF_ERROR(r.Finish());
  return parts;
}

Frame LetterFrame() {
  Frame frame;
  frame.kind = Frame::kLetter;
  return frame;
}

// Fails unless the frame is a letter, the only kind of frame on the data tag.
Status CheckLetter(const Frame& frame, int from) {
  if (frame.kind == Frame::kLetter) return {};
  return {Code::kDataLoss, "message of rank " + std::to_string(from) +
                               ": the message has another kind than this rank expects"};
}

// Sends one rank's letters and receives the letters that it expects.
class Letters final : public LocalWork {
 public:
  // `most` bounds the size of a letter: the largest total that any rank sends.
  Letters(CollectiveEngine& engine, std::span<const Collective::Letter> letters,
          std::span<const int> from, std::uint64_t most)
      : engine_(engine), texts_(from.size()) {
    const int self = engine.comm().rank();
    const Collective::Letter* to_self = nullptr;
    for (const Collective::Letter& letter : letters) {
      if (letter.peer == self) to_self = &letter;
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (from[i] == self) {
        if (to_self != nullptr) texts_[i] = to_self->text;
        continue;
      }
      unreceived_.push_back({from[i], i});
      engine_.data_in(from[i]).LimitPayload(most);
    }
    // Starts with the next higher rank, so that not all ranks send to the same one first.
    const auto next = std::find_if(letters.begin(), letters.end(),
                                   [self](const Collective::Letter& l) { return l.peer > self; });
    const auto send = [&](const Collective::Letter& letter) {
      if (letter.peer == self) return;
      engine_.data_out().Send(letter.peer, LetterFrame(), Payload(letter.text));
    };
    std::for_each(next, letters.end(), send);
    std::for_each(letters.begin(), next, send);
  }
  ~Letters() override { Cancel(); }

  Result<bool> Step() override {
    Status failure = Receive();
    const bool sent = engine_.data_out().Poll();
    if (failure.ok()) failure = engine_.data_out().failure();
    if (!failure.ok()) {
      Cancel();
      return failure;
    }
    return sent && unreceived_.empty();
  }

  void Cancel() override {
    engine_.data_out().CancelAll();
    for (const auto& [peer, at] : unreceived_) engine_.data_in(peer).Cancel();
    unreceived_.clear();
  }

  std::vector<std::string> Take() { return std::move(texts_); }

 private:
  Status Receive() {
    Status failure;
    std::erase_if(unreceived_, [&](const auto& coming) {
      const auto& [peer, at] = coming;
      if (!failure.ok()) return false;
      FrameReceiver& in = engine_.data_in(peer);
      const Result<bool> came = in.Poll();
      if (!came.ok()) failure = came.status();
      if (!came.ok() || !came.value()) return false;
      FrameReceiver::Received letter = in.Take();
      in.LimitPayload(kMaxPayload);
      failure = CheckLetter(letter.frame, peer);
      total_ = CheckedAdd(total_, std::uint64_t{letter.payload.size()}).value_or(kMaxPayload + 1);
      if (failure.ok() && total_ > kMaxPayload) {
        failure = Status(Code::kDataLoss, "messages of all ranks: " + std::to_string(total_) +
                                              " bytes in total, the limit is " +
                                              std::to_string(kMaxPayload) + " bytes");
      }
      texts_[at] = std::move(letter.payload);
      moved = true;
      return true;
    });
    return failure;
  }

  CollectiveEngine& engine_;
  std::uint64_t total_ = 0;
  std::vector<std::string> texts_;
  std::vector<std::pair<int, std::size_t>> unreceived_;  // Peer, and index in texts_.
};

// Order-independent sum of hashes of (sender, receiver) pairs.
class PairSum {
 public:
  void Add(int from, int to) {
    char pair[8];
    StoreLittle(pair, static_cast<std::uint32_t>(from));
    StoreLittle(pair + 4, static_cast<std::uint32_t>(to));
    sum_ += Xxh3Low64(std::string_view(pair, sizeof(pair)));
  }
  std::uint64_t value() const { return sum_; }

 private:
  std::uint64_t sum_ = 0;
};

using Parts = std::vector<std::string>;

// Runs one round of messages to rank 0 and back (collective_round.h) without LocalWork: rank 0 gets
// the payloads of all ranks, and `decide` makes the verdict that all ranks receive.
Result<CollectiveEngine::VerdictPayload> RunRound(
    CollectiveEngine& engine, CollectiveOp op, std::string_view phase,
    const Result<std::string_view>& mine,
    std::function<Status(Parts& parts, std::string* verdict)> decide) {
  Round round;
  round.op = op;
  round.phase = phase;
  round.mine = mine.status();
  if (mine.ok()) round.payload = mine.value();
  round.decide = std::move(decide);
  return engine.Run(round);
}

// Three numbers that the ranks exchange before data moves. Each rank sends the number of bytes that
// it sends, the PairSum of its outgoing messages and the PairSum of its incoming ones (both 0 if
// only sizes matter). Rank 0 answers with the most bytes of one rank, the bytes of all ranks, and
// 0.
using Volume = std::array<std::uint64_t, 3>;

// Compares the Volumes of all ranks before an exchange, so that every rank has come before any byte
// is written into memory.
Result<Volume> AgreeVolume(CollectiveEngine& engine, CollectiveOp op, std::string_view phase,
                           const Result<Volume>& volume) {
  const auto encode = [](const Volume& v) {
    ByteWriter out;
    for (const std::uint64_t number : v) out.U64(number);
    return std::move(out.bytes());
  };
  const auto decode = [](std::string_view bytes) -> Result<Volume> {
    ByteReader in(bytes, "message sizes that a rank sent");
    Volume v;
    for (std::uint64_t& number : v) number = in.U64();
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    return v;
  };
  const auto decide = [&](Parts& parts, std::string* verdict) -> Status {
    Volume all{};
    std::uint64_t pairs = 0;
    for (const std::string& part : parts) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Volume one, decode(part));
      all[0] = std::max(all[0], one[0]);
      all[1] = CheckedAdd(all[1], one[0]).value_or(~std::uint64_t{0});
      pairs += one[1] - one[2];
    }
    if (pairs != 0) {
      return {Code::kInternal,
              "internal error: a rank expects a message from a rank that sends none to it"};
    }
    *verdict = encode(all);
    return {};
  };
  const std::string mine = volume.ok() ? encode(volume.value()) : std::string();
  const Result<std::string_view> payload = volume.ok()
                                               ? Result<std::string_view>(std::string_view(mine))
                                               : Result<std::string_view>(volume.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::VerdictPayload told,
                               RunRound(engine, op, phase, payload, decide));
  return decode(*told);
}

Status Move(CollectiveEngine& engine, LocalWork& work, std::string_view phase,
            std::uint64_t bytes) {
  Round round;
  round.op = CollectiveOp::kTransfer;
  round.phase = phase;
  round.work = &work;
  round.allowance = CollectiveEngine::AllowanceFor(bytes);
  return engine.Run(round).status();
}

}  // namespace

Collective::Collective(Communicator& comm, const Timeouts& timeouts,
                       const std::atomic<bool>* cancel)
    : engine_(std::make_unique<CollectiveEngine>(comm, timeouts, cancel)) {}
Collective::~Collective() = default;

void Collective::IgnoreCancel() { engine_->IgnoreCancel(); }

int Collective::rank() const { return engine_->comm().rank(); }
int Collective::size() const { return engine_->comm().size(); }

Result<std::vector<std::string>> Collective::AllGather(std::string_view mine,
                                                       std::string_view phase) {
  Parts all;
  const auto decide = [&](Parts& parts, std::string* verdict) -> Status {
    all = std::move(parts);
    if (size() > 1) *verdict = EncodeParts(all);
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::VerdictPayload payload,
                               RunRound(*engine_, CollectiveOp::kAllGather, phase, mine, decide));
  if (rank() == 0) return all;
  return DecodeParts(*payload, size());
}

Result<std::vector<std::string>> Collective::Gather(std::string_view mine, std::string_view phase) {
  Parts all;
  const auto decide = [&](Parts& parts, std::string*) -> Status {
    all = std::move(parts);
    return {};
  };
  TENSORMOUNT_RETURN_IF_ERROR(
      RunRound(*engine_, CollectiveOp::kGather, phase, mine, decide).status());
  return all;
}

Result<std::string> Collective::Broadcast(const Result<std::string>& mine, std::string_view phase) {
  Result<std::string_view> status = std::string_view();
  if (rank() == 0 && !mine.ok()) status = mine.status();
  const auto decide = [&](Parts&, std::string* verdict) -> Status {
    *verdict = mine.value();
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::VerdictPayload payload,
                               RunRound(*engine_, CollectiveOp::kBroadcast, phase, status, decide));
  return *payload;
}

Status Collective::Agree(const Status& mine, std::string_view phase) {
  const Result<std::string_view> status =
      mine.ok() ? Result<std::string_view>(std::string_view()) : Result<std::string_view>(mine);
  return RunRound(*engine_, CollectiveOp::kAgree, phase, status, nullptr).status();
}

Result<std::string> Collective::Decide(std::string_view mine, std::string_view phase,
                                       const std::function<Result<std::string>(Parts&)>& decide,
                                       const Status& able) {
  const auto told = [&](Parts& parts, std::string* verdict) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(*verdict, decide(parts));
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::VerdictPayload payload,
                               RunRound(*engine_, CollectiveOp::kDecide, phase,
                                        able.ok() ? Result<std::string_view>(mine) : able, told));
  return *payload;
}

Result<std::vector<std::string>> Collective::NeighborAllToAll(std::span<const Letter> letters,
                                                              std::span<const int> from,
                                                              std::string_view phase) {
  const auto measure = [&]() -> Result<Volume> {
    std::uint64_t bytes = 0;
    PairSum sends;
    PairSum receives;
    std::vector<char> named(static_cast<std::size_t>(size()));
    const auto name = [&](int peer, char bit) -> Status {
      if (peer < 0 || peer >= size()) {
        return {Code::kInvalidArgument, "messages between ranks: rank " + std::to_string(peer) +
                                            " is outside [0, " + std::to_string(size()) + ")"};
      }
      char& bits = named[static_cast<std::size_t>(peer)];
      if ((bits & bit) != 0) {
        return {Code::kInvalidArgument,
                "messages between ranks: rank " + std::to_string(peer) + " is listed twice"};
      }
      bits = static_cast<char>(bits | bit);
      return {};
    };
    for (const Letter& letter : letters) {
      TENSORMOUNT_RETURN_IF_ERROR(name(letter.peer, 1));
      sends.Add(rank(), letter.peer);
      bytes += letter.text.size();
    }
    for (const int peer : from) {
      TENSORMOUNT_RETURN_IF_ERROR(name(peer, 2));
      receives.Add(peer, rank());
    }
    return Volume{bytes, sends.value(), receives.value()};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Volume volume,
      AgreeVolume(*engine_, CollectiveOp::kNeighborAllToAll, phase, measure()));
  Letters work(*engine_, letters, from, volume[0]);
  TENSORMOUNT_RETURN_IF_ERROR(Move(*engine_, work, phase, volume[1]));
  return work.Take();
}

Status Collective::Run(LocalWork& work, std::uint64_t bytes, std::string_view phase) {
  const Result<Volume> volume =
      AgreeVolume(*engine_, CollectiveOp::kExchange, phase, Volume{bytes});
  if (!volume.ok()) {
    work.Cancel();
    return volume.status();
  }
  return Move(*engine_, work, phase, volume.value()[0]);
}

Communicator& Collective::comm() { return engine_->comm(); }
std::uint32_t Collective::data_tag() const { return engine_->data_tag(); }
FrameSender& Collective::data_out() { return engine_->data_out(); }
FrameReceiver& Collective::data_in(int from) { return engine_->data_in(from); }

}  // namespace tensormount
