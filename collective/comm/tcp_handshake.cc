// SPDX-License-Identifier: Apache-2.0
// The frames of the handshake between two ranks of a TCP group, and the hashes that authenticate
// them.
#include "collective/comm/tcp_handshake.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/coding.h"

namespace tensormount {
namespace {

constexpr std::string_view kHelloMagic = "TMTCPHLO";
constexpr std::string_view kAnswerMagic = "TMTCPANS";
constexpr std::size_t kProofBytes = sizeof(KeyedDigest);
constexpr std::size_t kProved = kHandshakeFrame - kProofBytes;

std::string_view ProofOf(const HandshakeFrame& frame) {
  return std::string_view(frame.data(), frame.size()).substr(kProved);
}

// The keyed hash of a frame. `what` names the kind of frame, so that no kind is accepted as
// another.
KeyedDigest FrameProof(const SecretKey& token, std::string_view what, std::string_view bound,
                       std::string_view bytes) {
  std::string message(what);
  message += bound;
  message += bytes;
  return KeyedHash(token, message);
}

std::string_view BytesText(const KeyedDigest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

std::string_view BytesText(const TcpId& id) {
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

HandshakeFrame Proved(const SecretKey& token, std::string_view what, std::string_view bound,
                      std::string_view fields) {
  HandshakeFrame out{};
  std::memcpy(out.data(), fields.data(), fields.size());
  const KeyedDigest proof = FrameProof(token, what, bound, std::string_view(out.data(), kProved));
  std::memcpy(out.data() + kProved, proof.data(), proof.size());
  return out;
}

bool IsProved(const SecretKey& token, std::string_view what, std::string_view bound,
              const HandshakeFrame& frame) {
  const KeyedDigest proof = FrameProof(token, what, bound, std::string_view(frame.data(), kProved));
  return EqualInConstantTime(BytesText(proof), ProofOf(frame));
}

TcpId ReadId(ByteReader& r) {
  TcpId id{};
  const std::string_view raw = r.Raw(id.size());
  if (raw.size() == id.size()) std::memcpy(id.data(), raw.data(), raw.size());
  return id;
}

}  // namespace

TcpId TcpGroupId(const SecretKey& token, const std::vector<std::string>& addresses) {
  // Blanks separate the addresses, which contain none.
  std::string all = "group of " + std::to_string(addresses.size());
  for (const std::string& address : addresses) all += " " + address;
  const KeyedDigest digest = KeyedHash(token, all);
  TcpId out{};
  std::copy_n(digest.begin(), out.size(), out.begin());
  return out;
}

HandshakeFrame MakeHello(const SecretKey& token, const TcpId& listener, const TcpHello& hello) {
  ByteWriter w;
  w.Raw(kHelloMagic.data(), kHelloMagic.size());
  w.U16(hello.version);
  w.U16(0);
  w.U32(hello.from);
  w.U32(hello.to);
  w.U32(hello.size);
  w.Raw(hello.group.data(), hello.group.size());
  w.Raw(hello.nonce.data(), hello.nonce.size());
  return Proved(token, "hello", BytesText(listener), w.bytes());
}

std::optional<TcpHello> ReadHello(const SecretKey& token, const TcpId& listener,
                                  const HandshakeFrame& frame) {
  if (!IsProved(token, "hello", BytesText(listener), frame)) return std::nullopt;
  ByteReader r(std::string_view(frame.data(), kProved), "handshake");
  if (r.Raw(kHelloMagic.size()) != kHelloMagic) return std::nullopt;
  TcpHello hello;
  hello.version = r.U16();
  r.U16();
  hello.from = r.U32();
  hello.to = r.U32();
  hello.size = r.U32();
  hello.group = ReadId(r);
  hello.nonce = ReadId(r);
  return hello;
}

HandshakeFrame MakeAnswer(const SecretKey& token, const HandshakeFrame& hello, TcpAnswer answer,
                          const TcpId& nonce) {
  ByteWriter w;
  w.Raw(kAnswerMagic.data(), kAnswerMagic.size());
  w.U32(static_cast<std::uint32_t>(answer));
  w.Raw(nonce.data(), nonce.size());
  return Proved(token, "answer", ProofOf(hello), w.bytes());
}

std::optional<TcpAnswer> ReadAnswer(const SecretKey& token, const HandshakeFrame& hello,
                                    const HandshakeFrame& frame) {
  if (!IsProved(token, "answer", ProofOf(hello), frame)) return std::nullopt;
  ByteReader r(std::string_view(frame.data(), kProved), "answer");
  if (r.Raw(kAnswerMagic.size()) != kAnswerMagic) return std::nullopt;
  const std::uint32_t code = r.U32();
  if (code > static_cast<std::uint32_t>(TcpAnswer::kConnectionEnded)) return std::nullopt;
  return static_cast<TcpAnswer>(code);
}

ConfirmFrame MakeConfirm(const SecretKey& token, const HandshakeFrame& answer) {
  const KeyedDigest proof = FrameProof(token, "confirm", ProofOf(answer), {});
  ConfirmFrame out{};
  std::memcpy(out.data(), proof.data(), proof.size());
  return out;
}

bool IsConfirm(const SecretKey& token, const HandshakeFrame& answer, const ConfirmFrame& frame) {
  const KeyedDigest proof = FrameProof(token, "confirm", ProofOf(answer), {});
  return EqualInConstantTime(BytesText(proof), std::string_view(frame.data(), frame.size()));
}

}  // namespace tensormount
