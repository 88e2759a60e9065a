// SPDX-License-Identifier: Apache-2.0
// Sorts the chunks and objects of a publish into the manifests of the mounts that wrote them.
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
  // Numbers of files in the manifest, by their numbers in the journal.
  std::map<std::uint32_t, std::uint32_t> file_numbers;
  // Use of one data file. The file is a tensor file (Placement::kTensorFile) if it has all bytes of
  // one tensor, each at its position in that tensor, and nothing else; the kernel may then read it
  // as tensors/KEY (passthrough).
  struct FileUse {
    std::uint32_t number = 0;  // Number in the journal.
    std::uint64_t end = 0;     // End of the last used byte.
    // The tensor of the file's first chunk; an index of inventory.tensors.
    std::optional<std::size_t> tensor;
    // Whether the file has anything but chunks of `tensor` at their positions in that tensor.
    bool other = false;
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

// Whether the region is a run of the tensor's row-major order that begins at byte `offset`.
bool IsRunAt(const TensorMeta& meta, const Region& region, std::uint64_t offset) {
  const std::optional<ByteBounds> run = RunInTensor(meta, region);
  return run && run->first == offset;
}

}  // namespace

StagedManifests::StagedManifests(const Staging& staging, const std::vector<Journal>& journals)
    : staging_(staging), journals_(journals), writers_(journals.size() + 1) {
  for (Writer& writer : writers_) writer.inventory.info.uuid = staging.uuid;
}
StagedManifests::~StagedManifests() = default;

StagedManifests::Writer& StagedManifests::WriterOf(std::uint32_t journal) {
  return journal == kPublisher ? writers_.back() : writers_[journal];
}

// The digest of a tensor is the XOR of its chunks' contributions; each manifest stores the share of
// its own chunks.
void StagedManifests::AddTensor(const TensorMeta& meta, const std::vector<StagedChunk>& chunks) {
  if (chunks.empty()) {
    TensorRecord empty(meta);
    empty.has_digest = true;
    writers_.back().inventory.tensors.push_back(std::move(empty));
    return;
  }
  for (const StagedChunk& chunk : chunks) {
    Writer& writer = WriterOf(chunk.journal);
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
  Writer& writer = WriterOf(journal);
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
        return Status(Code::kDataLoss,
                      path + ": the file is missing, although a journal refers to it");
      }
      if (!file.ok()) return file.status();
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file.value()->Stat());
      if (info.kind != FileKind::kFile || info.size < use.end) {
        return Status(Code::kDataLoss,
                      path + ": the file ends at byte " + std::to_string(info.size) +
                          ", but its journal refers to bytes up to " + std::to_string(use.end));
      }
      TENSORMOUNT_RETURN_IF_ERROR(file.value()->Seal());
      // After the recorded bytes may follow unsynced bytes of a mount that was killed. They are not
      // used, but the recorded length must survive a power loss.
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

// Writes the manifests in the order of journals. Their names begin with "mount-" or "publisher-",
// so that they differ from those of the library's ranks.
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
