// SPDX-License-Identifier: Apache-2.0
// Decides from which mount each byte of a tensor is taken, compares bytes that several mounts
// wrote, and finds the boxes that no mount wrote.
#include "fs/save/tensor_assembly.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

#include "fs/save/resolve_journals.h"
#include "shard/box_access.h"
#include "shard/coverage.h"
#include "shard/coverage_search.h"
#include "shard/region_set.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kMaxPairs = std::size_t{1} << 24;
constexpr std::size_t kMaxHolesListed = 1000;
constexpr std::size_t kMaxDifferencesListed = 256;
constexpr std::int64_t kCompareBytes = 1 << 20;

// Appends to `out` the boxes in which two packed boxes of bytes differ: runs along the last axis,
// which the caller widens to whole elements; one box around all if there are many.
void AddDifferences(const Box& box, const std::byte* a, const std::byte* b, std::vector<Box>& out) {
  const int rank = box.rank();
  const std::int64_t row = rank > 0 ? box.extent(rank - 1) : 1;
  const std::size_t before = out.size();
  Dims at = Dims::Filled(rank, 0);
  std::int64_t done = 0;
  for (const std::int64_t all = box.volume(); done < all; done += row) {
    if (std::memcmp(a + done, b + done, static_cast<std::size_t>(row)) != 0) {
      for (std::int64_t i = 0; i < row;) {
        if (a[done + i] == b[done + i]) {
          ++i;
          continue;
        }
        std::int64_t end = i + 1;
        while (end < row && a[done + end] != b[done + end]) ++end;
        Box run = box;
        for (int x = 0; x + 1 < rank; ++x) {
          run = BoxAccess::WithAxis(run, x, box.begin(x) + at[x], 1);
        }
        if (rank > 0) run = BoxAccess::WithAxis(run, rank - 1, box.begin(rank - 1) + i, end - i);
        out.push_back(run);
        i = end;
      }
    }
    for (int x = rank - 2; x >= 0; --x) {
      if (++at[x] < box.extent(x)) break;
      at[x] = 0;
    }
  }
  if (out.size() - before <= kMaxDifferencesListed) return;
  Dims low = out[before].begin();
  Dims high = low;
  for (std::size_t i = before; i < out.size(); ++i) {
    for (int x = 0; x < rank; ++x) {
      low[x] = std::min(low[x], out[i].begin(x));
      high[x] = std::max(high[x], out[i].end(x));
    }
  }
  Box around = out[before];
  for (int x = 0; x < rank; ++x) around = BoxAccess::WithAxis(around, x, low[x], high[x] - low[x]);
  out.resize(before);
  out.push_back(around);
}

// Converts boxes of bytes to boxes of elements. Two findings may contain different bytes of one
// element; such boxes are cut, so that the element is listed once, except for thousands of
// findings, where that would be quadratic.
std::vector<Box> ElementBoxes(const TensorMeta& meta, const std::vector<Box>& bytes) {
  std::vector<Box> boxes;
  for (const Box& b : bytes) {
    const Box element = ElementBox(meta.dtype(), meta.shape(), b);
    std::vector<Box> fresh = {element};
    if (boxes.size() < 4096) {
      for (const Box& known : boxes) SubtractBox(fresh, known);
    }
    boxes.insert(boxes.end(), fresh.begin(), fresh.end());
  }
  JoinBoxes(meta.shape().rank(), boxes);
  return boxes;
}

// Leaves count from the begin of an extent, so equal regions with equal leaves have equal bytes.
bool SameBytesAndHash(const StagedRun& a, const StagedRun& b) {
  return a.whole() && b.whole() && a.bytes == b.bytes && a.extent().leaves == b.extent().leaves;
}

}  // namespace

// Compares a box in small bands, one after the other.
Status TensorAssembly::Compare(const TensorMeta& meta, const StagedRun& a, const StagedRun& b,
                               const Box& bytes) {
  std::vector<Box> todo = {bytes};
  std::vector<Box> different;
  std::vector<std::byte> left;
  std::vector<std::byte> right;
  while (!todo.empty()) {
    const Box box = todo.back();
    todo.pop_back();
    // A large box is halved along its first axis with an extent above 1, so that each part is a few
    // rows that are stored close together.
    if (box.volume() > kCompareBytes) {
      int axis = 0;
      while (box.extent(axis) == 1) ++axis;
      const std::int64_t half = box.extent(axis) / 2;
      todo.push_back(
          BoxAccess::WithAxis(box, axis, box.begin(axis) + half, box.extent(axis) - half));
      todo.push_back(BoxAccess::WithAxis(box, axis, box.begin(axis), half));
      continue;
    }
    const auto size = static_cast<std::size_t>(box.volume());
    left.resize(size);
    right.resize(size);
    TENSORMOUNT_RETURN_IF_ERROR(reader_.ReadBox(a, box, left.data()));
    TENSORMOUNT_RETURN_IF_ERROR(reader_.ReadBox(b, box, right.data()));
    if (left != right) AddDifferences(box, left.data(), right.data(), different);
    if (different.size() > kMaxHolesListed) break;  // These are enough for the report.
  }
  for (const Box& box : ElementBoxes(meta, different)) {
    AddProblem(report_, "conflict", TensorBoxText(meta, box),
               "differs between mounts " + MountOf(a) + " and " + MountOf(b));
  }
  return Status();
}

Status TensorAssembly::ResolveOverlaps(const TensorMeta& meta, std::vector<StagedRun>& runs) {
  // For each run, the boxes of its bytes that the steps below have left so far.
  std::vector<std::vector<Box>> left(runs.size());
  RegionSet boxes(ByteShape(meta.dtype(), meta.shape()));
  std::vector<std::uint32_t> owner;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    left[i] = runs[i].bytes.Boxes();
    for (const Box& box : left[i]) {
      if (!boxes.Add(Region(box), static_cast<std::uint32_t>(owner.size()))) {
        return Status(Code::kInternal,
                      "internal error: a written box is outside of tensor " + meta.key());
      }
      owner.push_back(static_cast<std::uint32_t>(i));
    }
  }
  // Overlapping pairs are found in O(n log n) by the search of the layout checks; only those are
  // cut.
  const CoverageFindings found = SearchCoverage(boxes, kMaxPairs, true);
  if (found.pairs_dropped) {
    return Status(Code::kResourceExhausted,
                  "tensor " + meta.key() + ": too many parts of the tensor were overwritten");
  }
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
  for (auto [a, b] : found.pairs) {
    a = owner[a];
    b = owner[b];
    if (a != b) pairs.emplace_back(std::min(a, b), std::max(a, b));
  }
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());

  std::vector<bool> cut(runs.size(), false);
  // First, kForget records: they remove bytes from earlier records of their target, and provide
  // none.
  for (const auto& [a, b] : pairs) {
    const StagedRun& earlier = runs[a];
    const StagedRun& later = runs[b];
    if (earlier.journal != later.journal || earlier.target != later.target || earlier.forgets() ||
        !later.forgets()) {
      continue;
    }
    cut[a] = true;
    for (const Box& box : later.bytes.Boxes()) SubtractBox(left[a], box);
  }
  // Second, records of one mount: a later record overrides an earlier one. Pairs are sorted by `a`,
  // so left[b] still has all bytes of `b` that no kForget removed.
  for (const auto& [a, b] : pairs) {
    if (runs[a].journal != runs[b].journal || runs[a].forgets() || runs[b].forgets()) continue;
    for (const Box& box : left[b]) {
      const bool meets = std::any_of(left[a].begin(), left[a].end(),
                                     [&](const Box& x) { return !Intersect(x, box).empty(); });
      if (!meets) continue;
      cut[a] = true;
      SubtractBox(left[a], box);
    }
  }
  // Third, bytes of two mounts: equal bytes are kept once, unequal bytes are reported.
  for (const auto& [a, b] : pairs) {
    const StagedRun& first = runs[a];
    const StagedRun& second = runs[b];
    if (first.journal == second.journal || first.forgets() || second.forgets()) continue;
    if (!cut[a] && !cut[b] && SameBytesAndHash(first, second)) {
      cut[b] = true;
      left[b].clear();
      continue;
    }
    // A copy, because the loop below cuts left[b].
    const std::vector<Box> ours = left[b];
    for (const Box& x : left[a]) {
      for (const Box& y : ours) {
        const Box common = Intersect(x, y);
        if (common.empty()) continue;
        TENSORMOUNT_RETURN_IF_ERROR(Compare(meta, first, second, common));
        cut[b] = true;
        SubtractBox(left[b], common);
      }
    }
  }
  std::vector<StagedRun> kept;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].forgets() || left[i].empty()) continue;
    kept.push_back(std::move(runs[i]));
    if (cut[i]) kept.back().remaining = std::move(left[i]);
  }
  runs = std::move(kept);
  return Status();
}

void TensorAssembly::FindMissing(const TensorMeta& meta, const std::vector<StagedRun>& runs) {
  RegionSet set(ByteShape(meta.dtype(), meta.shape()));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto number = static_cast<std::uint32_t>(i);
    if (!runs[i].remaining.has_value()) {
      (void)set.Add(runs[i].bytes, number);  // Cannot fail: `bytes` is within the tensor.
    } else {
      for (const Box& box : *runs[i].remaining) (void)set.Add(Region(box), number);
    }
  }
  if (IsPartition(set)) return;
  const CoverageReport coverage = CheckCoverage(set, kMaxHolesListed);
  report_.bytes_missing += coverage.missing_elements;
  for (const Box& box : ElementBoxes(meta, coverage.missing)) {
    AddProblem(report_, "missing", TensorBoxText(meta, box), "written by no mount");
  }
  if (coverage.truncated) ++report_.more;
  if (!coverage.overlaps.empty()) {  // This would be a bug.
    AddProblem(report_, "internal", "tensor " + meta.key(),
               "internal error: pieces overlap after they were split");
  }
}

// The common case returns early: one writer for each byte, and nothing forgotten.
Result<std::vector<StagedRun>> TensorAssembly::Resolve(const TensorMeta& meta,
                                                       std::vector<StagedRun> runs) {
  RegionSet set(ByteShape(meta.dtype(), meta.shape()));
  bool forgets = false;
  for (const StagedRun& run : runs) {
    forgets = forgets || run.forgets();
    if (!set.Add(run.bytes, 0)) {
      return Status(Code::kDataLoss, "tensor " + meta.key() + ": " + run.bytes.ToString() +
                                         " (in bytes) is not within the tensor");
    }
  }
  if (!forgets && IsPartition(set)) {
    report_.bytes_written += meta.bytes();
    return runs;
  }
  TENSORMOUNT_RETURN_IF_ERROR(ResolveOverlaps(meta, runs));
  for (const StagedRun& run : runs) {
    if (!run.remaining.has_value()) {
      report_.bytes_written += run.size;
    } else {
      for (const Box& b : *run.remaining)
        report_.bytes_written += static_cast<std::uint64_t>(b.volume());
    }
  }
  FindMissing(meta, runs);
  return runs;
}

}  // namespace tensormount::fs
