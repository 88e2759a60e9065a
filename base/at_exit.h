// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_AT_EXIT_H_
#define TENSORMOUNT_BASE_AT_EXIT_H_

#include <utility>

namespace tensormount {

// Calls `fn` at the end of its scope, on every path including exceptions, unless cancelled. For
// cleanup that is too small for a class. `fn` must not throw. Used on the stack of one thread:
//
//   AtExit unregister([&] { registrar.Unregister(id); });
//   ...                   // A return or exception here unregisters `id`.
//   unregister.Cancel();  // From here on `id` stays registered.
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
