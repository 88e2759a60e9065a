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

// Compares files with their hashes, one after the other, on one thread that gives way to everything
// else on the machine. The thread begins with the first file, with the signal mask of who adds it.
// Thread-safe.
// Files wait in the order in which they were opened. One at a time and at idle I/O priority:
// whoever reads a file meanwhile is served by the daemon and shall not notice.
class FileProver {
 public:
  // Files that wait. More are not taken: they come again with their next open.
  static constexpr std::size_t kMostWaiting = 1024;

  // `wanted`: whether the file is still of use (its checkpoint was not removed); empty: yes.
  // `report`: told once what is wrong with a file. Both are called on the thread, under no lock.
  using Wanted = std::function<bool(NodeId)>;
  using Report = std::function<void(const VirtualFile&, const Status&)>;
  FileProver(Wanted wanted, Report report);
  // Waits for the thread: ask idle() first where storage may hold it.
  ~FileProver();
  // Tells the thread to end between two steps of 1 MiB.
  void Stop();
  bool idle() const;  // It has ended, or never began.

  // Takes a file, unless it waits already. `proof`: of now.
  void Add(NodeId node, std::shared_ptr<const VirtualFile> file, const VirtualFile::Proof& proof);
  // Whether it was found damaged in this state.
  // `stamp` is the state of the file on disk: one that was replaced or repaired since is not known
  // to be damaged.
  bool FoundDamaged(NodeId node, const FileStamp& stamp) const;
  // How much of a file that waits or is at its turn was proven; nothing for others.
  std::optional<int> Percent(NodeId node) const;

  struct Load {
    std::string file;  // At its turn; empty: none.
    int percent = 0;
    std::size_t waiting = 0;
    std::uint64_t proven = 0;   // Files.
    std::uint64_t damaged = 0;  // Files.
  };
  Load load() const;

 private:
  // Held by the thread too: storage may keep that longer than this lives.
  struct Core;
  std::shared_ptr<Core> core_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FILE_PROVER_H_
