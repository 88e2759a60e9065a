// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_
#define TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_

#include <cstddef>
#include <optional>

#include "tensormount/common_value.h"

#include "index/archives/pickle.h"
#include "index/foreign/foreign.h"

namespace tensormount {

// Bounds the work of making common values of all pickles of a checkpoint together: a value may hold
// another one many times, in every one of many pickles. Four million nodes are far more than the
// settings of any run. Once spent it stays spent: the warnings then say that values were left out.
// Not thread-safe; one a checkpoint.
class ValueBudget {
 public:
  explicit ValueBudget(std::size_t nodes = std::size_t{4} << 20) : left_(nodes) {}
  // CommonFromPickle; nullopt also where too much was made already.
  // Walks the value twice: once to learn what it would cost, once to make it. A value over the
  // budget costs the walk up to where the budget ends, and nothing is made of it.
  std::optional<CommonValue> Convert(const pickle::Value& value);

 private:
  // What converting it would cost; false where the budget is spent.
  bool Take(const pickle::Value& value, int depth);

  // Nodes, a text counting one for every 64 bytes besides.
  std::size_t left_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_VALUE_BUDGET_H_
