// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_TENSOR_BOX_H_
#define TENSORMOUNT_FS_VIEWS_TENSOR_BOX_H_

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "fs/formats/file_segments.h"

namespace tensormount::fs {

// Appends a box of a tensor, packed in a container. Returns the errors of FileSegments::AddBox. A
// box that fills its container and is one run of the tensor's row-major bytes becomes a kTensor
// segment, which may be found to be a whole stored file and is usually one mapping; a kBox segment
// is gathered from strided reads. Slices of whole rows, and chunks of zarr/ that are blocks of rows
// without padding, are such runs.
Status AddTensorBox(FileSegments& segments, const TensorEntry& tensor, const Box& box,
                    const Dims& container);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_TENSOR_BOX_H_
