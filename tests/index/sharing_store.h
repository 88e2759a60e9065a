// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_INDEX_SHARING_STORE_H_
#define TENSORMOUNT_TESTS_INDEX_SHARING_STORE_H_

#include <map>
#include <string>
#include <sys/stat.h>

#include "index/records/manifest.h"
#include "tests/index/store_test_support.h"

// Checkpoints of one store that share data files by hard links, made by hand as a save that reuses
// its parent makes them.

namespace tensormount {

// Saves `own` and, besides, all that the checkpoint `base` of the store holds (other keys): its
// data files by links under their own names, or as copies where `copied`.
inline Result<Store::Published> SaveSharing(FileSystem& fs, const Store& store,
                                            const std::string& name, const TinySpec& own,
                                            const std::string& base, bool copied = false) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Staging staging, store.Begin(name, IfExists::kFail));
  TENSORMOUNT_RETURN_IF_ERROR(WriteTinyStaging(fs, staging, own));
  const std::string from = store.CheckpointPath(base);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto manifests, fs.List(JoinPath(from, "manifest")));
  for (const DirectoryEntry& entry : manifests) {
    const std::string manifest_name = "manifest/" + entry.name;
    if (manifest_name == kCoordinatorManifest) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes,
                                 fs.ReadFile(JoinPath(from, manifest_name), 1 << 24));
    TENSORMOUNT_ASSIGN_OR_RETURN(Manifest manifest, DecodeManifest(bytes, manifest_name));
    manifest.inventory.info.uuid = staging.uuid;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string again,
                                 EncodeManifest(manifest.inventory, manifest.leaves));
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.WriteFileDurably(JoinPath(staging.directory, "manifest/base-" + entry.name), again));
    for (const FileRecord& file : manifest.inventory.files) {
      const std::string to = JoinPath(staging.directory, file.name);
      if (fs.Exists(to)) continue;  // Of two manifests.
      if (!copied) {
        TENSORMOUNT_RETURN_IF_ERROR(fs.Link(JoinPath(from, file.name), to));
        continue;
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string data,
                                   fs.ReadFile(JoinPath(from, file.name), 1 << 24));
      TENSORMOUNT_RETURN_IF_ERROR(fs.WriteFileDurably(to, data));
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto sealed, fs.OpenShared(to));
      TENSORMOUNT_RETURN_IF_ERROR(sealed->Seal());
    }
  }
  return store.Publish(staging, TinyCoordinator(own), {});
}

// What a base holds that changes seldom, and what each step adds to it.
inline TinySpec FrozenSpec(std::uint64_t seed = 1) {
  TinySpec spec;
  spec.tensors = {{"frozen.big", DType::kF32, {300, 100}, seed, 2, 0, true},
                  {"frozen.small", DType::kF32, {6, 10}, seed + 1, 2, 1, false}};
  return spec;
}
inline TinySpec StepSpec(std::uint64_t seed) {
  TinySpec spec;
  spec.tensors = {{"adapter", DType::kF32, {16, 8}, seed, 2, 0, false}};
  spec.objects = {{"rng", "state " + std::to_string(seed), {}, {}}};
  return spec;
}
inline TinySpec Both(TinySpec a, const TinySpec& b) {
  a.tensors.insert(a.tensors.end(), b.tensors.begin(), b.tensors.end());
  a.objects.insert(a.objects.end(), b.objects.begin(), b.objects.end());
  return a;
}

// Every file below a folder: bytes, and the permission bits before them.
inline std::map<std::string, std::string> FilesBelow(const std::string& folder,
                                                     const std::string& below = "") {
  std::map<std::string, std::string> files;
  for (const DirectoryEntry& e : HostFileSystem().List(JoinPath(folder, below)).value()) {
    const std::string name = below.empty() ? e.name : below + "/" + e.name;
    if (e.kind == FileKind::kDirectory) {
      files.merge(FilesBelow(folder, name));
      continue;
    }
    const std::string path = JoinPath(folder, name);
    files[name] = std::to_string(HostFileSystem().LinkStat(path).value().mode & 0777) + " " +
                  ReadWholeFile(path);
  }
  return files;
}

// base, and link-1 and link-2, which share all of its files.
class SharingStoreTest : public StoreTest {
 protected:
  void SetUp() override {
    ASSERT_OK(Save("base", FrozenSpec()));
    const Store store = MakeStore();
    ASSERT_OK(SaveSharing(fs(), store, "link-1", StepSpec(10), "base"));
    ASSERT_OK(SaveSharing(fs(), store, "link-2", StepSpec(20), "base"));
  }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_INDEX_SHARING_STORE_H_
