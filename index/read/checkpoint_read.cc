// SPDX-License-Identifier: Apache-2.0
// Reads of regions, for index/read/checkpoint.h. PlanRead finds the chunks that a read may touch
// and makes a CopyPlan from their bytes to the buffer. ReadPlan executes the plan part by part.
// MapPlaced uses the same plan to return mappings instead of reading.
//
// Part of a plan                      read by
// one run, or runs of 32 KiB and more reading to the destination, hashed on the way
// other short runs                    copying from a mapping if one is safe, else ReadStrided;
//                                     leaves to check are hashed there too
// neighbours in file and buffer       one read for all, then checked one by one
//
// After bytes that no hash proves, a foreign file is checked for changes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "base/mapping.h"
#include "index/read/planned_read.h"
#include "index/read/stored_range_reader.h"
#include "index/records/extent_row.h"
#include "shard/copy_plan.h"
#include "shard/host_memory.h"
#include "shard/leaf_hash.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// Without a mapping guard (base/mapping.h), a copy from a mapping first reads all pages from the
// first run to the last. Such a copy is used only if these are at most about this many times the
// bytes of the runs.
constexpr std::uint64_t kMostGaps = 8;

// In a part of several runs, runs of at least this many bytes are read one by one to their
// destination; shorter runs are gathered.
constexpr std::uint64_t kLongRun = 32 * 1024;
// Largest single read for neighbouring parts. It stays in the processor's cache until it is
// checked.
constexpr std::uint64_t kJoinedBytes = std::uint64_t{1} << 20;
// Parts are announced to storage together up to this number, and until they have this many bytes.
constexpr std::size_t kPartsAhead = 64;
constexpr std::uint64_t kBytesAhead = std::uint64_t{16} << 20;

}  // namespace

ByteHull HullOf(std::span<const PlacedBox> want, const Dims& byte_shape) {
  ByteHull hull;
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

namespace {

// Whether the box of a table row may intersect the hull. Only for elements of whole bytes: the hull
// then has the tensor's axes and one more, for the bytes of an element.
bool MayMeet(const char* row, int rank, const ByteHull& hull) {
  for (int a = 0; a < rank; ++a) {
    const std::int64_t begin = extent_row::Begin(row, a);
    if (begin >= hull.end[a] || begin + extent_row::Extent(row, rank, a) <= hull.begin[a]) {
      return false;
    }
  }
  return true;
}

// The box of `placed` that contains `part`. Exactly one does, because the plan cut every part from
// one box.
const PlacedBox& Holder(std::span<const PlacedBox> placed, const Box& part) {
  return *std::find_if(placed.begin(), placed.end(),
                       [&](const PlacedBox& p) { return p.box.Contains(part); });
}

// The digest of a part's bytes as they are at the destination.
Crc64 DigestOfArrived(const CopyPlan::Part& part, const PlacedBox& dst, const std::byte* base,
                      const Dims& byte_shape) {
  return DigestOfPlaced({part.part, part.copy.dst_offset, dst.strides}, base, byte_shape);
}

// Reads one part of a plan from its file to its destination.
Status ReadPart(StoredRangeReader& reader, std::uint64_t chunk_offset, bool extend,
                const CopyPlan::Part& part, std::span<const PlacedBox> want, std::byte* base,
                const Dims& byte_shape, ReadStats& stats, Crc64* digest) {
  const StridedCopy& copy = part.copy;
  if (copy.axes == 0 || copy.run >= kLongRun) {
    // If a run of the file is also a run of the tensor (`linear`), the digest is computed from
    // the arriving bytes: their CRC, shifted by the number of the tensor's bytes behind them.
    StridedCopy in_tensor;
    if (digest != nullptr) {
      in_tensor = PlanCopy(part.part, Holder(want, part.part), PlaceWhole(byte_shape));
    }
    const bool linear = digest != nullptr && copy.axes == 0 && in_tensor.axes == 0;
    const auto tensor_bytes = static_cast<std::uint64_t>(Box::Whole(byte_shape).volume());
    const auto run_at = static_cast<std::uint64_t>(copy.src_offset) - chunk_offset;
    const auto tensor_at = static_cast<std::uint64_t>(in_tensor.dst_offset);
    StoredRangeReader::BlockCallback arrived;
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
    // Short runs are copied from a mapping if that is safe. A mapping skips the gaps between
    // runs, and copying runs that are in memory costs a third less than reading them through
    // the kernel. Leaves to check are hashed in the mapping too.
    bool prefers_mmap = false;
    if (extend && MappingGuarded()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(prefers_mmap, reader.PrefersMmap(copy));
    }
    if (prefers_mmap) {
      const ByteRange leaves = reader.LeavesOf(copy);
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* const map, reader.MappingTo(leaves.end));
      // In a damaged index the range may be too short for the part. The read below reports that.
      if (map != nullptr && leaves.end >= end && LooksInMemory(map + leaves.begin, leaves.size())) {
        TENSORMOUNT_RETURN_IF_ERROR(reader.ReadMapped(copy, map, base));
        if (digest != nullptr) {
          *digest ^= DigestOfArrived(part, Holder(want, part.part), base, byte_shape);
        }
        return Status();
      }
    }
    if (!extend && (span != copy.bytes() || !reader.verifies())) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* const map, reader.MappingTo(end));
      // Without a mapping guard, a page that the disk cannot deliver would end the program. All
      // pages are therefore fetched first, or, if most of them are not needed, the mapping is not
      // used. After a failure the read below reports the reason.
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
        // If the mapping fails, RunOnMapping leaves the lambda by a jump. The read then
        // fails, and a few KiB that the digest allocated leak.
        const bool copied = RunOnMapping([&] {
          if (digest != nullptr) {
            ExecuteCopyWithDigest(copy, part.part, map, base, byte_shape, digest);
          } else {
            ExecuteCopy(copy, map, base);
          }
        });
        if (copied) return Status();
        return reader.MappingError(static_cast<std::uint64_t>(copy.src_offset) - chunk_offset,
                                   span);
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(reader.ReadStrided(copy, base));
  }
  if (digest != nullptr) {
    *digest ^= DigestOfArrived(part, Holder(want, part.part), base, byte_shape);
  }
  return Status();
}

// Whether reads are extended to whole leaves or pages. kOnce reads ranges that are not proven like
// kExtendLeaves.
bool ExtendsLeaves(ReadVerify verify) {
  return verify == ReadVerify::kExtendLeaves || verify == ReadVerify::kOnce;
}

// The byte range of the file that the first parts take, as long as they are of chunk `number`.
// Parts of a chunk are neighbours in the plan.
ByteRange SourceRangeOf(std::span<const CopyPlan::Part> parts, std::uint32_t number) {
  ByteRange taken{UINT64_MAX, 0};
  for (const CopyPlan::Part& part : parts) {
    if (part.chunk != number) break;
    const auto first = static_cast<std::uint64_t>(part.copy.src_offset);
    taken.begin = std::min(taken.begin, first);
    taken.end = std::max(taken.end, first + part.copy.src_span());
  }
  return taken;
}

// Returns the end of the parts, from `first` on, that one read can serve. Such parts are single
// runs of one file that are neighbours in file and buffer, such as thousands of small chunks that
// many ranks saved into one file. If leaves must be read as a whole, chunks with hashes are joined
// only if they are whole, because a partial chunk needs bytes outside of its part.
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

// Reads parts that JoinableParts selected with one read. Returns false after a failure; reading
// part by part then finds the reason.
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

// Checks a part that ReadJoined has read.
Status CheckJoined(StoredRangeReader& reader, std::uint64_t chunk_offset,
                   const CopyPlan::Part& part, std::span<const PlacedBox> want, std::byte* base,
                   const Dims& byte_shape, Crc64* digest) {
  const StridedCopy& copy = part.copy;
  TENSORMOUNT_RETURN_IF_ERROR(
      reader.CheckRun(static_cast<std::uint64_t>(copy.src_offset) - chunk_offset,
                      base + copy.dst_offset, copy.run));
  if (digest != nullptr) {
    *digest ^= DigestOfArrived(part, Holder(want, part.part), base, byte_shape);
  }
  return Status();
}

// Checks after a read whether a foreign file changed meanwhile. If it did, the change explains a
// failure, and makes bytes without a hash unusable, so the result is kStale. `proven`: the bytes
// have a hash. A kDataLoss that a hash proves stays kDataLoss, and the message has both reasons.
Status CheckUnchangedAfterRead(const OpenedCheckpoint& checkpoint, const TensorMeta& meta,
                               std::uint32_t number, OpenDataFile& file, const Status& status,
                               bool proven) {
  const Status still = checkpoint.CheckFileUnchanged(number, file.file());
  if (still.ok()) return status;
  if (proven && status.code() == Code::kDataLoss) {
    return status.WithMessage(status.message() + "; " + still.message());
  }
  return still.WithContext("tensor " + meta.key()).With({.key = std::string(meta.key())});
}

}  // namespace

// The lookup of a tensor is cached, with its size as weight, because mounts read a tensor in
// thousands of small calls.
Result<std::shared_ptr<const ExtentLookup>> OpenedCheckpoint::Lookup(
    const TensorEntry& tensor) const {
  if (std::shared_ptr<const ExtentLookup> known = files_->lookups.Get(tensor.ordinal)) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const ExtentTable> table,
                               index_->Extents(tensor, /*keep=*/false));
  if (table->rank() != tensor.meta.shape().rank()) {
    return Status(Code::kInvalidArgument, "tensor " + tensor.meta.key() +
                                              ": the tensor does not belong to this checkpoint");
  }
  if (table->pending()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(table, ResolvePending(tensor, *table));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const ExtentLookup> lookup,
                               ExtentLookup::Make(tensor.meta, std::move(table)));
  const std::size_t weight = lookup->memory();
  return files_->lookups.Put(tensor.ordinal, std::move(lookup), weight);
}

Status OpenedCheckpoint::Prepare(const TensorEntry& tensor) const {
  if (binding_) return PrepareMapped(tensor);
  return Lookup(tensor).status();
}

// The lookup finds candidates by byte range. The packed table rows of the candidates are compared
// with the hull (if elements are whole bytes), and only rows that may meet the hull are decoded.
Result<std::vector<std::vector<PlacedBox>>> OpenedCheckpoint::AddChunks(
    const TensorEntry& tensor, const ByteHull& hull, PlannedRead& planned) const {
  if (binding_) return AddMappedChunks(tensor, hull, planned);
  const TensorMeta& meta = tensor.meta;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentLookup> lookup, Lookup(tensor));
  const bool axes_agree = meta.bits() % 8 == 0;
  const ExtentLookup::Rows rows = lookup->Candidates(hull.bytes.begin, hull.bytes.end);
  std::vector<std::vector<PlacedBox>> placed;
  placed.reserve(std::min<std::size_t>(rows.end - rows.begin, 1024));
  for (std::size_t i = rows.begin; i < rows.end; ++i) {
    if (!lookup->MayTouch(i, hull.bytes.begin, hull.bytes.end)) continue;
    if (axes_agree && !MayMeet(lookup->table().Row(i).data(), lookup->table().rank(), hull)) {
      continue;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, lookup->table().At(i));
    if (chunk.region.empty()) continue;
    if (chunk.file >= index_->files().size() ||
        (chunk.has_hash && chunk.manifest >= index_->manifests().size())) {
      return Status(Code::kDataLoss,
                    "index: tensor " + meta.key() + " " + chunk.region.ToString() +
                        ": the chunk refers to a file or manifest that the index does not list");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        placed.emplace_back(),
        PlaceChunk(meta.dtype(), meta.shape(), chunk.region, chunk.offset, chunk.strides));
    planned.chunks.push_back(std::move(chunk));
    planned.stored.push_back(&meta);
  }
  return placed;
}

// CopyPlan::Make proves that the parts fill the wanted boxes exactly, and names a box that is
// stored in no chunk.
Result<OpenedCheckpoint::PlannedRead> OpenedCheckpoint::PlanRead(
    const TensorEntry& tensor, std::span<const PlacedBox> want) const {
  if (binding_) return PlanMapped(tensor, want);
  const TensorMeta& meta = tensor.meta;
  PlannedRead planned;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::vector<std::vector<PlacedBox>> placed,
      AddChunks(tensor, HullOf(want, ByteShape(meta.dtype(), meta.shape())), planned));
  TENSORMOUNT_ASSIGN_OR_RETURN(CopyPlan plan, CopyPlan::Make(want, placed, &meta));
  planned.bytes = plan.bytes();
  planned.parts = std::move(plan).TakeParts();
  return planned;
}

namespace {

void FillWithZeros(const PlacedBox& placed, std::byte* base) {
  PlanCopy(placed.box, placed, placed)
      .ForEachRun([&](std::int64_t, std::int64_t to, std::uint64_t size) {
        std::memset(base + to, 0, size);
      });
}

}  // namespace

// kOnce skips the comparison of proven bytes. If a file changed during such a read, all bytes are
// read again and compared.
Status OpenedCheckpoint::ReadPlaced(const TensorEntry& tensor, std::span<const PlacedBox> want,
                                    std::byte* base, ReadVerify verify, ReadStats& stats,
                                    Crc64* digest) const {
  if (digest != nullptr) *digest = 0;
  if (want.empty()) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlannedRead planned, PlanRead(tensor, want));
  stats.bytes_wanted += planned.bytes;
  for (const PlacedBox& zeros : planned.zeros) FillWithZeros(zeros, base);
  const OpenedCheckpoint& stored = this->stored();
  // Parts in coordinates of names have no digest of their own, so it is computed from what arrived.
  const bool of_parts = digest != nullptr && !planned.in_names;
  const auto read = [&](ReadVerify how, ProvingRead* once) {
    return stored.ReadPlan(tensor, planned, want, base, how, once, stats,
                           of_parts ? digest : nullptr);
  };
  if (verify == ReadVerify::kOnce) {
    ProvingRead once(*proven_);
    TENSORMOUNT_RETURN_IF_ERROR(read(verify, &once));
    if (!once.End()) {
      if (digest != nullptr) *digest = 0;
      TENSORMOUNT_RETURN_IF_ERROR(read(ReadVerify::kExtendLeaves, nullptr));
    }
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(read(verify, nullptr));
  }
  if (digest != nullptr && !of_parts) {
    const Dims byte_shape = ByteShape(tensor.meta.dtype(), tensor.meta.shape());
    for (const PlacedBox& placed : want) *digest ^= DigestOfPlaced(placed, base, byte_shape);
  }
  return Status();
}

// Announces parts from `first` on to storage, so that a disk or server works on all of them while
// the read waits for the first. Returns the first part that was not looked at. Nothing is announced
// if one byte range covers the parts, or if the first byte is in memory. A failure to open a file
// is left to the read.
std::size_t OpenedCheckpoint::StartParts(const PlannedRead& planned, std::size_t first,
                                         ReadVerify verify) const {
  const std::span<const CopyPlan::Part> parts = planned.parts;
  if (parts.size() - first < 2) return parts.size();  // Most reads of a mount have one part.
  std::vector<FileStretch> stretches;
  std::uint64_t bytes = 0;
  std::size_t i = first;
  for (; i < parts.size() && i - first < kPartsAhead && bytes < kBytesAhead; ++i) {
    const ChunkRecord& chunk = planned.chunks[parts[i].chunk];
    ByteRange want = SourceRangeOf(parts.subspan(i, 1), parts[i].chunk);
    // Most bytes in this range are not wanted. ReadStrided announces short runs itself.
    if (want.size() > 2 * parts[i].copy.bytes()) continue;
    if (ExtendsLeaves(verify) && chunk.has_hash && want.begin >= chunk.offset) {
      const std::uint64_t first_leaf = (want.begin - chunk.offset) / kLeafBytes;
      const std::uint64_t last_leaf = (want.end - 1 - chunk.offset) / kLeafBytes;
      want = {chunk.offset + first_leaf * kLeafBytes,
              chunk.offset + std::min((last_leaf + 1) * kLeafBytes, chunk.length)};
    }
    bytes += want.size();
    if (!stretches.empty() && stretches.back().file == chunk.file &&
        stretches.back().bytes.end == want.begin) {
      stretches.back().bytes.end = want.end;
    } else {
      stretches.push_back({chunk.file, want});
    }
  }
  if (stretches.size() < 2) return i;
  for (const FileStretch& stretch : stretches) {
    const auto open = files_->Open(*this, stretch.file);
    if (!open.ok()) continue;
    File& file = open.value()->file();
    std::byte byte;
    if (&stretch == &stretches.front() && file.ReadCached(stretch.bytes.begin, &byte, 1) == 1) {
      break;
    }
    file.StartReading(stretch.bytes.begin, stretch.bytes.size());
  }
  return i;
}

// Reads the parts in plan order, which is chunk order. A chunk whose wanted bytes are proven
// (`held`) is read without comparison. Parts that can join their neighbours are read together.
// `file` is kept from chunk to chunk; when another file follows, a foreign file with unproven bytes
// is checked for changes.
Status OpenedCheckpoint::ReadPlan(const TensorEntry& tensor, const PlannedRead& planned,
                                  std::span<const PlacedBox> want, std::byte* base,
                                  ReadVerify verify, ProvingRead* once, ReadStats& stats,
                                  Crc64* digest) const {
  const Dims byte_shape = ByteShape(tensor.meta.dtype(), tensor.meta.shape());
  const std::vector<ChunkRecord>& chunks = planned.chunks;
  const std::span<const CopyPlan::Part> parts = planned.parts;
  std::shared_ptr<OpenDataFile> file;  // File of the previous part.
  std::uint32_t file_number = 0;
  const TensorMeta* meta = &tensor.meta;  // Stored tensor of the previous part.
  // Whether bytes that no hash proves were read from `file`. A foreign file must then be checked
  // for changes.
  bool unproven = false;
  // Parts before this one are in the buffer; those from `i` on are not checked yet.
  std::size_t arrived = 0;
  std::size_t told = 0;  // StartParts has looked at the parts before this one.
  for (std::size_t i = 0; i < parts.size();) {
    if (i >= told) told = StartParts(planned, i, verify);
    const std::uint32_t number = parts[i].chunk;
    const ChunkRecord& chunk = chunks[number];
    if (file && file_number != chunk.file && unproven) {
      TENSORMOUNT_RETURN_IF_ERROR(
          CheckUnchangedAfterRead(*this, *meta, file_number, *file, Status(), false));
      unproven = false;
    }
    meta = planned.stored[number];
    // Whether all bytes that this read takes from the chunk are proven.
    bool held = false;
    if (once != nullptr && chunk.has_hash) {
      if (!file || file_number != chunk.file) {
        file_number = chunk.file;
        const auto open = files_->Open(*this, chunk.file);
        file = open.ok() ? open.value() : nullptr;  // The read below reports a failed open.
      }
      if (file) {
        once->BeginFile(chunk.file, file);
        held = once->AreProven(SourceRangeOf(parts.subspan(i), number));
      }
    }
    StoredRangeReader reader(*this, *files_,
                             {.tensor = meta,
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
      // The next read opens the file's name again, which may be a repaired copy by then.
      EvictFile(chunk.file);
      return file
                 ? CheckUnchangedAfterRead(*this, *meta, file_number, *file, status, chunk.has_hash)
                 : status;
    }
  }
  return file && unproven
             ? CheckUnchangedAfterRead(*this, *meta, file_number, *file, Status(), false)
             : Status();
}

Result<std::vector<PlacedBox>> PlaceRead(const TensorEntry& tensor, const Region& region,
                                         const BufferView& out) {
  const TensorMeta& meta = tensor.meta;
  if (const Status reached = CheckHostMemory(out); !reached.ok()) {
    return reached.WithContext("tensor " + meta.key());
  }
  if (!region.Within(meta.shape())) {
    return Status(Code::kInvalidArgument, "tensor " + meta.key() + ": region " + region.ToString() +
                                              " is not within shape " + meta.shape().ToString());
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
                      std::to_string(offset + size) + " are not within its " +
                      std::to_string(meta.bytes()) + " bytes");
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

// An object part is one run, so there is no plan. Proven bytes are treated as in ReadPlaced. If a
// foreign file changed, the result is kStale, even if hashes proved the bytes. A kDataLoss that a
// hash proves stays kDataLoss, and the message has both reasons.
Status OpenedCheckpoint::ReadObject(const ObjectRecord& object, std::uint64_t offset, void* out,
                                    std::size_t size, ReadVerify verify) const {
  if (source_) return source_->ReadObject(object, offset, out, size, verify);
  std::string name = "object " + object.key;
  if (object.grid.rank() > 0) name += " part " + object.index.ToString();
  if (!RangeWithin(offset, size, object.length)) {
    return Status(Code::kInvalidArgument, name + ": bytes " + std::to_string(offset) + " to " +
                                              std::to_string(offset + size) +
                                              " are not within its " +
                                              std::to_string(object.length) + " bytes");
  }
  if (object.file >= index_->files().size() ||
      (object.has_hash() && object.manifest >= index_->manifests().size())) {
    return Status(Code::kDataLoss,
                  "index: the record of " + name +
                      " refers to a file or manifest that the index does not list");
  }
  if (size == 0) return Status();
  const std::uint64_t at = object.offset + offset;
  ProvingRead once(*proven_);
  std::shared_ptr<OpenDataFile> file;
  if (verify == ReadVerify::kOnce && object.has_hash()) {
    const auto open = files_->Open(*this, object.file);
    // The read below reports a failed open.
    if (open.ok()) once.BeginFile(object.file, file = open.value());
  }
  const auto read_as = [&](ReadVerify how, ProvingRead* proving) {
    ReadStats stats;
    StoredRangeReader reader(*this, *files_,
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
    if (!status.ok()) EvictFile(object.file);
    return status;
  };
  Status read = file && once.AreProven({at, at + size}) ? read_as(ReadVerify::kOff, nullptr)
                                                        : read_as(verify, file ? &once : nullptr);
  if (read.ok() && !once.End()) read = read_as(ReadVerify::kExtendLeaves, nullptr);
  if (!file) return read;
  const Status still = CheckFileUnchanged(object.file, file->file());
  if (still.ok()) return read;
  if (object.has_hash() && read.code() == Code::kDataLoss) {
    return read.WithMessage(read.message() + "; " + still.message());
  }
  return still.WithContext("object " + object.key);
}

Result<std::vector<OpenedCheckpoint::MappedRange>> OpenedCheckpoint::MapBytes(
    const TensorEntry& tensor, std::uint64_t offset, std::size_t size, ReadVerify verify,
    ForeignFiles foreign) const {
  const TensorMeta& meta = tensor.meta;
  // ReadBytes reports arguments that are refused here.
  if (size == 0 || !RangeWithin(offset, size, meta.bytes())) return std::vector<MappedRange>();
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Region region,
      Region::Flat(Box::Whole(ByteShape(meta.dtype(), meta.shape())),
                   static_cast<std::int64_t>(offset), static_cast<std::int64_t>(size)));
  return MapPlaced(tensor, PlacePacked(region, 0), verify, foreign);
}

// Plans like a read, and maps the runs in destination order. If something prevents mapping (too
// many runs, foreign files, bytes to compare), the result is empty and the caller reads.
Result<std::vector<OpenedCheckpoint::MappedRange>> OpenedCheckpoint::MapPlaced(
    const TensorEntry& tensor, std::span<const PlacedBox> want, ReadVerify verify,
    ForeignFiles foreign) const {
  struct Run {
    std::uint64_t offset = 0;  // Offset in the chunk's file.
    std::int64_t wanted_at = 0;
    std::uint64_t size = 0;
    std::uint32_t chunk = 0;
  };
  // Neighbouring runs, such as whole tensor rows of a box, are joined afterwards, so more runs are
  // allowed here.
  constexpr std::uint64_t kMaxRuns = 8 * kMaxMapped;
  std::vector<MappedRange> mapped;
  if (want.empty() || (verify != ReadVerify::kOff && verify != ReadVerify::kOnce)) return mapped;
  ProvingRead once(*proven_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlannedRead planned, PlanRead(tensor, want));
  if (!planned.zeros.empty()) return mapped;
  const OpenedCheckpoint& stored = this->stored();
  std::vector<Run> runs;
  for (const CopyPlan::Part& part : planned.parts) {
    if (part.copy.runs() > kMaxRuns - runs.size()) return mapped;
    part.copy.ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
      runs.push_back({static_cast<std::uint64_t>(src), dst, size, part.chunk});
    });
  }
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return a.wanted_at < b.wanted_at; });
  std::shared_ptr<OpenDataFile> file;  // File of the previous run.
  std::uint32_t file_number = 0;
  for (const Run& run : runs) {
    const std::uint32_t number = planned.chunks[run.chunk].file;
    // The caller uses the bytes after this check, so nobody would notice a later change of a
    // foreign file.
    if (foreign == ForeignFiles::kRead &&
        index_->files()[number].placement == Placement::kForeign) {
      return std::vector<MappedRange>();
    }
    if (!file || number != file_number) {
      TENSORMOUNT_ASSIGN_OR_RETURN(file, stored.files_->Open(stored, number));
      file_number = number;
      if (verify == ReadVerify::kOnce) once.BeginFile(number, file);
    }
    const std::uint64_t at = run.offset;
    if (verify == ReadVerify::kOnce && planned.chunks[run.chunk].has_hash &&
        !once.AreProven({at, at + run.size})) {
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
