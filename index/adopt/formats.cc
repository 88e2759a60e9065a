// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "index/adopt/format.h"

namespace tensormount {
namespace {

// What is there instead of a checkpoint, where that can be told.
std::string Instead(const ForeignFolder& folder) {
  if (!folder.file().empty()) {
    return "no file of a format that we read (.safetensors, .pt, .npz and such)";
  }
  const Result<std::vector<DirectoryEntry>> entries = folder.List("");
  if (!entries.ok()) return entries.status().message();
  if (entries.value().empty()) return "an empty folder";
  const auto any = [&](auto matches) {
    return std::any_of(entries.value().begin(), entries.value().end(), matches);
  };
  const auto named = [&](std::string_view name) {
    return any([&](const DirectoryEntry& e) { return e.name == name; });
  };
  const auto ends = [&](std::string_view suffix) {
    return any([&](const DirectoryEntry& e) { return e.name.ends_with(suffix); });
  };
  if (ends(".distcp")) return ".distcp files without .metadata: a save that did not end";
  if (named(".metadata.tmp")) return "a .metadata.tmp without .metadata: a save that did not end";
  if (ends(".ckpt-manifest.tmp") || named("data") || named("manifest")) {
    return "no COMMIT and no store.json in it: a checkpoint of tensormount whose save did not end, "
           "or none";
  }
  if (named("variables") || ends(".h5") || ends(".gguf") || ends(".onnx")) {
    return "in a format that we do not read";
  }
  return "no COMMIT, no store.json, and nothing that a format which we read begins with";
}

}  // namespace

// Asked in this order: what names itself most clearly comes first.
std::span<const ForeignFormat* const> ForeignFormats() {
  static const std::vector<const ForeignFormat*> kFormats = {
      &MegatronZarrFormat(),
      &OlmoFormat(),
      &TorchDcpFormat(),
      &TorchDcpRankFormat(),
      &HuggingFaceFormat(),
      &TorchSaveFormat(),
      &NumpyFormat(),
  };
  return kFormats;
}

const ForeignFormat* FindForeignFormat(const ForeignFolder& folder) {
  for (const ForeignFormat* format : ForeignFormats()) {
    if (format->Probe(folder)) return format;
  }
  return nullptr;
}

Result<ForeignContent> ReadForeign(const ForeignFolder& folder) {
  const ForeignFormat* format = FindForeignFormat(folder);
  if (format == nullptr) {
    return Status(Code::kUnsupported, folder.path() + ": " + Instead(folder));
  }
  ForeignBuilder builder(folder, std::string(format->name()));
  TENSORMOUNT_RETURN_IF_ERROR(format->Read(folder, builder));
  return builder.Finish();
}

}  // namespace tensormount
