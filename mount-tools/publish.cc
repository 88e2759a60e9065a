// SPDX-License-Identifier: Apache-2.0
// `tensormount publish` (commands.h): publishes a checkpoint that was written through mounts, or
// prints what is missing. It does the same as `mv -T` in a mount (fs/save), but needs no mount.
#include "fs/save/publish.h"

#include <chrono>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "index/store/store.h"
#include "mount-tools/commands.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

// Largest number of problems that are printed; report.txt in the staging directory and --json have
// more.
constexpr std::size_t kProblemsShown = 20;

std::string_view HintFor(Code code) {
  switch (code) {
    case Code::kUnavailable:
      return "pass --wait SECONDS to wait for done marks";
    case Code::kBusy:
      return "pass --wait SECONDS to wait until the files are closed";
    case Code::kAlreadyExists:
      return "pass --as NAME to publish under another name";
    default:
      return "";
  }
}

int PrintFailure(const Status& status, const fs::StagingReport& report, const std::string& staging,
                 Terminal& terminal) {
  if (terminal.json) {
    // StagingReport::ToJson is used, because texts in the report may be invalid UTF-8, which
    // nlohmann::json refuses to print.
    auto document = nlohmann::ordered_json::parse(report.ToJson(), nullptr, false);
    document["event"] = "failed";
    document["staging"] = staging;
    document["code"] = std::string(CodeName(status.code()));
    terminal.Json(document);
    (void)terminal.Flush();  // An error of the flush is ignored, because the command fails anyway.
  } else if (!terminal.quiet) {
    for (std::size_t i = 0; i < report.problems.size() && i < kProblemsShown; ++i) {
      terminal.Line(fmt::format("{}: {}", report.problems[i].object, report.problems[i].detail));
    }
    if (report.problems.size() + report.more > kProblemsShown) {
      terminal.Line(fmt::format("and {} more, in {}/report.txt",
                                report.problems.size() + report.more - kProblemsShown, staging));
    }
    (void)terminal.Flush();  // An error of the flush is ignored, because the command fails anyway.
  }
  return terminal.Fail(status, HintFor(status.code()));
}

}  // namespace

int RunPublish(const PublishArgs& args, Terminal& terminal) {
  const auto path = SplitStagingPath(args.staging);
  if (!path.ok()) return terminal.Fail(path.status());
  const auto store = Store::Open(path.value().store);
  if (!store.ok()) return terminal.Fail(store.status());
  const std::string as = args.as.empty() ? path.value().name : args.as;
  // With 0 there is one attempt, without waiting.
  const std::chrono::milliseconds wait(static_cast<std::int64_t>(args.wait_seconds * 1000));
  fs::StagingReport report;
  const auto published = fs::PublishStagingWhenDone(store.value(), store.value().fs(),
                                                    path.value().name, as, wait, &report);
  if (!published.ok()) return PrintFailure(published.status(), report, args.staging, terminal);
  const Store::Published& p = published.value();
  const std::string checkpoint = store.value().CheckpointPath(as);
  if (terminal.json) {
    nlohmann::ordered_json document = {{"event", "published"}};
    document.update(fs::PublishedJson(checkpoint, p, report));
    terminal.Json(document);
  } else if (!terminal.quiet) {
    terminal.Line(fmt::format("published {}: {}, {}, written by {}", checkpoint,
                              Counted(p.tensors, "tensor"), HumanBytes(p.bytes),
                              Counted(report.mounts, "mount")));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
