// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_PER_PROCESS_H_
#define TENSORMOUNT_BASE_PER_PROCESS_H_

#include <atomic>
#include <memory>
#include <unistd.h>

namespace tensormount {

// The one T of this process, made when it is first asked for and never destroyed, so that atexit
// functions may use it. A forked child gets one of its own: it has none of its parent's threads,
// which might hold a mutex of T, or be waited for in vain.
template <typename T>
T& PerProcess() {
  struct Node {
    const pid_t process = getpid();
    Node* parents = nullptr;  // Of the process that was forked: kept, never used.
    T value;
  };
  static std::atomic<Node*> newest = nullptr;
  Node* known = newest.load();
  while (known == nullptr || known->process != getpid()) {
    auto made = std::make_unique<Node>();
    made->parents = known;
    if (newest.compare_exchange_strong(known, made.get())) known = made.release();
  }
  return known->value;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_PER_PROCESS_H_
