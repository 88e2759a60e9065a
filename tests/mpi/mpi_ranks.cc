// SPDX-License-Identifier: Apache-2.0
// What one process of an MPI job does in mpi_test:
//   mpi_ranks conformance | cancel | collective | views | bulk
//   mpi_ranks victim | victim-of-subgroup OPERATION RANK SIGNAL
//   mpi_ranks between RANK SIGNAL
//   mpi_ranks worlds
//   mpi_ranks late FOLDER
// Prints one line that begins with "rank N: ".
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <signal.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "tensormount/mpi.h"

#include "collective/comm/collective.h"
#include "tests/collective/bulk_transport_conformance.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/communicator_conformance.h"
#include "tests/collective/group_view_cases.h"
#include "tests/collective/host_transports.h"

namespace tensormount {
namespace {

int Say(const Communicator& comm, const std::string& what) {
  std::printf("rank %d: %s\n", comm.rank(), what.c_str());
  std::fflush(stdout);
  return what == "good" ? 0 : 1;
}

int Say(const Communicator& comm, const std::string& name, const Status& status) {
  return Say(comm, status.ok() ? "good" : name + ": " + status.ToString());
}

int Victim(Communicator& comm, Operation operation, int victim, int signal) {
  std::vector<std::string> pids;
  {
    Collective c(comm, kPatient);
    auto all = c.AllGather(std::to_string(::getpid()), "pids");
    if (!all.ok()) return Say(comm, "pids", all.status());
    pids = std::move(all).value();
  }
  const int saw = WatchVictim(comm, operation, victim, signal);
  Say(comm, "saw " + std::to_string(saw));
  if (comm.rank() == (victim == 0 ? 1 : 0)) {
    // A stopped process would keep the job alive.
    ::kill(std::atoi(pids[static_cast<std::size_t>(victim)].c_str()), SIGKILL);
  }
  return 0;
}

// The last rank lives but does not come, until all others have given up and left a file in
// `folder`.
int Late(Communicator& comm, const std::string& folder) {
  const auto mark = [&](int rank) { return folder + "/" + std::to_string(rank); };
  const int last = comm.size() - 1;
  Collective c(comm, {std::chrono::seconds(60), std::chrono::milliseconds(500)});
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (int r = 0; comm.rank() == last && r < last;) {
    if (::access(mark(r).c_str(), F_OK) == 0 || std::chrono::steady_clock::now() > give_up) ++r;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const Status status = c.Agree({}, "evaluate");
  if (std::FILE* file = std::fopen(mark(comm.rank()).c_str(), "w")) std::fclose(file);
  const std::string name = "rank " + std::to_string(last) + " did not arrive within";
  if (status.code() == Code::kDeadlineExceeded &&
      status.message().find(name) != std::string::npos) {
    return Say(comm, "good");
  }
  return Say(comm, status.ok() ? "no failure" : status.ToString());
}

// One rank dies or stops after one job and before the next. The others find that by `liveness`,
// not by `arrival`.
int Between(Communicator& comm, int victim, int signal) {
  {
    Collective c(comm, kPatient);
    if (const Status status = c.Agree({}, "before"); !status.ok())
      return Say(comm, "before", status);
  }
  if (comm.rank() == victim) ::raise(signal);
  const auto begin = std::chrono::steady_clock::now();
  const Status status = Collective(comm, kWatchful).Agree({}, "after");
  const bool soon = std::chrono::steady_clock::now() - begin < kWatchful.liveness + kMargin;
  const bool named = status.message().find("rank " + std::to_string(victim)) != std::string::npos;
  return Say(comm,
             !status.ok() && named && soon ? "good" : "not seen in time: " + status.ToString());
}

double ResidentMiB() {
  long pages = 0;
  if (std::FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    std::fclose(f);
  }
  return static_cast<double>(pages) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

// Each took two communicators of MPI for ever, of which there are 32,766, and 16 KiB.
int Worlds(MpiSession& session, Communicator& world) {
  const auto use = [](Communicator& comm, int jobs) -> Status {
    for (int job = 0; job < jobs; ++job) {
      Collective c(comm, kPatient);
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto all,
                                   c.AllGather(std::to_string(comm.rank() * 10 + job), "all"));
      for (int r = 0; r < comm.size(); ++r) {
        if (all[static_cast<std::size_t>(r)] != std::to_string(r * 10 + job)) {
          return {Code::kInternal, "something else came"};
        }
      }
    }
    return {};
  };
  // Ranks let go of theirs at different times, and leave messages behind.
  std::unique_ptr<Communicator> kept;
  for (int i = 0; i < 40; ++i) {
    auto made = session.World();
    if (!made.ok()) return Say(world, "worlds", made.status());
    char left = 'x';
    (void)made.value()->Send((world.rank() + 1) % world.size(), 3,
                             BufferView::Host(DType::kU8, &left, Dims{1}));
    if (const Status used = use(*made.value(), i % 3); !used.ok()) return Say(world, "use", used);
    if (i % 5 == world.rank()) kept = std::move(made).value();
  }
  kept.reset();
  constexpr int kMany = 600;
  double before = 0;
  for (int i = 0; i < kMany; ++i) {
    if (i == kMany / 6) before = ResidentMiB();
    auto made = session.World();
    if (!made.ok()) return Say(world, "many worlds", made.status());
  }
  if (const double grown = ResidentMiB() - before; grown > 4) {
    return Say(world, "memory grew by " + std::to_string(grown) + " MiB");
  }
  return Say(world, "worlds", use(world, 2));
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (!UnderMpiLauncher()) {
    std::printf("not under a launcher\n");
    return 1;
  }
  auto session = MpiSession::Init();
  if (!session.ok()) {
    std::printf("%s\n", session.status().ToString().c_str());
    return 1;
  }
  auto comm = session.value()->World();
  if (!comm.ok()) {
    std::printf("%s\n", comm.status().ToString().c_str());
    return 1;
  }
  Communicator& world = *comm.value();
  if (mode == "conformance") return Say(world, mode, Conform(world, /*cancels=*/false));
  if (mode == "bulk") {
    BulkRank rank{.comm = world, .make = [&] { return MakeMessageTransport(world, kPatient); }};
    return Say(world, mode, ConformBulk(rank));
  }
  if (mode == "views") {
    Status status = ExerciseChannels(world);
    if (status.ok()) status = ExerciseSubgroups(world);
    return Say(world, mode, status);
  }
  if (mode == "cancel") {
    const int result = Say(world, mode, Conform(world, /*cancels=*/true));
    comm.value().reset();  // Must not wait for what is never received.
    session.value()->Abandon();
    ::_exit(result);
  }
  if (mode == "collective") {
    Status status = ExerciseCollective(world);
    if (status.ok())
      status = ExerciseLargePayload(world, world.size() == 2 ? 100'000'000 : 10'000'000);
    if (status.ok()) status = ExerciseFailures(world);
    return Say(world, mode, status);
  }
  if (mode == "worlds") return Worlds(*session.value(), world);
  if (mode == "between" && argc == 4) {
    (void)Between(world, std::atoi(argv[2]), std::atoi(argv[3]));
    session.value()->Abandon();
    ::_exit(0);  // As below.
  }
  if (mode == "late" && argc == 3) return Late(world, argv[2]);
  if ((mode == "victim" || mode == "victim-of-subgroup") && argc == 5) {
    // All ranks, turned round: rank 0 of the subgroup is the last one of the world.
    std::vector<int> turned;
    for (int r = world.size() - 1; r >= 0; --r) turned.push_back(r);
    auto sub = MakeSubgroup(world, turned, 1);
    if (!sub.ok()) return Say(world, mode, sub.status());
    Victim(mode == "victim" ? world : *sub.value(), static_cast<Operation>(std::atoi(argv[2])),
           std::atoi(argv[3]), std::atoi(argv[4]));
    session.value()->Abandon();
    ::_exit(0);  // Others of this job are gone: nothing may wait for them.
  }
  std::printf("unknown mode\n");
  return 1;
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) { return tensormount::Main(argc, argv); }
