// SPDX-License-Identifier: Apache-2.0
#include "base/mapping_guard.h"

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <mutex>

namespace tensormount {
namespace {

// Where this thread goes on when a page cannot be had; null: nowhere.
thread_local sigjmp_buf* t_escape = nullptr;
std::atomic<bool> g_enabled{false};
struct sigaction g_before {};

void OnBusError(int signal, siginfo_t* info, void* context) {
  if (t_escape != nullptr && info->si_code > 0) siglongjmp(*t_escape, 1);
  if ((g_before.sa_flags & SA_SIGINFO) != 0 && g_before.sa_sigaction != nullptr) {
    g_before.sa_sigaction(signal, info, context);
    return;
  }
  if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(signal);
    return;
  }
  // As it would have been: returning runs into the fault again, without us.
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGBUS, &plain, nullptr);
  if (info->si_code <= 0) raise(SIGBUS);
}

}  // namespace

void EnableMappingGuard() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action {};
    action.sa_sigaction = OnBusError;
    sigemptyset(&action.sa_mask);
    // Not blocked while it is handled, since the handler is left by a jump.
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    g_enabled.store(sigaction(SIGBUS, &action, &g_before) == 0, std::memory_order_release);
  });
}

bool RunOnMapping(void (*fn)(void*), void* argument) {
  if (!g_enabled.load(std::memory_order_acquire)) {
    fn(argument);
    return true;
  }
  sigjmp_buf escape;
  sigjmp_buf* const outer = t_escape;
  if (sigsetjmp(escape, 0) != 0) {
    t_escape = outer;
    return false;
  }
  t_escape = &escape;
  fn(argument);
  t_escape = outer;
  return true;
}

}  // namespace tensormount
