// SPDX-License-Identifier: Apache-2.0
// Reading from mapped files: a page that the disk cannot give, or that was cut off, arrives as
// SIGBUS. The guard turns it into a return value for code that runs inside RunOnMapping, and into
// what it would have been anyway for all other code.
#include "base/mapping.h"

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <sys/mman.h>

namespace tensormount {
namespace {

constexpr std::uintptr_t kPageBytes = 4096;

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

bool MappingGuarded() { return g_enabled.load(std::memory_order_acquire); }

bool RunOnMapping(void (*fn)(void*), void* argument) {
  if (!MappingGuarded()) {
    fn(argument);
    return true;
  }
  sigjmp_buf escape;
  sigjmp_buf* const outer = t_escape;
  // With the signal mask: what calls handlers for us (sanitizers) may block signals meanwhile.
  if (sigsetjmp(escape, 1) != 0) {
    t_escape = outer;
    return false;
  }
  t_escape = &escape;
  fn(argument);
  t_escape = outer;
  return true;
}

bool Populate(const std::byte* data, std::size_t size) {
#ifdef MADV_POPULATE_READ
  constexpr int kPopulate = MADV_POPULATE_READ;
#else
  constexpr int kPopulate = 22;  // Of a newer kernel than the headers.
#endif
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / kPageBytes * kPageBytes;
  const auto end = reinterpret_cast<std::uintptr_t>(data) + size;
  return madvise(reinterpret_cast<void*>(begin), end - begin, kPopulate) == 0;
}

bool InMemory(const std::byte* data, std::size_t size) {
  constexpr std::size_t kPages = 512;
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  unsigned char there[kPages];
  for (std::uintptr_t from = at / kPageBytes * kPageBytes; from < at + size;
       from += kPages * kPageBytes) {
    const std::size_t bytes = std::min<std::size_t>(at + size - from, kPages * kPageBytes);
    if (mincore(reinterpret_cast<void*>(from), bytes, there) != 0) return false;
    const std::size_t pages = (bytes + kPageBytes - 1) / kPageBytes;
    if (!std::all_of(there, there + pages, [](unsigned char c) { return (c & 1) != 0; })) {
      return false;
    }
  }
  return true;
}

}  // namespace tensormount
