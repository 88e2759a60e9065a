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

// The first exchange of a save or a validation: 64 bytes from each rank to rank 0, and rank 0's
// answer. Pure functions on bytes, so that tests and benchmarks run rounds of 16,384 ranks without
// processes.
//
// The message size does not depend on the rank's state. From the messages rank 0 finds, in this
// order: whether a rank cannot take part; whether all ranks were called with the same options;
// whether every rank has kept the plan of this job, so that tensors are not sent again; which ranks
// have equal layouts, so that only one rank of each such set sends its layout.

namespace tensormount {

inline constexpr std::size_t kRoundBytes = 64;
// Number of boxes that one owner (a rank that checks keys) checks in about the time of one
// exchange. With more owners the messages take most of the time, with fewer owners the checks.
inline constexpr std::uint64_t kBoxesAnOwner = 64'000;
// Maximum number of owners (ranks that check keys), because a rank sends a message to each owner.
inline constexpr std::uint64_t kMostOwners = 256;

// The first message of a rank. Encoded: u8 version, u8 flags (bit 0: failed), u16 world, u32 boxes,
// then the other fields as u64s in the order below.
struct RoundMessage {
  // This rank cannot take part and will send the reason in the next exchange, which all ranks then
  // make; all other fields but `world` are zero.
  bool failed = false;
  std::uint32_t world = 0;  // World size; only the low 16 bits are compared.
  std::uint32_t boxes = 0;  // Number of boxes of this rank.
  LayoutHashes layout;
  std::uint64_t call = 0;
  std::uint64_t common = 0;
  std::uint64_t plan = 0;  // Hash of the job whose plan this rank has kept; 0: none.
};
std::string EncodeRound(const RoundMessage& message);

// Rank 0's answer. Example: of four ranks, 0 and 2 have equal layouts, 1 and 3 too, and none has
// the plan: {next kProceed, agreed {job, false}, owners 1, layouts 2, tensors {0, 1, 0, 1}}, and
// ranks 0 and 1 send their layouts to rank 0.
struct RoundAnswer {
  enum class Next : std::uint8_t {
    kProceed,
    kFailed,         // Some rank failed: all ranks send their statuses.
    kOptionsDiffer,  // Options of rank 0 and `differing_rank` differ: both ranks send them.
  };
  Next next = Next::kProceed;
  // With kOptionsDiffer: the lowest rank whose options differ from rank 0's.
  std::uint32_t differing_rank = 0;
  Agreement agreed;
  // Ranks 0 to owners - 1 check the keys that OwnerOf assigns to them.
  std::uint32_t owners = 1;
  std::uint64_t boxes = 0;            // Number of boxes of all ranks.
  std::uint64_t layouts = 0;          // Number of different layouts of tensors.
  std::vector<std::uint32_t> common;  // Ranks that send common values; empty: all values are equal.
  RankClasses tensors;                // Ranks with equal tensors; empty: no tensors are exchanged.
  RankClasses objects;                // Ranks with equal objects; empty: no objects are exchanged.
};
// Makes rank 0's answer to the messages of all ranks. `owners`: the number of ranks that check
// keys; 0: the number follows from the number of boxes. Fails with kDataLoss or kInvalidArgument,
// naming the rank, if a message is damaged or from another version or world size.
Result<RoundAnswer> AnswerRound(std::span<const std::string> parts, std::uint32_t owners);

std::string EncodeAnswer(const RoundAnswer& answer);
Result<RoundAnswer> DecodeAnswer(std::string_view bytes, std::uint32_t world);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_ROUND_H_
