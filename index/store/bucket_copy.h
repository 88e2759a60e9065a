// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_BUCKET_COPY_H_
#define TENSORMOUNT_INDEX_STORE_BUCKET_COPY_H_

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/store_copy.h"

#include "base/object_writer.h"
#include "index/store/bucket_claim.h"
#include "index/store/copy_target.h"

namespace tensormount::bucket {

// Copies checkpoints into a store in a bucket (docs/format.md, "Stores in buckets"). Several files
// go up at a time.
class BucketTarget : public copies::CopyTarget {
 public:
  BucketTarget(ObjectWriter& writer, const Store& store, const CopyOptions& options)
      : CopyTarget(store, options),
        writer_(writer),
        unconditional_(options.unconditional),
        cancel_(options.cancel) {}

  Status Copy(const copies::CopyRequest& wanted, CopiedCheckpoint& out) override;

 private:
  struct Work;
  Status CopySteps(Work& work);
  Status FindEarlier(Work& work);
  Status CompareCommit(Work& work);
  Status Place(Work& work, std::size_t number);
  Status Send(Work& work, std::size_t number, const std::string& to);
  Result<bool> CopyInBucket(Work& work, std::size_t number, const std::string& to);
  Status CheckAll(Work& work);
  Status Publish(Work& work);
  Status CheckPublished(Work& work, const std::string& path, const std::string& etag);
  void EndUploads(Work& work);
  Status RenewIfDue(Work& work, std::chrono::seconds after);

  ObjectWriter& writer_;
  const bool unconditional_;
  const std::atomic<bool>* const cancel_;
};

}  // namespace tensormount::bucket

#endif  // TENSORMOUNT_INDEX_STORE_BUCKET_COPY_H_
