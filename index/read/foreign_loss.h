// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_FOREIGN_LOSS_H_
#define TENSORMOUNT_INDEX_READ_FOREIGN_LOSS_H_

#include <span>
#include <string>
#include <vector>

#include "tensormount/status.h"

namespace tensormount {

// What a foreign checkpoint names and its files lack, or hold as something else than it says:
// damage to whoever wants all of it. What is there in a form that we do not read is none: it is
// left out with a warning.
struct ForeignLoss {
  std::string file;    // Below the folder; empty: no one file.
  std::string reason;  // "the file is missing"
  // All keys that it concerns. None of either: nobody knows which.
  std::vector<std::string> tensors;
  std::vector<std::string> objects;
  // The tensors are there, with cells that are stored nowhere; otherwise they are left out.
  bool holes = false;

  // "tensor w", "14 tensors and 2 objects", "what it held".
  std::string What() const;
  // The first few keys where What() only counts: ": a, b, c, ..."; else empty.
  std::string Examples() const;
  // "__2_0.distcp: the file is missing: 14 tensors are left out: a, b, c, ...", or, of one thing
  // without a file, "tensor w: left out: ...". With holes "parts of 14 tensors are lost".
  std::string ToString() const;
};

// kDataLoss tells the first of them that concerns a key which the glob matches (empty: all), or of
// which nobody knows what it concerns, and counts the others: a lost file of a large model may be a
// loss of thousands of tensors.
Status CheckNoLoss(std::span<const ForeignLoss> lost, const std::string& keys = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FOREIGN_LOSS_H_
