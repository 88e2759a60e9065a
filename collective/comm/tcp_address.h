// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_TCP_ADDRESS_H_
#define TENSORMOUNT_COLLECTIVE_COMM_TCP_ADDRESS_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/tcp_group.h"

namespace tensormount {

// An IPv4 or IPv6 address without a port; IPv4 as ::ffff:a.b.c.d.
struct IpAddress {
  std::array<std::uint8_t, 16> bytes{};
  bool is_v4() const;
  bool is_loopback() const;
  // Those that mean something only together with an interface.
  bool is_link_local() const;
  std::string ToString() const;
  friend auto operator<=>(const IpAddress&, const IpAddress&) = default;

  // Neither name nor scope: kInvalidArgument.
  static Result<IpAddress> Parse(const std::string& text);
  // Of a socket's name or peer. False: of another family.
  static bool FromSocket(const sockaddr_storage& name, IpAddress* out, std::uint16_t* port);
  // For connect and bind; AF_INET where it is_v4.
  socklen_t ToSocket(std::uint16_t port, sockaddr_storage* out) const;
};

using TcpId = std::array<std::uint8_t, 16>;

// What a rank says of itself to the others.
struct TcpAddress {
  TcpId listener{};  // Random: of this very group in this very process.
  TcpId machine{};   // Of the kernel and its network namespace: who may share Unix sockets.
  bool has_unix = false;
  std::uint32_t pid = 0;
  std::string host;
  std::uint16_t port = 0;
  std::vector<IpAddress> candidates;  // In the order in which they are tried.

  static constexpr std::size_t kMostCandidates = 8;
  static constexpr std::size_t kMostHost = 64;
  // " (host node7, pid 4242)".
  std::string Who() const;
  // The name of its Unix socket, which stands in no folder (it begins with a NUL).
  std::string UnixName() const;

  // "tm1:" and base64 of version, fields and a checksum.
  std::string Encode() const;
  // kInvalidArgument: damaged. kUnsupported: of another version.
  static Result<TcpAddress> Decode(std::string_view text);
};

// What can be told to others, in order: IPv4 first. Never empty. See TcpOptions.
Result<std::vector<IpAddress>> ChooseAddresses(const TcpOptions& options);
// All addresses of this machine.
Result<std::vector<IpAddress>> OwnAddresses();
// Zeros where the system does not say: then nobody is taken for a neighbour.
TcpId ThisKernel();

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_ADDRESS_H_
