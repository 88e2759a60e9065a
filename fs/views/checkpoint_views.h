// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEWS_H_
#define TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEWS_H_

#include <memory>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/views/shown_checkpoint.h"
#include "fs/views/view.h"

// The views of a checkpoint that need no header of their own. What they are given must outlive
// them.

namespace tensormount::fs {

// Functions and not classes, because nobody needs more of these views than the interface. HfView,
// SlicesView and ZarrView are larger and have headers of their own.
using ViewList = std::vector<std::unique_ptr<const View>>;

// Row-major bytes of each tensor; layers of stacked ones by name.
// tensors/KEY. The plain one: everything that can read a file can read it (dd, np.memmap, rsync).
std::unique_ptr<const View> MakeTensorsView(const ShownCheckpoint& shown);
// The same behind a NumPy header.
// npy/KEY.npy, as numpy.save writes it, so that numpy.load can map it. The header is padded to a
// multiple of 64 bytes (shard/npy.h).
std::unique_ptr<const View> MakeNpyView(const ShownCheckpoint& shown);
// In which data files the bytes of a tensor are.
// extents/KEY.json, for people and programs that want to read the data files themselves.
std::unique_ptr<const View> MakeExtentsView(const ShownCheckpoint& shown);
// objects/KEY: what was saved besides tensors, byte for byte.
std::unique_ptr<const View> MakeObjectsView(const ShownCheckpoint& shown);
// Of a foreign .safetensors file the very same bytes, read by `fs`.
// model.safetensors: all tensors that the format has a type for, as one file.
std::unique_ptr<const View> MakeSafetensorsView(const ShownCheckpoint& shown);
// Fails where the common values cannot be read, and with it the checkpoint: they are a few records,
// and a checkpoint whose iteration number is damaged should not look whole.
Result<std::unique_ptr<const View>> MakeCommonJsonView(const ShownCheckpoint& shown);
// Names those of `views` that are there; the list may grow until the file is first looked at.
// checkpoint.json.
std::unique_ptr<const View> MakeCheckpointJsonView(const ShownCheckpoint& shown,
                                                   const ViewList& views);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEWS_H_
