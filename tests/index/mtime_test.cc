// SPDX-License-Identifier: Apache-2.0
#include "index/store/mtime.h"

#include <limits>

#include "tests/index/store_test_support.h"

namespace tensormount {
namespace {

using MtimeTest = StoreTest;

std::map<std::string, std::int64_t> Only(std::map<std::string, std::int64_t> all,
                                         std::int64_t other_than) {
  std::erase_if(all, [&](const auto& e) { return e.second == other_than; });
  return all;
}

TEST_F(MtimeTest, FirstCheckpointHasItsPublishTime) {
  ASSERT_OK(Save("a", DefaultTinySpec(), {.now = 5000}));
  const auto times = MtimesOf(InStore("a"));
  EXPECT_EQ(times.size(), 11u);  // 6 tensors, 3 parts of objects, 2 JSON files.
  EXPECT_EQ(Only(times, 5000), (std::map<std::string, std::int64_t>{}));
}

TEST_F(MtimeTest, OnlyChangedEntriesGetALaterMtime) {
  TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec, {.now = 5000}));
  spec.tensors[1].seed = 777;
  spec.objects[1].bytes = "another state here";
  ASSERT_OK(Save("b", spec, {.now = 5000}));
  EXPECT_EQ(Only(MtimesOf(InStore("b")), 5000),
            (std::map<std::string, std::int64_t>{
                {"layers.0.w", 5001}, {"object rng[1]", 5001}, {"checkpoint.json", 5001}}));
  // And back again, a clock that went backwards: still later than before.
  spec.tensors[1].seed = DefaultTinySpec().tensors[1].seed;
  ASSERT_OK(Save("c", spec, {.now = 4000}));
  EXPECT_EQ(Only(MtimesOf(InStore("c")), 5000),
            (std::map<std::string, std::int64_t>{
                {"layers.0.w", 5002}, {"object rng[1]", 5001}, {"checkpoint.json", 5002}}));
}

TEST_F(MtimeTest, ReshardingKeepsMtimes) {
  TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec, {.now = 5000}));
  for (TinyTensor& t : spec.tensors) {
    t.parts = 1;
    t.tensor_file = false;
  }
  ASSERT_OK(Save("b", spec, {.now = 9000}));
  EXPECT_EQ(Only(MtimesOf(InStore("b")), 5000),
            (std::map<std::string, std::int64_t>{{"checkpoint.json", 9000}}));
}

TEST_F(MtimeTest, AnotherDtypeOrShapeChangesTheMtime) {
  TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec, {.now = 5000}));
  spec.tensors[0].dtype = DType::kF16;
  spec.tensors[3].shape = {4, 8};
  ASSERT_OK(Save("b", spec, {.now = 6000}));
  EXPECT_EQ(Only(MtimesOf(InStore("b")), 5000),
            (std::map<std::string, std::int64_t>{
                {"embed.weight", 6000}, {"bias", 6000}, {"checkpoint.json", 6000}}));
}

TEST_F(MtimeTest, ReaddedTensorHasTheLatestMtime) {
  const TinySpec full = DefaultTinySpec(1);
  TinySpec without = full;
  without.tensors.erase(without.tensors.begin());
  TinySpec other = full;
  other.tensors[0].seed = 999;
  ASSERT_OK(Save("a", full, {.now = 5000}));
  ASSERT_OK(Save("b", without, {.now = 5000}));
  ASSERT_OK(Save("c", other, {.now = 5000}));
  // In "a" it had 5000 and other bytes: rsync of "c" over "a" must move it.
  EXPECT_EQ(MtimesOf(InStore("c"))["embed.weight"], 5002);
}

TEST_F(MtimeTest, CommonValuesAreComparedBitByBit) {
  TinySpec spec = DefaultTinySpec();
  spec.common["loss"] = std::numeric_limits<double>::quiet_NaN();
  ASSERT_OK(Save("a", spec, {.now = 5000}));
  ASSERT_OK(Save("b", spec, {.now = 6000}));
  EXPECT_EQ(MtimesOf(InStore("b"))["common.json"], 5000);
  spec.common["lr"] = 0.0;
  ASSERT_OK(Save("c", spec, {.now = 7000}));
  EXPECT_EQ(MtimesOf(InStore("c"))["common.json"], 7000);
  spec.common["lr"] = -0.0;
  ASSERT_OK(Save("d", spec, {.now = 7000}));
  EXPECT_EQ(MtimesOf(InStore("d"))["common.json"], 7001);
}

TEST_F(MtimeTest, ReplacedCheckpointCountsAsAParent) {
  const TinySpec first = DefaultTinySpec(1);
  TinySpec second = first;
  second.tensors[0].seed = 50;
  ASSERT_OK(Save("a", first, {.now = 5000}));
  ASSERT_OK(Save("b", second, {.now = 5000}));
  // Replaces "a"; its parent is "b". Equal to what it replaces, not to its parent.
  ASSERT_OK(Save("a", first, {.if_exists = IfExists::kReplace, .now = 5000}));
  EXPECT_EQ(
      Only(MtimesOf(InStore("a")), 5000),
      (std::map<std::string, std::int64_t>{{"embed.weight", 5002}, {"checkpoint.json", 5002}}));
  // The other way round: equal to the parent, not to what it replaces.
  ASSERT_OK(Save("b", first, {.if_exists = IfExists::kReplace, .now = 5000}));
  EXPECT_EQ(MtimesOf(InStore("b"))["embed.weight"], 5003);
}

TEST_F(MtimeTest, RemovedParentStillDeterminesMtimes) {
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec, {.now = 5000}));
  const Store store = MakeStore();
  const Staging staging = Written(store, "b", spec);
  ASSERT_OK(store.Remove("a"));
  ASSERT_OK(store.Publish(staging, TinyCoordinator(spec), {.now = 6000}));
  EXPECT_EQ(MtimesOf(InStore("b"))["bias"], 5000);
}

TEST_F(MtimeTest, DamagedParentDoesNotStopASave) {
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec, {.now = 5000}));
  const Store store = MakeStore();
  const Staging staging = Written(store, "b", spec);
  WriteWholeFile(InStore("a/COMMIT"), "gone");
  ASSERT_OK(store.Publish(staging, TinyCoordinator(spec), {.now = 6000}));
  EXPECT_EQ(MtimesOf(InStore("b"))["bias"], 6000);
}

}  // namespace
}  // namespace tensormount
