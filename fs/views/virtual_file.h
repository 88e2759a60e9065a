// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
#define TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "fs/formats/file_segments.h"
#include "fs/node.h"
#include "index/read/checkpoint.h"
#include "index/read/proven_ranges.h"

namespace tensormount::fs {

class CheckpointView;

// An open file of a mount: the view's segments, read with the mount's verification. Keeps its
// checkpoint open, so it can be read to the end even if the checkpoint is removed or renamed.
// Immutable, thread-safe.
// Used by the mount, for each open file and by many threads, and by exports; independent of FUSE.
class VirtualFile {
 public:
  // Makes a file with this text, for files in .tensormount/, which belong to no checkpoint.
  // immutable() is false, because the text may be different at the next open.
  static std::shared_ptr<const VirtualFile> OfText(std::string label, std::string text);

  std::uint64_t size() const { return segments_.size(); }
  // Name of the file in errors.
  const std::string& label() const { return label_; }
  // Whether reads access data files, and so may block as long as storage does.
  bool reads_data() const { return segments_.reads_data(); }
  // Whether the bytes behind this open never change (a changed foreign file fails reads) and may be
  // cached.
  bool immutable() const { return view_ != nullptr; }

  // Reads up to `size` bytes from `offset`, fewer only at the end of the file. kDataLoss: the bytes
  // are damaged (EIO for programs); kStale: a foreign file has changed. `stats` may be null.
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size,
                           ReadStats* stats) const;
  // Bytes [offset, offset + size) as mapped memory, in at most OpenedCheckpoint::kMaxMapped ranges,
  // in order, for a system call. Empty if the bytes must be read instead (files of text, objects,
  // foreign files, many short runs, zeros, pages not in memory, unverified bytes). Never only a
  // part of the bytes, because a reply is either spliced or copied. The ranges keep their memory
  // mapped.
  std::vector<OpenedCheckpoint::MappedRange> Map(std::uint64_t offset, std::size_t size) const;

  // Path of the stored file that has exactly the bytes of this file, as passthrough requires.
  // kNotFound: there is no such file. May read the stored file's header.
  Result<std::string> BackingPath() const;
  // The backing file, opened, and its attributes at that time. Keep it open as long as the kernel
  // reads from it.
  struct Backing {
    std::uint32_t number = 0;  // Number of the file among the checkpoint's data files.
    std::unique_ptr<File> file;
    FileInfo info;
  };
  Result<Backing> OpenBacking() const;
  // Converts `info`, which Stat of the backing file returned, to a stamp of that file.
  FileStamp StampOf(const Backing& backing, const FileInfo& info) const;

  // The verification state of the backing file's current bytes. Unless --verify is off or there
  // are no hashes, the kernel may read a file itself only after all of its bytes were verified
  // once, because later reads are not checked.
  struct Proof {
    bool hashed = false;                 // The index has hashes of the file's bytes.
    bool whole = false;                  // All bytes were verified since the file last changed.
    std::uint64_t unverified_bytes = 0;  // Approximate number of unverified bytes.
    FileStamp stamp;
  };
  Result<Proof> ProofOf(const Backing& backing) const;
  // Verifies every unverified byte: stored bytes are compared with their hashes, bytes that the
  // view makes (headers) are made again and compared with the file. Between steps it calls
  // `proceed`, if there is one, with the number of bytes done. kCancelled: `proceed` returned
  // false. kDataLoss: stored bytes are damaged. kUnavailable: the file changes meanwhile, has other
  // made bytes, or its stored bytes have no hashes.
  // Takes minutes for large files, so run it on a separate thread. Verified bytes are remembered,
  // so a repeated call continues after a cancelled one.
  using Proceed = std::function<bool(std::uint64_t done)>;
  Status Prove(const Backing& backing, const Proceed& proceed) const;

 private:
  friend class CheckpointView;
  VirtualFile() = default;
  // Calls fn for the segments that contain bytes [offset, offset + size), until it fails. fn gets a
  // segment, the offset `at` in the segment, the offset `done` in the range, and the number `n` of
  // bytes.
  using Visit = std::function<Status(const FileSegments::Segment& segment, std::uint64_t at,
                                     std::size_t done, std::size_t n)>;
  Status ForEachSegment(std::uint64_t offset, std::size_t size, const Visit& fn) const;
  Status ReadSegment(const FileSegments::Segment& segment, std::uint64_t at, char* out,
                     std::size_t size, ReadStats* stats) const;
  // Reads bytes [at, at + size) of a segment of the backing file into `out` and verifies them.
  // Tensors and objects are read with kOnce, which compares their leaves with hashes and remembers
  // the range. Other bytes are compared with those that the view makes.
  Status ProveSegment(const Backing& backing, const FileStamp& stamp,
                      const FileSegments::Segment& segment, std::uint64_t at, char* out,
                      std::size_t size) const;
  // Whether the file's bytes have hashes. Looks at the first chunk or object only, because an
  // adoption hashes all data or, with --quick, none.
  Result<bool> HasHashes() const;
  bool MapSegment(const FileSegments::Segment& segment, std::uint64_t at, std::size_t size,
                  std::vector<OpenedCheckpoint::MappedRange>& out) const;
  Result<std::uint32_t> BackingFile() const;
  // The record of the tensor of a kTensor segment.
  Result<TensorEntry> TensorOf(const FileSegments::Segment& segment) const;

  std::shared_ptr<const CheckpointView> view_;  // Null for a file made by OfText.
  Node node_;
  std::string label_;
  FileSegments segments_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
