// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_CKPTBENCH_H_
#define TENSORMOUNT_BENCH_CKPTBENCH_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

// ckptbench: what the library and the mount reach, each figure beside its floor: the same bytes
// moved by plain system calls, by as many threads and files, in the same run. Rounds of both
// alternate, so that a noisy neighbour meets both.

namespace tensormount::bench {

struct Options {
  double gib = 1;  // Bytes of a workload.
  int ranks = 4;
  int rounds = 7;
  int tensors = 10'000;           // publish, open: of this many tensors
  int chunks = 100;               // of this many chunks each. mount-ls: files of a folder.
  int world = 16'384;             // validate: ranks of the jobs that are judged.
  std::int64_t row_bytes = 8192;  // Of a tensor: what a column cut divides.
  std::string dir;                // Where files are made; a folder of its own is made below.
  std::string only;               // Cases whose "workload name" contains this.
  bool cold = false;              // Drops cached pages of data files before each reading round.
  bool sockets = false;           // Ranks as forked processes instead of threads.
  bool json = false;
};

using Clock = std::chrono::steady_clock;
inline double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Seconds that one round took.
using Round = std::function<Result<double>()>;

struct Case {
  std::string workload;     // "load"
  std::string name;         // "rows to rows"
  std::uint64_t bytes = 0;  // Moved by one round; 0: the figure is a time in milliseconds.
  std::string floor_name;   // What the floor does, in words.
  Round ours;
  Round floor;
  // Before every round of either; may be empty.
  std::function<Status()> before;
  // Facts for the line, asked for when the rounds are over; may be empty.
  std::function<std::map<std::string, double>()> facts;
};

// Runs `rounds` interleaved rounds after one that does not count, and prints one line.
Status RunCase(const Options& options, const Case& c);

// Page-aligned memory with every page present.
class PageBuffer {
 public:
  explicit PageBuffer(std::size_t size);
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PageBuffer& operator=(PageBuffer&&) = delete;
  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  // A process that was forked has the memory, but must find its pages again.
  void Touch() const;
  std::size_t size() const { return size_; }

 private:
  std::byte* data_;
  std::size_t size_;
};

// Runs fn(i) on n threads at once; seconds from a common start to the last end.
Result<double> TimeThreads(int n, const std::function<Status(int)>& fn);
// Runs body as `ranks` ranks (threads, or forked processes where options say so); seconds from the
// last rank's start to the last end. `prepare`, which may be empty, runs on every rank before the
// start. Memory that bodies write must be shared to be seen after forks.
Result<double> TimeRanks(const Options& options, const std::function<void(int rank)>& prepare,
                         const std::function<Status(Communicator&)>& body);

// Plain system calls: all bytes of [offset, offset + size) in 1 MiB steps.
Status RawRead(int fd, std::uint64_t offset, void* out, std::uint64_t size);
Status RawWrite(int fd, std::uint64_t offset, const void* data, std::uint64_t size);

class OwnedFd {
 public:
  // open(2); -1 on failure.
  OwnedFd(const std::string& path, int flags);
  ~OwnedFd();
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Regular files below a folder with their sizes, sorted by name.
std::vector<std::pair<std::string, std::uint64_t>> FilesBelow(const std::string& folder);
// Writes dirty pages back and drops the cached ones of these files.
Status DropCaches(const std::string& folder);

// A folder below options.dir, removed with everything in it.
class WorkFolder {
 public:
  static Result<std::unique_ptr<WorkFolder>> Make(const Options& options);
  ~WorkFolder();
  std::string Join(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  explicit WorkFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// The workloads.
Status BenchSave(const Options& options);
Status BenchAsync(const Options& options);
Status BenchSteps(const Options& options);
Status BenchReplicas(const Options& options);
Status BenchPlan(const Options& options);
Status BenchLoad(const Options& options);
Status BenchReshard(const Options& options);
Status BenchStagingWrite(const Options& options);
Status BenchMountRead(const Options& options);
Status BenchMountWrite(const Options& options);
Status BenchMountLs(const Options& options);
Status BenchPublish(const Options& options);
Status BenchOpen(const Options& options);
Status BenchHash(const Options& options);
Status BenchValidate(const Options& options);

}  // namespace tensormount::bench

#endif  // TENSORMOUNT_BENCH_CKPTBENCH_H_
