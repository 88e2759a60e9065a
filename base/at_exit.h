// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_AT_EXIT_H_
#define TENSORMOUNT_BASE_AT_EXIT_H_

#include <utility>

namespace tensormount {

// Calls `fn` when its scope is left, in whatever way; never after Cancel(). For what must be undone
// or told on every path, an exception's too, and is too small for a class of its own. `fn` must not
// throw. On the stack of one thread:
//
//   AtExit take_back([&] { registrar.Unregister(id); });
//   ...            // Every return from here on takes it back,
//   take_back.Cancel();  // until it is somebody else's.
template <typename Fn>
class [[nodiscard]] AtExit {
 public:
  explicit AtExit(Fn fn) : fn_(std::move(fn)) {}
  ~AtExit() {
    if (wanted_) fn_();
  }
  AtExit(const AtExit&) = delete;
  AtExit& operator=(const AtExit&) = delete;

  void Cancel() { wanted_ = false; }

 private:
  Fn fn_;
  bool wanted_ = true;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_AT_EXIT_H_
