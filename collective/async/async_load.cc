// SPDX-License-Identifier: Apache-2.0
// Loads in the background: each one is a thread that runs an ordinary load, after the earlier loads
// of its communicator.
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
  std::shared_ptr<const DeviceFences> fences;  // Taken when the caller called AsyncLoad.
  std::string path;
  LoadOptions options;
  std::atomic<std::uint64_t> bytes_read{0};
  // The counter of read bytes: LoadOptions::progress until the load has ended, then bytes_read.
  std::atomic<std::uint64_t>* read = &bytes_read;
  std::atomic<bool> cancel{false};
  Milestone<Result<LoadReport>> ended;
  std::thread thread;

  bool IsThisThread() const { return thread.get_id() == std::this_thread::get_id(); }
  ~Rep() {
    if (thread.joinable()) thread.join();
  }
  void Run(Communicator& comm) {
    Result<LoadReport> verdict = Status(Code::kInternal, "the background load did not run");
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

// The loads of the process; the process waits for them at exit.
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
    // A hook that ends the process runs on the load's own thread, which cannot wait for itself.
    if (rep != nullptr && !rep->IsThisThread()) (void)rep->ended.Wait();
  }
}

void AddLive(const std::shared_ptr<LoadHandle::Rep>& rep) {
  // PrepareProcess comes first, because loads for which EndLoads waits read SST tables.
  static const int registered = (SstTable::PrepareProcess(), std::atexit(&EndLoads));
  (void)registered;  // If atexit failed, only destructors wait for loads.
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
  std::swap(rep_, other.rep_);  // The load that this handle had is dropped with `other`.
  return *this;
}
LoadHandle::~LoadHandle() {
  if (rep_ == nullptr) return;
  if (!rep_->InThisProcess() || rep_->IsThisThread()) {
    // The thread is the parent's (after a fork) or this one (in a hook), so it cannot be joined
    // here.
    if (rep_->IsThisThread()) Cancel();
    (void)new std::shared_ptr<Rep>(std::move(rep_));
    return;
  }
  Cancel();
  (void)rep_->ended.Wait();  // No caller remains for the verdict.
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
  // After a failure here the load still runs, so that the other ranks learn of it.
  if (!prepared.ok()) (void)rep->request.Fail(prepared);
  const auto queue = std::static_pointer_cast<LoadQueue>(
      comm.Kept("loads in the background", [] { return std::make_shared<LoadQueue>(); }));
  AddLive(rep);
  std::lock_guard lock(queue->mutex);
  std::shared_ptr<LoadHandle::Rep> earlier = queue->last.lock();
  try {
    rep->thread = std::thread([load = rep.get(), &comm, earlier]() mutable {
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
