// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_strided.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tensormount {

StridedBytes MakeStridedBytes(Random& random) {
  StridedBytes s;
  const auto rank = static_cast<int>(random.Int(0, 4));
  Dims begin;
  Dims extent;
  std::int64_t left = 20'000;  // Elements, or a few cases would take longer than all others.
  for (int a = 0; a < rank; ++a) {
    const std::int64_t most = random.OneIn(4) ? 300 : 9;
    const std::int64_t whole = random.Int(1, std::min(most, left));
    left /= whole;
    s.byte_shape.push_back(whole);
    extent.push_back(random.Int(1, whole));
    begin.push_back(random.Int(0, whole - extent[a]));
  }
  const std::int64_t element = std::int64_t{1} << random.Int(0, 4);
  s.byte_shape.push_back(element);
  extent.push_back(element);
  begin.push_back(0);
  s.box = Box::Make(begin, extent).value();
  s.placed.box = s.box;
  s.placed.strides = Dims::Filled(rank + 1, 1);
  std::vector<int> order;
  for (int a = rank - 1; a >= 0; --a) order.push_back(a);
  if (random.OneIn(2)) random.Shuffle(order);
  std::int64_t step = element;
  for (const int a : order) {
    if (random.OneIn(3)) step += random.Int(0, 3) * element;
    const bool back = random.OneIn(4);
    s.placed.strides[a] = back ? -step : step;
    if (back) s.placed.offset += step * (extent[a] - 1);
    step *= extent[a];
  }
  s.bytes = static_cast<std::size_t>(step);
  return s;
}

}  // namespace tensormount
