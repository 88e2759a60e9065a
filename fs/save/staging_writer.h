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

// Everything that this mount writes into one staging: its journal, its data files, what is written
// of each target. Knows nothing of names and nodes. Thread-safe; different targets are written in
// parallel.
//
// Placement: a target of at least kOwnFileBytes whose bytes are one run of the tensor (rows, the
// whole tensor) is written into this mount's file of that tensor, each byte at its place in the
// tensor: where this mount comes to write all of it, the file is the tensor (Placement::
// kTensorFile) and can be passed through. Other large targets get a file of their own, packed.
// Small targets get an area of the pack, objects too while they are small. Synced bytes are never
// overwritten: a rewrite goes to the pack and supersedes them in the journal. Files are as long as
// what was written into them, and may have holes.
// Short writes (under 64 KiB) into a large target that have no neighbours, such as the columns of
// one rank written through `tensors/KEY`, would leave a file of pieces far apart, a record for
// each. They are appended to the pack instead, where those at one distance lie as the packed box
// that they are, and become one record (StagedExtent::runs); docs/performance.md has figures. Where
// neighbours follow and 64 KiB are together, they are copied to their place: who writes a
// tensor in order by small writes still gets its file.
// Lock order: Registry::renames, then turns and locks of targets and objects, then Registry::mutex,
// then those of DataFiles. A target calls back into the registry (on_first_write) with its own lock
// held, which is why the registry's mutex comes after it and is never held while a target is
// called.
class StagingWriter {
 public:
  // Makes the journal and files when the first byte is written. `fs` must outlive this.
  StagingWriter(FileSystem& fs, const Staging& staging, const std::string& incarnation);

  // A box of a tensor. Shared by all who have it open; kept, once it was written, until this ends.
  Result<std::shared_ptr<TargetWriter>> OpenTarget(const TensorMeta& meta, const Box& box);

  // An object part. kNotFound where it is not there and `create` is false.
  Result<std::shared_ptr<BlobWriter>> OpenObject(const std::string& key, const Dims& index,
                                                 bool create);
  // kNotFound. Who has it open goes on with a file without a name. Durable.
  Status RemoveObject(const std::string& key, const Dims& index);
  // kNotFound. What was written and synced goes with it, and those who have it open; what had the
  // new name goes on without one. Durable, and nothing is copied: one of both names at any time.
  Status RenameObject(const std::string& key, const Dims& index, const std::string& to_key,
                      const Dims& to_index);
  struct ObjectName {
    std::string key;
    Dims index;
    std::uint64_t size = 0;
  };
  std::vector<ObjectName> Objects() const;

  // Everything so far durable and recorded, each data file synced once. The first failure; it does
  // not keep others from being synced. Data files are sealed by the publish, not here.
  Status SyncAll();
  // Called when the staging was seen to have left its name (StagedCheckpoint::Retire).
  // No more writes: the staging was published or removed. Later calls are kStale, reads too;
  // descriptors are closed.
  void CloseForGood() { shared_->files.CloseForGood(); }
  // "<incarnation>.tmj" and its synced bytes, for done marks; empty while nothing was written.
  std::string journal_name() const;
  std::uint64_t journal_bytes() const;
  // Of this writer since it was made.
  std::uint64_t bytes_written() const { return shared_->bytes_written.load(); }
  std::uint64_t files() const { return shared_->files.count(); }
  std::uint64_t syncs() const { return shared_->syncs.load(); }

 private:
  using Numbers = std::vector<std::int64_t>;  // Dims have no order.
  // Key, begin and extent of the box, shape, bits. Tensors of one key differ where a schema was
  // taken back.
  using TargetKey = std::tuple<std::string, Numbers, Numbers, Numbers, std::int64_t>;
  using ObjectKey = std::pair<std::string, Numbers>;
  // A target that nobody has open and that was never written is forgotten by its deleter; one that
  // was written stays, since SyncAll has to reach it and a later open has to find its bytes.
  struct TargetEntry {
    std::weak_ptr<TargetWriter> open;
    std::shared_ptr<TargetWriter> kept;  // From its first byte on.
  };
  // Targets refer to it weakly, because whoever has one open may outlive the writer.
  struct Registry {
    std::mutex mutex;  // Taken after those of targets.
    std::map<TargetKey, TargetEntry> targets;
    std::map<ObjectKey, std::shared_ptr<BlobWriter>> objects;
    std::mutex renames;  // One after the other. Taken before all others.
    std::uint32_t next_owner = 0;
  };

  const std::shared_ptr<Registry> registry_;
  const std::shared_ptr<StagedParts> shared_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_WRITER_H_
