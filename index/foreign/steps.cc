// SPDX-License-Identifier: Apache-2.0
// Training directories (format.h): finds the step directories and the latest step. A mount reads a
// training directory at each listing, so a read costs only one listing, a probe for each step, and
// one small file.
#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "base/coding.h"
#include "base/hash.h"
#include "index/foreign/format.h"

namespace tensormount {
namespace {

constexpr std::string_view kLatestFile = "latest_checkpointed_iteration.txt";
constexpr std::uint64_t kMaxLatestBytes = 256;
// Files whose size and times show that a checkpoint was replaced in its directory (FormatStamp):
// metadata files, and files that formats write last. Each save writes them again.
constexpr std::string_view kMarks[] = {
    ".metadata",
    "metadata.json",
    "model_and_optim/.metadata",
    ".metadata.json",
    "model/metadata.json",
    "optim/metadata.json",
    "model.safetensors.index.json",
    "model.safetensors",
};
// Largest number of files that are examined in a directory without any file of kMarks.
constexpr std::size_t kMaxLookedAt = 1000;

}  // namespace

// The name must end with the number: "step10.tmp" is a save in progress.
std::optional<std::uint64_t> IterationOf(std::string_view name) {
  if (name == "release") return 0;
  for (const std::string_view prefix : {"iter_", "step-", "step_", "step", "checkpoint-"}) {
    if (!name.starts_with(prefix)) continue;
    const std::string_view digits = name.substr(prefix.size());
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error == std::errc() && end == digits.data() + digits.size()) return number;
  }
  return std::nullopt;
}

namespace {

std::string Trimmed(const std::string& text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

// The step that latest_checkpointed_iteration.txt (of Megatron-LM) names; empty if the file is
// missing or names none of the steps.
std::string NamedLatestStep(const ForeignFolder& folder, const std::vector<ForeignStep>& steps) {
  const Result<std::string> text = folder.ReadFile(kLatestFile, kMaxLatestBytes);
  if (!text.ok()) return {};
  const std::string said = Trimmed(text.value());
  for (const ForeignStep& step : steps) {
    if (said == "release" ? step.name == said
                          : step.name != "release" && std::to_string(step.generation) == said) {
      return step.name;
    }
  }
  return {};
}

// Adds a file to the hash. Its inode changes when the file is replaced, its size and time when it
// is rewritten. `mark` becomes `info` if the file is newer than all files before.
void AddToStamp(const FileInfo& info, std::string_view name, FileInfo& mark, Xxh3Stream& stream) {
  ByteWriter out;
  out.String(name);
  out.U64(info.device);
  out.U64(info.inode);
  out.U64(info.size);
  out.I64(info.mtime_seconds);
  out.I64(info.mtime_nanoseconds);
  stream.Update(out.bytes().data(), out.bytes().size());
  const auto time = [](const FileInfo& i) {
    return std::tuple(i.mtime_seconds, i.mtime_nanoseconds);
  };
  if (mark.kind != FileKind::kFile || time(mark) < time(info)) mark = info;
}

}  // namespace

std::string LatestStep(const ForeignFolder& folder, const std::vector<ForeignStep>& steps) {
  std::string said = NamedLatestStep(folder, steps);
  if (!said.empty() || steps.empty()) return said;
  return std::max_element(steps.begin(), steps.end(),
                          [](const ForeignStep& a, const ForeignStep& b) {
                            return std::tie(a.generation, a.name) < std::tie(b.generation, b.name);
                          })
      ->name;
}

// The result is a FileInfo, so that callers compare it like that of a single file. For a directory
// with files its inode is the hash.
Result<FileInfo> FormatStamp(const ForeignFolder& folder) {
  if (!folder.file().empty()) return folder.Stat(folder.file());
  FileInfo mark;
  mark.kind = FileKind::kDirectory;
  Xxh3Stream stream;
  for (const std::string_view name : kMarks) {
    const Result<FileInfo> info = folder.Stat(name);
    if (info.ok() && info.value().kind == FileKind::kFile) {
      AddToStamp(info.value(), name, mark, stream);
    }
  }
  if (mark.kind != FileKind::kFile) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder.List(""));
    for (std::size_t i = 0; i < std::min(entries.size(), kMaxLookedAt); ++i) {
      const Result<FileInfo> info = folder.Stat(entries[i].name);
      if (info.ok() && info.value().kind == FileKind::kFile) {
        AddToStamp(info.value(), entries[i].name, mark, stream);
      }
    }
  }
  if (mark.kind != FileKind::kFile) return folder.Stat("");
  mark.inode = stream.Value().low;
  return mark;
}

Result<std::optional<ForeignSteps>> ReadForeignSteps(const ForeignFolder& folder) {
  if (!folder.file().empty()) return std::optional<ForeignSteps>();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder.List(""));
  ForeignSteps out;
  for (const DirectoryEntry& entry : entries) {
    // A symlink is a step if Subfolder() accepts its target.
    if (entry.kind != FileKind::kDirectory && entry.kind != FileKind::kSymlink) continue;
    const std::optional<std::uint64_t> iteration = IterationOf(entry.name);
    if (!iteration) continue;
    const Result<ForeignFolder> below = folder.Subfolder(entry.name);
    // The directory is from a save that has not ended, or it is not a checkpoint.
    if (!below.ok() || FindForeignFormat(below.value()) == nullptr) continue;
    out.steps.push_back({.name = entry.name, .generation = *iteration});
  }
  if (out.steps.empty()) return std::optional<ForeignSteps>();
  std::sort(out.steps.begin(), out.steps.end(),
            [](const ForeignStep& a, const ForeignStep& b) { return a.name < b.name; });
  out.latest = LatestStep(folder, out.steps);
  return std::optional<ForeignSteps>(std::move(out));
}

}  // namespace tensormount
