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

// The agreement of the ranks before a save or a load begins. Each rank sends 64 bytes: hashes of
// its input, and the job whose plan it has kept. Rank 0 answers with an Agreement. If every rank
// has kept the plan of this job, inputs are not sent. If not, one rank of each set of ranks with
// equal inputs sends its input: of 4,096 ranks that hold replicas of 64 layouts, 64 send.
//
//   rank r                          rank 0
//   hashes, kept plan  -- 64 B -->  AgreementMaker::Add in the order of the ranks
//                      <- answer -  WriteAgreement, and WriteClasses unless `unchanged`
//   the input itself   ----------   if SendsForClass(classes, r), to the ranks that need it
//
// Saves use this exchange for layouts (layout/layout_round.h), loads for requests (load/meeting.h).
// Both keep their plans in KeptPlans, so that a later job with equal inputs costs only the first
// two lines of this diagram.

namespace tensormount {

// Classes of ranks with equal inputs: class_of[rank] is the lowest rank with the same input, which
// sends for the whole class. Example: ranks 0 to 3 have the inputs A, B, A, B. The classes are {0,
// 1, 0, 1}: ranks 0 and 1 send, and RanksByClass gives {{0, 2}, {1, 3}, {}, {}}.
using RankClasses = std::vector<std::uint32_t>;
// Finds the classes. of(rank) is a 128-bit hash of the rank's input; accidental collisions are
// ignored. O(ranks log classes).
template <typename Of>
RankClasses ClassesOf(std::size_t ranks, Of of) {
  std::map<Hash128, std::uint32_t> first;
  RankClasses class_of(ranks);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    class_of[r] = first.try_emplace(of(r), r).first->second;
  }
  return class_of;
}
// The ranks of each class, rising, at the position of the lowest rank of the class; other positions
// are empty.
std::vector<std::vector<int>> RanksByClass(const RankClasses& class_of);
// Whether `rank` sends for its class. False for all ranks if `class_of` is empty: nothing is to be
// sent.
bool SendsForClass(const RankClasses& class_of, int rank);

// Appends classes to a message: u32 number of ranks, or 0 if `class_of` is empty, then a u32 for
// each rank.
void WriteClasses(ByteWriter& out, const RankClasses& class_of);
// Reads what WriteClasses wrote. Fails with kDataLoss if the numbers cannot be a result of
// ClassesOf.
Status ReadClasses(ByteReader& in, std::uint32_t world, RankClasses& class_of);

// Equal jobs are recognized by a hash of the ranks' inputs, never by a counter, so a rank that
// restarted or forgot its plan is noticed.
struct Agreement {
  Hash128 job;             // Hash of all inputs: equal for equal jobs of a communicator.
  bool unchanged = false;  // Whether every rank has kept the plan of this job.
};
// Makes an Agreement on rank 0 from the ranks' messages, added in the order of ranks.
class AgreementMaker {
 public:
  // `domain` ends in a NUL, so that jobs of different kinds never hash the same.
  explicit AgreementMaker(std::string_view domain) { all_.Update(domain.data(), domain.size()); }
  // `brought`: hashes of everything that the rank's part of the plan depends on. `kept`: the low
  // half of the hash of the job whose plan the rank has; 0: none.
  void Add(std::span<const std::uint64_t> brought, std::uint64_t kept);
  Agreement Finish();

 private:
  void Flush();

  Xxh3Stream all_;
  // Words that are not hashed yet: the stream hashes hundreds of words at a time faster than a few.
  std::array<std::uint64_t, 512> pending_;
  std::size_t used_ = 0;
  std::size_t ranks_ = 0;
  std::uint64_t kept_ = 0;  // The job whose plan all ranks so far have; 0: none.
};

void WriteAgreement(ByteWriter& out, const Agreement& agreement);
Agreement ReadAgreement(ByteReader& in);

// This rank's part of the plans of the last jobs. Kept with the communicator, because a plan is
// valid only for its group. The number of plans is bounded, their size is not: a plan is about as
// large as its layout. `Plan` is immutable and shared by its users. Thread-safe. Find is linear.
template <typename Plan>
class KeptPlans {
 public:
  explicit KeptPlans(std::size_t most) : most_(most) {}

  // The plans of `comm` under this name, made at the first call and shared by all channels: saves
  // in the background alternate between two channels, and the second save of a layout should find
  // the plan of the first.
  static std::shared_ptr<KeptPlans> Of(Communicator& comm, const std::string& name,
                                       std::size_t most) {
    return std::static_pointer_cast<KeptPlans>(
        comm.KeptByRanks(name, [most] { return std::make_shared<KeptPlans>(most); }));
  }

  // Returns the most recently used plan with fits(plan), or null.
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
  // Replaces the least recently used plan if there are `most`.
  void Keep(std::shared_ptr<const Plan> plan) {
    const std::lock_guard lock(mutex_);
    plans_.push_front(std::move(plan));
    if (plans_.size() > most_) plans_.pop_back();
  }

 private:
  const std::size_t most_;
  std::mutex mutex_;
  std::list<std::shared_ptr<const Plan>> plans_;  // Most recently used first.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_AGREEMENT_H_
