// SPDX-License-Identifier: Apache-2.0
// A source on a file system that reads and can do nothing else, as one behind URLs will be: every
// command that reads says of it what it says of the same files on the host. Through the command
// line and the public interface, so that no step in between may ask the host instead.
#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/checkpoint.h"
#include "tensormount/log.h"

#include "base/file_system_for.h"
#include "fs/vfs.h"
#include "mount-tools/cli.h"
#include "tests/fs/vfs_ops.h"
#include "tests/support/plain_reads_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

using testing::HasSubstr;

constexpr char kScheme[] = "plain://";

PlainReadsFileSystem& Plain() {
  static auto* fs = [] {
    auto* const made = new PlainReadsFileSystem(kScheme);
    AddFileSystem(kScheme, *made);
    return made;
  }();
  return *fs;
}

// Some files cannot be opened any more.
class FailingFileSystem : public PlainReadsFileSystem {
 public:
  explicit FailingFileSystem(std::string scheme) : PlainReadsFileSystem(std::move(scheme)) {}
  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override {
    if (path.ends_with(suffix) && opened++ >= good) return Status::FromErrno(EIO, "open", path);
    return PlainReadsFileSystem::OpenRead(path);
  }
  std::string suffix;
  std::atomic<int> opened = 0;
  int good = 0;  // So often it works.
};

struct Ran {
  int status = 0;
  std::string out;
  std::string err;
};

Ran RunCommand(const std::vector<std::string>& words) {
  std::vector<const char*> argv = {"tensormount"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Ran ran;
  ran.status = tools::Main(static_cast<int>(argv.size()), argv.data());
  ran.out = testing::internal::GetCapturedStdout();
  ran.err = testing::internal::GetCapturedStderr();
  return ran;
}

std::string WithoutScheme(std::string text) {
  for (std::size_t at = 0; (at = text.find(kScheme, at)) != std::string::npos;) {
    text.erase(at, sizeof kScheme - 1);
  }
  return text;
}

// A foreign checkpoint has a uuid that is made of its path.
std::string WithoutOwn(std::string text) {
  text = WithoutScheme(std::move(text));
  const std::size_t at = text.find("saved by       tensormount") == std::string::npos
                             ? text.find("uuid           ")
                             : std::string::npos;
  if (at != std::string::npos) text.erase(at, text.find('\n', at) - at);
  return text;
}

// Files below a folder, or one file, by name.
void AddTree(const std::string& path, const std::string& name,
             std::map<std::string, std::string>& tree) {
  const auto entries = HostFileSystem().List(path);
  if (!entries.ok()) {
    tree[name] = ReadWholeFile(path);
    return;
  }
  for (const DirectoryEntry& entry : entries.value()) {
    AddTree(path + "/" + entry.name, name + "/" + entry.name, tree);
  }
}

class PlainSourceTest : public testing::Test {
 protected:
  void SetUp() override {
    (void)Plain();
    SetLogLevel(LogLevel::kError);  // That there are no locks is logged once.
    TinySpec spec = DefaultTinySpec();
    spec.common["lr"] = CommonValue(0.5);
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store_, "step-1", spec));
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store_, "step-2", DefaultTinySpec(2)));
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store_, "removed", DefaultTinySpec(3)));
    Host({"rm", store_ + "/removed"});  // What is in .trash/ is counted, too.
    Host({"export", store_ + "/step-1", file_, "--to", "safetensors"});
    Host({"export", store_ + "/step-1", dcp_, "--to", "dcp"});
    Plain().counts().refused = 0;
    Plain().counts().strays = 0;
  }
  void TearDown() override {
    EXPECT_EQ(Plain().counts().refused, 0u) << "somebody tried to write or to lock";
    EXPECT_EQ(Plain().counts().strays, 0u) << "somebody lost the scheme";
  }

  Ran Host(const std::vector<std::string>& words) {
    const Ran ran = RunCommand(words);
    EXPECT_EQ(ran.status, 0) << testing::PrintToString(words) << ran.err;
    return ran;
  }
  // The command on the host's file and on the same one behind the scheme.
  void BothSay(std::vector<std::string> words, const std::string& source) {
    words.insert(words.begin() + 1, source);
    const Ran host = Host(words);
    words[1] = kScheme + source;
    const std::uint64_t before = Plain().counts().opens;
    const Ran plain = Host(words);
    EXPECT_EQ(WithoutOwn(plain.out), WithoutOwn(host.out)) << testing::PrintToString(words);
    EXPECT_EQ(WithoutScheme(plain.err), host.err) << testing::PrintToString(words);
    EXPECT_GT(Plain().counts().opens, before) << testing::PrintToString(words);
  }

  TempDir dir_;
  const std::string store_ = dir_.Join("store");
  const std::string file_ = dir_.Join("model.safetensors");
  const std::string dcp_ = dir_.Join("model.dcp");
};

TEST_F(PlainSourceTest, ReadingCommandsPrintTheSame) {
  const std::string own = store_ + "/step-1";
  BothSay({"ls"}, store_);
  BothSay({"ls", "-l"}, store_);
  BothSay({"info"}, store_);
  BothSay({"info"}, store_ + "/latest");
  BothSay({"verify"}, store_);
  for (const std::string& source : {own, file_, dcp_}) {
    BothSay({"ls", "-l", "-v"}, source);
    BothSay({"info"}, source);
    BothSay({"info", "layers.0.cols", "--json"}, source);
    BothSay({"cat", "layers.0.cols"}, source);
    BothSay({"cat", "layers.0.w[2:5, 1:9]", "--as", "text"}, source);
    BothSay({"layout", "layers.0.cols"}, source);
    BothSay({"verify"}, source);
    BothSay({"diff", source}, source);
    BothSay({"load", "--ranks", "3", "--shard", "cols", "--compare", own, "-q"}, source);
  }
}

TEST_F(PlainSourceTest, ExportsAndImportsAreIdentical) {
  for (const std::string& source : {store_ + "/step-1", file_, dcp_}) {
    for (const char* format : {"safetensors", "hf", "npy", "dcp", "torch"}) {
      std::map<std::string, std::string> trees[2];
      for (const bool plain : {false, true}) {
        const std::string out = dir_.Join("out");
        Host({"export", (plain ? kScheme : "") + source, out, "--to", format, "--ranks", "2"});
        AddTree(out, "", trees[plain]);
        RemoveTree(out);
      }
      EXPECT_FALSE(trees[0].empty());
      EXPECT_EQ(trees[0], trees[1]) << source << " to " << format;
    }
    Host({"import", kScheme + source, store_ + "/copy"});
    Host({"diff", store_ + "/copy", source});
    Host({"rm", store_ + "/copy"});
  }
}

TEST_F(PlainSourceTest, MountViewsAreIdentical) {
  for (const std::string& source : {store_, file_, dcp_}) {
    ASSERT_OK_AND_ASSIGN(auto host, fs::Vfs::Open(HostFileSystem(), {.source = source}));
    ASSERT_OK_AND_ASSIGN(auto plain,
                         fs::Vfs::Open(Plain(), {.source = kScheme + source, .writable = true}));
    EXPECT_FALSE(plain->writable());
    fs::VfsOps a(*host);
    fs::VfsOps b(*plain);
    for (const std::string name : {"tensors/bias", "npy/layers.0.cols.npy", "model.safetensors",
                                   "slices/layers.0.w[0:2,1:3].npy"}) {
      const std::string path = source == store_ ? "step-1/" + name : name;
      ASSERT_OK_AND_ASSIGN(auto from_host, a.Open(path));
      ASSERT_OK_AND_ASSIGN(auto from_plain, b.Open(path));
      for (int again = 0; again < 2; ++again) {
        ASSERT_OK_AND_ASSIGN(const std::string want, from_host->Read(0, 1 << 20));
        ASSERT_OK_AND_ASSIGN(const std::string got, from_plain->Read(0, 1 << 20));
        EXPECT_EQ(got, want) << path;
      }
    }
  }
}

// What a checkpoint shares with another one is not known while that one cannot be read; an answer
// without a number that belongs to it would look as if there were none.
TEST_F(PlainSourceTest, InfoReportsUncountedSharedBytes) {
  constexpr char kFails[] = "fails://";
  static FailingFileSystem& fs = *new FailingFileSystem(kFails);
  static const bool added = (AddFileSystem(kFails, fs), true);
  ASSERT_TRUE(added);
  fs.suffix = "step-2/COMMIT";
  const Ran other = RunCommand({"info", kFails + store_ + "/step-1"});
  EXPECT_EQ(other.status, 0) << other.err;
  EXPECT_THAT(other.out, HasSubstr("stored "));
  EXPECT_THAT(other.err, HasSubstr("step-2 cannot be read, so"));
  fs.suffix = "step-1/COMMIT";
  int good = 0;
  for (;; ++good) {
    ASSERT_LT(good, 20);
    fs.opened = 0;
    fs.good = good;
    const Ran own = RunCommand({"info", kFails + store_ + "/step-1"});
    if (own.status == 0) {
      EXPECT_THAT(own.out, HasSubstr("stored "));
      break;
    }
    EXPECT_THAT(own.err, HasSubstr("Input/output error")) << good;
  }
  EXPECT_GE(good, 2);
}

TEST_F(PlainSourceTest, ErrorNamesTheUnsupportedOperation) {
  const std::string store = kScheme + store_;
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"init", store + "2"},
                                             {"import", file_, store + "/x"},
                                             {"adopt", file_, store + "/x"},
                                             {"copy", store + "/step-1", store + "2"},
                                             {"rm", store + "/step-1"},
                                             {"gc", store},
                                             {"pin", store + "/step-1"},
                                             {"prune", store, "--keep-last", "1", "--set-policy"},
                                             {"derive", store + "/x", "--from", "step-1"},
                                             {"export", file_, store + "/x", "--to", "npy"}}) {
    const Ran ran = RunCommand(words);
    EXPECT_EQ(ran.status, 2) << words[0];
    EXPECT_THAT(ran.err, HasSubstr("READ_ONLY")) << words[0];
    EXPECT_THAT(ran.err, HasSubstr("the plain file system is read-only")) << words[0];
  }
  // What is only read may lie anywhere.
  EXPECT_EQ(RunCommand({"copy", store + "/step-1", dir_.Join("other")}).status, 0);
  EXPECT_EQ(RunCommand({"verify", dir_.Join("other/step-1")}).status, 0);
  // What is stored names files of the host.
  const Ran adopted = RunCommand({"adopt", kScheme + file_, dir_.Join("adopted/x")});
  EXPECT_EQ(adopted.status, 2);
  EXPECT_THAT(adopted.err, HasSubstr("use `tensormount import` to copy it"));

  ASSERT_OK_AND_ASSIGN(const Checkpoint opened, Checkpoint::Open(kScheme + file_));
  ASSERT_OK_AND_ASSIGN(const Tensor tensor, opened.tensor("bias"));
  const auto mapped = tensor.Map(0, 4);
  EXPECT_THAT(mapped, HasCode(Code::kUnsupported));
  EXPECT_THAT(mapped.status().message(),
              HasSubstr("the plain file system does not support mapping files into memory"));
}

}  // namespace
}  // namespace tensormount
