// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_
#define TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mount-tools/terminal.h"

// One struct of arguments and one function for each subcommand; cli.cc fills the structs.
// Functions print results on standard output and return the exit status that interface says:
// 0 done, 1 the check that the command is for did not hold, 2 anything else (after one error line).

// The subcommands: a structure of arguments as they were typed, and a function in the file that is
// called like the command. cli.cc makes the one and calls the other; nothing here knows CLI11, and
// no command knows another. Defaults stand here, and the help shows them.
//
// A function returns the exit status (docs/cli.md): 0; 1 where what was asked about is not so, as
// damage or a difference; 2 where the command could not be carried out, after saying why on
// standard error. Results go to the terminal, which knows whether they are to be text or JSON.
// Under mpirun `import`, `export` and `load` run on every rank, and rank 0 prints.

namespace tensormount::tools {

struct ImportArgs {
  std::string source;
  std::string destination;     // STORE/NAME
  std::string shard = "rows";  // A rule of state/shard_rule.h.
  int ranks = 0;               // 0: not given.
  std::string placement = "auto";
  std::string if_exists = "fail";
  std::string map;                // JSON file; empty: none.
  double liveness_seconds = 30;   // After so long without a sign of life a rank counts as dead.
  double arrival_seconds = 1800;  // How long ranks wait for one that lives and does not come.
  bool partial = false;           // Without what a foreign source names and lacks.
};
// Saves a source into a store, each rank its shards.
int RunImport(const ImportArgs& args, Terminal& terminal);

struct ExportArgs {
  std::string source;
  std::string destination;
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
int RunExport(const ExportArgs& args, Terminal& terminal);

struct LoadArgs {
  std::string source;
  std::string shard = "rows";
  int ranks = 0;
  std::string keys;     // Glob; empty: all.
  std::string compare;  // Second source; empty: none.
  std::string map;      // JSON file; empty: none.
  double liveness_seconds = 30;
  double arrival_seconds = 1800;
  bool partial = false;  // Without what a foreign source names and lacks.
};
// Loads every rank's shards into memory, perhaps compares them with another source, and reports.
int RunLoad(const LoadArgs& args, Terminal& terminal);

struct LsArgs {
  std::string source;
  std::string glob;      // Of keys; empty: all.
  bool details = false;  // -l
  bool layers = false;   // Layers of stacked tensors under names of their own.
};
// Checkpoints of a store, or keys of a checkpoint.
int RunLs(const LsArgs& args, Terminal& terminal);

struct InfoArgs {
  std::string source;
  std::string key;
};
// A store, a checkpoint, or one tensor of it.
int RunInfo(const InfoArgs& args, Terminal& terminal);

struct CatArgs {
  std::string source;
  std::string key;  // KEY, KEY[SLICE] or KEY@SLICE.
  std::string as = "raw";
};
// A tensor, or a box of it, on standard output.
int RunCat(const CatArgs& args, Terminal& terminal);

struct DiffArgs {
  std::string first;
  std::string second;
  bool values = false;
  std::string keys;  // Glob; empty: all.
  std::string map;   // JSON file, of the first source; empty: none.
};
// 1 where the sources differ.
int RunDiff(const DiffArgs& args, Terminal& terminal);

struct LayoutArgs {
  std::string source;
  std::string key;
  std::string svg;   // File to write; empty: none.
  std::string html;  // The same.
};
// Which rank's chunk holds which box of a tensor, drawn.
int RunLayout(const LayoutArgs& args, Terminal& terminal);

struct AdoptArgs {
  std::string source;
  std::string destination;  // STORE/NAME
  std::string if_exists = "fail";
  bool quick = false;    // No hashes.
  bool partial = false;  // Without what a foreign source names and lacks.
};
// Records of a foreign checkpoint as one of a store; the bytes stay where they are.
int RunAdopt(const AdoptArgs& args, Terminal& terminal);

struct VerifyArgs {
  std::string source;
  bool quick = false;
  bool partial = false;  // Without what a foreign source names and lacks.
};
// 1 where something is damaged.
int RunVerify(const VerifyArgs& args, Terminal& terminal);

struct MountArgs {
  std::string source;
  std::string mount_point;
  bool foreground = false;
  bool read_only = false;
  bool views = false;
  bool allow_other = false;
  std::string tier = "auto";
  std::string verify = "first";
  std::string log_file;  // Where a daemon's messages go; empty: to the system's log.
  std::string map;       // JSON file; empty: none.
  std::string hf_part_size = "5GB";
  std::string hf_rules;  // JSON file; empty: none.
};
// Returns when the mount answers, or, in the foreground, when it has ended.
int RunMount(const MountArgs& args, Terminal& terminal);

struct UnmountArgs {
  std::string mount_point;
  bool lazy = false;  // At once, also while files are open.
};
int RunUnmount(const UnmountArgs& args, Terminal& terminal);

struct StatsArgs {
  std::string mount_point;
  double watch_seconds = 0;  // Between two looks; 0: one look.
  int rounds = 0;            // With watch_seconds; 0: until interrupted.
};
// The counters of a mount, which its daemon shows as a file of it.
int RunStats(const StatsArgs& args, Terminal& terminal);

struct RmArgs {
  std::vector<std::string> checkpoints;  // STORE/NAME
  bool dry_run = false;
};
// Moves checkpoints away; `gc` frees their space.
int RunRm(const RmArgs& args, Terminal& terminal);

struct GcArgs {
  std::string store;
  bool dry_run = false;
  std::optional<std::int64_t> grace_seconds;  // Asked for: it is to be relied on.
  std::int64_t staging_age_seconds = 86400;
};
inline constexpr std::int64_t kDefaultGraceSeconds = 60;
// Frees what was removed, and what died saves left behind.
int RunGc(const GcArgs& args, Terminal& terminal);

struct FsckArgs {
  std::string store;
  bool rebuild = false;
  bool read_data = false;
};
// A store as a whole. 1 where there is damage.
int RunFsck(const FsckArgs& args, Terminal& terminal);

struct PublishArgs {
  std::string staging;  // STORE/.staging/NAME
  std::string as;       // Empty: NAME.
  double wait_seconds = 0;
};
// Publishes what mounts wrote, or says what is missing.
int RunPublish(const PublishArgs& args, Terminal& terminal);

struct CheckArgs {
  std::string spec;  // A file, docs/spec.md.
  int limit = 100;   // Findings that are listed.
};
// Checks a described job without any data. 1 where a save of it would fail.
int RunCheck(const CheckArgs& args, Terminal& terminal);

struct DoctorArgs {
  std::string directory = ".";  // Whose filesystem is looked at.
};
// What this machine offers, what is missing, and how to get it.
int RunDoctor(const DoctorArgs& args, Terminal& terminal);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_
