// SPDX-License-Identifier: Apache-2.0
// What was ever written must stay readable, and the same input must give the same bytes.
// TENSORMOUNT_GOLDEN_OUT=DIR writes the checkpoint anew below DIR instead of comparing it.
#include <cstdlib>

#include "index/read/checkpoint.h"
#include "index/records/manifest.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

std::string Counting(std::size_t bytes, int step) {
  std::string out(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) {
    out[i] = static_cast<char>(static_cast<int>(i) * step + static_cast<int>(i >> 8));
  }
  return out;
}

Region BoxOf(const Dims& begin, const Dims& extent) {
  return Region(Box::Make(begin, extent).value());
}

// Nothing random: this is what tests/golden/v1/step-1000 was made from.
BuildSpec GoldenSpec() {
  BuildSpec spec;
  spec.writers = 2;
  spec.tensors = {
      {.key = "layers.0.w", .dtype = DType::kF32, .shape = {6, 8}, .bytes = Counting(192, 3)},
      {.key = "layers.0.b", .dtype = DType::kBF16, .shape = {9}, .bytes = Counting(18, 5)},
      {.key = "flat/\xC3\xA9", .dtype = DType::kI64, .shape = {5, 7}, .bytes = Counting(280, 7)},
      {.key = "scalar", .dtype = DType::kF64, .shape = {}, .bytes = Counting(8, 9)},
      {.key = "empty", .dtype = DType::kU8, .shape = {0, 3}, .bytes = ""},
      {.key = "leaves", .dtype = DType::kU8, .shape = {70000}, .bytes = Counting(70000, 11)}};
  const Box flat = Box::Make({0, 0}, {5, 7}).value();
  spec.partitions = {{{BoxOf({0, 0}, {6, 3})}, {BoxOf({0, 3}, {6, 5})}},
                     {{BoxOf({0}, {5})}, {BoxOf({5}, {4})}},
                     {{Region::Flat(flat, 0, 11).value()}, {Region::Flat(flat, 11, 24).value()}},
                     {{Region(Box())}, {}},
                     {{}, {}},
                     {{}, {BoxOf({0}, {70000})}}};
  spec.objects = {
      {"rng", {0}, {2}, "first"}, {"rng", {1}, {2}, "second"}, {"config", {}, {}, "{}"}};
  // Every kind of common value, and every reserved record that is a value's.
  const auto key = [](const char* text) { return CommonKey(std::string(text)); };
  const CommonDict nested{{{CommonKey(std::int64_t{-1}), CommonNone()},
                           {key(""), CommonTuple{{0.5, -0.0}}},
                           {key("big"), std::uint64_t{1} << 63}}};
  spec.common = {{"$content", CommonDict{{{key("model"), "golden"}, {key("step"), 1000}}}},
                 {"$rank.1", CommonDict{{{key("seed"), 7}}}},
                 {"args", CommonList{{nested, CommonList{}, CommonDict{}, "\xff"}}},
                 {"bytes", CommonBytes{std::string("\0\1", 2)}},
                 {"flag", true},
                 {"iteration", std::int64_t{1000}},
                 {"lr", 0.25},
                 {"name", std::string("golden")}};
  return spec;
}

// The same tensors with page hashes, of which only `leaves` is long enough: step-1001.
BuildSpec PagedGoldenSpec() {
  BuildSpec spec = GoldenSpec();
  spec.page_hashes = true;
  return spec;
}

class GoldenCheckpoint : public testing::TestWithParam<const char*> {
 protected:
  BuildSpec Spec() const { return Name() == "step-1001" ? PagedGoldenSpec() : GoldenSpec(); }
  std::string Name() const { return GetParam(); }
  std::string GoldenPath() const { return SourcePath("tests/golden/v1/" + Name()); }
};
INSTANTIATE_TEST_SUITE_P(Version1, GoldenCheckpoint, testing::Values("step-1000", "step-1001"));

TEST_P(GoldenCheckpoint, OpensAndReadsTheSameBytes) {
  const BuildSpec spec = Spec();
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), GoldenPath(), {}));
  EXPECT_TRUE(opened->warnings().empty());
  ASSERT_EQ(opened->index().tensor_count(), spec.tensors.size());
  for (const RandomTensor& tensor : spec.tensors) {
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(tensor.key));
    EXPECT_EQ(entry.meta.dtype(), tensor.dtype);
    EXPECT_EQ(entry.meta.shape(), tensor.shape);
    EXPECT_EQ(entry.digest, Crc64Bitwise(0, tensor.bytes.data(), tensor.bytes.size()));
    std::string got(tensor.bytes.size(), '?');
    ASSERT_OK(
        opened->ReadBytes(entry, 0, got.data(), got.size(), ReadVerify::kExtendLeaves, nullptr));
    EXPECT_EQ(got, tensor.bytes) << tensor.key;
  }
  EXPECT_THAT(opened->index().CommonRecords(), IsOkAndHolds(spec.common));
  ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts("rng"));
  ASSERT_EQ(parts.size(), 2u);
  std::string second(parts[1].length, '?');
  ASSERT_OK(opened->ReadObject(parts[1], 0, second.data(), second.size()));
  EXPECT_EQ(second, "second");
  EXPECT_EQ(opened->index().info().generation, 7u);
  EXPECT_EQ(opened->index().info().producer, "test");
  ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                       VerifyCheckpoint(HostFileSystem(), GoldenPath(), {}));
  for (const auto& damage : report.damages) ADD_FAILURE() << damage.object << damage.reason;
}

TEST_P(GoldenCheckpoint, SameInputGivesTheSameBytes) {
  const char* out = std::getenv("TENSORMOUNT_GOLDEN_OUT");
  TempDir dir;
  const std::string path = JoinPath(out != nullptr ? out : dir.path(), Name());
  ASSERT_OK_AND_ASSIGN(const BuiltCheckpoint built,
                       BuildCheckpoint(HostFileSystem(), path, Spec()));
  if (out != nullptr) GTEST_SKIP() << "written to " << path;
  ASSERT_OK_AND_ASSIGN(const auto golden,
                       OpenedCheckpoint::Open(HostFileSystem(), GoldenPath(), {}));
  const CommitRecord& commit = golden->commit()->record;
  EXPECT_EQ(built.commit.content_root, commit.content_root);
  ASSERT_EQ(built.commit.files.size(), commit.files.size());
  for (std::size_t i = 0; i < commit.files.size(); ++i) {
    const std::string& name = commit.files[i].name;
    EXPECT_EQ(built.commit.files[i].name, name);
    if (name == kIndexName) continue;
    EXPECT_EQ(ReadWholeFile(JoinPath(path, name)), ReadWholeFile(JoinPath(GoldenPath(), name)));
    EXPECT_EQ(built.commit.files[i].hash, commit.files[i].hash) << name;
  }
  // An SST differs in session id and times: its records must be the same.
  using Records = std::vector<std::pair<std::string, std::string>>;
  const auto records = [](const OpenedCheckpoint& opened) {
    Records all;
    EXPECT_OK(opened.index().table().Scan("", "", [&](auto key, auto value) {
      all.emplace_back(key, value);
      return true;
    }));
    return all;
  };
  ASSERT_OK_AND_ASSIGN(const auto again, OpenedCheckpoint::Open(HostFileSystem(), path, {}));
  EXPECT_EQ(records(*again), records(*golden));
  // COMMIT, but for what it says of the index.
  CommitRecord same = built.commit;
  for (CommitRecord::Entry& entry : same.files) {
    if (entry.name == kIndexName) entry = *commit.Find(kIndexName);
  }
  EXPECT_EQ(EncodeCommit(same), ReadWholeFile(JoinPath(GoldenPath(), kCommitName)));
}

// Each file of tests/golden/bad says the code that it must produce: CODE-what.commit or .tmm. What
// lies in its folders is of other formats (tests/adopt/hostile_test.cc).
TEST(Golden, BadFilesFailWithTheirCodes) {
  const std::string folder = SourcePath("tests/golden/bad");
  ASSERT_OK_AND_ASSIGN(const auto entries, HostFileSystem().List(folder));
  int seen = 0;
  for (const DirectoryEntry& entry : entries) {
    if (entry.kind != FileKind::kFile) continue;
    const std::string bytes = ReadWholeFile(JoinPath(folder, entry.name));
    Status status;
    if (entry.name.ends_with(".commit")) {
      status = StatusOf(DecodeCommit(bytes, entry.name));
    } else if (entry.name.ends_with(".tmm")) {
      status = StatusOf(DecodeManifest(bytes, entry.name));
    } else {
      continue;
    }
    ++seen;
    const std::string code = entry.name.substr(0, entry.name.find('-'));
    EXPECT_EQ(CodeName(status.code()), code) << entry.name << ": " << status.ToString();
    EXPECT_THAT(status, HasMessage(entry.name));
  }
  EXPECT_GE(seen, 12);
}

}  // namespace
}  // namespace tensormount
