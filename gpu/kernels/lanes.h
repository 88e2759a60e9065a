// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_LANES_H_
#define TENSORMOUNT_GPU_KERNELS_LANES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Abstraction of warps and blocks for kernels, so that the same templates run on a device and, lane
// by lane, on the host. Tests on the host compare them with the host's own hashes and copies, under
// sanitizers and without a device. A lane is a thread of a warp.

#if defined(__CUDACC__)
#define TENSORMOUNT_HOST_DEVICE __host__ __device__
#define TENSORMOUNT_UNROLL _Pragma("unroll")
// Prevent unrolling and inlining where they do not make kernels faster: the code would dominate the
// size of the image, which contains it once for each compute capability.
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

// The widest word that kernels load in one instruction.
struct alignas(16) Word16 {
  std::uint64_t low;
  std::uint64_t high;
};

// A warp of 32 lanes, simulated on the host. `Of<T>` has one T for each lane. Kernels compute the
// values of lanes in Map, and read them only by Get and Exchange, because on a device (DeviceWarp)
// each thread is one lane, and `Of<T>` is only its own T.
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
  // Gives each lane the value of the lane whose number is its own XOR `bits`, as
  // __shfl_xor_sync does.
  template <typename T>
  static std::array<T, kLanes> Exchange(const std::array<T, kLanes>& value, int bits) {
    std::array<T, kLanes> out{};
    for (int lane = 0; lane < kLanes; ++lane) {
      out[static_cast<std::size_t>(lane)] = value[static_cast<std::size_t>(lane ^ bits)];
    }
    return out;
  }
};

// A block of threads, simulated on the host. Kernels do the work of each thread in Each. When Each
// has returned, all threads see what the others wrote to shared memory: on a device (DeviceBlock)
// it ends with a barrier.
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

// Unaligned little-endian load. A device cannot load unaligned words, so it reads the one or two
// aligned words that contain the bytes. That is safe because device allocations begin and end at
// multiples of 8 bytes.
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
// Load from an address aligned to 16 bytes, of data that are read once: __ldcs marks them in the
// caches as the first to evict.
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
