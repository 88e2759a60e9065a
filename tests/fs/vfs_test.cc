// SPDX-License-Identifier: Apache-2.0
#include "fs/vfs.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "base/deadline.h"
#include "base/mapping.h"
#include "shard/safetensors.h"
#include "tests/fs/file_ops.h"
#include "tests/fs/vfs_ops.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

class VfsTest : public testing::Test {
 protected:
  std::string store() const { return dir_.Join("store"); }
  void Write(const std::string& name, const TinySpec& spec,
             const Store::PublishOptions& options = {}) {
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store(), name, spec, options));
  }
  void Open(const std::string& source, bool views = false, ServeVerify verify = ServeVerify::kOff) {
    auto vfs = Vfs::Open(HostFileSystem(), {source, views, verify});
    ASSERT_OK(vfs);
    vfs_ = std::move(vfs).value();
    ops_ = std::make_unique<VfsOps>(*vfs_);
  }
  // Polls until `condition`, at most the second that changes may take to show.
  template <typename Condition>
  void ExpectWithinASecond(const Condition& condition) {
    const Deadline deadline = Deadline::After(std::chrono::milliseconds(1000));
    while (!condition()) {
      ASSERT_FALSE(deadline.Passed());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  // Some data file of a checkpoint, with one byte in it changed.
  void Damage(const std::string& checkpoint, const std::string& key_part) {
    const std::string data = JoinPath(JoinPath(store(), checkpoint), "data");
    ASSERT_OK_AND_ASSIGN(const auto entries, HostFileSystem().List(data));
    for (const DirectoryEntry& entry : entries) {
      const std::string path = JoinPath(data, entry.name);
      std::string bytes = ReadWholeFile(path);
      const std::size_t at = bytes.find(key_part);
      if (at == std::string::npos) continue;
      bytes[at] = static_cast<char>(bytes[at] ^ 1);
      ASSERT_EQ(chmod(path.c_str(), 0644), 0);
      WriteWholeFile(path, bytes);
      return;
    }
    FAIL() << "no data file holds these bytes";
  }

  TempDir dir_;
  std::unique_ptr<Vfs> vfs_;
  std::unique_ptr<VfsOps> ops_;
};

// A disk that is not there any more, or a store that somebody moved, is no empty store: a script
// that resumes would begin anew.
TEST_F(VfsTest, RemovedStoreIsStaleAndNotEmpty) {
  Write("step-1", DefaultTinySpec());
  Open(store());
  const auto listed = [&] {
    return vfs_->List(kRootId, 0, [](const Vfs::Listed&) { return true; });
  };
  ASSERT_OK(listed());
  const auto gone = [&] { return listed().code() == Code::kStale; };
  const auto expect_gone = [&] {
    ExpectWithinASecond(gone);
    EXPECT_THAT(vfs_->Lookup(kRootId, "step-1"), HasCode(Code::kStale));
    EXPECT_THAT(vfs_->Lookup(kRootId, "latest"), HasCode(Code::kStale));
    EXPECT_THAT(vfs_->Lookup(kRootId, "step-2"), HasCode(Code::kStale));
    EXPECT_OK(vfs_->Lookup(kRootId, ".tensormount")) << "which says what is wrong";
  };
  // Moved away, and another folder in its place, as an empty mount point is.
  ASSERT_OK(HostFileSystem().RenameNoReplace(store(), dir_.Join("away")));
  expect_gone();
  ASSERT_OK(HostFileSystem().CreateDirectory(store()));
  expect_gone();
  ASSERT_OK(HostFileSystem().RemoveDirectory(store()));
  ASSERT_OK(HostFileSystem().RenameNoReplace(dir_.Join("away"), store()));
  ExpectWithinASecond([&] { return listed().ok(); });
  EXPECT_OK(vfs_->Lookup(kRootId, "step-1"));
  // Deleted with all that is in it, but for the folder.
  for (const DirectoryEntry& e : HostFileSystem().List(store()).value()) {
    ASSERT_OK(HostFileSystem().RemoveTree(JoinPath(store(), e.name)));
  }
  expect_gone();
}

TEST_F(VfsTest, StoreShowsItsCheckpoints) {
  const TinySpec spec = DefaultTinySpec();
  Write("step-1", spec);
  Write("step-2", DefaultTinySpec(2));
  Open(store());
  EXPECT_THAT(ops_->List(""), IsOkAndHolds(std::vector<std::string>{"latest", "step-1", "step-2"}));
  EXPECT_THAT(ops_->ReadLink("latest"), IsOkAndHolds(std::string("step-2")));
  for (const auto& [name, content] :
       {std::pair("step-1", spec), std::pair("step-2", DefaultTinySpec(2))}) {
    CheckTensorFiles(*ops_, name, content);
    CheckNpyFiles(*ops_, name, content);
    CheckSafetensors(*ops_, name, content);
    CheckObjects(*ops_, name, content);
    CheckJson(*ops_, name, content);
    CheckExtents(*ops_, name, JoinPath(store(), name), content);
    CheckXattrs(*ops_, name, content);
    CheckErrors(*ops_, name);
    CheckListing(*ops_, name, content, false);
  }
  CheckControlFiles(*ops_);
}

TEST_F(VfsTest, ShowsUnusualKeys) {
  const TinySpec spec = StrangeTinySpec();
  Write("step-1", spec);
  Open(JoinPath(store(), "step-1"), true);
  CheckListing(*ops_, "", spec, true);
  CheckTensorFiles(*ops_, "", spec);
  CheckXattrs(*ops_, "", spec);
  CheckJson(*ops_, "", spec);
}

TEST_F(VfsTest, MountedCheckpointIsTheRoot) {
  const TinySpec spec = DefaultTinySpec();
  Write("step-1", spec);
  Open(store() + "/latest");  // Taken once.
  Write("step-2", DefaultTinySpec(2));
  CheckListing(*ops_, "", spec, false);
  CheckTensorFiles(*ops_, "", spec);
  CheckSafetensors(*ops_, "", spec);
  CheckObjects(*ops_, "", spec);
  CheckErrors(*ops_, "");
  CheckControlFiles(*ops_);
  EXPECT_EQ(ops_->Stat("latest").status().ToErrno(), ENOENT);
}

TEST_F(VfsTest, MountsASafetensorsFile) {
  TinySpec spec = DefaultTinySpec();
  spec.objects.clear();
  spec.common.clear();
  std::vector<SafetensorsEntry> entries;
  std::string data;
  for (const TinyTensor& tensor : spec.tensors) {
    entries.push_back({.key = tensor.key, .dtype = tensor.dtype, .shape = tensor.shape});
    data += TinyBytes(tensor);
  }
  ASSERT_OK_AND_ASSIGN(const std::string header, MakeSafetensorsHeader(entries, {}));
  const std::string path = dir_.Join("model.safetensors");
  WriteWholeFile(path, header + data);
  Open(path);
  CheckTensorFiles(*ops_, "", spec);
  CheckNpyFiles(*ops_, "", spec);
  CheckSafetensors(*ops_, "", spec);
  // No writer hashed it: no digest. Everything else is there.
  EXPECT_EQ(ops_->Xattr("tensors/bias", "user.tensormount.digest").status().ToErrno(), ENODATA);
  EXPECT_THAT(ops_->Xattr("tensors/bias", "user.tensormount.dtype"),
              IsOkAndHolds(std::string("f32")));
}

TEST_F(VfsTest, InvalidSourcesAreRefused) {
  const std::string folder = dir_.Join("folder");
  ASSERT_OK(HostFileSystem().CreateDirectory(folder));
  EXPECT_THAT(Vfs::Open(HostFileSystem(), {folder}), HasCode(Code::kUnsupported));
  EXPECT_THAT(Vfs::Open(HostFileSystem(), {dir_.Join("nothing")}), HasCode(Code::kNotFound));
  WriteWholeFile(dir_.Join("text"), "no safetensors file at all");
  EXPECT_FALSE(Vfs::Open(HostFileSystem(), {dir_.Join("text")}).ok());
}

TEST_F(VfsTest, EmptyStoreHasNoLatest) {
  ASSERT_OK(Store::OpenOrCreate(HostFileSystem(), store()));
  Open(store());
  EXPECT_THAT(ops_->List(""), IsOkAndHolds(std::vector<std::string>{}));
  EXPECT_EQ(ops_->ReadLink("latest").status().ToErrno(), ENOENT);
}

TEST_F(VfsTest, PublishedCheckpointAppears) {
  Write("step-1", DefaultTinySpec());
  Open(store());
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
  Write("step-2", DefaultTinySpec(2));
  ExpectWithinASecond([&] { return ops_->Stat("step-2").ok(); });
  EXPECT_THAT(ops_->ReadLink("latest"), IsOkAndHolds(std::string("step-2")));
  CheckTensorFiles(*ops_, "step-2", DefaultTinySpec(2));
}

TEST_F(VfsTest, RemovedCheckpointVanishesAndOpenFilesStillRead) {
  const TinySpec spec = DefaultTinySpec();
  Write("step-1", spec);
  Write("step-2", DefaultTinySpec(2));
  Open(store());
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry node, ops_->Walk("step-1/tensors/bias"));
  // Opened before, first read after: data files must be found although the folder has moved.
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry folder, ops_->Walk("step-1/tensors"));
  ASSERT_OK_AND_ASSIGN(auto handle, ops_->Open("step-1/tensors/layers.0.w"));
  ASSERT_OK_AND_ASSIGN(const Store opened, Store::Open(HostFileSystem(), store()));
  ASSERT_OK(opened.Remove("step-1"));
  ExpectWithinASecond([&] { return ops_->Stat("step-1").status().ToErrno() == ENOENT; });
  // The kernel asks about open files by their nodes alone. Folders lead to others, and are gone.
  EXPECT_EQ(vfs_->Stat(node.id).value().attributes.size, node.attributes.size);
  EXPECT_OK(vfs_->GetXattr(node.id, "user.tensormount.key"));
  EXPECT_OK(vfs_->OpenFile(node.id));
  EXPECT_EQ(vfs_->Stat(folder.id).status().ToErrno(), ESTALE);
  EXPECT_EQ(vfs_->Lookup(folder.id, "bias").status().ToErrno(), ESTALE);
  EXPECT_EQ(vfs_->List(folder.id, 0, [](const Vfs::Listed&) { return true; }).ToErrno(), ESTALE);
  for (const TinyTensor& tensor : spec.tensors) {
    if (tensor.key != "layers.0.w") continue;
    EXPECT_THAT(handle->Read(0, 1 << 20), IsOkAndHolds(TinyBytes(tensor)));
  }
  // The open file is a reader that gc waits for; without it the folder goes.
  Store::GcOptions now;
  now.grace = std::chrono::seconds(0);
  ASSERT_OK_AND_ASSIGN(const auto kept, opened.Gc(now));
  EXPECT_THAT(kept.removed, testing::Each(testing::Not(testing::HasSubstr(".trash"))));
  EXPECT_THAT(kept.kept, testing::Contains(testing::HasSubstr(".trash")));
  handle = nullptr;
  EXPECT_EQ(vfs_->Stat(node.id).status().ToErrno(), ESTALE);
  EXPECT_EQ(vfs_->OpenFile(node.id).status().ToErrno(), ESTALE);
}

TEST_F(VfsTest, RemovedCheckpointIsClosed) {
  Write("step-1", DefaultTinySpec());
  Open(store());
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
  ASSERT_OK_AND_ASSIGN(const Store opened, Store::Open(HostFileSystem(), store()));
  ASSERT_OK(opened.Remove("step-1"));
  Store::GcOptions now;
  now.grace = std::chrono::seconds(0);
  // Nobody asks the mount anything: it notices by itself.
  const Deadline deadline = Deadline::After(std::chrono::seconds(5));
  for (;;) {
    ASSERT_OK_AND_ASSIGN(const auto report, opened.Gc(now));
    if (std::any_of(report.removed.begin(), report.removed.end(), [](const std::string& path) {
          return path.find(".trash") != std::string::npos;
        })) {
      break;
    }
    ASSERT_FALSE(deadline.Passed());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

TEST_F(VfsTest, ReplacedCheckpointGetsNewNodes) {
  Write("step-1", DefaultTinySpec());
  Open(store());
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry old, ops_->Walk("step-1/tensors/bias"));
  ASSERT_OK_AND_ASSIGN(auto handle, ops_->Open("step-1/tensors/bias"));
  Store::PublishOptions replace;
  replace.if_exists = IfExists::kReplace;
  Write("step-1", DefaultTinySpec(2), replace);
  ExpectWithinASecond([&] {
    const auto now = ops_->Walk("step-1/tensors/bias");
    return now.ok() && now.value().id != old.id;
  });
  EXPECT_EQ(vfs_->Stat(old.id).value().attributes.inode, old.attributes.inode);  // It is open.
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec(2));
  for (const TinyTensor& tensor : DefaultTinySpec().tensors) {
    if (tensor.key != "bias") continue;
    EXPECT_THAT(handle->Read(0, 1000), IsOkAndHolds(TinyBytes(tensor)));
  }
  handle = nullptr;
  EXPECT_EQ(vfs_->Stat(old.id).status().ToErrno(), ESTALE);
}

TEST_F(VfsTest, DamagedCommitHidesTheCheckpointAndIsReported) {
  Write("step-1", DefaultTinySpec());
  Write("step-2", DefaultTinySpec(2));
  const std::string commit = JoinPath(JoinPath(store(), "step-2"), "COMMIT");
  ASSERT_EQ(chmod(commit.c_str(), 0644), 0);
  WriteWholeFile(commit, "damaged");
  Open(store());
  EXPECT_THAT(ops_->List(""), IsOkAndHolds(std::vector<std::string>{"latest", "step-1"}));
  EXPECT_THAT(ops_->ReadLink("latest"), IsOkAndHolds(std::string("step-1")));
  EXPECT_THAT(vfs_->StatusFields(), testing::HasSubstr("step-2"));
}

TEST_F(VfsTest, InodesAndTimesAreEqualInEveryMount) {
  Write("step-1", StrangeTinySpec());
  Write("step-2", StrangeTinySpec());
  Open(store());
  std::vector<FileStat> first;
  for (const char* path : {"step-1", "step-1/tensors", "step-1/tensors/bias", "step-1/tensors/both",
                           "step-1/npy/bias.npy", "step-1/checkpoint.json", "step-1/common.json"}) {
    ASSERT_OK_AND_ASSIGN(const FileStat st, ops_->Stat(path));
    first.push_back(st);
  }
  Open(store());
  std::size_t i = 0;
  for (const char* path : {"step-1", "step-1/tensors", "step-1/tensors/bias", "step-1/tensors/both",
                           "step-1/npy/bias.npy", "step-1/checkpoint.json", "step-1/common.json"}) {
    ASSERT_OK_AND_ASSIGN(const FileStat st, ops_->Stat(path));
    EXPECT_EQ(st.inode, first[i].inode) << path;
    EXPECT_EQ(st.mtime, first[i].mtime) << path;
    ++i;
  }
  EXPECT_NE(ops_->Stat("step-2").value().inode, first[0].inode);
  EXPECT_NE(ops_->Stat("").value().inode, first[0].inode);
}

TEST_F(VfsTest, ModesNeverExceedThoseOfTheStore) {
  Write("step-1", DefaultTinySpec());
  const std::string folder = JoinPath(store(), "step-1");
  ASSERT_EQ(chmod(folder.c_str(), 0750), 0);
  ASSERT_EQ(chmod(JoinPath(folder, "COMMIT").c_str(), 0440), 0);
  ASSERT_EQ(chmod(store().c_str(), 0711), 0);
  Open(store());
  EXPECT_EQ(ops_->Stat("").value().mode, 0511u);
  EXPECT_EQ(ops_->Stat("step-1").value().mode, 0550u);
  EXPECT_EQ(ops_->Stat("step-1/tensors").value().mode, 0550u);
  EXPECT_EQ(ops_->Stat("step-1/tensors/bias").value().mode, 0440u);
  EXPECT_EQ(ops_->Stat("step-1/checkpoint.json").value().mode, 0440u);
}

// The bytes of the tensor that is damaged in the tests below: 3 leaves and a bit.
TinySpec LeafSpec() {
  TinySpec spec;
  spec.tensors.push_back(
      {.key = "big", .dtype = DType::kU8, .shape = {200000}, .seed = 5, .tensor_file = true});
  spec.objects.push_back(
      {.key = "blob",
       .bytes = TinyBytes({.key = "o", .dtype = DType::kU8, .shape = {150000}, .seed = 6})});
  return spec;
}

TEST_F(VfsTest, DamagedBytesAreServedOnlyWithoutVerify) {
  const TinySpec spec = LeafSpec();
  Write("step-1", spec);
  const std::string good = TinyBytes(spec.tensors[0]);
  const std::size_t bad = 70000;  // In the second leaf.
  Damage("step-1", good.substr(bad, 64));
  for (const ServeVerify verify : {ServeVerify::kOff, ServeVerify::kFirst, ServeVerify::kAlways}) {
    Open(store(), false, verify);
    ASSERT_OK_AND_ASSIGN(const auto file, ops_->Open("step-1/tensors/big"));
    const auto whole = file->Read(0, good.size());
    const auto elsewhere = file->Read(66000, 10);  // Good bytes of the bad leaf.
    if (verify == ServeVerify::kOff) {
      ASSERT_OK(whole);
      EXPECT_FALSE(whole.value() == good);
    } else {
      EXPECT_EQ(whole.status().ToErrno(), EIO);
      EXPECT_THAT(whole, HasMessage("tensor big"));
      EXPECT_EQ(elsewhere.status().ToErrno(), EIO);
    }
    // Other leaves are fine.
    EXPECT_THAT(file->Read(0, 65536), IsOkAndHolds(good.substr(0, 65536)));
    EXPECT_THAT(file->Read(140000, 100000), IsOkAndHolds(good.substr(140000)));
  }
}

TEST_F(VfsTest, ChangedFilesAreVerifiedAgain) {
  const TinySpec spec = LeafSpec();
  Write("step-1", spec);
  const std::string good = TinyBytes(spec.tensors[0]);
  std::vector<std::unique_ptr<FileOps::Handle>> handles;
  std::vector<std::unique_ptr<Vfs>> mounts;
  for (const ServeVerify verify : {ServeVerify::kFirst, ServeVerify::kAlways}) {
    Open(store(), false, verify);
    ASSERT_OK_AND_ASSIGN(auto file, ops_->Open("step-1/tensors/big"));
    EXPECT_THAT(file->Read(5, 70000), IsOkAndHolds(good.substr(5, 70000)));
    handles.push_back(std::move(file));
    mounts.push_back(std::move(vfs_));
  }
  Damage("step-1", good.substr(100, 64));
  for (const auto& handle : handles) {
    EXPECT_EQ(handle->Read(100, 64).status().ToErrno(), EIO);
    EXPECT_EQ(handle->Read(300, 64).status().ToErrno(), EIO);
    EXPECT_THAT(handle->Read(70000, 64), IsOkAndHolds(good.substr(70000, 64)));
  }
}

TEST_F(VfsTest, DamagedObjectReturnsEio) {
  const TinySpec spec = LeafSpec();
  Write("step-1", spec);
  Damage("step-1", spec.objects[0].bytes.substr(70000, 64));
  Open(store(), false, ServeVerify::kAlways);
  ASSERT_OK_AND_ASSIGN(const auto file, ops_->Open("step-1/objects/blob"));
  EXPECT_THAT(file->Read(10, 100), IsOkAndHolds(spec.objects[0].bytes.substr(10, 100)));
  EXPECT_EQ(file->Read(66000, 10).status().ToErrno(), EIO);
}

TEST_F(VfsTest, GridPartsAndAKeyOfTheSameNameBothRead) {
  TinySpec spec = DefaultTinySpec();
  spec.objects = {{.key = "rng", .bytes = "zero", .index = {0}, .grid = {2}},
                  {.key = "rng", .bytes = "one", .index = {1}, .grid = {2}},
                  {.key = "rng/0", .bytes = "plain"}};
  Write("step-1", spec);
  Open(JoinPath(store(), "step-1"));
  EXPECT_THAT(ops_->ReadAll("objects/rng/0"), IsOkAndHolds(std::string("plain")));
  EXPECT_THAT(ops_->ReadAll("objects/rng%00/0"), IsOkAndHolds(std::string("zero")));
  EXPECT_THAT(ops_->ReadAll("objects/rng%00/1"), IsOkAndHolds(std::string("one")));
}

// A store that stops answering must cost those who look no more than their patience, once.
TEST_F(VfsTest, StuckStoreDoesNotBlockOpenCheckpoints) {
  Write("step-1", DefaultTinySpec());
  std::atomic<bool> stuck{false};
  std::atomic<bool> reached{false};
  // Outlives the test where the thread does not come back in time.
  static ObservedFileSystem* fs = nullptr;
  fs = new ObservedFileSystem(HostFileSystem(), [&](const FileEvent& event) -> Status {
    if (event.op != FileOp::kList) return {};
    const Deadline deadline = Deadline::After(std::chrono::seconds(10));
    while (stuck && !deadline.Passed()) {
      reached = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return {};
  });
  ASSERT_OK_AND_ASSIGN(vfs_, Vfs::Open(*fs, {store()}));
  VfsOps ops(*vfs_);
  CheckTensorFiles(ops, "step-1", DefaultTinySpec());
  stuck = true;
  const auto begun = std::chrono::steady_clock::now();
  while (!reached) ASSERT_OK(ops.Stat("step-1"));  // Looks again when what it knows is old.
  for (int i = 0; i < 100; ++i) ASSERT_OK(ops.Stat("step-1/tensors/bias"));
  CheckTensorFiles(ops, "step-1", DefaultTinySpec());
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5));
  EXPECT_THAT(vfs_->StatusFields(), testing::HasSubstr("\"store_answers\": false"));
  stuck = false;
  ExpectWithinASecond(
      [&] { return vfs_->StatusFields().find("\"store_answers\": true") != std::string::npos; });
  vfs_ = nullptr;
  delete fs;
}

// Also at the very moment at which the mount sees that its checkpoint is gone: here as long as the
// opening of another one, gone too, hangs.
TEST_F(VfsTest, OpenFileOfARemovedCheckpointKeepsAttributes) {
  Write("step-1", DefaultTinySpec());
  Write("step-2", DefaultTinySpec(2));
  std::atomic<bool> hangs{false};
  std::atomic<bool> reached{false};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) -> Status {
    const Deadline deadline = Deadline::After(std::chrono::seconds(20));
    while (hangs && event.path.find("index.sst") != std::string::npos && !deadline.Passed()) {
      reached = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return {};
  });
  ASSERT_OK_AND_ASSIGN(vfs_, Vfs::Open(fs, {store()}));
  VfsOps ops(*vfs_);
  ASSERT_OK_AND_ASSIGN(const auto entry, ops.Walk("step-2/tensors/bias"));
  ASSERT_OK_AND_ASSIGN(const auto file, vfs_->OpenFile(entry.id));
  hangs = true;
  std::thread opens([&] { (void)ops.Stat("step-1/tensors/bias"); });
  while (!reached) std::this_thread::yield();
  ASSERT_EQ(::rename((store() + "/step-1").c_str(), (store() + "/.trash.1").c_str()), 0);
  ASSERT_EQ(::rename((store() + "/step-2").c_str(), (store() + "/.trash.2").c_str()), 0);
  const Deadline seen = Deadline::After(std::chrono::seconds(20));
  while (vfs_->CheckpointExists(entry.id) && !seen.Passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ASSERT_FALSE(vfs_->CheckpointExists(entry.id));
  for (int i = 0; i < 20; ++i) EXPECT_OK(vfs_->Stat(entry.id));
  hangs = false;
  opens.join();
  EXPECT_OK(vfs_->Stat(entry.id));
  vfs_ = nullptr;
}

TEST(InMemoryTest, ReportsWhetherPagesAreInMemory) {
  TempDir dir;
  const std::string path = dir.Join("f");
  constexpr std::size_t kBytes = std::size_t{3} << 20;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0);
  const std::string data(kBytes, 'x');
  ASSERT_EQ(write(fd, data.data(), data.size()), static_cast<ssize_t>(kBytes));
  void* map = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(map, MAP_FAILED);
  const auto* bytes = static_cast<const std::byte*>(map);
  EXPECT_TRUE(InMemory(bytes, kBytes));
  EXPECT_TRUE(InMemory(bytes + 5000, 100));
  ASSERT_EQ(ftruncate(fd, 0), 0);
  EXPECT_FALSE(InMemory(bytes, kBytes));
  // Only the last page is there again.
  ASSERT_EQ(pwrite(fd, "x", 1, kBytes - 1), 1);
  EXPECT_TRUE(InMemory(bytes + kBytes - 10, 10));
  EXPECT_FALSE(InMemory(bytes, kBytes));
  munmap(map, kBytes);
  close(fd);
}

TEST_F(VfsTest, UnknownInodeNumbersAreStale) {
  Write("step-1", DefaultTinySpec());
  Open(store());
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry tensors_entry, ops_->Walk("step-1/tensors"));
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry objects_entry, ops_->Walk("step-1/objects"));
  // Items of views of keys are the key's number << 12 and a depth.
  const NodeId tensors = tensors_entry.id;
  const NodeId objects = objects_entry.id;
  for (const NodeId id :
       {NodeId{0}, NodeId{2}, NodeId{999}, ~NodeId{0}, IdOf({.slot = 7, .item = kRootItem}),
        IdOf({.view = 3, .item = kRootItem}), IdOf({.slot = 1, .view = kOwnView, .item = 2}),
        IdOf({.slot = 1, .view = kMaxViews - 1, .item = kRootItem}), tensors + (5000 << 12),
        tensors + (5000 << 12) + 8, tensors + 8, tensors + (kMaxItems - (1 << 13)),
        objects + (5000 << 12)}) {
    EXPECT_EQ(vfs_->Stat(id).status().ToErrno(), ESTALE) << id;
    EXPECT_FALSE(vfs_->OpenFile(id).ok()) << id;
    EXPECT_FALSE(vfs_->Lookup(id, "x").ok()) << id;
    EXPECT_FALSE(vfs_->List(id, 0, [](const Vfs::Listed&) { return true; }).ok()) << id;
  }
}

}  // namespace
}  // namespace tensormount::fs
