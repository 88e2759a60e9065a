// SPDX-License-Identifier: Apache-2.0
// The command line: options of every subcommand, help, and from a Status to words and an exit
// status. Subcommands are functions of commands.h and know nothing of CLI11.
// The order of a run: all options are declared, with defaults from the structures of arguments;
// CLI11 parses, which sets `run` to the one subcommand; then, outside of the parser, `run` is
// called, so that no exception of the parser can come from a command.
#include "mount-tools/cli.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include "mount-tools/commands.h"
#include "mount-tools/help.h"
#include "mount-tools/nearest.h"

namespace tensormount::tools {
namespace {

// What --version says; the library has it from CMake (TENSORMOUNT_VERSION).
constexpr const char* kVersion = "tensormount 0.1.0";

// Commands that the interface fixes and that are not built yet: they answer so.
// So scripts can tell "not yet" (exit status 2, kUnsupported) from a slip in the name.
constexpr std::pair<const char*, const char*> kNotBuilt[] = {
    {"compact", "turns rank shards into tensor files"},
};

constexpr const char* kNotBuiltGroup = "Not built yet";

// Lives as long as Run: options refer to its members.
struct Program {
  CLI::App app{
      "Mounts, saves, loads and checks checkpoints of distributed training.\n"
      "SOURCE is a checkpoint (STORE/step-1000), a STORE, or what other programs saved: a folder "
      "or file in a format of docs/formats-adopted.md, or a training directory of such.",
      "tensormount"};
  Terminal terminal;
  std::function<int()> run;  // Set by the subcommand that was named.

  // What the options of each subcommand are parsed into. One is used in a run.
  ImportArgs import;
  ExportArgs export_;
  LoadArgs load;
  LsArgs ls;
  InfoArgs info;
  CatArgs cat;
  std::string new_store;
  DiffArgs diff;
  LayoutArgs layout;
  VerifyArgs verify;
  AdoptArgs adopt;
  DeriveArgs derive;
  MountArgs mount;
  UnmountArgs unmount;
  StatsArgs stats;
  RmArgs rm;
  PruneArgs prune;
  PinArgs pin;
  std::string unpinned;
  CopyArgs copy;
  RepairArgs repair;
  GcArgs gc;
  FsckArgs fsck;
  PublishArgs publish;
  std::string doctored = ".";
  CheckArgs check;

  template <typename Args>
  // A subcommand with an example in its help. The callback only notes what to run.
  CLI::App* Command(const char* name, const char* what, const char* example, Args& args,
                    int (*function)(const Args&, Terminal&)) {
    CLI::App* command = app.add_subcommand(name, what);
    command->footer(std::string("Example:\n  ") + example);
    command->callback([this, &args, function] {
      run = [this, &args, function] { return function(args, terminal); };
    });
    return command;
  }
};

// Of every subcommand, before or behind its name (fallthrough).
void AddCommon(CLI::App& app, Terminal& terminal) {
  app.add_flag("--json", terminal.json, "One JSON document, or one line an item");
  app.add_flag("-q,--quiet", terminal.quiet, "Only errors and what was asked for");
  app.add_flag("-v,--verbose", terminal.verbose, "Say more on standard error");
  app.add_option_function<std::string>(
         "--log-level",
         [&terminal](const std::string& word) {
           for (const LogLevel level :
                {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
             if (CLI::detail::to_lower(std::string(LogLevelName(level))) == word) {
               terminal.log_level = level;
               return;
             }
           }
           throw CLI::ValidationError("--log-level " + word,
                                      "debug, info, warning and error are possible");
         },
         "From which level on the library's own lines are shown: debug, info, warning or error")
      ->type_name("TEXT");
}

// The same words for the same option, wherever it is.
void AddMap(CLI::App* command, std::string& map) {
  command->add_option("--map", map, "JSON file of rules that give keys other names");
}

void AddPartial(CLI::App* command, bool& partial) {
  command->add_flag("--partial", partial,
                    "Go on without what the files of a foreign checkpoint lack");
}

// One function for each group of subcommands. What is checked here are ranges of numbers; words and
// paths are the command's.
void AddMounting(Program& p) {
  CLI::App* c = p.Command("mount", "Mounts a source as a filesystem",
                          "tensormount mount STORE /mnt/ckpt && ls /mnt/ckpt/latest/tensors",
                          p.mount, RunMount);
  c->add_option("SOURCE", p.mount.source)->required();
  c->add_option("MNT", p.mount.mount_point, "An empty folder")->required();
  c->add_flag("-f,--foreground", p.mount.foreground, "Stay in the foreground");
  c->add_flag("--read-only", p.mount.read_only, "No .staging/: nothing can be written");
  c->add_flag("--views", p.mount.views, "List the other views too: npy/, slices/, zarr/, hf/, ...");
  c->add_flag("--allow-other", p.mount.allow_other, "Let other users in, as the store's modes say");
  c->add_option("--tier", p.mount.tier, "auto, passthrough or daemon")->capture_default_str();
  c->add_option("--verify", p.mount.verify, "off, first or always")->capture_default_str();
  c->add_option("--log", p.mount.log_file,
                "Append messages to this file; otherwise a daemon's go to the system's log");
  AddMap(c, p.mount.map);
  c->add_option("--hf-part-size", p.mount.hf_part_size, "Most bytes of tensors in a file of hf/")
      ->capture_default_str();
  c->add_option("--hf-rules", p.mount.hf_rules, "JSON file of rules: what hf/ has, by which names");

  c = p.Command("unmount", "Unmounts", "tensormount unmount /mnt/ckpt", p.unmount, RunUnmount);
  c->add_option("MNT", p.unmount.mount_point)->required();
  c->add_flag("--lazy", p.unmount.lazy, "Detach now, clean up when nobody uses it any more");

  c = p.Command("stats", "The counters of a mount: bytes, requests, latencies by tier, errors",
                "tensormount stats /mnt/ckpt --watch 2", p.stats, RunStats);
  c->add_option("MNT", p.stats.mount_point)->required();
  c->add_option("--watch", p.stats.watch_seconds, "Seconds after which to look again, for ever")
      ->check(CLI::Range(0.1, 86400.0));
  c->add_option("--rounds", p.stats.rounds, "With --watch: so many looks")
      ->check(CLI::Range(1, 1'000'000));
}

// --liveness and --arrival, in seconds.
void AddTimeouts(CLI::App* command, double& liveness, double& arrival) {
  command
      ->add_option("--liveness", liveness,
                   "Seconds without a sign of life after which a rank counts as dead")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  command->add_option("--arrival", arrival, "Seconds that ranks wait for one that lives")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
}

// Commands that write into stores, and load, which has the same options of ranks.
void AddSaving(Program& p) {
  CLI::App* c = p.Command("import", "Saves a source into a store, each rank writing its slices",
                          "mpirun -n 4 tensormount import model.safetensors STORE/step-0 "
                          "--shard grid:2x2",
                          p.import, RunImport);
  c->add_option("SOURCE", p.import.source)->required();
  c->add_option("STORE/NAME", p.import.destination, "The store is made on first write")->required();
  c->add_option("--shard", p.import.shard,
                "rows, cols, dim:K, grid:AxB, flat, replicate or a JSON file")
      ->capture_default_str();
  c->add_option("--ranks", p.import.ranks, "Threads to save with (1); under mpirun its ranks")
      ->check(CLI::Range(1, 4096));
  c->add_option("--placement", p.import.placement, "auto, tensor-file, rank-shard or safetensors")
      ->capture_default_str();
  c->add_option("--if-exists", p.import.if_exists, "fail or replace")->capture_default_str();
  c->add_flag("--page-hashes", p.import.page_hashes,
              "Hashes of 4 KiB as well: reads of few rows are proved by less");
  c->add_option("--reuse", p.import.reuse,
                "auto: link what the latest checkpoint holds already; off; or the name of another")
      ->capture_default_str();
  c->add_option("--full-every", p.import.full_every,
                "Of so many saves in a row one writes everything anew; 0: none")
      ->capture_default_str();
  c->add_option("--inherit", p.import.inherit,
                "A checkpoint of the store, of which everything is taken that SOURCE does not have")
      ->option_text("STORE/NAME");
  c->add_option("--retain", p.import.retain,
                "Afterwards remove what these rules do not keep, as last=3,every=1000; policy: the "
                "store's")
      ->option_text("RULES");
  c->add_flag("--ephemeral", p.import.ephemeral, "It goes when the next one is saved");
  AddMap(c, p.import.map);
  AddPartial(c, p.import.partial);
  AddTimeouts(c, p.import.liveness_seconds, p.import.arrival_seconds);

  c = p.Command("adopt",
                "Records what other programs saved as a checkpoint; the data stay in place",
                "tensormount adopt /runs/7b/iter_0001000 STORE/step-1000", p.adopt, RunAdopt);
  c->add_option("SOURCE", p.adopt.source)->required();
  c->add_option("STORE/NAME", p.adopt.destination, "The store is made on first write")->required();
  c->add_option("--if-exists", p.adopt.if_exists, "fail or replace")->capture_default_str();
  AddMap(c, p.adopt.map);
  c->add_flag("--quick", p.adopt.quick, "Read no data: without hashes, reads are not verified");
  AddPartial(c, p.adopt.partial);

  c = p.Command("derive", "Makes a checkpoint out of an old one of the same store, by hard links",
                "tensormount derive STORE/base --from STORE/step-1000 --drop 'optimizer.*' "
                "--rename 'model.*=*'",
                p.derive, RunDerive);
  c->add_option("STORE/NEW", p.derive.destination)->required();
  c->add_option("--from", p.derive.from, "The old one")->required()->option_text("STORE/OLD");
  for (const auto& [name, globs, what] :
       {std::tuple("--keep", &p.derive.keep,
                   "Only keys that match this glob, or another one given"),
        std::tuple("--drop", &p.derive.drop, "Not the keys that match this glob"),
        std::tuple("--rename", &p.derive.rename,
                   "A new key, of what is kept; each '*' of NEW is what that of OLD stood for")}) {
    c->add_option(name, *globs, what)
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->option_text(std::string(name) == "--rename" ? "OLD=NEW" : "GLOB");
  }
  AddMap(c, p.derive.map);
  c->add_option("--if-exists", p.derive.if_exists, "fail or replace")->capture_default_str();

  c = p.Command("load", "Loads every rank's slices into memory and reports",
                "tensormount load STORE/step-0 --shard cols --ranks 2 --compare model.safetensors",
                p.load, RunLoad);
  c->add_option("SOURCE", p.load.source)->required();
  c->add_option("--shard", p.load.shard,
                "rows, cols, dim:K, grid:AxB, flat, replicate or a JSON file")
      ->capture_default_str();
  c->add_option("--ranks", p.load.ranks, "Threads to load with (1); under mpirun its ranks")
      ->check(CLI::Range(1, 4096));
  c->add_option("--keys", p.load.keys, "Only keys that match this glob; '*' crosses '/'");
  c->add_option("--compare", p.load.compare,
                "Compare every byte with this source; 1 if it differs");
  AddMap(c, p.load.map);
  AddPartial(c, p.load.partial);
  AddTimeouts(c, p.load.liveness_seconds, p.load.arrival_seconds);
}

void AddExport(Program& p) {
  ExportArgs& args = p.export_;
  CLI::App* c =
      p.Command("export", "Writes a source as real files in a format of others",
                "mpirun -n 4 tensormount export STORE/step-0 model.dcp --to dcp", args, RunExport);
  c->add_option("SOURCE", args.source)->required();
  c->add_option("DEST", args.destination, "A file (safetensors, torch) or a folder")->required();
  c->add_option("--to", args.to, "safetensors, hf, npy, zarr, dcp or torch")->required();
  c->add_option("--if-exists", args.if_exists, "fail, or replace an earlier export")
      ->capture_default_str();
  AddMap(c, args.map);
  AddPartial(c, args.partial);
  c->add_option("--hf-part-size", args.hf_part_size,
                "With --to hf: most bytes of tensors in a file (5GB)");
  c->add_option("--hf-rules", args.hf_rules,
                "With --to hf: JSON file of rules: what it has, by which names");
  c->add_option("--ranks", args.ranks, "Threads to write with (1); under mpirun its ranks")
      ->check(CLI::Range(1, 4096));
  AddTimeouts(c, args.liveness_seconds, args.arrival_seconds);
}

void AddLooking(Program& p) {
  CLI::App* c = p.Command("ls", "Lists checkpoints of a store, or keys of a checkpoint",
                          "tensormount ls -l STORE/step-0 'encoder.*'", p.ls, RunLs);
  c->add_option("SOURCE", p.ls.source)->required();
  c->add_option("GLOB", p.ls.glob, "'*' crosses '/'");
  c->add_flag("--layers", p.ls.layers, "Also the names of layers of stacked tensors");
  c->add_flag("-l", p.ls.details,
              "dtype, shape, size (-v: digest, chunks, placement); of checkpoints date and size");

  c = p.Command("info", "Describes a store, a checkpoint or one tensor",
                "tensormount info STORE/step-0 encoder.weight", p.info, RunInfo);
  c->add_option("SOURCE", p.info.source)->required();
  c->add_option("KEY", p.info.key, "A tensor, a layer, an object or a common value");
  c->add_flag("--common", p.info.common, "All common values, as MNT/common.json has them");

  c = p.Command("cat", "Writes a tensor or a box of it to standard output",
                "tensormount cat STORE/step-0 'encoder.weight[0:2, :]' --as text", p.cat, RunCat);
  c->add_option("SOURCE", p.cat.source)->required();
  c->add_option("KEY[SLICE]", p.cat.key, "Also KEY@SLICE")->required();
  c->add_option("--as", p.cat.as, "raw, npy or text")->capture_default_str();

  c = p.Command("diff", "Added, removed and changed keys of two sources; 1 if there are any",
                "tensormount diff STORE/step-0 STORE/step-100 --values", p.diff, RunDiff);
  c->add_option("SOURCE1", p.diff.first)->required();
  c->add_option("SOURCE2", p.diff.second)->required();
  c->add_flag("--values", p.diff.values, "How many elements differ, and how far");
  c->add_option("--keys", p.diff.keys, "Only keys that match this glob; '*' crosses '/'");
  AddMap(c, p.diff.map);

  c = p.Command("layout", "Draws which rank's chunk holds which box of a tensor",
                "tensormount layout STORE/step-0 encoder.weight --svg encoder.svg", p.layout,
                RunLayout);
  c->add_option("SOURCE", p.layout.source)->required();
  c->add_option("KEY", p.layout.key, "Also the name of a layer")->required();
  c->add_option("--svg", p.layout.svg, "Write the picture to this file; - is standard output");
  c->add_option("--html", p.layout.html, "Write a report to this file, readable on its own");

  c = p.Command("verify", "Checks every hash; names tensor, box and file of each damage",
                "tensormount verify STORE/step-0", p.verify, RunVerify);
  c->add_option("SOURCE", p.verify.source)->required();
  c->add_flag("--quick", p.verify.quick, "Commit record, lengths and index only");
  AddPartial(c, p.verify.partial);

  c = p.Command("check", "Checks a described job: missing and doubled boxes, without any data",
                "tensormount check job.json", p.check, RunCheck);
  c->add_option("SPEC.json", p.check.spec, "docs/spec.md says how it is written")->required();
  c->add_option("--limit", p.check.limit, "Findings listed; all are counted")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();

  c = p.Command("doctor", "What this machine offers, what is missing and how to get it",
                "tensormount doctor --dir /checkpoints", p.doctored, RunDoctor);
  c->add_option("--dir", p.doctored, "Whose filesystem to try")->capture_default_str();
}

void AddLifecycle(Program& p) {
  CLI::App* c = p.Command("init", "Makes an empty store, to be mounted and saved into",
                          "tensormount init STORE", p.new_store, RunInit);
  c->add_option("STORE", p.new_store)->required();

  c = p.Command("rm", "Removes checkpoints; gc frees their space", "tensormount rm STORE/step-0",
                p.rm, RunRm);
  c->add_option("STORE/NAME", p.rm.checkpoints)->required();
  c->add_flag("--dry-run", p.rm.dry_run, "Only say what would go");
  c->add_flag("--force", p.rm.force, "Also what is pinned");

  c = p.Command("prune", "Removes the checkpoints that no rule keeps, and frees their space",
                "tensormount prune STORE --keep-last 3 --keep-every 1000 --dry-run", p.prune,
                RunPrune);
  c->add_option("STORE", p.prune.store)->required();
  c->add_option("--keep-last", p.prune.keep_last, "The N newest")->option_text("N");
  c->add_option(
       "--keep-every", p.prune.keep_every,
       "Steps (the last number of a name) that are multiples of M; Mh: the newest of every "
       "M hours; M-generations. May be given several times")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->option_text("M");
  c->add_option(
       "--match", p.prune.match,
       "Only checkpoints of these names (\"runA-*\"): all others stay and count for nothing")
      ->option_text("NAMES");
  c->add_option("--keep-best", p.prune.keep_best,
                "The K with the highest or lowest value of the common state. May be given several "
                "times")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->option_text("METRIC:max|min:K");
  c->add_option("--rules", p.prune.rules, "All rules in one text, as import --retain takes them")
      ->option_text("RULES");
  CLI::Option* const alone[] = {
      c->add_flag("--dry-run", p.prune.dry_run, "Only say what would go and stay, and why"),
      c->add_flag("--set-policy", p.prune.set_policy,
                  "Remove nothing: these are the store's rules from now on, which `prune STORE` "
                  "uses"),
      c->add_flag("--show-policy", p.prune.show_policy, "Remove nothing: print the store's rules"),
      c->add_flag("--clear-policy", p.prune.clear_policy,
                  "Remove nothing: the store has no rules any more")};
  for (CLI::Option* const one : alone) {
    for (CLI::Option* const other : alone) {
      if (one != other) one->excludes(other);
    }
  }

  c = p.Command("pin", "Keeps a checkpoint from rules and from rm; lists the pins of a STORE",
                "tensormount pin STORE/step-0 --reason 'in the paper' --expires 90d", p.pin,
                RunPin);
  c->add_option("STORE/NAME", p.pin.checkpoint)->required();
  c->add_option("--reason", p.pin.reason, "For people");
  c->add_option("--expires", p.pin.expires,
                "From when on it is not held: 90d, 12h, 2027-01-31, 2027-01-31T12:00Z")
      ->option_text("WHEN");
  c = p.Command("unpin", "Takes the pin of a checkpoint away", "tensormount unpin STORE/step-0",
                p.unpinned, RunUnpin);
  c->add_option("STORE/NAME", p.unpinned)->required();

  c = p.Command("copy", "Copies checkpoints to another store, linking what it has already",
                "tensormount copy STORE/step-1000 /backup/STORE --limit-rate 200MB", p.copy,
                RunCopy);
  c->add_option("STORE/NAME... OTHER", p.copy.paths,
                "Checkpoints, or a STORE for all of its; at the end the store to copy them to")
      ->required()
      ->expected(2, CLI::detail::expected_max_vector_size);
  c->add_option("--limit-rate", p.copy.limit_rate, "Most bytes a second that are read, as 200MB");

  c = p.Command("repair", "Makes damaged files of a checkpoint whole out of another checkpoint",
                "tensormount repair STORE/step-1000 --from /backup/STORE/step-1000", p.repair,
                RunRepair);
  c->add_option("STORE/NAME", p.repair.checkpoint)->required();
  c->add_option("--from", p.repair.from,
                "A checkpoint that holds the same tensors: a copy, one that was cut otherwise, or "
                "one of another program; of a STORE that of the same name")
      ->required()
      ->option_text("SOURCE");
  c->add_flag("--dry-run", p.repair.dry_run, "Only say what is damaged and what SOURCE can repair");

  c = p.Command("gc", "Frees what was removed or left behind", "tensormount gc STORE", p.gc, RunGc);
  c->add_option("STORE", p.gc.store)->required();
  c->add_flag("--dry-run", p.gc.dry_run, "Only say what would go");
  c->add_option("--grace", p.gc.grace_seconds,
                "Seconds that removed checkpoints are kept; where there are no file locks, more "
                "than the longest read takes")
      ->check(CLI::Range(0.0, 1e9))
      ->default_str("60");
  c->add_option("--staging-age", p.gc.staging_age_seconds,
                "Seconds after which an untouched staging counts as abandoned")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();

  c = p.Command("fsck", "Checks a store as a whole; says what it would repair",
                "tensormount fsck STORE --rebuild", p.fsck, RunFsck);
  c->add_option("STORE", p.fsck.store)->required();
  c->add_flag("--rebuild", p.fsck.rebuild, "Repair");
  c->add_flag("--read-data", p.fsck.read_data, "Check every hash of every checkpoint too");

  c = p.Command("publish", "Publishes what mounts wrote, or says what is missing",
                "tensormount publish STORE/.staging/step-2000 --wait 60", p.publish, RunPublish);
  c->add_option("STAGING", p.publish.staging, "STORE/.staging/NAME")->required();
  c->add_option("--as", p.publish.as, "Name of the checkpoint; NAME where it is not given");
  c->add_option("--wait", p.publish.wait_seconds,
                "Seconds to wait for done marks and for open files")
      ->check(CLI::Range(0.0, 1e9));
}

// --root and --file, of every command that opens sources.
// Added last, by name: it is a property of the terminal, since opening a source asks it for all
// that the user said about sources.
void AddRoots(Program& p) {
  static constexpr const char* kOpening[] = {"mount", "load", "import", "ls",     "info",
                                             "cat",   "diff", "layout", "export", "verify",
                                             "adopt", "fsck", "prune"};
  for (const char* name : kOpening) {
    CLI::App* command = p.app.get_subcommand(name);
    if (command->get_group() == kNotBuiltGroup) continue;
    command
        ->add_option("--root", p.terminal.roots,
                     "A folder that data and links of the source may lead to, where they lead out "
                     "of it; may be given several times")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->option_text("DIR");
    if (std::string_view(name) == "fsck" || std::string_view(name) == "prune") continue;
    command
        ->add_option("--file", p.terminal.file,
                     "The file or index to read of a source that is a folder with several sets of "
                     "weights: the same as SOURCE/NAME")
        ->expected(1)
        ->option_text("NAME");
  }
}

void AddNotBuilt(Program& p) {
  for (const auto& [name, what] : kNotBuilt) {
    CLI::App* c = p.app.add_subcommand(name, std::string(what) + " (not built yet)");
    c->group(kNotBuiltGroup);
    c->fallthrough(false);
    // Otherwise an unknown option would be the error instead.
    c->prefix_command();  // Whatever follows is not looked at.
    const std::string command = name;
    c->callback([&p, command] {
      p.run = [&p, command] {
        return p.terminal.Fail(
            Status(Code::kUnsupported, fmt::format("{}: this command is not built yet", command)));
      };
    });
  }
}

// mount(8) calls `mount.tensormount SOURCE MNT [-sfnvrw] [-N ns] [-t type] [-o opt,opt=value]`;
// options are our long ones without dashes, and those that mount(8) itself understands are dropped.
// Turns them into the words of our `mount`; `fake` is set by -f: look at the arguments, mount
// nothing. Example: SOURCE MNT -o rw,noatime,views,hf-part-size=1GB becomes mount SOURCE MNT
// --views --hf-part-size=1GB. What begins with "x-" is systemd's and fstab's.
std::vector<std::string> FromMountHelper(int argc, const char* const* argv, const CLI::App& mount,
                                         bool* fake) {
  // Options that mount(8) passes on though they are for the kernel or for itself. A mount of ours
  // is nosuid and nodev anyway (FUSE), and atime is never written.
  static constexpr std::string_view kGeneric[] = {
      "defaults",     "auto",       "noauto",      "user",       "nouser", "users",
      "owner",        "group",      "_netdev",     "_rnetdev",   "nofail", "exec",
      "noexec",       "suid",       "nosuid",      "dev",        "nodev",  "atime",
      "noatime",      "relatime",   "norelatime",  "sync",       "async",  "dirsync",
      "strictatime",  "nodiratime", "lazytime",    "nolazytime", "silent", "loud",
      "iversion",     "noiversion", "nosymfollow", "mand",       "nomand", "diratime",
      "nostrictatime"};
  std::vector<std::string> words = {"mount"};
  *fake = false;
  bool read_only = false;
  bool sloppy = false;  // -s: options that nobody knows are no error.
  std::vector<std::string> options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "-o" && i + 1 < argc) {
      std::string_view rest = argv[++i];
      while (!rest.empty()) {
        const std::size_t comma = rest.find(',');
        const std::string_view option = rest.substr(0, comma);
        rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
        const std::string_view name = option.substr(0, option.find('='));
        if (option == "ro" || option == "rw") {
          read_only = option == "ro";  // The last one holds.
          continue;
        }
        const bool generic =
            option.empty() || option.starts_with("x-") || option.starts_with("X-") ||
            option.starts_with("comment=") ||
            std::find(std::begin(kGeneric), std::end(kGeneric), name) != std::end(kGeneric);
        // fuse's own spelling of --allow-other is what people have in their fstab.
        if (!generic) options.emplace_back(option == "allow_other" ? "allow-other" : option);
      }
    } else if ((arg == "-t" || arg == "-N") && i + 1 < argc) {
      ++i;
    } else if (arg.starts_with('-') && arg.size() > 1 && !arg.starts_with("--")) {
      for (const char letter : arg.substr(1)) {
        if (letter == 'r' || letter == 'w') read_only = letter == 'r';
        sloppy = sloppy || letter == 's';
        *fake = *fake || letter == 'f';
      }
    } else {
      words.emplace_back(arg);
    }
  }
  // After all arguments were seen, because -s may come last.
  for (const std::string& option : options) {
    const std::string flag = "--" + option.substr(0, option.find('='));
    if (!sloppy || mount.get_option_no_throw(flag) != nullptr) words.push_back("--" + option);
  }
  if (read_only) words.emplace_back("--read-only");
  return words;
}

// A variable of a shell that was never set is no value: `prune --keep-last "$N"` must not do
// without that rule. A reason may be empty.
void CheckNothingIsEmpty(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    for (const CLI::Option* option : command->get_options()) {
      // Of the words without a name each command says itself what they must be.
      if (option->get_positional() || option->get_name() == "--reason") continue;
      for (const std::string& value : option->results()) {
        if (value.empty()) throw CLI::ValidationError(option->get_name(), "its value is empty");
      }
    }
    CheckNothingIsEmpty(*command);
  }
}

// "--name=" takes the next word for its value.
void CheckNoWordEnds(std::span<const std::string> words) {
  for (const std::string& word : words) {
    if (word == "--") return;
    if (word.starts_with("--") && word.find('=') == word.size() - 1) {
      throw CLI::ValidationError(word, "its value is empty");
    }
  }
}

// The error line of words that are no command line of ours, with what was probably meant.
int FailToParse(const CLI::App& app, const CLI::ParseError& error, int argc,
                const char* const* argv, Terminal& terminal) {
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  const CLI::App* command = nullptr;
  std::string_view unknown_command;
  for (int i = 1; i < argc && command == nullptr && unknown_command.empty(); ++i) {
    const std::string_view word = argv[i];
    if (word.starts_with('-')) {
      const CLI::Option* known = app.get_option_no_throw(std::string(word));
      if (known != nullptr && known->get_items_expected_max() > 0) ++i;  // Its value.
      continue;
    }
    const auto at =
        std::ranges::find(commands, word, [](const CLI::App* c) { return c->get_name(); });
    if (at == commands.end()) {
      unknown_command = word;
    } else {
      command = *at;
    }
  }
  if (!unknown_command.empty()) {
    Nearest nearest(unknown_command);
    for (const CLI::App* known : commands) nearest.Offer(known->get_name());
    return terminal.Fail(
        Status(Code::kInvalidArgument, fmt::format("{}: no such command", unknown_command)),
        nearest.best().empty()
            ? "`tensormount --help` lists the commands"
            : fmt::format("did you mean `tensormount {}`? `tensormount --help` lists the commands",
                          nearest.best()));
  }
  const CLI::App& here = command == nullptr ? app : *command;
  const std::string help =
      command == nullptr
          ? "`tensormount --help` lists the commands"
          : fmt::format("`tensormount {} --help` lists its options", here.get_name());
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const std::string option(word.substr(0, word.find('=')));
    if (!option.starts_with("--") || option.size() < 3) continue;
    if (here.get_option_no_throw(option) != nullptr || app.get_option_no_throw(option) != nullptr) {
      continue;
    }
    Nearest nearest(option);
    for (const CLI::App* of : {&here, &app}) {
      for (const CLI::Option* known : of->get_options()) {
        for (const std::string& text : known->get_lnames()) nearest.Offer("--" + text);
      }
    }
    return terminal.Fail(
        Status(Code::kInvalidArgument,
               fmt::format("{}: {} has no such option", option, here.get_name())),
        nearest.best().empty() ? help : fmt::format("did you mean {}? {}", nearest.best(), help));
  }
  return terminal.Fail(
      Status(Code::kInvalidArgument,
             command != nullptr ? fmt::format("{}: {}", here.get_name(), error.what())
             : error.get_name() == "RequiredError" ? std::string("no command was given")
                                                   : std::string(error.what())),
      help);
}

// Declares, parses, runs.
int Run(int argc, const char* const* argv) {
  Program program;
  CLI::App& app = program.app;
  app.formatter(MakeHelpFormatter());
  app.set_version_flag("--version", kVersion);
  // Exactly one; none is an error with the hint to --help.
  app.require_subcommand(1);
  app.fallthrough();
  AddCommon(app, program.terminal);
  AddMounting(program);
  AddSaving(program);
  AddExport(program);
  AddLooking(program);
  AddLifecycle(program);
  AddNotBuilt(program);
  AddRoots(program);

  const std::string_view self = argc > 0 ? argv[0] : "";
  try {
    if (self.substr(self.rfind('/') + 1) == "mount.tensormount") {
      bool fake = false;
      const auto words = FromMountHelper(argc, argv, *app.get_subcommand("mount"), &fake);
      CheckNoWordEnds(words);
      // CLI11 wants them in reverse order.
      app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
      CheckNothingIsEmpty(app);
      // mount -f: only the arguments are checked.
      if (fake) return kDone;
    } else {
      CheckNoWordEnds(std::vector<std::string>(argv + std::min(argc, 1), argv + argc));
      app.parse(argc, argv);
      CheckNothingIsEmpty(app);
    }
  } catch (const CLI::ParseError& error) {
    // CLI11 ends --help and --version with an exception, too.
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version.
    // Not parsed yet, perhaps.
    for (int i = 1; i < argc; ++i) program.terminal.json |= std::string_view(argv[i]) == "--json";
    return FailToParse(app, error, argc, argv, program.terminal);
  }
  if (program.terminal.log_level) SetLogLevel(*program.terminal.log_level);
  return program.run();
}

}  // namespace

int Main(int argc, const char* const* argv) {
  // The one place that turns exceptions of libraries into an error line.
  try {
    return Run(argc, argv);
  } catch (const std::bad_alloc&) {
    Terminal terminal;
    return terminal.Fail(Status(Code::kResourceExhausted, "out of memory"));
  } catch (const std::exception& error) {
    Terminal terminal;
    return terminal.Fail(Status(Code::kInternal, error.what()));
  }
}

}  // namespace tensormount::tools
