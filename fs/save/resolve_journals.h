// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_RESOLVE_JOURNALS_H_
#define TENSORMOUNT_FS_SAVE_RESOLVE_JOURNALS_H_

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "fs/save/journal.h"
#include "fs/save/publish.h"
#include "fs/save/schema.h"
#include "shard/tensor_meta.h"

// What the journals of a staging say, sorted by tensor and object, and the pieces of a tensor that
// one journal has written, as regions of its bytes.

namespace tensormount::fs {

// A problem for the report; over 1,000 are counted.
void AddProblem(StagingReport& report, std::string code, std::string object, std::string detail);
// NumPy's spelling with ":" for whole axes: "tensor w [512:768, :]".
std::string TensorBoxText(const TensorMeta& meta, const Box& box);
// "object rng[2]", "object config".
std::string ObjectText(const std::string& key, const Dims& index);

struct LoadedJournal {
  std::string name;  // "<incarnation>.tmj"
  Journal journal;
  std::vector<std::string> files;  // Names by the journal's numbers.
};

// All that one journal says of one of its targets, in order: kExtent and kForget records.
struct TargetRecords {
  std::uint32_t journal = 0;
  std::uint32_t number = 0;
  const StagedTarget* target = nullptr;
  std::vector<std::pair<std::uint64_t, const JournalRecord*>> records;  // With their positions.
};

struct ObjectClaim {
  std::uint32_t journal = 0;
  const StagedObject* object = nullptr;
};

struct SortedJournals {
  std::map<std::string, std::vector<TargetRecords>> tensors;
  using ObjectName = std::pair<std::string, std::vector<std::int64_t>>;
  std::map<ObjectName, std::vector<ObjectClaim>> objects;  // At most one of each journal.
};
// Sorts records of journals, which must outlive the result. What is condemned, or about a tensor
// that `schema` does not have, becomes a problem of the report. kDataLoss for file numbers and
// names that journals cannot have.
Result<SortedJournals> SortJournals(std::vector<LoadedJournal>& journals,
                                    const StagingSchema& schema, StagingReport& report);

// Bytes of a tensor that stand side by side in a data file, in the row-major order of `bytes`.
struct StagedRun {
  std::uint32_t journal = 0;
  std::uint64_t sequence = 0;  // Later ones of one journal hold over earlier ones.
  std::uint32_t target = 0;
  const StagedExtent* extent =
      nullptr;             // Null: forgets these cells of earlier records of `target`.
  std::uint64_t at = 0;    // In the extent's stored bytes,
  std::uint64_t size = 0;  // so many.
  Region bytes;            // In byte coordinates of the tensor (ByteShape).
  // Where they are a range of the target: it begins here in the target's packed bytes.
  bool is_range = false;
  std::uint64_t begin = 0;
  Box of;        // The target's box, in elements,
  Box of_bytes;  // and in bytes.

  bool whole() const;  // All of its extent.
};
// What is left of one tensor's records after later ones of the same target. Pieces of different
// targets or journals may still overlap. In the order of journals, then records. kDataLoss where a
// record does not fit the tensor.
Result<std::vector<StagedRun>> PiecesOf(const TensorMeta& meta,
                                        const std::vector<TargetRecords>& targets);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_RESOLVE_JOURNALS_H_
