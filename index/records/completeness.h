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
// `why` is for messages and `coverage` for programs: a foreign checkpoint with holes is opened, and
// its boxes are reported as losses.
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
  // Findings are in the order of the checks: a row that breaks a rule is kBad whatever else is
  // wrong, because its region cannot be trusted to mean anything; an overlap goes before a hole.
  TensorCheck Check(const Inventory& inventory, const TensorRecord& tensor);

 private:
  RegionSet regions_;  // Of the tensor's chunks; owners are their rows.
};

// Whether the chunks of every tensor cover it exactly, and its objects' parts their grids; whether
// every chunk lies in its file and has the length of its region. kDataLoss names tensor, the exact
// missing or doubled box, and the files concerned.
//
// Run at every publish over the merged manifests, at every rebuild of an index, and over what an
// adapter for a foreign format found. It is the last check between what ranks say that they wrote
// and a COMMIT that promises it, so it believes no field of a row: rows come from files of other
// processes.
//
// Cost: linear in the number of chunks. Rows are compared as packed bytes; only a tensor that fails
// is decoded, to say what is wrong with it. No data is read.
Status CheckComplete(const Inventory& inventory);
// The part of it that is about objects.
Status CheckObjects(const Inventory& inventory);
// The part of it that is about one tensor, in the words of the whole.
Status CheckTensor(CompletenessCheck& check, const Inventory& inventory,
                   const TensorRecord& tensor);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMPLETENESS_H_
