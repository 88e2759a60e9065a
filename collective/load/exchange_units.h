// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_UNITS_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_UNITS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "collective/load/load_plan.h"
#include "collective/load/target.h"
#include "index/read/checkpoint.h"

// What is read once in a group of ranks, by whom, and who gets which part of it. Every rank of the
// group works it out for itself, the same.

//
// Example: 4 ranks want a quarter of the columns each of a tensor stored in rows, 8 MiB a chunk:
// all four want some of every row. A unit is 512 KiB of consecutive rows, read by one of the four
// in turn (whoever has read least), who keeps its quarter of each row and sends three.

namespace tensormount {

// What is read at once: stays in the cache of a core until it is cut up.
inline constexpr std::uint64_t kUnitBytes = 512u << 10;

// A part of a chunk that is one run of its file and wanted by somebody of the group.
struct ExchangeUnit {
  std::uint32_t tensor = 0;  // Position in the plan.
  Box box;                   // Of elements.
  std::uint32_t file = 0;    // Where it stands.
  std::uint64_t offset = 0;
  int reader = -1;  // One of those who want it.
};

// A box of bytes of a unit, and who wants it.
struct ExchangeBox {
  Box bytes;
  std::vector<int> receivers;     // Ranks but the reader; rising.
  std::vector<LoadTarget*> mine;  // Of this rank.
  std::uint64_t size() const { return static_cast<std::uint64_t>(bytes.volume()); }
};

// Works out which ranks read what in a load by exchange. Nothing of it is sent: every rank does it
// for itself from the plan, which all have, and comes to the same units in the same order. So it
// must not look at anything that differs between ranks but `targets` and `rank`, which say only
// what this rank does with the bytes.
class ExchangeUnits {
 public:
  // `targets` are this rank's, in the order of the plan. Of the tensors that the plan exchanges
  // only those that are `wanted`: the same on all ranks.
  using Wanted = std::function<bool(const PlannedTensor& tensor)>;
  ExchangeUnits(const OpenedCheckpoint& checkpoint, const LoadPlan& plan,
                std::span<LoadTarget> targets, int rank, Wanted wanted);

  // Units for the next few GiB that the plan exchanges, wanted by this group or not: all groups
  // make as many steps. False where nothing was left. Every cell that this rank wants of them
  // stands in exactly one chunk: a hole is kDataLoss here, before anything of them is moved.
  Result<bool> Next();

  const std::vector<ExchangeUnit>& units() const { return units_; }
  const PlannedTensor& tensor(const ExchangeUnit& unit) const { return plan_.tensors[unit.tensor]; }
  // Of all units.
  std::uint64_t bytes() const;
  // The unit's bytes, packed from 0 on.
  PlacedBox BytesOf(const ExchangeUnit& unit) const;
  // In an order that all ranks of the group know.
  std::vector<ExchangeBox> PiecesOf(const ExchangeUnit& unit) const;

 private:
  // What one rank of the group wants of a tensor, as disjoint boxes of bytes.
  struct Want {
    int rank = 0;
    std::vector<Box> bytes;
    LoadTarget* target = nullptr;  // Of this rank.
  };
  // What is worked out once for each tensor that has units in this step.
  struct Prepared {
    std::vector<Want> wants;           // Of this group.
    std::vector<ExchangeUnit> chunks;  // Whole ones, which nobody reads yet.
  };

  Status Prepare(std::size_t tensor);
  // Cuts a chunk into units, and gives each to one of those who want some of it.
  void AddUnits(const ExchangeUnit& chunk);

  const OpenedCheckpoint& checkpoint_;
  const LoadPlan& plan_;
  const int rank_;
  const Wanted wanted_;
  std::vector<std::vector<LoadTarget*>> mine_;  // By position in the plan.
  std::uint64_t group_size_ = 1;
  std::vector<bool> in_group_;       // By rank.
  std::vector<std::uint64_t> load_;  // Bytes that each rank reads so far.
  std::size_t next_tensor_ = 0;
  std::size_t next_chunk_ = 0;
  std::map<std::size_t, Prepared> prepared_;  // Tensors of the units.
  std::vector<ExchangeUnit> units_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_UNITS_H_
