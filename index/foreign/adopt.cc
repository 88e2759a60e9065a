// SPDX-License-Identifier: Apache-2.0
// Adoption: the records of a foreign checkpoint with hashes of its bytes, published as a
// checkpoint.
//
// Order: pending items are resolved and the tensors are checked to be whole before the store is
// touched, so that a checkpoint which cannot be adopted leaves nothing behind. Then a staging is
// begun, all bytes are read once for hashes (or none with `--quick`), one manifest is written, and
// the store publishes as it does for a save. There are no data files: every record points into
// files of somebody else, below info.root.
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

// The only manifest of an adopted checkpoint. Leaf hashes of all its ranges stand in it, one after
// the other in the order of RangesOf, whoever wrote the bytes.
constexpr std::string_view kAdoptedManifest = "manifest/adopted.tmm";

// What stands where, with nothing pending: the records of the source as they will be stored.
// In parallel, since each item costs a few small reads somewhere else in the files. Every task
// writes to the tensor of its own number and to nothing else, so no lock is needed.
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

// Reads all stored ranges once and writes down their hashes.
class ChunkHasher {
 public:
  ChunkHasher(const OpenedCheckpoint& foreign, Inventory& inventory, const AdoptOptions& options)
      : foreign_(foreign), inventory_(inventory), options_(options) {}

  // The leaves of the only manifest, which the records then point into.
  // The position of the leaves of each range is known before anything is read, from lengths alone:
  // so threads write their leaves to ranges of their own, and the result does not depend on which
  // thread was first.
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
                               File& open) { return foreign_.CheckStill(file, open); }},
              options_.threads, options_.watch);
    TENSORMOUNT_RETURN_IF_ERROR(scan.Run(ranges, [&](std::size_t i, ScanFinding& found) {
      return Take(ranges[i], found, first_leaves[i], roots[i]);
    }));
    TENSORMOUNT_RETURN_IF_ERROR(Record(roots, first_leaves));
    return std::move(leaves_);
  }

 private:
  // Called by threads of the scan. The first failure ends the adoption: unlike verify, which
  // reports all damage, nobody wants a checkpoint of what was left.
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
    // A digest is the exclusive or of what its chunks contribute, so chunks may come in any order,
    // and from any thread.
    if (range.kind == ScanRange::Kind::kChunk) digests_[range.owner] ^= found.read.contribution;
    return Status();
  }

  // `roots` and `first_leaves`: in the order of RangesOf.
  // Extents are packed rows that cannot be changed in place: each table is written again with the
  // hash in every row. Rows keep their order, which is sorted already.
  Status Record(const std::vector<Hash128>& roots, const std::vector<std::uint64_t>& first_leaves) {
    std::size_t i = 0;
    for (std::size_t t = 0; t < inventory_.tensors.size(); ++t) {
      TensorRecord& tensor = inventory_.tensors[t];
      // Same rank and row format as before (wide rows carry strides): hashes do not change them.
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

// Hashes that the source has, as one that was adopted before, are of other manifests.
// The manifests of that checkpoint are not part of this one, so their leaves could not be found;
// without `--quick` the same ranges get new hashes in Record().
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

// The facts of the checkpoint as a whole (producer, root, common values) go to the coordinator, as
// rank 0 would bring them in a save; everything else goes into the manifest. mtimes are 0 here,
// since the store decides them against the parent.
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
  if (!source.index().info().self_contained && source.commit() == nullptr) return {};
  return Status(Code::kInvalidArgument,
                source.directory() +
                    " is a checkpoint of tensormount: there is nothing to adopt, `tensormount "
                    "import` copies it");
}

Result<Store::Published> AdoptSource(FileSystem& fs, const OpenedCheckpoint& foreign, Store& store,
                                     const std::string& name, const AdoptOptions& options) {
  const CheckpointIndex& index = foreign.index();
  if (index.info().self_contained ||
      std::any_of(index.files().begin(), index.files().end(),
                  [](const FileRecord& f) { return f.placement != Placement::kForeign; })) {
    return Status(Code::kInvalidArgument,
                  foreign.directory() + ": has its own data: there is nothing to adopt");
  }
  // Before anything of the files is read: a map may be refused.
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
  // What it left is nobody's. Where it is not known whether it was published, the store says so.
  if (!published.ok() && published.status().code() != Code::kUnknown) {
    (void)store.AbortOrDecide(staging);
  }
  return published;
}

}  // namespace tensormount
