// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_TWIN_MEMORY_H_
#define TENSORMOUNT_TESTS_SUPPORT_TWIN_MEMORY_H_

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

// Memory that plays that of a device: where the device says it is nobody may touch it (who tries
// ends with SIGSEGV), and the test's own device reaches it elsewhere.

namespace tensormount {

// Ends the process: what a real device would not survive either.
[[noreturn]] void AbortDevice(const std::string& why);

// One piece of memory, mapped twice.
struct TwinMemory {
  explicit TwinMemory(std::size_t bytes);
  ~TwinMemory();
  TwinMemory(const TwinMemory&) = delete;
  TwinMemory& operator=(const TwinMemory&) = delete;

  const std::size_t size;
  std::byte* address = nullptr;     // Of the device.
  std::byte* bytes_here = nullptr;  // That can be read.
};

// All of a device. Thread-safe.
class TwinMemories {
 public:
  std::byte* Add(std::size_t bytes);
  // False where there is none that begins there.
  bool Remove(const std::byte* address);
  // Null where the address is in none.
  std::shared_ptr<TwinMemory> Find(const void* address);
  // Where `bytes` bytes from a device's address on can be read; aborts where they are not all of
  // one piece of memory.
  std::byte* Reveal(const void* address, std::size_t bytes = 1);
  std::size_t count();

 private:
  std::mutex mutex_;
  std::map<const std::byte*, std::shared_ptr<TwinMemory>> memory_;  // By first byte.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_TWIN_MEMORY_H_
