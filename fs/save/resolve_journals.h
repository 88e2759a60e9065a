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

// Sorts the journals of a staging by tensor and object, and converts the bytes of a tensor that
// each journal has written to regions.

namespace tensormount::fs {

// Adds a problem to the report; beyond 1,000 only counts it.
void AddProblem(StagingReport& report, std::string code, std::string object, std::string detail);
// A box of a tensor in NumPy notation, with ":" for whole axes: "tensor w [512:768, :]".
std::string TensorBoxText(const TensorMeta& meta, const Box& box);
// The name of an object part in reports: "object rng[2]", "object config".
std::string ObjectText(const std::string& key, const Dims& index);

// The kExtent and kForget records of one target of a journal, in order. Pointers refer to the
// journals' vectors, which no longer change.
struct TargetRecords {
  std::uint32_t journal = 0;
  std::uint32_t number = 0;
  const StagedTarget* target = nullptr;
  std::vector<const JournalRecord*> records;
};

// An object part as one journal recorded it. If several mounts wrote the same part, their bytes
// must be equal.
struct ObjectClaim {
  std::uint32_t journal = 0;
  const StagedObject* object = nullptr;
};

struct SortedJournals {
  std::map<std::string, std::vector<TargetRecords>> tensors;
  using ObjectName = std::pair<std::string, std::vector<std::int64_t>>;
  // For each object part at most one entry for each journal.
  std::map<ObjectName, std::vector<ObjectClaim>> objects;
};
// Sorts records of journals, which must outlive the result. Condemned targets and objects, and
// targets that do not match `schema`, become problems of the report.
// kDataLoss: a record has an invalid number, name or count of hashes.
// A kForget of a whole target drops the target's earlier records, including a kCondemn: the program
// truncated the file and may start again.
Result<SortedJournals> SortJournals(std::vector<Journal>& journals, const StagingSchema& schema,
                                    StagingReport& report);

// Bytes of a tensor that one record of a journal stored contiguously, in the row-major order of
// `bytes`. For a kForget record: the bytes that the record discards.
struct StagedRun {
  std::uint32_t journal = 0;
  std::uint32_t target = 0;  // Number of the target in that journal.
  // Later records of a journal override earlier ones. Records are ordered by address, since they
  // lie in the journal's vector.
  const JournalRecord* record = nullptr;
  std::uint64_t at = 0;    // Position in the extent's stored bytes.
  std::uint64_t size = 0;  // Number of bytes.
  Region bytes;            // Cells in byte coordinates (ByteShape).
  // The bytes are one range of the target, which begins at `begin` in the target's packed bytes.
  bool is_range = false;
  std::uint64_t begin = 0;
  Box target_box;  // The target's box in elements.
  Box of_bytes;    // The target's box in bytes.
  // Disjoint boxes of bytes that remained after TensorAssembly removed bytes that other records
  // supersede. Not set: all of `bytes` remain.
  std::optional<std::vector<Box>> remaining = std::nullopt;

  bool forgets() const { return record->kind == JournalRecord::Kind::kForget; }
  const StagedExtent& extent() const { return record->extent; }  // Undefined for a kForget.
  bool whole() const { return !forgets() && at == 0 && size == extent().bytes(); }
};
// The runs of one tensor's records, in the order of journals, then records. If all records of a
// target are single ranges, its runs are what later records left of earlier ones. Other runs may
// overlap (TensorAssembly::Resolve). kDataLoss: a record does not fit the tensor.
// A record of columns (StagedExtent::runs) becomes runs with boxes of bytes if its stride is that
// of an axis of the target, and otherwise one run for each of its ranges.
Result<std::vector<StagedRun>> RunsOf(const TensorMeta& meta,
                                      const std::vector<TargetRecords>& targets);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_RESOLVE_JOURNALS_H_
