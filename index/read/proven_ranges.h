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

// Identity and state of a file. If the state was settled (IsSettled), an equal later stamp means
// that nobody wrote to the file in between. Different stamps do not prove a write, because a hard
// link changes the stamp too. Device and inode identify the file. A program cannot set the change
// time.
struct FileStamp {
  std::uint64_t device = 0, inode = 0, size = 0;
  std::int64_t modified_seconds = 0, modified_nanoseconds = 0;
  std::int64_t changed_seconds = 0, changed_nanoseconds = 0;
  // Link count of files of a store. 0 for foreign files, where the link count is ignored.
  std::uint64_t links = 0;
  // Stamp of a foreign file. `info` must come from the open file, because the file's name may lead
  // to another file by now.
  static FileStamp OfForeignFile(const FileInfo& info);
  // Stamp of a sealed file of a store. Saves make hard links to such files, and removals of
  // checkpoints remove links.
  static FileStamp OfStoreFile(const FileInfo& info);
  // Whether a file in state `before` reached this state without a write. A new change time with a
  // new link count is not a write: a save linked the file, or a checkpoint that shared it was
  // deleted. Not transitive: pass the latest known state.
  bool IsUnwrittenSince(const FileStamp& before) const;
  // A file that is not written for this time is settled (IsSettled).
  static constexpr std::chrono::milliseconds kSettleTime{3000};
  // Whether a write from now on would change the stamp. Timestamps are coarse, so a second write
  // shortly after the first may leave the stamp unchanged.
  bool IsSettled() const;
  friend bool operator==(const FileStamp&, const FileStamp&) = default;
};

// The byte ranges of one checkpoint's data files that were compared with their hashes. A file's
// ranges are valid while its state does not change. Files are identified by their number in the
// index, so an object serves one checkpoint (uuid), but any number of opens of it. Thread-safe.
class ProvenRanges {
 public:
  // Largest number of ranges of all files together, 48 bytes each. Bytes above the limit are
  // compared again by the next read. Neighbouring ranges are merged, so files that were read as a
  // whole always fit.
  static constexpr std::size_t kMaxRanges = std::size_t{1} << 17;

  // Whether all of these bytes of file number `file` are proven. `now` is the file's present state.
  // O(log n) in the number of ranges.
  bool AreProven(std::uint32_t file, const FileStamp& now, ByteRange bytes) const;
  // Records proven bytes. The file must have been in the settled state `then` from before the read
  // until after it.
  void Add(std::uint32_t file, const FileStamp& then, ByteRange bytes);
  // Number of proven bytes of the file, which is now in state `now`.
  std::uint64_t Bytes(std::uint32_t file, const FileStamp& now) const;

 private:
  struct File {
    FileStamp stamp;
    // State before the last change that only links made, for threads that took a stamp before it.
    FileStamp before;
    std::map<std::uint64_t, std::uint64_t> ranges;  // Begin to end; disjoint.
    std::uint64_t bytes = 0;
  };
  // Whether the ranges of `known` are valid in state `now`. If only links changed, stores `now` as
  // the file's state, so that a later write is detected. Needs the exclusive lock.
  static bool Follow(File& known, const FileStamp& now);
  static bool Holds(const File& known, ByteRange bytes);

  // Reads of mounts usually only call AreProven, so they share the lock.
  mutable std::shared_mutex mutex_;
  mutable std::unordered_map<std::uint32_t, File> files_;
  std::size_t ranges_ = 0;
};

// Keeps track of the proven bytes in one read with ReadVerify::kOnce. For each file call BeginFile,
// then AreProven and AddProven any number of times; call End last. End or the next BeginFile
// records the ranges of AddProven, if the file was settled and did not change meanwhile. For one
// read; not thread-safe.
class ProvingRead {
 public:
  explicit ProvingRead(ProvenRanges& proven) : proven_(proven) {}
  ProvingRead(const ProvingRead&) = delete;
  ProvingRead& operator=(const ProvingRead&) = delete;

  // Begins the part of the read that reads this file.
  void BeginFile(std::uint32_t number, std::shared_ptr<OpenDataFile> file);
  // Whether these bytes of the current file are proven, so that they need no comparison.
  bool AreProven(ByteRange bytes) const;
  // Adds proven bytes of the current file: whole leaves, or pages if the leaves have page hashes.
  void AddProven(ByteRange bytes);
  // Ends the read. Returns false if a file changed while its bytes were used without comparison.
  // The bytes must then be read again and compared.
  bool End();

 private:
  void EndFile();

  ProvenRanges& proven_;
  std::uint32_t number_ = 0;
  // The current file. Null if there is none, or if its state is unknown.
  std::shared_ptr<OpenDataFile> file_;
  FileStamp stamp_;
  bool settled_ = false;  // Whether stamp_ was settled at BeginFile.
  std::vector<ByteRange> found_;
  bool changed_ = false;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_PROVEN_RANGES_H_
