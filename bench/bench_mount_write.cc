// SPDX-License-Identifier: Apache-2.0
// Writes through a real mount into a staging, beside pwrite and fsync of the same bytes.
#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/file_system.h"
#include "bench/ckptbench.h"
#include "fs/mount/mount_session.h"
#include "index/store/store.h"

namespace tensormount::bench {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// A staging with one tensor of so many rows of 1 MiB, fresh in every round.
class MountWriteBench {
 public:
  MountWriteBench(const WorkFolder& folder, std::uint64_t rows, int writers)
      : folder_(folder), rows_(rows), writers_(writers), data_(2 * kMiB) {
    for (std::size_t i = 0; i < data_.size(); ++i) {
      data_.data()[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
    }
  }

  Status Start() {
    TENSORMOUNT_RETURN_IF_ERROR(
        Store::OpenOrCreate(HostFileSystem(), folder_.Join("store")).status());
    TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().CreateDirectory(folder_.Join("mnt")));
    fs::MountOptions options;
    options.source = folder_.Join("store");
    options.mount_point = folder_.Join("mnt");
    TENSORMOUNT_ASSIGN_OR_RETURN(session_, fs::MountSession::Start(HostFileSystem(), options));
    return {};
  }
  std::uint64_t bytes() const { return rows_ * kMiB; }

  // Makes the files that a round writes; what the last one wrote goes.
  Status Before() {
    TENSORMOUNT_RETURN_IF_ERROR(RemoveLast());
    const std::string name = "round-" + std::to_string(++number_);
    staging_ = folder_.Join("mnt/.staging/" + name);
    if (mkdir(staging_.c_str(), 0755) != 0) return Status::FromErrno(errno, "mkdir", staging_);
    const std::string schema = R"({"tensors": {"w": {"dtype": "u8", "shape": [)" +
                               std::to_string(rows_) + ", " + std::to_string(kMiB) + "]}}}";
    const OwnedFd fd(staging_ + "/schema.json", O_WRONLY | O_CREAT);
    if (fd.get() < 0) return Status::FromErrno(errno, "create schema.json in", staging_);
    TENSORMOUNT_RETURN_IF_ERROR(RawWrite(fd.get(), 0, schema.data(), schema.size()));
    return fsync(fd.get()) == 0 ? Status() : Status::FromErrno(errno, "sync", "schema.json");
  }
  Status RemoveLast() {
    if (staging_.empty()) return {};
    TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().RemoveTree(folder_.Join("raw")));
    const std::string staging = std::exchange(staging_, {});
    if (unlink((staging + "/schema.json").c_str()) != 0 || rmdir(staging.c_str()) != 0) {
      return Status::FromErrno(errno, "remove", staging);
    }
    return HostFileSystem().RemoveTree(folder_.Join("store/.trash"));
  }

  Result<double> Ours() {
    return Write([this](int i, std::uint64_t begin, std::uint64_t end) {
      (void)i;
      return staging_ + "/slices/w[" + std::to_string(begin) + ":" + std::to_string(end) + "]";
    });
  }
  Result<double> Raw() {
    TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().CreateDirectory(folder_.Join("raw")));
    return Write([this](int i, std::uint64_t, std::uint64_t) {
      return folder_.Join("raw/" + std::to_string(i));
    });
  }

 private:
  // Each writer its rows into a file of its own, by 1 MiB, and fsync.
  template <typename Path>
  Result<double> Write(const Path& path) {
    return TimeThreads(writers_, [&](int i) -> Status {
      const auto n = static_cast<std::uint64_t>(writers_);
      const std::uint64_t begin = rows_ * static_cast<std::uint64_t>(i) / n;
      const std::uint64_t end = rows_ * static_cast<std::uint64_t>(i + 1) / n;
      const std::string name = path(i, begin, end);
      const OwnedFd fd(name, O_WRONLY | O_CREAT);
      if (fd.get() < 0) return Status::FromErrno(errno, "create", name);
      for (std::uint64_t row = begin; row < end; ++row) {
        const std::byte* from = data_.data() + row * 4096 % kMiB;
        TENSORMOUNT_RETURN_IF_ERROR(RawWrite(fd.get(), (row - begin) * kMiB, from, kMiB));
      }
      return fsync(fd.get()) == 0 ? Status() : Status::FromErrno(errno, "sync", name);
    });
  }

  const WorkFolder& folder_;
  const std::uint64_t rows_;
  const int writers_;
  PageBuffer data_;
  std::unique_ptr<fs::MountSession> session_;
  int number_ = 0;
  std::string staging_;
};

}  // namespace

Status BenchMountWrite(const Options& options) {
  const std::uint64_t rows =
      std::max<std::uint64_t>(static_cast<std::uint64_t>(options.gib * 1024), 8);
  for (const int writers : {1, 4}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder,
                                 WorkFolder::Make(options));
    MountWriteBench bench(*folder, rows, writers);
    TENSORMOUNT_RETURN_IF_ERROR(bench.Start());
    Case c;
    c.workload = "mount-write";
    c.name = "slices/ by 1 MiB, writers: " + std::to_string(writers);
    c.bytes = bench.bytes();
    c.floor_name = "pwrite of 1 MiB into fresh files, and fsync";
    c.before = [&] { return bench.Before(); };
    c.ours = [&] { return bench.Ours(); };
    c.floor = [&] { return bench.Raw(); };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
    TENSORMOUNT_RETURN_IF_ERROR(bench.RemoveLast());
  }
  return {};
}

}  // namespace tensormount::bench
