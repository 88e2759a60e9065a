// SPDX-License-Identifier: Apache-2.0
// The state of publish_calls.h; the requests are served in fuse_write_ops.cc (RENAME) and
// fuse_read_ops.cc (LOOKUP).
#include "fs/mount/publish_calls.h"

#include <utility>

namespace tensormount::fs {
namespace {

// How long a finished call is kept for the kernel's retry, which comes at once. The kernel does not
// retry if the call was answered in time or its thread was killed.
constexpr std::chrono::seconds kKeptFor{5};

}  // namespace

// Forgets calls that ended more than kKeptFor ago. Requires the lock.
void PublishCalls::DropOld() {
  const auto now = std::chrono::steady_clock::now();
  std::erase_if(calls_, [now](const auto& each) {
    return each.second->result && now - each.second->ended > kKeptFor;
  });
  count_.store(static_cast<int>(calls_.size()), std::memory_order_release);
}

PublishCalls::CallPtr PublishCalls::FindByThread(pid_t thread) {
  if (thread <= 0 || count_.load(std::memory_order_acquire) == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  DropOld();
  const auto it = calls_.find(thread);
  return it == calls_.end() || !it->second->kernel_retries ? nullptr : it->second;
}

PublishCalls::CallPtr PublishCalls::Find(pid_t thread, const Names& names) {
  CallPtr call = FindByThread(thread);
  return call && call->names == names ? call : nullptr;
}

PublishCalls::CallPtr PublishCalls::Add(pid_t thread, Names names) {
  auto call = std::make_shared<Call>(std::move(names));
  const std::lock_guard lock(mutex_);
  DropOld();
  if (thread > 0) calls_[thread] = call;
  count_.store(static_cast<int>(calls_.size()), std::memory_order_release);
  return call;
}

void PublishCalls::End(Call& call, Status result, std::optional<Vfs::Entry> staging,
                       std::shared_ptr<NodeReference> reference) {
  std::vector<std::function<void()>> waiting;
  {
    const std::lock_guard lock(mutex_);
    call.result = std::move(result);
    call.ended = std::chrono::steady_clock::now();
    call.staging = std::move(staging);
    call.reference = std::move(reference);
    waiting.swap(call.waiting);
  }
  for (const auto& again : waiting) again();
}

bool PublishCalls::WaitForEnd(Call& call, const std::function<std::function<void()>()>& again) {
  const std::lock_guard lock(mutex_);
  if (call.result) return false;
  call.waiting.push_back(again());
  return true;
}

void PublishCalls::Remove(pid_t thread, const CallPtr& call) {
  const std::lock_guard lock(mutex_);
  const auto it = calls_.find(thread);
  if (it != calls_.end() && it->second == call) calls_.erase(it);
  count_.store(static_cast<int>(calls_.size()), std::memory_order_release);
}

bool PublishCalls::Succeeded(Call& call) {
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  return call.result && call.result->ok() && now - call.ended < kExpectedFor;
}

std::optional<Vfs::Entry> PublishCalls::TakeStaging(Call& call,
                                                    std::shared_ptr<NodeReference>& reference) {
  const std::lock_guard lock(mutex_);
  reference = std::exchange(call.reference, nullptr);
  return std::exchange(call.staging, std::nullopt);
}

}  // namespace tensormount::fs
