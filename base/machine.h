// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_MACHINE_H_
#define TENSORMOUNT_BASE_MACHINE_H_

#include <cstdint>

namespace tensormount {

// A hash of the kernel's boot id: equal for processes on one running machine, containers included.
std::uint64_t MachineHash();

// The number of cores that this thread may run on (sched_getaffinity); at least 1.
int AllowedCores();

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_MACHINE_H_
