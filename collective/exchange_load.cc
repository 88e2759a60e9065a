// SPDX-License-Identifier: Apache-2.0
#include "collective/exchange_load.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// What is read at once: stays in the cache of a core until it is cut up.
constexpr std::uint64_t kUnitBytes = 1u << 20;
// Small tensors are cut finer, so that every rank reads some, but not finer than this.
constexpr std::uint64_t kLeastUnitBytes = 64u << 10;
// What a rank reads between two exchanges: large beside the cost of a round, small beside a cache
// that the ranks share.
constexpr std::uint64_t kRoundBytes = 4u << 20;
// Units are planned for this much at a time, so that a plan never grows with the model.
constexpr std::uint64_t kBatchBytes = std::uint64_t{4} << 30;
// Rounds between two checks whether everybody could read.
constexpr std::size_t kRoundsPerVerdict = 64;

// A part of a chunk that is one run of its file, wanted by somebody.
struct Unit {
  std::uint32_t tensor = 0;  // Position in the plan.
  Box box;                   // Of elements.
  PlacedBox bytes;           // The same in bytes, packed at 0.
};

class Exchanger {
 public:
  Exchanger(const OpenedCheckpoint& checkpoint, Collective& collective,
            std::span<const PlannedTensor> tensors, std::span<LoadTarget> targets,
            LoadVerify verify)
      : checkpoint_(checkpoint),
        collective_(collective),
        tensors_(tensors),
        verify_(verify),
        outgoing_(static_cast<std::size_t>(collective.size())),
        incoming_(static_cast<std::size_t>(collective.size())) {
    boxes_.resize(tensors.size());
    mine_.resize(tensors.size());
    for (LoadTarget& target : targets) {
      const auto t = static_cast<std::size_t>(target.tensor - tensors_.data());
      if (tensors_[t].exchange) mine_[t].push_back(&target);
    }
  }

  Status Run() {
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      if (!tensors_[t].exchange) continue;
      // A failure here must not keep this rank from the rounds that the others make, so it is
      // agreed on before the first of them.
      if (failure_.ok()) failure_ = PrepareTensor(t);
    }
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(failure_, "load: plan the exchange"));
    std::uint64_t batch = 0;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      if (!tensors_[t].exchange) continue;
      AddUnits(t);
      batch += tensors_[t].entry.meta.bytes();
      if (batch >= kBatchBytes) {
        TENSORMOUNT_RETURN_IF_ERROR(RunRounds());
        batch = 0;
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(RunRounds());
    return collective_.Agree(failure_, "load: read");
  }

  std::uint64_t read() const { return stats_.bytes_read; }
  std::uint64_t received() const { return received_; }

 private:
  struct Prepared {
    std::vector<std::vector<Box>> wants;  // Byte boxes of each want.
    std::vector<Box> chunks;              // Element boxes of the chunks, in file order.
  };

  Status PrepareTensor(std::size_t t) {
    const PlannedTensor& tensor = tensors_[t];
    const TensorMeta& meta = tensor.entry.meta;
    Prepared& prepared = boxes_[t];
    for (const LoadWant& want : tensor.wants) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                   ByteRegion(meta.dtype(), meta.shape(), want.region));
      prepared.wants.push_back(bytes.Boxes());
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> extents,
                                 checkpoint_.index().Extents(tensor.entry.ordinal));
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ChunkRecord> chunks, extents->All());
    std::sort(chunks.begin(), chunks.end(), [](const ChunkRecord& a, const ChunkRecord& b) {
      return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
    });
    std::vector<std::vector<PlacedBox>> placed;
    for (const ChunkRecord& chunk : chunks) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                   ByteRegion(meta.dtype(), meta.shape(), chunk.region));
      placed.push_back(PlacePacked(bytes, 0));
      for (const Box& box : chunk.region.Boxes()) prepared.chunks.push_back(box);
    }
    // Every cell that this rank wants stands in exactly one chunk: a hole is found before any byte
    // is moved.
    for (const LoadTarget* target : mine_[t]) {
      Result<CopyPlan> plan = CopyPlan::Make(target->placed, placed, &meta);
      if (!plan.ok()) return plan.status();
    }
    return {};
  }

  void AddUnits(std::size_t t) {
    const TensorMeta& meta = tensors_[t].entry.meta;
    const std::uint64_t unit_bytes = std::clamp(
        meta.bytes() / static_cast<std::uint64_t>(collective_.size()), kLeastUnitBytes, kUnitBytes);
    for (const Box& chunk : boxes_[t].chunks) {
      SplitBox(chunk, meta.bits() / 8, unit_bytes, [&](const Box& box) {
        // Cannot fail: the box is a part of a chunk whose bytes were placed before.
        const Region bytes = ByteRegion(meta.dtype(), meta.shape(), box).value();
        Unit unit{static_cast<std::uint32_t>(t), box, PlacePacked(bytes, 0).front()};
        for (const std::vector<Box>& want : boxes_[t].wants) {
          for (const Box& wanted : want) {
            if (Intersect(unit.bytes.box, wanted).empty()) continue;
            units_.push_back(std::move(unit));
            return;
          }
        }
      });
    }
  }

  // Reads `unit` and cuts it up: what this rank wants goes into its buffers, what others want is
  // appended to what they will be sent.
  void ReadUnit(const Unit& unit) {
    const PlannedTensor& tensor = tensors_[unit.tensor];
    const auto size = static_cast<std::size_t>(unit.bytes.box.volume());
    if (unit_.size() < size) unit_.resize(size);
    if (failure_.ok()) {
      const BufferView view =
          BufferView::Host(tensor.entry.meta.dtype(), unit_.data(), unit.box.extent());
      failure_ =
          checkpoint_.Read(tensor.entry, unit.box, view, UnitVerify(tensor), &stats_, nullptr);
    }
    ForEachPart(unit, [&](int rank, std::size_t own, const Box& part) {
      if (rank == collective_.rank()) {
        Place(unit.bytes, unit_.data(), part, *mine_[unit.tensor][own]);
        return;
      }
      std::vector<std::byte>& out = outgoing_[static_cast<std::size_t>(rank)];
      const std::size_t at = out.size();
      out.resize(at + static_cast<std::size_t>(part.volume()));
      ExecuteCopy(PlanCopy(part, unit.bytes, PlacePacked(Region(part), 0).front()), unit_.data(),
                  out.data() + at);
    });
  }

  ReadVerify UnitVerify(const PlannedTensor& tensor) const {
    if (verify_ == LoadVerify::kOff) return ReadVerify::kOff;
    // The digest proves the way from the disk to the last buffer at once.
    return tensor.proof.possible ? ReadVerify::kOff : ReadVerify::kExtendLeaves;
  }

  // Calls fn(rank, number among that rank's wants of this tensor, bytes) for every part of a unit
  // that somebody wants, in an order that all ranks know.
  template <typename Fn>
  void ForEachPart(const Unit& unit, Fn fn) const {
    const std::vector<LoadWant>& wants = tensors_[unit.tensor].wants;
    int rank = -1;
    std::size_t number = 0;
    for (std::size_t w = 0; w < wants.size(); ++w) {
      number = wants[w].rank == rank ? number + 1 : 0;
      rank = wants[w].rank;
      for (const Box& wanted : boxes_[unit.tensor].wants[w]) {
        const Box part = Intersect(unit.bytes.box, wanted);
        if (!part.empty()) fn(rank, number, part);
      }
    }
  }

  static void Place(const PlacedBox& from, const std::byte* bytes, const Box& part,
                    LoadTarget& target) {
    for (const PlacedBox& to : target.placed) {
      const Box common = Intersect(part, to.box);
      if (common.empty()) continue;
      ExecuteCopy(PlanCopy(common, from, to), bytes, target.base);
    }
  }

  Status RunRounds() {
    const auto ranks = static_cast<std::size_t>(collective_.size());
    const auto me = static_cast<std::size_t>(collective_.rank());
    // Group g of consecutive units is read by rank g % ranks in round g / ranks.
    std::vector<std::size_t> groups = {0};
    std::uint64_t total = 0;
    for (const Unit& unit : units_) total += static_cast<std::uint64_t>(unit.bytes.box.volume());
    const std::uint64_t group_bytes = std::min(kRoundBytes, total / ranks);
    std::uint64_t in_group = 0;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      in_group += static_cast<std::uint64_t>(units_[u].bytes.box.volume());
      if (in_group >= group_bytes || u + 1 == units_.size()) {
        groups.push_back(u + 1);
        in_group = 0;
      }
    }
    const std::size_t count = groups.size() - 1;
    std::vector<Collective::Transfer> sends;
    std::vector<Collective::Transfer> receives;
    for (std::size_t first = 0; first < count; first += ranks) {
      for (std::size_t k = 0; k < ranks; ++k) {
        outgoing_[k].clear();
        incoming_[k].size = 0;
      }
      for (std::size_t k = 0; k < ranks && first + k < count; ++k) {
        for (std::size_t u = groups[first + k]; u < groups[first + k + 1]; ++u) {
          if (k == me) {
            ReadUnit(units_[u]);
          } else {
            ForEachPart(units_[u], [&](int rank, std::size_t, const Box& part) {
              if (static_cast<std::size_t>(rank) == me) {
                incoming_[k].size += static_cast<std::uint64_t>(part.volume());
              }
            });
          }
        }
      }
      sends.clear();
      receives.clear();
      for (std::size_t k = 0; k < ranks; ++k) {
        if (incoming_[k].bytes.size() < incoming_[k].size) {
          incoming_[k].bytes.resize(static_cast<std::size_t>(incoming_[k].size));
        }
        sends.push_back({static_cast<int>(k), outgoing_[k].data(), outgoing_[k].size()});
        receives.push_back({static_cast<int>(k), incoming_[k].bytes.data(), incoming_[k].size});
        received_ += incoming_[k].size;
      }
      TENSORMOUNT_RETURN_IF_ERROR(collective_.Exchange(sends, receives, "load: exchange"));
      for (std::size_t k = 0; k < ranks && first + k < count; ++k) {
        if (k != me) Scatter(k, groups[first + k], groups[first + k + 1]);
      }
      if ((first / ranks + 1) % kRoundsPerVerdict == 0) {
        TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(failure_, "load: read"));
      }
    }
    units_.clear();
    return {};
  }

  // Places what rank `from` sent of its units.
  void Scatter(std::size_t from, std::size_t begin, std::size_t end) {
    const std::byte* bytes = incoming_[from].bytes.data();
    for (std::size_t u = begin; u < end; ++u) {
      ForEachPart(units_[u], [&](int rank, std::size_t own, const Box& part) {
        if (rank != collective_.rank()) return;
        Place(PlacePacked(Region(part), 0).front(), bytes, part, *mine_[units_[u].tensor][own]);
        bytes += part.volume();
      });
    }
  }

  const OpenedCheckpoint& checkpoint_;
  Collective& collective_;
  std::span<const PlannedTensor> tensors_;
  const LoadVerify verify_;
  std::vector<Prepared> boxes_;                 // By position in the plan.
  std::vector<std::vector<LoadTarget*>> mine_;  // Likewise.
  std::vector<Unit> units_;
  std::vector<std::byte> unit_;
  std::vector<std::vector<std::byte>> outgoing_;  // By rank.
  struct Incoming {
    std::vector<std::byte> bytes;  // At least `size`.
    std::uint64_t size = 0;
  };
  std::vector<Incoming> incoming_;
  Status failure_;
  ReadStats stats_;
  std::uint64_t received_ = 0;
};

}  // namespace

Status LoadByExchange(const OpenedCheckpoint& checkpoint, Collective& collective,
                      std::span<const PlannedTensor> tensors, std::span<LoadTarget> targets,
                      LoadVerify verify, std::uint64_t* read, std::uint64_t* received) {
  const bool any = std::any_of(tensors.begin(), tensors.end(),
                               [](const PlannedTensor& tensor) { return tensor.exchange; });
  if (!any) return {};
  Exchanger exchanger(checkpoint, collective, tensors, targets, verify);
  TENSORMOUNT_RETURN_IF_ERROR(exchanger.Run());
  for (LoadTarget& target : targets) {
    if (!target.tensor->exchange) continue;
    target.stats.bytes_wanted = target.bytes;
    const bool by_leaf = verify != LoadVerify::kOff && !target.tensor->proof.possible &&
                         target.tensor->entry.has_digest;
    if (by_leaf) target.stats.bytes_by_leaf = target.bytes;
  }
  *read += exchanger.read();
  *received += exchanger.received();
  return {};
}

}  // namespace tensormount
