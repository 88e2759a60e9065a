// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_AFTER_COMMIT_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_AFTER_COMMIT_H_

#include "tensormount/save.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/store/store.h"

// Rank 0's work on marks and other checkpoints of the store during a save. A failure of this work
// does not fail the save, and goes into its report.

namespace tensormount {

// Call before the publish: marks the checkpoint if the save is ephemeral, so that no retention rule
// ever keeps it.
void MarkIfEphemeral(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                     SaveReport& report);
// Call before the data are written: with retention rules, frees what earlier saves had to leave in
// .trash, so that a disk for two checkpoints is enough although a reader kept one for a while.
void FreeBefore(FileSystem& fs, const Store& store, const SaveOptions& options);
// Call after the commit: removes checkpoints by the retention rules, and earlier ephemeral ones.
// `replaced`: Store::Published::replaced. With retention rules its space is freed, too.
void RemoveByRules(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                   const std::string& replaced, SaveReport& report);

// If `failure` says that the disk is full, adds to the message how much of .trash gc may free.
Status WithTrashHint(FileSystem& fs, const std::string& store, const Status& failure);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_AFTER_COMMIT_H_
