// SPDX-License-Identifier: Apache-2.0
// The kernels (jobs.h) under the names by which the host loads them. nvcc compiles this file into
// an image, which cuda_module.cc includes in libtensormount_cuda.so.
#include "gpu/kernels/jobs.h"

using tensormount::kernels::ByteTables;
using tensormount::kernels::CopyJob;
using tensormount::kernels::CrcJob;
using tensormount::kernels::CrcTables;
using tensormount::kernels::DeviceBlock;
using tensormount::kernels::DeviceWarp;
using tensormount::kernels::HashJob;
using tensormount::kernels::kBlockThreads;
using tensormount::kernels::kHashThreads;
using tensormount::kernels::kLanes;
using tensormount::kernels::RunJob;
using tensormount::kernels::TileJob;
using tensormount::kernels::TileMemory;

namespace {

__device__ std::uint64_t ThisThread() {
  return std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ std::uint64_t AllThreads() { return std::uint64_t{gridDim.x} * blockDim.x; }

// Number of one-warp blocks that a multiprocessor can have resident; a lower bound.
// Source: CUDA C++ Programming Guide, technical specifications per compute capability.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100))
constexpr unsigned kMostBlocks = 32;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr unsigned kMostBlocks = 24;
#else
constexpr unsigned kMostBlocks = 16;
#endif

}  // namespace

extern "C" {

// Filled by the host when the image is loaded.
__device__ CrcTables tensormount_crc_tables;

__global__ void __launch_bounds__(kBlockThreads)
    tensormount_copy(const __grid_constant__ CopyJob job) {
  CopyThread(job, ThisThread(), AllThreads());
}

__global__ void __launch_bounds__(kBlockThreads)
    tensormount_runs(const __grid_constant__ RunJob job) {
  RunWarp(job, DeviceWarp(), static_cast<std::uint32_t>(ThisThread() / kLanes),
          static_cast<std::uint32_t>(AllThreads() / kLanes));
}

__global__ void __launch_bounds__(kBlockThreads, 6)
    tensormount_tiles(const __grid_constant__ TileJob job) {
  __shared__ TileMemory memory;
  TileBlock(job, DeviceBlock<kBlockThreads>(), memory, blockIdx.x, gridDim.x);
}

// The launch bounds limit the registers of a thread so that kMostBlocks blocks fit into a
// multiprocessor at the same time.
__global__ void __launch_bounds__(kHashThreads, kMostBlocks)
    tensormount_hash(const __grid_constant__ HashJob job) {
  HashWarp(job, DeviceWarp(), blockIdx.x, gridDim.x);
}

__global__ void __launch_bounds__(kBlockThreads)
    tensormount_crc(const __grid_constant__ CrcJob job) {
  // Copies the tables to shared memory, because the lanes of a warp look up scattered entries: in
  // global memory each look-up could touch another cache line.
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
