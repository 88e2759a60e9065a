// SPDX-License-Identifier: Apache-2.0
// Counts values by integer operations on their bits. A first pass over a small block finds the
// smallest and the largest magnitude, three instructions for each vector; only blocks with a zero
// or a value that is not finite are counted value by value.
#include "shard/value_counts.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <concepts>
#include <cstring>
#include <limits>
#include <type_traits>

#include "shard/element_values.h"
#include "shard/float_format.h"

#if defined(__x86_64__)
#define TENSORMOUNT_COUNT_AVX2 __attribute__((target("avx2")))
#endif
#define TENSORMOUNT_COUNT_INLINE __attribute__((always_inline)) inline

namespace tensormount {
namespace {

// Bytes of a block: it stays in the first-level cache between the passes.
constexpr std::size_t kCountBlockBytes = 4096;

// Each kind below gives the magnitude of a value, in an order in which larger means larger, and the
// smallest magnitude that is not finite.

template <typename Bits, FloatFormat F>
struct FloatKind {
  using Value = Bits;
  // The bits without the sign, which a shift drops: one instruction on vectors of every width.
  template <typename V>
  TENSORMOUNT_COUNT_INLINE static void Magnitudes(const V& x, V& magnitudes) {
    magnitudes = x + x;
  }
  static constexpr std::uint64_t Stored(Bits magnitude) { return magnitude >> 1; }
  static constexpr bool kMinusZeroIsNan = F.specials == FloatFormat::Specials::kNanMinusZero;
  static constexpr bool kHasInfinity = F.has_infinity();
  static constexpr bool kHasSpecial = F.specials != FloatFormat::Specials::kNanMinusZero;
  static constexpr Bits kSpecial =
      static_cast<Bits>((kHasInfinity ? F.exponent_mask() << F.fraction_bits
                                      : (F.exponent_mask() << F.fraction_bits) | F.fraction_mask())
                        << 1);
};

template <std::integral Int>
struct IntegerKind {
  using Value = std::make_unsigned_t<Int>;
  template <typename V>
  TENSORMOUNT_COUNT_INLINE static void Magnitudes(const V& x, V& magnitudes) {
    if constexpr (std::is_signed_v<Int>) {
      const V sign = V{} - (x >> (8 * sizeof(Value) - 1));
      magnitudes = (x ^ sign) - sign;
    } else {
      magnitudes = x;
    }
  }
  static constexpr std::uint64_t Stored(Value magnitude) { return magnitude; }
  static constexpr bool kMinusZeroIsNan = false;
  static constexpr bool kHasInfinity = false;
  static constexpr bool kHasSpecial = false;
  static constexpr Value kSpecial = 0;
};

// Powers of two: no zero and no sign; all ones are NaN.
struct ScaleKind : IntegerKind<std::uint8_t> {
  static constexpr bool kHasSpecial = true;
  static constexpr std::uint8_t kSpecial = 0xff;
};
template <typename Kind>
inline constexpr bool kHasZero = !std::is_same_v<Kind, ScaleKind>;

// Vectors of 32 bytes, which the compiler maps to whatever the CPU has. An operation on two of them
// is one on each lane; a comparison gives lanes of all ones or of zero.
template <typename T>
using Vector [[gnu::vector_size(32)]] = T;
template <typename T>
inline constexpr std::size_t kLanes = 32 / sizeof(T);

template <typename T>
TENSORMOUNT_COUNT_INLINE void LoadLanes(const std::byte* data, Vector<T>& out) {
  std::memcpy(&out, data, sizeof(out));
}
template <typename T>
TENSORMOUNT_COUNT_INLINE T LargestLane(const Vector<T>& lanes) {
  T largest = 0;
  for (std::size_t i = 0; i < kLanes<T>; ++i) largest = std::max<T>(largest, lanes[i]);
  return largest;
}
// The sum of lanes that were counted down by one for each match.
template <typename T>
TENSORMOUNT_COUNT_INLINE std::uint64_t SumOfLanes(const Vector<T>& lanes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kLanes<T>; ++i) sum += lanes[i];
  return sum;
}

// Counts value by value in `vectors` vectors, at most 255, so that no lane of 8 bits overflows.
template <typename Kind>
TENSORMOUNT_COUNT_INLINE void CountEach(const std::byte* data, std::size_t vectors,
                                        ValueCounts& counts) {
  using T = typename Kind::Value;
  using V = Vector<T>;
  constexpr T kMinusZero = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  constexpr T kPlusInfinity = static_cast<T>(Kind::kSpecial >> 1);
  V zeros{};
  V special{};
  V posinf{};
  V neginf{};
  V minus_zeros{};
  V largest{};
  for (std::size_t i = 0; i < vectors; ++i) {
    V x;
    LoadLanes<T>(data + i * sizeof(V), x);
    V m;
    Kind::Magnitudes(x, m);
    if constexpr (kHasZero<Kind>) zeros -= (V)(m == T{0});
    if constexpr (Kind::kMinusZeroIsNan) minus_zeros -= (V)(x == kMinusZero);
    V finite = m;
    if constexpr (Kind::kHasSpecial) {
      const V is_special = (V)(m >= Kind::kSpecial);
      special -= is_special;
      finite &= ~is_special;
    }
    if constexpr (Kind::kHasInfinity) {
      posinf -= (V)(x == kPlusInfinity);
      neginf -= (V)(x == static_cast<T>(kPlusInfinity | kMinusZero));
    }
    largest = finite > largest ? finite : largest;
  }
  const std::uint64_t infinities = SumOfLanes<T>(posinf) + SumOfLanes<T>(neginf);
  counts.zeros += SumOfLanes<T>(zeros) - SumOfLanes<T>(minus_zeros);
  counts.nan += SumOfLanes<T>(special) - infinities + SumOfLanes<T>(minus_zeros);
  counts.posinf += SumOfLanes<T>(posinf);
  counts.neginf += SumOfLanes<T>(neginf);
  counts.absmax_bits = std::max(counts.absmax_bits, Kind::Stored(LargestLane<T>(largest)));
}

// What a pass over some vectors finds.
template <typename T>
struct BlockPass {
  bool any_zero = false;
  std::uint64_t zeros = 0;  // With kZeros.
  T largest = 0;            // Magnitude; also of values that are not finite.
};
// kZeros: counts the zeros, for one instruction a vector more than to see that there are none. At
// most 255 vectors.
template <typename Kind, bool kZeros>
TENSORMOUNT_COUNT_INLINE void PassBlock(const std::byte* data, std::size_t vectors,
                                        BlockPass<typename Kind::Value>& pass) {
  using T = typename Kind::Value;
  using V = Vector<T>;
  V smallest = ~V{};
  V largest{};
  V zeros{};
  for (std::size_t i = 0; i < vectors; ++i) {
    V x;
    LoadLanes<T>(data + i * sizeof(V), x);
    V m;
    Kind::Magnitudes(x, m);
    largest = m > largest ? m : largest;
    if constexpr (kZeros) {
      zeros -= (V)(m == T{0});
    } else {
      smallest = m < smallest ? m : smallest;
    }
  }
  pass.largest = LargestLane<T>(largest);
  if constexpr (kZeros) {
    pass.zeros = SumOfLanes<T>(zeros);
    pass.any_zero = pass.zeros > 0;
  } else {
    pass.any_zero = LargestLane<T>(~smallest) == static_cast<T>(~T{0});
  }
}

template <typename Kind>
TENSORMOUNT_COUNT_INLINE void CountBlocks(const std::byte* data, std::size_t values,
                                          ValueCounts& counts) {
  using T = typename Kind::Value;
  using V = Vector<T>;
  constexpr std::size_t kBlock = kCountBlockBytes / sizeof(V);
  std::size_t vectors = values / kLanes<T>;
  bool count_zeros = false;  // The block before had zeros: this one may have some, too.
  while (vectors > 0) {
    const std::size_t n = std::min(vectors, kBlock);
    BlockPass<T> pass;
    if (count_zeros) {
      PassBlock<Kind, true>(data, n, pass);
    } else {
      PassBlock<Kind, false>(data, n, pass);
    }
    const bool special = Kind::kHasSpecial && pass.largest >= Kind::kSpecial;
    // The zeros of a type whose minus zero is NaN are counted one by one, too.
    const bool each = special || (Kind::kMinusZeroIsNan && pass.any_zero);
    if (each) {
      CountEach<Kind>(data, n, counts);
    } else {
      if (kHasZero<Kind> && pass.any_zero && !count_zeros) PassBlock<Kind, true>(data, n, pass);
      if (kHasZero<Kind>) counts.zeros += pass.zeros;
      counts.absmax_bits = std::max(counts.absmax_bits, Kind::Stored(pass.largest));
    }
    count_zeros = kHasZero<Kind> && pass.any_zero;
    data += n * sizeof(V);
    vectors -= n;
  }
  // The values after the last whole vector. Values that do not exist get the smallest magnitude
  // that is neither zero nor special.
  if (const std::size_t left = values % kLanes<T>; left > 0) {
    std::array<T, kLanes<T>> padded;
    padded.fill(kHasZero<Kind> ? T{1} : T{0});
    std::memcpy(padded.data(), data, left * sizeof(T));
    ValueCounts last;
    CountEach<Kind>(reinterpret_cast<const std::byte*>(padded.data()), 1, last);
    const bool only_padding = last.zeros + last.nonfinite() == left;
    if (only_padding) last.absmax_bits = 0;
    counts.Add(last);
  }
}

// Two values of four bits in each byte. The lower three bits are the magnitude; there are neither
// NaN nor infinities.
TENSORMOUNT_COUNT_INLINE void CountHalfBytes(const std::byte* data, std::size_t bytes,
                                             ValueCounts& counts) {
  using V = Vector<std::uint8_t>;
  // Of at most 255 vectors, so that no lane overflows.
  const auto count = [&counts](const std::byte* from, std::size_t vectors) {
    V low_zeros{};
    V high_zeros{};
    V largest{};
    for (std::size_t i = 0; i < vectors; ++i) {
      V x;
      LoadLanes<std::uint8_t>(from + i * sizeof(V), x);
      const V low = x & std::uint8_t{7};
      const V high = (x >> 4) & std::uint8_t{7};
      low_zeros -= (V)(low == std::uint8_t{0});
      high_zeros -= (V)(high == std::uint8_t{0});
      largest = low > largest ? low : largest;
      largest = high > largest ? high : largest;
    }
    counts.zeros += SumOfLanes<std::uint8_t>(low_zeros) + SumOfLanes<std::uint8_t>(high_zeros);
    const std::uint64_t most = LargestLane<std::uint8_t>(largest);
    counts.absmax_bits = std::max(counts.absmax_bits, most);
  };
  for (; bytes >= sizeof(V);) {
    const std::size_t n = std::min(bytes, kCountBlockBytes) / sizeof(V);
    count(data, n);
    data += n * sizeof(V);
    bytes -= n * sizeof(V);
  }
  if (bytes > 0) {
    std::array<std::byte, sizeof(V)> padded{};
    std::memcpy(padded.data(), data, bytes);
    count(padded.data(), 1);
    counts.zeros -= 2 * (sizeof(V) - bytes);  // The padding.
  }
}

template <typename Kind>
void CountPortable(const std::byte* data, std::size_t values, ValueCounts& counts) {
  CountBlocks<Kind>(data, values, counts);
}
void CountHalvesPortable(const std::byte* data, std::size_t values, ValueCounts& counts) {
  CountHalfBytes(data, values, counts);
}
#if defined(TENSORMOUNT_COUNT_AVX2)
template <typename Kind>
TENSORMOUNT_COUNT_AVX2 void CountAvx2(const std::byte* data, std::size_t values,
                                      ValueCounts& counts) {
  CountBlocks<Kind>(data, values, counts);
}
TENSORMOUNT_COUNT_AVX2 void CountHalvesAvx2(const std::byte* data, std::size_t values,
                                            ValueCounts& counts) {
  CountHalfBytes(data, values, counts);
}
bool HasAvx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0;
}
#endif

// How the values of a dtype are counted.
struct CountMethod {
  std::size_t width = 0;  // Bytes of a value; 0: the values cannot be counted.
  void (*count)(const std::byte*, std::size_t, ValueCounts&) = nullptr;
};

template <typename Kind>
CountMethod MethodFor() {
#if defined(TENSORMOUNT_COUNT_AVX2)
  static const bool avx2 = HasAvx2();
  if (avx2) return {sizeof(typename Kind::Value), &CountAvx2<Kind>};
#endif
  return {sizeof(typename Kind::Value), &CountPortable<Kind>};
}

CountMethod MethodForHalves() {
#if defined(TENSORMOUNT_COUNT_AVX2)
  if (HasAvx2()) return {1, &CountHalvesAvx2};
#endif
  return {1, &CountHalvesPortable};
}

CountMethod MethodOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return MethodFor<IntegerKind<std::uint8_t>>();
    case DType::kI8:
      return MethodFor<IntegerKind<std::int8_t>>();
    case DType::kI16:
      return MethodFor<IntegerKind<std::int16_t>>();
    case DType::kU16:
      return MethodFor<IntegerKind<std::uint16_t>>();
    case DType::kI32:
      return MethodFor<IntegerKind<std::int32_t>>();
    case DType::kU32:
      return MethodFor<IntegerKind<std::uint32_t>>();
    case DType::kI64:
      return MethodFor<IntegerKind<std::int64_t>>();
    case DType::kU64:
      return MethodFor<IntegerKind<std::uint64_t>>();
    case DType::kF16:
      return MethodFor<FloatKind<std::uint16_t, kF16Format>>();
    case DType::kBF16:
      return MethodFor<FloatKind<std::uint16_t, kBF16Format>>();
    case DType::kF32:
    case DType::kC64:
      return MethodFor<FloatKind<std::uint32_t, kF32Format>>();
    case DType::kF64:
    case DType::kC128:
      return MethodFor<FloatKind<std::uint64_t, kF64Format>>();
    case DType::kF8E4M3:
      return MethodFor<FloatKind<std::uint8_t, kF8E4M3Format>>();
    case DType::kF8E5M2:
      return MethodFor<FloatKind<std::uint8_t, kF8E5M2Format>>();
    case DType::kF8E4M3FNUZ:
      return MethodFor<FloatKind<std::uint8_t, kF8E4M3FNUZFormat>>();
    case DType::kF8E5M2FNUZ:
      return MethodFor<FloatKind<std::uint8_t, kF8E5M2FNUZFormat>>();
    case DType::kF8E8M0:
      return MethodFor<ScaleKind>();
    case DType::kF4:
      return MethodForHalves();
    case DType::kF6E2M3:
    case DType::kF6E3M2:
      break;
  }
  return {};
}

// Bit 63 of a row's first number: two hashes with the other counts follow. All ones: not known. The
// number of zeros is below 2^63, because a tensor has fewer elements.
constexpr std::uint64_t kLongRow = std::uint64_t{1} << 63;
constexpr std::uint64_t kNotKnown = ~std::uint64_t{0};

}  // namespace

void ValueCounts::Add(const ValueCounts& o) {
  zeros += o.zeros;
  nan += o.nan;
  posinf += o.posinf;
  neginf += o.neginf;
  absmax_bits = std::max(absmax_bits, o.absmax_bits);
}

bool CanCount(DType dtype) { return MethodOf(dtype).width != 0; }

std::uint64_t ValuesIn(DType dtype, std::uint64_t elements) {
  return NumberKindOf(dtype) == NumberKind::kComplex ? 2 * elements : elements;
}

std::string DescribeNonfinite(const ValueCounts& counts) {
  const std::uint64_t infinities = counts.posinf + counts.neginf;
  std::string text;
  if (counts.nan > 0) text = std::to_string(counts.nan) + " NaN";
  if (counts.nan > 0 && infinities > 0) text += " and ";
  if (infinities > 0) text += std::to_string(infinities) + " infinite";
  return text;
}

double AbsmaxOf(DType dtype, std::uint64_t bits) {
  if (dtype == DType::kF4) {
    // 0, 1/2, 1, 3/2, 2, 3, 4, 6.
    constexpr std::array<double, 8> kValues = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return kValues[bits & 7];
  }
  switch (NumberKindOf(dtype)) {
    case NumberKind::kInteger:
    case NumberKind::kUnsigned:
    case NumberKind::kNone:
      return static_cast<double>(bits);
    case NumberKind::kReal:
    case NumberKind::kComplex:
      break;
  }
  const DType part = dtype == DType::kC64    ? DType::kF32
                     : dtype == DType::kC128 ? DType::kF64
                                             : dtype;
  std::array<std::byte, sizeof(bits)> element;
  std::memcpy(element.data(), &bits, sizeof(bits));
  double value = 0;
  DecodeNumbers(part, element.data(), 1, &value);
  return value;
}

std::string AbsmaxText(DType dtype, std::uint64_t values, const ValueCounts& counts) {
  if (values == counts.nonfinite()) return {};
  const NumberKind kind = NumberKindOf(dtype);
  if (kind == NumberKind::kInteger || kind == NumberKind::kUnsigned) {
    return std::to_string(counts.absmax_bits);
  }
  const double value = AbsmaxOf(dtype, counts.absmax_bits);
  const bool wide = dtype == DType::kF64 || dtype == DType::kC128;
  std::array<char, 32> text;
  char* const end = text.data() + text.size();
  const auto done = wide ? std::to_chars(text.data(), end, value)
                         : std::to_chars(text.data(), end, static_cast<float>(value));
  return std::string(text.data(), done.ptr);
}

ValueCounter::ValueCounter(DType dtype) {
  const CountMethod method = MethodOf(dtype);
  count_ = method.count;
  width_ = method.width;
}

void ValueCounter::Update(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  if (rest_size_ > 0) {
    const std::size_t n = std::min(size, width_ - rest_size_);
    std::memcpy(rest_.data() + rest_size_, bytes, n);
    rest_size_ += n;
    bytes += n;
    size -= n;
    if (rest_size_ < width_) return;
    count_(rest_.data(), 1, counts_);
    rest_size_ = 0;
  }
  const std::size_t whole = size / width_;
  if (whole > 0) count_(bytes, whole, counts_);
  rest_size_ = size - whole * width_;
  if (rest_size_ > 0) std::memcpy(rest_.data(), bytes + whole * width_, rest_size_);
}

ValueCounts ValueCounter::Take() {
  const ValueCounts counts = counts_;
  counts_ = {};
  rest_size_ = 0;
  return counts;
}

void AppendCountsRow(const std::optional<ValueCounts>& counts, std::vector<Hash128>& out) {
  if (!counts) {
    out.push_back({kNotKnown, 0});
    return;
  }
  if (counts->nonfinite() == 0) {
    out.push_back({counts->zeros, counts->absmax_bits});
    return;
  }
  out.push_back({counts->zeros | kLongRow, counts->absmax_bits});
  out.push_back({counts->nan, counts->posinf});
  out.push_back({counts->neginf, 0});
}

std::optional<CountsRow> DecodeCountsRow(std::span<const Hash128> hashes) {
  if (hashes.empty()) return std::nullopt;
  const Hash128& first = hashes[0];
  if (first.low == kNotKnown) {
    if (first.high != 0) return std::nullopt;
    return CountsRow{std::nullopt, 1};
  }
  CountsRow row{ValueCounts{.zeros = first.low & ~kLongRow, .absmax_bits = first.high}, 1};
  if ((first.low & kLongRow) == 0) return row;
  if (hashes.size() < 3 || hashes[2].high != 0) return std::nullopt;
  row.hashes = 3;
  row.counts->nan = hashes[1].low;
  row.counts->posinf = hashes[1].high;
  row.counts->neginf = hashes[2].low;
  return row;
}

}  // namespace tensormount
