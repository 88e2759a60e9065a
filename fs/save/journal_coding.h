// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_JOURNAL_CODING_H_
#define TENSORMOUNT_FS_SAVE_JOURNAL_CODING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "index/records/inventory.h"

// What the writer and the reader of journals share (docs/format.md, "Journal").

namespace tensormount::fs {

inline constexpr std::string_view kJournalMagic{"TMJOURN\0", 8};
inline constexpr std::uint32_t kJournalVersion = 1;
inline constexpr std::size_t kJournalHeadBytes = 64;
inline constexpr std::size_t kIncarnationDigits = 16;

// Around a body: u32 length before it, u64 checksum behind it.
inline constexpr std::size_t kFrameBytes = 12;
// No body is longer: nothing larger is read or allocated for what a damaged length says.
inline constexpr std::size_t kMaxRecordBytes = std::size_t{16} << 20;

// A mark says where itself is, and how much of the file was durable when it was written: so a
// reader can tell damage from a tail that was never promised.
inline constexpr std::uint8_t kMarkKind = 8;
inline constexpr std::size_t kMarkBodyBytes = 17;  // u8 kind, u64 position, u64 synced.
inline constexpr std::size_t kMarkBytes = kMarkBodyBytes + kFrameBytes;

std::string EncodeHead(const Uuid& checkpoint, std::string_view incarnation);
std::string EncodeMark(std::uint64_t position, std::uint64_t synced);
bool IsIncarnation(std::string_view text);  // 16 lower-case hex digits.

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_JOURNAL_CODING_H_
