// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CODING_H_
#define TENSORMOUNT_BASE_CODING_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/hash.h"

// Little-endian records (docs/format.md). tensormount builds only for little-endian machines
// (checked in coding.cc), so a fixed-size field is a memcpy.
//
// There is no schema and no tags: a record is its fields in order, without padding. Records that
// may grow begin with a version or a length, which their own encoders and decoders handle
// (index/records, collective/comm, fs/save/journal.cc).

namespace tensormount {

// Loads a little-endian number from any alignment.
template <typename T>
T LoadLittle(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}
template <typename T>
void StoreLittle(void* p, T v) {
  std::memcpy(p, &v, sizeof(T));
}

// Appends fields to a byte string that it owns. It cannot fail: the encoder checks beforehand that
// its decoder accepts the values (for example, lengths fit 32 bits).
//
//   ByteWriter out;
//   out.U32(file);
//   out.U64(offset);
//   return std::move(out.bytes());  // 12 bytes.
class ByteWriter {
 public:
  void U8(std::uint8_t v) { Raw(&v, 1); }
  void U16(std::uint16_t v) { Raw(&v, 2); }
  void U32(std::uint32_t v) { Raw(&v, 4); }
  void U64(std::uint64_t v) { Raw(&v, 8); }
  void I64(std::int64_t v) { Raw(&v, 8); }
  void F64(double v) { Raw(&v, 8); }
  // Appends the low half first: the little-endian 128-bit number.
  void Hash(const Hash128& h) {
    U64(h.low);
    U64(h.high);
  }
  // Appends a u32 length and the bytes, which are arbitrary and not terminated (CheckKey, not this
  // function, requires UTF-8 for keys).
  void String(std::string_view s) {
    U32(static_cast<std::uint32_t>(s.size()));
    Raw(s.data(), s.size());
  }
  // Appends bytes without their length, which the reader must know.
  void Raw(const void* p, std::size_t n) { out_.append(static_cast<const char*>(p), n); }

  // The bytes so far; move them out when complete. Not const, so that an encoder can fill in a
  // length or count later.
  std::string& bytes() { return out_; }
  std::size_t size() const { return out_.size(); }

 private:
  std::string out_;
};

// Reads fields from bytes that it does not own. A read past the end yields zeros and makes
// `status()` kDataLoss permanently, so that a record is decoded first and checked once:
//
//   ByteReader in(bytes, "index: object");
//   const std::uint32_t file = in.U32();
//   const std::uint64_t offset = in.U64();
//   TENSORMOUNT_RETURN_IF_ERROR(in.Finish());  // Only now do the fields mean anything.
//
// Compare a count with left() before allocating memory for it: until then it is untrusted.
class ByteReader {
 public:
  // `what` names the object in errors. `data` and `what` must outlive the reader.
  ByteReader(std::string_view data, std::string_view what) : data_(data), what_(what) {}

  std::uint8_t U8() { return Fixed<std::uint8_t>(); }
  std::uint16_t U16() { return Fixed<std::uint16_t>(); }
  std::uint32_t U32() { return Fixed<std::uint32_t>(); }
  std::uint64_t U64() { return Fixed<std::uint64_t>(); }
  std::int64_t I64() { return Fixed<std::int64_t>(); }
  double F64() { return Fixed<double>(); }
  Hash128 Hash() {
    const std::uint64_t low = U64();
    return {low, U64()};
  }
  // Reads a u32 length and that many bytes; a length over `max` is an error before any allocation.
  // The view points into the reader's data, without a copy.
  std::string_view String(std::size_t max);
  std::string_view Raw(std::size_t n);

  // Number of unread bytes: an upper bound for the number of items that can follow.
  std::size_t left() const { return data_.size() - at_; }
  std::size_t position() const { return at_; }
  // kDataLoss "<what>: truncated at byte N" if a read went past the end.
  Status status() const;
  // Like status(), and kDataLoss if bytes are left over, because writer and reader then disagree
  // about the record.
  Status Finish() const;

 private:
  // Reads a number of fixed size. After a failure left() is 0, so that every later read fails, too,
  // even one of fewer bytes.
  template <typename T>
  T Fixed() {
    if (left() < sizeof(T)) {
      failed_ = true;
      at_ = data_.size();
      return T{};
    }
    T v = LoadLittle<T>(data_.data() + at_);
    at_ += sizeof(T);
    return v;
  }

  std::string_view data_;
  std::string_view what_;
  std::size_t at_ = 0;
  bool failed_ = false;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_CODING_H_
