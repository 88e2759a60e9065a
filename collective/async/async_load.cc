// SPDX-License-Identifier: Apache-2.0
// Loads in the background. AsyncLoad starts a thread that waits until the previous background load
// of the communicator has ended, and then runs an ordinary load. If no thread can be started, the
// caller's thread runs the load with a failed request, so that the other ranks learn of the
// failure.
#include "tensormount/async_load.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/per_process.h"
#include "base/thread.h"
#include "collective/async/milestone.h"
#include "collective/async/snapshot_state.h"
#include "collective/guarded.h"
#include "collective/save_load.h"
#include "index/records/sst_table.h"

namespace tensormount {

struct LoadHandle::Rep {
  bool InThisProcess() const { return getpid() == process; }
  const pid_t process = getpid();

  StateDict request;
  // Marks of the work that was in the caller's device streams when AsyncLoad was called; the load
  // waits only for that work.
  std::shared_ptr<const DeviceFences> fences;
  std::string path;
  LoadOptions options;
  std::atomic<std::uint64_t> bytes_read{0};
  // Points to LoadOptions::progress, if set, until the load has ended; then to bytes_read, because
  // the caller may free its counter.
  std::atomic<std::uint64_t>* read = &bytes_read;
  std::atomic<bool> cancel{false};
  Milestone<Result<LoadReport>> ended;
  Thread thread;

  bool IsThisThread() const { return thread.get_id() == std::this_thread::get_id(); }
  ~Rep() {
    if (thread.joinable()) thread.join();
  }
  void Run(Communicator& comm) {
    Result<LoadReport> verdict =
        Status(Code::kInternal, "internal error: the background load did not run");
    options.progress = read;
    const Status ran = Guarded([&]() -> Status {
      const LoadControl control{.cancel = &cancel, .fences = fences, .background = true};
      verdict = Load(request, path, comm, options, control);
      return {};
    });
    if (!ran.ok()) verdict = ran.WithContext("load " + path);
    ended.Reach(std::move(verdict), [&] {
      bytes_read = read->load();
      read = &bytes_read;
    });
  }
};

namespace {

struct LoadQueue {
  std::mutex mutex;
  std::weak_ptr<LoadHandle::Rep> last;
};

// The background loads of this process, which EndLoads cancels and waits for at exit.
struct LiveLoads {
  std::mutex mutex;
  std::vector<std::weak_ptr<LoadHandle::Rep>> loads;
};

void EndLoads() {
  auto& live = PerProcess<LiveLoads>();
  std::unique_lock lock(live.mutex);
  const std::vector<std::weak_ptr<LoadHandle::Rep>> loads = live.loads;
  lock.unlock();
  for (const auto& load : loads) {
    if (const auto rep = load.lock()) rep->cancel = true;
  }
  for (const auto& load : loads) {
    const auto rep = load.lock();
    // If the event hook of this load called exit(), this is the load's own thread, which cannot
    // wait for itself.
    if (rep != nullptr && !rep->IsThisThread()) (void)rep->ended.Wait();
  }
}

void AddLive(const std::shared_ptr<LoadHandle::Rep>& rep) {
  // PrepareProcess comes first, because exit handlers run in reverse order: EndLoads must run
  // before RocksDB's own cleanup, since the loads that it waits for read SST tables.
  static const int registered = (SstTable::PrepareProcess(), std::atexit(&EndLoads));
  (void)registered;  // If atexit failed, only destructors of handles wait for loads.
  auto& live = PerProcess<LiveLoads>();
  std::lock_guard lock(live.mutex);
  std::erase_if(live.loads, [](const auto& load) { return load.expired(); });
  live.loads.push_back(rep);
}

Status ForkedLoadError() {
  return {Code::kUnsupported,
          "the load belongs to the parent process: a forked child cannot use it"};
}

}  // namespace

LoadHandle::LoadHandle(std::shared_ptr<Rep> rep) : rep_(std::move(rep)) {}
LoadHandle::LoadHandle(LoadHandle&&) noexcept = default;
LoadHandle& LoadHandle::operator=(LoadHandle&& other) noexcept {
  // `other` gets this handle's previous load and cancels it when it is destroyed.
  std::swap(rep_, other.rep_);
  return *this;
}
LoadHandle::~LoadHandle() {
  if (rep_ == nullptr) return;
  if (!rep_->InThisProcess() || rep_->IsThisThread()) {
    // The load's thread cannot be joined here: after a fork it exists only in the parent, and in a
    // hook of this load it is the current thread. So the state is leaked.
    if (rep_->IsThisThread()) Cancel();
    (void)new std::shared_ptr<Rep>(std::move(rep_));
    return;
  }
  Cancel();
  (void)rep_->ended.Wait();  // The verdict is dropped, because no caller can ask for it any more.
}

Result<LoadReport> LoadHandle::Wait() {
  if (!rep_->InThisProcess()) return ForkedLoadError();
  return rep_->ended.Wait();
}

std::optional<Result<LoadReport>> LoadHandle::WaitFor(std::chrono::milliseconds most) {
  if (!rep_->InThisProcess()) return ForkedLoadError();
  return rep_->ended.WaitFor(most);
}

Result<int> LoadHandle::EventFd() {
  if (!rep_->InThisProcess()) return ForkedLoadError();
  return rep_->ended.EventFd();
}

std::uint64_t LoadHandle::bytes_read() const {
  std::uint64_t bytes = 0;
  if (rep_->InThisProcess()) rep_->ended.WithLock([&] { bytes = *rep_->read; });
  return bytes;
}

void LoadHandle::Cancel() { rep_->cancel = true; }

Result<LoadHandle> AsyncLoad(const StateDict& request, std::string_view path, Communicator& comm,
                             const LoadOptions& options) {
  auto rep = std::make_shared<LoadHandle::Rep>();
  rep->path = std::string(path);
  rep->options = options;
  if (options.progress != nullptr) rep->read = options.progress;
  const Status prepared = Guarded([&]() -> Status {
    rep->request = ShareState(request);
    TENSORMOUNT_ASSIGN_OR_RETURN(rep->fences, FencesOf(request));
    return {};
  });
  // After a failure here the load still runs, with a failed request, so that the other ranks learn
  // of the failure instead of waiting.
  if (!prepared.ok()) (void)rep->request.Fail(prepared);
  const auto queue = std::static_pointer_cast<LoadQueue>(
      comm.Kept("loads in the background", [] { return std::make_shared<LoadQueue>(); }));
  AddLive(rep);
  std::lock_guard lock(queue->mutex);
  std::shared_ptr<LoadHandle::Rep> earlier = queue->last.lock();
  try {
    rep->thread =
        Thread([load = rep.get(), &comm, earlier, callers = CallersSignals::Current()]() mutable {
          CallersSignals::RunsCallersCode(callers);
          if (earlier != nullptr) (void)earlier->ended.Wait();
          earlier = nullptr;
          load->Run(comm);
        });
  } catch (const std::system_error& e) {
    (void)rep->request.Fail(Status(Code::kResourceExhausted,
                                   "load " + rep->path + ": cannot start its thread: " + e.what()));
    if (earlier != nullptr) (void)earlier->ended.Wait();
    rep->Run(comm);
  }
  queue->last = rep;
  return LoadHandle(std::move(rep));
}

}  // namespace tensormount
