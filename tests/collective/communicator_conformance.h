// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_COMMUNICATOR_CONFORMANCE_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_COMMUNICATOR_CONFORMANCE_H_

#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

namespace tensormount {

// What every Communicator must do, whatever carries its messages. A case is run by all ranks of a
// group at once; each returns what it found wrong. Cases use tags of their own, so that they may
// follow each other on one communicator.
struct ConformanceCase {
  const char* name;
  int min_ranks;
  Status (*body)(Communicator&);
  // Leaves messages behind: nothing may follow it on the same communicator. Stands last.
  bool cancels = false;
};

const std::vector<ConformanceCase>& ConformanceCases();

// All cases that fit the group, one after the other: with `cancels` those that cancel alone.
Status Conform(Communicator& comm, bool cancels);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_COMMUNICATOR_CONFORMANCE_H_
