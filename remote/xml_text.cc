// SPDX-License-Identifier: Apache-2.0
// As much of XML as the answers of S3 need.
#include "remote/xml_text.h"

#include <array>
#include <charconv>
#include <utility>

namespace tensormount {
namespace {

std::string Resolved(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, char>, 5> kEntities = {
      {{"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}, {"&apos;", '\''}}};
  std::string out;
  while (!text.empty()) {
    bool found = false;
    for (const auto& [entity, c] : kEntities) {
      if (!text.starts_with(entity)) continue;
      out += c;
      text.remove_prefix(entity.size());
      found = true;
      break;
    }
    if (found) continue;
    // "&#34;", as some servers write quotes.
    if (text.starts_with("&#") && text.find(';') <= 6) {
      int value = 0;
      const char* const end = text.data() + text.find(';');
      const auto parsed = std::from_chars(text.data() + 2, end, value);
      if (parsed.ptr == end && value > 0 && value < 128) {
        out += static_cast<char>(value);
        text.remove_prefix(text.find(';') + 1);
        continue;
      }
    }
    out += text.front();
    text.remove_prefix(1);
  }
  return out;
}

}  // namespace

std::vector<std::string_view> XmlElements(std::string_view xml, std::string_view name) {
  const std::string open = "<" + std::string(name) + ">";
  const std::string close = "</" + std::string(name) + ">";
  std::vector<std::string_view> out;
  for (std::size_t at = xml.find(open); at != std::string_view::npos; at = xml.find(open, at)) {
    at += open.size();
    const std::size_t end = xml.find(close, at);
    if (end == std::string_view::npos) break;
    out.push_back(xml.substr(at, end - at));
    at = end + close.size();
  }
  return out;
}

std::string XmlText(std::string_view xml, std::string_view name) {
  const std::vector<std::string_view> all = XmlElements(xml, name);
  return all.empty() ? std::string() : Resolved(all.front());
}

}  // namespace tensormount
