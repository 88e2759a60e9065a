// SPDX-License-Identifier: Apache-2.0
// CommonToJson and CommonFromJson of tensormount/common_value.h. They have a file of their own
// because only they need a JSON library. Values without a JSON form (bytes, tuples, integer keys,
// NaN) become an object whose first key begins with '$'. A real dict with such a key is written as
// a "$dict" object, so that no text has two readings.
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tensormount/common_value.h"

#include "index/records/common_tree.h"
#include "index/records/record_coding.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kQuietNan = 0x7ff8000000000000;
// A tree level takes at most three JSON levels ({"$dict": [[key, value]]}), a scalar one more. The
// parser stops at this depth, before CheckCommon can compare the depth of the tree with its limit.
constexpr std::size_t kMaxJsonDepth = 3 * static_cast<std::size_t>(kMaxCommonDepth) + 1;

// ---- Writing ----

void AppendHex(std::string& out, std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
}

void AppendHexTag(std::string& out, std::string_view tag, std::string_view bytes) {
  out += "{\"";
  out += tag;
  out += "\":\"";
  AppendHex(out, bytes);
  out += "\"}";
}

void AppendString(std::string& out, const std::string& text) {
  if (IsUtf8(text)) {
    out += QuoteJson(text);
  } else {
    AppendHexTag(out, "$string", text);
  }
}

// Floats without a JSON form become tagged values: JSON has no NaN or infinity, and the payload of
// a NaN is data.
void AppendFloat(std::string& out, double value) {
  if (std::isnan(value)) {
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
    out += R"({"$float":"nan","bits":")";
    std::string bytes;
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(bits >> shift & 0xFF);
    AppendHex(out, bytes);
    out += "\"}";
  } else if (std::isinf(value)) {
    out += value > 0 ? R"({"$float":"inf"})" : R"({"$float":"-inf"})";
  } else {
    out += FloatText(value);
  }
}

// Whether the dict can be a JSON object and be read back as the same dict. Integer keys, keys that
// are not UTF-8 and keys that begin with '$' need {"$dict": [[key, value], ...]}.
bool IsPlainObject(const CommonDict& dict) {
  for (const auto& [key, value] : dict.items) {
    const auto* text = std::get_if<std::string>(&key);
    if (text == nullptr || text->starts_with('$') || !IsUtf8(*text)) return false;
  }
  return true;
}

void Append(std::string& out, const CommonValue& value);

void AppendItems(std::string& out, const std::vector<CommonValue>& items) {
  out += '[';
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ',';
    Append(out, items[i]);
  }
  out += ']';
}

void AppendDict(std::string& out, const CommonDict& dict) {
  const bool plain = IsPlainObject(dict);
  out += plain ? "{" : R"({"$dict":[)";
  bool first = true;
  for (const auto& [key, value] : dict.items) {
    if (!first) out += ',';
    first = false;
    if (!plain) out += '[';
    if (const auto* number = std::get_if<std::int64_t>(&key)) {
      out += std::to_string(*number);
    } else {
      AppendString(out, *std::get_if<std::string>(&key));
    }
    out += plain ? ':' : ',';
    Append(out, value);
    if (!plain) out += ']';
  }
  out += plain ? "}" : "]}";
}

void Append(std::string& out, const CommonValue& value) {
  if (const bool* b = value.get_if<bool>()) {
    out += *b ? "true" : "false";
  } else if (const auto* i = value.get_if<std::int64_t>()) {
    out += std::to_string(*i);
  } else if (const auto* u = value.get_if<std::uint64_t>()) {
    out += std::to_string(*u);
  } else if (const double* d = value.get_if<double>()) {
    AppendFloat(out, *d);
  } else if (const auto* s = value.get_if<std::string>()) {
    AppendString(out, *s);
  } else if (const auto* bytes = value.get_if<CommonBytes>()) {
    AppendHexTag(out, "$bytes", bytes->data);
  } else if (const auto* list = value.get_if<CommonList>()) {
    AppendItems(out, list->items);
  } else if (const auto* tuple = value.get_if<CommonTuple>()) {
    out += R"({"$tuple":)";
    AppendItems(out, tuple->items);
    out += '}';
  } else if (const auto* dict = value.get_if<CommonDict>()) {
    AppendDict(out, *dict);
  } else {
    out += "null";
  }
}

// ---- Reading ----

using Members = std::vector<std::pair<std::string, CommonValue>>;

Status Refused(std::string why) { return Status(Code::kInvalidArgument, std::move(why)); }

Result<std::string> FromHex(const CommonValue& value, std::string_view tag) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  const auto* text = value.get_if<std::string>();
  const auto bad = [&] {
    return Refused(std::string(tag) + " must be an even number of hex digits (0-9, a-f)");
  };
  if (text == nullptr || text->size() % 2 != 0) return bad();
  std::string bytes;
  bytes.reserve(text->size() / 2);
  for (std::size_t i = 0; i < text->size(); i += 2) {
    const int high = digit((*text)[i]);
    const int low = digit((*text)[i + 1]);
    if (high < 0 || low < 0) return bad();
    bytes += static_cast<char>(high * 16 + low);
  }
  return bytes;
}

Result<CommonValue> UntagFloat(const Members& members) {
  const auto* name = members[0].second.get_if<std::string>();
  if (name == nullptr) return Refused("$float must be a string");
  if (members.size() == 1) {
    if (*name == "inf") return CommonValue(HUGE_VAL);
    if (*name == "-inf") return CommonValue(-HUGE_VAL);
    if (*name == "nan") return CommonValue(std::bit_cast<double>(kQuietNan));
  } else if (*name == "nan" && members[1].first == "bits") {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, FromHex(members[1].second, "bits"));
    std::uint64_t bits = 0;
    for (const char c : bytes) bits = bits << 8 | static_cast<unsigned char>(c);
    const double value = std::bit_cast<double>(bits);
    if (bytes.size() != 8 || !std::isnan(value)) return Refused("\"bits\" do not encode a NaN");
    return CommonValue(value);
  }
  return Refused(R"($float must be "inf", "-inf" or "nan"; only "nan" may have "bits")");
}

Result<CommonValue> UntagDict(CommonValue& value) {
  auto* pairs = value.get_if<CommonList>();
  if (pairs == nullptr) return Refused("$dict must be an array of [key, value] pairs");
  CommonDict dict;
  for (CommonValue& item : pairs->items) {
    auto* pair = item.get_if<CommonList>();
    if (pair == nullptr || pair->items.size() != 2) {
      return Refused("$dict must be an array of [key, value] pairs");
    }
    CommonKey key;
    if (const auto* number = pair->items[0].get_if<std::int64_t>()) {
      key = *number;
    } else if (auto* text = pair->items[0].get_if<std::string>()) {
      key = std::move(*text);
    } else {
      return Refused("a key of $dict is a " + std::string(pair->items[0].kind_name()) +
                     ", not an int or a string");
    }
    const auto [it, added] = dict.items.emplace(std::move(key), std::move(pair->items[1]));
    if (!added) return Refused("key " + CommonPathPart(it->first, true) + " occurs twice");
  }
  return CommonValue(std::move(dict));
}

// The value of an object with a key that begins with '$'. An unknown tag, or a tag beside other
// keys, is an error and not a plain dict, so that no text has two readings.
Result<CommonValue> Untag(Members& members) {
  if (!members[0].first.starts_with('$') || (members.size() > 1 && members[0].first != "$float") ||
      members.size() > 2) {
    return Refused("a key that begins with '$' must be the only key of its object");
  }
  const std::string& tag = members[0].first;
  CommonValue& value = members[0].second;
  if (tag == "$float") return UntagFloat(members);
  if (tag == "$dict") return UntagDict(value);
  if (tag == "$bytes") {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes, FromHex(value, tag));
    return CommonValue(CommonBytes{std::move(bytes)});
  }
  if (tag == "$string") {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes, FromHex(value, tag));
    if (IsUtf8(bytes)) return Refused("$string is only for text that is not UTF-8");
    return CommonValue(std::move(bytes));
  }
  if (tag == "$tuple") {
    auto* list = value.get_if<CommonList>();
    if (list == nullptr) return Refused("$tuple must be an array");
    return CommonValue(CommonTuple{std::move(list->items)});
  }
  return Refused("unknown tag " + QuoteJson(tag));
}

// Builds the tree from the parser's events without recursion: depth costs only memory, and is
// limited.
class TreeBuilder : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return Put(CommonNone()); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(std::int64_t value) override { return Put(value); }
  bool number_unsigned(std::uint64_t value) override { return Put(value); }
  bool number_float(double value, const std::string& text) override {
    // The parser turns integers that are too large into floats. They are refused here.
    if (text.find_first_of(".eE") == std::string::npos) {
      return Fail(Refused("the integer " + text.substr(0, 40) + " does not fit in 64 bits"));
    }
    return Put(value);
  }
  bool string(std::string& value) override { return Put(std::move(value)); }
  bool binary(Json::binary_t&) override { return Fail(Refused("not JSON")); }

  bool start_object(std::size_t) override { return Open(true); }
  bool start_array(std::size_t) override { return Open(false); }
  // Begins a member of the object; the next event sets its value.
  bool key(std::string& value) override {
    frames_.back().members.emplace_back(std::move(value), CommonValue());
    return true;
  }
  // Ends an object. Only now is it known whether the object is a dict or a tagged value.
  bool end_object() override {
    Members members = std::move(frames_.back().members);
    frames_.pop_back();
    bool tagged = false;
    for (const auto& member : members) tagged = tagged || member.first.starts_with('$');
    if (tagged) {
      Result<CommonValue> value = Untag(members);
      return value.ok() ? Put(std::move(value).value()) : Fail(value.status());
    }
    CommonDict dict;
    for (auto& [name, value] : members) {
      const auto [it, added] = dict.items.emplace(std::move(name), std::move(value));
      if (!added) {
        return Fail(Refused("key " + CommonPathPart(it->first, true) + " occurs twice"));
      }
    }
    return Put(std::move(dict));
  }
  bool end_array() override {
    CommonList list{std::move(frames_.back().items)};
    frames_.pop_back();
    return Put(std::move(list));
  }
  bool parse_error(std::size_t at, const std::string&, const Json::exception& error) override {
    // Drops the leading "[json.exception...]" of the parser's message.
    std::string_view why = error.what();
    if (const std::size_t end = why.find("] "); end != why.npos) why.remove_prefix(end + 2);
    status_ = Refused("byte " + std::to_string(at) + ": " + std::string(why.substr(0, 300)));
    return false;
  }

  const Status& status() const { return status_; }
  CommonValue& value() { return value_; }

 private:
  struct Frame {
    bool is_object;
    // Members of an open object. The next event fills in the last one.
    Members members;
    std::vector<CommonValue> items;
  };

  bool Open(bool is_object) {
    if (frames_.size() >= kMaxJsonDepth) return Fail(Refused("nested too deeply"));
    frames_.push_back({is_object, {}, {}});
    return true;
  }

  bool Put(CommonValue value) {
    // Bounds memory during parsing. The pairs in $dict count here but not in the tree, so this
    // limit is wider than the limit of CheckCommon, which is checked afterwards.
    if (++nodes_ > 2 * kMaxCommonNodes) return Fail(Refused("too many values"));
    if (frames_.empty()) {
      value_ = std::move(value);
    } else if (frames_.back().is_object) {
      frames_.back().members.back().second = std::move(value);
    } else {
      frames_.back().items.push_back(std::move(value));
    }
    return true;
  }

  // Adds the position in the text to the failure.
  bool Fail(const Status& failure) {
    std::string path;
    for (const Frame& frame : frames_) {
      if (!frame.is_object) {
        path += '[' + std::to_string(frame.items.size()) + ']';
      } else if (!frame.members.empty()) {
        path += CommonPathPart(frame.members.back().first, path.empty());
      }
    }
    status_ = path.empty() ? failure : failure.WithContext(path);
    return false;
  }

  std::vector<Frame> frames_;
  std::size_t nodes_ = 0;
  CommonValue value_;
  Status status_;
};

}  // namespace

std::string QuoteJson(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<std::string> UnquoteJson(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_string()) return Refused("not a JSON string");
  return json.get<std::string>();
}

std::string CommonToJson(const CommonValue& value) {
  std::string text;
  Append(text, value);
  return text;
}

Result<CommonValue> CommonFromJson(std::string_view text) {
  TreeBuilder builder;
  if (!Json::sax_parse(text, &builder)) return builder.status().WithContext("common value in JSON");
  if (Status status = CheckCommon(builder.value()); !status.ok()) {
    return status.WithContext("common value in JSON");
  }
  return std::move(builder.value());
}

}  // namespace tensormount
