// SPDX-License-Identifier: Apache-2.0
// XXH3 behind an interface that does not expose the library. The library's vector code leaves the
// upper halves of AVX registers in use, which slows all SSE code until they are cleared.
#include "base/hash.h"

#if defined(__x86_64__)
#include <immintrin.h>
// Renames XXH3_128bits and its kin to forms that pick SSE2, AVX2 or AVX-512 at run time.
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <new>

namespace tensormount {
namespace {

#if defined(__x86_64__)
// Inputs up to this length take scalar paths inside XXH3.
constexpr std::size_t kScalarMax = 240;

__attribute__((target("avx"))) void ZeroUpperHalves() { _mm256_zeroupper(); }

// The library selects its code without synchronisation at the first long hash; trigger that here,
// before any thread hashes. Then determine whether its vector code may leave upper halves of
// registers in use, which would slow later SSE code.
const bool has_upper_halves = [] {
  static const char bytes[1024] = {};
  (void)XXH3_128bits(bytes, sizeof(bytes));
  (void)XXH3_64bits(bytes, sizeof(bytes));
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx") != 0;
}();

void ClearUpperHalves(std::size_t size) {
  if (size > kScalarMax && has_upper_halves) ZeroUpperHalves();
}
#else
void ClearUpperHalves(std::size_t) {}
#endif

XXH3_state_t* StateOf(void* state) { return static_cast<XXH3_state_t*>(state); }

Hash128 FromXxh(XXH128_hash_t h) { return {h.low64, h.high64}; }

}  // namespace

std::string Hash128::ToHex() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(32);
  for (const std::uint64_t half : {high, low}) {
    for (int shift = 60; shift >= 0; shift -= 4) out.push_back(kDigits[(half >> shift) & 15]);
  }
  return out;
}

Hash128 Xxh3(const void* data, std::size_t size) {
  const XXH128_hash_t h = XXH3_128bits(data, size);
  ClearUpperHalves(size);
  return FromXxh(h);
}

std::uint64_t Xxh3Low64(std::string_view s) {
  const std::uint64_t h = XXH3_64bits(s.data(), s.size());
  ClearUpperHalves(s.size());
  return h;
}

// The library allocates the state, because the state must be aligned to 64 bytes.
Xxh3Stream::Xxh3Stream()
    : state_(XXH3_createState(), [](void* state) { XXH3_freeState(StateOf(state)); }) {
  if (state_ == nullptr) throw std::bad_alloc();
  Reset();
}

void Xxh3Stream::Update(const void* data, std::size_t size) {
  if (size == 0) return;  // The library treats a null pointer as an error.
  XXH3_128bits_update(StateOf(state_.get()), data, size);
  ClearUpperHalves(kScalarMax + 1);  // Buffered data may be processed now.
}

Hash128 Xxh3Stream::Value() const { return FromXxh(XXH3_128bits_digest(StateOf(state_.get()))); }

void Xxh3Stream::Reset() { XXH3_128bits_reset(StateOf(state_.get())); }

}  // namespace tensormount
