// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <thread>
#include <unistd.h>

#include "base/deadline.h"
#include "base/file_system.h"
#include "bench/bench_tensors.h"
#include "bench/ckptbench.h"
#include "bench/null_fuse.h"
#include "fs/mount/mount_session.h"

namespace tensormount::bench {
namespace {

constexpr int kServerThreads = 2;

// Files read as if they were one after the other.
struct Files {
  explicit Files(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      struct stat st;
      if (stat(path.c_str(), &st) == 0) {
        list.emplace_back(path, static_cast<std::uint64_t>(st.st_size));
        bytes += list.back().second;
      }
    }
  }
  std::vector<std::pair<std::string, std::uint64_t>> list;
  std::uint64_t bytes = 0;
};

// Bytes [begin, end) of all of them by 1 MiB preads.
Status ReadRange(const Files& files, std::uint64_t begin, std::uint64_t end, PageBuffer& buffer) {
  for (const auto& [name, size] : files.list) {
    const std::uint64_t last = std::min(size, end);
    if (begin < last) {
      const OwnedFd fd(name, O_RDONLY);
      if (fd.get() < 0) return Status::FromErrno(errno, "open", name);
      for (std::uint64_t at = begin; at < last;) {
        const std::uint64_t step = std::min<std::uint64_t>(buffer.size(), last - at);
        TENSORMOUNT_RETURN_IF_ERROR(RawRead(fd.get(), at, buffer.data(), step));
        at += step;
      }
    }
    begin = begin > size ? begin - size : 0;
    end = end > size ? end - size : 0;
  }
  return {};
}

// Sequential reads by `threads`, each of a part of its own.
Result<double> ReadFiles(const Files& files, int threads, std::vector<PageBuffer>& buffers) {
  return TimeThreads(threads, [&](int t) {
    const auto n = static_cast<std::uint64_t>(threads);
    const auto i = static_cast<std::uint64_t>(t);
    return ReadRange(files, files.bytes * i / n, files.bytes * (i + 1) / n,
                     buffers[static_cast<std::size_t>(t)]);
  });
}

// Every word through a fresh mapping.
Result<double> ReadMapped(const Files& files) {
  static volatile std::uint64_t sink = 0;
  const auto start = Clock::now();
  for (const auto& [name, size] : files.list) {
    const OwnedFd fd(name, O_RDONLY);
    void* at = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (at == MAP_FAILED) return Status::FromErrno(errno, "map", name);
    const auto* words = static_cast<const std::uint64_t*>(at);
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < size / 8; ++i) sum ^= words[i];
    sink = sink ^ sum;
    munmap(at, size);
  }
  return SecondsSince(start);
}

constexpr std::uint64_t kRandomReads = 50'000;
constexpr std::uint64_t kRandomBytes = 4096;

// 4 KiB preads at places that are the same in every round.
Result<double> ReadRandomly(const Files& files, PageBuffer& buffer) {
  const auto& [name, size] = files.list.front();
  const OwnedFd fd(name, O_RDONLY);
  if (fd.get() < 0) return Status::FromErrno(errno, "open", name);
  const auto start = Clock::now();
  std::uint64_t state = 1;
  for (std::uint64_t i = 0; i < kRandomReads; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t at = (state >> 20) % (size / kRandomBytes) * kRandomBytes;
    TENSORMOUNT_RETURN_IF_ERROR(RawRead(fd.get(), at, buffer.data(), kRandomBytes));
  }
  return SecondsSince(start);
}

// One strip of every row by a pread of its own.
Result<double> ReadStrips(const std::string& name, std::uint64_t rows, std::uint64_t row_bytes,
                          std::uint64_t strip, PageBuffer& buffer) {
  const OwnedFd fd(name, O_RDONLY);
  if (fd.get() < 0) return Status::FromErrno(errno, "open", name);
  const auto start = Clock::now();
  for (std::uint64_t row = 0; row < rows; ++row) {
    TENSORMOUNT_RETURN_IF_ERROR(RawRead(fd.get(), row * row_bytes, buffer.data(), strip));
  }
  return SecondsSince(start);
}

// `ls -l`: every entry and its attributes.
Result<double> ListFolder(const std::string& path) {
  const auto start = Clock::now();
  DIR* dir = opendir(path.c_str());
  if (dir == nullptr) return Status::FromErrno(errno, "open", path);
  Status status;
  while (const dirent* entry = readdir(dir)) {
    struct stat st;
    if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
      status = Status::FromErrno(errno, "stat", entry->d_name);
    }
  }
  closedir(dir);
  TENSORMOUNT_RETURN_IF_ERROR(status);
  return SecondsSince(start);
}

// Opens files until the kernel reads each of them itself.
Status AwaitProof(const Files& files) {
  const Deadline deadline = Deadline::After(std::chrono::minutes(5));
  for (const auto& [name, size] : files.list) {
    std::string tier(64, '\0');
    while (tier != "passthrough") {
      if (deadline.Passed()) return Status(Code::kDeadlineExceeded, name + ": never proven");
      { const OwnedFd open_once(name, O_RDONLY); }
      tier.resize(64);
      const ssize_t n = getxattr(name.c_str(), "user.tensormount.tier", tier.data(), tier.size());
      tier.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
      if (tier != "passthrough") std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  return {};
}

Result<std::unique_ptr<fs::MountSession>> Mount(const std::string& source, const std::string& at,
                                                fs::MountOptions::Tier tier) {
  fs::MountOptions options;
  options.source = source;
  options.mount_point = at;
  options.tier = tier;
  options.threads = kServerThreads;
  return fs::MountSession::Start(HostFileSystem(), options);
}

}  // namespace

namespace {

// A checkpoint under one cut, and its files by every way there is to read them.
class ReadBench {
 public:
  ReadBench(const Options& options, Cut cut, const WorkFolder& folder)
      : options_(options), cut_(cut), folder_(folder) {
    for (int t = 0; t < kReaders; ++t) buffers_.emplace_back(1u << 20);
  }
  Status Run() {
    TENSORMOUNT_RETURN_IF_ERROR(Prepare());
    if (cut_ == Cut::kRows && passes_) {
      TENSORMOUNT_RETURN_IF_ERROR(FirstTouch("passthrough", kernel_mount_, kernel_at_, passed_));
      TENSORMOUNT_RETURN_IF_ERROR(AwaitProof(passed_));
    }
    TENSORMOUNT_RETURN_IF_ERROR(FirstTouch("daemon", daemon_mount_, daemon_at_, daemon_));
    if (cut_ == Cut::kRows && passes_) TENSORMOUNT_RETURN_IF_ERROR(Passthrough());
    TENSORMOUNT_RETURN_IF_ERROR(Daemon());
    return cut_ == Cut::kColumns ? Slices() : Status();
  }

 private:
  static constexpr int kReaders = 4;
  static constexpr const char* kNull =
      "a null FUSE server with the same flags, request size and threads";
  static constexpr const char* kNullMemory =
      "a null FUSE server that answers out of as much memory as the file has";

  Status Prepare();
  Status Passthrough();
  Status Daemon();
  Status Slices();
  // Of a mount that was made a moment ago: nothing was compared with its hashes yet.
  Status FirstTouch(const std::string& tier, std::unique_ptr<fs::MountSession>& mount,
                    const std::string& at, const Files& ours);
  Status Sequential(const std::string& tier, const std::string& floor_name, const Files& ours,
                    const Files& floor, int threads, bool cold);
  Case Named(const std::string& name, std::uint64_t bytes, std::string floor_name) {
    Case c;
    c.workload = "mount-read";
    c.name = name + (cut_ == Cut::kRows ? ", contiguous" : ", column shards");
    c.bytes = bytes;
    c.floor_name = std::move(floor_name);
    c.facts = [this] {
      return std::map<std::string, double>{{"direct_io", direct_io_ ? 1.0 : 0.0},
                                           {"passthrough", passes_ ? 1.0 : 0.0}};
    };
    return c;
  }

  const Options& options_;
  const Cut cut_;
  const WorkFolder& folder_;
  std::vector<PageBuffer> buffers_;
  std::string checkpoint_;
  std::unique_ptr<fs::MountSession> kernel_mount_;
  std::unique_ptr<fs::MountSession> daemon_mount_;
  std::unique_ptr<NullFuse> null_;
  std::unique_ptr<NullFuse> null_memory_;
  bool passes_ = false;
  bool direct_io_ = false;
  std::uint64_t tensor_bytes_ = 0;
  std::string kernel_at_;
  std::string daemon_at_;
  Files raw_{{}};
  Files passed_{{}};
  Files daemon_{{}};
  Files nothing_{{}};
  Files memory_{{}};
};

Status ReadBench::Prepare() {
  const std::string rule = cut_ == Cut::kRows ? "rows" : "cols";
  checkpoint_ = folder_.Join("store/" + rule);
  std::uint64_t bytes = 0;
  std::size_t tensors = 0;
  {
    RankTensors model(options_, cut_);
    model.Fill();
    bytes = model.bytes();
    tensors = model.tensors();
    tensor_bytes_ = model.tensor_bytes();
    TENSORMOUNT_RETURN_IF_ERROR(RunOnThreads(options_.ranks, [&](Communicator& comm) {
      return Save(model.State(comm.rank()), checkpoint_, comm).status();
    }));
  }
  kernel_at_ = folder_.Join("kernel-" + rule);
  daemon_at_ = folder_.Join("daemon-" + rule);
  const std::string null_at = folder_.Join("null-" + rule);
  const std::string memory_at = folder_.Join("null-memory-" + rule);
  for (const std::string& at : {kernel_at_, daemon_at_, null_at, memory_at}) {
    TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().CreateDirectory(at));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(kernel_mount_,
                               Mount(checkpoint_, kernel_at_, fs::MountOptions::Tier::kAuto));
  TENSORMOUNT_ASSIGN_OR_RETURN(daemon_mount_,
                               Mount(checkpoint_, daemon_at_, fs::MountOptions::Tier::kDaemon));
  passes_ = kernel_mount_->StatusJson().find("\"tier\": \"passthrough\"") != std::string::npos;
  NullFuse::Options null_options;
  null_options.mount_point = null_at;
  null_options.file_bytes = bytes;
  null_options.threads = kServerThreads;
  // Without DIRECT_IO_ALLOW_MMAP our mount is in page-cache mode, and so is its floor.
  direct_io_ = daemon_mount_->StatusJson().find("\"page_cache\"") == std::string::npos;
  null_options.direct_io = direct_io_;
  TENSORMOUNT_ASSIGN_OR_RETURN(null_, NullFuse::Start(null_options));
  null_options.mount_point = memory_at;
  null_options.memory_bytes = bytes;
  TENSORMOUNT_ASSIGN_OR_RETURN(null_memory_, NullFuse::Start(null_options));
  std::vector<std::string> data;
  for (const auto& [name, size] : FilesBelow(checkpoint_ + "/data")) data.push_back(name);
  std::vector<std::string> kernel_files;
  std::vector<std::string> daemon_files;
  for (std::size_t t = 0; t < tensors; ++t) {
    const std::string name = "/tensors/layers." + std::to_string(t) + ".weight";
    kernel_files.push_back(kernel_at_ + name);
    daemon_files.push_back(daemon_at_ + name);
  }
  raw_ = Files(data);
  passed_ = Files(kernel_files);
  daemon_ = Files(daemon_files);
  nothing_ = Files({null_at + "/f"});
  memory_ = Files({memory_at + "/f"});
  return {};
}

Status ReadBench::Sequential(const std::string& tier, const std::string& floor_name,
                             const Files& ours, const Files& floor, int threads, bool cold) {
  Case c = Named(tier + " 1 MiB sequential, " + std::to_string(threads) +
                     (threads == 1 ? " thread" : " threads") + (cold ? ", disk-cold" : "") +
                     (floor_name == kNull         ? ", beside a null server"
                      : floor_name == kNullMemory ? ", beside a null server that reads memory"
                                                  : ""),
                 ours.bytes, floor_name);
  c.ours = [&, threads] { return ReadFiles(ours, threads, buffers_); };
  c.floor = [&, threads] { return ReadFiles(floor, threads, buffers_); };
  if (cold) c.before = [this] { return DropCaches(checkpoint_); };
  return RunCase(options_, c);
}

Status ReadBench::FirstTouch(const std::string& tier, std::unique_ptr<fs::MountSession>& mount,
                             const std::string& at, const Files& ours) {
  Case c = Named(tier + " 1 MiB sequential, 1 thread, first touch", ours.bytes,
                 "pread of the data files by 1 MiB");
  c.ours = [&] { return ReadFiles(ours, 1, buffers_); };
  c.floor = [&] { return ReadFiles(raw_, 1, buffers_); };
  const auto how =
      tier == "daemon" ? fs::MountOptions::Tier::kDaemon : fs::MountOptions::Tier::kAuto;
  c.before = [&, how]() -> Status {
    mount.reset();
    TENSORMOUNT_ASSIGN_OR_RETURN(mount, Mount(checkpoint_, at, how));
    return {};
  };
  return RunCase(options_, c);
}

Status ReadBench::Passthrough() {
  const std::string floor = "the same calls on the data files";
  for (const int threads : {1, kReaders}) {
    TENSORMOUNT_RETURN_IF_ERROR(
        Sequential("passthrough", floor, passed_, raw_, threads, options_.cold));
  }
  Case mapped = Named("passthrough mmap", passed_.bytes, floor);
  mapped.ours = [&] { return ReadMapped(passed_); };
  mapped.floor = [&] { return ReadMapped(raw_); };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options_, mapped));
  Case random = Named("passthrough random 4 KiB", kRandomReads * kRandomBytes, floor);
  random.ours = [&] { return ReadRandomly(passed_, buffers_[0]); };
  random.floor = [&] { return ReadRandomly(raw_, buffers_[0]); };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options_, random));
  return Sequential("passthrough", floor, passed_, raw_, 1, true);
}

Status ReadBench::Daemon() {
  for (const int threads : {1, kReaders}) {
    TENSORMOUNT_RETURN_IF_ERROR(
        Sequential("daemon", kNull, daemon_, nothing_, threads, options_.cold));
    TENSORMOUNT_RETURN_IF_ERROR(
        Sequential("daemon", kNullMemory, daemon_, memory_, threads, options_.cold));
    TENSORMOUNT_RETURN_IF_ERROR(Sequential("daemon", "pread of the data files by 1 MiB", daemon_,
                                           raw_, threads, options_.cold));
  }
  return Sequential("daemon", "pread of the data files by 1 MiB", daemon_, raw_, 1, true);
}

// Half of what one column shard holds, of every row: a tensor-parallel reader's part.
Status ReadBench::Slices() {
  const auto row_bytes = static_cast<std::uint64_t>(options_.row_bytes);
  const std::uint64_t strip = row_bytes / static_cast<std::uint64_t>(options_.ranks) / 2;
  const std::uint64_t rows = tensor_bytes_ / row_bytes;
  const std::string tensor = daemon_.list.front().first;
  const std::string slice =
      daemon_at_ + "/slices/layers.0.weight[:,0:" + std::to_string(strip / sizeof(float)) + "]";
  const Files sliced({slice});
  if (sliced.bytes != strip * rows) return Status(Code::kInternal, slice + ": not as expected");
  Case by_rows = Named("a column slice as a file", sliced.bytes, "its rows one by one");
  by_rows.ours = [&] { return ReadFiles(sliced, 1, buffers_); };
  by_rows.floor = [&] { return ReadStrips(tensor, rows, row_bytes, strip, buffers_[0]); };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options_, by_rows));
  // As many bytes of the same tensor in one piece, by the same daemon.
  Case contiguous =
      Named("a column slice as a file, beside a piece", sliced.bytes, "as many bytes in one piece");
  Files piece({tensor});
  contiguous.ours = [&] { return ReadFiles(sliced, 1, buffers_); };
  contiguous.floor = [&]() -> Result<double> {
    return TimeThreads(1, [&](int) { return ReadRange(piece, 0, sliced.bytes, buffers_[0]); });
  };
  return RunCase(options_, contiguous);
}

}  // namespace

Status BenchMountRead(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  for (const Cut cut : {Cut::kRows, Cut::kColumns}) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadBench(options, cut, *folder).Run());
  }
  return {};
}

Status BenchMountLs(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  FileSystem& host = HostFileSystem();
  const std::string checkpoint = folder->Join("store/step");
  const auto self = MakeSelfCommunicator();
  std::vector<float> values(16);
  StateDict state;
  for (int t = 0; t < options.tensors; ++t) {
    (void)state.AddTensor(
        "t" + std::to_string(t),  // A failure fails the save.
        {{16}, Box::Whole({16}), BufferView::Host(DType::kF32, values.data(), {16})});
  }
  TENSORMOUNT_RETURN_IF_ERROR(Save(state, checkpoint, *self).status());
  const std::string native = folder->Join("native");
  TENSORMOUNT_RETURN_IF_ERROR(host.CreateDirectory(native));
  for (int t = 0; t < options.tensors; ++t) {
    const OwnedFd fd(native + "/t" + std::to_string(t), O_WRONLY | O_CREAT);
    if (fd.get() < 0) return Status::FromErrno(errno, "create a file in", native);
    TENSORMOUNT_RETURN_IF_ERROR(RawWrite(fd.get(), 0, values.data(), 64));
  }
  // Kernel caches of a mount live for an hour: a mount of its own for each cold listing.
  for (const bool first : {true, false}) {
    std::unique_ptr<fs::MountSession> mount;
    int number = 0;
    std::string at;
    const auto remount = [&]() -> Status {
      mount.reset();
      at = folder->Join((first ? "cold-" : "warm-") + std::to_string(number++));
      TENSORMOUNT_RETURN_IF_ERROR(host.CreateDirectory(at));
      TENSORMOUNT_ASSIGN_OR_RETURN(mount, Mount(checkpoint, at, fs::MountOptions::Tier::kAuto));
      return {};
    };
    if (!first) TENSORMOUNT_RETURN_IF_ERROR(remount());
    Case c;
    c.workload = "mount-ls";
    c.name = std::to_string(options.tensors) + (first ? " files, first time" : " files, again");
    c.floor_name = "readdir and stat of as many files of the file system below";
    if (first) c.before = remount;
    c.ours = [&] { return ListFolder(at + "/tensors"); };
    c.floor = [&] { return ListFolder(native); };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  }
  return {};
}

}  // namespace tensormount::bench
