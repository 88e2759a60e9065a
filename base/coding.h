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

// Little-endian records, as docs/format.md gives them. tensormount builds for little-endian
// machines only (checked in coding.cc), so that a fixed field is a memcpy.
//
// There is no schema and there are no tags: a record is its fields in order, without padding, and
// both sides know the order. What may grow has a version or a length in front of it, which the
// record's own encoder and decoder deal with (index/records, collective/comm, fs/save/journal.cc).

namespace tensormount {

// Little-endian, at any alignment. Every byte that we store or send is little-endian, and so is
// every machine that this is built for; a port to another would swap here and nowhere else.
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

// Appends fields to a byte string that it owns. It cannot fail: whoever encodes something checks
// before that its decoder will take it (lengths fit 32 bits, say).
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
  // Low half first: with little-endian halves that is the 128-bit number, little-endian.
  void Hash(const Hash128& h) {
    U64(h.low);
    U64(h.high);
  }
  // u32 length, then the bytes. Not terminated, and any bytes: keys are UTF-8 by CheckKey, not
  // here.
  void String(std::string_view s) {
    U32(static_cast<std::uint32_t>(s.size()));
    Raw(s.data(), s.size());
  }
  // Bytes whose number the reader knows from elsewhere.
  void Raw(const void* p, std::size_t n) { out_.append(static_cast<const char*>(p), n); }

  // What was written so far; to be moved out of when it is complete. Not const, so that an encoder
  // can come back and fill in a length or a count that it wrote as zero.
  std::string& bytes() { return out_; }
  std::size_t size() const { return out_.size(); }

 private:
  std::string out_;
};

// Reads fields from bytes that somebody else owns. A read past the end yields zeros and makes
// `status()` kDataLoss for good, so that a record is decoded first and checked once:
//
//   ByteReader in(bytes, "index: object");
//   const std::uint32_t file = in.U32();
//   const std::uint64_t offset = in.U64();
//   TENSORMOUNT_RETURN_IF_ERROR(in.Finish());  // Only now do the fields mean anything.
//
// A count is compared with left() before memory is taken for that many records: until then it is a
// claim of whoever wrote the bytes.
class ByteReader {
 public:
  // `what` names the object in the error; must outlive the reader.
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
  // A u32 length and its bytes; a length over `max` is an error before anything is allocated. The
  // view is of the reader's own data: no copy, and it lives as long as that.
  std::string_view String(std::size_t max);
  std::string_view Raw(std::size_t n);

  // Bytes not read yet: the most that any count that follows can be about.
  std::size_t left() const { return data_.size() - at_; }
  std::size_t position() const { return at_; }
  // kDataLoss "<what>: truncated at byte N" once a read went past the end.
  Status status() const;
  // The same, and an error when bytes are left over: of a record that is decoded to its end, more
  // bytes than fields mean that writer and reader do not speak of the same record.
  Status Finish() const;

 private:
  // After a failure nothing is left, so every later read fails as well, and none can succeed by
  // being shorter than the one that did not fit.
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
