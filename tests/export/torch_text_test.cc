// SPDX-License-Identifier: Apache-2.0
// The texts of torch's formats: pickles and zip archives.
#include "fs/formats/torch_text.h"

#include <cstring>

#include <gtest/gtest.h>

#include "base/crc32.h"
#include "fs/formats/pickle_writer.h"
#include "fs/formats/zip_writer.h"
#include "index/archives/pickle.h"
#include "index/archives/zip_archive.h"
#include "index/foreign/foreign.h"
#include "index/read/saved_paths.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

CommonValue SomeOfEverything() {
  CommonDict dict;
  dict.items["none"] = CommonNone();
  dict.items["bools"] = CommonList{{true, false}};
  CommonList numbers;
  for (const std::int64_t n : {0L, 1L, 255L, 256L, 65535L, 65536L, -1L, 2147483647L, 2147483648L,
                               -2147483648L, -2147483649L, 9223372036854775807L}) {
    numbers.items.emplace_back(n);
  }
  numbers.items.emplace_back(std::uint64_t{9223372036854775808u});
  numbers.items.emplace_back(std::uint64_t{18446744073709551615u});
  dict.items["ints"] = numbers;
  dict.items["floats"] = CommonTuple{{0.1, -0.0, 1e308, 5e-324}};
  dict.items["strings"] =
      CommonList{{"", "one", "one", std::string(300, 'x'), "\xc3\xa4\xe2\x82\xac"}};
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  dict.items["bytes"] = CommonBytes{all};
  dict.items[std::int64_t{7}] = CommonTuple();
  dict.items["empty"] = CommonList{{CommonList(), CommonDict(), CommonTuple()}};
  // So many strings that places in the memo need more than a byte.
  CommonList many;
  for (int i = 0; i < 600; ++i) many.items.emplace_back("s" + std::to_string(i % 400));
  dict.items["many"] = many;
  return dict;
}

TEST(PickleWriterTest, ValuesRoundTrip) {
  const CommonValue value = SomeOfEverything();
  for (const int protocol : {2, 4}) {
    PickleWriter writer(protocol);
    writer.Common(value);
    ASSERT_OK_AND_ASSIGN(const pickle::Document document, pickle::Parse(writer.Finish(), {}));
    const std::optional<CommonValue> back = CommonFromPickle(document.root());
    ASSERT_TRUE(back.has_value()) << protocol;
    const auto difference = FirstDifference(value, *back);
    EXPECT_FALSE(difference.has_value())
        << protocol << ": " << difference->path << ": " << difference->what;
  }
}

TEST(PickleWriterTest, TensorPickleEqualsThatOfTorch) {
  PickleWriter writer(2);
  PickleTensor(writer, DType::kBF16, Dims({2, 3}), "0");
  const std::string text = writer.Finish();
  // torch 2.13's data.pkl of such a tensor, less what it puts into the memo and never uses.
  EXPECT_EQ(text, std::string("\x80\x02"
                              "ctorch._utils\n_rebuild_tensor_v2\nq\0((X\7\0\0\0storageq\1"
                              "ctorch\nBFloat16Storage\nq\2X\1\0\0\0"
                              "0q\3X\3\0\0\0cpuq\4K\6tQ"
                              "K\0K\2K\3\x86K\3K\1\x86\x89"
                              "ccollections\nOrderedDict\nq\5)RtR.",
                              145));
}

// torch.save(0.1) of torch 2.13 has this length and this CRC-32.
TEST(ZipWriterTest, ArchiveEqualsThatOfTorch) {
  PickleWriter pickle(2);
  pickle.Float(0.1);
  ZipWriter zip;
  std::string text;
  zip.Add("data.pkl", pickle.Finish(), text);
  AddEntriesBeforeData(zip, text);
  zip.Add("version", "3\n", text);
  zip.Add(".data/serialization_id", "0290846867776292310400117280476085745929", text);
  zip.Finish(text);
  EXPECT_EQ(text.size(), 1261u);
  EXPECT_EQ(zip.size(), text.size());
  EXPECT_EQ(Crc32Extend(0, text.data(), text.size()), 0x8dc32befu);
}

// The same with data: [[0., 1., 2.], [3., 4., 5.]] of bfloat16; the pickle is torch's own.
TEST(ZipWriterTest, ArchiveWithAHoleEqualsThatOfTorch) {
  const std::string pickle(
      "\x80\x02"
      "ctorch._utils\n_rebuild_tensor_v2\nq\0((X\7\0\0\0storageq\1ctorch\nBFloat16Storage\nq\2"
      "X\1\0\0\0"
      "0q\3X\3\0\0\0cpuq\4K\6tq\5QK\0K\2K\3\x86q\6K\3K\1\x86q\7\x89"
      "ccollections\nOrderedDict\nq\10)Rq\ttq\nRq\v.",
      157);
  const std::string data("\0\0\x80\x3f\0\x40\x40\x40\x80\x40\xa0\x40", 12);
  ZipWriter zip;
  std::string text;
  zip.Add("data.pkl", pickle, text);
  AddEntriesBeforeData(zip, text);
  zip.Begin("data/0", data.size(), text);
  EXPECT_EQ(text.size() % ZipWriter::kAlignment, 0u);
  text += data;
  zip.End(text);
  zip.Add("version", "3\n", text);
  zip.Add(".data/serialization_id", "1572819951185464302603333058002045942079", text);
  zip.Finish(text);
  ASSERT_EQ(zip.holes().size(), 1u);
  const std::uint32_t crc = Crc32Extend(0, data.data(), data.size());
  for (const std::uint64_t position : zip.holes()[0].positions)
    std::memcpy(&text[position], &crc, 4);
  EXPECT_EQ(text.size(), 1577u);
  EXPECT_EQ(Crc32Extend(0, text.data(), text.size()), 0xe1158e9bu);
}

// Entries over 4 GiB, and entries behind them: in a file that is mostly holes.
TEST(ZipWriterTest, WritesZip64ForEntriesOver4GiB) {
  TempDir dir;
  constexpr std::uint64_t kHuge = (std::uint64_t{5} << 30) + 3;
  ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().CreateExclusive(dir.Join("a.pt")));
  ZipWriter zip;
  std::uint64_t at = 0;
  std::string text;
  const auto flush = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(file->WriteAt(at, text.data(), text.size()));
    at += text.size();
    text.clear();
    return {};
  };
  zip.Add("data.pkl", "N.", text);
  for (const auto& [name, size] : {std::pair("data/0", kHuge), {"data/1", 7}, {"data/2", 0}}) {
    zip.Begin(name, size, text);
    ASSERT_OK(flush());
    EXPECT_EQ(at % ZipWriter::kAlignment, 0u) << name;
    at += size;
    zip.End(text);
  }
  zip.Add("version", "3\n", text);
  zip.Finish(text);
  ASSERT_OK(flush());
  ASSERT_EQ(at, zip.size());
  const std::string zeros(1 << 20, '\0');
  std::uint32_t crc = 0;
  for (std::uint64_t n = 0; n + zeros.size() <= kHuge; n += zeros.size()) {
    crc = Crc32Combine(crc, Crc32Extend(0, zeros.data(), zeros.size()), zeros.size());
  }
  crc = Crc32Extend(crc, zeros.data(), 3);
  ASSERT_EQ(zip.holes().size(), 2u);
  for (const std::uint64_t position : zip.holes()[0].positions)
    ASSERT_OK(file->WriteAt(position, &crc, 4));
  crc = Crc32Extend(0, zeros.data(), 7);
  for (const std::uint64_t position : zip.holes()[1].positions)
    ASSERT_OK(file->WriteAt(position, &crc, 4));

  ASSERT_OK_AND_ASSIGN(const ZipArchive archive, ZipArchive::Read(*file, 0, at));
  ASSERT_EQ(archive.entries().size(), 5u);
  ASSERT_NE(archive.Find("archive/data/0"), nullptr);
  EXPECT_EQ(archive.Find("archive/data/0")->size, kHuge);
  const ZipEntry* behind = archive.Find("archive/data/1");
  ASSERT_NE(behind, nullptr);
  EXPECT_GT(behind->header, kHuge);
  EXPECT_EQ(behind->size, 7u);
  EXPECT_OK(CheckZipCrc(*file, *behind));
  EXPECT_OK(CheckZipCrc(*file, *archive.Find("archive/version")));
}

// Without the data: where each entry's begins.
TEST(ZipWriterTest, DataIsAlignedInAndBehindEntriesOver4GiB) {
  constexpr std::uint64_t kHuge = (std::uint64_t{4} << 30) + 5;
  ZipWriter zip;
  std::string text;
  for (const auto& [name, size] : {std::pair("data/0", kHuge), {"data/1", 7}, {"data/2", kHuge}}) {
    zip.Begin(name, size, text);
    EXPECT_EQ((zip.size() - size) % ZipWriter::kAlignment, 0u) << name;
    zip.End(text);
  }
}

TEST(PickleEncodedTest, InvalidDtypeNamesAreNotEncoded) {
  const auto written = [](const CommonValue& value) {
    PickleWriter pickle(2);
    return PickleEncoded(pickle, value);
  };
  EXPECT_TRUE(written(CommonDict{{{"torch.dtype", "bfloat16"}}}));
  for (const char* name :
       {"load", "hub", "float32\nR", "float32\n", "", "os.system", "torch.float32"}) {
    EXPECT_FALSE(written(CommonDict{{{"torch.dtype", name}}})) << name;
  }
  EXPECT_FALSE(written(
      CommonDict{{{"torch.dtype", "float32\n0cbuiltins\nprint\n(VX\ntR0ctorch\nfloat32"}}}));
  EXPECT_FALSE(written(CommonDict{{{"no such kind", 1}}}));
  EXPECT_FALSE(written(CommonDict{{{"torch.device", "foo"}}}));
  EXPECT_TRUE(written(CommonDict{{{"torch.device", "cuda:1"}}}));
  EXPECT_FALSE(written(CommonDict{{{"torch.Size", CommonList{{"x"}}}}}));
  EXPECT_FALSE(written(CommonDict{{{"dict", CommonList{{CommonList{{CommonList{{1}}, 2}}}}}}}));
  EXPECT_FALSE(written(CommonDict{{{"dict", CommonList{{CommonList{{1}}}}}}}));
  EXPECT_FALSE(written(CommonDict{}));
  EXPECT_FALSE(written(CommonList{{1, CommonDict{{{"int", "0x1"}}}}}));
  EXPECT_TRUE(written(CommonDict{{{"odict", CommonList{{CommonList{{"k", CommonTuple{}}}}}}}}));
}

SavedPath Path(std::initializer_list<PathStep> steps) { return steps; }
PathStep Name(std::string name) { return {std::move(name), PathStep::Kind::kName}; }
PathStep Number(std::int64_t key) { return {key, PathStep::Kind::kNumberKey}; }
PathStep Item(std::int64_t index) { return {index, PathStep::Kind::kListItem}; }

TEST(SavedPathsTest, PathsAreKeptOnlyForUnrenamedKeys) {
  CommonDict dict;
  dict.items["model.w"] = CommonTuple{{"model", "w"}};
  dict.items["list.1"] = CommonTuple{{"list", 1}};
  dict.items["opt.2.m"] = CommonTuple{{"opt", CommonList{{2}}, "m"}};
  dict.items["bad"] = CommonTuple{{0.5}};
  const SavedPaths paths =
      SavedPaths::Make({{std::string(kPlannerData), dict}}, [](std::string_view) { return false; });
  const auto path = [&](std::string_view shown, std::string_view stored) {
    const std::vector<SavedPath> found = paths.Of(shown, stored);
    EXPECT_EQ(found.size(), 1u);
    return found.front();
  };
  EXPECT_TRUE(paths.nested());
  EXPECT_EQ(path("model.w", "model.w"), Path({Name("model"), Name("w")}));
  EXPECT_EQ(path("list.1", "list.1"), Path({Name("list"), Item(1)}));
  EXPECT_EQ(path("opt.2.m", "opt.2.m"), Path({Name("opt"), Number(2), Name("m")}));
  EXPECT_EQ(path("new", "model.w"), Path({Name("new")}));
  EXPECT_EQ(path("model.w", "old"), Path({Name("model.w")}));
  EXPECT_EQ(path("bad", "bad"), Path({Name("bad")}));
  EXPECT_EQ(SavedPaths::ToPlannerPath(path("opt.2.m", "opt.2.m")),
            (std::vector<CommonKey>{"opt", "2", "m"}));
}

// Anybody may have written planner_data.
TEST(SavedPathsTest, ConflictingPathsAreDropped) {
  const auto known = [](const std::map<std::string, CommonValue>& paths) {
    CommonDict dict;
    for (const auto& [key, path] : paths) dict.items[key] = path;
    const SavedPaths made = SavedPaths::Make({{std::string(kPlannerData), dict}},
                                             [](std::string_view) { return true; });
    std::string found;
    for (const auto& [key, path] : paths) {
      if (made.Of(key, key).front() != Path({Name(key)})) found += key;
    }
    return found;
  };
  const auto path = [](std::vector<CommonValue> steps) { return CommonTuple{std::move(steps)}; };
  EXPECT_EQ(known({{"1", path({"a", 0})}, {"2", path({"a", 3})}}), "12");
  EXPECT_EQ(known({{"1", path({"a", -1})}, {"2", path({"a", 0})}}), "2");
  EXPECT_EQ(known({{"1", path({"a", std::int64_t{1} << 40})}}), "");
  EXPECT_EQ(known({{"1", path({"a", std::int64_t{1} << 40, "b"})}, {"2", path({"c", "d"})}}), "2");
  // A value within a value, two at one place, a dict that is a list, too.
  EXPECT_EQ(known({{"1", path({"a", "b"})}, {"2", path({"a", "b", "c"})}}), "2");
  EXPECT_EQ(known({{"1", path({"a", "b"})}, {"2", path({"a", "b"})}}), "2");
  EXPECT_EQ(known({{"1", path({"a", 0})}, {"2", path({"a", "b"})}}), "2");
  EXPECT_EQ(known({{"1", CommonTuple{std::vector<CommonValue>(100, CommonValue("a"))}}}), "");
}

TEST(SavedPathsTest, ContainersKeepTheirSavedTypes) {
  // {"z": OrderedDict(b=t, a=t), "list": [t, v], "none": OrderedDict()}
  const CommonList nodes = {{CommonList{{"dict", CommonList{{"z", "list", "none"}}}},
                             CommonList{{"odict", CommonList{{"b", "a"}}}}, "tensor", "tensor",
                             CommonList{{"list", 2}}, "tensor", "value",
                             CommonList{{"odict", CommonList{}}}}};
  const SavedPaths paths =
      SavedPaths::Make({{"tensormount.tree.0", CommonDict{{{"version", 1}, {"nodes", nodes}}}}},
                       [](std::string_view) { return true; });
  using Kind = SavedPaths::Container::Kind;
  ASSERT_EQ(paths.containers().size(), 4u);
  EXPECT_EQ(paths.containers().at({}).order, (std::vector<CommonKey>{"z", "list", "none"}));
  EXPECT_EQ(paths.containers().at(Path({Name("z")})).kind, Kind::kOrderedDict);
  EXPECT_EQ(paths.containers().at(Path({Name("z")})).order, (std::vector<CommonKey>{"b", "a"}));
  EXPECT_EQ(paths.containers().at(Path({Name("list")})).items, 2);
  ASSERT_EQ(paths.empty().size(), 1u);
  EXPECT_TRUE(paths.empty().front().ordered);
}

TEST(SavedPathsTest, StructuresOfSeveralRanksAreMerged) {
  const auto structure = [](CommonList nodes) {
    return CommonDict{{{"version", 1}, {"nodes", std::move(nodes)}}};
  };
  const auto dict = [](CommonList keys) { return CommonList{{"dict", std::move(keys)}}; };
  // {"m": {"a": t, "b": t, 0: [t, ()]}, "e": {}}: one rank had a and b tied, one had not.
  const CommonList tied = {{dict({{"m", "e"}}), dict({{"a", "b", 0}}), "tensor",
                            CommonList{{"tensor", "m.a"}}, CommonList{{"list", 2}}, "tensor",
                            CommonList{{"tuple", 0}}, dict({})}};
  const CommonList apart = {
      {dict({{"m", "step"}}), dict({{"a", "b"}}), "tensor", "tensor", "value"}};
  for (const bool swapped : {false, true}) {
    const CommonValues values = {{"tensormount.tree.1", structure(swapped ? apart : tied)},
                                 {"tensormount.tree.2", structure(swapped ? tied : apart)},
                                 {"tensormount.tree.3", structure({{"nonsense"}})},
                                 {"tensormount.tree.4", structure({{dict({{"never"}})}})},
                                 {"step", 3}};
    const SavedPaths paths =
        SavedPaths::Make(values, [](std::string_view key) { return key != "step"; });
    EXPECT_EQ(paths.Of("m.a", "m.a"), (std::vector<SavedPath>{Path({Name("m"), Name("a")})}));
    EXPECT_EQ(paths.Of("m.b", "m.b"), (std::vector<SavedPath>{Path({Name("m"), Name("b")})}));
    EXPECT_EQ(paths.Of("m.0.0", "m.0.0"),
              (std::vector<SavedPath>{Path({Name("m"), Number(0), Item(0)})}));
    EXPECT_TRUE(paths.IsEncoded("step"));
    EXPECT_FALSE(paths.IsEncoded("m.a"));
    ASSERT_EQ(paths.empty().size(), 2u);
  }
  const SavedPaths one = SavedPaths::Make({{"tensormount.tree.1", structure(tied)}},
                                          [](std::string_view key) { return key == "m.a"; });
  EXPECT_EQ(one.Of("m.a", "m.a"),
            (std::vector<SavedPath>{Path({Name("m"), Name("a")}), Path({Name("m"), Name("b")})}));
}

}  // namespace
}  // namespace tensormount::fs
