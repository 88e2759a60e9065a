// SPDX-License-Identifier: Apache-2.0
// Many programs at once, each with its own way of reading, while checkpoints come and go under the
// same names: whoever has a file open reads one checkpoint's bytes to the end, and no mix.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "tests/mount/mount_fixture.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

using MountTier = MountOptions::Tier;
using Verify = ServeVerify;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kStressRows = 512;
constexpr std::int64_t kColumns = 640;
// How long a name may still lead to what it named before (docs/mounting.md: within a second), with
// room for a machine that is busy with other things.
constexpr std::chrono::milliseconds kStale{6000};

TinySpec SpecOf(std::uint64_t seed) {
  TinySpec spec;
  // Odd and even seeds differ in size, too.
  const auto more = static_cast<std::int64_t>(seed % 2);
  spec.tensors.push_back({.key = "whole",
                          .dtype = DType::kU8,
                          .shape = {300'003 + more},
                          .seed = seed,
                          .tensor_file = true});
  spec.tensors.push_back({.key = "few",
                          .dtype = DType::kU8,
                          .shape = {5000 + more},
                          .seed = seed,
                          .tensor_file = true});
  spec.tensors.push_back({.key = "grid",
                          .dtype = DType::kU8,
                          .shape = {kStressRows, kColumns},
                          .seed = seed,
                          .parts = 2,
                          .axis = 1});
  spec.tensors.push_back(
      {.key = "grid/below", .dtype = DType::kU8, .shape = {700}, .seed = seed, .parts = 2});
  spec.tensors.push_back({.key = "none", .dtype = DType::kF32, .shape = {0, 4}, .seed = seed});
  return spec;
}

std::string CutOut(const std::string& grid, std::int64_t row, std::int64_t rows,
                   std::int64_t column, std::int64_t columns) {
  std::string out;
  for (std::int64_t r = row; r < row + rows; ++r) {
    out += grid.substr(static_cast<std::size_t>(r * kColumns + column),
                       static_cast<std::size_t>(columns));
  }
  return out;
}

// What the files of one checkpoint hold, by path.
std::map<std::string, std::string> FilesOf(std::uint64_t seed) {
  const TinySpec spec = SpecOf(seed);
  const std::string grid = TinyBytes(spec.tensors[2]);
  std::map<std::string, std::string> files;
  files["tensors/whole"] = TinyBytes(spec.tensors[0]);
  files["tensors/few"] = TinyBytes(spec.tensors[1]);
  files["tensors/grid%="] = grid;
  files["tensors/grid/below"] = TinyBytes(spec.tensors[3]);
  files["tensors/none"] = "";
  files["slices/whole[:]"] = files["tensors/whole"];
  files["slices/whole[0:300000]"] = files["tensors/whole"].substr(0, 300'000);
  files["slices/whole@0:300000"] = files["slices/whole[0:300000]"];
  files["slices/grid[3:500,5:600]"] = CutOut(grid, 3, 497, 5, 595);
  files["slices/grid@3:500,5:600"] = files["slices/grid[3:500,5:600]"];
  files["slices/grid%=[3:500,5:600]"] = files["slices/grid[3:500,5:600]"];
  files["slices/grid[:,7]"] = CutOut(grid, 0, kStressRows, 7, 1);
  files["slices/grid/below[1:699]"] = files["tensors/grid/below"].substr(1, 698);
  files["zarr/grid%=/c.0.0"] = CutOut(grid, 0, kStressRows, 0, kColumns / 2);
  files["zarr/grid%=/c.0.1"] = CutOut(grid, 0, kStressRows, kColumns / 2, kColumns / 2);
  files["zarr/few/c.0"] = files["tensors/few"];
  return files;
}

// All that was ever published, and since when it is not there any more.
class Oracle {
 public:
  struct Published {
    std::string name;
    std::uint64_t seed = 0;
    std::map<std::string, std::string> files;
    std::optional<Clock::time_point> removed;
  };
  void Add(const std::string& name, std::uint64_t seed) {
    auto files = FilesOf(seed);
    const std::lock_guard lock(mutex_);
    all_.push_back(std::make_shared<Published>(
        Published{.name = name, .seed = seed, .files = std::move(files), .removed = {}}));
  }
  void Remove(const std::string& name) {
    const std::lock_guard lock(mutex_);
    for (const auto& p : all_) {
      if (p->name == name && !p->removed) p->removed = Clock::now();
    }
  }
  // What `path` of `name` ("latest" is any) may hold for one who opened it at `since`.
  std::vector<const std::string*> Candidates(const std::string& name, const std::string& path,
                                             Clock::time_point since) const {
    const std::lock_guard lock(mutex_);
    std::vector<const std::string*> found;
    for (const auto& p : all_) {
      if (name != "latest" && p->name != name) continue;
      if (p->removed && *p->removed + kStale < since) continue;
      found.push_back(&p->files.at(path));
    }
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Published>> all_;
};

class MountStressTest : public MountTest {
 protected:
  // One more checkpoint of this name, in the place of the one that had it.
  void Publish(const std::string& name) {
    const auto store = Store::OpenOrCreate(HostFileSystem(), this->store());
    ASSERT_OK(store);
    if (published_.contains(name)) {
      ASSERT_OK(store.value().Remove(name));
      oracle_.Remove(name);
    }
    const std::uint64_t seed = next_seed_++;
    oracle_.Add(name, seed);
    Write(name, SpecOf(seed));
    published_.insert(name);
  }
  // Of one open file, read in one of the ways that there are (none maps it: this process serves
  // it); nullopt: `error` says why not.
  std::optional<std::string> ReadSomehow(const std::string& path, Random& random, int& error);
  void ReadLoop(std::uint64_t seed);
  void ListLoop(std::uint64_t seed);
  void Churn(const MountOptions& options);
  nlohmann::json Status() { return nlohmann::json::parse(session_->StatusJson()); }
  void Fail(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (failures_.size() < 20) failures_.push_back(what);
  }

  Oracle oracle_;
  std::uint64_t next_seed_ = 100;
  std::set<std::string> published_;
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> read_{0};
  std::atomic<std::uint64_t> absent_{0};
  std::mutex mutex_;
  std::vector<std::string> failures_;
};

bool ReadAt(int fd, char* out, std::size_t size, off_t at, std::size_t& got) {
  const ssize_t n = pread(fd, out, size, at);
  got = n > 0 ? static_cast<std::size_t>(n) : 0;
  return n >= 0;
}

std::optional<std::string> MountStressTest::ReadSomehow(const std::string& path, Random& random,
                                                        int& error) {
  constexpr std::size_t kAlign = 4096;
  const auto way = random.Int(0, 4);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | (way == 0 ? O_DIRECT : 0));
  error = errno;
  if (fd < 0) return std::nullopt;
  struct Close {
    int fd;
    ~Close() { close(fd); }
  } const close_it{fd};
  struct stat st;
  if (fstat(fd, &st) != 0) {
    error = errno;
    return std::nullopt;
  }
  const auto size = static_cast<std::size_t>(st.st_size);
  std::string out(size, '\0');
  std::size_t got = 0;
  if (way == 0) {
    void* buffer = nullptr;
    const std::size_t step = kAlign * static_cast<std::size_t>(random.Int(1, 80));
    if (posix_memalign(&buffer, kAlign, step) != 0) std::abort();
    const std::unique_ptr<void, decltype(&free)> free_it(buffer, &free);
    for (std::size_t at = 0; at < size;) {
      if (!ReadAt(fd, static_cast<char*>(buffer), step, static_cast<off_t>(at), got) || got == 0) {
        error = errno;
        return std::nullopt;
      }
      std::memcpy(out.data() + at, buffer, std::min(got, size - at));
      at += got;
    }
    return out;
  }
  if (way == 2 && size > 0) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    bool ok = true;
    for (std::size_t at = 0; ok && at < size;) {
      auto from = static_cast<off_t>(at);
      const ssize_t n = sendfile(ends[1], fd, &from, std::min<std::size_t>(size - at, 32'768));
      error = errno;
      ok = n > 0;
      for (ssize_t taken = 0; ok && taken < n;) {
        const ssize_t k = read(ends[0], out.data() + at, static_cast<std::size_t>(n - taken));
        ok = k > 0;
        at += ok ? static_cast<std::size_t>(k) : 0;
        taken += k;
      }
    }
    close(ends[0]);
    close(ends[1]);
    if (!ok) return std::nullopt;
    return out;
  }
  // Pieces of odd sizes, from the end to the beginning where it is way 3.
  std::vector<std::pair<std::size_t, std::size_t>> pieces;
  for (std::size_t at = 0; at < size;) {
    const std::size_t n = std::min<std::size_t>(
        size - at, static_cast<std::size_t>(random.Int(1, random.OneIn(3) ? 200'000 : 9'000)));
    pieces.emplace_back(at, n);
    at += n;
  }
  if (way == 3) std::reverse(pieces.begin(), pieces.end());
  for (const auto& [at, n] : pieces) {
    if (!ReadAt(fd, out.data() + at, n, static_cast<off_t>(at), got) || got != n) {
      error = errno;
      return std::nullopt;
    }
  }
  return out;
}

void MountStressTest::ReadLoop(std::uint64_t seed) {
  Random random(seed);
  const std::vector<std::string> names = {"a", "b", "c", "latest"};
  std::vector<std::string> paths;
  for (const auto& [path, bytes] : FilesOf(1)) paths.push_back(path);
  while (!stop_) {
    const std::string& name = names[static_cast<std::size_t>(random.Int(0, 3))];
    const std::string& path = paths[static_cast<std::size_t>(random.Next() % paths.size())];
    const Clock::time_point since = Clock::now();
    int error = 0;
    const auto got = ReadSomehow(At(name + "/" + path), random, error);
    if (!got) {
      // It is just being replaced. Nothing else may go wrong.
      if (error != ENOENT && error != ESTALE) {
        Fail(name + "/" + path + ": " + std::strerror(error));
      }
      ++absent_;
      continue;
    }
    ++read_;
    const auto candidates = oracle_.Candidates(name, path, since);
    const bool known = std::any_of(candidates.begin(), candidates.end(),
                                   [&](const std::string* c) { return *c == *got; });
    if (!known) Fail(name + "/" + path + ": bytes of no checkpoint that had this name");
  }
}

void MountStressTest::ListLoop(std::uint64_t seed) {
  Random random(seed);
  const std::vector<std::string> folders = {
      "",     "a",        "b/tensors",      "c/zarr",       "a/zarr/few",
      "b/hf", "c/slices", "latest/objects", ".tensormount", "a/tensors/grid"};
  while (!stop_) {
    const std::string& folder = folders[static_cast<std::size_t>(random.Next() % folders.size())];
    DIR* const dir = opendir(At(folder).c_str());
    if (dir == nullptr) continue;
    std::vector<long> places;
    std::map<std::string, int> names;
    while (const dirent* const entry = readdir(dir)) {
      // A checkpoint that was replaced while the root is listed may be met before and after.
      if (++names[entry->d_name] > 1 && !folder.empty()) {
        Fail(folder + ": lists " + entry->d_name + " twice");
      }
      struct stat st;
      (void)fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW);
      places.push_back(telldir(dir));
      if (random.OneIn(8)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (!places.empty()) {
      seekdir(dir, places[static_cast<std::size_t>(random.Next() % places.size())]);
      (void)readdir(dir);
    }
    closedir(dir);
  }
}

void MountStressTest::Churn(const MountOptions& options) {
  for (const char* name : {"a", "b", "c"}) Publish(name);
  Mount(store(), options);
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 12; ++i) {
    threads.emplace_back([this, i] { ReadLoop(TestSeed() + i); });
  }
  for (std::uint64_t i = 0; i < 2; ++i) {
    threads.emplace_back([this, i] { ListLoop(TestSeed() + 50 + i); });
  }
  const Clock::time_point end = Clock::now() + std::chrono::milliseconds(TestScale(800));
  Random random(TestSeed());
  while (Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(random.Int(20, 400)));
    Publish(std::string(1, static_cast<char>('a' + random.Int(0, 2))));
  }
  stop_ = true;
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures_) ADD_FAILURE() << failure;
  EXPECT_GT(read_, 20U);
  // Everything is let go of.
  ExpectWithin(std::chrono::seconds(5), [&] {
    return Status()["passthrough"]["live_backing_files"] == 0 &&
           Status()["open_checkpoints"].get<int>() <= 3;
  });
}

TEST_F(MountStressTest, PassthroughReadsAreExactDuringChurn) { Churn({.tier = MountTier::kAuto}); }
TEST_F(MountStressTest, VerifiedPassthroughReadsAreExactDuringChurn) {
  Churn({.tier = MountTier::kAuto, .verify = Verify::kFirst});
}
TEST_F(MountStressTest, DaemonReadsAreExactDuringChurn) { Churn({.tier = MountTier::kDaemon}); }
TEST_F(MountStressTest, CachedDaemonReadsAreExactDuringChurn) {
  Churn({.tier = MountTier::kDaemon, .verify = Verify::kAlways, .page_cache = true});
}

}  // namespace
}  // namespace tensormount::fs
