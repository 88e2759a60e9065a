// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEWS_H_
#define TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEWS_H_

#include <memory>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/views/shown_checkpoint.h"
#include "fs/views/view.h"

// Functions that make the views without a header of their own. Callers need only the View
// interface, so the classes are in .cc files. The arguments must outlive the view.

namespace tensormount::fs {

using ViewList = std::vector<std::unique_ptr<const View>>;

// tensors/KEY: the row-major bytes of a tensor, or of a layer of a stacked tensor, as a file for
// any program (dd, np.memmap, rsync).
std::unique_ptr<const View> MakeTensorsView(const ShownCheckpoint& shown);
// npy/KEY.npy: the tensor's row-major bytes after a NumPy header, as numpy.save writes them, so
// that numpy.load can map the file. The header is padded to a multiple of 64 bytes (shard/npy.h).
std::unique_ptr<const View> MakeNpyView(const ShownCheckpoint& shown);
// extents/KEY.json: the location of a tensor's bytes in data files, for programs that read data
// files directly.
std::unique_ptr<const View> MakeExtentsView(const ShownCheckpoint& shown);
// objects/KEY: saved objects, byte for byte.
std::unique_ptr<const View> MakeObjectsView(const ShownCheckpoint& shown);
// model.safetensors: all tensors that the format supports, as one file. For a source that is one
// foreign .safetensors file, and without a key map, it has the bytes of that file.
std::unique_ptr<const View> MakeSafetensorsView(const ShownCheckpoint& shown);
// common.json. If the common values are unreadable, this call fails, and so does the opening of the
// checkpoint: a checkpoint with a damaged iteration number must not look intact.
Result<std::unique_ptr<const View>> MakeCommonJsonView(const ShownCheckpoint& shown);
// checkpoint.json. Its text lists the names of `views`; views may be added until the file is first
// accessed.
std::unique_ptr<const View> MakeCheckpointJsonView(const ShownCheckpoint& shown,
                                                   const ViewList& views);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEWS_H_
