// SPDX-License-Identifier: Apache-2.0
#include "fs/views/shown_tensors.h"

#include <ctime>

#include <nlohmann/json.hpp>

#include "index/read/checkpoint.h"
#include "index/records/name_binding.h"
#include "index/records/name_rules.h"
#include "shard/npy.h"
#include "tests/fs/vfs_ops.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

// What this thread has computed so far.
double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class ShownTest : public testing::Test {
 protected:
  std::string store() const { return dir_.Join("store"); }
  void Write(const TinySpec& spec) {
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store(), "step-1", spec));
  }
  Status TryOpen(const std::string& source, std::string_view rules) {
    VfsOptions options{.source = source, .list_views = true};
    if (!rules.empty()) {
      options.map.rules = rules;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(vfs_, Vfs::Open(HostFileSystem(), options));
    ops_ = std::make_unique<VfsOps>(*vfs_);
    return {};
  }
  void Open(std::string_view rules) { ASSERT_OK(TryOpen(store() + "/step-1", rules)); }
  nlohmann::json Json(const std::string& path) {
    return nlohmann::json::parse(ops_->ReadAll(path).value());
  }

  TempDir dir_;
  std::unique_ptr<Vfs> vfs_;
  std::unique_ptr<VfsOps> ops_;
};

constexpr std::string_view kShownRules = R"([
  {"key": "bias", "to": "zz/bias"},
  {"match": "layers.*.*", "to": "blocks/*/*"},
  {"key": "rng", "to": "random"},
  {"drop": "step"}])";

// The spec as a mount with kRules shows it.
TinySpec Renamed(TinySpec spec) {
  const KeyMap map = KeyMap::FromJson(kShownRules).value();
  std::erase_if(spec.tensors, [&](const TinyTensor& t) { return map.Apply(t.key).empty(); });
  for (TinyTensor& tensor : spec.tensors) tensor.key = map.Apply(tensor.key);
  for (TinyObject& object : spec.objects) object.key = map.Apply(object.key);
  return spec;
}

TEST_F(ShownTest, EveryViewShowsMappedNames) {
  Write(DefaultTinySpec());
  Open(kShownRules);
  const TinySpec spec = Renamed(DefaultTinySpec());
  CheckTensorFiles(*ops_, "", spec);
  CheckNpyFiles(*ops_, "", spec);
  CheckSafetensors(*ops_, "", spec);
  CheckObjects(*ops_, "", spec);
  CheckListing(*ops_, "", spec, true);
  EXPECT_THAT(ops_->List("tensors"),
              IsOkAndHolds(ElementsAre("blocks", "embed.weight", "empty", "zz")));
  EXPECT_THAT(ops_->List("tensors/blocks/0"), IsOkAndHolds(ElementsAre("cols", "w")));
  EXPECT_THAT(ops_->Stat("tensors/bias"), HasCode(Code::kNotFound));
  EXPECT_THAT(ops_->Stat("tensors/step"), HasCode(Code::kNotFound));
  EXPECT_THAT(Json("checkpoint.json")["tensor_count"], 5);
  EXPECT_EQ(Json("checkpoint.json")["tensors"][4]["key"], "zz/bias");
  EXPECT_EQ(Json("extents/blocks/0/w.json")["key"], "blocks/0/w");
}

TEST_F(ShownTest, AttributesGiveTheStoredKey) {
  Write(DefaultTinySpec());
  Open(kShownRules);
  EXPECT_THAT(ops_->Xattr("tensors/zz/bias", "user.tensormount.key"), IsOkAndHolds("zz/bias"));
  EXPECT_THAT(ops_->Xattr("tensors/zz/bias", "user.tensormount.stored_key"), IsOkAndHolds("bias"));
  EXPECT_THAT(ops_->Xattr("objects/random/0", "user.tensormount.stored_key"), IsOkAndHolds("rng"));
  EXPECT_THAT(ops_->Xattrs("tensors/embed.weight"),
              IsOkAndHolds(Not(Contains("user.tensormount.stored_key"))));
}

TEST_F(ShownTest, KeyCollisionFailsTheMountWithAMessage) {
  Write(DefaultTinySpec());
  for (const std::string& source : {store() + "/step-1", store()}) {
    const Status status = TryOpen(source, R"([{"key": "bias", "to": "step"}])");
    ASSERT_THAT(status, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(status.message(), HasSubstr("bias and step would both be called step"));
  }
}

TEST_F(ShownTest, StoreMountMapsKeysOfEveryCheckpoint) {
  Write(DefaultTinySpec());
  ASSERT_OK(TryOpen(store(), kShownRules));
  EXPECT_OK(ops_->Stat("step-1/tensors/zz/bias"));
}

TEST_F(ShownTest, CheckpointThatTheMapDoesNotFitFailsAlone) {
  TinySpec spec = DefaultTinySpec();
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store(), "step-0", spec));
  spec.tensors[0].key = "other";
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store(), "step-1", spec));
  ASSERT_OK(TryOpen(store(), R"([{"key": "embed.weight", "to": "bias"}])"));
  EXPECT_OK(ops_->Stat("step-1/tensors/other"));
  EXPECT_THAT(ops_->Stat("step-0/tensors"), HasCode(Code::kInvalidArgument));
}

// 100,000 keys: no call looks at all of them.
TEST(ShownTensorsTest, LookupsOfManyRenamedKeysAreCheap) {
  Inventory inventory;
  inventory.info.uuid = {1, 2};
  for (int i = 0; i < 100'000; ++i) {
    char key[32];
    std::snprintf(key, sizeof key, "layers.%06d.w", i);
    inventory.tensors.emplace_back(TensorMeta::Make(key, DType::kF32, {4}).value());
  }
  ASSERT_OK_AND_ASSIGN(const auto stored, CheckpointIndex::FromInventory(inventory));
  ASSERT_OK_AND_ASSIGN(const NameRules map,
                       NameRules::FromJson(R"([{"match": "layers.*.w", "to": "w/*"}])"));
  ASSERT_OK_AND_ASSIGN(const auto binding, NameBinding::Bind(*stored, map));
  ASSERT_OK_AND_ASSIGN(const auto index, CheckpointIndex::Mapped(stored, binding));
  const ShownTensors shown(*index);
  const KeyTree tree(shown);
  ASSERT_OK_AND_ASSIGN(const TreeChild folder, tree.Lookup({}, "w"));
  const double before = ThreadSeconds();
  constexpr int kLookups = 2000;
  for (int i = 0; i < kLookups; ++i) {
    char name[32];
    std::snprintf(name, sizeof name, "%06d", i * 49);
    ASSERT_OK_AND_ASSIGN(const TreeChild child,
                         tree.Lookup({.first = folder.ordinal, .depth = folder.depth}, name));
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, stored->At(*binding->WholeSource(child.ordinal)));
    ASSERT_EQ(entry.meta.key(), "layers." + std::string(name) + ".w");
  }
  // 50 us each where a scan would take milliseconds. Of this thread's own time: others may take the
  // rest.
  EXPECT_LT(ThreadSeconds() - before, kLookups * 500e-6);
}

TinySpec StackedSpec() {
  TinySpec spec;
  spec.tensors = {
      {.key = "w", .dtype = DType::kF32, .shape = {4, 6, 10}, .seed = 3, .parts = 2, .axis = 1},
      {.key = "deep", .dtype = DType::kF16, .shape = {12, 5}, .seed = 4, .tensor_file = true},
      {.key = "blocks/0/bias", .dtype = DType::kU8, .shape = {7}, .seed = 5},
      {.key = "layers.2.w", .dtype = DType::kU8, .shape = {3}, .seed = 6}};
  spec.common.emplace("$layers.w", "layers.{}.w");
  spec.common.emplace("$layers.deep", "blocks/{}/deep");
  return spec;
}

TEST_F(ShownTest, LayersOpenByNameAndAreNotListed) {
  const TinySpec spec = StackedSpec();
  Write(spec);
  Open("");
  const std::string stack = TinyBytes(spec.tensors[0]);
  for (const int n : {0, 1, 3}) {
    const std::string path = "tensors/layers." + std::to_string(n) + ".w";
    const std::string want = stack.substr(static_cast<std::size_t>(n) * 240, 240);
    ASSERT_OK_AND_ASSIGN(const FileStat stat, ops_->Stat(path));
    EXPECT_EQ(stat.size, 240u);
    EXPECT_EQ(stat.mtime, ops_->Stat("tensors/w").value().mtime);
    EXPECT_THAT(ops_->ReadAll(path), IsOkAndHolds(want));
    EXPECT_THAT(ops_->ReadAll("npy/layers." + std::to_string(n) + ".w.npy"),
                IsOkAndHolds(MakeNpyHeader(DType::kF32, {6, 10}).value() + want));
    EXPECT_THAT(ops_->Xattr(path, "user.tensormount.shape"), IsOkAndHolds("[6, 10]"));
    EXPECT_THAT(ops_->Xattr(path, "user.tensormount.stacked_key"), IsOkAndHolds("w"));
    EXPECT_THAT(ops_->Xattr(path, "user.tensormount.layer"), IsOkAndHolds(std::to_string(n)));
    EXPECT_THAT(ops_->Xattrs(path), IsOkAndHolds(Not(Contains("user.tensormount.digest"))));
  }
  // A tensor of that very name goes before.
  EXPECT_EQ(ops_->Stat("tensors/layers.2.w").value().size, 3u);
  for (const char* none : {"tensors/layers.4.w", "tensors/layers.01.w", "extents/layers.0.w.json",
                           "npy/layers.0.w", "tensors/layers.0.w.npy", "tensors/layers.0.w/x"}) {
    EXPECT_THAT(ops_->Stat(none), Not(IsOk())) << none;
  }
  EXPECT_THAT(ops_->List("tensors"),
              IsOkAndHolds(ElementsAre("blocks", "deep", "layers.2.w", "w")));
  EXPECT_EQ(Json("checkpoint.json")["layers"]["w"], "layers.{}.w");
  EXPECT_EQ(Json("checkpoint.json")["tensor_count"], 4);
  EXPECT_EQ(Json("common.json"), nlohmann::json::object());
}

TEST_F(ShownTest, LayersOpenBelowListedAndUnlistedDirectories) {
  const TinySpec spec = StackedSpec();
  Write(spec);
  Open("");
  const std::string stack = TinyBytes(spec.tensors[1]);
  // blocks/0 has a listed file besides, blocks/11 nothing.
  EXPECT_THAT(ops_->ReadAll("tensors/blocks/0/deep"), IsOkAndHolds(stack.substr(0, 10)));
  EXPECT_THAT(ops_->ReadAll("tensors/blocks/11/deep"), IsOkAndHolds(stack.substr(110, 10)));
  EXPECT_EQ(ops_->Stat("tensors/blocks/11").value().kind, FileKind::kDirectory);
  EXPECT_THAT(ops_->List("tensors/blocks/11"), IsOkAndHolds(ElementsAre()));
  EXPECT_THAT(ops_->List("tensors/blocks"), IsOkAndHolds(ElementsAre("0")));
  EXPECT_THAT(ops_->List("tensors/blocks/0"), IsOkAndHolds(ElementsAre("bias")));
  EXPECT_THAT(ops_->Stat("tensors/blocks/12"), HasCode(Code::kNotFound));
}

TEST_F(ShownTest, LayersFollowTheMap) {
  const TinySpec spec = StackedSpec();
  Write(spec);
  Open(R"([{"key": "layers.2.w", "to": "other"}, {"match": "layers.*.w", "to": "h/*.weight"},
           {"key": "w", "to": "stack"}, {"drop": "blocks/{}*"}])");
  EXPECT_THAT(ops_->ReadAll("tensors/h/2.weight"),
              IsOkAndHolds(TinyBytes(spec.tensors[0]).substr(480, 240)));
  EXPECT_THAT(ops_->Xattr("tensors/h/2.weight", "user.tensormount.stacked_key"),
              IsOkAndHolds("stack"));
  EXPECT_THAT(ops_->Stat("tensors/layers.0.w"), HasCode(Code::kNotFound));
  EXPECT_THAT(ops_->Stat("tensors/blocks/3/deep"), HasCode(Code::kNotFound));
}

}  // namespace
}  // namespace tensormount::fs
