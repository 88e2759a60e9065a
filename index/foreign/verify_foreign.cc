// SPDX-License-Identifier: Apache-2.0
#include "index/foreign/verify_foreign.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "index/foreign/foreign.h"
#include "index/foreign/format.h"
#include "index/foreign/zip_archive.h"
#include "index/read/verify_ranges.h"

namespace tensormount {
namespace {

constexpr std::size_t kBlock = std::size_t{1} << 20;

bool BeginsZip(File& file, std::uint64_t offset, std::uint64_t length) {
  std::array<char, 4> head{};
  return length >= head.size() && file.ReadExactAt(offset, head.data(), head.size()).ok() &&
         std::string_view(head.data(), head.size()) == std::string_view("PK\3\4", 4);
}

// A run of bytes of a file that belongs to somebody.
struct ForeignRange {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  bool item = false;  // What an adapter looks into: an archive, perhaps.
  std::uint32_t owner = 0;
  std::uint32_t row = 0;
};
// Owners are tensors, then objects.
constexpr std::uint32_t kObjects = 0x80000000;

class ForeignVerifier {
 public:
  ForeignVerifier(const OpenedCheckpoint& opened, const VerifyOptions& options)
      : opened_(opened), options_(options) {}

  Result<VerifyReport> Run() {
    std::unordered_set<std::string> told;
    for (const ForeignLoss& loss : opened_.lost()) {
      told.insert(loss.ToString());
      report_.damages.push_back({.object = loss.What(),
                                 .file = loss.file,
                                 .offset = 0,
                                 .reason = loss.reason + loss.Examples(),
                                 .lost = true});
    }
    for (const std::string& warning : opened_.warnings()) {
      if (!told.contains(warning)) report_.warnings.push_back(warning);
    }
    const CheckpointIndex& index = opened_.index();
    report_.tensors = index.tensor_count();
    report_.chunks = index.chunk_count();
    if (!options_.quick) {
      Status failure;
      TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
        failure = Tensor(tensor);
        return failure.ok();
      }));
      TENSORMOUNT_RETURN_IF_ERROR(failure);
      TENSORMOUNT_ASSIGN_OR_RETURN(objects_, index.Objects());
      for (std::size_t i = 0; i < objects_.size(); ++i) {
        const ObjectRecord& object = objects_[i];
        pieces_.push_back({.file = object.file,
                           .offset = object.offset,
                           .length = object.length,
                           .item = true,
                           .owner = kObjects + static_cast<std::uint32_t>(i)});
      }
      ReadPieces();
    }
    return Concluded(std::move(report_), unread_);
  }

 private:
  // It could not be read, or not as what it should be.
  void Failed(std::string object, std::string file, std::uint64_t offset, const Status& status) {
    if (ProvesDamage(status) || status.code() == Code::kStale) {  // It changed.
      report_.damages.push_back({.object = std::move(object),
                                 .file = std::move(file),
                                 .offset = offset,
                                 .reason = status.message()});
    } else if (unread_.ok()) {
      unread_ = status.WithContext(object);
    }
  }

  // Finds its items, and notes what is to be read.
  Status Tensor(const TensorEntry& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto stored, opened_.index().Extents(tensor.ordinal));
    const auto found = opened_.Extents(tensor);
    if (!found.ok()) Failed("tensor " + tensor.meta.key(), {}, 0, found.status());
    for (std::size_t i = 0; i < stored->size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, stored->At(i));
      // That an item is none is known by now: its bytes, of which there may be any number, say
      // nothing more.
      if (!found.ok() && chunk.pending) continue;
      // Of an item all bytes are looked at, of which the tensor's are a part.
      pieces_.push_back({.file = chunk.file,
                         .offset = chunk.offset,
                         .length = chunk.length,
                         .item = chunk.pending,
                         .owner = tensor.ordinal,
                         .row = static_cast<std::uint32_t>(i)});
    }
    return {};
  }

  std::string NameOf(const ForeignRange& piece) const {
    if (piece.owner >= kObjects) {
      const ObjectRecord& object = objects_[piece.owner - kObjects];
      return "object " + object.key +
             (object.index.rank() > 0 ? " " + object.index.ToString() : std::string());
    }
    const auto tensor = opened_.index().At(piece.owner);
    const auto rows = opened_.index().Extents(piece.owner);
    if (!tensor.ok() || !rows.ok()) return "tensor " + std::to_string(piece.owner);
    const auto chunk = rows.value()->At(piece.row);
    return "tensor " + tensor.value().meta.key() +
           (chunk.ok() ? " " + chunk.value().region.ToString() : std::string());
  }

  // In the order of files and offsets; a file is open once at a time.
  void ReadPieces() {
    std::sort(pieces_.begin(), pieces_.end(), [](const ForeignRange& a, const ForeignRange& b) {
      return std::tie(a.file, a.offset, a.length) < std::tie(b.file, b.offset, b.length);
    });
    for (const ForeignRange& piece : pieces_) total_ += piece.length;
    for (std::size_t i = 0; i < pieces_.size();) {
      const std::uint32_t number = pieces_[i].file;
      std::size_t end = i;
      while (end < pieces_.size() && pieces_[end].file == number) ++end;
      ReadFile(number, i, end);
      i = end;
    }
  }

  void ReadFile(std::uint32_t number, std::size_t begin, std::size_t end) {
    const std::string& name = opened_.index().files()[number].name;
    auto file = opened_.OpenFile(number);
    if (!file.ok()) {
      for (std::size_t i = begin; i < end; ++i) {
        Failed(NameOf(pieces_[i]), name, pieces_[i].offset, file.status());
      }
      return;
    }
    File& open = *file.value();
    // An archive as a whole: what the tensors are windows of has a CRC an entry.
    const std::uint64_t length = opened_.index().files()[number].length;
    const ForeignRange whole{.file = number, .length = length};
    if (BeginsZip(open, 0, length) && CheckArchive(open, whole, name, begin, end)) {
      for (std::size_t i = begin; i < end; ++i) Count(pieces_[i].length);
    } else {
      for (std::size_t i = begin; i < end; ++i) ReadPiece(open, i, name);
    }
    if (const Status still = opened_.CheckStill(number, open); !still.ok()) {
      Failed(NameOf(pieces_[begin]), name, 0, still);
    }
  }

  // Whether the bytes are one archive; then its entries were checked. Damage is said of those of
  // the pieces [begin, end) that an entry holds bytes of.
  bool CheckArchive(File& file, const ForeignRange& where, const std::string& name,
                    std::size_t begin, std::size_t end) {
    const Result<ZipArchive> archive = ZipArchive::Read(file, where.offset, where.length);
    if (!archive.ok()) {
      // A file of many archives is none itself; an item has to be one.
      if (where.item) Failed(NameOf(where), name, where.offset, archive.status());
      return where.item;
    }
    for (const ZipEntry& entry : archive.value().entries()) {
      const Status checked = CheckZipCrc(file, entry);
      if (checked.ok()) continue;
      bool owned = false;
      for (std::size_t i = begin; i < end; ++i) {
        const ForeignRange& piece = pieces_[i];
        if (piece.offset >= entry.offset + entry.size ||
            entry.offset >= piece.offset + piece.length) {
          continue;
        }
        Failed(NameOf(piece), name, entry.offset, checked);
        owned = true;
      }
      if (!owned) Failed("archive entry " + entry.name, name, entry.offset, checked);
    }
    return true;
  }

  void Count(std::uint64_t bytes) {
    report_.bytes_checked += bytes;
    report_.bytes_without_hash += bytes;
    if (options_.progress) options_.progress(report_.bytes_checked, total_);
  }

  void ReadPiece(File& file, std::size_t number, const std::string& name) {
    const ForeignRange& piece = pieces_[number];
    // Of an object that is no archive, or one in an archive that was not found whole, bytes are
    // read.
    if (piece.item && BeginsZip(file, piece.offset, piece.length)) {
      (void)CheckArchive(file, piece, name, number, number + 1);
      Count(piece.length);
      return;
    }
    buffer_.resize(kBlock);
    for (std::uint64_t at = 0; at < piece.length;) {
      const auto size =
          static_cast<std::size_t>(std::min<std::uint64_t>(kBlock, piece.length - at));
      const Status read = file.ReadExactAt(piece.offset + at, buffer_.data(), size);
      if (!read.ok()) {
        Failed(NameOf(piece), name, piece.offset + at, read);
        return;
      }
      at += size;
      Count(size);
    }
  }

  const OpenedCheckpoint& opened_;
  const VerifyOptions& options_;
  VerifyReport report_;
  Status unread_;  // Why something was not checked.
  std::vector<ObjectRecord> objects_;
  std::vector<ForeignRange> pieces_;
  std::uint64_t total_ = 0;
  std::string buffer_;
};

}  // namespace

Result<VerifyReport> VerifyForeign(FileSystem& fs, const std::string& path,
                                   const VerifyOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                               ForeignFolder::Open(fs, path, options.roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(ForeignInventory inventory, ReadForeign(folder));
  OpenedCheckpoint::Options how;
  how.roots = options.roots;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened,
                               OpenedCheckpoint::OpenForeign(fs, std::move(inventory), path, how));
  return ForeignVerifier(*opened, options).Run();
}

}  // namespace tensormount
