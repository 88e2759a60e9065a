// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/log.h"

#include "device/device_queues.h"
#include "device/devices.h"
#include "tests/device/device_ops_conformance.h"
#include "tests/support/host_device.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

// ---- The device of the tests is one -----------------------------------------------------------

TEST(HostDeviceTest, Conforms) {
  const auto device = std::make_shared<HostDevice>(HostDevice::Options{});
  EXPECT_OK(CopiesAreExact(*device, TestSeed(), TestScale(100)));
  EXPECT_OK(TransposesAreExact(*device, TestSeed(), TestScale(40)));
  EXPECT_OK(SmallCopiesAreExact(*device, TestSeed(), TestScale(20)));
  EXPECT_OK(HashesAreThoseOfTheHost(*device, TestSeed(), TestScale(100)));
  EXPECT_OK(LeavesAreThoseOfTheHost(*device, TestSeed(), TestScale(40)));
  EXPECT_OK(OrderIsKept(*device, TestSeed(), TestScale(20)));
  EXPECT_EQ(device->allocations(), 0u);
}

// What is not waited for is not there: otherwise it would show nothing.
TEST(HostDeviceTest, HostDeviceRunsWorkAsynchronously) {
  const auto device = std::make_shared<HostDevice>(HostDevice::Options{.delay_us = 2000});
  ASSERT_OK_AND_ASSIGN(std::byte* const there, device->Allocate(8));
  ASSERT_OK_AND_ASSIGN(const auto queue, device->MakeQueue({}));
  int late = 0;
  for (int i = 0; i < 50; ++i) {
    const std::string value(8, static_cast<char>('0' + i));
    StridedCopy all;
    all.run = 8;
    const DeviceCopy copy{all, reinterpret_cast<const std::byte*>(value.data()), there};
    ASSERT_OK(queue->CopyIn({&copy, 1}));
    ASSERT_OK_AND_ASSIGN(const auto mark, queue->Mark());
    ASSERT_OK_AND_ASSIGN(const bool at_once, mark->Reached());
    late += at_once ? 0 : 1;
    ASSERT_OK(AwaitMark(*mark, Deadline::After(std::chrono::seconds(10))));
  }
  EXPECT_GT(late, 25);
  device->Free(there);
}

// ---- Which there are -------------------------------------------------------------------------

BufferView DeviceView(const std::byte* data, int ordinal, const Dims& shape = {4}) {
  BufferView view = BufferView::Host(DType::kU8, static_cast<const void*>(data), shape);
  view.device = {DeviceKind::kCuda, ordinal};
  view.memory = MemoryKind::kDevice;
  return view;
}

TEST(DevicesTest, DevicesOpenOnceOrErrorSaysWhyNot) {
  std::byte here[4] = {};
  SetDeviceSource({});
  EXPECT_FALSE(
      CheckMemory(DeviceView(here, 0)).ok());  // A real one, if there is any, knows better.
  HostDevices devices({HostDevice::Options{}});
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenDevice({DeviceKind::kCuda, 0}));
  EXPECT_EQ(OpenDevice({DeviceKind::kCuda, 0}).value(), opened);
  // The same one, said with its UUID.
  Device named{DeviceKind::kCuda, 0};
  named.uuid[3] = 7;
  EXPECT_EQ(OpenDevice(named).value(), opened);
  EXPECT_THAT(OpenDevice({DeviceKind::kCuda, 1}), HasCode(Code::kUnavailable));
  // To other devices there is a way only where a kind of device has one.
  EXPECT_THAT(OpenDeviceLink({DeviceKind::kCuda, 0}), HasCode(Code::kUnsupported));
  EXPECT_THAT(OpenDeviceLink({DeviceKind::kCuda, 1}), HasCode(Code::kUnavailable));

  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(4));
  EXPECT_OK(CheckMemory(DeviceView(there, 0)));
  EXPECT_THAT(CheckMemory(DeviceView(here, 0)), HasMessage("is no memory of cuda:0"));
  EXPECT_OK(CheckMemory(DeviceView(here, 0, {0, 4})));  // No bytes, no matter where.
  BufferView pinned = DeviceView(there, 0);
  pinned.memory = MemoryKind::kPinned;
  EXPECT_THAT(CheckMemory(pinned), HasCode(Code::kInvalidArgument));
  devices[0].Free(there);
}

TEST(DevicesTest, ForkedChildHasNoDevices) {
  HostDevices devices({HostDevice::Options{}});
  ASSERT_OK(OpenDevice({DeviceKind::kCuda, 0}));
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = OpenDevice({DeviceKind::kCuda, 0});
    const bool told = opened.status().code() == Code::kUnavailable &&
                      opened.status().message().find("forked") != std::string::npos;
    _exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// ---- Pinned memory ---------------------------------------------------------------------------

std::shared_ptr<PinnedRing> RingOf(const std::shared_ptr<HostDevice>& device, std::size_t blocks) {
  return std::make_shared<PinnedRing>(device, PinnedShape{blocks, 4096});
}
Deadline Soon() { return Deadline::After(milliseconds(50)); }

TEST(PinnedRingTest, RingIsBoundedAndReusesBlocks) {
  const auto device = std::make_shared<HostDevice>(HostDevice::Options{});
  const auto ring = RingOf(device, 2);
  EXPECT_EQ(ring->pinned_bytes(), 0u);  // Nothing before it is needed.
  ASSERT_OK_AND_ASSIGN(auto a, ring->Take(Soon()));
  std::optional<PinnedRing::Block> b = ring->TryTake();
  ASSERT_TRUE(b.has_value());
  EXPECT_NE(a.data(), b->data());
  EXPECT_FALSE(ring->TryTake().has_value());
  EXPECT_THAT(ring->Take(Soon()), HasMessage("all 2 pinned host buffers are in use, 0 of them"));
  std::atomic<bool> cancel = true;
  EXPECT_THAT(ring->Take(Deadline::After(std::chrono::seconds(60)), &cancel),
              HasCode(Code::kCancelled));
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(20));
    b.reset();
  });
  EXPECT_OK(ring->Take(Deadline::After(std::chrono::seconds(60))));
  later.join();
  EXPECT_EQ(ring->pinned_bytes(), 2 * 4096u);
}

// Who comes and goes does not keep who waits from a block.
TEST(PinnedRingTest, WaitingThreadIsServedFirst) {
  const auto device = std::make_shared<HostDevice>(HostDevice::Options{});
  const auto ring = RingOf(device, 1);
  ASSERT_OK_AND_ASSIGN(auto first, ring->Take(Soon()));
  std::optional<PinnedRing::Block> held(std::move(first));
  std::atomic<bool> served = false;
  std::thread waiter([&] { served = ring->Take(Deadline::After(std::chrono::seconds(60))).ok(); });
  std::this_thread::sleep_for(milliseconds(50));
  held.reset();
  int taken = 0;
  while (!served) {  // As BlockReader does it.
    held = ring->TryTake();
    taken += held.has_value() && !served ? 1 : 0;
    held.reset();
  }
  waiter.join();
  EXPECT_EQ(taken, 0);
}

TEST(PinnedRingTest, BlockReturnsOnlyAfterItsMarkIsReached) {
  const auto device = std::make_shared<HostDevice>(HostDevice::Options{});
  const auto ring = RingOf(device, 1);
  void* const stream = device->MakeStream();
  std::atomic<bool> go = false;
  device->Enqueue(stream, [&] { go.wait(false); });
  ASSERT_OK_AND_ASSIGN(auto mark, device->MarkStream({StreamKind::kHandle, stream}));
  {
    ASSERT_OK_AND_ASSIGN(auto block, ring->Take(Soon()));
    block.ReturnAfter(mark);
  }
  EXPECT_THAT(ring->Take(Soon()), HasMessage("1 of them by unfinished copies"));
  go = true;
  go.notify_all();
  EXPECT_OK(ring->Take(Deadline::After(std::chrono::seconds(10))));
}

// A mark that counts the questions of all marks.
class CountedMark : public DeviceMark {
 public:
  CountedMark(int& questions, bool reached) : questions_(questions), reached_(reached) {}
  Result<bool> Reached() override {
    ++questions_;
    return reached_;
  }

 private:
  int& questions_;
  bool reached_;
};

TEST(PinnedRingTest, DeviceIsAskedOnlyForABlockThatIsNeeded) {
  int questions = 0;  // The ring asks until its end.
  const auto ring = RingOf(std::make_shared<HostDevice>(HostDevice::Options{}), 20);
  {
    std::vector<PinnedRing::Block> all;
    for (int i = 0; i < 20; ++i) {
      ASSERT_OK_AND_ASSIGN(auto block, ring->Take(Soon()));
      all.push_back(std::move(block));
    }
    // The first block stays with the device; 18 return in order; one was never given away.
    for (std::size_t i = 0; i < 19; ++i) {
      all[i].ReturnAfter(
          std::shared_ptr<DeviceMark>(std::make_shared<CountedMark>(questions, i > 0)));
    }
  }
  for (int i = 0; i < 100; ++i) ASSERT_OK(ring->Take(Soon()));
  EXPECT_EQ(questions, 0) << "a block was free";
  std::vector<PinnedRing::Block> held;
  for (int i = 0; i < 19; ++i) {
    ASSERT_OK_AND_ASSIGN(auto block, ring->Take(Soon()));
    held.push_back(std::move(block));
  }
  EXPECT_EQ(questions, 18 * 2);  // The first block each time, and the one that was taken.
  EXPECT_FALSE(ring->TryTake());
}

TEST(PinnedRingTest, RefusedPinningIsLoggedOnce) {
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  const auto device = std::make_shared<HostDevice>(HostDevice::Options{});
  device->SetFault([](std::string_view what) {
    return what == "pin" ? Status(Code::kResourceExhausted, "RLIMIT_MEMLOCK") : Status();
  });
  const auto ring = RingOf(device, 3);
  {
    ASSERT_OK_AND_ASSIGN(auto a, ring->Take(Soon()));
    ASSERT_OK_AND_ASSIGN(auto b, ring->Take(Soon()));
    EXPECT_EQ(ring->pinned_bytes(), 0u);
    EXPECT_EQ(ring->pageable_bytes(), 2 * 4096u);
  }
  SetLogSink({});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("RLIMIT_MEMLOCK"), std::string::npos) << lines[0];
}

// ---- Work ------------------------------------------------------------------------------------

PlacedBox ByteRow(std::int64_t n) { return {Box::Make({0}, {n}).value(), 0, {1}}; }

// Two that share one block get on: neither keeps it while it waits.
TEST(DeviceWriterTest, WriterHoldsNoBlockWhileItWaits) {
  HostDevices devices({HostDevice::Options{.pinned = {1, 256}, .delay_us = 0}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(20);
  DeviceWriter one(rules);
  DeviceWriter two(rules);
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(2000));
  const auto write = [&](DeviceWriter& writer, std::int64_t from, char value) {
    const PlacedBox to = ByteRow(1000);
    return writer.Write(
        device, to.box, to, there + from, [&](const PlacedBox& packed, std::byte* base) {
          std::memset(base + packed.offset, value, static_cast<std::size_t>(packed.box.volume()));
          return Status();
        });
  };
  ASSERT_OK(write(one, 0, 'a'));  // Its last part is still in the block.
  ASSERT_OK(one.Push());
  ASSERT_OK(write(two, 1000, 'b'));
  ASSERT_OK(two.Push());
  ASSERT_OK(one.Finish());
  ASSERT_OK(two.Finish());
  const std::string all(reinterpret_cast<const char*>(devices[0].Reveal(there)), 2000);
  EXPECT_EQ(all, std::string(1000, 'a') + std::string(1000, 'b'));
  devices[0].Free(there);
}

// Threads that write by one writer get on with fewer blocks than they are: nobody keeps one that
// another waits for, also when it has nothing more to write.
TEST(DeviceWriterTest, ThreadsShareARingOfOneBlock) {
  HostDevices devices({HostDevice::Options{.pinned = {1, 256}, .delay_us = 20}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(20);
  DeviceWriter writer(rules);
  constexpr std::size_t kBoxes = 60;
  constexpr std::int64_t kBoxBytes = 100;
  constexpr std::size_t kBytes = 4 * kBoxes * kBoxBytes;
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(kBytes));
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      // Some end long before others.
      for (std::size_t i = t; i < kBoxes * (t + 1); i += 4) {
        const PlacedBox to = ByteRow(kBoxBytes);
        EXPECT_OK(writer.Write(device, to.box, to,
                               there + (t * kBoxes + i % kBoxes) * std::size_t{kBoxBytes},
                               [&](const PlacedBox& packed, std::byte* base) {
                                 std::memset(base + packed.offset, static_cast<int>('a' + t),
                                             static_cast<std::size_t>(packed.box.volume()));
                                 return Status();
                               }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_OK(writer.Finish());
  for (std::size_t t = 0; t < 4; ++t) {
    for (std::size_t i = t; i < kBoxes * (t + 1); i += 4) {
      const std::size_t at = (t * kBoxes + i % kBoxes) * std::size_t{kBoxBytes};
      const std::string box(reinterpret_cast<const char*>(devices[0].Reveal(there + at)),
                            std::size_t{kBoxBytes});
      ASSERT_EQ(box, std::string(std::size_t{kBoxBytes}, static_cast<char>('a' + t)));
    }
  }
  devices[0].Free(there);
}

// A device that fails once, at whichever mark, keeps no block, and forgets nothing.
TEST(DeviceWriterTest, FailedMarkLosesNoBlock) {
  for (int failing = 1; failing <= 3; ++failing) {
    HostDevices devices({HostDevice::Options{.pinned = {1, 256}, .delay_us = 0}});
    ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
    DeviceLimits rules;
    rules.patience = std::chrono::seconds(5);
    ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(1024));
    const PlacedBox to = ByteRow(1024);
    const auto write = [&](DeviceWriter& writer, DeviceWriter::WriteDigest* arrived) {
      return writer.Write(
          device, to.box, to, there,
          [](const PlacedBox& packed, std::byte* base) {
            std::memset(base + packed.offset, 'z', static_cast<std::size_t>(packed.box.volume()));
            return Status();
          },
          arrived);
    };
    std::atomic<int> left = failing;
    devices[0].SetFault([&](std::string_view what) {
      return what == "mark" && --left == 0 ? Status(Code::kUnavailable, "planted") : Status();
    });
    {
      DeviceWriter writer(rules);
      DeviceWriter::WriteDigest arrived{.byte_shape = Dims{1024}};
      Status status = write(writer, &arrived);
      if (status.ok()) status = writer.Finish();
      EXPECT_THAT(status, HasMessage("planted")) << failing;
      EXPECT_TRUE(writer.Settle(Deadline::After(std::chrono::seconds(5))));
    }
    DeviceWriter again(rules);
    DeviceWriter::WriteDigest arrived{.byte_shape = Dims{1024}};
    ASSERT_OK(write(again, &arrived));
    ASSERT_OK(again.Finish());
    const std::string all(1024, 'z');
    EXPECT_EQ(arrived.digest, Crc64Extend(0, all.data(), all.size()));
    EXPECT_FALSE(arrived.unknown);
    devices[0].Free(there);
  }
}

// What a thread has begun to write is waited for also where what it reads from throws.
TEST(DeviceWriterTest, ThrowingFillLeavesNoPendingWork) {
  HostDevices devices({HostDevice::Options{.pinned = {4, 256}, .delay_us = 2000}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(20);
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(1024));
  std::memset(devices[0].Reveal(there), 'x', 1024);
  {
    DeviceWriter writer(rules);
    const PlacedBox to = ByteRow(1024);
    int part = 0;
    EXPECT_THROW((void)writer.Write(device, to.box, to, there,
                                    [&](const PlacedBox& packed, std::byte* base) -> Status {
                                      if (++part == 4) throw std::bad_alloc();
                                      std::memset(base + packed.offset, 'y', 256);
                                      return {};
                                    }),
                 std::bad_alloc);
  }
  // Its end waited for the copies: what the device does later would be seen here.
  const std::string before(reinterpret_cast<const char*>(devices[0].Reveal(there)), 1024);
  EXPECT_EQ(before, std::string(768, 'y') + std::string(256, 'x'));
  devices[0].Free(there);
}

// However often marks fail: the block comes back with the first one that does not.
TEST(DeviceWriterTest, RepeatedlyFailingMarksLoseNoBlock) {
  HostDevices devices({HostDevice::Options{.pinned = {1, 256}, .delay_us = 0}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(5);
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(256));
  const PlacedBox to = ByteRow(256);
  const auto nothing = [](const PlacedBox&, std::byte*) { return Status(); };
  for (const int failing : {2, 3}) {
    std::atomic<int> left = failing;
    devices[0].SetFault([&](std::string_view what) {
      return what == "mark" && left-- > 0 ? Status(Code::kUnavailable, "planted") : Status();
    });
    {
      DeviceWriter writer(rules);
      EXPECT_THAT(writer.Write(device, to.box, to, there, nothing), HasMessage("planted"));
    }
    EXPECT_OK(device->ring->Take(Deadline::After(std::chrono::seconds(5)))) << failing;
  }
  // Where there is none for as long as the queue lives, nobody knows.
  devices[0].SetFault([](std::string_view what) {
    return what == "mark" ? Status(Code::kUnavailable, "planted") : Status();
  });
  {
    DeviceWriter writer(rules);
    EXPECT_THAT(writer.Write(device, to.box, to, there, nothing), HasMessage("planted"));
  }
  EXPECT_FALSE(device->ring->Take(Deadline::After(milliseconds(50))).ok());
  devices[0].SetFault({});
  devices[0].Quiesce();
  devices[0].Free(there);
}

// There is no memory between a copy and the digest behind it: the block stays with the device until
// the copy is done.
TEST(DeviceWriterTest, ExceptionDuringLaunchKeepsTheBlock) {
  HostDevices devices({HostDevice::Options{.pinned = {1, 256}, .delay_us = 0}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(5);
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(256));
  std::atomic<bool> go = false;
  devices[0].SetFault([&](std::string_view what) -> Status {
    if (what == "digest") throw std::bad_alloc();
    if (what == "run copy-in") go.wait(false);
    return {};
  });
  const PlacedBox to = ByteRow(256);
  {
    DeviceWriter writer(rules);
    DeviceWriter::WriteDigest arrived{.byte_shape = Dims{256}};
    const Status status = writer.Write(
        device, to.box, to, there,
        [](const PlacedBox&, std::byte* base) {
          std::memset(base, 'z', 256);
          return Status();
        },
        &arrived);
    EXPECT_THAT(status, HasCode(Code::kResourceExhausted));
    EXPECT_FALSE(writer.Settle(Soon()));
  }
  EXPECT_FALSE(device->ring->TryTake().has_value());
  go = true;
  go.notify_all();
  EXPECT_OK(device->ring->Take(Deadline::After(std::chrono::seconds(10))));
  devices[0].Quiesce();
  devices[0].Free(there);
}

TEST(DeviceQueuesTest, ExceptionDuringLaunchIsAFailure) {
  HostDevices devices({HostDevice::Options{.pinned = {1, 256}}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(5);
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(256));
  for (const char* const where : {"copy-out", "mark"}) {
    std::atomic<bool> thrown = false;
    devices[0].SetFault([&](std::string_view what) -> Status {
      if (what == where && !thrown.exchange(true)) throw std::bad_alloc();
      return {};
    });
    const PlacedBox whole = ByteRow(256);
    std::vector<std::byte> back;
    EXPECT_THAT(ReadBack({device, {&whole, 1}, there}, rules, back),
                HasCode(Code::kResourceExhausted))
        << where;
    EXPECT_OK(ReadBack({device, {&whole, 1}, there}, rules, back)) << where;
  }
  devices[0].SetFault({});
  devices[0].Free(there);
}

// A device that is full: the host digests, through the one block that there is.
TEST(DeviceQueuesTest, HostDigestHoldsNoBlock) {
  HostDevices devices({HostDevice::Options{.pinned = {1, 256}}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(2);
  const std::string text = Random(3).Bytes(300);
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(text.size()));
  std::memcpy(devices[0].Reveal(there), text.data(), text.size());
  devices[0].SetFault([](std::string_view what) {
    return what == "digest" ? Status(Code::kResourceExhausted, "it is full") : Status();
  });
  const PlacedBox whole = ByteRow(300);
  Crc64 digest = 0;
  const DigestRequest wanted{{device, {&whole, 1}, there}, Dims{300}, &digest};
  ASSERT_OK(DigestsOnDevices({&wanted, 1}, rules));
  EXPECT_EQ(digest, Crc64Extend(0, text.data(), text.size()));
  devices[0].SetFault({});
  devices[0].Free(there);
}

// Memory that a queue which is gone may still work on is freed after that, and nobody waits.
class PendingDeviceWorkTest : public testing::Test {
 protected:
  ~PendingDeviceWorkTest() override {
    Resume();
    devices_[0].SetFault({});
  }
  // From now on copies to the device hang.
  void Hang() {
    go_ = false;
    devices_[0].SetFault([this](std::string_view what) {
      if (what == "run copy-in") go_.wait(false);
      return Status();
    });
  }
  void Resume() {
    go_ = true;
    go_.notify_all();
    devices_[0].Quiesce();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // Until marks are reached, too.
  }
  // A queue that goes with a copy to this memory under way.
  void Leave(std::byte* there) {
    StridedCopy all;
    all.run = sizeof(here_);
    const DeviceCopy copy{all, here_, there};
    auto queue = MakeFencedQueue(*device_, {});
    ASSERT_OK(queue);
    ASSERT_OK(queue.value()->CopyIn({&copy, 1}));
  }
  // A queue that goes with work under way for which there is no mark.
  void Lose(std::byte* there) {
    devices_[0].SetFault([](std::string_view what) {
      return what == "mark" ? Status(Code::kUnavailable, "it is broken") : Status();
    });
    Leave(there);
    devices_[0].SetFault({});
    devices_[0].Quiesce();
  }
  std::byte* Allocate() { return device_->pending_work->Allocate(sizeof(here_)).value(); }

  HostDevices devices_{{HostDevice::Options{.delay_us = 0}}};
  std::shared_ptr<const OpenedDevice> device_ = OpenDevice({DeviceKind::kCuda, 0}).value();
  std::byte here_[8] = {};
  std::atomic<bool> go_ = true;
};

TEST_F(PendingDeviceWorkTest, MemoryIsFreedOnceLeftoverWorkEnds) {
  Hang();
  std::byte* const there = Allocate();
  EXPECT_TRUE(device_->pending_work->IsIdle());
  Leave(there);
  device_->pending_work->Free(there);
  EXPECT_FALSE(device_->pending_work->IsIdle());
  EXPECT_EQ(devices_[0].allocations(), 1u);
  Resume();
  EXPECT_TRUE(device_->pending_work->IsIdle());
  EXPECT_EQ(devices_[0].allocations(), 0u);
}

// Whoever uses the device next frees it; nobody needs to give back other memory for that.
TEST_F(PendingDeviceWorkTest, NextQueueOrAllocationFreesWaitingMemory) {
  for (const bool by_queue : {true, false}) {
    Hang();
    std::byte* const there = Allocate();
    Leave(there);
    device_->pending_work->Free(there);
    Resume();
    EXPECT_EQ(devices_[0].allocations(), 1u);
    if (by_queue) {
      EXPECT_OK(MakeFencedQueue(*device_, {}));
    } else {
      // Before it asks the device, which may be full.
      std::size_t seen = 1;
      devices_[0].SetFault([&](std::string_view what) {
        if (what == "allocate") seen = devices_[0].allocations();
        return Status();
      });
      device_->pending_work->Free(Allocate());
      EXPECT_EQ(seen, 0u);
    }
    EXPECT_EQ(devices_[0].allocations(), 0u);
  }
}

// Work of which nobody knows when it ends keeps the memory that it may reach, and no other.
TEST_F(PendingDeviceWorkTest, LostWorkKeepsOnlyReachableMemory) {
  std::byte* const reached = Allocate();
  Lose(reached);
  device_->pending_work->Free(reached);
  EXPECT_EQ(devices_[0].allocations(), 1u);
  device_->pending_work->Free(Allocate());
  EXPECT_EQ(devices_[0].allocations(), 1u);
}

// The same of work that hangs; and of memory whose owner knows that nothing works on it.
TEST_F(PendingDeviceWorkTest, HungWorkKeepsNoUnreachableMemory) {
  std::byte* const reached = Allocate();
  std::byte* const renewed = Allocate();
  Hang();
  Leave(reached);
  EXPECT_FALSE(device_->pending_work->HasNoPendingWork(renewed));
  device_->pending_work->Free(Allocate());
  EXPECT_EQ(devices_[0].allocations(), 2u);
  device_->pending_work->ResetPendingWork(renewed);
  EXPECT_TRUE(device_->pending_work->HasNoPendingWork(renewed));
  device_->pending_work->Free(renewed);
  device_->pending_work->Free(reached);
  EXPECT_EQ(devices_[0].allocations(), 1u);
  Resume();
  EXPECT_TRUE(device_->pending_work->IsIdle());
  EXPECT_EQ(devices_[0].allocations(), 0u);
}

// Also where the failure cannot be put into words, as where the host has no memory for them.
TEST_F(PendingDeviceWorkTest, FailedLateMarkReportsAnError) {
  struct Wordless : std::exception {
    const char* what() const noexcept override { return nullptr; }  // std::string throws.
  };
  devices_[0].SetFault([](std::string_view what) -> Status {
    if (what == "mark") throw Wordless();
    return {};
  });
  ASSERT_OK_AND_ASSIGN(auto queue, MakeFencedQueue(*device_, {}));
  const std::shared_ptr<DeviceMark> late = queue->MarkLater();
  EXPECT_THAT(late->Reached(), testing::Truly([](const Result<bool>& reached) {
                return reached.ok() && !reached.value();
              }));
  queue.reset();
  EXPECT_THAT(late->Reached(), HasCode(Code::kResourceExhausted));
}

TEST(DeviceQueuesTest, QueuesDigestInBatchesAndReadBack) {
  // Room for eight digests at a time.
  HostDevices devices({HostDevice::Options{.pinned = {2, 64}}});
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  DeviceLimits rules;
  rules.patience = std::chrono::seconds(20);
  const std::string text = Random(3).Bytes(300);
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(text.size()));
  std::memcpy(devices[0].Reveal(there), text.data(), text.size());
  const PlacedBox whole = ByteRow(300);
  std::vector<PlacedBox> tens;
  for (std::int64_t i = 0; i < 30; ++i)
    tens.push_back({Box::Make({10 * i}, {10}).value(), 10 * i, {1}});
  std::vector<Crc64> digests(tens.size());
  std::vector<DigestRequest> wanted;
  for (std::size_t i = 0; i < tens.size(); ++i) {
    wanted.push_back({{device, {&tens[i], 1}, there}, Dims{300}, &digests[i]});
  }
  ASSERT_OK(DigestsOnDevices(wanted, rules));
  Crc64 sum = 0;
  for (const Crc64 digest : digests) sum ^= digest;
  EXPECT_EQ(sum, Crc64Extend(0, text.data(), text.size()));

  std::vector<std::byte> back;
  ASSERT_OK_AND_ASSIGN(const auto placed, ReadBack({device, {&whole, 1}, there}, rules, back));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(back.data()), back.size()), text);
  EXPECT_EQ(placed.size(), 1u);
  devices[0].Free(there);
}

TEST(DeviceFencesTest, StreamThatRecordsAGraphIsRefused) {
  HostDevices devices({HostDevice::Options{}});
  ASSERT_OK_AND_ASSIGN(std::byte* const there, devices[0].Allocate(4));
  BufferView view = DeviceView(there, 0);
  void* const stream = devices[0].MakeStream();
  view.stream = {StreamKind::kHandle, stream};
  DeviceFences fences;
  EXPECT_OK(fences.Add(view));
  devices[0].BeginCapture(stream);
  EXPECT_THAT(DeviceFences().Add(view), HasMessage("records a graph"));
  devices[0].Free(there);
}

}  // namespace
}  // namespace tensormount
