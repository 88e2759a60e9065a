// SPDX-License-Identifier: Apache-2.0
// Saves in the background. Save() copies the state while the caller waits, then a lane, which is a
// thread with a channel of the communicator for itself, runs an ordinary save of the copy. Lanes
// know nothing of each other; what must happen in one order, as the verdicts of the saves of one
// saver, takes turns.
#include "tensormount/async_save.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>

#include "base/at_exit.h"
#include "base/deadline.h"
#include "base/per_process.h"
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

constexpr std::uint32_t kLanes = 2;  // Saves that may be under way at a time.
// Those of Make, and in the last place that of Of; a channel stays free.
constexpr std::uint32_t kSavers = (Communicator::kChannels - 1) / kLanes;
constexpr std::uint32_t kOwnSaver = kSavers - 1;
constexpr std::chrono::milliseconds kProgressInterval{1000};

class Turns;

// Which savers of a communicator exist. The n-th one of Make takes place n % kOwnSaver, on every
// rank.
struct SaverSlots {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint32_t made = 0;
  std::array<bool, kSavers> taken{};
  // That of Of. Ranks let go of it and make it anew at different times, so what they must count
  // alike outlives it.
  std::weak_ptr<AsyncSaver> shared;
  std::shared_ptr<Turns> shared_turns;
};

std::shared_ptr<SaverSlots> PlacesOf(Communicator& comm) {
  return std::static_pointer_cast<SaverSlots>(
      comm.Kept("async savers", [] { return std::make_shared<SaverSlots>(); }));
}

}  // namespace

// One save, between the caller and the thread that works on it.
struct SaveHandle::Rep {
  // A forked child has the handle and not the threads: what it waited for would never come.
  bool InThisProcess() const { return getpid() == process; }
  const pid_t process = getpid();

  Milestone<Status> staged;  // Of the bytes.
  Milestone<Result<SaveReport>> ended;
  std::atomic<SaveProgress::State> state{SaveProgress::State::kStaging};
  std::uint64_t bytes_total = 0;
  std::atomic<std::uint64_t> bytes_staged{0};
  std::atomic<std::uint64_t> bytes_written{0};
  // What SaveOptions::progress names, until the save has ended; otherwise bytes_written.
  std::atomic<std::uint64_t>* written = &bytes_written;
  std::atomic<std::int64_t> stalled{0};
  std::atomic<bool> cancel{false};
  AsyncOptions::OnDrop on_drop = AsyncOptions::OnDrop::kWait;

  void Staged(const Status& status) {
    state = SaveProgress::State::kSaving;
    staged.Reach(status);
  }
  void Ended(Result<SaveReport> verdict, bool was_in_place) {
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

// In which order the saves of one saver on this rank do what must not be done in any order. Lanes
// know nothing of each other, and the same two saves may run in either order on two ranks; each
// wait is for earlier saves alone, which end by their own deadlines whatever later ones do.
class Turns {
 public:
  enum class Step { kQueued, kStaged, kBegun };

  // A save that will come: its number. Numbers rise in the order of calls.
  std::uint64_t Enter(std::string path) {
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
  void Leave(std::uint64_t number) {
    {
      std::lock_guard lock(mutex_);
      saves_.erase(number);
    }
    changed_.notify_all();
  }

  // Until all earlier saves have come as far as `step`, or have ended; false where `limit` passes
  // before.
  bool AwaitEarlier(std::uint64_t number, Step step,
                    std::chrono::milliseconds limit = kLongestWait) {
    return Await(number, limit,
                 [step](const Save& earlier, const Save&) { return earlier.step >= step; });
  }
  // Until no earlier save to the same name is under way.
  void AwaitName(std::uint64_t number) {
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
  std::map<std::uint64_t, Save> saves_;  // Those that have not ended.
  std::uint64_t next_ = 0;
};

// One save that a lane has to do. A lane has a channel and a thread, and works on its saves one
// after the other, in the order of their numbers. It must: a save waits for the turn of earlier
// ones, and one of these that stood behind it in the queue would never have its turn.
struct Task {
  std::uint64_t number = 0;  // Of its turn.
  std::shared_ptr<SaveHandle::Rep> job;
  StateDict state;        // To be staged by the lane where `staged` is not set yet.
  bool in_place = false;  // Not staged: `staged` has views of the caller's memory.
  std::optional<SnapshotState> staged;
  std::shared_ptr<const DeviceFences> fences;  // Of the caller's memory, when it called.
  std::string path;
  SaveOptions options;
};

class Lane {
 public:
  Lane(std::unique_ptr<Communicator> channel, std::shared_ptr<SnapshotPool> pool,
       std::shared_ptr<DeviceSnapshots> on_devices, std::shared_ptr<Turns> turns)
      : channel_(std::move(channel)),
        pool_(std::move(pool)),
        on_devices_(std::move(on_devices)),
        turns_(std::move(turns)) {}

  // A save that will be added. Numbers rise from call to call.
  void Expect(std::uint64_t number) {
    std::lock_guard lock(mutex_);
    expected_.insert(expected_.end(), number);
  }

  // Waits for what is in the queue.
  ~Lane() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Where there is no thread to be had, the save fails, on the caller's: the other ranks must hear
  // of it.
  void Add(Task task) {
    Status failure;
    {
      std::lock_guard lock(mutex_);
      if (!thread_.joinable()) {
        failure = Guarded([&]() -> Status {
          try {
            thread_ = std::thread([this] { Run(); });
          } catch (const std::system_error& e) {
            return {Code::kResourceExhausted,
                    "save " + task.path + ": no thread for it: " + e.what()};
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
      turns_->Reach(task.number, Turns::Step::kStaged);
      task.job->Staged(failure);
    }
    (void)WaitUntil(task.number, PatienceOf(task.options.timeouts));
    Work(std::optional<Task>(std::move(task)));
  }
  // A save that is expected and could not be added: what comes after it does not wait for it.
  void Forget(std::uint64_t number) {
    {
      std::lock_guard lock(mutex_);
      if (!queue_.contains(number)) expected_.erase(number);
    }
    changed_.notify_all();
  }

  // Until nothing before `number` is under way; false where `limit` passes before.
  bool WaitUntil(std::uint64_t number, std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::min(limit, kLongestWait),
                             [&] { return expected_.empty() || *expected_.begin() >= number; });
  }
  bool WaitIdle(std::chrono::milliseconds limit) {
    return WaitUntil(std::numeric_limits<std::uint64_t>::max(), limit);
  }
  // Whether this is called by what it is working on, a callback.
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
    Result<SaveReport> verdict = Save(*task);
    if (!verdict.ok()) verdict = AfterDevices(verdict.status(), task->fences.get());
    if (!verdict.ok() && task->staged.has_value()) {
      for (const auto& memory : task->staged->on_devices) memory->Doubt();
    }
    // The memory goes back before anybody hears of the end, who may want it for the next save.
    task.reset();
    turns_->Leave(number);
    job->Ended(std::move(verdict), in_place);
    {
      std::lock_guard lock(mutex_);
      expected_.erase(number);
    }
    changed_.notify_all();
  }

  Result<SaveReport> Save(Task& task) {
    SaveHandle::Rep& job = *task.job;
    if (!task.staged.has_value()) {
      // Memory is given out in the order of saves, on every rank. Otherwise the first save might
      // hold it on one rank and the second on another, and each wait for the other for ever.
      (void)turns_->AwaitEarlier(task.number, Turns::Step::kStaged);
      const DeviceRules rules{task.fences.get(), &job.cancel, PatienceOf(task.options.timeouts)};
      task.staged.emplace(
          StageState(task.state, *pool_, *on_devices_, rules, &job.bytes_staged, &job.stalled));
      turns_->Reach(task.number, Turns::Step::kStaged);
      job.Staged(task.staged->status);
    }
    SaveOptions options = task.options;
    options.progress = job.written;
    std::optional<ProgressFile> progress;
    // What this rank says about itself must be finished when rank 0 begins to publish.
    options.events = [&](const Event& event) {
      if (event.kind != Event::Kind::kStart && event.phase == "write" && progress.has_value()) {
        progress->Stop();
      }
      TakeTurn(task, event);
      if (task.options.events) task.options.events(event);
    };
    SaveControl control;
    control.cancel = &job.cancel;
    if (task.in_place) control.fences = task.fences;
    control.copied = !task.in_place;
    control.begun = [&](const Staging& staging) {
      progress.emplace(HostFileSystem(), staging, channel_->rank(), channel_->size(),
                       kProgressInterval, [&job, written = options.progress] {
                         return ProgressFile::Line{job.bytes_total, written->load()};
                       });
    };
    control.ending = [&](const Staging&) {
      if (progress.has_value()) progress->Remove();
    };
    Result<SaveReport> verdict = Status(Code::kInternal, "the save did not run");
    const Status ran = Guarded([&]() -> Status {
      verdict = SaveOn(HostFileSystem(), task.staged->dict, task.path, *channel_, options, control);
      return {};
    });
    if (!ran.ok()) return ran.WithContext("asynchronous save " + task.path);
    return verdict;
  }

  // Rank 0 claims generations in the order of saves, so that `latest` is the last one that was
  // asked for; and of two saves that replace the same name, the second one stays.
  void TakeTurn(const Task& task, const Event& event) {
    if (channel_->rank() != 0) return;
    const bool start = event.kind == Event::Kind::kStart;
    if (event.phase == "stage") {
      if (start) {
        (void)turns_->AwaitEarlier(task.number, Turns::Step::kBegun);
      } else {
        turns_->Reach(task.number, Turns::Step::kBegun);
      }
    } else if (event.phase == "publish" && start) {
      turns_->AwaitName(task.number);
    }
  }

  const std::unique_ptr<Communicator> channel_;
  const std::shared_ptr<SnapshotPool> pool_;
  const std::shared_ptr<DeviceSnapshots> on_devices_;
  const std::shared_ptr<Turns> turns_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Task> queue_;
  std::set<std::uint64_t> expected_;  // That have not ended, whether they are in the queue or not.
  bool stop_ = false;
  std::thread thread_;  // Once there is something to do. Last: stops first.
};

}  // namespace

struct AsyncSaver::Rep {
  Rep(Communicator& comm, const AsyncOptions& opts)
      : options(opts),
        places(PlacesOf(comm)),
        pool(std::make_shared<SnapshotPool>(opts.staging_bytes)),
        on_devices(std::make_shared<DeviceSnapshots>(opts.device_staging_bytes)),
        turns(std::make_shared<Turns>()) {}
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
  // The number of a save that will be added to its lane.
  std::uint64_t Enter(std::string_view path) {
    std::lock_guard lock(entering);  // A lane expects numbers in their order.
    const std::uint64_t number = turns->Enter(WithoutTrailingSlashes(path));
    try {
      lanes[number % kLanes]->Expect(number);
    } catch (...) {
      turns->Leave(number);
      throw;
    }
    return number;
  }
  Status MakeLanes(Communicator& comm) {
    for (std::uint32_t i = 0; i < kLanes; ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> channel,
                                   MakeChannel(comm, 1 + *place * kLanes + i));
      lanes[i] = std::make_unique<Lane>(std::move(channel), pool, on_devices, turns);
    }
    return {};
  }

  const pid_t process = getpid();
  AsyncOptions options;
  std::shared_ptr<SaverSlots> places;
  std::optional<std::uint32_t> place;
  std::shared_ptr<SnapshotPool> pool;
  std::shared_ptr<DeviceSnapshots> on_devices;
  std::shared_ptr<Turns> turns;
  std::mutex entering;
  std::array<std::unique_ptr<Lane>, kLanes> lanes;
};

namespace {

// Savers that exist, for the end of the process: what is under way is waited for, as long as the
// time-outs of the saves allow.
struct LiveSavers {
  // Once it ends no save begins any more: a thread that is still there would write files while what
  // it needs is destroyed. `busy`: threads that begin a save, or destroy a saver that may have
  // some.
  std::atomic<bool> ending{false};
  std::atomic<int> busy{0};
  std::mutex mutex;
  std::set<AsyncSaver::Rep*> savers;
};
LiveSavers& Live() { return PerProcess<LiveSavers>(); }

Status OfAnotherProcess() {
  return {Code::kUnsupported, "the save is of the process that this one was forked from"};
}
// In slices: other threads, whose saves may be what is waited for, can still make and destroy
// savers meanwhile.
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
  // In this order: saves that are waited for write tables.
  static const int registered = (SstTable::PrepareProcess(), std::atexit(&DrainAll));
  (void)registered;  // Where it could not be, only destructors drain.
}

}  // namespace

// ---- Handle ---------------------------------------------------------------------------------

SaveHandle::SaveHandle(std::shared_ptr<Rep> rep) : rep_(std::move(rep)) {}
SaveHandle::SaveHandle(SaveHandle&&) noexcept = default;
SaveHandle& SaveHandle::operator=(SaveHandle&& other) noexcept {
  // What this one had is dropped with `other`.
  std::swap(rep_, other.rep_);
  std::swap(saver_, other.saver_);
  return *this;
}
SaveHandle::~SaveHandle() {
  if (rep_ == nullptr || !rep_->InThisProcess()) return;
  const bool cancel = rep_->on_drop == AsyncOptions::OnDrop::kCancel;
  if (cancel) Cancel();
  // What is not staged reads the caller's memory, which may go after this.
  if (cancel) {
    (void)rep_->staged.Wait();
  } else {
    (void)WaitCommitted();  // The verdict is nobody's any more.
  }
}

Status SaveHandle::WaitStaged() {
  return rep_->InThisProcess() ? rep_->staged.Wait() : OfAnotherProcess();
}

Result<SaveReport> SaveHandle::WaitCommitted() {
  if (!rep_->InThisProcess()) return OfAnotherProcess();
  return rep_->ended.Wait();
}

Result<bool> SaveHandle::WaitStagedFor(std::chrono::milliseconds most) {
  if (!rep_->InThisProcess()) return OfAnotherProcess();
  const std::optional<Status> staged = rep_->staged.WaitFor(most);
  if (staged) TENSORMOUNT_RETURN_IF_ERROR(*staged);
  return staged.has_value();
}

std::optional<Result<SaveReport>> SaveHandle::WaitCommittedFor(std::chrono::milliseconds most) {
  if (!rep_->InThisProcess()) return OfAnotherProcess();
  return rep_->ended.WaitFor(most);
}

Result<int> SaveHandle::StagedFd() {
  if (!rep_->InThisProcess()) return OfAnotherProcess();
  return rep_->staged.EventFd();
}

Result<int> SaveHandle::CommittedFd() {
  if (!rep_->InThisProcess()) return OfAnotherProcess();
  return rep_->ended.EventFd();
}

SaveProgress SaveHandle::progress() const {
  SaveProgress p;
  p.state = rep_->state;
  p.bytes_total = rep_->bytes_total;
  p.bytes_staged = rep_->bytes_staged;
  if (rep_->InThisProcess()) {  // Elsewhere a thread that is not there may hold it.
    rep_->ended.Look([&] { p.bytes_written = *rep_->written; });
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
    // Its lanes' threads are the parent's: they cannot be joined here.
    (void)rep_.release();
    return;
  }
  // Still seen by the end of the process while its lanes come to theirs.
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
    // Counted also where there is none: the next one is in the same place on all ranks.
    const std::uint32_t place = rep->places->made++ % kOwnSaver;
    if (rep->places->taken[place]) {
      return Status(Code::kResourceExhausted, "a communicator has at most " +
                                                  std::to_string(kOwnSaver) +
                                                  " asynchronous savers at a time");
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
  // One that is just being destroyed waits for its saves.
  std::shared_ptr<AsyncSaver> saver;
  const bool free = places.changed.wait_for(lock, Timeouts().arrival, [&] {
    saver = places.shared.lock();
    return saver != nullptr || !places.taken[kOwnSaver];
  });
  if (saver != nullptr) return saver;
  if (!free) {
    return Status(Code::kDeadlineExceeded,
                  "the communicator's asynchronous saver: the last one is still saving");
  }
  places.taken[kOwnSaver] = true;
  rep->place = kOwnSaver;
  if (places.shared_turns == nullptr) places.shared_turns = rep->turns;
  rep->turns = places.shared_turns;
  lock.unlock();
  TENSORMOUNT_RETURN_IF_ERROR(rep->MakeLanes(comm));
  saver.reset(new AsyncSaver(std::move(rep)));
  lock.lock();
  places.shared = saver;
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
  if (rep_->process != getpid()) return OfAnotherProcess();
  ++Live().busy;
  const AtExit begun([] { --Live().busy; });
  if (Live().ending) return Status(Code::kCancelled, "save: the process ends");
  auto job = std::make_shared<SaveHandle::Rep>();
  job->on_drop = rep_->options.on_drop;
  job->bytes_total = BytesOf(state);
  if (options.progress != nullptr) job->written = options.progress;
  Task task;
  task.job = job;
  task.path = std::string(path);
  task.options = options;
  task.number = rep_->Enter(path);
  Lane& lane = *rep_->lanes[task.number % kLanes];
  const std::uint64_t number = task.number;
  // Where there is not even the memory to say so.
  AtExit forget([&] {
    lane.Forget(number);
    rep_->turns->Leave(number);
  });
  // Whatever goes wrong from here on, the task is given to the lane, so that the other ranks hear
  // of it instead of waiting.
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
    // The save before the last must be over: its memory is what this one is staged in.
    const std::chrono::milliseconds patience = PatienceOf(options.timeouts);
    if (!lane.WaitUntil(task.number, patience)) {
      return {Code::kDeadlineExceeded,
              "save " + task.path + ": an earlier save is still under way"};
    }
    // Memory is given out in the order of saves, as in Lane::Save. Otherwise this save could hold
    // what an earlier one needs, and wait for the turn of that one.
    if (!rep_->turns->AwaitEarlier(task.number, Turns::Step::kStaged, patience)) {
      return {Code::kDeadlineExceeded,
              "save " + task.path + ": the tensors of an earlier save are not copied yet"};
    }
    const DeviceRules rules{task.fences.get(), &job->cancel, PatienceOf(options.timeouts)};
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
    rep_->turns->Reach(task.number, Turns::Step::kStaged);
    if (task.in_place) {
      job->state = SaveProgress::State::kSaving;
    } else {
      job->Staged(task.staged->status);
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
