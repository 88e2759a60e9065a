// SPDX-License-Identifier: Apache-2.0
// The way from device to device as a load has it, from OpenDeviceLink on: gpu/ over the driver of
// the tests, NCCL by the shim, a rank on a thread for each device.
#include <chrono>
#include <cstddef>
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

#include "collective/comm/bulk_transport.h"
#include "device/devices.h"
#include "gpu/cuda_context.h"
#include "tests/collective/collective_cases.h"
#include "tests/gpu/nccl_shim_testing.h"
#include "tests/support/fake_cuda_devices.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using gpu::NcclShim;
using std::chrono::milliseconds;

constexpr int kLinkRanks = 3;
constexpr std::size_t kLinkBytes = 10'000;

Deadline LinkPatience() { return Deadline::After(std::chrono::seconds(60)); }
Device DeviceOf(int ordinal) { return {DeviceKind::kCuda, ordinal}; }

gpu::CudaOptions LinkOptions(const std::string& library) {
  gpu::CudaOptions options = FakeCudaDevices::Small();
  options.nccl = {.library = library, .group_units = 2, .patience = std::chrono::seconds(30)};
  return options;
}

// A rank on a device of its own: sends the first half of its memory to the next one, in two units,
// and receives the second half.
class LinkRank {
 public:
  LinkRank(Communicator& comm, FakeCudaDevices& devices)
      : comm_(comm), ops_(devices.cuda().Open(device()).value()) {
    memory_ = ops_->Allocate(4 * kLinkBytes).value();
    std::memset(Bytes(), comm.rank() + 1, 2 * kLinkBytes);
  }
  // Of a device that was reset it stays with the driver of the tests.
  ~LinkRank() { ops_->Free(memory_); }
  LinkRank(const LinkRank&) = delete;
  LinkRank& operator=(const LinkRank&) = delete;

  Device device() const { return DeviceOf(comm_.rank()); }
  Result<std::unique_ptr<BulkTransport>> Make() {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto transport,
                                 MakeDeviceTransport(comm_, kPatient, OpenDeviceLink(device())));
    TENSORMOUNT_RETURN_IF_ERROR(transport->Register({memory_, 4 * kLinkBytes, device()}));
    return transport;
  }
  Status Go(BulkTransport& transport, const Deadline& deadline = LinkPatience()) {
    const auto size = static_cast<std::uint64_t>(comm_.size());
    const auto me = static_cast<std::uint64_t>(comm_.rank());
    std::memset(Bytes() + 2 * kLinkBytes, 0, 2 * kLinkBytes);
    std::vector<BulkUnit> plan;
    std::vector<BulkBlock> blocks;
    for (std::uint64_t turn = 0; turn < 2; ++turn) {
      for (int r = 0; r < comm_.size(); ++r)
        plan.push_back({r, (r + 1) % comm_.size(), kLinkBytes});
      std::byte* const out = memory_ + turn * kLinkBytes;
      blocks.push_back({turn * size + me, out, nullptr});
      blocks.push_back({turn * size + (me + size - 1) % size, nullptr, out + 2 * kLinkBytes});
    }
    TENSORMOUNT_RETURN_IF_ERROR(transport.Begin(plan));
    TENSORMOUNT_RETURN_IF_ERROR(transport.Put(blocks));
    return transport.Wait(deadline);
  }
  bool Came() const {
    const std::vector<std::byte> left(
        2 * kLinkBytes, std::byte((comm_.rank() + comm_.size() - 1) % comm_.size() + 1));
    return std::memcmp(Bytes() + 2 * kLinkBytes, left.data(), left.size()) == 0;
  }
  Status Meet(const char* what) { return Collective(comm_, kPatient).Agree({}, what); }

 private:
  std::byte* Bytes() const { return TheFakeCuda().reveal(memory_); }

  Communicator& comm_;
  const std::shared_ptr<DeviceOps> ops_;
  std::byte* memory_ = nullptr;
};

class CudaLinkTest : public testing::Test {
 protected:
  CudaLinkTest() : devices_(LinkOptions(NcclShim::PathOf(NcclShim::Version::kNew))) {
    TheFakeCuda().set_delay(0);
  }
  ~CudaLinkTest() override {
    TheFakeCuda().set_fault({});
    TheFakeCuda().quiesce();
    unsetenv("FAKE_CUDA_DEVICES");
  }
  static void OnRanks(const std::function<void(Communicator&)>& body, int ranks = kLinkRanks) {
    EXPECT_OK(RunOnThreads(ranks, [&](Communicator& comm) {
      body(comm);
      return Status();
    }));
  }
  // One good exchange, then what befalls rank 1 in the next.
  void ExpectFailure(const std::function<void()>& plant,
                     const std::function<void(int rank, const Status&)>& expect,
                     const std::function<void(int rank, BulkTransport&)>& after,
                     milliseconds patience = std::chrono::seconds(60)) {
    OnRanks([&](Communicator& comm) {
      LinkRank rank(comm, devices_);
      ASSERT_OK_AND_ASSIGN(auto transport, rank.Make());
      ASSERT_OK(rank.Go(*transport));
      ASSERT_OK(rank.Meet("the first exchange"));
      if (comm.rank() == 1) plant();
      ASSERT_OK(rank.Meet("planted"));
      Status status =
          rank.Go(*transport, comm.rank() == 1 ? Deadline::After(patience) : LinkPatience());
      // Whose units were moved is told of the failure all the same.
      for (const Deadline end = LinkPatience(); status.ok() && !end.Passed();) {
        status = transport->Poll().status();
        std::this_thread::sleep_for(milliseconds(1));
      }
      expect(comm.rank(), status);
      after(comm.rank(), *transport);
      transport.reset();
      // A new one, over the device as it is now, is good.
      ASSERT_OK(rank.Meet("failed"));
      if (comm.rank() == 1) TheFakeCuda().set_fault({});
      ASSERT_OK(rank.Meet("good again"));
      LinkRank next(comm, devices_);
      ASSERT_OK_AND_ASSIGN(const auto another, next.Make());
      EXPECT_OK(next.Go(*another));
      EXPECT_TRUE(next.Came());
      EXPECT_EQ(TheFakeCuda().contexts_on_stack(), 0);
    });
  }

  const int set_ = setenv("FAKE_CUDA_DEVICES", "3", 1);  // Before devices are opened.
  NcclShim shim_;
  FakeCudaDevices devices_;
};

TEST_F(CudaLinkTest, RanksExchangeDeviceMemory) {
  const FakeCuda::Counts before = [&] {
    for (int i = 0; i < kLinkRanks; ++i) EXPECT_OK(OpenDevice(DeviceOf(i)));
    return TheFakeCuda().counts();
  }();
  OnRanks([&](Communicator& comm) {
    LinkRank rank(comm, devices_);
    ASSERT_OK_AND_ASSIGN(const auto transport, rank.Make());
    EXPECT_EQ(transport->kind(), "nccl");
    for (int turn = 0; turn < 2; ++turn) {
      EXPECT_OK(rank.Go(*transport));
      EXPECT_TRUE(rank.Came()) << comm.rank();
      EXPECT_OK(transport->Release(LinkPatience()));
    }
  });
  EXPECT_STREQ(shim_.misuse(), "");
  EXPECT_EQ(shim_.live(), 0);
  const FakeCuda::Counts after = TheFakeCuda().counts();
  EXPECT_EQ(after.streams, before.streams);
  EXPECT_EQ(after.events, before.events);
  EXPECT_LE(after.allocations, before.allocations);
  // Nothing went by the host.
  EXPECT_EQ(after.crossed_bytes, before.crossed_bytes);
}

// A thread of the program whose current device is another one keeps it, and its capture mode.
TEST_F(CudaLinkTest, CurrentDeviceIsUnchanged) {
  OnRanks([&](Communicator& comm) {
    const int other = (comm.rank() + 1) % comm.size();
    const auto ops = devices_.cuda().Open(DeviceOf(other)).value();
    LinkRank rank(comm, devices_);
    const gpu::CudaScope program(*static_cast<gpu::CudaDevice&>(*ops).context());
    const int mode = TheFakeCuda().capture_mode();
    const auto stays = [&] {
      EXPECT_EQ(TheFakeCuda().current_device(), other);
      EXPECT_EQ(TheFakeCuda().contexts_on_stack(), 1);
      EXPECT_EQ(TheFakeCuda().capture_mode(), mode);
    };
    ASSERT_OK_AND_ASSIGN(auto transport, rank.Make());
    stays();
    EXPECT_OK(rank.Go(*transport));
    EXPECT_TRUE(rank.Came());
    stays();
    EXPECT_OK(transport->Release(LinkPatience()));
    EXPECT_OK(rank.Go(*transport));
    transport.reset();
    stays();
  });
  EXPECT_STREQ(shim_.misuse(), "");
}

TEST_F(CudaLinkTest, ErrorNamesTheDeviceSharedByTwoRanks) {
  OnRanks([&](Communicator& comm) {
    const auto made =
        MakeDeviceTransport(comm, kPatient, OpenDeviceLink(DeviceOf(comm.rank() == 0 ? 1 : 0)));
    EXPECT_THAT(made, HasCode(Code::kUnsupported));
    EXPECT_THAT(made,
                HasMessage("NCCL 2.32.3 allows one rank per device: ranks 1 and 2 are both on "
                           "GPU-abababab-abab-abab-abab-ababababab00"));
  });
  EXPECT_EQ(shim_.calls("ncclCommInitRankConfig"), 0);
}

TEST_F(CudaLinkTest, MissingCapabilityOfARankIsReportedOnAll) {
  FakeCudaDevices without(LinkOptions("/no/such/libnccl.so.2"));
  struct Lack {
    std::function<Result<std::unique_ptr<DeviceLink>>()> open;
    Code code;
    const char* words;
  };
  const std::vector<Lack> lacks = {
      {[] { return OpenDeviceLink(DeviceOf(7)); }, Code::kUnavailable, "cuda:7: find the device"},
      {[] { return OpenDeviceLink(DeviceOf(2)); }, Code::kUnavailable, "/no/such/libnccl.so.2"},
      {[] { return Status(Code::kUnsupported, "no support for CUDA"); }, Code::kUnsupported,
       "no support for CUDA"}};
  for (const Lack& lack : lacks) {
    OnRanks([&](Communicator& comm) {
      Result<std::unique_ptr<DeviceLink>> link =
          comm.rank() == 2 ? lack.open()
                           : devices_.cuda().Open(DeviceOf(comm.rank())).value()->OpenLink();
      EXPECT_EQ(link.ok(), comm.rank() != 2);
      const auto made = MakeDeviceTransport(comm, kPatient, std::move(link));
      EXPECT_THAT(made, HasCode(lack.code));
      EXPECT_THAT(made, HasMessage(lack.words));
      if (comm.rank() != 2) {
        EXPECT_THAT(made, HasMessage("rank 2: "));
      }
    });
  }
  EXPECT_EQ(shim_.live(), 0);
}

TEST_F(CudaLinkTest, StreamCreationFailureIsReportedOnAll) {
  // Before: a device makes streams for itself.
  for (int i = 0; i < kLinkRanks; ++i) ASSERT_OK(OpenDevice(DeviceOf(i)));
  TheFakeCuda().set_fault([](std::string_view what) {
    return what == "cuStreamCreateWithPriority" && TheFakeCuda().current_device() == 1
               ? gpu::cuda::kOutOfMemory
               : gpu::cuda::kSuccess;
  });
  OnRanks([&](Communicator& comm) {
    if (comm.rank() == 1) {
      EXPECT_THAT(OpenDeviceLink(DeviceOf(1)), HasMessage("CUDA_ERROR_OUT_OF_MEMORY"));
    }
    const auto made = MakeDeviceTransport(comm, kPatient, OpenDeviceLink(DeviceOf(comm.rank())));
    EXPECT_THAT(made, HasCode(Code::kResourceExhausted));
    EXPECT_THAT(made, HasMessage("cuda:1 (Fake H100): create a stream: CUDA_ERROR_OUT_OF_MEMORY"));
  });
}

TEST_F(CudaLinkTest, DriverErrorIsReportedOnAll) {
  for (const char* function : {"cuEventCreate", "cuEventRecord", "cuEventQuery"}) {
    ExpectFailure(
        [&] {
          TheFakeCuda().set_fault([function](std::string_view what) {
            return what == function && TheFakeCuda().current_device() == 1
                       ? gpu::cuda::kEccUncorrectable
                       : gpu::cuda::kSuccess;
          });
        },
        [&](int rank, const Status& status) {
          EXPECT_THAT(status, HasCode(Code::kUnavailable)) << function;
          EXPECT_THAT(status, HasMessage("CUDA_ERROR_ECC_UNCORRECTABLE"));
          EXPECT_THAT(status, HasMessage("cuda:1 (Fake H100)"));
          if (rank != 1) {
            EXPECT_THAT(status, HasMessage("rank 1: "));
          }
        },
        [](int rank, BulkTransport& transport) {
          // What a device does whose errors are all that it says, is not known.
          EXPECT_EQ(transport.Settle(LinkPatience()).ok(), rank != 1);
        });
    EXPECT_STREQ(shim_.misuse(), "");
    EXPECT_EQ(shim_.live(), 0);
  }
}

// An error that comes with somebody's work: an exchange is ours while it is under way, no longer.
TEST_F(CudaLinkTest, ErrorSaysWhetherItsWorkWasOurs) {
  ExpectFailure(
      [&] {
        TheFakeCuda().break_context(1, gpu::cuda::kIllegalAddress);
        EXPECT_THAT(devices_.cuda().Open(DeviceOf(1)).value()->MakeQueue({}),
                    HasMessage("tensormount had no work under way"));
        TheFakeCuda().break_context(1, gpu::cuda::kSuccess);
        TheFakeCuda().set_fault([](std::string_view what) {
          return what == "cuEventQuery" && TheFakeCuda().current_device() == 1
                     ? gpu::cuda::kIllegalAddress
                     : gpu::cuda::kSuccess;
        });
      },
      [](int /*rank*/, const Status& status) {
        EXPECT_THAT(status,
                    HasMessage("work of this program or of tensormount failed on the device"));
      },
      [](int rank, BulkTransport& transport) {
        EXPECT_EQ(transport.Settle(LinkPatience()).ok(), rank != 1);
      });
}

TEST_F(CudaLinkTest, ResetDeviceIsReportedOnAllAndReopened) {
  ExpectFailure([] { TheFakeCuda().reset(1); },
                [](int rank, const Status& status) {
                  EXPECT_THAT(status, HasCode(Code::kUnavailable));
                  EXPECT_THAT(status, HasMessage("cuda:1 (Fake H100)"));
                  EXPECT_THAT(status, HasMessage("the device was reset"));
                  if (rank != 1) {
                    EXPECT_THAT(status, HasMessage("rank 1: "));
                  }
                },
                [](int rank, BulkTransport& transport) {
                  const Status settled = transport.Settle(LinkPatience());
                  EXPECT_EQ(settled.ok(), rank != 1) << settled.message();
                });
  EXPECT_EQ(shim_.live(), 0);
}

// What NCCL hangs in ends with its communicator.
TEST_F(CudaLinkTest, HungTransferIsReportedAtTheDeadline) {
  ExpectFailure(
      [&] { shim_.Fault("ncclRecv", 1, 3, kNcclShimHang); },
      [](int rank, const Status& status) {
        EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded));
        EXPECT_THAT(status, HasMessage(rank == 1 ? "nccl: unit 0 (10000 bytes)"
                                                 : "rank 1: nccl: unit 0 (10000 bytes)"));
      },
      [](int /*rank*/, BulkTransport& transport) { EXPECT_OK(transport.Settle(LinkPatience())); },
      milliseconds(200));
  EXPECT_STREQ(shim_.misuse(), "");
  EXPECT_EQ(shim_.live(), 0);
}

// A stream that does not move on, whatever NCCL says, keeps the memory, and nobody's time.
TEST_F(CudaLinkTest, HungStreamIsReportedAtTheDeadline) {
  ExpectFailure(
      [] {
        TheFakeCuda().set_fault([](std::string_view what) {
          return what == "cuEventQuery" && TheFakeCuda().current_device() == 1
                     ? gpu::cuda::kNotReady
                     : gpu::cuda::kSuccess;
        });
      },
      [](int rank, const Status& status) {
        EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded));
        EXPECT_THAT(status, HasMessage(rank == 1 ? "nccl: unit 0 (10000 bytes)"
                                                 : "rank 1: nccl: unit 0 (10000 bytes)"));
      },
      [](int rank, BulkTransport& transport) {
        if (rank != 1) {
          EXPECT_OK(transport.Settle(LinkPatience()));
          return;
        }
        const Status settled = transport.Settle(Deadline::After(milliseconds(20)));
        EXPECT_THAT(settled, HasCode(Code::kDeadlineExceeded));
        EXPECT_THAT(settled, HasMessage("may still write to the memory"));
        TheFakeCuda().set_fault({});
        EXPECT_OK(transport.Settle(LinkPatience()));
      },
      milliseconds(200));
  EXPECT_STREQ(shim_.misuse(), "");
  EXPECT_EQ(shim_.live(), 0);
}

}  // namespace
}  // namespace tensormount
