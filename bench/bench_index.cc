// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "bench/ckptbench.h"
#include "bench/synthetic_staging.h"
#include "index/store/store.h"

namespace tensormount::bench {
namespace {

// Makes the compiler believe that somebody needs the value.
void Keep(std::uint64_t value) { asm volatile("" : : "r"(value)); }

// One row of each of options.tensors tensors a chunk, the rows dealt out evenly to the writers.
Status WriteStaging(const Options& options, const Staging& staging, int writers) {
  return WriteSyntheticStaging(
      HostFileSystem(), staging,
      {.tensors = options.tensors, .chunks_per_tensor = options.chunks, .writers = writers});
}

// The bytes that a publish makes, by plain calls: index, the coordinator's manifest and COMMIT
// written and fsynced, their folders synced, a rename, both parents synced.
Result<double> RawPublish(const std::string& folder, const std::string& model, int number) {
  const std::string from = folder + "/raw-" + std::to_string(number);
  const std::string to = from + "-done";
  if (mkdir(from.c_str(), 0755) != 0) return Status::FromErrno(errno, "make", from);
  std::uint64_t largest = 0;
  std::vector<std::uint64_t> sizes;
  for (const auto& [name, size] : FilesBelow(model)) {
    if (name.find("/data/") != std::string::npos || name.find("/manifest/r") != std::string::npos) {
      continue;
    }
    sizes.push_back(size);
    largest = std::max(largest, size);
  }
  const PageBuffer bytes(static_cast<std::size_t>(largest));
  const auto sync_folder = [](const std::string& path) {
    const OwnedFd fd(path, O_RDONLY | O_DIRECTORY);
    return fsync(fd.get()) == 0 ? Status() : Status::FromErrno(errno, "fsync", path);
  };
  const auto start = Clock::now();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const OwnedFd fd(from + "/" + std::to_string(i), O_RDWR | O_CREAT);
    TENSORMOUNT_RETURN_IF_ERROR(RawWrite(fd.get(), 0, bytes.data(), sizes[i]));
    if (fsync(fd.get()) != 0) return Status::FromErrno(errno, "fsync a file in", from);
    TENSORMOUNT_RETURN_IF_ERROR(sync_folder(from));
  }
  if (rename(from.c_str(), to.c_str()) != 0) return Status::FromErrno(errno, "rename", from);
  TENSORMOUNT_RETURN_IF_ERROR(sync_folder(folder));
  TENSORMOUNT_RETURN_IF_ERROR(sync_folder(to));
  const double seconds = SecondsSince(start);
  TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().RemoveTree(to));
  return seconds;
}

}  // namespace

Status BenchPublish(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store,
                               Store::OpenOrCreate(HostFileSystem(), folder->Join("store")));
  Inventory coordinator;
  coordinator.info.producer = "ckptbench";
  coordinator.info.world_size = static_cast<std::uint32_t>(options.ranks);
  std::map<std::string, double> facts;
  std::string last;
  int number = 0;
  const auto publish = [&](bool after_index) -> Result<double> {
    const std::string name = "step-" + std::to_string(number++);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Staging staging, store.Begin(name, IfExists::kFail));
    TENSORMOUNT_RETURN_IF_ERROR(WriteStaging(options, staging, options.ranks));
    const auto start = Clock::now();
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store::Published published,
                                 store.Publish(staging, coordinator, {}));
    const double all = SecondsSince(start);
    if (!last.empty()) TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().RemoveTree(last));
    last = store.CheckpointPath(name);
    facts["chunks"] = static_cast<double>(published.chunks);
    facts["manifests_ms"] = published.manifests_seconds * 1e3;
    facts["index_ms"] = published.index_seconds * 1e3;
    facts["after_index_ms"] = published.publish_seconds * 1e3;
    return after_index ? published.publish_seconds : all;
  };
  TENSORMOUNT_RETURN_IF_ERROR(publish(false).status());  // The sizes that the floor writes.
  for (const bool after_index : {false, true}) {
    Case c;
    c.workload = "publish";
    c.name = after_index ? "index built to acknowledged" : "data durable to acknowledged";
    c.floor_name = "write and fsync of index, coordinator's manifest and COMMIT, rename, folders";
    c.ours = [&] { return publish(after_index); };
    c.floor = [&] { return RawPublish(folder->Join(""), last, number); };
    c.facts = [&] { return facts; };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  }
  return {};
}

Status BenchOpen(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store,
                               Store::OpenOrCreate(HostFileSystem(), folder->Join("store")));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Staging staging, store.Begin("step", IfExists::kFail));
  TENSORMOUNT_RETURN_IF_ERROR(WriteStaging(options, staging, options.ranks));
  TENSORMOUNT_RETURN_IF_ERROR(store.Publish(staging, Inventory(), {}).status());
  const std::string path = store.CheckpointPath("step");
  for (const bool find : {false, true}) {
    Case c;
    c.workload = "open";
    c.name = find ? "open and find one tensor's extents" : "open";
    c.floor_name = "open, fstat and pread of COMMIT and of 64 KiB of each index file";
    if (options.cold) c.before = [&] { return DropCaches(path); };
    c.ours = [&]() -> Result<double> {
      const auto start = Clock::now();
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<OpenedCheckpoint> opened,
                                   OpenedCheckpoint::Open(HostFileSystem(), path, {}));
      if (find) {
        TENSORMOUNT_RETURN_IF_ERROR(
            opened->index().Extents(opened->index().tensor_count() / 2).status());
      }
      return SecondsSince(start);
    };
    c.floor = [&]() -> Result<double> {
      std::vector<std::byte> bytes(64 * 1024);
      const auto files = FilesBelow(path);
      const auto start = Clock::now();
      for (const auto& [name, size] : files) {
        if (name.find("/data/") != std::string::npos) continue;
        if (name.find("/manifest/") != std::string::npos) continue;
        const OwnedFd fd(name, O_RDONLY);
        struct stat st;
        if (fstat(fd.get(), &st) != 0) return Status::FromErrno(errno, "stat", name);
        const std::uint64_t part = std::min<std::uint64_t>(bytes.size(), size);
        TENSORMOUNT_RETURN_IF_ERROR(RawRead(fd.get(), size - part, bytes.data(), part));
      }
      return SecondsSince(start);
    };
    c.facts = [&] {
      return std::map<std::string, double>{
          {"chunks", static_cast<double>(options.tensors) * options.chunks}};
    };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  }
  return {};
}

Status BenchHash(const Options& options) {
  Options one = options;
  one.ranks = 1;
  const auto size =
      static_cast<std::size_t>(options.gib * 1024 * 1024 * 1024 / 4) & ~std::size_t{4095};
  PageBuffer memory(size);
  PageBuffer copy(size);
  std::memset(memory.data(), 0x5A, size);
  const auto timed = [&](const std::function<void()>& fn) {
    return [fn]() -> Result<double> {
      const auto start = Clock::now();
      fn();
      return SecondsSince(start);
    };
  };
  const Round xxh3 = timed([&] { Keep(Xxh3(memory.data(), size).low); });
  const Round crc = timed([&] { Keep(Crc64Extend(0, memory.data(), size)); });
  const Round fused = timed([&] { Keep(Crc64Copy(0, copy.data(), memory.data(), size)); });
  const Round plain = timed([&] { std::memcpy(copy.data(), memory.data(), size); });
  const struct {
    const char* name;
    const Round& ours;
    const char* floor_name;
    const Round& floor;
  } cases[] = {{"digest, CRC-64/NVME", crc, "XXH3-128 of the same bytes", xxh3},
               {"leaf hash, XXH3-128", xxh3, "memcpy of the same bytes", plain},
               {"digest while copying", fused, "memcpy of the same bytes", plain}};
  for (const auto& k : cases) {
    Case c;
    c.workload = "hash";
    c.name = k.name;
    c.bytes = size;
    c.floor_name = k.floor_name;
    c.ours = k.ours;
    c.floor = k.floor;
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(one, c));
  }
  return {};
}

}  // namespace tensormount::bench
