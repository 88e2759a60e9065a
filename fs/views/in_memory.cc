// SPDX-License-Identifier: Apache-2.0
#include "fs/views/in_memory.h"

#include <algorithm>
#include <cstdint>
#include <sys/mman.h>

namespace tensormount::fs {

bool InMemory(const std::byte* data, std::size_t size) {
  constexpr std::uintptr_t kPageBytes = 4096;
  constexpr std::size_t kPages = 512;
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  unsigned char there[kPages];
  for (std::uintptr_t from = at / kPageBytes * kPageBytes; from < at + size;
       from += kPages * kPageBytes) {
    const std::size_t bytes = std::min<std::size_t>(at + size - from, kPages * kPageBytes);
    if (mincore(reinterpret_cast<void*>(from), bytes, there) != 0) return false;
    const std::size_t pages = (bytes + kPageBytes - 1) / kPageBytes;
    if (!std::all_of(there, there + pages, [](unsigned char c) { return (c & 1) != 0; })) {
      return false;
    }
  }
  return true;
}

}  // namespace tensormount::fs
