// SPDX-License-Identifier: Apache-2.0
// Reads of mapped tensors, for index/read/checkpoint.h. A read of boxes of a mapped tensor becomes,
// for each term and stored tensor that they meet, boxes over the term's names. The places of the
// stored chunks are folded to the same names, and a CopyPlan copies from one to the other. All that
// follows (hashes, read-ahead, checks for changes) sees only chunks and strided copies, as for
// stored tensors.
#include <algorithm>
#include <utility>

#include "index/read/file_cache.h"
#include "index/read/foreign_file.h"
#include "index/read/planned_read.h"
#include "index/read/proven_ranges.h"
#include "index/read/saved_paths.h"
#include "index/records/name_binding.h"
#include "shard/box_access.h"

namespace tensormount {
namespace {

// The bounding box of placed boxes.
Box BoundingBox(std::span<const PlacedBox> boxes) {
  Dims begin = boxes[0].box.begin();
  Dims end = Dims::Filled(begin.rank(), 0);
  for (const PlacedBox& placed : boxes) {
    for (int a = 0; a < begin.rank(); ++a) {
      begin[a] = std::min(begin[a], placed.box.begin(a));
      end[a] = std::max(end[a], placed.box.end(a));
    }
  }
  for (int a = 0; a < begin.rank(); ++a) end[a] -= begin[a];
  return BoxAccess::Make(begin, end);
}

// The parts of `boxes` in `limits`.
std::vector<PlacedBox> PartsWithin(std::span<const PlacedBox> boxes, const Box& limits) {
  std::vector<PlacedBox> parts;
  for (const PlacedBox& placed : boxes) {
    const Box part = Intersect(placed.box, limits);
    if (!part.empty()) parts.push_back(PartOfPlaced(placed, part));
  }
  return parts;
}

// Calls fn(indices, position) for each combination of indices of a source's key that lies in
// `hull`, a box over names. `in_key`: the names in the key. Stops at the first error.
template <typename Fn>
Status ForEachStored(const MappedTensor::Source& source, std::span<const int> in_key,
                     const Box& hull, Fn fn) {
  std::vector<std::int64_t> indices;
  for (const int name : in_key) indices.push_back(hull.begin(name));
  for (;;) {
    std::size_t at = 0;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      at = at * static_cast<std::size_t>(source.sizes[static_cast<int>(i)]) +
           static_cast<std::size_t>(indices[i]);
    }
    TENSORMOUNT_RETURN_IF_ERROR(fn(indices, source.ordinals[at]));
    std::size_t i = indices.size();
    for (; i > 0; --i) {
      if (++indices[i - 1] < hull.end(in_key[i - 1])) break;
      indices[i - 1] = hull.begin(in_key[i - 1]);
    }
    if (i == 0) return Status();
  }
}

// Losses under the names that the map shows. What the map drops is no loss. The names that a lost
// tensor would have got by a rule with axes are not known without its shape; such a loss counts for
// every key.
std::vector<ForeignLoss> ShownLosses(const std::vector<ForeignLoss>& losses,
                                     const NameRules& rules) {
  std::vector<ForeignLoss> shown;
  for (const ForeignLoss& loss : losses) {
    ForeignLoss mapped = loss;
    mapped.tensors.clear();
    mapped.objects.clear();
    std::string split;
    for (const std::string& key : loss.tensors) {
      if (rules.Splits(key)) {
        split = key;
        continue;
      }
      std::string name = rules.NameOf(key);
      if (!name.empty()) mapped.tensors.push_back(std::move(name));
    }
    for (const std::string& key : loss.objects) {
      std::string name = rules.NameOf(key);
      if (!name.empty()) mapped.objects.push_back(std::move(name));
    }
    if (!split.empty()) {
      mapped.tensors.clear();
      mapped.objects.clear();
      mapped.reason += " (" + loss.Summary() + ", of which a rule uses tensor " + split + ")";
    }
    const bool unknown = loss.tensors.empty() && loss.objects.empty();
    if (unknown || !split.empty() || !mapped.tensors.empty() || !mapped.objects.empty()) {
      shown.push_back(std::move(mapped));
    }
  }
  return shown;
}

// Fails if `outer`, a name map over that of `inner`, needs cells that `inner` fills with zeros:
// they are in no chunk.
Status CheckNoZeros(const NameBinding& inner, const NameBinding& outer) {
  std::vector<bool> seen(outer.applications());  // All tensors of one have the same sources.
  for (std::uint32_t t = 0; t < outer.size(); ++t) {
    if (outer.WholeSource(t) || seen[outer.ApplicationOf(t)]) continue;
    seen[outer.ApplicationOf(t)] = true;
    for (const MappedTensor::Source& source : outer.At(t).sources) {
      for (const std::uint32_t ordinal : source.ordinals) {
        if (inner.WholeSource(ordinal)) continue;
        const auto terms = inner.At(ordinal).terms;
        if (std::ranges::all_of(terms, [](const CellTerm& term) { return term.from.has_value(); }))
          continue;
        return Status(Code::kUnsupported,
                      "name map: tensor " + outer.key(t) + " would be made of " +
                          inner.key(ordinal) +
                          ", which another name map fills with zeros in part: import the "
                          "checkpoint under the first names");
      }
    }
  }
  return Status();
}

}  // namespace

Result<std::shared_ptr<OpenedCheckpoint>> OpenedCheckpoint::Mapped(
    std::shared_ptr<const OpenedCheckpoint> source, const NameRules& rules) {
  std::shared_ptr<OpenedCheckpoint> opened(new OpenedCheckpoint);
  std::vector<std::string> lost;
  for (const ForeignLoss& loss : source->lost_) {
    lost.insert(lost.end(), loss.tensors.begin(), loss.tensors.end());
  }
  Result<std::shared_ptr<const NameBinding>> binding =
      NameBinding::Bind(*source->index_, rules, lost);
  if (binding.status().code() == Code::kNotFound) {
    // The checkpoint exists, so a caller must not take the error for its absence. A tensor that a
    // rule needs may be lost, which is another error than a wrong rule.
    const std::string& why = binding.status().message();
    if (source->lost_.empty()) return Status(Code::kInvalidArgument, why);
    return Status(Code::kDataLoss,
                  why + "; data of the checkpoint are lost: " + source->lost_.front().ToString());
  }
  TENSORMOUNT_RETURN_IF_ERROR(binding.status());
  if (source->binding_) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckNoZeros(*source->binding_, *binding.value()));
  }
  opened->binding_ = std::move(binding).value();
  TENSORMOUNT_ASSIGN_OR_RETURN(
      opened->index_,
      CheckpointIndex::Mapped(source->index_, opened->binding_, SavedPaths::IsInternal));
  opened->fs_ = source->fs_;
  opened->directory_ = source->directory_;
  opened->pinned_ = source->pinned_;
  opened->is_file_ = source->is_file_;
  opened->commit_ = source->commit_;
  opened->has_commit_ = source->has_commit_;
  opened->index_rebuilt_ = source->index_rebuilt_;
  opened->warnings_ = source->warnings_;
  opened->lost_ = ShownLosses(source->lost_, opened->binding_->rules());
  opened->beside_ = source->beside_;
  opened->proven_ = source->proven_;
  opened->source_ = std::move(source);
  return opened;
}

Result<TensorEntry> OpenedCheckpoint::WholeSourceOf(const TensorEntry& tensor) const {
  const std::optional<std::uint32_t> whole = binding_->WholeSource(tensor.ordinal);
  if (!whole) {
    return Status(Code::kNotFound, "tensor " + tensor.meta.key() +
                                       ": it is put together from parts of other tensors");
  }
  return source_->index_->At(*whole);
}

Result<bool> OpenedCheckpoint::HasHashes(const TensorEntry& tensor) const {
  if (binding_) {
    const std::optional<std::uint32_t> whole = binding_->WholeSource(tensor.ordinal);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const TensorEntry stored,
        source_->index_->At(whole ? *whole : binding_->FirstSource(tensor.ordinal)));
    return source_->HasHashes(stored);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> table, Extents(tensor));
  if (table->size() == 0) return false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, table->At(0));
  return chunk.has_hash;
}

Result<std::string> OpenedCheckpoint::StoredKeyOf(std::uint32_t ordinal) const {
  if (binding_) {
    const std::optional<std::uint32_t> whole = binding_->WholeSource(ordinal);
    return whole ? source_->StoredKeyOf(*whole) : std::string();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, index_->At(ordinal));
  return entry.meta.key();
}

Result<std::vector<std::string>> OpenedCheckpoint::StoredKeysOf(std::uint32_t ordinal,
                                                                std::size_t most) const {
  if (!binding_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string own, StoredKeyOf(ordinal));
    return std::vector<std::string>{std::move(own)};
  }
  if (const auto whole = binding_->WholeSource(ordinal)) {
    return source_->StoredKeysOf(*whole, most);
  }
  std::vector<std::string> keys;
  const MappedTensor mapped = binding_->At(ordinal);
  std::vector<bool> used(mapped.sources.size());
  for (const CellTerm& term : mapped.terms) {
    if (term.from) used[term.source] = true;
  }
  for (std::size_t s = 0; s < used.size(); ++s) {
    if (!used[s]) continue;
    for (const std::uint32_t stored : mapped.sources[s].ordinals) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> more,
                                   source_->StoredKeysOf(stored, most));
      for (const std::string& key : more) {
        if (keys.size() == most) return keys;
        // Tensors of a name map below this one may be made of the same stored ones.
        if (std::ranges::find(keys, key) == keys.end()) keys.push_back(key);
      }
    }
  }
  return keys;
}

std::string OpenedCheckpoint::StoredObjectKey(const std::string& key) const {
  if (!binding_) return key;
  const auto stored = binding_->objects().find(key);
  return source_->StoredObjectKey(stored == binding_->objects().end() ? key : stored->second);
}

std::string OpenedCheckpoint::ShownNameOf(std::string stored_key) const {
  if (!binding_) return stored_key;
  std::string name = source_->ShownNameOf(std::move(stored_key));
  return name.empty() ? name : binding_->rules().NameOf(name);
}

// A tensor that a rule with axes uses has no name of its own. It counts as shown.
bool OpenedCheckpoint::LeavesOut(const std::string& stored_key) const {
  if (!binding_) return false;
  const std::string name = source_->ShownNameOf(stored_key);
  if (name.empty()) return source_->LeavesOut(stored_key);
  return !binding_->rules().Splits(name) && binding_->rules().NameOf(name).empty();
}

// Makes the lookups of all stored tensors. A stack of many tensors makes more than the cache keeps;
// the reads then make them again.
Status OpenedCheckpoint::PrepareMapped(const TensorEntry& tensor) const {
  if (binding_->WholeSource(tensor.ordinal)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry stored, WholeSourceOf(tensor));
    return source_->Prepare(stored);
  }
  for (const MappedTensor::Source& source : binding_->At(tensor.ordinal).sources) {
    for (const std::uint32_t ordinal : source.ordinals) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry stored, source_->index_->At(ordinal));
      TENSORMOUNT_RETURN_IF_ERROR(source_->Prepare(stored));
    }
  }
  return Status();
}

template <typename Fn>
Status OpenedCheckpoint::AddStored(const MappedTensor& mapped, const CellTerm& term,
                                   std::span<const PlacedBox> wanted, PlannedRead& planned,
                                   Fn fn) const {
  const int names = term.extents.rank();
  const Box hull = BoundingBox(wanted);
  const auto add = [&](std::span<const std::int64_t> indices, std::uint32_t ordinal) -> Status {
    Box limits = hull;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      limits = BoxAccess::WithAxis(limits, term.from->in_key[i], indices[i], 1);
    }
    const std::vector<PlacedBox> here = PartsWithin(wanted, limits);
    if (here.empty()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, source_->index_->At(ordinal));
    const TensorEntry& stored = planned.mapped.emplace_back(std::move(entry));
    const PlacedBox need{term.from->Unfold(BoundingBox(here)), 0, Dims()};
    const Dims byte_shape = ByteShape(stored.meta.dtype(), stored.meta.shape());
    const auto first = static_cast<std::uint32_t>(planned.chunks.size());
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::vector<std::vector<PlacedBox>> placed,
        source_->AddChunks(stored, HullOf(std::span(&need, 1), byte_shape), planned));
    std::vector<std::vector<PlacedBox>> folded(placed.size());
    for (std::size_t c = 0; c < placed.size(); ++c) {
      for (const PlacedBox& box : placed[c]) term.from->Fold(box, indices, names, folded[c]);
    }
    return fn(stored, here, first, folded);
  };
  return ForEachStored(mapped.sources[term.source], term.from->in_key, hull, add);
}

// For a name map over this one: the chunks' places in a mapped tensor of this one.
Result<std::vector<std::vector<PlacedBox>>> OpenedCheckpoint::AddMappedChunks(
    const TensorEntry& tensor, const ByteHull& hull, PlannedRead& planned) const {
  if (binding_->WholeSource(tensor.ordinal)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, WholeSourceOf(tensor));
    const TensorEntry& stored = planned.mapped.emplace_back(std::move(entry));
    return source_->AddChunks(stored, hull, planned);
  }
  std::vector<std::vector<PlacedBox>> placed;
  PlacedBox want;
  Dims extent = hull.end;
  for (int a = 0; a < extent.rank(); ++a) extent[a] -= hull.begin[a];
  want.box = BoxAccess::Make(hull.begin, extent);
  want.strides = Dims::Filled(extent.rank(), 0);
  const MappedTensor mapped = binding_->At(tensor.ordinal);
  for (const CellTerm& term : mapped.terms) {
    std::vector<PlacedBox> wanted;
    term.to.Fold(want, mapped.key.span(), term.extents.rank(), wanted);
    if (wanted.empty() || !term.from) continue;  // CheckNoZeros: every term has a source.
    const auto place = [&](const TensorEntry&, const std::vector<PlacedBox>& here, std::uint32_t,
                           const std::vector<std::vector<PlacedBox>>& folded) -> Status {
      for (const std::vector<PlacedBox>& boxes : folded) {
        std::vector<PlacedBox>& chunk = placed.emplace_back();
        for (const PlacedBox& box : boxes) {
          for (const PlacedBox& part : here) {
            const Box both = Intersect(box.box, part.box);
            if (both.empty()) continue;
            TENSORMOUNT_RETURN_IF_ERROR(term.to.Place(PartOfPlaced(box, both), chunk));
          }
        }
      }
      return Status();
    };
    TENSORMOUNT_RETURN_IF_ERROR(AddStored(mapped, term, wanted, planned, place));
  }
  return placed;
}

Result<OpenedCheckpoint::PlannedRead> OpenedCheckpoint::PlanMapped(
    const TensorEntry& tensor, std::span<const PlacedBox> want) const {
  if (binding_->WholeSource(tensor.ordinal)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry stored, WholeSourceOf(tensor));
    TENSORMOUNT_ASSIGN_OR_RETURN(PlannedRead planned, source_->PlanRead(stored, want));
    const TensorMeta* const moved = &stored.meta;
    planned.mapped.push_back(std::move(stored));
    std::ranges::replace(planned.stored, moved,
                         static_cast<const TensorMeta*>(&planned.mapped.back().meta));
    return planned;
  }
  PlannedRead planned;
  planned.in_names = true;
  const MappedTensor mapped = binding_->At(tensor.ordinal);
  for (const CellTerm& term : mapped.terms) {
    const int names = term.extents.rank();
    std::vector<PlacedBox> wanted;
    for (const PlacedBox& placed : want) term.to.Fold(placed, mapped.key.span(), names, wanted);
    if (wanted.empty()) continue;
    if (!term.from) {
      planned.zeros.insert(planned.zeros.end(), wanted.begin(), wanted.end());
      continue;
    }
    const auto copy = [&](const TensorEntry& stored, const std::vector<PlacedBox>& here,
                          std::uint32_t first,
                          const std::vector<std::vector<PlacedBox>>& folded) -> Status {
      Result<CopyPlan> plan = CopyPlan::Make(here, folded);
      if (!plan.ok()) {
        return plan.status().WithContext("tensor " + tensor.meta.key() + ", from tensor " +
                                         stored.meta.key());
      }
      planned.bytes += plan.value().bytes();
      std::vector<CopyPlan::Part> parts = std::move(plan).value().TakeParts();
      for (CopyPlan::Part& part : parts) {
        part.chunk += first;
        planned.parts.push_back(std::move(part));
      }
      return Status();
    };
    TENSORMOUNT_RETURN_IF_ERROR(AddStored(mapped, term, wanted, planned, copy));
  }
  return planned;
}

// A mapped tensor is one range of a file if it is one term of one stored tensor, that tensor is one
// range, and the term takes consecutive bytes of it: a layer of a stack, for example.
Result<std::optional<ExtentLookup::FileRun>> OpenedCheckpoint::MappedFileRun(
    const TensorEntry& tensor) const {
  if (binding_->WholeSource(tensor.ordinal)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry stored, WholeSourceOf(tensor));
    return source_->FileRunOf(stored);
  }
  const std::optional<ExtentLookup::FileRun> none;
  const MappedTensor mapped = binding_->At(tensor.ordinal);
  if (mapped.terms.size() != 1 || !mapped.terms[0].from || tensor.meta.bytes() == 0) return none;
  const CellTerm& term = mapped.terms[0];
  const MappedTensor::Source& source = mapped.sources[term.source];
  if (source.ordinals.size() != 1) return none;
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry stored, source_->index_->At(source.ordinals[0]));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ExtentLookup::FileRun> run,
                               source_->FileRunOf(stored));
  if (!run) return none;
  const auto fold = [&](const TermSide& side, const TensorMeta& meta,
                        std::span<const std::int64_t> key) {
    std::vector<PlacedBox> boxes;
    side.Fold(PlaceWhole(ByteShape(meta.dtype(), meta.shape())), key, term.extents.rank(), boxes);
    return boxes;
  };
  const std::vector<std::int64_t> first(term.from->in_key.size(), 0);  // All sizes are one.
  const std::vector<PlacedBox> to = fold(term.to, tensor.meta, mapped.key.span());
  const std::vector<PlacedBox> from = fold(*term.from, stored.meta, first);
  if (to.size() != 1 || from.size() != 1) return none;
  const StridedCopy copy = PlanCopy(Intersect(to[0].box, from[0].box), from[0], to[0]);
  if (copy.axes != 0 || copy.run != tensor.meta.bytes()) return none;
  return std::optional<ExtentLookup::FileRun>(
      {run->file, run->offset + static_cast<std::uint64_t>(copy.src_offset)});
}

}  // namespace tensormount
