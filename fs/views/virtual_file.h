// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
#define TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "fs/node.h"
#include "fs/formats/file_segments.h"
#include "index/read/checkpoint.h"
#include "index/read/proven_ranges.h"

namespace tensormount::fs {

class CheckpointView;

// An open file of a mount: the segments that a view gave, read as the mount verifies. Keeps its
// checkpoint open, so that it can be read to the end whatever happens to the checkpoint's name.
// Immutable, thread-safe.
// What the mount and exports read; it knows no FUSE. Every descriptor of the mount has one, and
// many threads may read it at once.
class VirtualFile {
 public:
  // Of text that no checkpoint stands behind (.tensormount/).
  // It may say something else at the next open, so it is not immutable().
  static std::shared_ptr<const VirtualFile> OfText(std::string label, std::string text);

  std::uint64_t size() const { return segments_.size(); }
  // Names the file in errors.
  const std::string& label() const { return label_; }
  // Whether reads go to data files, and so may block for as long as these do.
  bool reads_data() const { return segments_.reads_data(); }
  // Whether the bytes behind this open never change and may be cached.
  bool immutable() const { return view_ != nullptr; }

  // Up to `size` bytes from `offset`; fewer only at the end of the file.
  // Errors: kDataLoss where the bytes are damaged (EIO for programs), kStale where the file of
  // another program is not what it was. `stats` may be null.
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size,
                           ReadStats* stats) const;
  // The same bytes where they are stored, in order, for a system call to take (at most
  // OpenedCheckpoint::kMaxMapped ranges); empty where they must be read (generated text, objects,
  // short runs, zeros, what is not in memory now, mounts that verify).
  // All or nothing: a reply is either spliced or copied. Each range holds what it points into, so
  // it stays mapped until the reply was sent.
  std::vector<OpenedCheckpoint::MappedRange> Map(std::uint64_t offset, std::size_t size) const;

  // Path of the one file of storage that is byte for byte this file from offset 0, and nothing
  // more: what kernel passthrough wants. kNotFound where there is none. May read its header.
  Result<std::string> BackingPath() const;
  // That file, opened as OpenedCheckpoint::OpenFile does.
  // The file and its state at that time, for the kernel and for proofs. Keep it open as long as the
  // kernel reads through it.
  struct Backing {
    std::uint32_t number = 0;  // Of the checkpoint's data files.
    std::unique_ptr<File> file;
    FileInfo info;
  };
  Result<Backing> OpenBacking() const;
  // The state that it is in by `info`, which is of that file.
  FileStamp StampOf(const Backing& backing, const FileInfo& info) const;

  // What is known of the backing file's bytes, as it is now.
  // Before the kernel may read a file by itself, all of its bytes must have been found good once:
  // afterwards nobody is asked any more.
  struct Proof {
    bool hashed = false;     // There are hashes to compare them with.
    bool whole = false;      // Every byte was found good since the file last changed.
    std::uint64_t left = 0;  // How many bytes were not, about.
    FileStamp stamp;
  };
  Result<Proof> ProofOf(const Backing& backing) const;
  // Compares every byte that is not known to be good with its hash, in steps, between which
  // `proceed` is asked (empty: yes) and told how many bytes are done; where it says no: kCancelled.
  // kDataLoss names what is damaged. kUnavailable: the file changes meanwhile, or has no hashes.
  // Runs for minutes on large files, on a thread of its own. What it finds good is remembered as it
  // goes, so one that was cancelled or repeated begins where it stopped.
  using Proceed = std::function<bool(std::uint64_t done)>;
  Status Prove(const Backing& backing, const Proceed& proceed) const;

 private:
  friend class CheckpointView;
  VirtualFile() = default;
  // The segments that bytes [offset, offset + size) are in: until fn(segment, at, done, n) does not
  // return ok. `at` is in the segment, `done` in the range.
  using Visit = std::function<Status(const FileSegments::Segment& segment, std::uint64_t at,
                                     std::size_t done, std::size_t n)>;
  Status ForEachSegment(std::uint64_t offset, std::size_t size, const Visit& fn) const;
  Status ReadSegment(const FileSegments::Segment& segment, std::uint64_t at, char* out,
                     std::size_t size, ReadStats* stats) const;
  // Bytes [at, at + size) of a segment of the backing file, into `out`, compared once.
  // Literal bytes are compared with those that the view would serve; tensors and objects are read
  // with kOnce, which compares their leaves and remembers them.
  Status ProveSegment(const Backing& backing, const FileStamp& stamp,
                      const FileSegments::Segment& segment, std::uint64_t at, char* out,
                      std::size_t size) const;
  // Told by the first stored chunk: an adoption hashes all data or, with --quick, none. What has no
  // hashes can never be proven.
  Result<bool> HasHashes() const;
  bool MapSegment(const FileSegments::Segment& segment, std::uint64_t at, std::size_t size,
                  std::vector<OpenedCheckpoint::MappedRange>& out) const;
  Result<std::uint32_t> BackingFile() const;
  // The tensor of a kTensor segment.
  Result<TensorEntry> TensorOf(const FileSegments::Segment& segment) const;

  std::shared_ptr<const CheckpointView> view_;  // Null: literal only.
  Node node_;
  std::string label_;
  FileSegments segments_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
