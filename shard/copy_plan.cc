// SPDX-License-Identifier: Apache-2.0
// Plans strided copies from stored regions to wanted regions of any shapes. Each wanted box is
// intersected with each stored one, and a sweep along one axis proves that the resulting parts are
// disjoint. Disjoint parts of the right total volume store each wanted cell exactly once; the cells
// at fault are determined only if this proof fails.
#include "shard/copy_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "shard/coverage.h"

namespace tensormount {
namespace {

// Reports which cells of `want` are not covered exactly once. Parts are cut to each wanted box and
// shifted to the origin for CheckCoverage; its findings are shifted back and converted to elements.
// Slow and exact, for errors only.
Status CoverageError(std::span<const PlacedBox> want, std::span<const CopyPlan::Part> parts,
                     const TensorMeta* meta) {
  const auto name = [&](const Box& bytes) {
    if (meta == nullptr) return "bytes " + bytes.ToString();
    return "tensor " + meta->key() + " " +
           ElementBox(meta->dtype(), meta->shape(), bytes).ToString();
  };
  for (const PlacedBox& w : want) {
    Dims ends;
    for (int a = 0; a < w.box.rank(); ++a) ends.push_back(w.box.end(a));
    // Shifts everything by -w.box.begin(), so that the wanted box begins at the origin.
    RegionSet regions(w.box.extent());
    const auto shifted = [&](const Box& box, std::int64_t sign) {
      Dims begin;
      for (int a = 0; a < box.rank(); ++a) begin.push_back(box.begin(a) + sign * w.box.begin(a));
      return Box::Make(begin, box.extent());
    };
    for (const CopyPlan::Part& p : parts) {
      const Box common = Intersect(p.part, w.box);
      if (common.empty()) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, shifted(common, -1));
      regions.Add(box, p.chunk);
    }
    const CoverageReport report = CheckCoverage(regions, 1);
    if (!report.missing.empty()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, shifted(report.missing[0], 1));
      return Status(Code::kDataLoss, name(box) + " is stored in no chunk");
    }
    if (!report.overlaps.empty()) {
      const Overlap& overlap = report.overlaps[0];
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, shifted(overlap.box, 1));
      return Status(Code::kDataLoss, name(box) + " is stored twice, in chunks " +
                                         std::to_string(overlap.first) + " and " +
                                         std::to_string(overlap.second));
    }
  }
  return Status(Code::kInternal,
                "internal error: copy plan: volumes differ, but every element is covered once");
}

// Whether the parts are disjoint. A sweep along the axis with the most distinct begins compares
// each part with those that have not ended. O(n log n), and a comparison for each pair that
// overlaps on this axis: few for rows and grids; n^2 / 2 at worst.
bool Disjoint(std::span<const CopyPlan::Part> parts) {
  if (parts.size() < 2) return true;
  const int rank = parts[0].part.rank();
  int axis = 0;
  std::size_t most = 0;
  std::vector<std::int64_t> begins(parts.size());
  for (int a = 0; a < rank; ++a) {
    for (std::size_t i = 0; i < parts.size(); ++i) begins[i] = parts[i].part.begin(a);
    std::sort(begins.begin(), begins.end());
    const auto distinct = static_cast<std::size_t>(
        std::distance(begins.begin(), std::unique(begins.begin(), begins.end())));
    if (distinct > most) {
      most = distinct;
      axis = a;
    }
  }
  std::vector<const Box*> order;
  order.reserve(parts.size());
  for (const CopyPlan::Part& p : parts) order.push_back(&p.part);
  std::sort(order.begin(), order.end(),
            [&](const Box* a, const Box* b) { return a->begin(axis) < b->begin(axis); });
  std::vector<const Box*> active;
  for (const Box* box : order) {
    std::erase_if(active, [&](const Box* b) { return b->end(axis) <= box->begin(axis); });
    for (const Box* other : active) {
      if (!Intersect(*box, *other).empty()) return false;
    }
    active.push_back(box);
  }
  return true;
}

}  // namespace

std::uint64_t StridedCopy::runs() const {
  if (run == 0) return 0;
  std::uint64_t n = 1;
  for (const Axis& a : loops()) n *= static_cast<std::uint64_t>(a.count);
  return n;
}

std::uint64_t StridedCopy::src_span() const {
  std::uint64_t span = run;
  for (const Axis& a : loops()) span += static_cast<std::uint64_t>((a.count - 1) * a.src);
  return span;
}

// O(axes). Example: cut [0:4, 2:4, 0:2] (4 rows, 2 elements of 2 bytes) from a packed [4, 8, 2],
// into a packed [4, 2, 2]: the axis of bytes is contiguous on both sides and merges into the axis
// of elements, which gives runs of 4 bytes; rows are 16 bytes apart on one side and 4 on the other,
// so they stay a loop: src_offset 4, run 4, axis {4, 16, 4}.
StridedCopy PlanCopy(const Box& part, const PlacedBox& src, const PlacedBox& dst) {
  StridedCopy copy;
  copy.src_offset = src.offset;
  copy.dst_offset = dst.offset;
  if (part.empty()) return copy;
  copy.run = 1;
  // Goes from the outermost axis inwards. The last kept axis grows while the next axis is
  // contiguous with it on both sides.
  for (int a = 0; a < part.rank(); ++a) {
    copy.src_offset += (part.begin(a) - src.box.begin(a)) * src.strides[a];
    copy.dst_offset += (part.begin(a) - dst.box.begin(a)) * dst.strides[a];
    const std::int64_t n = part.extent(a);
    if (n == 1) continue;
    const StridedCopy::Axis next = {n, src.strides[a], dst.strides[a]};
    if (copy.axes > 0) {
      StridedCopy::Axis& last = copy.loops().back();
      if (last.src == n * next.src && last.dst == n * next.dst) {
        last = {last.count * n, next.src, next.dst};
        continue;
      }
    }
    copy.axis[static_cast<std::size_t>(copy.axes++)] = next;
  }
  if (copy.axes > 0) {
    StridedCopy::Axis& last = copy.loops().back();
    if (last.src == 1 && last.dst == 1) {
      copy.run = static_cast<std::uint64_t>(last.count);
      last = {};
      --copy.axes;
    }
  }
  return copy;
}

void SplitBox(const Box& box, std::uint64_t element_bytes, std::uint64_t max_bytes,
              const std::function<void(const Box&)>& fn) {
  if (box.empty()) return;
  std::uint64_t inner = element_bytes * static_cast<std::uint64_t>(box.volume());
  int axis = 0;
  for (; axis < box.rank(); ++axis) {
    if (box.extent(axis) > 1) break;
  }
  if (inner <= max_bytes || axis == box.rank()) {
    fn(box);
    return;
  }
  inner /= static_cast<std::uint64_t>(box.extent(axis));
  const auto step = static_cast<std::int64_t>(std::max<std::uint64_t>(1, max_bytes / inner));
  for (std::int64_t i = 0; i < box.extent(axis); i += step) {
    Dims begin = box.begin();
    Dims extent = box.extent();
    begin[axis] += i;
    extent[axis] = std::min(step, box.extent(axis) - i);
    SplitBox(Box::Make(begin, extent).value(), element_bytes, max_bytes, fn);
  }
}

Result<CopyPlan> CopyPlan::Make(std::span<const PlacedBox> want,
                                std::span<const std::vector<PlacedBox>> chunks,
                                const TensorMeta* meta) {
  CopyPlan plan;
  std::uint64_t wanted = 0;
  for (const PlacedBox& w : want) wanted += static_cast<std::uint64_t>(w.box.volume());
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    for (const PlacedBox& w : want) {
      for (const PlacedBox& placed : chunks[c]) {
        if (placed.box.rank() != w.box.rank()) {
          return Status(Code::kInvalidArgument, "stored chunk " + std::to_string(c) + " has " +
                                                    std::to_string(placed.box.rank()) + " axes, " +
                                                    std::to_string(w.box.rank()) + " expected");
        }
        const Box part = Intersect(w.box, placed.box);
        if (part.empty()) continue;
        plan.bytes_ += static_cast<std::uint64_t>(part.volume());
        plan.parts_.push_back({static_cast<std::uint32_t>(c), part, PlanCopy(part, placed, w)});
      }
    }
  }
  // Disjoint parts of the right total volume cover everything once. The wanted boxes are disjoint,
  // so the parts of different wanted boxes are disjoint, too.
  if (plan.bytes_ != wanted || !Disjoint(plan.parts_)) {
    return CoverageError(want, plan.parts_, meta);
  }
  return plan;
}

}  // namespace tensormount
