// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/bulk_transport_conformance.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <utility>

#include "collective/comm/collective.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/conform.h"
#include "tests/support/random.h"

// A failure with this code that says `words`.
#define CONFORM_FAILED(status, expected, words)                                               \
  do {                                                                                        \
    const Status& conform_status = (status);                                                  \
    if (conform_status.code() != (expected) ||                                                \
        conform_status.message().find(words) == std::string::npos) {                          \
      return Status(Code::kInternal, std::string(__FILE__) + ":" + std::to_string(__LINE__) + \
                                         ": not \"" + (words) +                               \
                                         "\": " + conform_status.ToString());                 \
    }                                                                                         \
  } while (false)

namespace tensormount {
namespace {

using Transport = std::unique_ptr<BulkTransport>;

// Nothing that a loaded machine does may reach it.
Deadline BulkPatience() { return Deadline::After(std::chrono::seconds(60)); }
// Of what is to fail by its deadline.
Deadline BulkSoon() { return Deadline::After(std::chrono::milliseconds(50)); }

std::byte BulkByte(std::uint64_t seed, std::size_t unit, std::uint64_t at) {
  return static_cast<std::byte>((seed + unit * 131 + at * 7 + (at >> 8)) & 0xff);
}

// Where the units of one rank lie, with gaps that nobody may touch: what it sends, what it
// receives.
class BulkArena {
 public:
  static constexpr std::byte kGap{0xa5};
  static constexpr std::size_t kGapBytes = 3;

  BulkArena(const std::vector<BulkUnit>& plan, int rank, std::uint64_t seed) : plan_(plan) {
    std::size_t size = kGapBytes;
    for (std::size_t u = 0; u < plan.size(); ++u) {
      for (const bool sends : {true, false}) {
        if ((sends ? plan[u].from : plan[u].to) != rank) continue;
        (sends ? out_ : in_)[u] = size;
        size += plan[u].bytes + kGapBytes;
      }
    }
    bytes_.assign(size, kGap);
    for (const auto& [unit, at] : out_) {
      for (std::uint64_t i = 0; i < plan[unit].bytes; ++i) {
        bytes_[at + i] = BulkByte(seed, unit, i);
      }
    }
    expected_ = bytes_;
    for (const auto& [unit, at] : in_) {
      for (std::uint64_t i = 0; i < plan[unit].bytes; ++i) {
        expected_[at + i] = BulkByte(seed, unit, i);
      }
    }
  }

  Status RegisterAt(BulkTransport& transport, const Device& device) {
    return transport.Register({bytes_.data(), bytes_.size(), device});
  }
  Status UnregisterAt(BulkTransport& transport) { return transport.Unregister(bytes_.data()); }

  std::vector<BulkBlock> Blocks() {
    std::vector<BulkBlock> blocks;
    for (const auto& [unit, at] : out_) {
      if (plan_[unit].from != plan_[unit].to) blocks.push_back({unit, bytes_.data() + at, nullptr});
    }
    for (const auto& [unit, at] : in_) {
      const auto self = out_.find(unit);
      blocks.push_back(
          {unit, self == out_.end() ? nullptr : bytes_.data() + self->second, bytes_.data() + at});
    }
    return blocks;
  }
  std::byte* TargetOf(std::size_t unit) { return bytes_.data() + in_.at(unit); }
  bool IsThere(std::size_t unit) const {
    const auto at = static_cast<std::ptrdiff_t>(in_.at(unit));
    const auto size = static_cast<std::ptrdiff_t>(plan_[unit].bytes);
    return std::equal(bytes_.begin() + at, bytes_.begin() + at + size, expected_.begin() + at);
  }
  bool AsExpected() const { return bytes_ == expected_; }
  bool Receives(std::size_t unit) const { return in_.contains(unit); }

 private:
  const std::vector<BulkUnit> plan_;
  std::map<std::size_t, std::size_t> out_;  // By unit: where it lies.
  std::map<std::size_t, std::size_t> in_;
  std::vector<std::byte> bytes_;
  std::vector<std::byte> expected_;
};

std::vector<BulkUnit> RandomBulkPlan(Random& random, int ranks) {
  std::vector<BulkUnit> plan(static_cast<std::size_t>(random.Int(0, 60)));
  for (BulkUnit& unit : plan) {
    unit.from = static_cast<int>(random.Int(0, ranks - 1));
    unit.to = static_cast<int>(random.Int(0, ranks - 1));
    unit.bytes = static_cast<std::uint64_t>(random.OneIn(5)    ? 0
                                            : random.OneIn(12) ? random.Int(100'000, 600'000)
                                                               : random.Int(1, 9000));
  }
  return plan;
}

// One exchange, with blocks in any order and in several calls.
Status RunBulkPlan(BulkRank& rank, BulkTransport& transport, const std::vector<BulkUnit>& plan,
                   std::uint64_t seed, Random& order) {
  BulkArena arena(plan, rank.comm.rank(), seed);
  TENSORMOUNT_RETURN_IF_ERROR(arena.RegisterAt(transport, rank.device));
  TENSORMOUNT_RETURN_IF_ERROR(transport.Begin(plan));
  std::vector<BulkBlock> blocks = arena.Blocks();
  order.Shuffle(blocks);
  for (std::size_t i = 0; i < blocks.size();) {
    const auto n = static_cast<std::size_t>(order.Int(1, std::ssize(blocks)));
    const std::size_t end = std::min(blocks.size(), i + n);
    TENSORMOUNT_RETURN_IF_ERROR(
        transport.Put(std::span<const BulkBlock>(blocks).subspan(i, end - i)));
    i = end;
    if (order.OneIn(3)) std::this_thread::sleep_for(std::chrono::microseconds(order.Int(0, 300)));
  }
  bool early = true;
  for (std::size_t u = 0; u < plan.size(); ++u) {
    if (arena.Receives(u) && transport.Done(u)) early = early && arena.IsThere(u);
  }
  CONFORM(early);  // Done was said of what was not there.
  TENSORMOUNT_RETURN_IF_ERROR(transport.Wait(BulkPatience()));
  CONFORM(arena.AsExpected());
  for (std::size_t u = 0; u < plan.size(); ++u) {
    const bool mine = plan[u].from == rank.comm.rank() || plan[u].to == rank.comm.rank();
    CONFORM(transport.Done(u) == mine);
  }
  const Result<bool> still = transport.Poll();
  TENSORMOUNT_RETURN_IF_ERROR(still.status());
  CONFORM(still.value());
  return arena.UnregisterAt(transport);
}

Status BulkRandomPlansArrive(BulkRank& rank) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
  Random shared(rank.seed);
  Random order(rank.seed * 31 + static_cast<std::uint64_t>(rank.comm.rank()));
  for (int i = 0; i < rank.plans; ++i) {
    const std::vector<BulkUnit> plan = RandomBulkPlan(shared, rank.comm.size());
    const std::uint64_t seed = shared.Next();
    TENSORMOUNT_RETURN_IF_ERROR(
        RunBulkPlan(rank, *transport, plan, seed, order)
            .WithContext("seed " + std::to_string(rank.seed) + ", plan " + std::to_string(i)));
    if (shared.OneIn(2)) TENSORMOUNT_RETURN_IF_ERROR(transport->Release(BulkPatience()));
  }
  return {};
}

// The same pairs again and again, and every unit of another size.
Status BulkManySmallUnitsArrive(BulkRank& rank) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
  std::vector<BulkUnit> plan(rank.many);
  Random random(rank.seed);
  for (BulkUnit& unit : plan) {
    unit.from = static_cast<int>(random.Int(0, rank.comm.size() - 1));
    unit.to = static_cast<int>(random.Int(0, rank.comm.size() - 1));
    unit.bytes = static_cast<std::uint64_t>(random.Int(0, 24));
  }
  Random order(rank.seed + static_cast<std::uint64_t>(rank.comm.rank()));
  return RunBulkPlan(rank, *transport, plan, rank.seed, order);
}

Status BulkEmptyPlansEnd(BulkRank& rank) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
  TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(BulkPatience()));  // Nothing was begun.
  TENSORMOUNT_RETURN_IF_ERROR(transport->Release(BulkPatience()));
  TENSORMOUNT_RETURN_IF_ERROR(transport->Begin({}));
  TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(BulkPatience()));
  const int last = rank.comm.size() - 1;
  TENSORMOUNT_RETURN_IF_ERROR(transport->Begin({{0, last, 0}, {last, last, 0}}));
  CONFORM(transport->Done(1) == (rank.comm.rank() == last));
  TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(BulkPatience()));
  return transport->Settle(BulkPatience());
}

// What cannot be is refused, and changes nothing.
Status BulkWrongCallsAreRefused(BulkRank& rank) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
  const int me = rank.comm.rank();
  std::vector<std::byte> memory(64);
  std::byte* const data = memory.data();
  TENSORMOUNT_RETURN_IF_ERROR(transport->Register({data + 8, 48, rank.device}));
  CONFORM(transport->Register({data, 9, rank.device}).code() == Code::kAlreadyExists);
  CONFORM(transport->Register({data + 55, 1, rank.device}).code() == Code::kAlreadyExists);
  CONFORM(transport->Register({data + 20, 1, rank.device}).code() == Code::kAlreadyExists);
  CONFORM(transport->Register({nullptr, 1, rank.device}).code() == Code::kInvalidArgument);
  CONFORM(transport->Register({data, ~std::uint64_t{0}, rank.device}).code() ==
          Code::kInvalidArgument);
  CONFORM(transport->Unregister(data).code() == Code::kInvalidArgument);

  CONFORM(transport->Begin({{0, rank.comm.size(), 1}}).code() == Code::kInvalidArgument);
  CONFORM(transport->Begin({{-1, 0, 1}}).code() == Code::kInvalidArgument);
  // A unit of each rank to itself, and one that is larger than all memory, of nobody's blocks.
  std::vector<BulkUnit> plan;
  for (int r = 0; r < rank.comm.size(); ++r) plan.push_back({r, r, 16});
  TENSORMOUNT_RETURN_IF_ERROR(transport->Begin(plan));
  CONFORM(transport->Begin(plan).code() == Code::kBusy);
  CONFORM(transport->Release(BulkPatience()).code() == Code::kBusy);
  CONFORM(transport->Unregister(data + 8).code() == Code::kBusy);
  const auto unit = static_cast<std::uint64_t>(me);
  CONFORM_FAILED(transport->Wait(BulkPatience()), Code::kInvalidArgument,
                 "not put unit " + std::to_string(me) + " (16 bytes)");
  const auto put = [&](std::uint64_t u, const std::byte* from, std::byte* to) {
    const BulkBlock block{u, from, to};
    return transport->Put({&block, 1}).code();
  };
  CONFORM(put(plan.size(), data + 8, data + 8) == Code::kInvalidArgument);
  CONFORM(put(unit, data, data + 8) == Code::kInvalidArgument);
  CONFORM(put(unit, data + 8, data + 41) == Code::kInvalidArgument);
  CONFORM(put(unit, nullptr, data + 8) == Code::kInvalidArgument);
  if (rank.comm.size() > 1)
    CONFORM(put((unit + 1) % plan.size(), data + 8, data + 8) == Code::kInvalidArgument);
  // The second is wrong, so the first is not put either.
  const BulkBlock twice[2] = {{unit, data + 8, data + 40}, {unit, data + 8, data + 40}};
  CONFORM(transport->Put(twice).code() == Code::kInvalidArgument);
  std::memset(data + 8, 0x33, 16);
  CONFORM(put(unit, data + 8, data + 40) == Code::kOk);
  CONFORM(put(unit, data + 8, data + 40) == Code::kInvalidArgument);
  TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(BulkPatience()));
  CONFORM(std::memcmp(data + 8, data + 40, 16) == 0);
  TENSORMOUNT_RETURN_IF_ERROR(Collective(rank.comm, kPatient).Agree({}, "exchanged"));
  // Sizes that only wrap around are not in the range.
  TENSORMOUNT_RETURN_IF_ERROR(transport->Begin({{0, 0, ~std::uint64_t{0} - 3}}));
  if (me == 0) {
    CONFORM(put(0, data + 8, data + 8) == Code::kInvalidArgument);
    CONFORM(put(0, data + 40, data + 40) == Code::kInvalidArgument);
    transport->Abort(Status(Code::kCancelled, "too large"));
  }
  return {};
}

// Until it fails, and what it failed with.
Status AwaitBulkFailure(BulkTransport& transport, Status& why) {
  const Deadline deadline = BulkPatience();
  while (!deadline.Passed()) {
    const Result<bool> done = transport.Poll();
    if (!done.ok()) {
      CONFORM(transport.Wait(BulkSoon()).message() == done.status().message());
      CONFORM(transport.Begin({}).message() == done.status().message());
      CONFORM(transport.Release(BulkSoon()).message() == done.status().message());
      TENSORMOUNT_RETURN_IF_ERROR(transport.Settle(BulkPatience()));
      why = done.status();
      return {};
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return Status(Code::kInternal, "a rank was not told of the failure of another one");
}

// A ring, and a unit between two ranks of which one side never comes. The blocks of this rank.
struct BulkHang {
  int waits = 0;
  int hangs = 0;  // Does not put unit 0.
  bool sends = true;
};

Status BulkHungUnitEndsAtTheDeadline(BulkRank& rank) {
  const int me = rank.comm.rank();
  const int last = rank.comm.size() - 1;
  for (const BulkHang& hang : {BulkHang{0, last, true}, BulkHang{last, 0, false}}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
    std::vector<BulkUnit> plan = {{hang.hangs, hang.waits, 70'000}};
    if (!hang.sends) std::swap(plan[0].from, plan[0].to);
    for (int r = 0; r <= last; ++r) plan.push_back({r, (r + 1) % (last + 1), 5000});
    BulkArena arena(plan, me, rank.seed);
    TENSORMOUNT_RETURN_IF_ERROR(arena.RegisterAt(*transport, rank.device));
    TENSORMOUNT_RETURN_IF_ERROR(transport->Begin(plan));
    for (const BulkBlock& block : arena.Blocks()) {
      if (me == hang.hangs && block.unit == 0) continue;
      // What the ranks that hang and wait do may reach this one already.
      const Status put = transport->Put({&block, 1});
      if (!put.ok() && put.code() != Code::kDeadlineExceeded) return put;
    }
    if (me == hang.waits) {
      const Deadline deadline = BulkSoon();
      const Status late = transport->Wait(deadline);
      CONFORM(deadline.Passed());
      CONFORM(Deadline::Clock::now() - deadline.time() < kMargin);
      CONFORM_FAILED(late, Code::kDeadlineExceeded, "unit 0 (70000 bytes)");
      CONFORM_FAILED(late, Code::kDeadlineExceeded, "rank " + std::to_string(hang.hangs));
      CONFORM(!rank.names_one || late.fields().rank == hang.hangs);
    }
    Status told;
    TENSORMOUNT_RETURN_IF_ERROR(AwaitBulkFailure(*transport, told));
    CONFORM_FAILED(told, Code::kDeadlineExceeded, "unit 0 (70000 bytes)");
    CONFORM(!rank.names_one || told.fields().rank == hang.hangs);
    const std::string who = "rank " + std::to_string(hang.waits) + ": ";
    CONFORM((told.message().rfind(who, 0) == 0) == (me != hang.waits));
  }
  return {};
}

Status BulkRankThatVanishesIsNamed(BulkRank& rank) {
  for (const int victim : {rank.comm.size() - 1, 0}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(Transport transport, rank.make());
    const int me = rank.comm.rank();
    std::vector<BulkUnit> plan;
    for (int r = 0; r < rank.comm.size(); ++r) {
      plan.push_back({r, (r + 1) % rank.comm.size(), 100'000});
    }
    BulkArena arena(plan, me, rank.seed);
    TENSORMOUNT_RETURN_IF_ERROR(arena.RegisterAt(*transport, rank.device));
    TENSORMOUNT_RETURN_IF_ERROR(transport->Begin(plan));
    if (me == victim) {
      transport.reset();
    } else {
      (void)transport->Put(arena.Blocks());  // May know already.
      Status gone;
      TENSORMOUNT_RETURN_IF_ERROR(AwaitBulkFailure(*transport, gone));
      CONFORM_FAILED(gone, Code::kUnavailable, "rank " + std::to_string(victim) + " is gone");
      CONFORM(gone.fields().rank == victim);
    }
    // Who has heard of it must not leave before the others have: they would hear of that.
    TENSORMOUNT_RETURN_IF_ERROR(Collective(rank.comm, kPatient).Agree({}, "vanished"));
  }
  return {};
}

// Whoever has what it wanted may go; who needs it later is told that it went.
Status BulkRanksMayLeaveEarly(BulkRank& rank) {
  const int me = rank.comm.rank();
  TENSORMOUNT_ASSIGN_OR_RETURN(Transport transport, rank.make());
  const std::vector<BulkUnit> plan = {{0, 1, 200'000}};
  BulkArena arena(plan, me, rank.seed);
  TENSORMOUNT_RETURN_IF_ERROR(arena.RegisterAt(*transport, rank.device));
  TENSORMOUNT_RETURN_IF_ERROR(transport->Begin(plan));
  if (me > 1) {
    TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(BulkPatience()));
    transport.reset();
  }
  TENSORMOUNT_RETURN_IF_ERROR(Collective(rank.comm, kPatient).Agree({}, "left"));
  if (transport != nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR(transport->Put(arena.Blocks()));
    TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(BulkPatience()));
    CONFORM(arena.AsExpected());
  }
  const int last = rank.comm.size() - 1;
  if (me == last) transport.reset();
  TENSORMOUNT_RETURN_IF_ERROR(Collective(rank.comm, kPatient).Agree({}, "exchanged"));
  if (transport == nullptr) return {};
  (void)transport->Begin({{0, last, 1}});  // Rank 1 may have been told.
  Status gone;
  TENSORMOUNT_RETURN_IF_ERROR(AwaitBulkFailure(*transport, gone));
  CONFORM_FAILED(gone, Code::kUnavailable, "rank " + std::to_string(last) + " is gone");
  return {};
}

// From another thread, while ranks wait for what does not come.
Status BulkAbortReachesAll(BulkRank& rank) {
  for (const int aborts : {0, rank.comm.size() - 1}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
    const int me = rank.comm.rank();
    const int last = rank.comm.size() - 1;
    const std::vector<BulkUnit> plan = {{0, last, 80'000}, {last, 0, 1000}};
    BulkArena arena(plan, me, rank.seed);
    TENSORMOUNT_RETURN_IF_ERROR(arena.RegisterAt(*transport, rank.device));
    TENSORMOUNT_RETURN_IF_ERROR(transport->Begin(plan));
    const bool waits = me == aborts && last > 0;
    if (waits) TENSORMOUNT_RETURN_IF_ERROR(transport->Put(arena.Blocks()));
    std::thread other;
    if (me == aborts) {
      other = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        transport->Abort(Status(Code::kBusy, "shard 7 is being written"));
        transport->Abort(Status(Code::kInternal, "the second"));
      });
    }
    const Status waited = waits ? transport->Wait(BulkPatience()) : Status();
    Status told;
    const Status awaited = AwaitBulkFailure(*transport, told);
    if (other.joinable()) other.join();
    TENSORMOUNT_RETURN_IF_ERROR(awaited);
    if (waits) CONFORM_FAILED(waited, Code::kBusy, "shard 7 is being written");
    CONFORM_FAILED(told, Code::kBusy, "shard 7 is being written");
  }
  return {};
}

Status BulkDifferentPlansAreFoundOut(BulkRank& rank) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
  const int last = rank.comm.size() - 1;
  const std::uint64_t size = rank.comm.rank() == last ? 2000 : 3000;
  const std::vector<BulkUnit> plan = {{0, 0, 10}, {0, last, size}};
  BulkArena arena(plan, rank.comm.rank(), rank.seed);
  TENSORMOUNT_RETURN_IF_ERROR(arena.RegisterAt(*transport, rank.device));
  TENSORMOUNT_RETURN_IF_ERROR(transport->Begin(plan));
  // Only rank 0 puts: where both did, a kind may say first that a size was another one.
  if (rank.comm.rank() == 0) (void)transport->Put(arena.Blocks());
  Status told;
  TENSORMOUNT_RETURN_IF_ERROR(AwaitBulkFailure(*transport, told));
  CONFORM_FAILED(told, Code::kInternal, "rank " + std::to_string(last) + " has a different plan");
  return {};
}

// After Settle a rank may use its memory again, whatever the others still do.
Status BulkMemoryIsFreeOnceSettled(BulkRank& rank) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
  const int me = rank.comm.rank();
  const std::vector<BulkUnit> plan = {{1, 0, 500'000}, {1, 0, 50}};
  BulkArena arena(plan, me, rank.seed);
  TENSORMOUNT_RETURN_IF_ERROR(arena.RegisterAt(*transport, rank.device));
  TENSORMOUNT_RETURN_IF_ERROR(transport->Begin(plan));
  if (me == 0) {
    TENSORMOUNT_RETURN_IF_ERROR(transport->Put(arena.Blocks()));
    transport->Abort(Status(Code::kCancelled, "stop"));
    TENSORMOUNT_RETURN_IF_ERROR(transport->Settle(BulkPatience()));
    std::memset(arena.TargetOf(0), 0x77, plan[0].bytes);
  }
  TENSORMOUNT_RETURN_IF_ERROR(Collective(rank.comm, kPatient).Agree({}, "settled"));
  if (me == 1) (void)transport->Put(arena.Blocks());
  if (me != 0) {  // Rank 0 does nothing more for it: Settle was all.
    Status told;
    TENSORMOUNT_RETURN_IF_ERROR(AwaitBulkFailure(*transport, told));
    CONFORM_FAILED(told, Code::kCancelled, "stop");
  }
  TENSORMOUNT_RETURN_IF_ERROR(Collective(rank.comm, kPatient).Agree({}, "put"));
  if (me == 0) {
    for (std::uint64_t i = 0; i < plan[0].bytes; ++i) {
      CONFORM(arena.TargetOf(0)[i] == std::byte{0x77});
    }
  }
  return {};
}

// More than 32 bits of bytes: of memory that is only reserved, so that it costs nothing.
Status BulkLargeUnitsAreCountedRight(BulkRank& rank) {
  constexpr std::uint64_t kLarge = (std::uint64_t{5} << 30) + 1;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Transport transport, rank.make());
  void* const memory =
      ::mmap(nullptr, kLarge, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CONFORM(memory != MAP_FAILED);
  auto* const data = static_cast<std::byte*>(memory);
  const Status said = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(transport->Register({data, kLarge, rank.device}));
    TENSORMOUNT_RETURN_IF_ERROR(transport->Begin({{0, 1, kLarge}}));
    if (rank.comm.rank() == 0) {
      const BulkBlock over{0, data + 1, nullptr};
      CONFORM(transport->Put({&over, 1}).code() == Code::kInvalidArgument);
      const BulkBlock block{0, data, nullptr};
      TENSORMOUNT_RETURN_IF_ERROR(transport->Put({&block, 1}));
      CONFORM_FAILED(transport->Wait(BulkSoon()), Code::kDeadlineExceeded,
                     "unit 0 (5368709121 bytes) to rank 1");
    }
    Status told;
    return AwaitBulkFailure(*transport, told);
  }();
  ::munmap(memory, kLarge);
  return said;
}

}  // namespace

const std::vector<BulkCase>& BulkCases() {
  static const std::vector<BulkCase> cases = {
      {"RandomPlansArrive", 1, BulkRandomPlansArrive},
      {"ManySmallUnitsArrive", 1, BulkManySmallUnitsArrive},
      {"EmptyPlansEnd", 1, BulkEmptyPlansEnd},
      {"WrongCallsAreRefused", 1, BulkWrongCallsAreRefused},
      {"HungUnitEndsAtTheDeadline", 2, BulkHungUnitEndsAtTheDeadline},
      {"RankThatVanishesIsNamed", 2, BulkRankThatVanishesIsNamed},
      {"RanksMayLeaveEarly", 2, BulkRanksMayLeaveEarly},
      {"AbortReachesAll", 1, BulkAbortReachesAll},
      {"DifferentPlansAreFoundOut", 2, BulkDifferentPlansAreFoundOut},
      {"MemoryIsFreeOnceSettled", 2, BulkMemoryIsFreeOnceSettled},
      {"LargeUnitsAreCountedRight", 2, BulkLargeUnitsAreCountedRight},
  };
  return cases;
}

Status ConformBulk(BulkRank& rank) {
  for (const BulkCase& c : BulkCases()) {
    if (rank.comm.size() < c.min_ranks) continue;
    TENSORMOUNT_RETURN_IF_ERROR(c.body(rank).WithContext(c.name));
  }
  return BulkRandomPlansArrive(rank).WithContext("after failures");
}

}  // namespace tensormount
