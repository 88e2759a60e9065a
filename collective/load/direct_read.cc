// SPDX-License-Identifier: Apache-2.0
// Reads the data that a rank does not get by exchange, with several threads: one thread copies from
// the page cache at a fifth of a device bus's speed, and storage can serve many threads at once. A
// thread works on one target at a time, or on a part of a target in device memory. Small
// consecutive targets are combined.
#include "collective/load/direct_read.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "index/read/prefetch.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// Small targets are combined up to this size, about one millisecond of work for a thread.
constexpr std::uint64_t kTogetherBytes = std::uint64_t{4} << 20;
constexpr int kMostReadThreads = 12;
// Largest part of a target that is brought from storage and then read.
constexpr std::uint64_t kColdBytes = std::uint64_t{16} << 20;

// From this mean size of the targets on, reads from a server need nothing brought ahead.
constexpr std::uint64_t kLongBytes = std::uint64_t{8} << 20;

// Threads that read from a server: while some hash what has come, others wait for answers.
constexpr int kFarThreads = 4;

struct Share {
  LoadTarget* target = nullptr;
  bool whole = true;
  PlacedBox part;
};
struct ReadBatch {
  std::size_t first = 0;  // Index in shares_.
  std::size_t count = 0;
};

class DirectReader {
 public:
  DirectReader(const OpenedCheckpoint& checkpoint, const DirectReadRules& rules)
      : checkpoint_(checkpoint), rules_(rules) {}

  Result<DirectReadReport> Run(std::span<LoadTarget> targets) {
    for (LoadTarget& target : targets) {
      if (IsExchanged(target)) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          target.verify,
          ChooseReadVerify(checkpoint_.index(), *target.tensor, target.wanted().region,
                           rules_.verify, target.device != nullptr));
      target.digested = IsDigestedOnArrival(target);
      const TensorMeta& meta = target.tensor->entry().meta;
      if (target.digested) target.arrived.byte_shape = ByteShape(meta.dtype(), meta.shape());
      report_.bytes += target.bytes;
    }
    // Targets are in file order, so read-ahead pays.
    const std::shared_ptr<const void> in_order = checkpoint_.ReadInOrder();
    // Data that are not in the page cache are brought ahead of the reads, which get smaller parts.
    const bool far = !checkpoint_.fs().Can(Ability::kKernelFiles);
    const bool cold =
        !(far && AreLong(targets)) && Prefetcher::LooksCold(checkpoint_, WholeReads(targets));
    // The ranks of a machine share its page cache, but not what comes from a server.
    const int readers = rules_.one_machine && !far ? rules_.ranks_here : 1;
    for (LoadTarget& target : targets) {
      if (!IsExchanged(target)) AddShares(target, cold && MaySplit(target, readers));
    }
    if (cold) {
      prefetcher_ = std::make_unique<Prefetcher>(
          checkpoint_, PartReads(readers),
          Prefetcher::Options{readers > 1 ? rules_.rank_here : 0, readers, rules_.cancel});
    }
    TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Staging>(
        batches_.size(), far ? std::max(rules_.threads, kFarThreads) : rules_.threads,
        [this](std::size_t i, Staging& staging) { return Read(batches_[i], staging); }));
    return report_;
  }

 private:
  // Whether the digest of what arrives is taken. A device computes it faster than the host compares
  // leaves; the host takes it of the blocks of which it cannot compare every leaf, while they are
  // in its cache.
  bool IsDigestedOnArrival(const LoadTarget& target) const {
    if (target.convert) return false;
    if (target.device != nullptr) {
      return MayProveByDigest(rules_.verify) && target.verify == ReadVerify::kOff;
    }
    return rules_.verify == LoadVerify::kAuto && target.verify == ReadVerify::kWholeLeaves;
  }
  static bool IsExchanged(const LoadTarget& target) {
    return target.tensor->exchange && !target.convert;
  }
  // Whether a server works well enough on one read at a time: long ones are many requests, whose
  // answers go straight to the target.
  bool AreLong(std::span<const LoadTarget> targets) const {
    return report_.bytes / std::max<std::size_t>(targets.size(), 1) >= kLongBytes;
  }
  static std::vector<Prefetcher::Read> WholeReads(std::span<const LoadTarget> targets) {
    std::vector<Prefetcher::Read> reads;
    for (const LoadTarget& target : targets) {
      if (IsExchanged(target) || target.placed.empty()) continue;
      reads.push_back({&target.tensor->entry(), target.placed});
    }
    return reads;
  }
  // A read for each share, which wants nothing where elements are converted. If the ranks of this
  // machine want as much of a tensor as it has, they want all of it.
  std::vector<Prefetcher::Read> PartReads(int readers) const {
    std::vector<Prefetcher::Read> reads;
    for (const Share& share : shares_) {
      const LoadTarget& target = *share.target;
      const TensorEntry& entry = target.tensor->entry();
      const std::uint64_t of_all = target.bytes * static_cast<std::uint64_t>(readers);
      const bool all = share.whole && readers > 1 && !target.placed.empty() &&
                       of_all >= entry.meta.bytes() - entry.meta.bytes() / 8;
      reads.push_back(
          {&entry,
           share.whole ? std::span(std::as_const(target.placed)) : std::span(&share.part, 1), all});
    }
    return reads;
  }
  // Whether a part of a large target is read without most of the others. Parts of a transposed
  // chunk are not.
  bool MaySplit(const LoadTarget& target, int readers) const {
    if (target.convert || target.placed.empty() || target.bytes <= kColdBytes) return false;
    std::optional<PlacedBox> first;
    SplitBox(target.placed.front().box, 1, kColdBytes, [&](const Box& box) {
      if (!first) first = PartOfPlaced(target.placed.front(), box);
    });
    const auto stretches = checkpoint_.StretchesOf(target.tensor->entry(), {&*first, 1}, readers);
    if (!stretches.ok() || stretches.value().empty()) return false;
    std::uint64_t bytes = 0;
    for (const auto& stretch : stretches.value()) bytes += stretch.bytes.size();
    return bytes <= 2 * kColdBytes * static_cast<std::uint64_t>(readers);
  }

  struct Staging {
    std::vector<std::byte> bytes;
    std::size_t counted = 0;  // Bytes counted in the report so far.
  };

  void AddShares(LoadTarget& target, bool split) {
    if ((target.device == nullptr && !split) || target.convert) {
      return Add({&target, true, {}}, target.bytes);
    }
    const std::uint64_t most =
        target.device != nullptr ? target.device->ring->block_bytes() : kColdBytes;
    for (const PlacedBox& to : target.placed) {
      SplitBox(to.box, 1, most, [&](const Box& box) {
        Add({&target, false, PartOfPlaced(to, box)}, static_cast<std::uint64_t>(box.volume()));
      });
    }
  }
  void Add(Share share, std::uint64_t bytes) {
    if (batches_.empty() || batch_bytes_ + bytes > kTogetherBytes) {
      batches_.push_back({shares_.size(), 0});
      batch_bytes_ = 0;
    }
    ++batches_.back().count;
    batch_bytes_ += bytes;
    shares_.push_back(std::move(share));
  }

  Status Read(const ReadBatch& batch, Staging& staging) {
    for (std::size_t i = batch.first; i < batch.first + batch.count; ++i) {
      const Share& share = shares_[i];
      if (rules_.cancel != nullptr && rules_.cancel->load()) {
        return {Code::kCancelled, "the load was cancelled"};
      }
      if (prefetcher_ != nullptr) prefetcher_->Await(i);
      ReadStats stats;
      LoadTarget& target = *share.target;
      if (target.convert) {
        TENSORMOUNT_RETURN_IF_ERROR(
            ReadConverted(checkpoint_, target, staging.bytes, stats, rules_.read));
      } else {
        TENSORMOUNT_RETURN_IF_ERROR(
            ReadTarget(checkpoint_, target, share.whole ? nullptr : &share.part, stats));
        rules_.read(stats.bytes_read);
      }
      std::lock_guard lock(mutex_);
      target.stats.Add(stats);
      report_.peak_buffer_bytes += staging.bytes.capacity() - staging.counted;
      staging.counted = staging.bytes.capacity();
    }
    return {};
  }

  const OpenedCheckpoint& checkpoint_;
  const DirectReadRules& rules_;
  std::vector<Share> shares_;
  std::vector<ReadBatch> batches_;
  std::uint64_t batch_bytes_ = 0;  // Bytes of the last batch.
  std::mutex mutex_;
  DirectReadReport report_;
  std::unique_ptr<Prefetcher> prefetcher_;  // Null: the data are in the page cache.
};

}  // namespace

Result<DirectReadReport> ReadDirectly(const OpenedCheckpoint& checkpoint,
                                      std::span<LoadTarget> targets, const DirectReadRules& rules) {
  return DirectReader(checkpoint, rules).Run(targets);
}

int ReadThreads(int asked, int ranks_here) {
  if (asked > 0) return asked;
  return std::clamp(static_cast<int>(HostCores()) / std::max(ranks_here, 1), 1, kMostReadThreads);
}

}  // namespace tensormount
