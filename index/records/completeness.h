// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_COMPLETENESS_H_
#define TENSORMOUNT_INDEX_RECORDS_COMPLETENESS_H_

#include <string>

#include "tensormount/status.h"

#include "index/records/inventory.h"
#include "shard/coverage.h"
#include "shard/region_set.h"

namespace tensormount {

// Result of checking the chunks of one tensor.
enum class Completeness {
  kWhole,
  kHole,     // Some cells are in no chunk, and no cell is in two chunks.
  kOverlap,  // Some cells are in more than one chunk.
  // A chunk breaks a rule, for example: it exceeds its file or the shape, or its length does not
  // match its region.
  kBad,
};
// Result of the check of one tensor. `why` is for messages, `coverage` for programs: a foreign
// checkpoint with holes can be opened, and its missing boxes are reported as losses.
struct TensorCheck {
  Completeness verdict = Completeness::kWhole;
  std::string why;  // The finding without the tensor's name. Empty if the tensor is whole.
  // The missing boxes of a hole, or the doubled boxes of an overlap, at most four of each.
  CoverageReport coverage;
};

// Checks tensors one after the other. The memory is reused from tensor to tensor, because a
// checkpoint has many tensors, and most of them have one chunk. IsPartition (shard/coverage.h)
// decides whether regions cover a shape. Thread-compatible.
class CompletenessCheck {
 public:
  // Checks the chunks of `tensor`, whose file and manifest numbers refer to `inventory`. Reports
  // only one kind of finding: kBad before kOverlap, because the region of a bad table row cannot be
  // trusted, and kOverlap before kHole.
  TensorCheck Check(const Inventory& inventory, const TensorRecord& tensor);

 private:
  // The regions of the tensor's chunks. The number of each region (`owner`) is its table row.
  RegionSet regions_;
};

// Checks that the chunks of every tensor cover the tensor exactly, that object parts cover their
// grids, and that every chunk lies within its file and has the length of its region. kDataLoss
// names the tensor, the first missing or doubled box, and for a doubled box its two files.
//
// These checks run at every publish over the merged manifests, at every rebuild of an index, and on
// the result of a reader of a foreign format. They are the last checks before COMMIT vouches for
// the ranks' reports, so they trust no field of a table row.
//
// Takes expected linear time in the number of chunks for usual shardings (IsPartition). Table rows
// are compared as packed bytes, and decoded only if their packed form is not certainly valid. No
// data file is read.
Status CheckComplete(const Inventory& inventory);
// Checks only the objects, like CheckComplete.
Status CheckObjects(const Inventory& inventory);
// Checks one tensor, with the same messages as CheckComplete.
Status CheckTensor(CompletenessCheck& check, const Inventory& inventory,
                   const TensorRecord& tensor);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMPLETENESS_H_
