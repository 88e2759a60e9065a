// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gpu/nccl_transport.h"
#include "tests/collective/collective_cases.h"
#include "tests/support/require.h"
#include "tests/support/status_matchers.h"

namespace tensormount::gpu {
namespace {

// The few calls of the CUDA driver that these tests make, found at run time.
struct DriverCalls {
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*context_retain)(void**, int) = nullptr;
  int (*context_set)(void*) = nullptr;
  int (*stream_create)(void**, unsigned) = nullptr;
  int (*event_create)(void**, unsigned) = nullptr;
  int (*event_record)(void*, void*) = nullptr;
  int (*event_query)(void*) = nullptr;
  int (*allocate)(unsigned long long*, std::size_t) = nullptr;
  int (*copy_in)(unsigned long long, const void*, std::size_t) = nullptr;
  int (*copy_out)(void*, unsigned long long, std::size_t) = nullptr;
  int (*free)(unsigned long long) = nullptr;
};
constexpr int kCudaNotReady = 600;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaEventNoTiming = 2;

Status FromDriver(int result, const char* what) {
  if (result == 0) return {};
  return {Code::kUnavailable, std::string(what) + ": error " + std::to_string(result)};
}

// A stream of the first GPU, for as long as the process lives.
class DriverStream final : public NcclStream {
 public:
  static Result<std::shared_ptr<DriverStream>> Make() {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return Status(Code::kUnavailable, "no GPU here: no libcuda.so.1");
    auto stream = std::make_shared<DriverStream>();
    DriverCalls& calls = stream->calls_;
    bool found = true;
    const auto find = [&](const char* name, auto*& call) {
      call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(::dlsym(library, name));
      found = found && call != nullptr;
    };
    find("cuInit", calls.init);
    find("cuDeviceGet", calls.device_get);
    find("cuDevicePrimaryCtxRetain", calls.context_retain);
    find("cuCtxSetCurrent", calls.context_set);
    find("cuStreamCreate", calls.stream_create);
    find("cuEventCreate", calls.event_create);
    find("cuEventRecord", calls.event_record);
    find("cuEventQuery", calls.event_query);
    find("cuMemAlloc_v2", calls.allocate);
    find("cuMemcpyHtoD_v2", calls.copy_in);
    find("cuMemcpyDtoH_v2", calls.copy_out);
    find("cuMemFree_v2", calls.free);
    if (!found) return Status(Code::kUnavailable, "libcuda.so.1 lacks a call");
    int device = 0;
    TENSORMOUNT_RETURN_IF_ERROR(FromDriver(calls.init(0), "no GPU here: cuInit"));
    TENSORMOUNT_RETURN_IF_ERROR(FromDriver(calls.device_get(&device, 0), "cuDeviceGet"));
    TENSORMOUNT_RETURN_IF_ERROR(
        FromDriver(calls.context_retain(&stream->context_, device), "cuDevicePrimaryCtxRetain"));
    TENSORMOUNT_RETURN_IF_ERROR(stream->Enter());
    TENSORMOUNT_RETURN_IF_ERROR(FromDriver(
        calls.stream_create(&stream->stream_, kCudaStreamNonBlocking), "cuStreamCreate"));
    TENSORMOUNT_RETURN_IF_ERROR(
        FromDriver(calls.event_create(&stream->event_, kCudaEventNoTiming), "cuEventCreate"));
    return stream;
  }

  void* handle() const override { return stream_; }
  std::string device() const override { return {}; }
  Status Enter() override { return FromDriver(calls_.context_set(context_), "cuCtxSetCurrent"); }
  Status Mark() override {
    return FromDriver(calls_.event_record(event_, stream_), "cuEventRecord");
  }
  Result<bool> Done() override {
    const int result = calls_.event_query(event_);
    if (result == kCudaNotReady) return false;
    TENSORMOUNT_RETURN_IF_ERROR(FromDriver(result, "cuEventQuery"));
    return true;
  }
  const DriverCalls& calls() const { return calls_; }

 private:
  DriverCalls calls_;
  void* context_ = nullptr;
  void* stream_ = nullptr;
  void* event_ = nullptr;
};

// TENSORMOUNT_TEST_NCCL: a path, for a machine whose loader does not find it (that of torch's
// wheel).
Result<std::shared_ptr<const NcclLibrary>> OpenRealNccl() {
  const char* const path = std::getenv("TENSORMOUNT_TEST_NCCL");
  return NcclLibrary::Open(path == nullptr ? "" : path);
}

// Where there is NCCL and no GPU, its own words are the failure, and nothing hangs or crashes.
TEST(RealNcclTest, WithoutAGpuSaysSo) {
  const auto library = OpenRealNccl();
  if (!library.ok()) TENSORMOUNT_SKIP_UNLESS_REQUIRED("nccl", library.status().message());
  if (DriverStream::Make().ok()) GTEST_SKIP() << "this machine has a GPU";
  class NoStream final : public NcclStream {
   public:
    void* handle() const override { return nullptr; }
    std::string device() const override { return {}; }
    Status Enter() override { return {}; }
    Status Mark() override { return {}; }
    Result<bool> Done() override { return true; }
  };
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) {
    const auto made = MakeNcclTransport(comm, kPatient, library, std::make_shared<NoStream>());
    EXPECT_THAT(made, HasCode(Code::kUnavailable));
    EXPECT_THAT(made, HasMessage("ncclCommInitRankConfig: "));
    return Status();
  }));
}

// One rank, since NCCL takes one a GPU: its init, a group of a send and a receive, memory given
// back, its end.
TEST(RealNcclTest, OneRankExchangesWithItself) {
  const auto library = OpenRealNccl();
  if (!library.ok()) TENSORMOUNT_SKIP_UNLESS_REQUIRED("nccl", library.status().message());
  const auto made = DriverStream::Make();
  if (!made.ok()) TENSORMOUNT_SKIP_UNLESS_REQUIRED("nccl", made.status().message());
  const std::shared_ptr<DriverStream> stream = made.value();
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    constexpr std::uint64_t kBytes = 3'000'001;
    const DriverCalls& calls = stream->calls();
    TENSORMOUNT_RETURN_IF_ERROR(stream->Enter());
    unsigned long long memory = 0;
    TENSORMOUNT_RETURN_IF_ERROR(FromDriver(calls.allocate(&memory, 2 * kBytes), "cuMemAlloc"));
    auto* const data = reinterpret_cast<std::byte*>(memory);
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto transport,
                                 MakeNcclTransport(comm, kPatient, library, stream));
    TENSORMOUNT_RETURN_IF_ERROR(
        transport->Register({data, 2 * kBytes, Device{.kind = DeviceKind::kCuda}}));
    for (int turn = 1; turn <= 3; ++turn) {
      std::vector<unsigned char> out(kBytes);
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = static_cast<unsigned char>(i * 7 + static_cast<std::size_t>(turn) + (i >> 9));
      }
      TENSORMOUNT_RETURN_IF_ERROR(FromDriver(calls.copy_in(memory, out.data(), kBytes), "copy in"));
      TENSORMOUNT_RETURN_IF_ERROR(transport->Begin({{0, 0, kBytes}}));
      const BulkBlock block{0, data, data + kBytes};
      TENSORMOUNT_RETURN_IF_ERROR(transport->Put({&block, 1}));
      TENSORMOUNT_RETURN_IF_ERROR(transport->Wait(Deadline::After(std::chrono::seconds(60))));
      std::vector<unsigned char> in(kBytes);
      TENSORMOUNT_RETURN_IF_ERROR(
          FromDriver(calls.copy_out(in.data(), memory + kBytes, kBytes), "copy out"));
      EXPECT_TRUE(in == out) << turn;
      TENSORMOUNT_RETURN_IF_ERROR(transport->Release(Deadline::After(std::chrono::seconds(60))));
    }
    return FromDriver(calls.free(memory), "cuMemFree");
  }));
}

}  // namespace
}  // namespace tensormount::gpu
