// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_
#define TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mount-tools/terminal.h"

// The subcommands: a structure of arguments as they were typed, and a function in the file that is
// called like the command. cli.cc makes the one and calls the other; nothing here knows CLI11, and
// no command knows another. Defaults stand here, and the help shows them.
//
// A function prints its results on standard output and returns the exit status (docs/cli.md): 0; 1
// where what was asked about is not so, as damage or a difference; 2 where the command could not be
// carried out, after one error line on standard error. Results go to the terminal, which knows
// whether they are to be text or JSON. Under mpirun `import`, `export` and `load` run on every
// rank, and rank 0 prints.

namespace tensormount::tools {

// Where a field is a rule, a format or a size in words, it is parsed by the command and not by
// CLI11, so that the message of an error is the library's, and the same for all users of the rule.
struct ImportArgs {
  std::string source;
  std::string destination;     // STORE/NAME
  std::string shard = "rows";  // A rule of state/shard_rule.h.
  int ranks = 0;               // 0: not given.
  std::string placement = "auto";
  std::string if_exists = "fail";
  bool page_hashes = false;       // SaveOptions.
  std::string reuse = "auto";     // auto, off, or the checkpoint that is the base.
  std::uint32_t full_every = 50;  // SaveOptions.
  std::string inherit;            // STORE/NAME or NAME; empty: none.
  std::string retain;             // Rules of tensormount/retention.h; empty: nothing is removed.
  bool ephemeral = false;         // SaveOptions.
  std::string map;                // JSON file; empty: none.
  double liveness_seconds = 30;   // After so long without a sign of life a rank counts as dead.
  double arrival_seconds = 1800;  // How long ranks wait for one that lives and does not come.
  bool partial = false;           // Without what a foreign source names and lacks.
};
// Saves a source into a store, each rank its shards.
// 0 once the checkpoint is published, 2 otherwise. What one rank finds wrong fails all of them in
// the same collective call, so that none waits for it.
int RunImport(const ImportArgs& args, Terminal& terminal);

struct ExportArgs {
  std::string source;
  std::string destination;
  // ExportFormatName: safetensors, hf, npy, zarr, dcp, torch.
  std::string to;  // Format.
  std::string if_exists = "fail";
  std::string map;  // JSON file; empty: none.
  std::optional<std::string> hf_part_size;
  std::optional<std::string> hf_rules;  // JSON file.
  int ranks = 0;                        // 0: not given.
  double liveness_seconds = 30;
  double arrival_seconds = 1800;
  bool partial = false;  // Without what a foreign source names and lacks.
};
// Writes a source as real files in another format.
// 0 once the export stands whole under its name; 2 otherwise, and then what was written is removed,
// or named where it could not be.
int RunExport(const ExportArgs& args, Terminal& terminal);

struct LoadArgs {
  std::string source;
  std::string shard = "rows";
  int ranks = 0;
  // '*' crosses '/', as everywhere in the command.
  std::string keys;     // Glob; empty: all.
  std::string compare;  // Second source; empty: none.
  std::string map;      // JSON file; empty: none.
  double liveness_seconds = 30;
  double arrival_seconds = 1800;
  bool partial = false;  // Without what a foreign source names and lacks.
};
// Loads every rank's shards into memory, perhaps compares them with another source, and reports.
// 1 where --compare found a byte or a key that is not equal. Without it nothing is kept: it is for
// measuring a load before a job depends on it, and for proving that a source can be read by so many
// ranks.
int RunLoad(const LoadArgs& args, Terminal& terminal);

// Makes an empty store; one that is there already stays as it is.
int RunInit(const std::string& path, Terminal& terminal);

struct LsArgs {
  std::string source;
  std::string glob;      // Of keys; empty: all.
  bool details = false;  // -l
  bool layers = false;   // Layers of stacked tensors under names of their own.
};
// Checkpoints of a store, or keys of a checkpoint.
// Of a store also 1 or 2 where a checkpoint in it is damaged or could not be read; all others are
// listed all the same.
int RunLs(const LsArgs& args, Terminal& terminal);

struct InfoArgs {
  std::string source;
  std::string key;
  bool common = false;  // All common values, whole, and nothing else.
};
// A store, a checkpoint, or one tensor of it.
// The key may also be the name of a layer, an object or a common value; pickles are described and
// never run.
int RunInfo(const InfoArgs& args, Terminal& terminal);

// `as`: raw (the bytes), npy (with a NumPy header) or text (an element a word, a row a line).
struct CatArgs {
  std::string source;
  std::string key;  // KEY, KEY[SLICE] or KEY@SLICE.
  std::string as = "raw";
};
// A tensor, or a box of it, on standard output.
// Verified as it is read; memory is bounded by one block of 32 MiB, whatever the size.
int RunCat(const CatArgs& args, Terminal& terminal);

struct DiffArgs {
  std::string first;
  std::string second;
  // Counts elements that differ, and tells by how much.
  bool values = false;
  std::string keys;  // Glob; empty: all.
  std::string map;   // JSON file, of the first source; empty: none.
};
// 1 where the sources differ.
// Compared by digest where both have one, otherwise by bytes. 2 where data of either are lost,
// since what is lost was not compared.
int RunDiff(const DiffArgs& args, Terminal& terminal);

struct LayoutArgs {
  std::string source;
  std::string key;
  std::string svg;   // File to write; empty: none.
  std::string html;  // The same.
};
// Which rank's chunk holds which box of a tensor, drawn.
// To standard output as text, or to files; made of the index alone, no data are read.
int RunLayout(const LayoutArgs& args, Terminal& terminal);

struct DeriveArgs {
  std::string destination;          // STORE/NEW
  std::string from;                 // STORE/OLD, or OLD.
  std::vector<std::string> keep;    // Globs.
  std::vector<std::string> drop;    // Globs.
  std::vector<std::string> rename;  // OLD=NEW, '*' as in a map's "match".
  std::string map;                  // JSON file; empty: none.
  std::string if_exists = "fail";
};
// A new checkpoint out of an old one of the same store, by hard links.
// 0 once it is published. No data are read but what is copied out of files that are mostly dropped.
int RunDerive(const DeriveArgs& args, Terminal& terminal);

struct AdoptArgs {
  std::string source;
  std::string destination;  // STORE/NAME
  std::string if_exists = "fail";
  std::string map;       // JSON file; empty: none.
  bool quick = false;    // No hashes.
  bool partial = false;  // Without what a foreign source names and lacks.
};
// Records of a foreign checkpoint as one of a store; the bytes stay where they are.
// Reads all data once for their hashes, unless `quick`. From then on the checkpoint is verified as
// any other; the foreign files must stay where they are.
int RunAdopt(const AdoptArgs& args, Terminal& terminal);

struct VerifyArgs {
  std::string source;
  bool quick = false;
  bool partial = false;  // Without what a foreign source names and lacks.
};
// 1 where something is damaged.
// Also where the source cannot be opened because of damage: that is what the command is for. Of a
// store or a training directory all checkpoints, and the worst status of them.
int RunVerify(const VerifyArgs& args, Terminal& terminal);

// Relative paths and "latest" are resolved before the daemon leaves the folder of the caller.
struct MountArgs {
  std::string source;
  std::string mount_point;
  bool foreground = false;
  bool read_only = false;
  bool views = false;
  bool allow_other = false;
  // auto, passthrough or daemon: whether the kernel may read files by itself. docs/semantics.md,
  // "Tiers".
  std::string tier = "auto";
  // off, first or always: how often bytes are compared with their hashes.
  std::string verify = "first";
  std::string log_file;  // Where a daemon's messages go; empty: to the system's log.
  std::string map;       // JSON file; empty: none.
  std::string hf_part_size = "5GB";
  std::string hf_rules;  // JSON file; empty: none.
};
// Returns when the mount answers, or, in the foreground, when it has ended.
// In the background a daemon goes on after the command has ended; its first words (mounted, or why
// not) come to this command through a pipe.
int RunMount(const MountArgs& args, Terminal& terminal);

// Waits up to 10 seconds for the daemon to end, so that what follows in a script finds the folder
// free.
struct UnmountArgs {
  std::string mount_point;
  bool lazy = false;  // At once, also while files are open.
};
int RunUnmount(const UnmountArgs& args, Terminal& terminal);

struct StatsArgs {
  std::string mount_point;
  // With it every look but the first prints rates instead of totals.
  double watch_seconds = 0;  // Between two looks; 0: one look.
  int rounds = 0;            // With watch_seconds; 0: until interrupted.
};
// The counters of a mount, which its daemon shows as a file of it.
// Read from MNT/.tensormount/stats. A mount that does not answer in 5 seconds is an error and not a
// hang.
int RunStats(const StatsArgs& args, Terminal& terminal);

// `dry_run`: everything is checked, and nothing is moved.
struct RmArgs {
  // Of one store or several.
  std::vector<std::string> checkpoints;  // STORE/NAME
  bool dry_run = false;
  bool force = false;  // Also what is pinned.
};
// Moves checkpoints away; `gc` frees their space.
// All names are checked before the first is moved, so a slip in one removes nothing.
int RunRm(const RmArgs& args, Terminal& terminal);

// Rules as they were typed; all of them empty: the store's policy.
struct PruneArgs {
  std::string store;
  std::string keep_last;
  std::vector<std::string> keep_every;
  std::vector<std::string> keep_best;
  std::string match;  // Names that the rules are for; empty: all.
  std::string rules;  // All in one text.
  bool dry_run = false;
  // Then nothing is removed.
  bool set_policy = false;
  bool show_policy = false;
  bool clear_policy = false;
};
// Removes the checkpoints that no rule keeps, or says which these are and why the others stay.
// 2 where one could not be removed, which is named, or where nothing may be removed.
int RunPrune(const PruneArgs& args, Terminal& terminal);

struct PinArgs {
  std::string checkpoint;  // STORE/NAME; a STORE lists its pins.
  std::string reason;
  std::string expires;  // Empty: never.
};
int RunPin(const PinArgs& args, Terminal& terminal);
int RunUnpin(const std::string& checkpoint, Terminal& terminal);
struct CopyArgs {
  std::vector<std::string> paths;  // Sources, and the store that they are copied to as the last.
  std::string limit_rate;          // Bytes a second, in words; empty: no limit.
};
// Copies checkpoints to another store, as the same checkpoints.
// 0 once all of them are there; 2 otherwise, and then the others are all the same. What was
// interrupted is gone on with by the next one.
int RunCopy(const CopyArgs& args, Terminal& terminal);

struct RepairArgs {
  std::string checkpoint;  // STORE/NAME
  std::string from;        // A source that holds the same.
  bool dry_run = false;
};
// Makes damaged files of a checkpoint whole out of another one that holds the same tensors.
// 0 where it is whole afterwards (of a dry run: would be); 1 where something is damaged still,
// which is named, and the rest is repaired; 2 where nothing can be said.
int RunRepair(const RepairArgs& args, Terminal& terminal);

struct GcArgs {
  std::string store;
  bool dry_run = false;
  // Nothing was given: the default, and on filesystems without locks nothing is deleted.
  std::optional<std::int64_t> grace_seconds;  // Asked for: it is to be relied on.
  // A staging that nobody touched for so long counts as abandoned.
  std::int64_t staging_age_seconds = 86400;
};
inline constexpr std::int64_t kDefaultGraceSeconds = 60;
// Frees what was removed, and what died saves left behind.
// 2 where something could not be looked at or deleted; it is named, and the rest is done.
int RunGc(const GcArgs& args, Terminal& terminal);

struct FsckArgs {
  std::string store;
  bool rebuild = false;
  bool read_data = false;
};
// A store as a whole. 1 where there is damage.
// 2: no damage was found, but something could not be read, or needs a newer program. Repairs only
// with `rebuild`.
int RunFsck(const FsckArgs& args, Terminal& terminal);

struct PublishArgs {
  std::string staging;  // STORE/.staging/NAME
  std::string as;       // Empty: NAME.
  // For done marks of other writers and for files that are still open.
  double wait_seconds = 0;
};
// Publishes what mounts wrote, or says what is missing.
// 0 once it is published; 2 with the problems otherwise, and then the staging is as it was.
int RunPublish(const PublishArgs& args, Terminal& terminal);

struct CheckArgs {
  std::string spec;  // A file, docs/spec.md.
  int limit = 100;   // Findings that are listed.
};
// Checks a described job without any data. 1 where a save of it would fail.
// The judgement is that of a save (collective/layout), over ranks that exist on paper only.
int RunCheck(const CheckArgs& args, Terminal& terminal);

// What this machine offers, what is missing, and how to get it; `directory` is that whose
// filesystem is looked at.
// 2 only where the folder cannot be written; what is merely missing is told, and is no failure.
int RunDoctor(const std::string& directory, Terminal& terminal);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_
