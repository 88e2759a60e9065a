// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FILE_PROVER_H_
#define TENSORMOUNT_FS_MOUNT_FILE_PROVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tensormount/status.h"

#include "fs/node.h"
#include "fs/views/virtual_file.h"

namespace tensormount::fs {

// Compares files with their hashes, one after the other in the order in which they were added, on
// one thread with idle I/O priority, so that concurrent readers are not slowed down. The first Add
// starts the thread, which inherits the signal mask of the calling thread. Thread-safe.
class FileProver {
 public:
  // Limit of waiting files. Further files are dropped; their next open adds them again.
  static constexpr std::size_t kMostWaiting = 1024;

  // `wanted`: whether the file is still needed (its checkpoint exists); empty: always. `report`:
  // called for each file that is damaged or cannot be read. Both are called on the thread, without
  // a lock.
  using Wanted = std::function<bool(NodeId)>;
  using Report = std::function<void(const VirtualFile&, const Status&)>;
  FileProver(Wanted wanted, Report report);
  // Waits for the thread to end; check idle() first if storage may block it.
  ~FileProver();
  // Ends the thread at the next step of 1 MiB.
  void Stop();
  bool idle() const;  // Whether the thread has ended or never began.

  // Queues a file, unless it is queued already. `proof`: which of its bytes were compared already.
  void Add(NodeId node, std::shared_ptr<const VirtualFile> file, const VirtualFile::Proof& proof);
  // Whether the file was found damaged in the state `stamp`. A file that was replaced or repaired
  // since has another stamp.
  bool IsKnownDamaged(NodeId node, const FileStamp& stamp) const;
  // Progress of a queued file in percent; nullopt if the file is not queued.
  std::optional<int> Percent(NodeId node) const;

  struct Load {
    std::string file;  // Label of the file in progress; empty: none.
    int percent = 0;
    std::size_t waiting = 0;
    std::uint64_t proven = 0;   // Number of files.
    std::uint64_t damaged = 0;  // Number of files.
  };
  Load load() const;

 private:
  // Shared with the thread, which storage may block longer than this object lives.
  struct Core;
  std::shared_ptr<Core> core_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FILE_PROVER_H_
