// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CANCEL_SCOPE_H_
#define TENSORMOUNT_BASE_CANCEL_SCOPE_H_

#include <atomic>

namespace tensormount {

// As long as it lives, waits of this thread for answers of servers end with kCancelled once the
// flag is set. For operations that make many requests through interfaces without such a parameter.
// Scopes nest; the innermost one counts. `flag` may be null and must outlive the scope.
class CancelScope {
 public:
  explicit CancelScope(const std::atomic<bool>* flag) : before_(current_) { current_ = flag; }
  ~CancelScope() { current_ = before_; }
  CancelScope(const CancelScope&) = delete;
  CancelScope& operator=(const CancelScope&) = delete;

  static bool IsCancelled() { return current_ != nullptr && current_->load(); }
  // The flag of this thread, for a thread that works for it and ends before the scope does. May be
  // null.
  static const std::atomic<bool>* Current() { return current_; }
  // Sets the flag of a thread that has no scope; null: none. For callers that cannot hold an object
  // (tm_task_watch_thread). Scopes that are made later end before it counts again.
  static void SetForThread(const std::atomic<bool>* flag) { current_ = flag; }

 private:
  static inline thread_local const std::atomic<bool>* current_ = nullptr;
  const std::atomic<bool>* const before_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_CANCEL_SCOPE_H_
