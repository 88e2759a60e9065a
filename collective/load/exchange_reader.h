// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_READER_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_READER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/load.h"

#include "collective/load/exchange_units.h"
#include "shard/copy_plan.h"

// Reads the units of a load by exchange and cuts them into the blocks that each rank wants. Plan
// chooses one of two ways for each unit:
//
//   in place   vectored reads put the bytes straight into this rank's buffers and, for blocks of
//              other ranks or for a device, into memory of the unit. Used if nothing must be hashed
//              on the way (no verification, or by digest) and runs are long enough.
//   cut up     the whole unit is read into memory, verified by leaf hashes unless a digest verifies
//              it or verification is off, and copied from there. A block that is one run of the
//              unit is sent without a copy.

namespace tensormount {

// Memory that is only overwritten: growing neither clears nor keeps the content.
class GrowingBuffer {
 public:
  void Reserve(std::uint64_t wanted) {
    if (wanted <= capacity_) return;
    memory_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(wanted));
    capacity_ = wanted;
  }
  std::byte* data() { return memory_.get(); }
  std::uint64_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::uint64_t capacity_ = 0;
};

// Sent before the blocks of a unit: the unit's number in the batch, the number of blocks, and a
// checksum over all of them, by which the receiver checks that the blocks are the ones that were
// read.
struct UnitHeader {
  static constexpr std::size_t kBytes = 24;
  std::uint64_t unit = 0;
  std::uint64_t blocks = 0;
  std::uint64_t sum = 0;  // 0 if HasChecksum is false.

  // Whether the blocks of a tensor have a checksum. False if a digest verifies the destination
  // buffers, because the digest covers the transfer, too.
  static bool HasChecksum(const PlannedTensor& tensor) { return !tensor.proof.possible; }

  // Adds a block to `sum`. Blocks are counted from 0 for each receiver, and come in any order.
  void Add(std::uint64_t number, const std::byte* bytes, std::uint64_t size);
  std::string Encode() const;
  // `bytes` has kBytes bytes.
  static UnitHeader Decode(const std::string& bytes);
};

struct OutgoingUnit {
  std::size_t number = 0;  // Position of the unit in its batch.
  std::vector<ExchangeBox> blocks;
  std::vector<const std::byte*> at;   // By block: its packed bytes, if they are sent.
  std::map<int, UnitHeader> headers;  // By receiving rank.
  GrowingBuffer memory;
  std::uint64_t size = 0;  // Bytes of memory for the unit.
  std::size_t unsent = 0;
};

// Address of a block in the host buffer of a target; null if the block is not contiguous there, or
// the buffer is on a device.
std::byte* ContiguousPlace(const Box& bytes, const LoadTarget& target);

// Reads units one after the other and cuts them up. Used by the reading thread only.
class UnitReader {
 public:
  UnitReader(const OpenedCheckpoint& checkpoint, LoadVerify verify)
      : checkpoint_(checkpoint), verify_(verify) {}

  // Chooses the places of a unit's blocks and sets out.size; the caller then allocates the memory.
  void Plan(const ExchangeUnits& units, const ExchangeUnit& unit, OutgoingUnit& out);

  // Reads the unit of the last Plan: this rank's blocks into its buffers, other blocks to out.at.
  // Makes a header for each receiver.
  Status Read(const ExchangeUnits& units, const ExchangeUnit& unit, OutgoingUnit& out);

  // Whether the checkpoint is behind a server.
  bool is_far() const { return !checkpoint_.fs().Can(Ability::kKernelFiles); }
  // Asks for bytes of a data file that Read will read soon. Does not wait.
  void StartReading(std::uint32_t file, ByteRange range);

  std::uint64_t bytes_read() const { return stats_.bytes_read; }

 private:
  static constexpr std::uint64_t kElsewhere = ~std::uint64_t{0};
  // Bytes of a unit that are contiguous in the file and in memory.
  struct FileRun {
    std::uint64_t at = 0;       // Offset from the unit's first byte.
    std::byte* base = nullptr;  // Destination buffer; null: the memory of the unit.
    std::int64_t to = 0;
    std::uint64_t size = 0;
  };

  ReadVerify UnitVerify(const PlannedTensor& tensor) const;

  // Copies `part` to a second buffer of this rank that wants the same bytes.
  static Status CopyBetween(const Box& part, const LoadTarget& from, LoadTarget& to);

  // Fills runs_ with the unit's runs in file order and their destinations, so that one read both
  // fetches the unit and cuts it up. False if runs are too short, or wanted twice.
  bool CutIntoRuns(const OutgoingUnit& out);

  Status ReadRuns(const TensorMeta& meta, const ExchangeUnit& unit, std::byte* memory);

  const OpenedCheckpoint& checkpoint_;
  const LoadVerify verify_;
  // State of the unit of the last Plan.
  PlacedBox bytes_;
  std::vector<std::uint64_t> packed_at_;  // By block: its offset in the unit's memory.
  bool in_place_ = false;
  std::vector<FileRun> runs_;
  std::vector<File::Buffer> read_buffers_;
  GrowingBuffer gap_;
  // The data file of the previous unit.
  std::shared_ptr<File> file_;
  std::uint32_t file_number_ = 0;
  ReadStats stats_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_READER_H_
