// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/tcp_testing.h"

#include <chrono>
#include <thread>
#include <utility>

#include "bench/tcp_ranks.h"

namespace tensormount {

std::string NameOf(TcpWay way) {
  switch (way) {
    case TcpWay::kIpv4:
      return "Ipv4";
    case TcpWay::kIpv6:
      return "Ipv6";
    case TcpWay::kUnix:
      return "Unix";
  }
  return "?";
}

TcpOptions OptionsFor(TcpWay way) {
  TcpOptions options;
  options.address = way == TcpWay::kIpv6 ? "::1" : "127.0.0.1";
  options.unix_sockets = way == TcpWay::kUnix;
  return options;
}

bool CanUse(TcpWay way) { return TcpGroup::Listen(OptionsFor(way)).ok(); }

Result<std::unique_ptr<ForkedGroup>> StartTcpRanks(int ranks, TcpWay way,
                                                   const std::function<int(Communicator&)>& body) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto shared, SharedTcpRanks::Make(ranks));
  // The memory goes on in the children when the parent's mapping goes.
  return ForkedGroup::Start(
      ranks, [&](int rank) { return shared->Join(rank, OptionsFor(way)); }, body);
}

Result<TcpRanksHere> MakeTcpRanks(int ranks, const TcpOptions& options) {
  TcpRanksHere out;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.token, MakeTcpToken());
  std::vector<std::unique_ptr<TcpGroup>> groups;
  for (int r = 0; r < ranks; ++r) {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto group, TcpGroup::Listen(options));
    out.addresses.push_back(group->address());
    groups.push_back(std::move(group));
  }
  for (int r = 0; r < ranks; ++r) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        auto comm, groups[static_cast<std::size_t>(r)]->Connect(out.addresses, r, out.token));
    out.comms.push_back(std::move(comm));
  }
  return out;
}

Status OnTcpThreads(TcpRanksHere& ranks, const std::function<Status(Communicator&)>& body) {
  std::vector<Status> results(ranks.comms.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < results.size(); ++r) {
    threads.emplace_back(
        [&, r] { results[r] = body(*ranks.comms[r]).WithContext("rank " + std::to_string(r)); });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& status : results) TENSORMOUNT_RETURN_IF_ERROR(status);
  return {};
}

Status RunTcpThreads(int ranks, const TcpOptions& options,
                     const std::function<Status(Communicator&)>& body) {
  TENSORMOUNT_ASSIGN_OR_RETURN(TcpRanksHere here, MakeTcpRanks(ranks, options));
  // Each frees its own, beside the others, as processes do.
  std::vector<Status> results(here.comms.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < results.size(); ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Communicator> comm = std::move(here.comms[r]);
      results[r] = body(*comm).WithContext("rank " + std::to_string(r));
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& status : results) TENSORMOUNT_RETURN_IF_ERROR(status);
  return {};
}

BufferView TcpView(std::string& text) {
  return BufferView::Host(DType::kU8, text.data(), Dims{static_cast<std::int64_t>(text.size())});
}

Status TcpWait(Communicator& comm, Communicator::Request request) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (true) {
    const std::uint64_t seen = comm.Changes();
    TENSORMOUNT_RETURN_IF_ERROR(comm.Progress());
    const Result<bool> done = comm.Test(request);
    if (!done.ok() || done.value()) return done.status();
    if (std::chrono::steady_clock::now() > deadline) {
      return {Code::kDeadlineExceeded, "a message never came"};
    }
    comm.WaitForChange(seen, std::chrono::milliseconds(20));
  }
}

}  // namespace tensormount
