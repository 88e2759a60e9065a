// SPDX-License-Identifier: Apache-2.0
// The exchange in which the ranks of a load agree on a plan (meeting.h): first one message of fixed
// size from each rank (Card), then the keys that are not stored, then the requests.
#include "collective/load/meeting.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/coding.h"
#include "base/machine.h"
#include "collective/comm/agreement.h"
#include "collective/guarded.h"
#include "device/devices.h"

namespace tensormount {
namespace {

constexpr std::string_view kLoadDomain("tensormount load job v1\0", 24);

std::shared_ptr<KeptPlans<AgreedPlan>> PlansOf(Communicator& comm) {
  return KeptPlans<AgreedPlan>::Of(comm, "load plans", 4);
}

// Size in bytes of the first message of a rank, an encoded Card.
constexpr std::size_t kCardBytes = 64;
constexpr std::uint32_t kNeedsProof = 1;
constexpr std::uint32_t kShortRuns = 2;
constexpr std::uint32_t kOnDevice = 4;
constexpr std::uint32_t kSharedRequests = 8;
constexpr std::uint32_t kCardVersion = 4u << 24;  // The upper byte of Card::flags.
struct Card {
  Hash128 request;
  Hash128 call;
  Hash128 kept;  // Hash of the job whose plan the rank has kept; zero: none.
  std::uint64_t machine = 0;
  std::int32_t group = 0;
  std::uint32_t flags = 0;
};

std::string EncodeCard(const MeetingPart& part) {
  ByteWriter out;
  out.Hash(part.request_hash);
  out.Hash(part.call);
  out.Hash(part.kept_plan == nullptr ? Hash128{} : part.kept_plan->job);
  out.U64(part.machine);
  out.U32(static_cast<std::uint32_t>(part.group));
  out.U32(kCardVersion | (part.needs.proof ? kNeedsProof : 0) |
          (part.needs.short_runs ? kShortRuns : 0) |
          (part.needs.shared_requests ? kSharedRequests : 0) | (part.on_device ? kOnDevice : 0));
  return std::move(out.bytes());
}

Result<Card> DecodeCard(std::string_view bytes, std::size_t rank) {
  if (bytes.size() != kCardBytes) {
    return Status(Code::kDataLoss,
                  "load: the first message of rank " + std::to_string(rank) + " is malformed");
  }
  ByteReader in(bytes, "load: first message of a rank");
  Card card;
  card.request = in.Hash();
  card.call = in.Hash();
  card.kept = in.Hash();
  card.machine = in.U64();
  card.group = static_cast<std::int32_t>(in.U32());
  card.flags = in.U32();
  if ((card.flags & ~(kNeedsProof | kShortRuns | kSharedRequests | kOnDevice)) != kCardVersion) {
    return Status(Code::kInvalidArgument,
                  "rank " + std::to_string(rank) + " runs another version of tensormount");
  }
  return card;
}

// Hash of this rank's inputs to a plan.
Hash128 InputHash(const Hash128& request, const Hash128& call, std::uint64_t machine,
                  std::int32_t group) {
  ByteWriter all;
  all.Hash(request);
  all.Hash(call);
  all.U64(machine);
  all.U32(static_cast<std::uint32_t>(group));
  return Xxh3(all.bytes());
}

// Rank 0's answer to the cards.
struct Opening {
  bool same_call = true;  // If false, nothing else is set.
  Agreement agreed;
  bool whole = false;  // Whether every rank gets the requests of all ranks.
  ExchangeScope scope = ExchangeScope::kNone;
  bool on_devices = false;  // Whether each rank has all its tensors on one device.
  int ranks_here = 1;       // The most ranks on any one machine.
  RankClasses speakers;     // Ranks with equal requests; empty unless `whole` and the plan is new.
  std::vector<int> groups;  // Exchange group by rank; empty if `speakers` is.
};

// The exchange group of each rank: the caller's, or the part of it on one machine.
std::vector<int> GroupsOf(const std::vector<Card>& cards, ExchangeScope scope) {
  std::map<std::pair<int, std::uint64_t>, int> numbers;
  std::vector<int> groups;
  for (const Card& card : cards) {
    if (scope != ExchangeScope::kMachine) {
      groups.push_back(card.group);
      continue;
    }
    const std::pair at(card.group, card.machine);
    groups.push_back(numbers.emplace(at, static_cast<int>(numbers.size())).first->second);
  }
  return groups;
}

Result<std::string> DecideOpening(const std::vector<std::string>& parts, LoadPath path) {
  std::vector<Card> cards;
  std::map<std::uint64_t, std::uint32_t> of_machine;  // By machine: its number of ranks.
  AgreementMaker maker(kLoadDomain);
  std::uint32_t flags = 0;
  bool on_devices = true;
  bool same_call = true;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Card card, DecodeCard(parts[rank], rank));
    cards.push_back(card);
    same_call = same_call && card.call == cards[0].call;
    ++of_machine[card.machine];
    flags |= card.flags;
    on_devices = on_devices && (card.flags & kOnDevice) != 0;
    const Hash128 mine = InputHash(card.request, card.call, card.machine, card.group);
    const std::uint64_t words[] = {mine.low, mine.high};
    maker.Add(words, card.kept.low);
  }
  ByteWriter out;
  out.U8(same_call ? 1 : 0);
  if (!same_call) return std::move(out.bytes());
  const Agreement agreed = maker.Finish();
  std::uint32_t fullest = 0;
  for (const auto& [machine, ranks] : of_machine) fullest = std::max(fullest, ranks);
  ExchangeScope scope = ExchangeScope::kNone;
  if (of_machine.size() > 1 && (flags & kShortRuns) != 0) {
    scope = ExchangeScope::kJob;
  } else if (fullest > 1 && (flags & kSharedRequests) != 0) {
    scope = ExchangeScope::kMachine;
  }
  const bool whole =
      path == LoadPath::kExchange || (flags & kNeedsProof) != 0 || scope != ExchangeScope::kNone;
  WriteAgreement(out, agreed);
  out.U8(whole ? 1 : 0);
  out.U8(static_cast<std::uint8_t>(scope));
  out.U8(on_devices ? 1 : 0);
  out.U32(fullest);
  if (whole && !agreed.unchanged) {
    WriteClasses(out, ClassesOf(cards.size(), [&](std::size_t r) { return cards[r].request; }));
    for (const int group : GroupsOf(cards, scope)) out.U32(static_cast<std::uint32_t>(group));
  }
  return std::move(out.bytes());
}

Result<Opening> ReadOpening(std::string_view bytes, int ranks) {
  ByteReader in(bytes, "load: the decision that rank 0 sent");
  Opening opening;
  opening.same_call = in.U8() != 0;
  if (!opening.same_call) {
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    return opening;
  }
  opening.agreed = ReadAgreement(in);
  opening.whole = in.U8() != 0;
  opening.scope = static_cast<ExchangeScope>(in.U8());
  opening.on_devices = in.U8() != 0;
  opening.ranks_here = static_cast<int>(in.U32());
  if (opening.whole && !opening.agreed.unchanged) {
    TENSORMOUNT_RETURN_IF_ERROR(
        ReadClasses(in, static_cast<std::uint32_t>(ranks), opening.speakers));
    for (int r = 0; r < ranks; ++r) opening.groups.push_back(static_cast<int>(in.U32()));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return opening;
}

void WriteNames(ByteWriter& out, const std::vector<std::string>& names) {
  out.U32(static_cast<std::uint32_t>(names.size()));
  for (const std::string& name : names) out.String(name);
}

template <typename Fn>
void ReadNames(ByteReader& in, Fn fn) {
  constexpr std::size_t kMaxName = 4096;  // Maximum length of a name: a key and an index.
  const std::uint32_t count = in.U32();
  for (std::uint32_t i = 0; i < count && in.status().ok(); ++i) {
    fn(std::string(in.String(kMaxName)));
  }
}

// One rank's message about keys: which of its requested keys are not stored, and which stored ones
// it requests.
std::string EncodeKeys(const ResolvedRequest& mine, std::uint32_t tensors) {
  ByteWriter out;
  WriteNames(out, mine.not_stored);
  WriteNames(out, mine.requested_objects);
  std::string bits((tensors + 7) / 8, '\0');
  for (const auto& entry : mine.tensors) {
    char& bits_here = bits[entry->ordinal / 8];
    bits_here = static_cast<char>(bits_here | (1 << (entry->ordinal % 8)));
  }
  out.Raw(bits.data(), bits.size());
  return std::move(out.bytes());
}

Result<std::string> DecideKeys(const CheckpointIndex& index, const std::vector<std::string>& parts,
                               const LoadOptions& options) {
  std::set<std::string> not_stored;
  std::set<std::string> requested_objects;
  std::vector<bool> asked(index.tensor_count(), false);
  const std::size_t bytes = (asked.size() + 7) / 8;
  for (const std::string& part : parts) {
    ByteReader in(part, "load: the keys that a rank sent");
    ReadNames(in, [&](std::string name) { not_stored.insert(std::move(name)); });
    ReadNames(in, [&](std::string name) { requested_objects.insert(std::move(name)); });
    const std::string_view bits = in.Raw(bytes);
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    for (std::size_t b = 0; b < bytes; ++b) {
      if (bits[b] == 0) continue;
      for (std::size_t t = 8 * b; t < std::min(8 * b + 8, asked.size()); ++t) {
        if (((static_cast<unsigned char>(bits[b]) >> (t % 8)) & 1) != 0) asked[t] = true;
      }
    }
  }
  std::vector<std::string> not_requested;
  if (options.not_requested != Strict::kIgnore) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        not_requested,
        NotRequested(index, asked, {requested_objects.begin(), requested_objects.end()}, options));
  }
  ByteWriter out;
  WriteNames(out, {not_stored.begin(), not_stored.end()});
  WriteNames(out, not_requested);
  return std::move(out.bytes());
}

Status MeetOnKeys(Collective& collective, const CheckpointIndex& index, const LoadOptions& options,
                  AgreedPlan& agreed) {
  if (options.not_stored == Strict::kIgnore && options.not_requested == Strict::kIgnore) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string told,
      collective.Decide(
          EncodeKeys(*agreed.resolved, index.tensor_count()), "load: compare the requested keys",
          [&](std::vector<std::string>& parts) { return DecideKeys(index, parts, options); }));
  ByteReader in(told, "load: the keys that rank 0 sent");
  ReadNames(in, [&](std::string name) { agreed.not_stored.push_back(std::move(name)); });
  ReadNames(in, [&](std::string name) { agreed.not_requested.push_back(std::move(name)); });
  return in.Finish();
}

// Adds the request of each rank to the planner. Ranks with equal requests share one resolved
// request, which is freed after the last of these ranks.
Status AddAll(const CheckpointIndex& index, const LoadOptions& options,
              const std::shared_ptr<const ResolvedRequest>& mine, int me,
              const RankClasses& speakers, std::vector<std::string>& said, LoadPlanner& planner) {
  std::map<std::uint32_t, int> last;  // By sending rank: the last rank with the same request.
  for (std::size_t r = 0; r < speakers.size(); ++r) last[speakers[r]] = static_cast<int>(r);
  std::map<std::uint32_t, std::shared_ptr<const ResolvedRequest>> kept;
  kept[speakers[static_cast<std::size_t>(me)]] = mine;
  for (int rank = 0; rank < static_cast<int>(speakers.size()); ++rank) {
    const std::uint32_t speaker = speakers[static_cast<std::size_t>(rank)];
    std::shared_ptr<const ResolvedRequest>& wanted = kept[speaker];
    if (wanted == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const LoadRequest request, DecodeRequest(said[speaker]));
      said[speaker] = {};
      TENSORMOUNT_ASSIGN_OR_RETURN(ResolvedRequest other,
                                   ResolveRequest(index, request, options, /*objects=*/false));
      TENSORMOUNT_RETURN_IF_ERROR(other.refusal);
      wanted = std::make_shared<const ResolvedRequest>(std::move(other));
    }
    planner.Add(rank, *wanted);
    if (last[speaker] == rank) kept.erase(speaker);
  }
  return {};
}

}  // namespace

std::optional<Device> CommonDevice(const StateDict& request) {
  std::optional<Device> device;
  for (const StateDict::TensorItem& item : request.tensors()) {
    const BufferView& data = item.shard.data;
    if (item.shard.region.volume() == 0) continue;  // The shard needs no memory.
    if (!IsDeviceMemory(data) || (device && !(*device == data.device))) return std::nullopt;
    device = data.device;
  }
  return device;
}

Result<MeetingPart> PrepareMeeting(Communicator& comm, const CheckpointIndex& index,
                                   const StateDict& request, std::string_view path,
                                   const Hash128& identity, bool far, const LoadOptions& options) {
  MeetingPart part;
  TENSORMOUNT_ASSIGN_OR_RETURN(part.request, EncodeRequest(request));
  part.request_hash = Xxh3(part.request);
  part.machine = MachineHash();
  part.group = options.exchange_group;
  part.on_device = CommonDevice(request).has_value();
  ByteWriter call;
  call.Hash(CallFingerprint(path, options));
  part.call_text = EncodeCall(path, options);
  call.Hash(identity);
  call.U32(static_cast<std::uint32_t>(comm.size()));
  part.call = Xxh3(call.bytes());
  part.mine = InputHash(part.request_hash, part.call, part.machine, part.group);
  if (options.reuse_plan) {
    part.kept_plan =
        PlansOf(comm)->Find([&](const AgreedPlan& plan) { return plan.mine == part.mine; });
  }
  if (part.kept_plan != nullptr) {
    part.resolved = part.kept_plan->resolved;
    part.needs = part.kept_plan->needs;
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(const LoadRequest decoded, DecodeRequest(part.request));
    TENSORMOUNT_ASSIGN_OR_RETURN(ResolvedRequest resolved,
                                 ResolveRequest(index, decoded, options, /*objects=*/true));
    TENSORMOUNT_RETURN_IF_ERROR(resolved.refusal);
    part.resolved = std::make_shared<const ResolvedRequest>(std::move(resolved));
    TENSORMOUNT_ASSIGN_OR_RETURN(part.needs, FindNeeds(index, *part.resolved, far, options));
  }
  return part;
}

Result<std::shared_ptr<const AgreedPlan>> Meet(Communicator& comm, Collective& collective,
                                               const CheckpointIndex* index,
                                               Result<MeetingPart> prepared,
                                               const LoadOptions& options,
                                               const std::function<Status()>& validate,
                                               MeetingResult& met) {
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string told,
      collective.Decide(
          prepared.ok() ? EncodeCard(prepared.value()) : std::string(),
          "load: compare the calls of the ranks",
          [&](std::vector<std::string>& parts) { return DecideOpening(parts, options.path); },
          prepared.status()));
  const MeetingPart part = std::move(prepared).value();
  TENSORMOUNT_ASSIGN_OR_RETURN(Opening opening, ReadOpening(told, collective.size()));
  if (!opening.same_call) {
    return collective
        .Decide(part.call_text, "load: compare the options of the ranks",
                [](std::vector<std::string>& calls) -> Result<std::string> {
                  return NameDifferentCall(calls);
                })
        .status();
  }
  met.plan_reused = opening.agreed.unchanged;
  met.on_devices = opening.on_devices;
  if (opening.agreed.unchanged) {
    if (part.kept_plan != nullptr && part.kept_plan->job == opening.agreed.job)
      return part.kept_plan;
    return Status(Code::kInternal, "internal error: load: the kept plan belongs to another job");
  }

  if (options.validate) TENSORMOUNT_RETURN_IF_ERROR(validate());
  auto agreed = std::make_shared<AgreedPlan>();
  agreed->mine = part.mine;
  agreed->job = opening.agreed.job;
  agreed->resolved = part.resolved;
  agreed->needs = part.needs;
  agreed->ranks_here = opening.ranks_here;
  TENSORMOUNT_RETURN_IF_ERROR(MeetOnKeys(collective, *index, options, *agreed));
  // The encoded request of each rank; empty for a rank whose request another rank with an equal
  // request sends.
  std::vector<std::string> said;
  const int me = collective.rank();
  if (opening.whole) {
    const std::string_view mine =
        SendsForClass(opening.speakers, me) ? part.request : std::string_view();
    TENSORMOUNT_ASSIGN_OR_RETURN(
        said, collective.AllGather(mine, "load: share the requests of the ranks"));
  }
  const Status planned = Guarded([&]() -> Status {
    LoadPlanner planner(*index);
    if (opening.whole) {
      TENSORMOUNT_RETURN_IF_ERROR(
          AddAll(*index, options, part.resolved, me, opening.speakers, said, planner));
    } else {
      planner.Add(me, *part.resolved);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        agreed->plan, planner.Finish(collective.size(), opening.whole || collective.size() == 1,
                                     std::move(opening.groups), opening.scope, options));
    return {};
  });
  TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(planned, "load: plan the reads"));
  if (options.reuse_plan) {
    const auto kept = PlansOf(comm);
    kept->Forget([&](const AgreedPlan& plan) { return plan.mine == agreed->mine; });
    kept->Keep(agreed);
  }
  return std::shared_ptr<const AgreedPlan>(std::move(agreed));
}

}  // namespace tensormount
