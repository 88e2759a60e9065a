// SPDX-License-Identifier: Apache-2.0
// The command line (cli.h): options and help of every subcommand, and errors of parsing. Only this
// file and help.cc use CLI11. All options are declared first, with defaults from the argument
// structures. Then CLI11 parses, and the callback of the subcommand sets `run`, which is called
// after the parser has returned, so that an exception of the parser never comes from a command.
#include "mount-tools/cli.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include "mount-tools/cache_options.h"
#include "mount-tools/commands.h"
#include "mount-tools/help.h"
#include "mount-tools/nearest.h"

namespace tensormount::tools {
namespace {

// The output of --version. The number must equal the project version in CMakeLists.txt.
constexpr const char* kVersion = "tensormount 0.1.0";

// Commands that are planned but not implemented. They return 2 with kUnsupported, so that scripts
// can distinguish them from a mistyped name.
constexpr std::pair<const char*, const char*> kNotBuilt[] = {
    {"compact", "Converts rank shards into tensor files"},
};

constexpr const char* kNotBuiltGroup = "Not implemented yet";

// Descriptions of positional arguments that several commands share.
constexpr const char* kSource = "Store, checkpoint, or checkpoint of another program";
constexpr const char* kStore = "Store directory";

// The options and arguments of the program. It must outlive the parsing, because CLI11 stores the
// values in its members.
struct Program {
  CLI::App app{
      "Mounts, saves, loads and checks checkpoints of distributed training.\n"
      "SOURCE is a checkpoint (STORE/step-1000), a STORE, a checkpoint of another program (a "
      "directory or file in a format of docs/formats-adopted.md), or a training directory of such "
      "checkpoints.",
      "tensormount"};
  Terminal terminal;
  std::function<int()> run;  // Runs the subcommand; set while parsing.

  // The arguments of all subcommands. Only those of the subcommand on the command line are used.
  ImportArgs import;
  ExportArgs export_;
  LoadArgs load;
  LsArgs ls;
  InfoArgs info;
  CatArgs cat;
  std::string new_store;
  DiffArgs diff;
  LogArgs log;
  BlameArgs blame;
  WatchArgs watch;
  LayoutArgs layout;
  VerifyArgs verify;
  AdoptArgs adopt;
  DeriveArgs derive;
  MapArgs map;
  MountArgs mount;
  UnmountArgs unmount;
  StatsArgs stats;
  RmArgs rm;
  PruneArgs prune;
  PinArgs pin;
  std::string unpin_checkpoint;
  CopyArgs copy;
  RepairArgs repair;
  GcArgs gc;
  FsckArgs fsck;
  PublishArgs publish;
  std::string doctor_directory = ".";
  CheckArgs check;

  template <typename Args>
  // Adds a subcommand with an example in its help. Its callback only sets `run`.
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

// Adds the options that all subcommands have. They may stand before or after the subcommand's name.
void AddCommon(CLI::App& app, Terminal& terminal) {
  app.add_flag("--json", terminal.json, "Print one JSON document, or one JSON line per item");
  app.add_flag("-q,--quiet", terminal.quiet, "Print only errors and the requested output");
  app.add_flag("-v,--verbose", terminal.verbose, "Print more on standard error");
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
                                      "must be debug, info, warning or error");
         },
         "Lowest level of library log messages to print: debug, info, warning or error")
      ->type_name("TEXT");
}

// Adds --map, with the same help text for all commands.
void AddMap(CLI::App* command, std::string& map) {
  command->add_option("--map", map, "JSON file of rules that rename or drop keys");
}

void AddNames(CLI::App* command, NameMapArgs& map) {
  command
      ->add_option("--as", map.as,
                   "Names that the result has, by rules of the library: hf, hf:FAMILY, or "
                   "LAYOUT:FAMILY; after --map")
      ->option_text("NAME");
  command->add_option("--experts", map.experts, "With --as: experts in one tensor, or one each")
      ->check(CLI::IsMember({"fused", "split"}))
      ->option_text("fused|split");
  command
      ->add_option("--from", map.from, "With --as: the layout of the source, if its keys fit two")
      ->option_text("LAYOUT");
  command
      ->add_option(
          "--with", map.with,
          "Directory of a model: its config.json has numbers that rules use, and hf/ has its "
          "configuration and tokenizer")
      ->option_text("DIR");
  command->add_option("--set", map.numbers, "A size that the rules use; may be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->option_text("NAME=NUMBER");
}

void AddMap(CLI::App* command, NameMapArgs& map) {
  command->add_option("--map", map.rules,
                      "JSON file of rules that rename, split and join tensors (docs/mapping.md)");
  AddNames(command, map);
}

void AddPartial(CLI::App* command, bool& partial) {
  command->add_flag("--partial", partial,
                    "Continue when a foreign checkpoint has missing data; missing tensors are left "
                    "out and reported");
}

// Adds the subcommands for mounts. Only ranges of numbers are checked here; the commands check
// texts and paths.
void AddMountCommands(Program& p) {
  CLI::App* c = p.Command("mount", "Mounts a store or a checkpoint as a filesystem",
                          "tensormount mount STORE /mnt/ckpt && ls /mnt/ckpt/latest/tensors",
                          p.mount, RunMount);
  c->add_option("SOURCE", p.mount.source, kSource)->required();
  c->add_option("MNT", p.mount.mount_point, "An empty directory")->required();
  c->add_flag("-f,--foreground", p.mount.foreground, "Stay in the foreground");
  c->add_flag("--read-only", p.mount.read_only, "Mount read-only: no .staging/, no saves");
  c->add_flag("--views", p.mount.views,
              "Also list npy/, slices/, zarr/, hf/ and the other views (without this option they "
              "open by name only)");
  c->add_flag("--allow-other", p.mount.allow_other,
              "Allow access by other users, limited by the store's modes");
  c->add_option(
       "--tier", p.mount.tier,
       "Who reads the files, the kernel (passthrough) or the daemon: auto, passthrough or daemon")
      ->capture_default_str();
  c->add_option("--verify", p.mount.verify,
                "When bytes are compared with their hashes (first: when they are first read): off, "
                "first or always")
      ->capture_default_str();
  c->add_option(
      "--log", p.mount.log_file,
      "Append log messages to this file (default: the system log, or standard error with -f)");
  AddMap(c, p.mount.map);
  c->add_option("--hf-part-size", p.mount.hf_part_size,
                "Largest number of bytes of tensors in one file of hf/")
      ->capture_default_str();
  c->add_option("--hf-rules", p.mount.hf_rules,
                "JSON file of rules that select and rename the tensors in hf/");

  c = p.Command("unmount", "Unmounts a mount of tensormount", "tensormount unmount /mnt/ckpt",
                p.unmount, RunUnmount);
  c->add_option("MNT", p.unmount.mount_point, "Mount point")->required();
  c->add_flag("--lazy", p.unmount.lazy,
              "Detach now; clean up when no process uses the mount any more");

  c = p.Command(
      "stats",
      "Prints the counters of a mount: bytes, requests, latencies by tier, errors; or with "
      "--full statistics of tensors: mean, norm, smallest, largest, zeros, NaN",
      "tensormount stats /mnt/ckpt --watch 2", p.stats, RunStats);
  c->add_option("MNT|SOURCE", p.stats.source, "Mount point; with --full a source, as for ls")
      ->required();
  CLI::Option* const watch =
      c->add_option("--watch", p.stats.watch_seconds,
                    "Print rates at this interval, in seconds, until interrupted")
          ->check(CLI::Range(0.1, 86400.0));
  c->add_option("--rounds", p.stats.rounds, "With --watch: end after this many rounds")
      ->check(CLI::Range(1, 1'000'000));
  CLI::Option* const full =
      c->add_flag("--full", p.stats.full,
                  "Read all values of SOURCE, and print statistics of each tensor")
          ->excludes(watch);
  c->add_option("--keys", p.stats.keys,
                "With --full: only keys that match this glob; '*' also matches '/'")
      ->needs(full);
  c->add_option("--sort", p.stats.sort,
                "With --full: the column to sort by: count, zeros, subnormals, nan, inf, min, max, "
                "absmax, mean, norm")
      ->needs(full)
      ->option_text("COLUMN");
  c->add_flag("--no-keep", p.stats.no_keep,
              "With --full: neither use nor store results beside the checkpoint")
      ->needs(full);
}

// Adds --liveness and --arrival, in seconds.
void AddTimeouts(CLI::App* command, double& liveness, double& arrival) {
  command
      ->add_option("--liveness", liveness,
                   "Seconds without a heartbeat after which a rank counts as dead")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  command
      ->add_option("--arrival", arrival,
                   "Seconds to wait for a rank that is alive but does not arrive")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
}

// Adds import, adopt, derive and load.
void AddSaveCommands(Program& p) {
  CLI::App* c =
      p.Command("import", "Saves a source as a checkpoint of a store; each rank writes its slices",
                "mpirun -n 4 tensormount import model.safetensors STORE/step-0 "
                "--shard grid:2x2",
                p.import, RunImport);
  c->add_option("SOURCE", p.import.source, kSource)->required();
  c->add_option("STORE/NAME", p.import.destination,
                "New checkpoint; the store is created if it does not exist")
      ->required();
  c->add_option("--shard", p.import.shard,
                "How tensors are sharded: rows, cols, dim:K, grid:AxB, flat, replicate, or a JSON "
                "file of rules")
      ->capture_default_str();
  c->add_option(
       "--ranks", p.import.ranks,
       "Number of ranks, as threads of this process (1); under mpirun the ranks are those of MPI")
      ->check(CLI::Range(1, 4096));
  c->add_option("--placement", p.import.placement,
                "Layout of the data files: auto, tensor-file, rank-shard or safetensors")
      ->capture_default_str();
  c->add_option("--if-exists", p.import.if_exists, "If the checkpoint exists: fail or replace")
      ->capture_default_str();
  c->add_flag("--page-hashes", p.import.page_hashes,
              "Also write hashes of 4 KiB pages, so that reads of few rows verify less data");
  c->add_option("--statistics", p.import.statistics,
                "basic: count zeros, NaNs and infinities of each tensor while it is saved; or off")
      ->capture_default_str();
  c->add_option("--nonfinite", p.import.nonfinite,
                "If a tensor has NaNs or infinities: allow, warn, or refuse to save")
      ->capture_default_str();
  c->add_option("--nonfinite-exempt", p.import.nonfinite_exempt,
                "Glob of tensors that may have NaNs and infinities; may be repeated")
      ->option_text("GLOB");
  c->add_option("--reuse", p.import.reuse,
                "Hard-link unchanged data of an earlier checkpoint: auto (the latest), off, or the "
                "name of a checkpoint")
      ->capture_default_str();
  c->add_option(
       "--writers", p.import.writers,
       "Threads of a rank that read, hash and write, each into files of its own; 0: as many "
       "as there are cores for each rank, at most 8")
      ->check(CLI::Range(0, 16));
  c->add_option("--full-every", p.import.full_every,
                "Write all data, and link none, in one of this many successive saves; 0: never")
      ->capture_default_str();
  c->add_option("--inherit", p.import.inherit,
                "Take everything that SOURCE does not have from this checkpoint of the store")
      ->option_text("STORE/NAME");
  c->add_option("--retain", p.import.retain,
                "After the save, remove the checkpoints that these rules do not keep "
                "(last=3,every=1000); policy: use the store's rules")
      ->option_text("RULES");
  c->add_flag("--ephemeral", p.import.ephemeral,
              "Mark the checkpoint temporary: the next save removes it");
  c->add_option("--staging", p.import.staging,
                "For s3://: save to this directory, which all ranks see, and copy from there into "
                "the bucket (default: $TENSORMOUNT_STAGING)")
      ->option_text("DIR");
  AddMap(c, p.import.map);
  AddPartial(c, p.import.partial);
  AddTimeouts(c, p.import.liveness_seconds, p.import.arrival_seconds);

  c = p.Command("adopt",
                "Records a checkpoint of another program in a store; the data stay in place",
                "tensormount adopt /runs/7b/iter_0001000 STORE/step-1000", p.adopt, RunAdopt);
  c->add_option("SOURCE", p.adopt.source,
                "Checkpoint of another program (directory or file), or a training directory")
      ->required();
  c->add_option("STORE/NAME", p.adopt.destination,
                "New checkpoint; the store is created if it does not exist")
      ->required();
  c->add_option("--if-exists", p.adopt.if_exists, "If the checkpoint exists: fail or replace")
      ->capture_default_str();
  AddMap(c, p.adopt.map);
  c->add_flag("--quick", p.adopt.quick,
              "Do not read the data; without hashes later reads are not verified");
  AddPartial(c, p.adopt.partial);

  c = p.Command("derive", "Makes a new checkpoint from an old one of the same store, by hard links",
                "tensormount derive STORE/base --from STORE/step-1000 --drop 'optimizer.*' "
                "--rename 'model.*=*'",
                p.derive, RunDerive);
  c->add_option("STORE/NEW", p.derive.destination, "New checkpoint")->required();
  c->add_option("--from", p.derive.from, "The old checkpoint")
      ->required()
      ->option_text("STORE/OLD");
  for (const auto& [name, globs, what] :
       {std::tuple("--keep", &p.derive.keep,
                   "Keep only keys that match this glob; may be repeated"),
        std::tuple("--drop", &p.derive.drop, "Drop the keys that match this glob; may be repeated"),
        std::tuple("--rename", &p.derive.rename,
                   "Rename kept keys; each '*' of NEW stands for the text that the '*' of OLD "
                   "matched. May be repeated")}) {
    c->add_option(name, *globs, what)
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->option_text(std::string(name) == "--rename" ? "OLD=NEW" : "GLOB");
  }
  AddMap(c, p.derive.map);
  c->add_option("--if-exists", p.derive.if_exists, "If the checkpoint exists: fail or replace")
      ->capture_default_str();

  c = p.Command("map",
                "Shows the tensors that a name map makes of a checkpoint, without reading data",
                "tensormount map check rules.json STORE/step-0 --set heads=32", p.map, RunMap);
  c->add_option("check", p.map.action, "What to do: check")
      ->required()
      ->check(CLI::IsMember({"check"}));
  c->add_option("RULES", p.map.map.rules,
                "JSON file of rules (docs/mapping.md), or a name as of --as")
      ->required();
  c->add_option("SOURCE", p.map.source, kSource)->required();
  AddNames(c, p.map.map);

  c = p.Command("load", "Loads each rank's slices into memory and reports bytes, time and memory",
                "tensormount load STORE/step-0 --shard cols --ranks 2 --compare model.safetensors",
                p.load, RunLoad);
  c->add_option("SOURCE", p.load.source, kSource)->required();
  c->add_option("--shard", p.load.shard,
                "How tensors are sharded: rows, cols, dim:K, grid:AxB, flat, replicate, or a JSON "
                "file of rules")
      ->capture_default_str();
  c->add_option(
       "--ranks", p.load.ranks,
       "Number of ranks, as threads of this process (1); under mpirun the ranks are those of MPI")
      ->check(CLI::Range(1, 4096));
  c->add_option("--keys", p.load.keys, "Only keys that match this glob; '*' also matches '/'");
  c->add_option("--compare", p.load.compare,
                "Compare every byte with this source; exit status 1 if they differ");
  AddMap(c, p.load.map);
  AddPartial(c, p.load.partial);
  AddTimeouts(c, p.load.liveness_seconds, p.load.arrival_seconds);
}

void AddExport(Program& p) {
  ExportArgs& args = p.export_;
  CLI::App* c = p.Command(
      "export", "Exports a checkpoint to another format (safetensors, HF, torch, DCP, zarr, npy)",
      "mpirun -n 4 tensormount export STORE/step-0 model.dcp --to dcp", args, RunExport);
  c->add_option("SOURCE", args.source, kSource)->required();
  c->add_option("DEST", args.destination, "A file (safetensors, torch) or a directory")->required();
  c->add_option("--to", args.to,
                "Output format: safetensors, hf, npy, zarr, dcp, torch or torch_dist")
      ->required();
  c->add_option("--if-exists", args.if_exists,
                "If DEST exists (replace: only an earlier export of this format): fail or replace")
      ->capture_default_str();
  AddMap(c, args.map);
  AddPartial(c, args.partial);
  c->add_option("--hf-part-size", args.hf_part_size,
                "With --to hf: largest number of bytes of tensors in one file (5GB)");
  c->add_option("--hf-rules", args.hf_rules,
                "With --to hf: JSON file of rules that select and rename the tensors");
  c->add_option(
       "--ranks", args.ranks,
       "Number of ranks, as threads of this process (1); under mpirun the ranks are those of MPI")
      ->check(CLI::Range(1, 4096));
  AddTimeouts(c, args.liveness_seconds, args.arrival_seconds);
}

void AddInspectCommands(Program& p) {
  CLI::App* c = p.Command("ls", "Lists the checkpoints of a store, or the keys of a checkpoint",
                          "tensormount ls -l STORE/step-0 'encoder.*'", p.ls, RunLs);
  c->add_option("SOURCE", p.ls.source, kSource)->required();
  c->add_option("GLOB", p.ls.glob, "Only keys that match; '*' also matches '/'");
  c->add_flag("--layers", p.ls.layers, "Also list the layers of stacked tensors");
  c->add_flag(
      "--stats", p.ls.stats,
      "Zeros, NaNs, infinities and largest magnitude of each tensor, as counted by the save");
  c->add_option("--where", p.ls.where,
                "Only tensors for which this holds: 'nan > 0', 'absmax >= 1e4 and key ~ \"*.wq\"'; "
                "exit status 1 if there is none")
      ->option_text("CONDITION");
  c->add_flag("-l", p.ls.details,
              "Long format: dtype, shape, size (with -v digest, chunks, placement); for "
              "checkpoints date and size");

  c = p.Command("info", "Describes a store, a checkpoint or one tensor",
                "tensormount info STORE/step-0 encoder.weight", p.info, RunInfo);
  c->add_option("SOURCE", p.info.source, kSource)->required();
  c->add_option("KEY", p.info.key, "Key of a tensor, a layer, an object or a common value");
  c->add_flag("--common", p.info.common, "Print all common values in full, as in MNT/common.json");

  c = p.Command("cat", "Writes a tensor or a box of it to standard output",
                "tensormount cat STORE/step-0 'encoder.weight[0:2, :]' --as text", p.cat, RunCat);
  c->add_option("SOURCE", p.cat.source, kSource)->required();
  c->add_option("KEY[SLICE]", p.cat.key,
                "Key, with an optional slice such as [0:2, :]; KEY@SLICE means the same")
      ->required();
  c->add_option("--as", p.cat.as, "Output format: raw, npy or text")->capture_default_str();

  c = p.Command(
      "diff", "Compares two sources: added, removed and changed keys; exit status 1 if they differ",
      "tensormount diff STORE/step-0 STORE/step-100 --values", p.diff, RunDiff);
  c->add_option("SOURCE1", p.diff.first, kSource)->required();
  c->add_option("SOURCE2", p.diff.second, kSource)->required();
  CLI::Option* const values =
      c->add_flag("--values", p.diff.values, "Report how many elements differ, and by how much");
  CLI::Option* const stats =
      c->add_flag("--stats", p.diff.stats,
                  "Print a table of how far each tensor changed: share of its values, largest and "
                  "mean change, relative L2 change, cosine")
          ->excludes(values);
  c->add_option("--sort", p.diff.sort,
                "With --stats: the column to sort by: changed, max, mean, l2, cosine, nonfinite")
      ->needs(stats)
      ->option_text("COLUMN");
  c->add_option("--keys", p.diff.keys, "Only keys that match this glob; '*' also matches '/'");
  AddMap(c, p.diff.map);

  c = p.Command("log", "Lists the steps of a store, or the steps at which a tensor changed",
                "tensormount log STORE -n 20 --show loss,lr", p.log, RunLog);
  c->add_option("STORE", p.log.store, kStore)->required();
  c->add_option("KEY", p.log.key,
                "Key of a tensor or object, or a glob: print when it changed, by digest");
  c->add_option("-n", p.log.limit, "Only the newest N lines; with KEY, the last N changes")
      ->check(CLI::Range(1, std::numeric_limits<int>::max()))
      ->option_text("N");
  c->add_option("--show", p.log.show,
                "Also print these common values, such as loss,optimizer.lr. May be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->option_text("PATHS");
  c->add_flag("--reverse", p.log.reverse, "Print the oldest first");

  c = p.Command("blame", "Prints the step at which a tensor changed last, without reading data",
                "tensormount blame STORE encoder.weight", p.blame, RunBlame);
  c->add_option("STORE", p.blame.store, kStore)->required();
  c->add_option("KEY", p.blame.key,
                "Key of a tensor or object, or a glob of keys; '*' also matches '/'")
      ->required();

  c = p.Command("watch",
                "Waits for checkpoints that are published, and prints a line or runs a command for "
                "each",
                "tensormount watch STORE --exec python3 evaluate.py {}", p.watch, RunWatch);
  c->add_option("STORE", p.watch.store, "Store directory; it may not exist yet")->required();
  c->add_flag("--once", p.watch.once, "End after the first checkpoint");
  c->add_option("--timeout", p.watch.timeout_seconds,
                "End with status 2 if no checkpoint is published for this many seconds")
      ->check(CLI::Range(0.001, 1e9))
      ->option_text("SECONDS");
  c->add_option("--since", p.watch.since,
                "Begin with the existing checkpoints that are newer than this one")
      ->option_text("NAME");
  c->add_option("--since-generation", p.watch.since_generation,
                "The same for a generation; 0: begin with all existing checkpoints")
      ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()))
      ->option_text("N");
  c->add_option("--exec", p.watch.exec,
                "Run this command for each checkpoint, without a shell; {} in ARGs is replaced by "
                "the path of the checkpoint. All words after --exec belong to the command")
      ->option_text("CMD ARG...");

  c = p.Command("layout", "Draws which rank's chunk holds which box of a tensor",
                "tensormount layout STORE/step-0 encoder.weight --svg encoder.svg", p.layout,
                RunLayout);
  c->add_option("SOURCE", p.layout.source, kSource)->required();
  c->add_option("KEY", p.layout.key, "Key of a tensor, or the name of a layer")->required();
  c->add_option("--svg", p.layout.svg, "Write the picture to this SVG file; - is standard output");
  c->add_option("--html", p.layout.html,
                "Write a self-contained HTML report to this file; - is standard output");

  c = p.Command("verify",
                "Verifies every hash of a checkpoint; reports damage with tensor, box and file",
                "tensormount verify STORE/step-0", p.verify, RunVerify);
  c->add_option("SOURCE", p.verify.source, kSource)->required();
  c->add_flag("--quick", p.verify.quick, "Check only the commit record, lengths and the index");
  CLI::Option* nonfinite =
      c->add_flag("--nonfinite", p.verify.nonfinite,
                  "Also look for NaNs and infinities; exit status 1 if a tensor has any");
  c->add_option("--nonfinite-exempt", p.verify.nonfinite_exempt,
                "Glob of tensors that may have NaNs and infinities; may be repeated")
      ->option_text("GLOB")
      ->needs(nonfinite);
  AddPartial(c, p.verify.partial);

  c = p.Command("check",
                "Checks the sharding of a job that SPEC.json describes: missing and doubled boxes, "
                "without data",
                "tensormount check job.json", p.check, RunCheck);
  c->add_option("SPEC.json", p.check.spec, "Description of the job (format: docs/spec.md)")
      ->required();
  c->add_option("--limit", p.check.limit, "Number of findings to list; all are counted")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();

  c = p.Command("doctor", "Shows what this machine offers, what is missing and how to get it",
                "tensormount doctor --dir /checkpoints", p.doctor_directory, RunDoctor);
  c->add_option("where,--dir", p.doctor_directory, "Directory whose filesystem is tested, or a URL")
      ->capture_default_str();
}

void AddLifecycle(Program& p) {
  CLI::App* c = p.Command("init", "Makes an empty store, ready to be mounted and saved into",
                          "tensormount init STORE", p.new_store, RunInit);
  c->add_option("STORE", p.new_store, kStore)->required();

  c = p.Command("rm", "Removes checkpoints; `gc` frees their space", "tensormount rm STORE/step-0",
                p.rm, RunRm);
  c->add_option("STORE/NAME", p.rm.checkpoints, "Checkpoints to remove")->required();
  c->add_flag("--dry-run", p.rm.dry_run, "Remove nothing; print what would be removed");
  c->add_flag("--force", p.rm.force, "Also remove pinned checkpoints");

  c = p.Command(
      "prune", "Removes the checkpoints that no retention rule keeps, and frees their space",
      "tensormount prune STORE --keep-last 3 --keep-every 1000 --dry-run", p.prune, RunPrune);
  c->add_option("STORE", p.prune.store, kStore)->required();
  c->add_option("--keep-last", p.prune.keep_last, "Keep the N newest")->option_text("N");
  c->add_option(
       "--keep-every", p.prune.keep_every,
       "Keep steps (the last number in the name) that are multiples of M; Mh: the newest of every "
       "M hours; M-generations: the newest of every M generations. May be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->option_text("M");
  c->add_option("--match", p.prune.match,
                "Apply the rules only to these names (\"runA-*\"); all other checkpoints stay and "
                "are not counted")
      ->option_text("NAMES");
  c->add_option("--keep-best", p.prune.keep_best,
                "Keep the K with the highest or lowest METRIC, a common value. May be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->option_text("METRIC:max|min:K");
  c->add_option("--rules", p.prune.rules, "All rules in one text, as for import --retain")
      ->option_text("RULES");
  CLI::Option* const alone[] = {
      c->add_flag("--dry-run", p.prune.dry_run,
                  "Remove nothing; print which checkpoints stay or would be removed, and why"),
      c->add_flag(
          "--set-policy", p.prune.set_policy,
          "Remove nothing; save these rules as the store's policy, which `prune STORE` uses"),
      c->add_flag("--show-policy", p.prune.show_policy, "Remove nothing; print the store's policy"),
      c->add_flag("--clear-policy", p.prune.clear_policy,
                  "Remove nothing; delete the store's policy")};
  for (CLI::Option* const one : alone) {
    for (CLI::Option* const other : alone) {
      if (one != other) one->excludes(other);
    }
  }

  c = p.Command("pin",
                "Protects a checkpoint from retention rules, rm and replacement; with a STORE, "
                "lists its pins",
                "tensormount pin STORE/step-0 --reason 'in the paper' --expires 90d", p.pin,
                RunPin);
  c->add_option("STORE/NAME", p.pin.checkpoint, "Checkpoint, or a STORE to list its pins")
      ->required();
  c->add_option("--reason", p.pin.reason, "Text that is shown with the pin");
  c->add_option("--expires", p.pin.expires,
                "When the pin ends: 90d, 12h, 2027-01-31, 2027-01-31T12:00Z")
      ->option_text("WHEN");
  c = p.Command("unpin", "Removes the pin of a checkpoint", "tensormount unpin STORE/step-0",
                p.unpin_checkpoint, RunUnpin);
  c->add_option("STORE/NAME", p.unpin_checkpoint, "Checkpoint")->required();

  c = p.Command(
      "copy", "Copies checkpoints to another store; files that it has already are hard-linked",
      "tensormount copy STORE/step-1000 /backup/STORE --limit-rate 200MB", p.copy, RunCopy);
  c->add_option("STORE/NAME... OTHER", p.copy.paths,
                "Checkpoints, or a STORE for all its checkpoints; last, the destination store")
      ->required()
      ->expected(2, CLI::detail::expected_max_vector_size);
  c->add_option("--limit-rate", p.copy.limit_rate, "Limit of bytes read per second (200MB)");
  CLI::Option* const drain = c->add_flag(
      "--drain", p.copy.drain,
      "Copy a whole STORE, then each checkpoint as soon as it is published, until interrupted");
  c->add_option("--retain", p.copy.retain,
                "With --drain: prune the destination by these rules after each copy, as for import")
      ->needs(drain)
      ->option_text("RULES");
  c->add_flag("--unconditional", p.copy.unconditional,
              "To a bucket whose server ignores conditional puts: copy without protection from "
              "other writers");

  c = p.Command("repair", "Repairs damaged files of a checkpoint from another checkpoint",
                "tensormount repair STORE/step-1000 --from /backup/STORE/step-1000", p.repair,
                RunRepair);
  c->add_option("STORE/NAME", p.repair.checkpoint, "Checkpoint to repair")->required();
  c->add_option("--from", p.repair.from,
                "A checkpoint with the same tensors: a copy, another sharding, or a foreign "
                "checkpoint; in a STORE the one of the same name")
      ->required()
      ->option_text("SOURCE");
  c->add_flag("--dry-run", p.repair.dry_run,
              "Change nothing; print what is damaged and what SOURCE can repair");

  c = p.Command("gc", "Frees the space of removed checkpoints and failed saves",
                "tensormount gc STORE", p.gc, RunGc);
  c->add_option("STORE", p.gc.store, kStore)->required();
  c->add_flag("--dry-run", p.gc.dry_run, "Remove nothing; print what would be removed");
  c->add_option("--grace", p.gc.grace_seconds,
                "Seconds to keep removed checkpoints; on a filesystem without file locks choose "
                "more than the longest read takes")
      ->check(CLI::Range(0.0, 1e9))
      ->default_str("60");
  c->add_option("--staging-age", p.gc.staging_age_seconds,
                "Seconds after which an untouched staging directory counts as abandoned")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();

  c = p.Command("fsck", "Checks a whole store; prints what --rebuild would repair",
                "tensormount fsck STORE --rebuild", p.fsck, RunFsck);
  c->add_option("STORE", p.fsck.store, kStore)->required();
  c->add_flag("--rebuild", p.fsck.rebuild, "Repair what can be repaired");
  c->add_flag("--read-data", p.fsck.read_data, "Also verify every hash of every checkpoint");

  c = p.Command("publish",
                "Publishes a save that was written through mounts, or reports what is missing",
                "tensormount publish STORE/.staging/step-2000 --wait 60", p.publish, RunPublish);
  c->add_option("STAGING", p.publish.staging, "Staging directory, STORE/.staging/NAME")->required();
  c->add_option("--as", p.publish.as,
                "Name of the checkpoint (default: NAME of the staging directory)");
  c->add_option("--wait", p.publish.wait_seconds,
                "Seconds to wait for done marks and for files that are open for writing")
      ->check(CLI::Range(0.0, 1e9));
}

// Adds --root to the commands in kOpening, and --file to all of them except those of stores. The
// values are members of the terminal.
void AddRoots(Program& p) {
  static constexpr const char* kOpening[] = {"mount", "load",   "import", "ls",     "info",  "cat",
                                             "diff",  "layout", "export", "verify", "adopt", "fsck",
                                             "prune", "log",    "blame",  "stats"};
  for (const char* name : kOpening) {
    CLI::App* command = p.app.get_subcommand(name);
    if (command->get_group() == kNotBuiltGroup) continue;
    command
        ->add_option("--root", p.terminal.roots,
                     "Directory that links and data files of the source may lead into; without "
                     "this option links that leave the source are refused. May be repeated")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->option_text("DIR");
    static constexpr std::string_view kOfStores[] = {"fsck", "prune", "log", "blame"};
    if (std::ranges::find(kOfStores, std::string_view(name)) != std::end(kOfStores)) continue;
    command
        ->add_option("--file", p.terminal.file,
                     "File or index to read, if the source is a directory with several sets of "
                     "weights; the same as SOURCE/NAME")
        ->expected(1)
        ->option_text("NAME");
  }
}

// Adds --cache and --cache-size to the commands that read a SOURCE, which may be a URL.
void AddCache(Program& p) {
  static constexpr const char* kReading[] = {"mount", "load", "import", "ls",     "info",
                                             "cat",   "diff", "layout", "export", "verify",
                                             "map",   "copy", "repair", "stats"};
  for (const char* name : kReading) {
    CLI::App* command = p.app.get_subcommand(name);
    const std::string what = "Directory that keeps what is read from a URL, for later commands";
    const std::string of_mount = " (if SOURCE is a URL: ~/.cache/tensormount)";
    command
        ->add_option(
            "--cache", p.terminal.cache,
            what + (std::string_view(name) == "mount" ? of_mount : "") + "; none: no cache")
        ->expected(1)
        ->option_text("DIR");
    command
        ->add_option("--cache-size", p.terminal.cache_size,
                     "Largest number of bytes of the files in the cache")
        ->expected(1)
        ->option_text("SIZE=10GiB");
  }
}

void AddUnavailableCommands(Program& p) {
  for (const auto& [name, what] : kNotBuilt) {
    CLI::App* c = p.app.add_subcommand(name, std::string(what) + " (not implemented yet)");
    c->group(kNotBuiltGroup);
    c->fallthrough(false);
    // CLI11 ignores all further arguments, so that the error below is not about an unknown option.
    c->prefix_command();
    const std::string command = name;
    c->callback([&p, command] {
      p.run = [&p, command] {
        return p.terminal.Fail(Status(
            Code::kUnsupported, fmt::format("{}: this command is not implemented yet", command)));
      };
    });
  }
}

// Converts the arguments that mount(8) passes to those of `mount`:
//   mount.tensormount SOURCE MNT [-sfnvrw] [-N ns] [-t type] [-o opt,opt=value]
// Options after -o are long options of `mount` without dashes; options that mount(8) handles
// itself, comments, and "x-" options of systemd and fstab are dropped. Example: SOURCE MNT -o
// rw,noatime,views,hf-part-size=1GB becomes mount SOURCE MNT --views --hf-part-size=1GB. `fake` is
// set to true for -f, which means to check the arguments without mounting.
std::vector<std::string> ConvertMountHelperArgs(int argc, const char* const* argv,
                                                const CLI::App& mount, bool* fake) {
  // Options that mount(8) passes on although they are for mount(8) itself or the kernel. A
  // tensormount mount is always nosuid and nodev (FUSE) and never writes atime.
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
  // Whether -s was given, which makes mount(8) helpers ignore unknown options.
  bool sloppy = false;
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
          read_only = option == "ro";  // The last of ro and rw counts.
          continue;
        }
        const bool generic =
            option.empty() || option.starts_with("x-") || option.starts_with("X-") ||
            option.starts_with("comment=") ||
            std::find(std::begin(kGeneric), std::end(kGeneric), name) != std::end(kGeneric);
        // Lines of fstab often have allow_other, FUSE's spelling of the option.
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
  // The options are processed after all arguments, because -s may be the last argument.
  for (const std::string& option : options) {
    const std::string flag = "--" + option.substr(0, option.find('='));
    if (!sloppy || mount.get_option_no_throw(flag) != nullptr) words.push_back("--" + option);
  }
  if (read_only) words.emplace_back("--read-only");
  return words;
}

// Refuses options, GLOB and an optional KEY with an empty value, which is probably an unset shell
// variable: `prune --keep-last "$N"` must not run without that rule, and `ls SOURCE "$PATTERN"`
// must not list all keys. Only --reason may be empty.
void CheckNoEmptyValues(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    for (const CLI::Option* option : command->get_options()) {
      const std::string name = option->get_name();
      // An empty path or required KEY fails where it is used.
      const bool pattern = name == "GLOB" || (name == "KEY" && !option->get_required());
      if ((option->get_positional() && !pattern) || name == "--reason") continue;
      for (const std::string& value : option->results()) {
        if (value.empty())
          throw CLI::ValidationError(
              name, pattern ? "this argument is empty" : "the value of this option is empty");
      }
    }
    CheckNoEmptyValues(*command);
  }
}

// Takes the words after --exec of `watch` out of `words`, because CLI11 would parse the options of
// the command as its own. nullopt: no such words.
std::optional<std::vector<std::string>> TakeExecWords(std::vector<std::string>& words) {
  auto command = words.begin();
  while (command != words.end() && command->starts_with('-')) {
    // The only common option with a value.
    if (*command == "--log-level" && command + 1 != words.end()) ++command;
    ++command;
  }
  if (command == words.end() || *command != "watch") return std::nullopt;
  const auto exec = std::find(command, words.end(), "--exec");
  if (exec == words.end()) return std::nullopt;
  std::vector<std::string> taken(exec + 1, words.end());
  words.erase(exec, words.end());
  if (taken.empty()) throw CLI::ValidationError("--exec", "a command must follow");
  return taken;
}

// Refuses "--name=", for which CLI11 would take the next word as the value.
void CheckNoTrailingEquals(std::span<const std::string> words) {
  for (const std::string& word : words) {
    if (word == "--") return;
    if (word.starts_with("--") && word.find('=') == word.size() - 1) {
      throw CLI::ValidationError(word, "the value of this option is empty");
    }
  }
}

// Prints the error for arguments that do not parse, with a suggestion.
int FailToParse(const CLI::App& app, const CLI::ParseError& error, int argc,
                const char* const* argv, Terminal& terminal) {
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  const CLI::App* command = nullptr;
  std::string_view unknown_command;
  for (int i = 1; i < argc && command == nullptr && unknown_command.empty(); ++i) {
    const std::string_view word = argv[i];
    if (word.starts_with('-')) {
      const CLI::Option* known = app.get_option_no_throw(std::string(word));
      // Skips the option's value.
      if (known != nullptr && known->get_items_expected_max() > 0) ++i;
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
    NearestName nearest(unknown_command);
    for (const CLI::App* known : commands) nearest.Consider(known->get_name());
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
    NearestName nearest(option);
    for (const CLI::App* of : {&here, &app}) {
      for (const CLI::Option* known : of->get_options()) {
        for (const std::string& text : known->get_lnames()) nearest.Consider("--" + text);
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

int Run(int argc, const char* const* argv) {
  Program program;
  CLI::App& app = program.app;
  app.formatter(MakeHelpFormatter());
  app.set_version_flag("--version", kVersion);
  // If no subcommand is given, parsing fails, and the error has a hint to --help.
  app.require_subcommand(1);
  app.fallthrough();
  AddCommon(app, program.terminal);
  AddMountCommands(program);
  AddSaveCommands(program);
  AddExport(program);
  AddInspectCommands(program);
  AddLifecycle(program);
  AddUnavailableCommands(program);
  AddRoots(program);
  AddCache(program);

  const std::string_view self = argc > 0 ? argv[0] : "";
  try {
    if (self.substr(self.rfind('/') + 1) == "mount.tensormount") {
      bool fake = false;
      const auto words = ConvertMountHelperArgs(argc, argv, *app.get_subcommand("mount"), &fake);
      CheckNoTrailingEquals(words);
      // CLI11 expects the words in reverse order.
      app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
      CheckNoEmptyValues(app);
      // mount -f only checks the arguments.
      if (fake) return kDone;
    } else {
      std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
      auto exec = TakeExecWords(words);
      CheckNoTrailingEquals(words);
      app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
      CheckNoEmptyValues(app);
      if (exec) program.watch.exec = std::move(*exec);
    }
  } catch (const CLI::ParseError& error) {
    // CLI11 also throws for --help and --version.
    if (error.get_exit_code() == 0) return app.exit(error);
    // --json is looked up here, because CLI11 may have failed before it reached --json.
    for (int i = 1; i < argc; ++i) program.terminal.json |= std::string_view(argv[i]) == "--json";
    return FailToParse(app, error, argc, argv, program.terminal);
  }
  if (program.terminal.log_level) SetLogLevel(*program.terminal.log_level);
  // A mount reads the same bytes again and again.
  const bool by_default = app.got_subcommand("mount") && IsUrl(program.mount.source);
  const Status cache = ApplyCacheOptions(program.terminal, by_default);
  return cache.ok() ? program.run() : program.terminal.Fail(cache);
}

}  // namespace

int Main(int argc, const char* const* argv) {
  // Exceptions of libraries become an error line and an exit status.
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
