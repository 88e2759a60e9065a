// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_KEPT_STATISTICS_H_
#define TENSORMOUNT_INDEX_STORE_KEPT_STATISTICS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/hash.h"
#include "index/read/checkpoint.h"
#include "index/read/statistics.h"
#include "index/records/inventory.h"

namespace tensormount {

// Statistics of a checkpoint's tensors that are kept beside it, in STORE/.derived/UUID/statistics
// (docs/format.md, "Kept statistics"), so that `stats --full` reads the data once. The file may be
// lost or damaged: the statistics are then computed again.
class KeptStatistics {
 public:
  KeptStatistics() = default;
  KeptStatistics(const Uuid& uuid, const Hash128& content_root)
      : uuid_(uuid), content_root_(content_root) {}

  // Whether statistics of a checkpoint can be kept: ok, or why not. It must be a checkpoint of a
  // store in the host's file system that can be written, and no name map may be applied.
  static Status CanKeep(const OpenedCheckpoint& checkpoint);

  // Reads the file. kNotFound: there is none. kDataLoss: it is damaged, or of another checkpoint.
  static Result<KeptStatistics> Read(const OpenedCheckpoint& checkpoint);
  // Replaces the file. Not durable. Requires CanKeep.
  Status Write(const OpenedCheckpoint& checkpoint) const;

  // Null if none are known. Tensors without a digest (`adopt --quick`) have none, because their
  // data may change unnoticed.
  const TensorStatistics* Find(const TensorEntry& tensor) const;
  void Put(const TensorEntry& tensor, const TensorStatistics& statistics);

  // The file's bytes. Decode accepts only what Encode wrote; `what` is the path, for messages.
  std::string Encode() const;
  static Result<KeptStatistics> Decode(std::string_view bytes, const std::string& what);

  const Uuid& uuid() const { return uuid_; }
  const Hash128& content_root() const { return content_root_; }

 private:
  struct Entry {
    Crc64 digest = 0;
    TensorStatistics statistics;
  };
  Uuid uuid_;
  Hash128 content_root_;
  std::map<std::uint32_t, Entry> entries_;  // By the ordinal of the tensor.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_KEPT_STATISTICS_H_
