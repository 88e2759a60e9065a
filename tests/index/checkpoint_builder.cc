// SPDX-License-Identifier: Apache-2.0
#include "tests/index/checkpoint_builder.h"

#include <algorithm>
#include <limits>

#include "index/records/checkpoint_index.h"
#include "index/records/completeness.h"
#include "index/records/manifest.h"
#include "shard/chunk_accumulator.h"
#include "shard/page_hash.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// One writer's data file and manifest while they grow.
struct Writer {
  std::string data;
  Inventory inventory;
  std::vector<Hash128> leaves;
  bool page_hashes = false;  // BuildSpec.
  bool paged = false;        // There are some.

  // Appends bytes and their leaves; gives offset, first leaf and root.
  void Add(const std::string& bytes, std::uint64_t& offset, std::uint64_t& first_leaf,
           Hash128& hash) {
    offset = data.size();
    first_leaf = leaves.size();
    const ChunkHashes hashes = HashChunk(bytes.data(), bytes.size());
    hashes.AppendTo(leaves);
    hash = hashes.root;
    data += bytes;
    if (page_hashes && bytes.size() > kLeafBytes) {
      std::vector<Hash128> pages;
      for (std::size_t at = 0; at < bytes.size(); at += kHashPageBytes) {
        pages.push_back(Xxh3(std::string_view(bytes).substr(at, kHashPageBytes)));
      }
      AppendPageHashes(hashes.leaves, hash, pages, leaves);
      paged = true;
    }
  }
};

Crc64 DigestOf(const RandomTensor& tensor, const TensorMeta& meta, const Region& region) {
  const std::string packed = OracleBytes(tensor, region);
  const Result<Region> bytes = ByteRegion(meta.dtype(), meta.shape(), region);
  Crc64 digest = 0;
  for (const PlacedBox& placed : PlacePacked(bytes.value(), 0)) {
    digest ^= DigestOfPlaced(placed, reinterpret_cast<const std::byte*>(packed.data()),
                             ByteShape(meta.dtype(), meta.shape()));
  }
  return digest;
}

CommitRecord::Entry EntryOf(std::string name, const std::string& bytes) {
  return {.name = std::move(name), .length = bytes.size(), .hash = Xxh3(bytes), .tail = {}};
}

}  // namespace

Result<BuiltCheckpoint> BuildCheckpoint(FileSystem& fs, const std::string& directory,
                                        const BuildSpec& spec) {
  BuiltCheckpoint built;
  built.directory = directory;
  for (const char* folder : {"data", "manifest", "index"}) {
    TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectories(JoinPath(directory, folder)));
  }
  CheckpointInfo info;
  info.uuid = spec.uuid;
  info.generation = 7;
  info.parent = {1, 2};
  info.parent_name = "before";
  info.producer = "test";
  info.world_size = static_cast<std::uint32_t>(spec.writers);
  info.created = info.json_mtime = info.common_mtime = spec.now;

  std::vector<Writer> writers(static_cast<std::size_t>(spec.writers));
  for (std::size_t w = 0; w < writers.size(); ++w) {
    Writer& writer = writers[w];
    writer.page_hashes = spec.page_hashes;
    writer.inventory.info.uuid = spec.uuid;
    writer.inventory.files.push_back(
        {.name = "data/" + spec.uuid.Short() + "-r" + std::to_string(w) + ".bin",
         .placement = Placement::kRankShard});
    ExtraRange head;
    writer.Add(std::string(32, 'h'), head.offset, head.first_leaf, head.hash);
    head.length = 32;
    writer.inventory.extras.push_back(head);
  }
  for (std::size_t t = 0; t < spec.tensors.size(); ++t) {
    const RandomTensor& tensor = spec.tensors[t];
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorMeta meta,
                                 TensorMeta::Make(tensor.key, tensor.dtype, tensor.shape));
    std::vector<Region> written;
    for (std::size_t w = 0; w < writers.size(); ++w) {
      TensorRecord& inventory = writers[w].inventory.tensors.emplace_back(meta);
      inventory.has_digest = true;
      for (const Region& region : spec.partitions[t][w]) {
        if (region.empty()) continue;
        if (std::find(written.begin(), written.end(), region) != written.end()) continue;
        written.push_back(region);
        const std::string bytes = OracleBytes(tensor, region);
        ChunkRecord chunk;
        chunk.region = region;
        chunk.length = bytes.size();
        writers[w].Add(bytes, chunk.offset, chunk.first_leaf, chunk.hash);
        inventory.extents.Append(chunk);
        inventory.digest ^= DigestOf(tensor, meta, region);
      }
    }
  }
  for (const BuildObject& object : spec.objects) {
    ObjectRecord part;
    part.key = object.key;
    part.index = object.index;
    part.grid = object.grid;
    part.length = object.bytes.size();
    writers[0].Add(object.bytes, part.offset, part.first_leaf, part.hash);
    writers[0].inventory.objects.push_back(part);
  }

  InventoryMerger merger;
  for (std::size_t w = 0; w < writers.size(); ++w) {
    Writer& writer = writers[w];
    writer.inventory.files[0].length = writer.data.size();
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.WriteFileDurably(JoinPath(directory, writer.inventory.files[0].name), writer.data));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> data,
                                 fs.OpenRead(JoinPath(directory, writer.inventory.files[0].name)));
    TENSORMOUNT_RETURN_IF_ERROR(data->Seal());
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string manifest,
        EncodeManifest(writer.inventory, writer.leaves, {.pages = writer.paged}));
    const std::string name = "manifest/rank-" + std::to_string(w) + ".tmm";
    TENSORMOUNT_RETURN_IF_ERROR(fs.WriteFileDurably(JoinPath(directory, name), manifest));
    built.commit.files.push_back(EntryOf(name, manifest));
    TENSORMOUNT_RETURN_IF_ERROR(merger.Add(writer.inventory, name));
  }
  Inventory coordinator;
  coordinator.info = info;
  coordinator.common = spec.common;
  const std::string coordinator_name(kCoordinatorManifest);
  TENSORMOUNT_RETURN_IF_ERROR(merger.Add(coordinator, coordinator_name));
  TENSORMOUNT_ASSIGN_OR_RETURN(built.inventory, merger.Finish());
  for (std::size_t i = 0; i < built.inventory.tensors.size(); ++i) {
    built.inventory.tensors[i].mtime = spec.now + static_cast<std::int64_t>(i);
  }
  for (ObjectRecord& object : built.inventory.objects) object.mtime = spec.now;
  TENSORMOUNT_RETURN_IF_ERROR(CheckComplete(built.inventory));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest,
                               EncodeManifest(CoordinatorInventory(built.inventory), {}));
  TENSORMOUNT_RETURN_IF_ERROR(fs.WriteFileDurably(JoinPath(directory, coordinator_name), manifest));
  built.commit.files.push_back(EntryOf(coordinator_name, manifest));

  built.commit.uuid = info.uuid;
  built.commit.generation = info.generation;
  built.commit.parent = info.parent;
  built.commit.content_root = ContentRoot(built.inventory);
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const CommitRecord::Entry index,
      CheckpointIndex::WriteSst(fs, built.inventory, built.commit.content_root, directory,
                                std::string(kIndexName)));
  built.commit.files.push_back(index);
  for (const FileRecord& file : built.inventory.files) {
    built.commit.files.push_back({.name = file.name, .length = file.length, .hash = file.root});
  }
  std::sort(built.commit.files.begin(), built.commit.files.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  TENSORMOUNT_RETURN_IF_ERROR(
      fs.WriteFileDurably(JoinPath(directory, kCommitName), EncodeCommit(built.commit)));
  return built;
}

BuildSpec RandomSpec(Random& random, int tensors, std::uint64_t max_bytes) {
  BuildSpec spec;
  spec.writers = static_cast<int>(random.Int(1, 4));
  spec.page_hashes = random.OneIn(2);
  for (int t = 0; t < tensors; ++t) {
    // Names whose order is not that of their numbers.
    spec.tensors.push_back(MakeRandomTensor(
        random, "layer." + std::to_string(7 * t % 10) + "/w" + std::to_string(t), max_bytes));
    spec.partitions.push_back(RandomPartition(random, spec.tensors.back().shape, spec.writers));
  }
  spec.objects = {{"rng", {0}, {2}, random.Bytes(100)},
                  {"rng", {1}, {2}, random.Bytes(70000)},
                  {"config", {}, {}, "x: 1"},
                  {"empty", {}, {}, ""}};
  spec.common = {{"bool", true},
                 {"int", std::int64_t{-5}},
                 {"nan", -std::numeric_limits<double>::infinity()},
                 {"text", std::string("h\xC3\xA9")},
                 {"bytes", CommonBytes{std::string("\0\xFF", 2)}}};
  return spec;
}

}  // namespace tensormount
