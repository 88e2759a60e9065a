// SPDX-License-Identifier: Apache-2.0
// Links and records from a base (BaseLinker). The unit of work is one manifest of the base, because
// a manifest has all records of its writer, with digest contributions and leaf hashes. A rank that
// has read one can therefore decide for each of its ranges whether the range is taken, dead, or in
// a file that is not used, without the records of the whole checkpoint.
#include "index/store/linking.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "base/errors.h"
#include "index/read/rebuild.h"
#include "index/records/manifest.h"
#include "index/records/store_paths.h"
#include "index/store/store_moves.h"
#include "shard/chunk_accumulator.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

constexpr std::size_t kCopyBytes = std::size_t{1} << 20;

Status Cancelled(const std::atomic<bool>* cancel) {
  if (cancel == nullptr || !cancel->load(std::memory_order_relaxed)) return Status();
  return Status(Code::kCancelled, "the save is being cancelled");
}

// Identifies an object part by its key and grid index. The order is that of the base's objects.
using PartKey = std::pair<std::string, std::vector<std::int64_t>>;
PartKey KeyOf(const ObjectRecord& object) {
  const auto span = object.index.span();
  return {object.key, {span.begin(), span.end()}};
}

}  // namespace

ReusedFromBase ReusedFromBase::Nothing(std::size_t tensors, std::size_t objects) {
  ReusedFromBase taken;
  taken.tensors.assign(tensors, false);
  taken.objects.assign(objects, false);
  return taken;
}

bool ReusedFromBase::any() const {
  const auto is_set = [](bool b) { return b; };
  return std::any_of(tensors.begin(), tensors.end(), is_set) ||
         std::any_of(objects.begin(), objects.end(), is_set);
}

void LinkCounts::Add(const LinkCounts& o) {
  files_linked += o.files_linked;
  bytes_linked += o.bytes_linked;
  files_copied += o.files_copied;
  bytes_copied += o.bytes_copied;
  if (refused.empty()) refused = o.refused;
}

Result<LinkPlan> PlanLinks(const OpenedCheckpoint& base, const Staging& staging,
                           const ReusedFromBase& taken) {
  const CheckpointIndex& index = base.index();
  const std::vector<FileRecord>& files = index.files();
  std::vector<std::uint64_t> live(files.size(), 0);
  std::vector<std::uint64_t> dead(files.size(), 0);
  std::vector<bool> wanted(files.size(), false);
  LinkPlan plan;
  plan.stale_safetensors_header.assign(files.size(), false);
  // Whether each tensor is taken with a new key.
  std::vector<bool> renamed(index.tensor_count(), false);
  if (!taken.tensor_keys.empty()) {
    TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& entry) {
      const std::string& key = taken.tensor_keys[entry.ordinal];
      renamed[entry.ordinal] = taken.tensors[entry.ordinal] && key != entry.meta.key();
      return true;
    }));
  }
  const auto count = [&](std::uint32_t file, std::uint64_t length, bool taken_too) -> Status {
    if (file >= files.size())
      return DataLoss("a range refers to a file that is not in the file table");
    std::uint64_t& sum = taken_too ? live[file] : dead[file];
    const auto more = CheckedAdd(sum, length);
    if (!more)
      return DataLoss(files[file].name, "the ranges of the file add up to more than 2^64 bytes");
    sum = *more;
    if (taken_too) wanted[file] = true;
    return Status();
  };
  for (std::uint32_t t = 0; t < index.tensor_count(); ++t) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto extents, index.Extents(t));
    for (std::size_t i = 0; i < extents->size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, extents->At(i));
      TENSORMOUNT_RETURN_IF_ERROR(count(chunk.file, chunk.length, taken.tensors[t]));
      if (renamed[t]) plan.stale_safetensors_header[chunk.file] = true;
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> objects, index.Objects());
  for (std::size_t i = 0; i < objects.size(); ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(count(objects[i].file, objects[i].length, taken.objects[i]));
  }
  plan.files.assign(files.size(), BaseFileUse::kNone);
  const std::string own = "data/" + staging.ShortId() + "-";
  for (std::size_t f = 0; f < files.size(); ++f) {
    if (!wanted[f]) continue;
    plan.live_bytes += live[f];
    if (files[f].placement == Placement::kForeign) {
      plan.files[f] = BaseFileUse::kForeign;
      continue;
    }
    // A file without dead ranges is linked whatever its size, because its other bytes are only a
    // header, which may be longer than the data. In a pack, bytes that belong to no record are
    // waste, so a pack is always judged by its live bytes.
    const bool whole = dead[f] == 0 && files[f].placement != Placement::kPack;
    const bool enough = whole || live[f] >= files[f].length - std::min(live[f], files[f].length);
    // A file whose name begins like the new checkpoint's own files is not linked, because the new
    // checkpoint may use the name for a file of its own.
    plan.files[f] =
        enough && !files[f].name.starts_with(own) ? BaseFileUse::kLink : BaseFileUse::kCopy;
    if (dead[f] > 0) plan.stale_safetensors_header[f] = true;
  }
  return plan;
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenBase(FileSystem& fs, const std::string& store,
                                                   const std::string& name, const Uuid& uuid) {
  const std::string named = JoinPath(store, name);
  const std::string trash = JoinPath(JoinPath(store, store_paths::kTrashFolder), uuid.ToString());
  Status failed;
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (attempt > 0) fs.SleepFor(std::chrono::milliseconds(10));
    for (const std::string& directory : {named, trash}) {
      auto opened = OpenedCheckpoint::Open(fs, directory, {});
      if (opened.ok() && opened.value()->index().info().uuid == uuid &&
          opened.value()->commit() != nullptr) {
        return opened;
      }
      const Status why = opened.ok()
                             ? Status(Code::kStale, directory + ": replaced by another checkpoint")
                             : opened.status();
      if (failed.ok()) failed = why;
      if (why.code() != Code::kNotFound && why.code() != Code::kStale) {
        return why.WithContext("base " + name);
      }
    }
  }
  return failed.WithContext("base " + name);
}

std::string CopiedPackName(const Staging& staging, std::uint32_t part) {
  return "data/" + staging.ShortId() + "-c" + std::to_string(part) + ".bin";
}

std::string LinkedManifestName(std::uint32_t part, std::uint64_t consecutive_linked) {
  return "manifest/l" + std::to_string(part) + "-" + std::to_string(consecutive_linked) + ".tmm";
}

std::uint64_t ConsecutiveLinkedSaves(const CheckpointIndex& index) {
  std::uint64_t most = 0;
  for (const std::string& name : index.manifests()) {
    std::uint32_t part = 0;
    std::uint64_t consecutive_linked = 0;
    std::string_view rest = name;
    const auto take = [&](std::string_view word) {
      const bool there = rest.starts_with(word);
      if (there) rest.remove_prefix(word.size());
      return there;
    };
    const auto number = [&](auto& value) {
      const auto end = std::from_chars(rest.data(), rest.data() + rest.size(), value);
      rest.remove_prefix(static_cast<std::size_t>(end.ptr - rest.data()));
      return end.ec == std::errc();
    };
    if (take("manifest/l") && number(part) && take("-") && number(consecutive_linked) &&
        rest == ".tmm") {
      most = std::max(most, consecutive_linked);
    }
  }
  return most;
}

// ---- Files ----

Status BaseLinker::LinkAll(std::uint64_t consecutive_linked, LinkCounts& counts) {
  TENSORMOUNT_RETURN_IF_ERROR(LinkFiles(0, 1, counts));
  TENSORMOUNT_ASSIGN_OR_RETURN(const LinkedRecords records, Records(0, 1, counts));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest,
                               EncodeManifest(records.inventory, records.leaves, records.extras));
  return fs_.WriteFileDurably(
      JoinPath(staging_.directory, LinkedManifestName(0, consecutive_linked)), manifest);
}

Status BaseLinker::LinkFiles(std::uint32_t part, std::uint32_t parts, LinkCounts& counts) {
  return ForEachLinked(part, parts, [&](std::uint32_t f) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Cancelled(cancel_));
    return LinkFile(f, part, parts, counts);
  });
}

Status BaseLinker::LinkFile(std::uint32_t number, std::uint32_t part, std::uint32_t parts,
                            LinkCounts& counts) {
  const FileRecord& file = base_.index().files()[number];
  // Links in the base's directories are not followed, because they could lead anywhere.
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> opened,
                               OpenListedFile(fs_, base_.pinned_directory(), file.name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo listed, opened->Stat());
  const std::string from = JoinPath(base_.pinned_directory(), file.name);
  const std::string to = JoinPath(staging_.directory, file.name);
  if (file.name.rfind('/') != file.name.find('/')) {
    TENSORMOUNT_RETURN_IF_ERROR(fs_.CreateDirectories(to.substr(0, to.rfind('/'))));
  }
  // An unsealed file is not linked: a process could still write to it and change both checkpoints.
  const bool sealed = listed.sealed();
  const auto link = [&] {
    return sealed ? fs_.Link(from, to)
                  : Status::FromErrno(EPERM, "hard-link the unsealed file", from);
  };
  Status linked = link();
  if (linked.code() == Code::kAlreadyExists || (!sealed && fs_.Exists(to))) {
    // The file is left from an earlier attempt to publish this staging.
    TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveFile(to));
    linked = link();
  }
  if (linked.ok()) {
    // Meanwhile the name may lead to another or a truncated file, so the new link is checked.
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs_.LinkStat(to));
    if (info.kind != FileKind::kFile || info.size != file.length || info.device != listed.device ||
        info.inode != listed.inode) {
      return DataLoss(JoinPath(base_.directory(), file.name),
                      "the file is not the file of " + std::to_string(file.length) +
                          " bytes that its checkpoint lists");
    }
    ++counts.files_linked;
    counts.bytes_linked += file.length;
    return Status();
  }
  if (!store_moves::IsLinkRefused(linked)) return linked;
  if (counts.refused.empty()) {
    // A pinned path (/proc/self/fd/N) means nothing in a message.
    std::string why = linked.message();
    if (const std::size_t at = why.find(from); at != std::string::npos) {
      why.replace(at, from.size(), JoinPath(base_.directory(), file.name));
    }
    counts.refused = std::move(why);
  }
  TENSORMOUNT_RETURN_IF_ERROR(FindRanges(part, parts));
  TENSORMOUNT_RETURN_IF_ERROR(CopyFile(number, *opened, to));
  ++counts.files_copied;
  counts.bytes_copied += file.length;
  return Status();
}

void BaseLinker::Discard(std::uint32_t part, std::uint32_t parts) {
  (void)ForEachLinked(part, parts, [&](std::uint32_t f) {
    (void)fs_.RemoveFile(JoinPath(staging_.directory, base_.index().files()[f].name));
    return Status();
  });
  (void)fs_.RemoveFile(JoinPath(staging_.directory, CopiedPackName(staging_, part)));
}

// Collects the hashed chunks, objects and extra ranges of all files of a share, when the first file
// of the share must be copied. Extra ranges are only in the base's manifests.
Status BaseLinker::FindRanges(std::uint32_t part, std::uint32_t parts) {
  if (!ranges_.empty()) return Status();
  const CheckpointIndex& index = base_.index();
  std::vector<std::vector<CheckedRange>> ranges(index.files().size());
  std::vector<bool> of_share(index.files().size(), false);
  std::unordered_map<std::string_view, std::uint32_t> numbers;
  for (std::uint32_t f = 0; f < index.files().size(); ++f) {
    numbers.emplace(index.files()[f].name, f);
  }
  (void)ForEachLinked(part, parts, [&](std::uint32_t f) {
    of_share[f] = true;
    return Status();
  });
  const auto add = [&](std::uint32_t file, const CheckedRange& range) {
    if (range.length > 0 && file < ranges.size() && of_share[file]) {
      ranges[file].push_back(range);
    }
  };
  for (std::uint32_t t = 0; t < index.tensor_count(); ++t) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto extents, index.Extents(t));
    for (std::size_t i = 0; i < extents->size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, extents->At(i));
      if (chunk.has_hash) add(chunk.file, {chunk.offset, chunk.length, chunk.hash});
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> objects, index.Objects());
  for (const ObjectRecord& object : objects) {
    if (object.has_hash()) add(object.file, {object.offset, object.length, object.hash});
  }
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachManifest([&](const std::string& name, const Manifest& manifest) -> Status {
        const std::vector<FileRecord>& listed = manifest.inventory.files;
        for (const ExtraRange& extra : manifest.inventory.extras) {
          if (extra.file >= listed.size())
            return DataLoss(name, "a range refers to a file that is not in the file table");
          const auto known = numbers.find(listed[extra.file].name);
          if (known == numbers.end())
            return DataLoss(name, "the manifest lists a file that is not in the index");
          add(known->second, {extra.offset, extra.length, extra.hash});
        }
        return Status();
      }));
  for (auto& of_file : ranges) std::ranges::sort(of_file, {}, &CheckedRange::offset);
  ranges_ = std::move(ranges);
  return Status();
}

// All ranges are compared with their hashes during the copy, so that damage is not copied.
Status BaseLinker::CopyFile(std::uint32_t number, File& from, const std::string& to) {
  const FileRecord& file = base_.index().files()[number];
  RangeCheck check(ranges_[number]);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> out, fs_.CreateExclusive(to));
  std::vector<std::byte> block(static_cast<std::size_t>(
      std::min<std::uint64_t>(std::max<std::uint64_t>(file.length, 1), kCopyBytes)));
  const auto damaged = [&] {
    return DataLoss(JoinPath(base_.directory(), file.name),
                    "bytes from " + std::to_string(ranges_[number][check.next()].offset) +
                        " on: checksum mismatch");
  };
  const auto read = [&](std::uint64_t at, std::span<std::byte> bytes) {
    TENSORMOUNT_RETURN_IF_ERROR(Cancelled(cancel_));
    return from.ReadExactAt(at, bytes.data(), bytes.size());
  };
  const auto write = [&](std::uint64_t at, std::span<const std::byte> bytes) {
    if (!check.Add(bytes.data(), bytes.size())) return damaged();
    return out->WriteAt(at, bytes.data(), bytes.size());
  };
  TENSORMOUNT_RETURN_IF_ERROR(PassBytes(file.length, block, read, write));
  if (!check.all_good()) return damaged();
  TENSORMOUNT_RETURN_IF_ERROR(out->Seal());
  TENSORMOUNT_RETURN_IF_ERROR(out->Sync());
  return out->Close();
}

// ---- Records ----

// Builds the records of one new manifest, for BaseLinker::Records.
class BaseLinker::Gatherer {
 public:
  Gatherer(BaseLinker& linker, std::uint32_t part, LinkCounts& counts)
      : linker_(linker), part_(part), counts_(counts) {
    out_.inventory.info.uuid = linker.staging_.uuid;
  }

  Status Prepare() {
    const CheckpointIndex& index = linker_.base_.index();
    for (std::uint32_t f = 0; f < index.files().size(); ++f) {
      file_numbers_.emplace(index.files()[f].name, f);
    }
    ordinals_.reserve(index.tensor_count());
    TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& entry) {
      ordinals_.emplace(entry.meta.key(), entry.ordinal);
      return true;
    }));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> objects, index.Objects());
    for (std::size_t i = 0; i < objects.size(); ++i) positions_.emplace(KeyOf(objects[i]), i);
    return Status();
  }

  Status Add(const std::string& name, const Manifest& manifest) {
    manifest_name_ = &name;
    manifest_ = &manifest;
    own_numbers_.clear();
    for (const FileRecord& file : manifest.inventory.files) {
      const auto known = file_numbers_.find(file.name);
      if (known == file_numbers_.end())
        return Bad("the manifest lists a file that is not in the index");
      own_numbers_.push_back(known->second);
    }
    // The coordinator's manifest only lists tensors and objects that other manifests have recorded,
    // so its tensors, and objects without a file, are skipped.
    if (name != kCoordinatorManifest) {
      for (const TensorRecord& tensor : manifest.inventory.tensors) {
        if (const Status status = AddTensor(tensor); !status.ok()) {
          return status.WithContext("tensor " + tensor.meta.key());
        }
      }
    }
    for (const ObjectRecord& object : manifest.inventory.objects) {
      if (object.file == kNoFile) continue;
      if (const Status status = AddObject(object); !status.ok()) {
        return status.WithContext("object " + object.key);
      }
    }
    for (const ExtraRange& extra : manifest.inventory.extras) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, BaseFile(extra.file));
      if (Use(file) != BaseFileUse::kLink) continue;
      TENSORMOUNT_RETURN_IF_ERROR(
          AddDead(file, extra.offset, extra.length, extra.hash, extra.first_leaf));
    }
    return Status();
  }

  Result<LinkedRecords> Finish() {
    TENSORMOUNT_RETURN_IF_ERROR(CopyLive());
    for (auto& [ordinal, tensor] : tensors_) {
      tensor.extents.Sort();
      out_.inventory.tensors.push_back(std::move(tensor));
    }
    return std::move(out_);
  }

 private:
  // A live range of a file that is not linked, to be copied into the pack. CopyLive writes ranges
  // with wide elements first, so that all are aligned without gaps, and then sets the new
  // positions.
  struct LiveRange {
    std::uint32_t bits = 8;
    std::uint32_t file = 0;  // Number in the base.
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
    Hash128 hash;
    // Ordinal of the tensor; nullopt for an object.
    std::optional<std::uint32_t> tensor = {};
    ChunkRecord chunk = {};
    // Position of the object in the new inventory.
    std::size_t object = 0;
  };

  Status Bad(std::string_view why) const { return DataLoss(*manifest_name_, why); }
  BaseFileUse Use(std::uint32_t file) const { return linker_.plan_.files[file]; }
  Result<std::uint32_t> BaseFile(std::uint32_t own) const {
    if (own >= own_numbers_.size())
      return Bad("a range refers to a file that is not in the file table");
    return own_numbers_[own];
  }

  // Returns the number of a file of the base in the new manifest; adds the file if it is new there.
  std::uint32_t NewFile(std::uint32_t file) {
    const auto next = static_cast<std::uint32_t>(out_.inventory.files.size());
    const auto [at, fresh] = new_numbers_.try_emplace(file, next);
    if (fresh) {
      FileRecord record = linker_.base_.index().files()[file];
      if (record.placement == Placement::kSafetensors &&
          linker_.plan_.stale_safetensors_header[file]) {
        record.placement = Placement::kPack;
      }
      out_.inventory.files.push_back(std::move(record));
    }
    return at->second;
  }

  // Appends the leaf hashes of a range to the new manifest, and its page hashes if it has them.
  Result<std::uint64_t> TakeLeaves(std::uint64_t first, std::uint64_t length, const Hash128& hash) {
    const std::vector<Hash128>& leaves = manifest_->leaves;
    const std::optional<std::uint64_t> end =
        EndOfHashes(leaves, manifest_->extras, first, length, hash);
    if (!end) return Bad("leaf hashes of a range are missing");
    if (*end - first > LeafCount(length)) out_.extras.pages = true;
    const std::uint64_t at = out_.leaves.size();
    out_.leaves.insert(out_.leaves.end(), leaves.begin() + static_cast<std::ptrdiff_t>(first),
                       leaves.begin() + static_cast<std::ptrdiff_t>(*end));
    return at;
  }

  // Appends the row of value counts of a chunk whose hashes were just taken.
  void TakeCounts(const TensorMeta& meta, std::uint64_t first, const ChunkRecord& chunk) {
    AppendCountsRow(
        CountsOfChunk(manifest_->leaves, manifest_->extras, meta, first, chunk.length, chunk.hash),
        out_.leaves);
  }

  Status AddDead(std::uint32_t file, std::uint64_t offset, std::uint64_t length,
                 const Hash128& hash, std::uint64_t first_leaf) {
    ExtraRange extra;
    extra.file = NewFile(file);
    extra.offset = offset;
    extra.length = length;
    extra.hash = hash;
    TENSORMOUNT_ASSIGN_OR_RETURN(extra.first_leaf, TakeLeaves(first_leaf, length, hash));
    out_.inventory.extras.push_back(extra);
    return Status();
  }

  Status AddTensor(const TensorRecord& tensor) {
    const auto known = ordinals_.find(tensor.meta.key());
    if (known == ordinals_.end())
      return Bad("the manifest lists a tensor that is not in the index");
    const std::uint32_t ordinal = known->second;
    const bool taken = linker_.taken_.tensors[ordinal];
    TensorRecord* record = nullptr;
    if (taken) {
      TENSORMOUNT_ASSIGN_OR_RETURN(record, RecordOf(ordinal, tensor));
      record->digest ^= tensor.digest;
      record->has_digest = record->has_digest && tensor.has_digest;
    }
    for (std::size_t i = 0; i < tensor.extents.size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, tensor.extents.At(i));
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, BaseFile(chunk.file));
      const BaseFileUse use = Use(file);
      if (!taken) {
        if (use != BaseFileUse::kLink) continue;
        TENSORMOUNT_RETURN_IF_ERROR(
            AddDead(file, chunk.offset, chunk.length, chunk.hash, chunk.first_leaf));
        continue;
      }
      if (use == BaseFileUse::kNone) return Bad("a reused range is in a file that is not reused");
      if (chunk.has_hash) {
        const std::uint64_t first = chunk.first_leaf;
        TENSORMOUNT_ASSIGN_OR_RETURN(chunk.first_leaf, TakeLeaves(first, chunk.length, chunk.hash));
        TakeCounts(tensor.meta, first, chunk);
      }
      if (use == BaseFileUse::kCopy) {
        if (!chunk.has_hash) return Bad("a range that must be copied has no hash");
        copied_.push_back({.bits = tensor.meta.bits() % 8 == 0 ? tensor.meta.bits() : 1,
                           .file = file,
                           .offset = chunk.offset,
                           .length = chunk.length,
                           .hash = chunk.hash,
                           .tensor = ordinal,
                           .chunk = chunk});
        continue;
      }
      chunk.file = NewFile(file);
      record->extents.Append(chunk);
    }
    return Status();
  }

  Result<TensorRecord*> RecordOf(std::uint32_t ordinal, const TensorRecord& tensor) {
    const auto at = tensors_.find(ordinal);
    if (at != tensors_.end()) return &at->second;
    TensorMeta meta = tensor.meta;
    if (!linker_.taken_.tensor_keys.empty()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          meta, TensorMeta::Make(linker_.taken_.tensor_keys[ordinal], meta.dtype(), meta.shape()));
    }
    TensorRecord& made = tensors_.emplace(ordinal, TensorRecord(std::move(meta))).first->second;
    made.has_digest = true;
    return &made;
  }

  Status AddObject(const ObjectRecord& object) {
    const auto known = positions_.find(KeyOf(object));
    if (known == positions_.end())
      return Bad("the manifest lists an object that is not in the index");
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, BaseFile(object.file));
    const BaseFileUse use = Use(file);
    if (!linker_.taken_.objects[known->second]) {
      if (use != BaseFileUse::kLink) return Status();
      return AddDead(file, object.offset, object.length, object.hash, object.first_leaf);
    }
    if (use == BaseFileUse::kNone) return Bad("a reused object is in a file that is not reused");
    ObjectRecord record = object;
    if (!linker_.taken_.object_keys.empty()) {
      record.key = linker_.taken_.object_keys[known->second];
    }
    if (record.has_hash()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(record.first_leaf,
                                   TakeLeaves(object.first_leaf, object.length, object.hash));
    }
    if (use == BaseFileUse::kCopy) {
      if (!record.has_hash()) return Bad("an object that must be copied has no hash");
      copied_.push_back({.bits = 0,
                         .file = file,
                         .offset = object.offset,
                         .length = object.length,
                         .hash = object.hash,
                         .object = out_.inventory.objects.size()});
    } else {
      record.file = NewFile(file);
    }
    out_.inventory.objects.push_back(std::move(record));
    return Status();
  }

  Status CopyLive() {
    if (copied_.empty()) return Status();
    std::stable_sort(copied_.begin(), copied_.end(),
                     [](const LiveRange& a, const LiveRange& b) { return a.bits > b.bits; });
    const std::string name = CopiedPackName(linker_.staging_, part_);
    const auto number = static_cast<std::uint32_t>(out_.inventory.files.size());
    const std::string path = JoinPath(linker_.staging_.directory, name);
    // The file is left from an earlier attempt to publish this staging.
    if (linker_.fs_.Exists(path)) {
      TENSORMOUNT_RETURN_IF_ERROR(linker_.fs_.RemoveFile(path));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> out,
                                 linker_.fs_.CreateExclusive(path));
    std::uint64_t end = 0;
    std::vector<std::byte> block(kCopyBytes);
    std::unique_ptr<File> from;
    std::uint32_t open = 0;
    for (LiveRange& range : copied_) {
      if (from == nullptr || open != range.file) {
        from.reset();
        TENSORMOUNT_ASSIGN_OR_RETURN(from, linker_.base_.OpenFile(range.file));
        open = range.file;
      }
      const auto read = [&](std::uint64_t at, std::span<std::byte> bytes) {
        TENSORMOUNT_RETURN_IF_ERROR(Cancelled(linker_.cancel_));
        return from->ReadExactAt(range.offset + at, bytes.data(), bytes.size());
      };
      const auto write = [&](std::uint64_t at, std::span<const std::byte> bytes) {
        return out->WriteAt(end + at, bytes.data(), bytes.size());
      };
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkHashes found,
                                   PassChunk(range.length, block, read, write));
      if (found.root != range.hash) {
        return DataLoss(linker_.base_.FilePath(range.file),
                        "bytes from " + std::to_string(range.offset) + " on: checksum mismatch");
      }
      if (range.tensor) {
        range.chunk.file = number;
        range.chunk.offset = end;
        tensors_.at(*range.tensor).extents.Append(range.chunk);
      } else {
        out_.inventory.objects[range.object].file = number;
        out_.inventory.objects[range.object].offset = end;
      }
      end += range.length;
    }
    counts_.bytes_copied += end;
    out_.inventory.files.push_back({name, Placement::kPack, end, {}});
    TENSORMOUNT_RETURN_IF_ERROR(out->Seal());
    TENSORMOUNT_RETURN_IF_ERROR(out->Sync());
    return out->Close();
  }

  BaseLinker& linker_;
  const std::uint32_t part_;
  LinkCounts& counts_;
  LinkedRecords out_;
  // Numbers of files by name, ordinals of tensors by key, and positions of objects, all in the
  // base.
  std::unordered_map<std::string, std::uint32_t> file_numbers_;
  std::unordered_map<std::string, std::uint32_t> ordinals_;
  std::map<PartKey, std::size_t> positions_;
  // The manifest of the base that is being added. own_numbers_ maps its file numbers to the base's.
  const std::string* manifest_name_ = nullptr;
  const Manifest* manifest_ = nullptr;
  std::vector<std::uint32_t> own_numbers_;
  // For each file of the base that the new manifest lists: its number in the new manifest.
  std::map<std::uint32_t, std::uint32_t> new_numbers_;
  // The tensors of the new manifest by ordinal in the base. Ordinals are in the order of the base's
  // keys.
  std::map<std::uint32_t, TensorRecord> tensors_;
  std::vector<LiveRange> copied_;
};

Result<LinkedRecords> BaseLinker::Records(std::uint32_t part, std::uint32_t parts,
                                          LinkCounts& counts) {
  Gatherer gatherer(*this, part, counts);
  TENSORMOUNT_RETURN_IF_ERROR(gatherer.Prepare());
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachManifest([&](const std::string& name,
                          const Manifest& manifest) { return gatherer.Add(name, manifest); },
                      part, parts));
  return gatherer.Finish();
}

Status BaseLinker::ForEachManifest(
    const std::function<Status(const std::string&, const Manifest&)>& use, std::uint32_t part,
    std::uint32_t parts) {
  const DecodedCommit* commit = base_.commit();
  if (commit == nullptr) {
    return Status(Code::kInvalidArgument, base_.directory() + ": not a checkpoint of a store");
  }
  std::uint32_t number = 0;
  for (const CommitRecord::Entry& entry : commit->record.files) {
    if (!entry.name.starts_with("manifest/") || number++ % parts != part) continue;
    TENSORMOUNT_RETURN_IF_ERROR(Cancelled(cancel_));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Manifest manifest,
                                 ReadListedManifest(fs_, base_.pinned_directory(), entry));
    TENSORMOUNT_RETURN_IF_ERROR(use(entry.name, manifest).WithContext(base_.directory()));
  }
  return Status();
}

}  // namespace tensormount
