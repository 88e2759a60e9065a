// SPDX-License-Identifier: Apache-2.0
// Loads by exchange whose bytes go from device to device: gpu/ over the driver of the tests, NCCL
// by the shim, each rank a thread with a device of its own.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "collective/save_load.h"
#include "tests/collective/load_testing.h"
#include "tests/gpu/nccl_shim_testing.h"
#include "tests/support/fake_cuda_devices.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using gpu::NcclShim;
using std::chrono::milliseconds;
using testing::Each;

constexpr int kExchangeRanks = 4;

gpu::CudaOptions ExchangeDevices() {
  gpu::CudaOptions options = FakeCudaDevices::Small();
  options.nccl = {.library = NcclShim::PathOf(NcclShim::Version::kNew),
                  .group_units = 8,
                  .patience = milliseconds(100)};
  return options;
}

// A request whose buffers are moved to one device, and back.
class OnItsDevice {
 public:
  OnItsDevice(const StateDict& request, DeviceOps& ops, int ordinal) : ops_(ops) {
    for (const StateDict::TensorItem& item : request.tensors()) {
      Shard shard = item.shard;
      const std::uint64_t bytes =
          RegionBytes(shard.data.dtype, shard.global_shape, shard.region).value();
      auto* const here = static_cast<std::byte*>(shard.data.data);
      // Not at the begin of what was allocated.
      std::byte* const memory = ops.Allocate(static_cast<std::size_t>(bytes) + 64).value();
      std::byte* const there = memory + 24;
      std::memcpy(TheFakeCuda().reveal(there), here, static_cast<std::size_t>(bytes));
      moved_.push_back({memory, there, here, static_cast<std::size_t>(bytes)});
      shard.data.data = there;
      shard.data.device = {DeviceKind::kCuda, ordinal};
      shard.data.memory = MemoryKind::kDevice;
      EXPECT_OK(dict.AddTensor(item.key, shard));
    }
  }
  ~OnItsDevice() {
    TheFakeCuda().quiesce();  // What failed may have left work on it.
    for (const Moved& one : moved_) {
      std::memcpy(one.here, TheFakeCuda().reveal(one.there), one.bytes);
      ops_.Free(one.memory);
    }
  }
  OnItsDevice(const OnItsDevice&) = delete;
  OnItsDevice& operator=(const OnItsDevice&) = delete;
  StateDict dict;

 private:
  struct Moved {
    std::byte* memory = nullptr;
    std::byte* there = nullptr;
    std::byte* here = nullptr;
    std::size_t bytes = 0;
  };
  DeviceOps& ops_;
  std::vector<Moved> moved_;
};

class DeviceExchangeTest : public testing::Test {
 protected:
  DeviceExchangeTest() : devices_(ExchangeDevices()) { TheFakeCuda().set_delay(0); }
  ~DeviceExchangeTest() override {
    TheFakeCuda().set_fault({});
    TheFakeCuda().set_memory_limit(~std::size_t{0});
    TheFakeCuda().quiesce();
    unsetenv("FAKE_CUDA_DEVICES");
  }

  static LoadOptions Between(LoadVerify verify = LoadVerify::kAuto) {
    LoadOptions options;
    options.path = LoadPath::kExchange;
    options.exchange_via = ExchangeVia::kDevices;
    options.verify = verify;
    options.threads = 2;
    options.timeouts.arrival = std::chrono::seconds(40);
    return options;
  }
  // `ordinal`: which device each rank has.
  std::vector<LoadedRank> Load(const std::string& path, const std::vector<GlobalTensor>& tensors,
                               const std::vector<std::vector<Wish>>& wishes,
                               const LoadOptions& options,
                               const std::function<int(int rank)>& ordinal = {},
                               const std::atomic<bool>* cancel = nullptr,
                               const std::function<bool(int rank)>& background = {}) {
    LoadSetup setup;
    setup.options = [&](int) { return options; };
    setup.load = [&](FileSystem& fs, const StateDict& request, Communicator& comm,
                     const LoadOptions& of_rank) {
      const int device = ordinal ? ordinal(comm.rank()) : comm.rank();
      if (device < 0) return LoadOn(fs, request, path, comm, of_rank);
      const auto ops = devices_.cuda().Open({DeviceKind::kCuda, device}).value();
      const OnItsDevice moved(request, *ops, device);
      LoadControl control;
      control.cancel = cancel;
      control.min_device_exchange_bytes = worth_a_way_;
      control.background = background && background(comm.rank());
      return LoadOn(fs, moved.dict, path, comm, of_rank, control);
    };
    return LoadWishesWith(path, tensors, wishes, setup);
  }

  const int set_ = setenv("FAKE_CUDA_DEVICES", "4", 1);  // Before devices are opened.
  NcclShim shim_;
  FakeCudaDevices devices_;
  TempDir dir_;
  std::uint64_t worth_a_way_ = 1;
};

std::vector<GlobalTensor> Several() {
  return {MakeGlobal("w", DType::kF32, {96, 200}), MakeGlobal("odd", DType::kU8, {37, 13, 11}),
          MakeGlobal("bf", DType::kBF16, {64, 65}), MakeGlobal("one", DType::kF64, {1}),
          MakeGlobal("row", DType::kF32, {5000})};
}

TEST_F(DeviceExchangeTest, LoadsAnyShardingAndEachByteCrossesOnce) {
  const std::vector<GlobalTensor> tensors = Several();
  for (int d = 0; d < kExchangeRanks; ++d) {  // Which brings them their tables.
    ASSERT_OK(devices_.cuda().Open({DeviceKind::kCuda, d}));
  }
  for (const char* const saved : {"rows", "cols", "flat"}) {
    const std::string path = dir_.Join(std::string("store/") + saved);
    ASSERT_OK(SaveByRule(path, tensors, saved, 3));
    for (const char* const rule : {"rows", "cols", "grid:2x2", "flat", "replicate"}) {
      const auto wishes = WishesByRule(tensors, rule, kExchangeRanks);
      const std::size_t crossed = TheFakeCuda().counts().crossed_bytes;
      const auto loaded = Load(path, tensors, wishes, Between());
      ASSERT_EQ(WhatIsWrong(tensors, wishes, loaded), "") << saved << " to " << rule;
      std::uint64_t read = 0;
      std::uint64_t between = 0;
      std::uint64_t proved = 0;
      std::uint64_t wanted = 0;
      for (const LoadedRank& rank : loaded) {
        read += rank.report.bytes_read;
        between += rank.report.bytes_between_devices;
        EXPECT_EQ(rank.report.bytes_between_devices, rank.report.bytes_received);
        proved += rank.report.bytes_by_digest;
        wanted += rank.report.bytes_wanted;
      }
      EXPECT_GT(between, 0u);
      EXPECT_EQ(proved, wanted);
      // What was read, and digests on the way back.
      EXPECT_LE(TheFakeCuda().counts().crossed_bytes - crossed, read + 4096)
          << saved << " to " << rule << " between " << between;
    }
  }
}

TEST_F(DeviceExchangeTest, LoadsInManyWindowsWithLittleMemory) {
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {1500, 1100}),
                                             MakeGlobal("v", DType::kU16, {900'001})};
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  // The tensors, and areas of 1 MiB: six.
  TheFakeCuda().set_memory_limit(std::size_t{18} << 20);
  for (const char* const rule : {"cols", "replicate"}) {
    const auto wishes = WishesByRule(tensors, rule, kExchangeRanks);
    const auto loaded = Load(path, tensors, wishes, Between());
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "") << rule;
    for (const LoadedRank& rank : loaded) EXPECT_GT(rank.report.bytes_between_devices, 0u);
  }
}

// Columns that overlap cannot be proved by digest; unproved they go between devices all the same,
// and a unit that more ranks want parts of than an area holds is read again.
TEST_F(DeviceExchangeTest, OverlappingRegionsLoadExactly) {
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {700, 900})};
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  Random random(TestSeed());
  std::vector<std::vector<Wish>> wishes(kExchangeRanks);
  for (auto& of_rank : wishes) {
    for (int i = 0; i < 6; ++i) {
      const std::int64_t begin = random.Int(0, 200);
      const std::int64_t row = random.Int(0, 100);
      of_rank.push_back({0, Box::Make({row, begin}, {700 - row - i, 690}).value()});
    }
  }
  TheFakeCuda().set_memory_limit(std::size_t{22} << 20);
  const auto unproved = Load(path, tensors, wishes, Between(LoadVerify::kOff));
  EXPECT_EQ(WhatIsWrong(tensors, wishes, unproved), "");
  for (const LoadedRank& rank : unproved) EXPECT_GT(rank.report.bytes_between_devices, 0u);
  // By leaf, through the host.
  const auto proved = Load(path, tensors, wishes, Between());
  EXPECT_EQ(WhatIsWrong(tensors, wishes, proved), "");
  for (const LoadedRank& rank : proved) {
    EXPECT_EQ(rank.report.bytes_between_devices, 0u);
    EXPECT_EQ(rank.report.bytes_unverified, 0u);
  }
}

TEST_F(DeviceExchangeTest, ErrorSaysWhyDeviceExchangeIsImpossible) {
  const std::vector<GlobalTensor> tensors = Several();
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  const auto wishes = WishesByRule(tensors, "cols", kExchangeRanks);
  const auto expect = [&](const std::function<int(int)>& ordinal, Code code, const char* words) {
    for (const LoadedRank& rank : Load(path, tensors, wishes, Between(), ordinal)) {
      EXPECT_THAT(rank.status, HasCode(code));
      EXPECT_THAT(rank.status, HasMessage(words));
    }
    // Whoever leaves it to us gets the bytes.
    LoadOptions any = Between();
    any.exchange_via = ExchangeVia::kAuto;
    const auto loaded = Load(path, tensors, wishes, any, ordinal);
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
    for (const LoadedRank& rank : loaded) EXPECT_EQ(rank.report.bytes_between_devices, 0u);
  };
  expect([](int rank) { return rank == 2 ? -1 : rank; }, Code::kUnsupported,
         "every rank must load at least one tensor, and all its tensors onto one device");
  expect([](int rank) { return rank / 2; }, Code::kUnsupported, "are both on");
  LoadOptions groups = Between();
  LoadSetup setup;
  setup.options = [&](int rank) {
    LoadOptions options = groups;
    options.exchange_group = rank % 2;
    return options;
  };
  setup.load = [&](FileSystem& fs, const StateDict& request, Communicator& comm,
                   const LoadOptions& options) {
    const auto ops = devices_.cuda().Open({DeviceKind::kCuda, comm.rank()}).value();
    const OnItsDevice moved(request, *ops, comm.rank());
    return LoadOn(fs, moved.dict, path, comm, options);
  };
  for (const LoadedRank& rank : LoadWishesWith(path, tensors, wishes, setup)) {
    EXPECT_THAT(rank.status, HasCode(Code::kUnsupported));
    EXPECT_THAT(rank.status, HasMessage("all ranks must be in one group"));
  }
}

// NCCL takes seconds to connect, which is not worth it if few bytes or none go between devices.
TEST_F(DeviceExchangeTest, ConnectsOnlyForEnoughTraffic) {
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {96, 200})};
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  const auto connections = [&](ExchangeVia via, const std::vector<std::vector<Wish>>& wishes) {
    LoadOptions options = Between();
    options.exchange_via = via;
    const int before = shim_.calls("ncclCommInitRankConfig");
    EXPECT_EQ(WhatIsWrong(tensors, wishes, Load(path, tensors, wishes, options)), "");
    return shim_.calls("ncclCommInitRankConfig") - before;
  };
  const auto columns = WishesByRule(tensors, "cols", kExchangeRanks);
  worth_a_way_ = tensors[0].bytes.size() + 1;
  EXPECT_EQ(connections(ExchangeVia::kAuto, columns), 0);
  EXPECT_EQ(connections(ExchangeVia::kDevices, columns), kExchangeRanks);
  worth_a_way_ = tensors[0].bytes.size();
  EXPECT_EQ(connections(ExchangeVia::kAuto, columns), kExchangeRanks);
  // Columns that overlap are compared on their way through the host.
  std::vector<std::vector<Wish>> overlapping;
  for (int rank = 0; rank < kExchangeRanks; ++rank) {
    overlapping.push_back({{0, Box::Make({rank, 0}, {90, 150}).value()},
                           {0, Box::Make({0, 40 + rank}, {90, 150}).value()}});
  }
  EXPECT_EQ(connections(ExchangeVia::kDevices, overlapping), 0);
}

// Where nobody insists, ranks that do not connect in time cost that time, and no more.
TEST_F(DeviceExchangeTest, FailedConnectionFallsBackToTheHost) {
  const std::vector<GlobalTensor> tensors = Several();
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  const auto wishes = WishesByRule(tensors, "cols", kExchangeRanks);
  LoadOptions options = Between();
  options.exchange_via = ExchangeVia::kAuto;
  for (const bool hangs : {false, true}) {
    if (hangs) {
      shim_.Fault("ncclCommInitRankConfig", 1, 0, kNcclShimHang);
      options.timeouts.arrival = std::chrono::seconds(4);
    }
    const auto loaded = Load(path, tensors, wishes, options);
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
    for (const LoadedRank& rank : loaded) {
      EXPECT_EQ(rank.report.bytes_between_devices == 0, hangs);
    }
  }
  // Whoever does hears of it.
  options.exchange_via = ExchangeVia::kDevices;
  for (const LoadedRank& rank : Load(path, tensors, wishes, options)) {
    EXPECT_THAT(rank.status, HasCode(Code::kDeadlineExceeded));
    EXPECT_THAT(rank.status, HasMessage("did not connect in time"));
  }
  shim_.reset();
}

// A load in the background goes on beside the program's own NCCL, with which it could deadlock: so
// where one rank's does, all go through the host, but who asks for devices has them.
TEST_F(DeviceExchangeTest, BackgroundLoadsGoThroughTheHost) {
  const std::vector<GlobalTensor> tensors = Several();
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  const auto wishes = WishesByRule(tensors, "cols", kExchangeRanks);
  LoadOptions options = Between();
  for (const ExchangeVia via : {ExchangeVia::kAuto, ExchangeVia::kDevices}) {
    options.exchange_via = via;
    for (const int background : {1, kExchangeRanks}) {
      const auto loaded =
          Load(path, tensors, wishes, options, {}, nullptr, [&](int r) { return r < background; });
      EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
      for (const LoadedRank& rank : loaded) {
        EXPECT_EQ(rank.report.bytes_between_devices > 0, via == ExchangeVia::kDevices);
      }
    }
  }
}

// The memory of the exchange is given back beside a stream of the program that hangs.
TEST_F(DeviceExchangeTest, LoadReturnsWhileAProgramStreamHangs) {
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {300, 400})};
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  const auto wishes = WishesByRule(tensors, "cols", kExchangeRanks);
  void* const stream = devices_[0].MakeStream();
  // The stream may look at it once more when this is over.
  const auto go = std::make_shared<std::atomic<bool>>(false);
  TheFakeCuda().enqueue(0, stream, [go] { go->wait(false); });
  std::atomic<bool> over = false;
  std::thread load([&] {
    EXPECT_EQ(WhatIsWrong(tensors, wishes, Load(path, tensors, wishes, Between())), "");
    over = true;
  });
  const Deadline deadline = Deadline::After(std::chrono::seconds(60));
  while (!over && !deadline.Passed()) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_TRUE(over);
  *go = true;
  go->notify_all();
  load.join();
}

// The allocations of the devices once there are at most `expected`, or after 5 s. Memory of loads
// that have returned is freed in the background, so the number may fall at any time. A device also
// keeps its scratch buffers, as many as were used at the same time so far, so it may rise by one or
// two without a leak.
std::size_t AllocationsLeft(std::size_t expected) {
  const Deadline deadline = Deadline::After(std::chrono::seconds(5));
  std::size_t left = 0;
  do {
    TheFakeCuda().quiesce();
    left = TheFakeCuda().counts().allocations;
    if (left <= expected) break;
    std::this_thread::sleep_for(milliseconds(5));
  } while (!deadline.Passed());
  return left;
}

// The memory of an exchange that failed under a copy that hangs is freed once the copy has ended,
// by whatever uses the device next.
TEST_F(DeviceExchangeTest, MemoryIsFreedAfterAHungCopy) {
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {300, 400})};
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  const auto wishes = WishesByRule(tensors, "cols", kExchangeRanks);
  ASSERT_EQ(WhatIsWrong(tensors, wishes, Load(path, tensors, wishes, Between())), "");
  TheFakeCuda().quiesce();
  const std::size_t allocations = TheFakeCuda().counts().allocations;
  std::atomic<bool> go = false;
  TheFakeCuda().set_fault([&](std::string_view what) {
    if (what == "run cuMemcpyHtoDAsync") go.wait(false);
    return gpu::cuda::Result{0};
  });
  LoadOptions options = Between();
  options.timeouts.arrival = std::chrono::seconds(1);
  // Well after the loads have failed, whose tensors the test frees once the device is quiet.
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::seconds(4));
    go = true;
    go.notify_all();
  });
  for (const LoadedRank& rank : Load(path, tensors, wishes, options)) {
    EXPECT_THAT(rank.status, HasCode(Code::kDeadlineExceeded));
  }
  const std::size_t held = TheFakeCuda().counts().allocations;
  EXPECT_GT(held, allocations);
  later.join();
  TheFakeCuda().quiesce();
  TheFakeCuda().set_fault({});
  ASSERT_EQ(WhatIsWrong(tensors, wishes, Load(path, tensors, wishes, Between())), "");
  EXPECT_LT(AllocationsLeft(allocations), held);
}

TEST_F(DeviceExchangeTest, DamageIsDetectedByTheDigestAfterArrival) {
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {300, 400})};
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  FlipByte(DataFiles(path).front(), 70'000);
  const auto wishes = WishesByRule(tensors, "cols", kExchangeRanks);
  for (const LoadedRank& rank : Load(path, tensors, wishes, Between())) {
    EXPECT_THAT(rank.status, HasCode(Code::kDataLoss));
    EXPECT_THAT(rank.status, HasMessage("tensor w"));
  }
}

// Each kind of failure on one rank is the verdict of all, by the deadline, and the next load over
// the same devices is good.
TEST_F(DeviceExchangeTest, FailureOfOneRankFailsAllRanks) {
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {300, 400})};
  const std::string path = dir_.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  const auto wishes = WishesByRule(tensors, "cols", kExchangeRanks);
  struct Fault {
    const char* what;
    std::function<void()> plant;
    std::vector<Code> codes;
    int turns = 1;
  };
  ASSERT_EQ(WhatIsWrong(tensors, wishes, Load(path, tensors, wishes, Between())), "");
  // A fault with several turns is one after which all memory is freed: the allocations do not grow
  // with each turn. It comes first, because a hanging copy holds memory for long.
  const std::vector<Fault> faults = {
      {"a receive that fails",
       [&] { shim_.Fail("ncclRecv", 2, 0, gpu::NcclResult::kInternalError); },
       {Code::kInternal, Code::kUnavailable},
       5},
      {"a send that never ends",
       [&] { shim_.Fault("ncclSend", 1, 0, kNcclShimHang); },
       {Code::kDeadlineExceeded}},
      {"a kernel that fails",
       [] {
         static std::atomic<int> left;
         left = 5;
         TheFakeCuda().set_fault([](std::string_view what) {
           return what == "cuLaunchKernel" && --left == 0 ? gpu::cuda::Result{719}
                                                          : gpu::cuda::Result{0};
         });
       },
       {Code::kUnavailable, Code::kInternal}}};
  for (const Fault& fault : faults) {
    std::size_t first = 0;
    for (int turn = 0; turn < fault.turns; ++turn) {
      fault.plant();
      LoadOptions options = Between();
      options.timeouts.arrival = std::chrono::seconds(4);
      const auto begin = std::chrono::steady_clock::now();
      for (const LoadedRank& rank : Load(path, tensors, wishes, options)) {
        EXPECT_FALSE(rank.status.ok()) << fault.what;
        EXPECT_THAT(fault.codes, testing::Contains(rank.status.code()))
            << fault.what << ": " << rank.status.ToString();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << fault.what;
      shim_.reset();
      TheFakeCuda().set_fault({});
      // What is over is freed; what hangs may still be written to.
      TheFakeCuda().quiesce();
      if (turn == 0) first = TheFakeCuda().counts().allocations;
      const auto loaded = Load(path, tensors, wishes, Between());
      ASSERT_EQ(WhatIsWrong(tensors, wishes, loaded), "") << "after " << fault.what;
    }
    if (fault.turns > 1) {
      const std::size_t leaked = static_cast<std::size_t>(fault.turns) - 1;  // One a turn.
      EXPECT_LT(AllocationsLeft(first), first + leaked) << fault.what;
    }
  }
}

}  // namespace
}  // namespace tensormount
