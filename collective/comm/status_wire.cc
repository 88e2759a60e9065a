// SPDX-License-Identifier: Apache-2.0
// Encodes statuses for messages between ranks.
#include "collective/comm/status_wire.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/box.h"

namespace tensormount {
namespace {

constexpr std::size_t kMaxStatusMessage = std::size_t{1} << 20;
// Maximum length of a text field: more than any key, path or cause has.
constexpr std::size_t kMaxStatusField = std::size_t{1} << 16;

void WriteField(ByteWriter& out, std::string_view text) {
  out.String(text.size() <= kMaxStatusField ? text : std::string_view());
}

void WriteFields(ByteWriter& out, const ErrorFields& fields) {
  out.U32(static_cast<std::uint32_t>(fields.rank + 1));
  WriteField(out, fields.key);
  WriteField(out, fields.file);
  WriteField(out, fields.cause);
  WriteField(out, fields.device);
  const std::size_t axes = fields.box_begin.size();
  const bool box = axes <= static_cast<std::size_t>(kMaxRank) && axes == fields.box_extent.size();
  out.U8(box ? static_cast<std::uint8_t>(axes) : std::uint8_t{0});
  if (!box) return;
  for (const std::int64_t begin : fields.box_begin) out.I64(begin);
  for (const std::int64_t extent : fields.box_extent) out.I64(extent);
}

bool ReadFields(ByteReader& in, ErrorFields& fields) {
  const std::uint32_t rank = in.U32();
  fields.key = in.String(kMaxStatusField);
  fields.file = in.String(kMaxStatusField);
  fields.cause = in.String(kMaxStatusField);
  fields.device = in.String(kMaxStatusField);
  const std::size_t axes = in.U8();
  if (rank > static_cast<std::uint32_t>(std::numeric_limits<int>::max()) ||
      axes > static_cast<std::size_t>(kMaxRank)) {
    return false;
  }
  fields.rank = static_cast<int>(rank) - 1;
  for (std::size_t a = 0; a < axes; ++a) fields.box_begin.push_back(in.I64());
  for (std::size_t a = 0; a < axes; ++a) fields.box_extent.push_back(in.I64());
  return true;
}

}  // namespace

Status FromRank(int rank, const Status& status) {
  return status.WithContext("rank " + std::to_string(rank)).With({.rank = rank});
}

void WriteStatus(ByteWriter& out, const Status& status) {
  out.U8(static_cast<std::uint8_t>(status.code()));
  if (status.ok()) return;
  out.U32(static_cast<std::uint32_t>(status.ToErrno()));
  out.String(std::string_view(status.message()).substr(0, kMaxStatusMessage));
  WriteFields(out, status.fields());
}

Status ReadStatus(ByteReader& in) {
  const std::uint8_t code = in.U8();
  if (code == 0) return Status();
  const std::uint32_t err = in.U32();
  std::string message(in.String(kMaxStatusMessage));
  ErrorFields fields;
  const bool fields_good = ReadFields(in, fields);
  if (code > static_cast<std::uint8_t>(Code::kInternal) || err > 4095 || !fields_good ||
      !in.status().ok()) {
    return Status(Code::kDataLoss, "malformed status from another rank");
  }
  return Status::FromParts(static_cast<Code>(code), static_cast<int>(err), std::move(message))
      .With(fields);
}

}  // namespace tensormount
