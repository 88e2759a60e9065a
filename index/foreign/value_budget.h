// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_
#define TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_

#include <cstddef>
#include <optional>

#include "tensormount/common_value.h"

#include "index/archives/pickle.h"
#include "index/foreign/foreign.h"

namespace tensormount {

// Limits the common values that are made from all pickles of a checkpoint together. A value may
// contain another value many times, so many small pickles could describe very many values. Four
// million values are far more than the settings of any run. Not thread-safe; use one for each
// checkpoint.
class ValueBudget {
 public:
  explicit ValueBudget(std::size_t nodes = std::size_t{4} << 20) : left_(nodes) {}
  // Calls CommonFromPickle if the cost of the value is within the budget; nullopt if not. The cost
  // is computed first, without allocations.
  std::optional<CommonValue> Convert(const pickle::Value& value);

 private:
  // Takes the cost of the conversion from the budget; false if the budget does not suffice.
  bool Take(const pickle::Value& value, int depth);

  // The rest of the budget: each value costs 1, and a text 1 more for every 64 bytes.
  std::size_t left_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_
