// SPDX-License-Identifier: Apache-2.0
#include "fs/export/export.h"

#include <atomic>
#include <cerrno>
#include <mutex>

#include "base/crc32.h"
#include "fs/export/export_plan.h"
#include "fs/views/checkpoint_view.h"
#include "index/archives/torch_archive.h"
#include "index/archives/zip_archive.h"
#include "index/foreign/open_source.h"
#include "tests/fs/vfs_ops.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/power_cut.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Pair;

// Names of files below a folder (or "" for a file) and their bytes.
using Tree = std::map<std::string, std::string>;

Result<Tree> ReadTree(FileSystem& fs, const std::string& path, const std::string& prefix = "") {
  Tree out;
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(path));
  if (info.kind == FileKind::kFile) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out[prefix], fs.ReadFile(path, 1 << 26));
    return out;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto entries, fs.List(path));
  for (const DirectoryEntry& entry : entries) {
    TENSORMOUNT_ASSIGN_OR_RETURN(Tree below,
                                 ReadTree(fs, JoinPath(path, entry.name),
                                          prefix.empty() ? entry.name : prefix + "/" + entry.name));
    out.merge(below);
  }
  return out;
}

Result<Tree> ReadShownView(FileOps& ops, const std::string& path, const std::string& prefix = "") {
  Tree out;
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileStat stat, ops.Stat(path));
  if (stat.kind == FileKind::kFile) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out[prefix], ops.ReadAll(path));
    return out;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto names, ops.List(path));
  for (const std::string& name : names) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        Tree below,
        ReadShownView(ops, path + "/" + name, prefix.empty() ? name : prefix + "/" + name));
    out.merge(below);
  }
  return out;
}

// Every type that torch has, shapes with and without elements, a tensor of several blocks, names
// that no filesystem could hold.
TinySpec WideSpec() {
  TinySpec spec = StrangeTinySpec();
  int n = 0;
  for (const DTypeInfo& info : AllDTypes()) {
    if (info.torch.empty()) continue;
    spec.tensors.push_back({.key = "types." + std::string(info.name),
                            .dtype = info.dtype,
                            .shape = Dims({3, 5}),
                            .seed = static_cast<std::uint64_t>(100 + n++)});
  }
  spec.tensors.push_back({.key = "scalar", .dtype = DType::kBF16, .shape = Dims(), .seed = 90});
  spec.tensors.push_back(
      {.key = "nothing", .dtype = DType::kF32, .shape = Dims({3, 0, 2}), .seed = 91});
  spec.tensors.push_back(
      {.key = "ones", .dtype = DType::kI16, .shape = Dims({1, 1, 700, 3}), .seed = 92, .parts = 1});
  spec.tensors.push_back({.key = "large",
                          .dtype = DType::kF32,
                          .shape = Dims({900, 1201}),
                          .seed = 93,
                          .parts = 3,
                          .axis = 1});
  spec.common["args"] = CommonDict{{{"lr", 0.5}, {"betas", CommonTuple{{0.9, 0.95}}}}};
  return spec;
}

class ExportTest : public testing::Test {
 protected:
  void Write(const TinySpec& spec) {
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), "step-1", spec));
    Open();
  }
  void Open() {
    ASSERT_OK_AND_ASSIGN(source_,
                         OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("store/step-1"), {}));
  }
  // On so many ranks; all must say the same.
  Result<ExportReport> Run(const std::string& name, const ExportOptions& options, int ranks = 1,
                           FileSystem* fs = nullptr) {
    std::mutex mutex;
    std::vector<Result<ExportReport>> all;
    const Status status = RunOnThreads(ranks, [&](Communicator& comm) -> Status {
      Result<ExportReport> mine = Export(fs != nullptr ? *fs : HostFileSystem(), {}, source_,
                                         dir_.Join("out/") + name, comm, options);
      const Status mine_status = mine.status();
      const std::lock_guard lock(mutex);
      if (comm.rank() == 0) {
        all.insert(all.begin(), std::move(mine));
      } else {
        all.push_back(std::move(mine));
      }
      return mine_status;
    });
    for (const auto& one : all) EXPECT_EQ(one.status().code(), status.code());
    return all.at(0);
  }
  std::vector<std::string> Out() {
    std::vector<std::string> names;
    const auto entries = HostFileSystem().List(dir_.Join("out"));
    if (!entries.ok()) return {"unreadable"};
    for (const DirectoryEntry& entry : entries.value()) names.push_back(entry.name);
    return names;
  }
  void SetUp() override { ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("out"))); }

  TempDir dir_;
  std::shared_ptr<OpenedCheckpoint> source_;
};

TEST_F(ExportTest, ViewExportsEqualTheMountedFiles) {
  TinySpec spec = WideSpec();
  // What safetensors has no type for.
  std::erase_if(spec.tensors, [](const TinyTensor& t) { return t.dtype == DType::kC128; });
  Write(spec);
  VfsOptions mounted{.source = dir_.Join("store/step-1"), .list_views = true};
  mounted.hf.part_bytes = 1 << 20;
  ASSERT_OK_AND_ASSIGN(auto vfs, Vfs::Open(HostFileSystem(), mounted));
  VfsOps ops(*vfs);
  const std::pair<ExportFormat, const char*> kFormats[] = {
      {ExportFormat::kSafetensors, "model.safetensors"},
      {ExportFormat::kHf, "hf"},
      {ExportFormat::kNpy, "npy"},
      {ExportFormat::kZarr, "zarr"}};
  for (const auto& [format, view] : kFormats) {
    ASSERT_OK_AND_ASSIGN(const Tree want, ReadShownView(ops, view));
    for (const int ranks : {1, 2, 4}) {
      ExportOptions options;
      options.format = format;
      options.hf = mounted.hf;
      std::atomic<std::uint64_t> progress{0};
      options.progress = &progress;
      const std::string name = std::string(view) + "-" + std::to_string(ranks);
      ASSERT_OK_AND_ASSIGN(const ExportReport report, Run(name, options, ranks));
      ASSERT_OK_AND_ASSIGN(const Tree got, ReadTree(HostFileSystem(), dir_.Join("out/") + name));
      EXPECT_TRUE(got == want) << name;
      EXPECT_EQ(report.files, want.size());
      EXPECT_EQ(report.bytes_written, report.bytes);
      EXPECT_EQ(progress, report.bytes);
      EXPECT_EQ(report.path, dir_.Join("out/") + name);
      EXPECT_THAT(report.notes, testing::Contains(HasSubstr("object")));
    }
  }
}

// The files of dcp/ are those of an export, but the CRCs of data stay zero.
TEST_F(ExportTest, DcpViewDiffersFromTheExportInCrcsOnly) {
  Write(WideSpec());
  ASSERT_OK_AND_ASSIGN(auto vfs,
                       Vfs::Open(HostFileSystem(), {.source = dir_.Join("store/step-1")}));
  VfsOps ops(*vfs);
  ASSERT_OK_AND_ASSIGN(const Tree view, ReadShownView(ops, "dcp"));
  ExportOptions options;
  options.format = ExportFormat::kDcp;
  ASSERT_OK(Run("dcp", options, 1).status());
  ASSERT_OK_AND_ASSIGN(const Tree made, ReadTree(HostFileSystem(), dir_.Join("out/dcp")));
  ASSERT_EQ(view.size(), 2u);
  EXPECT_EQ(view.at(".metadata"), made.at(".metadata"));
  const std::string& got = view.at("__0_0.distcp");
  const std::string& want = made.at("__0_0.distcp");
  ASSERT_EQ(got.size(), want.size());
  std::size_t zeroed = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    ASSERT_EQ(got[i], 0) << i;
    ++zeroed;
  }
  // Each tensor and each object with data has two places for its CRC.
  EXPECT_GT(zeroed, 0u);
  EXPECT_LE(zeroed, 8 * (WideSpec().tensors.size() + WideSpec().objects.size()));
}

// A tensor for which torch has no type would be missing without a word.
TEST_F(ExportTest, NoDcpViewWhereTorchHasNoType) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors = {{.key = "w", .dtype = DType::kF6E2M3, .shape = {8}}};
  Write(spec);
  ASSERT_OK_AND_ASSIGN(auto vfs,
                       Vfs::Open(HostFileSystem(), {.source = dir_.Join("store/step-1")}));
  VfsOps ops(*vfs);
  EXPECT_THAT(ReadShownView(ops, "dcp").status(), HasCode(Code::kNotFound));
}

// Bytes of tensors by key, as our own reader of the format finds them.
Result<Tree> ReadForeignTensors(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSource(HostFileSystem(), path, {}));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened, OpenFound(found, {}));
  for (const std::string& warning : opened->warnings()) {
    if (warning.find("tensor") != std::string::npos) return Status(Code::kDataLoss, warning);
  }
  Tree out;
  Status failure;
  TENSORMOUNT_RETURN_IF_ERROR(opened->index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    std::string bytes(tensor.meta.bytes(), '\0');
    failure = opened->ReadBytes(tensor, 0, bytes.data(), bytes.size(), ReadVerify::kOff, nullptr);
    out[std::string(InfoOf(tensor.meta.dtype()).name) + tensor.meta.shape().ToString() + " " +
        tensor.meta.key()] = std::move(bytes);
    return failure.ok();
  }));
  TENSORMOUNT_RETURN_IF_ERROR(failure);
  return out;
}

Tree TensorsOf(const TinySpec& spec) {
  Tree out;
  for (const TinyTensor& tensor : spec.tensors) {
    out[std::string(InfoOf(tensor.dtype).name) + tensor.shape.ToString() + " " + tensor.key] =
        TinyBytes(tensor);
  }
  return out;
}

TEST_F(ExportTest, TorchExportsContainEveryTensor) {
  const TinySpec spec = WideSpec();
  Write(spec);
  const Tree want = TensorsOf(spec);
  for (const int ranks : {1, 2, 4}) {
    for (const ExportFormat format : {ExportFormat::kDcp, ExportFormat::kTorch}) {
      ExportOptions options;
      options.format = format;
      options.dcp_chunk_bytes = 1000;
      const std::string name = std::string(ExportFormatName(format)) + std::to_string(ranks) +
                               (format == ExportFormat::kTorch ? ".pt" : "");
      ASSERT_OK_AND_ASSIGN(const ExportReport report, Run(name, options, ranks));
      const Result<Tree> got = ReadForeignTensors(dir_.Join("out/") + name);
      ASSERT_OK(got.status());
      EXPECT_EQ(got.value().size(), want.size()) << name;
      EXPECT_TRUE(got.value() == want) << name;
      if (format == ExportFormat::kDcp) {
        EXPECT_EQ(report.files, static_cast<std::uint64_t>(ranks) + 1);
        EXPECT_THAT(report.notes, IsEmpty());
      }
    }
  }
  // The same file, whoever wrote which part of it.
  ASSERT_OK_AND_ASSIGN(const Tree one, ReadTree(HostFileSystem(), dir_.Join("out/torch1.pt")));
  ASSERT_OK_AND_ASSIGN(const Tree four, ReadTree(HostFileSystem(), dir_.Join("out/torch4.pt")));
  EXPECT_TRUE(one == four);
  ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().OpenRead(dir_.Join("out/torch4.pt")));
  ASSERT_OK_AND_ASSIGN(const FileInfo info, file->Stat());
  ASSERT_OK_AND_ASSIGN(const ZipArchive archive, ZipArchive::Read(*file, 0, info.size));
  for (const ZipEntry& entry : archive.entries()) {
    EXPECT_EQ(entry.offset % 64, 0u) << entry.name;
    EXPECT_EQ(Crc32Extend(0, one.at("").data() + entry.offset, entry.size), entry.crc)
        << entry.name;
    EXPECT_OK(CheckZipCrc(*file, entry));
  }
}

// torch has two of these elements in a byte (float4_e2m1fn_x2).
TEST_F(ExportTest, TorchExportsStoreF4AsPairs) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors = {{.key = "long", .dtype = DType::kF4, .shape = {6000}},
                  {.key = "rows", .dtype = DType::kF4, .shape = {5, 8}},
                  {.key = "w", .dtype = DType::kF32, .shape = {3}}};
  Write(spec);
  for (const ExportFormat format : {ExportFormat::kDcp, ExportFormat::kTorch}) {
    ExportOptions options;
    options.format = format;
    options.dcp_chunk_bytes = 1000;
    const std::string name = format == ExportFormat::kTorch ? "f4.pt" : "f4";
    ASSERT_OK(Run(name, options, 2).status());
    const Result<Tree> got = ReadForeignTensors(dir_.Join("out/") + name);
    ASSERT_OK(got.status());
    EXPECT_TRUE(got.value() == TensorsOf(spec)) << name;
  }
  // Elements that do not fall on pairs.
  spec.tensors = {{.key = "odd", .dtype = DType::kF4, .shape = {2, 3}}};
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), "step-2", spec));
  ASSERT_OK_AND_ASSIGN(source_,
                       OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("store/step-2"), {}));
  ExportOptions options;
  options.format = ExportFormat::kTorch;
  EXPECT_THAT(Run("odd.pt", options, 1), HasCode(Code::kUnsupported));
}

TEST_F(ExportTest, TorchExportContainsCommonValues) {
  TinySpec spec = DefaultTinySpec();
  spec.common["torch.planner_data"] = CommonDict{{{"layers.0.w", CommonTuple{{"layers", 0, "w"}}}}};
  Write(spec);
  ExportOptions options;
  options.format = ExportFormat::kTorch;
  ASSERT_OK(Run("values.pt", options, 2));
  ASSERT_OK_AND_ASSIGN(const FoundSource found,
                       FindSource(HostFileSystem(), dir_.Join("out/values.pt"), {}));
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenFound(found, {}));
  ASSERT_OK_AND_ASSIGN(const CommonState common, opened->index().Common());
  EXPECT_EQ(common.values.at("iteration"), spec.common.at("iteration"));
  EXPECT_EQ(common.values.at("lr"), spec.common.at("lr"));
}

// A list that lacks a few items is exported as a list with gaps. If it lacks more, its tensors are
// exported under their keys.
TEST_F(ExportTest, TorchExportRebuildsLists) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors.clear();
  CommonDict paths;
  const auto add = [&](const std::string& list, std::int64_t index) {
    const std::string key = list + "." + std::to_string(index);
    spec.tensors.push_back({.key = key, .dtype = DType::kF32, .shape = {2}});
    paths.items[key] = CommonTuple{{list, index}};
  };
  for (std::int64_t i = 0; i < 30; ++i) add("full", i);
  for (const std::int64_t i : {0, 71}) add("gaps", i);
  for (const std::int64_t i : {0, 72}) add("far", i);
  spec.common["torch.planner_data"] = paths;
  Write(spec);
  ExportOptions options;
  options.format = ExportFormat::kTorch;
  ASSERT_OK(Run("lists.pt", options, 1));
  ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().OpenRead(dir_.Join("out/lists.pt")));
  ASSERT_OK_AND_ASSIGN(const FileInfo info, file->Stat());
  ASSERT_OK_AND_ASSIGN(const TorchArchive archive, TorchArchive::Read(*file, 0, info.size));
  std::map<std::string, std::size_t> lists;
  std::vector<std::string> others;
  const pickle::Value root = archive.document().root();
  for (std::size_t i = 0; i < root.size(); ++i) {
    const std::string key(root.key(i).text());
    if (root.item(i).kind() == pickle::Kind::kList) {
      lists[key] = root.item(i).size();
    } else {
      others.push_back(key);
    }
  }
  EXPECT_THAT(lists, ElementsAre(Pair("full", 30u), Pair("gaps", 72u)));
  EXPECT_THAT(others, IsSupersetOf({"far.0", "far.72"}));
}

TEST_F(ExportTest, DcpExportContainsValuesAndObjects) {
  TinySpec spec = DefaultTinySpec();
  spec.common["torch.planner_data"] = CommonDict{{{"layers.0.w", CommonTuple{{"layers", 0, "w"}}}}};
  Write(spec);
  ExportOptions options;
  options.format = ExportFormat::kDcp;
  ASSERT_OK(Run("dcp", options, 2));
  ASSERT_OK_AND_ASSIGN(const FoundSource found,
                       FindSource(HostFileSystem(), dir_.Join("out/dcp"), {}));
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenFound(found, {}));
  ASSERT_OK_AND_ASSIGN(const CommonState common, opened->index().Common());
  EXPECT_EQ(common.values.at("iteration"), spec.common.at("iteration"));
  EXPECT_EQ(common.values.at("lr"), spec.common.at("lr"));
  EXPECT_EQ(common.values.at("torch.planner_data"), spec.common.at("torch.planner_data"));
  // Opaque objects are bytes in a pickle, and so a value again, or an archive that holds them.
  for (const TinyObject& object : spec.objects) {
    if (object.grid.rank() > 0) continue;
    const auto value = common.values.find(object.key);
    if (value != common.values.end()) {
      EXPECT_EQ(value->second, CommonValue(CommonBytes{object.bytes}));
      continue;
    }
    ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts(object.key));
    std::string bytes(parts.at(0).length, '\0');
    ASSERT_OK(opened->ReadObject(parts.at(0), 0, bytes.data(), bytes.size()));
    EXPECT_THAT(bytes, HasSubstr(object.bytes));
  }
}

// As torch's planners cut, so that a nested dict can be loaded from it.
TEST_F(ExportTest, DcpExportWritesDictValuesAsItems) {
  TinySpec spec = DefaultTinySpec();
  spec.common.clear();
  spec.objects.clear();
  spec.common["args"] =
      CommonDict{{{"lr", 0.5}, {"betas", CommonTuple{{0.9, 0.95}}}, {"none", CommonDict{}}}};
  spec.common["groups"] = CommonList{{CommonDict{{{"lr", 1}, {2, "two"}}}, CommonList{{3}}}};
  spec.common["list"] = CommonList{{1, CommonTuple{{CommonDict{{{"a", 1}}}}}}};
  // Two would get one name: it stays whole.
  spec.common["same"] = CommonDict{{{1, 1}, {"1", 2}}};
  spec.common["taken"] = CommonDict{{{"x", 1}}};
  spec.common["taken.x"] = 2;
  Write(spec);
  ExportOptions options;
  options.format = ExportFormat::kDcp;
  ASSERT_OK(Run("dcp", options, 2));
  ASSERT_OK_AND_ASSIGN(const FoundSource found,
                       FindSource(HostFileSystem(), dir_.Join("out/dcp"), {}));
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenFound(found, {}));
  ASSERT_OK_AND_ASSIGN(CommonState common, opened->index().Common());
  const CommonValue paths = common.values.at("torch.planner_data");
  common.values.erase("torch.planner_data");
  const CommonValues want = {{"args.lr", 0.5},
                             {"args.betas", CommonTuple{{0.9, 0.95}}},
                             {"args.none", CommonDict{}},
                             {"groups.0.2", "two"},
                             {"groups.0.lr", 1},
                             {"groups.1", CommonList{{3}}},
                             {"list", spec.common.at("list")},
                             {"same", spec.common.at("same")},
                             {"taken", spec.common.at("taken")},
                             {"taken.x", 2}};
  EXPECT_TRUE(common.values == want)
      << CommonToJson(CommonDict{{common.values.begin(), common.values.end()}});
  const auto* dict = paths.get_if<CommonDict>();
  ASSERT_NE(dict, nullptr);
  EXPECT_EQ(dict->items.size(), 6u);
  EXPECT_EQ(*dict->Find("groups.0.2"), CommonValue(CommonTuple{{"groups", 0, "2"}}));
  EXPECT_EQ(*dict->Find("args.none"), CommonValue(CommonTuple{{"args", "none"}}));
}

TEST_F(ExportTest, ErrorSaysThatANameIsReservedInSafetensors) {
  const TinySpec spec = DefaultTinySpec();
  Write(spec);
  ExportOptions options;
  options.format = ExportFormat::kSafetensors;
  const std::string map = R"([{"match": ")" + spec.tensors[0].key + R"(", "to": "__metadata__"}])";
  options.map.rules = map;
  const auto result = Run("reserved", options, 1);
  EXPECT_THAT(result.status(), HasCode(Code::kUnsupported));
  EXPECT_THAT(result.status(), HasMessage("named __metadata__: the name is reserved"));
}

TEST_F(ExportTest, ErrorNamesUnsupportedTensorsAndWritesNothing) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors.push_back({.key = "six", .dtype = DType::kF6E2M3, .shape = Dims({4, 4}), .seed = 7});
  spec.tensors.push_back({.key = "z", .dtype = DType::kC128, .shape = Dims({2}), .seed = 8});
  Write(spec);
  for (const ExportFormat format : {ExportFormat::kNpy, ExportFormat::kZarr, ExportFormat::kDcp,
                                    ExportFormat::kTorch, ExportFormat::kSafetensors}) {
    ExportOptions options;
    options.format = format;
    const auto result = Run("x", options, 2);
    EXPECT_THAT(result.status(), HasCode(Code::kUnsupported));
    EXPECT_THAT(result.status().message(),
                HasSubstr(format == ExportFormat::kSafetensors ? "z (c128)" : "six (f6_e2m3)"));
  }
  EXPECT_THAT(Out(), IsEmpty());
}

TEST_F(ExportTest, FailedWritesLeaveNothing) {
  Write(DefaultTinySpec());
  for (const ExportFormat format :
       {ExportFormat::kSafetensors, ExportFormat::kNpy, ExportFormat::kDcp, ExportFormat::kTorch}) {
    for (const FileOp op : {FileOp::kWrite, FileOp::kSync, FileOp::kOpenShared,
                            FileOp::kSyncDirectory, FileOp::kRename}) {
      std::atomic<int> count{0};
      ObservedFileSystem faulty(HostFileSystem(), [&](const FileEvent& event) -> Status {
        const bool here = event.op == op && event.path.find("/out/") != std::string::npos;
        if (!here || ++count < 2 - (op == FileOp::kRename ? 1 : 0)) return {};
        return Status::FromErrno(ENOSPC, "write", event.path);
      });
      ExportOptions options;
      options.format = format;
      const auto result = Run("x", options, 2, &faulty);
      if (result.ok()) {  // One file is made by one open; there is one folder only.
        EXPECT_LT(count, 2) << FileOpName(op);
        ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("out/x")));
      } else {
        EXPECT_THAT(result.status(), HasCode(Code::kResourceExhausted)) << FileOpName(op);
      }
      EXPECT_THAT(Out(), IsEmpty()) << FileOpName(op);
    }
  }
}

TEST_F(ExportTest, ExportCanBeCancelledAtAnyMoment) {
  Write(DefaultTinySpec());
  for (const ExportFormat format : {ExportFormat::kNpy, ExportFormat::kTorch}) {
    for (const int ranks : {1, 3}) {
      // Set at the n-th call to the filesystem of the destination, until one comes too late.
      bool done = false;
      for (int n = 0; !done; ++n) {
        std::atomic<bool> cancel{n == 0};
        std::atomic<int> calls{0};
        ObservedFileSystem watched(HostFileSystem(), [&](const FileEvent& event) -> Status {
          if (event.path.find("/out/") != std::string::npos && ++calls == n) cancel = true;
          return {};
        });
        ExportOptions options;
        options.format = format;
        options.cancel = &cancel;
        const auto result = Run("x", options, ranks, &watched);
        done = result.ok();
        if (done) {
          EXPECT_THAT(Out(), ElementsAre("x"));
          ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("out/x")));
          // At the earliest by the rename, and what follows it.
          EXPECT_GE(n, 5);
          continue;
        }
        EXPECT_THAT(result.status(), HasCode(Code::kCancelled)) << n;
        EXPECT_THAT(result.status().message(), HasSubstr("the files written so far were removed"));
        EXPECT_THAT(Out(), IsEmpty()) << n;
        ASSERT_LT(n, 1000);
      }
    }
  }
}

TEST_F(ExportTest, DamageErrorNamesTheFileAndLeavesNothing) {
  Write(WideSpec());
  // Each data file, in its middle: some tensor is hit in one of them.
  ASSERT_OK_AND_ASSIGN(const auto files, HostFileSystem().List(dir_.Join("store/step-1/data")));
  ASSERT_FALSE(files.empty());
  for (const DirectoryEntry& entry : files) {
    const std::string path = dir_.Join("store/step-1/data/") + entry.name;
    ASSERT_EQ(chmod(path.c_str(), 0644), 0);
    ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().OpenShared(path));
    ASSERT_OK_AND_ASSIGN(const FileInfo info, file->Stat());
    std::string bytes(info.size, '\0');
    ASSERT_OK(file->ReadExactAt(0, bytes.data(), bytes.size()));
    for (char& byte : bytes) byte = static_cast<char>(byte ^ 1);
    ASSERT_OK(file->WriteAt(0, bytes.data(), bytes.size()));
  }
  for (const ExportFormat format :
       {ExportFormat::kNpy, ExportFormat::kZarr, ExportFormat::kDcp, ExportFormat::kTorch}) {
    ExportOptions options;
    options.format = format;
    const auto result = Run("x", options, 2);
    EXPECT_THAT(result.status(), HasCode(Code::kDataLoss));
    EXPECT_THAT(Out(), IsEmpty());
  }
}

TEST_F(ExportTest, OverwriteReplacesOnlyEarlierExports) {
  Write(DefaultTinySpec());
  ExportOptions options;
  options.format = ExportFormat::kDcp;
  ASSERT_OK(Run("x", options));
  EXPECT_THAT(Run("x", options).status(), HasCode(Code::kAlreadyExists));
  options.replace = true;
  ASSERT_OK(Run("x", options, 2));
  EXPECT_THAT(Out(), ElementsAre("x"));
  ASSERT_OK_AND_ASSIGN(const Tree dcp, ReadTree(HostFileSystem(), dir_.Join("out/x")));
  EXPECT_TRUE(dcp.contains("__1_0.distcp"));
  // Another format's, somebody's own files, a file where a folder is meant.
  options.format = ExportFormat::kNpy;
  EXPECT_THAT(Run("x", options).status(), HasCode(Code::kInvalidArgument));
  options.format = ExportFormat::kTorch;
  EXPECT_THAT(Run("x", options).status(), HasCode(Code::kInvalidArgument));
  ASSERT_OK(Run("f", options));
  ASSERT_OK(Run("f", options));
  options.format = ExportFormat::kNpy;
  EXPECT_THAT(Run("f", options).status(), HasCode(Code::kInvalidArgument));
  ASSERT_OK(Run("n", options));
  ASSERT_OK(Run("n", options));
  ASSERT_OK(HostFileSystem().WriteFileDurably(dir_.Join("out/n/notes.txt"), "mine"));
  EXPECT_THAT(Run("n", options).status(), HasCode(Code::kInvalidArgument));
  // Neither is a store or a checkpoint the place for one.
  for (const char* in_store : {"../store/y", "../store/step-1/y", "../store/step-1/data/y"}) {
    EXPECT_THAT(Run(in_store, options).status(), HasCode(Code::kInvalidArgument)) << in_store;
  }
  const auto put = [this](const std::string& name, const std::string& text) {
    ASSERT_OK(HostFileSystem().WriteFileDurably(dir_.Join("out/" + name), text));
  };
  for (const auto& [format, own, theirs] :
       {std::tuple(ExportFormat::kHf, "model-00001-of-00002.safetensors", "tokenizer.json"),
        std::tuple(ExportFormat::kZarr, "", "notes.txt"),
        std::tuple(ExportFormat::kDcp, "__7_0.distcp", "common.pt")}) {
    options.format = format;
    const std::string name(ExportFormatName(format));
    ASSERT_OK(Run(name, options));
    if (*own != 0) put(name + "/" + own, "of an earlier one");
    ASSERT_OK(Run(name, options));
    put(name + "/" + theirs, "mine");
    EXPECT_THAT(Run(name, options).status(), HasCode(Code::kInvalidArgument)) << name;
    EXPECT_TRUE(HostFileSystem().Exists(dir_.Join("out/" + name + "/" + theirs)));
    ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("out/" + name)));
  }
  for (const ExportFormat format : {ExportFormat::kTorch, ExportFormat::kSafetensors}) {
    options.format = format;
    put("notes", "my notes");
    EXPECT_THAT(Run("notes", options).status(), HasCode(Code::kInvalidArgument));
    ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("out/notes")));
    put("notes", "");
    ASSERT_OK(Run("notes", options));
    ASSERT_OK(Run("notes", options));
    ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("out/notes")));
  }
  options.format = ExportFormat::kNpy;
  EXPECT_THAT(Run("../store", options).status(), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Run("../store/step-1", options).status(), HasCode(Code::kInvalidArgument));
  // What is read is not replaced, even where it is an export.
  ASSERT_OK_AND_ASSIGN(const FoundSource found,
                       FindSource(HostFileSystem(), dir_.Join("out/x"), {}));
  ASSERT_OK_AND_ASSIGN(source_, OpenFound(found, {}));
  options.format = ExportFormat::kDcp;
  const auto itself = Run("x", options);
  EXPECT_THAT(itself.status(), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(itself.status().message(), HasSubstr("the source of this export"));
  EXPECT_THAT(Run("no/such", options).status(), HasCode(Code::kNotFound));
  EXPECT_THAT(Run("..", options).status(), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Out(), ElementsAre("f", "n", "x"));
}

TEST_F(ExportTest, ExportWithEmptyFilesCanBeReplaced) {
  TinySpec spec = DefaultTinySpec();
  spec.objects.push_back({.key = "config.json", .bytes = "{}", .index = {}, .grid = {}});
  // No rank has a byte of it to write, and still one must make it.
  spec.objects.push_back({.key = "merges.txt", .bytes = "", .index = {}, .grid = {}});
  Write(spec);
  ExportOptions options;
  options.format = ExportFormat::kHf;
  options.replace = true;
  ASSERT_OK(Run("x", options));
  EXPECT_TRUE(HostFileSystem().Exists(dir_.Join("out/x/config.json")));
  EXPECT_TRUE(HostFileSystem().Exists(dir_.Join("out/x/merges.txt")));
  ASSERT_OK(Run("x", options, 2));
  // A checkpoint without it would not write it: then it may be somebody's.
  ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("store")));
  Write(DefaultTinySpec());
  EXPECT_THAT(Run("x", options).status(), HasCode(Code::kInvalidArgument));
}

TEST_F(ExportTest, NothingIsReplacedWithoutExchange) {
  Write(DefaultTinySpec());
  int exchanges = 0;
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) -> Status {
    if (event.op != FileOp::kExchange) return {};
    ++exchanges;
    return Status(Code::kUnsupported, "no RENAME_EXCHANGE");
  });
  ExportOptions options;
  for (const ExportFormat format : {ExportFormat::kDcp, ExportFormat::kTorch}) {
    options.format = format;
    options.replace = false;
    ASSERT_OK(Run("x", options, 1, &fs));
    ASSERT_OK_AND_ASSIGN(const FileInfo old, HostFileSystem().LinkStat(dir_.Join("out/x")));
    options.replace = true;
    const Status status = Run("x", options, 2, &fs).status();
    EXPECT_THAT(status, HasCode(Code::kUnsupported));
    EXPECT_THAT(status.message(), HasSubstr("remove it first"));
    EXPECT_THAT(Out(), ElementsAre("x"));
    ASSERT_OK_AND_ASSIGN(const FileInfo now, HostFileSystem().LinkStat(dir_.Join("out/x")));
    EXPECT_EQ(now.inode, old.inode);
    ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("out/x")));
  }
  EXPECT_EQ(exchanges, 2);
}

TEST_F(ExportTest, LeftoverTemporaryFilesAreWarnedAbout) {
  Write(DefaultTinySpec());
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("out/x.0123abcd.tmp")));
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("out/x.notes.tmp")));
  ExportOptions options;
  options.format = ExportFormat::kNpy;
  ASSERT_OK_AND_ASSIGN(const ExportReport report, Run("x", options));
  EXPECT_THAT(report.warnings, ElementsAre(HasSubstr("x.0123abcd.tmp")));
}

TEST_F(ExportTest, KeysAreRenamedByTheMap) {
  Write(DefaultTinySpec());
  ExportOptions options;
  options.format = ExportFormat::kTorch;
  const std::string map = R"([{"match": "embed.*", "to": "e.*"}])";
  options.map.rules = map;
  ASSERT_OK(Run("m.pt", options));
  ASSERT_OK_AND_ASSIGN(const Tree got, ReadForeignTensors(dir_.Join("out/m.pt")));
  EXPECT_TRUE(got.contains("bf16[8, 16] e.weight"));
}

// After a power cut at any moment there is the whole export under its name, or nothing; once the
// call has returned, it is there.
TEST_F(ExportTest, ExportIsDurableWhenItReturns) {
  TinySpec spec;
  spec.writers = 1;
  spec.tensors.push_back({.key = "a/b", .dtype = DType::kF32, .shape = Dims({5}), .seed = 1});
  Write(spec);
  for (const ExportFormat format : {ExportFormat::kNpy, ExportFormat::kDcp, ExportFormat::kTorch}) {
    const std::string live = dir_.Join("live");
    ASSERT_OK(HostFileSystem().CreateDirectory(live));
    PowerCutFileSystem fs(live);
    ExportOptions options;
    options.format = format;
    const Status status = RunOnThreads(1, [&](Communicator& comm) {
      return Export(fs, {}, source_, live + "/x", comm, options).status();
    });
    ASSERT_OK(status);
    ASSERT_OK_AND_ASSIGN(const Tree want, ReadTree(HostFileSystem(), live + "/x"));
    Random random(7);
    for (std::size_t k = 0; k <= fs.op_count(); ++k) {
      ASSERT_OK(fs.Materialise(k, random, dir_.Join("after")));
      const Result<Tree> got = ReadTree(HostFileSystem(), dir_.Join("after/x"));
      if (got.ok()) {
        EXPECT_TRUE(got.value() == want) << k;
      } else {
        EXPECT_THAT(got.status(), HasCode(Code::kNotFound));
        EXPECT_LT(k, fs.op_count());
      }
      ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("after")));
    }
    ASSERT_OK(HostFileSystem().RemoveTree(live));
  }
}

// Whether a file can be cloned is known only when it is tried, so the message says what is counted.
TEST(ExportRoom, RefusalSaysThatShareableTensorsAreCounted) {
  TempDir dir;
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), dir.Join("store"), "step-1", DefaultTinySpec()));
  ASSERT_OK_AND_ASSIGN(
      const auto view,
      CheckpointView::Open(HostFileSystem(), dir.Join("store/step-1"), Uuid{}, {}, {.slot = 3}));
  for (const ExportFormat format : {ExportFormat::kHf, ExportFormat::kNpy}) {
    ExportOptions options;
    options.format = format;
    const Status refused = MakeExportPlan(*view, options, 1, 0).status();
    EXPECT_THAT(refused, HasCode(Code::kResourceExhausted));
    EXPECT_THAT(refused, HasMessage("are free"));
    EXPECT_EQ(refused.message().find("cloned") != std::string::npos, format == ExportFormat::kHf);
  }
}

}  // namespace
}  // namespace tensormount::fs
