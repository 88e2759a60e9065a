// SPDX-License-Identifier: Apache-2.0
// Cuts units in order, as many at a time as the fullest rank has room for. A unit whose blocks do
// not fit into one window (many ranks want overlapping parts) is read again for the next window.
#include "collective/load/exchange_windows.h"

#include <algorithm>
#include <string>
#include <utility>

#include "shard/copy_plan.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

// Alignment of blocks in an area, in bytes, so that devices can copy wide words.
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
  for (; unit_ < units_.units().size(); ++unit_, block_index_ = 0, blocks_.clear()) {
    const ExchangeUnit& unit = units_.units()[unit_];
    if (blocks_.empty()) blocks_ = units_.BlocksOf(unit);
    const std::uint64_t bytes =
        Padded(static_cast<std::uint64_t>(units_.BytesOf(unit).box.volume()));
    Used& reader = Of(unit.reader);
    if (reader.units + bytes > area_bytes_) break;
    const bool mine = unit.reader == rank_;
    if (mine) window.reads.push_back({unit_, reader.units, {}});
    reader.units += bytes;
    const std::size_t first = block_index_;
    while (block_index_ < blocks_.size() && Add(blocks_[block_index_], window)) ++block_index_;
    any = any || block_index_ > first;
    if (block_index_ == blocks_.size()) continue;
    if (block_index_ == first && mine) window.reads.pop_back();
    break;
  }
  if (any) return true;
  if (unit_ == units_.units().size()) return false;
  return Status(Code::kInternal, "internal error: load: an exchange buffer of " +
                                     std::to_string(area_bytes_) +
                                     " bytes is too small for one unit");
}

bool WindowCutter::Add(ExchangeBox& block, ExchangeWindow& window) {
  const ExchangeUnit& unit = units_.units()[unit_];
  Used& reader = Of(unit.reader);
  const std::uint64_t bytes = Padded(block.size());
  const PlacedBox stored = units_.BytesOf(unit);
  const StridedCopy out =
      PlanCopy(block.bytes, stored, PlacePacked(Region(block.bytes), 0).front());
  const bool cut = !block.receivers.empty() && out.axes > 0;
  if (cut && reader.cut + bytes > area_bytes_) return false;
  for (const int to : block.receivers) {
    if (Of(to).received + bytes > area_bytes_) return false;
  }
  const bool mine = unit.reader == rank_;
  std::uint64_t at = 0;
  if (mine && cut) {
    at = reader.cut;
    window.cuts.push_back({window.reads.size() - 1, block.bytes, at});
  } else if (mine) {
    at = window.reads.back().at + static_cast<std::uint64_t>(out.src_offset);
  }
  if (cut) reader.cut += bytes;
  for (const int to : block.receivers) {
    const std::uint64_t number = window.plan.size();
    window.plan.push_back({unit.reader, to, block.size()});
    if (mine) window.sends.push_back({number, cut, at});
    if (to == rank_) window.receives.push_back({number, Of(to).received, block});
    Of(to).received += bytes;
  }
  if (mine) window.reads.back().blocks.push_back(block);
  return true;
}

}  // namespace tensormount
