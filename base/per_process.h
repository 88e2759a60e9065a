// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_PER_PROCESS_H_
#define TENSORMOUNT_BASE_PER_PROCESS_H_

#include <atomic>
#include <memory>
#include <unistd.h>

namespace tensormount {

// The T of this process, created on first use and never destroyed, so that atexit functions may use
// it. A forked child gets a new T, because the threads of the parent do not exist in the child: one
// of them might hold a mutex of the old T, or be waited for forever.
// A member of an object that lives as long as the process, or a static.
template <typename T>
class PerProcessMember {
 public:
  T& Get() {
    Node* known = newest_.load();
    while (known == nullptr || known->process != getpid()) {
      auto made = std::make_unique<Node>();
      made->parents = known;
      if (newest_.compare_exchange_strong(known, made.get())) known = made.release();
    }
    return known->value;
  }

 private:
  struct Node {
    const pid_t process = getpid();
    Node* parents = nullptr;  // The parent process's node; kept, never used.
    T value;
  };
  std::atomic<Node*> newest_ = nullptr;
};

// The T of this process for all callers.
template <typename T>
T& PerProcess() {
  static PerProcessMember<T> member;
  return member.Get();
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_PER_PROCESS_H_
