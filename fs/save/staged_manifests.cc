// SPDX-License-Identifier: Apache-2.0
// Chunks and objects of a publish, sorted into the manifest of the mount that wrote them.
#include "fs/save/staged_manifests.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "index/records/manifest.h"

namespace tensormount::fs {

struct StagedManifests::Writer {
  Inventory inventory;
  std::vector<Hash128> leaves;
  std::map<std::uint32_t, std::uint32_t> file_numbers;  // Of the journal: of the manifest.
  // A data file is a tensor file (Placement::kTensorFile) where every chunk in it lies at its own
  // position of one tensor and all of the tensor is there. Then the kernel may read it by itself as
  // tensors/KEY.
  struct FileUse {
    std::uint32_t number = 0;  // Of the journal.
    std::uint64_t end = 0;     // Of the last byte that counts.
    // Which tensor it is, as far as it is one: each byte at its place.
    std::optional<std::size_t> tensor;
    bool other = false;  // Something that is no byte of one tensor at its place.
  };
  std::vector<FileUse> files;

  std::uint32_t FileNumber(std::uint32_t of_journal) {
    const auto [it, fresh] =
        file_numbers.emplace(of_journal, static_cast<std::uint32_t>(files.size()));
    if (fresh) {
      files.push_back({});
      files.back().number = of_journal;
    }
    return it->second;
  }
  std::uint64_t AddLeaves(const std::vector<Hash128>& more) {
    const std::uint64_t first = leaves.size();
    leaves.insert(leaves.end(), more.begin(), more.end());
    return first;
  }
};

namespace {

// Whether the region begins at byte `offset` of the tensor's row-major order and is a run of it.
// For elements of fewer than 8 bits an offset in bytes need not be one in elements.
bool IsRunAt(const TensorMeta& meta, const Region& region, std::uint64_t offset) {
  const std::int64_t bits = meta.bits();
  const std::int64_t unit = bits % 8 == 0 ? bits / 8 : 0;
  std::int64_t first = 0;
  if (unit != 0) {
    if (offset % static_cast<std::uint64_t>(unit) != 0) return false;
    first = static_cast<std::int64_t>(offset) / unit;
  } else {
    if (offset > static_cast<std::uint64_t>(INT64_MAX) / 8 ||
        static_cast<std::int64_t>(offset) * 8 % bits != 0) {
      return false;
    }
    first = static_cast<std::int64_t>(offset) * 8 / bits;
  }
  // Equal cells, equal regions.
  const Result<Region> run = Region::Flat(Box::Whole(meta.shape()), first, region.volume());
  return run.ok() && run.value() == region;
}

}  // namespace

StagedManifests::StagedManifests(const Staging& staging, const std::vector<Journal>& journals)
    : staging_(staging), journals_(journals), writers_(journals.size() + 1) {
  for (Writer& writer : writers_) writer.inventory.info.uuid = staging.uuid;
}
StagedManifests::~StagedManifests() = default;

StagedManifests::Writer& StagedManifests::Of(std::uint32_t journal) {
  return journal == kPublisher ? writers_.back() : writers_[journal];
}

// The digest of a tensor is the XOR of what its chunks contribute; each manifest has the share of
// its own chunks.
void StagedManifests::AddTensor(const TensorMeta& meta, const std::vector<StagedChunk>& chunks) {
  if (chunks.empty()) {
    TensorRecord empty(meta);
    empty.has_digest = true;
    writers_.back().inventory.tensors.push_back(std::move(empty));
    return;
  }
  for (const StagedChunk& chunk : chunks) {
    Writer& writer = Of(chunk.journal);
    std::vector<TensorRecord>& tensors = writer.inventory.tensors;
    if (tensors.empty() || tensors.back().meta.key() != meta.key()) {
      tensors.emplace_back(meta);
      tensors.back().has_digest = true;
    }
    ChunkRecord record;
    record.region = chunk.region;
    record.file = writer.FileNumber(chunk.file);
    record.offset = chunk.offset;
    record.length = chunk.length;
    record.hash = ChunkRoot(chunk.leaves, chunk.length);
    record.first_leaf = writer.AddLeaves(chunk.leaves);
    tensors.back().extents.Append(record);
    tensors.back().digest ^= chunk.contribution;
    Writer::FileUse& use = writer.files[record.file];
    use.end = std::max(use.end, chunk.offset + chunk.length);
    const std::size_t tensor = tensors.size() - 1;
    if (!use.tensor) use.tensor = tensor;
    use.other = use.other || *use.tensor != tensor || !IsRunAt(meta, chunk.region, chunk.offset);
  }
}

void StagedManifests::AddObject(std::uint32_t journal, const StagedObject& object,
                                const Dims& grid) {
  Writer& writer = Of(journal);
  ObjectRecord record;
  record.key = object.key;
  record.index = object.index;
  record.grid = grid;
  record.file = writer.FileNumber(journal == kPublisher ? 0 : object.file);
  record.offset = object.length == 0 ? 0 : object.offset;
  record.length = object.length;
  record.hash = ChunkRoot(object.leaves, object.length);
  record.first_leaf = writer.AddLeaves(object.leaves);
  Writer::FileUse& use = writer.files[record.file];
  use.end = std::max(use.end, record.offset + record.length);
  use.other = true;
  writer.inventory.objects.push_back(std::move(record));
}

// Asked before the manifests are written: an object of no bytes needs a file to be recorded in.
bool StagedManifests::needs_patch_file() const { return !writers_.back().files.empty(); }

Status StagedManifests::SealFiles(FileSystem& fs, const PatchFile& patches, std::uint32_t journal,
                                  Writer& writer) {
  for (const Writer::FileUse& use : writer.files) {
    FileRecord record;
    record.placement = Placement::kPack;
    if (journal == kPublisher) {
      record.name = patches.name();
      record.length = patches.size();
    } else {
      record.name = journals_[journal].files[use.number];
      const std::string path = JoinPath(staging_.directory, record.name);
      const Result<std::unique_ptr<File>> file = fs.OpenRead(path);
      if (file.status().code() == Code::kNotFound) {
        return Status(Code::kDataLoss, path + ": missing, though a journal names it");
      }
      if (!file.ok()) return file.status();
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file.value()->Stat());
      if (info.kind != FileKind::kFile || info.size < use.end) {
        return Status(Code::kDataLoss, path + ": ends at byte " + std::to_string(info.size) +
                                           ", its journal says " + std::to_string(use.end));
      }
      TENSORMOUNT_RETURN_IF_ERROR(file.value()->Seal());
      // Behind what journals name may be bytes that nobody synced, of a mount that was killed. They
      // mean nothing, but the length that is recorded must survive a power cut.
      if (info.size > use.end) TENSORMOUNT_RETURN_IF_ERROR(file.value()->Sync());
      record.length = info.size;
      if (use.tensor && !use.other) {
        const TensorRecord& tensor = writer.inventory.tensors[*use.tensor];
        const bool all =
            tensor.extents.DataBytes() == tensor.meta.bytes() && info.size == tensor.meta.bytes();
        if (all) record.placement = Placement::kTensorFile;
      }
    }
    writer.inventory.files.push_back(std::move(record));
  }
  return Status();
}

// In the order of journals. Names begin with what wrote them, so that they are never those of the
// library's ranks.
Status StagedManifests::Write(FileSystem& fs, const PatchFile& patches) {
  for (std::size_t i = 0; i < writers_.size(); ++i) {
    Writer& writer = writers_[i];
    const bool own = i + 1 == writers_.size();
    if (writer.inventory.tensors.empty() && writer.inventory.objects.empty()) continue;
    TENSORMOUNT_RETURN_IF_ERROR(
        SealFiles(fs, patches, own ? kPublisher : static_cast<std::uint32_t>(i), writer));
    for (TensorRecord& tensor : writer.inventory.tensors) tensor.extents.Sort();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes,
                                 EncodeManifest(writer.inventory, writer.leaves));
    const std::string name =
        own ? "publisher-" + Uuid::Random().Short() : "mount-" + journals_[i].incarnation;
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.WriteFileDurably(JoinPath(staging_.directory, "manifest/" + name + ".tmm"), bytes));
  }
  return Status();
}

}  // namespace tensormount::fs
