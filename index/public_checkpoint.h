// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_PUBLIC_CHECKPOINT_H_
#define TENSORMOUNT_INDEX_PUBLIC_CHECKPOINT_H_

#include <memory>

#include "tensormount/checkpoint.h"

#include "index/read/checkpoint.h"

namespace tensormount {

// Gives other parts of the library access to the OpenedCheckpoint behind a public handle.
struct CheckpointInside {
  static const std::shared_ptr<const OpenedCheckpoint>& Of(const Checkpoint& checkpoint);
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_PUBLIC_CHECKPOINT_H_
