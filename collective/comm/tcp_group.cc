// SPDX-License-Identifier: Apache-2.0
// The API of a TCP group (tensormount/tcp_group.h): options, addresses, and the communicator made
// from them.
#include "tensormount/tcp_group.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <unistd.h>
#include <utility>

#include "base/keyed_hash.h"
#include "collective/comm/stream_communicator.h"
#include "collective/comm/tcp_address.h"
#include "collective/comm/tcp_hub.h"
#include "collective/comm/tcp_socket.h"

namespace tensormount {
namespace {

class ListeningTcpGroup final : public TcpGroup {
 public:
  ListeningTcpGroup(TcpOptions options, TcpAddress own, TcpSocket tcp, TcpSocket unix_socket)
      : options_(std::move(options)),
        own_(std::move(own)),
        address_(own_.Encode()),
        tcp_(std::move(tcp)),
        unix_(std::move(unix_socket)) {}

  const std::string& address() const override { return address_; }

  Result<std::unique_ptr<Communicator>> Connect(const std::vector<std::string>& addresses, int rank,
                                                const TcpToken& token) override {
    if (!tcp_.is_open()) {
      return Status(Code::kInvalidArgument,
                    "connect a TCP group: it was already connected, or an earlier attempt failed");
    }
    if (rank < 0 || static_cast<std::size_t>(rank) >= addresses.size()) {
      return Status(Code::kInvalidArgument, "connect a TCP group: rank " + std::to_string(rank) +
                                                " is outside [0, " +
                                                std::to_string(addresses.size()) + ")");
    }
    std::map<TcpId, std::size_t> listeners;
    for (std::size_t r = 0; r < addresses.size(); ++r) {
      const std::string who = "rank " + std::to_string(r);
      const Result<TcpAddress> decoded = TcpAddress::Decode(addresses[r]);
      if (!decoded.ok()) return decoded.status().WithContext(who);
      const auto [other, added] = listeners.emplace(decoded.value().listener, r);
      if (!added) {
        return Status(Code::kInvalidArgument,
                      who + " has the address of rank " + std::to_string(other->second));
      }
    }
    if (addresses[static_cast<std::size_t>(rank)] != address_) {
      return Status(Code::kInvalidArgument, "rank " + std::to_string(rank) +
                                                ": the address given for this rank is not its own");
    }
    TcpHub::Parts parts;
    parts.rank = rank;
    parts.token = token;
    parts.group = TcpGroupId(token, addresses);
    parts.options = options_;
    parts.own = own_;
    parts.addresses = addresses;
    parts.tcp = std::move(tcp_);
    parts.unix_socket = std::move(unix_);
    TENSORMOUNT_ASSIGN_OR_RETURN(auto hub, TcpHub::Make(std::move(parts)));
    return std::unique_ptr<Communicator>(std::make_unique<StreamCommunicator>(
        rank, static_cast<int>(addresses.size()), std::move(hub),
        StreamCommunicator::Options{.kind = "tcp", .leave_wait = options_.leave_wait}));
  }

 private:
  const TcpOptions options_;
  const TcpAddress own_;
  const std::string address_;
  TcpSocket tcp_;
  TcpSocket unix_;
};

std::string HostName() {
  char name[256] = "";
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  // Messages show the name in parentheses, so characters that could be misread there are replaced.
  std::string out;
  for (const char c : std::string(name)) {
    const bool plain = c > ' ' && c < 0x7f && c != '(' && c != ')' && c != ',';
    if (out.size() < TcpAddress::kMostHost) out += plain ? c : '_';
  }
  return out.empty() ? "unknown" : out;
}

}  // namespace

Result<TcpToken> MakeTcpToken() {
  TcpToken out{};
  TENSORMOUNT_RETURN_IF_ERROR(FillRandom(out));
  return out;
}

Result<std::unique_ptr<TcpGroup>> TcpGroup::Listen(const TcpOptions& given) {
  TcpOptions options = given;
  if (options.last_port == 0) options.last_port = options.first_port;
  if (options.last_port < options.first_port ||
      (options.first_port == 0 && options.last_port != 0)) {
    return Status(Code::kInvalidArgument,
                  "TcpOptions: first_port " + std::to_string(options.first_port) +
                      " and last_port " + std::to_string(options.last_port) +
                      " are not the ends of a range of ports");
  }
  constexpr std::chrono::milliseconds kZero{0};
  if (options.connect_timeout <= kZero || options.keep_alive < kZero ||
      options.leave_wait < kZero) {
    return Status(Code::kInvalidArgument,
                  "TcpOptions: connect_timeout must be positive; keep_alive and leave_wait must "
                  "not be negative");
  }
  for (auto* time : {&options.connect_timeout, &options.keep_alive, &options.leave_wait}) {
    *time = std::min<std::chrono::milliseconds>(*time, std::chrono::hours(24 * 365));
  }
  options.keep_alive = std::chrono::ceil<std::chrono::seconds>(options.keep_alive);
  TcpAddress own;
  TENSORMOUNT_RETURN_IF_ERROR(FillRandom(own.listener));
  own.machine = MachineBootId();
  own.pid = static_cast<std::uint32_t>(::getpid());
  own.host = HostName();
  TENSORMOUNT_ASSIGN_OR_RETURN(own.candidates, ChooseAddresses(options));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      TcpSocket tcp, ListenTcp(own.candidates, options.first_port, options.last_port, &own.port));
  TcpSocket unix_socket;
  if (options.unix_sockets) {
    // If this fails, ranks on this machine connect by TCP, unless descriptors are exhausted.
    if (Result<TcpSocket> made = ListenUnix(own.UnixName()); made.ok()) {
      unix_socket = std::move(made).value();
      own.has_unix = true;
    } else if (IsOutOfDescriptors(made.status().ToErrno())) {
      return made.status();
    }
  }
  return std::unique_ptr<TcpGroup>(std::make_unique<ListeningTcpGroup>(
      std::move(options), std::move(own), std::move(tcp), std::move(unix_socket)));
}

}  // namespace tensormount
