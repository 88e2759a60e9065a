// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_ZARR_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_ZARR_VIEW_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "fs/formats/zarr_grid.h"
#include "fs/views/shown_checkpoint.h"
#include "fs/views/view.h"
#include "index/records/lru_cache.h"

namespace tensormount::fs {

// zarr/: the tensors as a Zarr v3 hierarchy (docs/mounting.md, "Zarr"). A group for every directory
// of keys, an array for every tensor whose elements are whole bytes: zarr/KEY/zarr.json and its
// chunks c.0.1. Memory: a few grids and, once zarr/zarr.json was accessed, the position of each
// 256th tensor in it.
//
// Items, in 40 bits: 1 zarr/, 2 zarr/zarr.json;
//   0 | number of the tensor + 1 | 0 array, 1 its zarr.json, 2 + n chunk n
//   1 | first key of the directory | depth | 0 group, 1 its zarr.json
// with as many bits for tensors as their count needs.
//
// Items are computed, so an array of a million chunks costs nothing until it is accessed. Grids
// are in a small cache, because a reader opens all chunks of one array, then those of the next.
// zarr/zarr.json is made at the first access, which reads the extents of tensors of several chunks.
class ZarrView : public View {
 public:
  // `shown` must outlive this object.
  explicit ZarrView(const ShownCheckpoint& shown);

  std::string_view name() const override { return "zarr"; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 private:
  // A decoded item.
  struct ZarrItem {
    enum class Kind : std::uint8_t { kGroup, kGroupJson, kArray, kArrayJson, kChunk } kind;
    std::uint32_t number = 0;  // Number of the tensor, or of the directory's first key.
    std::uint32_t depth = 0;   // Depth of the directory; 0: zarr/ itself.
    std::uint64_t chunk = 0;

    bool folder() const { return kind == Kind::kGroup || kind == Kind::kArray; }
    bool group() const { return kind == Kind::kGroup || kind == Kind::kGroupJson; }
  };

  // An item and the records that its node and its file are made of, read once for each request.
  struct ResolvedItem {
    ZarrItem item;
    std::optional<TensorEntry> tensor;     // The array's tensor, or the first one of a directory.
    std::shared_ptr<const ZarrGrid> grid;  // Set for the files of an array.
  };

  // The item number; ZarrItemOf is the inverse. ZarrItemOf checks only the ranges of number and
  // depth; Resolve checks that the array and the chunk exist.
  std::uint64_t ItemOf(const ZarrItem& item) const;
  // Decodes an item number. kStale if a field is out of range; kNotFound if the checkpoint has too
  // many tensors for this view.
  Result<ZarrItem> ZarrItemOf(std::uint64_t item) const;
  Result<ResolvedItem> Resolve(const ZarrItem& item) const;
  Result<std::shared_ptr<const ZarrGrid>> GridOf(std::uint32_t number,
                                                 const TensorEntry& tensor) const;
  Result<std::shared_ptr<const GeneratedText>> RootJson() const;
  // Path below zarr/ of the directory that the item is or is in: "layers/0/w" for an array and all
  // files in it.
  Result<std::string> FolderPath(const ZarrItem& item) const;
  // `folder_path`: result of FolderPath.
  Result<ViewNode> NodeOf(const ResolvedItem& known, const std::string& folder_path) const;
  // Listings report zarr.json first, then the content in the order of keys or chunks.
  Status ListGroup(const ZarrItem& group, std::uint64_t cookie, const Visit& fn) const;
  Status ListArray(const ZarrItem& array, std::uint64_t cookie, const Visit& fn) const;
  // Largest number of chunks for which the bits below a tensor's number suffice; a grid that would
  // have more chunks is made coarser.
  std::uint64_t max_chunks() const { return (std::uint64_t{1} << shift_) - 2; }

  const ShownCheckpoint& shown_;
  // Number of bits below a tensor's number in an item. A directory's depth has one bit less.
  int shift_ = 0;
  mutable LruCache<std::uint32_t, const ZarrGrid> grids_;
  // Guards root_json_. It is held while that text is made, so that concurrent readers make it once.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const GeneratedText> root_json_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_ZARR_VIEW_H_
