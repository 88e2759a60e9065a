// SPDX-License-Identifier: Apache-2.0
// Reads the data that a rank does not get by exchange, with several threads: one thread copies from
// the page cache at a fifth of a device bus's speed, and storage can serve many threads at once. A
// thread works on one target at a time, or on a part of a target in device memory. Small
// consecutive targets are combined.
#include "collective/load/direct_read.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// Small targets are combined up to this size, about one millisecond of work for a thread.
constexpr std::uint64_t kTogetherBytes = std::uint64_t{4} << 20;
constexpr int kMostReadThreads = 12;

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
      if (target.tensor->exchange && !target.convert) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          target.verify,
          ChooseReadVerify(checkpoint_.index(), *target.tensor, target.wanted().region,
                           rules_.verify, target.device != nullptr));
      target.digested = target.device != nullptr && !target.convert &&
                        rules_.verify == LoadVerify::kAuto && target.verify == ReadVerify::kOff;
      const TensorMeta& meta = target.tensor->entry().meta;
      if (target.digested) target.arrived.byte_shape = ByteShape(meta.dtype(), meta.shape());
      AddShares(target);
      report_.bytes += target.bytes;
    }
    // Targets are in file order, so read-ahead pays.
    const std::shared_ptr<const void> in_order = checkpoint_.ReadInOrder();
    TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Staging>(
        batches_.size(), rules_.threads,
        [this](std::size_t i, Staging& staging) { return Read(batches_[i], staging); }));
    return report_;
  }

 private:
  struct Staging {
    std::vector<std::byte> bytes;
    std::size_t counted = 0;  // Bytes counted in the report so far.
  };

  void AddShares(LoadTarget& target) {
    if (target.device == nullptr || target.convert) return Add({&target, true, {}}, target.bytes);
    for (const PlacedBox& to : target.placed) {
      SplitBox(to.box, 1, target.device->ring->block_bytes(), [&](const Box& box) {
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
    for (const Share& share : std::span(shares_).subspan(batch.first, batch.count)) {
      if (rules_.cancel != nullptr && rules_.cancel->load()) {
        return {Code::kCancelled, "the load was cancelled"};
      }
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
