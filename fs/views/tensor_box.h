// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_TENSOR_BOX_H_
#define TENSORMOUNT_FS_VIEWS_TENSOR_BOX_H_

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "fs/formats/file_segments.h"

namespace tensormount::fs {

// Appends a box of a tensor, packed in a container as FileSegments::AddBox has it, and with its
// errors. What is one run of the tensor's row-major bytes is added as that run: it may be served
// from where it is stored.
// A kTensor segment can be mapped and spliced, and found to be the whole of a stored file; a kBox
// segment is gathered from strided reads. Slices of whole rows, and chunks of zarr/ that are blocks
// of rows, are such runs.
Status AddTensorBox(FileSegments& segments, const TensorEntry& tensor, const Box& box,
                    const Dims& container);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_TENSOR_BOX_H_
