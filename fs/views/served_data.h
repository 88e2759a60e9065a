// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_
#define TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/file_content.h"
#include "fs/views/shown_checkpoint.h"
#include "index/checkpoint.h"

namespace tensormount::fs {

// What a mount verifies of the bytes that it serves: nothing; every 64 KiB the first time that it
// is read; every read.
enum class ServeVerify { kOff, kFirst, kAlways };

// The bytes of a checkpoint's tensors and objects, verified as the mount was told. What fails a
// check is never remembered as good. Ranges must lie within what they are of. Thread-safe.
class ServedData {
 public:
  using Piece = OpenedCheckpoint::MappedPiece;
  using Cancelled = std::function<bool()>;

  // What is given must outlive this.
  ServedData(const OpenedCheckpoint& opened, const ShownObjects& objects, ServeVerify verify)
      : opened_(opened), objects_(objects), verify_(verify) {}

  ServeVerify verify() const { return verify_; }

  Status ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out, std::size_t size,
                    ReadStats* stats) const;
  // Bytes of the box's container. With kFirst they are verified by every read: a box does not
  // cover whole leaves, so that nothing could be remembered.
  Status ReadBox(const FileContent::BoxSource& box, std::uint64_t offset, char* out,
                 std::size_t size, ReadStats* stats) const;
  Status ReadObject(std::uint32_t part, std::uint64_t offset, char* out, std::size_t size) const;

  // The same bytes where they are stored (OpenedCheckpoint::MapPlaced), appended to `out`. False
  // where they must be read: not in memory now, zeros around a box, too many pieces, or a mount
  // that verifies.
  bool MapTensor(const TensorEntry& tensor, std::uint64_t offset, std::size_t size,
                 std::vector<Piece>& out) const;
  bool MapBox(const FileContent::BoxSource& box, std::uint64_t offset, std::size_t size,
              std::vector<Piece>& out) const;

  // Read everything once and check it, whatever the mount verifies; what is known to be good is
  // not read again. kCancelled when `cancelled` (may be empty) says so.
  Status VerifyTensor(const TensorEntry& tensor, std::uint64_t skip, std::uint64_t length,
                      const Cancelled& cancelled) const;
  Status VerifyBox(const FileContent::BoxSource& box, const Cancelled& cancelled) const;
  Status VerifyObject(std::uint32_t part, const Cancelled& cancelled) const;

 private:
  // Which blocks of kLeafBytes of tensors, and of objects behind them, were read and found good.
  // A bit each; made when first needed.
  struct GoodBlocks {
    std::vector<std::uint64_t> begins;  // First block of each tensor, then of each object.
    std::vector<std::atomic<std::uint64_t>> words;
    bool All(std::uint64_t first, std::uint64_t last) const;
    void Set(std::uint64_t first, std::uint64_t last);
  };
  Result<GoodBlocks*> Good() const;
  Status ReadObjectLeaves(const ObjectContent& part, std::uint64_t offset, char* out,
                          std::size_t size) const;
  Status ReadChecked(const TensorEntry& tensor, std::uint64_t offset, char* out, std::size_t size,
                     ReadStats* stats) const;
  Status ReadBoxAs(const FileContent::BoxSource& box, std::uint64_t offset, char* out,
                   std::size_t size, ReadVerify verify, ReadStats* stats) const;

  const OpenedCheckpoint& opened_;
  const ShownObjects& objects_;
  const ServeVerify verify_;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<GoodBlocks> good_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_
