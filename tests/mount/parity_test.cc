// SPDX-License-Identifier: Apache-2.0
// Every call on files of a mount answers what it answers on plain files with the same bytes:
// result, errno and bytes. Calls that change something, on every kind of node and as two users,
// answer what a read-only bind mount of the same tree answers.
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <functional>
#include <grp.h>
#include <limits>
#include <set>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/hash.h"
#include "tests/mount/mount_fixture.h"
#include "tests/support/fd.h"

namespace tensormount::fs {
namespace {

// What was called, and what came of it.
class Answers {
 public:
  // A result, or the name of errno.
  void Note(const std::string& what, std::int64_t result) {
    const int err = errno;
    all_.emplace_back(what, result >= 0 ? std::to_string(result) : strerrorname_np(err));
  }
  void Text(const std::string& what, std::string text) { all_.emplace_back(what, std::move(text)); }
  // Bytes that a call gave, `n` of them.
  void Bytes(const std::string& what, ssize_t n, const void* data) {
    if (n <= 0) return Note(what, n);
    const std::string_view bytes(static_cast<const char*>(data), static_cast<std::size_t>(n));
    all_.emplace_back(what, std::to_string(n) + " bytes " + std::to_string(Xxh3Low64(bytes)));
  }
  const std::vector<std::pair<std::string, std::string>>& all() const { return all_; }

 private:
  std::vector<std::pair<std::string, std::string>> all_;
};

void ExpectSame(const Answers& ours, const Answers& theirs, const std::string& context) {
  const std::size_t n = std::min(ours.all().size(), theirs.all().size());
  for (std::size_t i = 0; i < n; ++i) {
    // Another call means that one of both went another way before.
    ASSERT_EQ(ours.all()[i].first, theirs.all()[i].first) << context;
    EXPECT_EQ(ours.all()[i], theirs.all()[i]) << context;
  }
  EXPECT_EQ(ours.all().size(), theirs.all().size()) << context;
}

std::vector<off_t> Offsets(off_t size) {
  std::set<off_t> all = {-1,          0,
                         1,           511,
                         4095,        4096,
                         4097,        size / 2,
                         size - 1,    size,
                         size + 1,    size + 4096,
                         size - 4096, std::numeric_limits<off_t>::max()};
  return {all.begin(), all.end()};
}

constexpr std::size_t kBuffer = 300 * 1024;
constexpr std::size_t kSizes[] = {0, 1, 3, 4096, 4097, 131073, kBuffer};

void TryReads(const std::string& path, off_t size, Answers& answers) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  answers.Note("open", fd >= 0 ? 0 : -1);
  std::vector<char> memory(kBuffer);
  char* buffer = memory.data();
  for (const off_t at : Offsets(size)) {
    for (const std::size_t n : kSizes) {
      const std::string which = " " + std::to_string(n) + " at " + std::to_string(at);
      answers.Bytes("pread" + which, pread(fd, buffer, n, at), buffer);
      const iovec pieces[2] = {{buffer, n / 3}, {buffer + n / 3, n - n / 3}};
      answers.Bytes("preadv" + which, preadv(fd, pieces, 2, at), buffer);
      // -1 is the file's own position for this one.
      if (at != -1) answers.Bytes("preadv2" + which, preadv2(fd, pieces, 2, at, 0), buffer);
    }
    const iovec one = {buffer, 100};
    const ssize_t n = preadv2(fd, &one, 1, at == -1 ? 0 : at, RWF_NOWAIT);
    const bool later = n < 0 && (errno == EAGAIN || errno == EOPNOTSUPP);  // May be so.
    const ssize_t whole = pread(fd, buffer + 100, 100, at == -1 ? 0 : at);
    const bool right = n <= whole && (n <= 0 || std::memcmp(buffer, buffer + 100,
                                                            static_cast<std::size_t>(n)) == 0);
    answers.Text("RWF_NOWAIT " + std::to_string(at), later || right ? "right" : "wrong");
  }
  // The file's own position.
  answers.Note("lseek 7", lseek(fd, 7, SEEK_SET));
  const iovec pieces[3] = {{buffer, 1}, {buffer + 1, 5000}, {buffer + 5001, 3}};
  answers.Bytes("readv", readv(fd, pieces, 3), buffer);
  answers.Note("where", lseek(fd, 0, SEEK_CUR));
  lseek(fd, 0, SEEK_SET);
  std::string whole;
  for (;;) {
    const ssize_t n = read(fd, buffer, 70001);
    if (n <= 0) break;
    whole.append(buffer, static_cast<std::size_t>(n));
  }
  answers.Bytes("read to the end", static_cast<ssize_t>(whole.size()), whole.data());
  answers.Note("at the end", lseek(fd, 0, SEEK_CUR));
  answers.Note("read again", read(fd, buffer, 10));
  for (const off_t at : Offsets(size)) {
    // How large a file may be differs between plain filesystems too.
    if (at > size + 4096) continue;
    for (const int whence : {SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE, 17}) {
      lseek(fd, 5, SEEK_SET);
      answers.Note("lseek " + std::to_string(at) + " " + std::to_string(whence),
                   lseek(fd, at, whence));
    }
  }
  answers.Note("read to nowhere", read(fd, reinterpret_cast<void*>(64), 10));
  answers.Note("readahead", readahead(fd, 0, 100000));
  for (const int advice : {POSIX_FADV_NORMAL, POSIX_FADV_SEQUENTIAL, POSIX_FADV_RANDOM,
                           POSIX_FADV_WILLNEED, POSIX_FADV_DONTNEED, POSIX_FADV_NOREUSE, 99}) {
    answers.Note("fadvise " + std::to_string(advice), posix_fadvise(fd, 0, 0, advice));
  }
  answers.Bytes("after all", pread(fd, buffer, 5000, 0), buffer);
}

void TryMappings(const std::string& path, off_t size, Answers& answers) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  for (const int flags : {MAP_SHARED, MAP_PRIVATE}) {
    for (const int protection : {PROT_READ, PROT_READ | PROT_WRITE}) {
      for (const off_t at : {off_t{0}, off_t{4096}, off_t{1}, (size / 4096) * 4096}) {
        const auto left = static_cast<std::size_t>(std::max<off_t>(size - at, 0));
        for (const std::size_t length : {std::size_t{0}, std::size_t{1}, left}) {
          const std::string which = "mmap " + std::to_string(flags) + " " +
                                    std::to_string(protection) + " " + std::to_string(length) +
                                    " at " + std::to_string(at);
          void* map = mmap(nullptr, length, protection, flags, fd, at);
          if (map == MAP_FAILED) {
            answers.Note(which, -1);
            continue;
          }
          // To the end of the last page: past the file it is zeros.
          const std::size_t pages = (length + 4095) / 4096 * 4096;
          const std::size_t readable = std::min(pages, (left + 4095) / 4096 * 4096);
          answers.Bytes(which, static_cast<ssize_t>(readable), map);
          answers.Note(which + " madvise", madvise(map, length, MADV_WILLNEED));
          answers.Note(which + " msync", msync(map, length, MS_SYNC));
          if (protection & PROT_WRITE && readable > 0) {
            static_cast<char*>(map)[0] ^= 1;  // Private.
            answers.Bytes(which + " written", static_cast<ssize_t>(readable), map);
          }
          munmap(map, length);
        }
      }
    }
  }
}

void TryCopies(const std::string& path, off_t size, const std::string& scratch, Answers& answers) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto target = [&] {
    return open(scratch.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  };
  const auto content = [&](const std::string& what) {
    const std::string bytes = ReadWholeFile(scratch);
    answers.Bytes(what + " content", static_cast<ssize_t>(bytes.size()), bytes.data());
  };
  for (const off_t at : Offsets(size)) {
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{70000}}) {
      const std::string which = " " + std::to_string(n) + " at " + std::to_string(at);
      const Fd out(target());
      off_t from = at;
      answers.Note("sendfile" + which, sendfile(out, fd, &from, n));
      answers.Note("sendfile moved" + which, from);
      content("sendfile" + which);
      int pipes[2];
      if (pipe2(pipes, O_CLOEXEC) != 0) continue;
      from = at;
      char bytes[70000];
      const ssize_t moved =
          splice(fd, &from, pipes[1], nullptr, std::min(n, std::size_t{4096}), SPLICE_F_NONBLOCK);
      answers.Note("splice" + which, moved);
      if (moved > 0) answers.Bytes("spliced" + which, read(pipes[0], bytes, sizeof bytes), bytes);
      close(pipes[0]);
      close(pipes[1]);
    }
  }
  // Between different filesystems kernels answer EXDEV and programs read and write instead.
  const Fd out(target());
  off_t from = 1;
  const ssize_t copied = copy_file_range(fd, &from, out, nullptr, 5000, 0);
  if (copied >= 0) {
    std::string wanted(5000, 0);
    wanted.resize(
        static_cast<std::size_t>(std::max<ssize_t>(pread(fd, wanted.data(), 5000, 1), 0)));
    answers.Text("copy_file_range", ReadWholeFile(scratch) == wanted ? "right" : "wrong");
  } else {
    answers.Text("copy_file_range", errno == EXDEV ? "right" : strerrorname_np(errno));
  }
  from = 0;
  answers.Note("copy_file_range flags", copy_file_range(fd, &from, out, nullptr, 1, 77));
  answers.Note("sendfile to itself", sendfile(fd, fd, nullptr, 1));
}

void TryOpens(const std::string& path, Answers& answers) {
  const std::pair<const char*, int> flags[] = {
      {"rdonly", O_RDONLY},
      {"directory", O_RDONLY | O_DIRECTORY},
      {"nofollow", O_RDONLY | O_NOFOLLOW},
      {"path", O_PATH},
      {"path directory", O_PATH | O_DIRECTORY},
      {"noatime", O_RDONLY | O_NOATIME},
      {"append", O_RDONLY | O_APPEND},
      {"nonblock", O_RDONLY | O_NONBLOCK},
      {"sync", O_RDONLY | O_SYNC},
      {"creat", O_RDONLY | O_CREAT},
      {"creat excl", O_RDONLY | O_CREAT | O_EXCL},
      {"excl", O_RDONLY | O_EXCL},
      {"async", O_RDONLY | O_ASYNC},
  };
  for (const auto& [name, flag] : flags) {
    const Fd fd(open(path.c_str(), flag | O_CLOEXEC, 0644));
    answers.Note(std::string("open ") + name, fd >= 0 ? 0 : -1);
    if (fd < 0) continue;
    char byte[8] = {};
    answers.Bytes(std::string("read by ") + name, pread(fd, byte, 1, 0), byte);
    struct stat st;
    answers.Note(std::string("fstat by ") + name, fstat(fd, &st));
    answers.Note(std::string("write by ") + name, write(fd, byte, 1));
    answers.Note(std::string("ftruncate by ") + name, ftruncate(fd, 0));
    answers.Note(std::string("fallocate by ") + name, fallocate(fd, 0, 0, 10));
    answers.Note(std::string("fsync by ") + name, fsync(fd));
    answers.Note(std::string("fdatasync by ") + name, fdatasync(fd));
  }
  for (const char* tail : {"/", "/x", "/.", "/.."}) {
    const Fd fd(open((path + tail).c_str(), O_RDONLY | O_CLOEXEC));
    answers.Note(std::string("open ") + tail, fd >= 0 ? 0 : -1);
  }
  DIR* dir = opendir(path.c_str());
  answers.Note("opendir", dir != nullptr ? 0 : -1);
  if (dir != nullptr) closedir(dir);
  answers.Note("chdir", access((path + "/.").c_str(), X_OK));
  char target[10];
  answers.Note("readlink", readlink(path.c_str(), target, sizeof target));
  const Fd watch(inotify_init1(IN_CLOEXEC));
  answers.Note("inotify", inotify_add_watch(watch, path.c_str(), IN_MODIFY));
}

void TryStats(const std::string& path, Answers& answers) {
  const auto note = [&](const std::string& what, const struct stat& st) {
    answers.Text(what, std::to_string(st.st_mode) + " " + std::to_string(st.st_uid) + " " +
                           std::to_string(st.st_gid) + " " +
                           (S_ISDIR(st.st_mode)
                                ? ""
                                : std::to_string(st.st_size) + " " + std::to_string(st.st_nlink)));
  };
  struct stat st {};
  answers.Note("stat", stat(path.c_str(), &st));
  note("stat says", st);
  answers.Note("lstat", lstat(path.c_str(), &st));
  note("lstat says", st);
  const Fd fd(open(path.c_str(), O_PATH | O_CLOEXEC));
  answers.Note("fstatat", fstatat(fd, "", &st, AT_EMPTY_PATH));
  note("fstatat says", st);
  for (const int sync : {AT_STATX_SYNC_AS_STAT, AT_STATX_FORCE_SYNC, AT_STATX_DONT_SYNC}) {
    struct statx more {};
    answers.Note("statx", statx(AT_FDCWD, path.c_str(), sync, STATX_BASIC_STATS, &more));
    answers.Note("statx mode", more.stx_mode);
    if (!S_ISDIR(more.stx_mode)) {
      answers.Note("statx size", static_cast<std::int64_t>(more.stx_size));
    }
    answers.Note("statx mask", more.stx_mask & STATX_BASIC_STATS);
  }
  for (const int mode : {F_OK, R_OK, W_OK, X_OK, R_OK | W_OK, 64}) {
    answers.Note("access " + std::to_string(mode), access(path.c_str(), mode));
    answers.Note("eaccess " + std::to_string(mode),
                 faccessat(AT_FDCWD, path.c_str(), mode, AT_EACCESS));
  }
  char value[8];
  answers.Note("getxattr", getxattr(path.c_str(), "user.no such", value, sizeof value));
}

// The kernel's own locks: two openers of one file see each other's.
void TryLocks(const std::string& path, Answers& answers) {
  const Fd a(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const Fd b(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  answers.Note("flock shared", flock(a, LOCK_SH | LOCK_NB));
  answers.Note("flock shared too", flock(b, LOCK_SH | LOCK_NB));
  answers.Note("flock exclusive", flock(b, LOCK_EX | LOCK_NB));
  answers.Note("flock unlock", flock(a, LOCK_UN));
  answers.Note("flock exclusive now", flock(b, LOCK_EX | LOCK_NB));
  answers.Note("flock shared no more", flock(a, LOCK_SH | LOCK_NB));
  answers.Note("flock unlock", flock(b, LOCK_UN));
  struct flock lock {};
  lock.l_type = F_RDLCK;
  lock.l_len = 10;
  answers.Note("fcntl read", fcntl(a, F_OFD_SETLK, &lock));
  lock.l_type = F_WRLCK;
  answers.Note("fcntl write", fcntl(b, F_OFD_SETLK, &lock));  // Not open for writing.
  answers.Note("fcntl get", fcntl(b, F_OFD_GETLK, &lock));
  answers.Note("fcntl type", lock.l_type);
  lock.l_type = F_RDLCK;
  lock.l_pid = 0;
  answers.Note("fcntl posix", fcntl(a, F_SETLK, &lock));
  lock.l_type = F_UNLCK;
  answers.Note("fcntl unlock", fcntl(a, F_SETLK, &lock));
}

// Of files that are open for O_DIRECT: aligned calls; others differ between plain filesystems too.
void TryDirect(const std::string& path, off_t size, Answers& answers) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (fd < 0 && errno == EINVAL) return;  // Of the plain one: tmpfs before Linux 6.6.
  void* memory = nullptr;
  if (posix_memalign(&memory, 4096, 1 << 20) != 0) return;
  const std::unique_ptr<void, decltype(&std::free)> buffer(memory, std::free);
  for (const off_t at : {off_t{0}, off_t{4096}, size / 4096 * 4096, (size / 4096 + 5) * 4096}) {
    for (const std::size_t n : {std::size_t{4096}, std::size_t{1} << 20}) {
      answers.Bytes("direct " + std::to_string(n) + " at " + std::to_string(at),
                    pread(fd, buffer.get(), n, at), buffer.get());
    }
  }
}

void TryAll(const std::string& path, off_t size, const std::string& scratch, Answers& answers) {
  TryReads(path, size, answers);
  TryMappings(path, size, answers);
  TryCopies(path, size, scratch, answers);
  TryOpens(path, answers);
  TryStats(path, answers);
  TryLocks(path, answers);
}

// `what` in a child, as another user where `other` is set. Always in a child: a process that maps
// files of a mount that it serves itself can wait for itself, holding the lock of its own memory.
Answers InChild(bool other, const std::function<void(Answers&)>& what) {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (other && (setgroups(0, nullptr) != 0 || setgid(65534) != 0 || setuid(65534) != 0)) {
      _exit(1);
    }
    Answers answers;
    what(answers);
    std::string text;
    for (const auto& [call, answer] : answers.all()) text += call + "\n" + answer + "\n";
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t n = write(ends[1], text.data() + at, text.size() - at);
      if (n <= 0) _exit(1);
      at += static_cast<std::size_t>(n);
    }
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char block[4096];
  for (ssize_t n; (n = read(ends[0], block, sizeof block)) > 0;) {
    text.append(block, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Answers answers;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t middle = text.find('\n', at);
    const std::size_t end = text.find('\n', middle + 1);
    answers.Text(text.substr(at, middle - at), text.substr(middle + 1, end - middle - 1));
    at = end + 1;
  }
  return answers;
}

enum class Mode { kAuto, kDaemon, kPageCache };

class ParityTest : public MountTest, public testing::WithParamInterface<Mode> {
 protected:
  MountOptions Options() const {
    MountOptions options;
    options.read_only = true;
    if (GetParam() != Mode::kAuto) options.tier = MountOptions::Tier::kDaemon;
    options.page_cache = GetParam() == Mode::kPageCache;
    return options;
  }
  // Of each tier: rank shards, a file that is the tensor, small ones, one without any bytes.
  static TinySpec Spec() {
    TinySpec spec;
    spec.writers = 3;
    spec.tensors = {
        {.key = "sharded", .shape = {700, 1031}, .seed = 9, .parts = 3},
        {.key = "columns", .shape = {300, 1500}, .seed = 10, .parts = 3, .axis = 1},
        {.key = "whole", .shape = {500, 1000}, .seed = 11, .tensor_file = true},
        {.key = "small", .shape = {10}, .seed = 12},
        {.key = "pages", .shape = {8192}, .seed = 13},
        {.key = "empty", .shape = {0, 4}},
    };
    spec.objects = {{.key = "blob", .bytes = std::string(5000, 'b')}};
    return spec;
  }
  // The tree as plain files, with the same modes, bound read-only. Empty: not possible here.
  std::string BindCopy() {
    const std::string copy = dir_.Join("copy");
    const std::string bound = dir_.Join("bound");
    EXPECT_EQ(RunProcess({"cp", "-a", At("step-1"), copy}).exit_code, 0);
    EXPECT_EQ(mkdir(bound.c_str(), 0755), 0);
    if (mount(copy.c_str(), bound.c_str(), nullptr, MS_BIND, nullptr) != 0) return "";
    bound_ = bound;
    const unsigned long flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV;
    if (mount(nullptr, bound.c_str(), nullptr, flags, nullptr) != 0) return "";
    return bound;
  }
  void TearDown() override {
    if (!bound_.empty()) umount2(bound_.c_str(), MNT_DETACH);
    MountTest::TearDown();
  }
  std::string bound_;
};

INSTANTIATE_TEST_SUITE_P(Modes, ParityTest,
                         testing::Values(Mode::kAuto, Mode::kDaemon, Mode::kPageCache),
                         [](const auto& param) {
                           return param.param == Mode::kAuto     ? "Auto"
                                  : param.param == Mode::kDaemon ? "Daemon"
                                                                 : "PageCache";
                         });

TEST_P(ParityTest, FilesBehaveLikePlainFiles) {
  Write("step-1", Spec());
  Mount(store(), Options());
  const std::string bound = BindCopy();
  if (bound.empty()) GTEST_SKIP() << "no bind mounts here: " << std::strerror(errno);
  for (const char* file : {"tensors/sharded", "tensors/columns", "tensors/whole", "tensors/small",
                           "tensors/pages", "tensors/empty", "objects/blob", "checkpoint.json"}) {
    const std::string mine = At("step-1/") + file;
    const std::string plain = bound + "/" + file;
    struct stat st {};
    ASSERT_EQ(stat(plain.c_str(), &st), 0);
    const auto all = [&](const std::string& path) {
      return InChild(false, [&](Answers& a) { TryAll(path, st.st_size, dir_.Join("scratch"), a); });
    };
    ExpectSame(all(mine), all(plain), file);
    const auto direct = [&](const std::string& path) {
      return InChild(false, [&](Answers& a) { TryDirect(path, st.st_size, a); });
    };
    const Answers plain_direct = direct(plain);
    if (!plain_direct.all().empty()) ExpectSame(direct(mine), plain_direct, file);
  }
}

TEST_P(ParityTest, DirectoriesBehaveLikePlainDirectories) {
  Write("step-1", Spec());
  Mount(store(), Options());
  const std::string bound = BindCopy();
  if (bound.empty()) GTEST_SKIP() << "no bind mounts here: " << std::strerror(errno);
  for (const char* folder : {"", "/tensors", "/objects"}) {
    Answers ours;
    Answers theirs;
    for (const auto& [path, answers] :
         {std::pair{At("step-1") + folder, &ours}, std::pair{bound + folder, &theirs}}) {
      TryOpens(path, *answers);
      TryStats(path, *answers);
      const Fd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      char small[8];
      answers->Note("getdents into little", syscall(SYS_getdents64, fd.fd, small, sizeof small));
      answers->Note("map",
                    mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED ? 0 : -1);
      answers->Note("flock", flock(fd, LOCK_SH | LOCK_NB));
      answers->Note("sync", syncfs(fd));
      struct statvfs info {};
      answers->Note("fstatvfs", fstatvfs(fd, &info));
      answers->Note("longest name", static_cast<std::int64_t>(info.f_namemax));
      answers->Note("read-only", (info.f_flag & ST_RDONLY) != 0 ? 1 : 0);
      answers->Note("too long a name", access((path + "/" + std::string(256, 'x')).c_str(), F_OK));
    }
    ExpectSame(ours, theirs, folder);
  }
}

// Every call that changes something, on this node.
void TryToChange(const std::string& root, const std::string& path, Answers& answers) {
  const std::string fresh = root + "/fresh";
  const std::string other = root + "/tensors/small";
  const auto note = [&](const char* what, long result) { answers.Note(what, result); };
  const std::pair<const char*, int> flags[] = {
      {"open write", O_WRONLY},
      {"open both", O_RDWR},
      {"open truncate", O_RDONLY | O_TRUNC},
      {"open write truncate", O_WRONLY | O_TRUNC},
      {"open append", O_WRONLY | O_APPEND},
      {"open create", O_WRONLY | O_CREAT},
      {"open create exclusive", O_WRONLY | O_CREAT | O_EXCL},
      {"open temporary", O_RDWR | O_TMPFILE},
  };
  for (const auto& [name, flag] : flags) {
    const Fd fd(open(path.c_str(), flag | O_CLOEXEC, 0644));
    note(name, fd >= 0 ? 0 : -1);
    const Fd below(open((path + "/fresh").c_str(), flag | O_CLOEXEC, 0644));
    note((std::string(name) + " below").c_str(), below >= 0 ? 0 : -1);
  }
  note("mkdir", mkdir(path.c_str(), 0755));
  note("mkdir below", mkdir((path + "/fresh").c_str(), 0755));
  note("mknod", mknod(path.c_str(), S_IFREG | 0644, 0));
  note("mkfifo below", mknod((path + "/fresh").c_str(), S_IFIFO | 0644, 0));
  note("symlink", symlink("x", path.c_str()));
  note("symlink below", symlink("x", (path + "/fresh").c_str()));
  note("link", link(path.c_str(), fresh.c_str()));
  note("link onto", link(other.c_str(), path.c_str()));
  note("unlink", unlink(path.c_str()));
  note("unlink below", unlink((path + "/fresh").c_str()));
  note("rmdir", rmdir(path.c_str()));
  note("rmdir below", rmdir((path + "/fresh").c_str()));
  note("rename away", rename(path.c_str(), fresh.c_str()));
  note("rename onto", rename(other.c_str(), path.c_str()));
  note("rename to itself", rename(path.c_str(), path.c_str()));
  note("rename nothing", rename(fresh.c_str(), path.c_str()));
  for (const unsigned flag : {RENAME_NOREPLACE, RENAME_EXCHANGE}) {
    note("renameat2", renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, other.c_str(), flag));
  }
  note("truncate", truncate(path.c_str(), 0));
  note("truncate negative", truncate(path.c_str(), -1));
  note("chmod", chmod(path.c_str(), 0777));
  note("chown", chown(path.c_str(), 65534, 65534));
  note("chown nothing", chown(path.c_str(), static_cast<uid_t>(-1), static_cast<gid_t>(-1)));
  note("utimes now", utimensat(AT_FDCWD, path.c_str(), nullptr, 0));
  const timespec times[2] = {{.tv_sec = 1, .tv_nsec = 0}, {.tv_sec = 1, .tv_nsec = 0}};
  note("utimes", utimensat(AT_FDCWD, path.c_str(), times, 0));
  note("setxattr", setxattr(path.c_str(), "user.x", "y", 1, 0));
  note("removexattr", removexattr(path.c_str(), "user.x"));
  note("access", access(path.c_str(), W_OK));
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  note("fchmod", fchmod(fd, 0777));
  note("futimens", futimens(fd, times));
  note("fsetxattr", fsetxattr(fd, "user.x", "y", 1, 0));
}

TEST_P(ParityTest, ChangesAreRefusedLikeOnAReadOnlyBindMount) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user to be";
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  Write("step-1", Spec());
  ASSERT_EQ(chmod(store().c_str(), 0755), 0);
  ASSERT_EQ(chmod((store() + "/step-1").c_str(), 0755), 0);
  ASSERT_EQ(chmod((store() + "/step-1/COMMIT").c_str(), 0444), 0);
  struct stat st {};
  for (std::string up = dir_.path(); up.size() > 1; up = up.substr(0, up.rfind('/'))) {
    ASSERT_EQ(stat(up.c_str(), &st), 0);
    if ((st.st_mode & 1) == 0) GTEST_SKIP() << up << " is closed to others";
  }
  MountOptions options = Options();
  options.allow_other = true;
  // Of one checkpoint, so that the roots are alike.
  Mount(store() + "/step-1", options);
  const std::string copy = dir_.Join("copy");
  ASSERT_EQ(RunProcess({"cp", "-a", mount_point(), copy}).exit_code, 0);
  bound_ = dir_.Join("bound");
  ASSERT_EQ(mkdir(bound_.c_str(), 0755), 0);
  const unsigned long flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV;
  if (mount(copy.c_str(), bound_.c_str(), nullptr, MS_BIND, nullptr) != 0 ||
      mount(nullptr, bound_.c_str(), nullptr, flags, nullptr) != 0) {
    GTEST_SKIP() << "no bind mounts here: " << std::strerror(errno);
  }
  for (const bool other : {false, true}) {
    for (const char* node : {"/tensors/whole", "/tensors/sharded", "/checkpoint.json", "/tensors",
                             "/nothing", "/nothing/at all", ""}) {
      const auto on = [&](const std::string& root) {
        return InChild(other, [&](Answers& answers) { TryToChange(root, root + node, answers); });
      };
      ExpectSame(on(mount_point()), on(bound_),
                 std::string(other ? "another user: " : "root: ") + node);
    }
  }
}

// What df, installers and copy programs look at: the numbers of where the bytes are.
TEST_P(ParityTest, StatfsReportsTheSpaceOfTheSource) {
  Write("step-1", Spec());
  Mount(store(), Options());
  struct statvfs ours {};
  struct statvfs theirs {};
  ASSERT_EQ(statvfs(At("step-1/tensors/whole").c_str(), &ours), 0);
  ASSERT_EQ(statvfs(store().c_str(), &theirs), 0);
  EXPECT_EQ(ours.f_blocks * ours.f_frsize, theirs.f_blocks * theirs.f_frsize);
  EXPECT_GT(ours.f_bavail, 0u);
  EXPECT_LE(ours.f_bavail, ours.f_blocks);
  EXPECT_EQ(ours.f_namemax, 255u);
}

}  // namespace
}  // namespace tensormount::fs
