// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_TRASH_H_
#define TENSORMOUNT_INDEX_STORE_TRASH_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/store/store.h"

// Decides which entries of .trash must stay. Gc deletes the others, and fsck predicts that
// (docs/steps.md, "Removal and holds").

namespace tensormount::trash {

// A reason to keep an entry of .trash.
struct Hold {
  std::string why;  // Empty: nothing needs the entry.
  // The name in the store to move the checkpoint back to; empty: unknown, or not a checkpoint.
  std::string back_to;
};

// Returns the reason why STORE/.trash/ENTRY must stay. There are two: a pin or a running save needs
// the checkpoint, which exists nowhere else; or an interrupted removal moved another checkpoint
// here than the entry's name says. The checkpoint's uuid is read from the entry's files
// (ReadFolderUuid), or taken from the entry's name if no file has it. Fails if this cannot be
// determined.
Result<Hold> FindHold(FileSystem& fs, const std::string& store, const std::string& entry,
                      std::int64_t now);

// Moves an entry back to its name in the store. Returns false, and leaves the entry in place, if
// the name is unknown or taken, or if another entry of .trash has the same checkpoint. Takes the
// removal lock; also returns false if the lock is not free (a running removal may be about to move
// the entry back), or if no lock can be made (no locks, full disk).
Result<bool> MoveBack(FileSystem& fs, const std::string& store, const std::string& entry,
                      const Hold& kept);

// Deletes what earlier saves and prunes had to leave in .trash, for example because it was being
// read, as Store::FreeTrash does: checkpoints that rules removed, and others after gc's grace
// period. After `limit` no deletion is begun, except the first. For saves and prunes with rules,
// whose stores would otherwise grow until a gc.
Store::GcReport FreeLeftovers(const Store& store, std::int64_t now, std::chrono::seconds limit);

}  // namespace tensormount::trash

#endif  // TENSORMOUNT_INDEX_STORE_TRASH_H_
