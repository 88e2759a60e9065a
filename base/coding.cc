// SPDX-License-Identifier: Apache-2.0
// A reader remembers its first failure and gives zeros from then on, so that decoders read field
// after field and ask once, at the end, whether all of them were there. No length that was read is
// believed before the bytes behind it are counted.
#include "base/coding.h"

#include <bit>

namespace tensormount {

static_assert(std::endian::native == std::endian::little,
              "records and tensors are little-endian, and fixed fields are copied as they are");

std::string_view ByteReader::String(std::size_t max) {
  const std::uint32_t n = U32();
  if (n > max) {
    // As if the bytes had ended here: nothing behind a field that is wrong can be trusted.
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
                                     " bytes too many after byte " + std::to_string(at_));
}

}  // namespace tensormount
