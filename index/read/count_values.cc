// SPDX-License-Identifier: Apache-2.0
// Looks for values that are not finite (verify --nonfinite).
#include "index/read/count_values.h"

#include <algorithm>
#include <memory>

#include "base/glob.h"

namespace tensormount {
namespace {

// Bytes that are read and then counted.
constexpr std::size_t kCountedBytes = std::size_t{8} << 20;

}  // namespace

Result<NonfiniteTensors> FindNonfinite(const OpenedCheckpoint& checkpoint,
                                       const NonfiniteSearch& search) {
  NonfiniteTensors result;
  std::vector<TensorEntry> unknown;
  std::uint64_t total = 0;
  Status failed;
  TENSORMOUNT_RETURN_IF_ERROR(checkpoint.index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    // Types that cannot be counted have neither NaN nor infinities.
    if (!CanCount(tensor.meta.dtype())) return true;
    const std::string& key = tensor.meta.key();
    if (std::ranges::any_of(search.exempt, [&](const auto& g) { return GlobMatches(g, key); })) {
      return true;
    }
    const Result<std::optional<ValueCounts>> counts = checkpoint.CountsOf(tensor);
    if (!counts.ok()) {
      failed = counts.status();
      return false;
    }
    if (counts.value()) {
      if (counts.value()->nonfinite() > 0) result.found.push_back({tensor, *counts.value()});
    } else if (search.recorded_only) {
      ++result.left_out;
    } else {
      total += tensor.meta.bytes();
      unknown.push_back(tensor);
    }
    return true;
  }));
  TENSORMOUNT_RETURN_IF_ERROR(failed);
  if (!unknown.empty()) {
    const std::shared_ptr<const void> in_order = checkpoint.ReadInOrder();
    std::vector<std::byte> block(
        static_cast<std::size_t>(std::min<std::uint64_t>(total, kCountedBytes)));
    for (const TensorEntry& tensor : unknown) {
      ValueCounter counter(tensor.meta.dtype());
      for (std::uint64_t at = 0; at < tensor.meta.bytes();) {
        const auto n = static_cast<std::size_t>(
            std::min<std::uint64_t>(tensor.meta.bytes() - at, block.size()));
        TENSORMOUNT_RETURN_IF_ERROR(
            checkpoint.ReadBytes(tensor, at, block.data(), n, ReadVerify::kExtendLeaves, nullptr));
        counter.Update(block.data(), n);
        at += n;
        result.bytes_read += n;
        if (search.watch) TENSORMOUNT_RETURN_IF_ERROR(search.watch(result.bytes_read, total));
      }
      const ValueCounts counts = counter.Take();
      if (counts.nonfinite() > 0) result.found.push_back({tensor, counts});
    }
    std::ranges::sort(result.found, {}, [](const auto& one) { return one.tensor.ordinal; });
  }
  return result;
}

}  // namespace tensormount
