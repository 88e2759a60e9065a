// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_ZARR_METADATA_H_
#define TENSORMOUNT_FS_VIEWS_ZARR_METADATA_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "fs/formats/generated_text.h"
#include "fs/formats/zarr_grid.h"
#include "fs/views/key_tree.h"
#include "fs/views/shown_tensors.h"

// The zarr.json files of zarr/ (Zarr v3 core specification).

namespace tensormount::fs {

// File name of the metadata of every group and array. A reader opens the file of the root first,
// whose consolidated metadata contain all others. The others are one line each, because the root's
// file repeats them.
inline constexpr std::string_view kZarrJson = "zarr.json";

// The Zarr type of elements of this dtype: the same type if the core specification has it, else the
// unsigned integer of the same size. Empty for types under a byte, which zarr/ does not show.
// bf16 is thus uint16, which every client accepts and a reader can view as bf16; the true type is
// the attribute tensormount_dtype.
std::string_view ZarrType(DType dtype);

// The path of a key's array below zarr/: the key's path, except that a last name "zarr.json" is
// escaped, because the directory's metadata have that name.
std::string ZarrPath(std::string path_of_key);

// The text of zarr.json for a directory of keys.
std::string ZarrGroupJson();
// The text of zarr.json for a tensor whose dtype has a ZarrType.
std::string ZarrArrayJson(const TensorMeta& meta, const ZarrGrid& grid);
// zarr.json of zarr/ itself, with the metadata of all groups and arrays below it ("consolidated",
// as zarr-python 3 writes it). `tensors` and `tree`, its tree, must outlive the text.
// The text has one item for each tensor; the item begins with the groups of directories whose first
// tensor it is. `grids` is called whenever a tensor is rendered, and must always return the same
// grid for it.
using ZarrGrids = std::function<Result<ZarrGrid>(std::uint32_t number, const TensorEntry& tensor)>;
Result<std::shared_ptr<const GeneratedText>> ZarrRootJson(const ShownTensors& tensors,
                                                          const KeyTree& tree, ZarrGrids grids);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_ZARR_METADATA_H_
