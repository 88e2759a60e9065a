// SPDX-License-Identifier: Apache-2.0
#include "shard/npy.h"

#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

std::string Golden(const std::string& dict) {
  std::string header("\x93NUMPY\x01\x00v\x00", 10);
  return header + dict + std::string(117 - dict.size(), ' ') + "\n";
}

// What numpy.save of NumPy 2 (with ml_dtypes) wrote.
TEST(NpyTest, AsNumPyWritesIt) {
  EXPECT_THAT(MakeNpyHeader(DType::kBF16, {2}),
              IsOkAndHolds(Golden("{'descr': '<V2', 'fortran_order': False, 'shape': (2,), }")));
  EXPECT_THAT(MakeNpyHeader(DType::kBool, {}),
              IsOkAndHolds(Golden("{'descr': '|b1', 'fortran_order': False, 'shape': (), }")));
  EXPECT_THAT(
      MakeNpyHeader(DType::kC64, {3, 0, 2}),
      IsOkAndHolds(Golden("{'descr': '<c8', 'fortran_order': False, 'shape': (3, 0, 2), }")));
}

TEST(NpyTest, LongShapesStayAligned) {
  // NumPy's own sizes at the boundary.
  Dims shape = Dims::Filled(13, 2);
  shape.push_back(10);
  EXPECT_EQ(MakeNpyHeader(DType::kF32, shape).value().size(), 128u);
  shape[13] = 100;
  EXPECT_EQ(MakeNpyHeader(DType::kF32, shape).value().size(), 192u);
  const auto header = MakeNpyHeader(DType::kF32, Dims::Filled(16, 1'234'567'890'123));
  ASSERT_OK(header);
  EXPECT_EQ(header.value().size() % 64, 0u);
  EXPECT_EQ(header.value().back(), '\n');
}

TEST(NpyTest, SubByteTypesHaveNoForm) {
  EXPECT_THAT(MakeNpyHeader(DType::kF4, {2}), HasCode(Code::kUnsupported));
}

}  // namespace
}  // namespace tensormount
