// SPDX-License-Identifier: Apache-2.0
// Signatures of requests to S3, and the SHA-256 that they need: libcurl brings no hash, and which
// library of TLS it uses differs by system.
#include "remote/sigv4.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "remote/text.h"

namespace tensormount {
namespace {

constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void AddBlock(std::array<std::uint32_t, 8>& state, const unsigned char* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) {
    w[i] = static_cast<std::uint32_t>(block[4 * i]) << 24 |
           static_cast<std::uint32_t>(block[4 * i + 1]) << 16 |
           static_cast<std::uint32_t>(block[4 * i + 2]) << 8 | block[4 * i + 3];
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  std::array<std::uint32_t, 8> v = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
    const std::uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const std::uint32_t t1 = v[7] + s1 + choice + kRounds[i] + w[i];
    const std::uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
    const std::uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    std::copy_backward(v.begin(), v.end() - 1, v.end());
    v[4] += t1;
    v[0] = t1 + s0 + majority;
  }
  for (std::size_t i = 0; i < 8; ++i) state[i] += v[i];
}

std::string_view Bytes(const Sha256Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// The parameters in order, each with a "=".
std::string CanonicalQuery(std::string_view query) {
  std::vector<std::string> parts;
  while (!query.empty()) {
    const std::size_t end = std::min(query.find('&'), query.size());
    std::string part(query.substr(0, end));
    if (!part.empty()) {
      if (part.find('=') == std::string::npos) part += '=';
      parts.push_back(std::move(part));
    }
    query.remove_prefix(std::min(end + 1, query.size()));
  }
  // By name first: "a=" sorts before "a-b=", although '-' comes before '='.
  std::sort(parts.begin(), parts.end(), [](const std::string& a, const std::string& b) {
    const std::size_t name_a = a.find('=');
    const std::size_t name_b = b.find('=');
    const int order = a.compare(0, name_a, b, 0, name_b);
    return order != 0 ? order < 0 : a < b;
  });
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : "&") + part;
  return out;
}

}  // namespace

Sha256Digest Sha256(std::string_view data) {
  std::array<std::uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const std::uint64_t bits = static_cast<std::uint64_t>(data.size()) * 8;
  while (data.size() >= 64) {
    AddBlock(state, reinterpret_cast<const unsigned char*>(data.data()));
    data.remove_prefix(64);
  }
  std::array<unsigned char, 128> last{};
  std::memcpy(last.data(), data.data(), data.size());
  last[data.size()] = 0x80;
  const std::size_t end = data.size() < 56 ? 64 : 128;
  for (std::size_t i = 0; i < 8; ++i) {
    last[end - 1 - i] = static_cast<unsigned char>(bits >> (8 * i));
  }
  for (std::size_t at = 0; at < end; at += 64) AddBlock(state, last.data() + at);
  Sha256Digest digest{};
  for (std::size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Sha256Digest HmacSha256(std::string_view key, std::string_view data) {
  std::string block(key);
  if (block.size() > 64) block = Bytes(Sha256(key));
  block.resize(64, '\0');
  std::string inner;
  std::string outer;
  for (const char c : block) {
    inner += static_cast<char>(c ^ 0x36);
    outer += static_cast<char>(c ^ 0x5c);
  }
  const Sha256Digest first = Sha256(inner + std::string(data));
  return Sha256(outer + std::string(Bytes(first)));
}

std::string Hexadecimal(const Sha256Digest& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const unsigned char byte : digest) {
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

std::string Base64(const Sha256Digest& digest) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t at = 0; at < digest.size(); at += 3) {
    const std::size_t n = std::min<std::size_t>(3, digest.size() - at);
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 3; ++i) bits = bits << 8 | (i < n ? digest[at + i] : 0U);
    for (std::size_t i = 0; i < 4; ++i) {
      out += i <= n ? kDigits[bits >> (18 - 6 * i) & 63] : '=';
    }
  }
  return out;
}

std::vector<std::string> SignV4(std::string_view method, const Url& url, std::string_view body_hash,
                                const AwsCredentials& credentials, std::string_view region,
                                std::string_view service, std::time_t now,
                                std::span<const std::string> more) {
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y%m%dT%H%M%SZ", &parts);
  const std::string time(text);
  const std::string day = time.substr(0, 8);
  std::vector<std::pair<std::string, std::string>> headers = {
      {"host", Lowered(url.host)},
      {"x-amz-content-sha256", std::string(body_hash)},
      {"x-amz-date", time}};
  if (!credentials.session_token.empty()) {
    headers.emplace_back("x-amz-security-token", credentials.session_token);
  }
  const std::size_t own = headers.size();
  for (const std::string& header : more) {
    const std::size_t colon = header.find(':');
    std::string name = Lowered(header.substr(0, colon));
    if (colon == std::string::npos || !name.starts_with("x-amz-")) continue;
    headers.emplace_back(std::move(name), Trimmed(std::string_view(header).substr(colon + 1)));
  }
  std::vector<std::string> out;
  for (std::size_t i = 1; i < own; ++i) {
    out.push_back(headers[i].first + ": " + headers[i].second);
  }
  // The canonical form has them in the order of their names.
  std::sort(headers.begin(), headers.end());
  std::string canonical =
      std::string(method) + "\n" + url.path + "\n" + CanonicalQuery(url.query) + "\n";
  std::string names;
  for (const auto& [name, value] : headers) {
    canonical += name + ":" + value + "\n";
    names += (names.empty() ? "" : ";") + name;
  }
  canonical += "\n" + names + "\n" + std::string(body_hash);
  const std::string scope =
      day + "/" + std::string(region) + "/" + std::string(service) + "/aws4_request";
  const std::string to_sign =
      "AWS4-HMAC-SHA256\n" + time + "\n" + scope + "\n" + Hexadecimal(Sha256(canonical));
  Sha256Digest key = HmacSha256("AWS4" + credentials.secret_key, day);
  key = HmacSha256(Bytes(key), region);
  key = HmacSha256(Bytes(key), service);
  key = HmacSha256(Bytes(key), "aws4_request");
  const std::string signature = Hexadecimal(HmacSha256(Bytes(key), to_sign));
  out.push_back("Authorization: AWS4-HMAC-SHA256 Credential=" + credentials.access_key + "/" +
                scope + ", SignedHeaders=" + names + ", Signature=" + signature);
  return out;
}

}  // namespace tensormount
