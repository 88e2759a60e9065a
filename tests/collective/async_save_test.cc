// SPDX-License-Identifier: Apache-2.0
#include "tensormount/async_save.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/async_load.h"
#include "tensormount/checkpoint.h"
#include "tensormount/load.h"

#include "base/at_exit.h"
#include "base/file_system.h"
#include "base/thread.h"
#include "collective/async/progress_file.h"
#include "collective/async/snapshot_pool.h"
#include "collective/async/snapshot_state.h"
#include "collective/save_load.h"
#include "index/store/store.h"
#include "tests/collective/forwarding_communicator.h"
#include "tests/support/device_mode.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"
#include "tests/support/thread_masks.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

constexpr std::int64_t kStateRows = 64;
constexpr std::int64_t kStateColumns = 1024;

// One rank's rows of "w", all of one value, and its memory: on a device (DeviceMode), a stream
// writes there what `memory` was when the state was asked for.
struct RowsState {
  RowsState(Communicator& comm, float value)
      : rows(kStateRows / comm.size()),
        memory(static_cast<std::size_t>(rows * kStateColumns), value) {
    shard.global_shape = {kStateRows, kStateColumns};
    shard.region = Box::Make({rows * comm.rank(), 0}, {rows, kStateColumns}).value();
    shard.data = BufferView::Host(DType::kF32, memory.data(), {rows, kStateColumns});
  }
  StateDict State() const {
    StateDict state;
    EXPECT_OK(state.AddTensor("w", DeviceMode() ? OnDevice() : shard));
    EXPECT_OK(state.AddObject("rng", "random", {}));
    EXPECT_OK(state.SetCommon("iteration", 7));
    return state;
  }
  Shard OnDevice() const {
    TestDevice& device = ModeDevice(0);
    static void* const stream = device.MakeStream();
    if (there == nullptr) {
      there.reset(device.NewMemory(memory.size() * sizeof(float)), [&](std::byte* data) {
        device.Synchronize(stream);
        device.FreeMemory(data);
      });
    }
    const auto* const bytes = reinterpret_cast<const std::byte*>(memory.data());
    device.PutLater(stream, there.get(),
                    std::make_shared<const std::vector<std::byte>>(
                        bytes, bytes + memory.size() * sizeof(float)));
    Shard moved = shard;
    moved.data.data = there.get();
    moved.data.device = device.device();
    moved.data.memory = MemoryKind::kDevice;
    moved.data.stream = DeviceStream(StreamKind::kHandle, stream);
    return moved;
  }
  const std::int64_t rows;
  std::vector<float> memory;
  Shard shard;
  mutable std::shared_ptr<std::byte> there;
};

// Whether every cell of "w" is `value`.
Status AllAre(const std::string& path, float value) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint.tensor("w"));
  std::vector<float> cells(static_cast<std::size_t>(kStateRows * kStateColumns));
  TENSORMOUNT_RETURN_IF_ERROR(
      tensor.Read(Box::Whole({kStateRows, kStateColumns}),
                  BufferView::Host(DType::kF32, cells.data(), {kStateRows, kStateColumns})));
  const bool equal = std::all_of(cells.begin(), cells.end(), [&](float x) { return x == value; });
  return equal ? Status() : Status(Code::kDataLoss, path + ": cells differ");
}

class AsyncSaveTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return dir_.Join("store/" + name); }
  TempDir dir_;
};

// The caller writes over its buffers as soon as it may; under the thread sanitizer too.
TEST_F(AsyncSaveTest, SavesValuesFromTheTimeOfTheCall) {
  ASSERT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(comm));
    RowsState rows(comm, 0);
    for (int step = 1; step <= 3; ++step) {
      std::fill(rows.memory.begin(), rows.memory.end(), static_cast<float>(step));
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                   saver->Save(rows.State(), Path("step-" + std::to_string(step))));
      std::fill(rows.memory.begin(), rows.memory.end(), -1.0f);
      TENSORMOUNT_RETURN_IF_ERROR(handle.WaitStaged());
      TENSORMOUNT_ASSIGN_OR_RETURN(const SaveReport report, handle.WaitCommitted());
      EXPECT_EQ(handle.progress().state, SaveProgress::State::kCommitted);
      EXPECT_EQ(handle.progress().bytes_staged, handle.progress().bytes_total);
      EXPECT_EQ(report.tensors, 1u);
    }
    return {};
  }));
  for (int step = 1; step <= 3; ++step) {
    EXPECT_OK(AllAre(Path("step-" + std::to_string(step)), static_cast<float>(step)));
  }
  ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(Path("step-3")));
  EXPECT_EQ(checkpoint.common("iteration").value(), CommonValue(7));
  EXPECT_EQ(checkpoint.object("rng").value(), "random");
}

TEST_F(AsyncSaveTest, BuffersAreReadUntilWaitStagedReturns) {
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    AsyncOptions options;
    options.stage_in_background = true;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver,
                                 AsyncSaver::Make(comm, options));
    RowsState rows(comm, 5);
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(rows.State(), Path("step")));
    TENSORMOUNT_RETURN_IF_ERROR(handle.WaitStaged());
    std::fill(rows.memory.begin(), rows.memory.end(), -1.0f);
    return handle.WaitCommitted().status();
  }));
  EXPECT_OK(AllAre(Path("step"), 5));
}

// The same checkpoint as a save that waits: test_async_is_equivalent_to_sync.
TEST_F(AsyncSaveTest, AsyncSaveEqualsSave) {
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    RowsState rows(comm, 3);
    TENSORMOUNT_RETURN_IF_ERROR(Save(rows.State(), Path("sync"), comm).status());
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, AsyncSave(rows.State(), Path("async"), comm));
    return handle.WaitCommitted().status();
  }));
  ASSERT_OK_AND_ASSIGN(const auto sync, OpenedCheckpoint::Open(HostFileSystem(), Path("sync"), {}));
  ASSERT_OK_AND_ASSIGN(const auto async,
                       OpenedCheckpoint::Open(HostFileSystem(), Path("async"), {}));
  EXPECT_EQ(sync->commit()->record.content_root, async->commit()->record.content_root);
}

// How the forked child below ends, once what the library does at exit is done: made before the
// library's own, it runs after it, and before LeakSanitizer calls lost what only the threads of the
// parent held.
std::optional<int> child_exit;  // In the child alone.
[[maybe_unused]] const int ends_children = std::atexit([] {
  if (child_exit) _exit(*child_exit);
});

// Its exit waited for threads that only the parent has.
TEST_F(AsyncSaveTest, ForkedChildExitsWhileTheParentSaves) {
  const auto comm = MakeSelfCommunicator();
  RowsState rows(*comm, 1);
  ASSERT_OK_AND_ASSIGN(const auto saver, AsyncSaver::Make(*comm));
  std::atomic<bool> go = false;
  std::atomic<bool> waits = false;
  SaveOptions options;
  options.events = [&](const Event& event) {
    if (event.phase == "write") waits = true;
    while (event.phase == "write" && !go) std::this_thread::sleep_for(milliseconds(1));
  };
  // Not another one in the child: the simulated devices have locks, and threads that hold them.
  const StateDict state = rows.State();
  ASSERT_OK_AND_ASSIGN(auto handle, saver->Save(state, Path("one"), options));
  const AtExit goes([&] { go = true; });
  // What a thread of the parent holds of the allocator of a sanitizer would never come free in the
  // child.
  for (int i = 0; i < 20'000 && !waits; ++i) std::this_thread::sleep_for(milliseconds(1));
  ASSERT_TRUE(waits);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool right = handle.WaitStaged().code() == Code::kUnsupported &&
                       handle.WaitCommitted().status().code() == Code::kUnsupported &&
                       saver->Save(state, Path("two")).status().code() == Code::kUnsupported;
    child_exit = right ? 0 : 1;
    std::exit(1);
  }
  int status = -1;
  pid_t ended = 0;
  for (int i = 0; i < 20'000 && ended == 0; ++i) {
    ended = waitpid(child, &status, WNOHANG);
    if (ended == 0) std::this_thread::sleep_for(milliseconds(1));
  }
  if (ended == 0) kill(child, SIGKILL);
  EXPECT_EQ(ended, child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  go = true;
  EXPECT_OK(handle.WaitCommitted());
  EXPECT_OK(AllAre(Path("one"), 1));
}

// Two are under way at a time, and `latest` is the one of the higher generation, whichever came
// first.
TEST_F(AsyncSaveTest, SavesOverlapAndLatestNeverMovesBack) {
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(comm));
    std::vector<SaveHandle> handles;
    std::uint64_t last = 0;
    for (int step = 1; step <= 5; ++step) {
      RowsState rows(comm, static_cast<float>(step));
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                   saver->Save(rows.State(), Path("step-" + std::to_string(step))));
      handles.push_back(std::move(handle));
      if (comm.rank() != 0) continue;
      const auto store = Store::Open(HostFileSystem(), dir_.Join("store"));
      if (!store.ok()) continue;  // Not made yet.
      const auto latest = store.value().Latest();
      if (!latest.ok()) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const auto opened,
          OpenedCheckpoint::Open(HostFileSystem(),
                                 store.value().CheckpointPath(latest.value().name), {}));
      EXPECT_GE(opened->index().info().generation, last);
      last = opened->index().info().generation;
    }
    for (SaveHandle& handle : handles) {
      TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
    }
    return {};
  }));
  for (int step = 1; step <= 5; ++step) {
    EXPECT_OK(AllAre(Path("step-" + std::to_string(step)), static_cast<float>(step)));
  }
}

// A save that dawdles is not overtaken by the next one: neither in generation...
TEST_F(AsyncSaveTest, GenerationsFollowCallOrder) {
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(comm));
    SaveOptions slow;
    slow.events = [](const Event& event) {
      const bool first = event.phase == "validate" && event.kind == Event::Kind::kStart;
      if (first) std::this_thread::sleep_for(milliseconds(200));
    };
    RowsState rows(comm, 1);
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle a, saver->Save(rows.State(), Path("a"), slow));
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle b, saver->Save(rows.State(), Path("b")));
    TENSORMOUNT_ASSIGN_OR_RETURN(const SaveReport later, b.WaitCommitted());
    TENSORMOUNT_ASSIGN_OR_RETURN(const SaveReport earlier, a.WaitCommitted());
    EXPECT_LT(earlier.generation, later.generation);
    return {};
  }));
}

// Calls of several threads of a process: one that copies much is overtaken by those that copy
// little, and each save that it holds up has its number. They waited for each other for ever.
TEST_F(AsyncSaveTest, ThreadsSaveConcurrentlyOnOneSaver) {
  const auto comm = MakeSelfCommunicator();
  ASSERT_OK_AND_ASSIGN(const auto saver, AsyncSaver::Make(*comm));
  std::vector<float> much(6'000'000, 1);
  const float little = 2;
  const auto save = [&](const std::string& name, const float* data, std::int64_t n) -> Status {
    Shard shard;
    shard.global_shape = {n};
    shard.region = Box::Make({0}, {n}).value();
    shard.data = BufferView::Host(DType::kF32, const_cast<float*>(data), {n});
    StateDict state;
    TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("w", shard));
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, Path(name)));
    return handle.WaitCommitted().status();
  };
  std::atomic<bool> over = false;
  std::thread slow([&] {
    for (int i = 0; i < 4; ++i) {
      EXPECT_OK(save("much-" + std::to_string(i), much.data(), 6'000'000));
    }
    over = true;
  });
  const auto save_little = [&](const std::string& name) {
    for (int i = 0; i < 200 && !over; ++i) {
      EXPECT_OK(save(name + std::to_string(i), &little, 1));
    }
  };
  std::thread quick([&] { save_little("little-"); });
  save_little("small-");
  slow.join();
  quick.join();
}

// Memory is given out in the order of the calls: a save that has it would wait for the turn of one
// that waits for memory.
// A communicator that takes its time, as while a saver makes its channels.
class SlowCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  int rank() const override {
    std::this_thread::sleep_for(milliseconds(20));
    return ForwardingCommunicator::rank();
  }
};

// The first thread makes the saver of the communicator; the others wait until it is made.
TEST_F(AsyncSaveTest, ThreadsThatNeedTheFirstSaverAtTheSameTimeShareIt) {
  const auto self = MakeSelfCommunicator();
  SlowCommunicator comm(*self);
  RowsState rows(*self, 1);
  const StateDict state = rows.State();
  std::vector<std::future<Status>> begun;
  std::mutex mutex;
  std::vector<SaveHandle> handles;  // Kept, because the end of a saver also wakes its waiters.
  for (int i = 0; i < 4; ++i) {
    begun.push_back(std::async(std::launch::async, [&, i]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                   AsyncSave(state, Path("n" + std::to_string(i)), comm));
      std::lock_guard lock(mutex);
      handles.push_back(std::move(handle));
      return {};
    }));
  }
  bool hangs = false;
  for (auto& one : begun) {
    hangs = hangs || one.wait_for(std::chrono::seconds(20)) != std::future_status::ready;
  }
  EXPECT_FALSE(hangs);
  if (hangs) {
    std::lock_guard lock(mutex);
    handles.clear();  // So that the test ends.
  }
  for (auto& one : begun) EXPECT_OK(one.get());
}

TEST_F(AsyncSaveTest, ThreadsShareStagingMemoryOfASaver) {
  const auto comm = MakeSelfCommunicator();
  const std::vector<std::byte> bytes(Amount(std::size_t{32}, std::size_t{2}) << 20);
  AsyncOptions bounded;
  bounded.staging_bytes = bytes.size();  // One of the saves below takes all of it.
  ASSERT_OK_AND_ASSIGN(const auto saver, AsyncSaver::Make(*comm, bounded));
  SaveOptions options;
  options.timeouts.arrival = std::chrono::seconds(20);
  options.if_exists = IfExists::kReplace;
  options.reuse = Reuse::kOff;
  const auto state_of = [&](int tensors, std::int64_t n) {
    StateDict state;
    Shard shard;
    shard.global_shape = {n};
    shard.region = Box::Make({0}, {n}).value();
    shard.data = BufferView::Host(DType::kU8, const_cast<std::byte*>(bytes.data()), {n});
    for (int i = 0; i < tensors; ++i) EXPECT_OK(state.AddTensor("w" + std::to_string(i), shard));
    return state;
  };
  // One that takes long to look at before it asks for its memory.
  const StateDict many = state_of(Amount(20'000, 5'000), 4);
  const StateDict large = state_of(1, static_cast<std::int64_t>(bytes.size()));
  std::atomic<bool> over = false;
  std::thread other([&] {
    for (int i = 0; i < 100 && !over; ++i) {
      auto handle = saver->Save(large, Path("large"), options);
      EXPECT_OK(handle.ok() ? handle.value().WaitCommitted().status() : handle.status());
    }
  });
  for (int i = 0; i < 4; ++i) {
    auto handle = saver->Save(many, Path("many"), options);
    EXPECT_OK(handle.ok() ? handle.value().WaitCommitted().status() : handle.status());
  }
  over = true;
  other.join();
}

// ...nor, where both go to one name, in what stays there.
TEST_F(AsyncSaveTest, LastOfConcurrentReplacingSavesWins) {
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(comm));
    SaveOptions replace;
    replace.if_exists = IfExists::kReplace;
    SaveOptions slow = replace;
    slow.events = [](const Event& event) {
      const bool compare = event.phase == "compare" && event.kind == Event::Kind::kStart;
      if (compare) std::this_thread::sleep_for(milliseconds(200));
    };
    std::vector<SaveHandle> handles;
    for (int value = 1; value <= 3; ++value) {
      RowsState rows(comm, static_cast<float>(value));
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                   saver->Save(rows.State(), Path("same") + (value == 2 ? "/" : ""),
                                               value == 2 ? slow : replace));
      handles.push_back(std::move(handle));
    }
    for (SaveHandle& handle : handles) {
      TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
    }
    return {};
  }));
  EXPECT_OK(AllAre(Path("same"), 3));
}

// The training goes on with collective calls of its own over the same communicator.
TEST_F(AsyncSaveTest, RunsConcurrentlyWithOtherCollectiveCalls) {
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    RowsState rows(comm, 9);
    rows.shard.global_shape = {rows.rows * 3, kStateColumns};
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, AsyncSave(rows.State(), Path("async"), comm));
    RowsState other(comm, 4);
    other.shard.global_shape = {other.rows * 3, kStateColumns};
    for (int i = 0; i < 3; ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(
          Save(other.State(), Path("sync-" + std::to_string(i)), comm).status());
    }
    return handle.WaitCommitted().status();
  }));
}

TEST_F(AsyncSaveTest, FailureOfOneRankFailsAllRanks) {
  std::atomic<int> failed{0};
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(comm));
    StateDict state;
    if (comm.rank() == 1) {
      EXPECT_FALSE(state.Fail(Status(Code::kInvalidArgument, "the optimizer has no state")).ok());
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, Path("step")));
    const Status verdict = handle.WaitCommitted().status();
    EXPECT_THAT(verdict, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(verdict, HasMessage("rank 1: the optimizer has no state"));
    EXPECT_EQ(handle.progress().state, SaveProgress::State::kFailed);
    ++failed;
    // The next one is none the worse for it.
    RowsState rows(comm, 1);
    rows.shard.global_shape = {rows.rows * 3, kStateColumns};
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle next, saver->Save(rows.State(), Path("next")));
    return next.WaitCommitted().status();
  }));
  EXPECT_EQ(failed, 3);
}

// One rank asks for the end: all ranks end alike, and nothing of the save is left.
TEST_F(AsyncSaveTest, CancelOnOneRankEndsAllRanksAlike) {
  int cancelled = 0;
  for (int i = 0; i < 10; ++i) {
    std::atomic<int> committed{0};
    ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
      RowsState rows(comm, 1);
      rows.shard.global_shape = {rows.rows * 3, kStateColumns};
      TENSORMOUNT_ASSIGN_OR_RETURN(
          SaveHandle handle, AsyncSave(rows.State(), Path("step-" + std::to_string(i)), comm));
      if (comm.rank() == 2) {
        if (i > 0) std::this_thread::sleep_for(milliseconds(2 * i));
        handle.Cancel();
      }
      const Status verdict = handle.WaitCommitted().status();
      if (!verdict.ok()) {
        EXPECT_THAT(verdict, HasCode(Code::kCancelled));
        EXPECT_THAT(verdict, HasMessage("rank 2"));
        EXPECT_EQ(handle.progress().state, SaveProgress::State::kCancelled);
      }
      if (verdict.ok()) ++committed;
      return {};
    }));
    // All or none.
    EXPECT_TRUE(committed == 0 || committed == 3) << committed;
    EXPECT_EQ(Checkpoint::Open(Path("step-" + std::to_string(i))).ok(), committed == 3);
    if (committed == 0) ++cancelled;
  }
  EXPECT_GT(cancelled, 0);
}

TEST_F(AsyncSaveTest, DroppingTheHandleWaitsOrCancels) {
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> waits, AsyncSaver::Make(comm));
    RowsState rows(comm, 2);
    TENSORMOUNT_RETURN_IF_ERROR(waits->Save(rows.State(), Path("waits")).status());
    EXPECT_OK(AllAre(Path("waits"), 2));
    AsyncOptions options;
    options.on_drop = AsyncOptions::OnDrop::kCancel;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> cancels,
                                 AsyncSaver::Make(comm, options));
    TENSORMOUNT_RETURN_IF_ERROR(cancels->Save(rows.State(), Path("cancels")).status());
    return {};
  }));
  // In time or not: it is whole or it is not there.
  const auto cancelled = Checkpoint::Open(Path("cancels"));
  if (cancelled.ok()) {
    EXPECT_OK(AllAre(Path("cancels"), 2));
  }
}

TEST_F(AsyncSaveTest, HandleMayBeDestroyedInAHookOfItsSave) {
  const auto comm = MakeSelfCommunicator();
  RowsState rows(*comm, 1);
  ASSERT_OK_AND_ASSIGN(const auto saver, AsyncSaver::Make(*comm));
  for (const bool own : {true, false}) {  // By a saver of its own, or by that of the communicator.
    const std::string path = Path(own ? "own" : "shared");
    std::optional<SaveHandle> handle;
    std::atomic<bool> given = false;
    std::atomic<bool> destroyed = false;
    SaveOptions options;
    options.events = [&](const Event& event) {
      if (event.phase != "write" || destroyed) return;
      for (int i = 0; i < 20'000 && !given; ++i) std::this_thread::sleep_for(milliseconds(1));
      handle.reset();
      destroyed = true;
    };
    ASSERT_OK_AND_ASSIGN(auto made, own ? saver->Save(rows.State(), path, options)
                                        : AsyncSave(rows.State(), path, *comm, options));
    handle.emplace(std::move(made));
    given = true;
    for (int i = 0; i < 20'000 && !destroyed; ++i) std::this_thread::sleep_for(milliseconds(1));
    ASSERT_TRUE(destroyed) << "the save waits for itself";
    ASSERT_OK(own ? saver->Save(rows.State(), path + "2").value().WaitCommitted().status()
                  : AsyncSave(rows.State(), path + "2", *comm).value().WaitCommitted().status());
    // The save itself goes on.
    for (int i = 0; i < 20'000 && !Checkpoint::Open(path).ok(); ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_OK(AllAre(path, 1));
  }
}

TEST_F(AsyncSaveTest, StagingMemoryIsBoundedAndReused) {
  ASSERT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    AsyncOptions options;
    options.staging_bytes = 3u << 20;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver,
                                 AsyncSaver::Make(comm, options));
    // 256 KiB fit; two saves of 2 MiB do not fit at a time.
    for (int i = 0; i < 3; ++i) {
      std::vector<float> large(512 * 1024, static_cast<float>(i));
      StateDict state;
      EXPECT_OK(state.AddTensor(
          "w", {.global_shape = {512 * 1024},
                .region = Box::Whole({512 * 1024}),
                .data = BufferView::Host(DType::kF32, large.data(), {512 * 1024})}));
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                   saver->Save(state, Path("step-" + std::to_string(i))));
      TENSORMOUNT_RETURN_IF_ERROR(handle.WaitStaged());
      TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
    }
    std::vector<float> too_large(1024 * 1024, 1.0f);
    StateDict state;
    EXPECT_OK(state.AddTensor(
        "w", {.global_shape = {1024 * 1024},
              .region = Box::Whole({1024 * 1024}),
              .data = BufferView::Host(DType::kF32, too_large.data(), {1024 * 1024})}));
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, Path("too-large")));
    EXPECT_THAT(handle.WaitStaged(), HasCode(Code::kResourceExhausted));
    EXPECT_THAT(handle.WaitCommitted().status(), HasMessage("staging_bytes allows 3145728"));
    return {};
  }));
}

TEST(StagingPoolTest, TakeWaitsForFreedMemoryAndReusesPages) {
  auto pool = std::make_shared<SnapshotPool>(4u << 20);
  std::atomic<std::int64_t> stalled{0};
  ASSERT_OK_AND_ASSIGN(auto first, pool->Take(3u << 20, milliseconds(10), &stalled));
  std::byte* const where = first->data();
  EXPECT_THAT(pool->Take(3u << 20, milliseconds(10), &stalled).status(),
              HasCode(Code::kDeadlineExceeded));
  EXPECT_GT(stalled, 0);
  EXPECT_THAT(pool->Take(5u << 20, milliseconds(10), nullptr).status(),
              HasCode(Code::kResourceExhausted));
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(20));
    first.reset();
  });
  const auto second = pool->Take(3u << 20, milliseconds(60'000), &stalled);
  other.join();
  ASSERT_OK(second);
  EXPECT_EQ(second.value()->data(), where);
  EXPECT_LE(pool->mapped(), 4u << 20);
}

TEST(StagingPoolTest, IdleMemoryIsFreedForALargerSnapshot) {
  auto pool = std::make_shared<SnapshotPool>(6u << 20);
  EXPECT_OK(pool->Take(1u << 20, milliseconds(0), nullptr));
  EXPECT_EQ(pool->mapped(), 2u << 20);
  const auto larger = pool->Take(5u << 20, milliseconds(0), nullptr);
  ASSERT_OK(larger);
  EXPECT_EQ(pool->mapped(), 6u << 20);
}

// The bound is of cache lines that are begun, not of one more each.
TEST(StagedStateTest, StagingNeedsOnlyTheCacheLinesOfItsShards) {
  std::vector<float> memory(16);
  StateDict state;
  for (const std::int64_t cells : {1, 16}) {
    EXPECT_OK(state.AddTensor("of " + std::to_string(cells),
                              {.global_shape = {cells},
                               .region = Box::Whole({cells}),
                               .data = BufferView::Host(DType::kF32, memory.data(), {cells})}));
  }
  const auto with = [&](std::uint64_t bound) {
    return StageState(state, *std::make_shared<SnapshotPool>(bound),
                      *std::make_shared<DeviceSnapshots>(0), {}, nullptr, nullptr)
        .status;
  };
  EXPECT_OK(with(128));
  EXPECT_THAT(with(127), HasMessage("needs 128 bytes of staging memory"));
}

TEST(StagedStateTest, PacksStridedShardsWithoutLeadingAxes) {
  std::vector<float> memory(6 * 4);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  StateDict state;
  // The transposed [4, 6] view of [6, 4].
  EXPECT_OK(state.AddTensor(
      "t", {.global_shape = {4, 6},
            .region = Box::Whole({4, 6}),
            .data = BufferView::HostStrided(DType::kF32, memory.data(), {4, 6}, {1, 4})}));
  EXPECT_OK(
      state.AddTensor("layers", {.global_shape = {3, 6, 4},
                                 .region = Box::Make({2, 0, 0}, {1, 6, 4}).value(),
                                 .data = BufferView::Host(DType::kF32, memory.data(), {6, 4})}));
  auto pool = std::make_shared<SnapshotPool>(0);
  const SnapshotState staged = StageState(state, *pool, *std::make_shared<DeviceSnapshots>(0),
                                          {.patience = milliseconds(1000)}, nullptr, nullptr);
  ASSERT_OK(staged.status);
  ASSERT_EQ(staged.dict.tensors().size(), 2u);
  const auto* t = static_cast<const float*>(staged.dict.tensors()[0].shard.data.data);
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 6; ++c) EXPECT_EQ(t[r * 6 + c], static_cast<float>(c * 4 + r));
  }
  EXPECT_EQ(std::memcmp(staged.dict.tensors()[1].shard.data.data, memory.data(),
                        memory.size() * sizeof(float)),
            0);
}

// What is large is copied by several threads, each its part: of packed memory any bytes, of strided
// memory whole tensors.
TEST(StagedStateTest, ThreadsShareTheCopyOfLargeTensors) {
  constexpr std::int64_t kLarge = 9'000'001;
  constexpr std::int64_t kSide = 1500;
  std::vector<float> large(kLarge);
  std::vector<float> square(kSide * kSide);
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<float>(i * 7 % 100'003);
  for (std::size_t i = 0; i < square.size(); ++i) square[i] = static_cast<float>(i);
  StateDict state;
  EXPECT_OK(
      state.AddTensor("large", {.global_shape = {kLarge},
                                .region = Box::Whole({kLarge}),
                                .data = BufferView::Host(DType::kF32, large.data(), {kLarge})}));
  EXPECT_OK(state.AddTensor(
      "turned",
      {.global_shape = {kSide, kSide},
       .region = Box::Whole({kSide, kSide}),
       .data = BufferView::HostStrided(DType::kF32, square.data(), {kSide, kSide}, {1, kSide})}));
  EXPECT_OK(
      state.AddTensor("again", {.global_shape = {kLarge},
                                .region = Box::Whole({kLarge}),
                                .data = BufferView::Host(DType::kF32, large.data(), {kLarge})}));
  const OnDevices moved(state);
  auto pool = std::make_shared<SnapshotPool>(0);
  std::atomic<std::uint64_t> counted{0};
  std::shared_ptr<const DeviceFences> fences;
  ASSERT_OK(FencesAtCall(moved.dict(), fences));
  const SnapshotState staged =
      StageState(moved.dict(), *pool, *std::make_shared<DeviceSnapshots>(0),
                 {.fences = fences.get(), .patience = milliseconds(20'000)}, &counted, nullptr);
  ASSERT_OK(staged.status);
  EXPECT_EQ(counted, 4u * (2 * kLarge + kSide * kSide));
  const auto floats = [&](std::size_t i) {
    return static_cast<const float*>(staged.dict.tensors()[i].shard.data.data);
  };
  EXPECT_EQ(std::memcmp(floats(0), large.data(), 4 * large.size()), 0);
  EXPECT_EQ(std::memcmp(floats(2), large.data(), 4 * large.size()), 0);
  for (std::int64_t r = 0; r < kSide; r += 7) {
    for (std::int64_t c = 0; c < kSide; ++c) {
      ASSERT_EQ(floats(1)[r * kSide + c], square[static_cast<std::size_t>(c * kSide + r)]);
    }
  }
}

// Otherwise a signal to the process, such as SIGTERM before a preemption, might not interrupt the
// program's own thread.
TEST_F(AsyncSaveTest, ThreadsOfTheLibraryBlockSignals) {
  if (DeviceMode()) GTEST_SKIP() << "devices of tests start threads of their own";
  const auto before = ThreadMasks();
  const std::unique_ptr<Communicator> comm = MakeSelfCommunicator();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(*comm));
  int started = 0;
  // The hook itself has the caller's signals: a program that it starts inherits them.
  const auto look = [&](const Event&) {
    const sigset_t mask = CallersSignals::Current();
    EXPECT_EQ(sigismember(&mask, SIGTERM), 0);
    const SignalsBlocked blocked;
    EXPECT_EQ(ThreadsThatTakeSignals(before, &started), "");
  };
  SaveOptions options;
  options.events = look;
  RowsState rows(*comm, 1);
  ASSERT_OK_AND_ASSIGN(SaveHandle saved, saver->Save(rows.State(), Path("step"), options));
  ASSERT_OK(saved.WaitCommitted());
  EXPECT_GT(started, 0);
  // The thread of the saver still exists, and runs no hook now.
  EXPECT_EQ(ThreadsThatTakeSignals(before, &started), "");
  EXPECT_GT(started, 0);
  started = 0;
  StateDict request;
  ASSERT_OK(request.AddTensor("w", rows.shard));
  LoadOptions load;
  load.events = look;
  ASSERT_OK_AND_ASSIGN(LoadHandle loaded, AsyncLoad(request, Path("step"), *comm, load));
  ASSERT_OK(loaded.Wait());
  EXPECT_GT(started, 0);
  // The caller's own threads keep their signals.
  EXPECT_OK(RunOnThreads(2, [](Communicator&) -> Status {
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    EXPECT_EQ(sigismember(&mask, SIGTERM), 0);
    return {};
  }));
}

// Each place of a communicator is taken many times; what a cancelled save left on the way there
// does not reach the next one.
TEST_F(AsyncSaveTest, SaversCanBeRecreatedOnOneCommunicator) {
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    RowsState rows(comm, 2);
    rows.shard.global_shape = {rows.rows * 3, kStateColumns};
    std::vector<SaveHandle> handles;
    for (int i = 0; i < 12; ++i) {
      if (handles.size() == 3) handles.erase(handles.begin());  // The oldest; waits.
      TENSORMOUNT_ASSIGN_OR_RETURN(
          SaveHandle handle, AsyncSave(rows.State(), Path("step-" + std::to_string(i)), comm));
      if (i % 3 == 1 && comm.rank() == i % 2) handle.Cancel();
      handles.push_back(std::move(handle));
    }
    for (SaveHandle& handle : handles) {
      const Status verdict = handle.WaitCommitted().status();
      EXPECT_TRUE(verdict.ok() || verdict.code() == Code::kCancelled) << verdict.ToString();
    }
    // Savers besides: two at a time. One that is refused counts, so that the next ones are in the
    // same place on all ranks, whoever was refused.
    auto first = AsyncSaver::Make(comm);
    EXPECT_OK(first.status());
    if (comm.rank() != 1) first = Status(Code::kNotFound, "let go");
    const auto second = AsyncSaver::Make(comm);
    EXPECT_OK(second.status());
    EXPECT_EQ(AsyncSaver::Make(comm).status().code(),
              comm.rank() == 1 ? Code::kResourceExhausted : Code::kOk);
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle on_second,
                                 second.value()->Save(rows.State(), Path("on-second")));
    TENSORMOUNT_RETURN_IF_ERROR(on_second.WaitCommitted().status());
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto channel, MakeChannel(comm, 7));
    EXPECT_THAT(AsyncSaver::Make(*channel).status(), HasCode(Code::kInvalidArgument));
    return {};
  }));
  for (int i = 0; i < 12; i += 3) {
    EXPECT_OK(Checkpoint::Open(Path("step-" + std::to_string(i))));
  }
}

// One rank keeps its handles, another drops each at once: failed for ever after the third, once.
TEST_F(AsyncSaveTest, RanksMayKeepOrDropHandlesIndependently) {
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    RowsState rows(comm, 2);
    rows.shard.global_shape = {rows.rows * 3, kStateColumns};
    SaveOptions options;
    options.timeouts.arrival = std::chrono::seconds(20);
    std::vector<SaveHandle> kept;
    for (int i = 0; i < 9; ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          SaveHandle handle,
          AsyncSave(rows.State(), Path("step-" + std::to_string(i)), comm, options));
      if (comm.rank() == 0 || (comm.rank() == 2 && i % 2 == 0)) {
        kept.push_back(std::move(handle));
      } else {
        TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
      }
    }
    for (SaveHandle& handle : kept) TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
    return {};
  }));
  for (int i = 0; i < 9; ++i) EXPECT_OK(Checkpoint::Open(Path("step-" + std::to_string(i))));
}

// A shard without cells needs no memory, in a save that waits and in one that does not.
TEST_F(AsyncSaveTest, EmptyShardsNeedNoData) {
  ASSERT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    RowsState rows(comm, 1);
    StateDict state = rows.State();
    EXPECT_OK(state.AddTensor("none", MetadataOnly(DType::kF32, {0, 4}, Box::Whole({0, 4}))));
    TENSORMOUNT_RETURN_IF_ERROR(Save(state, Path("sync"), comm).status());
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, AsyncSave(state, Path("async"), comm));
    TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
    EXPECT_OK(state.AddTensor("some", MetadataOnly(DType::kF32, {4}, Box::Whole({4}))));
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle refused, AsyncSave(state, Path("refused"), comm));
    EXPECT_THAT(refused.WaitCommitted().status(),
                HasMessage("tensor some: shard [0:4] has no data"));
    return {};
  }));
}

TEST(ProgressFileTest, ReportsProgressOfEachRankAndIsRemoved) {
  TempDir dir;
  Staging staging;
  staging.directory = dir.Join("staging");
  staging.name = "step";
  ASSERT_OK(HostFileSystem().CreateDirectory(staging.directory));
  const auto line = [](std::uint64_t written) {
    return [written] { return ProgressFile::Line{100, written}; };
  };
  ProgressFile one(HostFileSystem(), staging, 1, 2, milliseconds(5), line(40));
  ProgressFile zero(HostFileSystem(), staging, 0, 2, milliseconds(5), line(30));
  std::string text;
  for (int i = 0; i < 2000 && text.find("\"bytes_written\": 70") == std::string::npos; ++i) {
    std::this_thread::sleep_for(milliseconds(5));
    const auto read = HostFileSystem().ReadFile(staging.directory + "/status.json", 10'000);
    if (read.ok()) text = read.value();
  }
  EXPECT_NE(text.find("\"bytes_written\": 70"), std::string::npos) << text;
  EXPECT_NE(text.find("\"bytes_total\": 200"), std::string::npos) << text;
  one.Stop();
  zero.Remove();
  EXPECT_TRUE(HostFileSystem().List(staging.directory).value().empty());
}

// The end of the process waits for what is under way.
TEST(AsyncSaveExitTest, ProcessExitWaitsForPendingSaves) {
  if (DeviceMode()) GTEST_SKIP() << "a forked process has no device";
  TempDir dir;
  const std::string path = dir.Join("store/step");
  EXPECT_EXIT(
      {
        static std::unique_ptr<Communicator> comm = MakeSelfCommunicator();
        static auto saver = AsyncSaver::Make(*comm);
        RowsState rows(*comm, 6);
        static auto handle = saver.value()->Save(rows.State(), path);
        std::exit(handle.ok() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_OK(AllAre(path, 6));
}

}  // namespace
}  // namespace tensormount
