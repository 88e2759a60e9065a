// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_INDEX_STORE_TEST_SUPPORT_H_
#define TENSORMOUNT_TESTS_INDEX_STORE_TEST_SUPPORT_H_

#include <cstdint>
#include <fcntl.h>
#include <map>
#include <string>
#include <sys/stat.h>
#include <vector>

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/store/store.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {

// Whether every tensor and object of `spec` reads back as it was written, and VerifyCheckpoint
// finds nothing. An explanation where not.
inline testing::AssertionResult HoldsWhole(FileSystem& fs, const std::string& directory,
                                           const TinySpec& spec) {
  const auto opened = OpenedCheckpoint::Open(fs, directory, OpenedCheckpoint::Options());
  if (!opened.ok()) return testing::AssertionFailure() << opened.status().ToString();
  const OpenedCheckpoint& c = *opened.value();
  if (c.index_was_rebuilt()) return testing::AssertionFailure() << "index was rebuilt";
  if (c.index().tensor_count() != spec.tensors.size()) {
    return testing::AssertionFailure() << c.index().tensor_count() << " tensors";
  }
  for (const TinyTensor& t : spec.tensors) {
    const auto entry = c.index().Find(t.key);
    if (!entry.ok()) return testing::AssertionFailure() << entry.status().ToString();
    const std::string wanted = TinyBytes(t);
    std::string got(wanted.size(), '?');
    const Status read =
        c.ReadBytes(entry.value(), 0, got.data(), got.size(), ReadVerify::kExtendLeaves, nullptr);
    if (!read.ok()) return testing::AssertionFailure() << t.key << ": " << read.ToString();
    if (got != wanted) return testing::AssertionFailure() << t.key << ": other bytes";
  }
  const auto report = VerifyCheckpoint(fs, directory, VerifyOptions{.threads = 1});
  if (!report.ok()) return testing::AssertionFailure() << report.status().ToString();
  for (const auto& d : report.value().damages) {
    return testing::AssertionFailure() << d.object << ": " << d.file << ": " << d.reason;
  }
  return testing::AssertionSuccess();
}
inline testing::AssertionResult HoldsWhole(const std::string& directory, const TinySpec& spec) {
  return HoldsWhole(HostFileSystem(), directory, spec);
}

// Mtimes by key, "checkpoint.json" and "common.json" and "object KEY" among them.
inline std::map<std::string, std::int64_t> MtimesOf(const std::string& directory) {
  std::map<std::string, std::int64_t> out;
  const auto opened =
      OpenedCheckpoint::Open(HostFileSystem(), directory, OpenedCheckpoint::Options());
  if (!opened.ok()) return out;
  const CheckpointIndex& index = opened.value()->index();
  EXPECT_OK(index.ForEachTensor(0, [&](const TensorEntry& t) {
    out[t.meta.key()] = t.mtime;
    return true;
  }));
  const auto objects = index.Objects();
  EXPECT_OK(objects);
  for (const ObjectRecord& o : objects.value()) {
    out["object " + o.key + (o.index.rank() > 0 ? o.index.ToString() : "")] = o.mtime;
  }
  out["checkpoint.json"] = index.info().json_mtime;
  out["common.json"] = index.info().common_mtime;
  return out;
}

// Names in a folder, sorted.
inline std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  const auto entries = HostFileSystem().List(folder);
  if (!entries.ok()) return names;
  for (const DirectoryEntry& e : entries.value()) names.push_back(e.name);
  return names;
}

inline void SetMtime(const std::string& path, std::int64_t seconds_since_1970) {
  const timespec t{seconds_since_1970, 0};
  const timespec times[2] = {t, t};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0) << path;
}

// Everything below, too.
inline void SetMtimes(const std::string& path, std::int64_t when) {
  const auto entries = HostFileSystem().List(path);
  if (entries.ok()) {
    for (const DirectoryEntry& e : entries.value()) SetMtimes(JoinPath(path, e.name), when);
  }
  SetMtime(path, when);
}

// A store in a fresh folder.
class StoreTest : public testing::Test {
 protected:
  FileSystem& fs() { return HostFileSystem(); }
  std::string StorePath() { return dir_.Join("store"); }
  std::string InStore(const std::string& below) { return JoinPath(StorePath(), below); }
  Store MakeStore() {
    auto store = Store::OpenOrCreate(fs(), StorePath());
    EXPECT_OK(store);
    return std::move(store).value();
  }
  Result<Store::Published> Save(const std::string& name, const TinySpec& spec,
                                const Store::PublishOptions& options = {}) {
    return WriteTinyCheckpoint(fs(), StorePath(), name, spec, options);
  }
  // Begun and written by its writers, not published.
  Staging Written(const Store& store, const std::string& name, const TinySpec& spec,
                  IfExists if_exists = IfExists::kFail) {
    auto staging = store.Begin(name, if_exists);
    EXPECT_OK(staging);
    EXPECT_OK(WriteTinyStaging(fs(), staging.value(), spec));
    return staging.value();
  }

  TempDir dir_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_INDEX_STORE_TEST_SUPPORT_H_
