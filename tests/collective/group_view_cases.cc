// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/group_view_cases.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/comm/collective.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/communicator_conformance.h"

namespace tensormount {
namespace {

Status Expect(bool condition, const char* what) {
  return condition ? Status() : Status(Code::kInternal, what);
}

}  // namespace

Status ExerciseChannels(Communicator& comm) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto one, MakeChannel(comm, 1));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto last, MakeChannel(comm, Communicator::kChannels - 1));
  TENSORMOUNT_RETURN_IF_ERROR(Conform(*one, /*cancels=*/false));
  // They start at different times on different ranks.
  Status on_one;
  Status on_last;
  std::thread first([&] { on_one = ExerciseCollective(*one); });
  std::thread second([&] { on_last = ExerciseCollective(*last); });
  const Status on_comm = ExerciseCollective(comm);
  first.join();
  second.join();
  TENSORMOUNT_RETURN_IF_ERROR(on_one.WithContext("channel 1"));
  TENSORMOUNT_RETURN_IF_ERROR(on_last.WithContext("last channel"));
  return on_comm.WithContext("the group itself");
}

Status ExerciseSubgroups(Communicator& comm) {
  std::vector<int> ranks;
  for (int r = comm.size() - 1; r >= 0; --r) {
    if (r % 2 == comm.rank() % 2) ranks.push_back(r);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto half, MakeSubgroup(comm, ranks, 1));
  TENSORMOUNT_RETURN_IF_ERROR(Expect(half->size() == static_cast<int>(ranks.size()), "size"));
  TENSORMOUNT_RETURN_IF_ERROR(
      Expect(ranks[static_cast<std::size_t>(half->rank())] == comm.rank(), "rank"));
  TENSORMOUNT_RETURN_IF_ERROR(Conform(*half, /*cancels=*/false));
  // The group, its half, a channel of the half and the half turned round, all at once.
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto channel, MakeChannel(*half, 1));
  std::vector<int> turned;
  for (int r = half->size() - 1; r >= 0; --r) turned.push_back(r);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto again, MakeSubgroup(*half, turned, 2));
  TENSORMOUNT_RETURN_IF_ERROR(
      Expect(again->rank() == half->size() - 1 - half->rank(), "rank in the turned half"));
  const std::vector<Communicator*> all = {&comm, half.get(), channel.get(), again.get()};
  std::vector<Status> results(all.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = ExerciseCollective(*all[i]); });
  }
  for (std::thread& t : threads) t.join();
  for (std::size_t i = 0; i < all.size(); ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(results[i].WithContext("group " + std::to_string(i)));
  }
  // Ranks are named as the subgroup counts them.
  Collective c(*half, kPatient);
  const Status odd =
      c.Agree(half->rank() == half->size() - 1 ? Status(Code::kBusy, "no") : Status(),
              "the last one refuses");
  return Expect(odd.message() == "rank " + std::to_string(half->size() - 1) + ": no", "name");
}

}  // namespace tensormount
