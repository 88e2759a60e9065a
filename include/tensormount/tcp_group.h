// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TCP_GROUP_H_
#define TENSORMOUNT_TCP_GROUP_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// How a rank of a TCP group can be reached, and how it reaches others (docs/tcp.md).
struct TcpOptions {
  // Whose addresses are told to others. Empty: what GLOO_SOCKET_IFNAME names, and where that is not
  // set all interfaces that are up, the loopback only where there is nothing else. May be a list
  // with commas: the first that there is.
  std::string interface;
  // An IPv4 or IPv6 address of this machine instead, as numbers.
  std::string address;
  // The ports to listen on, the first that is free; 0 and 0: any.
  std::uint16_t first_port = 0;
  std::uint16_t last_port = 0;
  // How long a peer that cannot be reached is tried again. One that has ended is noticed at once.
  std::chrono::milliseconds connect_timeout{30'000};
  // A machine that does not answer any more is taken for gone after about twice this, in whole
  // seconds; 0: never. (Timeouts::liveness is sooner while a job is under way.)
  std::chrono::milliseconds keep_alive{30'000};
  // When the communicator is destroyed: how long it waits for what it sent to be taken over by the
  // machines of the others.
  std::chrono::milliseconds leave_wait{5000};
  // Ranks of one machine use Unix sockets, where they can reach each other by them.
  bool unix_sockets = true;
};

// What all ranks of a group know and nobody else. Who has it can join the group.
using TcpToken = std::array<std::uint8_t, 32>;
// A random one, for one rank to make and the others to be told.
TENSORMOUNT_EXPORT Result<TcpToken> MakeTcpToken();

// A group of ranks that reach each other over TCP, with nothing but what the host program carries
// for them once: their addresses. For jobs that were started by torchrun, Slurm or a script.
//
//   auto mine = TcpGroup::Listen().value();
//   // By torch's store, MPI, a file: everybody's mine->address() in rank order, and rank 0's
//   token. auto comm = mine->Connect(addresses, rank, token).value();
//
// Neither call waits for another rank, and there is no thread: connections are made when they are
// first used, and all of it happens within the calls of the communicator. So a rank that is busy
// elsewhere answers nobody meanwhile; its kernel keeps what comes.
// One thread at a time.
class TENSORMOUNT_EXPORT TcpGroup {
 public:
  // kNotFound: no such interface, or it has no address. kInvalidArgument: an option that cannot be.
  // Errors of the system name what was tried.
  static Result<std::unique_ptr<TcpGroup>> Listen(const TcpOptions& options = {});
  virtual ~TcpGroup() = default;

  // Where this rank can be reached: printable ASCII without blanks, 512 characters at most. It is
  // no secret.
  virtual const std::string& address() const = 0;
  // This rank's communicator. `addresses`: those of all ranks, in the order of ranks, the same on
  // all of them. Takes what listens along; a second call is kInvalidArgument.
  // kInvalidArgument, by the number of the rank: an address that is damaged, twice, or not this
  // rank's own at `rank`. kUnsupported: of another version.
  virtual Result<std::unique_ptr<Communicator>> Connect(const std::vector<std::string>& addresses,
                                                        int rank, const TcpToken& token) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TCP_GROUP_H_
