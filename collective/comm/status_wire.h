// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_STATUS_WIRE_H_
#define TENSORMOUNT_COLLECTIVE_COMM_STATUS_WIRE_H_

#include "tensormount/status.h"

#include "base/coding.h"

// A status in a message to other ranks, with its code, errno, message and fields.

namespace tensormount {

// Adds `rank` to a failure before all ranks get it: to the message and, unless the failure already
// names another rank (one that `rank` waited for), to the field. Ok stays ok.
Status FromRank(int rank, const Status& status);

// Appends a status to a message. A status message over 1 MiB is cut, fields over 64 KiB are
// omitted.
void WriteStatus(ByteWriter& out, const Status& status);
// Reads a status, ok or a failure. Invalid bytes set a failure in `in`, or return kDataLoss.
Status ReadStatus(ByteReader& in);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STATUS_WIRE_H_
