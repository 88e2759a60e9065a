// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_C_STORE_H_
#define TENSORMOUNT_C_STORE_H_

// The part of the C interface that is about stores, and about checkpoints as a whole. Comes with
// tensormount/c.h, which says what holds for all of it.

#include "tensormount/c.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- Stores, and checkpoints as a whole -----------------------------------------------------

// What an operator does with the command (docs/cli.md), for programs: what is found comes as JSON,
// with the fields that the command prints with --json, which are only ever added. Freed with
// tm_free. These calls read and write as long as it takes; none waits for another process, but
// tm_export for the other ranks.

// The checkpoints of a store by name: an array of {"checkpoint", "uuid", "generation", "latest"},
// and "problem" where one cannot be read; of the others "created" (seconds since 1970),
// "file_bytes" (lengths of its data files), "stored_bytes" (of all its files), "own_bytes" (what
// removing it frees), "shared_bytes" (of files that other checkpoints of the store have, too) and
// "pinned" (null where the pins cannot be read). TM_NOT_FOUND: no store.
TM_EXPORT tm_status tm_store_list(const char* store, char** json);
// The latest: {"checkpoint", "uuid", "generation", "path", "warnings"}; damaged ones are passed
// over, with a warning each. TM_NOT_FOUND in an empty store. Where one could not be read, its
// error: it may be the latest.
TM_EXPORT tm_status tm_store_latest(const char* store, char** json);
// Removes "STORE/NAME", durably; readers that have it open read on. tm_store_gc frees its space.
// TM_PERMISSION_DENIED where it is pinned.
TM_EXPORT tm_status tm_store_remove(const char* path);
typedef struct tm_remove_options {
  uint32_t struct_size;
  int32_t force;  // 1: also what is pinned.
} tm_remove_options;
// `options` may be NULL.
TM_EXPORT tm_status tm_store_remove_with(const char* path, const tm_remove_options* options);

// Which checkpoints stay: tensormount/retention.h, docs/semantics.md. Rules are texts:
// "last=3,every=1000,best=eval.loss:min:2", or "policy" for the store's own.
typedef struct tm_pin_options {
  uint32_t struct_size;
  int32_t reserved;
  const char* reason;  // For people; may be NULL.
  int64_t expires;     // Seconds since 1970; 0: never.
} tm_pin_options;
// Keeps "STORE/NAME" from rules and from removal without force: {"uuid", "name", "reason", "by",
// "created", "expires", "expired"}. `options` and `json` may be NULL.
TM_EXPORT tm_status tm_store_pin(const char* path, const tm_pin_options* options, char** json);
TM_EXPORT tm_status tm_store_unpin(const char* path);  // TM_NOT_FOUND: it is not pinned.
// An array of these; "problem" where a pin cannot be read, which holds all the same.
TM_EXPORT tm_status tm_store_pins(const char* store, char** json);

typedef struct tm_prune_options {
  uint32_t struct_size;
  int32_t dry_run;    // 1: says what would be done.
  const char* rules;  // NULL: "policy".
} tm_prune_options;
// Removes what no rule keeps: {"rules", "dry_run", "removed": how many, "checkpoints":
// [{"checkpoint", "uuid", "generation", "kept", "removed", "reason", "failed"}]}, the newest first.
// `options` and `json` may be NULL. Where it fails it has removed nothing: the newest does not pass
// a quick verification, the policy is damaged or of a newer program, somebody else prunes
// (TM_BUSY).
TM_EXPORT tm_status tm_store_prune(const char* store, const tm_prune_options* options, char** json);
// The store's own rules: {"rules": a text, or null}. Set to NULL there are none any more.
TM_EXPORT tm_status tm_store_policy(const char* store, char** json);
TM_EXPORT tm_status tm_store_set_policy(const char* store, const char* rules);
typedef struct tm_publish_options {
  uint32_t struct_size;
  int32_t reserved;
  const char* name;  // Of the checkpoint; NULL: that of the staging.
  int64_t wait_ms;   // For mounts that are not done, and files that are open. 0: one try.
} tm_publish_options;
// Publishes what mounts wrote below "STORE/.staging/NAME": {"checkpoint", "uuid", "generation",
// "tensors", "chunks", "bytes", "mounts"}. `options` and `json` may be NULL. Where it fails the
// staging is as it was, and its report.json says why.
//   TM_UNAVAILABLE, TM_BUSY  a mount is not done, or has files open
//   TM_DATA_LOSS             bytes are missing, or differ between mounts
//   TM_INVALID_ARGUMENT      no such path, no name for a checkpoint, no schema
TM_EXPORT tm_status tm_store_publish(const char* staging, const tm_publish_options* options,
                                     char** json);
typedef struct tm_gc_options {
  uint32_t struct_size;
  int32_t dry_run;              // 1: says what would be done.
  int64_t grace_seconds;        // What was removed earlier goes; 0: 60; less than 0: all.
  int64_t staging_age_seconds;  // Stagings untouched for so long were abandoned; 0: a day.
} tm_gc_options;
// Deletes what was removed and is read by nobody, and what crashed saves left: {"removed", "kept",
// "failed", "bytes_freed", "dry_run"}. `options` may be NULL.
TM_EXPORT tm_status tm_store_gc(const char* store, const tm_gc_options* options, char** json);

typedef struct tm_copy_options {
  uint32_t struct_size;
  int32_t reserved;
  uint64_t limit_rate;  // Most bytes a second that are read; 0: as fast as it goes.
  tm_task* task;        // May be NULL.
} tm_copy_options;
// Copies checkpoints ("STORE/NAME", "STORE/latest", or "STORE" for all of its) to another store, as
// the same checkpoints; see CopyCheckpoints in tensormount/store_copy.h. Of several sources the
// status is about the call, *all (1: all of them are there now, or 0) and the report about each:
// {"destination", "checkpoints": [{"event": "copied", "there" or "failed", "checkpoint", "uuid",
// "generation", "bytes", "bytes_copied", "bytes_linked", ..., and where it failed "code" and
// "message"}]}. A single one that fails fails the call. `options`, `all` and `json` may be NULL.
//   TM_NOT_FOUND, TM_STALE  no such source, or it was deleted meanwhile
//   TM_INVALID_ARGUMENT     the destination is the source, or no place for a store
//   TM_ALREADY_EXISTS       the name is another's there, or the checkpoint has another one
//   TM_DATA_LOSS            the source is damaged
//   TM_UNSUPPORTED          its data lie outside of the store (adopted)
//   TM_BUSY                 another copy of it is under way
//   TM_RESOURCE_EXHAUSTED, TM_CANCELLED  the next copy goes on where this one was
TM_EXPORT tm_status tm_store_copy(const char* const* sources, size_t source_count,
                                  const char* destination, const tm_copy_options* options,
                                  int32_t* all, char** json);

typedef struct tm_verify_options {
  uint32_t struct_size;
  int32_t quick;    // 1: commit record, lengths and index only; no data are read.
  int32_t threads;  // 0: as many as cores.
  int32_t reserved;
  const char* const* roots;  // Folders where data of adopted checkpoints may lie.
  size_t root_count;
  tm_task* task;  // May be NULL.
} tm_verify_options;
// Every byte of a checkpoint against its hashes. The status is about the call, *whole (1 or 0) and
// the report about the checkpoint: {"whole", "tensors", "bytes", ..., "damage": [{"object", "file",
// "offset", "reason", "lost"}], "warnings": []}. Where a damaged file is shared with other
// checkpoints of the store its damage has "shared_with", their names. `options` and `json` may be
// NULL.
// TM_INVALID_ARGUMENT for a store: verify its checkpoints.
TM_EXPORT tm_status tm_verify(const char* path, const tm_verify_options* options, int32_t* whole,
                              char** json);

typedef struct tm_repair_options {
  uint32_t struct_size;
  int32_t dry_run;           // 1: reads and compares everything, and changes nothing.
  const char* const* roots;  // As those of tm_verify_options, of `from`.
  size_t root_count;
  tm_task* task;  // May be NULL.
} tm_repair_options;
// Makes damaged, short and missing files of checkpoint "STORE/NAME" whole again with the bytes of
// `from`, another checkpoint of the same tensors (tensormount/store_repair.h): *whole (1 or 0), and
// {"path", "uuid", "from", "dry_run", "whole", "files": [{"file", "damage", "bytes_damaged",
// "bytes_repaired", "whole", "shared_with"}], "left": [{"object", "file", "offset", "reason"}],
// ...}. `options` and `json` may be NULL.
//   TM_NOT_FOUND         no such checkpoint, or `from`
//   TM_INVALID_ARGUMENT  `from` is the checkpoint itself
//   TM_DATA_LOSS         COMMIT is lost, and `from` is no copy of this checkpoint
//   TM_UNSUPPORTED       an adopted checkpoint
//   TM_BUSY              another repair is under way in this store
TM_EXPORT tm_status tm_repair(const char* path, const char* from, const tm_repair_options* options,
                              int32_t* whole, char** json);

typedef struct tm_diff_options {
  uint32_t struct_size;
  int32_t values;       // 1: says how far numbers are apart, which reads what differs.
  const char* keys;     // A glob; NULL: all.
  const char* key_map;  // Rules as JSON (tensormount/key_map.h) that rename the first; NULL: none.
  uint64_t limit;       // Mismatches that are listed; 0: 10,000.
  tm_task* task;        // May be NULL.
  const char* const* roots;  // As those of tm_verify_options, of both checkpoints.
  size_t root_count;
} tm_diff_options;
// What two checkpoints differ in: *same (1 or 0), and {"same", "added", "removed", "changed",
// "equal", ..., "mismatches": [{"event", "what", "key", ...}], "more": how many are not listed}.
// `options` and `json` may be NULL. TM_NOT_FOUND: no key matches `keys`. TM_DATA_LOSS: what one of
// them lacks was not compared.
TM_EXPORT tm_status tm_diff(const char* first, const char* second, const tm_diff_options* options,
                            int32_t* same, char** json);

typedef struct tm_adopt_options {
  uint32_t struct_size;
  int32_t replace;      // 1: an existing checkpoint is replaced.
  int32_t quick;        // 1: no data are read, and later reads not verified.
  int32_t threads;      // 0: as many as cores.
  const char* key_map;  // Rules as JSON; NULL: none.
  tm_task* task;        // May be NULL.
  int32_t partial;      // 1: without what the source's files lack, which is TM_DATA_LOSS otherwise.
  int32_t reserved;
  const char* const* roots;  // As those of tm_open_options.
  size_t root_count;
} tm_adopt_options;
// Records what another program saved as checkpoint "STORE/NAME", in place: {"path", "uuid",
// "generation", "tensors", "chunks", "bytes"}. `options` and `json` may be NULL.
TM_EXPORT tm_status tm_adopt(const char* source, const char* path, const tm_adopt_options* options,
                             char** json);

typedef struct tm_derive_options {
  uint32_t struct_size;
  int32_t replace;          // 1: an existing checkpoint is replaced.
  const char* const* keep;  // Globs over the old keys: only what matches one of them, where given.
  size_t keep_count;
  const char* const* drop;  // Globs: not what matches one of them.
  size_t drop_count;
  const char* key_map;  // Rules as JSON, of what is left; NULL: none.
} tm_derive_options;
// A checkpoint "STORE/NEW" out of the one called `from` in the same store, by hard links
// (tensormount/derive.h): {"path", "uuid", "generation", "tensors", "objects", "dropped",
// "files_linked", "bytes_linked", "files_copied", "bytes_copied", "refused"}. `options` and `json`
// may be NULL. TM_NOT_FOUND: no such checkpoint, or a glob that matches nothing.
TM_EXPORT tm_status tm_derive(const char* path, const char* from, const tm_derive_options* options,
                              char** json);

// The same on every rank, but for the task.
typedef struct tm_export_options {
  uint32_t struct_size;
  int32_t replace;  // 1: an earlier export of the same format is replaced.
  int32_t partial;  // As in tm_adopt_options.
  int32_t reserved;
  const char* format;        // "safetensors" (also NULL), "hf", "npy", "zarr", "dcp" or "torch".
  const char* key_map;       // Rules as JSON; NULL: none.
  uint64_t hf_part_bytes;    // Of "hf": at most in a part; 0: 5 GB.
  const char* hf_rules;      // Of "hf": rules as JSON that make its names; NULL: none.
  int64_t liveness_ms;       // 0: 30,000.
  int64_t arrival_ms;        // 0: 1,800,000.
  int64_t total_ms;          // The whole call; 0: no limit.
  tm_task* task;             // May be NULL.
  const char* const* roots;  // As those of tm_open_options.
  size_t root_count;
} tm_export_options;
// Collective: real files out of what tm_checkpoint_open opens, each byte read and checked once,
// each rank its share. `destination` appears whole and durable in one step, or not at all: {"path",
// "format", "ranks", "files", "tensors", "bytes", "bytes_written", "files_cloned", "files_linked",
// "plan_seconds", "write_seconds", "sync_seconds", "notes", "warnings"}. `options` and `json` may
// be NULL.
//   TM_UNSUPPORTED         the format cannot hold some tensor, which is named
//   TM_ALREADY_EXISTS      `destination` is there
//   TM_INVALID_ARGUMENT    what is there is no export of this format; options do not fit
//   TM_RESOURCE_EXHAUSTED  no room
TM_EXPORT tm_status tm_export(const char* source, const char* destination,
                              tm_communicator* communicator, const tm_export_options* options,
                              char** json);

// New names of keys by rules as JSON (tensormount/key_map.h). `keys`: `count` texts, each with a
// NUL behind it, `keys_size` bytes in all. One name each, "" for those that are dropped.
// TM_INVALID_ARGUMENT names the rule that is none, or two keys that get one name.
TM_EXPORT tm_status tm_key_map_apply(const char* rules, const char* keys, size_t keys_size,
                                     size_t count, tm_list** out);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TENSORMOUNT_C_STORE_H_
