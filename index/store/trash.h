// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_TRASH_H_
#define TENSORMOUNT_INDEX_STORE_TRASH_H_

#include <cstdint>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"

// Decides which entries of .trash must stay. Gc deletes the others, and fsck predicts that
// (docs/steps.md, "Removal and holds").

namespace tensormount::trash {

// A reason to keep an entry of .trash.
struct Hold {
  std::string why;      // Empty: nothing needs the entry.
  std::string back_to;  // Its name in the store; empty: unknown.
};

// The reason why STORE/.trash/ENTRY must stay. One reason is that a pin or a running save needs the
// checkpoint, which exists nowhere else. The other is that the entry contains another checkpoint
// than its name says, because a removal was interrupted. The checkpoint's uuid is read from the
// entry's files (ReadFolderUuid); if they have none, it is taken from the entry's name. Fails if
// the reasons cannot be determined.
Result<Hold> FindHold(FileSystem& fs, const std::string& store, const std::string& entry,
                      std::int64_t now);

// Moves an entry back to its name in the store. Returns false, and leaves the entry in place, if
// the name is unknown or taken, or if another entry of .trash has the same checkpoint. Takes the
// removal lock; also returns false if the lock is not free, because a running removal may be about
// to move the entry back.
Result<bool> MoveBack(FileSystem& fs, const std::string& store, const std::string& entry,
                      const Hold& kept);

}  // namespace tensormount::trash

#endif  // TENSORMOUNT_INDEX_STORE_TRASH_H_
