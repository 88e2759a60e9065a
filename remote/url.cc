// SPDX-License-Identifier: Apache-2.0
// URLs: parts, redirects, encoding.
#include "remote/url.h"

#include <algorithm>

#include "base/file_system_for.h"
#include "remote/text.h"

namespace tensormount {
namespace {

bool IsUnreserved(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '.' || c == '_' || c == '~';
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

void AppendEncoded(char c, std::string& out) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  const auto byte = static_cast<unsigned char>(c);
  out += '%';
  out += kDigits[byte >> 4];
  out += kDigits[byte & 15];
}

}  // namespace

std::string Url::ToString() const {
  return origin() + path + (query.empty() ? std::string() : "?" + query);
}

Result<Url> ParseUrl(std::string_view text) {
  const auto bad = [&](const char* why) {
    return Status(Code::kInvalidArgument, ShownUrl(text) + ": " + why);
  };
  const std::size_t colon = text.find("://");
  if (colon == std::string_view::npos) return bad("is no URL");
  Url url;
  url.scheme = Lowered(text.substr(0, colon));
  if (url.scheme != "http" && url.scheme != "https") return bad("is neither http:// nor https://");
  const std::string_view rest = text.substr(colon + 3);
  const std::size_t end = std::min(rest.find_first_of("/?#"), rest.size());
  url.host = rest.substr(0, end);
  // Default ports are left out, as libcurl does in the header that a signature covers.
  const std::string_view port = url.scheme == "http" ? ":80" : ":443";
  if (url.host.ends_with(port)) url.host.resize(url.host.size() - port.size());
  if (url.host.find('@') != std::string::npos) {
    return bad("a user name or a password in a URL is not supported");
  }
  if (url.host.empty()) return bad("the URL has no host");
  for (const char c : url.host) {
    if (!IsUnreserved(c) && c != ':' && c != '[' && c != ']') return bad("the host is malformed");
  }
  const std::size_t colon_of_port = url.host.rfind(':');
  if (colon_of_port != std::string::npos &&
      url.host.find(']', colon_of_port) == std::string::npos) {
    const std::string number = url.host.substr(colon_of_port + 1);
    if (number.empty() || number.size() > 5 ||
        number.find_first_not_of("0123456789") != std::string::npos || std::stoi(number) > 65535) {
      return bad("the port is malformed");
    }
  }
  std::string_view path = rest.substr(end);
  path = path.substr(0, path.find('#'));
  const std::size_t question = path.find('?');
  if (question != std::string_view::npos) {
    url.query = path.substr(question + 1);
    path = path.substr(0, question);
  }
  url.path = path.empty() ? "/" : EncodeIllegal(path);
  return url;
}

Result<Url> ResolveRedirect(const Url& from, std::string_view location) {
  if (location.substr(0, location.find_first_of("/?#")).ends_with(':')) return ParseUrl(location);
  if (location.starts_with("//")) return ParseUrl(from.scheme + ":" + std::string(location));
  if (location.starts_with("/")) return ParseUrl(from.origin() + std::string(location));
  const std::string folder = from.path.substr(0, from.path.rfind('/') + 1);
  return ParseUrl(from.origin() + folder + std::string(location));
}

std::string PercentEncode(std::string_view text, bool keep_slashes) {
  std::string out;
  for (const char c : text) {
    if (IsUnreserved(c) || (keep_slashes && c == '/')) {
      out += c;
    } else {
      AppendEncoded(c, out);
    }
  }
  return out;
}

std::string PercentDecode(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const int high = text[i] == '%' && i + 2 < text.size() ? HexDigit(text[i + 1]) : -1;
    const int low = high >= 0 ? HexDigit(text[i + 2]) : -1;
    if (low >= 0) {
      out += static_cast<char>(high * 16 + low);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string EncodeIllegal(std::string_view path) {
  constexpr std::string_view kAllowed = "/:@!$&'()*+,;=";
  std::string out;
  for (std::size_t i = 0; i < path.size(); ++i) {
    const char c = path[i];
    const bool encoded =
        c == '%' && i + 2 < path.size() && HexDigit(path[i + 1]) >= 0 && HexDigit(path[i + 2]) >= 0;
    if (IsUnreserved(c) || encoded || kAllowed.find(c) != std::string_view::npos) {
      out += c;
    } else {
      AppendEncoded(c, out);
    }
  }
  return out;
}

std::string ShownUrl(std::string_view url) {
  std::string shown = WithoutQuery(url);
  const std::size_t host = shown.find("://");
  if (host == std::string::npos) return shown;
  const std::size_t end = shown.find('/', host + 3);
  const std::size_t at = shown.rfind('@', end);
  if (at != std::string::npos && at > host) shown.erase(host + 3, at + 1 - host - 3);
  return shown;
}

}  // namespace tensormount
