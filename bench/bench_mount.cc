// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_system.h"
#include "bench/bench_tensors.h"
#include "bench/ckptbench.h"
#include "bench/null_fuse.h"
#include "fs/mount/mount_session.h"

namespace tensormount::bench {
namespace {

using Clock = std::chrono::steady_clock;
double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int kServerThreads = 2;

// Reads files one after the other by 1 MiB preads.
Result<double> ReadFiles(const std::vector<std::string>& files, PageBuffer& buffer) {
  const auto start = Clock::now();
  for (const std::string& name : files) {
    const OwnedFd fd(name, O_RDONLY);
    struct stat st;
    if (fd.get() < 0 || fstat(fd.get(), &st) != 0) return Status::FromErrno(errno, "open", name);
    const auto size = static_cast<std::uint64_t>(st.st_size);
    for (std::uint64_t at = 0; at < size;) {
      const std::uint64_t step = std::min<std::uint64_t>(buffer.size(), size - at);
      TENSORMOUNT_RETURN_IF_ERROR(RawRead(fd.get(), at, buffer.data(), step));
      at += step;
    }
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

Status BenchMountRead(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  FileSystem& host = HostFileSystem();
  PageBuffer buffer(1u << 20);
  for (const Cut cut : {Cut::kRows, Cut::kColumns}) {
    const std::string rule = cut == Cut::kRows ? "rows" : "cols";
    const std::string checkpoint = folder->Join("store/" + rule);
    std::uint64_t bytes = 0;
    std::size_t tensors = 0;
    {
      RankTensors model(options, cut);
      model.Fill();
      bytes = model.bytes();
      tensors = model.tensors();
      TENSORMOUNT_RETURN_IF_ERROR(RunOnThreads(options.ranks, [&](Communicator& comm) {
        return Save(model.State(comm.rank()), checkpoint, comm).status();
      }));
    }
    const std::string ours = folder->Join("mnt-" + rule);
    const std::string null = folder->Join("null-" + rule);
    TENSORMOUNT_RETURN_IF_ERROR(host.CreateDirectory(ours));
    TENSORMOUNT_RETURN_IF_ERROR(host.CreateDirectory(null));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<fs::MountSession> mount,
                                 Mount(checkpoint, ours, fs::MountOptions::Tier::kDaemon));
    NullFuse::Options null_options;
    null_options.mount_point = null;
    null_options.file_bytes = bytes;
    null_options.threads = kServerThreads;
    // Without DIRECT_IO_ALLOW_MMAP our mount is in page-cache mode, and so is its floor.
    null_options.direct_io = mount->StatusJson().find("\"page_cache\"") == std::string::npos;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<NullFuse> floor,
                                 NullFuse::Start(null_options));
    std::vector<std::string> files;
    for (std::size_t t = 0; t < tensors; ++t) {
      files.push_back(ours + "/tensors/layers." + std::to_string(t) + ".weight");
    }
    for (const bool null_floor : {true, false}) {
      Case c;
      c.workload = "mount-read";
      c.name = "1 MiB sequential, saved by " + rule + (null_floor ? "" : ", beside pread");
      c.bytes = bytes;
      c.floor_name = null_floor ? "a null FUSE server with the same flags, request size and threads"
                                : "pread of the data files by 1 MiB, one thread";
      if (options.cold) c.before = [&] { return DropCaches(checkpoint); };
      c.ours = [&] { return ReadFiles(files, buffer); };
      if (null_floor) {
        c.floor = [&] { return ReadFiles({null + "/f"}, buffer); };
      } else {
        c.floor = [&] {
          std::vector<std::string> data;
          for (const auto& [name, size] : FilesBelow(checkpoint + "/data")) data.push_back(name);
          return ReadFiles(data, buffer);
        };
      }
      c.facts = [&] {
        return std::map<std::string, double>{{"direct_io", null_options.direct_io ? 1.0 : 0.0}};
      };
      TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
    }
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
