// SPDX-License-Identifier: Apache-2.0
#include "tests/support/twin_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sys/mman.h>
#include <unistd.h>

namespace tensormount {

void AbortDevice(const std::string& why) {
  std::fprintf(stderr, "device of the tests: %s\n", why.c_str());
  std::abort();
}

TwinMemory::TwinMemory(std::size_t bytes) : size(std::max<std::size_t>(bytes, 1)) {
  const int fd = memfd_create("twin memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) AbortDevice("memfd");
  void* const here = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* const there = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (here == MAP_FAILED || there == MAP_FAILED) AbortDevice("mmap");
  close(fd);
  bytes_here = static_cast<std::byte*>(here);
  address = static_cast<std::byte*>(there);
}

TwinMemory::~TwinMemory() {
  munmap(bytes_here, size);
  munmap(address, size);
}

std::byte* TwinMemories::Add(std::size_t bytes) {
  auto memory = std::make_shared<TwinMemory>(bytes);
  std::lock_guard lock(mutex_);
  memory_.emplace(memory->address, memory);
  return memory->address;
}

bool TwinMemories::Remove(const std::byte* address) {
  std::lock_guard lock(mutex_);
  return memory_.erase(address) == 1;
}

std::shared_ptr<TwinMemory> TwinMemories::Find(const void* address) {
  std::lock_guard lock(mutex_);
  const auto* const at = static_cast<const std::byte*>(address);
  const auto above = memory_.upper_bound(at);
  if (above == memory_.begin()) return nullptr;
  const std::shared_ptr<TwinMemory>& memory = std::prev(above)->second;
  return at < memory->address + memory->size ? memory : nullptr;
}

std::byte* TwinMemories::Reveal(const void* address, std::size_t bytes) {
  const std::shared_ptr<TwinMemory> memory = Find(address);
  const auto* const at = static_cast<const std::byte*>(address);
  if (memory == nullptr || at + bytes > memory->address + memory->size) {
    AbortDevice("an access outside of what was allocated");
  }
  return memory->bytes_here + (at - memory->address);
}

std::size_t TwinMemories::count() {
  std::lock_guard lock(mutex_);
  return memory_.size();
}

}  // namespace tensormount
