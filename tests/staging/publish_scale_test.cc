// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "tests/staging/staging_test_support.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

class PublishScaleTest : public StagingTest {};

double CpuSeconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Many tensors of eight extents each by two mounts. TENSORMOUNT_TEST_SCALE=10: 10,000 of them.
TEST_F(PublishScaleTest, ManyTensorsArePublishedQuickly) {
  const int tensors = TestScale(1000);
  const Store store = MakeStore();
  std::string schema = "{\"tensors\": {";
  for (int i = 0; i < tensors; ++i) {
    schema += (i > 0 ? ", \"" : "\"") + std::string("layers.") + std::to_string(i) +
              "\": {\"dtype\": \"bf16\", \"shape\": [16, 8]}";
  }
  const Staging staging = Make(store, "step", schema + "}}");
  const std::string bytes = Random(1).Bytes(256);
  {
    const StagingSchema read = ReadSchemas(fs(), staging.directory).value();
    TestMount a(fs(), staging, 1);
    TestMount b(fs(), staging, 2);
    for (const auto& [key, meta] : read.tensors()) {
      for (TestMount* m : {&a, &b}) {
        const std::int64_t row = m == &a ? 0 : 8;
        const std::uint32_t target = m->Target(meta, Box::Make({row, 0}, {8, 8}).value());
        for (std::uint64_t i = 0; i < 4; ++i) {
          m->Write(target, 32 * i,
                   std::string_view(bytes).substr(static_cast<std::size_t>(row) * 16 + 32 * i, 32));
        }
      }
    }
    ASSERT_OK(a.Flush());
    ASSERT_OK(b.Flush());
  }
  const double cpu = CpuSeconds();
  const auto begin = std::chrono::steady_clock::now();
  const auto published = PublishStaging(store, fs(), "step", "step", nullptr);
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  ASSERT_OK(published);
  const double used = CpuSeconds() - cpu;
  std::printf(
      "%d tensors of 8 extents: %.3f s, %.3f s of CPU; manifests %.3f, index %.3f, rest %.3f\n",
      tensors, took, used, published.value().manifests_seconds, published.value().index_seconds,
      published.value().publish_seconds);
  EXPECT_EQ(published.value().chunks, 8u * static_cast<std::uint64_t>(tensors));
  EXPECT_LT(used, 0.004 * std::max(tensors, 1000)) << "linear, with room for slow builds";
  EXPECT_EQ(BytesOf("step", "layers.7"), bytes);
}

}  // namespace
}  // namespace tensormount::fs
