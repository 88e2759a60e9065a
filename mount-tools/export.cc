// SPDX-License-Identifier: Apache-2.0
// `tensormount export` (commands.h), with ranks as threads or under mpirun. Each process checks the
// options and opens the source before its ranks start. Under mpirun an error of these steps is
// passed to fs::Export as `before`, which makes all ranks fail. One collective call does the export
// (fs/export/export.h), and rank 0 prints the report.
#include "fs/export/export.h"

#include <mutex>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/file_system_for.h"
#include "mount-tools/commands.h"
#include "mount-tools/interrupt.h"
#include "mount-tools/ranks.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

using fs::ExportFormat;

Status MakeExportOptions(const ExportArgs& args, fs::ExportOptions& options) {
  const auto format = fs::ExportFormatOf(args.to);
  if (!format) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("--to {}: must be one of safetensors, hf, npy, zarr, dcp, torch, torch_dist",
                    args.to));
  }
  options.format = *format;
  if (args.if_exists != "fail" && args.if_exists != "replace") {
    return Status(Code::kInvalidArgument,
                  fmt::format("--if-exists {}: must be fail or replace", args.if_exists));
  }
  options.replace = args.if_exists == "replace";
  // Options for another format are refused, because a user would notice only after the export that
  // they were ignored.
  if (*format != ExportFormat::kHf && (args.hf_part_size || args.hf_rules)) {
    return Status(Code::kInvalidArgument, "--hf-part-size and --hf-rules require --to hf");
  }
  TENSORMOUNT_RETURN_IF_ERROR(FileSystemFor(args.destination).status());
  TENSORMOUNT_ASSIGN_OR_RETURN(options.map, ReadNameMap(args.map));
  TENSORMOUNT_ASSIGN_OR_RETURN(options.hf.beside, ReadFilesBeside(args.map));
  TENSORMOUNT_ASSIGN_OR_RETURN(options.hf.rules, ReadKeyMap(args.hf_rules.value_or("")));
  if (args.hf_part_size) {
    TENSORMOUNT_ASSIGN_OR_RETURN(options.hf.part_bytes, fs::ParsePartSize(*args.hf_part_size));
  }
  return {};
}

// The part of a mount that has the same files. The last line of the report names it, because
// reading a mount may make the export unnecessary. Empty if a mount has no such files.
std::string ViewOf(ExportFormat format) {
  switch (format) {
    case ExportFormat::kSafetensors:
      return "model.safetensors";
    case ExportFormat::kHf:
    case ExportFormat::kNpy:
    case ExportFormat::kZarr:
      return std::string(fs::ExportFormatName(format)) + "/";
    default:
      return {};
  }
}

void PrintExport(const fs::ExportReport& report, const ExportArgs& args, ExportFormat format,
                 int ranks, Terminal& terminal) {
  for (const std::string& warning : report.warnings) terminal.Warn(warning);
  for (const std::string& note : report.notes) terminal.Warn(note);
  const double seconds = report.plan_seconds + report.write_seconds + report.sync_seconds;
  if (terminal.json) {
    terminal.Json(fs::ExportJson(report, format, ranks));
    return;
  }
  if (terminal.quiet) return;
  terminal.Line(fmt::format("exported {}: {}, {} in {} by {} in {} ({} written)", report.path,
                            Counted(report.tensors, "tensor"), HumanBytes(report.bytes),
                            Counted(report.files, "file"),
                            Counted(static_cast<std::uint64_t>(ranks), "rank"),
                            HumanSeconds(seconds), HumanBytes(report.bytes_written)));
  // With these options the export has other names or files than a mount without options.
  const std::string view = args.map.empty() && !args.hf_part_size && !args.hf_rules && !args.partial
                               ? ViewOf(format)
                               : "";
  if (!view.empty()) {
    terminal.Line(
        fmt::format("a mount shows the same bytes without a copy: tensormount mount {} MNT; MNT/{}",
                    args.source, view));
  }
}

}  // namespace

int RunExport(const ExportArgs& args, Terminal& terminal) {
  auto ranks = Ranks::Make(args.ranks);
  if (!ranks.ok()) return terminal.Fail(ranks.status());
  Ranks group = std::move(ranks).value();

  // An error before the collective call is passed to fs::Export, so that the other ranks do not
  // wait.
  fs::ExportOptions options;
  options.timeouts = MakeTimeouts(args.liveness_seconds, args.arrival_seconds);
  Status before = MakeExportOptions(args, options);
  std::shared_ptr<OpenedCheckpoint> source;
  if (before.ok()) {
    auto opened = OpenSource(args.source, terminal, LossPolicyOf(args.partial));
    before = opened.status();
    if (opened.ok()) source = opened.value();
  }
  // Without MPI no other process waits in the collective call, so the error ends the command here.
  if (!before.ok() && !group.is_mpi()) return terminal.Fail(before);

  const Interrupt interrupt;
  options.cancel = interrupt.flag();
  Progress progress(terminal, "export");
  if (source) progress.SetTotal(source->index().tensor_bytes());
  options.progress = &progress.done();
  // Without MPI the ranks are threads of this process, and the thread of rank 0 sets the report.
  std::mutex mutex;
  fs::ExportReport report;
  const Status status = group.Run([&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(fs::ExportReport mine,
                                 fs::Export(before, source, args.destination, comm, options));
    if (comm.rank() == 0) {
      const std::lock_guard lock(mutex);
      report = std::move(mine);
    }
    return {};
  });
  if (!status.ok()) return interrupt.ExitStatus(status, group.Fail(terminal, status));
  if (group.prints_results()) PrintExport(report, args, options.format, group.size(), terminal);
  return terminal.Flush();
}

}  // namespace tensormount::tools
