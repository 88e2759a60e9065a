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

namespace tensormount::tools {

struct ImportArgs {
  std::string source;
  std::string destination;  // STORE/NAME
  std::string shard = "rows";
  int ranks = 0;  // 0: not given.
  std::string placement = "auto";
  std::string if_exists = "fail";
  std::string map;               // JSON file; empty: none.
  double liveness_seconds = 30;  // After so long without a sign of life a rank counts as dead.
  double arrival_seconds = 1800;
  bool partial = false;  // Without what a foreign source names and lacks.
};
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
int RunLoad(const LoadArgs& args, Terminal& terminal);

struct LsArgs {
  std::string source;
  std::string glob;
  bool details = false;
  bool layers = false;
};
int RunLs(const LsArgs& args, Terminal& terminal);

struct InfoArgs {
  std::string source;
  std::string key;
};
int RunInfo(const InfoArgs& args, Terminal& terminal);

struct CatArgs {
  std::string source;
  std::string key;  // KEY, KEY[SLICE] or KEY@SLICE.
  std::string as = "raw";
};
int RunCat(const CatArgs& args, Terminal& terminal);

struct DiffArgs {
  std::string first;
  std::string second;
  bool values = false;
  std::string keys;  // Glob; empty: all.
  std::string map;   // JSON file, of the first source; empty: none.
};
int RunDiff(const DiffArgs& args, Terminal& terminal);

struct LayoutArgs {
  std::string source;
  std::string key;
  std::string svg;   // File to write; empty: none.
  std::string html;  // The same.
};
int RunLayout(const LayoutArgs& args, Terminal& terminal);

struct AdoptArgs {
  std::string source;
  std::string destination;  // STORE/NAME
  std::string if_exists = "fail";
  bool quick = false;    // No hashes.
  bool partial = false;  // Without what a foreign source names and lacks.
};
int RunAdopt(const AdoptArgs& args, Terminal& terminal);

struct VerifyArgs {
  std::string source;
  bool quick = false;
  bool partial = false;  // Without what a foreign source names and lacks.
};
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
int RunMount(const MountArgs& args, Terminal& terminal);

struct UnmountArgs {
  std::string mount_point;
  bool lazy = false;
};
int RunUnmount(const UnmountArgs& args, Terminal& terminal);

struct StatsArgs {
  std::string mount_point;
  double watch_seconds = 0;  // Between two looks; 0: one look.
  int rounds = 0;            // With watch_seconds; 0: until interrupted.
};
int RunStats(const StatsArgs& args, Terminal& terminal);

struct RmArgs {
  std::vector<std::string> checkpoints;  // STORE/NAME
  bool dry_run = false;
};
int RunRm(const RmArgs& args, Terminal& terminal);

struct GcArgs {
  std::string store;
  bool dry_run = false;
  std::optional<std::int64_t> grace_seconds;  // Asked for: it is to be relied on.
  std::int64_t staging_age_seconds = 86400;
};
inline constexpr std::int64_t kDefaultGraceSeconds = 60;
int RunGc(const GcArgs& args, Terminal& terminal);

struct FsckArgs {
  std::string store;
  bool rebuild = false;
  bool read_data = false;
};
int RunFsck(const FsckArgs& args, Terminal& terminal);

struct PublishArgs {
  std::string staging;  // STORE/.staging/NAME
  std::string as;       // Empty: NAME.
  double wait_seconds = 0;
};
int RunPublish(const PublishArgs& args, Terminal& terminal);

struct CheckArgs {
  std::string spec;
  int limit = 100;
};
int RunCheck(const CheckArgs& args, Terminal& terminal);

struct DoctorArgs {
  std::string directory = ".";  // Whose filesystem is looked at.
};
int RunDoctor(const DoctorArgs& args, Terminal& terminal);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_COMMANDS_H_
