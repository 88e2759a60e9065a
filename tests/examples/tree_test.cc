// SPDX-License-Identifier: Apache-2.0
#include "examples/models/tree.h"

#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tensormount/checkpoint.h"
#include "tensormount/load.h"
#include "tensormount/save.h"

#include "tests/shard/boxes.h"
#include "tests/state/cells.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::examples {
namespace {

using Kind = StateTree::Kind;

TreeStep TreeKey(CommonKey key) { return {TreeStep::Kind::kKey, std::move(key)}; }
TreeStep Item(std::int64_t index) { return {TreeStep::Kind::kListItem, index}; }
TreeStep TupleItem(std::int64_t index) { return {TreeStep::Kind::kTupleItem, index}; }

StateTree Common(CommonValue value) { return StateTree(std::move(value)); }

// One of every kind. `memory` has six values.
StateTree Sample(std::int32_t* memory) {
  const Shard w{.global_shape = {4, 3},
                .region = B({0, 0}, {2, 3}),
                .data = BufferView::Host(DType::kI32, static_cast<void*>(memory), {2, 3})};
  TreeDict numbered{.items = {{std::int64_t{7}, Common(1)}, {"7", Common("seven")}}};
  return TreeDict{
      .items = {
          {"model",
           TreeDict{.items = {{"layers", TreeList{{TreeDict{.items = {{"w", w}}}, Common(2.5)}}}}}},
          {"pair", TreeTuple{{Common(true), TreeObject{.key = "rng",
                                                       .bytes = "seed",
                                                       .place = {.index = {1}, .grid = {2}}}}}},
          {"numbered", std::move(numbered)},
          {"here", TreeLocal{CommonValue("mine")}},
          {"empty", TreeDict{}},
          {"none", TreeList{}},
      }};
}

TEST(TreePathTest, PathsConvertToTextAndNames) {
  const TreePath path = {TreeKey("opt"), TreeKey(7), TreeKey("exp.avg"), Item(3), TupleItem(0)};
  EXPECT_EQ(PathText(path), "opt{7}.\"exp.avg\"[3](0)");
  EXPECT_EQ(NameOfPath(path, TreeNames::kDotted), "opt.7.exp.avg.3.0");
  EXPECT_EQ(NameOfPath(path, TreeNames::kReversible), "opt.#7.exp%2Eavg.:3.,0");
  EXPECT_THAT(PathOfName("opt.#7.exp%2Eavg.:3.,0"), IsOkAndHolds(path));
  EXPECT_EQ(NameOfPath({TreeKey("")}, TreeNames::kReversible), "%");
  EXPECT_EQ(NameOfPath({TreeKey("#1"), TreeKey("a#1"), TreeKey(-1)}, TreeNames::kReversible),
            "%231.a#1.#-1");
  for (const char* bad : {"", "a..b", "a.", "#", "#x", "#01", "#+1", ":-1", ":00", "%2", "%2e",
                          "%61", "a%", "%%", ",", "%C3%A4", "#99999999999999999999"}) {
    EXPECT_THAT(PathOfName(bad), HasCode(Code::kInvalidArgument)) << bad;
  }
}

TEST(TreePathTest, ReversibleNamesAreReversible) {
  std::set<std::string> names;
  std::set<std::string> paths;
  for (int i = 0; i < TestScale(3000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    TreePath path;
    for (std::int64_t n = rnd.Int(1, 4); n > 0; --n) {
      const std::int64_t kind = rnd.Int(0, 5);
      if (kind == 0)
        path.push_back(TreeKey(rnd.OneIn(3) ? std::int64_t{rnd.Int(-3, 3)}
                                            : static_cast<std::int64_t>(rnd.Next())));
      if (kind == 1) path.push_back(Item(rnd.Int(0, 12)));
      if (kind == 2) path.push_back(TupleItem(rnd.Int(0, 12)));
      if (kind < 3) continue;
      std::string key;
      for (std::int64_t c = rnd.Int(0, 4); c > 0; --c) {
        key += std::string(".%#:,a0\xC3\xA4")
                   .substr(static_cast<std::size_t>(rnd.Int(0, 7)),
                           static_cast<std::size_t>(rnd.Int(1, 2)));
        if (rnd.OneIn(9)) key += '\0';
      }
      path.push_back(TreeKey(key));
    }
    const std::string name = NameOfPath(path, TreeNames::kReversible);
    ASSERT_THAT(PathOfName(name), IsOkAndHolds(path)) << name;
    ASSERT_EQ(name.find('\0'), std::string::npos);
    // Two names are equal exactly where the paths are.
    const bool new_name = names.insert(name).second;
    ASSERT_EQ(paths.insert(PathText(path)).second, new_name) << name;
    // A text that happens to be a name is the name of what it says.
    std::string damaged = name;
    damaged[static_cast<std::size_t>(rnd.Int(0, static_cast<std::int64_t>(name.size()) - 1))] =
        ".%#:,12AF"[rnd.Int(0, 8)];
    const auto read = PathOfName(damaged);
    if (read.ok()) {
      ASSERT_EQ(NameOfPath(read.value(), TreeNames::kReversible), damaged);
    }
  }
}

TEST(TreeTest, WalksLeavesInOrder) {
  std::int32_t memory[6] = {};
  StateTree tree = Sample(memory);
  EXPECT_THAT(DescribeTree(tree), IsOkAndHolds(std::string("here: local string\n"
                                                           "model.layers[0].w: tensor i32 [4, 3]\n"
                                                           "model.layers[1]: float\n"
                                                           "numbered{7}: int\n"
                                                           "numbered.7: string\n"
                                                           "pair(0): bool\n"
                                                           "pair(1): object\n")));
  EXPECT_EQ(FindPath(tree, {TreeKey("model"), TreeKey("layers"), Item(1)})->kind(), Kind::kCommon);
  EXPECT_EQ(FindPath(tree, {TreeKey("model"), TreeKey("layers"), TupleItem(1)}), nullptr);
  EXPECT_EQ(FindPath(tree, {TreeKey("model"), TreeKey("layers"), Item(2)}), nullptr);
  EXPECT_EQ(FindPath(tree, {TreeKey("numbered"), TreeKey("8")}), nullptr);
}

TEST(TreeTest, MapsLeavesInPlaceAndOutOfPlace) {
  std::int32_t memory[6] = {};
  StateTree tree = Sample(memory);
  const auto doubled =
      MappedLeaves(tree, [](const TreePath& path, const StateTree& leaf) -> Result<StateTree> {
        const auto* value = leaf.get_if<CommonValue>();
        const auto* number = value == nullptr ? nullptr : value->get_if<std::int64_t>();
        if (number != nullptr) return Common(*number * 2);
        return path.back() == TreeKey("here") ? Common(PathText(path)) : leaf;
      });
  ASSERT_OK(doubled);
  const auto diff = DiffTrees(tree, doubled.value());
  ASSERT_OK(diff);
  ASSERT_EQ(diff.value().mismatches.size(), 2u);
  EXPECT_EQ(diff.value().mismatches[0].path, "here");
  EXPECT_EQ(diff.value().mismatches[0].left, "local string");
  EXPECT_EQ(diff.value().mismatches[0].right, "string");
  EXPECT_EQ(diff.value().mismatches[1].path, "numbered{7}");
  EXPECT_EQ(diff.value().mismatches[1].what, "1 and 2");

  EXPECT_THAT(MapLeaves(tree,
                        [](const TreePath&, StateTree& leaf) {
                          return leaf.kind() == Kind::kObject
                                     ? Status(Code::kUnsupported, "no objects")
                                     : Status();
                        }),
              HasMessage("pair(1): no objects"));
  EXPECT_OK(MapLeaves(tree, [](const TreePath&, StateTree& leaf) {
    leaf = Common(0);
    return Status();
  }));
  EXPECT_THAT(ForEachLeaf(tree,
                          [](const TreePath&, const StateTree& leaf) {
                            return leaf.kind() == Kind::kCommon ? Status()
                                                                : Status(Code::kInternal, "");
                          }),
              IsOk());
}

TEST(TreeTest, MergesDisjointTrees) {
  const StateTree a = TreeDict{.items = {{"x", TreeDict{.items = {{"a", Common(1)}}}},
                                         {"l", TreeList{{Common(1), StateTree()}}}}};
  const StateTree b = TreeDict{.items = {{"x", TreeDict{.items = {{"b", Common(2)}}}},
                                         {"l", TreeList{{StateTree(), Common(2)}}},
                                         {"y", Common(3)}}};
  const auto merged = MergeTrees(a, b);
  ASSERT_OK(merged);
  EXPECT_THAT(DescribeTree(merged.value()),
              IsOkAndHolds(std::string("l[0]: int\nl[1]: int\nx.a: int\nx.b: int\ny: int\n")));
  EXPECT_THAT(MergeTrees(a, a), HasMessage("l[0]: cannot merge int and int"));
  const auto refused = [](const char* key, StateTree x, StateTree y, const char* why) {
    EXPECT_THAT(MergeTrees(TreeDict{.items = {{key, std::move(x)}}},
                           TreeDict{.items = {{key, std::move(y)}}}),
                HasMessage(why));
  };
  refused("k", Common(1), TreeDict{}, "k: cannot merge int and dict");
  refused("k", TreeList{}, TreeTuple{}, "k: cannot merge list and tuple");
  refused("k", TreeList{{Common(1)}}, TreeList{}, "k: cannot merge lists of 1 and 0 items");
}

TEST(TreeTest, ExtractedPartsMergeToTheWhole) {
  std::int32_t memory[6] = {};
  const StateTree tree = Sample(memory);
  for (int mask = 0; mask < 256; ++mask) {
    std::vector<Kind> kinds;
    for (int k = 0; k < 8; ++k) {
      if ((mask >> k & 1) != 0) kinds.push_back(static_cast<Kind>(k));
    }
    auto parts = ExtractKinds(tree, kinds);
    ASSERT_OK(parts);
    const auto count = [](const StateTree& t) {
      int n = 0;
      EXPECT_OK(ForEachLeaf(t, [&](const TreePath&, const StateTree&) {
        ++n;
        return Status();
      }));
      return n;
    };
    EXPECT_EQ(count(parts.value().matching) + count(parts.value().rest), 7);
    EXPECT_OK(ForEachLeaf(parts.value().matching, [&](const TreePath&, const StateTree& leaf) {
      return (mask >> static_cast<int>(leaf.kind()) & 1) != 0 ? Status()
                                                              : Status(Code::kInternal, "strange");
    }));
    const auto together =
        MergeTrees(std::move(parts.value().matching), std::move(parts.value().rest));
    ASSERT_OK(together);
    const auto diff = DiffTrees(tree, together.value());
    ASSERT_OK(diff);
    EXPECT_TRUE(diff.value().empty()) << mask;
  }
}

TEST(TreeTest, DiffReportsPathsAndMismatches) {
  std::int32_t left_memory[6] = {1, 2, 3, 4, 5, 6};
  std::int32_t right_memory[6] = {1, 4, 2, 5, 3, 6};  // Column by column.
  const StateTree left = Sample(left_memory);
  StateTree right = Sample(right_memory);
  auto* layers = right.get_if<TreeDict>()->items["model"].get_if<TreeDict>();
  auto& list = layers->items["layers"].get_if<TreeList>()->items;
  auto& tensor = *list[0].get_if<TreeDict>()->items["w"].get_if<TreeTensor>();
  tensor.shards[0].data.strides = {1, 2};
  auto diff = DiffTrees(left, right);
  ASSERT_OK(diff);
  EXPECT_TRUE(diff.value().empty());  // The same cells in another order of memory.

  right_memory[5] = 7;
  diff = DiffTrees(left, right);
  ASSERT_OK(diff);
  ASSERT_EQ(diff.value().mismatches.size(), 1u);
  EXPECT_EQ(diff.value().mismatches[0].path, "model.layers[0].w");
  EXPECT_EQ(diff.value().mismatches[0].what, "bytes of region [0:2, 0:3] differ");
  tensor.shards[0].region = B({2, 0}, {2, 3});
  EXPECT_THAT(DiffTrees(left, right).value().mismatches[0].what,
              testing::HasSubstr("regions [0:2, 0:3] and [2:4, 0:3]"));

  list.push_back(Common(1));
  list[1] = Common(2);
  right.get_if<TreeDict>()->items.erase("here");
  right.get_if<TreeDict>()->items["none"] = TreeTuple{};
  diff = DiffTrees(left, right);
  ASSERT_OK(diff);
  EXPECT_THAT(diff.value().only_left, testing::ElementsAre("here"));
  EXPECT_THAT(diff.value().only_right, testing::ElementsAre("model.layers[2]"));
  ASSERT_EQ(diff.value().mismatches.size(), 3u);
  EXPECT_EQ(diff.value().mismatches[1].left, "float");
  EXPECT_EQ(diff.value().mismatches[1].right, "int");
  EXPECT_EQ(diff.value().mismatches[2].left, "list");
  EXPECT_EQ(diff.value().mismatches[2].right, "tuple");
}

TEST(TreeTest, DeepTreesAreRefused) {
  StateTree deep = Common(1);
  for (int i = 0; i < kMaxTreeDepth; ++i) deep = TreeList{{std::move(deep)}};
  EXPECT_OK(DescribeTree(deep));
  EXPECT_OK(StructureOf(deep));
  deep = TreeList{{std::move(deep)}};
  EXPECT_THAT(DescribeTree(deep), HasMessage("at most 64 deep"));
  EXPECT_THAT(MergeTrees(deep, deep), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(DiffTrees(deep, deep), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(ExtractKinds(deep, {}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(StructureOf(deep), HasCode(Code::kInvalidArgument));
}

TEST(TreeTest, PrefixIsAddedToNames) {
  std::int32_t memory[6] = {};
  StateTree tree = Sample(memory);
  EXPECT_OK(AddPrefix(tree, "m."));
  const auto keys = [&tree] {
    std::vector<std::string> found;
    EXPECT_OK(ForEachLeaf(tree, [&](const TreePath&, const StateTree& leaf) {
      if (const auto* tensor = leaf.get_if<TreeTensor>()) found.push_back(tensor->key);
      if (const auto* object = leaf.get_if<TreeObject>()) found.push_back(object->key);
      return Status();
    }));
    return found;
  };
  using testing::ElementsAre;
  EXPECT_THAT(keys(), ElementsAre("m.model.layers.0.w", "m.rng"));
  EXPECT_OK(ReplacePrefix(tree, "m.", ""));
  EXPECT_THAT(keys(), ElementsAre("model.layers.0.w", "rng"));
  EXPECT_THAT(ReplacePrefix(tree, "model.", "decoder."),
              HasMessage("pair(1): key \"rng\" does not begin with \"model.\""));
  EXPECT_THAT(keys(), ElementsAre("model.layers.0.w", "rng"));  // None has changed.
  const std::vector<std::pair<std::string, std::string>> rules = {
      {"model.l", "L"}, {"model.", "never."}, {"x", "y"}};
  EXPECT_OK(MapPrefixes(tree, rules));
  EXPECT_THAT(keys(), ElementsAre("Layers.0.w", "rng"));

  StateTree other = Sample(memory);
  EXPECT_OK(AssignKeys(other, TreeNames::kReversible));
  tree = other;
  EXPECT_THAT(keys(), ElementsAre("model.layers.:0.w", "rng"));
}

TEST(TreeFlattenTest, FlattenAndUnflattenRoundTrip) {
  std::int32_t memory[6] = {1, 2, 3, 4, 5, 6};
  StateTree tree = Sample(memory);
  FlattenOptions options{.names = TreeNames::kReversible,
                         .structure = FlattenOptions::Structure::kCommon};
  StateDict state;
  ASSERT_OK(FlattenTree(tree, state, options));
  ASSERT_EQ(state.tensors().size(), 1u);
  EXPECT_EQ(state.tensors()[0].key, "model.layers.:0.w");
  EXPECT_EQ(state.objects()[0].key, "rng");
  EXPECT_EQ(state.common().size(), 5u);  // With the structure.
  EXPECT_TRUE(state.common().contains("numbered.#7"));
  EXPECT_EQ(state.locals().size(), 1u);

  // From the structure alone.
  const auto structure = TreeFromStructure(state.common().at("tree"));
  ASSERT_OK(structure);
  const auto back = UnflattenTree(structure.value(), SourceOf(state), {.names = options.names});
  ASSERT_OK(back);
  EXPECT_THAT(DescribeTree(back.value()), IsOkAndHolds(DescribeTree(tree).value()));
  auto diff = DiffTrees(tree, back.value());
  ASSERT_OK(diff);
  EXPECT_TRUE(diff.value().empty());

  // With a tree of the same form: tensors stay, values come.
  StateTree like = tree;
  EXPECT_OK(MapLeaves(like, [](const TreePath&, StateTree& leaf) {
    if (leaf.kind() == Kind::kCommon) leaf = Common("old");
    if (auto* object = leaf.get_if<TreeObject>()) object->bytes.clear();
    return Status();
  }));
  const auto filled = UnflattenTree(like, SourceOf(state), {.names = options.names});
  ASSERT_OK(filled);
  EXPECT_TRUE(DiffTrees(tree, filled.value()).value().empty());

  // What the source does not have is an error that says where, or stays.
  like.get_if<TreeDict>()->items["more"] = Common("kept");
  EXPECT_THAT(UnflattenTree(like, SourceOf(state), {.names = options.names}),
              HasMessage("more: value more: not there"));
  const auto kept =
      UnflattenTree(like, SourceOf(state), {.names = options.names, .keep_missing = true});
  ASSERT_OK(kept);
  EXPECT_EQ(*kept.value().get_if<TreeDict>()->items.at("more").get_if<CommonValue>(),
            CommonValue("kept"));
}

TEST(TreeFlattenTest, FlattenForLoadOmitsValues) {
  std::int32_t memory[6] = {};
  StateDict request;
  ASSERT_OK(FlattenTree(Sample(memory), request,
                        {.names = TreeNames::kReversible,
                         .for_load = true,
                         .structure = FlattenOptions::Structure::kCommon}));
  EXPECT_EQ(request.tensors()[0].key, "model.layers.:0.w");
  EXPECT_EQ(request.objects().size(), 1u);
  EXPECT_TRUE(request.objects()[0].bytes.empty());
  EXPECT_TRUE(request.common().empty());
  EXPECT_EQ(request.locals().size(), 1u);
}

TEST(TreeFlattenTest, RefusesTwoLeavesWithOneName) {
  std::int32_t memory[6] = {};
  const Shard shard{.global_shape = {6},
                    .region = B({0}, {6}),
                    .data = BufferView::Host(DType::kI32, static_cast<void*>(memory), {6})};
  const StateTree tree =
      TreeDict{.items = {{"a", TreeDict{.items = {{"b", Common(1)}}}}, {"a.b", shard}}};
  StateDict dotted;
  EXPECT_THAT(FlattenTree(tree, dotted),
              HasMessage("\"a.b\" and \"\"a.b\"\" would both be called \"a.b\""));
  EXPECT_FALSE(dotted.status().ok());
  StateDict reversible;
  EXPECT_OK(FlattenTree(tree, reversible, {.names = TreeNames::kReversible}));

  // The keys 1 and "1".
  StateDict keys;
  EXPECT_THAT(FlattenTree(TreeDict{.items = {{1, Common(1)}, {"1", Common(1)}}}, keys),
              HasMessage("would both be called \"1\""));

  // Two layers under one key that was given.
  const auto layer = [&shard](std::int64_t i) {
    return StateTree(TreeTensor{.key = "w", .shards = {Stacked(shard, 0, i, 2).value()}});
  };
  StateDict stacked;
  EXPECT_OK(FlattenTree(TreeList{{layer(0), layer(1)}}, stacked));
  EXPECT_EQ(stacked.tensors().size(), 2u);
  const auto structure = StructureOf(TreeList{{layer(0), layer(1)}});
  ASSERT_OK(structure);
  EXPECT_THAT(UnflattenTree(TreeFromStructure(structure.value()).value(), SourceOf(stacked)),
              HasMessage("would both be called \"w\""));
  // A key that was given and a path of that name.
  StateDict mixed;
  EXPECT_THAT(FlattenTree(TreeDict{.items = {{"w", shard}, {"x", layer(0)}}}, mixed),
              HasMessage("\"w\" and \"x\""));

  StateDict other;
  EXPECT_THAT(FlattenTree(shard, other), HasMessage("a tree of one tensor"));
  EXPECT_THAT(FlattenTree(TreeDict{.items = {{"tree", Common(1)}}}, other,
                          {.structure = FlattenOptions::Structure::kRank}),
              HasMessage("name of the structure"));
  EXPECT_THAT(FlattenTree(TreeDict{.items = {{"", Common(1)}}}, other), HasMessage("empty"));
}

// A nested state is loaded from the checkpoint alone: its structure, its values, and its tensors
// into memory that the request allocates.
TEST(TreeFlattenTest, LoadsWithoutATemplate) {
  const TempDir dir;
  const std::string path = dir.Join("store/step-1");
  const Array truth = Array::Counting({6, 4});
  const auto state_of = [&truth](int rank, std::vector<Piece>& memory) -> StateTree {
    memory.push_back(MakePiece(truth, B({rank * 3, 0}, {3, 4})));
    return TreeDict{
        .items = {{"model", TreeList{{memory.back().shard, TreeTuple{{CommonValue(3)}}}}},
                  {std::int64_t{5}, TreeObject{.key = {}, .bytes = "seed", .place = {}}},
                  {"nothing", TreeDict{}},
                  {"here", TreeLocal{CommonValue(rank)}}}};
  };
  const FlattenOptions options{.names = TreeNames::kReversible,
                               .structure = FlattenOptions::Structure::kCommon};
  std::vector<std::vector<Piece>> memory(2);
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    StateDict state;
    auto& mine = memory[static_cast<std::size_t>(comm.rank())];
    // The state remembers a failure, which then fails the save on both ranks.
    (void)FlattenTree(state_of(comm.rank(), mine), state, options);
    return Save(state, path, comm).status();
  }));

  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_OK(checkpoint);
  const auto structure = checkpoint.value().common("tree");
  ASSERT_OK(structure);
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    StateDict request;
    const Region mine = B({0, comm.rank() * 2}, {6, 2});
    const auto ask = [&]() -> Result<StateTree> {
      TENSORMOUNT_ASSIGN_OR_RETURN(StateTree tree, TreeFromStructure(structure.value()));
      TENSORMOUNT_RETURN_IF_ERROR(AssignKeys(tree, options.names));
      TENSORMOUNT_RETURN_IF_ERROR(MapLeaves(tree, [&](const TreePath&, StateTree& leaf) {
        if (auto* tensor = leaf.get_if<TreeTensor>()) {
          tensor->shards = {MetadataOnly(DType::kI32, truth.shape, mine)};
        }
        if (auto* local = leaf.get_if<TreeLocal>()) local->value = comm.rank() + 10;
        return Status();
      }));
      TENSORMOUNT_RETURN_IF_ERROR(
          FlattenTree(tree, request, {.names = options.names, .for_load = true}));
      TENSORMOUNT_RETURN_IF_ERROR(request.AllocateData());
      return tree;
    };
    const Result<StateTree> tree = ask();
    if (!tree.ok()) (void)request.Fail(tree.status());
    const Result<LoadReport> report = Load(request, path, comm);
    if (!report.ok()) return report.status();
    const auto back =
        UnflattenTree(tree.value(), SourceOf(request, report.value()), {.names = options.names});
    if (!back.ok()) return back.status();
    const Piece expected_data = MakePiece(truth, mine);
    const StateTree expected = TreeDict{
        .items = {
            {"model", TreeList{{TreeTensor{.key = "model.:0", .shards = {expected_data.shard}},
                                TreeTuple{{CommonValue(3)}}}}},
            {std::int64_t{5}, TreeObject{.key = "#5", .bytes = "seed", .place = {}}},
            {"nothing", TreeDict{}},
            {"here", TreeLocal{CommonValue(comm.rank() + 10)}}}};
    const auto diff = DiffTrees(expected, back.value());
    if (!diff.ok()) return diff.status();
    EXPECT_TRUE(diff.value().empty()) << DescribeTree(back.value()).value();
    for (const TreeMismatch& m : diff.value().mismatches) ADD_FAILURE() << m.path << ": " << m.what;
    return Status();
  }));
}

TEST(TreeFlattenTest, DamagedStructuresAreDataLoss) {
  std::int32_t memory[6] = {};
  const CommonValue good = StructureOf(Sample(memory)).value();
  ASSERT_OK(TreeFromStructure(good));
  EXPECT_THAT(TreeFromStructure(CommonValue(1)), HasCode(Code::kDataLoss));
  EXPECT_THAT(TreeFromStructure(CommonList{}), HasMessage("node 0: is missing"));
  const std::vector<CommonValue>& nodes = good.get_if<CommonList>()->items;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    CommonList shorter{nodes};
    shorter.items.resize(i);
    EXPECT_THAT(TreeFromStructure(shorter), HasCode(Code::kDataLoss));
    CommonList longer{nodes};
    longer.items.push_back(nodes[i]);
    EXPECT_THAT(TreeFromStructure(longer), HasCode(Code::kDataLoss));
    for (const CommonValue& bad : std::vector<CommonValue>{
             1, std::numeric_limits<std::int64_t>::max(), -1, "cat", CommonNone()}) {
      for (std::size_t field = 0; field < nodes[i].get_if<CommonTuple>()->items.size(); ++field) {
        CommonList damaged{nodes};
        damaged.items[i].get_if<CommonTuple>()->items[field] = bad;
        const auto tree = TreeFromStructure(damaged);  // Sometimes another tree, never a crash.
        if (!tree.ok()) {
          EXPECT_THAT(tree, HasCode(Code::kDataLoss));
        }
      }
      CommonList damaged{nodes};
      damaged.items[i] = bad;
      EXPECT_THAT(TreeFromStructure(damaged), HasCode(Code::kDataLoss));
    }
  }
}

}  // namespace
}  // namespace tensormount::examples
