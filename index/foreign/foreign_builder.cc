// SPDX-License-Identifier: Apache-2.0
// ForeignBuilder of foreign.h checks everything that adapters report: numbers against the file and
// the shape, chunks against each other, names against each other. Finish leaves out a tensor with
// overlapping chunks, and keeps a tensor with a hole. After other errors, the adapter decides
// whether it leaves out one tensor or the read fails.
//
// The checks are here and not in the adapters, because adapters parse hostile input: with a check
// forgotten in an adapter, a program could read past the end of a file.
//
// Finish sorts tensors and objects by key, chunks by position, and files by name. So a source gives
// the same inventory and UUID in any order of directory listings.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "base/errors.h"
#include "base/hash.h"
#include "index/foreign/foreign.h"
#include "index/records/common_state.h"
#include "index/records/completeness.h"
#include "index/records/lru_cache.h"
#include "index/records/record_coding.h"
#include "shard/coverage.h"

namespace tensormount {
namespace {

// Adapters may read a file again for every tensor in it, so files are kept open, at most this many.
// The usual limit for a process is 1,024 descriptors.
constexpr std::size_t kMaxOpenFiles = 256;
// Largest number of warnings before those of Finish, and of losses with their reasons. Further
// warnings are only counted, because a hostile checkpoint could cause a million.
constexpr std::size_t kMaxWarnings = 100;

// At most this many bytes of a key are shown in a message.
constexpr std::size_t kShownKeyOf = 256;
// The name of the list of losses in the content metadata.
constexpr const char* kLostName = "lost";

// Changes kInvalidArgument to kDataLoss, because here an invalid value comes from a file, not from
// a caller.
Status ToDataLoss(const Status& status) {
  return status.code() == Code::kInvalidArgument ? DataLoss(status.message()) : status;
}

// Lexicographic order of the indices of an object's parts; used only for sorting.
bool IndexLess(const Dims& a, const Dims& b) {
  return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
}

bool ObjectLess(const ObjectRecord& a, const ObjectRecord& b) {
  return a.key != b.key ? a.key < b.key : IndexLess(a.index, b.index);
}

std::string ListBoxes(const std::vector<Box>& boxes, bool more) {
  std::string text;
  for (const Box& box : boxes) text += (text.empty() ? "" : ", ") + box.ToString();
  return more ? text + " and more" : text;
}

}  // namespace

struct ForeignBuilder::Rep {
  // Hashes and compares tensors by key. A set with ByKey contains only numbers of tensors and finds
  // the keys in the vector, so that a million keys are not copied.
  struct ByKey {
    const std::vector<TensorRecord>& tensors;
    std::size_t operator()(std::uint32_t n) const {
      return std::hash<std::string_view>()(tensors[n].meta.key());
    }
    bool operator()(std::uint32_t a, std::uint32_t b) const {
      return tensors[a].meta.key() == tensors[b].meta.key();
    }
  };
  explicit Rep(const std::vector<TensorRecord>& all) : tensors(0, ByKey{all}, ByKey{all}) {}

  CompletenessCheck completeness;

  // Numbers of files by name below the root.
  std::map<std::string, std::uint32_t, std::less<>> files;
  std::unordered_set<std::uint32_t, ByKey, ByKey> tensors;
  // By tensor number: whether the tensor was left out, or is not among the wanted keys. Its record
  // stays until Finish, so that the adapters' numbers stay valid.
  std::vector<bool> dropped;
  std::vector<std::string> warnings;
  // Losses by file, by reason, and by whether only a part of each tensor is lost. All tensors that
  // lose data in one file for one reason are reported in one line.
  std::map<std::tuple<std::string, std::string, bool>, ForeignLoss> lost_by_file;
  std::vector<ForeignLoss> lost;
  // Losses after the first kMaxWarnings. Only their keys are kept, because `--partial` and `load
  // --keys` need each lost key.
  ForeignLoss more_lost{.reason = "for further reasons"};
  ForeignLoss more_holes{.reason = "have elements that are not stored", .holes = true};
  std::uint64_t more_warnings = 0;
  ItemResolver resolver;
  bool pending = false;
  LruCache<std::uint32_t, File> open{kMaxOpenFiles};
};

ForeignBuilder::ForeignBuilder(const ForeignFolder& folder, std::string producer)
    : folder_(folder), rep_(std::make_unique<Rep>(inventory_.tensors)) {
  inventory_.info.producer = std::move(producer);
  inventory_.info.world_size = 1;
  inventory_.info.self_contained = false;
  inventory_.info.root = folder.root();
}

ForeignBuilder::~ForeignBuilder() = default;

// Links may give one file two names, and so two numbers; SortFiles merges the two by the path from
// Locate. kNoFile, the largest number, is reserved.
Result<std::uint32_t> ForeignBuilder::AddFile(std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string below, folder_.PathFromRoot(name));
  if (const auto known = rep_->files.find(below); known != rep_->files.end()) return known->second;
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, folder_.Stat(name));
  if (info.kind != FileKind::kFile) return DataLoss(folder_.Shown(name) + ": not a regular file");
  if (inventory_.files.size() >= kNoFile) return DataLoss("the checkpoint has too many files");
  const auto number = static_cast<std::uint32_t>(inventory_.files.size());
  FileRecord record;
  TENSORMOUNT_ASSIGN_OR_RETURN(record.name, folder_.Locate(name));
  record.placement = Placement::kForeign;
  record.length = info.size;
  record.mtime_seconds = info.mtime_seconds;
  record.mtime_nanoseconds = info.mtime_nanoseconds;
  inventory_.files.push_back(std::move(record));
  rep_->files.emplace(std::move(below), number);
  return number;
}

std::uint64_t ForeignBuilder::FileLength(std::uint32_t file) const {
  return file < inventory_.files.size() ? inventory_.files[file].length : 0;
}

std::int64_t ForeignBuilder::FileTime(std::uint32_t file) const {
  return file < inventory_.files.size() ? inventory_.files[file].mtime_seconds : 0;
}

bool ForeignBuilder::Uses(std::string_view name) const {
  const Result<std::string> below = folder_.PathFromRoot(name);
  if (!below.ok()) return false;
  if (rep_->files.contains(below.value())) return true;
  const std::string folder = below.value() + "/";
  const auto first = rep_->files.lower_bound(folder);
  return first != rep_->files.end() && first->first.starts_with(folder);
}

Result<std::shared_ptr<File>> ForeignBuilder::OpenFile(std::uint32_t file) {
  if (file >= inventory_.files.size())
    return DataLoss("file number " + std::to_string(file) + " is not in the file table");
  if (std::shared_ptr<File> known = rep_->open.Get(file)) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> opened,
                               folder_.OpenLocated(inventory_.files[file].name));
  return rep_->open.Put(file, std::move(opened), 1);
}

void ForeignBuilder::ReserveTensors(std::size_t n) {
  inventory_.tensors.reserve(n);
  rep_->tensors.reserve(n);
}

Result<std::uint32_t> ForeignBuilder::AddTensor(std::string_view key, DType dtype,
                                                const Dims& shape) {
  Result<TensorMeta> meta = TensorMeta::Make(std::string(key), dtype, shape);
  if (!meta.ok()) {
    const Status why = ToDataLoss(meta.status());
    return CheckKey(key).ok() ? why.WithContext("tensor " + std::string(key)) : why;
  }
  if (inventory_.tensors.size() >= std::numeric_limits<std::uint32_t>::max()) {
    return DataLoss("the checkpoint has too many tensors");
  }
  const auto number = static_cast<std::uint32_t>(inventory_.tensors.size());
  inventory_.tensors.emplace_back(std::move(meta).value());
  // An unwanted tensor also gets a record and a number, because the adapter will add chunks to the
  // number. Its key is not taken, so that a tensor with this key in another file can be added.
  const bool wanted = only_ == nullptr || only_->contains(std::string(key));
  if (wanted && !rep_->tensors.insert(number).second) {
    inventory_.tensors.pop_back();
    return DataLoss("tensor " + std::string(key) + ": occurs twice");
  }
  rep_->dropped.push_back(!wanted);
  return number;
}

const TensorMeta& ForeignBuilder::MetaOf(std::uint32_t tensor) const {
  return inventory_.tensors.at(tensor).meta;
}

// Checks a chunk and adds it. Offset and length of a pending chunk are those of its item, which may
// have more bytes than the region. The length of an item is checked when the resolver locates the
// bytes.
Status ForeignBuilder::AppendChunk(std::uint32_t tensor, ChunkRecord& chunk) {
  TensorRecord& inventory = inventory_.tensors.at(tensor);
  const TensorMeta& meta = inventory.meta;
  const auto bad = [&](const std::string& why) {
    return DataLoss("tensor " + meta.key() + " " + chunk.region.ToString() + ": " + why);
  };
  if (chunk.region.box().rank() != meta.shape().rank() || !chunk.region.Within(meta.shape())) {
    return bad("the chunk is not within the tensor's shape " + meta.shape().ToString());
  }
  if (!chunk.pending) {
    const Result<std::uint64_t> needed =
        ChunkBytes(meta.dtype(), meta.shape(), chunk.region, chunk.strides);
    if (!needed.ok()) return bad(needed.status().message());
    if (needed.value() != chunk.length) {
      return bad(std::to_string(chunk.length) + " bytes are stored, " +
                 std::to_string(needed.value()) + " are needed");
    }
  }
  if (chunk.file >= inventory_.files.size()) return bad("the file is not in the file table");
  const FileRecord& file = inventory_.files[chunk.file];
  if (!RangeWithin(chunk.offset, chunk.length, file.length)) {
    return bad("bytes " + std::to_string(chunk.offset) + " to " +
               std::to_string(chunk.offset + chunk.length) + " reach past the end of " +
               folder_.Shown("") + ": " + file.name + " (" + std::to_string(file.length) +
               " bytes)");
  }
  chunk.has_hash = false;
  // The mtime of a tensor is that of its newest file.
  inventory.mtime = std::max(inventory.mtime, file.mtime_seconds);
  inventory.extents.Append(chunk);
  return {};
}

Status ForeignBuilder::AddChunk(std::uint32_t tensor, const Region& region, std::uint32_t file,
                                std::uint64_t offset, std::uint64_t length, const Dims& strides) {
  if (region.empty()) return {};
  ChunkRecord chunk;
  chunk.region = region;
  chunk.file = file;
  chunk.offset = offset;
  chunk.length = length;
  chunk.strides = strides;
  return AppendChunk(tensor, chunk);
}

Status ForeignBuilder::AddPendingChunk(std::uint32_t tensor, const Region& region,
                                       std::uint32_t file, std::uint64_t offset,
                                       std::uint64_t length) {
  if (region.empty()) return {};
  ChunkRecord chunk;
  chunk.region = region;
  chunk.file = file;
  chunk.offset = offset;
  chunk.length = length;
  chunk.pending = true;
  rep_->pending = true;
  return AppendChunk(tensor, chunk);
}

void ForeignBuilder::SetResolver(ItemResolver resolver) { rep_->resolver = std::move(resolver); }

// Keys and numbers of axes must be within the limits of our own format (CheckKey, kMaxRank), so
// that every foreign checkpoint can be adopted.
Status ForeignBuilder::AddObject(std::string_view key, std::uint32_t file, std::uint64_t offset,
                                 std::uint64_t length, const Dims& index, const Dims& grid) {
  TENSORMOUNT_RETURN_IF_ERROR(ToDataLoss(CheckKey(key)));
  const auto bad = [&](const std::string& why) {
    return DataLoss("object " + std::string(key) + " " + index.ToString() + ": " + why);
  };
  if (index.rank() != grid.rank() || grid.rank() > kMaxRank)
    return bad("the index of the part has another number of axes than the grid");
  for (int a = 0; a < grid.rank(); ++a) {
    if (index[a] < 0 || index[a] >= grid[a])
      return bad("the index of the part is outside of the grid " + grid.ToString());
  }
  if (!CheckedProduct(grid)) return bad("the grid " + grid.ToString() + " overflows");
  if (file >= inventory_.files.size()) return bad("the file is not in the file table");
  const FileRecord& record = inventory_.files[file];
  if (!RangeWithin(offset, length, record.length)) {
    return bad("reaches past the end of " + record.name);
  }
  ObjectRecord object;
  object.key = key;
  object.index = index;
  object.grid = grid;
  object.file = file;
  object.offset = offset;
  object.length = length;
  object.manifest = kNoManifest;
  object.mtime = record.mtime_seconds;
  inventory_.objects.push_back(std::move(object));
  return {};
}

void ForeignBuilder::AddCommon(const std::string& name, CommonValue value) {
  Status status = CheckCommonName(name);
  if (status.ok()) status = CheckCommon(value);
  if (status.ok() && !inventory_.common.emplace(name, std::move(value)).second) {
    status = Status(Code::kDataLoss, "a value of this name occurs twice");
  }
  if (!status.ok()) {
    Warn("common value " + name.substr(0, 256) + ": left out: " + status.message());
  }
}

void ForeignBuilder::Warn(std::string warning) {
  if (rep_->warnings.size() < kMaxWarnings) {
    rep_->warnings.push_back(std::move(warning));
  } else {
    ++rep_->more_warnings;
  }
}

void ForeignBuilder::AddLoss(ForeignLoss loss) {
  Warn(loss.ToString());
  if (rep_->lost.size() < kMaxWarnings) {
    rep_->lost.push_back(std::move(loss));
    return;
  }
  // After the first kMaxWarnings losses only the keys are kept, without the reason.
  ForeignLoss& more = loss.holes ? rep_->more_holes : rep_->more_lost;
  std::ranges::move(loss.tensors, std::back_inserter(more.tensors));
  std::ranges::move(loss.objects, std::back_inserter(more.objects));
}

// Adds the key to the loss with the same file, reason and `part`. After the first kMaxWarnings
// losses, only keys are kept.
void ForeignBuilder::ReportLost(std::string_view file, std::string_view reason, LostKind what,
                                std::string_view key, bool part) {
  auto& by_file = rep_->lost_by_file;
  auto at = by_file.find({std::string(file), std::string(reason), part});
  if (at == by_file.end() && by_file.size() >= kMaxWarnings) {
    if (part) return;  // CheckCover reports the hole.
    (what == LostKind::kTensor ? rep_->more_lost.tensors : rep_->more_lost.objects)
        .emplace_back(key);
    return;
  }
  if (at == by_file.end()) {
    const ForeignLoss loss{.file = std::string(file), .reason = std::string(reason), .holes = part};
    at = by_file.emplace(std::tuple(loss.file, loss.reason, part), loss).first;
  }
  (what == LostKind::kTensor ? at->second.tensors : at->second.objects).emplace_back(key);
}

void ForeignBuilder::ReportLostFile(std::string_view file, std::string_view reason) {
  auto& by_file = rep_->lost_by_file;
  ForeignLoss loss{.file = std::string(file), .reason = std::string(reason)};
  // Files after the first kMaxWarnings share one entry.
  if (by_file.size() >= kMaxWarnings)
    loss = {.file = "other files", .reason = "missing or damaged"};
  by_file.emplace(std::tuple(loss.file, loss.reason, false), loss);
}

// Returns all losses. Those of ReportLost and ReportLostFile come first, and their warnings come
// before all other warnings.
std::vector<ForeignLoss> ForeignBuilder::TakeLosses() {
  std::vector<ForeignLoss> all;
  std::vector<std::string> warnings;
  const auto add = [&](ForeignLoss& loss) {
    warnings.push_back(loss.ToString());
    all.push_back(std::move(loss));
  };
  for (auto& [reason, loss] : rep_->lost_by_file) add(loss);
  if (!rep_->more_lost.tensors.empty() || !rep_->more_lost.objects.empty()) add(rep_->more_lost);
  std::ranges::move(rep_->warnings, std::back_inserter(warnings));
  rep_->warnings = std::move(warnings);
  std::ranges::move(rep_->lost, std::back_inserter(all));
  if (!rep_->more_holes.tensors.empty()) all.push_back(std::move(rep_->more_holes));
  return all;
}

void ForeignBuilder::Drop(std::uint32_t tensor, std::string_view why) {
  if (rep_->dropped.at(tensor)) return;
  rep_->dropped[tensor] = true;
  AddLoss({.reason = std::string(why), .tensors = {inventory_.tensors[tensor].meta.key()}});
}

void ForeignBuilder::LeaveOut(std::uint32_t tensor, std::string_view why) {
  if (rep_->dropped.at(tensor)) return;
  rep_->dropped[tensor] = true;
  Warn("tensor " + inventory_.tensors[tensor].meta.key().substr(0, kShownKeyOf) +
       ": left out: " + std::string(why));
}

// Finds elements of a tensor that are in no chunk, or in several. Sorts the chunks, which the check
// requires.
Status ForeignBuilder::CheckCover(std::uint32_t number) {
  TensorRecord& tensor = inventory_.tensors[number];
  tensor.extents.Sort();
  const TensorCheck check = rep_->completeness.Check(inventory_, tensor);
  const CoverageReport& found = check.coverage;
  switch (check.verdict) {
    case Completeness::kWhole:
      break;
    // If an element is stored twice, neither value can be trusted.
    case Completeness::kOverlap:
      Drop(number, check.why);
      break;
    // A tensor with a hole is kept, because its other parts can be read; reading the hole fails.
    case Completeness::kHole:
      AddLoss({.reason = ListBoxes(found.missing, found.truncated) + " is not stored (" +
                         std::to_string(found.missing_elements) + " of " +
                         std::to_string(tensor.meta.elements()) + " elements): reading it fails",
               .tensors = {tensor.meta.key()},
               .holes = true});
      break;
    case Completeness::kBad:
      return DataLoss("tensor " + tensor.meta.key() + ": " + check.why);
  }
  return {};
}

// Removes the dropped tensors and sorts the others in place. Follows the cycles of the permutation,
// so that each record, which is large, is moved once.
void ForeignBuilder::SortTensors() {
  std::vector<TensorRecord>& all = inventory_.tensors;
  rep_->tensors.clear();
  std::vector<std::uint32_t> order(all.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto dropped = std::stable_partition(order.begin(), order.end(),
                                             [&](std::uint32_t i) { return !rep_->dropped[i]; });
  const auto kept = static_cast<std::size_t>(dropped - order.begin());
  std::sort(order.begin(), dropped, [&](std::uint32_t a, std::uint32_t b) {
    return all[a].meta.key() < all[b].meta.key();
  });
  for (std::uint32_t first = 0; first < order.size(); ++first) {
    if (order[first] == first) continue;
    TensorRecord held = std::move(all[first]);
    std::uint32_t to = first;
    while (order[to] != first) {
      const std::uint32_t from = order[to];
      all[to] = std::move(all[from]);
      order[to] = to;
      to = from;
    }
    all[to] = std::move(held);
    order[to] = to;
  }
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(kept), all.end());
}

// Sorts objects and leaves out those whose grid has missing or duplicate parts. An object that is
// not divided has one part with an empty index and an empty grid, whose product is 1.
void ForeignBuilder::CheckObjects() {
  std::vector<ObjectRecord>& all = inventory_.objects;
  std::sort(all.begin(), all.end(), ObjectLess);
  std::vector<ObjectRecord> kept;
  kept.reserve(all.size());
  for (std::size_t i = 0; i < all.size();) {
    std::size_t end = i;
    std::string why;
    for (; end < all.size() && all[end].key == all[i].key; ++end) {
      if (!(all[end].grid == all[i].grid)) {
        why = "the parts have different grids, " + all[i].grid.ToString() + " and " +
              all[end].grid.ToString();
      } else if (end > i && all[end].index == all[end - 1].index) {
        why = "part " + all[end].index.ToString() + " is stored twice";
      }
    }
    // All parts have different indices on the grid, so none is missing if their number is right.
    const auto parts = static_cast<std::uint64_t>(*CheckedProduct(all[i].grid));
    if (why.empty() && parts != end - i) {
      why = "only " + std::to_string(end - i) + " of the " + std::to_string(parts) +
            " parts of its grid " + all[i].grid.ToString() + " are stored";
    }
    if (why.empty()) {
      std::move(all.begin() + static_cast<std::ptrdiff_t>(i),
                all.begin() + static_cast<std::ptrdiff_t>(end), std::back_inserter(kept));
    } else {
      AddLoss({.reason = why, .objects = {all[i].key}});
    }
    i = end;
  }
  all = std::move(kept);
}

// Sorts files by name, merges equal names, and renumbers the files in all records. map[n] is the
// new number of file n.
Status ForeignBuilder::SortFiles() {
  std::vector<std::uint32_t> order(inventory_.files.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return inventory_.files[a].name < inventory_.files[b].name;
  });
  std::vector<std::uint32_t> map(order.size());
  std::vector<FileRecord> sorted;
  sorted.reserve(order.size());
  for (const std::uint32_t old : order) {
    if (sorted.empty() || sorted.back().name != inventory_.files[old].name) {
      sorted.push_back(inventory_.files[old]);
    }
    map[old] = static_cast<std::uint32_t>(sorted.size() - 1);
  }
  inventory_.files = std::move(sorted);
  for (ObjectRecord& object : inventory_.objects) object.file = map[object.file];
  constexpr std::array<std::uint32_t, 1> kManifests{0};
  for (TensorRecord& tensor : inventory_.tensors) {
    // CheckCover has sorted the chunks by position. Chunks do not overlap, so new file numbers do
    // not change the order.
    TENSORMOUNT_RETURN_IF_ERROR(tensor.extents.Remap(map, kManifests));
  }
  return {};
}

// Computes a UUID from all records (sizes and mtimes of files, positions of chunks), so that caches
// and mounts treat a source that was replaced as another checkpoint. Data are not read, so a file
// that was rewritten with its old size and mtime is not noticed.
void ForeignBuilder::SetIdentity() {
  Xxh3Stream stream;
  ByteWriter head;
  head.String(folder_.path());
  head.String(inventory_.info.root);
  head.String(inventory_.info.producer);
  std::int64_t newest = 0;
  for (const FileRecord& file : inventory_.files) {
    head.String(file.name);
    head.U64(file.length);
    head.I64(file.mtime_seconds);
    head.I64(file.mtime_nanoseconds);
    newest = std::max(newest, file.mtime_seconds);
  }
  for (const auto& [name, value] : inventory_.common) {
    head.String(name);
    EncodeCommon(head, value);
  }
  stream.Update(head.bytes().data(), head.bytes().size());
  for (TensorRecord& tensor : inventory_.tensors) {
    if (tensor.extents.size() == 0) tensor.mtime = newest;
    ByteWriter out;
    out.String(tensor.meta.key());
    out.U8(static_cast<std::uint8_t>(tensor.meta.dtype()));
    out.U8(static_cast<std::uint8_t>(tensor.meta.shape().rank()));
    for (const std::int64_t extent : tensor.meta.shape()) out.I64(extent);
    out.U64(tensor.extents.size());
    stream.Update(out.bytes().data(), out.bytes().size());
    const std::string_view rows = tensor.extents.packed();
    stream.Update(rows.data(), rows.size());
  }
  for (const ObjectRecord& object : inventory_.objects) {
    ByteWriter out;
    out.String(object.key);
    for (const std::int64_t i : object.index) out.I64(i);
    out.U32(object.file);
    out.U64(object.offset);
    out.U64(object.length);
    stream.Update(out.bytes().data(), out.bytes().size());
  }
  const Hash128 hash = stream.Value();
  inventory_.info.uuid = {hash.high, hash.low};
  inventory_.info.created = inventory_.info.json_mtime = inventory_.info.common_mtime = newest;
}

Result<ForeignInventory> ForeignBuilder::Finish() {
  rep_->open.Clear();
  if (rep_->pending && !rep_->resolver) {
    return Status(Code::kInternal,
                  "internal error: items were added without file positions, and no function that "
                  "finds these");
  }
  for (std::uint32_t i = 0; i < inventory_.tensors.size(); ++i) {
    if (!rep_->dropped[i]) TENSORMOUNT_RETURN_IF_ERROR(CheckCover(i));
  }
  SortTensors();
  CheckObjects();
  TENSORMOUNT_RETURN_IF_ERROR(SortFiles());
  SetIdentity();
  ForeignInventory out;
  out.lost = TakeLosses();
  if (rep_->more_warnings > 0) {
    rep_->warnings.push_back("and " + std::to_string(rep_->more_warnings) + " more warnings");
  }
  out.inventory = std::move(inventory_);
  out.resolver = std::move(rep_->resolver);
  out.warnings = std::move(rep_->warnings);
  out.beside = std::move(beside_);
  if (folder_.bounds().size() > 1) out.bounds = folder_.bounds();
  return out;
}

// Tensors that were left out have no record. A tensor without any chunk has one, and counts as a
// tensor with a hole.
void RemoveIncompleteTensors(ForeignInventory& inventory) {
  if (inventory.lost.empty()) return;
  std::unordered_set<std::string_view> holed;
  CommonList told;
  for (const ForeignLoss& loss : inventory.lost) {
    told.items.emplace_back(loss.ToString());
    if (loss.holes) holed.insert(loss.tensors.begin(), loss.tensors.end());
  }
  std::erase_if(inventory.inventory.tensors,
                [&](const TensorRecord& tensor) { return holed.contains(tensor.meta.key()); });
  CommonDict marks;
  marks.items.emplace(std::string(kLostName), std::move(told));
  inventory.inventory.common.insert_or_assign(std::string(kContentMetadataRecord),
                                              std::move(marks));
}

}  // namespace tensormount
