// SPDX-License-Identifier: Apache-2.0
// Stagings that mounts share (docs/format.md, "Staging of mounts"), a part of Store of store.h. The
// mounts have only the directory in common and do not communicate, so they use a lock file.
#include <algorithm>
#include <array>
#include <optional>

#include <nlohmann/json.hpp>

#include "index/records/store_paths.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kMaxSharedFileBytes = 64 * 1024;

// The content of staging.json: the data that rank 0 keeps in memory during a library save. They are
// on disk here, because any process may continue or publish the staging.
std::string EncodeShared(const Staging& staging) {
  nlohmann::ordered_json json;
  json["name"] = staging.name;
  json["uuid"] = staging.uuid.ToString();
  json["generation"] = staging.generation;
  json["parent"] = staging.parent.ToString();
  json["parent_name"] = staging.parent_name;
  // Bytes that are not UTF-8 are replaced. This does no harm, because the parent's name is only a
  // hint where to find the parent's uuid.
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

Status DecodeShared(std::string_view text, const std::string& path, Staging& staging) {
  const auto bad = [&](const std::string& why) {
    return Status(Code::kDataLoss, path + ": " + why);
  };
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return bad("not a JSON object");
  const auto uuid = [&](const char* name) -> std::optional<Uuid> {
    const auto it = json.find(name);
    if (it == json.end() || !it->is_string()) return std::nullopt;
    return Uuid::Parse(it->get_ref<const std::string&>());
  };
  const std::optional<Uuid> own = uuid("uuid");
  const std::optional<Uuid> parent = uuid("parent");
  if (!own || !parent) return bad("\"uuid\" or \"parent\" is not 32 hex digits");
  const auto generation = json.find("generation");
  if (generation == json.end() || !generation->is_number_unsigned()) {
    return bad("\"generation\" is not a number");
  }
  staging.uuid = *own;
  staging.parent = *parent;
  staging.generation = generation->get<std::uint64_t>();
  const auto name = json.find("parent_name");
  if (name != json.end() && name->is_string()) staging.parent_name = name->get<std::string>();
  return Status();
}

}  // namespace

namespace store_moves {

Result<SweptShared> SweepShared(FileSystem& fs, const std::string& directory, bool dry_run) {
  const std::string mark = JoinPath(directory, store_paths::kSharedFile);
  SweptShared swept_files;
  if (!fs.Exists(mark)) return swept_files;
  const auto sweep = [&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit commit, ReadCommit(fs, directory));
    // COMMIT must belong to this staging: another checkpoint's COMMIT would list none of the files
    // here, so all of them would be deleted.
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, fs.ReadFile(mark, kMaxSharedFileBytes));
    Staging staging;
    TENSORMOUNT_RETURN_IF_ERROR(DecodeShared(text, mark, staging));
    if (staging.uuid != commit.record.uuid) {
      return Status(Code::kDataLoss, directory + ": its COMMIT belongs to checkpoint " +
                                         commit.record.uuid.ToString() + ", but its " +
                                         std::string(store_paths::kSharedFile) + " to " +
                                         staging.uuid.ToString() + ": nothing is deleted");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(directory));
    for (const DirectoryEntry& e : entries) {
      const bool leftover =
          e.name != store_paths::kSharedFile && store_paths::IsSharedLeftover(e.name);
      if (dry_run || !leftover) continue;
      TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(JoinPath(directory, e.name)));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> files,
                                 fs.List(JoinPath(directory, "data")));
    for (const DirectoryEntry& e : files) {
      const std::string name = "data/" + e.name;
      if (e.kind == FileKind::kDirectory || commit.record.Find(name) != nullptr) continue;
      const Result<FileInfo> info = fs.LinkStat(JoinPath(directory, name));
      if (!dry_run) TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(JoinPath(directory, name)));
      if (info.ok() && info.value().links <= 1) swept_files.bytes += info.value().size;
      swept_files.data_files.push_back(name);
    }
    if (dry_run) return Status();
    // Deletions are made durable before staging.json is removed, because without it gc would not
    // sweep again.
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(JoinPath(directory, "data")));
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(directory));
    return fs.RemoveFile(mark);
  };
  const Status swept = sweep();
  if (!swept.ok() && swept.code() != Code::kNotFound) return swept;
  return swept_files;
}

}  // namespace store_moves

Result<Staging> Store::BeginShared(const std::string& name,
                                   std::span<const std::string_view> folders) const {
  FileSystem& fs = *fs_;
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  const std::string staging_folder = JoinPath(path_, store_paths::kStagingFolder);
  const std::string directory = JoinPath(staging_folder, name);
  // A cheap check for the common case; RenameNoReplace below decides.
  if (fs.Exists(directory)) return Status(Code::kAlreadyExists, directory + ": exists already");
  Staging staging;
  TENSORMOUNT_RETURN_IF_ERROR(ClaimPlace(name, IfExists::kFail, BaseChoice::kNone, {}, staging));
  staging.uuid = Uuid::Random();
  staging.directory = directory;
  // The leading dot distinguishes the temporary directory from stagings.
  const std::string temporary = JoinPath(staging_folder, ".new-" + staging.uuid.ToString());
  const auto build = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(temporary));
    const auto make = [&](std::string_view folder) {
      return fs.CreateDirectory(JoinPath(temporary, folder));
    };
    TENSORMOUNT_RETURN_IF_ERROR(make("data"));
    TENSORMOUNT_RETURN_IF_ERROR(make("manifest"));
    for (const std::string_view folder : folders) TENSORMOUNT_RETURN_IF_ERROR(make(folder));
    const auto write = [&](std::string_view file, std::string_view text) {
      return fs.WriteFileDurably(JoinPath(temporary, file), text);
    };
    TENSORMOUNT_RETURN_IF_ERROR(write(store_paths::kLockFile, ""));
    TENSORMOUNT_RETURN_IF_ERROR(write(store_paths::kUuidFile, staging.uuid.ToString()));
    TENSORMOUNT_RETURN_IF_ERROR(write(store_paths::kSharedFile, EncodeShared(staging)));
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(temporary));
    TENSORMOUNT_RETURN_IF_ERROR(fs.RenameNoReplace(temporary, directory));
    // All directories on the path are synced, even those that other processes created, because
    // writers later sync only the files below them.
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(staging_folder));
    TENSORMOUNT_RETURN_IF_ERROR(store_moves::SyncClaim(fs, path_, staging.generation));
    return fs.SyncDirectory(path_);
  };
  // build() creates everything in a temporary directory, so that others see a complete staging or
  // none.
  const Status built = build();
  if (built.ok()) return staging;
  (void)fs.RemoveTree(temporary);  // If this fails, gc removes it.
  return built;
}

Result<Staging> Store::OpenShared(const std::string& name) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  Staging staging;
  staging.store = path_;
  staging.name = name;
  staging.directory = JoinPath(JoinPath(path_, store_paths::kStagingFolder), name);
  const std::string path = JoinPath(staging.directory, store_paths::kSharedFile);
  const Result<std::string> text = fs_->ReadFile(path, kMaxSharedFileBytes);
  if (text.status().code() == Code::kNotFound) {
    if (!fs_->Exists(staging.directory)) return Status(Code::kNotFound, staging.directory);
    return Status(
        Code::kUnsupported,
        staging.directory +
            ": the staging directory belongs to a save through the library, not through a mount");
  }
  if (!text.ok()) return text.status();
  TENSORMOUNT_RETURN_IF_ERROR(DecodeShared(text.value(), path, staging));
  return staging;
}

Result<std::vector<std::string>> Store::ListShared() const {
  const std::string folder = JoinPath(path_, store_paths::kStagingFolder);
  const Result<std::vector<DirectoryEntry>> entries = fs_->List(folder);
  std::vector<std::string> names;
  if (entries.status().code() == Code::kNotFound) return names;
  if (!entries.ok()) return entries.status();
  for (const DirectoryEntry& e : entries.value()) {
    if (e.kind != FileKind::kDirectory || !CheckCheckpointName(e.name).ok()) continue;
    if (fs_->Exists(JoinPath(JoinPath(folder, e.name), store_paths::kSharedFile))) {
      names.push_back(e.name);
    }
  }
  return names;
}

}  // namespace tensormount
