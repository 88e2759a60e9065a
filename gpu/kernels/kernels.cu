// SPDX-License-Identifier: Apache-2.0
// The kernels (jobs.h), as the device finds them by name. Compiled alone, into an image that
// libtensormount_cuda carries.
#include "gpu/kernels/jobs.h"

using tensormount::kernels::ByteTables;
using tensormount::kernels::CopyJob;
using tensormount::kernels::CrcJob;
using tensormount::kernels::CrcTables;
using tensormount::kernels::DeviceWarp;
using tensormount::kernels::HashJob;
using tensormount::kernels::kBlockThreads;
using tensormount::kernels::kLanes;

// As much as a launch takes from compute capability 7.0 and CUDA 12.1 on.
// Source: CUDA C++ Programming Guide, kernel parameters.
static_assert(sizeof(CopyJob) <= 32'764 && sizeof(CrcJob) <= 32'764 && sizeof(HashJob) <= 32'764);

namespace {

__device__ std::uint64_t ThisThread() {
  return std::uint64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
}
__device__ std::uint64_t AllThreads() { return std::uint64_t{gridDim.x} * kBlockThreads; }

}  // namespace

extern "C" {

// Filled by the host when the image is loaded.
__device__ CrcTables tensormount_crc_tables;

__global__ void __launch_bounds__(kBlockThreads)
    tensormount_copy(const __grid_constant__ CopyJob job) {
  CopyThread(job, ThisThread(), AllThreads());
}

__global__ void __launch_bounds__(kBlockThreads)
    tensormount_hash(const __grid_constant__ HashJob job) {
  HashWarp(job, DeviceWarp(), ThisThread() / kLanes, AllThreads() / kLanes);
}

__global__ void __launch_bounds__(kBlockThreads)
    tensormount_crc(const __grid_constant__ CrcJob job) {
  // Lookups of a warp are all over the table: in shared memory they meet in banks, not in lines.
  __shared__ ByteTables bytes;
  constexpr int kWords = sizeof(ByteTables) / sizeof(std::uint64_t);
  for (int i = threadIdx.x; i < kWords; i += kBlockThreads) {
    (&bytes.of[0][0])[i] = (&tensormount_crc_tables.bytes.of[0][0])[i];
  }
  __syncthreads();
  CrcThread(job, bytes, tensormount_crc_tables, ThisThread(), AllThreads(),
            [](std::uint64_t* sum, std::uint64_t value) {
              atomicXor(reinterpret_cast<unsigned long long*>(sum),
                        static_cast<unsigned long long>(value));
            });
}

}  // extern "C"
