// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_WINDOWS_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_WINDOWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "collective/load/exchange_units.h"
#include "device/bulk_mover.h"

// The units of an exchange cut into windows, each of which moves as one exchange of a BulkTransport
// (collective/comm/bulk_transport.h). A window needs bounded memory on each rank; the positions of
// its bytes in three areas of one size are computed here:
//
//   units      units that this rank reads, as stored
//   cut        blocks of these for other ranks that are not one run of a unit
//   received   blocks that other ranks read
//
// Every rank computes the same windows from the same units, with the same bound.

namespace tensormount {

struct ExchangeWindow {
  struct Read {            // A unit that this rank reads.
    std::size_t unit = 0;  // Index in ExchangeUnits::units().
    std::uint64_t at = 0;  // Offset in the area "units".
    std::vector<ExchangeBox> blocks;
  };
  struct Cut {
    std::size_t read = 0;  // Index in `reads`.
    Box bytes;
    std::uint64_t at = 0;  // Offset in the area "cut".
  };
  struct Send {
    std::uint64_t number = 0;  // Position in `plan`.
    bool cut = false;          // Whether `at` is in the area "cut" or in "units".
    std::uint64_t at = 0;
  };
  struct Receive {
    std::uint64_t number = 0;
    std::uint64_t at = 0;
    ExchangeBox block;
  };
  std::vector<BulkUnit> plan;  // The transfers between all ranks; the same on each rank.
  std::vector<Read> reads;
  std::vector<Cut> cuts;
  std::vector<Send> sends;
  std::vector<Receive> receives;
};

// Cuts one batch of units into windows. `units` must outlive this object and must not change.
class WindowCutter {
 public:
  WindowCutter(const ExchangeUnits& units, int rank, int ranks, std::uint64_t area_bytes);
  // Makes the next window; returns false if none is left. Fails with kInternal if a unit or block
  // is larger than an area.
  Result<bool> Next(ExchangeWindow& window);

 private:
  struct Used {
    std::uint64_t units = 0;
    std::uint64_t cut = 0;
    std::uint64_t received = 0;
  };
  Used& Of(int rank) { return used_[static_cast<std::size_t>(rank)]; }
  // Adds the next block of the current unit; false if an area has no room for it.
  bool Add(ExchangeBox& block, ExchangeWindow& window);

  const ExchangeUnits& units_;
  const int rank_;
  const std::uint64_t area_bytes_;
  std::size_t unit_ = 0;  // Position of the current unit.
  std::vector<ExchangeBox> blocks_;
  std::size_t block_index_ = 0;
  std::vector<Used> used_;  // By rank: bytes used in each of its areas.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_WINDOWS_H_
