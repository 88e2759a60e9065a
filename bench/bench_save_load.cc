// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <fstream>
#include <unistd.h>

#include "base/file_system.h"
#include "bench/bench_tensors.h"
#include "bench/ckptbench.h"

namespace tensormount::bench {
namespace {

// Bytes that this process has read by read(2) and its kin so far.
double BytesReadByCalls() {
  std::ifstream io("/proc/self/io");
  std::string name;
  double value = 0;
  io >> name >> value;
  return value;
}

Status SaveOnce(const Options& options, RankTensors& tensors, const std::string& path) {
  return TimeRanks(options, {},
                   [&](Communicator& comm) {
                     return Save(tensors.State(comm.rank()), path, comm).status();
                   })
      .status();
}

// The files of a saved checkpoint again, by as many writers: a file of whole tensors is shared by
// all (each writes and syncs its part), any other file has one writer.
Result<double> RawSave(const Options& options, RankTensors& tensors, bool shared,
                       const std::vector<std::pair<std::string, std::uint64_t>>& files,
                       const std::string& folder) {
  TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().CreateDirectory(folder));
  const auto ranks = static_cast<std::uint64_t>(options.ranks);
  return TimeThreads(options.ranks, [&](int rank) -> Status {
    const auto r = static_cast<std::uint64_t>(rank);
    const PageBuffer& memory = tensors.memory(rank);
    for (std::size_t f = 0; f < files.size(); ++f) {
      if (!shared && f % ranks != r) continue;
      const OwnedFd fd(folder + "/" + std::to_string(f), O_RDWR | O_CREAT);
      if (fd.get() < 0) return Status::FromErrno(errno, "create a file in", folder);
      const std::uint64_t size = files[f].second;
      const std::uint64_t begin = shared ? size / ranks * r : 0;
      const std::uint64_t end = shared && r + 1 < ranks ? size / ranks * (r + 1) : size;
      for (std::uint64_t at = begin; at < end;) {
        const std::uint64_t step = std::min<std::uint64_t>(memory.size(), end - at);
        TENSORMOUNT_RETURN_IF_ERROR(RawWrite(fd.get(), at, memory.data(), step));
        at += step;
      }
      if (fsync(fd.get()) != 0) return Status::FromErrno(errno, "fsync a file in", folder);
    }
    return {};
  });
}

// Every rank reads its share of the bytes of all files, in order, by 1 MiB.
Result<double> RawLoad(const Options& options, RankTensors& tensors,
                       const std::vector<std::pair<std::string, std::uint64_t>>& files) {
  const auto ranks = static_cast<std::uint64_t>(options.ranks);
  return TimeThreads(options.ranks, [&](int rank) -> Status {
    const auto r = static_cast<std::uint64_t>(rank);
    std::uint64_t at = 0;
    for (const auto& [name, size] : files) {
      const OwnedFd fd(name, O_RDONLY);
      if (fd.get() < 0) return Status::FromErrno(errno, "open", name);
      const std::uint64_t part = size / ranks;
      const std::uint64_t room = tensors.memory(rank).size();
      if (at + part > room) at = 0;  // Headers make files a little larger than the tensors.
      TENSORMOUNT_RETURN_IF_ERROR(
          RawRead(fd.get(), part * r, tensors.memory(rank).data() + at, std::min(part, room)));
      at += part;
    }
    return {};
  });
}

struct LoadCase {
  std::string workload;
  std::string name;
  Cut saved;
  Cut loaded;
  LoadPath path;
  LoadVerify verify;
};

Status RunLoadCase(const Options& options, const std::string& checkpoint, const LoadCase& lc) {
  RankTensors target(options, lc.loaded);
  const auto files = FilesBelow(checkpoint + "/data");
  std::map<std::string, double> facts;
  Case c;
  c.workload = lc.workload;
  c.name = lc.name;
  c.bytes = target.bytes();
  c.floor_name = "pread of the same bytes by as many threads, 1 MiB at a time, in file order";
  if (options.cold) c.before = [&] { return DropCaches(checkpoint); };
  c.ours = [&] {
    const auto touch = [&](int rank) { target.memory(rank).Touch(); };
    return TimeRanks(options, touch, [&](Communicator& comm) -> Status {
      LoadOptions how;
      how.path = lc.path;
      how.verify = lc.verify;
      Result<LoadReport> report = Load(target.State(comm.rank()), checkpoint, comm, how);
      if (report.ok() && comm.rank() == 0) {
        facts["read_seconds"] = report.value().read_seconds;
        facts["proof_seconds"] = report.value().proof_seconds;
        facts["by_leaf"] = static_cast<double>(report.value().bytes_by_leaf);
        facts["by_digest"] = static_cast<double>(report.value().bytes_by_digest);
      }
      return report.status();
    });
  };
  c.floor = [&] { return RawLoad(options, target, files); };
  c.facts = [&] { return facts; };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  TENSORMOUNT_RETURN_IF_ERROR(c.ours().status());
  if (!target.IsFilled()) return Status(Code::kDataLoss, lc.name + ": loaded other bytes");
  return {};
}

Status SaveFilled(const Options& options, Cut cut, const std::string& path) {
  RankTensors tensors(options, cut);
  tensors.Fill();
  return SaveOnce(options, tensors, path);
}

}  // namespace

Status BenchSave(const Options& options) {
  for (const Cut cut : {Cut::kRows, Cut::kColumns}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder,
                                 WorkFolder::Make(options));
    RankTensors tensors(options, cut);
    tensors.Fill();
    const std::string sample = folder->Join("sample/step");
    TENSORMOUNT_RETURN_IF_ERROR(SaveOnce(options, tensors, sample));
    const auto files = FilesBelow(sample + "/data");
    TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().RemoveTree(folder->Join("sample")));
    std::map<std::string, double> facts;
    facts["files"] = static_cast<double>(files.size());
    Case c;
    c.workload = "save";
    c.name = cut == Cut::kRows ? "rows" : "cols";
    c.bytes = tensors.bytes();
    c.floor_name = "pwrite and fsync of as many bytes, files and fsyncs by as many threads";
    int number = 0;
    std::string last;
    // What the round before wrote is gone and its deletion over before the next begins.
    c.before = [&]() -> Status {
      if (last.empty()) return {};
      TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().RemoveTree(last));
      return HostFileSystem().SyncDirectory(folder->Join(""));
    };
    c.ours = [&]() -> Result<double> {
      last = folder->Join("store" + std::to_string(number++));
      const double before = BytesReadByCalls();
      const auto touch = [&](int rank) { tensors.memory(rank).Touch(); };
      Result<double> seconds = TimeRanks(options, touch, [&](Communicator& comm) -> Status {
        Result<SaveReport> report = Save(tensors.State(comm.rank()), last + "/step", comm);
        if (report.ok() && comm.rank() == 0) {
          facts["publish_seconds"] = report.value().publish_seconds;
          facts["validate_seconds"] = report.value().validate_seconds;
          facts["write_seconds"] = report.value().write_seconds;
        }
        return report.status();
      });
      facts["bytes_read_back"] = BytesReadByCalls() - before;
      return seconds;
    };
    c.floor = [&]() -> Result<double> {
      last = folder->Join("raw" + std::to_string(number++));
      return RawSave(options, tensors, cut == Cut::kRows, files, last);
    };
    c.facts = [&] { return facts; };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  }
  return {};
}

Status BenchLoad(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  TENSORMOUNT_RETURN_IF_ERROR(SaveFilled(options, Cut::kRows, folder->Join("store/rows")));
  TENSORMOUNT_RETURN_IF_ERROR(SaveFilled(options, Cut::kColumns, folder->Join("store/cols")));
  for (const bool verified : {true, false}) {
    for (const Cut cut : {Cut::kRows, Cut::kColumns}) {
      const std::string rule = cut == Cut::kRows ? "rows" : "cols";
      TENSORMOUNT_RETURN_IF_ERROR(
          RunLoadCase(options, folder->Join("store/" + rule),
                      {"load", rule + " to " + rule + (verified ? "" : ", unverified"), cut, cut,
                       LoadPath::kDirect, verified ? LoadVerify::kAuto : LoadVerify::kOff}));
    }
  }
  return {};
}

Status BenchReshard(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  const std::string rows = folder->Join("store/rows");
  const std::string columns = folder->Join("store/cols");
  TENSORMOUNT_RETURN_IF_ERROR(SaveFilled(options, Cut::kRows, rows));
  TENSORMOUNT_RETURN_IF_ERROR(SaveFilled(options, Cut::kColumns, columns));
  for (const LoadVerify verify : {LoadVerify::kAuto, LoadVerify::kOff}) {
    const std::string tail = verify == LoadVerify::kOff ? ", unverified" : "";
    for (const LoadPath path : {LoadPath::kDirect, LoadPath::kExchange}) {
      const std::string way = path == LoadPath::kDirect ? ", direct" : ", exchange";
      TENSORMOUNT_RETURN_IF_ERROR(RunLoadCase(
          options, rows,
          {"reshard", "rows to cols" + way + tail, Cut::kRows, Cut::kColumns, path, verify}));
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        RunLoadCase(options, columns,
                    {"reshard", "cols to rows, direct" + tail, Cut::kColumns, Cut::kRows,
                     LoadPath::kDirect, verify}));
  }
  return {};
}

}  // namespace tensormount::bench
