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
// (collective/comm/bulk_transport.h). What a rank needs of memory for a window is bounded, and
// where in it bytes stand is worked out here: in three areas of one size,
//
//   units      what this rank reads, as it is stored
//   cut        pieces of it that others want and that are no run of it
//   received   pieces that other ranks read
//
// Every rank works out the same windows from the same units, with the same bound.

namespace tensormount {

struct ExchangeWindow {
  struct Read {            // By this rank.
    std::size_t unit = 0;  // Of ExchangeUnits::units().
    std::uint64_t at = 0;  // In the area of units.
    std::vector<ExchangeBox> pieces;
  };
  struct Cut {
    std::size_t read = 0;  // Of `reads`.
    Box bytes;
    std::uint64_t at = 0;  // In the area of what is cut.
  };
  struct Send {
    std::uint64_t number = 0;  // In the plan.
    bool cut = false;          // In which area.
    std::uint64_t at = 0;
  };
  struct Receive {
    std::uint64_t number = 0;
    std::uint64_t at = 0;
    ExchangeBox piece;
  };
  std::vector<BulkUnit> plan;  // Of all ranks; the same on each.
  std::vector<Read> reads;
  std::vector<Cut> cuts;
  std::vector<Send> sends;
  std::vector<Receive> receives;
};

// Cuts one batch of units. `units` must outlive it, and stay as they are.
class WindowCutter {
 public:
  WindowCutter(const ExchangeUnits& units, int rank, int ranks, std::uint64_t area_bytes);
  // False where nothing is left. kInternal for a piece that no area holds.
  Result<bool> Next(ExchangeWindow& window);

 private:
  struct Used {
    std::uint64_t units = 0;
    std::uint64_t cut = 0;
    std::uint64_t received = 0;
  };
  Used& Of(int rank) { return used_[static_cast<std::size_t>(rank)]; }
  // The next piece of the unit at hand; false where an area has no room for it.
  bool Add(ExchangeBox& piece, ExchangeWindow& window);

  const ExchangeUnits& units_;
  const int rank_;
  const std::uint64_t area_bytes_;
  std::size_t unit_ = 0;  // At hand.
  std::vector<ExchangeBox> pieces_;
  std::size_t piece_ = 0;
  std::vector<Used> used_;  // By rank.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_WINDOWS_H_
