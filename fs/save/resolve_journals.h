// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_RESOLVE_JOURNALS_H_
#define TENSORMOUNT_FS_SAVE_RESOLVE_JOURNALS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "fs/save/journal.h"
#include "fs/save/publish.h"
#include "fs/save/schema.h"
#include "shard/tensor_meta.h"

// What the journals of a staging say, sorted by tensor and object, and the runs of bytes of a
// tensor that each journal has written, as regions.

namespace tensormount::fs {

// A problem for the report; over 1,000 are counted.
void AddProblem(StagingReport& report, std::string code, std::string object, std::string detail);
// NumPy's spelling with ":" for whole axes: "tensor w [512:768, :]".
std::string TensorBoxText(const TensorMeta& meta, const Box& box);
// "object rng[2]", "object config".
std::string ObjectText(const std::string& key, const Dims& index);

// Pointers go into the vectors of the journals, which do not change any more.
// All that one journal says of one of its targets, in order: kExtent and kForget records.
struct TargetRecords {
  std::uint32_t journal = 0;
  std::uint32_t number = 0;
  const StagedTarget* target = nullptr;
  std::vector<const JournalRecord*> records;  // Of the journal's vector.
};

// Where several mounts wrote the same object part, their bytes must be equal.
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
// A kForget of a whole target drops all earlier records of it, and its condemnation with them: the
// program truncated the file and may start again.
Result<SortedJournals> SortJournals(std::vector<Journal>& journals, const StagingSchema& schema,
                                    StagingReport& report);

// What is left of one extent of a journal: bytes of a tensor that are stored side by side, in the
// row-major order of `bytes`. Or, where its record is a kForget, bytes that earlier records of the
// same target no longer say anything about.
struct StagedRun {
  std::uint32_t journal = 0;
  std::uint32_t target = 0;  // Number in that journal.
  // Later ones of one journal hold over earlier ones; they are ordered by their addresses, which
  // are those of the journal's vector.
  const JournalRecord* record = nullptr;
  std::uint64_t at = 0;    // In the extent's stored bytes,
  std::uint64_t size = 0;  // so many.
  Region bytes;            // In byte coordinates of the tensor (ByteShape).
  // Where they are a range of the target: it begins here in the target's packed bytes.
  bool is_range = false;
  std::uint64_t begin = 0;
  Box of;        // The target's box, in elements,
  Box of_bytes;  // and in bytes.
  // Once TensorAssembly has cut away what others say of the same bytes: the boxes of bytes that are
  // left, disjoint. Not set: all of `bytes`.
  std::optional<std::vector<Box>> left = std::nullopt;

  bool forgets() const { return record->kind == JournalRecord::Kind::kForget; }
  const StagedExtent& extent() const { return record->extent; }  // Not of one that forgets.
  bool whole() const { return !forgets() && at == 0 && size == extent().bytes(); }
};
// What is left of one tensor's records after later ones of the same target. Runs of different
// targets or journals may still overlap. In the order of journals, then records. kDataLoss where a
// record does not fit the tensor.
// A record of columns (StagedExtent::runs) becomes one run with a box of bytes where its stride is
// that of an axis of the target, and single ranges otherwise.
Result<std::vector<StagedRun>> RunsOf(const TensorMeta& meta,
                                      const std::vector<TargetRecords>& targets);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_RESOLVE_JOURNALS_H_
