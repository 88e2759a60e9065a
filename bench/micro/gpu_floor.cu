// SPDX-License-Identifier: Apache-2.0
// What hashing on a device cannot be faster than: reading the same bytes once.
#include <cstdint>

extern "C" __global__ void __launch_bounds__(256)
    floor_read(const uint4* data, std::uint64_t words, std::uint32_t* out) {
  const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
  std::uint32_t sum = 0;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words;
       i += threads) {
    const uint4 word = data[i];
    sum ^= word.x ^ word.y ^ word.z ^ word.w;
  }
  // So that it is not left out; hardly ever true.
  if (sum == 0x12345678) *out = sum;
}
