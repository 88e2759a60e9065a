// SPDX-License-Identifier: Apache-2.0
// Channels and subgroups (MakeChannel and MakeSubgroup of tensormount/communicator.h): some or all
// ranks of another communicator, under their own numbers. All calls are forwarded; rank numbers in
// errors are translated back.
#include <algorithm>
#include <cctype>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensormount/communicator.h"

#include "collective/comm/host_bytes.h"

namespace tensormount {
namespace {

// Replaces "rank FROM" by "rank TO" in the message and the fields of `status`.
Status Renumbered(const Status& status, int from, int to) {
  if (from == to || status.ok()) return status;
  const std::string old = "rank " + std::to_string(from);
  const std::string& message = status.message();
  std::string out;
  std::size_t at = 0;
  while (true) {
    const std::size_t hit = message.find(old, at);
    if (hit == std::string::npos) break;
    const std::size_t end = hit + old.size();
    const bool whole =
        end == message.size() || std::isdigit(static_cast<unsigned char>(message[end])) == 0;
    out += message.substr(at, hit - at) + (whole ? "rank " + std::to_string(to) : old);
    at = end;
  }
  ErrorFields fields = status.fields();
  if (fields.rank == from) fields.rank = to;
  return Status::FromParts(status.code(), status.ToErrno(), out + message.substr(at)).With(fields);
}

// A text that identifies a list of ranks.
std::string Listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += std::to_string(rank) + " ";
  return text;
}

class GroupView final : public Communicator {
 public:
  // `ranks[r]` is rank r's number in the parent; `rank` is this rank's number here. `group`
  // identifies the group; empty if it is the parent's group.
  GroupView(Communicator& parent, std::vector<int> ranks, int rank, std::uint32_t channel,
            std::string group)
      : Communicator(channel, &parent, std::move(group)),
        parent_(parent),
        ranks_(std::move(ranks)),
        rank_(rank) {}

  ~GroupView() override {
    for (const auto& [request, peer] : outstanding_) parent_.Cancel(request);
    for (const int rank : kept_up_) parent_.KeepUp(rank, false);
  }

  // Requests heartbeats between rank 0 and every other rank of the group.
  void KeepUpWithRankZero() {
    const int end = rank_ == 0 ? size() : 1;
    for (int r = rank_ == 0 ? 1 : 0; r < end; ++r) kept_up_.push_back(Of(r));
    for (const int rank : kept_up_) parent_.KeepUp(rank, true);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  std::string kind() const override { return parent_.kind(); }

  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    TENSORMOUNT_RETURN_IF_ERROR(CheckEnvelope(*this, to, tag));
    return Note(parent_.Send(Of(to), tag, view), to);
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    TENSORMOUNT_RETURN_IF_ERROR(CheckEnvelope(*this, from, tag));
    return Note(parent_.Receive(Of(from), tag, view), from);
  }

  Result<bool> Test(Request request) override {
    Result<bool> done = parent_.Test(request);
    if (done.ok() && !done.value()) return done;
    const int peer = Forget(request);
    if (!done.ok() && peer >= 0) return Renumbered(done.status(), Of(peer), peer);
    return done;
  }

  void Cancel(Request request) override {
    if (Forget(request) >= 0) parent_.Cancel(request);
  }

  Status Progress() override { return parent_.Progress(); }
  std::chrono::nanoseconds SilentFor(int rank) const override {
    return parent_.SilentFor(ranks_.at(static_cast<std::size_t>(rank)));
  }
  void KeepUp(int rank, bool wanted) override {
    if (rank >= 0 && rank < size()) parent_.KeepUp(Of(rank), wanted);
  }
  // False if some ranks are left out or rank 0 is another one: then heartbeats with rank 0 begin
  // only when each rank makes the subgroup, perhaps long after another rank.
  bool BeatsAlways() const override {
    return size() == parent_.size() && ranks_.front() == 0 && parent_.BeatsAlways();
  }
  std::uint64_t Changes() const override { return parent_.Changes(); }
  bool HearsChanges() const override { return parent_.HearsChanges(); }
  void WaitForChange(std::uint64_t seen, std::chrono::nanoseconds most) override {
    parent_.WaitForChange(seen, most);
  }

 private:
  int Of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  Result<Request> Note(const Result<Request>& request, int peer) {
    if (!request.ok()) return Renumbered(request.status(), Of(peer), peer);
    std::lock_guard lock(mutex_);
    outstanding_.emplace(request.value(), peer);
    return request;
  }
  // Forgets a request and returns its peer; -1 if the request does not belong to this view.
  int Forget(Request request) {
    std::lock_guard lock(mutex_);
    const auto it = outstanding_.find(request);
    if (it == outstanding_.end()) return -1;
    const int peer = it->second;
    outstanding_.erase(it);
    return peer;
  }

  Communicator& parent_;
  const std::vector<int> ranks_;
  const int rank_;
  std::vector<int> kept_up_;  // Peers of heartbeats, as ranks of the parent.
  std::mutex mutex_;
  std::unordered_map<Request, int> outstanding_;
};

Status CheckChannel(std::uint32_t channel) {
  if (channel >= 1 && channel < Communicator::kChannels) return {};
  return {Code::kInvalidArgument, "channel number " + std::to_string(channel) + " is outside [1, " +
                                      std::to_string(Communicator::kChannels) + ")"};
}

}  // namespace

Result<std::unique_ptr<Communicator>> MakeChannel(Communicator& parent, std::uint32_t channel) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckChannel(channel));
  if (parent.channel() % Communicator::kChannels != 0) {
    return Status(Code::kInvalidArgument, "make a channel: the parent is a channel itself");
  }
  std::vector<int> ranks;
  for (int r = 0; r < parent.size(); ++r) ranks.push_back(r);
  return std::unique_ptr<Communicator>(std::make_unique<GroupView>(
      parent, std::move(ranks), parent.rank(), parent.channel() + channel, std::string()));
}

Result<std::unique_ptr<Communicator>> MakeSubgroup(Communicator& parent,
                                                   const std::vector<int>& ranks,
                                                   std::uint32_t channel) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckChannel(channel));
  if (parent.channel() / Communicator::kChannels == channel) {
    return Status(Code::kInvalidArgument, "make a subgroup: channel " + std::to_string(channel) +
                                              " is already used by its parent subgroup");
  }
  std::vector<bool> seen(static_cast<std::size_t>(parent.size()));
  for (const int rank : ranks) {
    if (rank < 0 || rank >= parent.size()) {
      return Status(Code::kInvalidArgument, "make a subgroup: rank " + std::to_string(rank) +
                                                " is outside [0, " + std::to_string(parent.size()) +
                                                ")");
    }
    if (seen[static_cast<std::size_t>(rank)]) {
      return Status(Code::kInvalidArgument,
                    "make a subgroup: rank " + std::to_string(rank) + " is listed twice");
    }
    seen[static_cast<std::size_t>(rank)] = true;
  }
  const auto self = std::find(ranks.begin(), ranks.end(), parent.rank());
  if (self == ranks.end()) {
    return Status(Code::kInvalidArgument, "make a subgroup: this rank (" +
                                              std::to_string(parent.rank()) +
                                              ") is not in the list of ranks");
  }
  auto view = std::make_unique<GroupView>(
      parent, ranks, static_cast<int>(self - ranks.begin()),
      channel * Communicator::kChannels + parent.channel() % Communicator::kChannels,
      Listed(ranks));
  view->KeepUpWithRankZero();
  return std::unique_ptr<Communicator>(std::move(view));
}

}  // namespace tensormount
