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

using ViewList = std::vector<std::unique_ptr<const View>>;

// Row-major bytes of each tensor; layers of stacked ones by name.
std::unique_ptr<const View> MakeTensorsView(const ShownCheckpoint& shown);
// The same behind a NumPy header.
std::unique_ptr<const View> MakeNpyView(const ShownCheckpoint& shown);
// In which data files the bytes of a tensor are.
std::unique_ptr<const View> MakeExtentsView(const ShownCheckpoint& shown);
std::unique_ptr<const View> MakeObjectsView(const ShownCheckpoint& shown);
// Of a foreign .safetensors file the very same bytes, read by `fs`.
std::unique_ptr<const View> MakeSafetensorsView(const ShownCheckpoint& shown);
Result<std::unique_ptr<const View>> MakeCommonJsonView(const ShownCheckpoint& shown);
// Names those of `views` that are there; the list may grow until the file is first looked at.
std::unique_ptr<const View> MakeCheckpointJsonView(const ShownCheckpoint& shown,
                                                   const ViewList& views);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEWS_H_
