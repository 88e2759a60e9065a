// SPDX-License-Identifier: Apache-2.0
// Reading from mapped files: a page that the disk cannot read, or that was truncated, raises
// SIGBUS. The guard turns it into a return value for code inside RunOnMapping, and leaves it
// unchanged for all other code.
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

using SignalAction = struct sigaction;  // Plain `sigaction` names the function.

constexpr std::uintptr_t kPageBytes = 4096;

// Where this thread continues after SIGBUS; null: not in RunOnMapping.
thread_local sigjmp_buf* t_escape = nullptr;
std::atomic<bool> g_enabled{false};
SignalAction g_before{};

// Runs on the thread that accessed the page, between any two instructions, so it makes only
// async-signal-safe calls. si_code above zero: the signal is from the kernel, not from kill(2).
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
  // Default action: returning repeats the fault without our handler.
  SignalAction plain{};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGBUS, &plain, nullptr);
  if (info->si_code <= 0) raise(SIGBUS);
}

}  // namespace

bool EnableMappingGuard() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  // If another handler replaced ours, ours is not installed again: the two could call each other
  // forever.
  if (g_enabled.load(std::memory_order_acquire)) return MappingGuarded();
  SignalAction action{};
  action.sa_sigaction = OnBusError;
  sigemptyset(&action.sa_mask);
  // SA_NODEFER: the handler ends by siglongjmp, which would otherwise leave SIGBUS blocked.
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
  // After a longjmp always restore the mask: sanitizers, which wrap handlers, may have blocked
  // signals.
  if (!good || sigismember(&before, SIGBUS) == 1) pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return good;
}

namespace {

// Pages per mincore call.
constexpr std::size_t kAskedPages = 512;
// Populating one page also maps cached pages around it (its folio). With steps of this size few
// calls map most cached pages (measured on ext4: 64 to 256 pages are equally good, 512 are worse).
constexpr std::size_t kStepPages = 64;

bool PopulatePages(std::uintptr_t begin, std::uintptr_t end) {
#ifdef MADV_POPULATE_READ
  constexpr int kPopulate = MADV_POPULATE_READ;
#else
  constexpr int kPopulate = 22;  // Kernel newer than the headers.
#endif
  return madvise(reinterpret_cast<void*>(begin), end - begin, kPopulate) == 0;
}

// Whether all pages of [begin, end), at most kAskedPages, are in memory; `begin` is page-aligned.
// Costs 3 ns per mapped page, 70 ns per other page.
bool AreInMemory(std::uintptr_t begin, std::uintptr_t end) {
  unsigned char there[kAskedPages];
  if (mincore(reinterpret_cast<void*>(begin), end - begin, there) != 0) return false;
  const std::size_t pages = (end - begin + kPageBytes - 1) / kPageBytes;
  return std::all_of(there, there + pages, [](unsigned char c) { return (c & 1) != 0; });
}

// Calls fn(begin, end) for blocks that begin at a page, until it returns false. The last one ends
// where the data end.
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

// Populating costs 160 ns per page, even if the page is mapped: more than copying the page. So
// Populate first populates a few pages, which maps their neighbours, and populates the rest only if
// pages are still missing.
bool Populate(const std::byte* data, std::size_t size, bool mincore_is_true) {
  return ForEachBlock(data, size, [&](std::uintptr_t begin, std::uintptr_t end) {
    if (!mincore_is_true) return PopulatePages(begin, end);
    if (!AreInMemory(begin, std::min(end, begin + kPageBytes))) return PopulatePages(begin, end);
    for (std::uintptr_t at = begin; at < end; at += kStepPages * kPageBytes) {
      if (!PopulatePages(at, std::min(end, at + kPageBytes))) return false;
    }
    // Always populate the last page: mincore reports cached pages beyond the end of a truncated
    // file.
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
