// SPDX-License-Identifier: Apache-2.0
// The files beside the tensors in a Hugging Face directory (model_files.h).
#include "index/foreign/model_files.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "index/records/glob_captures.h"

namespace tensormount {
namespace {

// Patterns of names. Tokenizers and templates may have several files.
constexpr std::array<std::string_view, 9> kModelFiles = {
    "config.json",   "generation_config.json",  "tokenizer*.json",   "tokenizer.model",
    "vocab.*",       "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template*"};

}  // namespace

bool IsModelFile(std::string_view name) {
  return std::any_of(kModelFiles.begin(), kModelFiles.end(), [&](std::string_view pattern) {
    return GlobCaptures(pattern, name).has_value();
  });
}

Result<std::shared_ptr<const ModelFiles>> ReadModelFiles(FileSystem& fs,
                                                         const std::string& directory) {
  constexpr std::uint64_t kMaxModelFile = std::uint64_t{64} << 20;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(directory));
  auto files = std::make_shared<ModelFiles>();
  for (const DirectoryEntry& entry : entries) {
    if (!IsModelFile(entry.name)) continue;
    const std::string path = JoinPath(directory, entry.name);
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
    if (info.kind != FileKind::kFile) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes, fs.ReadFile(path, kMaxModelFile));
    files->emplace(entry.name, std::make_shared<const std::string>(std::move(bytes)));
  }
  if (files->empty()) {
    return Status(Code::kNotFound,
                  directory + ": has no file of a model, such as config.json or tokenizer.json");
  }
  return std::shared_ptr<const ModelFiles>(std::move(files));
}

Status AddModelFiles(const ForeignFolder& folder, ForeignBuilder& builder) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder.List(""));
  for (const DirectoryEntry& entry : entries) {
    if (!IsModelFile(entry.name)) continue;
    const Result<FileInfo> info = folder.Stat(entry.name);
    if (info.ok() && info.value().kind == FileKind::kDirectory) continue;
    const Result<std::uint32_t> file =
        info.ok() ? builder.AddFile(entry.name) : Result<std::uint32_t>(info.status());
    if (!file.ok()) {
      builder.Warn("object " + entry.name + ": left out: " + file.status().message());
      continue;
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        builder.AddObject(entry.name, file.value(), 0, builder.FileLength(file.value())));
  }
  return {};
}

}  // namespace tensormount
