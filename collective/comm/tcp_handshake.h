// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_TCP_HANDSHAKE_H_
#define TENSORMOUNT_COLLECTIVE_COMM_TCP_HANDSHAKE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/tcp_group.h"

#include "base/keyed_hash.h"
#include "collective/comm/tcp_address.h"

namespace tensormount {

// The handshake of two ranks before the first message: three frames of fixed size, each ending with
// a keyed hash of itself. The key is the token, which never travels.
//
//   dialler                                        listener
//   hello(from, to, group, nonce)  ------------->  hash right, for this very listener? else closes
//                                  <-------------  answer(code, nonce), hashed with hello's hash
//   confirm (hashes answer's hash) ------------->  the stream is open at both ends
//   messages                       <------------>  messages
//
// Until the dialler has sent its confirmation it may give up and dial again; after that the
// connection is open, and its end means the end of the peer. So nothing is lost or delivered twice,
// and a recorded handshake cannot be confirmed. A frame's hash is checked before any other byte of
// it. Hellos of later versions have the same size.

// Identifies the group with these addresses, in this order, and this token.
TcpId TcpGroupId(const SecretKey& token, const std::vector<std::string>& addresses);

inline constexpr std::size_t kHandshakeFrame = 128;
inline constexpr std::size_t kConfirmFrame = 32;
using HandshakeFrame = std::array<char, kHandshakeFrame>;
using ConfirmFrame = std::array<char, kConfirmFrame>;

struct TcpHello {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t size = 0;
  TcpId group{};
  TcpId nonce{};
  std::uint16_t version = 0;
};

enum class TcpAnswer : std::uint32_t {
  kWelcome = 0,
  kBusy = 1,              // The listener dials the peer itself: wait for that.
  kWrongVersion = 2,      // The hello has another version.
  kWrongGroup = 3,        // The group has other addresses, or another number of addresses.
  kWrongRank = 4,         // The hello names a wrong sender or receiver.
  kAlreadyConnected = 5,  // A connection with that rank exists.
  kConnectionEnded = 6,   // The connection with that rank has ended.
};

HandshakeFrame MakeHello(const SecretKey& token, const TcpId& listener, const TcpHello& hello);
// Reads a hello; empty if the frame was not made with this token for this listener.
std::optional<TcpHello> ReadHello(const SecretKey& token, const TcpId& listener,
                                  const HandshakeFrame& frame);
inline constexpr std::uint16_t kTcpVersion = 1;

HandshakeFrame MakeAnswer(const SecretKey& token, const HandshakeFrame& hello, TcpAnswer answer,
                          const TcpId& nonce);
std::optional<TcpAnswer> ReadAnswer(const SecretKey& token, const HandshakeFrame& hello,
                                    const HandshakeFrame& frame);
ConfirmFrame MakeConfirm(const SecretKey& token, const HandshakeFrame& answer);
bool IsConfirm(const SecretKey& token, const HandshakeFrame& answer, const ConfirmFrame& frame);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_HANDSHAKE_H_
