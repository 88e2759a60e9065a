// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_PINS_H_
#define TENSORMOUNT_INDEX_STORE_PINS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/retention.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/inventory.h"
#include "index/store/store.h"

// Data that a store keeps beside its checkpoints: pins, ephemeral marks, the retention policy, and
// the bases of running saves (docs/format.md, "Keeping and removing"). `store` is the store's path.
// Safe for concurrent threads and processes.

namespace tensormount::pins {

// ---- Pins ----

// The pins of a store by uuid. If a checkpoint has several pins, the map has the one that expires
// last. A pin that cannot be read is included, with its problem.
using PinMap = std::map<Uuid, PinnedCheckpoint>;
// Reads all pins; empty for a store without pins. `now` is in seconds since 1970.
Result<PinMap> ReadAll(FileSystem& fs, const std::string& store, std::int64_t now);
// The pin of one checkpoint. nullopt if the checkpoint is not pinned, or its pins have expired.
Result<std::optional<PinnedCheckpoint>> Find(FileSystem& fs, const std::string& store,
                                             const Uuid& uuid, std::int64_t now);
// A pin as text: "pinned (for the paper), until 2027-01-31 12:00 UTC".
std::string Describe(const PinnedCheckpoint& pin);

// Pins a checkpoint durably. kNotFound: there is no such checkpoint, or it was removed meanwhile.
Result<PinnedCheckpoint> Pin(FileSystem& fs, const Store& store, const std::string& name,
                             const PinOptions& options);
// Pins a checkpoint durably before it is published as `name`.
Status PinBeforePublish(FileSystem& fs, const std::string& store, const Uuid& uuid,
                        const std::string& name, const std::string& reason);
// Removes the pins of a checkpoint durably. kNotFound: no such checkpoint, or it is not pinned.
Status Unpin(FileSystem& fs, const Store& store, const std::string& name);
// Removes all pins of one checkpoint durably. False: there were no pins.
Result<bool> RemovePins(FileSystem& fs, const std::string& store, const Uuid& uuid);
// The error of a removal that was refused: the checkpoint at `directory` must stay for the reason
// `held`.
Status Refusal(const std::string& directory, const std::string& held);
// kPermissionDenied if a pin protects the checkpoint at STORE/`name`.
Status CheckUnpinned(FileSystem& fs, const std::string& store, const std::string& name);

// ---- Ephemeral checkpoints, which go once a later one is committed ----

// Marks a checkpoint as ephemeral, durably, before it is published as `name`. A copy of it under
// another name is not ephemeral.
Status MarkEphemeral(FileSystem& fs, const std::string& store, const Uuid& uuid,
                     const std::string& name);
// Removes the mark. The removal is not synced; gc also removes marks of deleted checkpoints.
Status ForgetEphemeral(FileSystem& fs, const std::string& store, const Uuid& uuid);
// Marked checkpoints with their names. The name is empty if it cannot be read, or if an older
// version made the mark without a name.
Result<std::map<Uuid, std::string>> ReadEphemeral(FileSystem& fs, const std::string& store);

// ---- Running saves ----

// The checkpoints whose files or mtimes a staging uses, each with the path of one such staging.
// Fails if a file BASE or staging.json cannot be read, because a checkpoint that must stay is then
// unknown.
Result<std::map<Uuid, std::string>> ReadBases(FileSystem& fs, const std::string& store);

// ---- Policy ----

// The policy of a store; nullopt: there is none. kDataLoss: the policy is damaged. kUnsupported: a
// newer version wrote the policy. `unread`, if not null, is set to RetainedText::unread.
Result<std::optional<RetentionRules>> ReadPolicy(FileSystem& fs, const std::string& store,
                                                 bool* unread = nullptr);
Status WritePolicy(FileSystem& fs, const std::string& store, const RetentionRules& rules);
Status RemovePolicy(FileSystem& fs, const std::string& store);

// ---- The removal lock ----

// Takes the lock of removals and policy changes, so that they run one at a time. The lock is
// released when the file is closed. Returns null if the filesystem has no locks, or no space for
// the lock file. kBusy if the lock is not free within `wait_seconds`.
Result<std::unique_ptr<File>> Lock(FileSystem& fs, const std::string& store, double wait_seconds);

// Removes pins and ephemeral marks of deleted checkpoints, and hidden files that writers left
// beside them, and adds them to the report of gc. The removals are not synced: a file that
// reappears after a crash is removed by the next gc.
void Sweep(FileSystem& fs, const Store& store, const Store::GcOptions& options,
           Store::GcReport& report);

}  // namespace tensormount::pins

#endif  // TENSORMOUNT_INDEX_STORE_PINS_H_
