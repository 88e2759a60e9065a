// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_LANES_H_
#define TENSORMOUNT_GPU_KERNELS_LANES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Abstraction of warps and blocks for kernels, so that the same templates run on a device and, lane
// by lane, on the host. There tests compare them with the host's own hashes and copies under the
// sanitizers, without a device.

#if defined(__CUDACC__)
#define TENSORMOUNT_HOST_DEVICE __host__ __device__
#define TENSORMOUNT_UNROLL _Pragma("unroll")
// Prevent unrolling and inlining where they do not help: they would dominate the size of the image,
// of which there is one per kind of device.
#define TENSORMOUNT_ROLLED _Pragma("unroll 1")
#define TENSORMOUNT_OUT_OF_LINE __noinline__
#else
#define TENSORMOUNT_HOST_DEVICE
#define TENSORMOUNT_UNROLL
#define TENSORMOUNT_ROLLED
#define TENSORMOUNT_OUT_OF_LINE
#endif

namespace tensormount::kernels {

inline constexpr int kLanes = 32;

// The widest word that a device loads in one instruction.
struct alignas(16) Word16 {
  std::uint64_t low;
  std::uint64_t high;
};

// A warp: 32 lanes in lockstep. `Of<T>` is a value per lane. Kernels compute per lane in Map, and
// use the results only through Get and Exchange: on a device each thread is a lane, and `Of<T>` is
// its T.
struct HostWarp {
  template <typename T>
  using Of = std::array<T, kLanes>;

  template <typename Fn>
  auto Map(Fn fn) const -> Of<decltype(fn(0))> {
    Of<decltype(fn(0))> out{};
    for (int lane = 0; lane < kLanes; ++lane) out[static_cast<std::size_t>(lane)] = fn(lane);
    return out;
  }
  template <typename T>
  static T Get(const std::array<T, kLanes>& value, int lane) {
    return value[static_cast<std::size_t>(lane)];
  }
  // The value of the lane whose number differs in these bits (shuffle xor).
  template <typename T>
  static std::array<T, kLanes> Exchange(const std::array<T, kLanes>& value, int bits) {
    std::array<T, kLanes> out{};
    for (int lane = 0; lane < kLanes; ++lane) {
      out[static_cast<std::size_t>(lane)] = value[static_cast<std::size_t>(lane ^ bits)];
    }
    return out;
  }
};

// A block: threads with shared memory. Kernels do the work of one thread in Each, which ends with a
// barrier.
template <unsigned kCount>
struct HostBlock {
  static constexpr unsigned kThreads = kCount;
  template <typename Fn>
  void Each(Fn fn) const {
    for (unsigned thread = 0; thread < kThreads; ++thread) fn(thread);
  }
};

#if defined(__CUDACC__)
struct DeviceWarp {
  template <typename T>
  using Of = T;

  template <typename Fn>
  __device__ auto Map(Fn fn) const {
    return fn(static_cast<int>(threadIdx.x % kLanes));
  }
  template <typename T>
  __device__ static T Get(const T& value, int) {
    return value;
  }
  template <typename T>
  __device__ static T Exchange(const T& value, int bits) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, bits);
  }
};

template <unsigned kCount>
struct DeviceBlock {
  static constexpr unsigned kThreads = kCount;
  template <typename Fn>
  __device__ void Each(Fn fn) const {
    fn(threadIdx.x);
    __syncthreads();
  }
};
#endif

// Unaligned little-endian load. A device reads the aligned words that contain the bytes; this is
// safe because allocations consist of whole words.
TENSORMOUNT_HOST_DEVICE inline std::uint64_t Load64(const std::uint8_t* data) {
#if defined(__CUDA_ARCH__)
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const auto* const word = reinterpret_cast<const std::uint64_t*>(address & ~std::uintptr_t{7});
  const unsigned shift = static_cast<unsigned>(address & 7) * 8;
  if (shift == 0) return word[0];
  return (word[0] >> shift) | (word[1] << (64 - shift));
#else
  std::uint64_t value = 0;
  std::memcpy(&value, data, sizeof(value));
  return value;
#endif
}
// Unaligned load of two words.
TENSORMOUNT_HOST_DEVICE inline Word16 LoadAny(const std::uint8_t* data) {
  return {Load64(data), Load64(data + 8)};
}
// Aligned load of data that are read once (streaming cache hint).
TENSORMOUNT_HOST_DEVICE inline Word16 LoadOnce(const std::uint8_t* data) {
#if defined(__CUDA_ARCH__)
  const ulonglong2 words = __ldcs(reinterpret_cast<const ulonglong2*>(data));
  return {words.x, words.y};
#else
  return *reinterpret_cast<const Word16*>(data);
#endif
}
TENSORMOUNT_HOST_DEVICE inline std::uint32_t Load32(const std::uint8_t* data) {
  std::uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = (value << 8) | data[i];
  return value;
}

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_LANES_H_
