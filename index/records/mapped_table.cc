// SPDX-License-Identifier: Apache-2.0
// Records of mapped tensors, made on demand, beside records of everything else.
#include "index/records/mapped_table.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/coding.h"
#include "index/records/index_records.h"
#include "index/records/layer_names.h"

namespace tensormount {
namespace {

namespace record = index_record;

std::string Big32(std::uint32_t number) {
  // The bytes of a number in a record's key, after the letter of the kind.
  return record::Key(record::kTensor, number).substr(1);
}

}  // namespace

Result<std::unique_ptr<MappedTable>> MappedTable::Make(
    std::shared_ptr<const CheckpointIndex> source, std::shared_ptr<const NameBinding> binding,
    const std::function<bool(std::string_view)>& leave_out) {
  std::unique_ptr<MappedTable> table(new MappedTable(std::move(source), std::move(binding)));
  TENSORMOUNT_RETURN_IF_ERROR(table->MakeRecords(leave_out));
  return table;
}

Status MappedTable::MakeRecords(const std::function<bool(std::string_view)>& leave_out) {
  // What the counts of the info record and mtimes of mapped tensors need, by stored tensor.
  struct Stored {
    std::uint64_t bytes = 0;
    std::uint64_t chunks = 0;
    std::int64_t mtime = 0;
    std::uint32_t element_bytes = 0;
  };
  std::vector<Stored> stored;
  stored.reserve(source_->tensor_count());
  TENSORMOUNT_RETURN_IF_ERROR(source_->ForEachTensor(0, [&](const TensorEntry& entry) {
    stored.push_back(
        {entry.meta.bytes(), entry.chunks, entry.mtime, InfoOf(entry.meta.dtype()).bits / 8});
    return true;
  }));
  record::Counts counts;
  counts.tensors = binding_->size();
  mtimes_.assign(binding_->applications(), INT64_MIN);
  for (std::uint32_t t = 0; t < binding_->size(); ++t) {
    if (const std::optional<std::uint32_t> whole = binding_->WholeSource(t)) {
      counts.tensor_bytes += stored[*whole].bytes;
      counts.chunks += stored[*whole].chunks;
      continue;
    }
    const std::int64_t cells = *CheckedProduct(binding_->ShapeOf(t));
    counts.tensor_bytes +=
        static_cast<std::uint64_t>(cells) * stored[binding_->FirstSource(t)].element_bytes;
    std::int64_t& mtime = mtimes_[binding_->ApplicationOf(t)];
    if (mtime != INT64_MIN) continue;
    for (const MappedTensor::Source& source : binding_->At(t).sources) {
      for (const std::uint32_t ordinal : source.ordinals) {
        mtime = std::max(mtime, stored[ordinal].mtime);
      }
    }
  }

  // Everything but tensors, written like the records of an inventory without tensors.
  Inventory inventory;
  inventory.info = source_->info();
  inventory.files = source_->files();
  inventory.manifests = source_->manifests();
  TENSORMOUNT_ASSIGN_OR_RETURN(inventory.common, source_->CommonRecords());
  std::erase_if(inventory.common, [&](const auto& value) {
    return value.first.starts_with(kLayersRecordPrefix) || (leave_out && leave_out(value.first));
  });
  for (const auto& [ordinal, pattern] : binding_->layers()) {
    inventory.common.emplace(std::string(kLayersRecordPrefix) + binding_->key(ordinal), pattern);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectRecord> objects, source_->Objects());
  std::unordered_map<std::string_view, std::string_view> names;  // By stored key.
  for (const auto& [name, key] : binding_->objects()) names.emplace(key, name);
  for (ObjectRecord& object : objects) {
    const auto name = names.find(object.key);
    if (name == names.end()) continue;
    object.key = name->second;
    inventory.objects.push_back(std::move(object));
  }
  // A stable sort keeps the order of an object's parts.
  std::stable_sort(inventory.objects.begin(), inventory.objects.end(),
                   [](const ObjectRecord& a, const ObjectRecord& b) { return a.key < b.key; });
  TENSORMOUNT_ASSIGN_OR_RETURN(inventory.extras, source_->Extras());
  counts.files = static_cast<std::uint32_t>(inventory.files.size());
  counts.manifests = static_cast<std::uint32_t>(inventory.manifests.size());
  return record::ForEach(inventory, true, record::AllTensors(inventory),
                         [&](std::string_view key, std::string_view value) {
                           if (key != record::Key(record::kInfo)) {
                             records_.Append(key, value);
                             return Status();
                           }
                           ByteWriter info;
                           record::EncodeInfoRecord(info, inventory.info, counts);
                           records_.Append(key, info.bytes());
                           return Status();
                         });
}

Result<TensorEntry> MappedTable::EntryOf(std::uint32_t ordinal) const {
  const std::optional<std::uint32_t> whole = binding_->WholeSource(ordinal);
  TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry,
                               source_->At(whole ? *whole : binding_->FirstSource(ordinal)));
  const Dims& shape = whole ? entry.meta.shape() : binding_->ShapeOf(ordinal);
  Result<TensorMeta> meta = TensorMeta::Make(binding_->key(ordinal), entry.meta.dtype(), shape);
  if (!meta.ok()) return meta.status();
  entry.meta = std::move(meta).value();
  entry.ordinal = ordinal;
  entry.safetensors_offset = 0;
  entry.in_safetensors = false;
  if (whole) return entry;
  entry.digest = 0;
  entry.has_digest = false;
  entry.mtime = mtimes_[binding_->ApplicationOf(ordinal)];
  entry.chunks = 0;
  entry.wide = true;  // Ranks of a load cannot exchange ranges of files instead.
  entry.pending = false;
  return entry;
}

Result<std::string> MappedTable::TensorRecordOf(std::uint32_t ordinal) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, EntryOf(ordinal));
  ByteWriter out;
  record::EncodeTensor(out, entry);
  return std::move(out.bytes());
}

Result<std::string> MappedTable::Get(std::string_view key) const {
  const Status none(Code::kNotFound, "index: no such record");
  if (key.empty()) return none;
  if (key[0] == record::kKey) {
    const std::uint32_t ordinal = binding_->LowerBound(key.substr(1));
    if (ordinal == binding_->size() || binding_->key(ordinal) != key.substr(1)) return none;
    return Big32(ordinal);
  }
  if (key[0] == record::kTensor) {
    if (key.size() != 5) return none;
    const std::uint32_t ordinal = record::LoadBig32(key.data() + 1);
    return ordinal < binding_->size() ? TensorRecordOf(ordinal) : none;
  }
  return records_.Get(key);
}

Status MappedTable::Scan(std::string_view prefix, std::string_view from,
                         const std::function<bool(std::string_view, std::string_view)>& fn) const {
  if (prefix.empty()) {
    return Status(Code::kInternal, "internal error: a scan of all records of a mapped checkpoint");
  }
  const std::string_view begin = std::max(prefix, from);
  if (prefix[0] == record::kKey) {
    for (std::uint32_t t = binding_->LowerBound(begin.substr(1)); t < binding_->size(); ++t) {
      const std::string key = record::Key(record::kKey, binding_->key(t));
      if (!key.starts_with(prefix) || !fn(key, Big32(t))) break;
    }
    return Status();
  }
  if (prefix[0] == record::kTensor) {
    std::uint32_t t = begin.size() == 5 ? record::LoadBig32(begin.data() + 1) : 0;
    for (; t < binding_->size(); ++t) {
      const std::string key = record::Key(record::kTensor, t);
      if (!key.starts_with(prefix)) break;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string value, TensorRecordOf(t));
      if (!fn(key, value)) break;
    }
    return Status();
  }
  if (prefix[0] == record::kExtents && prefix.size() == 5) {
    // The stored tensor's records, with the number of the mapped one.
    const std::uint32_t ordinal = record::LoadBig32(prefix.data() + 1);
    if (ordinal >= binding_->size()) return Status();
    const std::optional<std::uint32_t> whole = binding_->WholeSource(ordinal);
    if (!whole) return Status();
    return source_->table().Scan(record::Key(record::kExtents, *whole), {},
                                 [&](std::string_view key, std::string_view value) {
                                   return fn(std::string(prefix) + std::string(key.substr(5)),
                                             value);
                                 });
  }
  return records_.Scan(prefix, from, fn);
}

}  // namespace tensormount
