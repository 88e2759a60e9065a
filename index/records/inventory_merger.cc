// SPDX-License-Identifier: Apache-2.0
// InventoryMerger of inventory.h. A publish merges millions of chunks, so table rows are moved and
// renumbered in place, without decoding. Records of the same key in two manifests must agree.
#include <algorithm>
#include <numeric>

#include "base/errors.h"
#include "index/records/file_roots.h"
#include "index/records/inventory.h"
#include "index/records/manifest.h"

namespace tensormount {
namespace {

std::string PartName(const ObjectRecord& object) {
  std::string name = "object " + object.key;
  if (object.grid.rank() > 0) name += " part " + object.index.ToString();
  return name;
}

bool PartLess(const ObjectRecord& a, const ObjectRecord& b) {
  if (a.key != b.key) return a.key < b.key;
  return std::lexicographical_compare(a.index.begin(), a.index.end(), b.index.begin(),
                                      b.index.end());
}

// Sorts by name and returns the map from old numbers to new positions. The numbers are sorted
// first, so that each item is moved once.
template <typename T, typename Name>
std::vector<std::uint32_t> SortByName(std::vector<T>& items, Name name) {
  std::vector<std::uint32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return name(items[a]) < name(items[b]); });
  std::vector<std::uint32_t> map(items.size());
  std::vector<T> sorted;
  sorted.reserve(items.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    map[order[i]] = i;
    sorted.push_back(std::move(items[order[i]]));
  }
  items = std::move(sorted);
  return map;
}

bool IsIdentity(std::span<const std::uint32_t> map) {
  for (std::size_t i = 0; i < map.size(); ++i) {
    if (map[i] != i) return false;
  }
  return true;
}

RangeHash HashedRange(const ObjectRecord& object) {
  return {object.offset, object.length, object.hash};
}
RangeHash HashedRange(const ExtraRange& extra) { return {extra.offset, extra.length, extra.hash}; }

}  // namespace

// Files are identified by name. The writers of a shared tensor file all list it, with equal
// properties.
Status InventoryMerger::Add(const Inventory& from, const std::string& manifest_name) {
  if (std::find(merged_.manifests.begin(), merged_.manifests.end(), manifest_name) !=
      merged_.manifests.end()) {
    return DataLoss(manifest_name + ": the manifest is listed twice");
  }
  if (!from.info.uuid.IsZero()) {
    if (uuid_.IsZero()) uuid_ = from.info.uuid;
    if (uuid_ != from.info.uuid) {
      return DataLoss(manifest_name + ": the manifest belongs to checkpoint " +
                      from.info.uuid.ToString() + ", not to " + uuid_.ToString());
    }
  }
  const auto manifest = static_cast<std::uint32_t>(merged_.manifests.size());
  merged_.manifests.push_back(manifest_name);
  if (manifest_name == kCoordinatorManifest) {
    coordinator_ = from;
    merged_.info = from.info;
  }
  Result<std::vector<FileRoot>> roots = FileRootsOf(from);
  if (!roots.ok()) return roots.status().WithContext(manifest_name);
  std::vector<std::uint32_t> file_map;
  file_map.reserve(from.files.size());
  for (std::size_t i = 0; i < from.files.size(); ++i) {
    const FileRecord& file = from.files[i];
    const auto [it, inserted] =
        file_number_.try_emplace(file.name, static_cast<std::uint32_t>(merged_.files.size()));
    if (inserted) {
      merged_.files.push_back(file);
      merged_.files.back().root = roots.value()[i].root;
      file_use_.push_back({roots.value()[i].ranges});
    } else {
      FileUse& use = file_use_[it->second];
      use.ranges += roots.value()[i].ranges;
      use.shared = true;
      const FileRecord& known = merged_.files[it->second];
      if (known.length != file.length || known.placement != file.placement ||
          known.mtime_seconds != file.mtime_seconds ||
          known.mtime_nanoseconds != file.mtime_nanoseconds) {
        return DataLoss(manifest_name + ": " + file.name +
                        ": writers disagree: " + std::to_string(known.length) + " bytes (" +
                        std::string(PlacementName(known.placement)) + ") and " +
                        std::to_string(file.length) + " (" +
                        std::string(PlacementName(file.placement)) + ")");
      }
    }
    file_map.push_back(it->second);
  }
  // Objects without a file are the coordinator's list of all objects, which FinishTables compares.
  // Objects with a file were written by the coordinator itself.
  if (manifest_name == kCoordinatorManifest) {
    for (const ObjectRecord& object : from.objects) {
      if (object.file == kNoFile) continue;
      TENSORMOUNT_RETURN_IF_ERROR(AddObject(object, file_map, manifest).WithContext(manifest_name));
    }
  } else {
    for (const TensorRecord& tensor : from.tensors) {
      TENSORMOUNT_RETURN_IF_ERROR(AddTensor(tensor, file_map, manifest).WithContext(manifest_name));
    }
    for (const ObjectRecord& object : from.objects) {
      TENSORMOUNT_RETURN_IF_ERROR(AddObject(object, file_map, manifest).WithContext(manifest_name));
    }
  }
  for (ExtraRange extra : from.extras) {
    if (extra.file >= file_map.size()) {
      return DataLoss(manifest_name +
                      ": an extra range refers to a file that is not in the file table");
    }
    extra.file = file_map[extra.file];
    extra.manifest = manifest;
    merged_.extras.push_back(extra);
  }
  for (const auto& [key, value] : from.common) {
    const auto [it, inserted] = merged_.common.try_emplace(key, value);
    if (!inserted && it->second != value) {
      return DataLoss(manifest_name + ": writers disagree on the common value " + key);
    }
  }
  if (spool_fs_ != nullptr && rows_.held_bytes() > spool_memory_) {
    return rows_.Spill(*spool_fs_, spool_path_, TensorsByKey());
  }
  return Status();
}

Status InventoryMerger::AddTensor(const TensorRecord& tensor,
                                  std::span<const std::uint32_t> file_map, std::uint32_t manifest) {
  const auto [it, inserted] = tensor_number_.try_emplace(tensor.meta.key(), merged_.tensors.size());
  if (inserted) {
    TensorRecord& first = merged_.tensors.emplace_back(tensor.meta);
    first.has_digest = true;
    first.counts = tensor.counts;
  } else if (std::optional<ValueCounts>& sum = merged_.tensors[it->second].counts; sum) {
    // The counts of a tensor are known if those of all its chunks are.
    tensor.counts ? sum->Add(*tensor.counts) : sum.reset();
  }
  TensorRecord& merged = merged_.tensors[it->second];
  if (merged.meta.dtype() != tensor.meta.dtype() || !(merged.meta.shape() == tensor.meta.shape())) {
    return DataLoss("tensor " + tensor.meta.key() +
                    ": writers disagree: " + std::string(InfoOf(merged.meta.dtype()).name) +
                    merged.meta.shape().ToString() + " and " +
                    std::string(InfoOf(tensor.meta.dtype()).name) + tensor.meta.shape().ToString());
  }
  // CRCs are linear: each writer's digest is the contribution of its chunks, and the XOR of all
  // contributions is the tensor's digest (docs/format.md, "Hashes").
  merged.has_digest = merged.has_digest && tensor.has_digest;
  merged.digest ^= tensor.digest;
  return rows_.Append(static_cast<std::uint32_t>(it->second), tensor.extents, file_map, manifest)
      .WithContext("tensor " + tensor.meta.key());
}

// FinishTables finds duplicate parts after sorting them.
Status InventoryMerger::AddObject(const ObjectRecord& object,
                                  std::span<const std::uint32_t> file_map, std::uint32_t manifest) {
  if (object.file >= file_map.size()) {
    return DataLoss(PartName(object) +
                    ": the record refers to a file that is not in the file table");
  }
  ObjectRecord& merged = merged_.objects.emplace_back(object);
  merged.file = file_map[object.file];
  if (merged.has_hash()) merged.manifest = manifest;
  return Status();
}

// A writer's manifest proves only its own records. The coordinator's list shows that a manifest is
// missing or belongs to another save. During a publish the list is empty, because it is made from
// this merge.
Status InventoryMerger::ApplyCoordinator() {
  const Inventory& list = *coordinator_;
  if (list.tensors.empty() && list.objects.empty()) return Status();  // Not written yet.
  const std::string who(kCoordinatorManifest);
  if (list.tensors.size() != merged_.tensors.size()) {
    return DataLoss(who + ": the manifest lists " + std::to_string(list.tensors.size()) +
                    " tensors, but the writers wrote " + std::to_string(merged_.tensors.size()));
  }
  for (const TensorRecord& tensor : list.tensors) {
    const auto it = tensor_number_.find(tensor.meta.key());
    if (it == tensor_number_.end()) {
      return DataLoss(who + ": tensor " + tensor.meta.key() + ": no writer wrote this tensor");
    }
    TensorRecord& merged = merged_.tensors[it->second];
    if (merged.meta.dtype() != tensor.meta.dtype() ||
        !(merged.meta.shape() == tensor.meta.shape()) || merged.has_digest != tensor.has_digest ||
        (merged.has_digest && merged.digest != tensor.digest)) {
      return DataLoss(who + ": tensor " + tensor.meta.key() +
                      ": dtype, shape or digest differs from the writers' manifests");
    }
    merged.mtime = tensor.mtime;
  }
  std::vector<const ObjectRecord*> parts;
  for (const ObjectRecord& object : list.objects) parts.push_back(&object);
  std::sort(parts.begin(), parts.end(),
            [](const ObjectRecord* a, const ObjectRecord* b) { return PartLess(*a, *b); });
  if (parts.size() != merged_.objects.size()) {
    return DataLoss(who + ": the manifest lists " + std::to_string(parts.size()) +
                    " parts of objects, but the writers wrote " +
                    std::to_string(merged_.objects.size()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    ObjectRecord& merged = merged_.objects[i];
    if (merged.key != parts[i]->key || !(merged.index == parts[i]->index) ||
        merged.length != parts[i]->length || merged.hash != parts[i]->hash) {
      return DataLoss(who + ": " + PartName(*parts[i]) + ": differs from the writers' manifests");
    }
    merged.mtime = parts[i]->mtime;
  }
  return Status();
}

bool InventoryMerger::SortNumbers() {
  file_map_ =
      SortByName(merged_.files, [](const FileRecord& f) -> const std::string& { return f.name; });
  manifest_map_ =
      SortByName(merged_.manifests, [](const std::string& s) -> const std::string& { return s; });
  for (ObjectRecord& object : merged_.objects) {
    object.file = file_map_[object.file];
    if (object.has_hash()) object.manifest = manifest_map_[object.manifest];
  }
  for (ExtraRange& extra : merged_.extras) {
    extra.file = file_map_[extra.file];
    extra.manifest = manifest_map_[extra.manifest];
  }
  return !IsIdentity(file_map_) || !IsIdentity(manifest_map_);
}

std::vector<std::uint32_t> InventoryMerger::TensorsByKey() const {
  std::vector<std::uint32_t> order(merged_.tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return merged_.tensors[a].meta.key() < merged_.tensors[b].meta.key();
  });
  return order;
}

// Objects are sorted first, for the comparison with the coordinator's list. Tensors keep the order
// of Add until after that comparison, because tensor_number_ holds positions.
Result<Inventory> InventoryMerger::FinishTables() {
  std::sort(merged_.objects.begin(), merged_.objects.end(), PartLess);
  for (std::size_t i = 1; i < merged_.objects.size(); ++i) {
    if (!PartLess(merged_.objects[i - 1], merged_.objects[i])) {
      return DataLoss(PartName(merged_.objects[i]) + ": the part was written twice");
    }
  }
  if (coordinator_) TENSORMOUNT_RETURN_IF_ERROR(ApplyCoordinator());
  merged_.info.uuid = uuid_;
  renumbered_ = SortNumbers();
  tensor_order_ = TensorsByKey();
  std::vector<TensorRecord> tensors;
  tensors.reserve(merged_.tensors.size());
  for (const std::uint32_t number : tensor_order_) {
    tensors.push_back(std::move(merged_.tensors[number]));
  }
  merged_.tensors = std::move(tensors);
  std::sort(merged_.extras.begin(), merged_.extras.end(),
            [](const ExtraRange& a, const ExtraRange& b) {
              return a.file != b.file ? a.file < b.file : a.offset < b.offset;
            });
  coordinator_.reset();
  tensor_number_.clear();
  file_number_.clear();
  return std::move(merged_);
}

// Extents are sorted here, because only now are their file numbers final.
Status InventoryMerger::TakeRows(Inventory& inventory,
                                 const std::function<Status(TensorRecord&)>& use) {
  SharedFileRoots shared;
  for (std::size_t f = 0; f < file_use_.size(); ++f) {
    const FileRecord& file = inventory.files[file_map_[f]];
    if (!file_use_[f].shared || file.placement == Placement::kForeign) continue;
    shared.Expect(file_map_[f], file_use_[f].ranges);
  }
  for (const ObjectRecord& object : inventory.objects) {
    TENSORMOUNT_RETURN_IF_ERROR(shared.Add(inventory.files, object.file, HashedRange(object)));
  }
  for (const ExtraRange& extra : inventory.extras) {
    TENSORMOUNT_RETURN_IF_ERROR(shared.Add(inventory.files, extra.file, HashedRange(extra)));
  }
  for (std::size_t i = 0; i < inventory.tensors.size(); ++i) {
    TensorRecord& tensor = inventory.tensors[i];
    const auto fill = [&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(tensor.extents, rows_.Take(tensor_order_[i]));
      if (renumbered_) {
        TENSORMOUNT_RETURN_IF_ERROR(tensor.extents.Remap(file_map_, manifest_map_));
      }
      tensor.extents.Sort();
      return shared.Add(inventory.files, tensor.extents);
    };
    if (Status filled = fill(); !filled.ok()) {
      return filled.WithContext("tensor " + tensor.meta.key());
    }
    TENSORMOUNT_RETURN_IF_ERROR(use(tensor));
  }
  return shared.Finish(inventory.files);
}

Result<Inventory> InventoryMerger::Finish() {
  TENSORMOUNT_ASSIGN_OR_RETURN(Inventory inventory, FinishTables());
  TENSORMOUNT_RETURN_IF_ERROR(TakeRows(inventory, [](TensorRecord&) { return Status(); }));
  return inventory;
}

}  // namespace tensormount
