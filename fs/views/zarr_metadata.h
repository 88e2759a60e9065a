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
#include "fs/views/key_tree.h"
#include "fs/views/shown_tensors.h"
#include "fs/formats/zarr_grid.h"

// The zarr.json files of zarr/ (Zarr v3 core specification).

namespace tensormount::fs {

// Every group and every array has one file of this name; a reader opens the root's first, and takes
// all others from its consolidated metadata where it finds any. Written by hand in one line:
// zarr.json of the root holds the same text once more for each array.
inline constexpr std::string_view kZarrJson = "zarr.json";

// The type that zarr/ gives elements of this type: of the format's core, or the unsigned integer of
// the same size where that has none. Empty for types under a byte, which are no arrays there.
// bf16 has none in the core specification, so it is uint16, which a reader views as bf16: the bits
// are right, and no client refuses the array. The true type is the attribute tensormount_dtype.
std::string_view ZarrType(DType dtype);

// The names that lead to the array of a key below zarr/: the key's path, but for a last name
// "zarr.json", which would be that of the folder's metadata.
std::string ZarrPath(std::string path_of_key);

// Of a folder of keys.
std::string ZarrGroupJson();
// Of a tensor that has a ZarrType.
std::string ZarrArrayJson(const TensorMeta& meta, const ZarrGrid& grid);
// Of zarr/ itself, with the metadata of all groups and arrays below it ("consolidated", as
// zarr-python 3 writes it). `tensors` and `tree`, its tree, must outlive the text.
// Items of the text are tensors; the groups of the folders that begin at a tensor stand before it.
// `grids` is called again for each tensor whenever its block is rendered, and must give the same
// grid.
using ZarrGrids = std::function<Result<ZarrGrid>(std::uint32_t number, const TensorEntry& tensor)>;
Result<std::shared_ptr<const GeneratedText>> ZarrRootJson(const ShownTensors& tensors,
                                                          const KeyTree& tree, ZarrGrids grids);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_ZARR_METADATA_H_
