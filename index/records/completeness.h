// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_COMPLETENESS_H_
#define TENSORMOUNT_INDEX_RECORDS_COMPLETENESS_H_

#include <string>

#include "tensormount/status.h"

#include "index/records/inventory.h"
#include "shard/coverage.h"
#include "shard/region_set.h"

namespace tensormount {

// What chunks make of one tensor.
enum class Completeness {
  kWhole,
  kHole,     // A box is stored in no chunk; no cell is stored twice.
  kOverlap,  // A box is stored twice.
  kBad,      // A chunk breaks a rule: outside of its file or the shape, not as long as its region.
};
struct TensorCheck {
  Completeness verdict = Completeness::kWhole;
  std::string why;          // Without the name of the tensor; empty: it is whole.
  CoverageReport coverage;  // Of a hole or an overlap: what is missing, and what is double.
};

// Judges tensors one after the other, in memory that it keeps: a checkpoint has very many, most of
// them of one chunk. Whether regions cover a shape is for IsPartition (shard/coverage.h) to say,
// here as in a layout of ranks. Thread-compatible.
class CompletenessCheck {
 public:
  // `tensor`: its chunks' files and manifests are numbers of `inventory`.
  TensorCheck Check(const Inventory& inventory, const TensorRecord& tensor);

 private:
  RegionSet regions_;  // Of the tensor's chunks; owners are their rows.
};

// Whether the chunks of every tensor cover it exactly, and its objects' parts their grids; whether
// every chunk lies in its file and has the length of its region. kDataLoss names tensor, the exact
// missing or doubled box, and the files concerned.
Status CheckComplete(const Inventory& inventory);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMPLETENESS_H_
