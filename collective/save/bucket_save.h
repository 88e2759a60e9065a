// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_BUCKET_SAVE_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_BUCKET_SAVE_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tensormount/save.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "collective/comm/collective.h"
#include "index/store/store.h"

namespace tensormount {

// A save into a bucket (docs/remote.md, "Saves"). The ranks save to a store on a file system, the
// staging store, as always; then rank 0 copies the checkpoint into the bucket. In the staging store
// each such checkpoint is ephemeral, so that the next save removes it, and pinned until the bucket
// has it, so that nothing removes it before.
class BucketSave {
 public:
  // Whether saves to "STORE/NAME" go through a staging store.
  static bool IsFor(std::string_view path);
  // kInvalidArgument: neither `options` nor the environment names a staging directory, or the path
  // is not STORE/NAME. kUnsupported: an option that buckets do not have.
  static Result<BucketSave> Make(const std::string& path, const SaveOptions& options);

  // STORE/NAME in the bucket.
  const std::string& path() const { return path_; }
  // STORE/NAME in the staging store.
  const std::string& staged() const { return staged_; }
  // Those of the save to the staging store.
  SaveOptions StagingOptions() const;

  // On rank 0, before anything is written: checks the name, and claims the generations of the
  // bucket's checkpoints in the staging store, so that the new checkpoint is the latest one. If the
  // bucket cannot be reached, the save goes on when the staging store has a checkpoint.
  Status Prepare(const Store& staging) const;
  // On rank 0, before the checkpoint is published in the staging store.
  Status Protect(FileSystem& fs, const Staging& staging) const;
  // Collective, after the publish: rank 0 copies, the others wait. Cancelled by the vote of any
  // rank. Adds to the report. A failure says where the checkpoint is.
  Status Copy(Collective& collective, FileSystem& fs, const Staging& staging,
              const std::function<bool()>& cancelled, SaveReport& report) const;

 private:
  struct Outcome;
  struct KeptCopy;
  struct KeptCopies;
  class Copying;
  BucketSave(FileSystem& to, SaveOptions options) : to_(&to), options_(std::move(options)) {}
  static std::unique_ptr<KeptCopy> TakeCopy(FileSystem& to, const std::string& store);
  static void GiveBack(const std::string& store, std::unique_ptr<KeptCopy> copy);
  void RunCopy(KeptCopy& copy, FileSystem& fs, const Staging& staging, Outcome& outcome,
               SaveReport& report) const;
  std::string PinReason() const;
  Status ClaimGenerations(const Store& bucket, const Store& staging) const;
  void ReleaseArrived(const Store& bucket, const Store& staging) const;
  bool HasArrived(const Uuid& uuid) const;
  // A failure after the publish in the staging store, with what to do.
  Status Explained(const Status& failure) const;

  FileSystem* to_;
  SaveOptions options_;
  std::string path_;
  std::string store_;  // Of path_.
  std::string name_;
  std::string staged_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_BUCKET_SAVE_H_
