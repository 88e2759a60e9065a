// SPDX-License-Identifier: Apache-2.0
// Statistics of values, and of changes. Values are decoded to doubles, a step at a time, and summed
// in lanes (vector_code.h). The sums of the steps are added up. So no partial sum has more than
// some hundred summands, which bounds the error.
//
// Doubles beyond 2^400, or all of them below 2^-400, have squares that overflow or vanish. A block
// of such values is measured again, with values that are multiplied by a power of two.
#include "shard/value_statistics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "shard/element_values.h"
#include "shard/float_format.h"
#include "shard/vector_code.h"

namespace tensormount {
namespace {

// Values of a step: so few that their doubles stay in the first-level cache.
constexpr std::size_t kStepValues = 512;
constexpr double kMostFinite = std::numeric_limits<double>::max();
constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::int64_t kMagnitudeBits = std::numeric_limits<std::int64_t>::max();

// The exponent of the power of two that values of this magnitude are divided by.
int ScaleExponent(double largest) {
  if (largest == 0 || (largest >= 0x1p-400 && largest <= 0x1p400)) return 0;
  // Both 2^1000 and 2^-1000 are normal doubles.
  return std::isinf(largest) ? 1000 : std::clamp(std::ilogb(largest), -1000, 1000);
}

// The smallest normal value of a float type; 0 for integers, and for f8_e8m0, which has no others.
double SmallestNormal(DType dtype) {
  const auto of = [](const FloatFormat& format) { return std::ldexp(1.0, 1 - format.bias()); };
  switch (dtype) {
    case DType::kF64:
      return of(kF64Format);
    case DType::kF32:
      return of(kF32Format);
    case DType::kBF16:
      return of(kBF16Format);
    case DType::kF16:
      return of(kF16Format);
    case DType::kF8E4M3:
      return of(kF8E4M3Format);
    case DType::kF8E5M2:
      return of(kF8E5M2Format);
    case DType::kF8E4M3FNUZ:
      return of(kF8E4M3FNUZFormat);
    case DType::kF8E5M2FNUZ:
      return of(kF8E5M2FNUZFormat);
    case DType::kF6E2M3:
      return of(kF6E2M3Format);
    case DType::kF6E3M2:
      return of(kF6E3M2Format);
    case DType::kF4:
      return of(kF4Format);
    case DType::kF8E8M0:
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
    case DType::kC64:  // ValueDType has replaced these two.
    case DType::kC128:
      break;
  }
  return 0;
}

// The doubles of a step. The positions behind the last value, up to a whole number of lanes, are
// NaN, which no sum counts.
struct StepNumbers {
  alignas(64) double values[kStepValues];

  void Decode(DType dtype, const std::byte* src, std::size_t count) {
    DecodeNumbers(dtype, src, count, values);
    Pad(count);
  }
  void Pad(std::size_t count) {
    for (std::size_t i = count; i < Padded(count); ++i) values[i] = kNoNumber;
  }
  static std::size_t Padded(std::size_t count) {
    return (count + kSumLanes - 1) / kSumLanes * kSumLanes;
  }
};

template <typename T>
void CopyLanes(const T& vector, void* lanes) {
  std::memcpy(lanes, &vector, sizeof(T));
}

struct StatisticLanes {
  double sum[kSumLanes];
  double squares[kSumLanes];
  double min[kSumLanes];
  double max[kSumLanes];
  std::int64_t finite[kSumLanes];
  std::int64_t zeros[kSumLanes];
  std::int64_t below[kSumLanes];  // Smaller than the smallest normal value.
};

// `count` is a multiple of kSumLanes. Comparisons of vectors give -1 where they hold.
template <typename L>
void SumStatistics(const double* values, std::size_t count, double smallest, double scale,
                   StatisticLanes& out) {
  using Doubles = typename L::Doubles;
  using Integers = typename L::Integers;
  for (int lane = 0; lane < kSumLanes; lane += L::kLanes) {
    Doubles sum{};
    Doubles squares{};
    Doubles min = Doubles{} + kInfinite;
    Doubles max = Doubles{} - kInfinite;
    Integers finite{};
    Integers zeros{};
    Integers below{};
    const Integers infinite = (Integers)(Doubles{} + kInfinite);
    const Integers sign = (Integers)(-Doubles{});
    for (std::size_t i = static_cast<std::size_t>(lane); i < count; i += kSumLanes) {
      Doubles value;
      std::memcpy(&value, values + i, sizeof(value));
      const Doubles size = (Doubles)((Integers)value & kMagnitudeBits);
      const Integers is_finite = size <= kMostFinite;
      const Integers kept = (Integers)value & is_finite;
      const Doubles scaled = (Doubles)kept * scale;
      sum += scaled;
      squares += scaled * scaled;
      const Doubles low = (Doubles)(kept | (infinite & ~is_finite));
      const Doubles high = (Doubles)(kept | ((infinite | sign) & ~is_finite));
      min = low < min ? low : min;
      max = high > max ? high : max;
      finite -= is_finite;
      zeros -= size == 0.0;
      below -= size < smallest;
    }
    CopyLanes(sum, out.sum + lane);
    CopyLanes(squares, out.squares + lane);
    CopyLanes(min, out.min + lane);
    CopyLanes(max, out.max + lane);
    CopyLanes(finite, out.finite + lane);
    CopyLanes(zeros, out.zeros + lane);
    CopyLanes(below, out.below + lane);
  }
}

// Exact sum, smallest and largest of 64-bit integers.
template <typename T>
void SumIntegers(const std::byte* src, std::size_t count, BlockStatistics& block) {
  T min = std::numeric_limits<T>::max();
  T max = std::numeric_limits<T>::min();
  Int128 sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, src + i * sizeof(T), sizeof(T));
    sum += value;
    min = std::min(min, value);
    max = std::max(max, value);
  }
  block.integer_sum = sum;
  block.integer_min = min;
  block.integer_max = max;
}

std::size_t BytesOf(DType dtype, std::size_t values) { return values * InfoOf(dtype).bits / 8; }

struct ChangeLanes {
  double sum_abs[kSumLanes];
  double squares[kSumLanes];
  double a_squares[kSumLanes];
  double b_squares[kSumLanes];
  double products[kSumLanes];
  double max_abs[kSumLanes];
  double max_a[kSumLanes];
  double max_b[kSumLanes];
  std::int64_t finite[kSumLanes];
  std::int64_t changed[kSumLanes];  // With other values; NaN equals NaN.
};

// What a block of doubles is multiplied by. The halves are for differences that overflow.
struct ChangeScale {
  double a = 1;
  double b = 1;
  double half = 1;
  double change = 1;
};

// `sizes`: null, or the exact magnitudes of the changes. kDoubles: the largest magnitudes of a and
// b are needed, and values may be scaled. kByValue: values that differ are counted.
template <typename L, bool kDoubles, bool kByValue>
void SumChanges(const double* a, const double* b, const double* sizes, std::size_t count,
                const ChangeScale& scale, ChangeLanes& out) {
  using Doubles = typename L::Doubles;
  using Integers = typename L::Integers;
  for (int lane = 0; lane < kSumLanes; lane += L::kLanes) {
    Doubles sum_abs{};
    Doubles squares{};
    Doubles a_squares{};
    Doubles b_squares{};
    Doubles products{};
    Doubles max_abs{};
    Doubles max_a{};
    Doubles max_b{};
    Integers finite{};
    Integers changed{};
    for (std::size_t i = static_cast<std::size_t>(lane); i < count; i += kSumLanes) {
      Doubles va;
      Doubles vb;
      std::memcpy(&va, a + i, sizeof(va));
      std::memcpy(&vb, b + i, sizeof(vb));
      const Integers is_finite = ((Doubles)((Integers)va & kMagnitudeBits) <= kMostFinite) &
                                 ((Doubles)((Integers)vb & kMagnitudeBits) <= kMostFinite);
      if (kByValue) changed -= (va != vb) & ((va == va) | (vb == vb));
      finite -= is_finite;
      Doubles xa = (Doubles)((Integers)va & is_finite);
      Doubles xb = (Doubles)((Integers)vb & is_finite);
      Doubles size;
      if (sizes != nullptr) {
        std::memcpy(&size, sizes + i, sizeof(size));
      } else {
        const Doubles change =
            kDoubles ? (xb * scale.half - xa * scale.half) * scale.change : xb - xa;
        size = (Doubles)((Integers)change & kMagnitudeBits);
      }
      if (kDoubles) {
        const Doubles size_a = (Doubles)((Integers)xa & kMagnitudeBits);
        const Doubles size_b = (Doubles)((Integers)xb & kMagnitudeBits);
        max_a = size_a > max_a ? size_a : max_a;
        max_b = size_b > max_b ? size_b : max_b;
        xa *= scale.a;
        xb *= scale.b;
      }
      sum_abs += size;
      squares += size * size;
      max_abs = size > max_abs ? size : max_abs;
      a_squares += xa * xa;
      b_squares += xb * xb;
      products += xa * xb;
    }
    CopyLanes(sum_abs, out.sum_abs + lane);
    CopyLanes(squares, out.squares + lane);
    CopyLanes(a_squares, out.a_squares + lane);
    CopyLanes(b_squares, out.b_squares + lane);
    CopyLanes(products, out.products + lane);
    CopyLanes(max_abs, out.max_abs + lane);
    CopyLanes(max_a, out.max_a + lane);
    CopyLanes(max_b, out.max_b + lane);
    CopyLanes(finite, out.finite + lane);
    CopyLanes(changed, out.changed + lane);
  }
}

// The number of elements with other bits. The counter has the type of the elements, which vector
// instructions add fastest, and holds kStepValues.
template <typename T>
std::uint64_t CountOtherBits(const std::byte* a, const std::byte* b, std::size_t count) {
  T changed = 0;
  for (std::size_t i = 0; i < count; ++i) {
    T x;
    T y;
    std::memcpy(&x, a + i * sizeof(T), sizeof(T));
    std::memcpy(&y, b + i * sizeof(T), sizeof(T));
    changed = static_cast<T>(changed + (x != y ? 1 : 0));
  }
  return changed;
}

std::uint64_t CountOtherBytes(const std::byte* a, const std::byte* b, std::size_t count) {
  std::uint64_t changed = 0;
  constexpr std::size_t kMost = 128;  // A counter of 8 bits holds it.
  for (std::size_t i = 0; i < count; i += kMost) {
    changed += CountOtherBits<std::uint8_t>(a + i, b + i, std::min(kMost, count - i));
  }
  return changed;
}

std::uint64_t CountChanged(DType dtype, const std::byte* a, const std::byte* b, std::size_t count) {
  switch (InfoOf(dtype).bits) {
    case 64:
      return CountOtherBits<std::uint64_t>(a, b, count);
    case 32:
      return CountOtherBits<std::uint32_t>(a, b, count);
    case 16:
      return CountOtherBits<std::uint16_t>(a, b, count);
    case 8:
      return CountOtherBytes(a, b, count);
    default: {
      std::uint8_t codes_a[kStepValues];
      std::uint8_t codes_b[kStepValues];
      UnpackCodes(dtype, a, count, codes_a);
      UnpackCodes(dtype, b, count, codes_b);
      return CountOtherBytes(reinterpret_cast<const std::byte*>(codes_a),
                             reinterpret_cast<const std::byte*>(codes_b), count);
    }
  }
}

// The numbers of one step of two tensors that are compared.
struct StepPair {
  StepNumbers a;
  StepNumbers b;
  StepNumbers sizes;
  std::int64_t integers_a[kStepValues];
  std::int64_t integers_b[kStepValues];

  // Exact magnitudes of the changes of integers.
  void DecodeIntegerChanges(DType type_a, const std::byte* from_a, DType type_b,
                            const std::byte* from_b, std::size_t count, BlockChange& block,
                            Int128& sum_abs) {
    DecodeIntegers(type_a, from_a, count, integers_a);
    DecodeIntegers(type_b, from_b, count, integers_b);
    const bool is_unsigned = type_a == DType::kU64;
    for (std::size_t i = 0; i < count; ++i) {
      const auto x = static_cast<std::uint64_t>(integers_a[i]);
      const auto y = static_cast<std::uint64_t>(integers_b[i]);
      const bool less = is_unsigned ? x < y : integers_a[i] < integers_b[i];
      const std::uint64_t size = less ? y - x : x - y;
      block.max_abs_integer = std::max(block.max_abs_integer, size);
      sum_abs += size;
      sizes.values[i] = static_cast<double>(size);
    }
    for (std::size_t i = count; i < StepNumbers::Padded(count); ++i) sizes.values[i] = 0;
  }
};

bool Is64BitInteger(DType dtype) { return dtype == DType::kI64 || dtype == DType::kU64; }

// Measures a block once. `scale` is that of a block of doubles.
void MeasureChangeOnce(DType type_a, const std::byte* a, DType type_b, const std::byte* b,
                       std::size_t count, const ChangeScale& scale, BlockChange& block,
                       double& max_a, double& max_b) {
  const bool same_type = type_a == type_b;
  const bool doubles = type_a == DType::kF64 || type_b == DType::kF64;
  const bool exact =
      HasIntegerChange(type_a, type_b) && (Is64BitInteger(type_a) || Is64BitInteger(type_b));
  Int128 integer_sum_abs = 0;
  StepPair step;
  ChangeLanes lanes;
  for (std::size_t done = 0; done < count; done += kStepValues) {
    const std::size_t n = std::min(kStepValues, count - done);
    const std::byte* from_a = a + BytesOf(type_a, done);
    const std::byte* from_b = b + BytesOf(type_b, done);
    step.a.Decode(type_a, from_a, n);
    step.b.Decode(type_b, from_b, n);
    if (exact) {
      step.DecodeIntegerChanges(type_a, from_a, type_b, from_b, n, block, integer_sum_abs);
    }
    WithLanes([&](auto kind) {
      using Kind = decltype(kind);
      const auto sum = [&](auto of_doubles, auto by_value) {
        SumChanges<Kind, of_doubles(), by_value()>(step.a.values, step.b.values,
                                                   exact ? step.sizes.values : nullptr,
                                                   StepNumbers::Padded(n), scale, lanes);
      };
      using Yes = std::true_type;
      using No = std::false_type;
      if (same_type) {
        doubles ? sum(Yes(), No()) : sum(No(), No());
        block.changed += CountChanged(type_a, from_a, from_b, n);
      } else {
        doubles ? sum(Yes(), Yes()) : sum(No(), Yes());
      }
    });
    block.sum_abs += AddLanes(lanes.sum_abs);
    block.squares += AddLanes(lanes.squares);
    block.a_squares += AddLanes(lanes.a_squares);
    block.b_squares += AddLanes(lanes.b_squares);
    block.products += AddLanes(lanes.products);
    for (int l = 0; l < kSumLanes; ++l) {
      block.max_abs = std::max(block.max_abs, lanes.max_abs[l]);
      max_a = std::max(max_a, lanes.max_a[l]);
      max_b = std::max(max_b, lanes.max_b[l]);
    }
    block.non_finite += n - static_cast<std::uint64_t>(AddLanes(lanes.finite));
    if (!same_type) block.changed += static_cast<std::uint64_t>(AddLanes(lanes.changed));
  }
  block.count = count;
  if (exact) {
    block.sum_abs = static_cast<double>(integer_sum_abs);
  } else if (HasIntegerChange(type_a, type_b)) {
    block.max_abs_integer = static_cast<std::uint64_t>(block.max_abs);
  }
}

}  // namespace

std::string DecimalText(Int128 value) {
  __extension__ using Unsigned = unsigned __int128;
  Unsigned rest =
      value < 0 ? Unsigned{0} - static_cast<Unsigned>(value) : static_cast<Unsigned>(value);
  std::string text;
  do {
    text += static_cast<char>('0' + static_cast<int>(rest % 10));
    rest /= 10;
  } while (rest > 0);
  if (value < 0) text += '-';
  std::reverse(text.begin(), text.end());
  return text;
}

DType ValueDType(DType dtype) {
  if (dtype == DType::kC64) return DType::kF32;
  return dtype == DType::kC128 ? DType::kF64 : dtype;
}

bool IsIntegerDType(DType dtype) {
  const NumberKind kind = NumberKindOf(dtype);
  return kind == NumberKind::kInteger || kind == NumberKind::kUnsigned;
}

bool HasIntegerChange(DType a, DType b) {
  return IsIntegerDType(a) && NumberKindOf(a) == NumberKindOf(b);
}

BlockStatistics MeasureBlock(DType dtype, const std::byte* src, std::size_t count) {
  BlockStatistics block;
  block.count = count;
  const double smallest = SmallestNormal(dtype);
  StepNumbers step;
  StatisticLanes lanes;
  // Sums of a step; the numbers in `block` count once, though doubles may be summed twice.
  const auto sum = [&](std::size_t done, std::size_t n, double scale) {
    step.Decode(dtype, src + BytesOf(dtype, done), n);
    WithLanes([&](auto kind) {
      SumStatistics<decltype(kind)>(step.values, StepNumbers::Padded(n), smallest, scale, lanes);
    });
    block.sum += AddLanes(lanes.sum);
    block.squares += AddLanes(lanes.squares);
  };
  for (std::size_t done = 0; done < count; done += kStepValues) {
    const std::size_t n = std::min(kStepValues, count - done);
    sum(done, n, 1);
    for (int l = 0; l < kSumLanes; ++l) {
      block.min = std::min(block.min, lanes.min[l]);
      block.max = std::max(block.max, lanes.max[l]);
    }
    const auto zeros = static_cast<std::uint64_t>(AddLanes(lanes.zeros));
    const auto below = static_cast<std::uint64_t>(AddLanes(lanes.below));
    block.zeros += zeros;
    if (smallest > 0) block.subnormals += below - zeros;
    if (static_cast<std::uint64_t>(AddLanes(lanes.finite)) == n) continue;
    for (std::size_t i = 0; i < n; ++i) {
      if (std::isnan(step.values[i])) ++block.nan;
      if (std::isinf(step.values[i])) {
        ++(step.values[i] > 0 ? block.posinf : block.neginf);
      }
    }
  }
  const bool any = block.min <= block.max;
  if (any && dtype == DType::kF64) {
    block.exponent = ScaleExponent(std::max(-block.min, block.max));
    if (block.exponent != 0) {
      block.sum = block.squares = 0;
      for (std::size_t done = 0; done < count; done += kStepValues) {
        sum(done, std::min(kStepValues, count - done), std::ldexp(1.0, -block.exponent));
      }
    }
  }
  if (any && IsIntegerDType(dtype)) {
    if (dtype == DType::kI64) {
      SumIntegers<std::int64_t>(src, count, block);
    } else if (dtype == DType::kU64) {
      SumIntegers<std::uint64_t>(src, count, block);
    } else {  // Sums of a block fit a double exactly.
      block.integer_sum = static_cast<Int128>(block.sum);
      block.integer_min = static_cast<Int128>(block.min);
      block.integer_max = static_cast<Int128>(block.max);
    }
  }
  return block;
}

void ValueSums::Add(const BlockStatistics& block) {
  const bool first = !(min <= max);
  if (block.min <= block.max) {
    integer_min = first ? block.integer_min : std::min(integer_min, block.integer_min);
    integer_max = first ? block.integer_max : std::max(integer_max, block.integer_max);
  }
  count += block.count;
  zeros += block.zeros;
  subnormals += block.subnormals;
  nan += block.nan;
  posinf += block.posinf;
  neginf += block.neginf;
  min = std::min(min, block.min);
  max = std::max(max, block.max);
  sum.Add(block.sum, block.exponent);
  squares.Add(block.squares, 2 * block.exponent);
  integer_sum += block.integer_sum;
}

BlockChange MeasureChange(DType type_a, const std::byte* a, DType type_b, const std::byte* b,
                          std::size_t count) {
  BlockChange block;
  double max_a = 0;
  double max_b = 0;
  MeasureChangeOnce(type_a, a, type_b, b, count, {}, block, max_a, max_b);
  if (type_a != DType::kF64 && type_b != DType::kF64) return block;
  const int a_exponent = ScaleExponent(max_a);
  const int b_exponent = ScaleExponent(max_b);
  const int change_exponent = ScaleExponent(block.max_abs);
  if (a_exponent == 0 && b_exponent == 0 && change_exponent == 0) return block;
  ChangeScale scale;
  scale.a = std::ldexp(1.0, -a_exponent);
  scale.b = std::ldexp(1.0, -b_exponent);
  const int half = std::isinf(block.max_abs) ? 1 : 0;
  scale.half = half == 1 ? 0.5 : 1;
  scale.change = std::ldexp(1.0, half - change_exponent);
  BlockChange scaled;
  double unused = 0;
  MeasureChangeOnce(type_a, a, type_b, b, count, scale, scaled, unused, unused);
  scaled.max_abs = block.max_abs;
  scaled.a_exponent = a_exponent;
  scaled.b_exponent = b_exponent;
  scaled.change_exponent = change_exponent;
  return scaled;
}

void ValueChange::Add(const BlockChange& block) {
  count += block.count;
  changed += block.changed;
  non_finite += block.non_finite;
  max_abs = std::max(max_abs, block.max_abs);
  max_abs_integer = std::max(max_abs_integer, block.max_abs_integer);
  sum_abs.Add(block.sum_abs, block.change_exponent);
  squares.Add(block.squares, 2 * block.change_exponent);
  a_squares.Add(block.a_squares, 2 * block.a_exponent);
  b_squares.Add(block.b_squares, 2 * block.b_exponent);
  products.Add(block.products, block.a_exponent + block.b_exponent);
}

void ValueChange::Add(const ValueChange& other) {
  count += other.count;
  changed += other.changed;
  non_finite += other.non_finite;
  max_abs = std::max(max_abs, other.max_abs);
  max_abs_integer = std::max(max_abs_integer, other.max_abs_integer);
  sum_abs.Add(other.sum_abs);
  squares.Add(other.squares);
  a_squares.Add(other.a_squares);
  b_squares.Add(other.b_squares);
  products.Add(other.products);
}

double ValueChange::changed_share() const {
  return count == 0 ? 0 : static_cast<double>(changed) / static_cast<double>(count);
}

double ValueChange::mean_abs() const {
  return finite() == 0 ? 0 : sum_abs.DividedBy(static_cast<double>(finite()));
}

double ValueChange::l2_change() const {
  if (squares.zero()) return 0;
  return a_squares.zero() ? kInfinite : squares.RootOfRatio(a_squares);
}

double ValueChange::cosine() const {
  if (a_squares.zero() || b_squares.zero()) return a_squares.zero() && b_squares.zero() ? 1 : 0;
  // The exponents of sums of squares are even.
  const double roots = std::sqrt(a_squares.mantissa()) * std::sqrt(b_squares.mantissa());
  const int exponent = products.exponent() - a_squares.exponent() / 2 - b_squares.exponent() / 2;
  return std::clamp(std::ldexp(products.mantissa() / roots, exponent), -1.0, 1.0);
}

}  // namespace tensormount
