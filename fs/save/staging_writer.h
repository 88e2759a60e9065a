// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGING_WRITER_H_
#define TENSORMOUNT_FS_SAVE_STAGING_WRITER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/journal.h"
#include "fs/save/schema.h"
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
class StagingWriter {
 public:
  static constexpr std::uint64_t kOwnFileBytes = std::uint64_t{4} << 20;
  // Makes the journal and files when the first byte is written. `fs` must outlive this.
  static std::shared_ptr<StagingWriter> Make(FileSystem& fs, const Staging& staging,
                                             const std::string& incarnation);
  virtual ~StagingWriter() = default;

  // A box of a tensor, from when it is first opened. Shared by all who have it open.
  class Target {
   public:
    virtual ~Target() = default;
    virtual std::uint64_t size() const = 0;  // Packed bytes of the box.
    // ENODATA where any of the bytes was not written through this target.
    virtual Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) = 0;
    // EFBIG past size(); needs a WriterLease held by the caller. kStale once CloseForGood ran.
    virtual Status Write(std::uint64_t offset, const void* data, std::size_t size) = 0;
    // Forgets what was written of [begin, end). Durable with the next sync of anything. Where that
    // is all of it a target that was condemned may be written again.
    virtual Status Forget(std::uint64_t begin, std::uint64_t end) = 0;
    // Until what was written before this call is durable and recorded. Where that fails the target
    // is condemned, in the journal too: later writes and syncs fail. Other targets go on.
    virtual Status Sync() = 0;
    virtual std::uint64_t written_bytes() const = 0;  // Distinct ones.
    virtual void Condemn(const std::string& reason) = 0;
    // [begin, end) pairs that are written, merged, in order: SEEK_DATA, SEEK_HOLE, `du`.
    virtual std::vector<std::pair<std::uint64_t, std::uint64_t>> Written() const = 0;
  };
  virtual Result<std::shared_ptr<Target>> OpenTarget(const TensorMeta& meta, const Box& box) = 0;

  // A file of any size: an object part. Same rules; holes read as they do anywhere: an object
  // counts as a whole, holes are zeros.
  class Blob {
   public:
    virtual ~Blob() = default;
    virtual std::uint64_t size() const = 0;
    virtual Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) = 0;
    virtual Status Write(std::uint64_t offset, const void* data, std::size_t size) = 0;
    // Where there are bytes already: what lies past the end is dropped.
    virtual Status Overwrite(std::uint64_t offset, const void* data, std::size_t size) = 0;
    virtual Result<std::uint64_t> Append(const void* data, std::size_t size) = 0;
    virtual Status Truncate(std::uint64_t size) = 0;
    virtual Status Sync() = 0;
  };
  virtual Result<std::shared_ptr<Blob>> OpenObject(const std::string& key, const Dims& index,
                                                   bool create) = 0;
  // kNotFound. Who has it open goes on with a file without a name. Durable.
  virtual Status RemoveObject(const std::string& key, const Dims& index) = 0;
  // kNotFound. What was written and synced goes with it, and those who have it open; what had the
  // new name goes on without one. Durable, and nothing is copied: one of both names at any time.
  virtual Status RenameObject(const std::string& key, const Dims& index, const std::string& to_key,
                              const Dims& to_index) = 0;
  struct ObjectName {
    std::string key;
    Dims index;
    std::uint64_t size = 0;
  };
  virtual std::vector<ObjectName> Objects() const = 0;

  // Everything so far durable and recorded, each data file synced once. The first failure; it does
  // not keep others from being synced. Data files are sealed by the publish, not here.
  virtual Status SyncAll() = 0;
  // No more writes: the staging was published or removed. Later calls are kStale, reads too;
  // descriptors are closed.
  virtual void CloseForGood() = 0;
  // "<incarnation>.tmj" and its synced bytes, for done marks; empty while nothing was written.
  virtual std::string journal_name() const = 0;
  virtual std::uint64_t journal_bytes() const = 0;
  struct Totals {
    std::uint64_t bytes_written = 0;
    std::uint64_t syncs = 0;
    std::uint64_t files = 0;
  };
  virtual Totals totals() const = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_WRITER_H_
