// SPDX-License-Identifier: Apache-2.0
#include "fs/views/slices_view.h"

#include <cerrno>
#include <set>

#include "shard/npy.h"
#include "tests/fs/shown_fixture.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

using ::testing::HasSubstr;

TEST(SliceNameTest, ParsesTheLastBracketsOrTheTextAfterAt) {
  const struct {
    std::string_view name, stem, slice;
    bool npy;
  } cases[] = {
      {"w[0:4,:,7]", "w", "0:4,:,7", false},
      {"w[0:4].npy", "w", "0:4", true},
      {"w@0:4,:", "w", "0:4,:", false},
      {"w@0:4.npy", "w", "0:4", true},
      {"w[]", "w", "", false},
      {"w@", "w", "", false},
      {"a[0%5D[1:2]", "a[0%5D", "1:2", false},
      {"a[0[1:2]", "a[0", "1:2", false},
      {"[1]", "", "1", false},
      {"@1.npy", "", "1", true},
      {"a%40b@1", "a%40b", "1", false},
      {"a%3D[-1]", "a%3D", "-1", false},
  };
  for (const auto& c : cases) {
    const std::optional<SliceName> parsed = ParseSliceName(c.name);
    ASSERT_TRUE(parsed) << c.name;
    EXPECT_EQ(parsed->stem, c.stem) << c.name;
    EXPECT_EQ(parsed->slice, c.slice) << c.name;
    EXPECT_EQ(parsed->npy, c.npy) << c.name;
  }
  for (const char* none : {"", "w", "w.npy", "w]", "w[0:4", "w[0:4]x", ".npy", "w[0].np"}) {
    EXPECT_FALSE(ParseSliceName(none)) << none;
  }
}

TEST(SliceNameTest, BoxTextRoundTrips) {
  const Dims shape{5, 1, 7};
  const Box box = Box::Make({2, 0, 0}, {1, 1, 7}).value();
  EXPECT_EQ(SliceText(box), "[2:3,0:1,0:7]");
  EXPECT_EQ(ParseSlice("2:3,0:1,0:7", shape).value().box, box);
  EXPECT_EQ(SliceText(Box()), "[]");
}

TinySpec SlicedSpec() {
  const std::string long_part(240, 'L');
  TinySpec spec;
  spec.tensors = {
      {.key = "rows", .dtype = DType::kF32, .shape = {13, 6}, .seed = 1, .parts = 3},
      {.key = "cols", .dtype = DType::kBF16, .shape = {6, 10}, .seed = 2, .parts = 4, .axis = 1},
      {.key = "cube", .dtype = DType::kU8, .shape = {4, 5, 6}, .seed = 3, .parts = 2, .axis = 1},
      {.key = "layers/0/w", .dtype = DType::kF64, .shape = {8, 3}, .seed = 4, .tensor_file = true},
      {.key = "layers/0", .dtype = DType::kI16, .shape = {9}, .seed = 5},
      {.key = "x[0]", .dtype = DType::kU8, .shape = {4}, .seed = 6},
      {.key = "a@b%", .dtype = DType::kU8, .shape = {4}, .seed = 7},
      {.key = "scalar", .dtype = DType::kI64, .shape = {}, .seed = 8},
      {.key = "none", .dtype = DType::kF32, .shape = {0, 4}, .seed = 9},
      {.key = "f4", .dtype = DType::kF4, .shape = {4, 6}, .seed = 10},
      {.key = "d/" + long_part, .dtype = DType::kU8, .shape = {3, 2}, .seed = 11},
      {.key = "d/" + long_part + "tail", .dtype = DType::kU8, .shape = {5}, .seed = 12},
      {.key = "stack", .dtype = DType::kF32, .shape = {4, 6, 5}, .seed = 13, .parts = 2, .axis = 1},
  };
  spec.common.emplace("$layers.stack", "h/{}/w");
  return spec;
}

class SlicesTest : public testing::Test {
 protected:
  Result<ViewNode> Walk(const std::string& path) { return WalkView(view_, path); }
  Result<std::string> Read(const std::string& path) {
    return ReadView(fixture_.shown(), view_, path);
  }
  const TinyTensor& Tensor(const std::string& key) {
    for (const TinyTensor& tensor : fixture_.spec().tensors) {
      if (tensor.key == key) return tensor;
    }
    ADD_FAILURE() << key;
    return fixture_.spec().tensors.front();
  }
  std::string Cut(const std::string& key, const Box& box) {
    const TinyTensor& tensor = Tensor(key);
    return CutBox(TinyBytes(tensor), InfoOf(tensor.dtype).bits / 8, tensor.shape, box,
                  box.extent());
  }

  ShownFixture fixture_{SlicedSpec()};
  std::shared_ptr<SliceItems> items_ = std::make_shared<SliceItems>();
  SlicesView view_{fixture_.shown(), items_};
};

TEST_F(SlicesTest, AnyBoxReadsExactlyInEverySpelling) {
  Random random(TestSeed());
  for (const std::string key : {"rows", "cols", "cube", "layers/0/w", "layers/0"}) {
    const Dims& shape = Tensor(key).shape;
    for (int round = 0; round < TestScale(12); ++round) {
      Dims begin = shape;
      Dims extent = shape;
      Dims kept;
      std::string plain, odd, dropped;
      for (int a = 0; a < shape.rank(); ++a) {
        begin[a] = random.Int(0, shape[a] - 1);
        extent[a] = random.Int(1, shape[a] - begin[a]);
        const std::string low = std::to_string(begin[a]);
        plain += (a > 0 ? "," : "") + low + ":" + std::to_string(begin[a] + extent[a]);
        // From the end, or left out where it is all there is.
        const bool to_end = begin[a] + extent[a] == shape[a];
        odd += (a > 0 ? ", " : "") + (begin[a] == 0 ? "" : std::to_string(begin[a] - shape[a])) +
               ":" + (to_end ? "" : std::to_string(begin[a] + extent[a] - shape[a]));
        const bool drop = extent[a] == 1;
        dropped +=
            (a > 0 ? "," : "") + (drop ? low : low + ":" + std::to_string(begin[a] + extent[a]));
        if (!drop) kept.push_back(extent[a]);
      }
      const std::string want = Cut(key, Box::Make(begin, extent).value());
      ASSERT_THAT(Read(key + "[" + plain + "]"), IsOkAndHolds(want)) << key << plain;
      ASSERT_THAT(Read(key + "[" + odd + "]"), IsOkAndHolds(want)) << key << odd;
      ASSERT_THAT(Read(key + "@" + dropped), IsOkAndHolds(want)) << key << dropped;
      const DType dtype = Tensor(key).dtype;
      ASSERT_THAT(Read(key + "[" + plain + "].npy"),
                  IsOkAndHolds(MakeNpyHeader(dtype, extent).value() + want));
      ASSERT_THAT(Read(key + "@" + dropped + ".npy"),
                  IsOkAndHolds(MakeNpyHeader(dtype, kept).value() + want));
      const std::uint64_t item = Walk(key + "[" + plain + "]").value().item;
      EXPECT_EQ(Walk(key + "@" + odd).value().item, item);
      EXPECT_EQ(Walk(key + "@" + dropped).value().item, item);
      EXPECT_NE(Walk(key + "@" + odd + ".npy").value().item, item);
    }
  }
}

TEST_F(SlicesTest, DroppedAxesGiveAnotherNpyFile) {
  const std::uint64_t full = Walk("rows[2:3,1:4].npy").value().item;
  const std::uint64_t dropped = Walk("rows[2,1:4].npy").value().item;
  EXPECT_NE(full, dropped);
  EXPECT_EQ(Walk("rows[-11, 1:4].npy").value().item, dropped);
  EXPECT_EQ(Walk("rows[2,1:4]").value().item, Walk("rows[2:3,1:4]").value().item);
  const std::string bytes = Cut("cube", Box::Make({1, 2, 3}, {1, 1, 1}).value());
  EXPECT_THAT(Read("cube[1,2,3].npy"), IsOkAndHolds(MakeNpyHeader(DType::kU8, {}).value() + bytes));
  EXPECT_THAT(Read("cube[1,2:3,3].npy"),
              IsOkAndHolds(MakeNpyHeader(DType::kU8, {1}).value() + bytes));
}

TEST_F(SlicesTest, EscapedAndSubByteKeysRead) {
  EXPECT_THAT(Read("x[0%5D[1:3]"), IsOkAndHolds(TinyBytes(Tensor("x[0]")).substr(1, 2)));
  EXPECT_THAT(Read("a%40b%25@1:3"), IsOkAndHolds(TinyBytes(Tensor("a@b%")).substr(1, 2)));
  EXPECT_THAT(Read("scalar[]"), IsOkAndHolds(TinyBytes(Tensor("scalar"))));
  EXPECT_THAT(Read("scalar@"), IsOkAndHolds(TinyBytes(Tensor("scalar"))));
  EXPECT_THAT(Read("rows[]"), IsOkAndHolds(TinyBytes(Tensor("rows"))));
  EXPECT_THAT(Read("none[]"), IsOkAndHolds(""));
  EXPECT_THAT(Read("rows[3:3]"), IsOkAndHolds(""));
  // A folder of this name is there too: with and without the mark.
  EXPECT_THAT(Read("layers/0%=[2:4]"), IsOkAndHolds(TinyBytes(Tensor("layers/0")).substr(4, 4)));
  EXPECT_EQ(Walk("layers/0%=[2:4]").value().item, Walk("layers/0[2:4]").value().item);
  // Two elements of a type under a byte are one.
  EXPECT_THAT(Read("f4[1:3]"), IsOkAndHolds(TinyBytes(Tensor("f4")).substr(3, 6)));
  EXPECT_EQ(Walk("f4[:,2:4]").value().size, 4u);
}

TEST_F(SlicesTest, LongNamesAreReadThroughADirectory) {
  const std::string name(240, 'L');
  const std::string want = TinyBytes(Tensor("d/" + name)).substr(2, 2);
  EXPECT_THAT(Read("d/%+" + name + "/[1]"), IsOkAndHolds(want));
  EXPECT_THAT(Read("d/%+" + name + "/@1:2"), IsOkAndHolds(want));
  EXPECT_EQ(Walk("d/%+" + name + "/@1").value().item, Walk("d/" + name + "[1]").value().item);
  // The same folder has the rest of the longer name.
  EXPECT_THAT(Read("d/%+" + name + "/tail[1:2]"),
              IsOkAndHolds(TinyBytes(Tensor("d/" + name + "tail")).substr(1, 1)));
  EXPECT_THAT(Read("%+rows/[2]"), IsOkAndHolds(TinyBytes(Tensor("rows")).substr(48, 24)));
  EXPECT_THAT(Read("layers/%+0%=/[2:4].npy"), IsOk());
  EXPECT_THAT(Walk("%+nothing"), HasCode(Code::kNotFound));
  EXPECT_THAT(Walk("layers/[1]"), HasCode(Code::kNotFound));
}

TEST_F(SlicesTest, SlicesOfStackedLayersRead) {
  const std::string layer = TinyBytes(Tensor("stack")).substr(240, 120);
  EXPECT_THAT(Read("h/2/w[]"), IsOkAndHolds(layer));
  EXPECT_THAT(Read("h/2/w[1:6,2:4]"),
              IsOkAndHolds(Cut("stack", Box::Make({2, 1, 2}, {1, 5, 2}).value())));
  EXPECT_THAT(Read("h/2/w[4].npy"),
              IsOkAndHolds(MakeNpyHeader(DType::kF32, {5}).value() + layer.substr(80, 20)));
  const auto attributes = view_.Attributes(Walk("h/2/w[4]").value().item).value();
  EXPECT_EQ(attributes.at("stacked_key"), "stack");
  EXPECT_EQ(attributes.at("layer"), "2");
  EXPECT_EQ(attributes.at("shape"), "[1, 5]");
  EXPECT_THAT(Walk("h/4"), HasCode(Code::kNotFound));
}

TEST_F(SlicesTest, InvalidSlicesReturnTheRightErrno) {
  for (const char* none : {"rows", "rows.npy", "rows[14]", "rows[0:14]", "rows[-14]", "rows[0:2,7]",
                           "rows[::2]", "rows[x]", "rows[0,0,0]", "rows[2:1]", "no[0]", "rows[0]x",
                           "layers/1/w[0]", "f4[0].npy", "scalar[0]", "layers[0]", "rows@[0:1]"}) {
    EXPECT_THAT(Walk(none), HasCode(Code::kNotFound)) << none;
  }
  EXPECT_THAT(Walk("rows[14]").status().message(), HasSubstr("out of range"));
  const Status cut = Walk("f4[:,1:3]").status();
  EXPECT_THAT(cut, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(cut.message(), HasSubstr("begin and end on a byte"));
  EXPECT_EQ(Walk("rows[0]/x").status().ToErrno(), ENOTDIR);
  EXPECT_EQ(view_.Open(View::kRoot).status().ToErrno(), EISDIR);
  EXPECT_EQ(items_->size(), 2u);  // layers and rows[0]
}

TEST_F(SlicesTest, ForgottenItemsAreStale) {
  const std::uint64_t first = Walk("rows[1]").value().item;
  ASSERT_EQ(Walk("rows@1:2").value().item, first);
  EXPECT_EQ(items_->size(), 1u);
  const FileSegments open = view_.Open(first).value();
  items_->Forget(first, 1);
  EXPECT_THAT(view_.Stat(first), IsOk());
  items_->Forget(first, 1);
  EXPECT_EQ(items_->size(), 0u);
  EXPECT_THAT(view_.Stat(first), HasCode(Code::kStale));
  EXPECT_THAT(view_.Open(first), HasCode(Code::kStale));
  // What is open is read on.
  EXPECT_THAT(ReadInventory(fixture_.shown(), open),
              IsOkAndHolds(TinyBytes(Tensor("rows")).substr(24, 24)));
  const ViewNode again = Walk("rows[1]").value();
  EXPECT_NE(again.item, first);
  EXPECT_EQ(again.identity, "rows[1:2,0:6]");
  items_->Forget(again.item, 5);
  items_->Forget(View::kRoot, 1);
  items_->Forget(first, 1);
  EXPECT_EQ(items_->size(), 0u);
}

// As after a minute in which nobody asked: the checkpoint was closed, and is opened again.
TEST_F(SlicesTest, ItemsOutliveTheView) {
  const std::uint64_t first = Walk("rows[1]").value().item;
  const std::uint64_t folder = Walk("layers").value().item;
  const SlicesView next(fixture_.shown(), items_);
  EXPECT_THAT(next.Stat(folder), IsOk());
  EXPECT_THAT(ReadInventory(fixture_.shown(), next.Open(first).value()),
              IsOkAndHolds(TinyBytes(Tensor("rows")).substr(24, 24)));
  EXPECT_THAT(next.Lookup(folder, "0"), IsOk());
  items_->Forget(first, 1);
  EXPECT_THAT(next.Stat(first), HasCode(Code::kStale));
}

TEST_F(SlicesTest, DirectoriesListNothingAndFilesHaveAttributes) {
  for (const char* folder : {"", "layers", "layers/0", "h", "%+rows"}) {
    const ViewNode node = Walk(folder).value();
    EXPECT_TRUE(node.folder) << folder;
    EXPECT_OK(view_.List(node.item, 0, [](const ViewChild& child, std::uint64_t) {
      ADD_FAILURE() << child.name;
      return true;
    }));
  }
  const ViewNode node = Walk("cols[:,2:4]").value();
  EXPECT_FALSE(node.folder);
  EXPECT_EQ(node.mtime, fixture_.shown().opened.index().Find("cols").value().mtime);
  EXPECT_EQ(view_.PathOf(node.item), "slices/cols[0:6,2:4]");
  EXPECT_EQ(view_.PathOf(View::kRoot), "slices");
  const auto attributes = view_.Attributes(node.item).value();
  EXPECT_EQ(attributes.at("key"), "cols");
  EXPECT_EQ(attributes.at("dtype"), "bf16");
  EXPECT_EQ(attributes.at("shape"), "[6, 2]");
  EXPECT_EQ(attributes.at("box"), "[0:6, 2:4]");
}

TEST_F(SlicesTest, ContiguousSlicesAreServedFromTheTensor) {
  using Kind = FileSegments::Segment::Kind;
  const struct {
    const char* path;
    Kind kind;
  } cases[] = {{"rows[2:5]", Kind::kTensor},  {"rows[2,1:4]", Kind::kTensor},
               {"rows[:,1:4]", Kind::kBox},   {"cube[1,2:4]", Kind::kTensor},
               {"cube[0:2,2:4]", Kind::kBox}, {"cube[]", Kind::kTensor},
               {"h/1/w[2:5]", Kind::kTensor}};
  for (const auto& c : cases) {
    const FileSegments segments = view_.Open(Walk(c.path).value().item).value();
    ASSERT_EQ(segments.segments().size(), 1u) << c.path;
    EXPECT_EQ(segments.segments()[0].kind, c.kind) << c.path;
  }
}

}  // namespace
}  // namespace tensormount::fs
