// SPDX-License-Identifier: Apache-2.0
#include "tests/fs/file_ops.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <dirent.h>
#include <fcntl.h>
#include <regex>
#include <set>
#include <sstream>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "fs/views/key_path.h"
#include "shard/npy.h"
#include "shard/safetensors.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

std::string Below(const std::string& folder, const std::string& name) {
  return folder.empty() ? name : folder + "/" + name;
}

bool IsAlsoFolder(const TinySpec& spec, const std::string& key) {
  return std::any_of(spec.tensors.begin(), spec.tensors.end(),
                     [&](const TinyTensor& t) { return t.key.starts_with(key + "/"); });
}

std::string PathOf(const TinySpec& spec, const std::string& key) {
  return fs::PathOfKey(key, IsAlsoFolder(spec, key));
}

std::string Hex(std::uint64_t v) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(v));
  return text;
}

class HostOps : public FileOps {
 public:
  explicit HostOps(std::string root) : root_(std::move(root)) {}

  class HostHandle : public Handle {
   public:
    explicit HostHandle(int fd) : fd_(fd) {}
    ~HostHandle() override { close(fd_); }
    Result<std::string> Read(std::uint64_t offset, std::size_t size) override {
      std::string out(size, '\0');
      std::size_t done = 0;
      while (done < size) {
        const ssize_t n =
            pread(fd_, out.data() + done, size - done, static_cast<off_t>(offset + done));
        if (n < 0) return Status::FromErrno(errno, "read", "a file");
        if (n == 0) break;
        done += static_cast<std::size_t>(n);
      }
      out.resize(done);
      return out;
    }

   private:
    int fd_;
  };

  Result<FileStat> Stat(const std::string& path) override {
    struct stat st;
    if (lstat(Full(path).c_str(), &st) != 0) return Status::FromErrno(errno, "stat", path);
    FileStat out;
    out.kind = S_ISDIR(st.st_mode)   ? FileKind::kDirectory
               : S_ISLNK(st.st_mode) ? FileKind::kSymlink
                                     : FileKind::kFile;
    out.size = static_cast<std::uint64_t>(st.st_size);
    out.inode = st.st_ino;
    out.links = st.st_nlink;
    out.mode = st.st_mode & 07777;
    out.mtime = st.st_mtim.tv_sec;
    EXPECT_EQ(st.st_mtim.tv_nsec, 0);
    return out;
  }
  Result<std::vector<std::string>> List(const std::string& path) override {
    DIR* dir = opendir(Full(path).c_str());
    if (dir == nullptr) return Status::FromErrno(errno, "list", path);
    std::vector<std::string> names;
    int dots = 0;
    errno = 0;
    while (const dirent* entry = readdir(dir)) {
      const std::string name = entry->d_name;
      if (name == "." || name == "..") {
        ++dots;
      } else {
        names.push_back(name);
      }
    }
    const int err = errno;
    closedir(dir);
    if (err != 0) return Status::FromErrno(err, "list", path);
    EXPECT_EQ(dots, 2);
    std::sort(names.begin(), names.end());
    return names;
  }
  Result<std::string> ReadLink(const std::string& path) override {
    char target[4096];
    const ssize_t n = readlink(Full(path).c_str(), target, sizeof target);
    if (n < 0) return Status::FromErrno(errno, "readlink", path);
    return std::string(target, static_cast<std::size_t>(n));
  }
  Result<std::unique_ptr<Handle>> Open(const std::string& path) override {
    const int fd = open(Full(path).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return Status::FromErrno(errno, "open", path);
    return std::unique_ptr<Handle>(std::make_unique<HostHandle>(fd));
  }
  Result<std::string> Xattr(const std::string& path, const std::string& name) override {
    char value[4096];
    const ssize_t n = getxattr(Full(path).c_str(), name.c_str(), value, sizeof value);
    if (n < 0) return Status::FromErrno(errno, "getxattr", path);
    return std::string(value, static_cast<std::size_t>(n));
  }
  Result<std::vector<std::string>> Xattrs(const std::string& path) override {
    char all[4096];
    const ssize_t n = listxattr(Full(path).c_str(), all, sizeof all);
    if (n < 0) return Status::FromErrno(errno, "listxattr", path);
    std::vector<std::string> names;
    for (ssize_t at = 0; at < n;) {
      names.emplace_back(all + at);
      at += static_cast<ssize_t>(names.back().size()) + 1;
    }
    return names;
  }

 private:
  std::string Full(const std::string& path) const {
    return path.empty() ? root_ : root_ + "/" + path;
  }
  std::string root_;
};

void ListTree(FileOps& ops, const std::string& folder, std::vector<std::string>& files,
              std::set<std::uint64_t>& inodes) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, ops.List(folder));
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size()) << folder;
  for (const std::string& name : names) {
    const std::string path = Below(folder, name);
    ASSERT_LE(name.size(), 255u);
    ASSERT_OK_AND_ASSIGN(const FileStat st, ops.Stat(path));
    EXPECT_TRUE(inodes.insert(st.inode).second) << path << " shares its inode";
    EXPECT_EQ(st.links, 1u);
    EXPECT_EQ(st.mode & 0222, 0u) << path;
    if (st.kind == FileKind::kDirectory) {
      EXPECT_NE(st.mode & 0111, 0u) << path;
      ListTree(ops, path, files, inodes);
    } else {
      ASSERT_OK_AND_ASSIGN(const std::string bytes, ops.ReadAll(path));
      EXPECT_EQ(bytes.size(), st.size) << path;
      files.push_back(path);
    }
  }
}

}  // namespace

std::unique_ptr<FileOps> MakeHostFileOps(const std::string& root) {
  return std::make_unique<HostOps>(root);
}

Result<std::string> FileOps::ReadAll(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<Handle> handle, Open(path));
  std::string all;
  for (std::size_t step = 61;; step = step * 3 + 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string piece, handle->Read(all.size(), step));
    all += piece;
    if (piece.size() < step) return all;
  }
}

TinySpec StrangeTinySpec(std::uint64_t seed) {
  TinySpec spec = DefaultTinySpec(seed);
  const std::string long_part(700, 'x');
  std::string wide;
  for (int i = 0; i < 130; ++i) wide += "\xC3\xBC";  // 260 bytes that must not be cut in half.
  const std::vector<std::string> keys = {"both",
                                         "both/inner",
                                         "both-more",
                                         "both0",
                                         "dots/../up",
                                         "dots/./here",
                                         "..",
                                         "trailing/",
                                         "/leading",
                                         "double//slash",
                                         "at@sign",
                                         "array.npy",
                                         "array.npy/deep",
                                         "side.json/deep",
                                         "side",
                                         "index[0]",
                                         "open[",
                                         "per%cent",
                                         "%-",
                                         "%+plus",
                                         "blank and\nnewline",
                                         long_part,
                                         long_part + "/below",
                                         long_part + "tail",
                                         long_part.substr(0, 240) + "/short",
                                         long_part.substr(0, 240),
                                         long_part.substr(0, 241),
                                         wide,
                                         wide + "/inner",
                                         "deep/a/b/c/d/e"};
  for (const std::string& key : keys) {
    spec.tensors.push_back({.key = key, .dtype = DType::kU8, .shape = {7}, .seed = seed + 1000});
  }
  return spec;
}

void CheckTensorFiles(FileOps& ops, const std::string& checkpoint, const TinySpec& spec) {
  Random random(TestSeed());
  for (const TinyTensor& tensor : spec.tensors) {
    const std::string path = Below(checkpoint, "tensors/" + PathOf(spec, tensor.key));
    const std::string want = TinyBytes(tensor);
    ASSERT_OK_AND_ASSIGN(const FileStat st, ops.Stat(path));
    EXPECT_EQ(st.kind, FileKind::kFile);
    EXPECT_EQ(st.size, want.size()) << path;
    ASSERT_OK_AND_ASSIGN(const std::string all, ops.ReadAll(path));
    EXPECT_TRUE(all == want) << path;
    ASSERT_OK_AND_ASSIGN(const auto handle, ops.Open(path));
    for (int i = 0; i < 20; ++i) {
      const auto size = static_cast<std::int64_t>(want.size());
      const auto offset = static_cast<std::size_t>(random.Int(0, size + 10));
      const auto length = static_cast<std::size_t>(random.Int(0, size + 10));
      ASSERT_OK_AND_ASSIGN(const std::string piece, handle->Read(offset, length));
      const std::string expected =
          offset >= want.size() ? std::string() : want.substr(offset, length);
      EXPECT_TRUE(piece == expected) << path << " at " << offset << " + " << length;
    }
  }
}

void CheckNpyFiles(FileOps& ops, const std::string& checkpoint, const TinySpec& spec) {
  for (const TinyTensor& tensor : spec.tensors) {
    const std::string path = Below(checkpoint, "npy/" + PathOf(spec, tensor.key) + ".npy");
    ASSERT_OK_AND_ASSIGN(const std::string header, MakeNpyHeader(tensor.dtype, tensor.shape));
    ASSERT_OK_AND_ASSIGN(const std::string all, ops.ReadAll(path));
    EXPECT_TRUE(all == header + TinyBytes(tensor)) << path;
    ASSERT_OK_AND_ASSIGN(const FileStat st, ops.Stat(path));
    EXPECT_EQ(st.size, all.size());
  }
}

void CheckSafetensors(FileOps& ops, const std::string& checkpoint, const TinySpec& spec) {
  ASSERT_OK_AND_ASSIGN(const std::string all, ops.ReadAll(Below(checkpoint, "model.safetensors")));
  ASSERT_GE(all.size(), 8u);
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) {
    length = (length << 8) | static_cast<unsigned char>(all[static_cast<std::size_t>(i)]);
  }
  ASSERT_LE(length, all.size() - 8);
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header,
                       ParseSafetensorsHeader(std::string_view(all).substr(8, length), all.size()));
  EXPECT_EQ(header.entries.size(), spec.tensors.size());
  for (const SafetensorsEntry& entry : header.entries) {
    const auto tensor = std::find_if(spec.tensors.begin(), spec.tensors.end(),
                                     [&](const TinyTensor& t) { return t.key == entry.key; });
    ASSERT_NE(tensor, spec.tensors.end()) << entry.key;
    EXPECT_EQ(entry.dtype, tensor->dtype);
    EXPECT_EQ(entry.shape, tensor->shape);
    EXPECT_TRUE(all.substr(8 + length + entry.begin, entry.end - entry.begin) == TinyBytes(*tensor))
        << entry.key;
  }
}

void CheckObjects(FileOps& ops, const std::string& checkpoint, const TinySpec& spec) {
  for (const TinyObject& object : spec.objects) {
    std::string path = Below(checkpoint, "objects/" + fs::PathOfKey(object.key, false));
    if (object.grid.rank() > 0) {
      path += '/';
      for (int i = 0; i < object.index.rank(); ++i) {
        path += (i > 0 ? "." : "") + std::to_string(object.index[i]);
      }
    }
    ASSERT_OK_AND_ASSIGN(const std::string bytes, ops.ReadAll(path));
    EXPECT_TRUE(bytes == object.bytes) << path;
    ASSERT_OK_AND_ASSIGN(const std::string key, ops.Xattr(path, "user.tensormount.key"));
    EXPECT_EQ(key, object.key);
  }
}

void CheckJson(FileOps& ops, const std::string& checkpoint, const TinySpec& spec) {
  ASSERT_OK_AND_ASSIGN(const std::string text, ops.ReadAll(Below(checkpoint, "checkpoint.json")));
  const Json json = Json::parse(text);
  EXPECT_EQ(json["tensor_count"], spec.tensors.size());
  ASSERT_EQ(json["tensors"].size(), spec.tensors.size());
  for (const Json& row : json["tensors"]) {
    const auto tensor = std::find_if(spec.tensors.begin(), spec.tensors.end(),
                                     [&](const TinyTensor& t) { return t.key == row["key"]; });
    ASSERT_NE(tensor, spec.tensors.end()) << row;
    const std::string bytes = TinyBytes(*tensor);
    EXPECT_EQ(row["dtype"], InfoOf(tensor->dtype).name);
    EXPECT_EQ(row["shape"],
              Json(std::vector<std::int64_t>(tensor->shape.begin(), tensor->shape.end())));
    EXPECT_EQ(row["bytes"], bytes.size());
    EXPECT_EQ(row["digest"], "crc64-nvme:" + Hex(Crc64Bitwise(0, bytes.data(), bytes.size())));
  }
  EXPECT_EQ(json["objects"].size(), spec.objects.size());
  ASSERT_OK_AND_ASSIGN(const std::string common, ops.ReadAll(Below(checkpoint, "common.json")));
  EXPECT_EQ(Json::parse(common).size(), spec.common.size());
}

void CheckExtents(FileOps& ops, const std::string& checkpoint, const std::string& folder,
                  const TinySpec& spec) {
  for (const TinyTensor& tensor : spec.tensors) {
    const std::string path = Below(checkpoint, "extents/" + PathOf(spec, tensor.key) + ".json");
    ASSERT_OK_AND_ASSIGN(const std::string text, ops.ReadAll(path));
    const Json json = Json::parse(text);
    EXPECT_EQ(json["key"], tensor.key);
    // Of whole rows only: enough to see that offsets and files are right.
    if (tensor.axis != 0) continue;
    std::string bytes = TinyBytes(tensor);
    std::uint64_t row = InfoOf(tensor.dtype).bits / 8;
    for (int a = 1; a < tensor.shape.rank(); ++a)
      row *= static_cast<std::uint64_t>(tensor.shape[a]);
    std::uint64_t seen = 0;
    for (const Json& extent : json["extents"]) {
      const std::uint64_t first =
          tensor.shape.rank() == 0 ? 0 : extent["begin"][0].get<std::uint64_t>();
      const std::uint64_t length = extent["bytes"];
      const std::string file = ReadWholeFile(folder + "/" + extent["file"].get<std::string>());
      EXPECT_TRUE(file.substr(extent["offset"], length) == bytes.substr(first * row, length));
      seen += length;
    }
    EXPECT_EQ(seen, bytes.size()) << path;
  }
}

void CheckXattrs(FileOps& ops, const std::string& checkpoint, const TinySpec& spec) {
  for (const TinyTensor& tensor : spec.tensors) {
    const std::string path = Below(checkpoint, "tensors/" + PathOf(spec, tensor.key));
    const std::string bytes = TinyBytes(tensor);
    EXPECT_THAT(ops.Xattr(path, "user.tensormount.key"), IsOkAndHolds(tensor.key));
    EXPECT_THAT(ops.Xattr(path, "user.tensormount.shape"), IsOkAndHolds(tensor.shape.ToString()));
    EXPECT_THAT(ops.Xattr(path, "user.tensormount.dtype"),
                IsOkAndHolds(std::string(InfoOf(tensor.dtype).name)));
    EXPECT_THAT(ops.Xattr(path, "user.tensormount.digest"),
                IsOkAndHolds("crc64-nvme:" + Hex(Crc64Bitwise(0, bytes.data(), bytes.size()))));
    EXPECT_THAT(ops.Xattrs(path), IsOkAndHolds(testing::Contains("user.tensormount.key")));
    // ENODATA here would make `ls -l` ask again for every file.
    for (const char* name : {"security.selinux", "system.posix_acl_access", "trusted.x"}) {
      EXPECT_EQ(ops.Xattr(path, name).status().ToErrno(), EOPNOTSUPP) << name;
    }
    EXPECT_EQ(ops.Xattr(path, "user.other").status().ToErrno(), ENODATA);
  }
}

void CheckListing(FileOps& ops, const std::string& checkpoint, const TinySpec& spec, bool views) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> top, ops.List(checkpoint));
  std::vector<std::string> want = {"checkpoint.json", "common.json", "objects", "tensors"};
  if (views)
    want.insert(want.end(), {"dcp", "extents", "hf", "model.safetensors", "npy", "slices", "zarr"});
  std::sort(want.begin(), want.end());
  EXPECT_EQ(top, want);

  std::set<std::uint64_t> inodes;
  for (const auto& [view, suffix] : std::vector<std::pair<std::string, std::string>>{
           {"tensors", ""}, {"npy", ".npy"}, {"extents", ".json"}}) {
    // Views that are not listed are there all the same.
    std::vector<std::string> files;
    ListTree(ops, Below(checkpoint, view), files, inodes);
    std::vector<std::string> expected;
    for (const TinyTensor& tensor : spec.tensors) {
      expected.push_back(Below(checkpoint, view + "/" + PathOf(spec, tensor.key) + suffix));
    }
    std::sort(files.begin(), files.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(files, expected);
  }
  std::vector<std::string> objects;
  ListTree(ops, Below(checkpoint, "objects"), objects, inodes);
  EXPECT_EQ(objects.size(), spec.objects.size());
}

void CheckErrors(FileOps& ops, const std::string& checkpoint) {
  const auto missing = [&](const std::string& name) {
    EXPECT_EQ(ops.Stat(Below(checkpoint, name)).status().ToErrno(), ENOENT) << name;
  };
  missing("nothing");
  missing("tensors/nothing");
  missing("tensors/layers.0");
  missing("npy/bias");
  missing("npy/bias.npy.npy");
  missing("extents/bias");
  missing("objects/nothing");
  missing("tensors/%62ias");  // "bias", spelled as it never is.
  missing("tensors/bias%=");
  missing(".staging");
  EXPECT_EQ(ops.Stat(Below(checkpoint, "tensors/bias/x")).status().ToErrno(), ENOTDIR);
  EXPECT_FALSE(ops.List(Below(checkpoint, "tensors/bias")).ok());
  EXPECT_FALSE(ops.ReadLink(Below(checkpoint, "tensors/bias")).ok());
}

namespace {

// One sample of Prometheus' text format.
struct MetricsSample {
  std::string name;
  std::map<std::string, std::string> labels;
  double value = 0;
};

// Strict: what the format allows and we do not write (blanks, comments, timestamps) fails too.
std::vector<MetricsSample> ParseMetrics(const std::string& text) {
  static const std::regex kHelp(R"(# HELP (tensormount_[a-z_]+) (\S.*\S))");
  static const std::regex kType(R"(# TYPE (tensormount_[a-z_]+) (counter|gauge|histogram))");
  static const std::regex kSample(
      R"re((tensormount_[a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"(?:,(?!\})|(?=\})))+)\})? (\S+))re");
  static const std::regex kLabel(R"re(([a-z_]+)="((?:[^"\\]|\\.)*)")re");
  std::vector<MetricsSample> samples;
  std::set<std::string> families;
  std::set<std::string> seen;
  std::string family;
  std::string type;
  std::istringstream lines(text);
  EXPECT_TRUE(text.ends_with('\n'));
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, kHelp)) {
      EXPECT_TRUE(families.insert(match[1]).second) << line << ": a second time";
      family = match[1];
      type.clear();
    } else if (std::regex_match(line, match, kType)) {
      EXPECT_EQ(family, match[1].str()) << "TYPE behind its HELP";
      EXPECT_EQ(type, "") << line;
      type = match[2];
      EXPECT_EQ(type == "counter", family.ends_with("_total")) << line;
    } else if (std::regex_match(line, match, kSample)) {
      MetricsSample sample{.name = match[1]};
      EXPECT_TRUE(seen.insert(match[1].str() + "{" + match[2].str()).second) << line << ": twice";
      const std::string labels = match[2];
      for (std::sregex_iterator it(labels.begin(), labels.end(), kLabel), end; it != end; ++it) {
        EXPECT_TRUE(sample.labels.emplace((*it)[1], (*it)[2]).second) << line;
      }
      std::size_t used = 0;
      sample.value = std::stod(match[3], &used);
      EXPECT_EQ(used, match[3].str().size()) << line;
      EXPECT_NE(type, "") << line << ": no TYPE";
      const std::string suffix = sample.name.substr(std::min(family.size(), sample.name.size()));
      EXPECT_EQ(sample.name, family + suffix) << "not of the family above it";
      EXPECT_TRUE(type == "histogram"
                      ? suffix == "_bucket" || suffix == "_sum" || suffix == "_count"
                      : suffix.empty())
          << line;
      EXPECT_TRUE(type == "gauge" || sample.value >= 0) << line;
      samples.push_back(std::move(sample));
    } else {
      ADD_FAILURE() << "neither HELP, TYPE nor a sample: " << line;
    }
  }
  // Histograms: buckets grow up to +Inf, which is the count.
  double before = 0;
  double le = -1;
  for (const MetricsSample& sample : samples) {
    if (sample.name.ends_with("_bucket")) {
      const double bound = std::stod(sample.labels.at("le"));
      EXPECT_GE(sample.value, before);
      EXPECT_GT(bound, le);
      before = sample.value;
      le = bound;
    } else if (sample.name.ends_with("_sum")) {
      EXPECT_TRUE(std::isinf(le));
    } else if (sample.name.ends_with("_count")) {
      EXPECT_EQ(sample.value, before);
      before = 0;
      le = -1;
    }
  }
  return samples;
}

}  // namespace

double MetricOf(FileOps& ops, const std::string& name,
                const std::map<std::string, std::string>& labels) {
  const auto text = ops.ReadAll(".tensormount/metrics");
  EXPECT_OK(text);
  if (!text.ok()) return NAN;
  for (const MetricsSample& sample : ParseMetrics(text.value())) {
    if (sample.name == "tensormount_" + name && sample.labels == labels) return sample.value;
  }
  ADD_FAILURE() << "no " << name << " in " << text.value();
  return NAN;
}

void CheckControlFiles(FileOps& ops) {
  EXPECT_GE(MetricOf(ops, "uptime_seconds"), 0);
  EXPECT_EQ(MetricOf(ops, "store_answers"), 1);
  EXPECT_THAT(ops.List(".tensormount"),
              IsOkAndHolds(std::vector<std::string>{"errors", "metrics", "stats", "status"}));
  for (const char* name : {"status", "stats"}) {
    ASSERT_OK_AND_ASSIGN(const std::string text, ops.ReadAll(std::string(".tensormount/") + name));
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << name;
    EXPECT_TRUE(Json::parse(text).is_object()) << name;
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> root, ops.List(""));
  EXPECT_EQ(std::count(root.begin(), root.end(), ".tensormount"), 0);  // Copies shall not have it.
}

}  // namespace tensormount
