// SPDX-License-Identifier: Apache-2.0
// Devices of CUDA over a driver of the tests: that they conform, and what a driver, a program or a
// machine can do to them.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "device/device_queues.h"
#include "device/devices.h"
#include "device/pinned_ring.h"
#include "gpu/cuda_driver.h"
#include "tests/device/device_ops_conformance.h"
#include "tests/support/fake_cuda_devices.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

namespace cuda = gpu::cuda;

constexpr Device kFirst{DeviceKind::kCuda, 0};
constexpr Device kSecond{DeviceKind::kCuda, 1};

BufferView CudaView(const std::byte* data, const Dims& shape = {4}, int ordinal = 0) {
  BufferView view = BufferView::Host(DType::kU8, static_cast<const void*>(data), shape);
  view.device = {DeviceKind::kCuda, ordinal};
  view.memory = MemoryKind::kDevice;
  return view;
}

class CudaDeviceTest : public testing::Test {
 protected:
  CudaDeviceTest() { TheFakeCuda().set_delay(30); }
  ~CudaDeviceTest() override {
    TheFakeCuda().set_fault({});
    TheFakeCuda().lie_about_hashes(false);
    TheFakeCuda().set_memory_limit(std::size_t{1} << 40);
    TheFakeCuda().quiesce();
  }
  std::shared_ptr<DeviceOps> First() { return devices_.cuda().Open(kFirst).value(); }
  // Fails calls of one function, the first `skipped` of them not.
  static void FailAt(const std::string& function, cuda::Result error, int skipped = 0) {
    auto left = std::make_shared<std::atomic<int>>(skipped);
    TheFakeCuda().set_fault([=](std::string_view what) {
      return what == function && (*left)-- <= 0 ? error : cuda::kSuccess;
    });
  }
  FakeCudaDevices devices_;
};

TEST_F(CudaDeviceTest, Conforms) {
  const auto device = First();
  EXPECT_OK(CopiesAreExact(*device, TestSeed(), TestScale(100)));
  EXPECT_OK(TransposesAreExact(*device, TestSeed(), TestScale(8)));
  EXPECT_OK(SmallCopiesAreExact(*device, TestSeed(), TestScale(6)));
  EXPECT_OK(HashesAreThoseOfTheHost(*device, TestSeed(), TestScale(100)));
  EXPECT_OK(LeavesAreThoseOfTheHost(*device, TestSeed(), TestScale(10)));
  EXPECT_OK(OrderIsKept(*device, TestSeed(), TestScale(20)));
  EXPECT_EQ(TheFakeCuda().contexts_on_stack(), 0);
  EXPECT_EQ(TheFakeCuda().capture_mode(), 0);
}

// Nearly every copy is cut.
TEST_F(CudaDeviceTest, ConformsWithOneKilobyteOfScratchMemory) {
  gpu::CudaDevices::Options options = FakeCudaDevices::Small();
  options.scratch_bytes = 1024;
  FakeCudaDevices little(options);
  const auto device = little.cuda().Open(kFirst).value();
  EXPECT_OK(CopiesAreExact(*device, TestSeed(), TestScale(50)));
  EXPECT_OK(TransposesAreExact(*device, TestSeed(), TestScale(2)));
  EXPECT_OK(SmallCopiesAreExact(*device, TestSeed(), TestScale(5)));
}

TEST_F(CudaDeviceTest, CopiesGoRunByRunWithoutScratchMemory) {
  const auto device = First();
  ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(4096));
  std::memset(TheFakeCuda().reveal(there), 'x', 4096);
  TheFakeCuda().set_memory_limit(0);
  StridedCopy columns;
  columns.run = 2;
  columns.axes = 1;
  columns.axis[0] = {100, 8, 2};
  std::string out(200, '\0');
  const DeviceCopy copy{columns, there, reinterpret_cast<std::byte*>(out.data())};
  ASSERT_OK(queue->CopyOut({&copy, 1}));
  ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
  ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
  EXPECT_EQ(out, std::string(200, 'x'));
  // Hashes and digests need memory; that is said, and what follows is none the worse.
  Hash128 hash;
  Crc64 digest = 0;
  const PlacedBox whole{Box::Whole({200}), 0, {1}};
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(queue->HashLeaves({&columns, 1}, there, 200, 64, &hash),
                HasCode(Code::kResourceExhausted));
    EXPECT_THAT(queue->Digest({&whole, 1}, there, {200}, &digest),
                HasCode(Code::kResourceExhausted));
    EXPECT_OK(queue->Mark());
  }
  device->Free(there);
}

// More queues than there is scratch memory take turns with it, in the device's time.
TEST_F(CudaDeviceTest, QueuesShareScratchMemory) {
  const auto device = First();
  constexpr std::size_t kQueues = 5;
  constexpr std::int64_t kRows = 2000;
  StridedCopy columns;
  columns.run = 4;
  columns.axes = 1;
  columns.axis[0] = {kRows, 12, 4};
  std::vector<std::unique_ptr<DeviceQueue>> queues;
  std::vector<std::byte*> there;
  std::vector<std::byte*> here;
  for (std::size_t q = 0; q < kQueues; ++q) {
    queues.push_back(device->MakeQueue({}).value());
    there.push_back(device->Allocate(12 * kRows).value());
    std::memset(TheFakeCuda().reveal(there[q]), static_cast<int>('a' + q), 12 * kRows);
    here.push_back(device->AllocatePinned(10 * 4 * kRows).value());
  }
  for (std::size_t round = 0; round < 10; ++round) {
    for (std::size_t q = 0; q < kQueues; ++q) {
      const DeviceCopy copy{columns, there[q], here[q] + round * 4 * kRows};
      ASSERT_OK(queues[q]->CopyOut({&copy, 1}));
    }
  }
  for (std::size_t q = 0; q < kQueues; ++q) {
    ASSERT_OK_AND_ASSIGN(const auto mark, queues[q]->Mark());
    ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(20))));
    const std::string all(reinterpret_cast<const char*>(here[q]), 10 * 4 * kRows);
    EXPECT_EQ(all, std::string(all.size(), static_cast<char>('a' + q)));
    device->FreePinned(here[q]);
    device->Free(there[q]);
  }
}

// Many small tensors cross in few launches.
TEST_F(CudaDeviceTest, SmallCopiesShareLaunches) {
  const auto device = First();
  ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(100'000));
  ASSERT_OK_AND_ASSIGN(std::byte* const here, device->AllocatePinned(100'000));
  Random random(TestSeed());
  const std::string bytes = random.Bytes(100'000);
  std::memcpy(TheFakeCuda().reveal(there), bytes.data(), bytes.size());
  std::vector<DeviceCopy> copies;
  for (std::size_t i = 0; i < 320; ++i) {
    StridedCopy plan;
    plan.run = 300;
    copies.push_back({plan, there + (319 - i) * 300, here + i * 300});
  }
  const FakeCuda::Counts before = TheFakeCuda().counts();
  ASSERT_OK(queue->CopyOut(copies));
  const FakeCuda::Counts after = TheFakeCuda().counts();
  EXPECT_LE(after.launches - before.launches, 12u);
  EXPECT_LE(after.copies - before.copies, 12u);
  ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
  ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
  for (std::size_t i = 0; i < 320; ++i) {
    ASSERT_EQ(std::memcmp(here + i * 300, bytes.data() + (319 - i) * 300, 300), 0) << i;
  }
  device->FreePinned(here);
  device->Free(there);
}

// As many as a launch is told of, whatever they need of scratch memory: a block of small tensors
// crosses in one piece out, and in two in, since kernels spread what has come.
TEST_F(CudaDeviceTest, ThousandsOfSmallCopiesShareALaunch) {
  gpu::CudaDevices::Options options = FakeCudaDevices::Small();
  options.scratch_bytes = std::size_t{1} << 20;
  FakeCudaDevices large(options);
  const auto device = large.cuda().Open(kFirst).value();
  ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(2000 * 128));
  ASSERT_OK_AND_ASSIGN(std::byte* const here, device->AllocatePinned(2000 * 64));
  std::memset(TheFakeCuda().reveal(there), 0, 2000 * 128);
  StridedCopy plan;
  plan.run = 64;
  std::vector<DeviceCopy> out;
  std::vector<DeviceCopy> in;
  for (std::size_t i = 0; i < 2000; ++i) {
    out.push_back({plan, there + i * 128, here + i * 64});
    in.push_back({plan, here + i * 64, there + i * 128});
  }
  // And one that crosses alone.
  ASSERT_OK_AND_ASSIGN(std::byte* const long_there, device->Allocate(65'536));
  ASSERT_OK_AND_ASSIGN(std::byte* const long_here, device->AllocatePinned(65'536));
  plan.run = 65'536;
  out.push_back({plan, long_there, long_here});
  in.push_back({plan, long_here, long_there});
  for (const bool leaves : {true, false}) {
    const FakeCuda::Counts before = TheFakeCuda().counts();
    ASSERT_OK(leaves ? queue->CopyOut(out) : queue->CopyIn(in));
    const FakeCuda::Counts after = TheFakeCuda().counts();
    EXPECT_EQ(after.launches - before.launches, 2u);
    EXPECT_EQ(after.copies - before.copies, leaves ? 2u : 3u);
    EXPECT_EQ(after.crossed_bytes - before.crossed_bytes, 2000u * 64 + 65'536);
  }
  ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
  ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
  device->FreePinned(long_here);
  device->FreePinned(here);
  device->Free(long_there);
  device->Free(there);
}

// What a call that failed had collected is not done by the next one.
TEST_F(CudaDeviceTest, CopiesOfAFailedCallAreDropped) {
  const auto device = First();
  ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(400));
  ASSERT_OK_AND_ASSIGN(std::byte* const here, device->AllocatePinned(400));
  std::memset(TheFakeCuda().reveal(there), 'x', 400);
  StridedCopy plan;
  plan.run = 100;
  const DeviceCopy in[] = {{plan, here, there}, {plan, here + 100, there + 100}};
  const DeviceCopy within{plan, there + 200, there + 300};
  const DeviceCopy out[] = {{plan, there, here}, {plan, there + 100, here + 100}};
  for (const bool crosses : {true, false}) {
    FailAt("cuMemcpyHtoDAsync", cuda::kInvalidValue);
    EXPECT_FALSE(queue->CopyIn(in).ok());
    TheFakeCuda().set_fault({});
    ASSERT_OK(crosses ? queue->CopyOut(out) : queue->CopyWithin({&within, 1}));
    ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
    ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(TheFakeCuda().reveal(there)), 400),
              std::string(400, 'x'));
    std::memset(here, '.', 400);
  }
  device->FreePinned(here);
  device->Free(there);
}

// What copies do not name stays as it is, but for the rest of a cache line between two of them.
TEST_F(CudaDeviceTest, GapsOnTheHostAreNotWritten) {
  const auto device = First();
  ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(200));
  ASSERT_OK_AND_ASSIGN(std::byte* const here, device->AllocatePinned(400));
  std::memset(TheFakeCuda().reveal(there), 'x', 200);
  StridedCopy plan;
  plan.run = 100;
  for (const std::size_t next : {120u, 130u, 192u, 300u}) {
    std::memset(here, '.', 400);
    const DeviceCopy copies[] = {{plan, there, here}, {plan, there + 100, here + next}};
    ASSERT_OK(queue->CopyOut(copies));
    ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
    ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(here), 400),
              std::string(100, 'x') + std::string(next - 100, '.') + std::string(100, 'x') +
                  std::string(300 - next, '.'));
  }
  device->FreePinned(here);
  device->Free(there);
}

// As saves and loads lay out small tensors: each begins a cache line of the block.
TEST_F(CudaDeviceTest, SmallTensorsAreTransferredTogether) {
  const auto device = First();
  ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(64'000));
  ASSERT_OK_AND_ASSIGN(std::byte* const here, device->AllocatePinned(64'000));
  Random random(TestSeed());
  std::string bytes = random.Bytes(64'000);
  std::memcpy(TheFakeCuda().reveal(there), bytes.data(), bytes.size());
  for (const bool out : {true, false}) {
    std::vector<DeviceCopy> copies;
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < 500; ++i) {
      sizes.push_back(static_cast<std::size_t>(random.Int(65, 128)));
      StridedCopy plan;
      plan.run = sizes.back();
      std::byte* const a = there + (499 - i) * 128;
      std::byte* const b = here + i * 128;
      copies.push_back(out ? DeviceCopy{plan, a, b} : DeviceCopy{plan, b, a});
    }
    const FakeCuda::Counts before = TheFakeCuda().counts();
    ASSERT_OK(out ? queue->CopyOut(copies) : queue->CopyIn(copies));
    EXPECT_LE(TheFakeCuda().counts().copies - before.copies, 20u);
    ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
    ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
    for (std::size_t i = 0; i < 500; ++i) {
      ASSERT_EQ(
          std::memcmp(here + i * 128, TheFakeCuda().reveal(there + (499 - i) * 128), sizes[i]), 0)
          << i;
    }
    bytes = random.Bytes(64'000);
    std::memcpy(here, bytes.data(), bytes.size());
  }
  device->FreePinned(here);
  device->Free(there);
}

// Memory that cannot be pinned: the results of kernels, and blocks of the ring, are ordinary
// memory.
TEST_F(CudaDeviceTest, ResultsAreExactWithoutPinnedMemory) {
  FailAt("cuMemHostRegister", cuda::kNotPermitted);
  FakeCudaDevices fresh;
  const auto device = fresh.cuda().Open(kFirst).value();
  EXPECT_OK(CopiesAreExact(*device, TestSeed(), TestScale(20)));
  EXPECT_OK(HashesAreThoseOfTheHost(*device, TestSeed(), TestScale(40)));
  EXPECT_THAT(device->AllocatePinned(4096), HasCode(Code::kResourceExhausted));
  // What is wrong with the device is not said to be that.
  TheFakeCuda().set_fault({});
  TheFakeCuda().break_context(0, cuda::kIllegalAddress);
  EXPECT_THAT(device->AllocatePinned(4096), HasCode(Code::kUnavailable));
  TheFakeCuda().break_context(0, cuda::kSuccess);
}

// A stream of the program that hangs holds up who waits for it, and nobody else.
TEST_F(CudaDeviceTest, HungStreamBlocksNoOtherWork) {
  const auto device = First();
  void* const stream = devices_[0].MakeStream();
  std::atomic<bool> go = false;
  TheFakeCuda().enqueue(0, stream, [&] { go.wait(false); });
  ASSERT_OK_AND_ASSIGN(const auto fence, device->MarkStream({StreamKind::kHandle, stream}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(4096));
  ASSERT_OK_AND_ASSIGN(std::byte* const here, device->AllocatePinned(4096));
  StridedCopy columns;
  columns.run = 2;
  columns.axes = 1;
  columns.axis[0] = {100, 8, 2};
  DeviceCopy copy{columns, there, here};
  {
    // Queues that came and went while it hung, too.
    for (int i = 0; i < 3; ++i) {
      ASSERT_OK_AND_ASSIGN(const auto behind, device->MakeQueue({}));
      ASSERT_OK(behind->WaitFor(fence));
      copy.to += 256;
      ASSERT_OK(behind->CopyOut({&copy, 1}));
      ASSERT_OK(behind->Mark());
    }
    ASSERT_OK_AND_ASSIGN(const auto other, device->MakeQueue({}));
    copy.to += 256;
    ASSERT_OK(other->CopyOut({&copy, 1}));
    ASSERT_OK_AND_ASSIGN(const auto mark, other->Mark());
    EXPECT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
  }
  // A queue takes only so much that is not done, and says so by its deadline.
  ASSERT_OK_AND_ASSIGN(const auto full,
                       device->MakeQueue({.patience = std::chrono::milliseconds(50)}));
  ASSERT_OK(full->WaitFor(fence));
  copy.to += 256;
  Status status;
  int copies = 0;
  for (; status.ok() && copies < 2000; ++copies) status = full->CopyOut({&copy, 1});
  EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded));
  EXPECT_GT(copies, 100);
  go = true;
  go.notify_all();
  TheFakeCuda().quiesce();
  device->FreePinned(here);
  device->Free(there);
}

// Memory is taken and given back beside a stream of the program that hangs. cuMemFree would wait
// for it.
TEST_F(CudaDeviceTest, MemoryIsFreedWhileAStreamHangs) {
  for (const bool pools : {true, false}) {
    if (!pools) FailAt("memory pools", cuda::kNotPermitted);
    const auto fresh = std::make_unique<FakeCudaDevices>();
    const auto device = fresh->cuda().Open(kFirst).value();
    TheFakeCuda().set_fault({});
    void* const stream = (*fresh)[0].MakeStream();
    // The stream may look at it once more when this is over.
    const auto go = std::make_shared<std::atomic<bool>>(false);
    TheFakeCuda().enqueue(0, stream, [go] { go->wait(false); });
    std::atomic<bool> over = false;
    std::thread other([&] {
      const std::byte* last = nullptr;
      for (int i = 0; i < 3; ++i) {
        const auto memory = device->Allocate(1000);
        ASSERT_OK(memory);
        // Where there are no pools it is kept.
        if (!pools && i > 0) {
          EXPECT_EQ(memory.value(), last);
        }
        last = memory.value();
        device->Free(memory.value());
      }
      EXPECT_OK(CopiesAreExact(*device, TestSeed(), 2));
      over = true;
    });
    const Deadline deadline = Deadline::After(std::chrono::seconds(20));
    while (!over && !deadline.Passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(over) << (pools ? "with" : "without") << " pools";
    *go = true;
    go->notify_all();
    other.join();
    TheFakeCuda().quiesce();
  }
}

// What a device without pools keeps makes room where it is full.
TEST_F(CudaDeviceTest, CachedMemoryIsFreedWhenTheDeviceIsFull) {
  FailAt("memory pools", cuda::kNotPermitted);
  const auto fresh = std::make_unique<FakeCudaDevices>();
  const auto device = fresh->cuda().Open(kFirst).value();
  TheFakeCuda().set_fault({});
  const std::size_t before = TheFakeCuda().counts().allocations;
  std::vector<std::byte*> small;
  for (int i = 0; i < 3; ++i) small.push_back(device->Allocate(std::size_t{10} << 20).value());
  for (std::byte* const data : small) device->Free(data);
  EXPECT_EQ(TheFakeCuda().counts().allocations, before + 3);
  TheFakeCuda().set_memory_limit(std::size_t{64} << 20);
  const auto large = device->Allocate(std::size_t{50} << 20);
  EXPECT_OK(large);
  EXPECT_EQ(TheFakeCuda().counts().allocations, before + 1);
  EXPECT_THAT(device->Allocate(std::size_t{50} << 20), HasCode(Code::kResourceExhausted));
  if (large.ok()) device->Free(large.value());
  TheFakeCuda().set_memory_limit(std::size_t{1} << 40);
}

// Ranks may be threads of one process: NCCL's kernels then work in each other's memory.
TEST_F(CudaDeviceTest, DevicesOfAProcessCanAccessEachOthersPools) {
  (void)First();
  const std::size_t before = TheFakeCuda().pools_opened();
  (void)devices_.cuda().Open(kSecond).value();
  EXPECT_EQ(TheFakeCuda().pools_opened() - before, 2u);
}

// While ranks exchange, a load that is cancelled goes on until all are told: by queues that were
// made before, too.
TEST_F(CudaDeviceTest, WaitingWriterIsNotCancelled) {
  FailAt("cuMemHostRegister", cuda::kNotPermitted);  // So that each copy is a wait.
  const FakeCudaDevices fresh;
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenDevice(kFirst));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, opened->ops->Allocate(1000));
  std::atomic<bool> cancel = false;
  DeviceLimits rules;
  rules.cancel = &cancel;
  rules.patience = std::chrono::seconds(20);
  {
    DeviceWriter writer(rules);
    const PlacedBox to{Box::Make({0}, {1000}).value(), 0, {1}};
    const auto write = [&] {
      const Status status = writer.Write(opened, to.box, to, there,
                                         [](const PlacedBox&, std::byte*) { return Status(); });
      return status.ok() ? writer.Push() : status;
    };
    ASSERT_OK(write());
    ASSERT_OK(writer.Finish());
    TheFakeCuda().set_fault([](std::string_view what) {
      if (what.starts_with("run ")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return what == "cuMemHostRegister" ? cuda::kNotPermitted : cuda::kSuccess;
    });
    ASSERT_OK(write());
    cancel = true;
    writer.IgnoreCancellation(std::chrono::seconds(20));
    EXPECT_OK(write());
    EXPECT_OK(writer.Finish());
  }
  TheFakeCuda().set_fault({});
  opened->ops->Free(there);
}

// ---- Which device, whose memory --------------------------------------------------------------

TEST_F(CudaDeviceTest, DeviceIsFoundByUuidUnderAnyOrdinal) {
  Device named = kFirst;
  named.uuid.fill(0xAB);
  named.uuid[15] = 1;
  EXPECT_EQ(devices_.cuda().Open(named).value(), devices_.cuda().Open(kSecond).value());
  // Of a part of a device, that of the whole: both are then, and the ordinal says which.
  Device part = kSecond;
  part.uuid.fill(0xCD);
  EXPECT_EQ(devices_.cuda().Open(part).value(), devices_.cuda().Open(kSecond).value());
  named.uuid[15] = 9;
  EXPECT_THAT(devices_.cuda().Open(named),
              HasMessage("device GPU-abababab-abab-abab-abab-ababababab09 is not among the 2 "
                         "devices that this process sees (CUDA_VISIBLE_DEVICES)"));
  EXPECT_THAT(devices_.cuda().Open({DeviceKind::kCuda, 7}), HasCode(Code::kUnavailable));
  EXPECT_THAT(First()->name(), testing::HasSubstr("cuda:0 (Fake H100)"));
  EXPECT_EQ(devices_.cuda().Count().value(), 2);
}

TEST_F(CudaDeviceTest, ACheckAsksTheDriverTwice) {
  const auto device = First();
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(96));
  const auto asked = std::make_shared<std::atomic<int>>(0);
  TheFakeCuda().set_fault([=](std::string_view what) {
    if (what.starts_with("cuPointer")) ++*asked;
    return cuda::kSuccess;
  });
  EXPECT_OK(CheckMemory(CudaView(there, {96})));
  EXPECT_EQ(*asked, 2);  // About the first and the last byte.
  device->Free(there);
}

TEST_F(CudaDeviceTest, ErrorNamesTheOwnerOfAForeignPointer) {
  const auto device = First();
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(96));
  EXPECT_OK(CheckMemory(CudaView(there, {96})));
  EXPECT_THAT(CheckMemory(CudaView(there, {97})), HasMessage("is not known to CUDA"));
  EXPECT_THAT(CheckMemory(CudaView(there, {96}, 1)), HasMessage("is memory of cuda:0"));
  BufferView strided = CudaView(there + 95, {10});
  strided.strides = {-10};
  EXPECT_OK(CheckMemory(strided));
  strided.strides = {-11};
  EXPECT_THAT(CheckMemory(strided), HasMessage("is not known to CUDA"));
  ASSERT_OK_AND_ASSIGN(std::byte* const pinned, device->AllocatePinned(100));
  EXPECT_THAT(CheckMemory(CudaView(pinned)), HasMessage("is host memory"));
  device->FreePinned(pinned);
  device->Free(there);
}

// Expandable segments of PyTorch, and managed memory.
TEST_F(CudaDeviceTest, MemoryMappedInPartsIsAccepted) {
  (void)First();
  std::byte* const mapped = TheFakeCuda().make_mapped(0, 10'000);
  EXPECT_OK(CheckMemory(CudaView(mapped, {10'000})));
  EXPECT_OK(CheckMemory(CudaView(mapped + 3000, {4000})));
  std::byte* const managed = TheFakeCuda().make_managed(100);
  EXPECT_OK(CheckMemory(CudaView(managed, {100}, 1)));
}

// ---- Streams ---------------------------------------------------------------------------------

TEST_F(CudaDeviceTest, EveryKindOfStreamIsAwaited) {
  const auto device = First();
  void* const own = devices_[0].MakeStream();
  const std::pair<DeviceStream, void*> streams[] = {
      {{StreamKind::kHandle, own}, own},
      {{StreamKind::kLegacyDefault, nullptr}, nullptr},
      {{StreamKind::kHandle, nullptr}, nullptr},  // As the runtime says it.
      {{StreamKind::kPerThreadDefault, nullptr}, reinterpret_cast<void*>(cuda::kPerThreadStream)}};
  for (const auto& [stream, handle] : streams) {
    void* const there = handle == nullptr ? reinterpret_cast<void*>(cuda::kLegacyStream) : handle;
    std::atomic<bool> go = false;
    TheFakeCuda().enqueue(0, there, [&] { go.wait(false); });
    ASSERT_OK_AND_ASSIGN(const auto mark, device->MarkStream(stream));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_FALSE(mark->Reached().value());
    go = true;
    go.notify_all();
    EXPECT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
  }
  EXPECT_THAT(devices_.cuda().Open(kSecond).value()->MarkStream({StreamKind::kHandle, own}),
              HasMessage("the stream does not belong to this device"));
}

// Each stream of the program that is held goes on behind the work, and not before.
TEST_F(CudaDeviceTest, HeldStreamContinuesAfterTheWork) {
  const auto device = First();
  void* const slow = devices_[0].MakeStream();
  void* const held = devices_[0].MakeStream();
  std::atomic<bool> go = false;
  TheFakeCuda().enqueue(0, slow, [&] { go.wait(false); });
  ASSERT_OK_AND_ASSIGN(const auto work, device->MarkStream({StreamKind::kHandle, slow}));
  ASSERT_OK(device->HoldStream({StreamKind::kHandle, held}, work));
  ASSERT_OK_AND_ASSIGN(const auto behind, device->MarkStream({StreamKind::kHandle, held}));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_FALSE(behind->Reached().value());
  go = true;
  go.notify_all();
  EXPECT_OK(AwaitMark(*behind, Deadline::After(std::chrono::seconds(10))));
}

TEST_F(CudaDeviceTest, RecordingStreamIsRefusedAndItsGraphStaysIntact) {
  const auto device = First();
  void* const stream = devices_[0].MakeStream();
  ASSERT_OK_AND_ASSIGN(const auto before, device->MarkStream({StreamKind::kHandle, stream}));
  TheFakeCuda().begin_capture(stream);
  EXPECT_THAT(device->MarkStream({StreamKind::kHandle, stream}), HasMessage("capturing a graph"));
  EXPECT_THAT(device->MarkStream({StreamKind::kLegacyDefault, nullptr}),
              HasMessage("capturing a graph"));
  EXPECT_THAT(device->HoldStream({StreamKind::kHandle, stream}, before),
              HasMessage("capturing a graph"));
  // What waits for earlier work does not disturb it: the driver would refuse a strict thread.
  EXPECT_OK(AwaitMark(*before, Deadline::After(std::chrono::seconds(10))));
  TheFakeCuda().end_capture(stream);
  EXPECT_OK(device->MarkStream({StreamKind::kHandle, stream}));
}

// ---- What goes wrong --------------------------------------------------------------------------

TEST_F(CudaDeviceTest, ErrorsOfOtherWorkAreReportedAsForeign) {
  const auto device = First();
  TheFakeCuda().break_context(0, cuda::kIllegalAddress);
  const auto queue = device->MakeQueue({});
  EXPECT_THAT(queue, HasCode(Code::kUnavailable));
  EXPECT_THAT(queue, HasMessage("CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access"));
  EXPECT_THAT(queue, HasMessage("tensormount had no work under way"));
  TheFakeCuda().break_context(0, cuda::kSuccess);

  // Under work of ours nobody can say.
  ASSERT_OK_AND_ASSIGN(const auto own, device->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(100'000));
  ASSERT_OK_AND_ASSIGN(std::byte* const here, device->AllocatePinned(100'000));
  TheFakeCuda().set_fault([](std::string_view what) {
    return what == "run cuMemcpyDtoHAsync" ? cuda::kEccUncorrectable : cuda::kSuccess;
  });
  StridedCopy all;
  all.run = 100'000;
  const DeviceCopy copy{all, there, here};
  ASSERT_OK(own->CopyOut({&copy, 1}));
  // It may be known at once, or later.
  const auto mark = own->Mark();
  const Status failed = mark.ok()
                            ? AwaitMark(*mark.value(), Deadline::After(std::chrono::seconds(10)))
                            : mark.status();
  EXPECT_THAT(failed, HasCode(Code::kUnavailable));
  EXPECT_THAT(failed, HasMessage("CUDA_ERROR_ECC_UNCORRECTABLE"));
  EXPECT_THAT(failed, HasMessage("work of this program or of tensormount"));
  TheFakeCuda().set_fault({});
  TheFakeCuda().break_context(0, cuda::kSuccess);
  device->FreePinned(here);
  device->Free(there);
}

TEST_F(CudaDeviceTest, ResetDeviceIsReportedAndReopened) {
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenDevice(kFirst));
  ASSERT_OK_AND_ASSIGN(const auto queue, opened->ops->MakeQueue({}));
  ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
  std::byte* pinned = nullptr;
  {
    ASSERT_OK_AND_ASSIGN(auto block, opened->ring->Take(Deadline::After(std::chrono::seconds(1))));
    pinned = block.data();
  }
  TheFakeCuda().reset(0);
  // Also where the program has a new context at once, at the old address.
  ASSERT_OK_AND_ASSIGN(const auto driver, gpu::OpenDriver(TENSORMOUNT_FAKE_CUDA));
  cuda::Context fresh = nullptr;
  ASSERT_EQ(driver->cuDevicePrimaryCtxRetain(&fresh, 100), cuda::kSuccess);
  EXPECT_THAT(mark->Reached(), HasMessage("the device was reset"));
  EXPECT_THAT(queue->Mark(), HasCode(Code::kUnavailable));
  EXPECT_THAT(opened->ops->MakeQueue({}), HasCode(Code::kUnavailable));
  *pinned = std::byte{1};  // Pages of the process: still there.
  ASSERT_OK_AND_ASSIGN(const auto again, OpenDevice(kFirst));
  EXPECT_NE(again, opened);
  EXPECT_OK(OrderIsKept(*again->ops, TestSeed(), 2));
  // Moments of the old one are not those of the new one.
  ASSERT_OK_AND_ASSIGN(const auto other, again->ops->MakeQueue({}));
  EXPECT_THAT(other->WaitFor(mark), HasCode(Code::kUnavailable));
}

// The program works on another device meanwhile.
TEST_F(CudaDeviceTest, CallersCudaContextIsUnchanged) {
  ASSERT_OK_AND_ASSIGN(const auto driver, gpu::OpenDriver(TENSORMOUNT_FAKE_CUDA));
  cuda::Context second = nullptr;
  ASSERT_EQ(driver->cuDevicePrimaryCtxRetain(&second, 101), cuda::kSuccess);
  ASSERT_EQ(driver->cuCtxPushCurrent(second), cuda::kSuccess);
  EXPECT_OK(OrderIsKept(*First(), TestSeed(), 2));
  cuda::Context popped = nullptr;
  ASSERT_EQ(driver->cuCtxPopCurrent(&popped), cuda::kSuccess);
  EXPECT_EQ(popped, second);
  EXPECT_EQ(TheFakeCuda().contexts_on_stack(), 0);
}

TEST_F(CudaDeviceTest, DriverFailuresAreReported) {
  EXPECT_THAT(gpu::OpenDriver("libthere_is_none.so.1"), HasCode(Code::kUnavailable));
  EXPECT_THAT(gpu::OpenDriver("libc.so.6"), HasMessage("is older than CUDA 12"));
  const std::span<const std::byte> other = std::as_bytes(std::span("other"));
  gpu::CudaDevices devices(TENSORMOUNT_FAKE_CUDA, other);
  EXPECT_THAT(devices.Open(kFirst),
              HasMessage("load tensormount's kernels for compute capability 9.0 with a driver of "
                         "CUDA 13.0: CUDA_ERROR_NO_BINARY_FOR_GPU"));
  EXPECT_THAT(devices.Open(kFirst), HasCode(Code::kUnavailable));
  FailAt("cuDevicePrimaryCtxRetain", cuda::kOutOfMemory);
  gpu::CudaDevices full(TENSORMOUNT_FAKE_CUDA, other);
  EXPECT_THAT(full.Open(kFirst),
              HasMessage("retain the device's primary context: CUDA_ERROR_OUT_OF_MEMORY"));
}

// The parent has used CUDA, tensormount has not.
TEST_F(CudaDeviceTest, ForkedChildIsRefused) {
  ASSERT_OK(gpu::OpenDriver(TENSORMOUNT_FAKE_CUDA));
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = gpu::OpenDriver(TENSORMOUNT_FAKE_CUDA);
    const bool told = opened.status().code() == Code::kUnavailable &&
                      opened.status().message().find("forked") != std::string::npos;
    _exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// Every function that may fail, at its first and at later calls: an error in words, and the next
// try is right.
// A scope that could not change the thread's mode does not change it at its end either.
TEST_F(CudaDeviceTest, CaptureModeIsRestoredOnlyIfItWasChanged) {
  const auto device = First();
  const auto left = std::make_shared<std::atomic<int>>(1);
  TheFakeCuda().set_fault([=](std::string_view what) {
    return what == "cuThreadExchangeStreamCaptureMode" && (*left)-- > 0 ? cuda::kNotPermitted
                                                                        : cuda::kSuccess;
  });
  EXPECT_OK(device->Allocate(16).status());
  TheFakeCuda().set_fault({});
  EXPECT_LT(left->load(), 1);
  EXPECT_EQ(TheFakeCuda().capture_mode(), 0);
}

TEST_F(CudaDeviceTest, QueuesDestroyTheirStreams) {
  const auto device = First();
  EXPECT_OK(CopiesAreExact(*device, TestSeed(), 1));
  TheFakeCuda().quiesce();
  const std::size_t streams = TheFakeCuda().counts().streams;
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
    EXPECT_EQ(TheFakeCuda().counts().streams, streams + 1);
  }
  EXPECT_EQ(TheFakeCuda().counts().streams, streams);
}

TEST_F(CudaDeviceTest, KernelsAreLoadedWhenTheDeviceIsOpened) {
  const FakeCudaDevices fresh;
  FailAt("cuFuncLoad", cuda::kNotPermitted, 4);  // The last of the five.
  const auto refused = devices_.cuda().Open(kFirst);
  TheFakeCuda().set_fault({});
  EXPECT_THAT(refused.status(), HasMessage("tensormount_crc: CUDA_ERROR_NOT_PERMITTED"));
  // The fake ends the process at a launch of a kernel that is not loaded.
  ASSERT_OK_AND_ASSIGN(const auto device, devices_.cuda().Open(kFirst));
  EXPECT_OK(CopiesAreExact(*device, TestSeed(), 1));
}

TEST_F(CudaDeviceTest, FailureOfEveryCudaFunctionIsHandled) {
  const char* const functions[] = {"cuMemAllocFromPoolAsync",
                                   "cuMemHostRegister",
                                   "cuLaunchKernel",
                                   "cuMemcpyHtoDAsync",
                                   "cuMemcpyDtoHAsync",
                                   "cuMemsetD8Async",
                                   "cuEventCreate",
                                   "cuEventRecord",
                                   "cuEventQuery",
                                   "cuStreamWaitEvent",
                                   "cuStreamCreateWithPriority"};
  for (const char* function : functions) {
    int failures = 0;
    for (int skipped = 0; skipped < 4; ++skipped) {
      const FakeCudaDevices fresh;
      const auto device = devices_.cuda().Open(kFirst).value();
      FailAt(function, cuda::kNotPermitted, skipped);
      const Status copies = CopiesAreExact(*device, TestSeed(), 1);
      const Status hashes = HashesAreThoseOfTheHost(*device, TestSeed(), 1);
      const Status order = OrderIsKept(*device, TestSeed(), 1);
      TheFakeCuda().set_fault({});
      for (const Status& status : {copies, hashes, order}) {
        if (status.ok()) continue;
        ++failures;
        EXPECT_THAT(status, HasMessage("CUDA_ERROR_NOT_PERMITTED")) << function;
        EXPECT_THAT(status, HasMessage("cuda:0")) << function;
      }
      TheFakeCuda().quiesce();
      EXPECT_OK(CopiesAreExact(*device, TestSeed(), 1)) << "after " << function;
      EXPECT_EQ(TheFakeCuda().contexts_on_stack(), 0);
    }
    // Results come through memory that is not pinned then.
    if (std::string(function) != "cuMemHostRegister") {
      EXPECT_GT(failures, 0) << function;
    }
  }
}

}  // namespace
}  // namespace tensormount
