// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_NPY_H_
#define TENSORMOUNT_SHARD_NPY_H_

#include <string>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

namespace tensormount {

// The header of a .npy file, version 1.0 (rank 16 always fits), C order, data aligned to 64
// bytes (NumPy's format document, numpy.lib.format). Types under a byte: kUnsupported.
Result<std::string> MakeNpyHeader(DType dtype, const Dims& shape);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_NPY_H_
