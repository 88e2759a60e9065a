// SPDX-License-Identifier: Apache-2.0
// tm_tcp_*: groups over TCP (tensormount/c.h, over tensormount/tcp_group.h).
#include <chrono>
#include <cstring>
#include <utility>

#include "tensormount/tcp_group.h"

#include "lib/c_api.h"

using tensormount::Code;
using tensormount::Status;
using tensormount::TcpGroup;
using tensormount::TcpOptions;
using tensormount::TcpToken;
using tensormount::c_api::Call;
using tensormount::c_api::Handle;
using tensormount::c_api::Need;

static_assert(TM_TCP_TOKEN_BYTES == std::tuple_size_v<TcpToken>);

struct tm_tcp {
  std::unique_ptr<TcpGroup> group;
  std::string address;  // Stays when `group` has given up what listens.
  const pid_t process = getpid();
};

tm_status tm_tcp_listen(const tm_tcp_options* options, tm_tcp** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({{out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_tcp_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_tcp_options"));
    TcpOptions how;
    if (given.interface_name != nullptr) how.interface = given.interface_name;
    if (given.address != nullptr) how.address = given.address;
    how.first_port = given.first_port;
    how.last_port = given.last_port;
    how.unix_sockets = given.no_unix_sockets == 0;
    // Otherwise the defaults of TcpOptions.
    if (given.connect_timeout_ms > 0) {
      how.connect_timeout = std::chrono::milliseconds(given.connect_timeout_ms);
    }
    if (given.keep_alive_ms != 0) {
      how.keep_alive = std::chrono::milliseconds(std::max<int64_t>(given.keep_alive_ms, 0));
    }
    if (given.leave_wait_ms > 0) how.leave_wait = std::chrono::milliseconds(given.leave_wait_ms);
    TENSORMOUNT_ASSIGN_OR_RETURN(auto group, TcpGroup::Listen(how));
    std::string address = group->address();
    *out = new tm_tcp{std::move(group), std::move(address)};
    return {};
  });
}

const char* tm_tcp_address(const tm_tcp* tcp) { return tcp == nullptr ? "" : tcp->address.c_str(); }

tm_status tm_tcp_token(uint8_t* token) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({{token, "token"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const TcpToken made, tensormount::MakeTcpToken());
    std::memcpy(token, made.data(), made.size());
    return {};
  });
}

tm_status tm_tcp_connect(tm_tcp* tcp, const char* const* addresses, int32_t rank, int32_t size,
                         const uint8_t* token, size_t token_size, tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({Handle(tcp, "tcp"), {token, "token"}, {out, "out"}}));
    if (size < 1) {
      return {Code::kInvalidArgument, "a group of " + std::to_string(size) + " ranks"};
    }
    if (token_size != TM_TCP_TOKEN_BYTES) {
      return {Code::kInvalidArgument, "a token of " + std::to_string(token_size) + " bytes, not " +
                                          std::to_string(TM_TCP_TOKEN_BYTES)};
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto texts,
        tensormount::c_api::ReadTexts(addresses, static_cast<std::size_t>(size), "addresses"));
    TcpToken secret;
    std::memcpy(secret.data(), token, secret.size());
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made, tcp->group->Connect(texts, rank, secret));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}

void tm_tcp_free(tm_tcp* tcp) { tensormount::c_api::FreeHandle(tcp); }
