// SPDX-License-Identifier: Apache-2.0
// What can be made, written, removed and published below .staging/, without a kernel.
#include "fs/staging/staging_tree.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fcntl.h>
#include <thread>

#include <gtest/gtest.h>

#include "tensormount/checkpoint.h"

#include "fs/save/staging_folder.h"
#include "fs/staging/staged_checkpoint.h"
#include "fs/vfs.h"
#include "tests/staging/walk.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

constexpr char kSchema[] =
    R"({"tensors": {"w": {"dtype": "f32", "shape": [8, 4]},
                    "layers/0/b": {"dtype": "u8", "shape": [10]}},
        "objects": {"rng": {"grid": [2]}}})";

class StagingTreeTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(Store::OpenOrCreate(HostFileSystem(), store()));
    tree_ = NewTree();
  }
  std::string store() const { return dir_.Join("store"); }
  std::unique_ptr<StagingTree> NewTree() {
    auto made = StagingTree::Make(HostFileSystem(), store(), stats_);
    EXPECT_OK(made);
    return std::move(made).value();
  }

  // Walks a path below .staging; references are not given back.
  static Result<StagingTree::Node> At(StagingTree& tree, std::string_view path) {
    return WalkStaging(tree, path);
  }
  Result<StagingTree::Node> At(std::string_view path) { return At(*tree_, path); }
  static std::pair<std::string, std::string> Split(const std::string& path) {
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return {"", path};
    return {path.substr(0, slash), path.substr(slash + 1)};
  }
  // As open(2) with O_CREAT does.
  static Result<std::shared_ptr<WriteHandle>> OpenIn(StagingTree& tree, const std::string& path,
                                                     int flags) {
    const auto [folder, name] = Split(path);
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto in, At(tree, folder));
    const auto there = tree.Lookup(in.item, name);
    if (there.ok()) return tree.Open(there.value().item, flags);
    if (there.status().code() != Code::kNotFound || (flags & O_CREAT) == 0) return there.status();
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made, tree.Create(in.item, name, flags));
    return std::move(made.handle);
  }
  Result<std::shared_ptr<WriteHandle>> OpenAt(const std::string& path,
                                              int flags = O_WRONLY | O_CREAT | O_TRUNC) {
    return OpenIn(*tree_, path, flags);
  }
  static Status PutIn(StagingTree& tree, const std::string& path, std::string_view bytes,
                      std::uint64_t offset = 0, int flags = O_WRONLY | O_CREAT) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto handle, OpenIn(tree, path, flags));
    TENSORMOUNT_RETURN_IF_ERROR(handle->Write(offset, bytes.data(), bytes.size()));
    return handle->Flush();
  }
  Status Put(const std::string& path, std::string_view bytes, std::uint64_t offset = 0) {
    const int cut = path.ends_with(".json") ? O_TRUNC : 0;
    return PutIn(*tree_, path, bytes, offset, O_WRONLY | O_CREAT | cut);
  }
  Status Remove(const std::string& path) {
    const auto [folder, name] = Split(path);
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto in, At(folder));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto node, tree_->Lookup(in.item, name));
    return node.attributes.kind == FileKind::kDirectory ? tree_->RemoveDirectory(in.item, name)
                                                        : tree_->Unlink(in.item, name);
  }
  std::vector<std::string> Names(const std::string& path) {
    std::vector<std::string> names;
    const auto node = At(path);
    EXPECT_OK(node);
    if (!node.ok()) return names;
    EXPECT_OK(tree_->List(node.value().item, 0,
                          [&](std::string_view name, const Attributes&, std::uint64_t) {
                            names.emplace_back(name);
                            return true;
                          }));
    return names;
  }
  Status Begin(const std::string& name) {
    TENSORMOUNT_RETURN_IF_ERROR(tree_->MakeDirectory(StagingTree::kRoot, name).status());
    return Put(name + "/schema.json", kSchema);
  }
  std::string Tensor(const std::string& name, const std::string& key) {
    auto checkpoint = Checkpoint::Open(store() + "/" + name);
    EXPECT_OK(checkpoint);
    if (!checkpoint.ok()) return "";
    auto tensor = checkpoint.value().tensor(key);
    EXPECT_OK(tensor);
    std::string bytes(static_cast<std::size_t>(tensor.value().bytes()), '\0');
    EXPECT_OK(tensor.value().ReadBytes(0, bytes.data(), bytes.size()));
    return bytes;
  }

  TempDir dir_;
  MountStats stats_;
  std::unique_ptr<StagingTree> tree_;
};

std::string Cells(std::size_t n, char first = 'a') {
  std::string bytes(n, '\0');
  for (std::size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<char>(first + static_cast<char>(i % 23));
  return bytes;
}

TEST_F(StagingTreeTest, SchemaCreatesTheTree) {
  ASSERT_OK(tree_->MakeDirectory(StagingTree::kRoot, "s"));
  EXPECT_EQ(tree_->MakeDirectory(StagingTree::kRoot, "s").status().ToErrno(), EEXIST);
  EXPECT_EQ(tree_->MakeDirectory(StagingTree::kRoot, "latest").status().ToErrno(), EPERM);
  EXPECT_EQ(Names("s"), (std::vector<std::string>{"slices", "tensors", "objects", "done"}));
  EXPECT_EQ(OpenAt("s/tensors/w").status().ToErrno(), ENOENT);
  EXPECT_NE(stats_.ErrorsJson().find("schema.json"), std::string::npos);
  ASSERT_OK(Put("s/schema.json", kSchema));
  EXPECT_EQ(Names("s").back(), "schema.json");
  EXPECT_EQ(Names("s/tensors"), (std::vector<std::string>{"layers", "w"}));
  EXPECT_EQ(Names("s/tensors/layers"), std::vector<std::string>{"0"});
  ASSERT_OK_AND_ASSIGN(const auto w, At("s/tensors/w"));
  EXPECT_EQ(w.attributes.size, 128u);
  EXPECT_EQ(w.attributes.allocated, 0u);
  ASSERT_OK_AND_ASSIGN(const auto slice, At("s/slices/w[2:4,1]"));
  EXPECT_EQ(slice.attributes.size, 8u);
  ASSERT_OK(At("s/slices/layers/0/b@3:7"));
  for (const char* none :
       {"s/slices/w[0:9]", "s/slices/x[0]", "s/slices/w", "s/tensors/layers/1", "s/other", "t"}) {
    EXPECT_EQ(At(none).status().ToErrno(), ENOENT) << none;
  }
  EXPECT_EQ(At("s/tensors/w/x").status().ToErrno(), ENOTDIR);
  EXPECT_EQ(OpenAt("s/other").status().ToErrno(), EPERM);
  // Nodes are counted, and never used again.
  tree_->Forget(w.item, 100);
  EXPECT_EQ(tree_->Stat(w.item).status().ToErrno(), ESTALE);
  ASSERT_OK_AND_ASSIGN(const auto again, At("s/tensors/w"));
  EXPECT_NE(again.item, w.item);
  EXPECT_EQ(again.attributes.inode, w.attributes.inode);
}

TEST_F(StagingTreeTest, SchemaIsCheckedAtClose) {
  ASSERT_OK(Begin("s"));
  EXPECT_EQ(Put("s/schema.json", "{\"tensors\": ").ToErrno(), EINVAL);
  EXPECT_EQ(
      Put("s/schema.json", R"({"tensors": {"w": {"dtype": "f16", "shape": [8, 4]}}})").ToErrno(),
      EEXIST);
  EXPECT_NE(stats_.ErrorsJson().find("tensor w"), std::string::npos);
  // Two at once, in parts: each has a text of its own.
  ASSERT_OK_AND_ASSIGN(const auto a, OpenAt("s/schema.json"));
  ASSERT_OK_AND_ASSIGN(const auto b, OpenAt("s/schema.json"));
  const std::string one = R"({"tensors": {"a": {"dtype": "u8", "shape": [1]}}})";
  const std::string two = R"({"tensors": {"bb": {"dtype": "u8", "shape": [2]}}})";
  ASSERT_OK(a->Write(0, one.data(), 10));
  ASSERT_OK(b->Write(0, two.data(), two.size()));
  ASSERT_OK(a->Append(one.data() + 10, one.size() - 10));
  ASSERT_OK(b->Flush());
  ASSERT_OK(a->Flush());
  EXPECT_EQ(Names("s/tensors"), (std::vector<std::string>{"a", "bb", "layers", "w"}));
  // Another mount sees it at once.
  const auto other = NewTree();
  ASSERT_OK(At(*other, "s/tensors/bb"));
  ASSERT_OK(PutIn(*other, "s/schema.json", R"({"tensors": {"c": {"dtype": "u8", "shape": [1]}}})",
                  0, O_WRONLY | O_TRUNC));
  ASSERT_OK(At("s/tensors/c"));
}

// An editor empties the file first, and may be gone before it writes.
TEST_F(StagingTreeTest, EditedTextFileHasTheSizeOfTheEdit) {
  ASSERT_OK(Begin("s"));
  ASSERT_OK(Put("s/common.json", R"({"step": 7})"));
  ASSERT_OK_AND_ASSIGN(const auto edit, OpenAt("s/common.json", O_RDWR));
  const auto size = [&] { return edit->Stat().value().size; };
  ASSERT_OK(edit->Truncate(0));
  EXPECT_EQ(size(), 0u);
  EXPECT_OK(edit->Flush());
  ASSERT_OK(edit->Write(0, R"({"step": 8} more)", 16));
  EXPECT_EQ(size(), 16u);
  EXPECT_EQ(edit->Flush().ToErrno(), EINVAL);
  ASSERT_OK(edit->Truncate(11));
  EXPECT_EQ(size(), 11u);
  EXPECT_OK(edit->Flush());
}

TEST_F(StagingTreeTest, UnwrittenTextFilesExistWhileOpen) {
  ASSERT_OK(tree_->MakeDirectory(StagingTree::kRoot, "s").status());
  for (const std::string name : {"s/schema.json", "s/common.json"}) {
    SCOPED_TRACE(name);
    {
      ASSERT_OK_AND_ASSIGN(const auto edit, OpenAt(name));
      EXPECT_OK(At(name));
    }
    EXPECT_THAT(At(name), HasCode(Code::kNotFound));
  }
}

TEST_F(StagingTreeTest, TextFileHasTheWrittenSizeAfterTheEdit) {
  const auto other = NewTree();
  ASSERT_OK(Begin("s"));
  ASSERT_OK(Put("s/common.json", R"({"step": 7, "more": "text"})"));
  EXPECT_EQ(At("s/common.json").value().attributes.size, 27u);
  ASSERT_OK(PutIn(*other, "s/common.json", "{}", 0, O_WRONLY | O_CREAT | O_TRUNC));
  EXPECT_EQ(At("s/common.json").value().attributes.size, 2u);
}

// Only for what was closed and is still mapped: who has a file open may keep it for ever.
TEST_F(StagingTreeTest, PublishDoesNotWaitForOpenFiles) {
  ASSERT_OK(Begin("s"));
  ASSERT_OK_AND_ASSIGN(const auto closed, OpenAt("s/objects/closed"));
  ASSERT_OK(closed->Write(0, "x", 1));
  ASSERT_OK(closed->Flush());
  ASSERT_OK(closed->Release());
  ASSERT_OK_AND_ASSIGN(const auto open, OpenAt("s/objects/open"));
  ASSERT_OK(open->Write(0, "x", 1));
  auto quickest = StagedCheckpoint::kReleasePatience;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(tree_->Publish("s", "s").ToErrno(), EBUSY);
    quickest = std::min(quickest, std::chrono::duration_cast<std::chrono::milliseconds>(
                                      std::chrono::steady_clock::now() - begin));
  }
  EXPECT_LT(quickest, StagedCheckpoint::kReleasePatience);
}

TEST_F(StagingTreeTest, PublishesWritesOfTwoMounts) {
  ASSERT_OK(Begin("s"));
  const auto other = NewTree();
  const std::string w = Cells(128);
  const std::string b = Cells(10, 'A');
  ASSERT_OK(Put("s/slices/w[0:4]", w.substr(0, 64)));
  EXPECT_EQ(tree_->Publish("s", "s").ToErrno(), EIO);
  ASSERT_OK_AND_ASSIGN(const auto report, OpenAt("s/report.txt", O_RDONLY));
  std::string text(4096, '\0');
  ASSERT_OK_AND_ASSIGN(const std::size_t n, report->Read(0, text.data(), text.size()));
  text.resize(n);
  EXPECT_NE(text.find("tensor w [4:8, :]"), std::string::npos) << text;
  EXPECT_EQ(Names("s/slices"), std::vector<std::string>{"w[0:4]"});
  EXPECT_EQ(OpenAt("s/report.txt").status().ToErrno(), EPERM);

  ASSERT_OK(PutIn(*other, "s/tensors/w", w.substr(64), 64));
  ASSERT_OK(PutIn(*other, "s/tensors/layers/0/b", b));
  ASSERT_OK(PutIn(*other, "s/objects/rng/0", "zero"));
  ASSERT_OK(Put("s/objects/rng/1", "one"));
  EXPECT_EQ(Put("s/objects/config/a", "c").ToErrno(), ENOENT);  // As in any folder.
  ASSERT_OK(tree_->MakeDirectory(At("s/objects").value().item, "config"));
  ASSERT_OK(Put("s/objects/config/a", "c"));
  EXPECT_EQ(OpenAt("s/objects/rng/2").status().ToErrno(), ENOENT);
  ASSERT_OK(Put("s/common.json", R"({"step": 7})"));
  EXPECT_EQ(Put("s/common.json", "[").ToErrno(), EINVAL);
  EXPECT_THAT(Names("s/objects"), testing::UnorderedElementsAre("config", "rng"));

  // Never while somebody writes, on any mount.
  ASSERT_OK_AND_ASSIGN(const auto here, OpenAt("s/tensors/w", O_WRONLY));
  EXPECT_EQ(tree_->Publish("s", "s").ToErrno(), EBUSY);
  EXPECT_EQ(other->Publish("s", "s").ToErrno(), EBUSY);
  ASSERT_OK(here->Flush());  // Closed, although not released; a write opens it again.
  ASSERT_OK(here->Write(0, w.data(), 4));
  EXPECT_EQ(other->Publish("s", "s").ToErrno(), EBUSY);
  ASSERT_OK(here->Flush());
  ASSERT_OK_AND_ASSIGN(const auto node, At("s/tensors/w"));
  EXPECT_EQ(tree_->Publish("s", ".x").ToErrno(), EPERM);
  ASSERT_OK(other->Publish("s", "step-1"));
  EXPECT_EQ(Tensor("step-1", "w"), w);
  EXPECT_EQ(Tensor("step-1", "layers/0/b"), b);

  // Nothing of it is left.
  EXPECT_EQ(here->Write(0, w.data(), 4).ToErrno(), ESTALE);
  EXPECT_EQ(At("s").status().ToErrno(), ENOENT);
  EXPECT_EQ(tree_->Stat(node.item).status().ToErrno(), ESTALE);
  EXPECT_EQ(tree_->MakeDirectory(StagingTree::kRoot, "step-1").status().ToErrno(), EEXIST);
  ASSERT_OK(Begin("s"));
  EXPECT_EQ(tree_->Publish("s", "step-1").ToErrno(), EEXIST);
  EXPECT_EQ(tree_->Publish("none", "step-2").ToErrno(), ENOENT);
}

TEST_F(StagingTreeTest, TensorFilesHaveAFixedSize) {
  ASSERT_OK(Begin("s"));
  ASSERT_OK_AND_ASSIGN(const auto w, OpenAt("s/tensors/w", O_RDWR));
  const std::string cells = Cells(128);
  EXPECT_EQ(w->Write(120, cells.data(), 9).ToErrno(), EFBIG);
  EXPECT_EQ(w->Append("x", 1).status().ToErrno(), EFBIG);
  EXPECT_EQ(w->Truncate(129).ToErrno(), EFBIG);
  ASSERT_OK(w->Write(16, cells.data(), 32));
  char byte = 0;
  EXPECT_EQ(w->Read(0, &byte, 1).status().ToErrno(), ENODATA);
  EXPECT_THAT(w->Read(16, &byte, 1), IsOkAndHolds(1u));
  EXPECT_EQ(byte, cells[0]);
  EXPECT_THAT(w->Seek(0, true), IsOkAndHolds(16u));
  EXPECT_THAT(w->Seek(20, false), IsOkAndHolds(48u));
  EXPECT_THAT(w->Seek(0, false), IsOkAndHolds(0u));
  EXPECT_EQ(w->Seek(48, true).status().ToErrno(), ENXIO);
  ASSERT_OK_AND_ASSIGN(const auto attributes, w->Stat());
  EXPECT_EQ(attributes.size, 128u);
  EXPECT_EQ(attributes.allocated, 32u);
  ASSERT_OK(w->Truncate(128));  // np.memmap("w+"): no write.
  EXPECT_EQ(w->Stat().value().allocated, 32u);
  ASSERT_OK(w->Truncate(24));
  EXPECT_EQ(w->Stat().value().allocated, 8u);
  ASSERT_OK_AND_ASSIGN(const auto cut, OpenAt("s/tensors/w", O_WRONLY | O_TRUNC));
  EXPECT_EQ(w->Stat().value().allocated, 0u);
  ASSERT_OK_AND_ASSIGN(const auto reader, OpenAt("s/tensors/w", O_RDONLY));
  EXPECT_EQ(reader->Write(0, "x", 1).ToErrno(), EBADF);
  // A shared mapping condemns it.
  EXPECT_EQ(w->WritePages(0, "page", 4).ToErrno(), ENODEV);
  EXPECT_EQ(w->Flush().ToErrno(), ENODEV);
}

TEST_F(StagingTreeTest, PublishWaitsForWriterMarks) {
  ASSERT_OK(Begin("s"));
  ASSERT_OK(Put("s/schema.json", R"({"tensors": {}, "writers": 2})"));
  ASSERT_OK(Put("s/tensors/w", Cells(128)));
  ASSERT_OK(Put("s/tensors/layers/0/b", Cells(10)));
  ASSERT_OK(Put("s/objects/rng/0", "0"));
  ASSERT_OK(Put("s/objects/rng/1", "1"));
  ASSERT_OK(Put("s/done/1", "what is written is dropped"));
  EXPECT_EQ(OpenAt("s/done/x").status().ToErrno(), EPERM);
  EXPECT_EQ(OpenAt("s/done/01").status().ToErrno(), EPERM);
  EXPECT_FALSE(OpenAt("s/done/2").ok());
  EXPECT_EQ(Names("s/done"), std::vector<std::string>{"1"});
  EXPECT_EQ(tree_->Publish("s", "s").ToErrno(), EAGAIN);
  ASSERT_OK(OpenAt("s/done/0"));
  ASSERT_OK(Remove("s/done/1"));
  EXPECT_EQ(tree_->Publish("s", "s").ToErrno(), EAGAIN);
  ASSERT_OK(OpenAt("s/done/1"));
  ASSERT_OK(tree_->Publish("s", "s"));
}

TEST_F(StagingTreeTest, RemovalDiscardsStagedBytes) {
  ASSERT_OK(Begin("s"));
  ASSERT_OK(Put("s/slices/w[0:4]", Cells(64)));
  ASSERT_OK(Put("s/tensors/w", Cells(64), 64));
  ASSERT_OK(Put("s/objects/o", "x"));
  ASSERT_OK(Put("s/done/0", ""));
  EXPECT_EQ(Remove("s").ToErrno(), ENOTEMPTY);
  for (const char* full : {"s/tensors", "s/slices", "s/objects", "s/done"}) {
    EXPECT_EQ(Remove(full).ToErrno(), ENOTEMPTY) << full;
  }
  // As rm -r does.
  for (const char* path :
       {"s/slices/w[0:4]", "s/slices", "s/tensors/w", "s/tensors/layers", "s/tensors",
        "s/objects/o", "s/objects", "s/done/0", "s/done", "s/schema.json"}) {
    ASSERT_OK(Remove(path)) << path;
  }
  EXPECT_EQ(Names("s/tensors"), std::vector<std::string>{});
  EXPECT_EQ(tree_->Publish("s", "s").ToErrno(), ENODATA);  // Not EINVAL.
  ASSERT_OK(Remove("s"));
  EXPECT_EQ(At("s").status().ToErrno(), ENOENT);
  // One into which nothing was written.
  ASSERT_OK(tree_->MakeDirectory(StagingTree::kRoot, "t"));
  ASSERT_OK(Remove("t"));
  // With schema.json goes what this mount wrote to tensors.
  ASSERT_OK(Begin("v"));
  ASSERT_OK(Put("v/slices/w[0:4]", Cells(64)));
  ASSERT_OK(Put("v/tensors/w", Cells(64), 64));
  ASSERT_OK(Remove("v/schema.json"));
  EXPECT_EQ(Names("v/slices"), std::vector<std::string>{});
  ASSERT_OK(Remove("v/slices"));
  ASSERT_OK(Remove("v/tensors"));
  ASSERT_OK(Remove("v"));
  // What was withdrawn may be begun again.
  ASSERT_OK(Begin("u"));
  ASSERT_OK(Remove("u/schema.json"));
  ASSERT_OK(Put("u/schema.json", R"({"tensors": {"w": {"dtype": "u8", "shape": [3]}}})"));
  EXPECT_EQ(Remove("u").ToErrno(), ENOTEMPTY);
  ASSERT_OK(Put("u/tensors/w", "abc"));
  ASSERT_OK(tree_->Publish("u", "u"));
  EXPECT_EQ(Tensor("u", "w"), "abc");
}

TEST_F(StagingTreeTest, ObjectFilesMayHaveAnySize) {
  ASSERT_OK(Begin("s"));
  ASSERT_OK_AND_ASSIGN(const auto folder, At("s/objects"));
  ASSERT_OK(tree_->MakeDirectory(folder.item, "a"));
  EXPECT_EQ(tree_->MakeDirectory(folder.item, "a").status().ToErrno(), EEXIST);
  ASSERT_OK(Put("s/objects/a/.x.tmp", "hello"));
  ASSERT_OK_AND_ASSIGN(const auto a, At("s/objects/a"));
  ASSERT_OK(tree_->RenameWithin(a.item, ".x.tmp", a.item, "x"));
  EXPECT_EQ(Names("s/objects/a"), std::vector<std::string>{"x"});
  ASSERT_OK_AND_ASSIGN(const auto x, OpenAt("s/objects/a/x", O_RDWR | O_APPEND));
  ASSERT_OK(x->Append(" there", 6));
  std::string bytes(64, '\0');
  EXPECT_THAT(x->Read(0, bytes.data(), bytes.size()), IsOkAndHolds(11u));
  EXPECT_EQ(bytes.substr(0, 11), "hello there");
  ASSERT_OK(x->Truncate(4));
  ASSERT_OK(x->WritePages(10, "no", 2));  // Behind the end, as where a mapping goes on.
  EXPECT_EQ(x->Stat().value().size, 4u);
  // Names that no key has. ENOENT would send `cp` looking for its source.
  for (const char* none : {"x.npy", "@x", "x[0]", "%"}) {
    const Status refused = OpenAt("s/objects/" + std::string(none)).status();
    EXPECT_THAT(refused, HasCode(Code::kInvalidArgument)) << none;
    EXPECT_EQ(refused.ToErrno(), EINVAL) << none;
    EXPECT_EQ(tree_->RenameWithin(a.item, "x", a.item, none).ToErrno(), EPERM) << none;
  }
  EXPECT_EQ(OpenAt("s/objects/" + std::string(241, 'n')).status().ToErrno(), ENAMETOOLONG);
  EXPECT_OK(OpenAt("s/objects/" + std::string(240, 'n')));
  ASSERT_OK_AND_ASSIGN(const auto tensors, At("s/tensors"));
  EXPECT_EQ(tree_->RenameWithin(a.item, "x", tensors.item, "x").ToErrno(), EPERM);
  EXPECT_EQ(tree_->RenameWithin(tensors.item, "w", tensors.item, "v").ToErrno(), EPERM);
}

// Pages of a few names, each removed before the next page: as scandir and unlink do.
TEST_F(StagingTreeTest, ListingDuringRemovalMissesNothing) {
  constexpr int kObjects = 300;
  constexpr std::size_t kPage = 7;
  ASSERT_OK(Begin("s"));
  for (int i = 0; i < kObjects; ++i) ASSERT_OK(Put("s/objects/o" + std::to_string(i), "x"));
  ASSERT_OK_AND_ASSIGN(const auto folder, At("s/objects"));
  std::set<std::string> seen;
  std::uint64_t cookie = 0;
  for (int made = 0;; ++made) {
    std::vector<std::string> page;
    ASSERT_OK(tree_->List(folder.item, cookie,
                          [&](std::string_view name, const Attributes&, std::uint64_t next) {
                            if (page.size() == kPage) return false;
                            page.emplace_back(name);
                            cookie = next;
                            return true;
                          }));
    if (page.empty()) break;
    for (const std::string& name : page) {
      if (!name.starts_with("o")) continue;
      EXPECT_TRUE(seen.insert(name).second) << name;
      ASSERT_OK(tree_->Unlink(folder.item, name));
    }
    // Names that come meanwhile, and other listings, move nothing.
    if (made % 5 == 0) {
      ASSERT_OK(Put("s/objects/new" + std::to_string(made), "x"));
    }
    if (made % 7 == 0) (void)Names("s/objects");
  }
  EXPECT_EQ(seen.size(), std::size_t{kObjects});
}

TEST_F(StagingTreeTest, SyncedBytesOfADeadMountAreKept) {
  ASSERT_OK(Begin("s"));
  ASSERT_OK(Put("s/tensors/layers/0/b", Cells(10)));
  ASSERT_OK(Put("s/objects/rng/0", "0"));
  ASSERT_OK_AND_ASSIGN(const auto w, OpenAt("s/tensors/w", O_WRONLY));
  ASSERT_OK(w->Write(0, Cells(64).data(), 64));
  ASSERT_OK(w->Sync());
  ASSERT_OK(w->Write(64, Cells(64).data(), 32));  // Never synced.
  const auto died = std::move(tree_);
  tree_ = NewTree();
  EXPECT_EQ(tree_->Publish("s", "s").ToErrno(), EBUSY);  // Its lock lives as long as it does.
  ASSERT_OK(w->Flush());
  ASSERT_OK(Put("s/objects/rng/1", "1"));
  ASSERT_OK(Put("s/slices/w[6:8]", Cells(32)));
  ASSERT_OK(tree_->Publish("s", "s"));
  EXPECT_EQ(Tensor("s", "w"), Cells(64) + Cells(32) + Cells(32));
}

// ---- The same through Vfs: what belongs to whom.

TEST_F(StagingTreeTest, VfsRoutesStagingPaths) {
  ASSERT_OK(Begin("s"));
  for (const auto& [path, bytes] :
       std::map<std::string, std::string>{{"s/tensors/w", Cells(128)},
                                          {"s/tensors/layers/0/b", Cells(10)},
                                          {"s/objects/rng/0", "0"},
                                          {"s/objects/rng/1", "1"}}) {
    ASSERT_OK(Put(path, bytes));
  }
  ASSERT_OK_AND_ASSIGN(const auto vfs,
                       Vfs::Open(HostFileSystem(), {.source = store(), .writable = true}));
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry staging, vfs->Lookup(kRootId, ".staging"));
  EXPECT_TRUE(Vfs::IsStaged(staging.id));
  EXPECT_TRUE(vfs->MayBlock(staging.id));
  const auto rename = [&](NodeId from, const char* name, NodeId to, const char* as,
                          unsigned flags) {
    return vfs->Rename(from, name, to, as, flags).ToErrno();
  };
  EXPECT_EQ(rename(staging.id, "s", staging.id, "t", 0), EPERM);
  EXPECT_EQ(rename(staging.id, "s", kRootId, "t", RENAME_EXCHANGE), EPERM);
  EXPECT_EQ(vfs->MakeDirectory(kRootId, "x").status().ToErrno(), EPERM);
  EXPECT_EQ(vfs->Lookup(kRootId, "step-1").status().ToErrno(), ENOENT);
  ASSERT_OK(vfs->Rename(staging.id, "s", kRootId, "step-1", RENAME_NOREPLACE));
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry step, vfs->Lookup(kRootId, "step-1"));  // At once.
  EXPECT_EQ(vfs->RemoveDirectory(kRootId, "step-1").ToErrno(), EROFS);
  EXPECT_EQ(vfs->Unlink(kRootId, "latest").ToErrno(), EROFS);
  EXPECT_EQ(vfs->MakeDirectory(step.id, "x").status().ToErrno(), EROFS);
  EXPECT_EQ(vfs->Truncate(step.id, 0).ToErrno(), EROFS);
  EXPECT_EQ(rename(kRootId, "step-1", kRootId, "step-2", 0), EROFS);
  ASSERT_OK(vfs->MakeDirectory(staging.id, "t"));
  EXPECT_EQ(rename(staging.id, "t", step.id, "t", 0), EROFS);
  EXPECT_EQ(vfs->RefuseMaking(staging.id, "link").ToErrno(), EPERM);
  EXPECT_EQ(vfs->RefuseChanging(staging.id).ToErrno(), EOPNOTSUPP);
  EXPECT_EQ(vfs->RefuseChanging(step.id).ToErrno(), EROFS);
  ASSERT_OK(vfs->Drain());

  ASSERT_OK_AND_ASSIGN(const auto sealed, Vfs::Open(HostFileSystem(), {.source = store()}));
  EXPECT_FALSE(sealed->writable());
  EXPECT_EQ(sealed->Lookup(kRootId, ".staging").status().ToErrno(), ENOENT);
  EXPECT_EQ(sealed->MakeDirectory(kRootId, "x").status().ToErrno(), EROFS);
}

}  // namespace
}  // namespace tensormount::fs
