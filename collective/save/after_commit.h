// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_AFTER_COMMIT_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_AFTER_COMMIT_H_

#include "tensormount/save.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/store/store.h"

// What rank 0 does with other checkpoints of the store beside a save. None of it fails the save:
// the report says what went wrong.

namespace tensormount {

// Before the publish: marks a checkpoint that is to be ephemeral, so that there is no moment at
// which it counts as one to keep.
void MarkIfEphemeral(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                     SaveReport& report);
// After the commit: removes by the rules that were asked for, and ephemeral checkpoints of before.
void RemoveByRules(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                   SaveReport& report);

// `failure` with what .trash holds as its cause, where it says that the disk is full.
Status WithTrashHint(FileSystem& fs, const std::string& store, const Status& failure);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_AFTER_COMMIT_H_
