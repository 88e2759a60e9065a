// SPDX-License-Identifier: Apache-2.0
// `tensormount derive` (commands.h): a new checkpoint from an old one of the same store.
#include "tensormount/derive.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "index/store/store.h"
#include "index/store/store_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

// The rules of --rename, followed by the rules of --map.
Result<KeyMap> ReadRenames(const DeriveArgs& args) {
  std::vector<KeyMap::Rule> rules;
  for (const std::string& rename : args.rename) {
    const std::size_t equals = rename.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == rename.size()) {
      return Status(Code::kInvalidArgument,
                    fmt::format("--rename {}: must have the form OLD=NEW", rename));
    }
    KeyMap::Rule rule;
    rule.from = rename.substr(0, equals);
    rule.to = rename.substr(equals + 1);
    rule.kind = rule.from.find('*') == std::string::npos ? KeyMap::Rule::Kind::kKey
                                                         : KeyMap::Rule::Kind::kMatch;
    rules.push_back(std::move(rule));
  }
  if (!args.map.empty()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto map, ReadKeyMap(args.map));
    rules.insert(rules.end(), map->rules().begin(), map->rules().end());
  }
  return KeyMap::Make(std::move(rules));
}

Result<DeriveReport> DeriveCheckpoint(const DeriveArgs& args) {
  if (args.if_exists != "fail" && args.if_exists != "replace") {
    return Status(Code::kInvalidArgument,
                  fmt::format("--if-exists {}: must be fail or replace", args.if_exists));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName to, SplitCheckpointPath(args.destination));
  const Result<std::string> from = NameInStore(to.store, args.from);
  TENSORMOUNT_RETURN_IF_ERROR(from.status().WithContext("--from"));
  DeriveOptions options;
  options.keep = args.keep;
  options.drop = args.drop;
  options.if_exists = args.if_exists == "replace" ? IfExists::kReplace : IfExists::kFail;
  TENSORMOUNT_ASSIGN_OR_RETURN(options.rename, ReadRenames(args));
  options.renames_must_match = args.map.empty();
  return Derive(args.destination, from.value(), options);
}

}  // namespace

int RunDerive(const DeriveArgs& args, Terminal& terminal) {
  const Result<DeriveReport> derived = DeriveCheckpoint(args);
  if (!derived.ok()) return terminal.Fail(derived.status());
  const DeriveReport& report = derived.value();
  if (terminal.json) {
    terminal.Json(DeriveJson(report));
    return terminal.Flush();
  }
  if (!terminal.quiet) {
    terminal.Line(fmt::format("committed {}: {}, {} dropped; {} linked ({}), {} copied",
                              report.path, Counted(report.tensors, "tensor"), report.dropped,
                              Counted(report.files_linked, "file"), HumanBytes(report.bytes_linked),
                              HumanBytes(report.bytes_copied)));
  }
  if (!report.refused.empty()) {
    terminal.Warn(fmt::format("hard links were refused, so files were copied: {}", report.refused));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
