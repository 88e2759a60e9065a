// SPDX-License-Identifier: Apache-2.0
#include "shard/tensor_meta.h"

#include <limits>
#include <string>

#include "tests/shard/boxes.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

TEST(TensorMetaTest, CountsBytes) {
  const auto meta = TensorMeta::Make("w", DType::kBF16, {3, 5});
  ASSERT_OK(meta);
  EXPECT_EQ(meta.value().elements(), 15u);
  EXPECT_EQ(meta.value().bytes(), 30u);
  EXPECT_EQ(TensorMeta::Make("w", DType::kF4, {2, 3}).value().bytes(), 3u);
  EXPECT_EQ(TensorMeta::Make("w", DType::kF6E2M3, {4}).value().bytes(), 3u);
  EXPECT_EQ(TensorMeta::Make("w", DType::kF32, {}).value().bytes(), 4u);
  EXPECT_EQ(TensorMeta::Make("w", DType::kF32, {5, 0}).value().bytes(), 0u);
}

TEST(TensorMetaTest, RefusesInvalidTensors) {
  constexpr std::int64_t kBig = std::int64_t{1} << 62;
  EXPECT_THAT(TensorMeta::Make("w", DType::kF4, {3}), HasMessage("whole bytes"));
  EXPECT_THAT(TensorMeta::Make("w", DType::kF4, {}), HasMessage("whole bytes"));
  EXPECT_THAT(TensorMeta::Make("w", DType::kU8, {kBig}), HasMessage("2^63 bits"));
  EXPECT_THAT(TensorMeta::Make("w", DType::kU8, {kBig, 0}), HasMessage("2^63 bits"));
  EXPECT_THAT(TensorMeta::Make("w", DType::kU8, {-1}), HasMessage("negative"));
  EXPECT_THAT(TensorMeta::Make("w", DType::kU8, Dims::Filled(17, 1)), HasMessage("17 axes"));
  EXPECT_THAT(TensorMeta::Make("w", DType::kU8, Dims::Filled(16, 1)), IsOk());
  EXPECT_THAT(TensorMeta::Make("", DType::kU8, {}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(CheckShape(DType::kF4, {3}), HasMessage("shape [3] of f4"));
  EXPECT_OK(CheckShape(DType::kF4, {2, 3}));
}

TEST(TensorMetaTest, ChecksKeys) {
  EXPECT_OK(CheckKey("a/b.c"));
  EXPECT_OK(CheckKey(std::string(2048, 'k')));
  EXPECT_THAT(CheckKey(std::string(2049, 'k')), HasMessage("2049 bytes"));
  EXPECT_THAT(CheckKey(std::string_view("a\0b", 3)), HasMessage("NUL"));
  EXPECT_THAT(CheckKey("\xFF"), HasMessage("UTF-8"));
  EXPECT_THAT(CheckKey(""), HasMessage("empty"));
}

TEST(ByteGeometryTest, ByteShapesAreComputed) {
  EXPECT_EQ(ByteShape(DType::kBF16, {3, 5}), (Dims{3, 5, 2}));
  EXPECT_EQ(ByteShape(DType::kU8, {}), (Dims{1}));
  EXPECT_EQ(ByteShape(DType::kF4, {3, 4}), (Dims{3, 2}));
  EXPECT_EQ(ByteShape(DType::kF4, {2, 3}), (Dims{3}));
  EXPECT_EQ(ByteShape(DType::kF4, {5, 2, 3}), (Dims{5, 3}));
  EXPECT_EQ(ByteShape(DType::kF6E3M2, {2, 4}), (Dims{2, 3}));
  EXPECT_EQ(ByteShape(DType::kF4, {3, 0}), (Dims{3, 0}));
  EXPECT_EQ(ByteShape(DType::kF4, {0, 3}), (Dims{0}));
}

TEST(ByteGeometryTest, SubByteRegionsMustBeWholeBytes) {
  const auto bytes = [](const Dims& shape, const Region& region) {
    return ByteRegion(DType::kF4, shape, region);
  };
  EXPECT_THAT(bytes({3, 4}, B({1, 2}, {2, 2})), IsOkAndHolds(Region(B({1, 1}, {2, 1}))));
  EXPECT_THAT(bytes({3, 4}, B({1, 1}, {2, 2})), HasMessage("does not begin and end on a byte"));
  EXPECT_THAT(bytes({3, 4}, B({1, 2}, {2, 1})), HasCode(Code::kInvalidArgument));
  // Rows of one and a half bytes: only runs of the whole order can be cut.
  EXPECT_THAT(bytes({4, 3}, B({2, 0}, {2, 3})), IsOkAndHolds(Region(B({3}, {3}))));
  EXPECT_THAT(bytes({4, 3}, B({1, 0}, {2, 3})), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(bytes({4, 3}, F(B({0, 0}, {4, 3}), 4, 6)), IsOkAndHolds(Region(B({2}, {3}))));
  EXPECT_THAT(bytes({4, 3}, B({0, 0}, {2, 2})), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(bytes({4, 4}, F(B({0, 0}, {4, 4}), 2, 8)), IsOkAndHolds(F(B({0, 0}, {4, 2}), 1, 4)));
  EXPECT_THAT(bytes({4, 4}, F(B({0, 0}, {4, 4}), 3, 8)), HasCode(Code::kInvalidArgument));
}

TEST(ByteGeometryTest, RegionMustLieInTheShape) {
  EXPECT_THAT(ByteRegion(DType::kU8, {4}, B({2}, {3})), HasMessage("does not lie within"));
  EXPECT_THAT(ByteRegion(DType::kU8, {4}, B({0, 0}, {1, 1})), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(RegionBytes(DType::kF32, {4, 4}, B({0, 0}, {2, 3})), IsOkAndHolds(24u));
  EXPECT_THAT(RegionBytes(DType::kF32, {4, 0}, B({0, 0}, {2, 0})), IsOkAndHolds(0u));
}

TEST(ByteGeometryTest, ByteOffsetsAreReportedAsElements) {
  EXPECT_EQ(ElementBox(DType::kF32, {4, 4}, B({1, 0, 0}, {2, 3, 4})), B({1, 0}, {2, 3}));
  EXPECT_EQ(ElementBox(DType::kF4, {3, 4}, B({1, 1}, {1, 1})), B({1, 2}, {1, 2}));
  EXPECT_EQ(ElementBox(DType::kF4, {5, 2, 3}, B({1, 1}, {2, 1})), B({1, 0, 0}, {2, 2, 3}));
}

// Against bits: a region is refused exactly where some maximal run of its elements does not begin
// and end on a byte, and otherwise its bytes are the bytes of its bits.
TEST(ByteGeometryPropertyTest, ByteRegionsMatchElementBits) {
  const std::vector<DType> types = {DType::kF4, DType::kF6E2M3, DType::kU8, DType::kBF16,
                                    DType::kF32};
  int taken = 0;
  for (int i = 0; i < TestScale(3000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    const DType dtype = rnd.Pick(types);
    const std::int64_t bits = InfoOf(dtype).bits;
    const Dims shape = RandomShape(rnd, 3, 6);
    if (!TensorMeta::Make("w", dtype, shape).ok()) continue;
    const KnownRegion known = RandomRegion(rnd, shape);
    SCOPED_TRACE(testing::Message() << i << " " << InfoOf(dtype).name << shape.ToString() << " "
                                    << known.region.ToString());
    std::vector<std::int64_t> wanted;
    bool on_bytes = true;
    for (std::size_t k = 0; k < known.cells.size(); ++k) {
      const std::int64_t bit = known.cells[k] * bits;
      const bool begins = k == 0 || known.cells[k] != known.cells[k - 1] + 1;
      if (begins && bit % 8 != 0) on_bytes = false;
      const bool ends = k + 1 == known.cells.size() || known.cells[k + 1] != known.cells[k] + 1;
      if (ends && (bit + bits) % 8 != 0) on_bytes = false;
      for (std::int64_t b = bit / 8; b * 8 < bit + bits; ++b) {
        if (wanted.empty() || wanted.back() != b) wanted.push_back(b);
      }
    }
    const auto region = ByteRegion(dtype, shape, known.region);
    if (!region.ok()) {
      // A flat range of a box that does not span its rows may fall on bytes by luck.
      ASSERT_TRUE(!on_bytes || (bits < 8 && known.region.is_flat()));
      ASSERT_THAT(region, HasMessage("does not begin and end on a byte"));
      continue;
    }
    ASSERT_TRUE(on_bytes);
    ++taken;
    std::vector<std::int64_t> got;
    const Dims byte_shape = ByteShape(dtype, shape);
    for (const Box& box : region.value().Boxes()) {
      for (const std::int64_t b : CellsOf(box, byte_shape)) got.push_back(b);
    }
    ASSERT_EQ(got, wanted);
    EXPECT_EQ(RegionBytes(dtype, shape, known.region).value(), wanted.size());
  }
  EXPECT_GT(taken, 300);
}

TEST(PlaceTest, PackedPiecesAreContiguous) {
  const auto placed = PlacePacked(F(B({0, 0}, {3, 4}), 2, 7), 100);
  ASSERT_EQ(placed.size(), 3u);
  EXPECT_EQ(placed[0].box, B({0, 2}, {1, 2}));
  EXPECT_EQ(placed[0].offset, 100);
  EXPECT_EQ(placed[1].offset, 102);
  EXPECT_EQ(placed[2].offset, 106);
  EXPECT_EQ(placed[1].strides, (Dims{4, 1}));
}

TEST(PlaceTest, BufferShapeMustMatchTheRegion) {
  std::uint32_t data[32];
  const Dims shape = {8, 4};
  const Region rows = B({0, 0}, {2, 4});
  const auto place = [&](const BufferView& b, const Region& r) {
    return PlaceBuffer(b, DType::kF32, shape, r);
  };
  EXPECT_OK(place(BufferView::Host(DType::kF32, data, {2, 4}), rows));
  EXPECT_OK(place(BufferView::Host(DType::kF32, data, {8}), rows));
  EXPECT_OK(place(BufferView::Host(DType::kF32, data, {5}), F(B({0, 0}, {8, 4}), 2, 5)));
  EXPECT_THAT(place(BufferView::Host(DType::kI32, data, {2, 4}), rows), HasMessage("dtype i32"));
  EXPECT_THAT(place(BufferView::Host(DType::kF32, data, {4, 2}), rows), HasMessage("[4, 2]"));
  EXPECT_THAT(place(BufferView::Host(DType::kF32, data, {9}), rows),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(place(BufferView::HostStrided(DType::kF32, data, {2, 4}, {4}), rows),
              HasMessage("strides"));
  EXPECT_THAT(place(BufferView::HostStrided(DType::kF32, data, {2, 4}, {INT64_MAX / 2, 1}), rows),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(place(BufferView::Host(DType::kF32, data, {2, 5}), B({0, 0}, {2, 5})),
              HasMessage("does not lie within"));
}

// Layers stacked under one key: the buffer of one layer has no axis for the layers.
TEST(PlaceTest, LeadingAxesOfExtentOneMayBeOmitted) {
  std::uint32_t data[64];
  const Dims shape = {10, 3, 2, 4};
  const Region layer = B({7, 0, 0, 0}, {1, 1, 2, 4});
  const auto place = [&](const Dims& extents, const Dims& strides, const Region& r) {
    return PlaceBuffer(BufferView::HostStrided(DType::kF32, data, extents, strides), DType::kF32,
                       shape, r);
  };
  for (const auto& [extents, strides] : std::vector<std::pair<Dims, Dims>>{
           {{1, 1, 2, 4}, {0, 0, 1, 2}}, {{1, 2, 4}, {99, 1, 2}}, {{2, 4}, {1, 2}}}) {
    const auto placed = place(extents, strides, layer);
    ASSERT_OK(placed);
    ASSERT_EQ(placed.value().size(), 1u);
    EXPECT_EQ(placed.value()[0].box, B({7, 0, 0, 0, 0}, {1, 1, 2, 4, 4}));
    EXPECT_EQ(placed.value()[0].strides[2], 4);
    EXPECT_EQ(placed.value()[0].strides[3], 8);
  }
  EXPECT_OK(place({2, 4}, {4, 1}, layer));
  // Only ones that lead, and only ones.
  EXPECT_THAT(place({2, 4}, {4, 1}, B({7, 0, 0, 0}, {2, 1, 2, 4})), HasMessage("[2, 4]"));
  EXPECT_THAT(place({3, 4}, {4, 1}, B({7, 0, 0, 0}, {1, 3, 1, 4})), HasMessage("[3, 4]"));
  EXPECT_THAT(place({1, 1, 1, 2, 4}, {8, 8, 8, 4, 1}, layer), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(place({4}, {1}, layer), HasMessage("[4]"));
  // A single element needs no axis at all; strides that are not packed still count.
  EXPECT_OK(PlaceBuffer(BufferView::Host(DType::kF32, static_cast<void*>(data), {}), DType::kF32,
                        {6}, B({2}, {1})));
}

TEST(PlaceTest, SubByteBuffersMustBePacked) {
  std::uint8_t data[64];
  const auto packed = PlaceBuffer(BufferView::Host(DType::kF4, data, {2, 4}), DType::kF4, {2, 4},
                                  B({0, 0}, {2, 4}));
  ASSERT_OK(packed);
  EXPECT_THAT(PlaceBuffer(BufferView::HostStrided(DType::kF4, data, {2, 4}, {8, 1}), DType::kF4,
                          {2, 4}, B({0, 0}, {2, 4})),
              HasMessage("must be packed"));
}

TEST(PlaceTest, StridesOutsideTheFileAreRefused) {
  const Dims shape = {2, 3};
  const Box box = Box::Whole(shape);
  const auto placed = PlaceStrided(DType::kF32, shape, box, 64, {4, 8});
  ASSERT_OK(placed);
  EXPECT_EQ(placed.value()[0].strides, (Dims{4, 8, 1}));
  EXPECT_THAT(PlaceStrided(DType::kF32, shape, box, 0, {-4, 8}),
              HasMessage("before byte 0 or past byte 2^62"));
  EXPECT_OK(PlaceStrided(DType::kF32, shape, box, 4, {-4, 8}));
  EXPECT_THAT(PlaceStrided(DType::kF32, shape, box, ~std::uint64_t{0}, {4, 8}),
              HasMessage("before byte 0 or past byte 2^62"));
  EXPECT_THAT(PlaceStrided(DType::kF32, shape, box, 0, {INT64_MAX, 8}),
              HasMessage("before byte 0 or past byte 2^62"));
  // Both at their limits: the sum has no room in 63 bits.
  const std::int64_t limit = std::int64_t{1} << 62;
  EXPECT_THAT(PlaceStrided(DType::kF32, {2}, Box::Whole({2}), std::uint64_t{1} << 62, {limit}),
              HasMessage("before byte 0 or past byte 2^62"));
  EXPECT_THAT(PlaceStrided(DType::kF32, shape, box, 0, {4}),
              HasMessage("has another number of axes than its strides"));
  EXPECT_THAT(PlaceStrided(DType::kF4, {2, 4}, Box::Whole({2, 4}), 0, {2, 1}),
              HasCode(Code::kUnsupported));
}

TEST(BufferViewTest, IsPackedDetectsStridedViews) {
  EXPECT_TRUE(BufferView::Host(DType::kF32, static_cast<void*>(nullptr), {2, 3}).IsPacked());
  const auto strided = [](const Dims& shape, const Dims& strides) {
    return BufferView::HostStrided(DType::kF32, nullptr, shape, strides).IsPacked();
  };
  EXPECT_TRUE(strided({2, 1, 3}, {3, 99, 1}));
  EXPECT_TRUE(strided({2, 0}, {7, 7}));
  EXPECT_FALSE(strided({2, 3}, {1, 2}));
  EXPECT_FALSE(strided({2, 3}, {3}));
  EXPECT_FALSE(strided({3}, {-1}));
}

}  // namespace
}  // namespace tensormount
