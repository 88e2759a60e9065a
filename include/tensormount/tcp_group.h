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
  // Interface whose addresses the other ranks get; may be a comma-separated list, of which the
  // first that is up and has an address is used. Empty: GLOO_SOCKET_IFNAME, or if that is not set
  // all interfaces that are up, the loopback only if there is no other.
  std::string interface;
  // A numeric IPv4 or IPv6 address of this machine, instead of an interface.
  std::string address;
  // Range of ports to listen on, of which the first free one is used; 0 and 0: any.
  std::uint16_t first_port = 0;
  std::uint16_t last_port = 0;
  // How long connecting to an unreachable peer is retried. A peer that has exited is noticed at
  // once.
  std::chrono::milliseconds connect_timeout{30'000};
  // A machine that stops answering counts as dead after about twice this time, in whole seconds; 0:
  // never. During a save or load the shorter Timeouts::liveness decides.
  std::chrono::milliseconds keep_alive{30'000};
  // How long the destructor of the communicator waits until the peers' machines have acknowledged
  // sent data.
  std::chrono::milliseconds leave_wait{5000};
  // Ranks on one machine use Unix sockets if they can reach each other by them.
  bool unix_sockets = true;
};

// A secret shared by the ranks of a group. Every process that has it can join the group.
using TcpToken = std::array<std::uint8_t, 32>;
// Makes a random token. One rank makes it, and the host program sends it to the others.
TENSORMOUNT_EXPORT Result<TcpToken> MakeTcpToken();

// A group of ranks that communicate over TCP, for jobs started by torchrun, Slurm or a script. The
// host program only distributes the addresses once.
//
//   auto mine = TcpGroup::Listen().value();
//   // Distribute everybody's mine->address() in rank order, and rank 0's token (through torch's
//   // key-value store, MPI or a file).
//   auto comm = mine->Connect(addresses, rank, token).value();
//
// Neither Listen nor Connect waits for another rank, and there is no background thread: connections
// are made at first use, within the calls of the communicator. So a busy rank does not answer; its
// kernel buffers incoming data. Not thread-safe.
class TENSORMOUNT_EXPORT TcpGroup {
 public:
  // Opens the sockets on which this rank listens. kNotFound: no such interface, or it is down or
  // has no usable (not link-local) address; or the machine has no interface at all.
  // kInvalidArgument: an invalid option. System errors name the address that failed.
  static Result<std::unique_ptr<TcpGroup>> Listen(const TcpOptions& options = {});
  virtual ~TcpGroup() = default;

  // The address of this rank: printable ASCII without blanks, at most 512 characters. Not secret.
  virtual const std::string& address() const = 0;
  // Makes this rank's communicator, which takes over the listening sockets. `addresses`: the
  // addresses of all ranks in rank order, equal on all ranks. kInvalidArgument: Connect was called
  // before; `rank` is out of range; or an address is damaged or duplicate, or the one at `rank` is
  // not this rank's own (the message names the rank). kUnsupported: an address of another version.
  virtual Result<std::unique_ptr<Communicator>> Connect(const std::vector<std::string>& addresses,
                                                        int rank, const TcpToken& token) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TCP_GROUP_H_
