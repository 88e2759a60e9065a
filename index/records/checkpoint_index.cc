// SPDX-License-Identifier: Apache-2.0
// Opening an index and look-ups in it. An open compares a small index with its hash, but only the
// end of a large one, so its cost is bounded whatever the number of tensors. Checksums of RocksDB's
// blocks cover the rest when it is read. Damage found later is bypassed if another copy of the
// records can be made (recovering_table.h).
#include "index/records/checkpoint_index.h"

#include <algorithm>
#include <mutex>

#include "base/coding.h"
#include "index/records/index_records.h"
#include "index/records/layer_names.h"
#include "index/records/mapped_table.h"
#include "index/records/memory_table.h"
#include "index/records/record_coding.h"
#include "index/records/recovering_table.h"
#include "index/records/sst_table.h"

namespace tensormount {
namespace {

namespace record = index_record;

Status BadIndex(std::string message) {
  return Status(Code::kDataLoss, "index: " + std::move(message));
}

// Compares the whole file with its hash. Reads blocks of 1 MiB, because the index may be large:
// `verify` checks files of any size, perhaps over a network.
Status CheckWholeFile(File& file, const CommitRecord::Entry& entry) {
  Xxh3Stream hash;
  std::string block(std::min<std::uint64_t>(entry.length, std::uint64_t{1} << 20), '\0');
  for (std::uint64_t at = 0; at < entry.length;) {
    const std::size_t n = std::min<std::uint64_t>(block.size(), entry.length - at);
    TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(at, block.data(), n));
    hash.Update(block.data(), n);
    at += n;
  }
  return hash.Value() == entry.hash ? Status() : BadIndex(entry.name + ": checksum mismatch");
}

// The identity as SstTable stores it: hex text, because RocksDB's table properties are strings.
SstIdentity IdentityOf(const Uuid& uuid, const Hash128& content_root) {
  return {uuid.ToString(), content_root.ToHex()};
}

// The records of an inventory in memory. With `to_memory` false they are exactly the records of the
// inventory's SST file.
Result<std::unique_ptr<MemoryTable>> ToMemory(const Inventory& inventory, bool to_memory) {
  auto table = std::make_unique<MemoryTable>();
  TENSORMOUNT_RETURN_IF_ERROR(record::ForEach(inventory, to_memory, record::AllTensors(inventory),
                                              [&](std::string_view key, std::string_view value) {
                                                table->Append(key, value);
                                                return Status();
                                              }));
  return table;
}

// Calls fn(key, value) for the records with this prefix in key order, until fn fails.
template <typename Fn>
Status ForEachRecord(const Table& table, std::string_view prefix, Fn fn) {
  Status failure;
  TENSORMOUNT_RETURN_IF_ERROR(
      table.Scan(prefix, {}, [&](std::string_view key, std::string_view value) {
        failure = fn(key, value);
        return failure.ok();
      }));
  return failure;
}

// The object parts whose keys in the table have this prefix.
Result<std::vector<ObjectRecord>> ScanObjects(const Table& table, std::string_view prefix) {
  std::vector<ObjectRecord> parts;
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachRecord(table, prefix, [&](std::string_view, std::string_view value) -> Status {
        ByteReader in(value, "index: object");
        TENSORMOUNT_ASSIGN_OR_RETURN(ObjectRecord object, DecodeObject(in, "index: object"));
        parts.push_back(std::move(object));
        return in.Finish();
      }));
  return parts;
}

}  // namespace

Result<CommitRecord::Entry> CheckpointIndex::WriteSst(FileSystem& fs, const Inventory& inventory,
                                                      const Hash128& content_root,
                                                      const std::string& directory,
                                                      const std::string& name) {
  return WriteSst(fs, inventory, record::AllTensors(inventory), content_root, directory, name);
}

Result<CommitRecord::Entry> CheckpointIndex::WriteSst(FileSystem& fs, const Inventory& inventory,
                                                      const TensorPass& pass,
                                                      const Hash128& content_root,
                                                      const std::string& directory,
                                                      const std::string& name) {
  const auto produce = [&](const SstTable::Emit& emit) -> Result<SstIdentity> {
    TENSORMOUNT_RETURN_IF_ERROR(record::ForEach(inventory, false, pass, emit));
    return IdentityOf(inventory.info.uuid, content_root);
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(CommitRecord::Entry entry,
                               SstTable::Write(fs, JoinPath(directory, name), produce));
  entry.name = name;
  return entry;
}

Result<std::shared_ptr<const CheckpointIndex>> CheckpointIndex::FromInventory(
    const Inventory& inventory) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<MemoryTable> table, ToMemory(inventory, true));
  return Load(std::move(table), true);
}

Result<std::shared_ptr<const CheckpointIndex>> CheckpointIndex::Mapped(
    std::shared_ptr<const CheckpointIndex> source, std::shared_ptr<const NameBinding> binding,
    const std::function<bool(std::string_view)>& leave_out) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<MappedTable> table,
                               MappedTable::Make(std::move(source), std::move(binding), leave_out));
  return Load(std::move(table), true);
}

Result<std::shared_ptr<const MemoryTable>> CheckpointIndex::RecordsOf(const Inventory& inventory) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<MemoryTable> table, ToMemory(inventory, false));
  return std::shared_ptr<const MemoryTable>(std::move(table));
}

// The codes that return false are failures of this process (memory, descriptors, cancellation, a
// bug), for which another copy of the records would not help. kNotFound counts as damage, because a
// deleted index can be rebuilt.
bool CheckpointIndex::IsCopyDamaged(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
    case Code::kResourceExhausted:
    case Code::kCancelled:
    case Code::kInternal:
      return false;
    default:
      return true;
  }
}

Result<std::shared_ptr<const CheckpointIndex>> CheckpointIndex::OpenSst(
    FileSystem& fs, const std::string& directory, const CommitRecord& commit,
    std::uint64_t check_bytes, std::function<Result<std::shared_ptr<const Table>>()> again) {
  const std::string name(kIndexName);
  // COMMIT is compared before RocksDB reads the file, so that RocksDB's parser meets damage only
  // where the checksum of a block finds it.
  const std::string path = JoinPath(directory, name);
  const CommitRecord::Entry* entry = commit.Find(name);
  if (entry == nullptr) return BadIndex(std::string(kCommitName) + " does not list " + name);
  // RocksDB does not check the end of the file (footer, properties and block index), so its hash
  // is compared here.
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.OpenReadBelow(directory, name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
  if (info.size != entry->length) {
    return BadIndex(name + ": " + "the file has " + std::to_string(info.size) + " bytes, " +
                    std::to_string(entry->length) + " expected");
  }
  if (entry->length <= check_bytes) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckWholeFile(*file, *entry));
  }
  std::string tail(std::min(kIndexTailBytes, entry->length), '\0');
  const std::uint64_t tail_offset = entry->length - tail.size();
  TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(tail_offset, tail.data(), tail.size()));
  if (Xxh3(tail) != entry->tail) {
    return BadIndex(name + ": checksum mismatch in its last " + std::to_string(tail.size()) +
                    " bytes");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<SstTable> sst, SstTable::Open(fs, path));
  // An intact index of another checkpoint means that somebody copied COMMIT or the index by hand.
  if (sst->identity() != IdentityOf(commit.uuid, commit.content_root)) {
    return BadIndex(name + ": it is the index of another checkpoint");
  }
  std::unique_ptr<Table> table = std::move(sst);
  if (again) {
    table = std::make_unique<RecoveringTable>(std::move(table), std::move(again));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const CheckpointIndex> index,
                               Load(std::move(table), false));
  // The info record repeats fields of COMMIT for readers that have only the index. If they differ,
  // one of the two files is wrong.
  if (index->info().uuid != commit.uuid || index->info().generation != commit.generation ||
      index->info().parent != commit.parent) {
    return BadIndex(name + ": uuid, generation or parent differs from " + std::string(kCommitName));
  }
  return index;
}

Result<std::shared_ptr<const CheckpointIndex>> CheckpointIndex::Load(std::unique_ptr<Table> table,
                                                                     bool in_memory) {
  std::shared_ptr<CheckpointIndex> index(new CheckpointIndex);
  index->in_memory_ = in_memory;
  index->table_ = std::move(table);
  TENSORMOUNT_RETURN_IF_ERROR(index->LoadLists());
  return std::shared_ptr<const CheckpointIndex>(std::move(index));
}

Status CheckpointIndex::LoadLists() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string info, table_->Get(record::Key(record::kInfo)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const record::Counts counts,
                               record::DecodeInfoRecord(info, in_memory_, info_));
  tensor_count_ = counts.tensors;
  tensor_bytes_ = counts.tensor_bytes;
  chunk_count_ = counts.chunks;
  safetensors_header_bytes_ = counts.safetensors_header_bytes;
  TENSORMOUNT_RETURN_IF_ERROR(ForEachRecord(
      *table_, record::Key(record::kFile),
      [&](std::string_view key, std::string_view value) -> Status {
        if (key != record::Key(record::kFile, static_cast<std::uint32_t>(files_.size()))) {
          return BadIndex("the records of files are not numbered in order");
        }
        ByteReader in(value, "index: file");
        TENSORMOUNT_ASSIGN_OR_RETURN(FileRecord file, DecodeFile(in));
        if (Status left = in.Finish(); !left.ok()) return left;
        if (info_.self_contained && file.placement == Placement::kForeign) {
          return BadIndex(file.name + ": a foreign file, but no root directory is recorded");
        }
        files_.push_back(std::move(file));
        return Status();
      }));
  TENSORMOUNT_RETURN_IF_ERROR(ForEachRecord(
      *table_, record::Key(record::kManifest),
      [&](std::string_view key, std::string_view value) -> Status {
        if (key != record::Key(record::kManifest, static_cast<std::uint32_t>(manifests_.size()))) {
          return BadIndex("the records of manifests are not numbered in order");
        }
        if (!value.starts_with("manifest/") || !IsSafeName(value)) {
          return BadIndex("\"" + std::string(value) + "\" is not a manifest name");
        }
        manifests_.emplace_back(value);
        return Status();
      }));
  // Numbers are dense, as checked above, so only the end can be missing.
  if (files_.size() != counts.files || manifests_.size() != counts.manifests) {
    return BadIndex("records of files or manifests are missing");
  }
  return Status();
}

Result<TensorEntry> CheckpointIndex::Find(std::string_view key) const {
  Result<std::string> ordinal = table_->Get(record::Key(record::kKey, key));
  if (ordinal.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, "no tensor " + std::string(key)).With({.key = std::string(key)});
  }
  TENSORMOUNT_RETURN_IF_ERROR(ordinal.status());
  if (ordinal.value().size() != 4)
    return BadIndex("tensor " + std::string(key) + ": malformed tensor number");
  // A key takes two look-ups, key to ordinal and ordinal to record. Records are stored by ordinal,
  // so that sequential listings read neighbours and keys of extents are short.
  TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, At(record::LoadBig32(ordinal.value().data())));
  if (entry.meta.key() != key) {
    return BadIndex("tensor " + std::string(key) + ": its record has key " + entry.meta.key());
  }
  return entry;
}

Result<TensorEntry> CheckpointIndex::At(std::uint32_t ordinal) const {
  Result<std::string> value = table_->Get(record::Key(record::kTensor, ordinal));
  if (value.status().code() == Code::kNotFound) {
    const std::string what = "no tensor number " + std::to_string(ordinal);
    // Below the count, a missing record is damage. Above it, the ordinal is invalid.
    return ordinal < tensor_count_ ? BadIndex(what) : Status(Code::kNotFound, what);
  }
  TENSORMOUNT_RETURN_IF_ERROR(value.status());
  return record::DecodeTensor(value.value(), ordinal, in_memory_);
}

Status CheckpointIndex::ForEachTensor(std::uint32_t first,
                                      const std::function<bool(const TensorEntry&)>& fn) const {
  if (first >= tensor_count_) return Status();
  Status inner;
  std::uint32_t next = first;
  bool stopped = false;
  TENSORMOUNT_RETURN_IF_ERROR(
      table_->Scan(record::Key(record::kTensor), record::Key(record::kTensor, first),
                   [&](std::string_view key, std::string_view value) {
                     if (key != record::Key(record::kTensor, next)) {
                       inner = BadIndex("the records of tensors are not numbered in order");
                       return false;
                     }
                     Result<TensorEntry> entry = record::DecodeTensor(value, next, in_memory_);
                     if (!entry.ok()) {
                       inner = entry.status();
                       return false;
                     }
                     ++next;
                     stopped = !fn(entry.value());
                     return !stopped;
                   }));
  TENSORMOUNT_RETURN_IF_ERROR(inner);
  if (!stopped && next != tensor_count_) return BadIndex("records of tensors are missing");
  return Status();
}

// The kKey records are sorted by key, so the first record whose key is not less than `key` has the
// answer. If there is none, all keys are smaller.
Result<std::uint32_t> CheckpointIndex::LowerBound(std::string_view key) const {
  std::uint32_t ordinal = tensor_count_;
  Status inner;
  TENSORMOUNT_RETURN_IF_ERROR(table_->Scan(record::Key(record::kKey),
                                           record::Key(record::kKey, key),
                                           [&](std::string_view, std::string_view value) {
                                             if (value.size() == 4) {
                                               ordinal = record::LoadBig32(value.data());
                                             } else {
                                               inner = BadIndex("a key has no tensor number");
                                             }
                                             return false;
                                           }));
  TENSORMOUNT_RETURN_IF_ERROR(inner);
  return ordinal;
}

Result<std::shared_ptr<const ExtentTable>> CheckpointIndex::Extents(std::uint32_t ordinal) const {
  if (std::shared_ptr<const ExtentTable> known = extents_.Get(ordinal)) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, At(ordinal));
  return Extents(entry);
}

Result<std::shared_ptr<const ExtentTable>> CheckpointIndex::Extents(const TensorEntry& entry,
                                                                    bool keep) const {
  // No lock is held during the read: two threads may read the same table, and the first one put
  // into the cache wins (LruCache::Put).
  const std::uint32_t ordinal = entry.ordinal;
  if (std::shared_ptr<const ExtentTable> known = extents_.Get(ordinal)) return known;
  const std::string prefix = record::Key(record::kExtents, ordinal);
  std::string rows;
  std::uint32_t page = 0;
  // Pages are numbered from 0 without gaps.
  bool in_order = true;
  TENSORMOUNT_RETURN_IF_ERROR(
      table_->Scan(prefix, {}, [&](std::string_view key, std::string_view value) {
        in_order = key == record::Key(record::kExtents, ordinal, page++);
        if (in_order) rows.append(value);
        return in_order;
      }));
  if (!in_order)
    return BadIndex("tensor " + entry.meta.key() + ": a record of its chunks is missing");
  Result<ExtentTable> table = ExtentTable::FromPacked(entry.meta.shape().rank(), std::move(rows),
                                                      entry.wide, entry.pending);
  if (!table.ok()) return table.status().WithContext("index: tensor " + entry.meta.key());
  if (table.value().size() != entry.chunks) {
    return BadIndex("tensor " + entry.meta.key() + ": " + std::to_string(table.value().size()) +
                    " chunks, " + std::to_string(entry.chunks) + " expected");
  }
  auto shared = std::make_shared<const ExtentTable>(std::move(table).value());
  if (!keep) return shared;
  const std::size_t weight = shared->packed().size() + 256;
  return extents_.Put(ordinal, std::move(shared), weight);
}

Result<std::vector<ObjectRecord>> CheckpointIndex::Objects() const {
  return ScanObjects(*table_, record::Key(record::kObject));
}

Result<std::vector<ObjectRecord>> CheckpointIndex::ObjectParts(std::string_view key) const {
  std::string prefix = record::Key(record::kObject, key);
  prefix += '\0';  // Ends the key, which has no NUL itself, so that "a" does not match "ab".
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectRecord> parts, ScanObjects(*table_, prefix));
  for (const ObjectRecord& part : parts) {
    if (part.key != key) {
      return BadIndex("object " + std::string(key) + ": the record of the object has another key");
    }
  }
  if (parts.empty()) {
    return Status(Code::kNotFound, "no object " + std::string(key)).With({.key = std::string(key)});
  }
  return parts;
}

Result<std::vector<ExtraRange>> CheckpointIndex::Extras() const {
  std::vector<ExtraRange> extras;
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachRecord(*table_, record::Key(record::kExtra),
                    [&](std::string_view, std::string_view value) -> Status {
                      ByteReader in(value, "index: extra range");
                      TENSORMOUNT_ASSIGN_OR_RETURN(const ExtraRange extra, DecodeExtra(in));
                      extras.push_back(extra);
                      return in.Finish();
                    }));
  return extras;
}

Result<CommonValues> CheckpointIndex::CommonRecords() const {
  CommonValues common;
  TENSORMOUNT_RETURN_IF_ERROR(ForEachRecord(
      *table_, record::Key(record::kCommon),
      [&](std::string_view key, std::string_view encoded) -> Status {
        ByteReader in(encoded, "index: common value");
        TENSORMOUNT_ASSIGN_OR_RETURN(CommonValue value, DecodeCommon(in, "index: common value"));
        common.emplace(key.substr(1), std::move(value));
        return in.Finish();
      }));
  return common;
}

Result<CommonState> CheckpointIndex::Common() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(CommonValues records, CommonRecords());
  return SplitCommonRecords(std::move(records));
}

Result<CommonValue> CheckpointIndex::CommonRecord(std::string_view name) const {
  Result<std::string> encoded = table_->Get(record::Key(record::kCommon, name));
  if (!encoded.ok()) {
    if (encoded.status().code() != Code::kNotFound) return encoded.status();
    return Status(Code::kNotFound, "no common value " + std::string(name))
        .With({.key = std::string(name)});
  }
  ByteReader in(encoded.value(), "index: common value");
  TENSORMOUNT_ASSIGN_OR_RETURN(CommonValue value, DecodeCommon(in, "index: common value"));
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return value;
}

Result<CommonValue> CheckpointIndex::CommonAt(std::string_view path) const {
  for (std::size_t end = path.size(); end != std::string_view::npos && end > 0;
       end = path.find_last_of(".[({", end - 1)) {
    const std::string name(path.substr(0, end));
    if (!CheckCommonName(name).ok()) continue;
    Result<CommonValue> value = CommonRecord(name);
    if (value.status().code() == Code::kNotFound) continue;
    if (!value.ok() || end == path.size()) return value;
    Result<CommonValue> inner = value.value().At(path.substr(end + (path[end] == '.' ? 1 : 0)));
    if (inner.ok()) return inner;
  }
  return Status(Code::kNotFound, "no common value " + std::string(path));
}

Result<std::shared_ptr<const LayerNames>> CheckpointIndex::Layers() const {
  // The mutex stays locked during the scan, which is short and runs once. A failure is not cached.
  const std::lock_guard lock(layers_mutex_);
  if (layers_) return layers_;
  std::map<std::string, std::string> patterns;
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachRecord(*table_, record::Key(record::kCommon, kLayersRecordPrefix),
                    [&](std::string_view key, std::string_view encoded) -> Status {
                      ByteReader in(encoded, "index: layer names");
                      TENSORMOUNT_ASSIGN_OR_RETURN(const CommonValue value,
                                                   DecodeCommon(in, "index: layer names"));
                      if (Status left = in.Finish(); !left.ok()) return left;
                      const auto* pattern = value.get_if<std::string>();
                      if (pattern == nullptr) return BadIndex("layer names: not a string");
                      patterns.emplace(key.substr(1 + kLayersRecordPrefix.size()), *pattern);
                      return Status();
                    }));
  layers_ = std::make_shared<const LayerNames>(std::move(patterns));
  return layers_;
}

Result<std::optional<LayerEntry>> CheckpointIndex::ResolveLayer(std::string_view key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const LayerNames> names, Layers());
  return FindLayer(*this, *names, key);
}

// The numbers of the header's pages are not checked: a missing page shows in the length.
Result<std::string> CheckpointIndex::SafetensorsHeader() const {
  if (safetensors_header_bytes_ == 0) {
    return Status(Code::kUnsupported,
                  "model.safetensors is not available: its header would be too long");
  }
  std::string header;
  TENSORMOUNT_RETURN_IF_ERROR(table_->Scan(record::Key(record::kSafetensors), {},
                                           [&](std::string_view, std::string_view value) {
                                             header.append(value);
                                             return true;
                                           }));
  if (header.size() != safetensors_header_bytes_)
    return BadIndex("the safetensors header is truncated");
  return header;
}

Result<Inventory> CheckpointIndex::ToInventory() const {
  Inventory inventory;
  inventory.info = info_;
  inventory.files = files_;
  inventory.manifests = manifests_;
  std::vector<TensorEntry> entries;
  TENSORMOUNT_RETURN_IF_ERROR(ForEachTensor(0, [&](const TensorEntry& entry) {
    entries.push_back(entry);
    return true;
  }));
  inventory.tensors.reserve(entries.size());
  for (const TensorEntry& entry : entries) {
    TensorRecord& tensor = inventory.tensors.emplace_back(entry.meta);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> extents, Extents(entry));
    tensor.extents = *extents;
    tensor.digest = entry.digest;
    tensor.has_digest = entry.has_digest;
    tensor.mtime = entry.mtime;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(inventory.objects, Objects());
  TENSORMOUNT_ASSIGN_OR_RETURN(inventory.extras, Extras());
  TENSORMOUNT_ASSIGN_OR_RETURN(inventory.common, CommonRecords());
  return inventory;
}

}  // namespace tensormount
