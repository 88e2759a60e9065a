// SPDX-License-Identifier: Apache-2.0
// Computes the cost of a common value before the value is made (value_budget.h). The limits of
// CommonFromPickle apply to one call only: a million small pickles, each of which describes a
// million values, would stay within them and take days.
#include "index/foreign/value_budget.h"

namespace tensormount {

using pickle::Kind;
using pickle::Value;

std::optional<CommonValue> ValueBudget::Convert(const Value& value) {
  if (!Take(value, 0)) return std::nullopt;
  return CommonFromPickle(value);
}

bool ValueBudget::Take(const Value& value, int depth) {
  if (depth > kMaxCommonDepth) return false;
  std::size_t cost = 1;
  const Kind kind = value.kind();
  if (kind == Kind::kString || kind == Kind::kBytes || kind == Kind::kLong) {
    cost += value.text().size() / 64;
  }
  if (cost > left_) {
    left_ = 0;
    return false;
  }
  left_ -= cost;
  switch (kind) {
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kSet:
      for (std::size_t i = 0; i < value.size(); ++i) {
        if (!Take(value.item(i), depth + 1)) return false;
      }
      return true;
    case Kind::kObject:
      if (!Take(value.args(), depth + 1) || !Take(value.state(), depth + 1)) return false;
      [[fallthrough]];
    case Kind::kDict:
      for (std::size_t i = 0; i < value.size(); ++i) {
        if (!Take(value.key(i), depth + 1) || !Take(value.item(i), depth + 1)) return false;
      }
      return true;
    default:
      return true;
  }
}

}  // namespace tensormount
