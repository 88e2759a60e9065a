// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_PROVEN_RANGES_H_
#define TENSORMOUNT_INDEX_READ_PROVEN_RANGES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "base/byte_range.h"
#include "base/file_system.h"

namespace tensormount {

class OpenDataFile;

// The state that a file is in. As long as it stays the same nobody has written to the file; the
// reverse does not hold (a hard link changes it).
// Device and inode tell whether the name leads to the same file; the rest, whether that was written
// to. The change time is what a program cannot set.
struct FileStamp {
  std::uint64_t device = 0, inode = 0, size = 0;
  std::int64_t modified_seconds = 0, modified_nanoseconds = 0;
  std::int64_t changed_seconds = 0, changed_nanoseconds = 0;
  std::uint64_t links = 0;  // Names that a file of ours has; 0: nobody's business.
  // `info` must be of the open file and not of its name, which may lead elsewhere by now.
  static FileStamp Of(const FileInfo& info);
  // Of a sealed file of a store, which later saves link and removals unlink.
  static FileStamp OfOurs(const FileInfo& info);
  // Whether nobody wrote to a file that was in state `before` and is in this one. That its change
  // time is another one is no write where its number of names is another one too: a save linked it,
  // or a checkpoint that shared it was deleted. Not transitive: whoever goes on comparing must do
  // so with the last state that he saw.
  bool SameBytes(const FileStamp& before) const;
  // How long it may take until it is Settled().
  static constexpr std::chrono::milliseconds kSettles{3000};
  // Whether a write from now on would show. File systems keep times in steps: of what was changed a
  // moment ago, another change may leave all as it is.
  bool Settled() const;
  friend bool operator==(const FileStamp&, const FileStamp&) = default;
};

// Which bytes of one checkpoint's data files were compared with their hashes, and in what state
// each file was then: known only while it stays in that. Kept by whoever wants it to outlive the
// opened checkpoint. Thread-safe.
// By number of file, as the index has it: so one object serves one checkpoint (uuid), but any
// number of opens of it.
class ProvenRanges {
 public:
  // Runs of bytes that are kept for all files together, 48 bytes each. What does not fit is proven
  // again by the next read; neighbours are one run, so that files that were read whole always fit.
  static constexpr std::size_t kMaxRanges = std::size_t{1} << 17;

  // Whether all of these bytes of data file number `file` were found good, which is in state `now`.
  // O(log runs).
  bool Hold(std::uint32_t file, const FileStamp& now, ByteRange bytes) const;
  // They were, and the file was in state `then`, settled, from before they were read to after.
  void Add(std::uint32_t file, const FileStamp& then, ByteRange bytes);
  // How many bytes of it were found good.
  std::uint64_t Bytes(std::uint32_t file, const FileStamp& now) const;

 private:
  // A state, and the runs of bytes that were good in it.
  struct File {
    FileStamp stamp;
    FileStamp before;  // The state that a link turned into `stamp`: of who looked a moment earlier.
    std::map<std::uint64_t, std::uint64_t> ranges;  // Begin to end; apart from each other.
    std::uint64_t bytes = 0;
  };
  // Whether what is known of a file holds in state `now`. One that was linked or unlinked since is
  // followed, so that a change after that is seen: under the lock alone.
  static bool Follow(File& known, const FileStamp& now);
  static bool Holds(const File& known, ByteRange bytes);

  // Reads of mounts only ask, most of the time, so they share it.
  mutable std::shared_mutex mutex_;
  mutable std::unordered_map<std::uint32_t, File> files_;
  std::size_t ranges_ = 0;
};

// What one read that proves bytes once (ReadVerify::kOnce) knows of the file that it is at. For one
// call; not thread-safe.
// Enter, then any number of Hold and Found, for each file in turn; End last. What was Found counts
// only once End, or the next Enter, has seen that the file did not change meanwhile.
class ProvingRead {
 public:
  explicit ProvingRead(ProvenRanges& proven) : proven_(proven) {}
  ProvingRead(const ProvingRead&) = delete;
  ProvingRead& operator=(const ProvingRead&) = delete;

  // The read goes on in this file.
  void Enter(std::uint32_t number, std::shared_ptr<OpenDataFile> file);
  // Whether bytes of it need not be compared.
  bool Hold(ByteRange bytes) const;
  // Bytes of it were compared and are good.
  // They must be whole leaves, or pages where these have hashes: less cannot be compared.
  void Found(ByteRange bytes);
  // The read is over. False where a file changed while bytes of it were taken for good: these must
  // be read and compared again.
  bool End();

 private:
  void Leave();

  ProvenRanges& proven_;
  std::uint32_t number_ = 0;
  std::shared_ptr<OpenDataFile> file_;  // Null: none, or its state is not known.
  FileStamp stamp_;
  bool settled_ = false;  // When it was taken.
  std::vector<ByteRange> found_;
  bool changed_ = false;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_PROVEN_RANGES_H_
