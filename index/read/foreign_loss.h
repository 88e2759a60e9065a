// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_FOREIGN_LOSS_H_
#define TENSORMOUNT_INDEX_READ_FOREIGN_LOSS_H_

#include <span>
#include <string>
#include <vector>

#include "tensormount/status.h"

namespace tensormount {

// Data that a foreign checkpoint names, but that its files lack or contradict. Data in a form that
// tensormount does not support are not a loss; they are left out with a warning.
struct ForeignLoss {
  // Path of the file below the checkpoint. Empty: the loss concerns no single file.
  std::string file;
  std::string reason;  // "the file is missing"
  // All keys of the lost data. If both lists are empty, the keys are unknown.
  std::vector<std::string> tensors;
  std::vector<std::string> objects;
  // Whether the tensors can be read, except for cells that no file has. If false, the tensors are
  // left out.
  bool holes = false;

  // The lost data in a few words: "tensor w", "14 tensors and 2 objects", "the contents of the
  // file" (if no keys are known).
  std::string Summary() const;
  // The first few keys, ": a, b, c, ...", if Summary() has only numbers; else empty.
  std::string Examples() const;
  // The loss as a sentence: "__2_0.distcp: the file is missing: 14 tensors are left out: a, b, c,
  // ...". For one key without a file: "tensor w: left out: ...". With holes: "parts of 14 tensors
  // are lost".
  std::string ToString() const;
};

// kDataLoss if a loss concerns a key that matches the glob `keys` (empty: all keys), or concerns
// unknown keys. The message describes the first such loss and gives the number of the others.
Status CheckNoLoss(std::span<const ForeignLoss> lost, const std::string& keys = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FOREIGN_LOSS_H_
