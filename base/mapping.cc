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

using SignalAction = struct sigaction;  // sigaction alone is the function.

constexpr std::uintptr_t kPageBytes = 4096;

// Where this thread goes on when a page cannot be had; null: nowhere.
thread_local sigjmp_buf* t_escape = nullptr;
std::atomic<bool> g_enabled{false};
SignalAction g_before{};

// Runs on the thread that touched the page, in the middle of any instruction: it may call nothing
// that is not safe in a signal handler. si_code above zero: the kernel's own, not one that kill(2)
// sent.
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
  SignalAction plain{};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGBUS, &plain, nullptr);
  if (info->si_code <= 0) raise(SIGBUS);
}

}  // namespace

bool EnableMappingGuard() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  // Not a second time where another handler took ours away: it may pass on to ours, and ours to it.
  if (g_enabled.load(std::memory_order_acquire)) return MappingGuarded();
  SignalAction action{};
  action.sa_sigaction = OnBusError;
  sigemptyset(&action.sa_mask);
  // Not blocked while it is handled, since the handler is left by a jump.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  const bool good = sigaction(SIGBUS, &action, &g_before) == 0;
  g_enabled.store(good, std::memory_order_release);
  return good;
}

bool MappingGuarded() {
  if (!g_enabled.load(std::memory_order_acquire)) return false;
  SignalAction now{};
  return sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
         now.sa_sigaction == OnBusError;
}

void DisableMappingGuard() {
  if (!MappingGuarded()) return;
  sigaction(SIGBUS, &g_before, nullptr);
  g_enabled.store(false, std::memory_order_release);
}

bool RunOnMapping(void (*fn)(void*), void* argument) {
  if (!g_enabled.load(std::memory_order_acquire)) {
    fn(argument);
    return true;
  }
  sigset_t bus;
  sigset_t before;
  sigemptyset(&bus);
  sigaddset(&bus, SIGBUS);
  pthread_sigmask(SIG_UNBLOCK, &bus, &before);
  sigjmp_buf escape;
  sigjmp_buf* const outer = t_escape;
  const bool good = sigsetjmp(escape, 0) == 0;
  if (good) {
    t_escape = &escape;
    fn(argument);
  }
  t_escape = outer;
  // After a jump in any case: what calls handlers for us (sanitizers) may block signals meanwhile.
  if (!good || sigismember(&before, SIGBUS) == 1) pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return good;
}

namespace {

// Pages that are asked about in one call.
constexpr std::size_t kAskedPages = 512;
// Whoever touches a page gets its whole folio mapped, or what the kernel maps around a fault. In
// steps of this, most of what is in memory is mapped by few calls (measured with ext4, 64 to 256
// pages are equally good and 512 are not).
constexpr std::size_t kStepPages = 64;

bool PopulatePages(std::uintptr_t begin, std::uintptr_t end) {
#ifdef MADV_POPULATE_READ
  constexpr int kPopulate = MADV_POPULATE_READ;
#else
  constexpr int kPopulate = 22;  // Of a newer kernel than the headers.
#endif
  return madvise(reinterpret_cast<void*>(begin), end - begin, kPopulate) == 0;
}

// At most kAskedPages from a page's first byte on. Of a mapped page this costs 3 ns, of others 70.
bool AreInMemory(std::uintptr_t begin, std::uintptr_t end) {
  unsigned char there[kAskedPages];
  if (mincore(reinterpret_cast<void*>(begin), end - begin, there) != 0) return false;
  const std::size_t pages = (end - begin + kPageBytes - 1) / kPageBytes;
  return std::all_of(there, there + pages, [](unsigned char c) { return (c & 1) != 0; });
}

// Calls fn(begin, end) for blocks of whole pages until it is false.
template <typename Fn>
bool ForEachBlock(const std::byte* data, std::size_t size, Fn fn) {
  const auto stop = reinterpret_cast<std::uintptr_t>(data) + size;
  std::uintptr_t at = reinterpret_cast<std::uintptr_t>(data) / kPageBytes * kPageBytes;
  for (; at < stop; at += kAskedPages * kPageBytes) {
    if (!fn(at, std::min<std::uintptr_t>(stop, at + kAskedPages * kPageBytes))) return false;
  }
  return true;
}

}  // namespace

// To populate all pages costs 160 ns for each, also where they are mapped already: more than
// copying them. So a few are, which maps their neighbours, and the rest only where pages are
// missing then.
bool Populate(const std::byte* data, std::size_t size, bool mincore_is_true) {
  return ForEachBlock(data, size, [&](std::uintptr_t begin, std::uintptr_t end) {
    if (!mincore_is_true) return PopulatePages(begin, end);
    if (!AreInMemory(begin, std::min(end, begin + kPageBytes))) return PopulatePages(begin, end);
    for (std::uintptr_t at = begin; at < end; at += kStepPages * kPageBytes) {
      if (!PopulatePages(at, std::min(end, at + kPageBytes))) return false;
    }
    // The last page by itself: of a file that was cut short mincore knows pages behind its end.
    const std::uintptr_t last = (end - 1) / kPageBytes * kPageBytes;
    return AreInMemory(begin, end) ? PopulatePages(last, end) : PopulatePages(begin, end);
  });
}

bool InMemory(const std::byte* data, std::size_t size) {
  return ForEachBlock(data, size, AreInMemory);
}

bool LooksInMemory(const std::byte* data, std::size_t size) {
  constexpr std::uintptr_t kEach = 64 * 1024;
  const auto end = reinterpret_cast<std::uintptr_t>(data) + size;
  auto at = reinterpret_cast<std::uintptr_t>(data) / kPageBytes * kPageBytes;
  for (; at < end; at += kEach) {
    if (!AreInMemory(at, at + 1)) return false;
  }
  return true;
}

}  // namespace tensormount
