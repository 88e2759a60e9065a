// SPDX-License-Identifier: Apache-2.0
// Keeps blocks of remote objects in files, and proves what it reads from them. All files are
// reached through a descriptor of their directory, which was checked when it was opened, and no
// symbolic link is followed.
#include "remote/disk_cache.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <dirent.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>

#include "base/byte_size.h"
#include "base/deadline.h"
#include "base/file_system.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/thread.h"
#include "remote/environment.h"
#include "remote/sigv4.h"
#include "remote/text.h"
#include "remote/url.h"

namespace tensormount {
namespace {

// One hash each, so that a short read proves what it returns without reading the whole block.
constexpr std::uint64_t kHashedBytes = 64 << 10;
constexpr std::size_t kHashes = DiskCache::kBlockBytes / kHashedBytes;
// The bytes of the block begin at this offset of its file.
constexpr std::uint64_t kHeaderBytes = 4096;
constexpr const char* kUsageName = "usage";
constexpr std::string_view kNewPrefix = ".new-";
// A block whose mtime is older than this gets the current time when it is read.
constexpr std::int64_t kTouchSeconds = 10;
// A time so far in the future is from a wrong clock.
constexpr std::int64_t kFutureSeconds = 600;
constexpr std::chrono::seconds kLockPatience{2};
constexpr std::chrono::seconds kFinishPatience{5};
// Of blocks that wait to be written.
constexpr std::uint64_t kMostWaiting = std::uint64_t{64} << 20;

constexpr std::array<char, 8> kMagic = {'T', 'M', 'B', 'L', 'O', 'C', 'K', '1'};
struct BlockHeader {
  std::array<char, 8> magic{};
  std::array<char, 64> key{};
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  std::array<Hash128, kHashes> hashes{};
  Hash128 own;  // Of the members above.
};
static_assert(sizeof(BlockHeader) == 8 + 64 + 8 + 8 + 16 * kHashes + 16);
static_assert(sizeof(BlockHeader) <= kHeaderBytes);

Hash128 OwnHash(const BlockHeader& header) { return Xxh3(&header, offsetof(BlockHeader, own)); }

BlockHeader HeaderOf(const DiskCache::BlockName& name) {
  BlockHeader header;
  header.magic = kMagic;
  std::memcpy(header.key.data(), name.key.data(), std::min(name.key.size(), header.key.size()));
  header.number = name.number;
  header.bytes = name.bytes;
  return header;
}

// The contents of the file "usage".
struct Usage {
  std::uint64_t bytes = 0;
  Hash128 hash;
};

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { Close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }
  bool Close() { return fd_ < 0 || close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

// False with errno, or with errno 0 at the end of the file.
bool ReadAll(int fd, void* out, std::uint64_t size, std::uint64_t offset) {
  auto* to = static_cast<char*>(out);
  while (size > 0) {
    const ssize_t n = pread(fd, to, size, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = 0;
    if (n <= 0) return false;
    to += n;
    offset += static_cast<std::uint64_t>(n);
    size -= static_cast<std::uint64_t>(n);
  }
  return true;
}

bool WriteAll(int fd, const void* data, std::uint64_t size, std::uint64_t offset) {
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = pwrite(fd, from, size, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENOSPC;
    if (n <= 0) return false;
    from += n;
    offset += static_cast<std::uint64_t>(n);
    size -= static_cast<std::uint64_t>(n);
  }
  return true;
}

// Errors that say nothing of the cache.
bool IsOfTheProcess(int error) { return error == EMFILE || error == ENFILE || error == ENOMEM; }

std::string Reason(int error) { return std::generic_category().message(error); }

// Calls `fn` for the files of blocks, complete or not, until it returns false.
Status ForEachBlockFile(int directory,
                        const std::function<bool(const char*, const struct stat&)>& fn) {
  Descriptor fd(openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  DIR* const list = fd.get() < 0 ? nullptr : fdopendir(fd.get());
  if (list == nullptr) return Status::FromErrno(errno, "list", "the cache");
  (void)fd.Release();
  int error = 0;
  for (;;) {
    errno = 0;
    const dirent* const entry = readdir(list);
    error = errno;
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    const bool ours =
        name.starts_with(kNewPrefix) || (name.size() > 65 && name[64] == '-' && name[0] != '.');
    struct stat info {};
    if (!ours || fstatat(directory, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!fn(entry->d_name, info)) break;
  }
  closedir(list);
  return error == 0 ? Status() : Status::FromErrno(error, "list", "the cache");
}

// Checks that nobody else may change what is in the directory.
Status CheckOwner(int fd, const std::string& path) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return Status::FromErrno(errno, "open", path);
  if (info.st_uid != geteuid()) {
    return {Code::kPermissionDenied, path + ": the cache belongs to the user " +
                                         std::to_string(info.st_uid) +
                                         ", who could change what is read from it; name a "
                                         "directory of your own"};
  }
  if ((info.st_mode & 022) != 0) {
    return {Code::kPermissionDenied,
            path +
                ": other users may write to the cache, and so change what is read from it; run "
                "`chmod go-w " +
                path + "`"};
  }
  return {};
}

// The query of a URL without what signs it and differs each time it is signed. All else may name
// another object.
std::string QueryOfObject(const std::string& query) {
  constexpr std::string_view kOldSignature[] = {"signature", "expires",        "key-pair-id",
                                                "policy",    "awsaccesskeyid", "googleaccessid"};
  std::vector<std::pair<std::string, std::string>> parts;  // Name in lower case, text.
  for (std::size_t at = 0; at < query.size();) {
    const std::size_t end = std::min(query.find('&', at), query.size());
    const std::string part = query.substr(at, end - at);
    parts.emplace_back(Lowered(part.substr(0, part.find('='))), part);
    at = end + 1;
  }
  const bool signed_before = std::any_of(
      parts.begin(), parts.end(), [](const auto& part) { return part.first == "signature"; });
  std::string out;
  for (const auto& [name, text] : parts) {
    if (name.starts_with("x-amz-") || name.starts_with("x-goog-")) continue;
    if (signed_before && std::find(std::begin(kOldSignature), std::end(kOldSignature), name) !=
                             std::end(kOldSignature)) {
      continue;
    }
    out += (out.empty() ? "" : "&") + text;
  }
  return out;
}

// The blocks of this process that wait to be written, and the thread that writes them.
class CacheWriter {
 public:
  struct Job {
    std::shared_ptr<DiskCache> cache;
    std::string key;
    std::uint64_t object_bytes = 0;
    ByteRange range;  // Whole blocks.
    const std::byte* bytes = nullptr;
    std::shared_ptr<const void> owner;  // Of `bytes`.
  };

  static CacheWriter& Get() { return PerProcess<CacheWriter>(); }

  // False: too much waits already. Otherwise Add follows.
  bool MakeRoom(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (waiting_ + bytes > kMostWaiting) return false;
    waiting_ += bytes;
    return true;
  }

  void Add(Job job) {
    static const int registered = std::atexit(&FinishDiskCaches);
    (void)registered;  // If atexit failed, the last blocks are lost.
    const std::lock_guard lock(mutex_);
    const std::uint64_t bytes = job.range.size();
    jobs_.push_back(std::move(job));
    if (!started_) {
      try {
        // Lives as long as the process.
        Thread([this] { Work(); }).detach();
        started_ = true;
      } catch (const std::system_error&) {  // No thread: nothing is kept now.
        jobs_.pop_back();
        waiting_ -= bytes;
        return;
      }
    }
    changed_.notify_all();
  }

  void Finish(const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline.time(), [&] { return waiting_ == 0; });
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !jobs_.empty(); });
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      const std::uint64_t bytes = job.range.size();
      for (std::uint64_t at = job.range.begin; at < job.range.end; at += DiskCache::kBlockBytes) {
        const std::uint64_t size = std::min(DiskCache::kBlockBytes, job.object_bytes - at);
        job.cache->Write({job.key, at / DiskCache::kBlockBytes, size},
                         job.bytes + (at - job.range.begin));
      }
      job = {};
      lock.lock();
      waiting_ -= bytes;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::uint64_t waiting_ = 0;  // Of jobs_, of the job that is being written, and what has room.
  bool started_ = false;
};

}  // namespace

Result<std::shared_ptr<DiskCache>> DiskCache::Open(const std::string& directory,
                                                   std::uint64_t most_bytes) {
  const std::string path = WithoutTrailingSlashes(directory);
  int error = 0;
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    if (mkdir(path.substr(0, end).c_str(), 0700) != 0 && errno != EEXIST) error = errno;
    if (end == std::string::npos) break;
  }
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  const auto open_failed = [](int why, const std::string& what) {
    if (why == ENOTDIR || why == ELOOP) {
      return Status(Code::kPermissionDenied,
                    what + ": the cache is no directory, or is a symbolic link");
    }
    return Status::FromErrno(why, "open the cache", what);
  };
  const Descriptor top(open(path.c_str(), kFlags));
  if (top.get() < 0) return open_failed(errno == ENOENT && error != 0 ? error : errno, path);
  TENSORMOUNT_RETURN_IF_ERROR(CheckOwner(top.get(), path));
  error = mkdirat(top.get(), "blocks", 0700) == 0 ? 0 : errno;
  Descriptor blocks(openat(top.get(), "blocks", kFlags));
  const std::string inner = JoinPath(path, "blocks");
  if (blocks.get() < 0) return open_failed(errno == ENOENT && error != 0 ? error : errno, inner);
  TENSORMOUNT_RETURN_IF_ERROR(CheckOwner(blocks.get(), inner));
  return std::shared_ptr<DiskCache>(new DiskCache(path, blocks.Release(), most_bytes));
}

DiskCache::~DiskCache() { close(blocks_); }

std::string DiskCache::FileName(const BlockName& name) const {
  return name.key + "-" + std::to_string(name.number);
}

bool DiskCache::Has(const BlockName& name) const {
  struct stat info {};
  return reads_.load() &&
         fstatat(blocks_, FileName(name).c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISREG(info.st_mode);
}

void DiskCache::StartReading(const BlockName& name) const {
  if (!reads_.load()) return;
  const Descriptor file(
      openat(blocks_, FileName(name).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() >= 0) (void)posix_fadvise(file.get(), 0, 0, POSIX_FADV_WILLNEED);
}

bool DiskCache::Read(const BlockName& name, ByteRange part, std::byte* out) {
  if (!reads_.load()) return false;
  const Descriptor file(
      openat(blocks_, FileName(name).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info {};
  if (file.get() < 0 || fstat(file.get(), &info) != 0) {
    if (errno == ELOOP || errno == ENXIO) {
      Remove(name, "is no regular file");
    } else if (errno != ENOENT && !IsOfTheProcess(errno)) {
      StopReading(errno);
    }
    return false;
  }
  if (!S_ISREG(info.st_mode)) {
    Remove(name, "is no regular file");
    return false;
  }
  // What is hashed together is read together.
  const ByteRange hashed{
      part.begin / kHashedBytes * kHashedBytes,
      std::min((part.end + kHashedBytes - 1) / kHashedBytes * kHashedBytes, name.bytes)};
  std::unique_ptr<std::byte[]> scratch;  // NOLINT(*-avoid-c-arrays)
  if (hashed != part) scratch.reset(new std::byte[hashed.size()]);
  std::byte* const to = scratch == nullptr ? out : scratch.get();
  BlockHeader header;
  if (!ReadAll(file.get(), &header, sizeof(header), 0) ||
      !ReadAll(file.get(), to, hashed.size(), kHeaderBytes + hashed.begin)) {
    if (errno == 0) {
      Remove(name, "was cut off");
    } else {
      StopReading(errno);
    }
    return false;
  }
  const BlockHeader expected = HeaderOf(name);
  bool good = header.own == OwnHash(header) && header.magic == expected.magic &&
              header.key == expected.key && header.number == expected.number &&
              header.bytes == expected.bytes;
  for (std::uint64_t at = hashed.begin; good && at < hashed.end; at += kHashedBytes) {
    const std::uint64_t size = std::min(kHashedBytes, hashed.end - at);
    good = Xxh3(to + (at - hashed.begin), size) == header.hashes.at(at / kHashedBytes);
  }
  if (!good) {
    Remove(name, "does not have the bytes that its hash is of");
    return false;
  }
  if (scratch != nullptr) std::memcpy(out, to + (part.begin - hashed.begin), part.size());
  const std::int64_t age = std::time(nullptr) - info.st_mtim.tv_sec;
  if (age < 0 || age > kTouchSeconds) (void)futimens(file.get(), nullptr);
  return true;
}

void DiskCache::Write(const BlockName& name, const std::byte* bytes) {
  if (!writes_.load() || Has(name)) return;
  if (!Reserve(kHeaderBytes + name.bytes)) return;
  BlockHeader header = HeaderOf(name);
  for (std::uint64_t at = 0; at < name.bytes; at += kHashedBytes) {
    header.hashes.at(at / kHashedBytes) = Xxh3(bytes + at, std::min(kHashedBytes, name.bytes - at));
  }
  header.own = OwnHash(header);
  std::array<char, kHeaderBytes> first{};
  std::memcpy(first.data(), &header, sizeof(header));
  static thread_local std::mt19937_64 random(std::random_device{}());
  const std::string temporary =
      std::string(kNewPrefix) + std::to_string(getpid()) + "-" + std::to_string(random());
  Descriptor file(openat(blocks_, temporary.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (file.get() < 0) {
    if (!IsOfTheProcess(errno)) StopWriting(errno);
    return;
  }
  // close() reports what the server of a network file system met.
  if (!WriteAll(file.get(), first.data(), first.size(), 0) ||
      !WriteAll(file.get(), bytes, name.bytes, kHeaderBytes) || !file.Close() ||
      renameat(blocks_, temporary.c_str(), blocks_, FileName(name).c_str()) != 0) {
    const int error = errno;
    // If the file is gone, another process removed it as the oldest one, or the directory is gone,
    // which the next Reserve finds.
    if (unlinkat(blocks_, temporary.c_str(), 0) == 0 || errno != ENOENT) StopWriting(error);
  }
}

bool DiskCache::Reserve(std::uint64_t bytes) {
  if (bytes > most_bytes_) return false;
  // Opened each time: a descriptor that a forked child shares would share its lock, too.
  const Descriptor file(
      openat(blocks_, kUsageName, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
  if (file.get() < 0) {
    if (!IsOfTheProcess(errno)) StopWriting(errno);
    return false;
  }
  const Deadline deadline = Deadline::After(kLockPatience);
  while (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      StopWriting(errno);
      return false;
    }
    if (deadline.Passed()) return false;  // Another process is removing files, or was stopped.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Usage usage;
  const bool known = ReadAll(file.get(), &usage, sizeof(usage), 0) &&
                     usage.hash == Xxh3(&usage.bytes, sizeof(usage.bytes));
  bool fits = known && usage.bytes <= most_bytes_ - bytes;
  if (!fits) {
    // If files have to go, a sixteenth more goes than is needed, so that they are seldom listed.
    const Result<std::uint64_t> left = Evict(most_bytes_ - bytes);
    if (left.ok()) {
      usage.bytes = left.value();
      fits = usage.bytes <= most_bytes_ - bytes;
    } else {
      StopWriting(left.status().ToErrno());
    }
  }
  if (fits) {
    usage.bytes += bytes;
    usage.hash = Xxh3(&usage.bytes, sizeof(usage.bytes));
    if (!WriteAll(file.get(), &usage, sizeof(usage), 0)) {
      StopWriting(errno);
      fits = false;
    }
  }
  (void)flock(file.get(), LOCK_UN);
  return fits;
}

Result<std::uint64_t> DiskCache::Evict(std::uint64_t most) {
  struct Used {
    std::int64_t seconds = 0;
    std::int64_t nanoseconds = 0;
    std::uint64_t bytes = 0;
    auto operator<=>(const Used&) const = default;
  };
  const std::int64_t now = std::time(nullptr);
  const auto used_of = [now](const struct stat& info) {
    Used used{info.st_mtim.tv_sec, info.st_mtim.tv_nsec, static_cast<std::uint64_t>(info.st_size)};
    if (used.seconds > now + kFutureSeconds) used.seconds = 0;
    return used;
  };
  std::vector<Used> files;
  std::uint64_t left = 0;
  TENSORMOUNT_RETURN_IF_ERROR(ForEachBlockFile(blocks_, [&](const char*, const struct stat& info) {
    files.push_back(used_of(info));
    left += files.back().bytes;
    return true;
  }));
  if (left <= most) return left;
  std::sort(files.begin(), files.end());
  const std::uint64_t target = most - most / 16;
  std::uint64_t would_be = left;
  std::size_t gone = 0;
  while (would_be > target && gone < files.size()) would_be -= files[gone++].bytes;
  const Used last = files[gone - 1];
  int error = 0;
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachBlockFile(blocks_, [&](const char* name, const struct stat& info) {
        if (left <= target) return false;
        const Used used = used_of(info);
        if (used > last) return true;
        if (unlinkat(blocks_, name, 0) == 0 || errno == ENOENT) {
          left -= std::min(left, used.bytes);
        } else {
          error = errno;
        }
        return error == 0;
      }));
  if (error != 0) return Status::FromErrno(error, "remove a block of", path_);
  return left;
}

void DiskCache::Remove(const BlockName& name, const char* why) {
  (void)unlinkat(blocks_, FileName(name).c_str(), 0);
  if (told_of_damage_.exchange(true)) return;
  Log(LogLevel::kWarning, path_ + ": the file blocks/" + FileName(name) + " of the cache " + why +
                              "; it was removed and is asked for again (reported once)");
}

void DiskCache::StopWriting(int error) {
  if (!writes_.exchange(false)) return;
  Log(LogLevel::kWarning, path_ + ": the cache keeps nothing more: " +
                              (error == ENOENT ? "its directory was removed" : Reason(error)) +
                              "; reads go on from the server");
}

void DiskCache::StopReading(int error) {
  writes_ = false;
  if (!reads_.exchange(false)) return;
  Log(LogLevel::kWarning,
      path_ + ": the cache is no longer used: " + Reason(error) + "; reads go on from the server");
}

std::shared_ptr<const CachedObject> CachedObject::Make(std::shared_ptr<DiskCache> cache,
                                                       std::string_view url,
                                                       std::string_view identity,
                                                       std::uint64_t size) {
  Result<Url> parsed = ParseUrl(url);
  if (cache == nullptr || identity.empty() || size == 0 || !parsed.ok()) return nullptr;
  parsed.value().query = QueryOfObject(parsed.value().query);
  // A hash that nobody can find another text for: servers choose ETags as they like. Lengths come
  // first, so that no two triples are one text.
  const std::string place = parsed.value().ToString();
  const std::string text = "tensormount block " + std::to_string(place.size()) + " " + place + " " +
                           std::to_string(identity.size()) + " " + std::string(identity) + " " +
                           std::to_string(size);
  return std::shared_ptr<const CachedObject>(
      new CachedObject(std::move(cache), Hexadecimal(Sha256(text)), size));
}

DiskCache::BlockName CachedObject::NameAt(std::uint64_t offset) const {
  const std::uint64_t number = offset / DiskCache::kBlockBytes;
  return {key_, number, std::min(DiskCache::kBlockBytes, size_ - number * DiskCache::kBlockBytes)};
}

bool CachedObject::Read(ByteRange range, std::byte* out) const {
  const std::uint64_t begin = range.begin / DiskCache::kBlockBytes * DiskCache::kBlockBytes;
  return cache_->Read(NameAt(range.begin), {range.begin - begin, range.end - begin}, out);
}

std::vector<ByteRange> CachedObject::Missing(ByteRange range) const {
  std::vector<ByteRange> out;
  const std::uint64_t end = std::min(range.end, size_);
  std::uint64_t at = range.begin / DiskCache::kBlockBytes * DiskCache::kBlockBytes;
  for (; at < end; at += DiskCache::kBlockBytes) {
    if (Has(at)) continue;
    const std::uint64_t to = std::min(at + DiskCache::kBlockBytes, size_);
    if (!out.empty() && out.back().end == at) {
      out.back().end = to;
    } else {
      out.push_back({at, to});
    }
  }
  return out;
}

void CachedObject::Keep(ByteRange range, const std::byte* bytes,
                        std::shared_ptr<const void> owner) const {
  constexpr std::uint64_t kBlock = DiskCache::kBlockBytes;
  ByteRange whole{(range.begin + kBlock - 1) / kBlock * kBlock, range.end};
  if (whole.end != size_) whole.end = whole.end / kBlock * kBlock;
  if (whole.begin >= whole.end || !cache_->writes() || !CacheWriter::Get().MakeRoom(whole.size())) {
    return;
  }
  const std::byte* from = bytes + (whole.begin - range.begin);
  if (owner == nullptr) {
    const std::shared_ptr<std::byte[]> copy(new std::byte[whole.size()]);  // NOLINT
    std::memcpy(copy.get(), from, whole.size());
    from = copy.get();
    owner = copy;
  }
  CacheWriter::Get().Add({cache_, key_, size_, whole, from, std::move(owner)});
}

Result<DiskCacheSettings> DiskCacheSettings::Parse(std::string_view directory,
                                                   std::string_view size) {
  DiskCacheSettings out;
  if (directory != "none") out.directory = directory;
  if (size.empty()) return out;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.most_bytes, ParseByteSize("cache size", size));
  if (out.most_bytes < DiskCache::kLeastMostBytes) {
    return Status(Code::kInvalidArgument,
                  "cache size \"" + std::string(size) + "\": must be at least 16MiB");
  }
  return out;
}

std::shared_ptr<DiskCache> DiskCacheOfEnvironment() {
  const std::string directory = EnvironmentVariable("TENSORMOUNT_CACHE");
  if (directory.empty()) return nullptr;
  // One for all, so that an error is told once. The caches stay open.
  struct Opened {
    std::mutex mutex;
    std::map<std::pair<std::string, std::string>, std::shared_ptr<DiskCache>> caches;
  };
  auto& opened = PerProcess<Opened>();
  const std::pair key(directory, EnvironmentVariable("TENSORMOUNT_CACHE_SIZE"));
  const std::lock_guard lock(opened.mutex);
  const auto known = opened.caches.find(key);
  if (known != opened.caches.end()) return known->second;
  const auto open = [&]() -> Result<std::shared_ptr<DiskCache>> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const DiskCacheSettings settings,
                                 DiskCacheSettings::Parse(key.first, key.second));
    if (settings.directory.empty()) return std::shared_ptr<DiskCache>();
    return DiskCache::Open(settings.directory, settings.most_bytes);
  };
  Result<std::shared_ptr<DiskCache>> cache = open();
  if (!cache.ok()) {
    Log(LogLevel::kWarning, std::string(cache.status().message()) + "; no cache is used");
  }
  return opened.caches[key] = cache.ok() ? std::move(cache).value() : nullptr;
}

void FinishDiskCaches() { CacheWriter::Get().Finish(Deadline::After(kFinishPatience)); }

}  // namespace tensormount
