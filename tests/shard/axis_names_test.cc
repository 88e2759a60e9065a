// SPDX-License-Identifier: Apache-2.0
// Named axes: their texts, sizes, and how boxes of a tensor become boxes over names.
#include "shard/axis_names.h"

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "shard/cell_map.h"
#include "tests/shard/boxes.h"
#include "tests/support/random_names.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

TEST(AxisNames, PrintWhatTheyParsed) {
  for (const std::string text :
       {"", "l d", "(h i j) d", "l (g (q + k + v) h) d", "e 1 d", "(a + b c)", "((a + b) c + d)"}) {
    ASSERT_OK_AND_ASSIGN(const AxisNames axes, AxisNames::Parse(text));
    EXPECT_EQ(axes.ToString(), text);
  }
  ASSERT_OK_AND_ASSIGN(const AxisNames axes, AxisNames::Parse("  ((l))   ( a+( b c ) ) "));
  EXPECT_EQ(axes.ToString(), "l (a + b c)");
  EXPECT_EQ(axes.rank(), 2);
}

TEST(AxisNames, RefuseInvalidTexts) {
  const std::map<std::string, std::string> kWrong = {
      {"(a", "byte 3: expected a name or \")\""},
      {"a)", "byte 2: expected the name of an axis"},
      {"(a + )", "byte 6: expected the name of an axis"},
      {"()", "byte 2: expected the name of an axis"},
      {"a-b", "byte 2: expected the name of an axis"},
      {"2x", "byte 1: expected the name of an axis"},
      {"((((((((((a))))))))))", "nested more than 8 deep"},
      {"a b c d e f g h i j k l m n o p q", "at most 16 axes"},
  };
  for (const auto& [text, why] : kWrong) {
    const Status status = AxisNames::Parse(text).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(why), std::string::npos) << text << ": " << status.message();
  }
}

TEST(AxisNames, LearnSizes) {
  ASSERT_OK_AND_ASSIGN(const AxisNames axes, AxisNames::Parse("l (g (q + k + v) h) d"));
  AxisSizes sizes = {{"g", 8}, {"k", 1}, {"v", 1}, {"h", 128}};
  ASSERT_OK(axes.LearnSizes({32, 6144, 4096}, sizes));
  EXPECT_EQ(
      sizes,
      (AxisSizes{{"d", 4096}, {"g", 8}, {"h", 128}, {"k", 1}, {"l", 32}, {"q", 4}, {"v", 1}}));
  ASSERT_OK_AND_ASSIGN(const Dims shape, axes.ShapeOf(sizes));
  EXPECT_EQ(shape, (Dims{32, 6144, 4096}));

  // One unknown name in several summands.
  ASSERT_OK_AND_ASSIGN(const AxisNames halves, AxisNames::Parse("(gate f + up f) d"));
  AxisSizes half = {{"gate", 1}, {"up", 1}};
  ASSERT_OK(halves.LearnSizes({22016, 4096}, half));
  EXPECT_EQ(half["f"], 11008);
  AxisSizes odd = {{"gate", 1}, {"up", 1}};
  EXPECT_EQ(halves.LearnSizes({22017, 4096}, odd).code(), Code::kInvalidArgument);
  // A name twice in a product gives nothing.
  ASSERT_OK_AND_ASSIGN(const AxisNames square, AxisNames::Parse("(a + a b + a)"));
  AxisSizes none;
  ASSERT_OK(square.LearnSizes({9}, none));
  EXPECT_TRUE(none.empty());

  // Two unknown names are left for later.
  AxisSizes few = {{"g", 8}};
  ASSERT_OK(axes.LearnSizes({32, 6144, 4096}, few));
  EXPECT_FALSE(few.contains("q"));
  EXPECT_EQ(axes.ShapeOf(few).status().code(), Code::kInvalidArgument);
}

TEST(AxisNames, NameTheSizesThatDoNotFit) {
  ASSERT_OK_AND_ASSIGN(const AxisNames axes, AxisNames::Parse("(heads h) d"));
  AxisSizes sizes = {{"heads", 30}};
  const Status status = axes.LearnSizes({4096, 4096}, sizes);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("axis 0: it has 4096 cells, which does not fit (heads h) (h is "
                                  "not known, heads = 30)"),
            std::string::npos)
      << status.message();
  AxisSizes other;
  EXPECT_EQ(axes.LearnSizes({4096}, other).code(), Code::kInvalidArgument);
  ASSERT_OK_AND_ASSIGN(const AxisNames sum, AxisNames::Parse("(a + b)"));
  AxisSizes large = {{"a", 9}};
  EXPECT_EQ(sum.LearnSizes({4}, large).code(), Code::kInvalidArgument);
}

TEST(AxisNames, RefuseHugeSizesAndDiagonals) {
  const std::int64_t huge = std::int64_t{1} << 40;
  ASSERT_OK_AND_ASSIGN(const AxisNames product, AxisNames::Parse("(a b)"));
  EXPECT_EQ(product.Terms({{"a", huge}, {"b", huge}}).status().code(), Code::kInvalidArgument);
  ASSERT_OK_AND_ASSIGN(const AxisNames two, AxisNames::Parse("a b"));
  EXPECT_EQ(two.Terms({{"a", huge}, {"b", huge}}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(two.Terms({{"a", -1}, {"b", 2}}).status().code(), Code::kInvalidArgument);
  ASSERT_OK_AND_ASSIGN(const AxisNames diagonal, AxisNames::Parse("a a"));
  EXPECT_EQ(diagonal.Terms({{"a", 3}}).status().code(), Code::kInvalidArgument);
  // The same name in two summands is no diagonal.
  ASSERT_OK_AND_ASSIGN(const AxisNames summands, AxisNames::Parse("(f s + f t)"));
  ASSERT_OK_AND_ASSIGN(const auto terms, summands.Terms({{"f", 3}, {"s", 2}, {"t", 4}}));
  EXPECT_EQ(terms.size(), 2u);
  std::string sums;
  for (int i = 0; i < 9; ++i) {
    sums += "(a" + std::to_string(i) + " + b" + std::to_string(i) + ") ";
  }
  ASSERT_OK_AND_ASSIGN(const AxisNames many, AxisNames::Parse(sums));
  AxisSizes ones;
  for (const std::string& name : many.names()) ones[name] = 1;
  EXPECT_EQ(many.Terms(ones).status().code(), Code::kInvalidArgument);
  ASSERT_OK_AND_ASSIGN(const AxisNames most, AxisNames::Parse(sums.substr(0, sums.rfind(" ("))));
  ASSERT_OK_AND_ASSIGN(const auto all, most.Terms(ones));
  EXPECT_EQ(all.size(), AxisNames::kMaxTerms);
}

TEST(AxisNames, LeaveOutEmptyTerms) {
  ASSERT_OK_AND_ASSIGN(const AxisNames axes, AxisNames::Parse("(v + pad) d"));
  ASSERT_OK_AND_ASSIGN(const auto terms, axes.Terms({{"v", 5}, {"pad", 0}, {"d", 3}}));
  ASSERT_EQ(terms.size(), 1u);
  EXPECT_EQ(terms[0].digits[0].name, "v");
  ASSERT_OK_AND_ASSIGN(const auto none, axes.Terms({{"v", 5}, {"pad", 1}, {"d", 0}}));
  EXPECT_TRUE(none.empty());
}

// The cells of folded boxes, as labels with the byte at which each begins.
void AddLabels(const CellTerm& term, const std::vector<std::string>& names,
               const std::vector<PlacedBox>& boxes, std::map<std::string, std::int64_t>& labels) {
  for (const PlacedBox& placed : boxes) {
    for (std::int64_t n = 0; n < placed.box.volume(); ++n) {
      std::int64_t rest = n;
      std::int64_t offset = placed.offset;
      std::map<std::string, std::int64_t> indices;
      for (int a = placed.box.rank() - 1; a >= 0; --a) {
        const std::int64_t step = rest % placed.box.extent(a);
        rest /= placed.box.extent(a);
        offset += step * placed.strides[a];
        if (a < term.extents.rank()) {
          indices[names[static_cast<std::size_t>(a)]] = placed.box.begin(a) + step;
        }
      }
      std::string text;
      for (const auto& [name, index] : indices) text += name + "=" + std::to_string(index) + ";";
      ASSERT_TRUE(labels.emplace(text, offset).second) << text << " twice";
    }
  }
}

// A tensor of bytes, so that offsets are cells.
PlacedBox PlacedIn(const Dims& shape, const Box& box) {
  const Box bytes = B(
      [&] {
        Dims begin = box.begin();
        begin.push_back(0);
        return begin;
      }(),
      [&] {
        Dims extent = box.extent();
        extent.push_back(1);
        return extent;
      }());
  Dims strides = Dims::Filled(shape.rank() + 1, 1);
  for (int a = shape.rank() - 2; a >= 0; --a) strides[a] = strides[a + 1] * shape[a + 1];
  std::int64_t offset = 0;
  for (int a = 0; a < shape.rank(); ++a) offset += box.begin(a) * strides[a];
  return {bytes, offset, strides};
}

TEST(CellTerm, FoldsBoxesToTheirCells) {
  Random random(TestSeed());
  for (int round = 0; round < TestScale(3000); ++round) {
    int next = 0;
    NamedSide side;
    for (std::int64_t n = random.Int(0, 3); n > 0; --n) {
      side.axes.push_back(RandomNameTree(random, 3, next));
    }
    const Dims shape = side.Shape();
    if (*CheckedProduct(shape) > 5000 || next > 16) continue;
    SCOPED_TRACE(side.Text());
    ASSERT_OK_AND_ASSIGN(const AxisNames axes,
                         AxisNames::Parse(side.Text().substr(side.Text().find(':') + 1)));
    AxisSizes sizes;
    const auto collect = [&](const NameTree& tree, const auto& self) -> void {
      if (tree.kind == NameTree::Kind::kName) sizes[tree.name] = tree.size;
      for (const NameTree& part : tree.parts) self(part, self);
    };
    for (const NameTree& axis : side.axes) collect(axis, collect);
    ASSERT_OK_AND_ASSIGN(const std::vector<AxisTerm> terms, axes.Terms(sizes));

    const Box box = RandomBox(random, shape);
    std::map<std::string, std::int64_t> expected;
    for (const std::int64_t cell : CellsOf(box, shape)) expected[side.LabelAt({}, cell)] = cell;
    std::map<std::string, std::int64_t> found;
    for (const AxisTerm& axis_term : terms) {
      // Paired with the same names in another order, so that names are not merged.
      AxisTerm reversed;
      std::vector<std::string> names;
      for (const AxisTerm::Digit& digit : axis_term.digits) names.push_back(digit.name);
      for (auto digit = axis_term.digits.rbegin(); digit != axis_term.digits.rend(); ++digit) {
        reversed.digits.push_back({digit->name, digit->size, 1, reversed.begin.rank()});
        reversed.begin.push_back(0);
      }
      ASSERT_OK_AND_ASSIGN(const CellTerm term,
                           CellTerm::Make(axis_term, {}, &reversed, {}, 0, sizes));
      ASSERT_EQ(term.extents.rank(), static_cast<int>(names.size()));
      std::vector<PlacedBox> boxes;
      term.to.Fold(PlacedIn(shape, box), {}, term.extents.rank(), boxes);
      ASSERT_NO_FATAL_FAILURE(AddLabels(term, names, boxes, found));
      std::size_t most = 1;
      for (int a = 0; a < shape.rank(); ++a) {
        const auto digits = static_cast<std::size_t>(
            std::count_if(term.to.digits.begin(), term.to.digits.end(),
                          [&](const TermSide::Digit& digit) { return digit.axis == a; }));
        if (digits > 0) most *= 2 * digits - 1;
      }
      EXPECT_LE(boxes.size(), most);
      for (const PlacedBox& folded : boxes) {
        const Box back = term.to.Unfold(folded.box);
        ASSERT_TRUE(PlacedIn(shape, box).box.Contains(back)) << back.ToString();
      }
    }
    ASSERT_EQ(found, expected) << box.ToString();
  }
}

TEST(CellTerm, MergesNamesThatAreNeighboursOnBothSides) {
  ASSERT_OK_AND_ASSIGN(const AxisNames fused, AxisNames::Parse("l (g (q + k + v) h) d"));
  ASSERT_OK_AND_ASSIGN(const AxisNames query, AxisNames::Parse("(g q h) d"));
  const AxisSizes sizes = {{"l", 2}, {"g", 3}, {"q", 4}, {"k", 1}, {"v", 1}, {"h", 8}, {"d", 5}};
  ASSERT_OK_AND_ASSIGN(const auto from, fused.Terms(sizes));
  ASSERT_OK_AND_ASSIGN(const auto to, query.Terms(sizes));
  const std::vector<std::string> layer = {"l"};
  ASSERT_OK_AND_ASSIGN(const CellTerm term, CellTerm::Make(to[0], layer, &from[0], {}, 0, sizes));
  // l, g, q and h together, d.
  EXPECT_EQ(term.extents, (Dims{2, 3, 32, 5}));
  EXPECT_FALSE(term.IsIdentity());
  ASSERT_OK_AND_ASSIGN(const CellTerm same, CellTerm::Make(to[0], {}, &to[0], {}, 0, sizes));
  EXPECT_TRUE(same.IsIdentity());
  EXPECT_EQ(same.extents, (Dims{96, 5}));
}

}  // namespace
}  // namespace tensormount
