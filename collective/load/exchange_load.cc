// SPDX-License-Identifier: Apache-2.0
#include "collective/load/exchange_load.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// What is read at once: stays in the cache of a core until it is cut up.
constexpr std::uint64_t kUnitBytes = 512u << 10;
// Small tensors are cut finer, so that every rank reads some, but not finer than this.
constexpr std::uint64_t kLeastUnitBytes = 64u << 10;
// What a rank reads between two exchanges: large beside the cost of a round, small beside a cache
// that the ranks share.
constexpr std::uint64_t kRoundBytes = 4u << 20;
// Shorter runs are cheaper copied out of a block than read one by one.
constexpr std::uint64_t kShortestPiece = 512;
// Units are planned for this much at a time, so that a plan never grows with the model.
constexpr std::uint64_t kBatchBytes = std::uint64_t{4} << 30;
// Data files that are open at a time.
constexpr std::size_t kMaxFiles = 64;
// Rounds between two checks whether everybody could read.
constexpr std::size_t kRoundsPerVerdict = 64;

// A part of a chunk that is one run of its file, wanted by somebody.
struct Unit {
  std::uint32_t tensor = 0;  // Position in the plan.
  Box box;                   // Of elements.
  PlacedBox bytes;           // The same in bytes, packed at 0.
  std::uint32_t file = 0;    // Where it stands.
  std::uint64_t offset = 0;
};

// Memory that is only ever overwritten: growing does not clear or keep anything.
class Bytes {
 public:
  void Reserve(std::uint64_t wanted) {
    if (wanted <= capacity_) return;
    memory_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(wanted));
    capacity_ = wanted;
  }
  std::byte* data() { return memory_.get(); }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::uint64_t capacity_ = 0;
};

class Exchanger {
 public:
  Exchanger(FileSystem& fs, const OpenedCheckpoint& checkpoint, Collective& collective,
            std::span<const PlannedTensor> tensors, std::span<LoadTarget> targets,
            LoadVerify verify, std::atomic<std::uint64_t>* progress)
      : fs_(fs),
        checkpoint_(checkpoint),
        collective_(collective),
        tensors_(tensors),
        verify_(verify),
        progress_(progress) {
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
    // Element boxes of the chunks and where they stand, in file order.
    struct Stored {
      Box box;
      std::uint32_t file = 0;
      std::uint64_t offset = 0;
    };
    std::vector<Stored> chunks;
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
      std::uint64_t offset = chunk.offset;
      for (const Box& box : chunk.region.Boxes()) {
        prepared.chunks.push_back({box, chunk.file, offset});
        offset += static_cast<std::uint64_t>(box.volume()) * (meta.bits() / 8);
      }
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
    for (const Prepared::Stored& chunk : boxes_[t].chunks) {
      std::uint64_t offset = chunk.offset;  // Units are consecutive runs of the chunk.
      SplitBox(chunk.box, meta.bits() / 8, unit_bytes, [&](const Box& box) {
        // Cannot fail: the box is a part of a chunk whose bytes were placed before.
        const Region bytes = ByteRegion(meta.dtype(), meta.shape(), box).value();
        Unit unit{static_cast<std::uint32_t>(t), box, PlacePacked(bytes, 0).front(), chunk.file,
                  offset};
        offset += static_cast<std::uint64_t>(unit.bytes.box.volume());
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

  // A part of a unit that one rank wants.
  struct Part {
    int rank = 0;
    Box bytes;
    LoadTarget* target = nullptr;  // Of this rank's parts.
    std::uint64_t size() const { return static_cast<std::uint64_t>(bytes.volume()); }
  };
  // Bytes of a unit that stand together in the file and in memory.
  struct FileRun {
    std::uint64_t at = 0;  // From the unit's first byte.
    std::byte* to = nullptr;
    std::uint64_t size = 0;
  };
  struct Arrival {
    Part part;
    const std::byte* bytes = nullptr;
  };

  // Reads a unit and cuts it up: what this rank wants goes into its buffers, what others want
  // follows each other from `out` on and is added to what is sent. Returns bytes used of `out`.
  std::uint64_t ReadUnit(std::size_t number, std::byte* out) {
    const Unit& unit = units_[number];
    const PlannedTensor& tensor = tensors_[unit.tensor];
    if (UnitVerify(tensor) == ReadVerify::kOff && CutIntoRuns(number, out)) {
      if (failure_.ok()) failure_ = ReadRuns(unit);
      return PostParts(number, out);
    }
    unit_.Reserve(static_cast<std::uint64_t>(unit.bytes.box.volume()));
    if (failure_.ok()) {
      const BufferView view =
          BufferView::Host(tensor.entry.meta.dtype(), unit_.data(), unit.box.extent());
      failure_ =
          checkpoint_.Read(tensor.entry, unit.box, view, UnitVerify(tensor), &stats_, nullptr);
    }
    std::uint64_t used = 0;
    ForEachPartOf(number, number + 1, [&](const Part& part) {
      if (part.rank == collective_.rank()) {
        Place(unit.bytes, unit_.data(), part.bytes, *part.target);
        return;
      }
      ExecuteCopy(PlanCopy(part.bytes, unit.bytes, PlacePacked(Region(part.bytes), 0).front()),
                  unit_.data(), out + used);
      used += part.size();
    });
    return PostParts(number, out);
  }

  // What others want of a unit stands in the order of the parts from `out` on: sends it, and
  // returns how much it is.
  std::uint64_t PostParts(std::size_t number, std::byte* out) {
    std::uint64_t used = 0;
    ForEachPartOf(number, number + 1, [&](const Part& part) {
      if (part.rank == collective_.rank()) return;
      sends_.push_back({part.rank, out + used, part.size()});
      used += part.size();
    });
    return used;
  }

  // The runs of a unit and where each goes, in file order, in runs_: then one read both fetches
  // the unit and cuts it up. False where runs are too short for that, or wanted twice.
  bool CutIntoRuns(std::size_t number, std::byte* out) {
    const Unit& unit = units_[number];
    runs_.clear();
    bool good = true;
    ForEachPartOf(number, number + 1, [&](const Part& part) {
      const auto add = [&](const StridedCopy& copy, std::byte* base) {
        good = good && copy.run >= kShortestPiece;
        if (!good) return;
        copy.ForEachRun([&](std::int64_t from, std::int64_t to, std::uint64_t size) {
          runs_.push_back({static_cast<std::uint64_t>(from), base + to, size});
        });
      };
      if (part.rank != collective_.rank()) {
        add(PlanCopy(part.bytes, unit.bytes, PlacePacked(Region(part.bytes), 0).front()), out);
        out += part.size();
        return;
      }
      for (const PlacedBox& to : part.target->placed) {
        const Box common = Intersect(part.bytes, to.box);
        if (!common.empty()) add(PlanCopy(common, unit.bytes, to), part.target->base);
      }
    });
    if (!good) return false;
    std::sort(runs_.begin(), runs_.end(),
              [](const FileRun& a, const FileRun& b) { return a.at < b.at; });
    for (std::size_t i = 1; i < runs_.size(); ++i) {
      if (runs_[i].at < runs_[i - 1].at + runs_[i - 1].size) return false;
    }
    return true;
  }

  Status ReadRuns(const Unit& unit) {
    const TensorMeta& meta = tensors_[unit.tensor].entry.meta;
    const std::string name = checkpoint_.FilePath(unit.file);
    const auto failed = [&](const Status& why) {
      return why.WithContext("tensor " + meta.key() + " " + unit.box.ToString());
    };
    // Units come in file order, so old ones are done with; thousands would pass the limit.
    if (files_.size() >= kMaxFiles && !files_.contains(unit.file)) files_.clear();
    std::unique_ptr<File>& file = files_[unit.file];
    if (file == nullptr) {
      Result<std::unique_ptr<File>> opened = fs_.OpenRead(name);
      if (opened.status().code() == Code::kNotFound) {
        return failed(Status(Code::kDataLoss, name + ": the file is missing"));
      }
      if (!opened.ok()) return failed(opened.status());
      file = std::move(opened).value();
    }
    // What nobody wants between two runs goes where nobody looks.
    pieces_.clear();
    std::uint64_t at = 0;
    for (const FileRun& run : runs_) {
      for (; at < run.at; at += pieces_.back().size) {
        unit_.Reserve(kUnitBytes);
        pieces_.push_back({unit_.data(), std::min(run.at - at, kUnitBytes)});
      }
      pieces_.push_back({run.to, run.size});
      at += run.size;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got, file->ReadPiecesAt(unit.offset, pieces_));
    stats_.bytes_read += got;
    if (got == at) return {};
    return failed(Status(Code::kDataLoss, name + ": byte " + std::to_string(unit.offset + got) +
                                              ": the file ends here"));
  }

  ReadVerify UnitVerify(const PlannedTensor& tensor) const {
    if (verify_ == LoadVerify::kOff) return ReadVerify::kOff;
    // The digest proves the way from the disk to the last buffer at once.
    return tensor.proof.possible ? ReadVerify::kOff : ReadVerify::kExtendLeaves;
  }

  // Calls fn(part) for every part of units [begin, end) that somebody wants, in an order that all
  // ranks know.
  template <typename Fn>
  void ForEachPartOf(std::size_t begin, std::size_t end, Fn fn) const {
    for (std::size_t u = begin; u < end; ++u) {
      const Unit& unit = units_[u];
      const std::vector<LoadWant>& wants = tensors_[unit.tensor].wants;
      std::size_t mine = 0;
      for (std::size_t w = 0; w < wants.size(); ++w) {
        Part part;
        part.rank = wants[w].rank;
        if (part.rank == collective_.rank()) part.target = mine_[unit.tensor][mine++];
        for (const Box& wanted : boxes_[unit.tensor].wants[w]) {
          part.bytes = Intersect(unit.bytes.box, wanted);
          if (!part.bytes.empty()) fn(part);
        }
      }
    }
  }

  // Where the bytes of a part stand in the buffer, if they are one run there; otherwise null.
  static std::byte* ContiguousPlace(const Part& part) {
    for (const PlacedBox& to : part.target->placed) {
      if (!to.box.Contains(part.bytes)) continue;
      const StridedCopy copy = PlanCopy(part.bytes, PlacePacked(Region(part.bytes), 0).front(), to);
      return copy.axes == 0 ? part.target->base + copy.dst_offset : nullptr;
    }
    return nullptr;
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
    for (std::size_t first = 0; first < count; first += ranks) {
      const std::size_t present = std::min(ranks, count - first);
      // One message a part, so that most of them arrive where they belong without another copy.
      std::uint64_t outgoing = 0;
      std::uint64_t incoming = 0;
      for (std::size_t k = 0; k < present; ++k) {
        ForEachPartOf(groups[first + k], groups[first + k + 1], [&](const Part& part) {
          if (k == me && part.rank != collective_.rank()) outgoing += part.size();
          if (k != me && part.rank == collective_.rank()) incoming += part.size();
        });
      }
      outgoing_.Reserve(outgoing);
      incoming_.Reserve(incoming);
      received_ += incoming;
      sends_.clear();
      receives_.clear();
      scatters_.clear();
      incoming = 0;
      for (std::size_t k = 0; k < present; ++k) {
        if (k == me) continue;
        ForEachPartOf(groups[first + k], groups[first + k + 1], [&](const Part& part) {
          if (part.rank != collective_.rank()) return;
          std::byte* to = ContiguousPlace(part);
          if (to == nullptr) {
            to = incoming_.data() + incoming;
            incoming += part.size();
            scatters_.push_back({part, to});
          }
          receives_.push_back({static_cast<int>(k), to, part.size()});
        });
      }
      if (me < present) {
        outgoing = 0;
        for (std::size_t u = groups[first + me]; u < groups[first + me + 1]; ++u) {
          const std::uint64_t before = stats_.bytes_read;
          outgoing += ReadUnit(u, outgoing_.data() + outgoing);
          if (progress_ != nullptr) progress_->fetch_add(stats_.bytes_read - before);
        }
      }
      TENSORMOUNT_RETURN_IF_ERROR(collective_.Exchange(sends_, receives_, "load: exchange"));
      for (const Arrival& arrival : scatters_) {
        Place(PlacePacked(Region(arrival.part.bytes), 0).front(), arrival.bytes, arrival.part.bytes,
              *arrival.part.target);
      }
      if ((first / ranks + 1) % kRoundsPerVerdict == 0) {
        TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(failure_, "load: read"));
      }
    }
    units_.clear();
    return {};
  }

  FileSystem& fs_;
  const OpenedCheckpoint& checkpoint_;
  Collective& collective_;
  std::span<const PlannedTensor> tensors_;
  const LoadVerify verify_;
  std::atomic<std::uint64_t>* const progress_;
  std::vector<Prepared> boxes_;                 // By position in the plan.
  std::vector<std::vector<LoadTarget*>> mine_;  // Likewise.
  std::vector<Unit> units_;
  Bytes unit_;
  std::vector<FileRun> runs_;
  std::vector<File::Piece> pieces_;
  std::map<std::uint32_t, std::unique_ptr<File>> files_;  // By number.
  Bytes outgoing_;
  Bytes incoming_;
  std::vector<Collective::Transfer> sends_;
  std::vector<Collective::Transfer> receives_;
  std::vector<Arrival> scatters_;
  Status failure_;
  ReadStats stats_;
  std::uint64_t received_ = 0;
};

}  // namespace

Status LoadByExchange(FileSystem& fs, const OpenedCheckpoint& checkpoint, Collective& collective,
                      std::span<const PlannedTensor> tensors, std::span<LoadTarget> targets,
                      LoadVerify verify, std::uint64_t* read, std::uint64_t* received,
                      std::atomic<std::uint64_t>* progress) {
  const bool any = std::any_of(tensors.begin(), tensors.end(),
                               [](const PlannedTensor& tensor) { return tensor.exchange; });
  if (!any) return {};
  Exchanger exchanger(fs, checkpoint, collective, tensors, targets, verify, progress);
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
