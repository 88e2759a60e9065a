// SPDX-License-Identifier: Apache-2.0
// A stand-in for filesystems that are not here (NFS, Lustre, dying disks): what is below BACKING,
// at MOUNTPOINT, with rules that may change at any time. Reads and mappings go through the page
// cache; names and attributes are never kept, so that every call meets the rules.
//
// usage: adverse_fs BACKING MOUNTPOINT RULES [--silly | --cache]
//        stays until MOUNTPOINT is unmounted
//        --silly: what it is asked to unlink while open is renamed to .nfsXXXX until its last
//        close, as NFS does (sillyrename); it cannot be unlinked, nor its folder removed, before
//        --cache: what was read of a file stays in the page cache when it is opened again
//
// RULES is a file with a rule a line, which is to be replaced as a whole (rename); it is looked at
// before each call, and may not be there:
//
//   ACTION OPERATION GLOB [FROM TO]
//
//   ACTION     an errno's name (EIO, ESTALE, ENOLCK, ...); wait:SECONDS; slow:SECONDS:RATE, storage
//              that needs SECONDS for each call, many at a time, and delivers RATE bytes a second;
//              hang, until the rule is
//              gone or the caller is killed (no other signal ends it, as on a hard NFS mount); lie:
//              done, it says, and does nothing (write, fsync)
//   OPERATION  lookup getattr setattr open read write flush fsync readdir create mkdir unlink rmdir
//              rename flags (rename with flags, RENAME_NOREPLACE and others) link symlink readlink
//              statfs lock (flock, and POSIX locks, OFD locks among them), or * for each of them
//   GLOB       of the path below MOUNTPOINT, where * goes over /; of a rename both are looked at
//   FROM TO    only reads and writes that touch these bytes
//
// A line of standard output for each call that met a rule: "ACTION OPERATION PATH", and of a slow
// one also the bytes: "... FROM TO".
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#define FUSE_USE_VERSION 312
#include <fuse3/fuse_lowlevel.h>

namespace {

using Chars = std::array<char, PATH_MAX + 64>;

// ---- Rules ------------------------------------------------------------------------------------

struct Rule {
  std::string text;
  std::string action;
  std::string operation;
  std::string glob;
  std::uint64_t from = 0;
  std::uint64_t to = std::numeric_limits<std::uint64_t>::max();
};

constexpr std::pair<const char*, int> kErrors[] = {
    {"EACCES", EACCES},         {"EBUSY", EBUSY},   {"EDQUOT", EDQUOT}, {"EINTR", EINTR},
    {"EINVAL", EINVAL},         {"EIO", EIO},       {"ENOENT", ENOENT}, {"ENOLCK", ENOLCK},
    {"ENOSPC", ENOSPC},         {"ENOSYS", ENOSYS}, {"EPERM", EPERM},   {"EROFS", EROFS},
    {"EOPNOTSUPP", EOPNOTSUPP}, {"ESTALE", ESTALE}, {"EXDEV", EXDEV},
};

std::string rules_path;
std::mutex rules_mutex;
struct stat rules_seen {};
std::vector<Rule> rules;

std::vector<Rule> Rules() {
  struct stat now {};
  std::lock_guard lock(rules_mutex);
  if (::stat(rules_path.c_str(), &now) != 0) return {};
  if (now.st_ino == rules_seen.st_ino && now.st_size == rules_seen.st_size &&
      now.st_mtim.tv_sec == rules_seen.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == rules_seen.st_mtim.tv_nsec)
    return rules;
  rules.clear();
  std::ifstream file(rules_path);
  for (std::string line; std::getline(file, line);) {
    Rule rule{line, {}, {}, {}};
    std::istringstream words(line);
    if (words >> rule.action >> rule.operation >> rule.glob) {
      words >> rule.from >> rule.to;
      if (rule.to == 0) rule.to = std::numeric_limits<std::uint64_t>::max();
      rules.push_back(rule);
    }
  }
  rules_seen = now;
  return rules;
}

struct Call {
  fuse_req_t request;
  std::string_view operation;
  std::string path;
  std::string other;  // Of a rename or link.
  std::uint64_t from = 0;
  std::uint64_t to = std::numeric_limits<std::uint64_t>::max();
};

bool Meets(const Rule& rule, const Call& call) {
  if (rule.operation != "*" && rule.operation != call.operation) return false;
  if (call.to <= rule.from || call.from >= rule.to) return false;
  return ::fnmatch(rule.glob.c_str(), call.path.c_str(), 0) == 0 ||
         (!call.other.empty() && ::fnmatch(rule.glob.c_str(), call.other.c_str(), 0) == 0);
}

// Whether SIGKILL waits for the caller; true also where that cannot be known.
bool IsKilled(fuse_req_t request) {
  std::ifstream status("/proc/" + std::to_string(fuse_req_ctx(request)->pid) + "/status");
  std::uint64_t pending = 0;
  bool known = false;
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("SigPnd:", 0) != 0 && line.rfind("ShdPnd:", 0) != 0) continue;
    pending |= std::strtoull(line.c_str() + 7, nullptr, 16);
    known = true;
  }
  return !known || (pending & (1u << 8)) != 0;
}

void Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

// Sleeps as long as storage that is shared by all calls needs for `bytes`.
void BeSlow(double seconds, double rate, std::uint64_t bytes) {
  using Clock = std::chrono::steady_clock;
  const auto span = [](double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
  };
  static std::mutex mutex;
  static Clock::time_point free_at;  // When all calls before this one are served.
  Clock::time_point end;
  {
    std::lock_guard lock(mutex);
    free_at = std::max(free_at, Clock::now()) + span(static_cast<double>(bytes) / rate);
    end = free_at;
  }
  std::this_thread::sleep_until(std::max(end, Clock::now() + span(seconds)));
}

constexpr int kLie = -1;

// What the rules say to a call: 0, an errno, or kLie. Takes as long as they say.
int Meet(const Call& call) {
  for (const Rule& rule : Rules()) {
    if (!Meets(rule, call)) continue;
    const bool slow = rule.action.rfind("slow:", 0) == 0;
    const std::string bytes =
        slow ? " " + std::to_string(call.from) + " " + std::to_string(call.to) : "";
    std::printf("%s %.*s %s%s\n", rule.action.c_str(), static_cast<int>(call.operation.size()),
                call.operation.data(), call.path.c_str(), bytes.c_str());
    std::fflush(stdout);
    if (slow) {
      char* rate = nullptr;
      const double seconds = std::strtod(rule.action.c_str() + 5, &rate);
      BeSlow(seconds, *rate == ':' ? std::atof(rate + 1) : 1e12,
             call.operation == "read" || call.operation == "write" ? call.to - call.from : 0);
      continue;
    }
    if (rule.action == "lie") return kLie;
    const bool hang = rule.action == "hang";
    if (hang || rule.action.rfind("wait:", 0) == 0) {
      const double seconds = hang ? 1e9 : std::atof(rule.action.c_str() + 5);
      const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
      bool there = true;
      while (there && std::chrono::steady_clock::now() < end) {
        Pause();
        if (fuse_req_interrupted(call.request) != 0 && IsKilled(call.request)) return EINTR;
        const std::vector<Rule> now = Rules();
        there = std::any_of(now.begin(), now.end(),
                            [&](const Rule& other) { return other.text == rule.text; });
      }
      continue;
    }
    for (const auto& [name, number] : kErrors) {
      if (rule.action == name) return number;
    }
    return EIO;
  }
  return 0;
}

// ---- Nodes ------------------------------------------------------------------------------------

struct Node {
  int fd = -1;  // O_PATH
  std::uint64_t lookups = 0;
  std::uint64_t opens = 0;
  bool silly = false;
};
using Key = std::pair<dev_t, ino_t>;

bool silly_renames = false;
bool keeps_cache = false;
std::atomic<unsigned> silly_names{0};
std::string backing;
std::mutex nodes_mutex;
std::map<Key, Node> nodes;  // Their addresses are inode numbers.
Node root;

Node& Of(fuse_ino_t ino) { return ino == FUSE_ROOT_ID ? root : *reinterpret_cast<Node*>(ino); }

std::string Proc(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

// Where it is now, below the mount point.
std::string PathOf(int fd) {
  Chars to;
  const ssize_t size = ::readlink(Proc(fd).c_str(), to.data(), to.size());
  const std::string path(to.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  return path.size() > backing.size() ? path.substr(backing.size() + 1) : std::string();
}
std::string PathOf(fuse_ino_t ino) { return PathOf(Of(ino).fd); }
std::string PathOf(fuse_ino_t parent, const char* name) {
  const std::string folder = PathOf(parent);
  return folder.empty() ? name : folder + "/" + name;
}

int Errno(int result) { return result < 0 ? errno : 0; }

int Look(fuse_ino_t parent, const char* name, fuse_entry_param* entry) {
  *entry = {};
  const int fd = ::openat(Of(parent).fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return errno;
  if (::fstat(fd, &entry->attr) != 0) {
    const int error = errno;
    ::close(fd);
    return error;
  }
  std::lock_guard lock(nodes_mutex);
  Node& node = nodes[{entry->attr.st_dev, entry->attr.st_ino}];
  if (node.lookups++ == 0) {
    node.fd = fd;
  } else {
    ::close(fd);
  }
  entry->ino = reinterpret_cast<fuse_ino_t>(&node);
  return 0;
}

constexpr int kAnswered = -2;

// What the rules say, then what `f` does: 0, an errno, or kAnswered.
template <typename F>
void Serve(const Call& call, F f) {
  int error = Meet(call);
  if (error == 0) error = f();
  if (error != kAnswered) fuse_reply_err(call.request, error == kLie ? 0 : error);
}

int AnswerEntry(fuse_req_t request, fuse_ino_t parent, const char* name) {
  fuse_entry_param entry;
  if (const int error = Look(parent, name, &entry)) return error;
  fuse_reply_entry(request, &entry);
  return kAnswered;
}

void Forget(fuse_ino_t ino, std::uint64_t count) {
  if (ino == FUSE_ROOT_ID) return;
  std::lock_guard lock(nodes_mutex);
  Node& node = Of(ino);
  if ((node.lookups -= count) != 0) return;
  ::close(node.fd);
  nodes.erase(
      std::find_if(nodes.begin(), nodes.end(), [&](auto& n) { return &n.second == &node; }));
}

// ---- Names ------------------------------------------------------------------------------------

void Lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
  Serve({request, "lookup", PathOf(parent, name), {}},
        [&] { return AnswerEntry(request, parent, name); });
}

// A last close is told to us after the caller's close has returned: NFS waits for it before it
// looks at what is in the way, so often at most.
constexpr int kCloseWaits = 20;

// Where the file of this name is open, it gets another until its last close. 0, or an errno; sets
// `done` where that is all that is to happen to the name.
int SillyRename(fuse_ino_t parent, const char* name, bool* done) {
  struct stat st {};
  if (!silly_renames || ::fstatat(Of(parent).fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) return 0;
  std::lock_guard lock(nodes_mutex);
  const auto it = nodes.find({st.st_dev, st.st_ino});
  if (it == nodes.end() || it->second.opens == 0) return 0;
  if (it->second.silly) return EBUSY;
  if (st.st_nlink > 1) return 0;
  char other[32];
  std::snprintf(other, sizeof(other), ".nfs%012" PRIx64 "%04x",
                static_cast<std::uint64_t>(st.st_ino), ++silly_names);
  if (::renameat(Of(parent).fd, name, Of(parent).fd, other) != 0) return errno;
  it->second.silly = true;
  *done = true;
  return 0;
}

void Unlink(fuse_req_t request, fuse_ino_t parent, const char* name) {
  Serve({request, "unlink", PathOf(parent, name), {}}, [&] {
    bool done = false;
    int error = EBUSY;
    for (int i = 0; i < kCloseWaits && error == EBUSY; ++i) {
      if (i > 0) Pause();
      error = SillyRename(parent, name, &done);
    }
    // Its last close has come meanwhile, and took it away.
    return error != 0 || done ? error : Errno(::unlinkat(Of(parent).fd, name, 0));
  });
}

void Rmdir(fuse_req_t request, fuse_ino_t parent, const char* name) {
  Serve({request, "rmdir", PathOf(parent, name), {}}, [&] {
    int error = ENOTEMPTY;
    for (int i = 0; i < kCloseWaits && error == ENOTEMPTY; ++i) {
      if (i > 0) Pause();
      error = Errno(::unlinkat(Of(parent).fd, name, AT_REMOVEDIR));
      if (!silly_renames) break;
    }
    return error;
  });
}

void Rename(fuse_req_t request, fuse_ino_t parent, const char* name, fuse_ino_t to,
            const char* to_name, unsigned flags) {
  const std::string from_path = PathOf(parent, name);
  const std::string to_path = PathOf(to, to_name);
  Serve({request, "rename", from_path, to_path}, [&] {
    int error = flags == 0 ? 0 : Meet({request, "flags", from_path, to_path});
    bool moved = false;
    if (error == 0 && flags == 0) error = SillyRename(to, to_name, &moved);
    if (error != 0) return error;
    return Errno(::renameat2(Of(parent).fd, name, Of(to).fd, to_name, flags));
  });
}

void Mkdir(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode) {
  Serve({request, "mkdir", PathOf(parent, name), {}}, [&] {
    const int error = Errno(::mkdirat(Of(parent).fd, name, mode));
    return error != 0 ? error : AnswerEntry(request, parent, name);
  });
}

void Symlink(fuse_req_t request, const char* link, fuse_ino_t parent, const char* name) {
  Serve({request, "symlink", PathOf(parent, name), {}}, [&] {
    const int error = Errno(::symlinkat(link, Of(parent).fd, name));
    return error != 0 ? error : AnswerEntry(request, parent, name);
  });
}

void Link(fuse_req_t request, fuse_ino_t ino, fuse_ino_t parent, const char* name) {
  Serve({request, "link", PathOf(parent, name), PathOf(ino)}, [&] {
    const int error =
        Errno(::linkat(AT_FDCWD, Proc(Of(ino).fd).c_str(), Of(parent).fd, name, AT_SYMLINK_FOLLOW));
    return error != 0 ? error : AnswerEntry(request, parent, name);
  });
}

void Readlink(fuse_req_t request, fuse_ino_t ino) {
  Serve({request, "readlink", PathOf(ino), {}}, [&] {
    Chars to;
    const ssize_t size = ::readlinkat(Of(ino).fd, "", to.data(), to.size() - 1);
    if (size < 0) return errno;
    to[static_cast<std::size_t>(size)] = '\0';
    fuse_reply_readlink(request, to.data());
    return kAnswered;
  });
}

// ---- Attributes -------------------------------------------------------------------------------

int AnswerAttributes(fuse_req_t request, fuse_ino_t ino) {
  struct stat st {};
  if (::fstatat(Of(ino).fd, "", &st, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0) return errno;
  fuse_reply_attr(request, &st, 0);
  return kAnswered;
}

void GetAttr(fuse_req_t request, fuse_ino_t ino, fuse_file_info*) {
  Serve({request, "getattr", PathOf(ino), {}}, [&] { return AnswerAttributes(request, ino); });
}

int Change(fuse_ino_t ino, const struct stat& st, int what, const fuse_file_info* file) {
  const std::string path = Proc(Of(ino).fd);
  int error = 0;
  if (what & FUSE_SET_ATTR_MODE) error = Errno(::chmod(path.c_str(), st.st_mode));
  if (error == 0 && (what & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID))) {
    error = Errno(::fchownat(Of(ino).fd, "", (what & FUSE_SET_ATTR_UID) ? st.st_uid : ~uid_t{0},
                             (what & FUSE_SET_ATTR_GID) ? st.st_gid : ~gid_t{0}, AT_EMPTY_PATH));
  }
  if (error == 0 && (what & FUSE_SET_ATTR_SIZE)) {
    error = Errno(file != nullptr ? ::ftruncate(static_cast<int>(file->fh), st.st_size)
                                  : ::truncate(path.c_str(), st.st_size));
  }
  if (error == 0 && (what & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME))) {
    timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
    if (what & FUSE_SET_ATTR_ATIME) times[0] = st.st_atim;
    if (what & FUSE_SET_ATTR_MTIME) times[1] = st.st_mtim;
    if (what & FUSE_SET_ATTR_ATIME_NOW) times[0].tv_nsec = UTIME_NOW;
    if (what & FUSE_SET_ATTR_MTIME_NOW) times[1].tv_nsec = UTIME_NOW;
    error = Errno(::utimensat(AT_FDCWD, path.c_str(), times, 0));
  }
  return error;
}

void SetAttr(fuse_req_t request, fuse_ino_t ino, struct stat* st, int what, fuse_file_info* file) {
  Serve({request, "setattr", PathOf(ino), {}}, [&] {
    const int error = Change(ino, *st, what, file);
    return error != 0 ? error : AnswerAttributes(request, ino);
  });
}

void StatFs(fuse_req_t request, fuse_ino_t ino) {
  Serve({request, "statfs", PathOf(ino), {}}, [&] {
    struct statvfs st {};
    if (::fstatvfs(Of(ino).fd, &st) != 0) return errno;
    fuse_reply_statfs(request, &st);
    return kAnswered;
  });
}

// ---- Files ------------------------------------------------------------------------------------

void Opened(fuse_ino_t ino) {
  std::lock_guard lock(nodes_mutex);
  ++Of(ino).opens;
}

void Open(fuse_req_t request, fuse_ino_t ino, fuse_file_info* file) {
  Serve({request, "open", PathOf(ino), {}}, [&] {
    const int flags = file->flags & ~(O_NOFOLLOW | O_DIRECT | O_CREAT | O_EXCL);
    const int fd = ::open(Proc(Of(ino).fd).c_str(), flags | O_CLOEXEC);
    if (fd < 0) return errno;
    file->fh = static_cast<std::uint64_t>(fd);
    Opened(ino);
    file->keep_cache = keeps_cache ? 1 : 0;
    fuse_reply_open(request, file);
    return kAnswered;
  });
}

void Create(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode,
            fuse_file_info* file) {
  Serve({request, "create", PathOf(parent, name), {}}, [&] {
    const int flags = file->flags & ~(O_NOFOLLOW | O_DIRECT);
    const int fd = ::openat(Of(parent).fd, name, flags | O_CREAT | O_CLOEXEC, mode);
    if (fd < 0) return errno;
    file->fh = static_cast<std::uint64_t>(fd);
    fuse_entry_param entry;
    if (const int error = Look(parent, name, &entry)) {
      ::close(fd);
      return error;
    }
    Opened(entry.ino);
    fuse_reply_create(request, &entry, file);
    return kAnswered;
  });
}

void Release(fuse_req_t request, fuse_ino_t ino, fuse_file_info* file) {
  ::close(static_cast<int>(file->fh));
  {
    std::lock_guard lock(nodes_mutex);
    Node& node = Of(ino);
    if (--node.opens == 0 && node.silly) {
      ::unlink((backing + "/" + PathOf(node.fd)).c_str());
      node.silly = false;
    }
  }
  fuse_reply_err(request, 0);
}

void Read(fuse_req_t request, fuse_ino_t ino, std::size_t size, off_t at, fuse_file_info* file) {
  const auto from = static_cast<std::uint64_t>(at);
  Serve({request, "read", PathOf(ino), {}, from, from + size}, [&] {
    std::vector<char> bytes(size);
    const ssize_t got = ::pread(static_cast<int>(file->fh), bytes.data(), size, at);
    if (got < 0) return errno;
    fuse_reply_buf(request, bytes.data(), static_cast<std::size_t>(got));
    return kAnswered;
  });
}

void Write(fuse_req_t request, fuse_ino_t ino, const char* bytes, std::size_t size, off_t at,
           fuse_file_info* file) {
  const auto from = static_cast<std::uint64_t>(at);
  const int error = Meet({request, "write", PathOf(ino), {}, from, from + size});
  ssize_t put = static_cast<ssize_t>(size);
  if (error == 0) put = ::pwrite(static_cast<int>(file->fh), bytes, size, at);
  if (error > 0 || put < 0) {
    fuse_reply_err(request, error > 0 ? error : errno);
    return;
  }
  fuse_reply_write(request, static_cast<std::size_t>(put));
}

void Flush(fuse_req_t request, fuse_ino_t ino, fuse_file_info*) {
  Serve({request, "flush", PathOf(ino), {}}, [] { return 0; });
}

void Sync(fuse_req_t request, fuse_ino_t ino, int, fuse_file_info* file) {
  Serve({request, "fsync", PathOf(ino), {}},
        [&] { return Errno(::fsync(static_cast<int>(file->fh))); });
}

// Waits without being stuck in the kernel.
void Flock(fuse_req_t request, fuse_ino_t ino, fuse_file_info* file, int how) {
  Serve({request, "lock", PathOf(ino), {}}, [&] {
    while (::flock(static_cast<int>(file->fh), how | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK || (how & LOCK_NB) != 0) return errno;
      if (fuse_req_interrupted(request) != 0) return EINTR;
      Pause();
    }
    return 0;
  });
}

// Of POSIX locks only the refusal is played.
void SetLock(fuse_req_t request, fuse_ino_t ino, fuse_file_info*, struct flock*, int) {
  Serve({request, "lock", PathOf(ino), {}}, [] { return 0; });
}

// ---- Folders ----------------------------------------------------------------------------------

DIR* FolderOf(fuse_file_info* file) { return reinterpret_cast<DIR*>(file->fh); }

void OpenDir(fuse_req_t request, fuse_ino_t ino, fuse_file_info* file) {
  Serve({request, "open", PathOf(ino), {}}, [&] {
    const int fd = ::openat(Of(ino).fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* const folder = fd < 0 ? nullptr : ::fdopendir(fd);
    if (folder == nullptr) return errno;
    file->fh = reinterpret_cast<std::uint64_t>(folder);
    fuse_reply_open(request, file);
    return kAnswered;
  });
}

void ReadDir(fuse_req_t request, fuse_ino_t ino, std::size_t size, off_t at, fuse_file_info* file) {
  Serve({request, "readdir", PathOf(ino), {}}, [&] {
    DIR* const folder = FolderOf(file);
    ::seekdir(folder, at);
    std::vector<char> bytes(size);
    std::size_t used = 0;
    while (const dirent* entry = ::readdir(folder)) {
      struct stat st {};
      st.st_ino = entry->d_ino;
      st.st_mode = static_cast<mode_t>(entry->d_type) << 12;
      const std::size_t more = fuse_add_direntry(request, bytes.data() + used, size - used,
                                                 entry->d_name, &st, entry->d_off);
      if (more > size - used) break;
      used += more;
    }
    fuse_reply_buf(request, bytes.data(), used);
    return kAnswered;
  });
}

void ReleaseDir(fuse_req_t request, fuse_ino_t, fuse_file_info* file) {
  ::closedir(FolderOf(file));
  fuse_reply_err(request, 0);
}

void SyncDir(fuse_req_t request, fuse_ino_t ino, int, fuse_file_info* file) {
  Serve({request, "fsync", PathOf(ino), {}},
        [&] { return Errno(::fsync(::dirfd(FolderOf(file)))); });
}

fuse_lowlevel_ops Operations() {
  fuse_lowlevel_ops ops{};
  // Read-ahead that hangs must not hold that of other files, as it would at the default of 12.
  ops.init = [](void*, fuse_conn_info* conn) {
    conn->max_background = 1024;
    conn->congestion_threshold = 1024;
  };
  ops.lookup = Lookup;
  ops.forget = [](fuse_req_t request, fuse_ino_t ino, std::uint64_t count) {
    Forget(ino, count);
    fuse_reply_none(request);
  };
  ops.unlink = Unlink;
  ops.rmdir = Rmdir;
  ops.rename = Rename;
  ops.mkdir = Mkdir;
  ops.symlink = Symlink;
  ops.readlink = Readlink;
  ops.link = Link;
  ops.getattr = GetAttr;
  ops.setattr = SetAttr;
  ops.statfs = StatFs;
  ops.open = Open;
  ops.create = Create;
  ops.release = Release;
  ops.read = Read;
  ops.write = Write;
  ops.flush = Flush;
  ops.fsync = Sync;
  ops.flock = Flock;
  ops.setlk = SetLock;
  ops.opendir = OpenDir;
  ops.readdir = ReadDir;
  ops.releasedir = ReleaseDir;
  ops.fsyncdir = SyncDir;
  return ops;
}

}  // namespace

int main(int argc, char** argv) {
  silly_renames = argc == 5 && std::strcmp(argv[4], "--silly") == 0;
  keeps_cache = argc == 5 && std::strcmp(argv[4], "--cache") == 0;
  if (argc != 4 && !silly_renames && !keeps_cache) {
    std::fprintf(stderr, "usage: adverse_fs BACKING MOUNTPOINT RULES [--silly | --cache]\n");
    return 2;
  }
  Chars resolved;
  if (::realpath(argv[1], resolved.data()) == nullptr) {
    std::perror(argv[1]);
    return 2;
  }
  backing = resolved.data();
  rules_path = argv[3];
  root.fd = ::open(backing.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  ::umask(0);
  const fuse_lowlevel_ops operations = Operations();
  std::string name = "adverse_fs";
  std::string option = "-ofsname=adverse_fs,subtype=adverse,allow_other,default_permissions";
  char* arguments[] = {name.data(), option.data(), nullptr};
  fuse_args args = FUSE_ARGS_INIT(2, arguments);
  fuse_session* session = fuse_session_new(&args, &operations, sizeof(operations), nullptr);
  if (session == nullptr || fuse_set_signal_handlers(session) != 0 ||
      fuse_session_mount(session, argv[2]) != 0)
    return 2;
  fuse_loop_config* config = fuse_loop_cfg_create();
  fuse_loop_cfg_set_max_threads(config, 128);  // Those that hang hold one each.
  const int ended = fuse_session_loop_mt(session, config);
  fuse_loop_cfg_destroy(config);
  fuse_session_unmount(session);
  fuse_session_destroy(session);
  return ended == 0 ? 0 : 1;
}
