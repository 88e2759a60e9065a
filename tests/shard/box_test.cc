// SPDX-License-Identifier: Apache-2.0
#include "tensormount/box.h"

#include <limits>
#include <set>
#include <string>

#include "tensormount/dtype.h"

#include "shard/box_access.h"
#include "shard/utf8.h"
#include "tests/shard/boxes.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

TEST(BoxTest, RefusesInvalidBoxes) {
  EXPECT_THAT(Box::Make({0}, {1, 2}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Box::Make({-1}, {1}), HasMessage("negative"));
  EXPECT_THAT(Box::Make({0}, {-1}), HasMessage("negative"));
  EXPECT_THAT(Box::Make({kMax}, {1}), HasMessage("ends past"));
  EXPECT_THAT(Box::Make({0, 0}, {kMax, 2}), HasMessage("elements"));
  EXPECT_THAT(Box::Make({0, 0, 0}, {kMax, 2, 0}), IsOk());
}

TEST(BoxTest, PrintsLikeNumPy) {
  EXPECT_EQ(B({0, 128}, {4, 128}).ToString(), "[0:4, 128:256]");
  EXPECT_EQ(Box().ToString(), "[]");
  EXPECT_EQ(Box().volume(), 1);
  EXPECT_EQ((Dims{2, 3}.ToString()), "[2, 3]");
}

TEST(BoxTest, IntersectsAndContains) {
  EXPECT_EQ(Intersect(B({0, 2}, {4, 4}), B({2, 0}, {4, 4})), B({2, 2}, {2, 2}));
  EXPECT_TRUE(Intersect(B({0}, {2}), B({2}, {2})).empty());
  EXPECT_TRUE(B({1, 1}, {3, 3}).Contains(B({1, 2}, {3, 2})));
  EXPECT_FALSE(B({1, 1}, {3, 3}).Contains(B({1, 2}, {3, 3})));
  EXPECT_TRUE(B({1}, {3}).Within({4}));
  EXPECT_FALSE(B({1}, {4}).Within({4}));
  EXPECT_FALSE(B({1}, {3}).Within({4, 4}));
}

// Few axes stand in the object, many elsewhere: nobody may see where.
TEST(DimsTest, StoresDimsOfAnyRank) {
  const auto make = [](int rank) {
    Dims dims;
    for (int a = 0; a < rank; ++a) dims.push_back(100 * rank + a);
    return dims;
  };
  for (int from = 0; from <= kMaxAxes; ++from) {
    const Dims a = make(from);
    ASSERT_EQ(a.rank(), from);
    for (int axis = 0; axis < from; ++axis) EXPECT_EQ(a[axis], 100 * from + axis);
    EXPECT_EQ(Dims(a.span()), a);
    for (int to = 0; to <= kMaxAxes; ++to) {
      Dims b = make(to);
      Dims source = a;
      b = source;
      if (from > 0) source[0] = -1;
      EXPECT_EQ(b, a) << "a copy shares nothing";
      b = make(to);
      b = Dims(a);
      EXPECT_EQ(b, a);
      Dims c = std::move(b);
      EXPECT_EQ(c, a);
      b = make(to);
      EXPECT_EQ(b, make(to)) << "what was moved from is assigned to";
      const Dims& self = c;
      c = self;
      EXPECT_EQ(c, a);
      if (from == to) continue;
      EXPECT_NE(make(to), a);
    }
  }
}

TEST(DimsTest, ProductIsChecked) {
  EXPECT_EQ(CheckedProduct({}), 1);
  EXPECT_EQ(CheckedProduct({kMax}), kMax);
  EXPECT_EQ(CheckedProduct({kMax, 2}), std::nullopt);
  EXPECT_EQ(CheckedProduct({kMax, 2, 0}), 0);
  EXPECT_EQ(CheckedProduct({-1, 0}), std::nullopt);
}

struct SliceCase {
  const char* text;
  Dims shape;
  const char* box;  // Or "" where it is refused with `message`.
  Dims kept;
  const char* message = "";
};

TEST(SliceTest, ParsesSlicesLikeNumPy) {
  const std::vector<SliceCase> cases = {
      {"0:2, :, 7", {4, 5, 8}, "[0:2, 0:5, 7:8]", {2, 5}},
      {"", {4, 5}, "[0:4, 0:5]", {4, 5}},
      {"", {}, "[]", {}},
      {"1", {4, 5}, "[1:2, 0:5]", {5}},
      {"-1,-3:-1", {4, 5}, "[3:4, 2:4]", {2}},
      {":2,3:", {4, 5}, "[0:2, 3:5]", {2, 2}},
      {" 1 : 3 ", {4}, "[1:3]", {2}},
      {"1:3,\t", {4}, "", {}, "more parts than axes"},
      {"2:2", {4}, "[2:2]", {0}},
      {"4:4", {4}, "[4:4]", {0}},
      {"-4:4", {4}, "[0:4]", {4}},
      {"0:4:1", {4}, "[0:4]", {4}},
      {"::", {4}, "[0:4]", {4}},
      {"0:4:2", {4}, "", {}, "only steps of 1"},
      {"0:5", {4}, "", {}, "'0:5' is out of range for 4 elements"},
      {"-5:", {4}, "", {}, "out of range"},
      {":-5", {4}, "", {}, "out of range"},
      {"4", {4}, "", {}, "'4' is out of range for 4 elements"},
      {"-5", {4}, "", {}, "out of range"},
      {"3:2", {4}, "", {}, "ends before it begins"},
      {"0,0", {4}, "", {}, "more parts than axes"},
      {"0", {}, "", {}, "more parts than axes"},
      {"0,", {4, 4}, "", {}, "nothing after the last comma"},
      {",0", {4, 4}, "", {}, "neither a number nor a range"},
      {"a", {4}, "", {}, "'a' is neither"},
      {"0x1", {4}, "", {}, "'0x1' is neither"},
      {"1:b", {4}, "", {}, "not a range of numbers"},
      {"99999999999999999999", {4}, "", {}, "neither a number"},
      {"0", {0}, "", {}, "out of range for 0"},
      {":", {0}, "[0:0]", {0}},
  };
  for (const SliceCase& c : cases) {
    SCOPED_TRACE(c.text);
    const auto slice = ParseSlice(c.text, c.shape);
    if (*c.message != '\0') {
      EXPECT_THAT(slice, HasCode(Code::kInvalidArgument));
      EXPECT_THAT(slice, HasMessage(c.message));
      continue;
    }
    ASSERT_OK(slice);
    EXPECT_EQ(slice.value().box.ToString(), c.box);
    EXPECT_EQ(slice.value().kept, c.kept);
  }
}

TEST(SubtractBoxTest, CutsOneAxisAfterTheOther) {
  std::vector<Box> boxes = {B({0, 0}, {4, 4}), B({4, 0}, {2, 4}), B({1, 1}, {2, 1})};
  SubtractBox(boxes, B({1, 1}, {2, 1}));
  EXPECT_EQ(boxes, (std::vector<Box>{B({0, 0}, {1, 4}), B({3, 0}, {1, 4}), B({1, 0}, {2, 1}),
                                     B({1, 2}, {2, 2}),
                                     B({4, 0}, {2, 4})}));  // Untouched; the third one is gone.
  std::vector<Box> scalar = {Box()};
  SubtractBox(scalar, Box());
  EXPECT_TRUE(scalar.empty());
}

TEST(SubtractBoxTest, LeavesEveryOtherCellOnce) {
  Random rnd(7);
  for (int round = 0; round < 2000; ++round) {
    const Dims shape = RandomShape(rnd, 4, 5);
    const Box box = RandomBox(rnd, shape, 1);
    const Box first = RandomBox(rnd, shape);
    const Box second = RandomBox(rnd, shape);
    std::multiset<std::int64_t> expected;
    for (const std::int64_t cell : CellsOf(box, shape)) expected.insert(cell);
    for (const Box& cut : {first, second}) {
      for (const std::int64_t cell : CellsOf(cut, shape)) expected.erase(cell);
    }
    std::vector<Box> left = {box};
    SubtractBox(left, first);
    EXPECT_LE(left.size(), 2 * static_cast<std::size_t>(shape.rank()) + 1);
    SubtractBox(left, second);
    std::multiset<std::int64_t> cells;
    for (const Box& rest : left) {
      EXPECT_FALSE(rest.empty());
      for (const std::int64_t cell : CellsOf(rest, shape)) cells.insert(cell);
    }
    EXPECT_EQ(cells, expected) << box.ToString() << " without " << first.ToString() << " and "
                               << second.ToString();
  }
}

TEST(DTypeTest, EveryNameRoundTrips) {
  std::set<std::string_view> names;
  for (const DTypeInfo& d : AllDTypes()) {
    EXPECT_EQ(&InfoOf(d.dtype), &d);
    EXPECT_THAT(DTypeFromNumber(static_cast<std::uint8_t>(d.dtype)), IsOkAndHolds(d.dtype));
    for (const std::string_view name : {d.name, d.safetensors, d.torch, d.numpy}) {
      if (name.empty()) continue;
      EXPECT_THAT(DTypeFromName(name), IsOkAndHolds(d.dtype)) << name;
    }
    EXPECT_TRUE(names.insert(d.name).second) << d.name;
  }
  EXPECT_EQ(InfoOf(DType::kF6E2M3).bits, 6u);
  EXPECT_EQ(InfoOf(DType::kC128).bits, 128u);
  EXPECT_EQ(InfoOf(DType::kBF16).npy_descr, "<V2");
}

TEST(DTypeTest, UnknownNameIsUnsupported) {
  EXPECT_THAT(DTypeFromNumber(0), HasCode(Code::kUnsupported));
  EXPECT_THAT(DTypeFromNumber(24), HasMessage("24"));
  EXPECT_THAT(DTypeFromName("f7"), HasMessage("'f7'"));
  EXPECT_THAT(DTypeFromName(""), HasCode(Code::kUnsupported));
}

TEST(Utf8Test, AcceptsOnlyWellFormedUtf8) {
  for (const char* good : {"", "a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xED\x9F\xBF",
                           "\xF4\x8F\xBF\xBF", "a\xC2\x80z"}) {
    EXPECT_TRUE(IsUtf8(good)) << good;
  }
  for (const char* bad :
       {"\x80", "\xC3", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "\xE2\x28\xA1", "\xF0\x9F\x98"}) {
    EXPECT_FALSE(IsUtf8(bad)) << bad;
  }
  EXPECT_FALSE(IsUtf8(std::string_view("\xE2\x82\xAC", 2)));
}

}  // namespace
}  // namespace tensormount
