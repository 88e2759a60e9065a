// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_TRASH_H_
#define TENSORMOUNT_INDEX_STORE_TRASH_H_

#include <cstdint>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"

// What of .trash must stay, and why: asked by gc, which deletes there, and by fsck, which says what
// gc will do (docs/semantics.md, "Who removes, and who holds").

namespace tensormount::trash {

struct Kept {
  std::string why;      // Empty: nothing holds it.
  std::string back_to;  // A name in the store where it belongs; empty: nobody knows.
};

// What holds the folder STORE/.trash/ENTRY at this moment: a pin or a save under way of a
// checkpoint that stands nowhere else; or that it is another checkpoint than its name says, which
// whoever moved it there did not live to see. By what lies in it, not by its name. Fails where that
// cannot be told.
Result<Kept> WhyKept(FileSystem& fs, const std::string& store, const std::string& entry,
                     std::int64_t now);

// Moves it to its name, if that is free and no other folder in .trash holds the same checkpoint.
// Alone with the lock of those who remove: one of them may just be about to do it. True: it stands
// there, durably. False: it was left where it is.
Result<bool> MoveBack(FileSystem& fs, const std::string& store, const std::string& entry,
                      const Kept& kept);

}  // namespace tensormount::trash

#endif  // TENSORMOUNT_INDEX_STORE_TRASH_H_
