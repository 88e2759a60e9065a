// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_COPY_SOURCE_H_
#define TENSORMOUNT_INDEX_STORE_COPY_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/hash.h"
#include "index/read/pinned_commit.h"
#include "index/read/scan.h"
#include "index/records/commit_record.h"
#include "index/records/inventory.h"
#include "index/store/range_check.h"

// What a copy reads: checkpoints, their files, and the proof of the bytes of each file.

namespace tensormount::copies {

// A checkpoint to copy, as it was when the copy began.
struct CopyRequest {
  FileSystem* fs = nullptr;  // The file system of the source.
  std::string directory;
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  std::uint64_t bytes = 0;
  std::uint64_t files = 0;
  Status problem;  // Why the checkpoint cannot be read.
  // Whether the checkpoint was selected by copying a whole store, and not by name.
  bool from_whole_store = false;
};

// A source that is open and locked, with the records that tell the hashes of its bytes.
struct OpenedSource {
  FileSystem* fs = nullptr;
  PinnedCommit pinned;
  std::string commit;  // Content of the file COMMIT.
  CommitRecord record;
  Inventory inventory;
  // Stored ranges of each file, by file name; sorted by offset.
  std::map<std::string, std::vector<ScanRange>, std::less<>> ranges;

  // Whether the source was deleted meanwhile. Error codes of opens and reads do not show this.
  bool Deleted() const;
};

// Opens a source and reads its records. kStale: it was replaced or deleted meanwhile. kDataLoss,
// kUnsupported: it cannot be copied.
Result<OpenedSource> OpenSource(const CopyRequest& wanted);
// A file of the source. kDataLoss: it has another size than COMMIT says.
Result<std::unique_ptr<File>> OpenFile(const OpenedSource& source, const CommitRecord::Entry& entry,
                                       FileInfo* info);

// Compares the bytes of a file, which are added in order, with the recorded hashes. In a data file
// each stored range is compared with its chunk hash. (RebuildInventory has compared these hashes
// with the file root in COMMIT.) Any other file is compared as a whole with the hash in COMMIT. For
// one thread.
class FileProof {
 public:
  FileProof(const OpenedSource& source, const CommitRecord::Entry& entry);
  FileProof(const FileProof&) = delete;
  FileProof& operator=(const FileProof&) = delete;

  Status Add(const std::byte* data, std::size_t size);
  Status Finish() const;

 private:
  Status Differs(const std::string& what) const;

  const OpenedSource& source_;
  const CommitRecord::Entry& entry_;
  const std::vector<ScanRange>* ranges_ = nullptr;
  std::vector<CheckedRange> hashed_;  // Hashes of ranges_.
  std::optional<RangeCheck> check_;
  std::optional<Xxh3Stream> whole_;
};

// Key of a file by name, length and hash: two checkpoints that list a file with the same key may
// share it.
Hash128 AlikeKey(const CommitRecord::Entry& entry);
struct KeyHasher {
  std::size_t operator()(const Hash128& key) const { return static_cast<std::size_t>(key.low); }
};
using Keys = std::unordered_set<Hash128, KeyHasher>;

// Finds the checkpoints that the caller named, and sorts them in the order of copying. Adds the
// keys of all their data files to `keys`. `from`: the file system of each source.
Result<std::vector<CopyRequest>> FindSources(const std::vector<std::string>& sources,
                                             const std::vector<FileSystem*>& from, FileSystem& to,
                                             const std::string& destination, Keys& keys);

}  // namespace tensormount::copies

#endif  // TENSORMOUNT_INDEX_STORE_COPY_SOURCE_H_
