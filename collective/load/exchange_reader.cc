// SPDX-License-Identifier: Apache-2.0
// One unit of an exchange read and cut up: straight into buffers of this rank and messages, where
// it is long runs and need not be checked on the way, else as a whole into memory, from which it is
// copied. Both end in the one vectored read of base/file_system.h, or in OpenedCheckpoint's.
#include "collective/load/exchange_reader.h"

#include <algorithm>
#include <string_view>

#include "base/coding.h"
#include "base/hash.h"

namespace tensormount {
namespace {

// Shorter runs are cheaper copied out of a block than read one by one.
constexpr std::uint64_t kShortestPiece = 512;
// A gap that is worth a read of its own to leave out.
constexpr std::uint64_t kLongGap = 64u << 10;
// Data files that are open at a time.
constexpr std::size_t kMaxFiles = 64;

}  // namespace

void UnitLetter::Add(std::uint64_t number, const std::byte* bytes, std::uint64_t size) {
  char pair[16];
  StoreLittle(pair, number);
  StoreLittle(pair + 8, Xxh3Low64(std::string_view(reinterpret_cast<const char*>(bytes),
                                                   static_cast<std::size_t>(size))));
  sum ^= Xxh3Low64(std::string_view(pair, sizeof(pair)));
}

std::string UnitLetter::Encode() const {
  std::string bytes(kBytes, '\0');
  StoreLittle(bytes.data(), unit);
  StoreLittle(bytes.data() + 8, pieces);
  StoreLittle(bytes.data() + 16, sum);
  return bytes;
}

UnitLetter UnitLetter::Decode(const std::string& bytes) {
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

void UnitReader::Plan(const ExchangeUnits& units, const ExchangeUnit& unit, Outgoing& out) {
  out.pieces = units.PiecesOf(unit);
  out.at.assign(out.pieces.size(), nullptr);
  bytes_ = units.BytesOf(unit);
  packed_at_.assign(out.pieces.size(), kElsewhere);
  out.size = 0;
  for (std::size_t p = 0; p < out.pieces.size(); ++p) {
    const ExchangeBox& piece = out.pieces[p];
    const bool to_device = !piece.mine.empty() && piece.mine.front()->device != nullptr;
    if (piece.receivers.empty() && !to_device) continue;
    // Sent from where this rank itself wants it, if it is one run there.
    if (!piece.mine.empty()) out.at[p] = ContiguousPlace(piece.bytes, *piece.mine.front());
    if (out.at[p] != nullptr) continue;
    packed_at_[p] = out.size;
    out.size += piece.size();
  }
  in_place_ = UnitVerify(units.tensor(unit)) == ReadVerify::kOff && CutIntoRuns(out);
  if (in_place_) return;
  // All of the unit is read into memory, and what is one run of it is sent from there.
  packed_at_.assign(out.pieces.size(), kElsewhere);
  out.size = static_cast<std::uint64_t>(bytes_.box.volume());
  for (std::size_t p = 0; p < out.pieces.size(); ++p) {
    const ExchangeBox& piece = out.pieces[p];
    out.at[p] = nullptr;
    if (piece.receivers.empty()) continue;
    const StridedCopy copy =
        PlanCopy(piece.bytes, bytes_, PlacePacked(Region(piece.bytes), 0).front());
    if (copy.axes == 0) {
      packed_at_[p] = static_cast<std::uint64_t>(copy.src_offset);
    } else {
      packed_at_[p] = out.size;
      out.size += piece.size();
    }
  }
}

Status UnitReader::Read(const ExchangeUnits& units, const ExchangeUnit& unit, Outgoing& out) {
  const PlannedTensor& tensor = units.tensor(unit);
  std::byte* const memory = out.memory.data();
  for (std::size_t p = 0; p < out.pieces.size(); ++p) {
    if (packed_at_[p] != kElsewhere) out.at[p] = memory + packed_at_[p];
  }
  if (in_place_) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(tensor.entry().meta, unit, memory));
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(checkpoint_.ReadPlaced(tensor.entry(), {&bytes_, 1}, memory,
                                                       UnitVerify(tensor), stats_, nullptr));
  }
  for (std::size_t p = 0; p < out.pieces.size(); ++p) {
    const ExchangeBox& piece = out.pieces[p];
    const PlacedBox packed = PlacePacked(Region(piece.bytes), 0).front();
    const bool cut = !in_place_ && out.at[p] != nullptr &&
                     packed_at_[p] >= static_cast<std::uint64_t>(bytes_.box.volume());
    if (cut) {
      ExecuteCopy(PlanCopy(piece.bytes, bytes_, packed), memory, memory + packed_at_[p]);
    }
    for (std::size_t m = 0; m < piece.mine.size(); ++m) {
      LoadTarget& target = *piece.mine[m];
      if (!in_place_) {
        TENSORMOUNT_RETURN_IF_ERROR(PlaceBytes(bytes_, memory, piece.bytes, target));
      } else if (packed_at_[p] != kElsewhere) {
        TENSORMOUNT_RETURN_IF_ERROR(PlaceBytes(packed, out.at[p], piece.bytes, target));
      } else if (m > 0) {
        TENSORMOUNT_RETURN_IF_ERROR(CopyBetween(piece.bytes, *piece.mine.front(), target));
      }
    }
    if (piece.receivers.empty()) continue;
    for (const int to : piece.receivers) {
      UnitLetter& letter = out.letters[to];
      letter.unit = out.number;
      const std::uint64_t number = letter.pieces++;
      if (UnitLetter::SumsTravel(tensor)) letter.Add(number, out.at[p], piece.size());
    }
  }
  return {};
}

ReadVerify UnitReader::UnitVerify(const PlannedTensor& tensor) const {
  if (verify_ == LoadVerify::kOff) return ReadVerify::kOff;
  // The digest proves the way from the disk to the last buffer at once.
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

bool UnitReader::CutIntoRuns(const Outgoing& out) {
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
  for (std::size_t p = 0; p < out.pieces.size() && good; ++p) {
    const ExchangeBox& piece = out.pieces[p];
    if (packed_at_[p] != kElsewhere) {
      add(PlanCopy(piece.bytes, bytes_, PlacePacked(Region(piece.bytes), 0).front()), nullptr,
          packed_at_[p]);
      continue;
    }
    if (piece.mine.empty()) continue;
    const LoadTarget& target = *piece.mine.front();
    for (const PlacedBox& to : target.placed) {
      const Box common = Intersect(piece.bytes, to.box);
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

Result<File*> UnitReader::Open(const ExchangeUnit& unit) {
  // Units come in file order, so old ones are done with; thousands would pass the limit.
  if (files_.size() >= kMaxFiles && !files_.contains(unit.file)) files_.clear();
  std::unique_ptr<File>& file = files_[unit.file];
  if (file == nullptr) {
    const std::string name = checkpoint_.FilePath(unit.file);
    Result<std::unique_ptr<File>> opened = checkpoint_.OpenFile(unit.file);
    if (opened.status().code() == Code::kNotFound) {
      return Status(Code::kDataLoss, name + ": the file is missing");
    }
    if (!opened.ok()) return opened.status();
    file = std::move(opened).value();
  }
  return file.get();
}

Status UnitReader::ReadRuns(const TensorMeta& meta, const ExchangeUnit& unit, std::byte* memory) {
  const auto failed = [&](const Status& why) {
    return why.WithContext("tensor " + meta.key() + " " + unit.box.ToString());
  };
  Result<File*> file = Open(unit);
  if (!file.ok()) return failed(file.status());
  for (std::size_t i = 0; i < runs_.size();) {
    // What nobody wants between two runs goes where nobody looks, but for long gaps.
    const std::uint64_t begin = runs_[i].at;
    std::uint64_t at = begin;
    pieces_.clear();
    for (; i < runs_.size() && runs_[i].at - at < kLongGap; ++i) {
      if (runs_[i].at > at) {
        gap_.Reserve(kLongGap);
        pieces_.push_back({gap_.data(), static_cast<std::size_t>(runs_[i].at - at)});
      }
      pieces_.push_back({(runs_[i].base == nullptr ? memory : runs_[i].base) + runs_[i].to,
                         static_cast<std::size_t>(runs_[i].size)});
      at = runs_[i].at + runs_[i].size;
    }
    Result<std::size_t> got = file.value()->ReadVectorAt(unit.offset + begin, pieces_);
    if (!got.ok()) return failed(got.status());
    stats_.bytes_read += got.value();
    if (got.value() != at - begin) {
      return failed(Status(Code::kDataLoss, checkpoint_.FilePath(unit.file) + ": byte " +
                                                std::to_string(unit.offset + begin + got.value()) +
                                                ": the file ends here"));
    }
  }
  if (Status still = checkpoint_.CheckStill(unit.file, *file.value()); !still.ok()) {
    return failed(still);
  }
  return {};
}

}  // namespace tensormount
