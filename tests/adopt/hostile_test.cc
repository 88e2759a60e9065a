// SPDX-License-Identifier: Apache-2.0
// tests/golden/bad/{pickle,zip,source}: each name begins with the code that must come of it. Made
// by tests/golden/make_bad.py; what is too large to keep, or no file, is made here.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file_system.h"
#include "index/archives/pickle.h"
#include "index/archives/zip_archive.h"
#include "index/foreign/open_source.h"
#include "tests/adopt/bytes.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

namespace stdfs = std::filesystem;

constexpr std::uint64_t kMayTake = std::uint64_t{64} << 20;

constexpr bool kMemoryCounts = !kSanitized;

// A field of /proc/self/status in bytes.
std::uint64_t MemoryField(const std::string& field) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(field + ":", 0) == 0) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

struct Outcome {
  std::string code;          // "OK", "DATA_LOSS"; "DIED" where the process did.
  std::string message;       // Of the failure; of what opened its warnings.
  std::uint64_t memory = 0;  // At most, above what was there before.
};

// Runs `what` in a process of its own, which has 20 s.
Outcome Apart(const std::function<Status(std::string& warnings)>& what) {
  int ends[2];
  if (pipe(ends) != 0) return {"DIED", "pipe", 0};
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::ofstream("/proc/self/clear_refs") << "5";  // The peak counts from here.
    const std::uint64_t before = MemoryField("VmRSS");
    std::string warnings;
    const Status status = what(warnings);
    const std::uint64_t peak = MemoryField("VmHWM");
    const std::string out = std::string(CodeName(status.code())) + " " +
                            std::to_string(peak > before ? peak - before : 0) + " " +
                            (status.ok() ? warnings : status.message()).substr(0, 2000);
    (void)!write(ends[1], out.data(), out.size());
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || text.empty()) {
    return {"DIED", "signal " + std::to_string(WTERMSIG(status)), 0};
  }
  Outcome out;
  std::istringstream in(text);
  in >> out.code >> out.memory;
  in.get();
  std::getline(in, out.message, '\0');
  return out;
}

Outcome OpenApart(const std::string& path) {
  return Apart([&](std::string& warnings) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened, OpenNamed(HostFileSystem(), path, {}));
    for (const std::string& warning : opened->warnings()) warnings += warning + "\n";
    // What was accepted can be listed and read, or says why not.
    TENSORMOUNT_RETURN_IF_ERROR(opened->index().ForEachTensor(0, [&](const TensorEntry& entry) {
      std::string bytes(std::min<std::uint64_t>(entry.meta.bytes(), 4096), '\0');
      const Status read = opened->ReadBytes(entry, 0, bytes.data(), bytes.size(),
                                            ReadVerify::kExtendLeaves, nullptr);
      warnings += "read " + std::string(CodeName(read.code())) + " " + read.message() + "\n";
      return true;
    }));
    return Status();
  });
}

std::uint64_t BytesBelow(const stdfs::path& path) {
  if (!stdfs::is_directory(path)) return stdfs::file_size(path);
  std::uint64_t sum = 0;
  for (const auto& entry : stdfs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) sum += entry.file_size();
  }
  return sum;
}

// The code that a name begins with.
std::string CodeOf(const std::string& name) { return name.substr(0, name.find('-')); }

void Check(const std::string& name, const Outcome& outcome, std::uint64_t bytes) {
  EXPECT_EQ(outcome.code, CodeOf(name)) << name << ": " << outcome.message;
  EXPECT_TRUE(outcome.code == "OK" || !outcome.message.empty()) << name;
  if (kMemoryCounts) {
    EXPECT_LE(outcome.memory, kMayTake + bytes) << name;
  }
  // No control characters in what a terminal may show.
  const bool clean = std::none_of(outcome.message.begin(), outcome.message.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x20 && c != '\n';
  });
  EXPECT_TRUE(clean) << name << ": " << outcome.message;
}

void ForEach(const std::string& kind, std::size_t at_least,
             const std::function<Outcome(const std::string& path)>& open) {
  std::size_t count = 0;
  std::vector<stdfs::path> paths;
  for (const auto& entry : stdfs::directory_iterator(SourcePath("tests/golden/bad/" + kind))) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const stdfs::path& path : paths) {
    Check(path.filename(), open(path), BytesBelow(path));
    ++count;
  }
  EXPECT_GE(count, at_least);
}

TEST(Hostile, HostilePicklesFailWithTheirCode) {
  ForEach("pickle", 130, [](const std::string& path) {
    return Apart([&](std::string&) -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes,
                                   HostFileSystem().ReadFile(path, std::uint64_t{1} << 30));
      TENSORMOUNT_ASSIGN_OR_RETURN(const pickle::Document document,
                                   pickle::Parse(std::move(bytes)));
      return pickle::Describe(document).empty() ? Status(Code::kInternal, "no listing") : Status();
    });
  });
}

// The same as the metadata of a checkpoint: none of them is one.
TEST(Hostile, HostilePicklesAsDcpMetadataAreRefused) {
  TempDir dir;
  for (const auto& entry : stdfs::directory_iterator(SourcePath("tests/golden/bad/pickle"))) {
    stdfs::copy_file(entry.path(), dir.Join(".metadata"), stdfs::copy_options::overwrite_existing);
    const Outcome outcome = OpenApart(dir.path());
    EXPECT_NE(outcome.code, "OK") << entry.path();
    EXPECT_NE(outcome.code, "DIED") << entry.path();
    EXPECT_NE(outcome.code, "INTERNAL") << entry.path();
  }
}

TEST(Hostile, HostileZipArchivesFailWithTheirCode) {
  ForEach("zip", 45, [](const std::string& path) {
    return Apart([&](std::string&) -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto file, HostFileSystem().OpenRead(path));
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
      return ZipArchive::Read(*file, 0, info.size).status();
    });
  });
}

TEST(Hostile, HostileSourcesFailWithTheirCode) {
  ForEach("source", 120, [](const std::string& path) { return OpenApart(path); });
}

class HostileMade : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) {
    const std::string path = dir_.Join(name);
    stdfs::create_directories(stdfs::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  TempDir dir_;
};

// Streams that ask for more memory than their size may.
TEST_F(HostileMade, MemoryBombsAreRefusedWithinTheLimit) {
  const std::pair<std::string, std::string> cases[] = {
      {"RESOURCE_EXHAUSTED-nones", "](" + std::string(6 << 20, 'N') + "e"},
      {"RESOURCE_EXHAUSTED-marks", std::string(16 << 20, '(')},
      {"RESOURCE_EXHAUSTED-lists", "(" + std::string(6 << 20, ']') + "t"},
      {"RESOURCE_EXHAUSTED-memos", "N" + std::string(6 << 20, '\x94')}};
  for (const auto& [name, operations] : cases) {
    const std::string bytes = Pickle(operations);
    const Outcome outcome = Apart([&](std::string&) { return pickle::Parse(bytes).status(); });
    EXPECT_EQ(outcome.code, CodeOf(name)) << name << ": " << outcome.message;
    if (kMemoryCounts) {
      EXPECT_LE(outcome.memory, kMayTake + 6 * bytes.size()) << name;
    }
  }
}

TEST_F(HostileMade, Oversized100MegabyteHeadersAreRefused) {
  const std::uint64_t size = 100 << 20;
  Check("DATA_LOSS-", OpenApart(Write("a.safetensors", U64(size) + std::string(size, '['))), size);
  // Sizes without the bytes: nothing is allocated for them.
  Check("DATA_LOSS-", OpenApart(Write("c.safetensors", U64(size) + "{")), 0);
}

TEST_F(HostileMade, LinksFifosAndDevicesAreRefused) {
  const std::string outside = Write("outside/w.safetensors", U64(2) + "{}");
  stdfs::create_directories(dir_.Join("inside"));
  stdfs::create_symlink(outside, dir_.Join("inside/model.safetensors"));
  const Outcome link = OpenApart(dir_.Join("inside"));
  EXPECT_EQ(link.code, "PERMISSION_DENIED") << link.message;
  stdfs::create_directories(dir_.Join("fifo"));
  ASSERT_EQ(mkfifo(dir_.Join("fifo/.metadata").c_str(), 0600), 0);
  const Outcome fifo = OpenApart(dir_.Join("fifo"));
  EXPECT_NE(fifo.code, "OK") << fifo.message;
  EXPECT_NE(fifo.code, "DIED") << "waited for a writer: " << fifo.message;
  stdfs::create_directories(dir_.Join("folder/.metadata"));
  const Outcome folder = OpenApart(dir_.Join("folder"));
  EXPECT_NE(folder.code, "OK") << folder.message;
  EXPECT_NE(folder.code, "DIED") << folder.message;
  stdfs::create_directories(dir_.Join("device"));
  stdfs::create_symlink("/dev/zero", dir_.Join("device/.metadata"));
  const Outcome device = OpenApart(dir_.Join("device"));
  EXPECT_EQ(device.code, "PERMISSION_DENIED") << device.message;  // Leads out.
}

}  // namespace
}  // namespace tensormount
