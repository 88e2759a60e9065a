// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_BULK_TRANSPORT_CONFORMANCE_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_BULK_TRANSPORT_CONFORMANCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "collective/comm/bulk_transport.h"

namespace tensormount {

// One rank of a case, and how it makes its transport: together with all others.
struct BulkRank {
  Communicator& comm;
  std::function<Result<std::unique_ptr<BulkTransport>>()> make;
  Device device;            // Of the memory that blocks lie in.
  std::uint64_t seed = 1;   // The same on all ranks.
  int plans = 4;            // Random ones to try.
  std::size_t many = 2000;  // Units of a plan with many.
  bool names_one = true;    // It knows which unit is late, not only which group.
};

// What every kind of BulkTransport must do. A case is run by all ranks of a group at once; each
// returns what it found wrong. Cases may follow each other on one communicator: they leave nothing
// in it that the next transport could take for its own.
struct BulkCase {
  const char* name;
  int min_ranks;
  Status (*body)(BulkRank&);
};
const std::vector<BulkCase>& BulkCases();

// All cases that fit the group, one after the other, and the first once more.
Status ConformBulk(BulkRank& rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_BULK_TRANSPORT_CONFORMANCE_H_
