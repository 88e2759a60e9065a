// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_AGREEMENT_H_
#define TENSORMOUNT_COLLECTIVE_COMM_AGREEMENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "base/coding.h"
#include "base/hash.h"

// What the ranks of a job, a save or a load, agree on before they begin. Each says in 64 bytes what
// it brings and the plan of which job it has kept; rank 0 answers with an Agreement. Where every
// rank has the plan of this very job, nobody says more. Else one rank of each set that brings the
// same speaks for all of them: of 4,096 ranks that hold replicas of 64 layouts, 64 speak.

//
//   rank r                          rank 0
//   hashes, kept plan  -- 64 B -->  AgreementMaker::Add in the order of the ranks
//                      <- answer -  WriteAgreement, and WriteClasses where not `unchanged`
//   the whole of it    ----------   only where Speaks(classes, r), and to whom it concerns
//
// Saves use it for layouts (layout/layout_round.h), loads for requests (load/meeting.h). Both keep
// their plans in KeptPlans, so that a second job of the same kind costs the first two lines.

namespace tensormount {

// class_of[rank] is the lowest rank that brings the same, which speaks for all of its class.
// Worked example: ranks 0 to 3 bring A, B, A, B. The classes are {0, 1, 0, 1}: ranks 0 and 1
// speak, RanksByClass gives {{0, 2}, {1, 3}, {}, {}}.
using RankClasses = std::vector<std::uint32_t>;
// of(rank) is a hash of what it brings. 128 bits: that two that differ have the same one is not
// reckoned with, and nobody but the ranks of the job chooses what is hashed. O(ranks log classes).
template <typename Of>
RankClasses ClassesOf(std::size_t ranks, Of of) {
  std::map<Hash128, std::uint32_t> first;
  RankClasses class_of(ranks);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    class_of[r] = first.try_emplace(of(r), r).first->second;
  }
  return class_of;
}
// The ranks of each class, rising, at the position of its lowest rank; empty elsewhere.
std::vector<std::vector<int>> RanksByClass(const RankClasses& class_of);
// Whether `rank` speaks. False for all where nothing is to be said, which no classes mean.
bool Speaks(const RankClasses& class_of, int rank);

// u32 number of classes, then a u32 each. 0 or as many as ranks.
void WriteClasses(ByteWriter& out, const RankClasses& class_of);
// kDataLoss where they are not what ClassesOf gives.
Status ReadClasses(ByteReader& in, std::uint32_t world, RankClasses& class_of);

// A hash in place of the layouts: equal jobs are recognised by what the ranks bring, never by a
// counter, so a rank that restarted or forgot its plan is noticed (it has nothing kept).
struct Agreement {
  Hash128 job;             // Of what all ranks bring: equal for equal jobs of one communicator.
  bool unchanged = false;  // Every rank has kept the plan of this job.
};
// Makes one on rank 0, of what the ranks say in their order.
class AgreementMaker {
 public:
  // `domain` ends in a NUL: jobs of different kinds are never equal.
  explicit AgreementMaker(std::string_view domain) { all_.Update(domain.data(), domain.size()); }
  // `brought`: hashes of all that the rank's part of the plan depends on. `kept`: the low half of
  // the job whose plan it has; 0: none.
  void Add(std::span<const std::uint64_t> brought, std::uint64_t kept);
  Agreement Finish();

 private:
  void Flush();

  Xxh3Stream all_;
  // Not hashed yet: a few words at a time cost the stream more than they cost by hundreds.
  std::array<std::uint64_t, 512> pending_;
  std::size_t used_ = 0;
  std::size_t ranks_ = 0;
  std::uint64_t kept_ = 0;  // By all ranks so far; 0: not all have the same.
};

void WriteAgreement(ByteWriter& out, const Agreement& agreement);
Agreement ReadAgreement(ByteReader& in);

// The plans of the last jobs of a communicator's ranks, this rank's part of them. How many there
// may be is bounded, how large one is is not: a plan weighs about what its layout does. `Plan` is
// immutable; whoever uses one shares it. Thread-safe.
// Kept with the communicator because a plan is of its group: another group has other ranks. Find
// is linear, over the few plans that are kept.
template <typename Plan>
class KeptPlans {
 public:
  explicit KeptPlans(std::size_t most) : most_(most) {}

  // Those of `comm` under this name, whatever its channel: saves in the background take turns on
  // two, and the second save of a layout should find the plan of the first. Made at the first call.
  static std::shared_ptr<KeptPlans> Of(Communicator& comm, const std::string& name,
                                       std::size_t most) {
    return std::static_pointer_cast<KeptPlans>(
        comm.KeptByRanks(name, [most] { return std::make_shared<KeptPlans>(most); }));
  }

  // The last used one with fits(plan); null: none.
  template <typename Fits>
  std::shared_ptr<const Plan> Find(Fits fits) {
    const std::lock_guard lock(mutex_);
    for (auto at = plans_.begin(); at != plans_.end(); ++at) {
      if (!fits(**at)) continue;
      plans_.splice(plans_.begin(), plans_, at);
      return plans_.front();
    }
    return nullptr;
  }
  template <typename Fits>
  void Forget(Fits fits) {
    const std::lock_guard lock(mutex_);
    plans_.remove_if([&](const auto& plan) { return fits(*plan); });
  }
  // In the place of the one that was not used for longest, where there are `most`.
  void Keep(std::shared_ptr<const Plan> plan) {
    const std::lock_guard lock(mutex_);
    plans_.push_front(std::move(plan));
    if (plans_.size() > most_) plans_.pop_back();
  }

 private:
  const std::size_t most_;
  std::mutex mutex_;
  std::list<std::shared_ptr<const Plan>> plans_;  // The last used one first.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_AGREEMENT_H_
