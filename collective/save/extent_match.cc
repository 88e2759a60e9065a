// SPDX-License-Identifier: Apache-2.0
// Chunks are sorted twice, by region and by position in the tensor, and each extent is looked up in
// both: a rank's chunks are few and in memory, while a base may have very many extents.
#include "collective/save/extent_match.h"

#include <algorithm>
#include <tuple>

#include "collective/layout/layout_table.h"
#include "collective/save/save_plan.h"
#include "index/records/extent_lookup.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

bool BoxesMeet(const Box& a, const Box& b) {
  for (int axis = 0; axis < a.rank(); ++axis) {
    if (a.begin(axis) >= b.end(axis) || b.begin(axis) >= a.end(axis)) return false;
  }
  return true;
}

}  // namespace

ExtentMatch::ExtentMatch(const TensorMeta& meta, std::span<const RankTask::Chunk> chunks)
    : meta_(meta), chunks_(chunks), same_(chunks.size()) {
  by_region_.reserve(chunks.size());
  for (std::uint32_t c = 0; c < chunks.size(); ++c) {
    const Region& region = chunks[c].region;
    if (region.empty()) continue;  // An empty chunk has no part.
    by_region_.push_back(c);
    const ByteBounds bounds = BoundsOf(meta, region);
    (RunInTensor(meta, region) ? runs_ : others_).push_back({bounds.first, bounds.end, 0, c});
  }
  std::sort(by_region_.begin(), by_region_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return CompareRegions(chunks_[a].region, chunks_[b].region) < 0;
  });
  for (std::vector<Span>* spans : {&runs_, &others_}) {
    std::sort(spans->begin(), spans->end(),
              [](const Span& a, const Span& b) { return a.first < b.first; });
    std::uint64_t reach = 0;
    for (Span& span : *spans) span.reach = reach = std::max(reach, span.end);
  }
}

std::span<const std::uint32_t> ExtentMatch::ChunksOf(const Region& region) const {
  const auto compared = [&](std::uint32_t c) { return CompareRegions(chunks_[c].region, region); };
  const auto first = std::partition_point(by_region_.begin(), by_region_.end(),
                                          [&](std::uint32_t c) { return compared(c) < 0; });
  auto end = first;
  while (end != by_region_.end() && compared(*end) == 0) ++end;
  return {first, end};
}

// The spans with bytes in [first, end), and possibly others between them if chunks overlap or are
// not runs.
std::span<const ExtentMatch::Span> ExtentMatch::SpansNear(const std::vector<Span>& spans,
                                                          std::uint64_t first, std::uint64_t end) {
  const auto from = std::partition_point(spans.begin(), spans.end(),
                                         [&](const Span& span) { return span.reach <= first; });
  const auto to =
      std::partition_point(from, spans.end(), [&](const Span& span) { return span.first < end; });
  return {from, to};
}

Status ExtentMatch::Add(std::uint32_t row, const ChunkRecord& stored) {
  ++extents_;
  if (!stored.has_hash || stored.strides.rank() > 0 || stored.region.empty()) return {};
  bool same = false;
  for (const std::uint32_t c : ChunksOf(stored.region)) {
    if (chunks_[c].bytes != stored.length) continue;
    same = true;
    if (!same_[c]) same_[c] = row;
  }
  if (same || !stored.region.Within(meta_.shape())) return {};
  const ByteBounds bounds = BoundsOf(meta_, stored.region);
  const std::span<const Span> near = SpansNear(runs_, bounds.first, bounds.end);
  if (near.empty()) return {};
  const std::optional<ByteBounds> there = RunInTensor(meta_, stored.region);
  if (!there || there->end - there->first != stored.length) return {};
  for (const Span& here : near) {
    const std::uint64_t from = std::max(here.first, there->first);
    const std::uint64_t to = std::min(here.end, there->end);
    if (from >= to) continue;
    // The leaves of the extent that lie wholly in the common range.
    const std::uint64_t first = LeafCount(from - there->first);
    const bool to_the_end = to == there->end;
    const std::uint64_t last =
        to_the_end ? LeafCount(stored.length) : (to - there->first) / kLeafBytes;
    if (first >= last) continue;
    const std::uint64_t begin = there->first + first * kLeafBytes;
    const std::uint64_t end = to_the_end ? to : there->first + last * kLeafBytes;
    shared_.push_back({begin, end - begin, first, here.chunk, row});
  }
  // Disjoint chunks and disjoint extents have fewer ranges in common, so more of them mean that
  // extents overlap.
  if (shared_.size() > chunks_.size() + extents_) {
    return {Code::kDataLoss, "tensor " + meta_.key() + ": its stored chunks overlap"};
  }
  return {};
}

bool ExtentMatch::Touches(const ChunkRecord& stored) const {
  if (stored.region.empty() || !stored.region.Within(meta_.shape())) return false;
  if (!ChunksOf(stored.region).empty()) return true;
  const ByteBounds bounds = BoundsOf(meta_, stored.region);
  for (const std::vector<Span>* spans : {&runs_, &others_}) {
    for (const Span& here : SpansNear(*spans, bounds.first, bounds.end)) {
      if (here.end > bounds.first &&
          BoxesMeet(chunks_[here.chunk].region.box(), stored.region.box())) {
        return true;
      }
    }
  }
  return false;
}

std::vector<ExtentMatch::ExtentPart> ExtentMatch::Cut() {
  std::sort(shared_.begin(), shared_.end(), [](const Shared& a, const Shared& b) {
    return std::tie(a.chunk, a.begin, a.row) < std::tie(b.chunk, b.begin, b.row);
  });
  std::vector<std::uint64_t> firsts(chunks_.size(), 0);
  for (const Span& run : runs_) firsts[run.chunk] = run.first;
  std::vector<ExtentPart> pieces;
  pieces.reserve(chunks_.size());
  auto next = shared_.begin();
  for (std::uint32_t c = 0; c < chunks_.size(); ++c) {
    const RankTask::Chunk& chunk = chunks_[c];
    auto shared = next;
    while (next != shared_.end() && next->chunk == c) ++next;
    if (same_[c]) {
      pieces.push_back({.chunk = c, .begin = chunk.begin, .bytes = chunk.bytes, .row = same_[c]});
      continue;
    }
    std::uint64_t at = chunk.begin;
    const auto rest = [&](std::uint64_t to) {
      if (to > at) pieces.push_back({.chunk = c, .begin = at, .bytes = to - at});
    };
    for (; shared != next; ++shared) {
      const std::uint64_t begin = chunk.begin + (shared->begin - firsts[c]);
      if (begin < at) continue;  // Extents overlap: damage that other checks find.
      rest(begin);
      pieces.push_back({.chunk = c,
                        .begin = begin,
                        .bytes = shared->bytes,
                        .row = shared->row,
                        .leaf = shared->leaf});
      at = begin + shared->bytes;
    }
    rest(chunk.begin + chunk.bytes);
  }
  return pieces;
}

}  // namespace tensormount
