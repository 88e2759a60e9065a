// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <set>
#include <string>

#include "bench/synthetic_staging.h"
#include "tests/index/store_test_support.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

using PublishScaleTest = StoreTest;

// With TENSORMOUNT_TEST_SCALE=10 the million chunks of docs/performance.md.
TEST_F(PublishScaleTest, ManyChunksArePublishedComparedAndOpened) {
  const SyntheticSpec spec{.tensors = TestScale(1000), .chunks_per_tensor = 100, .writers = 4};
  const Store store = MakeStore();
  std::set<std::string> roots;
  for (const char* name : {"parent", "child"}) {
    const auto staging = store.Begin(name, IfExists::kFail);
    ASSERT_OK(staging);
    ASSERT_OK(WriteSyntheticStaging(fs(), staging.value(), spec));
    const bool first = name[0] == 'p';
    const auto start = std::chrono::steady_clock::now();
    const auto published =
        store.Publish(staging.value(), Inventory(),
                      {.now = first ? 5000 : 6000, .rows_in_memory = first ? 0u : UINT64_MAX});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    ASSERT_OK(published);
    const Store::Published& p = published.value();
    EXPECT_EQ(p.tensors, static_cast<std::uint64_t>(spec.tensors));
    EXPECT_EQ(p.chunks, static_cast<std::uint64_t>(spec.tensors) * 100);
    EXPECT_EQ(p.bytes, static_cast<std::uint64_t>(spec.tensors) * 100 * 16 * 4);
    roots.insert(p.content_root.ToHex());
    EXPECT_FALSE(fs().Exists(InStore(std::string(name) + "/rows.spool")));
    std::printf("%s: %llu chunks: %.3f s (manifests %.3f, index %.3f, rest %.3f)\n", name,
                static_cast<unsigned long long>(p.chunks), took.count(), p.manifests_seconds,
                p.index_seconds, p.publish_seconds);
  }
  EXPECT_EQ(roots.size(), 1u);  // However much memory there was.
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
