// SPDX-License-Identifier: Apache-2.0
// Loads in the background: each is a thread that runs an ordinary load, after those of its
// communicator that were asked for before it.
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
  std::shared_ptr<const DeviceFences> fences;  // Of the caller's memory, when it called.
  std::string path;
  LoadOptions options;
  std::atomic<std::uint64_t> bytes_read{0};
  // What LoadOptions::progress names, until the load has ended; otherwise bytes_read.
  std::atomic<std::uint64_t>* read = &bytes_read;
  std::atomic<bool> cancel{false};
  Milestone<Result<LoadReport>> ended;
  std::thread thread;

  bool IsThisThread() const { return thread.get_id() == std::this_thread::get_id(); }
  ~Rep() {
    if (thread.joinable()) thread.join();
  }
  void Run(Communicator& comm) {
    Result<LoadReport> verdict = Status(Code::kInternal, "the load did not run");
    options.progress = read;
    const Status ran = Guarded([&]() -> Status {
      const LoadControl control{.cancel = &cancel, .fences = fences, .background = true};
      verdict = LoadOn(HostFileSystem(), request, path, comm, options, control);
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

// The last load of a communicator that was asked for.
struct LoadQueue {
  std::mutex mutex;
  std::weak_ptr<LoadHandle::Rep> last;
};

// For the end of the process.
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
    // A hook that ends the process is called by the load itself.
    if (rep != nullptr && !rep->IsThisThread()) (void)rep->ended.Wait();
  }
}

void AddLive(const std::shared_ptr<LoadHandle::Rep>& rep) {
  // In this order: loads that are waited for read tables.
  static const int registered = (SstTable::PrepareProcess(), std::atexit(&EndLoads));
  (void)registered;  // Where it could not be, only destructors wait.
  auto& live = PerProcess<LiveLoads>();
  std::lock_guard lock(live.mutex);
  std::erase_if(live.loads, [](const auto& load) { return load.expired(); });
  live.loads.push_back(rep);
}

Status LoadOfAnotherProcess() {
  return {Code::kUnsupported, "the load is of the process that this one was forked from"};
}

}  // namespace

LoadHandle::LoadHandle(std::shared_ptr<Rep> rep) : rep_(std::move(rep)) {}
LoadHandle::LoadHandle(LoadHandle&&) noexcept = default;
LoadHandle& LoadHandle::operator=(LoadHandle&& other) noexcept {
  std::swap(rep_, other.rep_);  // What this one had is dropped with `other`.
  return *this;
}
LoadHandle::~LoadHandle() {
  if (rep_ == nullptr) return;
  if (!rep_->InThisProcess() || rep_->IsThisThread()) {
    // Its thread is the parent's, or this one, in a hook: it cannot be joined here.
    if (rep_->IsThisThread()) Cancel();
    (void)new std::shared_ptr<Rep>(std::move(rep_));
    return;
  }
  Cancel();
  (void)rep_->ended.Wait();  // The verdict is nobody's any more.
}

Result<LoadReport> LoadHandle::Wait() {
  if (!rep_->InThisProcess()) return LoadOfAnotherProcess();
  return rep_->ended.Wait();
}

std::optional<Result<LoadReport>> LoadHandle::WaitFor(std::chrono::milliseconds most) {
  if (!rep_->InThisProcess()) return LoadOfAnotherProcess();
  return rep_->ended.WaitFor(most);
}

Result<int> LoadHandle::EventFd() {
  if (!rep_->InThisProcess()) return LoadOfAnotherProcess();
  return rep_->ended.EventFd();
}

std::uint64_t LoadHandle::bytes_read() const {
  std::uint64_t bytes = 0;
  if (rep_->InThisProcess()) rep_->ended.Look([&] { bytes = *rep_->read; });
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
  // Whatever goes wrong here, the load runs, so that the other ranks hear of it.
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
    (void)rep->request.Fail(
        Status(Code::kResourceExhausted, "load " + rep->path + ": no thread for it: " + e.what()));
    if (earlier != nullptr) (void)earlier->ended.Wait();
    rep->Run(comm);
  }
  queue->last = rep;
  return LoadHandle(std::move(rep));
}

}  // namespace tensormount
