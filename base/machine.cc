// SPDX-License-Identifier: Apache-2.0
// Finds out on which machine a process runs.
#include "base/machine.h"

#include <fstream>
#include <string>

#include "base/hash.h"

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

}  // namespace tensormount
