// SPDX-License-Identifier: Apache-2.0
// Headers of .npy files, which are Python literals written by NumPy and others: the parser accepts
// the literals that occur in such headers, in any order and spacing, and evaluates nothing.
#include "shard/npy.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/coding.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

Status BadNpyHeader(const std::string& why) {
  return Status(Code::kDataLoss, "npy header: " + why);
}

// Printable text of at most 64 bytes, for messages.
std::string Shown(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 64)) out += c >= ' ' && c < 127 ? c : '?';
  return out + (text.size() > 64 ? "...'" : "'");
}

// A parser for the Python literals of these headers.
class Literal {
 public:
  Literal(std::string_view text, bool python2) : text_(text), python2_(python2) {}

  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool Take(char c) {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool Take(std::string_view word) {
    SkipSpace();
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  bool At(char c) {
    SkipSpace();
    return at_ < text_.size() && text_[at_] == c;
  }
  // Parses a string without escapes, which occur in no name of a type or key.
  std::optional<std::string_view> String() {
    SkipSpace();
    if (at_ == text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return std::nullopt;
    const std::size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view inner = text_.substr(at_ + 1, end - at_ - 1);
    if (inner.find('\\') != std::string_view::npos) return std::nullopt;
    at_ = end + 1;
    return inner;
  }
  // Parses a number, as in Python without leading zeros.
  std::optional<std::int64_t> Number() {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] < '0' || text_[at_] > '9') return std::nullopt;
    const bool zero = text_[at_] == '0';
    std::int64_t value = 0;
    const char* const begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error != std::errc() || (zero && value != 0)) return std::nullopt;
    at_ += static_cast<std::size_t>(end - begin);
    // Python 2 wrote "3L", which NumPy accepts, except in version 3, which Python 2 never wrote.
    if (python2_ && at_ < text_.size() && text_[at_] == 'L') ++at_;
    return value;
  }
  bool AtEnd() {
    SkipSpace();
    return at_ == text_.size();
  }
  std::string PositionText() const { return "byte " + std::to_string(at_) + " of its dictionary"; }

 private:
  std::string_view text_;
  bool python2_;
  std::size_t at_ = 0;
};

Result<Dims> ParseShape(Literal& in) {
  if (!in.Take('(')) return BadNpyHeader(in.PositionText() + ": the shape is not a tuple");
  Dims shape;
  while (!in.Take(')')) {
    const auto extent = in.Number();
    if (!extent)
      return BadNpyHeader(in.PositionText() +
                          ": the shape contains a value that is not an integer");
    if (shape.rank() == kMaxRank) {
      return Status(Code::kUnsupported,
                    "npy header: more than " + std::to_string(kMaxRank) + " axes");
    }
    shape.push_back(*extent);
    if (in.Take(',')) continue;
    // "(3)" is a number, not a tuple.
    if (!in.At(')') || shape.rank() == 1) {
      return BadNpyHeader(in.PositionText() + ": the shape is not a tuple of integers");
    }
  }
  return shape;
}

// Name of an unsupported kind of elements, for messages.
std::string KindName(std::string_view descr) {
  const std::size_t at = descr.find_first_not_of("<>=|");
  switch (at == std::string_view::npos ? '\0' : descr[at]) {
    case 'O':
      return "Python objects (pickles)";
    case 'U':
    case 'S':
    case 'a':
      return "text";
    case 'M':
    case 'm':
      return "dates or times";
    case 'V':
      return "raw bytes of an unknown type";
    default:
      return "unknown type";
  }
}

}  // namespace

Result<std::string> MakeNpyHeader(DType dtype, const Dims& shape) {
  const DTypeInfo& info = InfoOf(dtype);
  if (info.npy_descr.empty()) {
    return Status(Code::kUnsupported,
                  "element type " + std::string(info.name) +
                      " cannot be stored in .npy files, whose elements are whole bytes");
  }
  std::string dict =
      "{'descr': '" + std::string(info.npy_descr) + "', 'fortran_order': False, 'shape': (";
  for (int a = 0; a < shape.rank(); ++a) {
    if (a > 0) dict += ' ';
    dict += std::to_string(shape[a]);
    if (a + 1 < shape.rank() || shape.rank() == 1) dict += ',';
  }
  dict += "), }";
  // NumPy leaves space for the first extent to grow to 21 digits. With the same space, our file of
  // an array equals NumPy's.
  if (shape.rank() > 0) {
    const std::size_t digits = std::to_string(shape[0]).size();
    dict.append(21 - std::min<std::size_t>(digits, 21), ' ');
  }
  constexpr std::size_t kPrefix = 10;  // The bytes of magic, version and length.
  constexpr std::size_t kAlign = 64;
  // 1 to 64 spaces, like NumPy. The header of 16 axes is far below the 65,535 bytes of version 1.0.
  dict.append(kAlign - (kPrefix + dict.size() + 1) % kAlign, ' ');
  dict += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(dict.size() & 0xFF);
  header += static_cast<char>(dict.size() >> 8);
  return header + dict;
}

Result<DType> DTypeFromNpyDescr(std::string_view descr) {
  const auto unsupported = [&](const std::string& what) {
    return Status(Code::kUnsupported,
                  "element type " + Shown(descr) + " is not supported: " + what);
  };
  if (descr == "<f1") return DType::kF8E5M2;  // ml_dtypes writes float8_e5m2 as "<f1".
  if (descr == "<V1") return unsupported("one-byte floats exist in several formats");
  for (const DTypeInfo& info : AllDTypes()) {
    if (info.npy_descr.empty()) continue;
    if (info.npy_descr == descr) return info.dtype;
    // For one-byte types any byte order is accepted.
    if (info.npy_descr.starts_with('|') && descr.size() == 3 &&
        (descr[0] == '<' || descr[0] == '>' || descr[0] == '=') &&
        info.npy_descr.substr(1) == descr.substr(1)) {
      return info.dtype;
    }
    if (descr.starts_with('>') && info.npy_descr.starts_with('<') &&
        info.npy_descr.substr(1) == descr.substr(1)) {
      return unsupported("big-endian");
    }
  }
  return unsupported(KindName(descr));
}

Result<std::uint64_t> NpyDataOffset(std::string_view first_bytes) {
  if (!first_bytes.starts_with(kMagic)) {
    return BadNpyHeader("does not begin with the magic bytes of .npy files");
  }
  if (first_bytes.size() < 10) return BadNpyHeader("is truncated in its first 10 bytes");
  const auto major = static_cast<unsigned char>(first_bytes[6]);
  const auto minor = static_cast<unsigned char>(first_bytes[7]);
  if (major < 1 || major > 3 || minor != 0) {
    return Status(Code::kUnsupported, "npy header: version " + std::to_string(major) + "." +
                                          std::to_string(minor) + " is not known");
  }
  if (major == 1) return std::uint64_t{10} + LoadLittle<std::uint16_t>(first_bytes.data() + 8);
  if (first_bytes.size() < kNpyPrefix) return BadNpyHeader("truncated");
  const std::uint64_t offset = kNpyPrefix + LoadLittle<std::uint32_t>(first_bytes.data() + 8);
  if (offset > kMaxNpyHeader) {
    return Status(Code::kUnsupported, "npy header: " + std::to_string(offset) + " bytes, at most " +
                                          std::to_string(kMaxNpyHeader) + " are supported");
  }
  return offset;
}

Result<NpyHeader> ParseNpyHeader(std::string_view first_bytes) {
  NpyHeader header;
  TENSORMOUNT_ASSIGN_OR_RETURN(header.data_offset, NpyDataOffset(first_bytes));
  if (header.data_offset > first_bytes.size()) return BadNpyHeader("truncated");
  // Magic and version are 8 bytes, followed by a length of 2 or 4 bytes. Python 2 could write
  // versions 1.0 and 2.0.
  const std::size_t prefix = first_bytes[6] == 1 ? 10 : kNpyPrefix;
  Literal in(first_bytes.substr(prefix, header.data_offset - prefix), first_bytes[6] < 3);
  if (!in.Take('{')) return BadNpyHeader("not a dictionary");
  // Keys may come in any order; NumPy sorts them.
  std::optional<std::string> descr;
  std::optional<bool> fortran;
  std::optional<Dims> shape;
  while (!in.Take('}')) {
    const auto key = in.String();
    if (!key || !in.Take(':')) return BadNpyHeader(in.PositionText() + ": expected a key");
    const bool twice = (*key == "descr" && descr) || (*key == "fortran_order" && fortran) ||
                       (*key == "shape" && shape);
    if (twice) return BadNpyHeader("key " + Shown(*key) + " occurs twice");
    if (*key == "descr") {
      if (in.At('[') || in.At('(')) {
        return Status(Code::kUnsupported,
                      "npy header: elements with several fields are not supported");
      }
      const auto text = in.String();
      if (!text) return BadNpyHeader(in.PositionText() + ": descr is not a string");
      descr = std::string(*text);
    } else if (*key == "fortran_order") {
      if (in.Take(std::string_view("True"))) {
        fortran = true;
      } else if (in.Take(std::string_view("False"))) {
        fortran = false;
      } else {
        return BadNpyHeader(in.PositionText() + ": fortran_order is neither True nor False");
      }
    } else if (*key == "shape") {
      TENSORMOUNT_ASSIGN_OR_RETURN(shape, ParseShape(in));
    } else {
      return BadNpyHeader("unknown key " + Shown(*key));
    }
    if (!in.Take(',') && !in.At('}'))
      return BadNpyHeader(in.PositionText() + ": expected a comma or '}'");
  }
  if (!in.AtEnd())
    return BadNpyHeader(in.PositionText() + ": unexpected bytes after the dictionary");
  if (!descr || !fortran || !shape) return BadNpyHeader("descr, fortran_order or shape is missing");
  TENSORMOUNT_ASSIGN_OR_RETURN(header.dtype, DTypeFromNpyDescr(*descr));
  if (const Status fits = CheckShape(header.dtype, *shape); !fits.ok()) {
    return BadNpyHeader(fits.message());
  }
  header.shape = *shape;
  header.fortran_order = *fortran;
  return header;
}

}  // namespace tensormount
