// SPDX-License-Identifier: Apache-2.0
// The destinations of a tensor's bytes in a rank's memory: buffers as placed boxes or, for
// conversion, blocks of the stored type that are converted when complete. Device memory is written
// through the devices' rings.
#include "collective/load/target.h"

#include <atomic>
#include <cstring>
#include <map>
#include <utility>

#include "shard/convert.h"
#include "shard/copy_plan.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// Maps a placed box of a layer to the stack that has the layer.
Result<PlacedBox> PlacedInStack(const PlacedBox& placed, std::int64_t layer) {
  if (layer < 0) return placed;
  Dims begin{layer};
  Dims extent{1};
  PlacedBox out;
  out.offset = placed.offset;
  out.strides = Dims{0};
  for (int a = 0; a < placed.box.rank(); ++a) {
    begin.push_back(placed.box.begin(a));
    extent.push_back(placed.box.extent(a));
    out.strides.push_back(placed.strides[a]);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(out.box, Box::Make(begin, extent));
  return out;
}

std::vector<PlacedBox> PartsIn(const std::vector<PlacedBox>& placed,
                               const std::vector<Box>& boxes) {
  std::vector<PlacedBox> parts;
  for (const Box& box : boxes) {
    for (const PlacedBox& from : placed) {
      const Box common = Intersect(from.box, box);
      if (!common.empty()) parts.push_back(PartOfPlaced(from, common));
    }
  }
  return parts;
}

Result<std::vector<PlacedBox>> AsElements(const std::vector<PlacedBox>& placed) {
  std::vector<PlacedBox> elements;
  for (const PlacedBox& bytes : placed) {
    Dims begin;
    Dims extent;
    PlacedBox out;
    out.offset = bytes.offset;
    for (int a = 0; a + 1 < bytes.box.rank(); ++a) {
      begin.push_back(bytes.box.begin(a));
      extent.push_back(bytes.box.extent(a));
      out.strides.push_back(bytes.strides[a]);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(out.box, Box::Make(begin, extent));
    elements.push_back(std::move(out));
  }
  return elements;
}

Result<PlacedBox> AsBytes(const PlacedBox& elements, std::int64_t size) {
  Dims begin = elements.box.begin();
  Dims extent = elements.box.extent();
  begin.push_back(0);
  extent.push_back(size);
  PlacedBox bytes;
  bytes.offset = elements.offset;
  bytes.strides = elements.strides;
  bytes.strides.push_back(1);
  TENSORMOUNT_ASSIGN_OR_RETURN(bytes.box, Box::Make(begin, extent));
  return bytes;
}

Result<LoadTarget> MakeTarget(const PlannedTensor& tensor, std::uint32_t want,
                              const ResolvedItem& item, const Shard& shard, DeviceWriter& writer) {
  LoadTarget target;
  target.tensor = &tensor;
  target.want = want;
  target.base = static_cast<std::byte*>(shard.data.data);
  if (IsDeviceMemory(shard.data)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(target.device, OpenDevice(shard.data.device));
    target.writer = &writer;
  }
  target.convert = item.convert;
  target.to = shard.data.dtype;
  const TensorMeta& meta = tensor.entry().meta;
  const Region& region = target.wanted().region;
  TENSORMOUNT_ASSIGN_OR_RETURN(target.bytes, RegionBytes(meta.dtype(), meta.shape(), region));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      std::vector<PlacedBox> placed,
      PlaceBuffer(shard.data, shard.data.dtype, shard.global_shape, shard.region));
  if (item.convert) {
    TENSORMOUNT_ASSIGN_OR_RETURN(placed, AsElements(placed));
  }
  for (PlacedBox& box : placed) {
    TENSORMOUNT_ASSIGN_OR_RETURN(box, PlacedInStack(box, item.layer));
  }
  const bool cropped = item.regions.size() != 1 || !item.uncovered.empty();
  if (cropped) {
    std::vector<Box> boxes = region.Boxes();
    if (!item.convert) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                   ByteRegion(meta.dtype(), meta.shape(), region));
      boxes = bytes.Boxes();
    }
    placed = PartsIn(placed, boxes);
  }
  (item.convert ? target.elements : target.placed) = std::move(placed);
  return target;
}

// Converts the elements of a packed block that lie in `to.box` to `type`, and stores them at `base`
// as `to` says, one innermost row at a time.
Status ConvertBlock(const TensorMeta& meta, const Box& block, const std::byte* bytes, DType type,
                    std::byte* base, const PlacedBox& to) {
  const Box common = Intersect(block, to.box);
  if (common.empty()) return {};
  const std::int64_t size = meta.bits() / 8;
  const int inner = common.rank() - 1;
  const auto count = static_cast<std::size_t>(inner < 0 ? 1 : common.extent(inner));
  Dims at = common.begin();
  for (;;) {
    std::int64_t from = 0;  // Offset in the block, in elements.
    std::int64_t into = to.offset;
    for (int a = 0; a < common.rank(); ++a) {
      from = from * block.extent(a) + (at[a] - block.begin(a));
      into += (at[a] - to.box.begin(a)) * to.strides[a];
    }
    const auto unfit = ConvertElements(meta.dtype(), bytes + from * size, type, base + into,
                                       inner < 0 ? 0 : to.strides[inner], count);
    if (unfit.has_value()) {
      if (inner >= 0) at[inner] += static_cast<std::int64_t>(unfit->position);
      return Status(Code::kInvalidArgument, "tensor " + meta.key() + " " + at.ToString() + ": " +
                                                unfit->value + " cannot be represented in " +
                                                std::string(InfoOf(type).name));
    }
    int axis = inner - 1;
    for (; axis >= 0; --axis) {
      if (++at[axis] < common.end(axis)) break;
      at[axis] = common.begin(axis);
    }
    if (axis < 0) return {};
  }
}

// Converts a packed block into device memory (as ConvertBlock). `block` is not split, so the
// converted bytes are at most kConvertBlockBytes times the ratio of the element sizes.
Status ConvertToDevice(const TensorMeta& meta, const Box& block, const std::byte* bytes,
                       const LoadTarget& target, const PlacedBox& to) {
  const Box common = Intersect(block, to.box);
  if (common.empty()) return {};
  const std::int64_t size = InfoOf(target.to).bits / 8;
  PlacedBox elements{common, 0, Dims::Filled(common.rank(), 0)};
  std::int64_t step = size;
  for (int a = common.rank() - 1; a >= 0; --a) {
    elements.strides[a] = step;
    step *= common.extent(a);
  }
  std::vector<std::byte> converted(static_cast<std::size_t>(step));
  TENSORMOUNT_RETURN_IF_ERROR(
      ConvertBlock(meta, block, bytes, target.to, converted.data(), elements));
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlacedBox from, AsBytes(elements, size));
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlacedBox into, AsBytes(to, size));
  return target.writer->Write(target.device, from.box, into, target.base,
                              [&](const PlacedBox& packed, std::byte* base) -> Status {
                                ExecuteCopy(PlanCopy(packed.box, from, packed), converted.data(),
                                            base);
                                return {};
                              });
}

}  // namespace

// Adds the digest of bytes that were given to the target's writer. Thread-safe.
static void AddGiven(LoadTarget& target, Crc64 digest) {
  std::atomic_ref(target.given).fetch_xor(digest, std::memory_order_relaxed);
}

// Whether a target of an exchange has no digest proof, so that CheckArrived must check it.
static bool IsCheckedOnArrival(const LoadTarget& target) {
  return target.tensor->exchange && !target.tensor->proof.possible;
}

Result<std::vector<LoadTarget>> MakeTargets(const LoadPlan& plan, const ResolvedRequest& mine,
                                            const StateDict& request, int rank,
                                            DeviceWriter& writer) {
  std::vector<LoadTarget> targets;
  for (const PlannedTensor& tensor : plan.tensors) {
    for (std::uint32_t w = 0; w < tensor.wants.size(); ++w) {
      const RequestedRegion& want = tensor.wants[w];
      if (want.rank != rank) continue;
      const auto item = std::ranges::lower_bound(mine.items, want.item, {}, &ResolvedItem::item);
      TENSORMOUNT_ASSIGN_OR_RETURN(
          LoadTarget target,
          MakeTarget(tensor, w, *item, request.tensors()[want.item].shard, writer));
      targets.push_back(std::move(target));
    }
  }
  return targets;
}

Status PlaceBytes(const PlacedBox& from, const std::byte* bytes, const Box& part,
                  LoadTarget& target) {
  const TensorMeta& meta = target.tensor->entry().meta;
  const bool check = target.device != nullptr && IsCheckedOnArrival(target);
  for (const PlacedBox& to : target.placed) {
    const Box common = Intersect(part, to.box);
    if (common.empty()) continue;
    if (target.device == nullptr) {
      ExecuteCopy(PlanCopy(common, from, to), bytes, target.base);
      continue;
    }
    const auto fill = [&](const PlacedBox& packed, std::byte* base) -> Status {
      ExecuteCopy(PlanCopy(packed.box, from, packed), bytes, base);
      if (check) {
        AddGiven(target, DigestOfPlaced(packed, base, ByteShape(meta.dtype(), meta.shape())));
      }
      return {};
    };
    TENSORMOUNT_RETURN_IF_ERROR(target.writer->Write(target.device, common, to, target.base, fill));
  }
  return {};
}

Status ReadTarget(const OpenedCheckpoint& checkpoint, LoadTarget& target, const PlacedBox* part,
                  ReadStats& stats) {
  const TensorEntry& entry = target.tensor->entry();
  const std::span<const PlacedBox> wanted =
      part != nullptr ? std::span(part, 1) : std::span<const PlacedBox>(target.placed);
  if (target.device == nullptr) {
    Crc64 digest = 0;
    TENSORMOUNT_RETURN_IF_ERROR(checkpoint.ReadPlaced(entry, wanted, target.base, target.verify,
                                                      stats, target.digested ? &digest : nullptr));
    std::atomic_ref(target.arrived.digest).fetch_xor(digest, std::memory_order_relaxed);
    return {};
  }
  const bool check = target.verify != ReadVerify::kOff;
  for (const PlacedBox& to : wanted) {
    TENSORMOUNT_RETURN_IF_ERROR(target.writer->Write(
        target.device, to.box, to, target.base,
        [&](const PlacedBox& packed, std::byte* base) {
          Crc64 digest = 0;
          const Status status = checkpoint.ReadPlaced(entry, {&packed, 1}, base, target.verify,
                                                      stats, check ? &digest : nullptr);
          if (check) AddGiven(target, digest);
          return status;
        },
        target.digested ? &target.arrived : nullptr));
  }
  return {};
}

Status CheckArrived(std::span<const LoadTarget> targets, bool exchanged,
                    const DeviceLimits& rules) {
  std::vector<const LoadTarget*> checked;
  for (const LoadTarget& target : targets) {
    if (target.device == nullptr || target.convert || target.tensor->exchange != exchanged)
      continue;
    const bool by_leaf = exchanged ? IsCheckedOnArrival(target)
                                   : target.verify != ReadVerify::kOff &&
                                         (!target.tensor->proof.possible ||
                                          target.stats.bytes_by_leaf == target.bytes);
    if (by_leaf) checked.push_back(&target);
  }
  std::vector<Crc64> there(checked.size());
  std::vector<DigestRequest> wanted;
  for (std::size_t i = 0; i < checked.size(); ++i) {
    const TensorMeta& meta = checked[i]->tensor->entry().meta;
    wanted.push_back({checked[i]->boxes(), ByteShape(meta.dtype(), meta.shape()), &there[i]});
  }
  TENSORMOUNT_RETURN_IF_ERROR(DigestsOnDevices(wanted, rules));
  for (std::size_t i = 0; i < checked.size(); ++i) {
    if (there[i] == checked[i]->given) continue;
    const std::string& key = checked[i]->tensor->entry().meta.key();
    return Status(Code::kDataLoss, "tensor " + key + " " + checked[i]->wanted().region.ToString() +
                                       ": bytes changed on the way to " +
                                       checked[i]->device->ops->name())
        .With({.key = key});
  }
  return {};
}

Status ZeroUncovered(const ResolvedRequest& mine, const StateDict& request, DeviceWriter& writer) {
  for (const ResolvedItem& item : mine.items) {
    if (!item.zero || item.uncovered.empty()) continue;
    const Shard& shard = request.tensors()[item.item].shard;
    auto* base = static_cast<std::byte*>(shard.data.data);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::vector<PlacedBox> placed,
        PlaceBuffer(shard.data, shard.data.dtype, shard.global_shape, shard.region));
    for (const Box& box : item.uncovered) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                   ByteRegion(shard.data.dtype, shard.global_shape, box));
      for (const PlacedBox& part : PartsIn(placed, bytes.Boxes())) {
        if (IsDeviceMemory(shard.data)) {
          TENSORMOUNT_ASSIGN_OR_RETURN(const auto device, OpenDevice(shard.data.device));
          TENSORMOUNT_RETURN_IF_ERROR(writer.WriteZeros(device, part.box, part, base));
          continue;
        }
        PlanCopy(part.box, part, part)
            .ForEachRun([&](std::int64_t, std::int64_t to, std::uint64_t size) {
              std::memset(base + to, 0, static_cast<std::size_t>(size));
            });
      }
    }
  }
  return {};
}

Status ReadConverted(const OpenedCheckpoint& checkpoint, LoadTarget& target,
                     std::vector<std::byte>& staging, ReadStats& stats,
                     const std::function<void(std::uint64_t)>& read) {
  const TensorEntry& entry = target.tensor->entry();
  const TensorMeta& meta = entry.meta;
  Status status;
  for (const Box& box : target.wanted().region.Boxes()) {
    SplitBox(box, meta.bits() / 8, kConvertBlockBytes, [&](const Box& block) {
      if (!status.ok()) return;
      staging.resize(static_cast<std::size_t>(block.volume()) * (meta.bits() / 8));
      const BufferView view = BufferView::Host(meta.dtype(), staging.data(), block.extent());
      const std::uint64_t before = stats.bytes_read;
      status = checkpoint.Read(entry, block, view, target.verify, &stats, nullptr);
      read(stats.bytes_read - before);
      for (const PlacedBox& to : target.elements) {
        if (!status.ok()) break;
        status = target.device == nullptr
                     ? ConvertBlock(meta, block, staging.data(), target.to, target.base, to)
                     : ConvertToDevice(meta, block, staging.data(), target, to);
      }
    });
  }
  return status;
}

}  // namespace tensormount
