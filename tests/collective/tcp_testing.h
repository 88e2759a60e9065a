// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_TCP_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_TCP_TESTING_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/tcp_group.h"

#include "bench/forked_group.h"

namespace tensormount {

// How ranks of a test reach each other: all on the loopback.
enum class TcpWay { kIpv4, kIpv6, kUnix };
std::string NameOf(TcpWay way);
// Whether the machine has it.
bool CanUse(TcpWay way);
TcpOptions OptionsFor(TcpWay way);

// Forked ranks of one TCP group, each of which listened in its own process.
Result<std::unique_ptr<ForkedGroup>> StartTcpRanks(int ranks, TcpWay way,
                                                   const std::function<int(Communicator&)>& body);

// Ranks that are threads, each with its own communicator of one group; the first failure by rank.
Status RunTcpThreads(int ranks, const TcpOptions& options,
                     const std::function<Status(Communicator&)>& body);
// The communicators of one group in this process, by rank, and what they were made of.
struct TcpRanksHere {
  TcpToken token{};
  std::vector<std::string> addresses;
  std::vector<std::unique_ptr<Communicator>> comms;
};
Result<TcpRanksHere> MakeTcpRanks(int ranks, const TcpOptions& options);
// `body` on a thread each.
Status OnTcpThreads(TcpRanksHere& ranks, const std::function<Status(Communicator&)>& body);

BufferView TcpView(std::string& text);
// With a deadline.
Status TcpWait(Communicator& comm, Communicator::Request request);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_TCP_TESTING_H_
