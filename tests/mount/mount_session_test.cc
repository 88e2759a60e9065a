// SPDX-License-Identifier: Apache-2.0
// How mounts come, go, refuse and survive.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <grp.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "fs/mount/mount_table.h"
#include "tests/mount/mount_fixture.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/plain_reads_file_system.h"
#include "tests/support/thread_masks.h"

namespace tensormount::fs {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TinySpec BigSpec() {
  TinySpec spec;
  spec.tensors.push_back(
      {.key = "big", .dtype = DType::kU8, .shape = {500000}, .seed = 5, .tensor_file = true});
  return spec;
}

TEST(MountTable, MountIsFoundByItsWholePath) {
  EXPECT_TRUE(FindMount("/proc"));
  EXPECT_TRUE(FindMount("/proc/"));
  EXPECT_FALSE(FindMount("/proc/self"));
  // A folder that is not there is no short way to the root.
  EXPECT_FALSE(FindMount("/no-such-folder/proc"));
  EXPECT_FALSE(FindMount(""));
}

TEST_F(MountTest, PublishAndRemovalAppearWithinASecond) {
  Write("step-1", DefaultTinySpec());
  Mount(store());
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
  EXPECT_EQ(ops_->Stat("step-2").status().ToErrno(), ENOENT);  // Remembered, but not for long.
  Write("step-2", DefaultTinySpec(2));
  ExpectWithin(milliseconds(1000), [&] { return ops_->Stat("step-2").ok(); });
  ExpectWithin(milliseconds(1000), [&] { return ops_->ReadLink("latest").value() == "step-2"; });
  CheckTensorFiles(*ops_, "step-2", DefaultTinySpec(2));

  ASSERT_OK_AND_ASSIGN(const auto handle, ops_->Open("step-2/tensors/layers.0.w"));
  ASSERT_OK_AND_ASSIGN(const Store opened, Store::Open(HostFileSystem(), store()));
  ASSERT_OK(opened.Remove("step-2"));
  ExpectWithin(milliseconds(1000),
               [&] { return ops_->Stat("step-2").status().ToErrno() == ENOENT; });
  ExpectWithin(milliseconds(1000), [&] { return ops_->ReadLink("latest").value() == "step-1"; });
  EXPECT_THAT(ops_->List(""), IsOkAndHolds(std::vector<std::string>{"latest", "step-1"}));
  // Who had it open reads on.
  const TinySpec removed = DefaultTinySpec(2);
  for (const TinyTensor& tensor : removed.tensors) {
    if (tensor.key != "layers.0.w") continue;
    EXPECT_THAT(handle->Read(0, 1 << 20), IsOkAndHolds(TinyBytes(tensor)));
  }
}

TEST_F(MountTest, ReplacementAppearsWithinASecond) {
  Write("step-1", BigSpec());
  Mount(store());
  ASSERT_OK(ops_->ReadAll("step-1/tensors/big"));
  TinySpec other = BigSpec();
  other.tensors[0].seed = 6;
  Store::PublishOptions replace;
  replace.if_exists = IfExists::kReplace;
  Write("step-1", other, replace);
  ExpectWithin(milliseconds(1000), [&] {
    const auto bytes = ops_->ReadAll("step-1/tensors/big");
    return bytes.ok() && bytes.value() == TinyBytes(other.tensors[0]);
  });
}

// Every way to change something, as errno; 0 where it worked.
std::vector<std::pair<std::string, int>> TryToWrite(const std::string& root) {
  std::vector<std::pair<std::string, int>> answers;
  const std::string file = root + "/tensors/bias";
  const std::string folder = root + "/tensors";
  const std::string fresh = root + "/fresh";
  const auto note = [&](const char* what, long result) {
    answers.emplace_back(what, result < 0 ? errno : 0);
  };
  const auto try_open = [&](const char* what, const std::string& path, int flags) {
    const int fd = open(path.c_str(), flags | O_CLOEXEC, 0644);
    note(what, fd);
    if (fd >= 0) close(fd);
  };
  try_open("write", file, O_WRONLY);
  try_open("read and write", file, O_RDWR);
  try_open("truncate on open", file, O_RDONLY | O_TRUNC);
  try_open("create", fresh, O_WRONLY | O_CREAT);
  try_open("create existing", file, O_RDONLY | O_CREAT | O_EXCL);
  try_open("temporary", root, O_RDWR | O_TMPFILE);
  note("mkdir", mkdir(fresh.c_str(), 0755));
  note("mkdir existing", mkdir(folder.c_str(), 0755));
  note("mknod", mknod(fresh.c_str(), S_IFREG | 0644, 0));
  note("symlink", symlink("x", fresh.c_str()));
  note("link", link(file.c_str(), fresh.c_str()));
  note("link folder", link(folder.c_str(), fresh.c_str()));
  note("unlink", unlink(file.c_str()));
  note("unlink folder", unlink(folder.c_str()));
  note("unlink nothing", unlink(fresh.c_str()));
  note("rmdir", rmdir(folder.c_str()));
  note("rmdir file", rmdir(file.c_str()));
  note("rename", rename(file.c_str(), fresh.c_str()));
  note("rename nothing", rename(fresh.c_str(), file.c_str()));
  note("truncate", truncate(file.c_str(), 0));
  note("chmod", chmod(file.c_str(), 0666));
  note("chown", chown(file.c_str(), 1, 1));
  note("utimes", utimensat(AT_FDCWD, file.c_str(), nullptr, 0));
  note("setxattr", setxattr(file.c_str(), "user.x", "y", 1, 0));
  note("removexattr", removexattr(file.c_str(), "user.x"));
  note("access", access(file.c_str(), W_OK));
  note("access folder", access(folder.c_str(), W_OK));
  return answers;
}

TEST_F(MountTest, RefusesWritesLikeAReadOnlyBindMount) {
  Write("step-1", DefaultTinySpec());
  MountOptions options;
  options.read_only = true;
  Mount(store(), options);
  const auto ours = TryToWrite(At("step-1"));
  const auto answer_to = [&](const std::string& what) {
    for (const auto& [name, err] : ours) {
      if (name == what) return err;
    }
    return -1;
  };
  for (const char* what : {"write", "read and write", "create", "mkdir", "unlink", "rename",
                           "truncate", "chmod", "setxattr", "access"}) {
    EXPECT_EQ(answer_to(what), EROFS) << what;
  }
  // The oracle: the same files, bound read-only.
  const std::string copy = dir_.Join("copy");
  const std::string bound = dir_.Join("bound");
  ASSERT_EQ(RunProcess({"cp", "-r", At("step-1"), copy}).exit_code, 0);
  ASSERT_EQ(mkdir(bound.c_str(), 0755), 0);
  if (mount(copy.c_str(), bound.c_str(), nullptr, MS_BIND, nullptr) != 0) {
    GTEST_SKIP() << "no bind mounts here: " << std::strerror(errno);
  }
  const int remounted =
      mount(nullptr, bound.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr);
  const auto theirs = remounted == 0 ? TryToWrite(bound) : ours;
  umount2(bound.c_str(), MNT_DETACH);
  EXPECT_EQ(ours, theirs);
}

// The kernel refuses for a mount that is read-only; where somebody has made it writable, we do.
TEST_F(MountTest, WritesAreRefusedByTheMountItself) {
  Write("step-1", DefaultTinySpec());
  Mount(store());
  if (mount(nullptr, mount_point().c_str(), nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, nullptr) !=
      0) {
    GTEST_SKIP() << "may not remount: " << std::strerror(errno);
  }
  for (const auto& [what, err] : TryToWrite(At("step-1"))) {
    if (what.starts_with("access")) continue;  // Root may always, says the kernel.
    EXPECT_NE(err, 0) << what;
    EXPECT_NE(err, ENOSYS) << what;
  }
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
}

// No descriptors, locks or inodes, and a path that is none of the kernel's.
TEST_F(MountTest, ReadOnlySourceIsMounted) {
  static auto* plain = new PlainReadsFileSystem("plain://");  // Threads of a mount may outlive it.
  Write("step-1", DefaultTinySpec());
  Mount("plain://" + store(), {}, *plain);
  for (int again = 0; again < 2; ++again) {
    CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
    CheckNpyFiles(*ops_, "step-1", DefaultTinySpec());
    CheckSafetensors(*ops_, "latest", DefaultTinySpec());
  }
  EXPECT_THAT(ops_->Stat(".staging"), HasCode(Code::kNotFound));
  struct statvfs space {};
  EXPECT_EQ(statvfs(mount_point().c_str(), &space), 0);
  EXPECT_EQ(space.f_blocks, 0u);
  EXPECT_EQ(plain->counts().refused, 0u);
  EXPECT_EQ(plain->counts().strays, 0u);
  MountOptions others{.source = "plain://" + store(), .mount_point = dir_.Join("other")};
  others.allow_other = true;
  ASSERT_OK(HostFileSystem().CreateDirectory(others.mount_point));
  const Status refused = MountSession::Start(*plain, others).status();
  EXPECT_THAT(refused, HasCode(Code::kUnsupported));
  EXPECT_THAT(refused.message(), testing::HasSubstr("is not on this host"));
}

TEST_F(MountTest, InvalidMountPointsAreRefused) {
  Write("step-1", DefaultTinySpec());
  const auto try_at = [&](const std::string& path, const std::string& source) {
    MountOptions options;
    options.source = source;
    options.mount_point = path;
    return MountSession::Start(HostFileSystem(), options).status();
  };
  WriteWholeFile(mount_point() + "/occupied", "x");
  EXPECT_THAT(try_at(mount_point(), store()), HasCode(Code::kBusy));
  ASSERT_EQ(unlink((mount_point() + "/occupied").c_str()), 0);
  EXPECT_THAT(try_at(dir_.Join("nothing"), store()), HasCode(Code::kNotFound));
  EXPECT_THAT(try_at(mount_point(), dir_.Join("nothing")), HasCode(Code::kNotFound));
  WriteWholeFile(dir_.Join("file"), "x");
  EXPECT_FALSE(try_at(dir_.Join("file"), store()).ok());
  ASSERT_EQ(mkdir((store() + "/inside").c_str(), 0755), 0);
  EXPECT_THAT(try_at(store() + "/inside", store()), HasCode(Code::kInvalidArgument));
  EXPECT_FALSE(IsMountPoint(mount_point()));
  Mount(store());
  EXPECT_TRUE(IsMountPoint(mount_point()));
  EXPECT_THAT(try_at(mount_point(), store()), HasCode(Code::kBusy));
}

TEST_F(MountTest, StatusReportsHowFilesAreServed) {
  Write("step-1", DefaultTinySpec());
  Mount(store());
  ASSERT_OK_AND_ASSIGN(const std::string text, ops_->ReadAll(".tensormount/status"));
  const auto status = nlohmann::json::parse(text);
  EXPECT_EQ(status["mount_point"], mount_point());
  EXPECT_EQ(status["source"], store());
  EXPECT_TRUE(status["tier"] == "passthrough" || status["tier"] == "daemon");
  EXPECT_TRUE(status["data_files"] == "direct_io" || status["data_files"] == "page_cache");
  EXPECT_EQ(nlohmann::json::parse(session_->StatusJson())["pid"], getpid());
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
  ASSERT_OK_AND_ASSIGN(const std::string stats, ops_->ReadAll(".tensormount/stats"));
  EXPECT_GT(nlohmann::json::parse(stats)["bytes"]["daemon"], 0);
}

// A thread that blocks what it raises itself ends the process, whatever handler there is: one page
// that the disk does not give would end the mount for everybody.
TEST_F(MountTest, ServingThreadsDoNotBlockFaultSignals) {
  Write("step-1", DefaultTinySpec());
  Mount(store());
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
  int serving = 0;
  // A thread that begins blocks all signals for a moment.
  ExpectWithin(seconds(5), [&] {
    serving = 0;
    bool faults_blocked = false;
    for (const auto& [thread, mask] : ThreadMasks()) {
      if (Blocks(mask, SIGTERM)) ++serving;
      for (const int signal : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
        faults_blocked = faults_blocked || Blocks(mask, signal);
      }
    }
    return !faults_blocked;
  });
  EXPECT_GT(serving, 0);
}

// A program that mounts in its own process gets its signals on its own threads.
TEST_F(MountTest, ThreadsOfAMountBlockSignals) {
  Write("step-1", DefaultTinySpec());
  const auto before = ThreadMasks();
  Mount(store());
  CheckTensorFiles(*ops_, "step-1", DefaultTinySpec());
  int started = 0;
  EXPECT_EQ(ThreadsThatTakeSignals(before, &started), "");
  EXPECT_GT(started, 2);
  for (int round = 0; round < 100; ++round) {
    static std::atomic<pid_t> taken_by;
    taken_by = 0;
    std::signal(SIGALRM, [](int) { taken_by = gettid(); });
    kill(getpid(), SIGALRM);
    kill(getpid(), SIGALRM);
    while (taken_by == 0) std::this_thread::yield();
    EXPECT_TRUE(before.contains(std::to_string(taken_by) + " mount_session_t")) << taken_by;
  }
  std::signal(SIGALRM, SIG_DFL);
}

TEST_F(MountTest, ExternalUnmountEndsTheSession) {
  Write("step-1", DefaultTinySpec());
  Mount(store());
  {
    ASSERT_OK_AND_ASSIGN(const auto handle, ops_->Open("step-1/tensors/bias"));
    EXPECT_THAT(Unmount(mount_point(), false, milliseconds(50)), HasCode(Code::kBusy));
    EXPECT_OK(handle->Read(0, 10));
  }
  std::atomic<bool> ended{false};
  std::thread waiter([&] {
    EXPECT_OK(session_->Wait());
    ended = true;
  });
  EXPECT_FALSE(ended);
  EXPECT_OK(Unmount(mount_point(), false, seconds(5)));
  waiter.join();
  EXPECT_TRUE(ended);
  EXPECT_FALSE(IsMountPoint(mount_point()));
  EXPECT_THAT(Unmount(mount_point(), false, seconds(1)), HasCode(Code::kNotFound));
}

TEST_F(MountTest, StopsEvenWhileInUse) {
  Write("step-1", DefaultTinySpec());
  Mount(store());
  ASSERT_OK_AND_ASSIGN(const auto handle, ops_->Open("step-1/tensors/layers.0.w"));
  const auto begun = std::chrono::steady_clock::now();
  session_->Stop();
  EXPECT_OK(session_->Wait());
  session_ = nullptr;
  EXPECT_LT(std::chrono::steady_clock::now() - begun, seconds(5));
  EXPECT_FALSE(IsMountPoint(mount_point()));
  // The bytes, where the kernel reads them itself, or an error; never other bytes.
  const auto late = handle->Read(1000, 10);
  const TinySpec spec = DefaultTinySpec();
  for (const TinyTensor& tensor : spec.tensors) {
    if (tensor.key != "layers.0.w" || !late.ok()) continue;
    EXPECT_EQ(late.value(), TinyBytes(tensor).substr(1000, 10));
  }
}

TEST_F(MountTest, UnmountRefusesOtherFileSystems) {
  const std::string other = dir_.Join("other");
  ASSERT_EQ(mkdir(other.c_str(), 0755), 0);
  if (mount("none", other.c_str(), "tmpfs", 0, nullptr) != 0) GTEST_SKIP() << "may not mount";
  EXPECT_THAT(Unmount(other, true, seconds(1)), HasCode(Code::kInvalidArgument));
  EXPECT_EQ(umount2(other.c_str(), 0), 0);
}

TEST_F(MountTest, DaemonUnmountsOnSignalsAndDeadMountsAreCleanedUp) {
  Write("step-1", DefaultTinySpec());
  const std::string program = BuiltProgram("tensormount");
  if (access(program.c_str(), X_OK) != 0) GTEST_SKIP() << "the command is not built";
  const auto start = [&] {
    auto daemon = std::make_unique<Subprocess>(
        std::vector<std::string>{program, "mount", "-f", store(), mount_point()});
    ExpectWithin(seconds(10), [&] { return IsMountPoint(mount_point()); });
    ExpectWithin(seconds(10), [&] { return access(At("step-1/tensors/bias").c_str(), R_OK) == 0; });
    return daemon;
  };
  for (const int signal : {SIGTERM, SIGINT}) {
    const auto daemon = start();
    daemon->Signal(signal);
    const auto outcome = daemon->WaitFor(seconds(10));
    ASSERT_TRUE(outcome.has_value());
    EXPECT_EQ(outcome->exit_code, 0) << *outcome;
    EXPECT_FALSE(IsMountPoint(mount_point()));
  }
  const auto daemon = start();
  daemon->Signal(SIGKILL);
  ASSERT_TRUE(daemon->WaitFor(seconds(10)).has_value());
  struct stat st;
  // What the kernel remembers of the root lasts for less than a second.
  ExpectWithin(seconds(2), [&] { return stat(mount_point().c_str(), &st) != 0; });
  EXPECT_EQ(errno, ENOTCONN);
  EXPECT_TRUE(IsMountPoint(mount_point()));
  EXPECT_OK(Unmount(mount_point(), false, seconds(5)));
  EXPECT_EQ(stat(mount_point().c_str(), &st), 0);
}

TEST_F(MountTest, DamageIsAnErrorAndALogLine) {
  const TinySpec spec = BigSpec();
  Write("step-1", spec);
  const std::string good = TinyBytes(spec.tensors[0]);
  MountOptions options;
  options.verify = ServeVerify::kAlways;
  Mount(store(), options);
  EXPECT_THAT(ops_->ReadAll("step-1/tensors/big"), IsOkAndHolds(good));
  const std::string data = store() + "/step-1/data";
  ASSERT_OK_AND_ASSIGN(const auto files, HostFileSystem().List(data));
  for (const DirectoryEntry& entry : files) {
    const std::string path = data + "/" + entry.name;
    std::string bytes = ReadWholeFile(path);
    const std::size_t at = bytes.find(good.substr(70000, 64));
    if (at == std::string::npos) continue;
    ASSERT_EQ(chmod(path.c_str(), 0644), 0);
    const int fd = open(path.c_str(), O_WRONLY);
    const char flipped = static_cast<char>(bytes[at] ^ 4);
    ASSERT_EQ(pwrite(fd, &flipped, 1, static_cast<off_t>(at)), 1);
    close(fd);
  }
  ASSERT_OK_AND_ASSIGN(const auto handle, ops_->Open("step-1/tensors/big"));
  EXPECT_EQ(handle->Read(70000, 1).status().ToErrno(), EIO);
  EXPECT_EQ(handle->Read(0, good.size()).status().ToErrno(), EIO);
  EXPECT_EQ(ops_->ReadAll("step-1/npy/big.npy").status().ToErrno(), EIO);
  EXPECT_EQ(ops_->ReadAll("step-1/model.safetensors").status().ToErrno(), EIO);
  EXPECT_THAT(handle->Read(200000, 5000), IsOkAndHolds(good.substr(200000, 5000)));
  ASSERT_OK_AND_ASSIGN(const std::string errors, ops_->ReadAll(".tensormount/errors"));
  const auto line = nlohmann::json::parse(errors.substr(0, errors.find('\n')));
  EXPECT_EQ(line["code"], "DATA_LOSS");
  EXPECT_EQ(line["path"], "step-1/tensors/big");
  EXPECT_THAT(line["message"].get<std::string>(), testing::HasSubstr("tensor big"));
}

TEST_F(MountTest, OtherUsersGetOnlyThePermissionsOfTheStore) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user to be";
  Write("step-1", DefaultTinySpec());
  MountOptions options;
  options.allow_other = true;
  options.source = store();
  options.mount_point = mount_point();
  // The temporary folder is closed to others.
  EXPECT_THAT(MountSession::Start(HostFileSystem(), options), HasCode(Code::kPermissionDenied));
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  struct stat st;
  for (std::string up = dir_.path(); up.size() > 1; up = up.substr(0, up.rfind('/'))) {
    ASSERT_EQ(stat(up.c_str(), &st), 0);
    if ((st.st_mode & 1) == 0) GTEST_SKIP() << up << " is closed to others";
  }
  ASSERT_EQ(chmod((store() + "/step-1").c_str(), 0750), 0);
  Write("step-2", DefaultTinySpec());
  ASSERT_EQ(chmod((store() + "/step-2").c_str(), 0755), 0);
  ASSERT_EQ(chmod((store() + "/step-2/COMMIT").c_str(), 0444), 0);
  ASSERT_EQ(chmod(store().c_str(), 0755), 0);
  // The errno that user 65534 gets, 0 for success.
  const auto as_other = [](const std::string& path) {
    const pid_t pid = fork();
    if (pid == 0) {
      if (setgroups(0, nullptr) != 0 || setgid(65534) != 0 || setuid(65534) != 0) _exit(250);
      const int fd = open(path.c_str(), O_RDONLY);
      char byte;
      _exit(fd < 0 ? errno : read(fd, &byte, 1) == 1 ? 0 : 251);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 252;
  };
  for (const bool allow : {false, true}) {
    options.allow_other = allow;
    Mount(store(), options);
    EXPECT_EQ(as_other(At("step-2/tensors/bias")), allow ? 0 : EACCES);
    EXPECT_EQ(as_other(At("step-1/tensors/bias")), EACCES);
    session_ = nullptr;
  }
}

// Readers on storage that does not answer: everything else is served, and they can be killed.
class StuckStorageTest : public MountTest,
                         public testing::WithParamInterface<MountOptions::Tier> {};
INSTANTIATE_TEST_SUITE_P(Tiers, StuckStorageTest,
                         testing::Values(MountOptions::Tier::kDaemon, MountOptions::Tier::kAuto));

TEST_P(StuckStorageTest, StuckStorageDoesNotBlockOtherCalls) {
  Write("step-1", BigSpec());
  Write("step-2", DefaultTinySpec());
  static std::atomic<bool> stuck;
  static std::atomic<int> held;
  stuck = true;
  held = 0;
  // Never destroyed: a reader may come back while the process ends.
  static auto& fs = *new ObservedFileSystem(HostFileSystem(), [](const FileEvent& event) -> Status {
    const bool data = event.path.find("/data/") != std::string::npos;
    if (!data || (event.op != FileOp::kRead && event.op != FileOp::kOpenRead)) return {};
    if (!stuck) return {};
    ++held;
    const Deadline deadline = Deadline::After(seconds(15));
    while (stuck && !deadline.Passed()) std::this_thread::sleep_for(milliseconds(5));
    return {};
  });
  MountOptions options;
  options.threads = 2;
  options.tier = GetParam();
  options.give_up_after = milliseconds(300);
  Mount(store(), options, fs);
  std::vector<std::unique_ptr<Subprocess>> readers;
  for (int i = 0; i < 14; ++i) {  // More than there are threads.
    readers.push_back(
        std::make_unique<Subprocess>(std::vector<std::string>{"cat", At("step-1/tensors/big")}));
  }
  // Reads hold threads; of the opens of one file that would be passed through only the first does.
  const bool passes = nlohmann::json::parse(session_->StatusJson())["tier"] == "passthrough";
  ExpectWithin(seconds(5), [&] { return held >= (passes ? 1 : 10); });
  EXPECT_OK(ops_->Stat("step-2/tensors/bias"));
  EXPECT_OK(ops_->List("step-2/tensors"));
  EXPECT_OK(ops_->ReadAll("step-2/checkpoint.json"));
  ASSERT_OK_AND_ASSIGN(const std::string status, ops_->ReadAll(".tensormount/status"));
  if (!passes) {
    EXPECT_GE(nlohmann::json::parse(status)["reads_running"], 10);
  }
  if (passes) {
    EXPECT_OK(ops_->Stat("step-2/tensors/embed.weight"));
  }
  for (const auto& reader : readers) reader->Signal(SIGKILL);
  const Deadline deadline = Deadline::After(seconds(6));
  for (const auto& reader : readers) {
    const auto outcome = reader->WaitFor(std::chrono::duration_cast<milliseconds>(deadline.Left()));
    ASSERT_TRUE(outcome.has_value()) << "a reader could not be killed";
    EXPECT_EQ(outcome->signal, SIGKILL);
  }
  stuck = false;
  EXPECT_THAT(ops_->ReadAll("step-1/tensors/big"), IsOkAndHolds(TinyBytes(BigSpec().tensors[0])));
}

}  // namespace
}  // namespace tensormount::fs
