// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_STATUS_WIRE_H_
#define TENSORMOUNT_COLLECTIVE_COMM_STATUS_WIRE_H_

#include "tensormount/status.h"

#include "base/coding.h"

// A status as other ranks are told it, with its code, errno, words and fields.

namespace tensormount {

// What befell `rank`, as all ranks are told it: named in words and, where the failure itself names
// no other one (whom that rank waited for in vain), as a field. Ok stays ok.
Status FromRank(int rank, const Status& status);

// Words over 1 MiB are cut, fields that are impossibly long left out.
void WriteStatus(ByteWriter& out, const Status& status);
// Ok as well as failures; garbage makes the reader's own status a failure or gives kDataLoss.
Status ReadStatus(ByteReader& in);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STATUS_WIRE_H_
