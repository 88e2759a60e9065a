// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>

#include "tests/index/store_test_support.h"
#include "tests/support/random.h"
#include "tests/support/synthetic_staging.h"

namespace tensormount {
namespace {

using PublishScaleTest = StoreTest;

// With TENSORMOUNT_TEST_SCALE=10 the million chunks of docs/performance.md.
TEST_F(PublishScaleTest, ManyChunksArePublishedComparedWithTheirParentAndOpened) {
  const SyntheticSpec spec{.tensors = TestScale(1000), .chunks_per_tensor = 100, .writers = 4};
  const Store store = MakeStore();
  for (const char* name : {"parent", "child"}) {
    const auto staging = store.Begin(name, IfExists::kFail);
    ASSERT_OK(staging);
    ASSERT_OK(WriteSyntheticStaging(fs(), staging.value(), spec));
    const bool first = name[0] == 'p';
    const auto start = std::chrono::steady_clock::now();
    const auto published =
        store.Publish(staging.value(), Inventory(), {.now = first ? 5000 : 6000});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    ASSERT_OK(published);
    const Store::Published& p = published.value();
    EXPECT_EQ(p.tensors, static_cast<std::uint64_t>(spec.tensors));
    EXPECT_EQ(p.chunks, static_cast<std::uint64_t>(spec.tensors) * 100);
    std::printf("%s: %llu chunks: %.3f s (manifests %.3f, index %.3f, rest %.3f)\n", name,
                static_cast<unsigned long long>(p.chunks), took.count(), p.manifests_seconds,
                p.index_seconds, p.publish_seconds);
  }
  const auto opened = OpenedCheckpoint::Open(fs(), InStore("child"), {});
  ASSERT_OK(opened);
  const CheckpointIndex& index = opened.value()->index();
  EXPECT_FALSE(opened.value()->index_was_rebuilt());
  const auto last = index.At(index.tensor_count() - 1);
  ASSERT_OK(last);
  EXPECT_EQ(last.value().mtime, 5000);
  const auto extents = index.Extents(last.value().ordinal);
  ASSERT_OK(extents);
  EXPECT_EQ(extents.value()->size(), 100u);
}

}  // namespace
}  // namespace tensormount
