// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SORT_COLUMN_H_
#define TENSORMOUNT_MOUNT_TOOLS_SORT_COLUMN_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

// --sort COLUMN of commands that print a table of numbers.

namespace tensormount::tools {

enum class Direction : std::uint8_t { kLargestFirst, kSmallestFirst };

template <typename T>
struct SortColumn {
  std::string_view name;
  double (*value)(const T&);
  Direction direction = Direction::kLargestFirst;
};

// The column of that name; null if `name` is empty. kInvalidArgument lists all names.
template <typename T>
Result<const SortColumn<T>*> FindSortColumn(std::span<const SortColumn<T>> columns,
                                            const std::string& name) {
  if (name.empty()) return static_cast<const SortColumn<T>*>(nullptr);
  std::string all;
  for (const SortColumn<T>& column : columns) {
    if (column.name == name) return &column;
    all += (all.empty() ? "" : ", ") + std::string(column.name);
  }
  return Status(Code::kInvalidArgument, "--sort " + name + ": must be one of " + all);
}

// Sorts rows, of which `numbers` returns the T. Rows of equal value stay in their order.
template <typename T, typename Row, typename Fn>
void SortRows(std::vector<Row>& rows, const SortColumn<T>* column, const Fn& numbers) {
  if (column == nullptr) return;
  std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) {
    const double x = column->value(numbers(a));
    const double y = column->value(numbers(b));
    return column->direction == Direction::kLargestFirst ? x > y : x < y;
  });
}

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SORT_COLUMN_H_
