// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_VALUE_COUNTS_H_
#define TENSORMOUNT_SHARD_VALUE_COUNTS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensormount/dtype.h"

#include "base/hash.h"

// Counts of the values of a tensor, taken from the bits of its elements while a save hashes them.
// docs/format.md, "Value counts", has their form in manifests.
namespace tensormount {

// Counts of some values of one dtype. A complex element counts as two values, its parts. Counts of
// disjoint cells are added, in any order, to counts of all of them.
struct ValueCounts {
  std::uint64_t zeros = 0;   // Zeros of both signs.
  std::uint64_t nan = 0;     // All NaNs, whatever their payload.
  std::uint64_t posinf = 0;  // Plus infinity.
  std::uint64_t neginf = 0;
  // The largest magnitude of the finite values: the bits of a float without its sign, or the
  // magnitude of an integer. 0 without finite values.
  std::uint64_t absmax_bits = 0;

  // Counts of all types but floats are 0.
  std::uint64_t nonfinite() const { return nan + posinf + neginf; }
  void Add(const ValueCounts& o);
  friend bool operator==(const ValueCounts&, const ValueCounts&) = default;
};

// Whether the values of a dtype can be counted: all but the types of 6 bits, for which programs
// differ in the order of bits.
bool CanCount(DType dtype);
// Number of values in `elements` elements: twice as many for complex types.
std::uint64_t ValuesIn(DType dtype, std::uint64_t elements);
// "3 NaN and 1 infinite", for counts with values that are not finite.
std::string DescribeNonfinite(const ValueCounts& counts);
// ValueCounts::absmax_bits as a number. Exact, except for integers beyond 2^53, which are rounded.
double AbsmaxOf(DType dtype, std::uint64_t bits);
// The largest magnitude of `counts` over `values` values as the shortest text that reads back as
// the same number; empty if no value is finite.
std::string AbsmaxText(DType dtype, std::uint64_t values, const ValueCounts& counts);

// Counts the values of packed elements that arrive in order, in pieces of any size; an element may
// be cut anywhere. Not thread-safe.
class ValueCounter {
 public:
  // `dtype`: CanCount must be true.
  explicit ValueCounter(DType dtype);
  void Update(const void* data, std::size_t size);
  // The counts of all whole elements so far. The counter is then empty.
  ValueCounts Take();

 private:
  using Count = void (*)(const std::byte* data, std::size_t values, ValueCounts& counts);

  Count count_;
  std::size_t width_;  // Bytes of a value.
  ValueCounts counts_;
  // The beginning of a value whose end has not arrived.
  std::array<std::byte, 8> rest_{};
  std::size_t rest_size_ = 0;
};

// Appends the row of a range to the leaf section of a manifest: 16 bytes, or 48 if there are values
// that are not finite. nullopt: the counts are not known.
void AppendCountsRow(const std::optional<ValueCounts>& counts, std::vector<Hash128>& out);
inline constexpr std::size_t kLongestCountsRow = 3;  // In hashes.
// A row that was read: its counts, and its length in hashes of 16 bytes.
struct CountsRow {
  std::optional<ValueCounts> counts;
  std::size_t hashes = 0;
};
// Decodes the row at the beginning of `hashes`. nullopt if the row is cut off or malformed.
std::optional<CountsRow> DecodeCountsRow(std::span<const Hash128> hashes);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_VALUE_COUNTS_H_
