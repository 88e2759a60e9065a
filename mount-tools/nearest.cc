// SPDX-License-Identifier: Apache-2.0
// Suggestions for mistyped names (nearest.h): the Damerau-Levenshtein distance, in which a swap of
// two neighbours counts once (optimal string alignment).
#include "mount-tools/nearest.h"

#include <algorithm>
#include <vector>

#include <fmt/core.h>

namespace tensormount::tools {
namespace {

// The number of edits between `a` and `b`, or `limit` if there are at least `limit`. Only cells
// near the diagonal of the table are computed.
std::size_t Distance(std::string_view a, std::string_view b, std::size_t limit) {
  const std::size_t longer = std::max(a.size(), b.size());
  const std::size_t shorter = std::min(a.size(), b.size());
  if (longer - shorter >= limit) return limit;
  std::vector<std::size_t> before(b.size() + 1, limit);  // The table row before `last`.
  std::vector<std::size_t> last(b.size() + 1, limit);
  std::vector<std::size_t> row(b.size() + 1, limit);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = std::min(j, limit);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::fill(row.begin(), row.end(), limit);
    if (i < limit) row[0] = i;
    const std::size_t from = i > limit ? i - limit : 1;
    const std::size_t to = std::min(b.size(), i + limit);
    for (std::size_t j = std::max<std::size_t>(from, 1); j <= to; ++j) {
      std::size_t best = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      best = std::min({best, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        best = std::min(best, before[j - 2] + 1);
      }
      row[j] = std::min(best, limit);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

}  // namespace

NearestName::NearestName(std::string_view text)
    : text_(text), distance_(std::clamp<std::size_t>(text.size() / 3, 1, 8) + 1) {}

void NearestName::Consider(std::string_view name) {
  if (text_.empty()) return;
  const std::size_t distance = Distance(text_, name, distance_);
  if (distance >= distance_) return;
  distance_ = distance;
  best_ = name;
}

std::string KeyHint(const OpenedCheckpoint& checkpoint, std::string_view source,
                    std::string_view key) {
  const std::string lists = fmt::format("`tensormount ls {}` lists the keys", source);
  const std::size_t slice = key.find_first_of("[@");
  const std::string_view name = key.substr(0, slice);
  NearestName nearest(name);
  bool has_name = false;
  const auto look = [&](const TensorEntry& tensor) {
    has_name = has_name || tensor.meta.key() == name;
    nearest.Consider(tensor.meta.key());
    return true;
  };
  // If the keys cannot be read, nothing is suggested.
  if (!checkpoint.index().ForEachTensor(0, look).ok()) return lists;
  if (has_name && slice != std::string_view::npos && key[slice] == '[' && key.back() != ']') {
    return fmt::format("a slice ends with a bracket, for example {}[0:2, :]", name);
  }
  const Result<CommonValues> common = checkpoint.index().CommonRecords();
  for (const auto& [name_of, value] : common.ok() ? common.value() : CommonValues()) {
    if (name_of == name) {
      return fmt::format("the key is that of a common value; `tensormount info {} {}` prints it",
                         source, name_of);
    }
    if (!IsReservedCommonName(name_of)) nearest.Consider(name_of);
  }
  if (has_name || nearest.best().empty()) return lists;
  return fmt::format("did you mean {}? {}", nearest.best(), lists);
}

}  // namespace tensormount::tools
