// SPDX-License-Identifier: Apache-2.0
#include "index/read/known_defects.h"

#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

CommonList DictNode(CommonList keys) { return CommonList{{"dict", std::move(keys)}}; }
CommonList TensorNode(std::string key) { return CommonList{{"tensor", std::move(key)}}; }
CommonValue MadeStructure(CommonList nodes) {
  return CommonDict{{{"version", 1}, {"nodes", std::move(nodes)}}};
}

class KnownDefectsTest : public testing::Test {
 protected:
  std::vector<std::string> Notes(const TinySpec& spec) {
    const std::string name = "step-" + std::to_string(++made_);
    const auto made = WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), name, spec);
    EXPECT_OK(made);
    auto opened = OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("store/" + name), {});
    EXPECT_OK(opened);
    return opened.ok() ? FindKnownDefects(*opened.value()) : std::vector<std::string>{"not opened"};
  }

  TempDir dir_;
  int made_ = 0;
};

TEST_F(KnownDefectsTest, SoundCheckpointHasNoNotes) {
  EXPECT_THAT(Notes(DefaultTinySpec()), IsEmpty());
}

TEST_F(KnownDefectsTest, EmptySaveOfDcpPlanCachingIsNoted) {
  EXPECT_THAT(Notes(TinySpec()),
              ElementsAre(HasSubstr("contains no tensor, no object and no common value")));
  TinySpec spec;
  spec.common["tensormount.dcp.0"] =
      CommonDict{{{"dict", CommonList{{CommonList{{"m.w", CommonTuple{{"m", "w"}}}}}}}}};
  EXPECT_THAT(Notes(spec), ElementsAre(HasSubstr("had 1 value (m.w), but none of them is stored")));
  spec.tensors = {{.key = "m.w", .dtype = DType::kF32, .shape = Dims({2})}};
  EXPECT_THAT(Notes(spec), IsEmpty());
}

TEST_F(KnownDefectsTest, TextKeysInOptimizerStateAreNoted) {
  const auto spec = [](const CommonValue& key, const CommonValue& param) {
    TinySpec made;
    made.tensors = {{.key = "optim.state.0.m", .dtype = DType::kF32, .shape = Dims({2})}};
    made.common["torch.planner_data"] =
        CommonDict{{{"optim.state.0.m", CommonTuple{{"optim", "state", key, "m"}}}}};
    made.common["optim.param_groups"] = CommonList{{CommonDict{{{"params", CommonList{{param}}}}}}};
    return made;
  };
  EXPECT_THAT(Notes(spec("0", 0)), ElementsAre(HasSubstr("optim.state has text keys (\"0\")")));
  EXPECT_THAT(Notes(spec(CommonList{{0}}, 0)), IsEmpty());
  EXPECT_THAT(Notes(spec("0", "0")), IsEmpty());
  // Of torch.distributed.checkpoint, where text is right.
  TinySpec dcp = spec("0", 0);
  dcp.common.erase("optim.param_groups");
  dcp.common["optim.param_groups.0.params"] = CommonList{{0}};
  EXPECT_THAT(Notes(dcp), IsEmpty());
}

TEST_F(KnownDefectsTest, TiesOfOnlySomeRanksAreNoted) {
  TinySpec spec;
  spec.tensors = {{.key = "a", .dtype = DType::kF32, .shape = Dims({2})},
                  {.key = "b", .dtype = DType::kF32, .shape = Dims({2}), .seed = 1}};
  const CommonValue tied = MadeStructure({{DictNode({{"a", "b"}}), "tensor", TensorNode("a")}});
  spec.common["tensormount.tree.1"] = tied;
  EXPECT_THAT(Notes(spec), ElementsAre(HasSubstr("stored separately: b with a")));
  spec.common["tensormount.tree.2"] = MadeStructure({{DictNode({{"a", "b"}}), "tensor", "tensor"}});
  EXPECT_THAT(Notes(spec), ElementsAre(HasSubstr("stored separately: b with a")));
  TinySpec right;
  right.tensors = {spec.tensors.front()};
  right.common["tensormount.tree.1"] = tied;
  EXPECT_THAT(Notes(right), IsEmpty());
}

// One number, a byte: of the seed that gives it.
TinyTensor NumberOfSeed(std::string key, char number) {
  TinyTensor tensor{.key = std::move(key), .dtype = DType::kU8, .shape = Dims()};
  while (TinyBytes(tensor)[0] != number) ++tensor.seed;
  return tensor;
}

TEST_F(KnownDefectsTest, MomentsAtStepZeroAreNoted) {
  struct Case {
    std::string option;
    std::string moment;
    char fresh;
    char stepped;
  };
  for (const Case& one : {Case{"momentum_decay", "mu_product", 1, 2}, Case{"t0", "eta", 3, 0},
                          Case{"step_sizes", "step_size", 3, 0}}) {
    for (const char step : {char{0}, char{1}}) {
      for (const bool stepped : {false, true}) {
        TinySpec spec;
        spec.common["optim.param_groups.0." + one.option] = 0.5;
        spec.tensors = {
            NumberOfSeed("optim.state.w." + one.moment, stepped ? one.stepped : one.fresh),
            NumberOfSeed("optim.state.w.step", step)};
        if (stepped && step == 0) {
          EXPECT_THAT(Notes(spec), ElementsAre(HasSubstr("(optim.state.w) have step 0")));
        } else {
          EXPECT_THAT(Notes(spec), IsEmpty()) << one.moment;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tensormount
