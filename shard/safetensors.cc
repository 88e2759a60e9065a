// SPDX-License-Identifier: Apache-2.0
// Headers of safetensors files, written like the reference: JSON without spaces, and the fields of
// a tensor in the same order. The reader refuses everything that the reference reader refuses, and
// more: a file that readers interpret differently could show different weights to different users.
// The parser is event-based, so that no tree of a header of 100 MB is built.
#include "shard/safetensors.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/coding.h"
#include "shard/strict_json.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

// The limit that the format's reference implementation has.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::string_view kMetadataKey = "__metadata__";
// Limits for strings, because one string could fill the whole header and parsers keep several
// copies of a string. No writer needs more.
constexpr std::size_t kMaxStringBytes = std::size_t{16} << 20;
constexpr std::size_t kMaxMetadataBytes = std::size_t{32} << 20;

Status BadSafetensorsHeader(const std::string& why) {
  return Status(Code::kDataLoss, "safetensors header: " + why);
}

std::string QuotedKey(std::string_view key) {
  return "tensor '" + std::string(key.substr(0, 256)) + (key.size() > 256 ? "...'" : "'");
}

std::optional<DType> FromSafetensorsName(std::string_view name) {
  for (const DTypeInfo& d : AllDTypes()) {
    if (!d.safetensors.empty() && d.safetensors == name) return d.dtype;
  }
  return std::nullopt;
}

// Number of bytes of a packed tensor; nullopt if it exceeds 2^63 - 1 or is not a whole number.
std::optional<std::uint64_t> PackedBytes(DType dtype, const Dims& shape) {
  const auto elements = CheckedProduct(shape);
  if (!elements) return std::nullopt;
  const auto bits = CheckedMul<std::uint64_t>(static_cast<std::uint64_t>(*elements),
                                              std::uint64_t{InfoOf(dtype).bits});
  if (!bits || *bits % 8 != 0) return std::nullopt;
  return *bits / 8;
}

// Whether some string exceeds kMaxStringBytes. Strings end at an unescaped quote; the parser
// detects invalid JSON.
bool HasLongString(std::string_view json) {
  std::size_t at = 0;
  while ((at = json.find('"', at)) != std::string_view::npos) {
    const std::size_t begin = ++at;
    for (;; at += 2) {
      at = json.find_first_of("\"\\", at);
      if (at == std::string_view::npos) return json.size() - begin > kMaxStringBytes;
      if (json[at] == '"') break;
    }
    if (at - begin > kMaxStringBytes) return true;
    ++at;
  }
  return false;
}

// A state machine over the events of the JSON parser; `at_` is the expected token:
//
//   kStart  {  kTop  "KEY"  kTensor  {  kField  "dtype"  kDType  "F32"  kField ... }  kTop ... }
//   kEnd
//
// and from kField by "shape" to kShape, then [ kExtent ... ], by "data_offsets" to kOffsets and
// kOffset. A field with another name may have any value, which is ignored; `skip_` counts its
// depth. No tree is built. The first token that the format does not allow ends the parse with
// `error`.
class Reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Reader(UnknownDType unknown_dtype) : unknown_dtype_(unknown_dtype) {}

  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> unknown;  // By key: the name of its unknown element type.
  std::map<std::string, std::string> metadata;
  Status error;

  bool start_object(std::size_t) override {
    if (skip_ > 0) return SkipDeeper();
    switch (at_) {
      case ParsePosition::kStart:
        at_ = ParsePosition::kTop;
        return true;
      case ParsePosition::kTensor:
        at_ = ParsePosition::kField;
        entry_ = {};
        entry_.key = key_;
        has_dtype_ = has_shape_ = has_offsets_ = false;
        fields_.clear();
        return true;
      case ParsePosition::kMetadata:
        at_ = ParsePosition::kMetadataEntry;
        return true;
      case ParsePosition::kUnknown:
        return SkipDeeper();
      default:
        return UnexpectedToken("an object");
    }
  }

  bool key(string_t& name) override {
    if (skip_ > 0) return true;
    switch (at_) {
      case ParsePosition::kTop:
        if (!keys_.insert(name).second) return Fail("key '" + name + "' occurs twice");
        key_ = name;
        at_ = name == kMetadataKey ? ParsePosition::kMetadata : ParsePosition::kTensor;
        return true;
      case ParsePosition::kField:
        if (!fields_.insert(name).second) {
          return Fail(QuotedKey(key_) + ": field '" + name + "' occurs twice");
        }
        at_ = name == "dtype"          ? ParsePosition::kDType
              : name == "shape"        ? ParsePosition::kShape
              : name == "data_offsets" ? ParsePosition::kOffsets
                                       : ParsePosition::kUnknown;
        return true;
      case ParsePosition::kMetadataEntry:
        metadata_key_ = name;
        if (metadata.contains(name)) return Fail("__metadata__: key '" + name + "' occurs twice");
        at_ = ParsePosition::kMetadataValue;
        return true;
      default:
        return UnexpectedToken("a key");
    }
  }

  bool end_object() override {
    if (skip_ > 0) return SkipShallower();
    switch (at_) {
      case ParsePosition::kTop:
        at_ = ParsePosition::kEnd;
        return true;
      case ParsePosition::kField:
        if (!has_dtype_) return Fail(QuotedKey(key_) + ": no dtype");
        if (!has_shape_) return Fail(QuotedKey(key_) + ": no shape");
        if (!has_offsets_) return Fail(QuotedKey(key_) + ": no data_offsets");
        entries.push_back(std::move(entry_));
        at_ = ParsePosition::kTop;
        return true;
      case ParsePosition::kMetadataEntry:
        at_ = ParsePosition::kTop;
        return true;
      default:
        return UnexpectedToken("the end of an object");
    }
  }

  bool start_array(std::size_t) override {
    if (skip_ > 0) return SkipDeeper();
    switch (at_) {
      case ParsePosition::kShape:
        at_ = ParsePosition::kExtent;
        return true;
      case ParsePosition::kOffsets:
        at_ = ParsePosition::kOffset;
        offsets_ = 0;
        return true;
      case ParsePosition::kUnknown:
        return SkipDeeper();
      default:
        return UnexpectedToken("an array");
    }
  }

  bool end_array() override {
    if (skip_ > 0) return SkipShallower();
    if (at_ == ParsePosition::kExtent) {
      has_shape_ = true;
    } else if (at_ == ParsePosition::kOffset) {
      if (offsets_ != 2) return Fail(QuotedKey(key_) + ": data_offsets are not two numbers");
      has_offsets_ = true;
    } else {
      return UnexpectedToken("the end of an array");
    }
    at_ = ParsePosition::kField;
    return true;
  }

  bool string(string_t& value) override {
    if (skip_ > 0) return true;
    if (at_ == ParsePosition::kMetadataValue) {
      metadata_bytes_ += metadata_key_.size() + value.size();
      if (metadata_bytes_ > kMaxMetadataBytes) {
        error = Status(Code::kUnsupported, "safetensors header: metadata exceeds 32 MiB");
        return false;
      }
      metadata.emplace(std::move(metadata_key_), value);
      at_ = ParsePosition::kMetadataEntry;
      return true;
    }
    if (at_ == ParsePosition::kDType) {
      const auto dtype = FromSafetensorsName(value);
      if (!dtype && unknown_dtype_ == UnknownDType::kLeaveOut) {
        unknown.emplace(key_, value.substr(0, 64));
      } else if (!dtype) {
        error = Status(Code::kUnsupported, "safetensors header: " + QuotedKey(key_) + ": dtype '" +
                                               value.substr(0, 64) + "' is not known");
        return false;
      }
      entry_.dtype = dtype.value_or(DType::kU8);
      has_dtype_ = true;
      at_ = ParsePosition::kField;
      return true;
    }
    return Scalar("a string");
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (skip_ > 0) return true;
    if (at_ == ParsePosition::kExtent) {
      if (entry_.shape.rank() == kMaxRank) {
        error = Status(Code::kUnsupported, "safetensors header: " + QuotedKey(key_) +
                                               ": more than " + std::to_string(kMaxRank) + " axes");
        return false;
      }
      const auto extent = CheckedCast<std::int64_t>(value);
      if (!extent)
        return Fail(QuotedKey(key_) + ": extent " + std::to_string(value) + " overflows");
      entry_.shape.push_back(*extent);
      return true;
    }
    if (at_ == ParsePosition::kOffset) {
      if (offsets_ == 0) entry_.begin = value;
      if (offsets_ == 1) entry_.end = value;
      if (offsets_ == 2) return Fail(QuotedKey(key_) + ": data_offsets are not two numbers");
      ++offsets_;
      return true;
    }
    return Scalar("a number");
  }

  bool null() override {
    // The reference reads and writes null as "no metadata".
    if (skip_ == 0 && at_ == ParsePosition::kMetadata) {
      at_ = ParsePosition::kTop;
      return true;
    }
    return Scalar("null");
  }
  bool boolean(bool) override { return Scalar("a boolean"); }
  bool number_integer(number_integer_t) override { return Scalar("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Scalar("a number that is not whole or does not fit 64 bits");
  }
  bool binary(binary_t&) override { return Scalar("binary"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& e) override {
    return Fail("JSON, byte " + std::to_string(position) + ": " + e.what());
  }

 private:
  enum class ParsePosition {
    kStart,
    kTop,     // A key, or the end of the header.
    kTensor,  // The object that describes the tensor key_.
    kField,   // A field of a tensor's object, or the end of that object.
    kDType,
    kShape,
    kExtent,
    kOffsets,
    kOffset,
    kUnknown,  // The value of an unknown field, which the format allows.
    kMetadata,
    kMetadataEntry,
    kMetadataValue,
    kEnd,
  };

  bool Fail(const std::string& why) {
    if (error.ok()) error = BadSafetensorsHeader(why);
    return false;
  }

  // Reports an unexpected token, and what was expected.
  bool UnexpectedToken(const std::string& got) {
    switch (at_) {
      case ParsePosition::kStart:
        return Fail("is not a JSON object");
      case ParsePosition::kTensor:
        return Fail(QuotedKey(key_) + " is " + got + ", not an object");
      case ParsePosition::kDType:
        return Fail(QuotedKey(key_) + ": dtype is " + got + ", not a string");
      case ParsePosition::kShape:
      case ParsePosition::kExtent:
        return Fail(QuotedKey(key_) + ": shape holds " + got + ", not whole numbers");
      case ParsePosition::kOffsets:
      case ParsePosition::kOffset:
        return Fail(QuotedKey(key_) + ": data_offsets hold " + got + ", not two whole numbers");
      case ParsePosition::kMetadata:
      case ParsePosition::kMetadataEntry:
      case ParsePosition::kMetadataValue:
        return Fail("__metadata__ holds " + got + ", not a string for each key");
      default:
        return Fail("unexpected " + got);
    }
  }

  // A value that is allowed only in unknown fields.
  bool Scalar(const std::string& got) {
    if (skip_ > 0) return true;
    if (at_ != ParsePosition::kUnknown) return UnexpectedToken(got);
    at_ = ParsePosition::kField;
    return true;
  }

  bool SkipDeeper() {
    ++skip_;
    return true;
  }
  bool SkipShallower() {
    if (--skip_ == 0) at_ = ParsePosition::kField;
    return true;
  }

  UnknownDType unknown_dtype_;
  ParsePosition at_ = ParsePosition::kStart;
  std::size_t skip_ = 0;  // Depth inside a value that is ignored.
  std::string key_;
  std::string metadata_key_;
  std::size_t metadata_bytes_ = 0;
  std::unordered_set<std::string> keys_;
  std::unordered_set<std::string> fields_;
  SafetensorsEntry entry_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  int offsets_ = 0;
};

// Checks offsets against shapes, each other and the length of the data part. Entries are sorted by
// begin, so one pass verifies that each begins where the previous one ends: no gap, in which a file
// could hide data, and no overlap. Empty tensors share a begin and sort before the one that has
// bytes. `unknown`: tensors of unknown size.
Status CheckLayout(const std::vector<SafetensorsEntry>& entries,
                   const std::map<std::string, std::string>& unknown, std::uint64_t data_bytes) {
  std::uint64_t at = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry& e : entries) {
    const std::string place =
        QuotedKey(e.key) + ": bytes " + std::to_string(e.begin) + " to " + std::to_string(e.end);
    if (e.end < e.begin) return BadSafetensorsHeader(place + " end before they begin");
    const auto bytes =
        unknown.contains(e.key) ? std::optional(e.end - e.begin) : PackedBytes(e.dtype, e.shape);
    if (!bytes) {
      return BadSafetensorsHeader(QuotedKey(e.key) + ": shape " + e.shape.ToString() + " of " +
                                  std::string(InfoOf(e.dtype).safetensors) +
                                  " overflows or does not fill whole bytes");
    }
    if (e.end - e.begin != *bytes) {
      return BadSafetensorsHeader(place + ", but shape " + e.shape.ToString() + " of " +
                                  std::string(InfoOf(e.dtype).safetensors) + " takes " +
                                  std::to_string(*bytes));
    }
    if (e.begin < at) return BadSafetensorsHeader(place + " overlap " + QuotedKey(before->key));
    if (e.begin > at) {
      return BadSafetensorsHeader(place + " leave a gap after byte " + std::to_string(at));
    }
    if (e.end > data_bytes) {
      return BadSafetensorsHeader(place + " reach past the end of the data at byte " +
                                  std::to_string(data_bytes));
    }
    at = e.end;
    before = &e;
  }
  if (at != data_bytes) {
    return BadSafetensorsHeader(std::to_string(data_bytes - at) +
                                " bytes are left over after the last tensor");
  }
  return Status();
}

void AppendJsonString(std::string_view s, std::string& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  // Escapes only what JSON requires and keeps UTF-8, like the reference. Plain text is appended run
  // by run.
  std::size_t plain = 0;  // Start of the text not yet appended.
  for (std::size_t i = 0; i < s.size(); ++i) {
    const auto u = static_cast<unsigned char>(s[i]);
    if (u >= 0x20 && u != '"' && u != '\\') continue;
    out.append(s, plain, i - plain);
    plain = i + 1;
    if (u >= 0x20) {
      out += '\\';
      out += s[i];
    } else {
      out += "\\u00";
      out += kHex[u >> 4];
      out += kHex[u & 15];
    }
  }
  out.append(s, plain);
  out += '"';
}

void AppendNumber(std::uint64_t n, std::string& out) {
  std::array<char, 20> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), n).ptr;
  out.append(digits.data(), end);
}

Status BadEntry(Code code, std::string_view key, const std::string& why) {
  return Status(code, "safetensors header: " + QuotedKey(key) + ": " + why);
}

}  // namespace

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view header_json,
                                                 std::uint64_t file_size, UnknownDType unknown) {
  if (header_json.size() > kMaxHeaderBytes) {
    return BadSafetensorsHeader(std::to_string(header_json.size()) + " bytes, the format allows " +
                                std::to_string(kMaxHeaderBytes));
  }
  const std::uint64_t data_offset = 8 + header_json.size();
  if (data_offset > file_size) {
    return BadSafetensorsHeader(std::to_string(header_json.size()) +
                                " bytes do not fit in a file of " + std::to_string(file_size));
  }
  if (header_json.empty() || header_json.front() != '{')
    return BadSafetensorsHeader("does not begin with '{'");
  if (const Status text = CheckJsonText(header_json); !text.ok())
    return BadSafetensorsHeader(text.message());
  if (HasLongString(header_json)) {
    return Status(Code::kUnsupported, "safetensors header: a string exceeds 16 MiB");
  }
  // The parser copies whole strings, so strings that are too long were refused above.
  Reader reader(unknown);
  if (!nlohmann::json::sax_parse(header_json.begin(), header_json.end(), &reader)) {
    return reader.error.ok() ? BadSafetensorsHeader("is not JSON") : reader.error;
  }
  std::sort(reader.entries.begin(), reader.entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              if (a.begin != b.begin) return a.begin < b.begin;
              if (a.end != b.end) return a.end < b.end;
              return a.key < b.key;
            });
  TENSORMOUNT_RETURN_IF_ERROR(CheckLayout(reader.entries, reader.unknown, file_size - data_offset));
  std::erase_if(reader.entries,
                [&](const SafetensorsEntry& e) { return reader.unknown.contains(e.key); });
  SafetensorsHeader header;
  header.unknown = std::move(reader.unknown);
  header.entries = std::move(reader.entries);
  header.metadata = std::move(reader.metadata);
  header.data_offset = data_offset;
  return header;
}

Result<SafetensorsHeader> ReadSafetensorsHeader(File& file, UnknownDType unknown) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  if (info.size < 8) {
    return BadSafetensorsHeader("a file of " + std::to_string(info.size) +
                                " bytes is too short for the header length")
        .WithContext(file.path());
  }
  std::array<char, 8> prefix{};
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(0, prefix.data(), prefix.size()));
  // Checks both limits before the allocation: in a file of another format the first eight bytes may
  // be any number.
  const auto length = LoadLittle<std::uint64_t>(prefix.data());
  if (length > kMaxHeaderBytes) {
    return BadSafetensorsHeader(std::to_string(length) + " bytes, the format allows " +
                                std::to_string(kMaxHeaderBytes))
        .WithContext(file.path());
  }
  if (length > info.size - 8) {
    return BadSafetensorsHeader(std::to_string(length) + " bytes do not fit in a file of " +
                                std::to_string(info.size))
        .WithContext(file.path());
  }
  std::string json(length, '\0');
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(8, json.data(), json.size()));
  auto header = ParseSafetensorsHeader(json, info.size, unknown);
  if (!header.ok()) return header.status().WithContext(file.path());
  return header;
}

// Eight bytes are for the length, which Finish fills in. Text is appended in its final form, so
// that a header of a million tensors is in memory once.
SafetensorsHeaderWriter::SafetensorsHeaderWriter(std::size_t tensors) : out_(8, '\0') {
  keys_.reserve(tensors);
  out_ += '{';
}

Status SafetensorsHeaderWriter::AddMetadata(const std::map<std::string, std::string>& metadata) {
  if (metadata.empty()) return {};
  AppendJsonString(kMetadataKey, out_);
  char before = '{';
  out_ += ':';
  for (const auto& [name, value] : metadata) {
    if (!IsUtf8(name) || !IsUtf8(value)) {
      return BadEntry(Code::kInvalidArgument, kMetadataKey, "an entry is not UTF-8");
    }
    out_ += before;
    before = ',';
    AppendJsonString(name, out_);
    out_ += ':';
    AppendJsonString(value, out_);
  }
  out_ += '}';
  return {};
}

Result<std::uint64_t> SafetensorsHeaderWriter::Add(std::string_view key, DType dtype,
                                                   const Dims& shape) {
  const DTypeInfo& info = InfoOf(dtype);
  if (info.safetensors.empty()) {
    return BadEntry(Code::kUnsupported, key,
                    "the format has no element type " + std::string(info.name));
  }
  const auto bad = [&](const std::string& why) {
    return BadEntry(Code::kInvalidArgument, key, why);
  };
  if (key == kMetadataKey) return bad("the name is reserved");
  if (!IsUtf8(key)) return bad("is not UTF-8");
  if (!keys_.insert(key).second) return bad("occurs twice");
  const auto bytes = PackedBytes(dtype, shape);
  const auto end = bytes ? CheckedAdd(at_, *bytes) : std::nullopt;
  if (!end) return bad("shape " + shape.ToString() + " overflows or does not fill whole bytes");
  const std::uint64_t begin = std::exchange(at_, *end);
  if (out_.size() - 8 > kMaxHeaderBytes) return begin;  // Finish then reports the error.
  if (out_.size() > 9) out_ += ',';
  AppendJsonString(key, out_);
  out_ += ":{\"dtype\":\"";
  out_ += info.safetensors;
  out_ += "\",\"shape\":[";
  for (int a = 0; a < shape.rank(); ++a) {
    if (a > 0) out_ += ',';
    AppendNumber(static_cast<std::uint64_t>(shape[a]), out_);
  }
  out_ += "],\"data_offsets\":[";
  AppendNumber(begin, out_);
  out_ += ',';
  AppendNumber(*end, out_);
  out_ += "]}";
  return begin;
}

Result<std::string> SafetensorsHeaderWriter::Finish(std::uint64_t alignment) {
  if (alignment < 8 || (alignment & (alignment - 1)) != 0 || alignment > kMaxHeaderBytes) {
    return Status(Code::kInvalidArgument, "safetensors header: alignment " +
                                              std::to_string(alignment) +
                                              " is not a power of two that is at least 8");
  }
  // Blanks after the object count in the header's length; every reader accepts them.
  out_ += '}';
  out_.append((alignment - out_.size() % alignment) % alignment, ' ');
  if (out_.size() - 8 > kMaxHeaderBytes) {
    return Status(Code::kInvalidArgument, "safetensors header: more than the " +
                                              std::to_string(kMaxHeaderBytes) +
                                              " bytes that the format allows");
  }
  StoreLittle<std::uint64_t>(out_.data(), out_.size() - 8);
  return std::move(out_);
}

Result<std::string> MakeSafetensorsHeader(std::vector<SafetensorsEntry>& entries,
                                          const std::map<std::string, std::string>& metadata,
                                          std::uint64_t alignment) {
  SafetensorsHeaderWriter writer(entries.size());
  TENSORMOUNT_RETURN_IF_ERROR(writer.AddMetadata(metadata));
  for (SafetensorsEntry& e : entries) {
    TENSORMOUNT_ASSIGN_OR_RETURN(e.begin, writer.Add(e.key, e.dtype, e.shape));
    e.end = e.begin + *PackedBytes(e.dtype, e.shape);
  }
  return writer.Finish(alignment);
}

}  // namespace tensormount
