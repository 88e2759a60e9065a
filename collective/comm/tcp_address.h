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
  // Whether the address is link-local, and so usable only with an interface.
  bool is_link_local() const;
  std::string ToString() const;
  friend auto operator<=>(const IpAddress&, const IpAddress&) = default;

  // Parses a numeric address. Fails with kInvalidArgument for names and scoped addresses.
  static Result<IpAddress> Parse(const std::string& text);
  // Reads a socket's own or peer name. Returns false for another address family.
  static bool FromSocket(const sockaddr_storage& name, IpAddress* out, std::uint16_t* port);
  // For connect and bind; AF_INET if is_v4.
  socklen_t ToSocket(std::uint16_t port, sockaddr_storage* out) const;
};

using TcpId = std::array<std::uint8_t, 16>;

// The address that a rank publishes to the others.
struct TcpAddress {
  TcpId listener{};  // Random; identifies the listener of one TcpGroup.
  // Identifies boot and network namespace (MachineBootId): equal for ranks that can reach each
  // other by Unix sockets.
  TcpId machine{};
  bool has_unix = false;
  std::uint32_t pid = 0;
  std::string host;
  std::uint16_t port = 0;
  std::vector<IpAddress> candidates;  // IP addresses, in the order in which to dial them.

  static constexpr std::size_t kMostCandidates = 8;
  static constexpr std::size_t kMostHost = 64;
  // Text about the rank for messages: " (host node7, pid 4242)".
  std::string PeerSuffix() const;
  // The name of the rank's Unix socket, in the abstract namespace (it begins with a NUL).
  std::string UnixName() const;

  // The address as text: "tm1:" and base64 of version, fields and a checksum.
  std::string Encode() const;
  // Parses an encoded address. Fails with kInvalidArgument if the text is damaged, with
  // kUnsupported if it comes from another version.
  static Result<TcpAddress> Decode(std::string_view text);
};

// The addresses that this rank publishes, chosen by TcpOptions or GLOO_SOCKET_IFNAME; IPv4 first,
// never empty.
Result<std::vector<IpAddress>> ChooseAddresses(const TcpOptions& options);
// All addresses of this machine.
Result<std::vector<IpAddress>> OwnAddresses();
// Identifies this machine's boot and network namespace. Zeros if the system gives no id: then Unix
// sockets are not used.
TcpId MachineBootId();

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_ADDRESS_H_
