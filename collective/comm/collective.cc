// SPDX-License-Identifier: Apache-2.0
#include "collective/comm/collective.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "collective/comm/collective_frame.h"
#include "collective/comm/collective_round.h"

namespace tensormount {
namespace {

using Round = CollectiveEngine::Round;

// u64 count, u64 size of each, then the bytes of all.
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
  ByteReader r(bytes, "gathered parts");
  std::vector<std::string> parts(static_cast<std::size_t>(ranks));
  if (r.U64() != parts.size()) {
    return Status(Code::kDataLoss, "gathered parts: not one of every rank");
  }
  std::vector<std::uint64_t> sizes(parts.size());
  for (std::uint64_t& size : sizes) size = r.U64();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (sizes[i] > r.left()) return Status(Code::kDataLoss, "gathered parts: truncated");
    parts[i] = std::string(r.Raw(static_cast<std::size_t>(sizes[i])));
  }
  TENSORMOUNT_RETURN_IF_ERROR(r.Finish());
  return parts;
}

// The transfers of one rank, all at once.
class Transfers final : public LocalWork {
 public:
  Transfers(Communicator& comm, std::uint32_t tag) : comm_(comm), tag_(tag) {}
  ~Transfers() override { Cancel(); }

  void Post(const Collective::Transfer& t, bool is_send) {
    if (t.size == 0 || !failure_.ok()) return;
    const auto size = CheckedCast<std::int64_t>(t.size);
    if (!size) {
      failure_ = Status(Code::kInvalidArgument, "exchange: an impossible size");
      return;
    }
    const BufferView view = BufferView::Host(DType::kU8, t.data, Dims{*size});
    const Result<Communicator::Request> request =
        is_send ? comm_.Send(t.peer, tag_, view) : comm_.Receive(t.peer, tag_, view);
    if (request.ok()) {
      pending_.push_back(request.value());
    } else {
      failure_ = request.status();
    }
  }

  Result<bool> Step() override {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      if (failure_.ok()) {
        const Result<bool> done = comm_.Test(pending_[i]);
        if (!done.ok()) {
          failure_ = done.status();
          continue;
        }
        if (done.value()) continue;
      }
      pending_[kept++] = pending_[i];
    }
    pending_.resize(kept);
    if (!failure_.ok()) {
      Cancel();
      return failure_;
    }
    return pending_.empty();
  }

  void Cancel() override {
    for (const Communicator::Request request : pending_) comm_.Cancel(request);
    pending_.clear();
  }

 private:
  Communicator& comm_;
  const std::uint32_t tag_;
  std::vector<Communicator::Request> pending_;
  Status failure_;
};

// One rank's messages to all and from all. To each other rank goes first the size alone, and after
// it the bytes, where there are any; nobody knows beforehand who has something to say.
class Letters final : public LocalWork {
 public:
  // No message may be larger than `most`: what the most talkative rank says in all.
  Letters(Communicator& comm, std::uint32_t tag, const std::vector<std::string>& to_each,
          std::uint64_t most)
      : comm_(comm), tag_(tag), most_(most), in_(to_each.size()), out_sizes_(to_each.size()) {
    // Starts with the next rank, so that not all talk to the same one at once.
    const auto n = static_cast<std::size_t>(comm.size());
    const auto self = static_cast<std::size_t>(comm.rank());
    texts_.resize(n);
    texts_[self] = to_each[self];
    for (std::size_t k = 1; k < n; ++k) {
      Incoming& in = in_[(self + n - k) % n];
      in.peer = static_cast<int>((self + n - k) % n);
      Start(comm.Receive(in.peer, tag, View(in.size, sizeof(in.size))), &in.request);
      in.stage = Incoming::kSize;
      ++coming_;
    }
    for (std::size_t k = 1; k < n; ++k) {
      const std::size_t to = (self + k) % n;
      StoreLittle(out_sizes_[to].data(), std::uint64_t{to_each[to].size()});
      Post(to, out_sizes_[to].data(), out_sizes_[to].size());
      if (!to_each[to].empty()) Post(to, to_each[to].data(), to_each[to].size());
    }
  }
  ~Letters() override { Cancel(); }

  Result<bool> Step() override {
    for (Incoming& in : in_) {
      while (failure_.ok() && Advance(in)) {
      }
    }
    std::erase_if(sends_, [&](Communicator::Request request) {
      if (!failure_.ok()) return false;
      const Result<bool> done = comm_.Test(request);
      if (!done.ok()) failure_ = done.status();
      return !done.ok() || done.value();
    });
    if (!failure_.ok()) {
      Cancel();
      return failure_;
    }
    return coming_ == 0 && sends_.empty();
  }

  void Cancel() override {
    for (const Communicator::Request request : sends_) comm_.Cancel(request);
    sends_.clear();
    for (Incoming& in : in_) {
      if (in.stage != Incoming::kNothing && in.request) comm_.Cancel(*in.request);
      in.stage = Incoming::kNothing;
    }
  }

  std::vector<std::string> Take() { return std::move(texts_); }

 private:
  struct Incoming {
    enum Stage { kNothing, kSize, kText };
    Stage stage = kNothing;
    int peer = 0;
    char size[8] = {};
    std::optional<Communicator::Request> request;
  };

  static BufferView View(const void* data, std::size_t size) {
    return BufferView::Host(DType::kU8, data, Dims{static_cast<std::int64_t>(size)});
  }
  static BufferView View(void* data, std::size_t size) {
    return BufferView::Host(DType::kU8, data, Dims{static_cast<std::int64_t>(size)});
  }

  void Start(const Result<Communicator::Request>& request,
             std::optional<Communicator::Request>* out) {
    out->reset();
    if (request.ok()) {
      *out = request.value();
    } else if (failure_.ok()) {
      failure_ = request.status();
    }
  }
  void Post(std::size_t to, const void* data, std::size_t size) {
    std::optional<Communicator::Request> request;
    Start(comm_.Send(static_cast<int>(to), tag_, View(data, size)), &request);
    if (request) sends_.push_back(*request);
  }

  // True where it came one stage further.
  bool Advance(Incoming& in) {
    if (in.stage == Incoming::kNothing || !in.request) return false;
    const Result<bool> done = comm_.Test(*in.request);
    if (done.ok() && !done.value()) return false;
    in.request.reset();
    if (!done.ok()) {
      failure_ = done.status();
      return false;
    }
    if (in.stage == Incoming::kSize) {
      failure_ = OnSize(in, LoadLittle<std::uint64_t>(in.size));
      if (!failure_.ok() || in.stage == Incoming::kText) return failure_.ok();
    }
    in.stage = Incoming::kNothing;
    --coming_;
    return false;
  }

  Status OnSize(Incoming& in, std::uint64_t size) {
    if (size == 0) return {};
    total_ = CheckedAdd(total_, size).value_or(~std::uint64_t{0});
    if (size > most_ || total_ > kMaxPayload) {
      return {Code::kDataLoss, "message of rank " + std::to_string(in.peer) + ": " +
                                   std::to_string(size) + " bytes cannot be"};
    }
    std::string& text = texts_[static_cast<std::size_t>(in.peer)];
    try {
      text.resize(static_cast<std::size_t>(size));
    } catch (const std::exception&) {
      return {Code::kResourceExhausted, "no memory for " + std::to_string(size) +
                                            " bytes of rank " + std::to_string(in.peer)};
    }
    Start(comm_.Receive(in.peer, tag_, View(text.data(), text.size())), &in.request);
    in.stage = Incoming::kText;
    return failure_;
  }

  Communicator& comm_;
  const std::uint32_t tag_;
  const std::uint64_t most_;
  std::uint64_t total_ = 0;
  std::vector<std::string> texts_;
  std::vector<Incoming> in_;
  std::vector<std::array<char, 8>> out_sizes_;
  std::vector<Communicator::Request> sends_;
  std::size_t coming_ = 0;
  Status failure_;
};

using Parts = std::vector<std::string>;

}  // namespace

class Collective::Impl {
 public:
  Impl(Communicator& comm, const Timeouts& timeouts) : engine(comm, timeouts) {}

  // One round without work: everybody's bytes and a verdict.
  Result<CollectiveEngine::Payload> Decide(
      CollectiveOp op, std::string_view phase, const Result<std::string_view>& mine,
      std::function<Status(Parts& parts, std::string* verdict)> decide) {
    Round round;
    round.op = op;
    round.phase = phase;
    round.mine = mine.status();
    if (mine.ok()) round.payload = mine.value();
    round.decide = std::move(decide);
    return engine.Run(round);
  }

  // How many bytes the ranks move: everybody comes before anything is written into anybody's
  // memory.
  struct Volume {
    std::uint64_t most = 0;  // Of one rank.
    std::uint64_t all = 0;
  };
  Result<Volume> Arrive(CollectiveOp op, std::string_view phase,
                        const Result<std::uint64_t>& bytes) {
    char mine[8] = {};
    if (bytes.ok()) StoreLittle(mine, bytes.value());
    const auto decide = [](Parts& parts, std::string* verdict) -> Status {
      Volume v;
      for (const std::string& p : parts) {
        if (p.size() != 8) return {Code::kDataLoss, "exchange: a size is missing"};
        const auto size = LoadLittle<std::uint64_t>(p.data());
        v.most = std::max(v.most, size);
        v.all = CheckedAdd(v.all, size).value_or(~std::uint64_t{0});
      }
      verdict->resize(16);
      StoreLittle(verdict->data(), v.most);
      StoreLittle(verdict->data() + 8, v.all);
      return {};
    };
    const Result<std::string_view> payload =
        bytes.ok() ? Result<std::string_view>(std::string_view(mine, sizeof(mine)))
                   : Result<std::string_view>(bytes.status());
    TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload told,
                                 Decide(op, phase, payload, decide));
    if (told->size() != 16) return Volume{};
    return Volume{LoadLittle<std::uint64_t>(told->data()),
                  LoadLittle<std::uint64_t>(told->data() + 8)};
  }

  Status Transfer(LocalWork& work, std::string_view phase, std::uint64_t bytes) {
    Round round;
    round.op = CollectiveOp::kTransfer;
    round.phase = phase;
    round.work = &work;
    round.allowance = CollectiveEngine::AllowanceFor(bytes);
    return engine.Run(round).status();
  }

  CollectiveEngine engine;
};

Collective::Collective(Communicator& comm, const Timeouts& timeouts)
    : impl_(std::make_unique<Impl>(comm, timeouts)) {}
Collective::~Collective() = default;

int Collective::rank() const { return impl_->engine.comm().rank(); }
int Collective::size() const { return impl_->engine.comm().size(); }

Result<std::vector<std::string>> Collective::AllGather(std::string_view mine,
                                                       std::string_view phase) {
  Parts all;
  const auto decide = [&](Parts& parts, std::string* verdict) -> Status {
    all = std::move(parts);
    if (size() > 1) *verdict = EncodeParts(all);
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload payload,
                               impl_->Decide(CollectiveOp::kAllGather, phase, mine, decide));
  if (rank() == 0) return all;
  return DecodeParts(*payload, size());
}

Result<std::vector<std::string>> Collective::Gather(std::string_view mine, std::string_view phase) {
  Parts all;
  const auto decide = [&](Parts& parts, std::string*) -> Status {
    all = std::move(parts);
    return {};
  };
  TENSORMOUNT_RETURN_IF_ERROR(impl_->Decide(CollectiveOp::kGather, phase, mine, decide).status());
  return all;
}

Result<std::string> Collective::Broadcast(const Result<std::string>& mine, std::string_view phase) {
  Result<std::string_view> status = std::string_view();
  if (rank() == 0 && !mine.ok()) status = mine.status();
  const auto decide = [&](Parts&, std::string* verdict) -> Status {
    *verdict = mine.value();
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload payload,
                               impl_->Decide(CollectiveOp::kBroadcast, phase, status, decide));
  return *payload;
}

Result<std::vector<std::uint64_t>> Collective::AllReduceXor(std::span<const std::uint64_t> mine,
                                                            std::string_view phase) {
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size_bytes());
  const auto decide = [](Parts& parts, std::string* verdict) -> Status {
    *verdict = std::move(parts[0]);
    for (std::size_t r = 1; r < parts.size(); ++r) {
      if (parts[r].size() != verdict->size()) {
        return {Code::kInternal, "XOR of all ranks: rank " + std::to_string(r) + " has " +
                                     std::to_string(parts[r].size() / 8) + " numbers, rank 0 " +
                                     std::to_string(verdict->size() / 8)};
      }
      for (std::size_t i = 0; i + 8 <= verdict->size(); i += 8) {
        StoreLittle(verdict->data() + i, LoadLittle<std::uint64_t>(verdict->data() + i) ^
                                             LoadLittle<std::uint64_t>(parts[r].data() + i));
      }
    }
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload payload,
                               impl_->Decide(CollectiveOp::kXor, phase, bytes, decide));
  if (payload->size() != mine.size_bytes()) {
    return Status(Code::kDataLoss, "XOR of all ranks: the answer has another length");
  }
  std::vector<std::uint64_t> out(mine.size());
  if (!out.empty()) std::memcpy(out.data(), payload->data(), payload->size());
  return out;
}

Status Collective::Agree(const Status& mine, std::string_view phase) {
  const Result<std::string_view> status =
      mine.ok() ? Result<std::string_view>(std::string_view()) : Result<std::string_view>(mine);
  return impl_->Decide(CollectiveOp::kAgree, phase, status, nullptr).status();
}

Result<std::string> Collective::Decide(std::string_view mine, std::string_view phase,
                                       const std::function<Result<std::string>(Parts&)>& decide) {
  const auto told = [&](Parts& parts, std::string* verdict) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(*verdict, decide(parts));
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload payload,
                               impl_->Decide(CollectiveOp::kDecide, phase, mine, told));
  return *payload;
}

Result<std::vector<std::string>> Collective::AllToAll(const std::vector<std::string>& to_each,
                                                      std::string_view phase) {
  Result<std::uint64_t> bytes = std::uint64_t{0};
  if (to_each.size() == static_cast<std::size_t>(size())) {
    for (const std::string& text : to_each) bytes.value() += text.size();
  } else {
    bytes =
        Status(Code::kInvalidArgument, "messages to " + std::to_string(to_each.size()) +
                                           " ranks given, the group has " + std::to_string(size()));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Impl::Volume volume,
                               impl_->Arrive(CollectiveOp::kAllToAll, phase, bytes));
  Letters work(impl_->engine.comm(), impl_->engine.data_tag(), to_each, volume.most);
  TENSORMOUNT_RETURN_IF_ERROR(impl_->Transfer(work, phase, volume.all));
  return work.Take();
}

Status Collective::Run(LocalWork& work, std::uint64_t bytes, std::string_view phase) {
  const Result<Impl::Volume> volume = impl_->Arrive(CollectiveOp::kExchange, phase, bytes);
  if (!volume.ok()) {
    work.Cancel();
    return volume.status();
  }
  return impl_->Transfer(work, phase, volume.value().most);
}

Communicator& Collective::comm() { return impl_->engine.comm(); }
std::uint32_t Collective::data_tag() const { return impl_->engine.data_tag(); }

Status Collective::Exchange(std::span<const Transfer> sends, std::span<const Transfer> receives,
                            std::string_view phase) {
  std::uint64_t bytes = 0;
  for (const auto& transfers : {sends, receives}) {
    for (const Transfer& t : transfers) {
      bytes = CheckedAdd(bytes, t.size).value_or(~std::uint64_t{0});
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Impl::Volume volume,
                               impl_->Arrive(CollectiveOp::kExchange, phase, bytes));
  Transfers work(impl_->engine.comm(), impl_->engine.data_tag());
  for (const Transfer& t : receives) work.Post(t, /*is_send=*/false);
  for (const Transfer& t : sends) work.Post(t, /*is_send=*/true);
  return impl_->Transfer(work, phase, volume.most);
}

}  // namespace tensormount
