// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/collective_cases.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <errno.h>
#include <signal.h>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tests/collective/bulk_exchange.h"
#include "tests/collective/conform.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"

namespace tensormount {
namespace {

// More than one message of an exchange carries.
constexpr std::size_t kBulk = Amount(3u << 20, 5u << 18);

using Clock = std::chrono::steady_clock;

std::string Text(int from, std::size_t size) {
  return Random(static_cast<std::uint64_t>(from) + 1).Bytes(size);
}

Status Gathers(Collective& c) {
  for (const std::size_t base : {0u, 1u, 150u, 161u, 5000u, 70'000u}) {
    // Sizes differ by rank, around what fits into a frame.
    const auto size_of = [&](int r) { return base + static_cast<std::size_t>(r) * (base / 3); };
    const std::string mine = Text(c.rank(), size_of(c.rank()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all, c.AllGather(mine, "gather to all"));
    CONFORM(all.size() == static_cast<std::size_t>(c.size()));
    for (int r = 0; r < c.size(); ++r) {
      CONFORM(all[static_cast<std::size_t>(r)] == Text(r, size_of(r)));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto here, c.Gather(mine, "gather"));
    CONFORM(here == (c.rank() == 0 ? all : std::vector<std::string>()));
  }
  return {};
}

Status Broadcasts(Collective& c) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{160}, std::size_t{161}, std::size_t{1'500'000}}) {
    const std::string mine = c.rank() == 0 ? Text(9, size) : "not mine to say";
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string got, c.Broadcast(mine, "broadcast"));
    CONFORM(got == Text(9, size));
  }
  Result<std::string> failed = std::string();
  if (c.rank() == 0) failed = Status::FromErrno(ENOSPC, "write", "plan");
  const Result<std::string> got = c.Broadcast(failed, "broadcast a failure");
  CONFORM(got.status().code() == Code::kResourceExhausted);
  CONFORM(got.status().ToErrno() == ENOSPC);
  CONFORM(got.status().message() == Status::FromErrno(ENOSPC, "write", "plan").message());
  return {};
}

Status Agreements(Collective& c) {
  TENSORMOUNT_RETURN_IF_ERROR(c.Agree({}, "all is well"));
  // Each rank alone, then all from there on.
  for (int bad = 0; bad < c.size(); ++bad) {
    Status mine;
    if (c.rank() == bad) mine = Status::FromErrno(EDQUOT, "write", "rank-" + std::to_string(bad));
    const Status one = c.Agree(mine, "one fails");
    CONFORM(one.code() == Status::FromErrno(EDQUOT, "", "").code());
    CONFORM(one.ToErrno() == EDQUOT);
    CONFORM(one.message().rfind("rank " + std::to_string(bad) + ": write rank-", 0) == 0);
    CONFORM(one.message().find("other rank") == std::string::npos);
    if (c.rank() > bad) mine = Status(Code::kBusy, "also");
    const Status many = c.Agree(mine, "many fail");
    CONFORM(many.code() == one.code());
    CONFORM(many.message().rfind("rank " + std::to_string(bad) + ": write rank-", 0) == 0);
    const int others = c.size() - bad - 1;
    const bool said =
        many.message().find("(" + std::to_string(others) + " other rank") != std::string::npos;
    CONFORM(said == (others > 0));
  }
  // A long message is cut, not lost.
  const Status mine =
      c.rank() == c.size() - 1 ? Status(Code::kStale, std::string(90'000, 'm')) : Status();
  const Status cut = c.Agree(mine, "long message");
  CONFORM(cut.code() == Code::kStale);
  CONFORM(cut.message().size() > 1000 && cut.message().size() < 10'000);
  return {};
}

// Rank a sends b this many bytes, in two transfers; some are empty.
std::size_t SizeOf(int a, int b) {
  return (a + b) % 3 == 2 ? 0 : static_cast<std::size_t>(1 + a * 70'001 + b * 913);
}

Status Exchanges(Collective& c) {
  const auto n = static_cast<std::size_t>(c.size());
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<std::string> out(n);
    std::vector<std::string> in(n);
    std::vector<BulkTransfer> sends;
    std::vector<BulkTransfer> receives;
    for (std::size_t p = 0; p < n; ++p) {
      const int peer = static_cast<int>(p);
      out[p] = Text(c.rank() * 100 + peer + turn, SizeOf(c.rank(), peer));
      in[p].resize(SizeOf(peer, c.rank()));
      const auto cut = [&](std::string& s, std::vector<BulkTransfer>& to) {
        const std::size_t half = s.size() / 3;
        to.push_back({peer, s.data(), half});
        to.push_back({peer, s.data() + half, s.size() - half});
      };
      cut(out[p], sends);
      cut(in[p], receives);
    }
    TENSORMOUNT_RETURN_IF_ERROR(ExchangeBulk(c, sends, receives, "exchange"));
    for (std::size_t p = 0; p < n; ++p) {
      CONFORM(in[p] == Text(static_cast<int>(p) * 100 + c.rank() + turn,
                            SizeOf(static_cast<int>(p), c.rank())));
    }
  }
  return ExchangeBulk(c, {}, {}, "nothing to exchange");
}

Status Decisions(Collective& c) {
  int asked = 0;
  const std::string mine = Text(c.rank(), 200);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string told,
                               c.Decide(mine, "decide", [&](std::vector<std::string>& parts) {
                                 ++asked;
                                 std::string all = std::to_string(parts.size());
                                 for (const std::string& p : parts) all += p;
                                 return Result<std::string>(std::move(all));
                               }));
  std::string expected = std::to_string(c.size());
  for (int r = 0; r < c.size(); ++r) expected += Text(r, 200);
  CONFORM(told == expected);
  CONFORM(asked == (c.rank() == 0 ? 1 : 0));
  // A failure, an exception: all get it, and go on.
  for (const bool throws : {false, true}) {
    const Result<std::string> failed =
        c.Decide({}, "decide against", [&](std::vector<std::string>&) -> Result<std::string> {
          if (throws) throw std::runtime_error("out of luck");
          return Status(Code::kBusy, "not today");
        });
    CONFORM(failed.status().code() == (throws ? Code::kInternal : Code::kBusy));
    CONFORM(failed.status().message().find(throws ? "out of luck" : "not today") !=
            std::string::npos);
  }
  return c.Agree({}, "after decisions");
}

Status Letters(Collective& c) {
  const auto n = static_cast<std::size_t>(c.size());
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<std::string> out(n);
    for (std::size_t p = 0; p < n; ++p) {
      const int peer = static_cast<int>(p);
      out[p] = Text(c.rank() * 100 + peer + turn, SizeOf(c.rank() + turn, peer));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto in, AllToAll(c, out, "letters"));
    CONFORM(in.size() == n);
    for (std::size_t p = 0; p < n; ++p) {
      const int peer = static_cast<int>(p);
      CONFORM(in[p] == Text(peer * 100 + c.rank() + turn, SizeOf(peer + turn, c.rank())));
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto nothing,
                               AllToAll(c, std::vector<std::string>(n), "no letters"));
  CONFORM(nothing == std::vector<std::string>(n));
  // Between neighbours in a ring, the next one of each: pairs that nobody names cost nothing.
  const int next = (c.rank() + 1) % c.size();
  const int before = (c.rank() + c.size() - 1) % c.size();
  for (int turn = 0; turn < 2; ++turn) {
    const Collective::Letter letter{next, Text(c.rank(), SizeOf(turn, c.rank()))};
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto in, c.NeighborAllToAll({&letter, 1}, {&before, 1}, "letters in a ring"));
    CONFORM(in == std::vector<std::string>{Text(before, SizeOf(turn, before))});
  }
  // What one rank gets wrong is an error on all, and the object goes on working.
  const bool last = c.rank() == c.size() - 1;
  const Collective::Letter letters[] = {{last ? c.size() : 0, "x"}, {0, "x"}};
  const auto outside = c.NeighborAllToAll({letters, last ? 1u : 0u}, {}, "to nobody");
  CONFORM(outside.status().code() == Code::kInvalidArgument);
  CONFORM(outside.status().message().find("rank " + std::to_string(c.size() - 1)) == 0);
  const Collective::Letter again[] = {{0, "x"}, {0, "y"}};
  const auto twice = c.NeighborAllToAll({again, last ? 2u : 0u}, {}, "to one twice");
  CONFORM(twice.status().code() == Code::kInvalidArgument);
  CONFORM(twice.status().message().find("listed twice") != std::string::npos);
  // A message that its receiver does not expect, and one that nobody sends.
  CONFORM(c.NeighborAllToAll({again, last ? 1u : 0u}, {}, "not expected").status().code() ==
          Code::kInternal);
  const int from = 0;
  CONFORM(c.NeighborAllToAll({}, {&from, last ? 1u : 0u}, "not sent").status().code() ==
          Code::kInternal);
  return c.Agree({}, "after letters");
}

}  // namespace

Result<std::vector<std::string>> AllToAll(Collective& c, const std::vector<std::string>& to_each,
                                          std::string_view phase) {
  std::vector<Collective::Letter> letters;
  std::vector<int> from;
  for (int r = 0; r < c.size(); ++r) {
    letters.push_back({r, to_each.at(static_cast<std::size_t>(r))});
    from.push_back(r);
  }
  return c.NeighborAllToAll(letters, from, phase);
}

Status ExerciseCollective(Communicator& comm) {
  // Two jobs after each other on one communicator.
  for (int job = 0; job < 2; ++job) {
    Collective c(comm, kPatient);
    CONFORM(c.rank() == comm.rank() && c.size() == comm.size());
    TENSORMOUNT_RETURN_IF_ERROR(Gathers(c));
    TENSORMOUNT_RETURN_IF_ERROR(Broadcasts(c));
    TENSORMOUNT_RETURN_IF_ERROR(Agreements(c));
    TENSORMOUNT_RETURN_IF_ERROR(Exchanges(c));
    TENSORMOUNT_RETURN_IF_ERROR(Decisions(c));
    TENSORMOUNT_RETURN_IF_ERROR(Letters(c));
  }
  return {};
}

Status ExerciseLargePayload(Communicator& comm, std::size_t bytes) {
  Collective c(comm, kPatient);
  std::string mine(comm.rank() == comm.size() - 1 ? bytes : 3, static_cast<char>(comm.rank()));
  if (mine.size() > 1000) mine[bytes / 2] = 'x';
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto all, c.AllGather(mine, "large"));
  CONFORM(all.back().size() == bytes);
  CONFORM(all.back()[bytes / 2] == 'x');
  CONFORM(all.back().back() == static_cast<char>(comm.size() - 1));
  return {};
}

namespace {

// Everything that every rank says in job `number`.
Status ExerciseJob(Communicator& comm, const Timeouts& timeouts, std::uint64_t number,
                   bool rank_zero_fails) {
  const int n = comm.size();
  const auto said = [&](int from, int to) {
    return Text(static_cast<int>(number) * 100 + from * 10 + to, 1000);
  };
  Collective c(comm, timeouts);
  std::vector<std::string> out;
  std::vector<std::string> in(static_cast<std::size_t>(n), std::string(1000, ' '));
  for (int r = 0; r < n; ++r) out.push_back(said(comm.rank(), r));
  std::vector<BulkTransfer> sends;
  std::vector<BulkTransfer> receives;
  for (std::size_t r = 0; r < out.size(); ++r) {
    sends.push_back({static_cast<int>(r), out[r].data(), out[r].size()});
    receives.push_back({static_cast<int>(r), in[r].data(), in[r].size()});
  }
  if (rank_zero_fails && comm.rank() == 0) sends[0].peer = n;
  TENSORMOUNT_RETURN_IF_ERROR(ExchangeBulk(c, sends, receives, "bulk"));
  for (int r = 0; r < n; ++r) {
    CONFORM(in[static_cast<std::size_t>(r)] == said(r, comm.rank()));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto letters, AllToAll(c, out, "letters"));
  for (int r = 0; r < n; ++r) {
    CONFORM(letters[static_cast<std::size_t>(r)] == said(r, comm.rank()));
  }
  return {};
}

}  // namespace

Status ExerciseFailures(Communicator& comm, int jobs) {
  std::uint64_t number = 0;
  const auto good_jobs = [&]() -> Status {
    for (const std::uint64_t end = number + static_cast<std::uint64_t>(jobs); number < end;
         ++number) {
      TENSORMOUNT_RETURN_IF_ERROR(
          ExerciseJob(comm, kPatient, number, false).WithContext("job " + std::to_string(number)));
    }
    return {};
  };
  // What the others said is on its way when rank 0 fails.
  CONFORM(ExerciseJob(comm, kPatient, number++, true).code() == Code::kInvalidArgument);
  TENSORMOUNT_RETURN_IF_ERROR(good_jobs());
  for (const int late : {comm.size() - 1, 0}) {
    if (comm.size() == 1) break;
    const Timeouts hasty{kPatient.liveness, std::chrono::milliseconds(100)};
    if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    // On a loaded machine nobody may be late.
    const Status hurried = ExerciseJob(comm, hasty, number++, false);
    CONFORM(hurried.ok() || hurried.code() == Code::kDeadlineExceeded);
    TENSORMOUNT_RETURN_IF_ERROR(good_jobs());
  }
  return {};
}

Status CallOperation(Collective& c, Operation operation, const std::string& phase) {
  switch (operation) {
    case Operation::kAllGather:
      return c.AllGather(std::string(100'000, 'a'), phase).status();
    case Operation::kGather:
      return c.Gather("mine", phase).status();
    case Operation::kBroadcast:
      return c.Broadcast(std::string(50'000, 'b'), phase).status();
    case Operation::kAgree:
      return c.Agree({}, phase);
    case Operation::kExchange: {
      std::vector<std::string> in(static_cast<std::size_t>(c.size()), std::string(kBulk, ' '));
      std::string out(kBulk, 'e');
      std::vector<BulkTransfer> sends;
      std::vector<BulkTransfer> receives;
      for (int p = 0; p < c.size(); ++p) {
        sends.push_back({p, out.data(), out.size()});
        receives.push_back({p, in[static_cast<std::size_t>(p)].data(), out.size()});
      }
      return ExchangeBulk(c, sends, receives, phase);
    }
    case Operation::kDecide:
      return c
          .Decide(std::string(5000, 'd'), phase,
                  [](std::vector<std::string>& parts) {
                    return Result<std::string>(std::move(parts[0]));
                  })
          .status();
    case Operation::kAllToAll: {
      const auto n = static_cast<std::size_t>(c.size());
      return AllToAll(c, std::vector<std::string>(n, std::string(kBulk, 'l')), phase).status();
    }
  }
  return {Code::kInternal, "no such operation"};
}

int WatchVictim(Communicator& comm, Operation operation, int victim, int signal) {
  Collective c(comm, kWatchful);
  const auto complain = [&](const std::string& what, const Status& status) {
    std::fprintf(stderr, "operation %d, victim %d, signal %d, rank %d: %s: %s\n",
                 static_cast<int>(operation), victim, signal, comm.rank(), what.c_str(),
                 status.ToString().c_str());
  };
  if (const Status ready = c.Agree({}, "ready"); !ready.ok()) {
    complain("before anything happened", ready);
    return 1;
  }
  if (comm.rank() == victim) ::raise(signal);
  const auto start = Clock::now();
  const Status failure = CallOperation(c, operation, "the call in which it happens");
  const auto waited = Clock::now() - start;
  if (failure.ok()) {
    complain("no failure", failure);
    return 2;
  }
  if (comm.rank() != victim || victim != 0) {
    if (failure.message().find("rank " + std::to_string(victim)) == std::string::npos) {
      complain("the victim is not named", failure);
      return 3;
    }
  }
  if (waited > kWatchful.liveness + kMargin) {
    complain("the deadline was passed", failure);
    return 4;
  }
  const Status again = CallOperation(c, operation, "the next call");
  if (again.code() != failure.code() || again.message() != failure.message()) {
    complain("the next call says something else", again);
    return 5;
  }
  // The next job does not wait for it a second time, on another channel neither.
  const auto channel = MakeChannel(comm, 1);
  if (!channel.ok()) return 8;
  for (Communicator* next : {&comm, channel.value().get()}) {
    if (comm.rank() == victim) break;
    const auto begin = Clock::now();
    const Status later = Collective(*next, kWatchful).Agree({}, "the next job");
    if (later.ok() || later.message().find("rank " + std::to_string(victim)) == std::string::npos ||
        later.code() == Code::kInternal) {
      complain("the victim is not named in the next job", later);
      return 6;
    }
    if (Clock::now() - begin > kWatchful.liveness / 2) {
      complain("the next job waited for the victim", later);
      return 7;
    }
  }
  return kSawFailure + static_cast<int>(failure.code());
}

}  // namespace tensormount
