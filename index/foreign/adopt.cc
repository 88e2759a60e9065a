// SPDX-License-Identifier: Apache-2.0
// AdoptSource of adopt.h: publishes the records of a foreign checkpoint in a store, with hashes of
// the data. The data stay in the foreign files.
//
// Before anything is written to the store, all pending items are located and all tensors are
// checked to be complete. Then a staging directory is made, all data are read once for hashes
// (unless AdoptOptions::hashes is false), one manifest is written, and the store publishes as for a
// save. The new checkpoint has no data files of its own: all records refer to the foreign files
// below info.root.
#include "index/foreign/adopt.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <variant>
#include <vector>

#include "base/parallel.h"
#include "index/read/scan.h"
#include "index/records/completeness.h"
#include "index/records/key_renames.h"
#include "index/records/manifest.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

// The manifest of an adopted checkpoint, besides the coordinator's. It contains all records except
// common values and, if hashes were computed, the leaf hashes of all stored ranges in the order of
// RangesOf.
constexpr std::string_view kAdoptedManifest = "manifest/adopted.tmm";

// Returns the records of the source with all pending items located. Tensors are processed in
// parallel, because locating an item takes a few small reads. Each task writes only to its own
// tensor, so no lock is needed.
Result<Inventory> ResolvedInventory(const OpenedCheckpoint& foreign, int threads) {
  const CheckpointIndex& index = foreign.index();
  TENSORMOUNT_ASSIGN_OR_RETURN(Inventory inventory, index.ToInventory());
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachParallel<std::monostate>(inventory.tensors.size(), threads, [&](std::size_t t, auto&) {
        TensorRecord& tensor = inventory.tensors[t];
        if (tensor.extents.pending()) {
          TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry,
                                       index.At(static_cast<std::uint32_t>(t)));
          TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> extents,
                                       foreign.Extents(entry));
          tensor.extents = *extents;
        }
        return Status();
      }));
  return inventory;
}

// Reads all stored ranges once and records their hashes.
class ChunkHasher {
 public:
  ChunkHasher(const OpenedCheckpoint& foreign, Inventory& inventory, const AdoptOptions& options)
      : foreign_(foreign), inventory_(inventory), options_(options) {}

  // Returns the leaf hashes for the manifest, and makes the records refer to them. The position of
  // each range's leaf hashes follows from lengths alone, so threads write to separate positions,
  // and the result does not depend on their order.
  Result<std::vector<Hash128>> Run() {
    const std::vector<ScanRange> ranges = RangesOf(inventory_);
    std::vector<Hash128> roots(ranges.size());
    std::vector<std::uint64_t> first_leaves(ranges.size());
    std::uint64_t leaves = 0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      first_leaves[i] = leaves;
      leaves += LeafCount(ranges[i].length);
    }
    leaves_.resize(leaves);
    digests_ = std::vector<std::atomic<Crc64>>(inventory_.tensors.size());
    Scan scan(inventory_,
              {.open = [this](std::uint32_t file) { return foreign_.OpenFile(file); },
               .check = [this](std::uint32_t file,
                               File& open) { return foreign_.CheckFileUnchanged(file, open); }},
              options_.threads, options_.watch);
    TENSORMOUNT_RETURN_IF_ERROR(scan.Run(ranges, [&](std::size_t i, ScanFinding& found) {
      return Take(ranges[i], found, first_leaves[i], roots[i]);
    }));
    TENSORMOUNT_RETURN_IF_ERROR(Record(roots, first_leaves));
    return std::move(leaves_);
  }

 private:
  // Stores the hashes of one range; called on a thread of the scan. An error here ends the
  // adoption, because a checkpoint must not be published with hashes missing.
  Status Take(const ScanRange& range, const ScanFinding& found, std::uint64_t first_leaf,
              Hash128& root) {
    if (!found.failure.ok()) {
      Status why = found.failure;
      if (found.step == ScanFinding::Step::kOpen && why.code() == Code::kNotFound) {
        why = Status(Code::kDataLoss, why.message());
      } else if (found.step == ScanFinding::Step::kRead) {
        why = why.WithContext(inventory_.files[range.file].name);
      }
      return why.WithContext(RangeName(inventory_, range));
    }
    root = ChunkRoot(found.read.leaves, range.length);
    std::copy(found.read.leaves.begin(), found.read.leaves.end(),
              leaves_.begin() + static_cast<std::ptrdiff_t>(first_leaf));
    // A tensor's digest is the exclusive or of the contributions of its chunks, so chunks may come
    // in any order and from any thread.
    if (range.kind == ScanRange::Kind::kChunk) digests_[range.owner] ^= found.read.contribution;
    return Status();
  }

  // Writes the hashes into the records. `roots` and `first_leaves` are in the order of RangesOf.
  // The rows of an extent table cannot be changed, so each table is built again.
  Status Record(const std::vector<Hash128>& roots, const std::vector<std::uint64_t>& first_leaves) {
    std::size_t i = 0;
    for (std::size_t t = 0; t < inventory_.tensors.size(); ++t) {
      TensorRecord& tensor = inventory_.tensors[t];
      // A wide table has strides in every row.
      ExtentTable hashed(tensor.extents.rank(), tensor.extents.wide());
      for (std::size_t row = 0; row < tensor.extents.size(); ++row, ++i) {
        TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, tensor.extents.At(row));
        chunk.has_hash = true;
        chunk.hash = roots[i];
        chunk.manifest = 0;
        chunk.first_leaf = first_leaves[i];
        hashed.Append(chunk);
      }
      tensor.extents = std::move(hashed);
      tensor.digest = digests_[t];
      tensor.has_digest = true;
    }
    for (ObjectRecord& object : inventory_.objects) {
      object.hash = roots[i];
      object.manifest = 0;
      object.first_leaf = first_leaves[i];
      ++i;
    }
    return Status();
  }

  const OpenedCheckpoint& foreign_;
  Inventory& inventory_;
  const AdoptOptions& options_;
  std::vector<Hash128> leaves_;
  std::vector<std::atomic<Crc64>> digests_;
};

// Removes the hashes that the records of the source may have: these hashes refer to leaf hashes in
// manifests of the source, which the new checkpoint does not have. Used if AdoptOptions::hashes is
// false.
Status DropHashes(Inventory& inventory) {
  for (TensorRecord& tensor : inventory.tensors) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ChunkRecord> chunks, tensor.extents.All());
    tensor.extents = ExtentTable(tensor.extents.rank(), tensor.extents.wide());
    for (ChunkRecord& chunk : chunks) {
      chunk.has_hash = false;
      chunk.hash = Hash128{};
      chunk.manifest = 0;
      chunk.first_leaf = 0;
      tensor.extents.Append(chunk);
    }
    tensor.digest = 0;
    tensor.has_digest = false;
  }
  for (ObjectRecord& object : inventory.objects) {
    object.hash = Hash128{};
    object.manifest = kNoManifest;
    object.first_leaf = 0;
  }
  return Status();
}

// Writes the manifest and publishes. As in a save, producer, world size, root and common values are
// passed to Store::Publish, and all other records go into the manifest. The mtimes are 0, because
// Store::Publish decides them (DecideMtimes).
Result<Store::Published> PublishAdopted(FileSystem& fs, Inventory inventory, Store& store,
                                        const Staging& staging, std::span<const Hash128> leaves,
                                        const AdoptOptions& options) {
  Inventory coordinator;
  coordinator.info.producer = inventory.info.producer;
  coordinator.info.world_size = inventory.info.world_size;
  coordinator.info.self_contained = false;
  coordinator.info.root = inventory.info.root;
  coordinator.common = std::exchange(inventory.common, {});
  inventory.info = CheckpointInfo();
  inventory.info.uuid = staging.uuid;
  for (TensorRecord& tensor : inventory.tensors) tensor.mtime = 0;
  for (ObjectRecord& object : inventory.objects) object.mtime = 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest, EncodeManifest(inventory, leaves));
  TENSORMOUNT_RETURN_IF_ERROR(
      fs.WriteFileDurably(JoinPath(staging.directory, kAdoptedManifest), manifest));
  Store::PublishOptions publish;
  publish.if_exists = options.if_exists;
  publish.expected_manifests = {std::string(kAdoptedManifest)};
  return store.Publish(staging, coordinator, publish);
}

}  // namespace

Status CheckIsForeign(const OpenedCheckpoint& source) {
  if (!source.index().info().self_contained && source.commit() == nullptr) {
    if (source.index().info().root.starts_with('/')) return {};
    return Status(Code::kUnsupported, source.directory() +
                                          ": its data are not local files, so it cannot be "
                                          "adopted; use `tensormount import` to copy it");
  }
  return Status(Code::kInvalidArgument,
                source.directory() +
                    ": already a tensormount checkpoint, so there is nothing to adopt; use "
                    "`tensormount import` to copy it");
}

Result<StoreAndName> SplitAdoptPath(const std::string& path) {
  if (path.find('/') == std::string::npos) {
    return Status(Code::kInvalidArgument, "adopt " + path + ": the path must be STORE/NAME");
  }
  return SplitCheckpointPath(path);
}

Result<Store::Published> AdoptSource(FileSystem& fs, const OpenedCheckpoint& foreign, Store& store,
                                     const std::string& name, const AdoptOptions& options) {
  const CheckpointIndex& index = foreign.index();
  if (index.info().self_contained ||
      std::any_of(index.files().begin(), index.files().end(),
                  [](const FileRecord& f) { return f.placement != Placement::kForeign; })) {
    return Status(Code::kInvalidArgument, foreign.directory() +
                                              ": has its own data files, so there is nothing to "
                                              "adopt; use `tensormount import` to copy it");
  }
  // The key map is checked before the slow reads below, because an invalid map fails the adoption.
  std::optional<KeyRenames> renames;
  if (options.map) {
    TENSORMOUNT_ASSIGN_OR_RETURN(renames, KeyRenames::Make(index, *options.map));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(Inventory inventory, ResolvedInventory(foreign, options.threads));
  if (renames) TENSORMOUNT_RETURN_IF_ERROR(renames->Apply(inventory));
  TENSORMOUNT_RETURN_IF_ERROR(CheckComplete(inventory).WithContext(foreign.directory()));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Staging staging, store.Begin(name, options.if_exists));
  const auto steps = [&]() -> Result<Store::Published> {
    std::vector<Hash128> leaves;
    if (options.hashes) {
      TENSORMOUNT_ASSIGN_OR_RETURN(leaves, ChunkHasher(foreign, inventory, options).Run());
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(DropHashes(inventory));
    }
    return PublishAdopted(fs, std::move(inventory), store, staging, leaves, options);
  };
  Result<Store::Published> published = steps();
  // Moves the staging directory away, except after kUnknown: then the checkpoint may have been
  // published.
  if (!published.ok() && published.status().code() != Code::kUnknown) {
    (void)store.AbortOrDecide(staging);
  }
  return published;
}

}  // namespace tensormount
