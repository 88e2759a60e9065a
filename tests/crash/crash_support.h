// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_CRASH_CRASH_SUPPORT_H_
#define TENSORMOUNT_TESTS_CRASH_CRASH_SUPPORT_H_

#include <string>

#include "index/store/store.h"
#include "tests/index/store_test_support.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {

// As small as a checkpoint can be that has every kind of file.
inline TinySpec CrashSpec(std::uint64_t seed) {
  TinySpec spec;
  spec.writers = 1;
  spec.tensors = {{"w", DType::kF32, {4, 8}, seed, 2, 0, true},
                  {"b", DType::kBF16, {8}, seed + 1, 1, 0, false}};
  spec.objects = {{"rng", "state " + std::to_string(seed), {}, {}}};
  spec.common = {{"iteration", static_cast<std::int64_t>(seed)}};
  return spec;
}

inline constexpr Store::GcOptions kGcAll{.grace = std::chrono::seconds(0),
                                         .staging_age = std::chrono::seconds(0)};

// No checkpoint of the store is half there, nor anything that fsck calls damage.
inline testing::AssertionResult NothingHalf(const Store& store) {
  const auto list = store.List();
  if (!list.ok()) return testing::AssertionFailure() << list.status().ToString();
  for (const CheckpointListing& c : list.value()) {
    if (!c.problem.ok()) {
      return testing::AssertionFailure() << c.name << ": " << c.problem.ToString();
    }
  }
  const auto findings = store.Fsck({});
  if (!findings.ok()) return testing::AssertionFailure() << findings.status().ToString();
  for (const auto& f : findings.value()) {
    if (f.damage) return testing::AssertionFailure() << f.object << ": " << f.problem;
  }
  return testing::AssertionSuccess();
}

inline bool Visible(const std::string& store, const std::string& name) {
  return HostFileSystem().Exists(JoinPath(store, name));
}

// The next save of `name` works, and gc then leaves nothing of what went before it. The name is
// free again afterwards.
inline void ExpectNextSaveWorksAndGcCleans(const std::string& path, const std::string& name) {
  const TinySpec spec = CrashSpec(4711);
  ASSERT_OK(
      WriteTinyCheckpoint(HostFileSystem(), path, name, spec, {.if_exists = IfExists::kReplace}));
  EXPECT_TRUE(HoldsWhole(JoinPath(path, name), spec));
  const auto store = Store::Open(HostFileSystem(), path);
  ASSERT_OK(store);
  ASSERT_OK(store.value().Remove(name));
  ASSERT_OK(store.value().Gc(kGcAll));
  EXPECT_THAT(NamesIn(JoinPath(path, ".staging")), testing::IsEmpty());
  EXPECT_THAT(NamesIn(JoinPath(path, ".trash")), testing::IsEmpty());
  // What somebody may still be writing goes once it is older.
  for (const std::string& left : NamesIn(path)) {
    if (left.starts_with(".store")) SetMtime(JoinPath(path, left), 1);
  }
  ASSERT_OK(store.value().Gc(kGcAll));
  EXPECT_THAT(NamesIn(path), testing::Each(testing::Not(testing::StartsWith(".store"))));
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_CRASH_CRASH_SUPPORT_H_
