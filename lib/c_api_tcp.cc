// SPDX-License-Identifier: Apache-2.0
// tm_tcp_*: groups of ranks over TCP (tensormount/c.h).
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/tcp_group.h"

#include "lib/c_api.h"

using tensormount::Code;
using tensormount::Result;
using tensormount::Status;
using tensormount::TcpGroup;
using tensormount::TcpOptions;
using tensormount::TcpToken;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;

struct tm_tcp {
  std::unique_ptr<TcpGroup> group;
  const pid_t process = getpid();
};

namespace {

static_assert(TM_TCP_TOKEN_BYTES == sizeof(TcpToken));

Result<std::uint16_t> ReadPort(const char* field, std::uint32_t number) {
  if (number > std::numeric_limits<std::uint16_t>::max()) {
    return Status(Code::kInvalidArgument, std::string(field) + ": " + std::to_string(number) +
                                              " is not a port number (0 to 65535)");
  }
  return static_cast<std::uint16_t>(number);
}

Status CheckTokenSize(std::size_t size) {
  if (size == sizeof(TcpToken)) return {};
  return {Code::kInvalidArgument, "the token of a group must have " +
                                      std::to_string(sizeof(TcpToken)) + " bytes, not " +
                                      std::to_string(size)};
}

Result<TcpOptions> ReadTcpOptions(const tm_tcp_options* options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_tcp_options given,
                               tensormount::c_api::ReadStruct(options, "tm_tcp_options"));
  TcpOptions out;
  out.unix_sockets = given.no_unix_sockets == 0;
  if (given.interface_name != nullptr) out.interface = given.interface_name;
  if (given.address != nullptr) out.address = given.address;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.first_port, ReadPort("first_port", given.first_port));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.last_port, ReadPort("last_port", given.last_port));
  const auto time = [](std::int64_t ms, std::chrono::milliseconds* to) {
    if (ms != 0) *to = std::chrono::milliseconds(ms);
  };
  time(given.connect_timeout_ms, &out.connect_timeout);
  time(given.leave_wait_ms, &out.leave_wait);
  time(std::max<std::int64_t>(given.keep_alive_ms, 0), &out.keep_alive);
  if (given.keep_alive_ms < 0) out.keep_alive = std::chrono::milliseconds(0);
  return out;
}

}  // namespace

tm_status tm_tcp_listen(const tm_tcp_options* options, tm_tcp** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const TcpOptions given, ReadTcpOptions(options));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made, TcpGroup::Listen(given));
    *out = new tm_tcp{std::move(made)};
    return {};
  });
}

const char* tm_tcp_address(const tm_tcp* tcp) {
  return tcp == nullptr ? nullptr : tcp->group->address().c_str();
}

tm_status tm_tcp_token(uint8_t* token, size_t size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{token, "token"}}));
    TENSORMOUNT_RETURN_IF_ERROR(CheckTokenSize(size));
    TENSORMOUNT_ASSIGN_OR_RETURN(const TcpToken made, tensormount::MakeTcpToken());
    std::copy(made.begin(), made.end(), token);
    return {};
  });
}

tm_status tm_tcp_connect(tm_tcp* tcp, const char* const* addresses, int32_t rank, int32_t size,
                         const uint8_t* token, size_t token_size, tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({tensormount::c_api::Handle(tcp, "tcp"),
                                               {addresses, "addresses"},
                                               {token, "token"},
                                               {out, "out"}}));
    TENSORMOUNT_RETURN_IF_ERROR(CheckTokenSize(token_size));
    if (size < 1) return {Code::kInvalidArgument, "size: a group has at least one rank"};
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::vector<std::string> texts,
        tensormount::c_api::ReadTexts(addresses, static_cast<std::size_t>(size), "addresses"));
    TcpToken secret;
    std::copy(token, token + token_size, secret.begin());
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made, tcp->group->Connect(texts, rank, secret));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}

void tm_tcp_free(tm_tcp* tcp) { tensormount::c_api::FreeHandle(tcp); }
