// SPDX-License-Identifier: Apache-2.0
// Saves in the background. The state is copied, by default before Save() returns (SaveInPlace does
// not copy); then a lane (a thread with its own channel of the communicator) runs an ordinary save.
// Lanes are independent; steps that must happen in the order of the calls, such as claiming a
// generation, wait in SaveOrder.
#include "tensormount/async_save.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/at_exit.h"
#include "base/deadline.h"
#include "base/per_process.h"
#include "base/thread.h"
#include "collective/async/milestone.h"
#include "collective/async/progress_file.h"
#include "collective/async/snapshot_pool.h"
#include "collective/async/snapshot_state.h"
#include "collective/guarded.h"
#include "collective/save_load.h"
#include "index/records/sst_table.h"

namespace tensormount {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kLanes = 2;  // Lanes (threads) of a saver, one for each concurrent save.
// Maximum number of savers of a communicator at a time. Each saver takes kLanes of the channels
// from 1 on; channel 7 stays free. AsyncSaver::Of uses the last slot, AsyncSaver::Make the others.
constexpr std::uint32_t kSavers = (Communicator::kChannels - 1) / kLanes;
constexpr std::uint32_t kOwnSaver = kSavers - 1;
constexpr std::chrono::milliseconds kProgressInterval{1000};

class SaveOrder;

// The existing savers of a communicator. The n-th saver of AsyncSaver::Make takes slot n %
// kOwnSaver on every rank.
struct SaverSlots {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint32_t made = 0;
  std::array<bool, kSavers> taken{};
  // The saver of AsyncSaver::Of. Ranks may release and remake this saver at different times. Its
  // save order is kept here, so that the number of a save, which chooses the lane and thus the
  // channel, stays equal on all ranks.
  std::weak_ptr<AsyncSaver> shared;
  std::shared_ptr<SaveOrder> shared_order;
};

std::shared_ptr<SaverSlots> PlacesOf(Communicator& comm) {
  return std::static_pointer_cast<SaverSlots>(
      comm.Kept("async savers", [] { return std::make_shared<SaverSlots>(); }));
}

}  // namespace

// The state of one save, shared by the caller's handle and the thread that saves.
struct SaveHandle::Rep {
  // False in a forked child, which has the handle but not the threads: a wait there would never
  // end.
  bool InThisProcess() const { return getpid() == process; }
  const pid_t process = getpid();

  // Reached after the copy, or for SaveInPlace after the save. Then the caller may overwrite its
  // buffers, unless it failed with ErrorFields::memory_in_use.
  Milestone<Status> staged;
  Milestone<Result<SaveReport>> ended;
  std::atomic<SaveProgress::State> state{SaveProgress::State::kStaging};
  std::uint64_t bytes_total = 0;
  std::atomic<std::uint64_t> bytes_staged{0};
  std::atomic<std::uint64_t> bytes_written{0};
  // Points to SaveOptions::progress, if set, until the save has ended; then to bytes_written,
  // because the caller may free its counter.
  std::atomic<std::uint64_t>* written = &bytes_written;
  std::atomic<std::int64_t> stalled{0};
  std::atomic<bool> cancel{false};
  AsyncOptions::OnDrop on_drop = AsyncOptions::OnDrop::kWait;
  std::atomic<std::thread::id> worker{};  // The thread that saves, from its begin on.

  void ReportStaged(const Status& status) {
    state = SaveProgress::State::kSaving;
    staged.Reach(status);
  }
  void ReportEnded(Result<SaveReport> verdict, bool was_in_place) {
    const Status status = verdict.status();
    const std::uint64_t bytes = status.ok() ? verdict.value().bytes_written_here : written->load();
    const auto end = status.ok()                         ? SaveProgress::State::kCommitted
                     : status.code() == Code::kCancelled ? SaveProgress::State::kCancelled
                                                         : SaveProgress::State::kFailed;
    ended.Reach(std::move(verdict), [&] {
      bytes_written = bytes;
      written = &bytes_written;
      state = end;
    });
    if (was_in_place) staged.Reach(status);
  }
};

namespace {

// Orders the steps of one saver's saves on this rank. Each lane (thread) saves independently, so
// two saves may run in different orders on two ranks. A save waits only for earlier saves, and
// earlier saves never wait for later ones, so the waits cannot deadlock.
class SaveOrder {
 public:
  enum class Step { kQueued, kStaged, kBegun };

  // Adds a save and returns its number. Numbers rise in the order of calls.
  std::uint64_t Register(std::string path) {
    std::lock_guard lock(mutex_);
    saves_.emplace(next_, Save{Step::kQueued, std::move(path)});
    return next_++;
  }
  void Reach(std::uint64_t number, Step step) {
    {
      std::lock_guard lock(mutex_);
      saves_.at(number).step = step;
    }
    changed_.notify_all();
  }
  void Remove(std::uint64_t number) {
    {
      std::lock_guard lock(mutex_);
      saves_.erase(number);
    }
    changed_.notify_all();
  }

  // Waits until all earlier saves have reached `step` or ended; false if `limit` passes first.
  bool AwaitEarlier(std::uint64_t number, Step step,
                    std::chrono::milliseconds limit = kLongestWait) {
    return Await(number, limit,
                 [step](const Save& earlier, const Save&) { return earlier.step >= step; });
  }
  // Waits until no earlier save to the same path is in progress.
  void AwaitSamePath(std::uint64_t number) {
    (void)Await(number, kLongestWait,
                [](const Save& earlier, const Save& own) { return earlier.path != own.path; });
  }

 private:
  struct Save {
    Step step;
    std::string path;
  };

  template <typename Passed>
  bool Await(std::uint64_t number, std::chrono::milliseconds limit, Passed passed) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::min(limit, kLongestWait), [&] {
      const auto own = saves_.find(number);
      return std::all_of(saves_.begin(), own,
                         [&](const auto& save) { return passed(save.second, own->second); });
    });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Save> saves_;  // Saves that have not ended, by number.
  std::uint64_t next_ = 0;
};

// One save for a lane (background thread). A lane works on its saves in the order of their numbers,
// because a save waits for earlier ones: an earlier save behind it in the same queue would never
// run.
struct Task {
  std::uint64_t number = 0;  // Number of the save in SaveOrder.
  std::shared_ptr<SaveHandle::Rep> job;
  // Set only if the lane makes the copy: a state whose shards are views of the caller's memory.
  StateDict state;
  // For SaveInPlace: the shards of `staged` are views of the caller's memory, not copies.
  bool in_place = false;
  std::optional<SnapshotState> staged;
  // Marks of the work that was in the caller's device streams when the save was requested; the save
  // waits only for that work.
  std::shared_ptr<const DeviceFences> fences;
  std::string path;
  SaveOptions options;
};

class Lane {
 public:
  Lane(std::unique_ptr<Communicator> channel, std::shared_ptr<SnapshotPool> pool,
       std::shared_ptr<DeviceSnapshots> on_devices, std::shared_ptr<SaveOrder> save_order)
      : channel_(std::move(channel)),
        pool_(std::move(pool)),
        on_devices_(std::move(on_devices)),
        save_order_(std::move(save_order)) {}

  // Announces a save that Add will queue later. Each call has a higher number than the one before.
  void Expect(std::uint64_t number) {
    std::lock_guard lock(mutex_);
    expected_.insert(expected_.end(), number);
  }

  // Waits until all queued saves have ended.
  ~Lane() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Gives a save to the thread. If no thread can be started, the save runs on the caller's thread
  // and fails, so that the other ranks learn of the failure.
  void Add(Task task) {
    Status failure;
    {
      std::lock_guard lock(mutex_);
      if (!thread_.joinable()) {
        failure = Guarded([&]() -> Status {
          try {
            thread_ = Thread([this, callers = CallersSignals::Current()] {
              CallersSignals::RunsCallersCode(callers);
              Run();
            });
          } catch (const std::system_error& e) {
            return {Code::kResourceExhausted,
                    "save " + task.path + ": cannot start its thread: " + e.what()};
          }
          return {};
        });
      }
      if (failure.ok()) queue_.emplace(task.number, std::move(task));
    }
    if (failure.ok()) {
      changed_.notify_all();
      return;
    }
    const bool was_staged = task.staged.has_value();
    task.staged.emplace();
    (void)task.staged->dict.Fail(failure);
    if (!was_staged) {
      save_order_->Reach(task.number, SaveOrder::Step::kStaged);
      task.job->ReportStaged(failure);
    }
    (void)WaitUntil(task.number, PatienceOf(task.options.timeouts));
    Work(std::optional<Task>(std::move(task)));
  }
  // Drops an announced save that could not be added, so that later saves do not wait for it.
  void Forget(std::uint64_t number) {
    {
      std::lock_guard lock(mutex_);
      if (!queue_.contains(number)) expected_.erase(number);
    }
    changed_.notify_all();
  }

  // Waits until all saves of this lane before `number` have ended; false if `limit` passes first.
  bool WaitUntil(std::uint64_t number, std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::min(limit, kLongestWait),
                             [&] { return expected_.empty() || *expected_.begin() >= number; });
  }
  bool WaitIdle(std::chrono::milliseconds limit) {
    return WaitUntil(std::numeric_limits<std::uint64_t>::max(), limit);
  }
  // Whether the caller runs on this lane's thread, in a callback.
  bool IsThisThread() {
    std::lock_guard lock(mutex_);
    return std::this_thread::get_id() == thread_.get_id();
  }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] {
        return queue_.empty() ? stop_ : queue_.begin()->first == *expected_.begin();
      });
      if (queue_.empty()) return;
      std::optional<Task> task(std::move(queue_.begin()->second));
      queue_.erase(queue_.begin());
      lock.unlock();
      Work(std::move(task));
      lock.lock();
    }
  }

  void Work(std::optional<Task> task) {
    const std::shared_ptr<SaveHandle::Rep> job = task->job;
    const std::uint64_t number = task->number;
    const bool in_place = task->in_place;
    job->worker = std::this_thread::get_id();
    Result<SaveReport> verdict = Save(*task);
    if (!verdict.ok()) verdict = AfterDevices(verdict.status(), task->fences.get());
    if (!verdict.ok() && task->staged.has_value()) {
      for (const auto& memory : task->staged->on_devices) memory->MarkStillAccessed();
    }
    // The staging memory goes back to its pools before the end is reported, because the caller may
    // need this memory for its next save.
    task.reset();
    save_order_->Remove(number);
    job->ReportEnded(std::move(verdict), in_place);
    {
      std::lock_guard lock(mutex_);
      expected_.erase(number);
    }
    changed_.notify_all();
  }

  Result<SaveReport> Save(Task& task) {
    SaveHandle::Rep& job = *task.job;
    if (!task.staged.has_value()) {
      // Memory is given out in the order of saves, on every rank. In another order the first save
      // could have the memory on one rank and the second save on another rank, and each save would
      // wait for the other until it times out.
      (void)save_order_->AwaitEarlier(task.number, SaveOrder::Step::kStaged);
      const DeviceLimits rules{task.fences.get(), &job.cancel,
                               DevicePatienceOf(task.options.timeouts)};
      task.staged.emplace(
          StageState(task.state, *pool_, *on_devices_, rules, &job.bytes_staged, &job.stalled));
      save_order_->Reach(task.number, SaveOrder::Step::kStaged);
      job.ReportStaged(task.staged->status);
    }
    SaveOptions options = task.options;
    options.progress = job.written;
    std::optional<ProgressFile> progress;
    // This rank must stop writing its progress file before it reports that its data is written:
    // afterwards rank 0 removes these files and publishes, and a later write would add a file to
    // the checkpoint.
    options.events = [&](const Event& event) {
      if (event.kind != Event::Kind::kStart && event.phase == "write" && progress.has_value()) {
        progress->Stop();
      }
      KeepSaveOrder(task, event);
      if (task.options.events) task.options.events(event);
    };
    SaveControl control;
    control.cancel = &job.cancel;
    if (task.in_place) control.fences = task.fences;
    control.copied = !task.in_place;
    control.background = true;
    control.on_staging_made = [&](FileSystem& fs, const Staging& staging) {
      progress.emplace(fs, staging, channel_->rank(), channel_->size(), kProgressInterval,
                       [&job, written = options.progress] {
                         return ProgressFile::Line{job.bytes_total, written->load()};
                       });
    };
    control.on_staging_end = [&](const Staging&) {
      if (progress.has_value()) progress->Remove();
    };
    Result<SaveReport> verdict =
        Status(Code::kInternal, "internal error: the background save did not run");
    const Status ran = Guarded([&]() -> Status {
      verdict = tensormount::Save(task.staged->dict, task.path, *channel_, options, control);
      return {};
    });
    if (!ran.ok()) return ran.WithContext("asynchronous save " + task.path);
    return verdict;
  }

  // Makes rank 0 claim generations in the order of this saver's saves, so that `latest` is the save
  // requested last, and publish saves of one path in this order, so that the last one remains.
  void KeepSaveOrder(const Task& task, const Event& event) {
    if (channel_->rank() != 0) return;
    const bool start = event.kind == Event::Kind::kStart;
    if (event.phase == "stage") {
      if (start) {
        (void)save_order_->AwaitEarlier(task.number, SaveOrder::Step::kBegun);
      } else {
        save_order_->Reach(task.number, SaveOrder::Step::kBegun);
      }
    } else if (event.phase == "publish" && start) {
      save_order_->AwaitSamePath(task.number);
    }
  }

  const std::unique_ptr<Communicator> channel_;
  const std::shared_ptr<SnapshotPool> pool_;
  const std::shared_ptr<DeviceSnapshots> on_devices_;
  const std::shared_ptr<SaveOrder> save_order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Task> queue_;
  std::set<std::uint64_t> expected_;  // Numbers of saves that have not ended, queued or not.
  bool stop_ = false;
  Thread thread_;  // Started with the first save.
};

}  // namespace

struct AsyncSaver::Rep {
  Rep(Communicator& comm, const AsyncOptions& opts)
      : options(opts),
        places(PlacesOf(comm)),
        pool(std::make_shared<SnapshotPool>(opts.staging_bytes)),
        on_devices(std::make_shared<DeviceSnapshots>(opts.device_staging_bytes)),
        save_order(std::make_shared<SaveOrder>()) {}
  ~Rep() {
    for (auto& lane : lanes) lane.reset();
    if (place.has_value()) {
      {
        std::lock_guard lock(places->mutex);
        places->taken[*place] = false;
      }
      places->changed.notify_all();
    }
  }
  // Announces a save to its lane and returns its number.
  std::uint64_t Register(std::string_view path) {
    std::lock_guard lock(entering);  // Each lane must get numbers in rising order.
    const std::uint64_t number = save_order->Register(WithoutTrailingSlashes(path));
    try {
      lanes[number % kLanes]->Expect(number);
    } catch (...) {
      save_order->Remove(number);
      throw;
    }
    return number;
  }
  Status MakeLanes(Communicator& comm) {
    for (std::uint32_t i = 0; i < kLanes; ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> channel,
                                   MakeChannel(comm, 1 + *place * kLanes + i));
      lanes[i] = std::make_unique<Lane>(std::move(channel), pool, on_devices, save_order);
    }
    return {};
  }

  const pid_t process = getpid();
  AsyncOptions options;
  std::shared_ptr<SaverSlots> places;
  std::optional<std::uint32_t> place;
  std::shared_ptr<SnapshotPool> pool;
  std::shared_ptr<DeviceSnapshots> on_devices;
  std::shared_ptr<SaveOrder> save_order;
  std::mutex entering;
  std::array<std::unique_ptr<Lane>, kLanes> lanes;
};

namespace {

// The savers of the process. At exit the process waits until their saves in progress have ended.
struct LiveSavers {
  // Set at exit: then no save begins any more, because its thread would run while static objects
  // that it needs are destroyed. `busy` counts threads that begin a save or destroy a saver.
  std::atomic<bool> ending{false};
  std::atomic<int> busy{0};
  std::mutex mutex;
  std::set<AsyncSaver::Rep*> savers;
  std::vector<std::shared_ptr<AsyncSaver>> kept;  // Their last handle was destroyed in a hook.
};
LiveSavers& Live() { return PerProcess<LiveSavers>(); }

Status ForkedSaverError() {
  return {Code::kUnsupported,
          "asynchronous saves and their savers belong to the parent process: a forked child cannot "
          "use them"};
}
// Waits for the saves of all savers, in short slices, so that other threads can still make and
// destroy savers meanwhile.
void DrainAll() {
  Live().ending = true;
  for (bool idle = false; !idle;) {
    idle = Live().busy == 0;
    {
      std::lock_guard lock(Live().mutex);
      for (AsyncSaver::Rep* saver : Live().savers) {
        for (const auto& lane : saver->lanes) {
          idle = idle && (lane->IsThisThread() || lane->WaitIdle(std::chrono::milliseconds(20)));
        }
      }
    }
    if (!idle) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void DrainAtExit() {
  // PrepareProcess comes first, because exit handlers run in reverse order: DrainAll must run
  // before RocksDB's own cleanup, since the saves that it waits for write SST tables.
  static const int registered = (SstTable::PrepareProcess(), std::atexit(&DrainAll));
  (void)registered;  // If atexit failed, only destructors of savers wait for saves.
}

}  // namespace

// ---- Handle ---------------------------------------------------------------------------------

SaveHandle::SaveHandle(std::shared_ptr<Rep> rep) : rep_(std::move(rep)) {}
SaveHandle::SaveHandle(SaveHandle&&) noexcept = default;
SaveHandle& SaveHandle::operator=(SaveHandle&& other) noexcept {
  // `other` gets this handle's previous save and waits for it or cancels it when it is destroyed.
  std::swap(rep_, other.rep_);
  std::swap(saver_, other.saver_);
  return *this;
}
SaveHandle::~SaveHandle() {
  if (rep_ == nullptr || !rep_->InThisProcess()) return;
  bool cancel = rep_->on_drop == AsyncOptions::OnDrop::kCancel;
  // In a hook of this save the thread would wait for itself. The lane keeps the state of the save;
  // the caller's memory may be freed, so a save that still reads it is cancelled.
  const bool in_own_hook = rep_->worker.load() == std::this_thread::get_id();
  if (in_own_hook) cancel = cancel || !rep_->staged.WaitFor(std::chrono::milliseconds(0));
  if (cancel) Cancel();
  if (in_own_hook) {
    // The saver cannot join its thread here either, so it stays; later saves use it.
    std::lock_guard lock(Live().mutex);
    if (saver_ != nullptr) Live().kept.push_back(std::move(saver_));
    return;
  }
  // Until the snapshot is taken, the save reads the caller's memory, which may be freed after this
  // destructor.
  if (cancel) {
    (void)rep_->staged.Wait();
  } else {
    (void)WaitCommitted();  // The verdict is dropped, because no caller can ask for it any more.
  }
}

Status SaveHandle::WaitStaged() {
  return rep_->InThisProcess() ? rep_->staged.Wait() : ForkedSaverError();
}

Result<SaveReport> SaveHandle::WaitCommitted() {
  if (!rep_->InThisProcess()) return ForkedSaverError();
  return rep_->ended.Wait();
}

Result<bool> SaveHandle::WaitStagedFor(std::chrono::milliseconds most) {
  if (!rep_->InThisProcess()) return ForkedSaverError();
  const std::optional<Status> staged = rep_->staged.WaitFor(most);
  if (staged) TENSORMOUNT_RETURN_IF_ERROR(*staged);
  return staged.has_value();
}

std::optional<Result<SaveReport>> SaveHandle::WaitCommittedFor(std::chrono::milliseconds most) {
  if (!rep_->InThisProcess()) return ForkedSaverError();
  return rep_->ended.WaitFor(most);
}

Result<int> SaveHandle::StagedFd() {
  if (!rep_->InThisProcess()) return ForkedSaverError();
  return rep_->staged.EventFd();
}

Result<int> SaveHandle::CommittedFd() {
  if (!rep_->InThisProcess()) return ForkedSaverError();
  return rep_->ended.EventFd();
}

SaveProgress SaveHandle::progress() const {
  SaveProgress p;
  p.state = rep_->state;
  p.bytes_total = rep_->bytes_total;
  p.bytes_staged = rep_->bytes_staged;
  if (rep_->InThisProcess()) {  // In a forked child the mutex of `ended` may be locked forever.
    rep_->ended.WithLock([&] { p.bytes_written = *rep_->written; });
  }
  p.stalled = std::chrono::nanoseconds(rep_->stalled);
  return p;
}

void SaveHandle::Cancel() { rep_->cancel = true; }

// ---- Saver ----------------------------------------------------------------------------------

AsyncSaver::AsyncSaver(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {
  std::lock_guard lock(Live().mutex);
  Live().savers.insert(rep_.get());
}

AsyncSaver::~AsyncSaver() {
  if (rep_->process != getpid()) {
    // In a forked child the saver's threads belong to the parent and cannot be joined.
    (void)rep_.release();
    return;
  }
  // DrainAll waits until `busy` is 0, and so also for the threads of a saver that is no longer in
  // `savers`.
  ++Live().busy;
  const AtExit done([] { --Live().busy; });
  {
    std::lock_guard lock(Live().mutex);
    Live().savers.erase(rep_.get());
  }
  rep_.reset();
}

Result<std::unique_ptr<AsyncSaver>> AsyncSaver::Make(Communicator& comm,
                                                     const AsyncOptions& options) {
  DrainAtExit();
  auto rep = std::make_unique<Rep>(comm, options);
  {
    std::lock_guard lock(rep->places->mutex);
    // Counted even if the slot is taken, so that the next saver has the same slot on all ranks.
    const std::uint32_t place = rep->places->made++ % kOwnSaver;
    if (rep->places->taken[place]) {
      return Status(Code::kResourceExhausted,
                    "a communicator has at most " + std::to_string(kOwnSaver) +
                        " asynchronous savers at a time; close one first");
    }
    rep->places->taken[place] = true;
    rep->place = place;
  }
  TENSORMOUNT_RETURN_IF_ERROR(rep->MakeLanes(comm));
  return std::unique_ptr<AsyncSaver>(new AsyncSaver(std::move(rep)));
}

Result<std::shared_ptr<AsyncSaver>> AsyncSaver::Of(Communicator& comm) {
  DrainAtExit();
  auto rep = std::make_unique<Rep>(comm, AsyncOptions{});
  SaverSlots& places = *rep->places;
  std::unique_lock lock(places.mutex);
  // If the previous saver is being destroyed, waits until its saves have ended. If another thread
  // makes the saver, waits for that.
  std::shared_ptr<AsyncSaver> saver;
  const bool free = places.changed.wait_for(lock, Timeouts().arrival, [&] {
    saver = places.shared.lock();
    return saver != nullptr || !places.taken[kOwnSaver];
  });
  if (saver != nullptr) {
    std::lock_guard live(Live().mutex);
    std::erase(Live().kept, saver);  // The caller keeps it now.
    return saver;
  }
  if (!free) {
    return Status(Code::kDeadlineExceeded,
                  "cannot start a background save: the previous saver of this communicator did not "
                  "finish within the arrival timeout; wait for its saves first");
  }
  places.taken[kOwnSaver] = true;
  rep->place = kOwnSaver;
  if (places.shared_order == nullptr) places.shared_order = rep->save_order;
  rep->save_order = places.shared_order;
  lock.unlock();
  TENSORMOUNT_RETURN_IF_ERROR(rep->MakeLanes(comm));
  saver.reset(new AsyncSaver(std::move(rep)));
  lock.lock();
  places.shared = saver;
  lock.unlock();
  places.changed.notify_all();  // Other threads may wait for this saver.
  return saver;
}

Result<SaveHandle> AsyncSaver::Save(const StateDict& state, std::string_view path,
                                    const SaveOptions& options) {
  return Start(state, path, options,
               rep_->options.stage_in_background ? Staging::kInBackground : Staging::kNow);
}

Result<SaveHandle> AsyncSaver::SaveInPlace(const StateDict& state, std::string_view path,
                                           const SaveOptions& options) {
  return Start(state, path, options, Staging::kNone);
}

Result<SaveHandle> AsyncSaver::Start(const StateDict& state, std::string_view path,
                                     const SaveOptions& options, Staging staging) {
  if (rep_->process != getpid()) return ForkedSaverError();
  ++Live().busy;
  const AtExit begun([] { --Live().busy; });
  if (Live().ending) {
    return Status(Code::kCancelled, "save " + std::string(path) + ": the process is exiting");
  }
  auto job = std::make_shared<SaveHandle::Rep>();
  job->on_drop = rep_->options.on_drop;
  job->bytes_total = BytesOf(state);
  if (options.progress != nullptr) job->written = options.progress;
  Task task;
  task.job = job;
  task.path = std::string(path);
  task.options = options;
  task.number = rep_->Register(path);
  Lane& lane = *rep_->lanes[task.number % kLanes];
  const std::uint64_t number = task.number;
  // Runs if the task cannot be given to the lane because memory is exhausted.
  AtExit forget([&] {
    lane.Forget(number);
    rep_->save_order->Remove(number);
  });
  // If a step of this preparation fails, the task still goes to the lane, so that the other ranks
  // learn of the failure instead of waiting.
  const Status prepared = Guarded([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(task.fences, FencesOf(state));
    if (staging == Staging::kInBackground) {
      task.state = ShareState(state);
      return {};
    }
    if (staging == Staging::kNone) {
      task.in_place = true;
      task.staged.emplace();
      task.staged->dict = ShareState(state);
      return {};
    }
    // The save before the last one uses the same lane and must have ended, because this save reuses
    // its staging memory.
    const std::chrono::milliseconds patience = PatienceOf(options.timeouts);
    if (!lane.WaitUntil(task.number, patience)) {
      return {
          Code::kDeadlineExceeded,
          "save " + task.path +
              ": timed out: the save before the last one has not ended; wait for it, or raise the "
              "arrival timeout"};
    }
    // Memory is given out in the order of saves, as in Lane::Save: otherwise this save could hold
    // memory that an earlier save needs, while another rank gives it to the earlier save, and both
    // saves would time out.
    if (!rep_->save_order->AwaitEarlier(task.number, SaveOrder::Step::kStaged, patience)) {
      return {
          Code::kDeadlineExceeded,
          "save " + task.path + ": timed out: the tensors of an earlier save are not copied yet"};
    }
    const DeviceLimits rules{task.fences.get(), &job->cancel, DevicePatienceOf(options.timeouts)};
    task.staged.emplace(StageState(state, *rep_->pool, *rep_->on_devices, rules, &job->bytes_staged,
                                   &job->stalled));
    return {};
  });
  if (!prepared.ok()) {
    task.staged.emplace();
    task.staged->status = prepared;
    (void)task.staged->dict.Fail(prepared);
  }
  if (task.staged.has_value()) {
    rep_->save_order->Reach(task.number, SaveOrder::Step::kStaged);
    if (task.in_place) {
      job->state = SaveProgress::State::kSaving;
    } else {
      job->ReportStaged(task.staged->status);
    }
  }
  lane.Add(std::move(task));
  forget.Cancel();
  return SaveHandle(std::move(job));
}

Result<SaveHandle> AsyncSave(const StateDict& state, std::string_view path, Communicator& comm,
                             const SaveOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<AsyncSaver> saver, AsyncSaver::Of(comm));
  TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, path, options));
  handle.saver_ = std::move(saver);
  return handle;
}

}  // namespace tensormount
