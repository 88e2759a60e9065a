// SPDX-License-Identifier: Apache-2.0
// Finds out on which machine, and on which of its cores, a process runs.
#include "base/machine.h"

#include <algorithm>
#include <fstream>
#include <sched.h>
#include <string>

#include "base/hash.h"
#include "base/parallel.h"

namespace tensormount {

std::uint64_t MachineHash() {
  static const std::uint64_t machine = [] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    file >> id;
    return Xxh3(id).low;
  }();
  return machine;
}

int AllowedCores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  // Fails on machines with more cores than the set has.
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return static_cast<int>(HostCores());
  return std::max(1, CPU_COUNT(&allowed));
}

}  // namespace tensormount
