// SPDX-License-Identifier: Apache-2.0
// Opens SOURCE arguments, in the same way for all commands (source.h).
#include "mount-tools/source.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/file_system_for.h"
#include "base/glob.h"
#include "fs/mount/mount_table.h"
#include "index/archives/torch_archive.h"
#include "index/store/store.h"
#include "mount-tools/nearest.h"

namespace tensormount::tools {

namespace {

// The source of the tensormount mount at this path. For a directory at the top of a mount, the
// checkpoint that the directory shows. nullopt for other paths.
std::optional<std::string> SourceOfMount(FileSystem& host, const std::string& text) {
  const Result<std::string> resolved = host.Resolve(text);
  if (!resolved.ok()) return std::nullopt;
  const std::size_t slash = resolved.value().rfind('/');
  const std::string folder = resolved.value().substr(0, slash);
  for (const std::string& at : {resolved.value(), folder}) {
    const auto mount = at.empty() ? std::nullopt : fs::FindMount(at);
    if (!mount || mount->type != fs::kMountType) continue;
    constexpr std::uint64_t kMaxBytes = 1 << 20;
    const Result<std::string> status =
        host.ReadFile(JoinPath(at, ".tensormount/status"), kMaxBytes);
    if (!status.ok()) return std::nullopt;
    const auto json = nlohmann::json::parse(status.value(), nullptr, false);
    if (!json.is_object() || !json.contains("source") || !json["source"].is_string()) {
      return std::nullopt;
    }
    const auto source = json["source"].get<std::string>();
    return at == resolved.value() ? source : JoinPath(source, resolved.value().substr(slash + 1));
  }
  return std::nullopt;
}

// A text like "; did you mean st/step-1?" if the directory has a similar name; else empty.
std::string SuggestSimilarName(FileSystem& host, const std::string& text) {
  const std::string path = WithoutTrailingSlashes(text);
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
  const auto entries = host.List(folder.empty() ? "." : folder);
  if (!entries.ok()) return {};
  NearestName nearest(path.substr(folder.size()));
  for (const DirectoryEntry& entry : entries.value()) {
    if (!entry.name.starts_with('.')) nearest.Consider(entry.name);
  }
  return nearest.best().empty() ? std::string()
                                : fmt::format("; did you mean {}{}?", folder, nearest.best());
}

}  // namespace

Result<FoundSource> ApplyFileOption(FoundSource source, Terminal& terminal) {
  if (terminal.file.empty()) return source;
  if (source.kind == SourceKind::kForeign) {
    const Result<FileInfo> info = source.fs->Stat(source.path);
    if (!info.ok()) return source;
    if (info.value().kind == FileKind::kDirectory) {
      return FindSource(*source.fs, JoinPath(source.path, terminal.file), terminal.roots);
    }
  }
  // No error, because of two sources only one may be such a directory.
  terminal.Warn(fmt::format("--file {} is ignored: {} is not a directory of another program",
                            terminal.file, source.path));
  return source;
}

Result<FoundSource> FindSourceArgument(const std::string& text, Terminal& terminal) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(text));
  Result<FoundSource> found = FindSource(*fs, text, terminal.roots);
  if (found.ok()) return ApplyFileOption(std::move(found).value(), terminal);
  if (found.status().code() == Code::kUnsupported) {
    if (const auto shown = SourceOfMount(*fs, text)) {
      terminal.Note(fmt::format("{}: this mount shows {}, which is read instead", text, *shown));
      return FindSource(*shown, terminal.roots);
    }
  }
  if (found.status().code() == Code::kNotFound && !fs->Exists(text)) {
    return Status(Code::kNotFound, fmt::format("{}: no such file or directory{}",
                                               WithoutQuery(text), SuggestSimilarName(*fs, text)));
  }
  return found;
}

Result<Store> OpenStoreArgument(const std::string& text, Terminal& terminal) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSourceArgument(text, terminal));
  if (found.kind == SourceKind::kStore) return Store::Open(*found.fs, found.path);
  if (found.kind == SourceKind::kCheckpoint) {
    const auto parts = SplitCheckpointPath(found.path);
    return Status(Code::kInvalidArgument,
                  text + ": is a checkpoint; name the store that contains it" +
                      (parts.ok() ? ", " + parts.value().store : std::string()));
  }
  return Status(Code::kUnsupported,
                text +
                    ": is not a store, but what another program saved, which records no digests; "
                    "`tensormount adopt` adds it to a store");
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenSource(const std::string& text, Terminal& terminal,
                                                     LossPolicy lost) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSourceArgument(text, terminal));
  TENSORMOUNT_ASSIGN_OR_RETURN(FoundSource one, LatestOf(found, terminal.roots));
  const bool latest = one.path != found.path;
  // This is a note and not a warning, because a store as an argument stands for its latest
  // checkpoint.
  if (latest) {
    terminal.Note(fmt::format("{}: using its latest checkpoint, {}", text,
                              one.path.substr(one.path.rfind('/') + 1)));
  }
  if (latest) {
    TENSORMOUNT_ASSIGN_OR_RETURN(one, ApplyFileOption(std::move(one), terminal));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(auto opened,
                               OpenFound(one, terminal.roots, lost == LossPolicy::kLeaveOut));
  for (const std::string& warning : opened->warnings()) terminal.Warn(warning);
  if (lost == LossPolicy::kRefuse) TENSORMOUNT_RETURN_IF_ERROR(CheckSourceComplete(*opened));
  if (lost != LossPolicy::kWarn && !opened->beside().empty()) {
    terminal.Warn(
        fmt::format("{}: the directory also has data that is not part of the checkpoint: {}",
                    opened->directory(), JoinFirstNames(opened->beside())));
  }
  return opened;
}

std::string JoinFirstNames(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  return names.size() > kShown ? fmt::format("{} and {} more", text, names.size() - kShown) : text;
}

Status CheckSourceComplete(const OpenedCheckpoint& source, const std::string& keys) {
  const Status lost = CheckNoLoss(source.lost(), keys).WithContext(source.directory());
  return lost.WithMessage(lost.message() + " (--partial continues without the missing data)");
}

Result<std::string> ReadNamedFile(const std::string& path, std::uint64_t max_bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(path));
  return fs->ReadFile(path, max_bytes);
}

Result<std::shared_ptr<const KeyMap>> ReadKeyMap(const std::string& path) {
  if (path.empty()) return std::shared_ptr<const KeyMap>();
  // Largest size in bytes of a file of rules.
  constexpr std::uint64_t kMaxBytes = 64 << 20;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, ReadNamedFile(path, kMaxBytes));
  Result<KeyMap> map = KeyMap::FromJson(text);
  if (!map.ok()) return map.status().WithContext(path);
  return std::make_shared<const KeyMap>(std::move(map).value());
}

Result<NameMap> ReadNameMap(const NameMapArgs& args) {
  NameMap map;
  for (const std::string& text : args.numbers) {
    const std::size_t equals = text.find('=');
    const char* const end = text.data() + text.size();
    std::int64_t number = 0;
    const auto parsed = equals == std::string::npos
                            ? std::from_chars_result{end, std::errc::invalid_argument}
                            : std::from_chars(text.data() + equals + 1, end, number);
    if (parsed.ec != std::errc() || parsed.ptr != end) {
      return Status(Code::kInvalidArgument, fmt::format("--set {}: must be NAME=NUMBER", text));
    }
    if (!map.numbers.emplace(text.substr(0, equals), number).second) {
      return Status(Code::kInvalidArgument, fmt::format("--set {}: given twice", text));
    }
  }
  if (args.as.empty() && !args.from.empty()) {
    return Status(Code::kInvalidArgument, "--from requires --as");
  }
  if (!args.experts.empty()) {
    if (args.as.empty()) return Status(Code::kInvalidArgument, "--experts requires --as");
    if (!map.numbers.emplace("split", args.experts == "split" ? 1 : 0).second) {
      return Status(Code::kInvalidArgument, "--experts and --set split are the same: give one");
    }
  }
  if (args.empty()) {
    if (map.numbers.empty()) return map;
    return Status(Code::kInvalidArgument, "--set requires --map or --as");
  }
  map.as = args.as;
  map.from = args.from;
  if (!args.with.empty()) {
    constexpr std::uint64_t kMaxBytes = 1 << 20;
    const Result<std::string> config = ReadNamedFile(JoinPath(args.with, "config.json"), kMaxBytes);
    if (config.ok()) {
      map.config = config.value();
    } else if (config.status().code() == Code::kNotFound) {
      // Numbers may come from elsewhere, but the directory must be that of a model.
      TENSORMOUNT_RETURN_IF_ERROR(ReadFilesBeside(args).status());
    } else {
      return config.status();
    }
  }
  if (args.rules.empty()) return map;
  TENSORMOUNT_ASSIGN_OR_RETURN(map.rules, ReadNamedFile(args.rules, NameRules::kMaxBytes));
  // An empty file is no JSON; without this it would be no map.
  if (map.rules.empty()) map.rules = " ";
  if (const Status valid = NameRules::FromMap(map).status(); !valid.ok()) {
    return valid.WithContext(args.rules);
  }
  return map;
}

Result<std::shared_ptr<const ModelFiles>> ReadFilesBeside(const NameMapArgs& args) {
  if (args.with.empty()) return std::shared_ptr<const ModelFiles>();
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(args.with));
  return ReadModelFiles(*fs, args.with);
}

Result<std::string> DescribePart(const OpenedCheckpoint& checkpoint, const ObjectRecord& part) {
  if (part.file >= checkpoint.index().files().size()) {
    return Status(Code::kDataLoss,
                  fmt::format("the object is in file number {}, but the index lists only {} files",
                              part.file, checkpoint.index().files().size()));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, checkpoint.OpenFile(part.file));
  return DescribeObject(*file, part.offset, part.length);
}

Status CheckShardRuleSplits(const OpenedCheckpoint& source, const std::string& text,
                            const ShardRule& rule, int ranks) {
  if (text == "replicate" || ranks == 1) return {};
  bool any = false;
  int most = 0;
  TENSORMOUNT_RETURN_IF_ERROR(source.index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    const int axes = tensor.meta.shape().rank();
    most = std::max(most, axes);
    any = any || axes == 0 || rule.Cuts(tensor.meta.key(), axes);
    return !any;
  }));
  if (any || most == 0) return {};
  return {Code::kInvalidArgument,
          fmt::format("--shard {}: splits no tensor: the tensors have at most {} {}", text, most,
                      most == 1 ? "axis" : "axes")};
}

std::string PlacementOf(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor) {
  const auto extents = checkpoint.index().Extents(tensor);
  if (!extents.ok()) return "damaged";
  // Reads all chunk records, which takes a moment for a million chunks.
  std::set<Placement> kinds;
  for (std::size_t i = 0; i < extents.value()->size(); ++i) {
    const auto chunk = extents.value()->At(i);
    if (!chunk.ok() || chunk.value().file >= checkpoint.index().files().size()) return "damaged";
    kinds.insert(checkpoint.index().files()[chunk.value().file].placement);
  }
  if (kinds.empty()) return "none";
  return kinds.size() == 1 ? std::string(PlacementName(*kinds.begin())) : "mixed";
}

}  // namespace tensormount::tools
