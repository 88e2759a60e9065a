// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_KNOWN_DEFECTS_H_
#define TENSORMOUNT_INDEX_READ_KNOWN_DEFECTS_H_

#include <string>
#include <vector>

#include "index/read/checkpoint.h"

namespace tensormount {

// What earlier versions of this library did wrong when they saved, imported or exported the
// checkpoint, where what is stored tells: a sentence each, with the reason. The bytes are those
// that were saved; hashes cannot tell. docs/reliability.md ("Checkpoints that old defects made")
// lists the checks, and what cannot be told. Reads the common values, of some optimizers a few
// small tensors, and walks over the keys only where such optimizers are named. What cannot be read
// is passed over.
std::vector<std::string> FindKnownDefects(const OpenedCheckpoint& opened);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_KNOWN_DEFECTS_H_
