// SPDX-License-Identifier: Apache-2.0
// Divides one rank's data among its writers, and joins what they have written. The kernel lets one
// thread at a time write to a file, so each writer has files of its own.
#include "collective/save/data_writer.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "base/parallel.h"
#include "collective/guarded.h"
#include "collective/save/part_writer.h"

namespace tensormount {
namespace {

// Unless the caller asked for a number of writers: a writer for fewer bytes gains nothing, and more
// rank shards cost readers more files.
constexpr std::uint64_t kLeastBytesOfAWriter = std::uint64_t{16} << 20;
constexpr std::uint64_t kLeastBytesOfAShard = std::uint64_t{64} << 20;

// A file, or a rank shard, that one writer writes.
struct Unit {
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> chunks;  // Positions in the task, ascending.
  bool is_pack = false;
  bool is_shard = false;
};

// Runs of neighbouring chunks with about as many bytes each.
void AddShards(const RankTask& task, std::span<const std::uint32_t> chunks, int writers,
               std::uint64_t least, std::vector<Unit>& units) {
  std::uint64_t total = 0;
  for (const std::uint32_t i : chunks) total += task.chunks[i].bytes;
  const std::uint64_t shards =
      std::clamp<std::uint64_t>(total / least, 1, static_cast<std::uint64_t>(writers));
  const std::uint64_t each = (total + shards - 1) / shards;
  for (const std::uint32_t i : chunks) {
    const bool begins = units.empty() || !units.back().is_shard || units.back().bytes >= each;
    if (begins) units.emplace_back().is_shard = true;
    units.back().bytes += task.chunks[i].bytes;
    units.back().chunks.push_back(i);
  }
}

std::vector<Unit> UnitsOf(const RankTask& task, const StateDict& state, int writers, bool asked) {
  std::vector<Unit> units;
  std::vector<std::uint32_t> of_shards;
  Unit pack;
  pack.is_pack = true;
  std::optional<std::uint32_t> last;  // The tensor of the last unit.
  for (std::uint32_t i = 0; i < task.chunks.size(); ++i) {
    const RankTask::Chunk& chunk = task.chunks[i];
    Unit* unit = nullptr;
    switch (task.tensors[chunk.tensor].placement) {
      case Placement::kTensorFile:
        if (last != chunk.tensor) units.emplace_back();
        last = chunk.tensor;
        unit = &units.back();
        break;
      case Placement::kRankShard:
        of_shards.push_back(i);
        continue;
      default:
        // The safetensors placement has one file of all tensors, whatever their size.
        unit = &pack;
    }
    unit->bytes += chunk.bytes;
    unit->chunks.push_back(i);
  }
  AddShards(task, of_shards, writers, asked ? 1 : kLeastBytesOfAShard, units);
  for (const std::uint32_t item : task.objects) pack.bytes += state.objects()[item].bytes.size();
  if (!pack.chunks.empty() || !task.objects.empty()) units.push_back(std::move(pack));
  return units;
}

// Joins the parts of a rank into its manifest.
class PartJoiner {
 public:
  PartJoiner(const RankTask& task, bool counts) : task_(task) { out_.extras.counts = counts; }

  Status Add(WrittenPart part) {
    std::vector<std::uint32_t> files;  // New numbers by old ones.
    for (FileRecord& file : part.inventory.files) {
      files.push_back(static_cast<std::uint32_t>(out_.inventory.files.size()));
      out_.inventory.files.push_back(std::move(file));
    }
    const std::uint64_t first_leaf = out_.leaves.size();
    for (ExtraRange& extra : part.inventory.extras) {
      extra.file = files[extra.file];
      extra.first_leaf += first_leaf;
      out_.inventory.extras.push_back(extra);
    }
    for (ObjectRecord& object : part.inventory.objects) {
      object.file = files[object.file];
      object.first_leaf += first_leaf;
      out_.inventory.objects.push_back(std::move(object));
    }
    for (auto& [t, tensor] : part.tensors) {
      TensorRecord& record = RecordOf(tensors_, task_, t);
      record.digest ^= tensor.digest;
      TENSORMOUNT_RETURN_IF_ERROR(
          record.extents.AppendMapped(tensor.extents, files, 0, first_leaf));
    }
    out_.leaves.insert(out_.leaves.end(), part.leaves.begin(), part.leaves.end());
    out_.extras.pages = out_.extras.pages || part.paged;
    out_.bytes += part.bytes;
    std::ranges::move(part.files, std::back_inserter(out_.files));
    return Status();
  }

  WrittenData Finish(const Staging& staging) {
    out_.inventory.info.uuid = staging.uuid;
    for (std::uint32_t t = 0; t < task_.tensors.size(); ++t) {
      if (task_.tensors[t].empty) RecordOf(tensors_, task_, t);
    }
    for (auto& [ordinal, tensor] : tensors_) {
      tensor.extents.Sort();
      out_.inventory.tensors.push_back(std::move(tensor));
    }
    return std::move(out_);
  }

 private:
  const RankTask& task_;
  WrittenData out_;
  std::map<std::uint32_t, TensorRecord> tensors_;  // By position of the tensor in the task.
};

}  // namespace

std::vector<WriterPart> DivideTask(const RankTask& task, const StateDict& state, int writers,
                                   bool asked) {
  std::vector<WriterPart> parts(1);
  std::uint64_t total = 0;
  for (const RankTask::Chunk& chunk : task.chunks) total += chunk.bytes;
  if (!asked) {
    writers = static_cast<int>(
        std::min<std::uint64_t>(static_cast<std::uint64_t>(writers), total / kLeastBytesOfAWriter));
  }
  if (writers <= 1) {
    parts[0].chunks.resize(task.chunks.size());
    std::iota(parts[0].chunks.begin(), parts[0].chunks.end(), 0U);
    parts[0].objects = task.objects;
    return parts;
  }
  std::vector<Unit> units = UnitsOf(task, state, writers, asked);
  // The largest first, each to the writer with the fewest bytes; rank shards to different ones.
  std::ranges::stable_sort(units, [](const Unit& a, const Unit& b) {
    return std::pair(b.is_shard, b.bytes) < std::pair(a.is_shard, a.bytes);
  });
  parts.resize(static_cast<std::size_t>(writers));
  std::vector<std::uint64_t> bytes(parts.size(), 0);
  int shards = 0;
  for (const Unit& unit : units) {
    const auto least = static_cast<std::size_t>(std::ranges::min_element(bytes) - bytes.begin());
    const std::size_t to = unit.is_shard ? static_cast<std::size_t>(shards) : least;
    WriterPart& part = parts[to];
    bytes[to] += unit.bytes;
    if (unit.is_shard) part.shard = shards++;
    if (unit.is_pack) part.objects = task.objects;
    part.chunks.insert(part.chunks.end(), unit.chunks.begin(), unit.chunks.end());
  }
  for (WriterPart& part : parts) std::ranges::sort(part.chunks);
  std::erase_if(parts, [](const WriterPart& p) { return p.chunks.empty() && p.objects.empty(); });
  return parts;
}

Result<WrittenData> WriteData(const WriteInput& input) {
  const std::vector<WriterPart> parts =
      DivideTask(input.task, input.state, input.writers, input.asked);
  std::atomic<bool> stop{false};
  std::vector<WrittenPart> written(parts.size());
  std::mutex mutex;
  Status first;  // The failure for which the other writers stop.
  struct Nothing {};
  const Status all = ForEachParallel<Nothing>(
      parts.size(), static_cast<int>(parts.size()), [&](std::size_t i, Nothing&) -> Status {
        const Status done = Guarded([&]() -> Status {
          TENSORMOUNT_ASSIGN_OR_RETURN(written[i], WritePart(input, parts[i], stop));
          return Status();
        });
        if (done.ok()) return done;
        const std::lock_guard lock(mutex);
        if (!stop.exchange(true)) first = done;
        return done;
      });
  TENSORMOUNT_RETURN_IF_ERROR(first);
  TENSORMOUNT_RETURN_IF_ERROR(all);
  PartJoiner joiner(input.task, input.count_values);
  for (WrittenPart& part : written) TENSORMOUNT_RETURN_IF_ERROR(joiner.Add(std::move(part)));
  return joiner.Finish(input.staging);
}

Status SealShared(FileSystem& fs, const Staging& staging, const RankTask& task) {
  for (const RankTask::Tensor& tensor : task.tensors) {
    if (!tensor.seals) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        fs.OpenShared(JoinPath(staging.directory, TensorFileName(staging, tensor.file))));
    TENSORMOUNT_RETURN_IF_ERROR(file->Seal());
    TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(file->Close());
  }
  return Status();
}

std::vector<std::string> FilesWrittenAlone(const Staging& staging, const RankTask& task, int rank) {
  std::vector<std::string> names = {PackName(staging, rank)};
  for (int shard = 0; shard < kMostWriters; ++shard) {
    names.push_back(RankShardName(staging, rank, shard));
  }
  for (const RankTask::Tensor& tensor : task.tensors) {
    if (tensor.placement == Placement::kTensorFile && !tensor.shared) {
      names.push_back(TensorFileName(staging, tensor.file));
    }
  }
  return names;
}

std::string TensorFileName(const Staging& staging, std::string_view stem) {
  return "data/" + staging.ShortId() + "-" + std::string(stem) + ".bin";
}
std::string RankShardName(const Staging& staging, int rank, int shard) {
  return "data/" + staging.ShortId() + "-r" + std::to_string(rank) +
         (shard == 0 ? "" : "." + std::to_string(shard)) + ".safetensors";
}
std::string PackName(const Staging& staging, int rank) {
  return "data/" + staging.ShortId() + "-p" + std::to_string(rank) + ".bin";
}
std::string ManifestName(int rank) { return "manifest/r" + std::to_string(rank) + ".tmm"; }

}  // namespace tensormount
