// SPDX-License-Identifier: Apache-2.0
// Reads of regions. Each is planned (PlanRead: which chunks touch it, and a CopyPlan from their
// bytes to the buffer), then run part by part (ReadPlan) in the order of the plan. MapPlaced takes
// the same plan and, instead of reading, names where its bytes are mapped.
//
// Part of a plan                      read by
// one run, or runs of 32 KiB and more where they belong, hashed on the way
// short runs with gaps between them   picked from a mapping where one is safe, else in windows;
//                                     leaves that are to be checked are hashed there as well
// neighbours in file and buffer       one read for all, then checked one by one
//
// After bytes that no hash proves, a foreign file is asked whether it is still what it was.
#include "index/read/region_reader.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "base/mapping.h"
#include "index/records/extent_row.h"
#include "shard/copy_plan.h"
#include "shard/host_memory.h"
#include "shard/leaf_hash.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// How much may be fetched for each byte that is wanted.
constexpr std::uint64_t kMostGaps = 8;

// Runs of at least this many bytes are read where they belong; shorter ones are gathered.
constexpr std::uint64_t kLongRun = 32 * 1024;
// Neighbouring parts are read at once up to this, which stays in cache until it is checked.
constexpr std::uint64_t kJoinedBytes = std::uint64_t{1} << 20;

// The box around all of `want`, and the stretch of the row-major byte order that holds it.
struct Hull {
  Dims begin;
  Dims end;
  ByteRange bytes;
};

// The byte range of the hull is what ExtentLookup searches by; for a box of full rows it is exact,
// else it is the stretch from its first cell to its last.
Hull HullOf(std::span<const PlacedBox> want, const Dims& byte_shape) {
  Hull hull;
  hull.begin = want[0].box.begin();
  hull.end = Dims::Filled(byte_shape.rank(), 0);
  for (const PlacedBox& placed : want) {
    for (int a = 0; a < byte_shape.rank(); ++a) {
      hull.begin[a] = std::min(hull.begin[a], placed.box.begin(a));
      hull.end[a] = std::max(hull.end[a], placed.box.end(a));
    }
  }
  std::uint64_t last = 0;
  for (int a = 0; a < byte_shape.rank(); ++a) {
    const auto extent = static_cast<std::uint64_t>(byte_shape[a]);
    hull.bytes.begin = hull.bytes.begin * extent + static_cast<std::uint64_t>(hull.begin[a]);
    last = last * extent + static_cast<std::uint64_t>(hull.end[a] - 1);
  }
  hull.bytes.end = last + 1;
  return hull;
}

// Whether the box of a row may meet the hull. Axes of elements and of bytes are the same but for
// the last one, where an element is whole bytes.
bool MayMeet(const char* row, int rank, const Hull& hull) {
  for (int a = 0; a < rank; ++a) {
    const std::int64_t begin = extent_row::Begin(row, a);
    if (begin >= hull.end[a] || begin + extent_row::Extent(row, rank, a) <= hull.begin[a]) {
      return false;
    }
  }
  return true;
}

// As if the tensor stood in one buffer in row-major order.
PlacedBox WholeTensor(const Dims& byte_shape) {
  PlacedBox whole{Box::Whole(byte_shape), 0, Dims::Filled(byte_shape.rank(), 1)};
  for (int a = byte_shape.rank() - 2; a >= 0; --a) {
    whole.strides[a] = whole.strides[a + 1] * byte_shape[a + 1];
  }
  return whole;
}

// There is exactly one: the plan cut every part out of one wanted box.
const PlacedBox& Holder(std::span<const PlacedBox> placed, const Box& part) {
  return *std::find_if(placed.begin(), placed.end(),
                       [&](const PlacedBox& p) { return p.box.Contains(part); });
}

// Of what stands where a part belongs.
Crc64 DigestOfArrived(const CopyPlan::Part& part, const PlacedBox& dst, const std::byte* base,
                      const Dims& byte_shape) {
  return DigestOfPlaced({part.part, part.copy.dst_offset, dst.strides}, base, byte_shape);
}

// One part of a plan, from its file to where it belongs.
Status ReadPart(PartReader& reader, std::uint64_t chunk_offset, bool extend,
                const CopyPlan::Part& part, std::span<const PlacedBox> want, std::byte* base,
                const Dims& byte_shape, ReadStats& stats, Crc64* digest) {
  const StridedCopy& copy = part.copy;
  const PlacedBox& dst = Holder(want, part.part);
  if (copy.axes == 0 || copy.run >= kLongRun) {
    // Digest of a run that is also a run of the tensor: CRC of the bytes as they arrive, shifted by
    // how many bytes of the tensor come behind them.
    const StridedCopy in_tensor = PlanCopy(part.part, dst, WholeTensor(byte_shape));
    const bool linear = digest != nullptr && copy.axes == 0 && in_tensor.axes == 0;
    const auto tensor_bytes = static_cast<std::uint64_t>(Box::Whole(byte_shape).volume());
    const auto run_at = static_cast<std::uint64_t>(copy.src_offset) - chunk_offset;
    const auto tensor_at = static_cast<std::uint64_t>(in_tensor.dst_offset);
    PartReader::Arrived arrived;
    if (linear) {
      arrived = [&](std::uint64_t at, const std::byte* data, std::size_t size) {
        const std::uint64_t end = tensor_at + (at - run_at) + size;
        *digest ^= Crc64Shift(tensor_bytes - end).Apply(Crc64Extend(0, data, size));
      };
    }
    Status status;
    copy.ForEachRun([&](std::int64_t src, std::int64_t to, std::uint64_t size) {
      if (!status.ok()) return;
      status =
          reader.ReadRun(static_cast<std::uint64_t>(src) - chunk_offset, base + to, size, arrived);
    });
    TENSORMOUNT_RETURN_IF_ERROR(status);
    if (linear) return Status();
  } else {
    const std::uint64_t span = copy.src_span();
    const std::uint64_t end = static_cast<std::uint64_t>(copy.src_offset) + span;
    // Gaps in the file: pick from a mapping. Without gaps a read is as good where storage is waited
    // for; from memory to memory short runs cost a third less without the kernel. What is to be
    // checked is hashed in the mapping, too.
    bool maps_well = false;
    if (extend && MappingGuarded()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(maps_well, reader.MapsWell(copy));
    }
    if (maps_well) {
      const ByteRange leaves = reader.LeavesOf(copy);
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* const map, reader.MappingTo(leaves.end));
      // Of a damaged index the range may be shorter than what is to stand in it: read, which says
      // so.
      if (map != nullptr && leaves.end >= end && LooksInMemory(map + leaves.begin, leaves.size())) {
        TENSORMOUNT_RETURN_IF_ERROR(reader.ReadMapped(copy, map, base));
        if (digest != nullptr) *digest ^= DigestOfArrived(part, dst, base, byte_shape);
        return Status();
      }
    }
    if (!extend && (span != copy.bytes() || !reader.verifies())) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* const map, reader.MappingTo(end));
      // Without a guard a page that the disk does not give would end the program: all of them are
      // fetched first, unless most would be for nothing. What fails is read, which says why.
      const auto safe = [&] {
        const auto bytes = static_cast<std::size_t>(span);
        const std::byte* const first = map + copy.src_offset;
        if (span == copy.bytes() && !InMemory(first, bytes)) return false;
        if (MappingGuarded()) return true;
        return span / kMostGaps <= copy.bytes() &&
               Populate(first, bytes, reader.file()->mincore_is_true());
      };
      if (map != nullptr && safe()) {
        stats.bytes_read += copy.bytes();
        // Where it is left by a jump, the load fails: the few KiB that the digest had are lost.
        const bool copied = RunOnMapping([&] {
          if (digest != nullptr) {
            ExecuteCopyWithDigest(copy, part.part, map, base, byte_shape, digest);
          } else {
            ExecuteCopy(copy, map, base);
          }
        });
        if (copied) return Status();
        return reader.WhyNotThere(static_cast<std::uint64_t>(copy.src_offset) - chunk_offset, span);
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(reader.ReadStrided(copy, base));
  }
  if (digest != nullptr) *digest ^= DigestOfArrived(part, dst, base, byte_shape);
  return Status();
}

// Of kOnce what is not known to be good is read like this.
bool ExtendsLeaves(ReadVerify verify) {
  return verify == ReadVerify::kExtendLeaves || verify == ReadVerify::kOnce;
}

// The stretch of the file that holds what the first parts, those of chunk `number`, take.
// Parts of a chunk stand together in the plan, so the first that is of another chunk ends it.
ByteRange TakenFrom(std::span<const CopyPlan::Part> parts, std::uint32_t number) {
  ByteRange taken{UINT64_MAX, 0};
  for (const CopyPlan::Part& part : parts) {
    if (part.chunk != number) break;
    const auto first = static_cast<std::uint64_t>(part.copy.src_offset);
    taken.begin = std::min(taken.begin, first);
    taken.end = std::max(taken.end, first + part.copy.src_span());
  }
  return taken;
}

// Where the parts from `first` on that one read serves end: each one run, of one file, one after
// the other in file and buffer. Small chunks cost a call each otherwise.
// Thousands of chunks of a few KiB each, side by side in file and buffer (a tensor that was saved
// by many ranks into one file), are one read. With leaves to extend, only whole chunks join: a
// partial one needs bytes that are not wanted.
std::size_t JoinableParts(std::span<const CopyPlan::Part> parts, std::size_t first,
                          std::span<const ChunkRecord> chunks, ReadVerify verify) {
  std::uint64_t bytes = 0;
  std::size_t i = first;
  for (; i < parts.size(); ++i) {
    const StridedCopy& copy = parts[i].copy;
    const ChunkRecord& chunk = chunks[parts[i].chunk];
    if (copy.axes != 0 || bytes + copy.run > kJoinedBytes || chunk.strides.rank() > 0) break;
    if (ExtendsLeaves(verify) && chunk.has_hash && copy.run != chunk.length) break;
    if (i > first) {
      const StridedCopy& before = parts[i - 1].copy;
      const auto run = static_cast<std::int64_t>(before.run);
      if (chunk.file != chunks[parts[first].chunk].file ||
          copy.src_offset != before.src_offset + run ||
          copy.dst_offset != before.dst_offset + run) {
        break;
      }
    }
    bytes += copy.run;
  }
  return i;
}

// False where it does not work: part by part it is then found out why.
bool ReadJoined(OpenDataFile& file, std::span<const CopyPlan::Part> parts, std::byte* base,
                ReadStats& stats) {
  const StridedCopy& first = parts.front().copy;
  const StridedCopy& last = parts.back().copy;
  const std::uint64_t size =
      static_cast<std::uint64_t>(last.src_offset - first.src_offset) + last.run;
  Result<std::size_t> got = file.file().ReadAt(static_cast<std::uint64_t>(first.src_offset),
                                               base + first.dst_offset, size);
  if (!got.ok() || got.value() != size) return false;
  stats.bytes_read += size;
  return true;
}

// A part that ReadJoined has read.
Status CheckJoined(PartReader& reader, std::uint64_t chunk_offset, const CopyPlan::Part& part,
                   std::span<const PlacedBox> want, std::byte* base, const Dims& byte_shape,
                   Crc64* digest) {
  const StridedCopy& copy = part.copy;
  TENSORMOUNT_RETURN_IF_ERROR(
      reader.CheckRun(static_cast<std::uint64_t>(copy.src_offset) - chunk_offset,
                      base + copy.dst_offset, copy.run));
  if (digest != nullptr) {
    *digest ^= DigestOfArrived(part, Holder(want, part.part), base, byte_shape);
  }
  return Status();
}

// After a read from a file: where it is a foreign one that changed meanwhile, that is why the read
// failed, or why what it gave may not be believed. `proven`: hashes found that something is wrong.
// A hash that says "damaged" stays damage though the file changed too: the message says both.
Status StillTrue(const OpenedCheckpoint& checkpoint, const TensorMeta& meta, std::uint32_t number,
                 OpenDataFile& file, const Status& status, bool proven) {
  const Status still = checkpoint.CheckStill(number, file.file());
  if (still.ok()) return status;
  if (proven && status.code() == Code::kDataLoss) {
    return status.WithMessage(status.message() + "; " + still.message());
  }
  return still.WithContext("tensor " + meta.key()).With({.key = std::string(meta.key())});
}

}  // namespace

// Made once a tensor and cached by what it weighs: mounts read a tensor in thousands of small
// calls.
Result<std::shared_ptr<const ExtentLookup>> OpenedCheckpoint::Lookup(
    const TensorEntry& tensor) const {
  if (std::shared_ptr<const ExtentLookup> known = files_->lookups.Get(tensor.ordinal)) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const ExtentTable> table,
                               index_->Extents(tensor.ordinal));
  if (table->rank() != tensor.meta.shape().rank()) {
    return Status(Code::kInvalidArgument,
                  "tensor " + tensor.meta.key() + ": not of this checkpoint");
  }
  if (table->pending()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(table, ResolvePending(tensor, *table));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const ExtentLookup> lookup,
                               ExtentLookup::Make(tensor.meta, std::move(table)));
  const std::size_t weight = lookup->memory();
  return files_->lookups.Put(tensor.ordinal, std::move(lookup), weight);
}

struct OpenedCheckpoint::PlannedRead {
  std::vector<ChunkRecord> chunks;
  CopyPlan plan;
};

Status OpenedCheckpoint::Prepare(const TensorEntry& tensor) const {
  return Lookup(tensor).status();
}

// Candidates come from the lookup by byte range; of these, rows are compared with the hull while
// still packed, and only those that meet it are decoded. CopyPlan::Make then proves that the parts
// fill what is wanted exactly, and names the box that is stored nowhere.
Result<OpenedCheckpoint::PlannedRead> OpenedCheckpoint::PlanRead(
    const TensorEntry& tensor, std::span<const PlacedBox> want) const {
  const TensorMeta& meta = tensor.meta;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentLookup> lookup, Lookup(tensor));
  const Dims byte_shape = ByteShape(meta.dtype(), meta.shape());
  const Hull hull = HullOf(want, byte_shape);
  const bool axes_agree = meta.bits() % 8 == 0;
  const ExtentLookup::Rows rows = lookup->Candidates(hull.bytes.begin, hull.bytes.end);
  PlannedRead planned;
  std::vector<ChunkRecord>& chunks = planned.chunks;
  std::vector<std::vector<PlacedBox>> placed;
  chunks.reserve(std::min<std::size_t>(rows.end - rows.begin, 1024));
  placed.reserve(chunks.capacity());
  for (std::size_t i = rows.begin; i < rows.end; ++i) {
    if (!lookup->MayTouch(i, hull.bytes.begin, hull.bytes.end)) continue;
    if (axes_agree && !MayMeet(lookup->table().Row(i).data(), lookup->table().rank(), hull)) {
      continue;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, lookup->table().At(i));
    if (chunk.region.empty()) continue;
    if (chunk.file >= index_->files().size() ||
        (chunk.has_hash && chunk.manifest >= index_->manifests().size())) {
      return Status(Code::kDataLoss, "index: tensor " + meta.key() + " " + chunk.region.ToString() +
                                         ": file or manifest is not in the table");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        placed.emplace_back(),
        PlaceChunk(meta.dtype(), meta.shape(), chunk.region, chunk.offset, chunk.strides));
    chunks.push_back(std::move(chunk));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(planned.plan, CopyPlan::Make(want, placed, &meta));
  return planned;
}

// kOnce reads without comparing what is known to be good. If a file changed under such a read, all
// of it is read again, and compared: the second pass takes nothing for granted.
Status OpenedCheckpoint::ReadPlaced(const TensorEntry& tensor, std::span<const PlacedBox> want,
                                    std::byte* base, ReadVerify verify, ReadStats& stats,
                                    Crc64* digest) const {
  if (digest != nullptr) *digest = 0;
  if (want.empty()) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlannedRead planned, PlanRead(tensor, want));
  stats.bytes_wanted += planned.plan.bytes();
  if (verify == ReadVerify::kOnce) {
    ProvingRead once(*proven_);
    TENSORMOUNT_RETURN_IF_ERROR(
        ReadPlan(tensor, planned, want, base, verify, &once, stats, digest));
    if (once.End()) return Status();
    if (digest != nullptr) *digest = 0;
    verify = ReadVerify::kExtendLeaves;
  }
  return ReadPlan(tensor, planned, want, base, verify, nullptr, stats, digest);
}

// One pass over the parts in the order of the plan, which is that of chunks. Per chunk: is it known
// to be good (held), can it join its neighbours, then each part. `file` is kept from chunk to
// chunk; a change of file is when a foreign one is asked whether it stayed what it was.
Status OpenedCheckpoint::ReadPlan(const TensorEntry& tensor, const PlannedRead& planned,
                                  std::span<const PlacedBox> want, std::byte* base,
                                  ReadVerify verify, ProvingRead* once, ReadStats& stats,
                                  Crc64* digest) const {
  const TensorMeta& meta = tensor.meta;
  const Dims byte_shape = ByteShape(meta.dtype(), meta.shape());
  const std::vector<ChunkRecord>& chunks = planned.chunks;
  const CopyPlan& plan = planned.plan;
  const std::span<const CopyPlan::Part> parts = plan.parts();
  std::shared_ptr<OpenDataFile> file;  // Of the part before.
  std::uint32_t file_number = 0;
  // Whether bytes of that file are here that only its size and mtime vouch for.
  bool unproven = false;
  std::size_t arrived = 0;  // Parts before this one stand in the buffer already, unchecked.
  for (std::size_t i = 0; i < parts.size();) {
    const std::uint32_t number = parts[i].chunk;
    const ChunkRecord& chunk = chunks[number];
    if (file && file_number != chunk.file && unproven) {
      TENSORMOUNT_RETURN_IF_ERROR(StillTrue(*this, meta, file_number, *file, Status(), false));
      unproven = false;
    }
    // Whether all that this read takes from the chunk is known to be good.
    bool held = false;
    if (once != nullptr && chunk.has_hash) {
      if (!file || file_number != chunk.file) {
        file_number = chunk.file;
        const auto open = files_->Open(*this, chunk.file);
        file = open.ok() ? open.value() : nullptr;  // What failed fails below, where it is worded.
      }
      if (file) {
        once->Enter(chunk.file, file);
        held = once->Hold(TakenFrom(parts.subspan(i), number));
      }
    }
    PartReader reader(*this, *files_,
                      {.tensor = &meta,
                       .region = &chunk.region,
                       .object = {},
                       .file = chunk.file,
                       .offset = chunk.offset,
                       .length = chunk.length,
                       .has_hash = chunk.has_hash,
                       .hash = chunk.hash,
                       .manifest = chunk.manifest,
                       .first_leaf = chunk.first_leaf},
                      held ? ReadVerify::kOff : verify, file ? once : nullptr, stats);
    if (file && file_number == chunk.file) {
      reader.UseFile(file);
      if (i >= arrived) {
        const std::size_t end = JoinableParts(parts, i, chunks, verify);
        if (end > i + 1 && ReadJoined(*file, parts.subspan(i, end - i), base, stats)) {
          arrived = end;
        }
      }
    }
    const bool extend = !held && ExtendsLeaves(verify) && chunk.has_hash;
    Status status;
    for (; status.ok() && i < parts.size() && parts[i].chunk == number; ++i) {
      status = i < arrived
                   ? CheckJoined(reader, chunk.offset, parts[i], want, base, byte_shape, digest)
                   : ReadPart(reader, chunk.offset, extend, parts[i], want, base, byte_shape, stats,
                              digest);
    }
    file = reader.file();
    file_number = chunk.file;
    unproven = unproven || !(extend || held);
    if (!status.ok()) {
      // The next read opens the name again: somebody may have put a good copy there.
      LetGo(chunk.file);
      return file ? StillTrue(*this, meta, file_number, *file, status, chunk.has_hash) : status;
    }
  }
  return file && unproven ? StillTrue(*this, meta, file_number, *file, Status(), false) : Status();
}

Result<std::vector<PlacedBox>> PlaceRead(const TensorEntry& tensor, const Region& region,
                                         const BufferView& out) {
  const TensorMeta& meta = tensor.meta;
  if (const Status reached = CheckHostMemory(out); !reached.ok()) {
    return reached.WithContext("tensor " + meta.key());
  }
  if (!region.Within(meta.shape())) {
    return Status(Code::kInvalidArgument, "tensor " + meta.key() + ": " + region.ToString() +
                                              " is not within " + meta.shape().ToString());
  }
  Result<std::vector<PlacedBox>> want = PlaceBuffer(out, meta.dtype(), meta.shape(), region);
  if (!want.ok()) return want.status().WithContext("tensor " + meta.key());
  return want;
}

Result<std::vector<PlacedBox>> PlaceBytes(const TensorEntry& tensor, std::uint64_t offset,
                                          std::size_t size) {
  const TensorMeta& meta = tensor.meta;
  if (!RangeWithin(offset, size, meta.bytes())) {
    return Status(Code::kInvalidArgument,
                  "tensor " + meta.key() + ": bytes " + std::to_string(offset) + " to " +
                      std::to_string(offset + size) + " of " + std::to_string(meta.bytes()));
  }
  if (size == 0) return std::vector<PlacedBox>();
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Region region,
      Region::Flat(Box::Whole(ByteShape(meta.dtype(), meta.shape())),
                   static_cast<std::int64_t>(offset), static_cast<std::int64_t>(size)));
  return PlacePacked(region, 0);
}

Status OpenedCheckpoint::Read(const TensorEntry& tensor, const Region& region,
                              const BufferView& out, ReadVerify verify, ReadStats* stats,
                              Crc64* digest) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<PlacedBox> want, PlaceRead(tensor, region, out));
  ReadStats local;
  const Status status =
      ReadPlaced(tensor, want, static_cast<std::byte*>(out.data), verify, local, digest);
  if (stats != nullptr) stats->Add(local);
  return status;
}

Status OpenedCheckpoint::ReadBytes(const TensorEntry& tensor, std::uint64_t offset, void* out,
                                   std::size_t size, ReadVerify verify, ReadStats* stats) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<PlacedBox> want, PlaceBytes(tensor, offset, size));
  ReadStats local;
  const Status status =
      ReadPlaced(tensor, want, static_cast<std::byte*>(out), verify, local, nullptr);
  if (stats != nullptr) stats->Add(local);
  return status;
}

// An object part is one run of bytes: no plan, but the same proof, and the same second look where
// the file changed.
Status OpenedCheckpoint::ReadObject(const ObjectRecord& object, std::uint64_t offset, void* out,
                                    std::size_t size, ReadVerify verify) const {
  std::string name = "object " + object.key;
  if (object.grid.rank() > 0) name += " part " + object.index.ToString();
  if (!RangeWithin(offset, size, object.length)) {
    return Status(Code::kInvalidArgument, name + ": bytes " + std::to_string(offset) + " to " +
                                              std::to_string(offset + size) + " of " +
                                              std::to_string(object.length));
  }
  if (object.file >= index_->files().size() ||
      (object.has_hash() && object.manifest >= index_->manifests().size())) {
    return Status(Code::kDataLoss, "index: " + name + ": file or manifest is not in the table");
  }
  if (size == 0) return Status();
  const std::uint64_t at = object.offset + offset;
  ProvingRead once(*proven_);
  std::shared_ptr<OpenDataFile> file;
  if (verify == ReadVerify::kOnce && object.has_hash()) {
    const auto open = files_->Open(*this, object.file);
    // What failed fails below, where it is worded.
    if (open.ok()) once.Enter(object.file, file = open.value());
  }
  const auto read_as = [&](ReadVerify how, ProvingRead* proving) {
    ReadStats stats;
    PartReader reader(*this, *files_,
                      {.object = name,
                       .file = object.file,
                       .offset = object.offset,
                       .length = object.length,
                       .has_hash = object.has_hash(),
                       .hash = object.hash,
                       .manifest = object.manifest,
                       .first_leaf = object.first_leaf},
                      how, proving, stats);
    if (file) reader.UseFile(file);
    const Status status = reader.ReadRun(offset, static_cast<std::byte*>(out), size, {});
    file = reader.file();
    if (!status.ok()) LetGo(object.file);
    return status;
  };
  Status read = file && once.Hold({at, at + size}) ? read_as(ReadVerify::kOff, nullptr)
                                                   : read_as(verify, file ? &once : nullptr);
  if (read.ok() && !once.End()) read = read_as(ReadVerify::kExtendLeaves, nullptr);
  if (!file) return read;
  const Status still = CheckStill(object.file, file->file());
  if (still.ok()) return read;
  return still.WithContext("object " + object.key);
}

Result<std::vector<OpenedCheckpoint::MappedRange>> OpenedCheckpoint::MapBytes(
    const TensorEntry& tensor, std::uint64_t offset, std::size_t size, ReadVerify verify,
    ForeignFiles foreign) const {
  const TensorMeta& meta = tensor.meta;
  // What is refused here is refused in words by ReadBytes.
  if (size == 0 || !RangeWithin(offset, size, meta.bytes())) return std::vector<MappedRange>();
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Region region,
      Region::Flat(Box::Whole(ByteShape(meta.dtype(), meta.shape())),
                   static_cast<std::int64_t>(offset), static_cast<std::int64_t>(size)));
  return MapPlaced(tensor, PlacePacked(region, 0), verify, foreign);
}

// The same plan as a read, and then the runs in the order of the destination. Whatever stands
// against it (too many runs, foreign files, bytes that would have to be compared) gives an empty
// result, and the caller reads.
Result<std::vector<OpenedCheckpoint::MappedRange>> OpenedCheckpoint::MapPlaced(
    const TensorEntry& tensor, std::span<const PlacedBox> want, ReadVerify verify,
    ForeignFiles foreign) const {
  struct Run {
    std::uint64_t offset = 0;  // In the file of its chunk.
    std::int64_t wanted_at = 0;
    std::uint64_t size = 0;
    std::uint32_t chunk = 0;
  };
  // More runs are put together again where they lie side by side: whole rows of a box, say.
  constexpr std::uint64_t kMaxRuns = 8 * kMaxMapped;
  std::vector<MappedRange> mapped;
  if (want.empty() || (verify != ReadVerify::kOff && verify != ReadVerify::kOnce)) return mapped;
  ProvingRead once(*proven_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlannedRead planned, PlanRead(tensor, want));
  std::vector<Run> runs;
  for (const CopyPlan::Part& part : planned.plan.parts()) {
    if (part.copy.runs() > kMaxRuns - runs.size()) return mapped;
    part.copy.ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
      runs.push_back({static_cast<std::uint64_t>(src), dst, size, part.chunk});
    });
  }
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return a.wanted_at < b.wanted_at; });
  std::shared_ptr<OpenDataFile> file;  // Of the run before.
  std::uint32_t file_number = 0;
  for (const Run& run : runs) {
    const std::uint32_t number = planned.chunks[run.chunk].file;
    // Whoever takes the bytes does so after we looked whether the file is still as it was.
    if (foreign == ForeignFiles::kRead &&
        index_->files()[number].placement == Placement::kForeign) {
      return std::vector<MappedRange>();
    }
    if (!file || number != file_number) {
      TENSORMOUNT_ASSIGN_OR_RETURN(file, files_->Open(*this, number));
      file_number = number;
      if (verify == ReadVerify::kOnce) once.Enter(number, file);
    }
    const std::uint64_t at = run.offset;
    if (verify == ReadVerify::kOnce && planned.chunks[run.chunk].has_hash &&
        !once.Hold({at, at + run.size})) {
      return std::vector<MappedRange>();
    }
    const std::byte* const map = file->MappingTo(at + run.size);
    if (map == nullptr) return std::vector<MappedRange>();
    if (!mapped.empty() && mapped.back().data + mapped.back().size == map + at) {
      mapped.back().size += run.size;
      continue;
    }
    if (mapped.size() == kMaxMapped) return std::vector<MappedRange>();
    mapped.push_back({.data = map + at, .size = run.size, .keep = file});
  }
  return mapped;
}

}  // namespace tensormount
