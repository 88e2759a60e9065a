// SPDX-License-Identifier: Apache-2.0
#include "index/read/compare.h"

#include <atomic>
#include <cstring>
#include <map>

#include "index/foreign/open_source.h"
#include "index/records/name_rules.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

class CompareTest : public testing::Test {
 protected:
  std::shared_ptr<OpenedCheckpoint> Make(const std::string& name, const TinySpec& spec) {
    const std::string store = dir_.path() + "/STORE";
    EXPECT_OK(WriteTinyCheckpoint(HostFileSystem(), store, name, spec).status());
    auto opened = OpenedCheckpoint::Open(HostFileSystem(), store + "/" + name, {});
    EXPECT_OK(opened.status());
    return opened.ok() ? opened.value() : nullptr;
  }

  // Writes all tensors of a spec as a .safetensors file, which has no digests, and opens it.
  std::shared_ptr<OpenedCheckpoint> MakePlain(const std::string& name, const TinySpec& spec) {
    std::string header;
    std::string data;
    for (const TinyTensor& tensor : spec.tensors) {
      const std::string bytes = TinyBytes(tensor);
      header += (header.empty() ? "{\"" : ",\"") + tensor.key + "\":{\"dtype\":\"" +
                std::string(InfoOf(tensor.dtype).safetensors) +
                "\",\"shape\":" + tensor.shape.ToString() + ",\"data_offsets\":[" +
                std::to_string(data.size()) + "," + std::to_string(data.size() + bytes.size()) +
                "]}";
      data += bytes;
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const std::uint64_t length = header.size();
    const std::string path = dir_.path() + "/" + name + ".safetensors";
    EXPECT_OK(HostFileSystem().WriteFileDurably(
        path, std::string(reinterpret_cast<const char*>(&length), 8) + header + data));
    auto opened = OpenNamed(HostFileSystem(), path, {});
    EXPECT_OK(opened.status());
    return opened.ok() ? opened.value() : nullptr;
  }

  // "~ key", with what differs kept in found_.
  std::vector<std::string> Run(const OpenedCheckpoint& a, const OpenedCheckpoint& b,
                               CompareOptions options = {}) {
    std::vector<std::string> lines;
    found_.clear();
    auto summary = CompareCheckpoints(a, b, options, [&](const Mismatch& d) {
      const char sign = "+-~"[static_cast<std::size_t>(d.kind)];
      lines.push_back(std::string(1, sign) + " " + d.key);
      found_[d.key] = d;
      return Status();
    });
    EXPECT_OK(summary.status());
    if (summary.ok()) summary_ = summary.value();
    return lines;
  }

  TempDir dir_;
  std::map<std::string, Mismatch> found_;
  CompareSummary summary_;
};

using Lines = std::vector<std::string>;

TEST_F(CompareTest, EqualCheckpointsAreComparedWithoutReadingData) {
  TinySpec spec = DefaultTinySpec();
  const auto a = Make("a", spec);
  for (TinyTensor& tensor : spec.tensors) {
    if (!tensor.tensor_file && tensor.shape.rank() == 2) tensor.parts = 3;
  }
  spec.writers = 3;
  const auto b = Make("b", spec);
  EXPECT_EQ(Run(*a, *b), Lines());
  EXPECT_TRUE(summary_.same());
  EXPECT_EQ(summary_.by_digest, spec.tensors.size() + spec.objects.size());
  EXPECT_EQ(summary_.by_bytes, 0U);
  EXPECT_EQ(summary_.bytes_read, 0U);
  EXPECT_EQ(summary_.equal, spec.tensors.size() + spec.objects.size() + spec.common.size());
}

TEST_F(CompareTest, ReportsAddedRemovedAndChangedKeys) {
  TinySpec spec = DefaultTinySpec();
  const auto a = Make("a", spec);
  for (TinyTensor& tensor : spec.tensors) {
    if (tensor.key == "bias") tensor.key = "bias2";
    if (tensor.key == "layers.0.w") tensor.seed += 77;
    if (tensor.key == "layers.0.cols") tensor.shape = {10, 6};
    if (tensor.key == "step") tensor.dtype = DType::kF64;
  }
  for (TinyObject& object : spec.objects) {
    if (object.key == "config") object.bytes += "more";
  }
  spec.common.erase("lr");
  spec.common["iteration"] = 17;
  const auto b = Make("b", spec);
  EXPECT_EQ(Run(*a, *b), (Lines{"- bias", "+ bias2", "~ layers.0.cols", "~ layers.0.w", "~ step",
                                "~ config", "~ iteration", "- lr"}));
  EXPECT_EQ(found_["layers.0.cols"].reason, "shape [6, 10] and [10, 6]");
  EXPECT_EQ(found_["layers.0.w"].reason, "digests differ");
  EXPECT_EQ(found_["step"].reason, "dtype i64 and f64");
  EXPECT_EQ(found_["config"].subject, Mismatch::Subject::kObject);
  EXPECT_THAT(found_["iteration"].reason, testing::HasSubstr("17"));
  EXPECT_EQ(summary_.bytes_read, 0U);
  EXPECT_EQ(summary_.added, 1U);
  EXPECT_EQ(summary_.removed, 2U);
  EXPECT_EQ(summary_.changed, 5U);
}

TEST_F(CompareTest, ThreadsReadBlocksWhenDigestsAreMissing) {
  TinySpec spec;
  spec.tensors = {
      {.key = "w", .dtype = DType::kF32, .shape = {300, 100}, .seed = 5, .parts = 3, .axis = 1},
      {.key = "v", .dtype = DType::kBF16, .shape = {1000}, .seed = 6},
      {.key = "fp4", .dtype = DType::kF4, .shape = {6, 8}, .seed = 7},
      {.key = "none", .dtype = DType::kF32, .shape = {0, 4}}};
  const auto a = Make("a", spec);
  const auto same = MakePlain("same", spec);
  CompareOptions options;
  options.block_bytes = 4096;
  options.threads = 3;
  std::atomic<std::uint64_t> last{0};
  options.watch = [&](std::uint64_t done, std::uint64_t) {
    if (done > last) last = done;
    return Status();
  };
  EXPECT_EQ(Run(*a, *same, options), Lines());
  EXPECT_EQ(summary_.by_bytes, 3U);
  EXPECT_EQ(summary_.by_digest, 1U) << "an empty tensor needs no bytes";
  EXPECT_EQ(summary_.bytes_read, 2 * (120000 + 2000 + 24U));
  EXPECT_EQ(last, summary_.bytes_read);
  // Who looks may end it, whatever was found.
  options.watch = [](std::uint64_t, std::uint64_t) { return Status(Code::kCancelled, "enough"); };
  const auto ended =
      CompareCheckpoints(*a, *same, options, [](const Mismatch&) { return Status(); });
  EXPECT_EQ(ended.status().code(), Code::kCancelled);
}

TEST_F(CompareTest, FirstDifferingElementIsReportedByAnyThread) {
  TinySpec spec;
  spec.tensors = {{.key = "w", .dtype = DType::kI32, .shape = {200, 100}, .seed = 5}};
  const auto ours = Make("a", spec);
  const auto plain = MakePlain("plain", spec);
  // Two elements of the file are changed: one far behind the other.
  const std::string path = plain->directory();
  ASSERT_OK_AND_ASSIGN(std::string bytes, HostFileSystem().ReadFile(path, 1 << 20));
  const std::size_t data = bytes.size() - 80000;
  for (const std::size_t element : {std::size_t{12345}, std::size_t{7003}}) {
    std::int32_t value = 0;
    std::memcpy(&value, &bytes[data + element * 4], 4);
    value ^= element == 7003 ? 1 << 16 : 1 << 20;
    std::memcpy(&bytes[data + element * 4], &value, 4);
  }
  ASSERT_OK(HostFileSystem().WriteFileDurably(dir_.path() + "/other.safetensors", bytes));
  ASSERT_OK_AND_ASSIGN(const auto other,
                       OpenNamed(HostFileSystem(), dir_.path() + "/other.safetensors", {}));
  CompareOptions options;
  options.block_bytes = 4096;
  options.threads = 4;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(Run(*ours, *other, options), Lines{"~ w"});
    EXPECT_EQ(found_["w"].first_element, 7003U);
    EXPECT_FALSE(found_["w"].values);
  }
  options.values = true;
  EXPECT_EQ(Run(*ours, *other, options), Lines{"~ w"});
  const ValueMismatch& values = *found_["w"].values;
  EXPECT_EQ(values.compared, 20000U);
  EXPECT_EQ(values.differing, 2U);
  EXPECT_EQ(values.first, 7003U);
  EXPECT_EQ(*values.max_abs_integer, 1U << 20);
  EXPECT_EQ(IndexOf(values.max_abs->at, {200, 100}), Dims({123, 45}));
}

TEST_F(CompareTest, ValuesOfDifferentDtypesAreCompared) {
  TinySpec spec;
  spec.tensors = {{.key = "w", .dtype = DType::kI32, .shape = {50}, .seed = 5}};
  const auto a = Make("a", spec);
  spec.tensors[0].dtype = DType::kI64;
  const auto b = Make("b", spec);
  CompareOptions options;
  options.values = true;
  EXPECT_EQ(Run(*a, *b, options), Lines{"~ w"});
  EXPECT_EQ(found_["w"].reason, "dtype i32 and i64");
  ASSERT_TRUE(found_["w"].values);
  EXPECT_EQ(found_["w"].values->compared, 50U);
  EXPECT_FALSE(found_["w"].first_element) << "bytes of two types have nothing in common";
}

TEST_F(CompareTest, KeysAreChosenAndRenamed) {
  TinySpec spec = DefaultTinySpec();
  const auto a = Make("a", spec);
  for (TinyTensor& tensor : spec.tensors) {
    if (tensor.key == "bias") tensor.key = "zz/bias";  // Sorts elsewhere.
  }
  for (TinyObject& object : spec.objects) {
    if (object.key == "rng") object.key = "random";
  }
  const auto b = Make("b", spec);
  ASSERT_OK_AND_ASSIGN(const NameRules map,
                       NameRules::FromJson(R"([{"key": "bias", "to": "zz/bias"},
                                                {"key": "rng", "to": "random"}])"));
  ASSERT_OK_AND_ASSIGN(const auto mapped, OpenedCheckpoint::Mapped(a, map));
  EXPECT_EQ(Run(*a, *b).size(), 2 + 2 * 2U);  // One tensor; an object of two parts.
  CompareOptions options;
  EXPECT_EQ(Run(*mapped, *b, options), Lines());
  EXPECT_EQ(summary_.by_digest, spec.tensors.size() + spec.objects.size());
  options.keys = "*bias";
  EXPECT_EQ(Run(*a, *b, options), (Lines{"- bias", "+ zz/bias"}));
}

TEST_F(CompareTest, CommonValuesAreComparedEntryByEntry) {
  TinySpec spec;
  spec.tensors = {{.key = "w", .dtype = DType::kU8, .shape = {4}}};
  CommonDict args;
  args.items = {{"lr", 0.5}, {"seed", 1}, {"old", "x"}};
  spec.common["args"] = args;
  spec.common["$rank.3"] = CommonDict{.items = {{"seed", 1}}};
  const auto a = Make("a", spec);
  args.items = {{"lr", 0.25}, {"seed", 1}, {"new", CommonList{{1, 2}}}};
  spec.common["args"] = args;
  spec.common["$rank.3"] = CommonDict{.items = {{"seed", 2}}};
  const auto b = Make("b", spec);
  EXPECT_EQ(Run(*a, *b), (Lines{"~ args.lr", "+ args.new", "- args.old", "~ rank 3: seed"}));
  EXPECT_EQ(found_["args.lr"].reason, "0.5 in the first and 0.25 in the second");
  EXPECT_EQ(found_["args.new"].reason, "[1,2]");
  EXPECT_EQ(summary_.equal, 2U);  // args.seed and the tensor.
}

TEST_F(CompareTest, DamageFailsTheComparison) {
  TinySpec spec;
  spec.tensors = {{.key = "w", .dtype = DType::kF32, .shape = {100}, .seed = 1}};
  const auto a = Make("a", spec);
  const auto plain = MakePlain("plain", spec);
  std::string file;
  ASSERT_OK_AND_ASSIGN(const auto names, HostFileSystem().List(a->directory() + "/data"));
  file = a->directory() + "/data/" + names[0].name;
  ASSERT_OK_AND_ASSIGN(std::string bytes, HostFileSystem().ReadFile(file, 1 << 20));
  bytes[bytes.size() - 9] ^= 4;
  ASSERT_OK(HostFileSystem().ReplaceFile(file, bytes));
  const auto result = CompareCheckpoints(*a, *plain, {}, [](const Mismatch&) { return Status(); });
  EXPECT_EQ(result.status().code(), Code::kDataLoss);
  EXPECT_THAT(result.status().message(), testing::HasSubstr("w"));
}

}  // namespace
}  // namespace tensormount
