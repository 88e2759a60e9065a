// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGING_WRITER_H_
#define TENSORMOUNT_FS_SAVE_STAGING_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/blob_writer.h"
#include "fs/save/target_writer.h"
#include "index/store/store.h"

namespace tensormount::fs {

// The writes of this mount into one staging: its journal, its data files, the written bytes of each
// target. Independent of names and nodes. Thread-safe; different targets are written in parallel.
//
// Placement: a target (a box of a tensor) of at least kOwnFileBytes whose bytes are one run of the
// tensor (rows, the whole tensor) is written into this mount's file of that tensor, each byte at
// its position in the tensor. If all bytes of the tensor are there, the file is the tensor
// (Placement::kTensorFile) and can use passthrough. Other large targets get a file of their own,
// packed; small targets and small objects get an area of the pack. Synced bytes are never
// overwritten: a rewrite goes to the pack and supersedes them in the journal. Files end at the last
// written byte, and may have holes. Short writes (under 64 KiB) into a large target without
// adjacent written bytes, such as the columns of one rank written through `tensors/KEY`, would
// leave a file of scattered pieces with a record for each. They are appended to the pack instead;
// those at a fixed distance form a packed box there and become one record (StagedExtent::runs;
// figures in docs/performance.md). Once 64 KiB are contiguous they are copied to their position, so
// a tensor that is written in order by small writes still gets its file.
// Lock order: Registry::renames, then sync_lock_ and mutex_ of targets and objects, then
// Registry::mutex, then the locks of DataFiles. A target calls back into the registry
// (on_first_write) with its own lock held, so the registry's mutex comes after it and is never held
// while a function of a target is called.
class StagingWriter {
 public:
  // Makes the journal and files at the first write. `fs` must outlive this object.
  StagingWriter(FileSystem& fs, const Staging& staging, const std::string& incarnation);

  // The writer of a box of a tensor; everybody who opens that box gets the same one. Once the box
  // was written, its writer is kept until this object is destroyed.
  Result<std::shared_ptr<TargetWriter>> OpenTarget(const TensorMeta& meta, const Box& box);

  // The writer of an object part. kNotFound: the part does not exist and `create` is false.
  Result<std::shared_ptr<BlobWriter>> OpenObject(const std::string& key, const Dims& index,
                                                 bool create);
  // Removes an object, durably. kNotFound: this mount did not write it. Programs that have the
  // object open continue with an unnamed file.
  Status RemoveObject(const std::string& key, const Dims& index);
  // Renames an object, durably and without copying; after a crash at least one of both names
  // exists. Synced bytes and open handles stay with the object. An object that had the new name
  // loses it and continues without a name. kNotFound: this mount did not write the object.
  Status RenameObject(const std::string& key, const Dims& index, const std::string& to_key,
                      const Dims& to_index);
  struct ObjectName {
    std::string key;
    Dims index;
    std::uint64_t size = 0;
  };
  std::vector<ObjectName> Objects() const;

  // Makes everything written so far durable and recorded, with one sync for each data file. Returns
  // the first failure, which does not keep other parts from being synced.
  Status SyncAll();
  // Ends all writing, because the staging was published or removed (StagedCheckpoint::Retire).
  // Later calls, reads too, return kStale; descriptors are closed.
  void CloseForGood() { shared_->files.CloseForGood(); }
  // Name of the journal for done marks, "<incarnation>.tmj"; empty while nothing was written.
  std::string journal_name() const;
  std::uint64_t journal_bytes() const;
  // Totals for .tensormount/status.
  std::uint64_t bytes_written() const { return shared_->bytes_written.load(); }
  std::uint64_t files() const { return shared_->files.count(); }
  std::uint64_t syncs() const { return shared_->syncs.load(); }

 private:
  using Numbers = std::vector<std::int64_t>;  // Dims have no operator<.
  // Key, begin and extent of the box, shape, bits. After a withdrawal of the schema, a key may
  // stand for another tensor.
  using TargetKey = std::tuple<std::string, Numbers, Numbers, Numbers, std::int64_t>;
  using ObjectKey = std::pair<std::string, Numbers>;
  // The deleter of an unwritten target that nobody has open removes its entry. A written target
  // stays, because SyncAll must sync it and a later open must find its bytes.
  struct TargetEntry {
    std::weak_ptr<TargetWriter> open;
    std::shared_ptr<TargetWriter> kept;  // Set at the first write.
  };
  // All targets and objects of the writer. Targets refer to the registry weakly, because they may
  // outlive the writer.
  struct Registry {
    std::mutex mutex;  // Taken after the mutexes of targets.
    std::map<TargetKey, TargetEntry> targets;
    std::map<ObjectKey, std::shared_ptr<BlobWriter>> objects;
    std::mutex renames;  // Serializes renames; taken before all others.
    std::uint32_t next_owner = 0;
  };

  const std::shared_ptr<Registry> registry_;
  const std::shared_ptr<StagedParts> shared_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_WRITER_H_
