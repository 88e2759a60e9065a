// SPDX-License-Identifier: Apache-2.0
// Units in their order, as many at a time as the fullest rank has room for. A unit whose pieces do
// not fit into one window (many ranks want parts that overlap) is read once more for the next.
#include "collective/load/exchange_windows.h"

#include <algorithm>
#include <string>
#include <utility>

#include "shard/copy_plan.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

// So that wide words fit wherever a piece begins.
constexpr std::uint64_t kAlignInArea = 256;
std::uint64_t Padded(std::uint64_t bytes) {
  return (bytes + kAlignInArea - 1) / kAlignInArea * kAlignInArea;
}

}  // namespace

WindowCutter::WindowCutter(const ExchangeUnits& units, int rank, int ranks,
                           std::uint64_t area_bytes)
    : units_(units), rank_(rank), area_bytes_(area_bytes), used_(static_cast<std::size_t>(ranks)) {}

Result<bool> WindowCutter::Next(ExchangeWindow& window) {
  window = {};
  std::fill(used_.begin(), used_.end(), Used{});
  bool any = false;
  for (; unit_ < units_.units().size(); ++unit_, piece_ = 0, pieces_.clear()) {
    const ExchangeUnit& unit = units_.units()[unit_];
    if (pieces_.empty()) pieces_ = units_.PiecesOf(unit);
    const std::uint64_t bytes =
        Padded(static_cast<std::uint64_t>(units_.BytesOf(unit).box.volume()));
    Used& reader = Of(unit.reader);
    if (reader.units + bytes > area_bytes_) break;
    const bool mine = unit.reader == rank_;
    if (mine) window.reads.push_back({unit_, reader.units, {}});
    reader.units += bytes;
    const std::size_t first = piece_;
    while (piece_ < pieces_.size() && Add(pieces_[piece_], window)) ++piece_;
    any = any || piece_ > first;
    if (piece_ == pieces_.size()) continue;
    if (piece_ == first && mine) window.reads.pop_back();
    break;
  }
  if (any) return true;
  if (unit_ == units_.units().size()) return false;
  return Status(Code::kInternal, "load: an area of " + std::to_string(area_bytes_) +
                                     " bytes is too small for a unit of an exchange");
}

bool WindowCutter::Add(ExchangeBox& piece, ExchangeWindow& window) {
  const ExchangeUnit& unit = units_.units()[unit_];
  Used& reader = Of(unit.reader);
  const std::uint64_t bytes = Padded(piece.size());
  const PlacedBox stored = units_.BytesOf(unit);
  const StridedCopy out =
      PlanCopy(piece.bytes, stored, PlacePacked(Region(piece.bytes), 0).front());
  const bool cut = !piece.receivers.empty() && out.axes > 0;
  if (cut && reader.cut + bytes > area_bytes_) return false;
  for (const int to : piece.receivers) {
    if (Of(to).received + bytes > area_bytes_) return false;
  }
  const bool mine = unit.reader == rank_;
  std::uint64_t at = 0;
  if (mine && cut) {
    at = reader.cut;
    window.cuts.push_back({window.reads.size() - 1, piece.bytes, at});
  } else if (mine) {
    at = window.reads.back().at + static_cast<std::uint64_t>(out.src_offset);
  }
  if (cut) reader.cut += bytes;
  for (const int to : piece.receivers) {
    const std::uint64_t number = window.plan.size();
    window.plan.push_back({unit.reader, to, piece.size()});
    if (mine) window.sends.push_back({number, cut, at});
    if (to == rank_) window.receives.push_back({number, Of(to).received, piece});
    Of(to).received += bytes;
  }
  if (mine) window.reads.back().pieces.push_back(piece);
  return true;
}

}  // namespace tensormount
