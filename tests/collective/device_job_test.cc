// SPDX-License-Identifier: Apache-2.0
// Saves and loads of tensors on devices: what they promise of streams and memory, and everything
// that a device can do wrong.
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/async_load.h"
#include "tensormount/async_save.h"
#include "tensormount/load.h"
#include "tensormount/log.h"
#include "tensormount/save.h"

#include "device/devices.h"
#include "index/store/store.h"
#include "tests/collective/save_testing.h"
#include "tests/support/host_device.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

constexpr int kTwo = 2;
constexpr std::int64_t kRowBytes =
    100'000;  // Bytes of a rank's rows: more than a ring of 64 KiB holds.

// What "work that never ends" waits for.
class Gate {
 public:
  void Pass() { open_.wait(false); }
  void Open() {
    open_ = true;
    open_.notify_all();
  }

 private:
  std::atomic<bool> open_ = false;
};

class DeviceJobTest : public testing::Test {
 protected:
  ~DeviceJobTest() override {
    gate_.Open();
    for (void* stream : streams_) device().Synchronize(stream);
    device().Quiesce();  // What was given up is still read.
    for (std::byte* data : memory_) device().Free(data);
  }
  HostDevice& device() { return devices_[0]; }
  // Work of this kind ("run copy-in") does not go on until gate_ opens.
  void StopAtTheGate(std::string_view work) {
    device().SetFault([this, work](std::string_view what) {
      if (what == work) gate_.Pass();
      return Status();
    });
  }
  std::string Path(const std::string& name) const { return dir_.Join("store/" + name); }

  // Memory of the device, all of it `value`.
  std::byte* Make(char value) {
    memory_.push_back(device().Allocate(kRowBytes).value());
    std::memset(device().Reveal(memory_.back()), value, kRowBytes);
    return memory_.back();
  }
  void* MakeStream() {
    streams_.push_back(device().MakeStream());
    return streams_.back();
  }
  static BufferView View(std::byte* data, const Dims& shape) {
    BufferView view = BufferView::Host(DType::kU8, static_cast<void*>(data), shape);
    view.device = {DeviceKind::kCuda, 0};
    view.memory = MemoryKind::kDevice;
    return view;
  }
  // Rows `rank` of "w".
  static StateDict Rows(int rank, std::byte* data, void* stream = nullptr) {
    BufferView view = View(data, {1, kRowBytes});
    if (stream != nullptr) view.stream = {StreamKind::kHandle, stream};
    StateDict state;
    const Region row = Box::Make({rank, 0}, {1, kRowBytes}).value();
    EXPECT_OK(state.AddTensor("w", {{kTwo, kRowBytes}, row, view}));
    return state;
  }
  // Runs a job on two ranks; results by rank.
  static std::vector<Status> OnTwoRanks(const std::function<Status(Communicator&)>& job) {
    std::vector<Status> results(kTwo);
    EXPECT_OK(RunOnThreads(kTwo, [&](Communicator& comm) {
      results[static_cast<std::size_t>(comm.rank())] = job(comm);
      return Status();
    }));
    return results;
  }
  // Saves rows of 'a' and 'b'.
  std::vector<Status> SaveRows(const std::string& name, const SaveOptions& options = {}) {
    const std::vector<std::byte*> rows = {Make('a'), Make('b')};
    return OnTwoRanks([&](Communicator& comm) {
      const StateDict state = Rows(comm.rank(), rows[static_cast<std::size_t>(comm.rank())]);
      return Save(state, Path(name), comm, options).status();
    });
  }
  std::vector<Status> LoadRows(const std::string& name, const std::vector<std::byte*>& rows,
                               const LoadOptions& options = {}) {
    return OnTwoRanks([&](Communicator& comm) {
      const StateDict request = Rows(comm.rank(), rows[static_cast<std::size_t>(comm.rank())]);
      return Load(request, Path(name), comm, options).status();
    });
  }
  // Of all ranks, in the same words.
  void ExpectOnAll(const std::vector<Status>& results, Code code, const std::string& words) {
    for (const Status& status : results) {
      EXPECT_THAT(status, HasCode(code));
      EXPECT_THAT(status, HasMessage(words));
    }
  }
  void ExpectNothingIn(const std::string& store) {
    EXPECT_THAT(Inside(dir_.Join(store)), testing::IsEmpty());
  }
  static std::string Row(char value) { return std::string(kRowBytes, value); }

  TempDir dir_;
  HostDevices devices_{{HostDevice::Options{}}};
  std::vector<std::byte*> memory_;
  std::vector<void*> streams_;
  Gate gate_;
};

// ---- What is promised ------------------------------------------------------------------------

TEST_F(DeviceJobTest, EachByteLeavesTheDeviceOnceWithLittlePinnedMemory) {
  for (const Status& status : SaveRows("step")) EXPECT_OK(status);
  EXPECT_EQ(device().bytes_out(), static_cast<std::uint64_t>(kTwo * kRowBytes));
  EXPECT_EQ(ReadAll(Path("step")).at("w"), Row('a') + Row('b'));
  const auto opened = OpenDevice({DeviceKind::kCuda, 0}).value();
  EXPECT_LE(opened->ring->pinned_bytes(), 4 * 64 * 1024u);
  EXPECT_GT(opened->ring->pinned_bytes(), 0u);

  std::vector<std::byte*> rows = {Make('x'), Make('x')};
  for (const Status& status : LoadRows("step", rows)) EXPECT_OK(status);
  EXPECT_EQ(std::memcmp(device().Reveal(rows[1]), Row('b').data(), kRowBytes), 0);
  EXPECT_LE(opened->ring->pinned_bytes(), 4 * 64 * 1024u);
}

// A save is of what the stream had been given when it was called; what comes after the call waits
// for nothing and is not seen once the bytes are staged.
TEST_F(DeviceJobTest, SaveHasTheDeviceValuesOfTheCall) {
  std::byte* const data = Make('?');
  std::byte* const revealed = device().Reveal(data);
  void* const stream = MakeStream();
  const auto fill = [&](char value) {
    device().Enqueue(stream, [=] {
      std::this_thread::sleep_for(milliseconds(30));
      std::memset(revealed, value, kRowBytes);
    });
  };
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    StateDict state;
    BufferView view = View(data, {kRowBytes});
    view.stream = {StreamKind::kHandle, stream};
    TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("w", {{kRowBytes}, Box::Whole({kRowBytes}), view}));
    fill('1');
    TENSORMOUNT_RETURN_IF_ERROR(Save(state, Path("sync"), comm).status());
    for (const bool background : {false, true}) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto saver,
                                   AsyncSaver::Make(comm, {.stage_in_background = background}));
      fill('2');
      TENSORMOUNT_ASSIGN_OR_RETURN(
          SaveHandle handle, saver->Save(state, Path(background ? "background" : "async"), {}));
      TENSORMOUNT_RETURN_IF_ERROR(handle.WaitStaged());
      fill('3');
      TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
    }
    return {};
  }));
  EXPECT_EQ(ReadAll(Path("sync")).at("w"), Row('1'));
  EXPECT_EQ(ReadAll(Path("async")).at("w"), Row('2'));
  EXPECT_EQ(ReadAll(Path("background")).at("w"), Row('2'));
}

// With memory of the device for copies, what is staged has not crossed to the host; where it does
// not suffice the host's is taken.
TEST_F(DeviceJobTest, StagesOnTheDeviceWhenItHasRoom) {
  std::byte* const data = Make('1');
  std::byte* const strided = Make('2');
  const auto fill = [&](char value) {
    std::memset(device().Reveal(data), value, kRowBytes);
    std::memset(device().Reveal(strided), value + 1, kRowBytes);
  };
  for (const std::uint64_t bytes : {std::uint64_t{1} << 20, std::uint64_t{1000}}) {
    const bool there = bytes > kRowBytes;
    Gate crossing;
    std::atomic<bool> crossed = false;
    device().SetFault([&](std::string_view what) {
      if (what == "run copy-out") {
        crossed = true;
        if (there) crossing.Pass();
      }
      return Status();
    });
    EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto saver,
                                   AsyncSaver::Make(comm, {.device_staging_bytes = bytes}));
      for (int i = 0; i < 2; ++i) {  // The memory is used again.
        fill('1');
        StateDict state;
        TENSORMOUNT_RETURN_IF_ERROR(
            state.AddTensor("w", {{kRowBytes}, Box::Whole({kRowBytes}), View(data, {kRowBytes})}));
        BufferView columns = View(strided, {100, 3});
        columns.strides = {10, 2};
        TENSORMOUNT_RETURN_IF_ERROR(
            state.AddTensor("c", {{100, 3}, Box::Whole({100, 3}), columns}));
        const std::string name = "copy" + std::to_string(bytes) + std::to_string(i);
        TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, Path(name), {}));
        TENSORMOUNT_RETURN_IF_ERROR(handle.WaitStaged());
        EXPECT_EQ(handle.progress().bytes_staged, kRowBytes + 300u);
        fill('8');
        crossing.Open();
        TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
        EXPECT_EQ(ReadAll(Path(name)).at("w"), Row('1'));
        EXPECT_EQ(ReadAll(Path(name)).at("c"), std::string(300, '2'));
      }
      return {};
    }));
    EXPECT_TRUE(crossed);
    device().SetFault({});
  }
  device().Quiesce();
  EXPECT_EQ(device().allocations(), 2u);  // Those of the test.
}

// A save whose copies within the device are still due is cancelled: what they write into is not
// given to the next save, which would commit the bytes of now as those of its call.
TEST_F(DeviceJobTest, PendingCopiesDoNotCorruptTheNextSave) {
  std::byte* const late = Make('a');
  std::byte* const row = Make('b');
  void* const stream = MakeStream();
  device().Enqueue(stream, [this] { gate_.Pass(); });
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto saver, AsyncSaver::Make(comm, {.stage_in_background = true,
                                                  .device_staging_bytes = std::uint64_t{1} << 20}));
    const auto state = [&](std::byte* data, void* on) {
      BufferView view = View(data, {kRowBytes});
      if (on != nullptr) view.stream = {StreamKind::kHandle, on};
      StateDict made;
      EXPECT_OK(made.AddTensor("w", {{kRowBytes}, Box::Whole({kRowBytes}), view}));
      return made;
    };
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle first, saver->Save(state(late, stream), Path("a"), {}));
    first.Cancel();
    EXPECT_THAT(first.WaitCommitted(), HasCode(Code::kCancelled));
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle second,
                                 saver->Save(state(row, MakeStream()), Path("b"), {}));
    TENSORMOUNT_RETURN_IF_ERROR(second.WaitStaged());
    std::memset(device().Reveal(late), 'x', kRowBytes);
    std::memset(device().Reveal(row), 'y', kRowBytes);
    gate_.Open();
    device().Synchronize(stream);
    TENSORMOUNT_RETURN_IF_ERROR(second.WaitCommitted().status());
    EXPECT_EQ(ReadAll(Path("b")).at("w"), Row('b'));
    // The memory comes back once its copies have come.
    device().Quiesce();
    const std::size_t allocations = device().allocations();
    for (const char* name : {"c", "d"}) {
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle next,
                                   saver->Save(state(row, nullptr), Path(name), {}));
      TENSORMOUNT_RETURN_IF_ERROR(next.WaitCommitted().status());
      EXPECT_EQ(ReadAll(Path(name)).at("w"), Row('y'));
    }
    EXPECT_EQ(device().allocations(), allocations);
    return {};
  }));
}

// What a save that failed read from does not count against the bound for ever.
TEST_F(DeviceJobTest, LargerSnapshotFitsAfterAFailedSave) {
  std::byte* const row = Make('a');
  std::byte* const other = Make('b');
  std::atomic<int> copies = 0;
  device().SetFault([&](std::string_view what) {
    copies += what == "copy-within" ? 1 : 0;
    return Status();
  });
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto saver,
                                 AsyncSaver::Make(comm, {.device_staging_bytes = 250'000}));
    const auto save = [&](const std::string& name, bool both) -> Status {
      StateDict state;
      for (const auto& [key, data] : {std::pair("w", row), std::pair("v", other)}) {
        if (data == other && !both) continue;
        TENSORMOUNT_RETURN_IF_ERROR(
            state.AddTensor(key, {{kRowBytes}, Box::Whole({kRowBytes}), View(data, {kRowBytes})}));
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, Path(name), {}));
      return handle.WaitCommitted().status();
    };
    TENSORMOUNT_RETURN_IF_ERROR(save("a", false));
    EXPECT_THAT(save("a", false), HasCode(Code::kAlreadyExists));
    EXPECT_EQ(copies, 2);
    TENSORMOUNT_RETURN_IF_ERROR(save("b", true));
    EXPECT_EQ(copies, 3);
    return {};
  }));
  device().SetFault({});
  device().Quiesce();
  EXPECT_EQ(device().allocations(), 2u);  // Those of the test.
}

// A saver that goes while a stream hangs keeps its memory of the device until the stream goes on
// and somebody uses the device again.
TEST_F(DeviceJobTest, SaverDestroyedDuringAHangFreesItsMemoryLater) {
  std::byte* const row = Make('a');
  void* const stream = MakeStream();
  device().Enqueue(stream, [this] { gate_.Pass(); });
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto saver, AsyncSaver::Make(comm, {.stage_in_background = true,
                                                  .device_staging_bytes = std::uint64_t{1} << 20}));
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                 saver->Save(Rows(0, row, stream), Path("a"), {}));
    while (device().allocations() == memory_.size()) std::this_thread::yield();
    handle.Cancel();
    EXPECT_FALSE(handle.WaitCommitted().ok());
    return {};
  }));
  EXPECT_EQ(device().allocations(), memory_.size() + 1);
  gate_.Open();
  device().Synchronize(stream);
  device().Quiesce();
  for (const Status& status : SaveRows("b")) EXPECT_OK(status);
  EXPECT_EQ(device().allocations(), memory_.size());
}

// Kernels that were given before a load and write where it loads have run before it.
TEST_F(DeviceJobTest, LoadWaitsForEarlierWorkOnItsStreams) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  for (const bool background : {false, true}) {
    std::byte* const row = Make('?');
    void* const stream = MakeStream();
    device().Enqueue(stream, [revealed = device().Reveal(row)] {
      std::this_thread::sleep_for(milliseconds(50));
      std::memset(revealed, 'z', kRowBytes);
    });
    EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
      const StateDict request = Rows(1, row, stream);
      if (!background) return Load(request, Path("step"), comm).status();
      TENSORMOUNT_ASSIGN_OR_RETURN(LoadHandle handle, AsyncLoad(request, Path("step"), comm, {}));
      return handle.Wait().status();
    }));
    device().Synchronize(stream);
    EXPECT_EQ(std::memcmp(device().Reveal(row), Row('b').data(), kRowBytes), 0);
  }
}

TEST_F(DeviceJobTest, AllocateDataAllocatesOnADevice) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    StateDict request;
    Shard shard{.global_shape = {kTwo, kRowBytes}, .region = Box::Whole({kTwo, kRowBytes})};
    shard.data.dtype = DType::kU8;
    shard.data.shape = {kTwo, kRowBytes};
    shard.metadata_only = true;
    TENSORMOUNT_RETURN_IF_ERROR(request.AddTensor("w", shard));
    TENSORMOUNT_RETURN_IF_ERROR(request.AllocateData({DeviceKind::kCuda, 0}, Fill::kZero));
    const void* const data = request.tensors()[0].shard.data.data;
    EXPECT_EQ(*device().Reveal(data), std::byte{0});
    TENSORMOUNT_RETURN_IF_ERROR(Load(request, Path("step"), comm).status());
    EXPECT_EQ(std::memcmp(device().Reveal(data), (Row('a') + Row('b')).data(), 2 * kRowBytes), 0);
    return {};
  }));
  EXPECT_EQ(device().allocations(), memory_.size());
  device().SetFault([](std::string_view what) {
    return what == "allocate" ? Status(Code::kResourceExhausted, "cuda:0: out of memory")
                              : Status();
  });
  StateDict request;
  Shard shard{.global_shape = {4}, .region = Box::Whole({4})};
  shard.data.dtype = DType::kU8;
  shard.data.shape = {4};
  shard.metadata_only = true;
  ASSERT_OK(request.AddTensor("w", shard));
  EXPECT_THAT(request.AllocateData({DeviceKind::kCuda, 0}, Fill::kZero),
              HasMessage("out of memory"));
}

// ---- What goes wrong -------------------------------------------------------------------------

Timeouts Short() { return {.arrival = milliseconds(400)}; }

TEST_F(DeviceJobTest, HungCopyFailsTheSaveAtItsDeadline) {
  StopAtTheGate("run copy-out");
  SaveOptions options;
  options.timeouts = Short();
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Status> results = SaveRows("step", options);
  ExpectOnAll(results, Code::kDeadlineExceeded,
              "tensor w: cuda:0 (host device): timeout: the device did not finish");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  ExpectNothingIn("store");
  // What hangs keeps its blocks, here all of them.
  device().SetFault({});
  ExpectOnAll(SaveRows("again", options), Code::kDeadlineExceeded,
              "all 4 pinned host buffers are in use, 4 of them by unfinished copies");
  gate_.Open();
  for (const Status& status : SaveRows("again")) EXPECT_OK(status);
}

TEST_F(DeviceJobTest, SaveWithAHungCopyCanBeCancelled) {
  StopAtTheGate("run copy-out");
  std::byte* const row = Make('a');
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto saver, AsyncSaver::Make(comm, {}));
    StateDict state = Rows(0, row);
    SaveOptions options;
    options.validate = false;
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                 saver->SaveInPlace(state, Path("step"), options));
    std::this_thread::sleep_for(milliseconds(50));
    handle.Cancel();
    EXPECT_THAT(handle.WaitCommitted(), HasCode(Code::kCancelled));
    return {};
  }));
  ExpectNothingIn("store");
}

// Whoever writes to a tensor that is being saved is found out: that is not what its device hashed.
TEST_F(DeviceJobTest, TensorChangedDuringTheSaveIsDetected) {
  std::byte* const row = Make('a');
  std::atomic<int> copies = 0;
  device().SetFault([&](std::string_view what) {
    if (what == "run copy-out" && copies++ == 1) {
      *device().Reveal(row + kRowBytes - 1) = std::byte{'!'};
    }
    return Status();
  });
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) {
    SaveOptions options;
    options.validate = false;  // One row of two.
    const Status status = Save(Rows(0, row), Path("step"), comm, options).status();
    EXPECT_THAT(status, HasCode(Code::kBusy));
    EXPECT_THAT(status, HasMessage("tensor w: the data changed during the save: [0:1, 0:100000] "
                                   "differs, "
                                   "from byte 65536 on"));
    return Status();
  }));
  ExpectNothingIn("store");
  device().SetFault({});
  device().LieAboutHashes(true);
  ExpectOnAll(SaveRows("step"), Code::kBusy, "tensor w: the data changed during the save: [");
}

// A device whose memory is full: its bytes are hashed by the host, and what cannot be watched is
// said.
TEST_F(DeviceJobTest, HostHashesWhenTheDeviceIsFull) {
  device().SetFault([](std::string_view what) {
    return what == "hash" || what == "digest" ? Status(Code::kResourceExhausted, "it is full")
                                              : Status();
  });
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  std::vector<std::byte*> replicas = {Make('a'), Make('a')};
  const auto save = [&](const std::string& name) {
    return OnTwoRanks([&](Communicator& comm) {
      const BufferView view = View(replicas[static_cast<std::size_t>(comm.rank())], {kRowBytes});
      StateDict state;
      EXPECT_OK(state.AddTensor("w", {{kRowBytes}, Box::Whole({kRowBytes}), view}));
      return Save(state, Path(name), comm).status();
    });
  };
  for (const Status& status : save("same")) EXPECT_OK(status);
  *device().Reveal(replicas[1] + 7) = std::byte{'b'};
  ExpectOnAll(save("other"), Code::kDataLoss, "differs between the replicas on rank 0 and rank 1");
  for (const Status& status : SaveRows("step")) EXPECT_OK(status);
  std::vector<std::byte*> rows = {Make('?'), Make('?')};
  for (const Status& status : LoadRows("step", rows)) EXPECT_OK(status);
  SetLogSink({});
  device().SetFault({});
  EXPECT_EQ(std::memcmp(device().Reveal(rows[0]), Row('a').data(), kRowBytes), 0);
  EXPECT_EQ(std::memcmp(device().Reveal(rows[1]), Row('b').data(), kRowBytes), 0);
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines[0].find("cannot be detected"), std::string::npos) << lines[0];
}

// A program that does as it may: its streams write right before each save and right after it. Of
// ten thousand (TENSORMOUNT_TEST_SCALE=500) none is accused of writing meanwhile.
TEST_F(DeviceJobTest, NoFalseAlarmForWritesAroundTheSave) {
  Random random(TestSeed());
  std::byte* const data = Make('?');
  void* const stream = MakeStream();
  const auto fill = [&](char value) {
    device().Enqueue(
        stream, [=, revealed = device().Reveal(data)] { std::memset(revealed, value, kRowBytes); });
  };
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto saver, AsyncSaver::Make(comm, {.device_staging_bytes = std::uint64_t{1} << 20}));
    for (int i = 0; i < TestScale(20); ++i) {
      const char value = static_cast<char>('a' + i % 26);
      fill(value);
      StateDict state;
      // Whole, by rows, by columns.
      const std::int64_t columns = random.Int(1, 300);
      const std::int64_t rows = std::min<std::int64_t>(kRowBytes / columns, random.Int(1, 500));
      BufferView view = View(data, {rows, columns});
      const std::int64_t step = random.Int(1, 2);
      if (rows * columns * step <= kRowBytes) view.strides = {columns * step, step};
      if (random.OneIn(3)) view = View(data, {kRowBytes});
      view.stream = {StreamKind::kHandle, stream};
      const Dims shape = view.shape;
      TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("w", {shape, Box::Whole(shape), view}));
      SaveOptions options;
      options.if_exists = IfExists::kReplace;
      if (random.OneIn(2)) {
        TENSORMOUNT_RETURN_IF_ERROR(Save(state, Path("step"), comm, options).status());
      } else {
        TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, Path("step"), options));
        TENSORMOUNT_RETURN_IF_ERROR(handle.WaitStaged());
        fill('!');
        TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
      }
      fill('?');
      const std::string saved = ReadAll(Path("step")).at("w");
      if (saved != std::string(saved.size(), value)) {
        return {Code::kInternal, "other bytes than at the call, save " + std::to_string(i)};
      }
    }
    return {};
  }));
}

// Replicas are compared where they are.
TEST_F(DeviceJobTest, ReplicasAreHashedOnTheirDevice) {
  std::vector<std::byte*> rows = {Make('a'), Make('a')};
  const auto save = [&](const std::string& name) {
    return OnTwoRanks([&](Communicator& comm) {
      const BufferView view = View(rows[static_cast<std::size_t>(comm.rank())], {kRowBytes});
      StateDict state;
      EXPECT_OK(state.AddTensor("w", {{kRowBytes}, Box::Whole({kRowBytes}), view}));
      return Save(state, Path(name), comm).status();
    });
  };
  for (const Status& status : save("same")) EXPECT_OK(status);
  EXPECT_EQ(device().bytes_out(), static_cast<std::uint64_t>(kRowBytes));
  *device().Reveal(rows[1] + 7) = std::byte{'b'};
  ExpectOnAll(save("other"), Code::kDataLoss, "differs between the replicas on rank 0 and rank 1");
}

// At one moment of its work.
class DeviceFaultTest : public DeviceJobTest, public testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(Moments, DeviceFaultTest, testing::Values("run copy", "copy", "mark"));

TEST_P(DeviceFaultTest, DeviceErrorIsReportedOnAllRanks) {
  device().SetFault([&](std::string_view now) {
    return now.starts_with(GetParam()) ? Status(Code::kUnavailable, "GPU has fallen off the bus")
                                       : Status();
  });
  for (int i = 0; i < 3; ++i) {  // However often.
    const std::vector<Status> results = SaveRows("step");
    ExpectOnAll(results, Code::kUnavailable, "tensor w: cuda:0 (host device): ");
    ExpectOnAll(results, Code::kUnavailable, "GPU has fallen off the bus");
    // So that nobody takes the rank for dead.
    for (const Status& status : results) {
      EXPECT_EQ(status.fields().device, "cuda:0 (host device)");
    }
    ExpectNothingIn("store");
  }
}

TEST_P(DeviceFaultTest, LoadFailureOnOneRankFailsAllRanks) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  std::atomic<int> times = 0;
  device().SetFault([&](std::string_view now) {
    return now.starts_with(GetParam()) && times++ == 0
               ? Status(Code::kUnavailable, "GPU has fallen off the bus")
               : Status();
  });
  ExpectOnAll(LoadRows("step", {Make('x'), Make('x')}), Code::kUnavailable,
              "GPU has fallen off the bus");
}

// After a load that failed behind a stream that hung, its memory is given to somebody else, in the
// order of that stream as allocators do it: what the load still writes comes before.
TEST_F(DeviceJobTest, LeftoverLoadWritesPrecedeLaterStreamWork) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  LoadOptions options;
  options.timeouts = Short();
  for (const bool background : {false, true}) {
    Gate gate;
    std::byte* const row = Make('?');
    void* const stream = MakeStream();
    device().Enqueue(stream, [&] { gate.Pass(); });
    Status failure;
    EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
      const StateDict request = Rows(1, row, stream);
      if (!background) {
        failure = Load(request, Path("step"), comm, options).status();
        return {};
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(LoadHandle handle,
                                   AsyncLoad(request, Path("step"), comm, options));
      failure = handle.Wait().status();
      return {};
    }));
    EXPECT_THAT(failure, HasCode(Code::kDeadlineExceeded));
    EXPECT_FALSE(failure.fields().memory_in_use);
    device().Enqueue(stream,
                     [revealed = device().Reveal(row)] { std::memset(revealed, 'n', kRowBytes); });
    gate.Open();
    device().Synchronize(stream);
    device().Quiesce();
    EXPECT_EQ(std::memcmp(device().Reveal(row), Row('n').data(), kRowBytes), 0);
  }
}

// The same for what a save still reads: the memory is not freed below it.
TEST_F(DeviceJobTest, LeftoverSaveReadsPrecedeLaterStreamWork) {
  void* const stream = MakeStream();
  std::byte* const row = Make('a');
  std::atomic<int> reading = 0;
  device().SetFault([&](std::string_view what) {
    if (what == "run copy-out") {
      ++reading;
      gate_.Pass();
    }
    return Status();
  });
  SaveOptions options;
  options.timeouts = Short();
  const std::vector<Status> results = OnTwoRanks([&](Communicator& comm) {
    return Save(Rows(comm.rank(), row, stream), Path("step"), comm, options).status();
  });
  for (const Status& status : results) {
    EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded));
    EXPECT_FALSE(status.fields().memory_in_use);
  }
  std::atomic<bool> freed = false;
  device().Enqueue(stream, [&] { freed = true; });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_GT(reading, 0);
  EXPECT_FALSE(freed);
  gate_.Open();
  device().Synchronize(stream);
  EXPECT_TRUE(freed);
  device().SetFault({});
}

// Where no stream orders the memory, or the stream cannot be told to wait, the failure says that it
// must not be used again.
TEST_F(DeviceJobTest, ErrorSaysThatUnorderedMemoryIsStillInUse) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  LoadOptions options;
  options.timeouts = Short();
  for (const bool ordered : {false, true}) {
    device().SetFault([&](std::string_view what) {
      if (what == "run copy-in") gate_.Pass();
      return what == "hold" ? Status(Code::kInvalidArgument, "records a graph") : Status();
    });
    std::byte* const row = Make('x');
    void* const stream = ordered ? MakeStream() : nullptr;
    EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
      const Status failure = Load(Rows(1, row, stream), Path("step"), comm, options).status();
      EXPECT_THAT(failure, HasCode(Code::kDeadlineExceeded));
      EXPECT_TRUE(failure.fields().memory_in_use);
      // One that leaves nothing under way says nothing.
      const Status none = Load(Rows(1, row, stream), Path("none"), comm, options).status();
      EXPECT_THAT(none, HasCode(Code::kNotFound));
      EXPECT_FALSE(none.fields().memory_in_use);
      return {};
    }));
  }
  gate_.Open();
  device().Quiesce();
  device().SetFault({});
}

// Memory that a state dict allocated goes with it, but not below a load that failed.
TEST_F(DeviceJobTest, StateMemoryIsFreedAfterLeftoverLoadWrites) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  StopAtTheGate("run copy-in");
  LoadOptions options;
  options.timeouts = Short();
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    StateDict request;
    Shard shard{.global_shape = {kTwo, kRowBytes}, .region = Box::Whole({kTwo, kRowBytes})};
    shard.data.dtype = DType::kU8;
    shard.data.shape = {kTwo, kRowBytes};
    shard.metadata_only = true;
    TENSORMOUNT_RETURN_IF_ERROR(request.AddTensor("w", shard));
    TENSORMOUNT_RETURN_IF_ERROR(request.AllocateData({DeviceKind::kCuda, 0}, Fill::kUninitialized));
    EXPECT_THAT(Load(request, Path("step"), comm, options), HasCode(Code::kDeadlineExceeded));
    return {};
  }));
  EXPECT_EQ(device().allocations(), memory_.size() + 1);
  gate_.Open();
  device().Quiesce();
  device().SetFault({});
  const auto opened = OpenDevice({DeviceKind::kCuda, 0}).value();
  const Deadline deadline = Deadline::After(std::chrono::seconds(10));
  while (!opened->pending_work->IsIdle() && !deadline.Passed()) std::this_thread::yield();
  EXPECT_EQ(device().allocations(), memory_.size());
}

TEST_F(DeviceJobTest, HungCopyFailsTheLoadAtItsDeadline) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  StopAtTheGate("run copy-in");
  LoadOptions options;
  options.timeouts = Short();
  ExpectOnAll(LoadRows("step", {Make('x'), Make('x')}, options), Code::kDeadlineExceeded,
              "the device did not finish");
}

// Leaves prove what was read; the way to the device is proved by its own digest.
TEST_F(DeviceJobTest, BytesChangedOnTheWayToTheDeviceFailTheLoad) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  for (const LoadVerify verify : {LoadVerify::kAuto, LoadVerify::kLeaves}) {
    LoadOptions options;
    options.verify = verify;
    for (const Status& status : LoadRows("step", {Make('x'), Make('x')}, options)) {
      EXPECT_OK(status);
    }
    device().LieAboutHashes(true);
    ExpectOnAll(LoadRows("step", {Make('x'), Make('x')}, options), Code::kDataLoss,
                "[0:1, 0:100000]: bytes changed on the way to cuda:0 (host device)");
    device().LieAboutHashes(false);
  }
}

// The digest of what stands on the device is compared with that of the checkpoint.
TEST_F(DeviceJobTest, WrongDigestOnTheDeviceFailsTheLoad) {
  for (const Status& status : SaveRows("step")) ASSERT_OK(status);
  LoadOptions options;
  options.verify = LoadVerify::kAuto;
  std::vector<std::byte*> rows = {Make('x'), Make('x')};
  device().LieAboutHashes(true);
  // Columns: no leaf is whole in what a rank wants.
  const std::vector<Status> results = OnTwoRanks([&](Communicator& comm) {
    StateDict request;
    const BufferView view =
        View(rows[static_cast<std::size_t>(comm.rank())], {kTwo, kRowBytes / 2});
    const Region half = Box::Make({0, comm.rank() * kRowBytes / 2}, {kTwo, kRowBytes / 2}).value();
    EXPECT_OK(request.AddTensor("w", {{kTwo, kRowBytes}, half, view}));
    return Load(request, Path("step"), comm, options).status();
  });
  ExpectOnAll(results, Code::kDataLoss, "tensor w: the digest of the loaded data differs");
}

TEST_F(DeviceJobTest, SaveAndLoadWorkWithoutPinnedMemory) {
  device().SetFault([](std::string_view what) {
    return what == "pin" ? Status(Code::kResourceExhausted, "RLIMIT_MEMLOCK") : Status();
  });
  for (const Status& status : SaveRows("step")) EXPECT_OK(status);
  EXPECT_EQ(ReadAll(Path("step")).at("w"), Row('a') + Row('b'));
  EXPECT_EQ(OpenDevice({DeviceKind::kCuda, 0}).value()->ring->pinned_bytes(), 0u);
}

TEST_F(DeviceJobTest, StreamThatRecordsAGraphIsRefusedOnAllRanks) {
  std::vector<std::byte*> rows = {Make('a'), Make('b')};
  void* const stream = MakeStream();
  device().BeginCapture(stream);
  const std::vector<Status> saved = OnTwoRanks([&](Communicator& comm) {
    const StateDict state = Rows(comm.rank(), rows[static_cast<std::size_t>(comm.rank())],
                                 comm.rank() == 1 ? stream : nullptr);
    return Save(state, Path("step"), comm).status();
  });
  ExpectOnAll(saved, Code::kInvalidArgument,
              "rank 1: tensor w: cuda:0 (host device): the stream records a graph");
  ExpectNothingIn("store");
}

}  // namespace
}  // namespace tensormount
