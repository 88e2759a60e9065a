// SPDX-License-Identifier: Apache-2.0
#include "collective/load/meeting.h"

#include <algorithm>
#include <fstream>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "base/coding.h"
#include "collective/guarded.h"

namespace tensormount {
namespace {

// Plans of earlier loads, kept with the communicator of a rank.
struct KeptPlans {
  static constexpr std::size_t kMost = 4;
  std::mutex mutex;
  std::list<std::shared_ptr<const AgreedPlan>> plans;  // The last used one first.
};

std::shared_ptr<KeptPlans> PlansOf(Communicator& comm) {
  return std::static_pointer_cast<KeptPlans>(
      comm.Kept("load plans", [] { return std::make_shared<KeptPlans>(); }));
}

std::shared_ptr<const AgreedPlan> FindKept(Communicator& comm, const Hash128& mine) {
  const std::shared_ptr<KeptPlans> kept = PlansOf(comm);
  const std::lock_guard lock(kept->mutex);
  for (auto at = kept->plans.begin(); at != kept->plans.end(); ++at) {
    if ((*at)->mine != mine) continue;
    kept->plans.splice(kept->plans.begin(), kept->plans, at);
    return kept->plans.front();
  }
  return nullptr;
}

void Keep(Communicator& comm, std::shared_ptr<const AgreedPlan> plan) {
  const std::shared_ptr<KeptPlans> kept = PlansOf(comm);
  const std::lock_guard lock(kept->mutex);
  std::erase_if(kept->plans, [&](const auto& other) { return other->mine == plan->mine; });
  kept->plans.push_front(std::move(plan));
  if (kept->plans.size() > KeptPlans::kMost) kept->plans.pop_back();
}

// The first message.
constexpr std::size_t kCardBytes = 64;
constexpr std::uint32_t kNeedsProof = 1;
constexpr std::uint32_t kShortRuns = 2;
struct Card {
  Hash128 request;
  Hash128 call;
  Hash128 at_hand;
  std::uint64_t machine = 0;
  std::int32_t group = 0;
  std::uint32_t flags = 0;
};

std::string EncodeCard(const MeetingPart& part) {
  ByteWriter out;
  out.Hash(part.request_hash);
  out.Hash(part.call);
  out.Hash(part.at_hand == nullptr ? Hash128{} : part.at_hand->job);
  out.U64(part.machine);
  out.U32(static_cast<std::uint32_t>(part.group));
  out.U32((part.needs.proof ? kNeedsProof : 0) | (part.needs.short_runs ? kShortRuns : 0));
  return std::move(out.bytes());
}

Card DecodeCard(std::string_view bytes) {
  ByteReader in(bytes, "card");
  Card card;
  card.request = in.Hash();
  card.call = in.Hash();
  card.at_hand = in.Hash();
  card.machine = in.U64();
  card.group = static_cast<std::int32_t>(in.U32());
  card.flags = in.U32();
  return card;
}

// What rank 0 makes of the cards.
struct Opening {
  Hash128 job;
  bool unchanged = false;
  bool whole = false;  // Everybody needs everybody's request.
  bool several_machines = false;
  std::vector<std::uint32_t> speakers;  // By rank: the lowest one with the same request.
  std::vector<int> groups;              // By rank.
};

Result<std::string> DecideOpening(const std::vector<std::string>& parts, LoadPath path) {
  std::vector<Card> cards;
  ByteWriter all;
  for (const std::string& part : parts) {
    if (part.size() != kCardBytes) return Status(Code::kDataLoss, "load: a card is damaged");
    cards.push_back(DecodeCard(part));
  }
  bool several = false;
  std::uint32_t flags = 0;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const Card& card = cards[rank];
    if (card.call != cards[0].call) {
      return Status(Code::kInvalidArgument,
                    "rank " + std::to_string(rank) +
                        ": load was called with another path or other options than on rank 0");
    }
    several = several || card.machine != cards[0].machine;
    flags |= card.flags;
    all.Hash(card.request);
    all.U64(card.machine);
    all.U32(static_cast<std::uint32_t>(card.group));
  }
  all.Hash(cards[0].call);
  const Hash128 job = Xxh3(all.bytes());
  const bool unchanged =
      std::all_of(cards.begin(), cards.end(), [&](const Card& c) { return c.at_hand == job; });
  const bool whole = path == LoadPath::kExchange || (flags & kNeedsProof) != 0 ||
                     (several && (flags & kShortRuns) != 0);
  ByteWriter out;
  out.Hash(job);
  out.U8(unchanged ? 1 : 0);
  out.U8(whole ? 1 : 0);
  out.U8(several ? 1 : 0);
  if (whole && !unchanged) {
    std::map<Hash128, std::uint32_t> first;
    for (std::size_t rank = 0; rank < cards.size(); ++rank) {
      out.U32(first.emplace(cards[rank].request, static_cast<std::uint32_t>(rank)).first->second);
      out.U32(static_cast<std::uint32_t>(cards[rank].group));
    }
  }
  return std::move(out.bytes());
}

Result<Opening> ReadOpening(std::string_view bytes, int ranks) {
  ByteReader in(bytes, "load: what rank 0 decided");
  Opening opening;
  opening.job = in.Hash();
  opening.unchanged = in.U8() != 0;
  opening.whole = in.U8() != 0;
  opening.several_machines = in.U8() != 0;
  if (opening.whole && !opening.unchanged) {
    for (int r = 0; r < ranks; ++r) {
      opening.speakers.push_back(in.U32());
      opening.groups.push_back(static_cast<int>(in.U32()));
      if (opening.speakers.back() > static_cast<std::uint32_t>(r)) {
        return Status(Code::kDataLoss, "load: what rank 0 decided is damaged");
      }
    }
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
  constexpr std::size_t kMaxName = 4096;  // A key and an index.
  const std::uint32_t count = in.U32();
  for (std::uint32_t i = 0; i < count && in.status().ok(); ++i) {
    fn(std::string(in.String(kMaxName)));
  }
}

// What one rank says of keys: what is not stored of its request, and what it asks for of what is
// stored.
std::string EncodeKeys(const Resolved& mine, std::uint32_t tensors) {
  ByteWriter out;
  WriteNames(out, mine.not_stored);
  WriteNames(out, mine.asked_objects);
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
  std::set<std::string> asked_objects;
  std::vector<bool> asked(index.tensor_count(), false);
  const std::size_t bytes = (asked.size() + 7) / 8;
  for (const std::string& part : parts) {
    ByteReader in(part, "load: keys of a rank");
    ReadNames(in, [&](std::string name) { not_stored.insert(std::move(name)); });
    ReadNames(in, [&](std::string name) { asked_objects.insert(std::move(name)); });
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
        NotRequested(index, asked, {asked_objects.begin(), asked_objects.end()}, options));
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
      const std::string told, collective.Decide(EncodeKeys(*agreed.resolved, index.tensor_count()),
                                                "load: keys", [&](std::vector<std::string>& parts) {
                                                  return DecideKeys(index, parts, options);
                                                }));
  ByteReader in(told, "load: keys of all ranks");
  ReadNames(in, [&](std::string name) { agreed.not_stored.push_back(std::move(name)); });
  ReadNames(in, [&](std::string name) { agreed.not_requested.push_back(std::move(name)); });
  return in.Finish();
}

// Adds what every rank wants, as it said itself. What a rank asks for is kept only as long as a
// later one asks for the same.
Status AddAll(const CheckpointIndex& index, const LoadOptions& options,
              const std::shared_ptr<const Resolved>& mine, int me,
              const std::vector<std::uint32_t>& speakers, std::vector<std::string>& said,
              LoadPlanner& planner) {
  std::map<std::uint32_t, int> last;  // By speaker: the last rank that it speaks for.
  for (std::size_t r = 0; r < speakers.size(); ++r) last[speakers[r]] = static_cast<int>(r);
  std::map<std::uint32_t, std::shared_ptr<const Resolved>> kept;
  kept[speakers[static_cast<std::size_t>(me)]] = mine;
  for (int rank = 0; rank < static_cast<int>(speakers.size()); ++rank) {
    const std::uint32_t speaker = speakers[static_cast<std::size_t>(rank)];
    std::shared_ptr<const Resolved>& wanted = kept[speaker];
    if (wanted == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const LoadRequest request, DecodeRequest(said[speaker]));
      said[speaker] = {};
      TENSORMOUNT_ASSIGN_OR_RETURN(Resolved other,
                                   ResolveRequest(index, request, options, /*objects=*/false));
      TENSORMOUNT_RETURN_IF_ERROR(other.refusal);
      wanted = std::make_shared<const Resolved>(std::move(other));
    }
    planner.Add(rank, *wanted);
    if (last[speaker] == rank) kept.erase(speaker);
  }
  return {};
}

}  // namespace

std::uint64_t ThisMachine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return Xxh3(id).low;
}

Result<MeetingPart> PrepareMeeting(Communicator& comm, const CheckpointIndex& index,
                                   const StateDict& request, std::string_view path,
                                   const Hash128& identity, const LoadOptions& options) {
  MeetingPart part;
  TENSORMOUNT_ASSIGN_OR_RETURN(part.request, EncodeRequest(request));
  part.request_hash = Xxh3(part.request);
  part.machine = ThisMachine();
  part.group = options.exchange_group;
  ByteWriter call;
  call.Hash(CallFingerprint(path, options));
  call.Hash(identity);
  call.U32(static_cast<std::uint32_t>(comm.size()));
  part.call = Xxh3(call.bytes());
  ByteWriter mine;
  mine.Hash(part.request_hash);
  mine.Hash(part.call);
  mine.U64(part.machine);
  mine.U32(static_cast<std::uint32_t>(part.group));
  part.mine = Xxh3(mine.bytes());
  if (options.reuse_plan) part.at_hand = FindKept(comm, part.mine);
  if (part.at_hand != nullptr) {
    part.resolved = part.at_hand->resolved;
    part.needs = part.at_hand->needs;
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(const LoadRequest decoded, DecodeRequest(part.request));
    TENSORMOUNT_ASSIGN_OR_RETURN(Resolved resolved,
                                 ResolveRequest(index, decoded, options, /*objects=*/true));
    TENSORMOUNT_RETURN_IF_ERROR(resolved.refusal);
    part.resolved = std::make_shared<const Resolved>(std::move(resolved));
    TENSORMOUNT_ASSIGN_OR_RETURN(part.needs, FindNeeds(index, *part.resolved, options));
  }
  return part;
}

Result<std::shared_ptr<const AgreedPlan>> Meet(Communicator& comm, Collective& collective,
                                               const CheckpointIndex& index, MeetingPart part,
                                               const LoadOptions& options,
                                               const std::function<Status()>& validate,
                                               bool* reused) {
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string told,
      collective.Decide(EncodeCard(part), "load: meet", [&](std::vector<std::string>& parts) {
        return DecideOpening(parts, options.path);
      }));
  TENSORMOUNT_ASSIGN_OR_RETURN(Opening opening, ReadOpening(told, collective.size()));
  *reused = opening.unchanged;
  if (opening.unchanged) return part.at_hand;

  if (options.validate) TENSORMOUNT_RETURN_IF_ERROR(validate());
  auto agreed = std::make_shared<AgreedPlan>();
  agreed->mine = part.mine;
  agreed->job = opening.job;
  agreed->resolved = part.resolved;
  agreed->needs = part.needs;
  TENSORMOUNT_RETURN_IF_ERROR(MeetOnKeys(collective, index, options, *agreed));
  std::vector<std::string> said;  // By rank: its request, where it speaks.
  const int me = collective.rank();
  if (opening.whole) {
    const bool speaks = opening.speakers[static_cast<std::size_t>(me)] == static_cast<unsigned>(me);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        said, collective.AllGather(speaks ? std::string_view(part.request) : std::string_view(),
                                   "load: requests"));
  }
  const Status planned = Guarded([&]() -> Status {
    LoadPlanner planner(index);
    if (opening.whole) {
      TENSORMOUNT_RETURN_IF_ERROR(
          AddAll(index, options, part.resolved, me, opening.speakers, said, planner));
    } else {
      planner.Add(me, *part.resolved);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        agreed->plan, planner.Finish(collective.size(), opening.whole || collective.size() == 1,
                                     std::move(opening.groups), opening.several_machines, options));
    return {};
  });
  TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(planned, "load: plan"));
  if (options.reuse_plan) Keep(comm, agreed);
  return std::shared_ptr<const AgreedPlan>(std::move(agreed));
}

}  // namespace tensormount
