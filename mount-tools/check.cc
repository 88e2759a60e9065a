// SPDX-License-Identifier: Apache-2.0
// `tensormount check`: a described job checked without data; see commands.h.
#include <fmt/core.h>

#include "tensormount/validate.h"

#include "base/file_system.h"
#include "mount-tools/commands.h"
#include "mount-tools/shown_text.h"

namespace tensormount::tools {

int RunCheck(const CheckArgs& args, Terminal& terminal) {
  // Descriptions of very large jobs have some hundred MB; more than this is a mistake in the path.
  constexpr std::uint64_t kMaxBytes = std::uint64_t{4} << 30;
  auto text = HostFileSystem().ReadFile(args.spec, kMaxBytes);
  if (!text.ok()) return terminal.Fail(text.status());
  auto report = CheckSpec(text.value(), static_cast<std::size_t>(args.limit));
  if (!report.ok()) {
    return terminal.Fail(report.status().WithContext(args.spec),
                         "docs/spec.md says how such a file is written");
  }
  std::string shown = terminal.json ? report.value().ToJson() : report.value().ToText();
  while (shown.ends_with('\n')) shown.pop_back();
  // --quiet is silent only about a job that is sound.
  if (terminal.json || !terminal.quiet || !report.value().ok()) {
    terminal.Text(terminal.json ? shown : ShownText(shown, "\n"));
  }
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  return report.value().ok() ? kDone : kCheckFailed;
}

}  // namespace tensormount::tools
