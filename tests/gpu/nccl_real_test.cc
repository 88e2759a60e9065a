// SPDX-License-Identifier: Apache-2.0
// NCCL itself, by the module as it is installed: where there is a GPU, or where a ctest puts the
// driver of the tests and the shim in their places. TENSORMOUNT_NCCL says where a NCCL is that the
// loader does not find (that of torch's wheel).
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/at_exit.h"
#include "collective/comm/bulk_transport.h"
#include "device/devices.h"
#include "device/pinned_ring.h"
#include "gpu/cuda_driver.h"
#include "gpu/nccl_link.h"
#include "tests/collective/collective_cases.h"
#include "tests/support/require.h"
#include "tests/support/status_matchers.h"

namespace tensormount::gpu {
namespace {

constexpr std::chrono::seconds kRealPatience{60};

// Where there is NCCL and no GPU, its own words are the failure, and nothing hangs or crashes.
TEST(RealNcclTest, MissingGpuIsReportedWithNcclsError) {
  const auto library = NcclLibrary::Open();
  if (!library.ok()) TENSORMOUNT_SKIP_UNLESS_REQUIRED("nccl", library.status().message());
  if (OpenDriver().ok()) GTEST_SKIP() << "this machine has a GPU";
  class NoStream final : public NcclStream {
   public:
    void* handle() const override { return nullptr; }
    std::string device() const override { return {}; }
    Status RunOnDevice(const std::function<Status()>& calls) override { return calls(); }
    Status Mark() override { return {}; }
    Result<bool> Done() override { return true; }
  };
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) {
    const auto made = MakeDeviceTransport(
        comm, kPatient, MakeNcclLink(library.value(), std::make_shared<NoStream>()));
    EXPECT_THAT(made, HasCode(Code::kUnavailable));
    EXPECT_THAT(made, HasMessage("ncclCommInitRankConfig: "));
    return Status();
  }));
}

Status CopyAndWait(DeviceQueue& queue, std::byte* from, std::byte* to, std::size_t bytes, bool in) {
  StridedCopy whole;
  whole.run = bytes;
  const DeviceCopy copy{whole, from, to};
  TENSORMOUNT_RETURN_IF_ERROR(in ? queue.CopyIn({&copy, 1}) : queue.CopyOut({&copy, 1}));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto mark, queue.Mark());
  return AwaitMark(*mark, Deadline::After(kRealPatience));
}

// One rank, since NCCL takes one a GPU: its init, a group of a send and a receive, memory given
// back, its end.
TEST(RealNcclTest, SingleRankExchangesWithItself) {
  constexpr Device kDevice{DeviceKind::kCuda, 0};
  auto link = OpenDeviceLink(kDevice);
  if (!link.ok()) TENSORMOUNT_SKIP_UNLESS_REQUIRED("nccl", link.status().message());
  EXPECT_THAT(link.value()->version(), testing::StartsWith("NCCL 2."));
  EXPECT_THAT(link.value()->device(), testing::StartsWith("GPU-"));
  const auto ops = OpenDevice(kDevice).value()->ops;
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    constexpr std::size_t kBytes = 3'000'001;
    TENSORMOUNT_ASSIGN_OR_RETURN(std::byte* const host, ops->AllocatePinned(2 * kBytes));
    const AtExit free_host([&] { ops->FreePinned(host); });
    TENSORMOUNT_ASSIGN_OR_RETURN(std::byte* const data, ops->Allocate(2 * kBytes));
    const AtExit free_data([&] { ops->Free(data); });
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto queue, ops->MakeQueue({}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto transport,
                                 MakeDeviceTransport(comm, kPatient, std::move(link)));
    EXPECT_EQ(transport->kind(), "nccl");
    TENSORMOUNT_RETURN_IF_ERROR(transport->Register({data, 2 * kBytes, kDevice}));
    for (std::size_t turn = 1; turn <= 3; ++turn) {
      for (std::size_t i = 0; i < kBytes; ++i) {
        host[i] = static_cast<std::byte>(i * 7 + turn + (i >> 9));
      }
      TENSORMOUNT_RETURN_IF_ERROR(CopyAndWait(*queue, host, data, kBytes, true));
      TENSORMOUNT_RETURN_IF_ERROR(transport->Begin({{0, 0, kBytes}}));
      const BulkBlock block{0, data, data + kBytes};
      TENSORMOUNT_RETURN_IF_ERROR(transport->Put({&block, 1}));
      TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(Deadline::After(kRealPatience)));
      TENSORMOUNT_RETURN_IF_ERROR(CopyAndWait(*queue, data + kBytes, host + kBytes, kBytes, false));
      EXPECT_EQ(std::memcmp(host, host + kBytes, kBytes), 0) << turn;
      TENSORMOUNT_RETURN_IF_ERROR(transport->Release(Deadline::After(kRealPatience)));
    }
    return {};
  }));
}

}  // namespace
}  // namespace tensormount::gpu
