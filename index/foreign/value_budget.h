// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_
#define TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_

#include <cstddef>
#include <optional>

#include "tensormount/common_value.h"

#include "index/foreign/foreign.h"
#include "index/foreign/pickle.h"

namespace tensormount {

// Bounds the work of making common values of all pickles of a checkpoint together: a value may hold
// another one many times, in every one of many pickles.
class ValueBudget {
 public:
  explicit ValueBudget(std::size_t nodes = std::size_t{4} << 20) : left_(nodes) {}
  // CommonFromPickle; nullopt also where too much was made already.
  std::optional<CommonValue> Convert(const pickle::Value& value);

 private:
  bool Take(const pickle::Value& value, int depth);

  std::size_t left_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_
