// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_C_STORE_H_
#define TENSORMOUNT_C_STORE_H_

// The part of the C interface for stores and whole checkpoints. Included by tensormount/c.h, whose
// general rules apply here, too.

#include "tensormount/c.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- Stores, and checkpoints as a whole -----------------------------------------------------

// The operations of the command `tensormount` (docs/cli.md) as functions. Results are JSON with the
// fields that the command prints with --json; later versions may add fields. JSON is freed with
// tm_free. The calls block on storage; tm_export waits for its ranks, tm_store_publish for mounts,
// and calls that remove checkpoints or change the policy up to 10 s for a prune by another process.

// The checkpoints of a store by name: an array of {"checkpoint", "uuid", "generation", "latest"}. A
// checkpoint that cannot be read also has "problem"; the others also have "created" (seconds since
// 1970), "file_bytes" (lengths of its data files), "stored_bytes" (lengths of all its files),
// "own_bytes" (freed by removing it), "shared_bytes" (of files shared with other checkpoints of the
// store) and "pinned" (null if the pins cannot be read). TM_NOT_FOUND: no store.
TM_EXPORT tm_status tm_store_list(const char* store, char** json);
// The latest checkpoint: {"checkpoint", "uuid", "generation", "path", "warnings"}. Damaged
// checkpoints are skipped, with a warning each. TM_NOT_FOUND in an empty store. If a checkpoint
// cannot be read, its error is returned, because it may be the latest.
TM_EXPORT tm_status tm_store_latest(const char* store, char** json);
// The checkpoints that are published in a store, each exactly once, by uuid: a replaced name is
// another checkpoint, a renamed or copied one is not. A thread of the watch looks at the store each
// second, and at once where the kernel reports changes; it goes on between the calls. Use a watch
// from one thread at a time.
typedef struct tm_watch tm_watch;
typedef struct tm_watch_options {
  uint32_t struct_size;
  // 1: also the checkpoints that exist already and have a generation above `above`.
  int32_t existing;
  uint64_t above;
  // Name of a checkpoint: also the existing ones that are newer. NULL: as `existing` says.
  const char* since;
} tm_watch_options;
// Begins to watch before it returns. The store may not exist yet. `options` may be NULL. Freed with
// tm_watch_free. TM_NOT_FOUND: no checkpoint `since`. TM_INVALID_ARGUMENT: `store` is a checkpoint,
// or not a directory.
TM_EXPORT tm_status tm_store_watch(const char* store, const tm_watch_options* options,
                                   tm_watch** out);
// Waits for the next checkpoint: {"event": "committed", "checkpoint", "uuid", "generation",
// "parent", "created", "derived", "removed", "path"}, in the order of generations if several were
// published meanwhile. "removed" is true if the checkpoint is gone already; "path" is then null,
// and if its files were deleted all fields but "uuid" are. *json is NULL if none came within
// `wait_ms` (at most a day). TM_STALE: the store was removed. Other errors: it could not be read
// for a minute.
TM_EXPORT tm_status tm_watch_next(tm_watch* watch, int64_t wait_ms, char** json);
// May take two seconds if storage does not answer.
TM_EXPORT void tm_watch_free(tm_watch* watch);
// Removes "STORE/NAME", durably; readers that have it open can read on. tm_store_gc frees its
// space. TM_PERMISSION_DENIED if it is pinned.
TM_EXPORT tm_status tm_store_remove(const char* path);
typedef struct tm_remove_options {
  uint32_t struct_size;
  int32_t force;  // 1: removes pinned checkpoints, too.
} tm_remove_options;
// Like tm_store_remove, with options. `options` may be NULL.
TM_EXPORT tm_status tm_store_remove_with(const char* path, const tm_remove_options* options);

// Retention: see tensormount/retention.h and docs/steps.md. Rules are strings:
// "last=3,every=1000,best=eval.loss:min:2", or "policy" for the rules stored in the store.
typedef struct tm_pin_options {
  uint32_t struct_size;
  int32_t reserved;
  const char* reason;  // For people; may be NULL.
  int64_t expires;     // Seconds since 1970; 0: never.
} tm_pin_options;
// Pins "STORE/NAME": retention rules keep it, and only `force` removes it. Returns {"uuid", "name",
// "reason", "by", "created", "expires", "expired"}. `options` and `json` may be NULL.
TM_EXPORT tm_status tm_store_pin(const char* path, const tm_pin_options* options, char** json);
// Removes the pin of "STORE/NAME". TM_NOT_FOUND: no such checkpoint, or it is not pinned.
TM_EXPORT tm_status tm_store_unpin(const char* path);
// All pins of a store: an array of objects as in tm_store_pin. A pin that cannot be read has
// "problem" and still protects its checkpoint.
TM_EXPORT tm_status tm_store_pins(const char* store, char** json);

typedef struct tm_prune_options {
  uint32_t struct_size;
  int32_t dry_run;    // 1: only reports.
  const char* rules;  // NULL: "policy".
} tm_prune_options;
// Removes the checkpoints that the rules do not keep: {"rules", "dry_run", "removed": a count,
// "checkpoints": [{"checkpoint", "uuid", "generation", "kept", "removed", "reason", "failed"}],
// ...}, the checkpoints in the order of PruneReport::decisions. `options` and `json` may be NULL.
// On failure nothing was removed: for example the newest checkpoint does not pass a quick
// verification, the policy is damaged or written by a newer version, or another process prunes
// (TM_BUSY).
TM_EXPORT tm_status tm_store_prune(const char* store, const tm_prune_options* options, char** json);
// The rules stored in the store: {"rules": a string, or null}. tm_store_set_policy with NULL
// removes the rules.
TM_EXPORT tm_status tm_store_policy(const char* store, char** json);
TM_EXPORT tm_status tm_store_set_policy(const char* store, const char* rules);
typedef struct tm_publish_options {
  uint32_t struct_size;
  int32_t reserved;
  const char* name;  // Name of the checkpoint; NULL: the name of the staging directory.
  int64_t wait_ms;   // How long to wait for unfinished mounts and open files; 0: one try.
} tm_publish_options;
// Publishes the files that mounts wrote below "STORE/.staging/NAME": {"checkpoint", "uuid",
// "generation", "tensors", "chunks", "bytes", "mounts", ...}. `options` and `json` may be NULL. On
// failure the files that mounts wrote stay; report.json beside them gives the reason, except with
// TM_UNKNOWN and if another process publishes.
//   TM_UNAVAILABLE, TM_BUSY  a mount is not finished, or has files open
//   TM_DATA_LOSS             bytes are missing, or differ between mounts
//   TM_INVALID_ARGUMENT      invalid path or checkpoint name, or no schema
//   TM_ALREADY_EXISTS        the name is taken
//   TM_UNKNOWN               published, but a power cut may undo that
TM_EXPORT tm_status tm_store_publish(const char* staging, const tm_publish_options* options,
                                     char** json);
typedef struct tm_gc_options {
  uint32_t struct_size;
  int32_t dry_run;              // 1: only reports.
  int64_t grace_seconds;        // Minimum age since removal; 0: 60; negative: none.
  int64_t staging_age_seconds;  // Staging untouched this long is abandoned; 0: one day.
} tm_gc_options;
// Deletes removed checkpoints that no reader has open, and files left by crashed saves: {"removed",
// "kept", "failed", "bytes_freed", "dry_run"}. `options` may be NULL.
TM_EXPORT tm_status tm_store_gc(const char* store, const tm_gc_options* options, char** json);

typedef struct tm_copy_options {
  uint32_t struct_size;
  // 1: copy into a bucket whose server ignores conditional puts, without protection from others.
  int32_t unconditional;
  uint64_t limit_rate;  // Bytes read per second, at most; 0: no limit.
  tm_task* task;        // May be NULL.
} tm_copy_options;
// Copies checkpoints ("STORE/NAME", "STORE/latest", or "STORE" for all) to another store, as the
// same checkpoints; see CopyCheckpoints in tensormount/store_copy.h. With several checkpoints the
// status is about the call, *all is 1 if every checkpoint is now in the destination, and the report
// lists each: {"destination", "checkpoints": [{"event": "copied", "there" or "failed",
// "checkpoint", "uuid", "generation", "bytes", "bytes_copied", "bytes_linked", ..., and on failure
// "code" and "message"}]}. If there is only one checkpoint to copy, its failure fails the call.
// `options`, `all` and `json` may be NULL.
//   TM_NOT_FOUND, TM_STALE  no such source, or it was deleted meanwhile
//   TM_INVALID_ARGUMENT     the destination is the source, or cannot be a store
//   TM_ALREADY_EXISTS       the destination has another checkpoint of this name, or this
//                           checkpoint under another name
//   TM_DATA_LOSS            the source is damaged
//   TM_UNSUPPORTED          the data lie outside the store (an adopted checkpoint)
//   TM_BUSY                 another copy of the checkpoint is in progress
//   TM_UNKNOWN              cannot tell whether it is published, or a power cut may undo that
//   TM_RESOURCE_EXHAUSTED, TM_CANCELLED  the next copy continues this one
TM_EXPORT tm_status tm_store_copy(const char* const* sources, size_t source_count,
                                  const char* destination, const tm_copy_options* options,
                                  int32_t* all, char** json);

typedef struct tm_verify_options {
  uint32_t struct_size;
  int32_t quick;    // 1: only commit record, manifests, index and lengths; no data are read.
  int32_t threads;  // 0: one per core.
  int32_t reserved;
  const char* const* roots;  // Directories where data of adopted checkpoints may lie.
  size_t root_count;
  tm_task* task;  // May be NULL.
} tm_verify_options;
// Verifies every byte of a checkpoint against its hashes. The status is about the call; *whole (1
// or 0) and the report are about the checkpoint: {"whole", "tensors", "bytes", ..., "damage":
// [{"object", "file", "offset", "reason", "lost"}], "warnings": []}. The damage of a file that
// other checkpoints of the store share has "shared_with", their names. `options` and `json` may be
// NULL. TM_INVALID_ARGUMENT for a store: verify its checkpoints one by one.
TM_EXPORT tm_status tm_verify(const char* path, const tm_verify_options* options, int32_t* whole,
                              char** json);

typedef struct tm_repair_options {
  uint32_t struct_size;
  int32_t dry_run;           // 1: reads and compares everything, changes nothing.
  const char* const* roots;  // Trusted directories for `from`, as in tm_verify_options.
  size_t root_count;
  tm_task* task;  // May be NULL.
} tm_repair_options;
// Repairs damaged, short and missing files of checkpoint "STORE/NAME" with the bytes of `from`,
// another checkpoint of the same tensors (tensormount/store_repair.h): *whole (1 or 0), and
// {"path", "uuid", "from", "dry_run", "whole", "files": [{"file", "damage", "bytes_damaged",
// "bytes_repaired", "whole", "shared_with"}], "left": [{"object", "file", "offset", "reason"}],
// ...}. `options` and `json` may be NULL.
//   TM_NOT_FOUND         no such checkpoint, or `from`
//   TM_INVALID_ARGUMENT  `from` is the checkpoint itself
//   TM_DATA_LOSS         COMMIT is lost, and `from` is not a copy of this checkpoint
//   TM_UNSUPPORTED       an adopted checkpoint
//   TM_BUSY              another repair is in progress in this store
//   TM_RESOURCE_EXHAUSTED  no space for the new file
TM_EXPORT tm_status tm_repair(const char* path, const char* from, const tm_repair_options* options,
                              int32_t* whole, char** json);

typedef struct tm_diff_options {
  uint32_t struct_size;
  int32_t values;    // 1: measures how far values differ, which reads the differing data.
  const char* keys;  // A glob; NULL: all.
  // JSON rules (tensormount/key_map.h) that rename keys of the first checkpoint; NULL: none.
  const char* key_map;
  uint64_t limit;            // Mismatches listed at most; 0: 10,000.
  tm_task* task;             // May be NULL.
  const char* const* roots;  // Trusted directories, as in tm_verify_options.
  size_t root_count;
} tm_diff_options;
// Compares two checkpoints: *same (1 or 0), and {"same", "added", "removed", "changed", "equal",
// ..., "mismatches": [{"event", "what", "key", ...}], "more": the number not listed}. `options` and
// `json` may be NULL. TM_NOT_FOUND: no key matches `keys`. TM_DATA_LOSS: data missing in one of
// them were not compared.
TM_EXPORT tm_status tm_diff(const char* first, const char* second, const tm_diff_options* options,
                            int32_t* same, char** json);

typedef struct tm_adopt_options {
  uint32_t struct_size;
  int32_t replace;      // 1: an existing checkpoint is replaced.
  int32_t quick;        // 1: no data are read, and later reads are not verified.
  int32_t threads;      // 0: one per core.
  const char* key_map;  // Rules as JSON; NULL: none.
  tm_task* task;        // May be NULL.
  // 1: leave out tensors whose data are missing in the source; 0: they are TM_DATA_LOSS.
  int32_t partial;
  int32_t reserved;
  const char* const* roots;  // Trusted directories, as in tm_open_options.
  size_t root_count;
} tm_adopt_options;
// Records a checkpoint of another program as checkpoint "STORE/NAME"; the data stay where they are:
// {"path", "uuid", "generation", "tensors", "chunks", "bytes"}. `options` and `json` may be NULL.
TM_EXPORT tm_status tm_adopt(const char* source, const char* path, const tm_adopt_options* options,
                             char** json);

typedef struct tm_derive_options {
  uint32_t struct_size;
  int32_t replace;          // 1: an existing checkpoint is replaced.
  const char* const* keep;  // Globs over the old keys: keep only matching keys; none: keep all.
  size_t keep_count;
  const char* const* drop;  // Globs over the old keys: drop matching keys.
  size_t drop_count;
  const char* key_map;  // JSON rules that rename the remaining keys; NULL: none.
} tm_derive_options;
// Makes checkpoint "STORE/NEW" from checkpoint `from` of the same store, by hard links
// (tensormount/derive.h): {"path", "uuid", "generation", "tensors", "objects", "dropped",
// "files_linked", "bytes_linked", "files_copied", "bytes_copied", "refused"}. `options` and `json`
// may be NULL. TM_NOT_FOUND: no such checkpoint, or a glob matches nothing.
TM_EXPORT tm_status tm_derive(const char* path, const char* from, const tm_derive_options* options,
                              char** json);

// Options of an export. All except the task must be equal on every rank.
typedef struct tm_export_options {
  uint32_t struct_size;
  int32_t replace;  // 1: an earlier export of the same format is replaced.
  int32_t partial;  // 1: leave out tensors whose data are missing in the source.
  int32_t reserved;
  const char* format;        // "safetensors" (also NULL), "hf", "npy", "zarr", "dcp", "torch"
                             // or "torch_dist".
  const char* key_map;       // Rules as JSON; NULL: none.
  uint64_t hf_part_bytes;    // "hf" only: largest size of a part; 0: 5 GB.
  const char* hf_rules;      // "hf" only: JSON rules that make the names of tensors; NULL: none.
  int64_t liveness_ms;       // 0 means 30,000.
  int64_t arrival_ms;        // 0 means 1,800,000.
  int64_t total_ms;          // Limit for the whole call; 0: none.
  tm_task* task;             // May be NULL.
  const char* const* roots;  // Trusted directories, as in tm_open_options.
  size_t root_count;
} tm_export_options;
// Collective: exports any source that tm_checkpoint_open opens. Files that can be cloned or
// hard-linked from the source are not read; all other bytes are read and verified once. The ranks
// share the work. `destination` appears complete and durable in one step, or not at all: {"path",
// "format", "ranks", "files", "tensors", "bytes", "bytes_written", "files_cloned", "files_linked",
// "plan_seconds", "write_seconds", "sync_seconds", "notes", "warnings"}. `options` and `json` may
// be NULL.
//   TM_UNSUPPORTED         the format cannot hold the tensor named in the message
//   TM_ALREADY_EXISTS      `destination` exists
//   TM_INVALID_ARGUMENT    the existing `destination` is not an export of this format, or the
//                          options are incompatible
//   TM_RESOURCE_EXHAUSTED  no space
TM_EXPORT tm_status tm_export(const char* source, const char* destination,
                              tm_communicator* communicator, const tm_export_options* options,
                              char** json);

// Renames keys by JSON rules (tensormount/key_map.h). `keys`: `count` NUL-terminated strings,
// `keys_size` bytes in all. Returns one name per key, "" for dropped keys. TM_INVALID_ARGUMENT
// names an invalid rule, or two keys that get the same name.
TM_EXPORT tm_status tm_key_map_apply(const char* rules, const char* keys, size_t keys_size,
                                     size_t count, tm_list** out);

// ---- Files of a checkpoint, as in a mount ---------------------------------------------------

// The files that a mount shows of a checkpoint (docs/mounting.md, "The tree"), without a mount:
// "npy/w.npy", "hf/model.safetensors", "dcp/.metadata". Read-only. Paths are relative to the
// checkpoint; "" is its directory. Bytes are verified as in a mount. Several threads may use a
// tm_files or a tm_file at a time; both stay valid after tm_checkpoint_close.
typedef struct tm_files tm_files;
typedef struct tm_file tm_file;
typedef struct tm_files_options {
  uint32_t struct_size;
  int32_t reserved;
  const char* key_map;     // JSON rules that rename keys; NULL: none.
  uint64_t hf_part_bytes;  // Largest size of a part in hf/; 0: 5 GB.
  const char* hf_rules;    // JSON rules that make the names of tensors in hf/; NULL: none.
} tm_files_options;
// `options` may be NULL. Freed with tm_files_close. TM_INVALID_ARGUMENT: the rules are invalid, or
// give two keys the same name.
TM_EXPORT tm_status tm_files_open(const tm_checkpoint* checkpoint, const tm_files_options* options,
                                  tm_files** out);
TM_EXPORT void tm_files_close(tm_files* files);

typedef struct tm_file_info {
  uint32_t struct_size;
  int32_t is_directory;
  uint64_t size;   // Bytes; 0 for a directory.
  int64_t mtime;   // Seconds since 1970: the save that last changed the content.
  uint64_t inode;  // The same for the same path of the same checkpoint.
} tm_file_info;
// TM_NOT_FOUND: nothing has this path.
TM_EXPORT tm_status tm_files_stat(const tm_files* files, const char* path, tm_file_info* info);
// The names in a directory. Slices open by name and are not listed. TM_NOT_FOUND: nothing has this
// path. TM_INVALID_ARGUMENT: the path is a file. Freed with tm_list_free.
TM_EXPORT tm_status tm_files_list(const tm_files* files, const char* path, tm_list** out);

// Opens a file. Freed with tm_file_close. TM_NOT_FOUND: nothing has this path. TM_INVALID_ARGUMENT:
// the path is a directory.
TM_EXPORT tm_status tm_file_open(const tm_files* files, const char* path, tm_file** out);
TM_EXPORT void tm_file_close(tm_file* file);
TM_EXPORT uint64_t tm_file_size(const tm_file* file);
// Reads up to `size` bytes from `offset`; *got is smaller only at the end of the file.
// TM_DATA_LOSS: the bytes are damaged.
TM_EXPORT tm_status tm_file_read(const tm_file* file, uint64_t offset, void* out, size_t size,
                                 size_t* got);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TENSORMOUNT_C_STORE_H_
