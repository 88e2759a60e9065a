// SPDX-License-Identifier: Apache-2.0
// Which tier serves a file, and that programs cannot tell but by speed.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "tests/mount/mount_fixture.h"
#include "tests/support/fd.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

using MountTier = MountOptions::Tier;
using Verify = ServeVerify;

struct Mapping {
  Mapping(int fd, std::size_t s, int protection, int flags)
      : size(s), at(mmap(nullptr, s, protection, flags, fd, 0)) {}
  ~Mapping() {
    if (at != MAP_FAILED) munmap(at, size);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  bool ok() const { return at != MAP_FAILED; }
  std::string_view text() const { return {static_cast<const char*>(at), size}; }
  std::size_t size;
  void* at;
};

constexpr std::int64_t kBig = 700'003;

TinySpec TierSpec(std::uint64_t seed = 5) {
  TinySpec spec;
  spec.tensors.push_back(
      {.key = "whole", .dtype = DType::kU8, .shape = {kBig}, .seed = seed, .tensor_file = true});
  spec.tensors.push_back({.key = "other",
                          .dtype = DType::kU8,
                          .shape = {5000},
                          .seed = seed + 1,
                          .tensor_file = true});
  spec.tensors.push_back(
      {.key = "pieces", .dtype = DType::kU8, .shape = {kBig}, .seed = seed + 2, .parts = 2});
  return spec;
}

class MountTierTest : public MountTest {
 protected:
  nlohmann::json Status() { return nlohmann::json::parse(session_->StatusJson()); }
  // Whether this kernel and this process can; if not, the daemon's tier is what there is.
  bool Passes() { return Status()["tier"] == "passthrough"; }
  // What the daemon sent, the text of the stats themselves included.
  static constexpr std::uint64_t kTexts = 20'000;
  std::uint64_t DaemonBytes() {
    const auto text = ops_->ReadAll(".tensormount/stats");
    EXPECT_OK(text);
    return nlohmann::json::parse(text.value())["bytes"]["daemon"].get<std::uint64_t>();
  }
  std::string TierOf(const std::string& path) {
    const auto tier = ops_->Xattr(path, "user.tensormount.tier");
    return tier.ok() ? tier.value() : tier.status().ToString();
  }
  std::string Want(const std::string& key, const TinySpec& spec = TierSpec()) {
    for (const TinyTensor& tensor : spec.tensors) {
      if (tensor.key == key) return TinyBytes(tensor);
    }
    ADD_FAILURE() << key;
    return "";
  }
  void ExpectLiveBackings(std::size_t n) {
    ExpectWithin(std::chrono::seconds(3), [&] {
      return Status()["passthrough"]["live_backing_files"].get<std::size_t>() == n;
    });
  }
  // Of a whole tensor, with a byte changed and the seal put back.
  void Damage(const std::string& checkpoint) {
    const auto files = HostFileSystem().List(checkpoint + "/data");
    ASSERT_OK(files);
    int damaged = 0;
    for (const auto& entry : files.value()) {
      const std::string path = checkpoint + "/data/" + entry.name;
      struct stat st;
      ASSERT_EQ(stat(path.c_str(), &st), 0);
      if (st.st_size != kBig) continue;
      std::string bytes = ReadWholeFile(path);
      bytes[300'000] ^= 1;
      ASSERT_EQ(chmod(path.c_str(), 0644), 0);
      WriteWholeFile(path, bytes);
      ASSERT_EQ(chmod(path.c_str(), 0444), 0);
      ++damaged;
    }
    ASSERT_EQ(damaged, 1);
  }
};

#define NEEDS_PASSTHROUGH() \
  if (!Passes()) GTEST_SKIP() << Status()["passthrough"]["why_not"].get<std::string>()

TEST_F(MountTierTest, WholeFilesArePassedThrough) {
  Write("step-1", TierSpec());
  Mount(store());
  NEEDS_PASSTHROUGH();
  const std::string want = Want("whole");
  EXPECT_EQ(TierOf("step-1/tensors/whole"), "passthrough");
  EXPECT_EQ(TierOf("step-1/tensors/pieces"), "daemon");
  const std::uint64_t before = DaemonBytes();
  {
    const Fd fd(open(At("step-1/tensors/whole").c_str(), O_RDONLY));
    ASSERT_GE(fd.fd, 0);
    const Fd twice(open(At("step-1/tensors/whole").c_str(), O_RDONLY));
    ASSERT_GE(twice.fd, 0);
    std::string got(want.size() + 10, 'x');
    ASSERT_EQ(pread(fd, got.data(), got.size(), 0), static_cast<ssize_t>(want.size()));
    got.resize(want.size());
    EXPECT_TRUE(got == want);
    char few[100];
    ASSERT_EQ(pread(twice, few, sizeof few, 654'321), 100);
    EXPECT_EQ(std::string_view(few, 100), want.substr(654'321, 100));
    EXPECT_EQ(pread(fd, few, sizeof few, kBig), 0);
    EXPECT_EQ(lseek(fd, 1000, SEEK_DATA), 1000);
    EXPECT_EQ(lseek(fd, 1000, SEEK_HOLE), kBig);

    ExpectInChild([&] {
      const Mapping shared(fd, want.size(), PROT_READ, MAP_SHARED);
      EXPECT_TRUE(shared.ok());
      if (!shared.ok()) return false;
      EXPECT_TRUE(shared.text() == want);
      const Mapping mine(fd, want.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE);
      EXPECT_TRUE(mine.ok());
      if (!mine.ok()) return false;
      static_cast<char*>(mine.at)[5] ^= 1;
      EXPECT_TRUE(mine.text().substr(6) == std::string_view(want).substr(6));
      EXPECT_TRUE(shared.text() == want);
      EXPECT_FALSE(Mapping(fd, want.size(), PROT_READ | PROT_WRITE, MAP_SHARED).ok());
      return true;
    });

    const std::string copy = dir_.Join("copy");
    const Fd out(open(copy.c_str(), O_WRONLY | O_CREAT, 0644));
    off_t at = 0;
    while (at < kBig) ASSERT_GT(sendfile(out, fd, &at, static_cast<std::size_t>(kBig - at)), 0);
    EXPECT_TRUE(ReadWholeFile(copy) == want);
    ExpectLiveBackings(1);
  }
  ExpectLiveBackings(0);
  EXPECT_LT(DaemonBytes() - before, kTexts);
  EXPECT_TRUE(ops_->ReadAll("step-1/tensors/pieces").value() == Want("pieces"));
  EXPECT_GE(DaemonBytes() - before, static_cast<std::uint64_t>(kBig));
  const auto status = Status();
  EXPECT_EQ(status["passthrough"]["negotiated"], true);
  EXPECT_EQ(status["passthrough"]["opens"], 2);
  EXPECT_EQ(status["passthrough"]["fell_back"], 0);
  const auto stats = nlohmann::json::parse(ops_->ReadAll(".tensormount/stats").value());
  EXPECT_EQ(stats["bytes"]["passthrough"], 2 * kBig) << stats["bytes"];
}

TEST_F(MountTierTest, DaemonTierOptionDisablesPassthrough) {
  Write("step-1", TierSpec());
  Mount(store(), {.tier = MountTier::kDaemon});
  EXPECT_EQ(TierOf("step-1/tensors/whole"), "daemon");
  EXPECT_TRUE(ops_->ReadAll("step-1/tensors/whole").value() == Want("whole"));
  EXPECT_EQ(Status()["tier"], "daemon");
  EXPECT_EQ(Status()["passthrough"]["negotiated"], false);
  EXPECT_EQ(Status()["passthrough"]["why_not"], "--tier daemon");
  EXPECT_GE(DaemonBytes(), static_cast<std::uint64_t>(kBig));
}

TEST_F(MountTierTest, PassthroughTierIsUsedOrRefused) {
  Write("step-1", TierSpec());
  MountOptions options{
      .source = store(), .mount_point = mount_point(), .tier = MountTier::kPassthrough};
  auto session = MountSession::Start(HostFileSystem(), options);
  if (session.ok()) {
    session_ = std::move(session).value();
    ops_ = MakeHostFileOps(mount_point());
    EXPECT_TRUE(ops_->ReadAll("step-1/tensors/whole").value() == Want("whole"));
    EXPECT_TRUE(ops_->ReadAll("step-1/tensors/pieces").value() == Want("pieces"));
    session_ = nullptr;
  } else {
    EXPECT_THAT(session, HasCode(Code::kUnsupported));
  }
  options.verify = Verify::kAlways;
  const auto refused = MountSession::Start(HostFileSystem(), options);
  EXPECT_THAT(refused, HasCode(Code::kUnsupported));
  EXPECT_NE(refused.status().ToString().find("--verify always"), std::string::npos);
}

// Without CAP_SYS_ADMIN the mount works all the same, by fusermount3 and by the daemon.
TEST_F(MountTierTest, UnprivilegedUserGetsTheDaemonTier) {
  Write("step-1", TierSpec());
  const std::string program = BuiltProgram("tensormount");
  if (geteuid() != 0 || access(program.c_str(), X_OK) != 0) GTEST_SKIP() << "needs root";
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  ASSERT_EQ(chown(mount_point().c_str(), 65534, 65534), 0);
  const auto as_nobody = [&](const std::vector<std::string>& command) {
    std::vector<std::string> all = {"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"};
    all.insert(all.end(), command.begin(), command.end());
    return all;
  };
  if (RunProcess(as_nobody({"test", "-w", "/dev/fuse"})).exit_code != 0 ||
      RunProcess(as_nobody({"test", "-x", program})).exit_code != 0) {
    GTEST_SKIP() << "an ordinary user may not use /dev/fuse or run the program here";
  }
  Subprocess daemon(as_nobody({program, "mount", "-f", store(), mount_point()}));
  ExpectWithin(std::chrono::seconds(10), [&] { return IsMountPoint(mount_point()); });
  const auto read = RunProcess(as_nobody({"cat", At("step-1/tensors/whole")}));
  EXPECT_EQ(read.exit_code, 0) << read;
  EXPECT_TRUE(read.out == Want("whole"));
  const auto status = RunProcess(as_nobody({"cat", At(".tensormount/status")}));
  EXPECT_NE(status.out.find("CAP_SYS_ADMIN"), std::string::npos) << status;
  daemon.Signal(SIGTERM);
  EXPECT_TRUE(daemon.WaitFor(std::chrono::seconds(10)).has_value());
}

TEST_F(MountTierTest, VerifyFirstRunsBeforePassthrough) {
  Write("step-1", TierSpec());
  Write("step-2", TierSpec(50));
  Damage(store() + "/step-1");
  Mount(store(), {.verify = Verify::kFirst});
  NEEDS_PASSTHROUGH();
  const Fd bad(open(At("step-1/tensors/whole").c_str(), O_RDONLY));
  EXPECT_EQ(bad.fd, -1);
  EXPECT_EQ(errno, EIO);
  ASSERT_OK_AND_ASSIGN(const std::string errors, ops_->ReadAll(".tensormount/errors"));
  EXPECT_NE(errors.find("step-1/tensors/whole"), std::string::npos) << errors;
  EXPECT_TRUE(ops_->ReadAll("step-1/tensors/other").value() == Want("other"));
  const std::uint64_t before = DaemonBytes();
  EXPECT_TRUE(ops_->ReadAll("step-2/tensors/whole").value() == Want("whole", TierSpec(50)));
  EXPECT_LT(DaemonBytes() - before, kTexts);
}

TEST_F(MountTierTest, VerifyAlwaysUsesTheDaemon) {
  Write("step-1", TierSpec());
  Mount(store(), {.verify = Verify::kAlways});
  EXPECT_EQ(TierOf("step-1/tensors/whole"), "daemon");
  EXPECT_TRUE(ops_->ReadAll("step-1/tensors/whole").value() == Want("whole"));
  const std::string why = Status()["passthrough"]["why_not"];
  EXPECT_NE(why.find("--verify always"), std::string::npos);
  EXPECT_GE(DaemonBytes(), static_cast<std::uint64_t>(kBig));
}

// A file that cannot be passed through is read all the same, and counted.
TEST_F(MountTierTest, UnsealedFileFallsBackToTheDaemon) {
  Write("step-1", TierSpec());
  Mount(store());
  NEEDS_PASSTHROUGH();
  const auto files = HostFileSystem().List(store() + "/step-1/data");
  ASSERT_OK(files);
  for (const auto& entry : files.value()) {
    ASSERT_EQ(chmod((store() + "/step-1/data/" + entry.name).c_str(), 0644), 0);
  }
  EXPECT_TRUE(ops_->ReadAll("step-1/tensors/whole").value() == Want("whole"));
  const auto status = Status()["passthrough"];
  EXPECT_GE(status["fell_back"].get<int>(), 1);
  EXPECT_NE(status["reasons"].dump().find("not sealed"), std::string::npos) << status;
}

TEST_F(MountTierTest, OpenFileOutlivesItsCheckpoint) {
  Write("step-1", TierSpec());
  Mount(store());
  const Fd fd(open(At("step-1/tensors/whole").c_str(), O_RDONLY));
  ASSERT_GE(fd.fd, 0);
  ASSERT_OK_AND_ASSIGN(const Store opened, Store::Open(HostFileSystem(), store()));
  ASSERT_OK(opened.Remove("step-1"));
  std::string got(kBig, 'x');
  ASSERT_EQ(pread(fd, got.data(), got.size(), 0), kBig);
  EXPECT_TRUE(got == Want("whole"));
}

// Same and different files, opened, read, mapped and closed by many threads: never EIO, never
// another byte, and nothing is left registered.
TEST_F(MountTierTest, ConcurrentOpensLeaveNoBackingFile) {
  TinySpec spec = TierSpec();
  for (int i = 0; i < 4; ++i) {
    spec.tensors.push_back({.key = "n" + std::to_string(i),
                            .dtype = DType::kU8,
                            .shape = {40'000 + i},
                            .seed = 90 + static_cast<std::uint64_t>(i),
                            .tensor_file = true});
  }
  Write("step-1", spec);
  Mount(store());
  std::vector<std::pair<std::string, std::string>> files;
  for (const TinyTensor& tensor : spec.tensors) {
    files.emplace_back(At("step-1/tensors/" + tensor.key), TinyBytes(tensor));
  }
  const bool passes = Passes();
  std::atomic<int> failures{0};
  const auto work = [&](int thread) {
    Random random(TestSeed() + static_cast<std::uint64_t>(thread));
    const int rounds = TestScale(150);
    for (int i = 0; i < rounds; ++i) {
      const auto& [path, want] = files[static_cast<std::size_t>(
          random.Int(0, static_cast<std::int64_t>(files.size()) - 1))];
      const Fd fd(open(path.c_str(), O_RDONLY));
      if (fd.fd < 0) {
        ADD_FAILURE() << path << ": " << std::strerror(errno);
        ++failures;
        return;
      }
      const auto at =
          static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(want.size()) - 50));
      char few[50];
      if (pread(fd, few, sizeof few, static_cast<off_t>(at)) != 50 ||
          std::memcmp(few, want.data() + at, 50) != 0) {
        ADD_FAILURE() << path << ": other bytes";
        ++failures;
        return;
      }
      // A page of a file that the daemon serves would be faulted in under a lock of this process's
      // memory that the daemon, in this same process, may want.
      if (passes && !path.ends_with("/pieces") && random.OneIn(4)) {
        const Mapping map(fd, want.size(), PROT_READ, random.OneIn(2) ? MAP_SHARED : MAP_PRIVATE);
        if (!map.ok() || map.text().substr(at, 50) != std::string_view(want).substr(at, 50)) {
          ADD_FAILURE() << path << ": mapped " << std::strerror(errno);
          ++failures;
          return;
        }
      }
    }
  };
  ExpectInChild([&] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) threads.emplace_back(work, t);
    for (std::thread& thread : threads) thread.join();
    return failures == 0;
  });
  ExpectLiveBackings(0);
}

// A folder that is the mount of another file system, for the store to lie in.
class MountTierOnTest : public MountTierTest {
 protected:
  void TearDown() override {
    MountTierTest::TearDown();
    // The kernel lets go of files that were open a moment after their last close.
    for (const std::string& at : {under_, below_}) {
      if (at.empty()) continue;
      ExpectWithin(std::chrono::seconds(5), [&] { return umount2(at.c_str(), 0) == 0; });
    }
  }
  void CheckOn(const std::string& folder) {
    const std::string on = folder + "/store";
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), on, "step-1", TierSpec()));
    Mount(on);
    NEEDS_PASSTHROUGH();
    const std::uint64_t before = DaemonBytes();
    EXPECT_TRUE(ops_->ReadAll("step-1/tensors/whole").value() == Want("whole"));
    EXPECT_LT(DaemonBytes() - before, kTexts) << session_->StatusJson();
    EXPECT_EQ(Status()["passthrough"]["fell_back"], 0) << session_->StatusJson();
  }
  std::string under_;
  std::string below_;
};

TEST_F(MountTierOnTest, ServesFromTmpfs) {
  const std::string at = dir_.Join("tmpfs");
  ASSERT_EQ(mkdir(at.c_str(), 0755), 0);
  if (mount("none", at.c_str(), "tmpfs", 0, nullptr) != 0) GTEST_SKIP() << "may not mount";
  under_ = at;
  CheckOn(at);
}

TEST_F(MountTierOnTest, ServesFromOverlayfs) {
  // On a tmpfs of its own: what lies below may be an overlay already.
  below_ = dir_.Join("below");
  ASSERT_EQ(mkdir(below_.c_str(), 0755), 0);
  if (mount("none", below_.c_str(), "tmpfs", 0, nullptr) != 0) {
    below_.clear();
    GTEST_SKIP() << "may not mount";
  }
  for (const char* name : {"/lower", "/upper", "/work", "/merged"}) {
    ASSERT_EQ(mkdir((below_ + name).c_str(), 0755), 0);
  }
  const std::string options =
      "lowerdir=" + below_ + "/lower,upperdir=" + below_ + "/upper,workdir=" + below_ + "/work";
  const std::string at = below_ + "/merged";
  if (mount("overlay", at.c_str(), "overlay", 0, options.c_str()) != 0) {
    GTEST_SKIP() << "no overlayfs here";
  }
  under_ = at;
  CheckOn(at);
}

}  // namespace
}  // namespace tensormount::fs
