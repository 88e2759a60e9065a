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

// What a store says of its checkpoints beside them: pins, marks of ephemeral ones, its policy, and
// of which checkpoints saves under way take files (docs/format.md, "Keeping and removing").
// `store` is its path. Thread-safe, and so are several processes.

namespace tensormount::pins {

// ---- Pins ----

// By uuid; where several files pin one, the one that holds longest. One that cannot be read is in
// it with its problem. A store without pins has none. `now`: seconds since 1970.
using PinMap = std::map<Uuid, PinnedCheckpoint>;
Result<PinMap> ReadAll(FileSystem& fs, const std::string& store, std::int64_t now);
// Of one checkpoint. nullopt: it is not pinned, or no more.
Result<std::optional<PinnedCheckpoint>> Find(FileSystem& fs, const std::string& store,
                                             const Uuid& uuid, std::int64_t now);
// "pinned (for the paper), until 2027-01-31 12:00 UTC".
std::string Describe(const PinnedCheckpoint& pin);

// Durably. kNotFound: no such checkpoint, or it was removed while it was being pinned.
Result<PinnedCheckpoint> Pin(FileSystem& fs, const Store& store, const std::string& name,
                             const PinOptions& options);
Status Unpin(FileSystem& fs, const Store& store, const std::string& name);
// Takes all pins of one checkpoint away, durably. Whether there were any.
Result<bool> RemovePins(FileSystem& fs, const std::string& store, const Uuid& uuid);
// What whoever removes answers where something holds the checkpoint at `directory`.
Status Refusal(const std::string& directory, const std::string& held);
// kPermissionDenied where a pin holds the checkpoint that stands at `name`.
Status CheckUnpinned(FileSystem& fs, const std::string& store, const std::string& name);

// ---- Ephemeral checkpoints ----

// Durably, before it is published as `name`: a copy under another one is to keep it.
Status MarkEphemeral(FileSystem& fs, const std::string& store, const Uuid& uuid,
                     const std::string& name);
// Not durably: gc does it, too.
Status ForgetEphemeral(FileSystem& fs, const std::string& store, const Uuid& uuid);
// With their names; empty: that is not known (an older program marked it).
Result<std::map<Uuid, std::string>> ReadEphemeral(FileSystem& fs, const std::string& store);

// ---- Saves under way ----

// Checkpoints of which stagings say that they take files or times from them, each with the staging.
// Fails where one that is there cannot be read: then nobody knows what it needs.
Result<std::map<Uuid, std::string>> ReadBases(FileSystem& fs, const std::string& store);

// ---- Policy ----

// nullopt: there is none. kDataLoss: damaged; kUnsupported: of a newer program.
Result<std::optional<RetentionRules>> ReadPolicy(FileSystem& fs, const std::string& store);
Status WritePolicy(FileSystem& fs, const std::string& store, const RetentionRules& rules);
Status RemovePolicy(FileSystem& fs, const std::string& store);

// ---- One at a time ----

// The lock of those who remove what somebody may pin, held as long as the file is open. Null: this
// filesystem has no locks, or no room for one. kBusy after `wait_seconds`.
Result<std::unique_ptr<File>> Lock(FileSystem& fs, const std::string& store, double wait_seconds);

// Removes pins and ephemeral marks of what is gone; appends to `report`, as gc does. Not durably:
// what comes back goes the next time.
void Sweep(FileSystem& fs, const Store& store, const Store::GcOptions& options,
           Store::GcReport& report);

}  // namespace tensormount::pins

#endif  // TENSORMOUNT_INDEX_STORE_PINS_H_
