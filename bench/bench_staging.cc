// SPDX-License-Identifier: Apache-2.0
// Writes into a staging, hashing and journal included, beside pwrite and fsync of the same bytes.
#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <memory>
#include <string>
#include <unistd.h>
#include <utility>

#include "base/file_system.h"
#include "bench/ckptbench.h"
#include "fs/save/staging_writer.h"

namespace tensormount::bench {
namespace {

constexpr std::uint64_t kRows = 1024;
constexpr std::uint64_t kSmall = 4096;

// How a tensor is written by one thread.
struct Pattern {
  std::string name;
  std::uint64_t write = 0;   // Bytes of one call.
  std::uint64_t stride = 0;  // From one call to the next; more than `write`: columns.
  // Of the tensor; 0: whole rows. Otherwise the target is a column box, packed.
  std::uint64_t box_columns = 0;
};

class StagingBench {
 public:
  StagingBench(const Options& options, const WorkFolder& folder, Pattern pattern)
      : folder_(folder), pattern_(std::move(pattern)), data_(std::size_t{1} << 20) {
    for (std::size_t i = 0; i < data_.size(); ++i) {
      data_.data()[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
    }
    const auto bytes = static_cast<std::uint64_t>(options.gib * (1 << 30));
    calls_ = std::max<std::uint64_t>(bytes / pattern_.write, 8);
  }

  std::uint64_t bytes() const { return calls_ * pattern_.write; }
  std::uint64_t journal_bytes() const { return journal_bytes_; }

  Status RemoveLast() {
    if (last_.empty()) return {};
    return HostFileSystem().RemoveTree(std::exchange(last_, {}));
  }

  Result<double> Ours() {
    TENSORMOUNT_RETURN_IF_ERROR(MakeFolder());
    Staging staging;
    staging.directory = last_;
    staging.name = "bench";
    staging.uuid = Uuid::Random();
    const auto columns = static_cast<std::int64_t>(
        pattern_.box_columns != 0 ? 2 * pattern_.box_columns : pattern_.stride);
    const auto rows = static_cast<std::int64_t>(
        pattern_.box_columns != 0 ? bytes() / pattern_.box_columns : calls_);
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorMeta meta,
                                 TensorMeta::Make("w", DType::kU8, {rows, columns}));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const Box box,
        Box::Make({0, 0}, {rows, pattern_.box_columns != 0 ? columns / 2 : columns}));
    return TimeThreads(1, [&](int) -> Status {
      const auto writer =
          std::make_shared<fs::StagingWriter>(HostFileSystem(), staging, "0123456789abcdef");
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto target, writer->OpenTarget(meta, box));
      const std::uint64_t step = pattern_.box_columns != 0 ? pattern_.write : pattern_.stride;
      for (std::uint64_t i = 0; i < calls_; ++i) {
        TENSORMOUNT_RETURN_IF_ERROR(target->Write(i * step, Data(i), pattern_.write));
      }
      TENSORMOUNT_RETURN_IF_ERROR(target->Sync());
      journal_bytes_ = writer->journal_bytes();
      return {};
    });
  }

  Result<double> Raw() {
    TENSORMOUNT_RETURN_IF_ERROR(MakeFolder());
    return TimeThreads(1, [&](int) -> Status {
      const OwnedFd fd(last_ + "/raw", O_RDWR | O_CREAT);
      if (fd.get() < 0) return Status::FromErrno(errno, "create a file in", last_);
      for (std::uint64_t i = 0; i < calls_; ++i) {
        TENSORMOUNT_RETURN_IF_ERROR(
            RawWrite(fd.get(), i * pattern_.write, Data(i), pattern_.write));
      }
      if (fsync(fd.get()) != 0) return Status::FromErrno(errno, "fsync a file in", last_);
      return {};
    });
  }

 private:
  const std::byte* Data(std::uint64_t call) const {
    return data_.data() + call * pattern_.write % (data_.size() - pattern_.write + 1);
  }
  Status MakeFolder() {
    last_ = folder_.Join("round-" + std::to_string(number_++));
    for (const char* name : {"", "/data", "/journal"}) {
      TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().CreateDirectory(last_ + name));
    }
    return {};
  }

  const WorkFolder& folder_;
  const Pattern pattern_;
  PageBuffer data_;
  std::uint64_t calls_ = 0;
  std::uint64_t journal_bytes_ = 0;
  int number_ = 0;
  std::string last_;
};

}  // namespace

Status BenchStagingWrite(const Options& options) {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  for (const Pattern& pattern :
       {Pattern{"whole tensor by 1 MiB", kMiB, kMiB},
        Pattern{"column box by 1 MiB", kMiB, 0, kMiB / kRows},
        Pattern{"whole tensor by 4 KiB", kSmall, kSmall},
        Pattern{"columns of 2 KiB, rows of 8 KiB", kSmall / 2, 2 * kSmall}}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder,
                                 WorkFolder::Make(options));
    StagingBench bench(options, *folder, pattern);
    Case c;
    c.workload = "staging-write";
    c.name = pattern.name;
    c.bytes = bench.bytes();
    c.floor_name = "pwrite side by side into a fresh file by calls of the same size, and fsync";
    c.before = [&] { return bench.RemoveLast(); };
    c.ours = [&] { return bench.Ours(); };
    c.floor = [&] { return bench.Raw(); };
    c.facts = [&] {
      return std::map<std::string, double>{
          {"journal_bytes", static_cast<double>(bench.journal_bytes())}};
    };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
    TENSORMOUNT_RETURN_IF_ERROR(bench.RemoveLast());
  }
  return {};
}

}  // namespace tensormount::bench
