// SPDX-License-Identifier: Apache-2.0
// ForeignBuilder of foreign.h: what adapters say is checked here, and nowhere else. Numbers against
// the file and the shape, chunks against each other (IsPartition), names against each other. What
// concerns one tensor leaves it out, with a warning or as a loss; what concerns the checkpoint ends
// the read.
//
// Adapters are parsers of hostile input and there are seven of them; so none is trusted to have
// compared a number with a file. A chunk must lie within the shape of its tensor and within the
// file, and its length must be that of its region. Whatever an adapter forgets becomes a Status
// here, not a read past an end.
//
// Finish sorts everything: tensors and objects by key, chunks by where they begin, files by name.
// Adapters list folders and maps in whatever order they like, and the same source gives the same
// inventory, and the same identity, every time.
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

// Adapters come back to a file for every tensor in it. Far below the usual limit of 1,024
// descriptors, which the program has uses for besides.
constexpr std::size_t kMaxOpenFiles = 256;
// More are counted, not kept: a lying checkpoint could have a million.
constexpr std::size_t kMaxWarnings = 100;

// What a message shows of a key.
constexpr std::size_t kShownKeyOf = 256;
// Under this name of the content metadata.
constexpr const char* kLostName = "lost";

// What comes from outside and cannot work is damage, whoever found it.
Status AsDamage(const Status& status) {
  return status.code() == Code::kInvalidArgument ? DataLoss(status.message()) : status;
}

// Dims has no order of its own: which of two shapes is less has no meaning but here.
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
  // Numbers of tensors, told apart by their keys.
  // Keys stand in the records already: the set holds numbers of tensors, so that a million keys are
  // not copied. The records may move when the vector grows, which is why the set refers to the
  // vector and not to its elements.
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

  std::map<std::string, std::uint32_t, std::less<>> files;  // By name below the root.
  std::unordered_set<std::uint32_t, ByKey, ByKey> tensors;
  // By number of tensor: left out, or not among the wanted keys. Records stay until Finish, so that
  // numbers that adapters hold stay true.
  std::vector<bool> dropped;
  std::vector<std::string> warnings;
  // By file, reason and whether it is of parts, so that the loss of one file is one line whatever
  // it held.
  std::map<std::tuple<std::string, std::string, bool>, ForeignLoss> lost_by_file;
  std::vector<ForeignLoss> lost;
  // Keys of what came after kMaxWarnings reasons: each still counts as lost, for `--partial` and
  // `load --keys` ask by key.
  ForeignLoss more_lost{.reason = "for other reasons"};
  ForeignLoss more_holes{.reason = "have cells that are stored nowhere", .holes = true};
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

// Two names may lead to one file by links; they are two numbers until SortFiles, which goes by the
// name that Locate gave. kNoFile is the largest number and means none.
Result<std::uint32_t> ForeignBuilder::AddFile(std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string below, folder_.BelowRoot(name));
  if (const auto known = rep_->files.find(below); known != rep_->files.end()) return known->second;
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, folder_.Stat(name));
  if (info.kind != FileKind::kFile) return DataLoss(folder_.Shown(name) + ": not a regular file");
  if (inventory_.files.size() >= kNoFile) return DataLoss("too many files");
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
  const Result<std::string> below = folder_.BelowRoot(name);
  if (!below.ok()) return false;
  if (rep_->files.contains(below.value())) return true;
  const std::string folder = below.value() + "/";
  const auto first = rep_->files.lower_bound(folder);
  return first != rep_->files.end() && first->first.starts_with(folder);
}

Result<std::shared_ptr<File>> ForeignBuilder::OpenFile(std::uint32_t file) {
  if (file >= inventory_.files.size()) return DataLoss("a file that is not in the table");
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
    const Status why = AsDamage(meta.status());
    return CheckKey(key).ok() ? why.WithContext("tensor " + std::string(key)) : why;
  }
  if (inventory_.tensors.size() >= std::numeric_limits<std::uint32_t>::max()) {
    return DataLoss("too many tensors");
  }
  const auto number = static_cast<std::uint32_t>(inventory_.tensors.size());
  inventory_.tensors.emplace_back(std::move(meta).value());
  // An unwanted tensor still gets a record and a number, for the adapter will add chunks to it;
  // only its key is not taken, so that the tensor of that key in another file can have it.
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

// Of a pending chunk offset and length are those of an item, which may be larger than the region;
// what lies in it is compared when it is resolved.
Status ForeignBuilder::AppendChunk(std::uint32_t tensor, ChunkRecord& chunk) {
  TensorRecord& inventory = inventory_.tensors.at(tensor);
  const TensorMeta& meta = inventory.meta;
  const auto bad = [&](const std::string& why) {
    return DataLoss("tensor " + meta.key() + " " + chunk.region.ToString() + ": " + why);
  };
  if (chunk.region.box().rank() != meta.shape().rank() || !chunk.region.Within(meta.shape())) {
    return bad("is not within " + meta.shape().ToString());
  }
  if (!chunk.pending) {
    const Result<std::uint64_t> needed =
        ChunkBytes(meta.dtype(), meta.shape(), chunk.region, chunk.strides);
    if (!needed.ok()) return bad(needed.status().message());
    if (needed.value() != chunk.length) {
      return bad(std::to_string(chunk.length) + " bytes stored, " + std::to_string(needed.value()) +
                 " needed");
    }
  }
  if (chunk.file >= inventory_.files.size()) return bad("in a file that is not in the table");
  const FileRecord& file = inventory_.files[chunk.file];
  if (!RangeWithin(chunk.offset, chunk.length, file.length)) {
    return bad("bytes " + std::to_string(chunk.offset) + " to " +
               std::to_string(chunk.offset + chunk.length) + " of " + folder_.Shown("") + ": " +
               file.name + ", which has " + std::to_string(file.length));
  }
  chunk.has_hash = false;
  // The newest file that holds a part of the tensor tells when it was last written.
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

// CheckKey and kMaxRank are the limits of the format on disk: an adopted checkpoint must be able to
// store what was found.
Status ForeignBuilder::AddObject(std::string_view key, std::uint32_t file, std::uint64_t offset,
                                 std::uint64_t length, const Dims& index, const Dims& grid) {
  TENSORMOUNT_RETURN_IF_ERROR(AsDamage(CheckKey(key)));
  const auto bad = [&](const std::string& why) {
    return DataLoss("object " + std::string(key) + " " + index.ToString() + ": " + why);
  };
  if (index.rank() != grid.rank() || grid.rank() > kMaxRank) return bad("grid and index differ");
  for (int a = 0; a < grid.rank(); ++a) {
    if (index[a] < 0 || index[a] >= grid[a]) return bad("not on its grid " + grid.ToString());
  }
  if (!CheckedProduct(grid)) return bad("its grid " + grid.ToString() + " overflows");
  if (file >= inventory_.files.size()) return bad("in a file that is not in the table");
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
    status = Status(Code::kDataLoss, "occurs twice");
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

void ForeignBuilder::Lost(ForeignLoss loss) {
  Warn(loss.ToString());
  if (rep_->lost.size() < kMaxWarnings) {
    rep_->lost.push_back(std::move(loss));
    return;
  }
  // Every key counts, though not every reason is told.
  ForeignLoss& more = loss.holes ? rep_->more_holes : rep_->more_lost;
  std::ranges::move(loss.tensors, std::back_inserter(more.tensors));
  std::ranges::move(loss.objects, std::back_inserter(more.objects));
}

// Found by key of file and reason first; where there are too many reasons the key alone is kept.
void ForeignBuilder::Lose(std::string_view file, std::string_view reason, What what,
                          std::string_view key, bool part) {
  auto& by_file = rep_->lost_by_file;
  auto at = by_file.find({std::string(file), std::string(reason), part});
  if (at == by_file.end() && by_file.size() >= kMaxWarnings) {
    if (part) return;  // The holes tell of it.
    (what == What::kTensor ? rep_->more_lost.tensors : rep_->more_lost.objects).emplace_back(key);
    return;
  }
  if (at == by_file.end()) {
    const ForeignLoss loss{.file = std::string(file), .reason = std::string(reason), .holes = part};
    at = by_file.emplace(std::tuple(loss.file, loss.reason, part), loss).first;
  }
  (what == What::kTensor ? at->second.tensors : at->second.objects).emplace_back(key);
}

void ForeignBuilder::LoseFile(std::string_view file, std::string_view reason) {
  auto& by_file = rep_->lost_by_file;
  ForeignLoss loss{.file = std::string(file), .reason = std::string(reason)};
  // A marker of its own where so many files are gone that their names are not kept.
  if (by_file.size() >= kMaxWarnings) loss = {.file = "other files", .reason = "are damaged"};
  by_file.emplace(std::tuple(loss.file, loss.reason, false), loss);
}

// Files first, each in one line.
std::vector<ForeignLoss> ForeignBuilder::TakeLost() {
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
  Lost({.reason = std::string(why), .tensors = {inventory_.tensors[tensor].meta.key()}});
}

void ForeignBuilder::LeaveOut(std::uint32_t tensor, std::string_view why) {
  if (rep_->dropped.at(tensor)) return;
  rep_->dropped[tensor] = true;
  Warn("tensor " + inventory_.tensors[tensor].meta.key().substr(0, kShownKeyOf) +
       ": left out: " + std::string(why));
}

// What is stored in no chunk, or in two.
// Sorting comes first, because the check wants chunks in the order in which they begin.
Status ForeignBuilder::CheckCover(std::uint32_t number) {
  TensorRecord& tensor = inventory_.tensors[number];
  tensor.extents.Sort();
  const TensorCheck check = rep_->completeness.Check(inventory_, tensor);
  const CoverageReport& found = check.coverage;
  switch (check.verdict) {
    case Completeness::kWhole:
      break;
    // Nobody can say which of two bytes is meant.
    case Completeness::kOverlap:
      Drop(number, check.why);
      break;
    // Kept: most of a tensor is better than nothing for whoever looks, and a read of the hole
    // fails.
    case Completeness::kHole:
      Lost({.reason = ListBoxes(found.missing, found.truncated) + " is stored nowhere (" +
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

// Without those that were dropped. In place and each moved once: tensors are large. Follows the
// permutation in cycles, each element moved once and without a second vector of records.
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

// Sorts objects and leaves those out of whose grid a part is missing or double.
// Objects that have no grid are one part of an empty index: the product of no extents is 1.
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
        why =
            "its parts are on grids " + all[i].grid.ToString() + " and " + all[end].grid.ToString();
      } else if (end > i && all[end].index == all[end - 1].index) {
        why = "part " + all[end].index.ToString() + " is stored twice";
      }
    }
    // Distinct and on the grid: as many as it has are all of them.
    const auto parts = static_cast<std::uint64_t>(*CheckedProduct(all[i].grid));
    if (why.empty() && parts != end - i) {
      why = std::to_string(end - i) + " of the " + std::to_string(parts) + " parts of its grid " +
            all[i].grid.ToString() + " are stored";
    }
    if (why.empty()) {
      std::move(all.begin() + static_cast<std::ptrdiff_t>(i),
                all.begin() + static_cast<std::ptrdiff_t>(end), std::back_inserter(kept));
    } else {
      Lost({.reason = why, .objects = {all[i].key}});
    }
    i = end;
  }
  all = std::move(kept);
}

// Files in the order of their names, everywhere.
// `map`: new number by old one. Chunks are renumbered in their packed rows (Remap), which keeps
// them packed.
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
    // Two names may lead to one file by links.
    if (sorted.empty() || sorted.back().name != inventory_.files[old].name) {
      sorted.push_back(inventory_.files[old]);
    }
    map[old] = static_cast<std::uint32_t>(sorted.size() - 1);
  }
  inventory_.files = std::move(sorted);
  for (ObjectRecord& object : inventory_.objects) object.file = map[object.file];
  constexpr std::array<std::uint32_t, 1> kManifests{0};
  for (TensorRecord& tensor : inventory_.tensors) {
    // Sorted since CheckCover, by where they begin: no two begin at one cell, whatever their files.
    TENSORMOUNT_RETURN_IF_ERROR(tensor.extents.Remap(map, kManifests));
  }
  return {};
}

// A foreign checkpoint has no uuid, but caches and inode numbers of mounts want one. It changes
// with everything that records say (sizes and mtimes of files, positions of chunks), so a source
// that was replaced is another checkpoint. Bytes are not read: a file that was rewritten with its
// old size and mtime is not noticed.
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

// The builder is empty afterwards. Losses become warnings here, in front of all others: what is
// gone matters more than what is odd.
Result<ForeignInventory> ForeignBuilder::Finish() {
  rep_->open.Clear();
  if (rep_->pending && !rep_->resolver) {
    return Status(Code::kInternal, "items to be found later, and nobody who finds them");
  }
  for (std::uint32_t i = 0; i < inventory_.tensors.size(); ++i) {
    if (!rep_->dropped[i]) TENSORMOUNT_RETURN_IF_ERROR(CheckCover(i));
  }
  SortTensors();
  CheckObjects();
  TENSORMOUNT_RETURN_IF_ERROR(SortFiles());
  SetIdentity();
  ForeignInventory out;
  out.lost = TakeLost();
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

// Tensors that were lost whole never became records, or Finish took them out; only those with holes
// are still there.
void LeaveOutLost(ForeignInventory& inventory) {
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
