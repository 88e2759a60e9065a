// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_REPORT_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_REPORT_H_

#include <string_view>

#include "tensormount/status.h"
#include "tensormount/validate.h"

#include "base/coding.h"

// The encoding of a LayoutReport in messages between ranks.

namespace tensormount {

void EncodeReport(ByteWriter& out, const LayoutReport& report);
// Reads a report from a message. Malformed bytes fail with kDataLoss "<what>: ...".
Result<LayoutReport> DecodeReport(ByteReader& in, std::string_view what);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_REPORT_H_
