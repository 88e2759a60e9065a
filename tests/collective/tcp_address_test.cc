// SPDX-License-Identifier: Apache-2.0
#include "collective/comm/tcp_address.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/tcp_group.h"

#include "base/hash.h"
#include "collective/comm/tcp_handshake.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

TcpAddress SomeAddress(std::size_t candidates = 3, std::size_t host = 9) {
  TcpAddress a;
  for (std::size_t i = 0; i < 16; ++i) {
    a.listener[i] = static_cast<std::uint8_t>(i * 17);
    a.machine[i] = static_cast<std::uint8_t>(255 - i);
  }
  a.has_unix = true;
  a.pid = 4242;
  a.host = std::string(host, 'h');
  a.port = 65535;
  for (std::size_t i = 0; i < candidates; ++i) {
    a.candidates.push_back(
        IpAddress::Parse(i % 2 == 0 ? "10.1.2." + std::to_string(i) : "fd00::" + std::to_string(i))
            .value());
  }
  return a;
}

TEST(TcpAddressTest, AddressRoundTripsAsPlainText) {
  for (const TcpAddress& a : {SomeAddress(), SomeAddress(1, 1), SomeAddress(8, 64)}) {
    const std::string text = a.Encode();
    EXPECT_LE(text.size(), 512u);
    for (const char c : text) EXPECT_TRUE(c > ' ' && c < 0x7f) << text;
    ASSERT_OK_AND_ASSIGN(const TcpAddress b, TcpAddress::Decode(text));
    EXPECT_EQ(b.listener, a.listener);
    EXPECT_EQ(b.machine, a.machine);
    EXPECT_EQ(b.has_unix, a.has_unix);
    EXPECT_EQ(b.pid, a.pid);
    EXPECT_EQ(b.host, a.host);
    EXPECT_EQ(b.port, a.port);
    EXPECT_EQ(b.candidates, a.candidates);
  }
}

TEST(TcpAddressTest, EveryDamagedOrMissingByteIsRefused) {
  const std::string good = SomeAddress().Encode();
  for (std::size_t at = 0; at < good.size(); ++at) {
    EXPECT_FALSE(TcpAddress::Decode(good.substr(0, at)).ok()) << at;
    EXPECT_FALSE(TcpAddress::Decode(good.substr(0, at) + good.substr(at + 1)).ok()) << at;
    for (int byte = 0; byte < 256; ++byte) {
      std::string bad = good;
      if (bad[at] == static_cast<char>(byte)) continue;
      bad[at] = static_cast<char>(byte);
      const Status status = TcpAddress::Decode(bad).status();
      EXPECT_FALSE(status.ok()) << at << " " << byte;
      EXPECT_THAT(status.message(), testing::HasSubstr("the address of a rank"));
    }
  }
  EXPECT_THAT(TcpAddress::Decode(good + "A"), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(TcpAddress::Decode(""), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(TcpAddress::Decode(std::string(100'000, 'A')), HasCode(Code::kInvalidArgument));
}

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

// The text of these fields, whatever they say, as Encode writes it: with the checksum that they
// have.
std::string WithChecksum(std::string fields) {
  const std::uint64_t sum = Xxh3Low64(fields);
  fields.append(reinterpret_cast<const char*>(&sum), sizeof(sum));
  std::string out = "tm1:";
  for (std::size_t bit = 0; bit < fields.size() * 8; bit += 6) {
    unsigned digit = 0;
    for (std::size_t b = bit; b < bit + 6; ++b) {
      const unsigned byte = b / 8 < fields.size() ? static_cast<unsigned char>(fields[b / 8]) : 0;
      digit = digit << 1 | (byte >> (7 - b % 8) & 1);
    }
    out += kDigits[digit];
  }
  return out;
}

// What stands in an address before its checksum.
std::string Fields(const TcpAddress& a) {
  const std::string text = a.Encode();
  std::string bytes;
  unsigned bits = 0;
  int have = 0;
  for (const char c : std::string_view(text).substr(4)) {
    bits = bits << 6 | static_cast<unsigned>(kDigits.find(c));
    have += 6;
    if (have < 8) continue;
    have -= 8;
    bytes += static_cast<char>(bits >> have & 255);
  }
  return bytes.substr(0, bytes.size() - 8);
}

// Right checksums, wrong fields: what Decode must not take for granted.
TEST(TcpAddressTest, RandomFieldsAreRefusedOrRoundTrip) {
  ASSERT_EQ(WithChecksum(Fields(SomeAddress())), SomeAddress().Encode());
  Random random(TestSeed());
  int taken = 0;
  std::set<std::string> refusals;
  for (int i = 0; i < 20'000; ++i) {
    std::string fields = Fields(SomeAddress(1 + random.Next() % 8, 1 + random.Next() % 64));
    const std::size_t changes = 1 + random.Next() % 4;
    for (std::size_t c = 0; c < changes; ++c) {
      fields[random.Next() % fields.size()] = static_cast<char>(random.Next() % 256);
    }
    if (random.Next() % 4 == 0) fields.resize(random.Next() % fields.size());
    const std::string text = WithChecksum(fields);
    const Result<TcpAddress> decoded = TcpAddress::Decode(text);
    if (decoded.ok()) {
      EXPECT_EQ(decoded.value().Encode(), text);
      ++taken;
    } else {
      refusals.insert(decoded.status().message());
    }
  }
  EXPECT_GT(taken, 1'000);
  const auto has = [&](std::string_view part) {
    return std::any_of(refusals.begin(), refusals.end(), [&](const std::string& refusal) {
      return refusal.find(part) != std::string::npos;
    });
  };
  for (const char* part : {"another version", "the host's name is too long", "addresses",
                           "an IP address of unknown kind", "gives another text"}) {
    EXPECT_TRUE(has(part)) << part;
  }
  EXPECT_FALSE(has("checksum"));
}

TEST(TcpAddressTest, AddressesAreChosenByOptionsThenByGloo) {
  ::unsetenv("GLOO_SOCKET_IFNAME");
  TcpOptions options;
  ASSERT_OK_AND_ASSIGN(const auto chosen, ChooseAddresses(options));
  ASSERT_FALSE(chosen.empty());
  for (const IpAddress& a : chosen) {
    EXPECT_FALSE(a.is_link_local()) << a.ToString();
    EXPECT_EQ(a.is_loopback(), chosen.front().is_loopback());
  }
  options.interface = "no-such-interface,lo";
  ASSERT_OK_AND_ASSIGN(const auto loopback, ChooseAddresses(options));
  EXPECT_EQ(loopback.front().ToString(), "127.0.0.1");
  options.interface = "no-such-interface";
  EXPECT_THAT(ChooseAddresses(options), HasCode(Code::kNotFound));
  options.address = "127.0.0.1";
  EXPECT_THAT(ChooseAddresses(options), HasCode(Code::kInvalidArgument));
  options.interface.clear();
  ASSERT_OK_AND_ASSIGN(const auto given, ChooseAddresses(options));
  EXPECT_EQ(given.size(), 1u);
  for (const char* bad : {"localhost", "1.2.3", "fe80::1", "fe80::1%lo", "169.254.1.1", " "}) {
    options.address = bad;
    EXPECT_THAT(ChooseAddresses(options), HasCode(Code::kInvalidArgument)) << bad;
  }

  ::setenv("GLOO_SOCKET_IFNAME", "no-such-interface,lo", 1);
  ASSERT_OK_AND_ASSIGN(const auto by_gloo, ChooseAddresses(TcpOptions{}));
  EXPECT_EQ(by_gloo, loopback);
  ::setenv("GLOO_SOCKET_IFNAME", "no-such-interface", 1);
  const Status unknown = ChooseAddresses(TcpOptions{}).status();
  EXPECT_EQ(unknown.code(), Code::kNotFound);
  EXPECT_THAT(unknown.message(), testing::HasSubstr("GLOO_SOCKET_IFNAME"));
  // What a program says itself counts more.
  options.address = "127.0.0.1";
  EXPECT_OK(ChooseAddresses(options));
  ::unsetenv("GLOO_SOCKET_IFNAME");
}

TEST(TcpHandshakeTest, FrameNeedsItsTokenListenerAndPredecessor) {
  SecretKey token{};
  token[5] = 1;
  TcpId listener{};
  TcpHello hello;
  hello.from = 2;
  hello.to = 1;
  hello.size = 4;
  hello.version = kTcpVersion;
  const HandshakeFrame frame = MakeHello(token, listener, hello);
  ASSERT_TRUE(ReadHello(token, listener, frame).has_value());
  EXPECT_EQ(ReadHello(token, listener, frame)->from, 2u);
  SecretKey other = token;
  other[31] ^= 1;
  TcpId elsewhere = listener;
  elsewhere[0] ^= 1;
  EXPECT_FALSE(ReadHello(other, listener, frame).has_value());
  EXPECT_FALSE(ReadHello(token, elsewhere, frame).has_value());
  const HandshakeFrame answer = MakeAnswer(token, frame, TcpAnswer::kWelcome, TcpId{});
  ASSERT_EQ(ReadAnswer(token, frame, answer), TcpAnswer::kWelcome);
  const ConfirmFrame confirm = MakeConfirm(token, answer);
  ASSERT_TRUE(IsConfirm(token, answer, confirm));
  for (std::size_t i = 0; i < kHandshakeFrame; ++i) {
    HandshakeFrame bad = frame;
    bad[i] ^= 4;
    EXPECT_FALSE(ReadHello(token, listener, bad).has_value()) << i;
    bad = answer;
    bad[i] ^= 4;
    EXPECT_FALSE(ReadAnswer(token, frame, bad).has_value()) << i;
  }
  hello.nonce[3] = 1;
  EXPECT_FALSE(ReadAnswer(token, MakeHello(token, listener, hello), answer).has_value());
  EXPECT_FALSE(IsConfirm(token, frame, confirm));
  // One kind of frame is not another.
  EXPECT_FALSE(ReadHello(token, listener, answer).has_value());
}

}  // namespace
}  // namespace tensormount
