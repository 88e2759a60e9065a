// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_checkpoint.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/hash.h"
#include "index/records/manifest.h"
#include "shard/chunk_accumulator.h"
#include "shard/safetensors.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

std::size_t ToSize(std::uint64_t v) { return static_cast<std::size_t>(v); }

// One piece of a tensor as a writer holds it.
struct TensorPiece {
  const TinyTensor* tensor = nullptr;
  int number = 0;
  Box box;
  std::string bytes;
  Crc64 digest = 0;
  std::uint64_t tensor_offset = 0;  // Of its first byte in the tensor.
};

Result<std::vector<TensorPiece>> CutTensor(const TinyTensor& t) {
  const std::string all = TinyBytes(t);
  std::vector<TensorPiece> pieces;
  if (t.parts <= 1 || t.shape.rank() == 0) {
    TensorPiece p;
    p.tensor = &t;
    p.box = Box::Whole(t.shape);
    p.bytes = all;
    p.digest = Crc64Extend(0, all.data(), all.size());
    if (!p.bytes.empty()) pieces.push_back(std::move(p));
    return pieces;
  }
  const std::uint64_t item = InfoOf(t.dtype).bits / 8;
  std::uint64_t outer = 1;
  std::uint64_t inner = item;
  for (int a = 0; a < t.shape.rank(); ++a) {
    if (a < t.axis) outer *= static_cast<std::uint64_t>(t.shape[a]);
    if (a > t.axis) inner *= static_cast<std::uint64_t>(t.shape[a]);
  }
  const std::int64_t extent = t.shape[t.axis];
  const std::int64_t step = (extent + t.parts - 1) / t.parts;
  for (int n = 0; n < t.parts; ++n) {
    const std::int64_t begin = std::min<std::int64_t>(extent, n * step);
    const std::int64_t count = std::min<std::int64_t>(step, extent - begin);
    if (count == 0) continue;
    Dims box_begin = Dims::Filled(t.shape.rank(), 0);
    Dims box_extent = t.shape;
    box_begin[t.axis] = begin;
    box_extent[t.axis] = count;
    TensorPiece p;
    p.tensor = &t;
    p.number = n;
    TENSORMOUNT_ASSIGN_OR_RETURN(p.box, Box::Make(box_begin, box_extent));
    const std::uint64_t run = static_cast<std::uint64_t>(count) * inner;
    p.tensor_offset = static_cast<std::uint64_t>(begin) * inner;
    for (std::uint64_t o = 0; o < outer; ++o) {
      const std::uint64_t at =
          (o * static_cast<std::uint64_t>(extent) + static_cast<std::uint64_t>(begin)) * inner;
      p.bytes.append(all, ToSize(at), ToSize(run));
      const Crc64Shift behind(all.size() - at - run);
      p.digest ^= behind.Apply(Crc64Extend(0, all.data() + at, ToSize(run)));
    }
    if (!p.bytes.empty()) pieces.push_back(std::move(p));
  }
  return pieces;
}

// The manifest of one writer while it grows.
struct Writer {
  Inventory inventory;
  std::vector<Hash128> leaves;

  std::uint32_t AddFile(const std::string& name, Placement placement, std::uint64_t length) {
    inventory.files.push_back({name, placement, length, Hash128{}});
    return static_cast<std::uint32_t>(inventory.files.size() - 1);
  }
  // Hashes bytes into the manifest's leaves; returns the root and where they begin.
  std::pair<Hash128, std::uint64_t> Hash(std::string_view bytes) {
    const std::uint64_t first = leaves.size();
    const ChunkHashes hashes = HashChunk(bytes.data(), bytes.size());
    hashes.AppendTo(leaves);
    return {hashes.root, first};
  }
  Status AddChunk(const TensorPiece& piece, std::uint32_t file, std::uint64_t offset) {
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorRecord * tensor, TensorOf(*piece.tensor));
    ChunkRecord chunk;
    chunk.region = Region(piece.box);
    chunk.file = file;
    chunk.offset = offset;
    chunk.length = piece.bytes.size();
    std::tie(chunk.hash, chunk.first_leaf) = Hash(piece.bytes);
    tensor->extents.Append(chunk);
    tensor->digest ^= piece.digest;
    return Status();
  }
  Result<TensorRecord*> TensorOf(const TinyTensor& t) {
    for (TensorRecord& c : inventory.tensors) {
      if (c.meta.key() == t.key) return &c;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, TensorMeta::Make(t.key, t.dtype, t.shape));
    inventory.tensors.emplace_back(std::move(meta));
    inventory.tensors.back().has_digest = true;
    return &inventory.tensors.back();
  }
};

Status WriteSealed(FileSystem& fs, const std::string& path, std::string_view bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.CreateExclusive(path));
  TENSORMOUNT_RETURN_IF_ERROR(file->WriteAt(0, bytes.data(), bytes.size()));
  TENSORMOUNT_RETURN_IF_ERROR(file->Seal());
  TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
  return file->Close();
}

// All pieces of one writer that go to its rank shard, a valid safetensors file.
Status WriteRankShard(FileSystem& fs, const Staging& staging, int rank,
                      const std::vector<TensorPiece>& pieces, Writer& writer) {
  if (pieces.empty()) return Status();
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
  for (const TensorPiece& p : pieces) {
    SafetensorsEntry e;
    e.key = p.tensor->parts <= 1 ? p.tensor->key : p.tensor->key + "#" + std::to_string(p.number);
    e.dtype = p.tensor->dtype;
    e.shape = p.box.extent();
    if (InfoOf(e.dtype).safetensors.empty()) {
      metadata[e.key] = std::string(InfoOf(e.dtype).name);
      e.dtype = DType::kU8;
      e.shape = Dims{static_cast<std::int64_t>(p.bytes.size())};
    }
    entries.push_back(std::move(e));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes, MakeSafetensorsHeader(entries, metadata, 64));
  const std::uint64_t header = bytes.size();
  for (const TensorPiece& p : pieces) bytes += p.bytes;
  const std::string name =
      "data/" + staging.ShortId() + "-r" + std::to_string(rank) + ".safetensors";
  const std::uint32_t file = writer.AddFile(name, Placement::kRankShard, bytes.size());
  ExtraRange extra;
  extra.file = file;
  extra.length = header;
  std::tie(extra.hash, extra.first_leaf) =
      writer.Hash(std::string_view(bytes).substr(0, ToSize(header)));
  writer.inventory.extras.push_back(extra);
  std::uint64_t at = header;
  for (const TensorPiece& p : pieces) {
    TENSORMOUNT_RETURN_IF_ERROR(writer.AddChunk(p, file, at));
    at += p.bytes.size();
  }
  return WriteSealed(fs, JoinPath(staging.directory, name), bytes);
}

Status WriteObjects(FileSystem& fs, const Staging& staging, const std::vector<TinyObject>& objects,
                    Writer& writer) {
  if (objects.empty()) return Status();
  const std::string name = "data/" + staging.ShortId() + "-r0.pack";
  std::string bytes;
  for (const TinyObject& o : objects) {
    ObjectRecord record;
    record.key = o.key;
    record.index = o.index;
    record.grid = o.grid;
    record.file = static_cast<std::uint32_t>(writer.inventory.files.size());
    record.offset = bytes.size();
    record.length = o.bytes.size();
    std::tie(record.hash, record.first_leaf) = writer.Hash(o.bytes);
    bytes += o.bytes;
    writer.inventory.objects.push_back(std::move(record));
  }
  (void)writer.AddFile(name, Placement::kPack, bytes.size());  // The number is already in use.
  return WriteSealed(fs, JoinPath(staging.directory, name), bytes);
}

}  // namespace

TinySpec DefaultTinySpec(std::uint64_t seed) {
  TinySpec spec;
  spec.tensors = {
      {"embed.weight", DType::kBF16, {8, 16}, seed, 2, 0, false},
      {"layers.0.w", DType::kF32, {16, 32}, seed + 1, 2, 0, true},
      {"layers.0.cols", DType::kF32, {6, 10}, seed + 2, 2, 1, false},
      {"bias", DType::kF32, {32}, seed + 3, 1, 0, false},
      {"step", DType::kI64, {}, seed + 4, 1, 0, false},
      {"empty", DType::kF32, {0, 4}, seed + 5, 1, 0, false},
  };
  spec.objects = {{"rng", "first generator", {0}, {2}},
                  {"rng", "second generator", {1}, {2}},
                  {"config", "{\"layers\": 1}", {}, {}}};
  spec.common = {{"iteration", std::int64_t{100}}, {"lr", 0.25}};
  return spec;
}

std::string TinyBytes(const TinyTensor& t) {
  const Result<TensorMeta> meta = TensorMeta::Make(t.key, t.dtype, t.shape);
  if (!meta.ok()) return "";
  return Random(t.seed * 1000003 + 17).Bytes(ToSize(meta.value().bytes()));
}

Status WriteTinyStaging(FileSystem& fs, const Staging& staging, const TinySpec& spec) {
  std::vector<Writer> writers(static_cast<std::size_t>(spec.writers));
  for (Writer& writer : writers) writer.inventory.info.uuid = staging.uuid;
  std::vector<std::vector<TensorPiece>> shard_pieces(writers.size());
  for (const TinyTensor& t : spec.tensors) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<TensorPiece> pieces, CutTensor(t));
    // Writer 0 declares it also where it holds none of its bytes: empty tensors exist.
    TENSORMOUNT_RETURN_IF_ERROR(writers[0].TensorOf(t).status());
    for (const TensorPiece& p : pieces) {
      const std::size_t w = static_cast<std::size_t>(p.number) % writers.size();
      if (!t.tensor_file) {
        shard_pieces[w].push_back(p);
        continue;
      }
      const std::string all = TinyBytes(t);
      const std::string name =
          "data/" + staging.ShortId() + "-t" + std::to_string(&t - spec.tensors.data()) + ".bin";
      Writer& writer = writers[w];
      auto it = std::find_if(writer.inventory.files.begin(), writer.inventory.files.end(),
                             [&](const FileRecord& f) { return f.name == name; });
      const std::uint32_t file =
          it != writer.inventory.files.end()
              ? static_cast<std::uint32_t>(it - writer.inventory.files.begin())
              : writer.AddFile(name, Placement::kTensorFile, all.size());
      TENSORMOUNT_RETURN_IF_ERROR(writer.AddChunk(p, file, p.tensor_offset));
      if (&p == &pieces.front()) {
        TENSORMOUNT_RETURN_IF_ERROR(WriteSealed(fs, JoinPath(staging.directory, name), all));
      }
    }
  }
  for (std::size_t w = 0; w < writers.size(); ++w) {
    TENSORMOUNT_RETURN_IF_ERROR(
        WriteRankShard(fs, staging, static_cast<int>(w), shard_pieces[w], writers[w]));
    if (w == 0) TENSORMOUNT_RETURN_IF_ERROR(WriteObjects(fs, staging, spec.objects, writers[w]));
    std::sort(
        writers[w].inventory.tensors.begin(), writers[w].inventory.tensors.end(),
        [](const TensorRecord& a, const TensorRecord& b) { return a.meta.key() < b.meta.key(); });
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest,
                                 EncodeManifest(writers[w].inventory, writers[w].leaves));
    TENSORMOUNT_RETURN_IF_ERROR(fs.WriteFileDurably(
        JoinPath(staging.directory, "manifest/rank-" + std::to_string(w) + ".tmm"), manifest));
  }
  return Status();
}

Inventory TinyCoordinator(const TinySpec& spec) {
  Inventory coordinator;
  coordinator.info.producer = "tiny";
  coordinator.info.world_size = static_cast<std::uint32_t>(spec.writers);
  coordinator.common = spec.common;
  return coordinator;
}

Result<Store::Published> WriteTinyCheckpoint(FileSystem& fs, const std::string& store_path,
                                             const std::string& name, const TinySpec& spec,
                                             const Store::PublishOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::OpenOrCreate(fs, store_path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Staging staging, store.Begin(name, options.if_exists));
  TENSORMOUNT_RETURN_IF_ERROR(WriteTinyStaging(fs, staging, spec));
  return store.Publish(staging, TinyCoordinator(spec), options);
}

}  // namespace tensormount
