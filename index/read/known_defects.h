// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_KNOWN_DEFECTS_H_
#define TENSORMOUNT_INDEX_READ_KNOWN_DEFECTS_H_

#include <string>
#include <vector>

#include "index/read/checkpoint.h"

namespace tensormount {

// Finds defects that earlier versions of this library caused in the checkpoint when they saved,
// imported or exported it, as far as the stored data show them. Returns one text for each defect,
// with the reason. Hashes cannot show these defects, because the bytes are those that were saved.
// docs/reliability.md ("Checkpoints that old defects made") lists the checks and their limits.
// Reads the common values, sometimes the list of objects, and for some optimizers also the key list
// and the first values of some tensors. Skips data that cannot be read.
std::vector<std::string> FindKnownDefects(const OpenedCheckpoint& opened);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_KNOWN_DEFECTS_H_
