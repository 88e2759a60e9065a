// SPDX-License-Identifier: Apache-2.0
// `tensormount repair` (commands.h): prints the damage, what was repaired, and what could not be.
#include <string_view>

#include <fmt/core.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tensormount/store_repair.h"

#include "base/counted.h"
#include "index/store/store_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/interrupt.h"
#include "mount-tools/terminal.h"

namespace tensormount::tools {
namespace {

void PrintRepair(const RepairReport& report, Terminal& terminal) {
  const std::string name = report.path.substr(report.path.rfind('/') + 1);
  for (const RepairedFile& file : report.files) {
    const char* const verb = report.dry_run ? "could be repaired" : "repaired";
    terminal.Line(fmt::format(
        "{}: {}: {}: {} of {} {}{}", name, file.file, file.damage, HumanBytes(file.bytes_repaired),
        HumanBytes(file.bytes_damaged), verb,
        file.shared_with.empty() ? std::string()
                                 : fmt::format(", also in {}", fmt::join(file.shared_with, ", "))));
  }
  for (const RepairLeft& left : report.left) {
    terminal.Line(fmt::format("{}: {}: {}: byte {}: not repaired: {}", name, left.object, left.file,
                              left.offset, left.reason));
  }
  if (terminal.quiet) return;
  const std::string checked = HumanBytes(report.bytes_checked);
  if (!report.left.empty()) {
    terminal.Line(fmt::format("{}: still damaged: {} not repaired, {} checked", name,
                              Counted(report.left.size(), "range"), checked));
  } else if (report.files.empty()) {
    terminal.Line(fmt::format("{}: whole, nothing to repair, {} checked", name, checked));
  } else {
    terminal.Line(fmt::format("{}: {}: {}, {} checked", name,
                              report.dry_run ? "would be whole" : "whole",
                              Counted(report.files.size(), "damaged file"), checked));
  }
}

}  // namespace

int RunRepair(const RepairArgs& args, Terminal& terminal) {
  const Interrupt interrupt;
  RepairOptions options;
  options.dry_run = args.dry_run;
  options.roots = terminal.roots;
  Result<RepairReport> repaired = RepairReport();
  {
    // The destructor of `progress` erases the progress line before the report is printed.
    Progress progress(terminal, "repair");
    options.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return interrupt.Check();
    };
    repaired = RepairCheckpoint(args.checkpoint, args.from, options);
  }
  if (!repaired.ok()) {
    const bool goes_on = repaired.status().code() == Code::kCancelled;
    return interrupt.ExitStatus(
        repaired.status(),
        terminal.Fail(repaired.status(), goes_on ? "run the same command again to continue" : ""));
  }
  if (terminal.json) {
    terminal.Json(RepairJson(repaired.value()));
  } else {
    PrintRepair(repaired.value(), terminal);
  }
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  return repaired.value().left.empty() ? kDone : kCheckFailed;
}

}  // namespace tensormount::tools
