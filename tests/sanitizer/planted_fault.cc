// SPDX-License-Identifier: Apache-2.0
// Commits the fault that its argument names.
#include <cstdio>
#include <limits>
#include <memory>
#include <string_view>
#include <thread>

namespace {

// Volatile, so that no compiler sees through it.
volatile int opaque_zero = 0;

int HeapOverflow() {
  const auto array = std::make_unique<int[]>(4);
  return array[static_cast<std::size_t>(4 + opaque_zero)];
}

int SignedOverflow() { return std::numeric_limits<int>::max() - opaque_zero + (1 - opaque_zero); }

int Leak() {
  // On a thread that ends: its stack, where a copy of the pointer may stand, is not looked through.
  std::thread([] {
    int* volatile block = new int[100];
    block[0] = 1;
  }).join();
  return 0;
}

int DataRace() {
  int shared = 0;
  std::thread writer([&] { shared = 1 + opaque_zero; });
  shared = 2 + opaque_zero;
  writer.join();
  return shared;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view fault = argc == 2 ? argv[1] : "";
  int value = 0;
  if (fault == "heap_overflow") {
    value = HeapOverflow();
  } else if (fault == "signed_overflow") {
    value = SignedOverflow();
  } else if (fault == "leak") {
    value = Leak();
  } else if (fault == "data_race") {
    value = DataRace();
  } else {
    std::fprintf(stderr, "usage: planted_fault heap_overflow|signed_overflow|leak|data_race\n");
    return 2;
  }
  std::printf("nobody noticed: %d\n", value);
  return 0;
}
