// SPDX-License-Identifier: Apache-2.0
// What programs read through a mount, beside a plain file with the same bytes.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/mount/mount_fixture.h"
#include "tests/support/fd.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

// What files are served by: the kernel itself, where it can; the daemon, directly or through the
// kernel's cache.
enum class Served { kAuto, kDaemon, kPageCache };

class MountReadTest : public MountTest, public testing::WithParamInterface<Served> {
 protected:
  MountOptions Mode() const {
    MountOptions options;
    if (GetParam() != Served::kAuto) options.tier = MountOptions::Tier::kDaemon;
    options.page_cache = GetParam() == Served::kPageCache;
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, MountReadTest,
                         testing::Values(Served::kAuto, Served::kDaemon, Served::kPageCache),
                         [](const auto& param) {
                           return param.param == Served::kAuto     ? "Auto"
                                  : param.param == Served::kDaemon ? "Daemon"
                                                                   : "PageCache";
                         });

TEST_P(MountReadTest, StoreShowsItsCheckpoints) {
  const TinySpec spec = DefaultTinySpec();
  Write("step-1", spec);
  Write("step-2", DefaultTinySpec(2));
  Mount(store(), Mode());
  EXPECT_THAT(ops_->List(""), IsOkAndHolds(std::vector<std::string>{"latest", "step-1", "step-2"}));
  EXPECT_THAT(ops_->ReadLink("latest"), IsOkAndHolds(std::string("step-2")));
  CheckTensorFiles(*ops_, "latest", DefaultTinySpec(2));
  CheckTensorFiles(*ops_, "step-1", spec);
  CheckNpyFiles(*ops_, "step-1", spec);
  CheckSafetensors(*ops_, "step-1", spec);
  CheckObjects(*ops_, "step-1", spec);
  CheckJson(*ops_, "step-1", spec);
  CheckExtents(*ops_, "step-1", JoinPath(store(), "step-1"), spec);
  CheckXattrs(*ops_, "step-1", spec);
  CheckErrors(*ops_, "step-1");
  CheckListing(*ops_, "step-1", spec, false);
  CheckControlFiles(*ops_);
}

TEST_P(MountReadTest, ShowsUnusualKeysInAllViews) {
  const TinySpec spec = StrangeTinySpec();
  Write("step-1", spec);
  MountOptions options = Mode();
  options.list_views = true;
  Mount(store() + "/step-1", options);
  CheckListing(*ops_, "", spec, true);
  CheckTensorFiles(*ops_, "", spec);
  CheckXattrs(*ops_, "", spec);
}

TEST_F(MountTest, MetricsCountOperationsOfPrograms) {
  TinySpec spec;
  spec.tensors.push_back({.key = "w", .dtype = DType::kU8, .shape = {100'000}, .parts = 2});
  Write("step-1", spec);
  Mount(store());
  EXPECT_EQ(MetricOf(*ops_, "checkpoints"), 1);
  EXPECT_EQ(MetricOf(*ops_, "problems"), 0);
  EXPECT_EQ(MetricOf(*ops_, "queue_waiting", {{"queue", "reads"}}), 0);
  // The file of the metrics itself is open while it is made.
  const double open = MetricOf(*ops_, "open_files");
  const double read = MetricOf(*ops_, "storage_read_bytes_total");
  const double sent = MetricOf(*ops_, "sent_bytes_total", {{"tier", "daemon"}});
  {
    ASSERT_OK_AND_ASSIGN(const auto file, ops_->Open("step-1/tensors/w"));
    EXPECT_EQ(MetricOf(*ops_, "open_files"), open + 1);
    EXPECT_OK(file->Read(0, 100'000));
  }
  EXPECT_GE(MetricOf(*ops_, "sent_bytes_total", {{"tier", "daemon"}}), sent + 100'000);
  EXPECT_GE(MetricOf(*ops_, "storage_read_bytes_total"), read);
  EXPECT_GE(MetricOf(*ops_, "request_seconds_count", {{"tier", "daemon"}, {"operation", "read"}}),
            1);
  EXPECT_GT(MetricOf(*ops_, "request_seconds_sum", {{"tier", "daemon"}, {"operation", "read"}}), 0);
  EXPECT_EQ(MetricOf(*ops_, "request_failures_total", {{"tier", "daemon"}, {"operation", "read"}}),
            0);
  EXPECT_EQ(MetricOf(*ops_, "stagings"), 0);
  ASSERT_EQ(mkdir((mount_point() + "/.staging/step-2").c_str(), 0755), 0);
  EXPECT_EQ(MetricOf(*ops_, "stagings"), 1);
  // RELEASE comes after close(2) has returned.
  const Deadline deadline = Deadline::After(std::chrono::seconds(10));
  while (MetricOf(*ops_, "open_files") != open && !deadline.Passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(MetricOf(*ops_, "open_files"), open);
}

TEST_F(MountTest, ManyFilesAreListedCompletely) {
  TinySpec spec;
  spec.writers = 1;
  for (int i = 0; i < 3000; ++i) {
    spec.tensors.push_back({.key = "layer." + std::to_string(i), .shape = {1}});
  }
  Write("step-1", spec);
  Mount(store());
  for (int round = 0; round < 2; ++round) {  // The second time out of the kernel's cache.
    ASSERT_OK_AND_ASSIGN(const auto names, ops_->List("step-1/tensors"));
    EXPECT_EQ(names.size(), spec.tensors.size());
    for (int i = 0; i < 3000; i += 100) {
      EXPECT_OK(ops_->Stat("step-1/tensors/layer." + std::to_string(i)));
    }
  }
}

// A tensor of some requests, in three rank shards, and the same bytes in a plain file.
struct Pair {
  TinySpec spec;
  std::string bytes;
  std::string plain;
};

Pair MakePair(const TempDir& dir) {
  Pair pair;
  pair.spec.writers = 3;
  pair.spec.tensors.push_back(
      {.key = "big", .dtype = DType::kU8, .shape = {2500, 1031}, .seed = 9, .parts = 3});
  pair.bytes = TinyBytes(pair.spec.tensors[0]);
  pair.plain = dir.Join("plain");
  WriteWholeFile(pair.plain, pair.bytes);
  return pair;
}

TEST_P(MountReadTest, ReadsLikeAPlainFile) {
  const Pair pair = MakePair(dir_);
  Write("step-1", pair.spec);
  Mount(store(), Mode());
  const Fd ours(open(At("step-1/tensors/big").c_str(), O_RDONLY));
  const Fd plain(open(pair.plain.c_str(), O_RDONLY));
  ASSERT_GE(ours.fd, 0);
  const auto size = static_cast<std::int64_t>(pair.bytes.size());
  Random random(TestSeed());
  std::vector<char> a(3 << 20);
  std::vector<char> b(3 << 20);
  for (int i = 0; i < TestScale(150); ++i) {
    const off_t offset =
        random.OneIn(4) ? random.Int(0, size / 4096 + 1) * 4096 : random.Int(0, size + 5000);
    const auto length =
        static_cast<std::size_t>(random.OneIn(3) ? random.Int(0, 3 << 20) : random.Int(0, 9000));
    const ssize_t n = pread(ours, a.data(), length, offset);
    ASSERT_EQ(n, pread(plain, b.data(), length, offset)) << offset << " + " << length;
    ASSERT_EQ(std::memcmp(a.data(), b.data(), static_cast<std::size_t>(n)), 0);
  }
  // Vectors, and the file's own position.
  iovec pieces[3] = {{a.data(), 3}, {a.data() + 3, 100000}, {a.data() + 100003, 1}};
  EXPECT_EQ(lseek(ours, 77, SEEK_SET), 77);
  EXPECT_EQ(readv(ours, pieces, 3), 100004);
  EXPECT_EQ(std::memcmp(a.data(), pair.bytes.data() + 77, 100004), 0);
  EXPECT_EQ(lseek(ours, 0, SEEK_CUR), 77 + 100004);
  EXPECT_EQ(lseek(ours, -5, SEEK_END), size - 5);
  EXPECT_EQ(read(ours, a.data(), 100), 5);
  EXPECT_EQ(read(ours, a.data(), 100), 0);
  for (const off_t at :
       {off_t{-1}, off_t{0}, off_t{5000}, off_t{size - 1}, off_t{size}, off_t{size + 1}}) {
    for (const int whence : {SEEK_DATA, SEEK_HOLE, SEEK_SET}) {
      errno = 0;
      const off_t got = lseek(ours, at, whence);
      const int err = errno;
      errno = 0;
      EXPECT_EQ(got, lseek(plain, at, whence)) << at << " " << whence;
      if (got < 0) {
        EXPECT_EQ(err, errno) << at << " " << whence;
      }
    }
  }
}

// In a process that does not serve the mount.
bool MapsLike(const std::string& path, const std::string& bytes) {
  const Fd fd(open(path.c_str(), O_RDONLY));
  EXPECT_GE(fd.fd, 0) << path;
  for (const int flags : {MAP_SHARED, MAP_PRIVATE}) {
    void* map = mmap(nullptr, bytes.size(), PROT_READ, flags, fd, 0);
    EXPECT_NE(map, MAP_FAILED) << path << ": " << std::strerror(errno);
    if (map == MAP_FAILED) return false;
    EXPECT_EQ(std::memcmp(map, bytes.data(), bytes.size()), 0) << path;
    // Reading beside a mapping.
    char buffer[100];
    EXPECT_EQ(pread(fd, buffer, sizeof buffer, 10), 100);
    EXPECT_EQ(std::memcmp(buffer, bytes.data() + 10, sizeof buffer), 0);
    munmap(map, bytes.size());
  }
  void* map = mmap(nullptr, bytes.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  EXPECT_NE(map, MAP_FAILED) << path << ": " << std::strerror(errno);
  if (map == MAP_FAILED) return false;
  static_cast<char*>(map)[0] = static_cast<char>(bytes[0] + 1);
  EXPECT_EQ(std::memcmp(static_cast<char*>(map) + 1, bytes.data() + 1, bytes.size() - 1), 0);
  munmap(map, bytes.size());
  EXPECT_EQ(mmap(nullptr, bytes.size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  return true;
}

TEST_P(MountReadTest, MapsLikeAPlainFile) {
  const Pair pair = MakePair(dir_);
  Write("step-1", pair.spec);
  Mount(store(), Mode());
  for (const char* path : {"step-1/tensors/big", "step-1/model.safetensors", "step-1/npy/big.npy",
                           "step-1/checkpoint.json"}) {
    ASSERT_OK_AND_ASSIGN(const std::string bytes, ops_->ReadAll(path));
    ExpectInChild([&] { return MapsLike(At(path), bytes); });
    // What was written to a private mapping stayed private.
    EXPECT_THAT(ops_->ReadAll(path), IsOkAndHolds(bytes));
  }
}

TEST_P(MountReadTest, CopyFileRangeAndSendfileAreExact) {
  const Pair pair = MakePair(dir_);
  Write("step-1", pair.spec);
  Mount(store(), Mode());
  const std::string path = At("step-1/tensors/big");
  const auto copy_all = [&](const auto& step) {
    const Fd in(open(path.c_str(), O_RDONLY));
    const std::string target = dir_.Join("copy");
    const Fd out(open(target.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
    for (;;) {
      const ssize_t n = step(in.fd, out.fd);
      ASSERT_GE(n, 0) << std::strerror(errno);
      if (n == 0) break;
    }
    EXPECT_TRUE(ReadWholeFile(target) == pair.bytes);
  };
  // Newer kernels copy so within one file system only; programs then read and write.
  const Fd from(open(path.c_str(), O_RDONLY));
  const Fd to(open(dir_.Join("probe").c_str(), O_RDWR | O_CREAT, 0600));
  if (copy_file_range(from, nullptr, to, nullptr, 1, 0) >= 0) {
    copy_all([](int in, int out) { return copy_file_range(in, nullptr, out, nullptr, 700001, 0); });
  } else {
    EXPECT_EQ(errno, EXDEV);
  }
  copy_all([](int in, int out) { return sendfile(out, in, nullptr, 700001); });
  EXPECT_EQ(RunProcess({"cmp", path, pair.plain}).exit_code, 0);
  EXPECT_EQ(RunProcess({"cp", path, dir_.Join("cp")}).exit_code, 0);
  EXPECT_TRUE(ReadWholeFile(dir_.Join("cp")) == pair.bytes);
}

TEST_P(MountReadTest, DirectReadsAreExact) {
  const Pair pair = MakePair(dir_);
  Write("step-1", pair.spec);
  Mount(store(), Mode());
  const Fd fd(open(At("step-1/tensors/big").c_str(), O_RDONLY | O_DIRECT));
  ASSERT_GE(fd.fd, 0);
  void* memory = nullptr;
  ASSERT_EQ(posix_memalign(&memory, 4096, 1 << 21), 0);
  const std::unique_ptr<void, decltype(&std::free)> buffer(memory, std::free);
  std::string all;
  for (;;) {
    const ssize_t n = pread(fd, buffer.get(), 1 << 21, static_cast<off_t>(all.size()));
    ASSERT_GE(n, 0) << std::strerror(errno);
    if (n == 0) break;
    all.append(static_cast<char*>(buffer.get()), static_cast<std::size_t>(n));
  }
  EXPECT_TRUE(all == pair.bytes);
}

TEST_P(MountReadTest, ConcurrentReadersReadExactly) {
  const Pair pair = MakePair(dir_);
  Write("step-1", pair.spec);
  MountOptions options = Mode();
  options.verify = ServeVerify::kFirst;
  Mount(store(), options);
  std::vector<std::thread> readers;
  for (int r = 0; r < 6; ++r) {
    readers.emplace_back([&, r] {
      Random random(TestSeed() + static_cast<std::uint64_t>(r));
      const Fd fd(open(At("step-1/tensors/big").c_str(), O_RDONLY));
      std::vector<char> buffer(300000);
      for (int i = 0; i < 40; ++i) {
        const auto offset = static_cast<std::size_t>(
            random.Int(0, static_cast<std::int64_t>(pair.bytes.size()) - 300000));
        const auto length = static_cast<std::size_t>(random.Int(1, 300000));
        ASSERT_EQ(pread(fd, buffer.data(), length, static_cast<off_t>(offset)),
                  static_cast<ssize_t>(length));
        ASSERT_EQ(std::memcmp(buffer.data(), pair.bytes.data() + offset, length), 0);
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
}

TEST_F(MountTest, StatReportsSizesTimesAndInodes) {
  const Pair pair = MakePair(dir_);
  Write("step-1", pair.spec);
  Mount(store());
  struct stat st;
  ASSERT_EQ(stat(At("step-1/tensors/big").c_str(), &st), 0);
  EXPECT_EQ(static_cast<std::size_t>(st.st_size), pair.bytes.size());
  EXPECT_EQ(st.st_nlink, 1u);
  EXPECT_EQ(static_cast<std::size_t>(st.st_blocks), (pair.bytes.size() + 511) / 512);
  EXPECT_EQ(st.st_blksize, 1 << 20);
  EXPECT_TRUE(S_ISREG(st.st_mode));
  EXPECT_EQ(st.st_uid, geteuid());
  struct stat again;
  const Fd fd(open(At("step-1/tensors/big").c_str(), O_RDONLY));
  ASSERT_EQ(fstat(fd, &again), 0);
  EXPECT_EQ(again.st_ino, st.st_ino);
  // What is published in the same second with the same bytes has the same time: rsync skips it.
  Write("step-2", pair.spec);
  ExpectWithin(std::chrono::milliseconds(1000),
               [&] { return stat(At("step-2/tensors/big").c_str(), &again) == 0; });
  EXPECT_EQ(again.st_mtim.tv_sec, st.st_mtim.tv_sec);
  EXPECT_NE(again.st_ino, st.st_ino);
}

// The second copy moves nothing, and of a new step only what changed: that is what mtimes are for.
TEST_F(MountTest, RsyncTransfersOnlyChangedFiles) {
  TinySpec spec = DefaultTinySpec();
  Write("step-1", spec);
  spec.tensors[1].seed = 77;  // The parent is there: published within the same second.
  Write("step-2", spec);
  Mount(store());
  if (RunProcess({"rsync", "--version"}).exit_code != 0) GTEST_SKIP() << "there is no rsync";
  const auto sync = [&](const std::string& step) {
    const ProcessOutcome outcome =
        RunProcess({"rsync", "-a", "--out-format=%n", At(step) + "/", dir_.Join("copy") + "/"});
    EXPECT_EQ(outcome.exit_code, 0) << outcome;
    std::vector<std::string> files;
    std::size_t begin = 0;
    while (begin < outcome.out.size()) {
      const std::size_t end = outcome.out.find('\n', begin);
      const std::string name = outcome.out.substr(begin, end - begin);
      if (!name.empty() && !name.ends_with('/')) files.push_back(name);
      begin = end + 1;
    }
    std::sort(files.begin(), files.end());
    return files;
  };
  EXPECT_GT(sync("step-1").size(), spec.tensors.size());
  EXPECT_EQ(sync("step-1"), std::vector<std::string>{});
  const std::vector<std::string> changed = {"checkpoint.json", "tensors/" + spec.tensors[1].key};
  EXPECT_EQ(sync("step-2"), changed);
}

}  // namespace
}  // namespace tensormount::fs
