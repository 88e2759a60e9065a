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

#include "fs/views/shown_checkpoint.h"
#include "fs/views/view.h"
#include "fs/formats/zarr_grid.h"
#include "index/records/lru_cache.h"

namespace tensormount::fs {

// zarr/: the tensors as a Zarr v3 hierarchy (docs/semantics.md, "Zarr"). A group for every folder
// of keys, an array for every tensor whose elements are whole bytes: ZARR/KEY/zarr.json and its
// chunks c.0.1. Nothing is kept per tensor but a few grids and, once zarr/zarr.json was looked at,
// where each 256th tensor begins in it.
//
// Items, below the 40 bits that there are: 1 zarr/, 2 zarr/zarr.json;
//   0 | number of the tensor + 1 | 0 array, 1 its zarr.json, 2 + n chunk n
//   1 | first key of the folder | depth | 0 group, 1 its zarr.json
// with as many bits for tensors as their count needs.
//
// Numbers by arithmetic, so that an array of a million chunks costs nothing until chunks are
// opened. Grids are kept in a small cache: a reader asks for all chunks of one array, then for
// those of the next.
// zarr/zarr.json is made when somebody first looks at it: it reads the extents of every tensor.
class ZarrView : public View {
 public:
  // `shown` must outlive this.
  explicit ZarrView(const ShownCheckpoint& shown);

  std::string_view name() const override { return "zarr"; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 private:
  // What an item is.
  struct ZarrItem {
    enum class Kind : std::uint8_t { kGroup, kGroupJson, kArray, kArrayJson, kChunk } kind;
    std::uint32_t number = 0;  // Of the tensor, or of the folder's first key.
    std::uint32_t depth = 0;   // Of the folder; 0: zarr/ itself.
    std::uint64_t chunk = 0;

    bool folder() const { return kind == Kind::kGroup || kind == Kind::kArray; }
    bool group() const { return kind == Kind::kGroup || kind == Kind::kGroupJson; }
  };

  // With what says how large it is.
  // An item and the records that its node and its file are made of, read once a request.
  struct Known {
    ZarrItem item;
    std::optional<TensorEntry> tensor;     // Of an array, or the first one of a folder.
    std::shared_ptr<const ZarrGrid> grid;  // Of files of an array.
  };

  // The two are inverse for items that exist; ZarrItemOf checks the ranges of numbers, Know that
  // there is such a chunk or type.
  std::uint64_t ItemOf(const ZarrItem& item) const;
  // kStale for numbers that ItemOf does not make.
  Result<ZarrItem> ZarrItemOf(std::uint64_t item) const;
  Result<Known> Know(const ZarrItem& item) const;
  Result<std::shared_ptr<const ZarrGrid>> GridOf(std::uint32_t number,
                                                 const TensorEntry& tensor) const;
  Result<std::shared_ptr<const GeneratedText>> RootJson() const;
  // Below zarr/, of the folder that the item is or is in.
  // "layers/0/w" of an array and of all files in it.
  Result<std::string> FolderPath(const ZarrItem& item) const;
  // `folder_path` is what FolderPath gives.
  Result<ViewNode> NodeOf(const Known& known, const std::string& folder_path) const;
  // Listings report zarr.json first, then what is in the folder, in the order of keys or chunks.
  Status ListGroup(const ZarrItem& group, std::uint64_t cookie, const Visit& fn) const;
  Status ListArray(const ZarrItem& array, std::uint64_t cookie, const Visit& fn) const;
  // As many as fit the bits below a tensor's number; grids with more are made coarser.
  std::uint64_t max_chunks() const { return (std::uint64_t{1} << shift_) - 2; }

  const ShownCheckpoint& shown_;
  int shift_ = 0;  // Bits below a tensor's number; of a folder's depth there is one less.
  mutable LruCache<std::uint32_t, const ZarrGrid> grids_;
  // Guards root_json_, and is held while that is made, so that readers who come at once wait for
  // one of them.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const GeneratedText> root_json_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_ZARR_VIEW_H_
