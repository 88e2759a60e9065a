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

// Reads the units of a load by exchange and cuts them into what each rank wants.
//
// Two ways, chosen for each unit by Plan:
//   in place   one preadv whose pieces are the places where the bytes go: this rank's buffers, and
//              memory of the unit for what others want, or a device. Where nothing must be hashed
//              on the way (no proof, or one by digest) and runs are long enough.
//   cut up     the whole unit into memory, verified by leaves where they prove it, and copied from
//              there. What is one run of it is sent without being copied.

namespace tensormount {

// Memory that is only ever overwritten: growing does not clear or keep anything.
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

// What a reader says before it sends pieces of a unit: which unit of the batch, how many pieces,
// and a checksum over all of them. So whoever gets them knows that they are those which were read.
struct UnitLetter {
  static constexpr std::size_t kBytes = 24;
  std::uint64_t unit = 0;
  std::uint64_t pieces = 0;
  std::uint64_t sum = 0;  // 0 of a tensor without SumsTravel.

  // False where a digest proves the buffers in which the pieces end: that proves their way too, and
  // hashing them when they are sent and when they come would cost as much again.
  static bool SumsTravel(const PlannedTensor& tensor) { return !tensor.proof.possible; }

  // Adds a piece to `sum`. Pieces are counted from 0 for each receiver, and come in any order.
  void Add(std::uint64_t number, const std::byte* bytes, std::uint64_t size);
  std::string Encode() const;
  // Of kBytes bytes.
  static UnitLetter Decode(const std::string& bytes);
};

// A unit that was read and is being sent.
struct Outgoing {
  std::size_t number = 0;  // In its batch.
  std::vector<ExchangeBox> pieces;
  std::vector<const std::byte*> at;   // Of each piece that others want: its bytes, packed.
  std::map<int, UnitLetter> letters;  // By receiver.
  GrowingBuffer memory;
  std::uint64_t size = 0;  // Of the memory that it needs.
  std::size_t unsent = 0;
};

// Where the bytes of a piece stand in a buffer of the host, if they are one run there; otherwise
// null.
std::byte* ContiguousPlace(const Box& bytes, const LoadTarget& target);

// Reads units one after the other and cuts them up. On one thread, that of the reading; opened
// files are kept, at most a few.
class UnitReader {
 public:
  UnitReader(const OpenedCheckpoint& checkpoint, LoadVerify verify)
      : checkpoint_(checkpoint), verify_(verify) {}

  // Finds places for the pieces of a unit; sets out.size. The memory may then be given.
  void Plan(const ExchangeUnits& units, const ExchangeUnit& unit, Outgoing& out);

  // Reads the unit that was planned last: into the buffers of this rank, and into out.at what
  // others want, with a letter for each of them.
  Status Read(const ExchangeUnits& units, const ExchangeUnit& unit, Outgoing& out);

  std::uint64_t bytes_read() const { return stats_.bytes_read; }

 private:
  static constexpr std::uint64_t kElsewhere = ~std::uint64_t{0};
  // Bytes of a unit that stand together in the file and in memory.
  struct FileRun {
    std::uint64_t at = 0;       // From the unit's first byte.
    std::byte* base = nullptr;  // Null: of the memory of the unit.
    std::int64_t to = 0;
    std::uint64_t size = 0;
  };

  ReadVerify UnitVerify(const PlannedTensor& tensor) const;

  // A second buffer of this rank that has the same bytes.
  static Status CopyBetween(const Box& part, const LoadTarget& from, LoadTarget& to);

  // The runs of a unit and where each goes, in file order, in runs_: then one read both fetches
  // the unit and cuts it up. False where runs are too short for that, or wanted twice.
  bool CutIntoRuns(const Outgoing& out);

  Result<File*> Open(const ExchangeUnit& unit);

  Status ReadRuns(const TensorMeta& meta, const ExchangeUnit& unit, std::byte* memory);

  const OpenedCheckpoint& checkpoint_;
  const LoadVerify verify_;
  // Of the unit that was planned last.
  PlacedBox bytes_;
  std::vector<std::uint64_t> packed_at_;  // Of each piece in the memory.
  bool in_place_ = false;
  std::vector<FileRun> runs_;
  std::vector<File::Buffer> pieces_;
  GrowingBuffer gap_;
  std::map<std::uint32_t, std::unique_ptr<File>> files_;  // By number.
  ReadStats stats_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_READER_H_
