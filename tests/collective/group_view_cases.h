// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_GROUP_VIEW_CASES_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_GROUP_VIEW_CASES_H_

#include "tensormount/communicator.h"
#include "tensormount/status.h"

namespace tensormount {

// Run by all ranks of a group; return what was wrong.

// A channel does what any communicator does; jobs on two channels, each on a thread of its own, and
// on the group itself do not disturb each other.
Status ExerciseChannels(Communicator& comm);
// The group cut in two, odd and even ranks backwards, both parts at work at once, each with a
// channel and a subgroup of its own.
Status ExerciseSubgroups(Communicator& comm);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_GROUP_VIEW_CASES_H_
