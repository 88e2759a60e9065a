// SPDX-License-Identifier: Apache-2.0
// Matches a request with the stored tensors: names and rules (strict keys, growing and shrinking,
// dtypes, grids), layers in their stacks. A request that can never be served is refused here,
// before any rank reads.
#include "collective/load/resolve.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/glob.h"
#include "index/records/layer_names.h"
#include "shard/box_access.h"
#include "shard/convert.h"

namespace tensormount {
namespace {

LoadRule RuleFor(const LoadOptions& options, const std::string& key) {
  for (const KeyRule& rule : options.rules) {
    if (GlobMatches(rule.keys, key)) return rule.rule;
  }
  return {};
}

// The name of an object part in messages: "KEY" or "KEY[2, 3]".
std::string ObjectName(const std::string& key, const Dims& index) {
  return index.rank() == 0 ? key : key + index.ToString();
}

void SortUnique(std::vector<std::string>& names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
}

// A stored tensor, or a layer of one, under the requested name.
struct Found {
  std::shared_ptr<const TensorEntry> entry;  // Null: the key is not stored.
  std::int64_t layer = -1;
  Dims shape;  // For a layer: without the stack's first axis.
};

Result<Found> Find(const CheckpointIndex& index, const std::string& key) {
  Found found;
  Result<TensorEntry> entry = index.Find(key);
  if (entry.ok()) {
    found.shape = entry.value().meta.shape();
    found.entry = std::make_shared<const TensorEntry>(std::move(entry).value());
    return found;
  }
  if (entry.status().code() != Code::kNotFound) return entry.status();
  TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<LayerEntry> layer, index.ResolveLayer(key));
  if (!layer.has_value()) return found;
  found.shape = layer->meta.shape();
  found.layer = layer->layer;
  found.entry = std::make_shared<const TensorEntry>(std::move(layer->stacked));
  return found;
}

// How one requested tensor differs from the stored one; the same for all of its regions.
struct Fit {
  bool same_shape = true;
  bool convert = false;
  bool zero = false;
  Status refusal;
};

Fit FitTensor(const TensorMeta& asked, const Found& found, const LoadRule& rule) {
  const TensorMeta& stored = found.entry->meta;
  Fit fit;
  fit.same_shape = asked.shape() == found.shape;
  fit.convert = asked.dtype() != stored.dtype();
  fit.zero = rule.grow == LoadRule::Grow::kZero;
  const auto refuse = [&](Code code, const std::string& why) {
    if (!fit.refusal.ok()) return;
    fit.refusal =
        Status(code, "tensor " + asked.key() + ": asked for as " +
                         std::string(InfoOf(asked.dtype()).name) + " " + asked.shape().ToString() +
                         ", stored as " + std::string(InfoOf(stored.dtype()).name) + " " +
                         found.shape.ToString() + why)
            .With({.key = std::string(asked.key())});
  };
  if (asked.shape().rank() != found.shape.rank()) {
    refuse(Code::kInvalidArgument, "");
    return fit;
  }
  for (int axis = 0; axis < found.shape.rank(); ++axis) {
    const std::string number = std::to_string(axis);
    if (asked.shape()[axis] < found.shape[axis] && !rule.allow_shrink) {
      refuse(Code::kInvalidArgument, "; no load rule allows axis " + number + " to shrink");
    }
    if (asked.shape()[axis] > found.shape[axis] && rule.grow == LoadRule::Grow::kError) {
      refuse(Code::kInvalidArgument, "; no load rule allows axis " + number + " to grow");
    }
  }
  if (fit.convert && !rule.convert_dtype) {
    refuse(Code::kInvalidArgument, "; no load rule allows converting the dtype");
  }
  if (fit.convert) {
    if (Status status = CanConvert(stored.dtype(), asked.dtype()); !status.ok()) {
      refuse(status.code(), "; " + status.message());
    }
  }
  // Rows of sub-byte elements need not be whole bytes, and their bytes may change with the shape.
  if (!fit.same_shape && stored.bits() % 8 != 0) {
    refuse(Code::kUnsupported, "; the shape cannot change if elements are smaller than a byte");
  }
  return fit;
}

Result<Box> BoxInStack(const Box& box, std::int64_t layer) {
  if (layer < 0) return box;
  Dims begin{layer};
  Dims extent{1};
  for (const std::int64_t v : box.begin()) begin.push_back(v);
  for (const std::int64_t v : box.extent()) extent.push_back(v);
  return Box::Make(begin, extent);
}

Status ResolveItem(const LoadRequest::Item& item, const Found& found, const Fit& fit,
                   ResolvedRequest& out) {
  ResolvedItem r;
  r.item = item.item;
  r.asked = item.tensor;
  r.stored = found.entry->ordinal;
  r.layer = found.layer;
  r.convert = fit.convert;
  r.zero = fit.zero;
  if (fit.same_shape) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, BoxInStack(item.region.box(), found.layer));
    Region region = box;
    if (item.region.is_flat()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          region, Region::Flat(box, item.region.flat_first(), item.region.volume()));
    }
    r.regions.push_back(region);
  } else {
    const Box stored = Box::Whole(found.shape);
    for (const Box& box : item.region.Boxes()) {
      std::vector<Box> uncovered = {box};
      SubtractBox(uncovered, stored);
      r.uncovered.insert(r.uncovered.end(), uncovered.begin(), uncovered.end());
      const Box common = Intersect(box, stored);
      if (common.empty()) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box part, BoxInStack(common, found.layer));
      r.regions.push_back(part);
    }
  }
  out.items.push_back(std::move(r));
  return {};
}

Status ResolveTensors(const CheckpointIndex& index, const LoadRequest& request,
                      const LoadOptions& options, ResolvedRequest& out) {
  std::vector<Found> found(request.tensors.size());
  std::vector<Fit> fits(request.tensors.size());
  for (std::size_t t = 0; t < request.tensors.size(); ++t) {
    const TensorMeta& asked = request.tensors[t];
    TENSORMOUNT_ASSIGN_OR_RETURN(found[t], Find(index, asked.key()));
    if (found[t].entry == nullptr) {
      out.skipped.push_back(asked.key());
      if (!IsExemptKey(options, asked.key())) out.not_stored.push_back(asked.key());
      continue;
    }
    fits[t] = FitTensor(asked, found[t], RuleFor(options, asked.key()));
    if (!fits[t].refusal.ok()) {
      out.refusal = fits[t].refusal;
      return {};
    }
    out.tensors.push_back(found[t].entry);
  }
  // Several layers of one stack refer to one tensor.
  std::sort(out.tensors.begin(), out.tensors.end(),
            [](const auto& a, const auto& b) { return a->ordinal < b->ordinal; });
  out.tensors.erase(
      std::unique(out.tensors.begin(), out.tensors.end(),
                  [](const auto& a, const auto& b) { return a->ordinal == b->ordinal; }),
      out.tensors.end());
  for (const LoadRequest::Item& item : request.items) {
    if (found[item.tensor].entry == nullptr || item.region.empty()) continue;
    TENSORMOUNT_RETURN_IF_ERROR(ResolveItem(item, found[item.tensor], fits[item.tensor], out));
  }
  return {};
}

// Finds the stored part for a requested part of an object; null if there is none. Sets `skip` if a
// rule says not to load the part.
Result<const ObjectRecord*> FindPart(const LoadRequest::Object& want,
                                     const std::vector<ObjectRecord>& parts, LoadRule::Grid rule,
                                     bool* skip) {
  const Dims& grid = parts.front().grid;
  // A request without a grid can only be compared by the number of axes of its index.
  const bool other =
      want.grid.rank() != 0 ? !(want.grid == grid) : want.index.rank() != grid.rank();
  if (other && rule == LoadRule::Grid::kError) {
    return Status(Code::kInvalidArgument, "object " + want.key + ": asked for " +
                                              (want.grid.rank() != 0 || want.index.rank() == 0
                                                   ? "on a grid of " + want.grid.ToString()
                                                   : "as part " + want.index.ToString()) +
                                              ", stored on a grid of " + grid.ToString())
        .With({.key = want.key});
  }
  if (other && rule == LoadRule::Grid::kSkip) {
    *skip = true;
    return nullptr;
  }
  if (other && rule == LoadRule::Grid::kFirst) return &parts.front();
  for (const ObjectRecord& part : parts) {
    if (part.index == want.index) return &part;
  }
  return nullptr;
}

Status ResolveObjects(const CheckpointIndex& index, const LoadRequest& request,
                      const LoadOptions& options, ResolvedRequest& out) {
  for (const LoadRequest::Object& want : request.objects) {
    out.requested_objects.push_back(want.key);
    Result<std::vector<ObjectRecord>> parts = index.ObjectParts(want.key);
    if (!parts.ok() && parts.status().code() != Code::kNotFound) return parts.status();
    bool skip = false;
    const ObjectRecord* part = nullptr;
    if (parts.ok() && !parts.value().empty()) {
      Result<const ObjectRecord*> found =
          FindPart(want, parts.value(), RuleFor(options, want.key).grid, &skip);
      if (!found.ok()) {
        out.refusal = found.status();
        return {};
      }
      part = found.value();
    }
    if (part != nullptr) {
      out.objects.push_back({want.key, want.index, *part});
      continue;
    }
    out.skipped.push_back(want.key);
    if (!skip && !IsExemptKey(options, want.key)) {
      out.not_stored.push_back(ObjectName(want.key, want.index));
    }
  }
  return {};
}

}  // namespace

const std::shared_ptr<const TensorEntry>& ResolvedRequest::Stored(const ResolvedItem& of) const {
  return *std::ranges::lower_bound(tensors, of.stored, {},
                                   [](const auto& entry) { return entry->ordinal; });
}

bool IsExemptKey(const LoadOptions& options, std::string_view key) {
  const std::string text(key);
  return std::any_of(options.strict_exempt.begin(), options.strict_exempt.end(),
                     [&](const std::string& glob) { return GlobMatches(glob, text); });
}

Result<ResolvedRequest> ResolveRequest(const CheckpointIndex& index, const LoadRequest& request,
                                       const LoadOptions& options, bool objects) {
  ResolvedRequest out;
  TENSORMOUNT_RETURN_IF_ERROR(ResolveTensors(index, request, options, out));
  if (!out.refusal.ok()) return out;
  if (objects) TENSORMOUNT_RETURN_IF_ERROR(ResolveObjects(index, request, options, out));
  SortUnique(out.not_stored);
  SortUnique(out.skipped);
  SortUnique(out.requested_objects);
  return out;
}

Result<std::vector<std::string>> NotRequested(const CheckpointIndex& index,
                                              const std::vector<bool>& tensors,
                                              const std::vector<std::string>& objects,
                                              const LoadOptions& options) {
  std::vector<std::string> keys;
  // Scans all tensors if many were not requested, else looks up each one.
  const auto left = static_cast<std::size_t>(std::count(tensors.begin(), tensors.end(), false));
  if (left > tensors.size() / 16) {
    TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& entry) {
      if (!tensors[entry.ordinal]) keys.push_back(entry.meta.key());
      return true;
    }));
  } else if (left > 0) {
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t]) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry,
                                   index.At(static_cast<std::uint32_t>(t)));
      keys.push_back(entry.meta.key());
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> stored, index.Objects());
  for (const ObjectRecord& object : stored) {
    if (!std::binary_search(objects.begin(), objects.end(), object.key)) {
      keys.push_back(object.key);
    }
  }
  std::erase_if(keys, [&](const std::string& key) { return IsExemptKey(options, key); });
  SortUnique(keys);
  return keys;
}

}  // namespace tensormount
