// SPDX-License-Identifier: Apache-2.0
// Signatures of requests to S3.
#include "remote/sigv4.h"

#include <algorithm>
#include <cstring>

#include "remote/text.h"

namespace tensormount {
namespace {

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
