// SPDX-License-Identifier: Apache-2.0
#include "collective/comm/collective.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
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

}  // namespace

class Collective::Impl {
 public:
  Impl(Communicator& comm, const Timeouts& timeouts) : engine(comm, timeouts) {}
  CollectiveEngine engine;
};

Collective::Collective(Communicator& comm, const Timeouts& timeouts)
    : impl_(std::make_unique<Impl>(comm, timeouts)) {}
Collective::~Collective() = default;

int Collective::rank() const { return impl_->engine.comm().rank(); }
int Collective::size() const { return impl_->engine.comm().size(); }

Result<std::vector<std::string>> Collective::AllGather(std::string_view mine,
                                                       std::string_view phase) {
  std::vector<std::string> all;
  Round round;
  round.op = CollectiveOp::kAllGather;
  round.phase = phase;
  round.payload = mine;
  round.decide = [&](std::vector<std::string>& parts, std::string* verdict) -> Status {
    all = std::move(parts);
    if (size() > 1) *verdict = EncodeParts(all);
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload payload, impl_->engine.Run(round));
  if (rank() == 0) return all;
  return DecodeParts(*payload, size());
}

Result<std::vector<std::string>> Collective::Gather(std::string_view mine, std::string_view phase) {
  std::vector<std::string> all;
  Round round;
  round.op = CollectiveOp::kGather;
  round.phase = phase;
  round.payload = mine;
  round.decide = [&](std::vector<std::string>& parts, std::string*) -> Status {
    all = std::move(parts);
    return {};
  };
  TENSORMOUNT_RETURN_IF_ERROR(impl_->engine.Run(round).status());
  return all;
}

Result<std::string> Collective::Broadcast(const Result<std::string>& mine, std::string_view phase) {
  const bool root = rank() == 0;
  Round round;
  round.op = CollectiveOp::kBroadcast;
  round.phase = phase;
  if (root) round.mine = mine.status();
  round.decide = [&](std::vector<std::string>&, std::string* verdict) -> Status {
    *verdict = mine.value();
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload payload, impl_->engine.Run(round));
  return *payload;
}

Result<std::vector<std::uint64_t>> Collective::AllReduceXor(std::span<const std::uint64_t> mine,
                                                            std::string_view phase) {
  Round round;
  round.op = CollectiveOp::kXor;
  round.phase = phase;
  round.payload = {reinterpret_cast<const char*>(mine.data()), mine.size_bytes()};
  round.decide = [](std::vector<std::string>& parts, std::string* verdict) -> Status {
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
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload payload, impl_->engine.Run(round));
  if (payload->size() != mine.size_bytes()) {
    return Status(Code::kDataLoss, "XOR of all ranks: the answer has another length");
  }
  std::vector<std::uint64_t> out(mine.size());
  if (!out.empty()) std::memcpy(out.data(), payload->data(), payload->size());
  return out;
}

Status Collective::Agree(const Status& mine, std::string_view phase) {
  Round round;
  round.op = CollectiveOp::kAgree;
  round.phase = phase;
  round.mine = mine;
  return impl_->engine.Run(round).status();
}

Status Collective::Exchange(std::span<const Transfer> sends, std::span<const Transfer> receives,
                            std::string_view phase) {
  std::uint64_t bytes = 0;
  for (const auto& transfers : {sends, receives}) {
    for (const Transfer& t : transfers) {
      bytes = CheckedAdd(bytes, t.size).value_or(~std::uint64_t{0});
    }
  }
  // All come before anything is written into anybody's memory; the largest part tells how long the
  // transfers may take.
  char mine[8];
  StoreLittle(mine, bytes);
  Round arrive;
  arrive.op = CollectiveOp::kExchange;
  arrive.phase = phase;
  arrive.payload = {mine, sizeof(mine)};
  arrive.decide = [](std::vector<std::string>& parts, std::string* verdict) -> Status {
    std::uint64_t most = 0;
    for (const std::string& p : parts) {
      if (p.size() != 8) return {Code::kDataLoss, "exchange: a size is missing"};
      most = std::max(most, LoadLittle<std::uint64_t>(p.data()));
    }
    verdict->resize(8);
    StoreLittle(verdict->data(), most);
    return {};
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const CollectiveEngine::Payload most, impl_->engine.Run(arrive));
  Transfers work(impl_->engine.comm(), impl_->engine.data_tag());
  for (const Transfer& t : receives) work.Post(t, /*is_send=*/false);
  for (const Transfer& t : sends) work.Post(t, /*is_send=*/true);
  Round transfer;
  transfer.op = CollectiveOp::kTransfer;
  transfer.phase = phase;
  transfer.work = &work;
  if (most->size() == 8) {
    transfer.allowance = CollectiveEngine::AllowanceFor(LoadLittle<std::uint64_t>(most->data()));
  }
  return impl_->engine.Run(transfer).status();
}

}  // namespace tensormount
