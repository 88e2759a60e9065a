// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_ROUND_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_ROUND_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "collective/comm/agreement.h"
#include "collective/layout/wire.h"

// The first exchange of a save or a validation: 64 bytes a rank to rank 0, and its answer. Pure:
// bytes in, bytes out, so that tests and benchmarks judge rounds of 16,384 ranks without any.
//
// What a rank says does not grow with what it holds. From it rank 0 finds out, in this order:
// whether somebody cannot take part; whether all were called with the same options; whether this is
// the job of the save before (then the plan is at hand and no layout is sent at all); and otherwise
// who has equal layouts, so that one rank of each class sends its own.

namespace tensormount {

inline constexpr std::size_t kRoundBytes = 64;
// Boxes that one owner judges in about the time of one exchange: more owners would wait for
// messages, fewer for one rank.
inline constexpr std::uint64_t kBoxesAnOwner = 64'000;
// And no more of them than this: a rank sends each a message.
inline constexpr std::uint64_t kMostOwners = 256;

// u8 version, u8 flags (bit 0: failed), u16 world, u32 boxes, then the u64s in the order below.
struct RoundMessage {
  // This rank cannot take part and will say why in the next exchange, which all ranks then make;
  // the rest is zero.
  bool failed = false;
  std::uint32_t world = 0;  // Its low 16 bits are compared.
  std::uint32_t boxes = 0;  // At most 2^32 - 1.
  LayoutHashes layout;
  std::uint64_t call = 0;
  std::uint64_t common = 0;
  std::uint64_t plan = 0;  // Of the job whose plan is at hand; 0: none.
};
std::string EncodeRound(const RoundMessage& message);

// What rank 0 makes of them. Example: of four ranks, 0 and 2 brought equal layouts, 1 and 3 too,
// none had the plan: {next kGo, agreed {job, false}, owners 1, layouts 2, tensors {0, 1, 0, 1}},
// and ranks 0 and 1 send their layouts to rank 0.
struct RoundAnswer {
  enum class Next : std::uint8_t {
    kGo,
    kFailed,   // Some rank failed: all say why not.
    kOptions,  // Options of rank 0 and of `other` differ: both tell.
  };
  Next next = Next::kGo;
  std::uint32_t other = 0;  // kOptions: the first rank that differs from rank 0.
  Agreement agreed;
  // Ranks 0 to owners - 1 judge the keys, each those that OwnerOf gives it.
  std::uint32_t owners = 1;
  std::uint64_t boxes = 0;            // Of all ranks.
  std::uint64_t layouts = 0;          // Different ones.
  std::vector<std::uint32_t> common;  // Ranks that send their common values; none: all are equal.
  RankClasses tensors;                // Empty: nothing is exchanged.
  RankClasses objects;                // Likewise.
};
// `owners`: 0, as many as the boxes ask for. kDataLoss, kInvalidArgument where a message is broken
// or from another version or world; names the rank.
Result<RoundAnswer> JudgeRound(std::span<const std::string> parts, std::uint32_t owners);

std::string EncodeAnswer(const RoundAnswer& answer);
Result<RoundAnswer> DecodeAnswer(std::string_view bytes, std::uint32_t world);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_ROUND_H_
