// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_UNITS_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_UNITS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "base/byte_range.h"
#include "collective/load/load_plan.h"
#include "collective/load/target.h"
#include "index/read/checkpoint.h"

// The units of a load by exchange: what is read once in a group of ranks, by which rank, and which
// rank gets which part. Every rank of the group computes the same units.
//
// Example: 4 ranks want a quarter of the columns each of a tensor stored in rows, 8 MiB a chunk:
// all four want some of every row. A unit is 512 KiB of consecutive rows, read by the one of the
// four that has read least so far; the reader keeps its quarter of each row and sends the other
// three.

namespace tensormount {

// Maximum size of a unit, in bytes, so that a unit stays in a core's cache until it is cut up.
inline constexpr std::uint64_t kUnitBytes = 512u << 10;

// A part of a chunk that is one run of its file and that some rank of the group wants.
struct ExchangeUnit {
  std::uint32_t tensor = 0;  // Position in the plan.
  Box box;                   // Box of elements.
  std::uint32_t file = 0;    // Data file and offset of the run.
  std::uint64_t offset = 0;
  int reader = -1;  // The rank that reads the unit; -1: not chosen yet.
};

// A box of bytes of a unit, and the ranks that want it.
struct ExchangeBox {
  Box bytes;
  std::vector<int> receivers;     // Ranks that get the box from the reader; rising.
  std::vector<LoadTarget*> mine;  // This rank's targets that want the box.
  std::uint64_t size() const { return static_cast<std::uint64_t>(bytes.volume()); }
};

// Computes which ranks read which units. Nothing is sent: every rank has the plan and computes the
// same units in the same order. So the computation must not depend on anything that differs between
// ranks; `targets` and `rank` only say what this rank does with the bytes.
class ExchangeUnits {
 public:
  // `targets` are this rank's targets, in the order of the plan. Only tensors for which `wanted`
  // returns true are exchanged; `wanted` must return the same on all ranks.
  using TensorFilter = std::function<bool(const PlannedTensor& tensor)>;
  ExchangeUnits(const OpenedCheckpoint& checkpoint, const LoadPlan& plan,
                std::span<LoadTarget> targets, int rank, TensorFilter wanted);

  // Makes the units of the next batch, a few GiB of chunks. Returns false if no chunk was left. All
  // groups of ranks have the same number of batches, even if a batch has no unit for a group. Each
  // cell that this rank wants must be in exactly one chunk: a hole fails with kDataLoss before any
  // byte of the batch is moved.
  Result<bool> Next();

  const std::vector<ExchangeUnit>& units() const { return units_; }
  const PlannedTensor& tensor(const ExchangeUnit& unit) const { return plan_.tensors[unit.tensor]; }
  std::uint64_t bytes() const;
  // The unit's bytes, packed from offset 0.
  PlacedBox BytesOf(const ExchangeUnit& unit) const;
  // The blocks of a unit, in an order that is the same on all ranks of the group.
  std::vector<ExchangeBox> BlocksOf(const ExchangeUnit& unit) const;

 private:
  // The part of a tensor that one rank of the group wants, as disjoint boxes of bytes.
  struct UnitRequest {
    int rank = 0;
    std::vector<Box> bytes;
    LoadTarget* target = nullptr;  // Null for requests of other ranks.
  };
  // Computed once for each tensor of a batch.
  struct Prepared {
    std::vector<UnitRequest> wants;    // Requests of the ranks of this group.
    std::vector<ExchangeUnit> chunks;  // The tensor's chunks; `reader` is not set.
  };

  Status Prepare(std::size_t tensor);
  // Cuts a chunk into units, and chooses the reader of each among the ranks that want some of it.
  void AddUnits(const ExchangeUnit& chunk);
  // Whether the unit, of `size` bytes, should have the same reader as the last one.
  bool GoesOn(const ExchangeUnit& unit, std::uint64_t size) const;

  const OpenedCheckpoint& checkpoint_;
  const LoadPlan& plan_;
  const int rank_;
  const TensorFilter wanted_;
  // This rank's targets, by position of the tensor in the plan.
  std::vector<std::vector<LoadTarget*>> mine_;
  std::uint64_t group_size_ = 1;
  std::vector<bool> in_group_;       // By rank: whether the rank is in this rank's group.
  std::vector<std::uint64_t> load_;  // Bytes assigned to each rank so far.
  // Behind a server: the reader of the last unit, and the range of its file that the rank reads at
  // one go.
  const bool far_;
  int far_reader_ = -1;
  std::uint32_t far_file_ = 0;
  ByteRange far_range_;
  std::size_t next_tensor_ = 0;
  std::size_t next_chunk_ = 0;
  std::map<std::size_t, Prepared> prepared_;  // Tensors of this batch.
  std::vector<ExchangeUnit> units_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_UNITS_H_
