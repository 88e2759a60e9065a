// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/fs/vfs_ops.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

CommonValue Dict(std::map<CommonKey, CommonValue> items) { return CommonDict{std::move(items)}; }
CommonKey Key(const char* text) { return std::string(text); }

class CommonJsonTest : public testing::Test {
 protected:
  std::string Read(const TinySpec& spec, const std::string& name) {
    const std::string store = dir_.Join("store");
    EXPECT_OK(WriteTinyCheckpoint(HostFileSystem(), store, "step-1", spec));
    auto vfs = Vfs::Open(HostFileSystem(), {.source = store + "/step-1"});
    if (!vfs.ok()) return vfs.status().ToString();
    const Result<std::string> text = VfsOps(*vfs.value()).ReadAll(name);
    return text.ok() ? text.value() : text.status().ToString();
  }

  TempDir dir_;
};

TEST_F(CommonJsonTest, ShowsValuesBeforeReservedFields) {
  TinySpec spec = DefaultTinySpec();
  spec.common = {{"args", Dict({{Key("betas"), CommonTuple{{0.9, HUGE_VAL}}}})},
                 {"odd \"name\"", std::int64_t{9007199254740993}},
                 {"$content", Dict({{Key("model"), "tiny"}, {CommonKey(std::int64_t{1}), 2}})},
                 {"$rank.0", Dict({{Key("seed"), 7}})},
                 {"$rank.10", Dict({{Key("rng"), CommonBytes{"\x01"}}})},
                 {"$rank.9", Dict({})},
                 {"$of-a-newer-version", 1}};
  const std::string text = Read(spec, "common.json");
  EXPECT_EQ(text, R"({
  "args": {"betas":{"$tuple":[0.9,{"$float":"inf"}]}},
  "odd \"name\"": 9007199254740993,
  "$content": {"$dict":[[1,2],["model","tiny"]]},
  "$ranks": {
    "0": {"seed":7},
    "9": {},
    "10": {"rng":{"$bytes":"01"}}
  }
}
)");
  // Each value reads back as what it was.
  const auto json = nlohmann::ordered_json::parse(text);
  EXPECT_THAT(CommonFromJson(json.at("args").dump()), IsOkAndHolds(spec.common.at("args")));
  EXPECT_THAT(CommonFromJson(json.at("$content").dump()), IsOkAndHolds(spec.common.at("$content")));
}

TEST_F(CommonJsonTest, CheckpointJsonShowsContentMetadata) {
  TinySpec spec = DefaultTinySpec();
  spec.common["$content"] = Dict({{Key("model"), "tiny"}});
  EXPECT_EQ(nlohmann::json::parse(Read(spec, "checkpoint.json")).at("content"),
            nlohmann::json::parse(R"({"model": "tiny"})"));
}

TEST_F(CommonJsonTest, EmptyStateShowsNoReservedFields) {
  TinySpec spec = DefaultTinySpec();
  spec.common = {};
  EXPECT_EQ(Read(spec, "common.json"), "{}\n");
}

}  // namespace
}  // namespace tensormount::fs
