// SPDX-License-Identifier: Apache-2.0
// Verification of a load by digests: each rank digests its buffers, and the sum over all ranks must
// be the stored digest. After a failure the stored bytes are read again to locate the damage.
#include "collective/load/digest_proof.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "shard/copy_plan.h"
#include "shard/coverage.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// Bytes read from storage at once for a proof or a diagnosis.
constexpr std::uint64_t kProofBlockBytes = 8u << 20;

// A text that is equal for equal regions, so that equal regions are found without comparing all
// pairs.
std::string RegionKey(const Region& region) {
  std::string key;
  const auto put = [&key](std::int64_t v) {
    key.append(reinterpret_cast<const char*>(&v), sizeof(v));
  };
  for (std::int64_t v : region.box().begin()) put(v);
  for (std::int64_t v : region.box().extent()) put(v);
  put(region.is_flat() ? 1 : 0);
  put(region.flat_first());
  put(region.volume());
  return key;
}

// The element at byte `offset` of the row-major order.
Dims ElementAt(const TensorMeta& meta, std::uint64_t offset) {
  auto n = static_cast<std::int64_t>(offset * 8 / meta.bits());
  Dims at = Dims::Filled(meta.shape().rank(), 0);
  for (int a = meta.shape().rank() - 1; a >= 0; --a) {
    const std::int64_t extent = std::max<std::int64_t>(meta.shape()[a], 1);
    at[a] = n % extent;
    n /= extent;
  }
  return at;
}

// The bounding box of the elements added.
struct Bounds {
  Dims low;
  Dims high;
  bool any = false;

  void Add(const Dims& at) {
    if (!any) {
      low = high = at;
      any = true;
      return;
    }
    for (int a = 0; a < at.rank(); ++a) {
      low[a] = std::min(low[a], at[a]);
      high[a] = std::max(high[a], at[a]);
    }
  }
  std::string ToString() const {
    Dims extent = high;
    for (int a = 0; a < extent.rank(); ++a) extent[a] = high[a] - low[a] + 1;
    Result<Box> box = Box::Make(low, extent);
    return box.ok() ? box.value().ToString() : low.ToString();
  }
};

// Adds to `bounds` the elements in which the packed bytes at `bytes` and the buffer at `base`
// differ.
void CompareBox(const TensorMeta& meta, const PlacedBox& whole, const PlacedBox& packed,
                const std::byte* bytes, const PlacedBox& placed, const std::byte* base,
                Bounds& bounds) {
  const Box part = Intersect(packed.box, placed.box);
  if (part.empty()) return;
  const StridedCopy runs = PlanCopy(part, packed, placed);
  struct Name {
    std::int64_t from = 0;
    std::int64_t to = 0;
  };
  std::vector<Name> names;  // Rising; filled at the first difference.
  // The runs of `names` may be longer or shorter than those of `runs`, so a differing byte is
  // looked up by its position in the packed bytes.
  runs.ForEachRun([&](std::int64_t at, std::int64_t memory, std::uint64_t size) {
    if (std::memcmp(bytes + at, base + memory, size) == 0) return;
    if (names.empty()) {
      PlanCopy(part, packed, whole)
          .ForEachRun([&](std::int64_t from, std::int64_t to, std::uint64_t) {
            names.push_back({from, to});
          });
    }
    for (std::uint64_t i = 0; i < size; ++i) {
      if (bytes[at + static_cast<std::int64_t>(i)] == base[memory + static_cast<std::int64_t>(i)]) {
        continue;
      }
      const std::int64_t wrong = at + static_cast<std::int64_t>(i);
      const auto name =
          std::upper_bound(names.begin(), names.end(), wrong,
                           [](std::int64_t place, const Name& n) { return place < n.from; }) -
          1;
      bounds.Add(ElementAt(meta, static_cast<std::uint64_t>(name->to + (wrong - name->from))));
    }
  });
}

}  // namespace

ProofPlan PlanProof(const TensorEntry& entry, std::span<const RequestedRegion> wants, int ranks) {
  ProofPlan plan;
  if (!entry.has_digest || wants.empty()) return plan;
  const TensorMeta& meta = entry.meta;
  RegionSet regions(meta.shape());
  std::map<std::string, std::uint32_t> first;
  for (std::uint32_t i = 0; i < wants.size(); ++i) {
    if (wants[i].convert) return {};
    const auto [at, fresh] = first.emplace(RegionKey(wants[i].region), i);
    if (fresh) {
      plan.contributors.push_back(i);
      regions.Add(wants[i].region, i);
    } else {
      plan.replicas.push_back({i, at->second});
    }
  }
  CoverageReport coverage = CheckCoverage(regions, 64);
  if (!coverage.overlaps.empty() || coverage.truncated) return plan;
  if (coverage.missing_elements > meta.elements() / 4) return plan;
  for (const Box& box : coverage.missing) {
    // Cells that end inside a byte cannot be read alone.
    if (!ByteRegion(meta.dtype(), meta.shape(), box).ok()) return plan;
  }
  plan.completed = std::move(coverage.missing);
  plan.completer = static_cast<int>(entry.ordinal % static_cast<std::uint32_t>(ranks));
  plan.possible = true;
  return plan;
}

Crc64 DigestOfBuffer(const TensorMeta& meta, std::span<const PlacedBox> placed,
                     const std::byte* base) {
  const Dims byte_shape = ByteShape(meta.dtype(), meta.shape());
  Crc64 digest = 0;
  for (const PlacedBox& box : placed) digest ^= DigestOfPlaced(box, base, byte_shape);
  return digest;
}

Result<Crc64> DigestFromStorage(const OpenedCheckpoint& checkpoint, const TensorEntry& entry,
                                std::span<const Box> boxes, ReadStats* stats) {
  const TensorMeta& meta = entry.meta;
  const std::uint64_t element_bytes = std::max<std::uint64_t>(1, meta.bits() / 8);
  // Boxes of sub-byte elements are not split, because a part could end inside an element.
  const std::uint64_t block = meta.bits() % 8 == 0 ? kProofBlockBytes : ~std::uint64_t{0};
  std::vector<std::byte> bytes;
  Crc64 digest = 0;
  Status status;
  for (const Box& box : boxes) {
    SplitBox(box, element_bytes, block, [&](const Box& part) {
      if (!status.ok()) return;
      Result<Region> region = ByteRegion(meta.dtype(), meta.shape(), part);
      if (!region.ok()) {
        status = region.status();
        return;
      }
      bytes.resize(static_cast<std::size_t>(region.value().volume()));
      const BufferView view = BufferView::Host(meta.dtype(), bytes.data(), part.extent());
      status = checkpoint.Read(entry, part, view, ReadVerify::kWholeLeaves, stats, nullptr);
      if (!status.ok()) return;
      digest ^= DigestOfBuffer(meta, PlacePacked(region.value(), 0), bytes.data());
    });
  }
  TENSORMOUNT_RETURN_IF_ERROR(status);
  return digest;
}

Status FindDamage(const OpenedCheckpoint& checkpoint, const TensorEntry& entry,
                  const Region& region, std::span<const PlacedBox> placed, const std::byte* base) {
  const TensorMeta& meta = entry.meta;
  const PlacedBox whole = PlaceWhole(ByteShape(meta.dtype(), meta.shape()));
  const bool cut = meta.bits() % 8 == 0;
  std::vector<Region> parts;
  if (cut) {
    for (const Box& box : region.Boxes()) {
      SplitBox(box, meta.bits() / 8, kProofBlockBytes,
               [&](const Box& part) { parts.push_back(Region(part)); });
    }
  } else {
    parts.push_back(region);
  }
  std::vector<std::byte> bytes;
  for (const Region& part : parts) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region part_bytes,
                                 ByteRegion(meta.dtype(), meta.shape(), part));
    bytes.resize(static_cast<std::size_t>(part_bytes.volume()));
    Dims extent = part.box().extent();
    if (part.is_flat()) extent = Dims{part.volume()};
    const BufferView view = BufferView::Host(meta.dtype(), bytes.data(), extent);
    TENSORMOUNT_RETURN_IF_ERROR(
        checkpoint.Read(entry, part, view, ReadVerify::kExtendLeaves, nullptr, nullptr));
    Bounds bounds;
    for (const PlacedBox& packed : PlacePacked(part_bytes, 0)) {
      for (const PlacedBox& box : placed) {
        CompareBox(meta, whole, packed, bytes.data(), box, base, bounds);
      }
    }
    if (bounds.any) {
      return Status(Code::kDataLoss, "tensor " + meta.key() + " " + bounds.ToString() +
                                         ": bytes changed between storage and the buffer");
    }
  }
  return {};
}

}  // namespace tensormount
