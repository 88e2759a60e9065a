// SPDX-License-Identifier: Apache-2.0
#include "index/foreign/adopt.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "index/read/stretch_read.h"
#include "index/records/completeness.h"
#include "index/records/manifest.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

constexpr std::string_view kAdoptedManifest = "manifest/adopted.tmm";

// Calls fn(i, state) for every i below `count` on some threads, each with a state of its own. Stops
// at the first failure, which it returns.
template <typename State, typename Fn>
Status ForEachParallel(std::size_t count, int threads, const Fn& fn) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  Status failure;
  const auto fail = [&](Status status) {
    next = count;
    const std::lock_guard lock(mutex);
    if (failure.ok()) failure = std::move(status);
  };
  const auto work = [&] {
    try {
      State state;
      for (std::size_t i = next++; i < count; i = next++) {
        if (Status status = fn(i, state); !status.ok()) return fail(std::move(status));
      }
    } catch (const std::bad_alloc&) {
      fail(Status(Code::kResourceExhausted, "out of memory"));
    }
  };
  std::size_t wanted =
      threads > 0 ? static_cast<std::size_t>(threads) : std::thread::hardware_concurrency();
  wanted = std::clamp<std::size_t>(wanted, 1, std::max<std::size_t>(1, count));
  std::vector<std::thread> workers;
  for (std::size_t t = 1; t < wanted; ++t) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  return failure;
}

struct Nothing {};

// What stands where, with nothing pending: the records of the source as they will be stored.
Result<Inventory> ResolvedInventory(const OpenedCheckpoint& foreign, int threads) {
  const CheckpointIndex& index = foreign.index();
  TENSORMOUNT_ASSIGN_OR_RETURN(Inventory inventory, index.ToInventory());
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachParallel<Nothing>(inventory.tensors.size(), threads, [&](std::size_t t, Nothing&) {
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

// Reads all pieces of the content once and writes down their hashes.
class ChunkHasher {
 public:
  ChunkHasher(const OpenedCheckpoint& foreign, Inventory& inventory, const AdoptOptions& options)
      : foreign_(foreign), inventory_(inventory), options_(options) {}

  // The leaves of the only manifest, which the records then point into.
  Result<std::vector<Hash128>> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(Plan());
    digests_ = std::vector<std::atomic<Crc64>>(inventory_.tensors.size());
    TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Worker>(
        pieces_.size(), options_.threads,
        [&](std::size_t i, Worker& worker) { return Hash(pieces_[order_[i]], worker); }));
    Record();
    return std::move(leaves_);
  }

 private:
  struct ChunkOf {
    std::size_t tensor = 0;  // Of an object: the number of tensors and its own.
    ChunkRecord chunk;
  };
  struct Worker {
    StretchReader reader;
    std::shared_ptr<File> file;  // Of the piece before.
    std::uint32_t number = kNoFile;
  };

  Status Plan() {
    std::uint64_t leaves = 0;
    const auto add = [&](std::size_t tensor, ChunkRecord chunk) {
      chunk.first_leaf = leaves;
      leaves += LeafCount(chunk.length);
      total_ += chunk.length;
      pieces_.push_back({tensor, std::move(chunk)});
    };
    for (std::size_t t = 0; t < inventory_.tensors.size(); ++t) {
      const ExtentTable& table = inventory_.tensors[t].extents;
      for (std::size_t i = 0; i < table.size(); ++i) {
        TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, table.At(i));
        add(t, std::move(chunk));
      }
    }
    for (std::size_t o = 0; o < inventory_.objects.size(); ++o) {
      const ObjectRecord& object = inventory_.objects[o];
      ChunkRecord chunk;
      chunk.file = object.file;
      chunk.offset = object.offset;
      chunk.length = object.length;
      add(inventory_.tensors.size() + o, std::move(chunk));
    }
    leaves_.resize(leaves);
    // As they stand in files, which is how storage likes to be read.
    order_.resize(pieces_.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
      const ChunkRecord& x = pieces_[a].chunk;
      const ChunkRecord& y = pieces_[b].chunk;
      return std::pair(x.file, x.offset) < std::pair(y.file, y.offset);
    });
    return Status();
  }

  Status Hash(ChunkOf& piece, Worker& worker) {
    ChunkRecord& chunk = piece.chunk;
    const bool is_tensor = piece.tensor < inventory_.tensors.size();
    const auto failed = [&](const Status& why) {
      if (!is_tensor) {
        return why.WithContext("object " +
                               inventory_.objects[piece.tensor - inventory_.tensors.size()].key);
      }
      return why.WithContext("tensor " + inventory_.tensors[piece.tensor].meta.key() + " " +
                             chunk.region.ToString());
    };
    if (!worker.file || worker.number != chunk.file) {
      Result<std::unique_ptr<File>> file = foreign_.OpenFile(chunk.file);
      if (file.status().code() == Code::kNotFound) {
        return failed(Status(Code::kDataLoss, file.status().message()));
      }
      if (!file.ok()) return failed(file.status());
      worker.file = std::move(file).value();
      worker.number = chunk.file;
    }
    std::vector<PlacedBox> boxes;
    Dims shape;
    if (is_tensor) {
      const TensorMeta& meta = inventory_.tensors[piece.tensor].meta;
      shape = ByteShape(meta.dtype(), meta.shape());
      Result<std::vector<PlacedBox>> placed =
          PlaceChunk(meta.dtype(), meta.shape(), chunk.region, 0, chunk.strides);
      if (!placed.ok()) return failed(placed.status());
      boxes = std::move(placed).value();
    }
    StretchReader::Findings found;
    const Status read = worker.reader.Read(
        *worker.file, chunk.offset, chunk.length, boxes, shape,
        [&](std::uint64_t bytes) {
          const std::uint64_t done = done_ += bytes;
          if (options_.progress) options_.progress(done, total_);
        },
        found);
    if (Status still = foreign_.CheckStill(chunk.file, *worker.file); !still.ok()) {
      return failed(still);
    }
    if (!read.ok()) return failed(read.WithContext(inventory_.files[chunk.file].name));
    chunk.has_hash = true;
    chunk.manifest = 0;
    chunk.hash = ChunkRoot(found.leaves, chunk.length);
    std::copy(found.leaves.begin(), found.leaves.end(),
              leaves_.begin() + static_cast<std::ptrdiff_t>(chunk.first_leaf));
    if (is_tensor) digests_[piece.tensor] ^= found.contribution;
    return Status();
  }

  void Record() {
    for (std::size_t t = 0; t < inventory_.tensors.size(); ++t) {
      TensorRecord& tensor = inventory_.tensors[t];
      tensor.extents = ExtentTable(tensor.extents.rank(), tensor.extents.wide());
      tensor.digest = digests_[t];
      tensor.has_digest = true;
    }
    for (const ChunkOf& piece : pieces_) {
      if (piece.tensor < inventory_.tensors.size()) {
        inventory_.tensors[piece.tensor].extents.Append(piece.chunk);
        continue;
      }
      ObjectRecord& object = inventory_.objects[piece.tensor - inventory_.tensors.size()];
      object.hash = piece.chunk.hash;
      object.manifest = 0;
      object.first_leaf = piece.chunk.first_leaf;
    }
  }

  const OpenedCheckpoint& foreign_;
  Inventory& inventory_;
  const AdoptOptions& options_;
  std::vector<ChunkOf> pieces_;
  std::vector<std::size_t> order_;
  std::vector<Hash128> leaves_;
  std::vector<std::atomic<Crc64>> digests_;
  std::atomic<std::uint64_t> done_{0};
  std::uint64_t total_ = 0;
};

// Hashes that the source has, as one that was adopted before, are of other manifests.
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

Result<Store::Published> AdoptSource(FileSystem& fs, const OpenedCheckpoint& foreign, Store& store,
                                     const std::string& name, const AdoptOptions& options) {
  const CheckpointIndex& index = foreign.index();
  if (index.info().self_contained ||
      std::any_of(index.files().begin(), index.files().end(),
                  [](const FileRecord& f) { return f.placement != Placement::kForeign; })) {
    return Status(Code::kInvalidArgument,
                  foreign.directory() + ": has its own data: there is nothing to adopt");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(Inventory inventory, ResolvedInventory(foreign, options.threads));
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
