// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_THREAD_H_
#define TENSORMOUNT_BASE_THREAD_H_

#include <csignal>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

// Threads of the library. The kernel delivers a signal that is sent to the process to any thread
// that does not block it. If a thread of the library took SIGTERM or SIGINT, the program's main
// thread would not be interrupted: in Python the handler only sets a flag that the main thread
// checks. So the library's threads block all signals, except those that a thread raises itself.

namespace tensormount {

// Blocks signals on this thread while it exists. A thread that is started meanwhile inherits the
// mask.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // If one of these were blocked, it would end the process despite a handler. The handler of
    // SIGBUS turns it into EIO (base/mapping.h).
    for (const int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      sigdelset(&all, own);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// While it exists, this thread has the signal mask that RunsCallersCode() was given, if it was. For
// hooks: a program that a hook starts inherits the mask, and must not block SIGTERM because of us.
class CallersSignals {
 public:
  CallersSignals() {
    if (callers_) pthread_sigmask(SIG_SETMASK, &*callers_, &before_);
  }
  ~CallersSignals() {
    if (callers_) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  CallersSignals(const CallersSignals&) = delete;
  CallersSignals& operator=(const CallersSignals&) = delete;

  static sigset_t Current() {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    return mask;
  }
  // This thread of the library calls hooks. `callers`: the mask of the thread that started it.
  static void RunsCallersCode(const sigset_t& callers) { callers_ = callers; }

 private:
  static inline thread_local std::optional<sigset_t> callers_;
  sigset_t before_;
};

// A std::thread or std::jthread that blocks signals.
template <typename StdThread>
class SignalBlockingThread : public StdThread {
 public:
  SignalBlockingThread() = default;
  template <typename Fn, typename... Args>
  requires(!std::is_same_v<std::remove_cvref_t<Fn>,
                           SignalBlockingThread>) explicit SignalBlockingThread(Fn&& fn,
                                                                                Args&&... args)
      : StdThread(Start(std::forward<Fn>(fn), std::forward<Args>(args)...)) {}

 private:
  template <typename... Args>
  static StdThread Start(Args&&... args) {
    const SignalsBlocked blocked;
    return StdThread(std::forward<Args>(args)...);
  }
};

using Thread = SignalBlockingThread<std::thread>;
using JoiningThread = SignalBlockingThread<std::jthread>;

// std::async on a thread that blocks signals.
template <typename Fn>
auto StartAsync(std::launch policy, Fn&& fn) {
  const SignalsBlocked blocked;
  return std::async(policy, std::forward<Fn>(fn));
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_THREAD_H_
