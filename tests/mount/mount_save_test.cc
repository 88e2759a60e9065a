// SPDX-License-Identifier: Apache-2.0
// Saving through real mounts, by system calls and by the programs that people use.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "tensormount/checkpoint.h"

#include "tests/mount/mount_fixture.h"

namespace tensormount::fs {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kRow = 1024;
constexpr std::size_t kRows = 256;  // Of u8: large enough for several requests of each writer.
constexpr char kSchema[] =
    R"({"tensors": {"w": {"dtype": "u8", "shape": [256, 1024]}, "b": {"dtype": "f32", "shape": [25]}},
        "writers": 4})";

std::string Cells(std::size_t n, unsigned seed) {
  std::string bytes(n, '\0');
  for (std::size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    bytes[i] = static_cast<char>(seed >> 24);
  }
  return bytes;
}

int ErrnoOf(long result) { return result < 0 ? errno : 0; }

int OpenErrno(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) return errno;
  close(fd);
  return 0;
}

// What write and then close answer.
int PutErrno(const std::string& path, std::string_view bytes,
             int flags = O_WRONLY | O_CREAT | O_TRUNC) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) return errno;
  int error = 0;
  for (std::size_t at = 0; at < bytes.size() && error == 0;) {
    const ssize_t n = write(fd, bytes.data() + at, bytes.size() - at);
    if (n < 0)
      error = errno;
    else
      at += static_cast<std::size_t>(n);
  }
  if (close(fd) != 0 && error == 0) error = errno;
  return error;
}

class SaveTest : public MountTest {
 protected:
  void SetUp() override {
    MountTest::SetUp();
    ASSERT_OK(Store::OpenOrCreate(HostFileSystem(), store()));
    ASSERT_OK(HostFileSystem().CreateDirectory(second()));
    w_ = Cells(kRow * kRows, 1);
    b_ = Cells(100, 2);
    WriteWholeFile(dir_.Join("w.bin"), w_);
    WriteWholeFile(dir_.Join("b.bin"), b_);
  }
  void TearDown() override {
    for (auto& daemon : daemons_) daemon->SignalGroup(SIGKILL);
    daemons_.clear();
    other_ = nullptr;
    if (IsMountPoint(second())) (void)Unmount(second(), true, seconds(5));
    if (session_ == nullptr && IsMountPoint(mount_point())) {
      (void)Unmount(mount_point(), true, seconds(5));
    }
    MountTest::TearDown();
  }
  std::string second() const { return dir_.Join("mnt2"); }
  std::string Staged(const std::string& path) const { return At(".staging/" + path); }

  void MountSecond() {
    MountOptions options;
    options.source = store();
    options.mount_point = second();
    auto session = MountSession::Start(HostFileSystem(), options);
    ASSERT_OK(session);
    other_ = std::move(session).value();
  }
  // A daemon of its own, which can be killed.
  Subprocess& Daemon(const std::string& at) {
    daemons_.push_back(std::make_unique<Subprocess>(
        std::vector<std::string>{BuiltProgram("tensormount"), "mount", "-f", store(), at}));
    const Deadline deadline = Deadline::After(seconds(20));
    while (!IsMountPoint(at) && !deadline.Passed()) std::this_thread::sleep_for(milliseconds(5));
    EXPECT_TRUE(IsMountPoint(at)) << daemons_.back()->err();
    return *daemons_.back();
  }
  // With MNT, MNT2 and the files w.bin and b.bin.
  ProcessOutcome Shell(const std::string& script) {
    ProcessOptions options;
    options.environment = {{"MNT", mount_point()}, {"MNT2", second()}, {"LC_ALL", "C"}};
    options.working_folder = dir_.path();
    return RunProcess({"bash", "-euo", "pipefail", "-c", script}, options);
  }
  void ExpectShell(const std::string& script) {
    const ProcessOutcome outcome = Shell(script);
    EXPECT_EQ(outcome.exit_code, 0) << script << "\n" << outcome;
  }
  void Begin(const std::string& name, const std::string& schema = kSchema) {
    ASSERT_EQ(ErrnoOf(mkdir(Staged(name).c_str(), 0755)), 0);
    ASSERT_EQ(PutErrno(Staged(name + "/schema.json"), schema), 0);
  }
  void ExpectPublished(const std::string& name) {
    for (const std::string& root : {mount_point(), second()}) {
      if (!IsMountPoint(root)) continue;
      ExpectWithin(seconds(2), [&] { return access((root + "/" + name).c_str(), F_OK) == 0; });
      EXPECT_TRUE(ReadWholeFile(root + "/" + name + "/tensors/w") == w_) << root;
      EXPECT_TRUE(ReadWholeFile(root + "/" + name + "/tensors/b") == b_) << root;
    }
    EXPECT_OK(Checkpoint::Open(store() + "/" + name));
    const ProcessOutcome verified =
        RunProcess({BuiltProgram("tensormount"), "verify", store() + "/" + name});
    EXPECT_EQ(verified.exit_code, 0) << verified;
  }

  std::string w_;
  std::string b_;
  std::unique_ptr<MountSession> other_;
  std::vector<std::unique_ptr<Subprocess>> daemons_;
};

TEST_F(SaveTest, DocumentedShellSessionSaves) {
  Mount(store());
  ExpectShell(R"sh(
    S=$MNT/.staging/step-1
    mkdir $S
    ! mkdir $S 2>/dev/null
    cat > $S/schema.json <<'EOF'
    {"tensors": {"w": {"dtype": "u8", "shape": [256, 1024]}, "b": {"dtype": "f32", "shape": [25]}}, "writers": 4}
EOF
    for r in 0 1 2; do
      ( head -c $(((r+1)*65536)) w.bin | tail -c 65536 > "$S/slices/w[$((r*64)):$((r*64+64)),:]"
        touch $S/done/$r ) &
    done
    wait
    dd if=w.bin of=$S/tensors/w bs=64K skip=3 seek=3 conv=notrunc status=none
    cp b.bin $S/tensors/b
    ! mv -T $S $MNT/step-1 2>err
    grep -q 'Resource temporarily unavailable' err
    touch $S/done/3
    mv -T $S $MNT/step-1
    cmp w.bin $MNT/step-1/tensors/w
    cmp b.bin $MNT/latest/tensors/b
    ! ls $S 2>/dev/null
  )sh");
  ExpectPublished("step-1");
}

TEST_F(SaveTest, SystemCallsReturnTheDocumentedErrnos) {
  Mount(store());
  const auto name = [this](const std::string& path) { return Staged("s/" + path); };
  // In the root.
  EXPECT_EQ(ErrnoOf(mkdir(At("x").c_str(), 0755)), EPERM);
  EXPECT_EQ(OpenErrno(At("x"), O_WRONLY | O_CREAT), EPERM);
  EXPECT_EQ(ErrnoOf(symlink("x", At("x").c_str())), EPERM);
  EXPECT_EQ(ErrnoOf(rmdir(At(".staging").c_str())), EPERM);
  Begin("s");
  // In the staging.
  EXPECT_EQ(ErrnoOf(mkdir(name("").c_str(), 0755)), EEXIST);
  EXPECT_EQ(ErrnoOf(mkdir(name("tensors/x").c_str(), 0755)), EPERM);
  EXPECT_EQ(OpenErrno(name("x"), O_WRONLY | O_CREAT), EPERM);
  EXPECT_EQ(OpenErrno(name("tensors/x"), O_WRONLY | O_CREAT), ENOENT);
  EXPECT_EQ(OpenErrno(name("slices/w[0:257]"), O_WRONLY | O_CREAT), ENOENT);
  EXPECT_EQ(OpenErrno(name("slices/w[0:256"), O_WRONLY | O_CREAT), ENOENT);
  EXPECT_EQ(OpenErrno(name("tensors"), O_WRONLY), EISDIR);
  EXPECT_EQ(OpenErrno(name("schema.json"), O_WRONLY | O_CREAT | O_EXCL), EEXIST);
  EXPECT_EQ(PutErrno(name("schema.json"), "{"), EINVAL);
  EXPECT_EQ(PutErrno(name("schema.json"), R"({"tensors": {"w": {"dtype": "u8", "shape": [2]}}})"),
            EEXIST);
  EXPECT_EQ(PutErrno(name("common.json"), "[1]"), EINVAL);
  EXPECT_NE(ReadWholeFile(At(".tensormount/errors")).find("tensor w"), std::string::npos);
  EXPECT_EQ(ErrnoOf(symlink("x", name("x").c_str())), EPERM);
  EXPECT_EQ(ErrnoOf(link(name("tensors/w").c_str(), name("x").c_str())), EPERM);
  EXPECT_EQ(ErrnoOf(mkfifo(name("objects/x").c_str(), 0600)), EPERM);
  EXPECT_EQ(ErrnoOf(setxattr(name("tensors/w").c_str(), "user.x", "y", 1, 0)), EOPNOTSUPP);
  EXPECT_EQ(ErrnoOf(chmod(name("tensors/w").c_str(), 0600)), 0);
  EXPECT_EQ(ErrnoOf(utimensat(AT_FDCWD, name("tensors/w").c_str(), nullptr, 0)), 0);
  EXPECT_EQ(ErrnoOf(rename(name("tensors/w").c_str(), name("tensors/v").c_str())), EPERM);
  EXPECT_EQ(ErrnoOf(rename(Staged("s").c_str(), Staged("t").c_str())), EPERM);
  EXPECT_EQ(ErrnoOf(rename(name("tensors").c_str(), At("step-1").c_str())), EPERM);
  EXPECT_EQ(ErrnoOf(rename(Staged("s").c_str(), At("step-1").c_str())), EAGAIN);
  EXPECT_EQ(ErrnoOf(rename(Staged("s").c_str(), At(".x").c_str())), EPERM);
  EXPECT_EQ(ErrnoOf(rmdir(Staged("s").c_str())), ENOTEMPTY);
  EXPECT_EQ(OpenErrno(name("done/7"), O_WRONLY | O_CREAT), EINVAL);
  struct statfs room;
  ASSERT_EQ(ErrnoOf(statfs(name("tensors/w").c_str(), &room)), 0);
  EXPECT_GT(room.f_bavail, 0u);

  const int fd = open(name("tensors/w").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(pwrite(fd, w_.data() + 100, 1000, 100), 1000);
  EXPECT_EQ(lseek(fd, 0, SEEK_DATA), 100);
  EXPECT_EQ(lseek(fd, 100, SEEK_HOLE), 1100);
  struct stat st;
  ASSERT_EQ(fstat(fd, &st), 0);
  EXPECT_EQ(st.st_size, static_cast<off_t>(w_.size()));
  EXPECT_EQ(st.st_blocks, 2);  // 1,000 bytes.
  char back[1000];
  EXPECT_EQ(pread(fd, back, 1000, 100), 1000);
  EXPECT_EQ(std::memcmp(back, w_.data() + 100, 1000), 0);
  EXPECT_EQ(ErrnoOf(pread(fd, back, 10, 0)), ENODATA);
  EXPECT_EQ(ErrnoOf(pwrite(fd, back, 10, static_cast<off_t>(w_.size()) - 5)), EFBIG);
  EXPECT_EQ(ErrnoOf(ftruncate(fd, static_cast<off_t>(w_.size()) + 1)), EFBIG);
  EXPECT_EQ(ErrnoOf(ftruncate(fd, static_cast<off_t>(w_.size()))), 0);
  EXPECT_EQ(ErrnoOf(fallocate(fd, 0, 0, static_cast<off_t>(w_.size()))), 0);
  EXPECT_EQ(ErrnoOf(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096)),
            EOPNOTSUPP);
  EXPECT_EQ(lseek(fd, 0, SEEK_DATA), 100);  // None of them was a write.
  EXPECT_EQ(ErrnoOf(rename(Staged("s").c_str(), At("s").c_str())), EBUSY);
  EXPECT_EQ(ErrnoOf(fsync(fd)), 0);
  close(fd);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(OpenErrno(name("done/" + std::to_string(r)), O_WRONLY | O_CREAT), 0);
  }
  EXPECT_EQ(ErrnoOf(rename(Staged("s").c_str(), At("s").c_str())), EIO);
  const std::string report = ReadWholeFile(name("report.txt"));
  EXPECT_NE(report.find("tensor b [:]"), std::string::npos) << report;
  EXPECT_TRUE(nlohmann::json::parse(ReadWholeFile(name("report.json"))).is_object());

  // What is published refuses as ever, other than the root.
  EXPECT_EQ(PutErrno(name("tensors/w"), w_), 0);
  EXPECT_EQ(PutErrno(name("tensors/b"), b_), 0);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(OpenErrno(name("done/" + std::to_string(r)), O_WRONLY), 0);
  }
  const int late = open(name("tensors/b").c_str(), O_WRONLY | O_CLOEXEC);
  const int twin = dup(late);
  close(twin);  // Flushed: counts as closed, until it writes again.
  ASSERT_EQ(ErrnoOf(rename(Staged("s").c_str(), At("s").c_str())), 0);
  EXPECT_EQ(ErrnoOf(pwrite(late, "x", 1, 0)), ESTALE);
  close(late);
  ExpectPublished("s");
  EXPECT_EQ(OpenErrno(At("s/tensors/w"), O_WRONLY), EROFS);
  EXPECT_EQ(OpenErrno(At("s/x"), O_WRONLY | O_CREAT), EROFS);
  EXPECT_EQ(ErrnoOf(rename(At("s").c_str(), At("t").c_str())), EROFS);
  EXPECT_EQ(ErrnoOf(rmdir(At("s").c_str())), EROFS);
  EXPECT_EQ(ErrnoOf(chmod(At("s/tensors/w").c_str(), 0600)), EROFS);
  EXPECT_EQ(ErrnoOf(unlink(At("latest").c_str())), EROFS);
  EXPECT_EQ(ErrnoOf(mkdir(Staged("s").c_str(), 0755)), EEXIST);  // The name is taken.
}

TEST_F(SaveTest, SharedMappingsAreCondemned) {
  Mount(store());
  Begin("s");
  ASSERT_EQ(PutErrno(Staged("s/tensors/w"), w_, O_WRONLY), 0);
  constexpr int kRefused = 77;
  const int came = ChildStatus([&] {
    const int fd = open(Staged("s/tensors/w").c_str(), O_RDWR | O_CLOEXEC);
    void* map = mmap(nullptr, w_.size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) return errno == ENODEV ? kRefused : 1;
    static_cast<char*>(map)[10] ^= 1;
    if (msync(map, w_.size(), MS_SYNC) == 0) return 2;
    munmap(map, w_.size());
    return close(fd) == 0 ? 3 : 0;
  });
  if (came == kRefused) return;
  ASSERT_EQ(came, 0);
  EXPECT_EQ(PutErrno(Staged("s/tensors/b"), b_), 0);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(OpenErrno(Staged("s/done/" + std::to_string(r)), O_WRONLY | O_CREAT), 0);
  }
  EXPECT_EQ(ErrnoOf(rename(Staged("s").c_str(), At("s").c_str())), EIO);
}

TEST_F(SaveTest, OrdinaryProgramsCanSave) {
  Mount(store());
  ExpectShell(R"sh(
    S=$MNT/.staging/a
    mkdir -p $S
    echo '{"tensors": {"w": {"dtype": "u8", "shape": [256, 1024]}, "b": {"dtype": "f32", "shape": [25]}}}' > $S/schema.json
    # By pieces of odd sizes, from several places, over itself, through both spellings.
    dd if=w.bin of=$S/tensors/w bs=1000 conv=notrunc status=none
    head -c 40960 w.bin | tail -c +20481 | cp /dev/stdin "$S/slices/w@20:40"
    dd if=w.bin of="$S/slices/w[0:16,:]" bs=4096 count=4 oflag=dsync status=none
    python3 - "$S" <<'EOF'
import array, os, sys
data = open("b.bin", "rb").read()
a = array.array("f"); a.frombytes(data)
with open(sys.argv[1] + "/tensors/b", "wb") as f: a.tofile(f)
with open(sys.argv[1] + "/tensors/b", "r+b") as f:
    f.seek(40); f.write(data[40:]); f.flush(); os.fsync(f.fileno())
os.makedirs(sys.argv[1] + "/objects/conf/x")
with open(sys.argv[1] + "/objects/conf/x/y.json", "w") as f: f.write("{}")
with open(sys.argv[1] + "/objects/conf/x/y.json", "a") as f: f.write("\n")
EOF
    tar cf o.tar b.bin && tar xf o.tar -C $S/objects
    cp -p w.bin $S/objects/w.bin
    echo '{"step": 3}' > $S/common.json
    mv $S $MNT
    cmp w.bin $MNT/a/tensors/w && cmp b.bin $MNT/a/tensors/b && cmp w.bin $MNT/a/objects/w.bin
    cmp b.bin $MNT/a/objects/b.bin
    [ "$(cat $MNT/a/objects/conf/x/y.json)" = "{}" ]
    grep -q '"step"' $MNT/a/common.json
  )sh");
  ExpectPublished("a");
  // Onto a name that is taken: mv -T says so; plain mv would move it into the checkpoint.
  ExpectShell(R"sh(
    S=$MNT/.staging/b
    mkdir $S && echo '{"tensors": {"b": {"dtype": "f32", "shape": [25]}}}' > $S/schema.json
    cp --sparse=always b.bin $S/tensors/b
    if mv -T $S $MNT/a 2>err; then exit 1; fi
    if mv $S $MNT/a 2>>err; then exit 1; fi
    if mv -T $S $MNT/latest 2>>err; then exit 1; fi
    mv -T $S $MNT/b
    cmp b.bin $MNT/b/tensors/b
  )sh");
  if (std::system("command -v rsync >/dev/null 2>&1") == 0) {
    ExpectShell(R"sh(
      S=$MNT/.staging/c
      mkdir $S && echo '{"tensors": {"w": {"dtype": "u8", "shape": [256, 1024]}, "b": {"dtype": "f32", "shape": [25]}}}' > $S/schema.json
      rsync -a --inplace $MNT/a/tensors/ $S/tensors/
      rsync -a $MNT/a/objects/conf $S/objects/
      mv -T $S $MNT/c
    )sh");
    ExpectPublished("c");
  }
}

TEST_F(SaveTest, RemovingAStagingRemovesItsContents) {
  Mount(store());
  ExpectShell(R"sh(
    S=$MNT/.staging/a
    mkdir $S && echo '{"tensors": {"x/w": {"dtype": "u8", "shape": [256, 1024]}, "b": {"dtype": "f32", "shape": [25]}}}' > $S/schema.json
    cp w.bin $S/tensors/x/w; cp b.bin "$S/slices/b[:]"; mkdir $S/objects/d; cp b.bin $S/objects/d/o; touch $S/done/0
    ! rmdir $S 2>/dev/null
    rm -r $S
    ! ls $S 2>/dev/null
    [ -z "$(ls $MNT/.staging)" ]
    mkdir $S && rmdir $S
  )sh");
}

// The writer of rows [64 r, 64 r + 64) of w: in pieces; says "half" in the middle and then waits,
// where `stop` is set.
std::vector<std::string> Writer(const std::string& staging, int r, bool stop) {
  return {"python3", "-c", R"sh(
import sys, time
root, r, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
data = open("w.bin", "rb").read()[r * 65536:(r + 1) * 65536]
with open(f"{root}/slices/w[{64 * r}:{64 * r + 64}]", "wb", buffering=0) as f:
    for at in range(0, 65536, 4096):
        if stop and at == 32768:
            print("half", flush=True)
            time.sleep(600)
        f.write(data[at:at + 4096])
open(f"{root}/done/{r}", "w").close()
)sh", staging, std::to_string(r), stop ? "1" : "0"};
}

TEST_F(SaveTest, SaveFromTwoMountsSurvivesAKilledWriter) {
  Daemon(mount_point());
  Daemon(second());
  Begin("step-1");
  ASSERT_EQ(PutErrno(Staged("step-1/tensors/b"), b_), 0);
  ProcessOptions options;
  options.working_folder = dir_.path();
  std::vector<std::unique_ptr<Subprocess>> writers;
  for (int r = 0; r < 4; ++r) {
    const std::string root = (r % 2 == 0 ? mount_point() : second()) + "/.staging/step-1";
    writers.push_back(std::make_unique<Subprocess>(Writer(root, r, r == 3), options));
  }
  for (std::size_t r = 0; r < 3; ++r) {
    const ProcessOutcome outcome = writers[r]->Wait();
    EXPECT_EQ(outcome.exit_code, 0) << outcome;
  }
  ExpectWithin(seconds(20), [&] { return writers[3]->out() == "half\n"; });
  // While it has its file open nobody publishes, on either mount.
  EXPECT_EQ(ErrnoOf(rename(Staged("step-1").c_str(), At("step-1").c_str())), EBUSY);
  writers[3]->Signal(SIGKILL);
  EXPECT_EQ(writers[3]->Wait().signal, SIGKILL);
  ExpectWithin(seconds(5), [&] {
    return ErrnoOf(rename(Staged("step-1").c_str(), At("step-1").c_str())) == EAGAIN;
  });
  ASSERT_EQ(OpenErrno(Staged("step-1/done/3"), O_WRONLY | O_CREAT), 0);
  const ProcessOutcome failed = Shell("mv -T $MNT/.staging/step-1 $MNT/step-1");
  EXPECT_NE(failed.exit_code, 0);
  EXPECT_NE(failed.err.find("Input/output error"), std::string::npos) << failed;
  const std::string report = ReadWholeFile(Staged("step-1/report.txt"));
  EXPECT_NE(report.find("tensor w [224:256, :]"), std::string::npos) << report;
  EXPECT_EQ(access(At("step-1").c_str(), F_OK), -1);
  // Started again, it publishes.
  const ProcessOutcome again = RunProcess(Writer(second() + "/.staging/step-1", 3, false), options);
  EXPECT_EQ(again.exit_code, 0) << again;
  ExpectShell("mv -T $MNT2/.staging/step-1 $MNT2/step-1");
  ExpectPublished("step-1");
}

TEST_F(SaveTest, KilledDaemonLosesNoSyncedBytes) {
  Subprocess& daemon = Daemon(mount_point());
  Begin("step-1");
  ASSERT_EQ(PutErrno(Staged("step-1/tensors/b"), b_), 0);
  const int fd =
      open(Staged("step-1/slices/w[0:128]").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(pwrite(fd, w_.data(), 128 * kRow, 0), static_cast<ssize_t>(128 * kRow));
  ASSERT_EQ(fsync(fd), 0);
  daemon.Signal(SIGKILL);
  (void)daemon.Wait();
  EXPECT_NE(ErrnoOf(pwrite(fd, w_.data(), 10, 0)), 0);
  close(fd);
  ASSERT_OK(Unmount(mount_point(), true, seconds(5)));

  // SIGTERM makes durable what nobody has synced yet, although the file is open.
  Subprocess& next = Daemon(mount_point());
  const int open_file = open(Staged("step-1/tensors/w").c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(open_file, 0);
  ASSERT_EQ(pwrite(open_file, w_.data() + 128 * kRow, 64 * kRow, 128 * kRow),
            static_cast<ssize_t>(64 * kRow));
  next.Signal(SIGTERM);
  EXPECT_EQ(next.Wait().exit_code, 0);
  close(open_file);
  EXPECT_FALSE(IsMountPoint(mount_point()));

  Mount(store());
  ASSERT_EQ(PutErrno(Staged("step-1/slices/w[192:256]"), std::string_view(w_).substr(192 * kRow)),
            0);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(OpenErrno(Staged("step-1/done/" + std::to_string(r)), O_WRONLY | O_CREAT), 0);
  }
  ASSERT_EQ(ErrnoOf(rename(Staged("step-1").c_str(), At("step-1").c_str())), 0)
      << ReadWholeFile(Staged("step-1/report.txt"));
  ExpectPublished("step-1");
}

TEST_F(SaveTest, ConcurrentPublishersHaveOneWinner) {
  Mount(store());
  MountSecond();
  for (int round = 0; round < 5; ++round) {
    const std::string name = "step-" + std::to_string(round);
    ASSERT_EQ(ErrnoOf(mkdir(Staged(name).c_str(), 0755)), 0);
    ASSERT_EQ(PutErrno(Staged(name + "/schema.json"),
                       R"({"tensors": {"b": {"dtype": "f32", "shape": [25]}}})"),
              0);
    ASSERT_EQ(PutErrno(second() + "/.staging/" + name + "/tensors/b", b_), 0);
    std::array<int, 2> answers{};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        const std::string root = i == 0 ? mount_point() : second();
        answers[i] =
            ErrnoOf(rename((root + "/.staging/" + name).c_str(), (root + "/" + name).c_str()));
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::sort(answers.begin(), answers.end());
    EXPECT_EQ(answers[0], 0);
    const int loser = answers[1];
    EXPECT_TRUE(loser == EBUSY || loser == ENOENT || loser == ESTALE || loser == EEXIST) << loser;
    ExpectWithin(seconds(1), [&] { return access(At(name).c_str(), F_OK) == 0; });
    EXPECT_TRUE(ReadWholeFile(At(name + "/tensors/b")) == b_);
  }
}

TEST_F(SaveTest, ReadersSeeWholeCheckpointsDuringPublish) {
  Mount(store());
  std::atomic<bool> stop{false};
  std::atomic<int> reads{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        std::error_code gone;
        const std::string step = std::filesystem::read_symlink(At("latest"), gone).string();
        if (gone) continue;
        const unsigned seed = static_cast<unsigned>(std::stoi(step.substr(5)));
        const int fd = open(At(step + "/tensors/b").c_str(), O_RDONLY | O_CLOEXEC);
        ASSERT_GE(fd, 0) << std::strerror(errno);
        std::string bytes(100, '\0');
        ASSERT_EQ(read(fd, bytes.data(), bytes.size()), 100);
        close(fd);
        ASSERT_TRUE(bytes == Cells(100, seed));
        ++reads;
      }
    });
  }
  for (unsigned step = 1; step <= 12; ++step) {
    const std::string name = "step-" + std::to_string(step);
    ASSERT_EQ(ErrnoOf(mkdir(Staged(name).c_str(), 0755)), 0);
    ASSERT_EQ(PutErrno(Staged(name + "/schema.json"),
                       R"({"tensors": {"b": {"dtype": "f32", "shape": [25]}}})"),
              0);
    ASSERT_EQ(PutErrno(Staged(name + "/tensors/b"), Cells(100, step)), 0);
    ASSERT_EQ(ErrnoOf(rename(Staged(name).c_str(), At(name).c_str())), 0);
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(reads.load(), 0);
}

// With the rights of the one who mounts, and no others.
TEST_F(SaveTest, UnprivilegedUserSavesInItsOwnStore) {
  const std::vector<std::string> nobody = {"setpriv", "--reuid=65534", "--regid=65534",
                                           "--clear-groups"};
  const auto as_nobody = [&](std::vector<std::string> command) {
    command.insert(command.begin(), nobody.begin(), nobody.end());
    return command;
  };
  const std::string program = BuiltProgram("tensormount");
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  ASSERT_EQ(chown(mount_point().c_str(), 65534, 65534), 0);
  if (RunProcess(as_nobody({"test", "-w", "/dev/fuse"})).exit_code != 0 ||
      RunProcess(as_nobody({"test", "-x", program})).exit_code != 0) {
    GTEST_SKIP() << "an ordinary user cannot mount here";
  }
  const auto save = [&](const std::string& name) {
    return RunProcess(as_nobody({"bash", "-euc",
                                 "S=$0/.staging/$1; mkdir $S; echo '{\"tensors\": {\"b\": "
                                 "{\"dtype\": \"u8\", \"shape\": [3]}}}' > $S/schema.json; "
                                 "printf abc > $S/tensors/b; mv -T $S $0/$1; cat $0/$1/tensors/b",
                                 mount_point(), name}));
  };
  const auto mounted = [&](const std::function<void()>& use) {
    Subprocess daemon(as_nobody({program, "mount", "-f", store(), mount_point()}));
    ExpectWithin(seconds(20), [&] { return IsMountPoint(mount_point()); });
    use();
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.Wait().exit_code, 0);
  };
  // Somebody else's store is read-only, and status says why.
  mounted([&] {
    EXPECT_NE(save("a").exit_code, 0);
    const auto status = RunProcess(as_nobody({"cat", At(".tensormount/status")}));
    const auto fields = nlohmann::json::parse(status.out);
    EXPECT_EQ(fields["writable"], false);
    EXPECT_NE(fields["not_writable_because"].get<std::string>().find(store()), std::string::npos);
  });
  ASSERT_EQ(RunProcess({"chown", "-R", "65534:65534", store()}).exit_code, 0);
  mounted([&] {
    const ProcessOutcome saved = save("a");
    EXPECT_EQ(saved.out, "abc") << saved;
  });
}

TEST_F(SaveTest, ReadOnlyMountsHaveNoStaging) {
  MountOptions options;
  options.read_only = true;
  Mount(store(), options);
  EXPECT_EQ(access(At(".staging").c_str(), F_OK), -1);
  EXPECT_EQ(ErrnoOf(mkdir(At("x").c_str(), 0755)), EROFS);
  const auto status = nlohmann::json::parse(session_->StatusJson());
  EXPECT_EQ(status["writable"], false);
  EXPECT_TRUE(status["not_writable_because"].is_null());
}

}  // namespace
}  // namespace tensormount::fs
