// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_BUCKET_EXPORT_H_
#define TENSORMOUNT_FS_EXPORT_BUCKET_EXPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/object_writer.h"
#include "fs/export/export_plan.h"
#include "fs/views/checkpoint_view.h"

namespace tensormount::fs {

// One rank's part of an export into a bucket (docs/remote.md, "Writing"). Each file of the plan is
// an object below the destination, which one rank sends from its begin to its end. For one thread.
//
// Objects cannot be renamed, so a directory does not appear in one step. Readers find it by files
// in it that name the others (an index, metadata); rank 0 sends these last, by PutLast, when all
// ranks have sent the others.
class BucketExport {
 public:
  // All must outlive this object.
  BucketExport(ObjectWriter& writer, const CheckpointView& view, const ExportPlan& plan,
               const std::string& destination, int rank, int ranks, const ExportOptions& options)
      : writer_(writer),
        view_(view),
        plan_(plan),
        destination_(destination),
        rank_(rank),
        ranks_(ranks),
        options_(options) {}

  // By rank 0, before any object is sent. kAlreadyExists: the destination has objects. (An object
  // of one file is replaced, if the options say so.) kUnsupported: files of the format are not
  // written from begin to end.
  Status Prepare() const;
  // Sends this rank's files.
  Status Put();
  // By rank 0: sends the files by which readers find the others.
  Status PutLast();
  // Deletes what this rank has sent, and ends its unfinished uploads.
  Status Discard();
  std::uint64_t bytes_written() const { return bytes_written_; }

 private:
  bool IsLast(const ExportFile& file) const;
  std::string PathOf(const ExportFile& file) const;
  Status Send(const ExportFile& file);

  ObjectWriter& writer_;
  const CheckpointView& view_;
  const ExportPlan& plan_;
  const std::string& destination_;
  const int rank_;
  const int ranks_;
  const ExportOptions& options_;
  std::vector<std::string> begun_;  // Objects that this rank has sent or begun to send.
  std::vector<std::byte> buffer_;
  std::uint64_t bytes_written_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_BUCKET_EXPORT_H_
