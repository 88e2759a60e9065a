// SPDX-License-Identifier: Apache-2.0
// What programs do to open files without a thought: map, fork, rename, be interrupted, outlive.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "tests/mount/mount_fixture.h"
#include "tests/support/fd.h"
#include "tests/support/observed_file_system.h"

namespace tensormount::fs {
namespace {

constexpr char kOneTensor[] = R"({"tensors": {"b": {"dtype": "u8", "shape": [3]}}})";

class HabitsTest : public MountTest {
 protected:
  void SetUp() override {
    MountTest::SetUp();
    ASSERT_OK(Store::OpenOrCreate(HostFileSystem(), store()));
  }
  std::string Object(const std::string& name) const { return At(".staging/s/objects/" + name); }
  void BeginStaging() {
    ASSERT_EQ(mkdir(At(".staging/s").c_str(), 0755), 0) << std::strerror(errno);
    WriteWholeFile(At(".staging/s/schema.json"), kOneTensor);
    WriteWholeFile(At(".staging/s/tensors/b"), "abc");
  }
  // 0, or what rename(2) answered.
  int PublishErrno() { return rename(At(".staging/s").c_str(), At("s").c_str()) == 0 ? 0 : errno; }
  std::string Published(const std::string& name) { return ReadWholeFile(At("s/objects/" + name)); }
};

constexpr std::size_t kMapped = 300'000;  // Several requests, and no whole number of pages.
constexpr int kNoMapping = 77;            // What children return where the kernel refuses.

// What `publish` answers once the kernel has let go of what was unmapped, a moment later.
int OnceLetGo(const std::function<int()>& publish) {
  const Deadline deadline = Deadline::After(std::chrono::seconds(5));
  int error = EBUSY;
  while (error == EBUSY && !deadline.Passed()) error = publish();
  return error;
}

// As np.memmap(mode="w+") does: the file is closed before the first page is touched.
void* MapAndClose(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0 || pwrite(fd, "", 1, kMapped - 1) != 1) _exit(1);
  void* const map = mmap(nullptr, kMapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) _exit(errno == ENODEV ? kNoMapping : 2);
  if (close(fd) != 0) _exit(3);
  return map;
}

TEST_F(HabitsTest, PagesOfAMappedObjectAreSaved) {
  Mount(store());
  BeginStaging();
  const int came = ChildStatus([&] {
    void* const map = MapAndClose(Object("x"));
    std::memset(map, 7, kMapped);
    // Without a sync: what a mapping has changed is there once it is unmapped. The kernel lets go
    // of the file a moment later, until when it counts as open.
    return munmap(map, kMapped) == 0 ? OnceLetGo([&] { return PublishErrno(); }) : 4;
  });
  if (came == kNoMapping) GTEST_SKIP() << "this kernel maps no such files";
  ASSERT_EQ(came, 0);
  EXPECT_TRUE(Published("x") == std::string(kMapped, 7));
}

// What was not written back yet is in the kernel alone: nobody may publish without it.
TEST_F(HabitsTest, MappedObjectCountsAsOpenForWriting) {
  Mount(store());
  BeginStaging();
  const int came = ChildStatus([&] {
    void* const map = MapAndClose(Object("x"));
    std::memset(map, 7, kMapped);
    if (PublishErrno() != EBUSY) return 4;
    if (msync(map, kMapped, MS_SYNC) != 0) return 5;
    static_cast<char*>(map)[kMapped - 1] = 8;
    munmap(map, kMapped);
    return OnceLetGo([&] { return PublishErrno(); });
  });
  if (came == kNoMapping) GTEST_SKIP() << "this kernel maps no such files";
  ASSERT_EQ(came, 0);
  EXPECT_TRUE(Published("x") == std::string(kMapped - 1, 7) + '\x08');
}

// The other mount knows of the pages by the lease alone.
TEST_F(HabitsTest, OtherMountDoesNotPublishWithoutMappedPages) {
  Mount(store());
  BeginStaging();
  const std::string second = dir_.Join("mnt2");
  ASSERT_EQ(mkdir(second.c_str(), 0755), 0);
  MountOptions options;
  options.source = store();
  options.mount_point = second;
  ASSERT_OK_AND_ASSIGN(const auto other, MountSession::Start(HostFileSystem(), options));
  const int came = ChildStatus([&] {
    void* const map = MapAndClose(Object("x"));
    std::memset(map, 7, kMapped);
    const auto publish = [&] {
      return rename((second + "/.staging/s").c_str(), (second + "/s").c_str()) == 0 ? 0 : errno;
    };
    if (publish() != EBUSY) return 4;
    munmap(map, kMapped);
    return OnceLetGo(publish);
  });
  if (came == kNoMapping) GTEST_SKIP() << "this kernel maps no such files";
  ASSERT_EQ(came, 0);
  EXPECT_TRUE(ReadWholeFile(second + "/s/objects/x") == std::string(kMapped, 7));
}

TEST_F(HabitsTest, AppendInterruptedByASignalIsDoneOnce) {
  static std::atomic<bool> slow;
  slow = false;
  // Longer than the watchdog waits for, several times over.
  static ObservedFileSystem fs(HostFileSystem(), [](const FileEvent& event) -> Status {
    if (slow && event.op == FileOp::kWrite && event.path.find("/data/") != std::string::npos) {
      std::this_thread::sleep_for(std::chrono::milliseconds(280));
    }
    return {};
  });
  MountOptions options;
  options.give_up_after = std::chrono::milliseconds(20);
  Mount(store(), options, fs);
  BeginStaging();
  slow = true;
  ExpectInChild([&] {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &action, nullptr);
    const int fd = open(Object("log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return false;
    const itimerval soon{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = 5000}};
    setitimer(ITIMER_REAL, &soon, nullptr);
    // As Python's os.write and most programs do.
    ssize_t n = -1;
    do {
      n = write(fd, "hello\n", 6);
    } while (n < 0 && errno == EINTR);
    return n == 6 && close(fd) == 0;
  });
  slow = false;
  ASSERT_EQ(PublishErrno(), 0);
  EXPECT_EQ(Published("log"), "hello\n");
}

// Without room on the disk: nothing is copied, and nothing is cut off before it is certain.
TEST_F(HabitsTest, RenameMovesAnObject) {
  static std::atomic<bool> full;
  full = false;
  static ObservedFileSystem fs(HostFileSystem(), [](const FileEvent& event) -> Status {
    if (full && event.op == FileOp::kWrite && event.path.find("/data/") != std::string::npos) {
      return Status::FromErrno(ENOSPC, "write", event.path);
    }
    return {};
  });
  Mount(store(), {}, fs);
  BeginStaging();
  const std::string bytes(200'000, 'n');
  WriteWholeFile(Object("state"), std::string(1000, 'o'));
  const Fd old(open(Object("state").c_str(), O_RDONLY | O_CLOEXEC));
  const Fd fd(open(Object("state.tmp").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_GE(fd.fd, 0);
  ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  full = true;
  EXPECT_EQ(rename(Object("state.tmp").c_str(), Object("state").c_str()), 0)
      << std::strerror(errno);
  EXPECT_TRUE(ReadWholeFile(Object("state")) == bytes);
  EXPECT_EQ(access(Object("state.tmp").c_str(), F_OK), -1);
  full = false;
  // Whoever had the replaced one open reads on; what was open follows.
  char first = 0;
  EXPECT_EQ(pread(old, &first, 1, 0), 1);
  EXPECT_EQ(first, 'o');
  struct stat st;
  ASSERT_EQ(fstat(fd, &st), 0) << std::strerror(errno);
  EXPECT_EQ(st.st_size, static_cast<off_t>(bytes.size()));
  EXPECT_EQ(pwrite(fd, "end", 3, static_cast<off_t>(bytes.size())), 3);
  EXPECT_EQ(PublishErrno(), EBUSY);
  EXPECT_EQ(fsync(fd), 0);
  EXPECT_EQ(rename(Object("state").c_str(), Object("renamed").c_str()), 0) << std::strerror(errno);
  EXPECT_EQ(close(dup(fd)), 0);  // As close(2) of this process.
  ASSERT_EQ(PublishErrno(), 0);
  EXPECT_TRUE(Published("renamed") == bytes + "end");
  EXPECT_EQ(access(At("s/objects/state").c_str(), F_OK), -1);
}

TEST_F(HabitsTest, ExitOfAForkedChildIsNotAClose) {
  Mount(store());
  BeginStaging();
  const Fd fd(open(Object("opt").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_GE(fd.fd, 0);
  ASSERT_EQ(write(fd, "first half ", 11), 11);
  EXPECT_EQ(ChildStatus([] { return 0; }), 0);
  EXPECT_EQ(RunProcess({"true"}).exit_code, 0);  // Closed at its exec.
  EXPECT_EQ(PublishErrno(), EBUSY);
  EXPECT_EQ(write(fd, "second half", 11), 11);
  EXPECT_EQ(close(dup(fd)), 0);
  ASSERT_EQ(PublishErrno(), 0);
  EXPECT_EQ(Published("opt"), "first half second half");
}

// Before anything was written: whoever opened it is known all the same.
TEST_F(HabitsTest, ExitOfAForkBeforeTheFirstWriteIsNotAClose) {
  Mount(store());
  BeginStaging();
  const Fd fd(open(Object("opt").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_GE(fd.fd, 0);
  EXPECT_EQ(ChildStatus([] { return 0; }), 0);
  EXPECT_EQ(PublishErrno(), EBUSY);
  EXPECT_EQ(write(fd, "all", 3), 3);
  // Closed by another thread than the one that opened it.
  std::thread([&] { EXPECT_EQ(close(dup(fd)), 0); }).join();
  ASSERT_EQ(PublishErrno(), 0);
  EXPECT_EQ(Published("opt"), "all");
}

TEST_F(HabitsTest, ChildCanWriteToAFileOpenedByItsParent) {
  Mount(store());
  BeginStaging();
  int ready[2];
  int go[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(go), 0);
  int fd = open(Object("log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(write(fd, "parent ", 7), 7);
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    if (write(fd, "child ", 6) != 6 || write(ready[1], "r", 1) != 1) _exit(1);
    if (read(go[0], &byte, 1) != 1 || write(fd, "on", 2) != 2) _exit(2);
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  ASSERT_EQ(close(fd), 0);
  // The parent has closed it, the child has written since it was opened and has it open.
  EXPECT_EQ(PublishErrno(), EBUSY);
  ASSERT_EQ(write(go[1], "g", 1), 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  // At once: its exit closed it.
  ASSERT_EQ(PublishErrno(), 0);
  EXPECT_EQ(Published("log"), "parent child on");
  for (const int end : {ready[0], ready[1], go[0], go[1]}) close(end);
}

// Every tier, and a view that is made when it is asked for.
TEST_F(HabitsTest, OpenFilesOfARemovedCheckpointStillRead) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors.push_back(
      {.key = "big", .dtype = DType::kU8, .shape = {500000}, .seed = 5, .tensor_file = true});
  Write("step-1", spec);
  Mount(store());
  std::vector<std::unique_ptr<Fd>> files;
  const std::vector<std::string> names = {
      "tensors/big",     "tensors/layers.0.w", "npy/big.npy",        "slices/big[5:200000]",
      "checkpoint.json", "model.safetensors",  "zarr/big/zarr.json", "extents/big.json",
  };
  std::vector<off_t> sizes;
  for (const std::string& name : names) {
    files.push_back(std::make_unique<Fd>(open(At("step-1/" + name).c_str(), O_RDONLY | O_CLOEXEC)));
    ASSERT_GE(files.back()->fd, 0) << name;
    struct stat st;
    ASSERT_EQ(fstat(*files.back(), &st), 0);
    sizes.push_back(st.st_size);
  }
  const Fd folder(open(At("step-1/tensors").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_OK_AND_ASSIGN(const Store opened, Store::Open(HostFileSystem(), store()));
  ASSERT_OK(opened.Remove("step-1"));
  ExpectWithin(std::chrono::milliseconds(2000),
               [&] { return ops_->Stat("step-1").status().ToErrno() == ENOENT; });
  for (std::size_t i = 0; i < names.size(); ++i) {
    char byte = 0;
    ASSERT_EQ(pread(*files[i], &byte, 1, 0), 1) << names[i];  // The kernel then asks for the time.
    struct stat st;
    EXPECT_EQ(fstat(*files[i], &st), 0) << names[i] << ": " << std::strerror(errno);
    EXPECT_EQ(st.st_size, sizes[i]) << names[i];
    char key[64];
    if (names[i].starts_with("tensors/")) {
      EXPECT_GT(fgetxattr(*files[i], "user.tensormount.key", key, sizeof key), 0) << names[i];
    }
    const std::string self = "/proc/self/fd/" + std::to_string(files[i]->fd);
    const Fd again(open(self.c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_GE(again.fd, 0) << names[i] << ": " << std::strerror(errno);
    EXPECT_EQ(pread(again, &byte, 1, st.st_size - 1), 1) << names[i];
  }
  // Folders are no open files: they are gone.
  EXPECT_EQ(openat(folder, "bias", O_RDONLY | O_CLOEXEC), -1);
  files.clear();
  // And gc waits for nobody any more.
  ExpectWithin(std::chrono::milliseconds(2000), [&] {
    EXPECT_OK(opened.Gc({.grace = std::chrono::seconds(0)}));
    return HostFileSystem().List(store() + "/.trash").value().empty();
  });
}

}  // namespace
}  // namespace tensormount::fs
