// SPDX-License-Identifier: Apache-2.0
// Reads and cuts up one unit of an exchange. If the unit's runs are long and need no check on the
// way, they are read straight into this rank's buffers and into message buffers. Any other unit is
// read whole into memory and copied from there.
#include "collective/load/exchange_reader.h"

#include <algorithm>
#include <string_view>

#include "base/coding.h"
#include "base/hash.h"

namespace tensormount {
namespace {

// Least size of runs that are read one by one; shorter runs are cheaper to copy out of a block.
constexpr std::uint64_t kShortestPiece = 512;
// A gap of this size between two wanted runs is skipped by a separate read; a shorter gap is read,
// too.
constexpr std::uint64_t kLongGap = 64u << 10;

}  // namespace

void UnitHeader::Add(std::uint64_t number, const std::byte* bytes, std::uint64_t size) {
  char pair[16];
  StoreLittle(pair, number);
  StoreLittle(pair + 8, Xxh3Low64(std::string_view(reinterpret_cast<const char*>(bytes),
                                                   static_cast<std::size_t>(size))));
  sum ^= Xxh3Low64(std::string_view(pair, sizeof(pair)));
}

std::string UnitHeader::Encode() const {
  std::string bytes(kBytes, '\0');
  StoreLittle(bytes.data(), unit);
  StoreLittle(bytes.data() + 8, blocks);
  StoreLittle(bytes.data() + 16, sum);
  return bytes;
}

UnitHeader UnitHeader::Decode(const std::string& bytes) {
  return {LoadLittle<std::uint64_t>(bytes.data()), LoadLittle<std::uint64_t>(bytes.data() + 8),
          LoadLittle<std::uint64_t>(bytes.data() + 16)};
}

std::byte* ContiguousPlace(const Box& bytes, const LoadTarget& target) {
  if (target.device != nullptr) return nullptr;
  for (const PlacedBox& to : target.placed) {
    if (!to.box.Contains(bytes)) continue;
    const StridedCopy copy = PlanCopy(bytes, PlacePacked(Region(bytes), 0).front(), to);
    return copy.axes == 0 ? target.base + copy.dst_offset : nullptr;
  }
  return nullptr;
}

void UnitReader::Plan(const ExchangeUnits& units, const ExchangeUnit& unit, OutgoingUnit& out) {
  out.blocks = units.BlocksOf(unit);
  out.at.assign(out.blocks.size(), nullptr);
  bytes_ = units.BytesOf(unit);
  packed_at_.assign(out.blocks.size(), kElsewhere);
  out.size = 0;
  for (std::size_t p = 0; p < out.blocks.size(); ++p) {
    const ExchangeBox& block = out.blocks[p];
    const bool to_device = !block.mine.empty() && block.mine.front()->device != nullptr;
    if (block.receivers.empty() && !to_device) continue;
    // A block that is contiguous in this rank's own buffer is sent from there.
    if (!block.mine.empty()) out.at[p] = ContiguousPlace(block.bytes, *block.mine.front());
    if (out.at[p] != nullptr) continue;
    packed_at_[p] = out.size;
    out.size += block.size();
  }
  in_place_ = UnitVerify(units.tensor(unit)) == ReadVerify::kOff && CutIntoRuns(out);
  if (in_place_) return;
  // The whole unit is read into memory; a block that is contiguous in the unit is sent from that
  // memory.
  packed_at_.assign(out.blocks.size(), kElsewhere);
  out.size = static_cast<std::uint64_t>(bytes_.box.volume());
  for (std::size_t p = 0; p < out.blocks.size(); ++p) {
    const ExchangeBox& block = out.blocks[p];
    out.at[p] = nullptr;
    if (block.receivers.empty()) continue;
    const StridedCopy copy =
        PlanCopy(block.bytes, bytes_, PlacePacked(Region(block.bytes), 0).front());
    if (copy.axes == 0) {
      packed_at_[p] = static_cast<std::uint64_t>(copy.src_offset);
    } else {
      packed_at_[p] = out.size;
      out.size += block.size();
    }
  }
}

Status UnitReader::Read(const ExchangeUnits& units, const ExchangeUnit& unit, OutgoingUnit& out) {
  const PlannedTensor& tensor = units.tensor(unit);
  std::byte* const memory = out.memory.data();
  for (std::size_t p = 0; p < out.blocks.size(); ++p) {
    if (packed_at_[p] != kElsewhere) out.at[p] = memory + packed_at_[p];
  }
  if (in_place_) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(tensor.entry().meta, unit, memory));
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(checkpoint_.ReadPlaced(tensor.entry(), {&bytes_, 1}, memory,
                                                       UnitVerify(tensor), stats_, nullptr));
  }
  for (std::size_t p = 0; p < out.blocks.size(); ++p) {
    const ExchangeBox& block = out.blocks[p];
    const PlacedBox packed = PlacePacked(Region(block.bytes), 0).front();
    const bool cut = !in_place_ && out.at[p] != nullptr &&
                     packed_at_[p] >= static_cast<std::uint64_t>(bytes_.box.volume());
    if (cut) {
      ExecuteCopy(PlanCopy(block.bytes, bytes_, packed), memory, memory + packed_at_[p]);
    }
    for (std::size_t m = 0; m < block.mine.size(); ++m) {
      LoadTarget& target = *block.mine[m];
      if (!in_place_) {
        TENSORMOUNT_RETURN_IF_ERROR(PlaceBytes(bytes_, memory, block.bytes, target));
      } else if (packed_at_[p] != kElsewhere) {
        TENSORMOUNT_RETURN_IF_ERROR(PlaceBytes(packed, out.at[p], block.bytes, target));
      } else if (m > 0) {
        TENSORMOUNT_RETURN_IF_ERROR(CopyBetween(block.bytes, *block.mine.front(), target));
      }
    }
    if (block.receivers.empty()) continue;
    for (const int to : block.receivers) {
      UnitHeader& header = out.headers[to];
      header.unit = out.number;
      const std::uint64_t number = header.blocks++;
      if (UnitHeader::HasChecksum(tensor)) header.Add(number, out.at[p], block.size());
    }
  }
  return {};
}

void UnitReader::StartReading(std::uint32_t file, ByteRange range) {
  // If the file cannot be opened, the read says why.
  const Result<std::shared_ptr<File>> opened = checkpoint_.SharedFile(file);
  if (opened.ok()) opened.value()->StartReading(range.begin, range.size());
}

ReadVerify UnitReader::UnitVerify(const PlannedTensor& tensor) const {
  if (verify_ == LoadVerify::kOff) return ReadVerify::kOff;
  // The digest covers the whole way from storage to the destination buffer.
  return tensor.proof.possible ? ReadVerify::kOff : ReadVerify::kExtendLeaves;
}

Status UnitReader::CopyBetween(const Box& part, const LoadTarget& from, LoadTarget& to) {
  for (const PlacedBox& placed : from.placed) {
    const Box common = Intersect(part, placed.box);
    if (common.empty()) continue;
    TENSORMOUNT_RETURN_IF_ERROR(PlaceBytes(placed, from.base, common, to));
  }
  return {};
}

bool UnitReader::CutIntoRuns(const OutgoingUnit& out) {
  runs_.clear();
  bool good = true;
  const auto add = [&](const StridedCopy& copy, std::byte* base, std::uint64_t offset) {
    good = good && copy.run >= kShortestPiece;
    if (!good) return;
    copy.ForEachRun([&](std::int64_t from, std::int64_t to, std::uint64_t size) {
      runs_.push_back(
          {static_cast<std::uint64_t>(from), base, to + static_cast<std::int64_t>(offset), size});
    });
  };
  for (std::size_t p = 0; p < out.blocks.size() && good; ++p) {
    const ExchangeBox& block = out.blocks[p];
    if (packed_at_[p] != kElsewhere) {
      add(PlanCopy(block.bytes, bytes_, PlacePacked(Region(block.bytes), 0).front()), nullptr,
          packed_at_[p]);
      continue;
    }
    if (block.mine.empty()) continue;
    const LoadTarget& target = *block.mine.front();
    for (const PlacedBox& to : target.placed) {
      const Box common = Intersect(block.bytes, to.box);
      if (!common.empty()) add(PlanCopy(common, bytes_, to), target.base, 0);
    }
  }
  if (!good) return false;
  std::sort(runs_.begin(), runs_.end(),
            [](const FileRun& a, const FileRun& b) { return a.at < b.at; });
  for (std::size_t i = 1; i < runs_.size(); ++i) {
    if (runs_[i].at < runs_[i - 1].at + runs_[i - 1].size) return false;
  }
  return true;
}

Status UnitReader::ReadRuns(const TensorMeta& meta, const ExchangeUnit& unit, std::byte* memory) {
  const auto failed = [&](const Status& why) {
    file_ = nullptr;
    checkpoint_.EvictFile(unit.file);
    return why.WithContext("tensor " + meta.key() + " " + unit.box.ToString());
  };
  // Units come in file order, so the last file is kept open.
  if (file_ == nullptr || file_number_ != unit.file) {
    Result<std::shared_ptr<File>> file = checkpoint_.SharedFile(unit.file);
    if (!file.ok()) return failed(file.status());
    file_ = std::move(file).value();
    file_number_ = unit.file;
  }
  for (std::size_t i = 0; i < runs_.size();) {
    // Unwanted bytes between two runs go to a scratch buffer; a longer gap ends the read.
    const std::uint64_t begin = runs_[i].at;
    std::uint64_t at = begin;
    read_buffers_.clear();
    for (; i < runs_.size() && runs_[i].at - at < kLongGap; ++i) {
      if (runs_[i].at > at) {
        gap_.Reserve(kLongGap);
        read_buffers_.push_back({gap_.data(), static_cast<std::size_t>(runs_[i].at - at)});
      }
      read_buffers_.push_back({(runs_[i].base == nullptr ? memory : runs_[i].base) + runs_[i].to,
                               static_cast<std::size_t>(runs_[i].size)});
      at = runs_[i].at + runs_[i].size;
    }
    Result<std::size_t> got = file_->ReadVectorAt(unit.offset + begin, read_buffers_);
    if (!got.ok()) return failed(got.status());
    stats_.bytes_read += got.value();
    if (got.value() != at - begin) {
      return failed(Status(Code::kDataLoss, checkpoint_.FilePath(unit.file) + ": byte " +
                                                std::to_string(unit.offset + begin + got.value()) +
                                                ": the file ends here"));
    }
  }
  if (Status still = checkpoint_.CheckFileUnchanged(unit.file, *file_); !still.ok()) {
    return failed(still);
  }
  return {};
}

}  // namespace tensormount
