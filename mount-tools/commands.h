// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_
#define TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mount-tools/name_map_args.h"
#include "mount-tools/terminal.h"

// The subcommands: for each, a structure of arguments, and a function in the file with the
// command's name. cli.cc fills the structures with CLI11 and calls the functions, which do not use
// CLI11 or each other. The help shows the defaults in the structures.
//
// A function prints its results through the terminal, as text or JSON, and returns the exit status
// (docs/cli.md): 0; 1 if the check failed (damage or a difference was found); 2 if the command
// failed, usually after an error line on standard error; 128 + the signal if an import, export,
// adopt, copy or repair was interrupted. Under mpirun `import`, `export` and `load` run on every
// rank, and rank 0 prints the results.

namespace tensormount::tools {

// In all argument structures, rules, formats and sizes are texts. The command parses them and not
// CLI11, so that the error messages are the library's.
struct ImportArgs {
  std::string source;
  std::string destination;     // STORE/NAME
  std::string shard = "rows";  // A rule of state/shard_rule.h.
  int ranks = 0;               // 0: --ranks was not given.
  std::string placement = "auto";
  std::string if_exists = "fail";
  bool page_hashes = false;                   // See SaveOptions::page_hashes (tensormount/save.h).
  std::string statistics = "basic";           // basic or off.
  std::string nonfinite = "allow";            // allow, warn or refuse.
  std::vector<std::string> nonfinite_exempt;  // Globs of keys.
  std::string reuse = "auto";                 // auto, off, or the name of the base checkpoint.
  std::uint32_t full_every = 50;              // See SaveOptions::full_every.
  int writers = 0;                            // See SaveOptions::writers.
  std::string inherit;                        // STORE/NAME or NAME; empty: none.
  std::string retain;                         // Rules of tensormount/retention.h; empty: none.
  bool ephemeral = false;                     // See SaveOptions::ephemeral.
  std::string staging;                        // See SaveOptions::staging.
  NameMapArgs map;
  // A rank that sends nothing for this long during a collective call counts as dead.
  double liveness_seconds = 30;
  // How long ranks wait for a live rank that does not make the collective call.
  double arrival_seconds = 1800;
  bool partial = false;  // Whether to leave out incomplete tensors of a foreign source.
};
// Saves a source into a store; each rank saves its shards. Returns 0 only if the checkpoint is
// published. An error of one rank fails all ranks in the same collective call.
int RunImport(const ImportArgs& args, Terminal& terminal);

struct ExportArgs {
  std::string source;
  std::string destination;
  // Name of the format (ExportFormatName): safetensors, hf, npy, zarr, dcp, torch or torch_dist.
  std::string to;
  std::string if_exists = "fail";
  NameMapArgs map;
  std::optional<std::string> hf_part_size;
  std::optional<std::string> hf_rules;  // JSON file.
  int ranks = 0;                        // 0: --ranks was not given.
  double liveness_seconds = 30;
  double arrival_seconds = 1800;
  bool partial = false;  // Whether to leave out incomplete tensors of a foreign source.
};
// Exports a source to another format. Returns 0 only if the export is complete. After an error the
// incomplete output is removed, or the error names it if it cannot be removed.
int RunExport(const ExportArgs& args, Terminal& terminal);

struct LoadArgs {
  std::string source;
  std::string shard = "rows";
  int ranks = 0;
  // Glob of the keys to load, in which '*' also matches '/'; empty: all.
  std::string keys;
  std::string compare;  // Source to compare with; empty: none.
  NameMapArgs map;
  double liveness_seconds = 30;
  double arrival_seconds = 1800;
  bool partial = false;  // Whether to leave out incomplete tensors of a foreign source.
};
// Loads every rank's shards into memory, and reports bytes, time and memory. With --compare it
// compares the data with another source, and returns 1 if they differ. It shows how fast a job with
// this number of ranks could load the source.
int RunLoad(const LoadArgs& args, Terminal& terminal);

// Makes an empty store. An existing store is not changed.
int RunInit(const std::string& path, Terminal& terminal);

struct LsArgs {
  std::string source;
  std::string glob;      // Glob of the keys to list; empty: all.
  bool details = false;  // Long format (-l).
  bool layers = false;   // Whether to list the layers of stacked tensors, too.
  bool stats = false;    // Whether to show the value counts of each tensor.
  std::string where;     // A condition on tensors (mount-tools/where.h); empty: all.
};
// Lists the checkpoints of a store, or the keys of a checkpoint. For a store it returns 1 or 2 if a
// checkpoint is damaged or cannot be read; the others are still listed. With a condition it returns
// 1 if no tensor fulfils it.
int RunLs(const LsArgs& args, Terminal& terminal);

struct InfoArgs {
  std::string source;
  std::string key;
  bool common = false;  // Whether to print only the common values, in full.
};
// Describes a store, a checkpoint, or one tensor, layer, object or common value of a checkpoint.
// Pickles are parsed and never executed.
int RunInfo(const InfoArgs& args, Terminal& terminal);

struct LogArgs {
  std::string store;
  std::string key;                // Empty: the steps of the store.
  int limit = 0;                  // The newest N; 0: all.
  bool reverse = false;           // Whether to print the oldest first.
  std::vector<std::string> show;  // Paths of common values, joined by commas.
};
// Prints the steps of a store, or the steps at which a key changed, without reading data. Returns 1
// or 2 if a checkpoint is damaged or cannot be read, as RunLs does.
int RunLog(const LogArgs& args, Terminal& terminal);

struct BlameArgs {
  std::string store;
  std::string key;  // A key, or a glob of keys of the newest step.
};
// Prints the step at which each key changed last, by digest. Returns as RunLog.
int RunBlame(const BlameArgs& args, Terminal& terminal);

struct WatchArgs {
  std::string store;
  bool once = false;
  // End if no checkpoint is published for this time, in seconds; 0: never.
  double timeout_seconds = 0;
  std::string since;  // Name of a checkpoint; empty: from now on.
  // Report existing checkpoints whose generation is above this one; negative: none.
  std::int64_t since_generation = -1;
  std::vector<std::string> exec;  // The command and its arguments; empty: none.
};
// Prints each checkpoint that is published, and runs a command for it. Returns 0 with `once`; 1 if
// a command failed; 2 if the store fails or the time is over; 128 + the signal after a signal.
int RunWatch(const WatchArgs& args, Terminal& terminal);

// `as`: raw (the bytes), npy (the bytes after a NumPy header) or text (a line for the elements
// along the last axis).
struct CatArgs {
  std::string source;
  std::string key;  // KEY, KEY[SLICE] or KEY@SLICE.
  std::string as = "raw";
};
// Writes a tensor, or a box of it, or an object to standard output. Bytes that have a hash are
// verified, except for the description of an object (`as` text). Bytes are read in blocks of at
// most 32 MiB to limit memory.
int RunCat(const CatArgs& args, Terminal& terminal);

struct DiffArgs {
  std::string first;
  std::string second;
  // Whether to count the elements that differ, and report by how much.
  bool values = false;
  bool stats = false;  // Whether to report by how much each tensor changed.
  std::string sort;    // With `stats`: a column of the table; empty: in the order of the keys.
  std::string keys;    // Glob of the keys to compare; empty: all.
  NameMapArgs map;     // Applied to the first source.
};
// Compares two sources by their digests, or by bytes where a digest is missing. Returns 1 if they
// differ, and 2 if data of a source are missing, because missing data cannot be compared.
int RunDiff(const DiffArgs& args, Terminal& terminal);

struct MapArgs {
  std::string action;  // "check"
  NameMapArgs map;
  std::string source;
};
// Shows the tensors that a name map makes of a source, without reading data. Fails if the rules do
// not use every cell once.
int RunMap(const MapArgs& args, Terminal& terminal);

struct LayoutArgs {
  std::string source;
  std::string key;
  std::string svg;   // File to write; empty: none.
  std::string html;  // File to write; empty: none.
};
// Draws which rank stored which box of a tensor, to standard output as text, or to files. Reads no
// data.
int RunLayout(const LayoutArgs& args, Terminal& terminal);

struct DeriveArgs {
  std::string destination;          // STORE/NEW
  std::string from;                 // STORE/OLD, or OLD.
  std::vector<std::string> keep;    // Globs of keys.
  std::vector<std::string> drop;    // Globs of keys.
  std::vector<std::string> rename;  // OLD=NEW, '*' as in a map's "match".
  std::string map;                  // JSON file; empty: none.
  std::string if_exists = "fail";
};
// Makes a new checkpoint from an old one of the same store, with hard links. Data are read only if
// they are copied: because links are refused, or because less than half of a file is kept.
int RunDerive(const DeriveArgs& args, Terminal& terminal);

struct AdoptArgs {
  std::string source;
  std::string destination;  // STORE/NAME
  std::string if_exists = "fail";
  std::string map;       // JSON file; empty: none.
  bool quick = false;    // Whether to skip the hashes, so that no data are read.
  bool partial = false;  // Whether to leave out incomplete tensors of a foreign source.
};
// Publishes the records of a foreign checkpoint as a checkpoint of a store; the data stay in the
// foreign files, which must not move. Without `quick`, it reads all data once for hashes, so that
// the checkpoint can be verified like others.
int RunAdopt(const AdoptArgs& args, Terminal& terminal);

struct VerifyArgs {
  std::string source;
  bool quick = false;
  bool partial = false;  // Whether to accept missing data of a foreign source.
  // Whether NaNs and infinities are a failed check, too, except in tensors whose keys match a glob.
  bool nonfinite = false;
  std::vector<std::string> nonfinite_exempt;
};
// Verifies a checkpoint, or all checkpoints of a store or training directory. Returns 1 for damage,
// for NaNs and infinities with --nonfinite, and if the checkpoint cannot be opened because of
// damage; for several checkpoints the worst status.
int RunVerify(const VerifyArgs& args, Terminal& terminal);

// Arguments of mount. Relative paths and "latest" are resolved at the start, because the daemon
// changes its working directory.
struct MountArgs {
  std::string source;
  std::string mount_point;
  bool foreground = false;
  bool read_only = false;
  bool views = false;
  bool allow_other = false;
  // auto, passthrough or daemon: whether the kernel may read files directly (docs/mounting.md,
  // "Tiers").
  std::string tier = "auto";
  // off, first or always: how often bytes are compared with their hashes.
  std::string verify = "first";
  std::string log_file;  // Empty: the system's log, or standard error in the foreground.
  NameMapArgs map;
  std::string hf_part_size = "5GB";
  std::string hf_rules;  // JSON file; empty: none.
};
// Mounts a source. Returns when the mount answers requests or, in the foreground, when the mount
// has ended. A daemon in the background reports success or failure of its start to this command
// through a pipe.
int RunMount(const MountArgs& args, Terminal& terminal);

// Unmounts, and waits up to 10 seconds until nothing is mounted there, so that a script can use
// the directory at once.
struct UnmountArgs {
  std::string mount_point;
  bool lazy = false;  // Whether to detach at once, even while files are open.
};
int RunUnmount(const UnmountArgs& args, Terminal& terminal);

struct StatsArgs {
  std::string source;  // A mount point; with `full` a source.
  // With watch_seconds, text output after the first shows rates instead of totals.
  double watch_seconds = 0;  // Interval between outputs; 0: one output.
  int rounds = 0;            // Number of outputs with watch_seconds; 0: until interrupted.
  bool full = false;         // Whether to print statistics of the values of tensors.
  std::string keys;          // Glob of the keys; empty: all.
  std::string sort;          // A column of the table; empty: in the order of the keys.
  bool no_keep = false;      // Whether to compute all statistics anew and store none.
};
// Prints the counters of a mount from MNT/.tensormount/stats. A mount that does not answer within 5
// seconds is an error. With `full`, prints statistics of the values of a source, which are kept
// beside a checkpoint of a store (index/store/kept_statistics.h).
int RunStats(const StatsArgs& args, Terminal& terminal);

// `dry_run`: whether to check the names and remove nothing.
struct RmArgs {
  std::vector<std::string> checkpoints;  // STORE/NAME
  bool dry_run = false;
  bool force = false;  // Whether to remove pinned checkpoints, too.
};
// Moves checkpoints to the trash; `gc` frees their space. All names are checked before the first
// move, so a wrong name removes nothing.
int RunRm(const RmArgs& args, Terminal& terminal);

// Retention rules as option texts. Without any rule the store's policy applies.
struct PruneArgs {
  std::string store;
  std::string keep_last;
  std::vector<std::string> keep_every;
  std::vector<std::string> keep_best;
  std::string match;  // Glob of the names that the rules apply to; empty: all.
  std::string rules;  // All rules in one text.
  bool dry_run = false;
  // If one of these three is true, nothing is removed.
  bool set_policy = false;
  bool show_policy = false;
  bool clear_policy = false;
};
// Removes the checkpoints that no rule keeps, and frees their space. With `dry_run` it only lists
// which checkpoints would be removed or would stay, and why. Returns 2 if a checkpoint could not be
// removed or removal is not allowed.
int RunPrune(const PruneArgs& args, Terminal& terminal);

struct PinArgs {
  std::string checkpoint;  // STORE/NAME; a STORE lists its pins.
  std::string reason;
  std::string expires;  // When the pin ends; empty: never.
};
int RunPin(const PinArgs& args, Terminal& terminal);
int RunUnpin(const std::string& checkpoint, Terminal& terminal);
struct CopyArgs {
  std::vector<std::string> paths;  // Sources, then the destination store.
  std::string limit_rate;          // Bytes a second, such as "100MB"; empty: no limit.
  bool unconditional = false;      // CopyOptions::unconditional.
  bool drain = false;              // Go on with what is published later.
  std::string retain;              // Rules for the destination of a drain.
};
// Copies checkpoints to another store, with the same UUIDs. Returns 0 if all were copied or existed
// there already. If one cannot be copied, the others are copied, and the result is 2; but a full
// disk or a failing destination ends the copy. The next run resumes an interrupted copy. A drain
// runs until it is interrupted; 0 if it waited for work then.
int RunCopy(const CopyArgs& args, Terminal& terminal);

struct RepairArgs {
  std::string checkpoint;  // STORE/NAME
  std::string from;        // The source of intact data, with the same tensors.
  bool dry_run = false;
};
// Repairs damaged files of a checkpoint with data of another source that has the same tensors.
// Returns 0 if the checkpoint is then intact (with `dry_run`: would be intact), 1 if damage
// remains, and 2 if the repair failed.
int RunRepair(const RepairArgs& args, Terminal& terminal);

struct GcArgs {
  std::string store;
  bool dry_run = false;
  // Minimum time in .trash before a removed checkpoint is deleted; unset: kDefaultGraceSeconds. On
  // a filesystem without locks only a value that is set is trusted; if it is unset, gc deletes no
  // checkpoint there.
  std::optional<std::int64_t> grace_seconds;
  // A staging directory that was unchanged for this long counts as abandoned.
  std::int64_t staging_age_seconds = 86400;
};
inline constexpr std::int64_t kDefaultGraceSeconds = 60;
// Frees the space of removed checkpoints and failed saves. Returns 2 if something could not be
// examined or deleted, after processing all else.
int RunGc(const GcArgs& args, Terminal& terminal);

struct FsckArgs {
  std::string store;
  bool rebuild = false;
  bool read_data = false;
};
// Checks a whole store; repairs only with `rebuild`. Returns 1 for damage; 2 if no damage was found
// but something could not be read, or needs a newer version.
int RunFsck(const FsckArgs& args, Terminal& terminal);

struct PublishArgs {
  std::string staging;  // STORE/.staging/NAME
  std::string as;       // Name of the checkpoint; empty: NAME.
  // How long to wait for the done marks of other writers, and for files that are open for writing.
  double wait_seconds = 0;
};
// Publishes a checkpoint that was written through mounts. On failure prints the problems and
// returns 2; the staging directory stays and gets a report.
int RunPublish(const PublishArgs& args, Terminal& terminal);

struct CheckArgs {
  std::string spec;  // The file with the description (docs/spec.md).
  int limit = 100;   // Largest number of findings to list.
};
// Checks the description of a job, without data. Returns 1 if a save of the job would fail. Uses
// the checks of a save (collective/layout) with simulated ranks.
int RunCheck(const CheckArgs& args, Terminal& terminal);

// Reports what this machine supports, what is missing, and how to get it. `directory` is on the
// filesystem to check. Missing features are not errors; the result is 2 if no test directory can be
// made in `directory`.
int RunDoctor(const std::string& directory, Terminal& terminal);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_
