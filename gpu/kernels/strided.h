// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_STRIDED_H_
#define TENSORMOUNT_GPU_KERNELS_STRIDED_H_

#include <cstdint>

#include "gpu/kernels/lanes.h"
#include "shard/copy_plan.h"

// A strided copy (shard/copy_plan.h) as numbered pieces. A thread of a kernel computes the place of
// a piece from its number alone. Strided is passed to a kernel by value.

namespace tensormount::kernels {

struct Strided {
  std::int64_t from = 0;  // Offsets of the first run in the source and in the destination.
  std::int64_t to = 0;
  std::uint64_t run = 0;    // Bytes of a run.
  std::uint64_t piece = 0;  // Bytes of a piece; the last one of a run may be shorter.
  std::uint64_t run_pieces = 0;
  std::uint64_t pieces = 0;  // Pieces of all runs.
  int axes = 0;              // Number of axes; in the arrays the outermost is the first.
  std::uint64_t count[kMaxAxes] = {};
  std::int64_t from_step[kMaxAxes] = {};
  std::int64_t to_step[kMaxAxes] = {};
};

struct RunPart {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::uint64_t bytes = 0;
};

// Cuts a copy into pieces of at most `piece` bytes.
inline Strided CutIntoPieces(const StridedCopy& plan, std::uint64_t piece) {
  Strided s;
  if (plan.run == 0) return s;
  s.from = plan.src_offset;
  s.to = plan.dst_offset;
  s.run = plan.run;
  s.piece = piece;
  s.run_pieces = (plan.run + piece - 1) / piece;
  s.pieces = plan.runs() * s.run_pieces;
  for (const StridedCopy::Axis& axis : plan.loops()) {
    s.count[s.axes] = static_cast<std::uint64_t>(axis.count);
    s.from_step[s.axes] = axis.src;
    s.to_step[s.axes] = axis.dst;
    ++s.axes;
  }
  return s;
}

// Piece `number` of a copy. `Index` may be 32 bits wide if `pieces` is below 2^32: a device needs
// several times as long for 64-bit divisions.
template <typename Index>
TENSORMOUNT_HOST_DEVICE RunPart PieceAt(const Strided& s, std::uint64_t number) {
  auto rest = static_cast<Index>(number);
  const auto in_run = static_cast<Index>(rest % static_cast<Index>(s.run_pieces));
  rest /= static_cast<Index>(s.run_pieces);
  RunPart p;
  p.from = s.from + static_cast<std::int64_t>(std::uint64_t{in_run} * s.piece);
  p.to = s.to + static_cast<std::int64_t>(std::uint64_t{in_run} * s.piece);
  const std::uint64_t left = s.run - std::uint64_t{in_run} * s.piece;
  p.bytes = left < s.piece ? left : s.piece;
  TENSORMOUNT_ROLLED
  for (int a = s.axes - 1; a >= 0; --a) {
    const auto count = static_cast<Index>(s.count[a]);
    const auto at = static_cast<std::int64_t>(rest % count);
    rest /= count;
    p.from += at * s.from_step[a];
    p.to += at * s.to_step[a];
  }
  return p;
}

// The largest word size, at most 16 bytes, that divides runs, steps and addresses, so that elements
// of 1 to 16 bytes move whole, and rows by 16 bytes.
inline std::uint64_t WordOf(const StridedCopy& plan, const void* from, const void* to) {
  std::uint64_t all = plan.run | reinterpret_cast<std::uintptr_t>(from) |
                      reinterpret_cast<std::uintptr_t>(to) |
                      static_cast<std::uint64_t>(plan.src_offset) |
                      static_cast<std::uint64_t>(plan.dst_offset) | 16;
  for (const StridedCopy::Axis& axis : plan.loops()) {
    all |= static_cast<std::uint64_t>(axis.src) | static_cast<std::uint64_t>(axis.dst);
  }
  return all & (~all + 1);
}

template <typename Word>
TENSORMOUNT_HOST_DEVICE void CopyWord(const RunPart& p, const std::uint8_t* from,
                                      std::uint8_t* to) {
  *reinterpret_cast<Word*>(to + p.to) = *reinterpret_cast<const Word*>(from + p.from);
}

// Copies piece `number` of a copy that was cut into pieces of WordOf bytes, or of a smaller power
// of two, so that each piece is one aligned word.
template <typename Index>
TENSORMOUNT_HOST_DEVICE void CopyPiece(const Strided& s, std::uint64_t number,
                                       const std::uint8_t* from, std::uint8_t* to) {
  const RunPart p = PieceAt<Index>(s, number);
  switch (s.piece) {
    case 16:
      return CopyWord<Word16>(p, from, to);
    case 8:
      return CopyWord<std::uint64_t>(p, from, to);
    case 4:
      return CopyWord<std::uint32_t>(p, from, to);
    case 2:
      return CopyWord<std::uint16_t>(p, from, to);
    default:
      return CopyWord<std::uint8_t>(p, from, to);
  }
}

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_STRIDED_H_
