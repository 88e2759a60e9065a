// SPDX-License-Identifier: Apache-2.0
// `tensormount check` (commands.h): checks the description of a job, without data.
#include <fmt/core.h>

#include "tensormount/validate.h"

#include "mount-tools/commands.h"
#include "mount-tools/shown_text.h"
#include "mount-tools/source.h"

namespace tensormount::tools {

int RunCheck(const CheckArgs& args, Terminal& terminal) {
  // The description of a very large job has a few hundred MB, so a file above this limit is not a
  // description.
  constexpr std::uint64_t kMaxBytes = std::uint64_t{4} << 30;
  auto text = ReadNamedFile(args.spec, kMaxBytes);
  if (!text.ok()) return terminal.Fail(text.status());
  auto report = CheckSpec(text.value(), static_cast<std::size_t>(args.limit));
  if (!report.ok()) {
    return terminal.Fail(report.status().WithContext(args.spec),
                         "docs/spec.md describes the format of this file");
  }
  std::string shown = terminal.json ? report.value().ToJson() : report.value().ToText();
  while (shown.ends_with('\n')) shown.pop_back();
  // --quiet hides only the text report of a valid job. JSON and reports of errors are always
  // printed.
  if (terminal.json || !terminal.quiet || !report.value().ok()) {
    terminal.Text(terminal.json ? shown : ShownText(shown, "\n"));
  }
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  return report.value().ok() ? kDone : kCheckFailed;
}

}  // namespace tensormount::tools
