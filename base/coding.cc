// SPDX-License-Identifier: Apache-2.0
// A reader remembers its first failure and returns zeros from then on, so that decoders read all
// fields and check once at the end. Lengths are trusted only after comparison with the remaining
// bytes.
#include "base/coding.h"

#include <bit>

namespace tensormount {

static_assert(std::endian::native == std::endian::little,
              "tensormount needs a little-endian machine: it copies stored numbers as they are");

std::string_view ByteReader::String(std::size_t max) {
  const std::uint32_t n = U32();
  if (n > max) {
    // Fails as if the bytes ended here, because nothing after an invalid field can be trusted.
    failed_ = true;
    at_ = data_.size();
    return {};
  }
  return Raw(n);
}

std::string_view ByteReader::Raw(std::size_t n) {
  if (left() < n) {
    failed_ = true;
    at_ = data_.size();
    return {};
  }
  const std::string_view v = data_.substr(at_, n);
  at_ += n;
  return v;
}

Status ByteReader::status() const {
  if (!failed_) return Status();
  return Status(Code::kDataLoss,
                std::string(what_) + ": truncated at byte " + std::to_string(data_.size()));
}

Status ByteReader::Finish() const {
  TENSORMOUNT_RETURN_IF_ERROR(status());
  if (left() == 0) return Status();
  return Status(Code::kDataLoss, std::string(what_) + ": " + std::to_string(left()) +
                                     " unexpected bytes after byte " + std::to_string(at_));
}

}  // namespace tensormount
