// SPDX-License-Identifier: Apache-2.0
// Store of store.h: opening and creating a store, names, listing, the latest checkpoint, and Begin.
// Publishing, arbitration, fsck and gc are separate protocols, each in a file of its own.
//
// Begin claims a generation by making a directory in .generations/, so that no two saves get the
// same number. Gc deletes all claims except the highest, in ascending order.
#include "index/store/store.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <optional>
#include <tuple>

#include <nlohmann/json.hpp>

#include "base/file_system_for.h"
#include "base/machine.h"
#include "base/parallel.h"
#include "index/records/store_paths.h"
#include "index/store/bucket.h"
#include "index/store/known_generations.h"
#include "index/store/pins.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

using store_paths::kCommitFile;
using store_paths::kGenerationsFolder;
using store_paths::kStagingFolder;
using store_paths::kSuperblockFile;
using store_paths::kTrashFolder;

// Largest store.json that is read. It normally has about 200 bytes, but anybody may have written
// the file.
constexpr std::uint64_t kMaxSuperblockBytes = 64 * 1024;
constexpr std::string_view kFormatName = "tensormount-store";
// Number of checkpoints in a page cache for which another thread pays off.
constexpr std::size_t kLooksAThread = 256;
// Number of checkpoints whose time tells how many threads look at the others.
constexpr std::size_t kLooksAlone = 8;
// Number of COMMITs that a save read itself, from which on it writes them to the file of known
// generations.
constexpr std::size_t kWorthWriting = 32;
// Age of a directory's change time from which on another change gets another time.
constexpr std::int64_t kSettledSeconds = 2;

struct Superblock {
  Uuid uuid;
  std::uint64_t unknown_read_compatible = 0;
};

// Number of threads to look at `count` checkpoints, each of which takes `each`. Over a network a
// look waits for one to three round trips, so up to 16 are made at once, whatever the number of
// cores.
int LookThreads(std::size_t count, std::chrono::steady_clock::duration each) {
  const bool waits = each > std::chrono::microseconds(100);
  const std::size_t most = waits ? 16 : std::min<std::size_t>(16, AllowedCores());
  return static_cast<int>(std::clamp<std::size_t>(count / (waits ? 4 : kLooksAThread), 1, most));
}

// Whether the COMMIT of a usable checkpoint was read, not only known from the file of known
// generations.
bool WasRead(const CheckpointListing& listing) { return listing.commit_bytes != 0; }

std::string EncodeSuperblock(const Uuid& uuid) {
  nlohmann::ordered_json json;
  json["format"] = std::string(kFormatName);
  json["version"] = kFormatVersion;
  json["uuid"] = uuid.ToString();
  json["compatible"] = 0;
  json["read_compatible"] = 0;
  json["incompatible"] = 0;
  return json.dump(2) + "\n";
}

std::string Hex(std::uint64_t bits) {
  char text[17] = {};
  const auto end = std::to_chars(text, text + 16, bits, 16);
  return "0x" + std::string(text, end.ptr);
}

// After "format", the incompatible feature bits are checked first, because unknown ones may change
// the meaning of the other fields.
Result<Superblock> DecodeSuperblock(std::string_view text, const std::string& path) {
  const auto bad = [&](const std::string& why) {
    return Status(Code::kDataLoss, path + ": " + why);
  };
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return bad("not a JSON object");
  const auto format = json.find("format");
  if (format == json.end() || !format->is_string() ||
      format->get_ref<const std::string&>() != kFormatName) {
    return bad("\"format\" is not \"" + std::string(kFormatName) + "\"");
  }
  const auto number = [&](const char* name) -> std::optional<std::uint64_t> {
    const auto it = json.find(name);
    if (it == json.end() || !it->is_number_unsigned()) return std::nullopt;
    return it->get<std::uint64_t>();
  };
  const std::optional<std::uint64_t> incompatible = number("incompatible");
  if (!incompatible) return bad("\"incompatible\" is not a number");
  if ((*incompatible & ~kKnownIncompatible) != 0) {
    return Status(Code::kUnsupported,
                  path + ": a store of a newer format: incompatible feature bits " +
                      Hex(*incompatible & ~kKnownIncompatible));
  }
  const std::optional<std::uint64_t> version = number("version");
  if (!version || *version == 0) return bad("\"version\" is not a number");
  if (*version > kFormatVersion) {
    return Status(Code::kUnsupported,
                  path + ": a store of format version " + std::to_string(*version) +
                      ", but this version knows only " + std::to_string(kFormatVersion));
  }
  const std::optional<std::uint64_t> read_compatible = number("read_compatible");
  if (!read_compatible) return bad("\"read_compatible\" is not a number");
  const auto uuid = json.find("uuid");
  if (uuid == json.end() || !uuid->is_string()) return bad("\"uuid\" is missing");
  const std::optional<Uuid> parsed = Uuid::Parse(uuid->get_ref<const std::string&>());
  if (!parsed) return bad("\"uuid\" is not 32 hex digits");
  return Superblock{*parsed, *read_compatible};
}

std::string ParentOrRoot(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
}

// The existing part of a path: the real path of the last existing directory, and the names below it
// that do not exist, the deepest first.
struct ExistingPart {
  std::string resolved;
  std::vector<std::string> missing;
};
Result<ExistingPart> FindExisting(FileSystem& fs, const std::string& path) {
  std::string existing = path;
  ExistingPart part;
  Result<std::string> resolved = fs.Resolve(existing);
  while (!resolved.ok() && resolved.status().code() == Code::kNotFound) {
    existing = WithoutTrailingSlashes(existing);
    const std::size_t slash = existing.rfind('/');
    const std::string name = slash == std::string::npos ? existing : existing.substr(slash + 1);
    if (name.empty() || name == "." || name == "..") return resolved.status();
    part.missing.push_back(name);
    existing = slash == std::string::npos ? "." : slash == 0 ? "/" : existing.substr(0, slash);
    resolved = fs.Resolve(existing);
  }
  if (!resolved.ok()) return resolved.status();
  part.resolved = std::move(resolved).value();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(part.resolved));
  if (info.kind != FileKind::kDirectory) {
    return Status(Code::kInvalidArgument, path + ": " + part.resolved + " is not a directory");
  }
  return part;
}

// Refuses a new store inside a checkpoint, which it would damage, or inside another store, which
// would list it. Directories that cannot be read are ignored.
Status CheckRoomForStore(FileSystem& fs, const std::string& path, const ExistingPart& part) {
  const auto holds = [&](const std::string& folder, std::string_view name) {
    return fs.LinkStat(JoinPath(folder, name)).ok();
  };
  for (std::string at = part.resolved;; at = ParentOrRoot(at)) {
    // Both tests below use the result of one look-up, because another process may create this store
    // between two look-ups.
    const bool is_store = holds(at, kSuperblockFile);
    if (is_store && part.missing.empty() && at == part.resolved) return Status();
    if (holds(at, kCommitFile) && holds(at, "manifest")) {
      return Status(Code::kInvalidArgument, path + ": cannot create a store there: " + at +
                                                " is a checkpoint. Checkpoints are stored side by "
                                                "side, as STORE/NAME");
    }
    if (is_store) {
      return Status(Code::kInvalidArgument, path + ": cannot create a store there: " + at +
                                                " is a store. Its checkpoints are STORE/NAME, "
                                                "without directories between");
    }
    if (at == "/") return Status();
  }
}

// Creates the missing directories of `path` durably and returns its real path. Every directory is
// synced into its parent before anything is made in it. A process that finds an existing directory
// therefore only needs to sync its parent.
Result<std::string> MakeStoreFolder(FileSystem& fs, const std::string& path) {
  if (fs.object_writer() != nullptr) {  // A bucket has no directories.
    TENSORMOUNT_RETURN_IF_ERROR(bucket::CheckStorePath(path));
    return WithoutTrailingSlashes(path);
  }
  TENSORMOUNT_RETURN_IF_ERROR(fs.Need(Ability::kWrite, path));
  // Without RENAME_NOREPLACE two saves of the same name could overwrite each other.
  TENSORMOUNT_RETURN_IF_ERROR(fs.Need(Ability::kRenameNoReplace, path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ExistingPart part, FindExisting(fs, path));
  TENSORMOUNT_RETURN_IF_ERROR(CheckRoomForStore(fs, path, part));
  std::string at = part.resolved;
  // Another process may have created the directory and not synced it yet. Errors because this
  // process may not open the parent are ignored: no save creates directories in such a parent.
  if (at != "/") {
    const Status synced = fs.SyncDirectory(ParentOrRoot(at));
    if (!synced.ok() && synced.code() != Code::kPermissionDenied &&
        synced.code() != Code::kReadOnly && synced.code() != Code::kInvalidArgument) {
      return synced;
    }
  }
  for (auto it = part.missing.rbegin(); it != part.missing.rend(); ++it) {
    const std::string below = JoinPath(at, *it);
    TENSORMOUNT_RETURN_IF_ERROR(fs.EnsureDirectory(below));
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(at));
    at = below;
  }
  return at;
}

Result<Superblock> ReadSuperblock(FileSystem& fs, const std::string& store) {
  const std::string path = JoinPath(store, kSuperblockFile);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, fs.ReadFile(path, kMaxSuperblockBytes));
  return DecodeSuperblock(text, path);
}

// Creates store.json. One of several concurrent creators wins by a no-replace rename, and all read
// the winner's file.
Status CreateSuperblock(FileSystem& fs, const std::string& store) {
  if (ObjectWriter* const writer = fs.object_writer()) {
    return bucket::CreateSuperblock(*writer, store, EncodeSuperblock(Uuid::Random()));
  }
  const std::string temporary =
      JoinPath(store, "." + std::string(kSuperblockFile) + "." + Uuid::Random().Short());
  TENSORMOUNT_RETURN_IF_ERROR(fs.WriteFileDurably(temporary, EncodeSuperblock(Uuid::Random())));
  const Status moved = fs.RenameNoReplace(temporary, JoinPath(store, kSuperblockFile));
  if (!moved.ok()) (void)fs.RemoveFile(temporary);  // If this fails, gc removes it.
  if (!moved.ok() && moved.code() != Code::kAlreadyExists) return moved;
  return fs.SyncDirectory(store);
}

std::optional<std::uint64_t> ParseGeneration(const std::string& name) {
  std::uint64_t n = 0;
  const auto end = std::from_chars(name.data(), name.data() + name.size(), n);
  if (end.ec != std::errc() || end.ptr != name.data() + name.size()) return std::nullopt;
  return n;
}

}  // namespace

namespace store_moves {

Status SuperblockDamage(FileSystem& fs, const std::string& store) {
  const std::string path = JoinPath(store, kSuperblockFile);
  const Result<std::string> text = fs.ReadFile(path, kMaxSuperblockBytes);
  if (text.status().code() == Code::kNotFound) return text.status();
  if (!text.ok()) return Status();
  const Status decoded = DecodeSuperblock(text.value(), path).status();
  return decoded.code() == Code::kDataLoss ? decoded : Status();
}

Status RemakeSuperblock(FileSystem& fs, const std::string& store) {
  const std::string path = JoinPath(store, kSuperblockFile);
  const Status aside = fs.RenameNoReplace(
      path, JoinPath(store, "." + std::string(kSuperblockFile) + "." + Uuid::Random().Short()));
  if (!aside.ok() && aside.code() != Code::kNotFound) return aside;
  return CreateSuperblock(fs, store);
}

}  // namespace store_moves

// A name must be one path component. Leading dots are reserved for the store, and "latest" resolves
// to the newest checkpoint.
Status CheckCheckpointName(std::string_view name) {
  const auto bad = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, "checkpoint name \"" + std::string(name.substr(0, 255)) +
                                              "\": " + std::string(why));
  };
  if (name.empty()) return bad("the name is empty");
  if (name.size() > 255) return bad("the name has more than 255 bytes");
  if (name.front() == '.') return bad("begins with a dot");
  if (name.find('/') != std::string_view::npos) return bad("contains a slash");
  if (name.find('\0') != std::string_view::npos) return bad("contains a NUL");
  if (name == "latest" || name == kSuperblockFile || name == store_paths::kPolicyFile) {
    return bad("reserved");
  }
  return Status();
}

Result<Store> Store::Open(FileSystem& fs, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string resolved, fs.Resolve(path));
  Result<Superblock> superblock = ReadSuperblock(fs, resolved);
  if (superblock.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, path + (store_paths::LooksLikeStore(fs, resolved)
                                               ? ": " + store_paths::MissingSuperblockMessage(path)
                                               : std::string(": not a store (no store.json)")));
  }
  if (!superblock.ok()) return superblock.status();
  return Store(fs, resolved, superblock.value().uuid, superblock.value().unknown_read_compatible);
}

Result<Store> Store::OpenOrCreate(FileSystem& fs, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string resolved, MakeStoreFolder(fs, path));
  Result<Superblock> superblock = ReadSuperblock(fs, resolved);
  if (superblock.status().code() == Code::kNotFound) {
    TENSORMOUNT_RETURN_IF_ERROR(CreateSuperblock(fs, resolved));
    superblock = ReadSuperblock(fs, resolved);
  }
  if (!superblock.ok()) return superblock.status();
  return Store(fs, resolved, superblock.value().uuid, superblock.value().unknown_read_compatible);
}

Result<Store> Store::OpenOrCreate(FileSystem& fs, const std::string& path,
                                  const std::string& name) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  if (fs.object_writer() != nullptr) {
    return Status(Code::kUnsupported,
                  path +
                      ": only saves, imports and copies make checkpoints in a bucket. Make it on a "
                      "file system; `tensormount copy STORE/" +
                      name + " " + path + "` copies it");
  }
  const std::string taken = JoinPath(path, name);
  if (fs.Exists(taken) && !fs.Exists(JoinPath(path, kSuperblockFile)) &&
      !store_moves::IsEmptyDirectory(fs, taken)) {
    return Status(Code::kAlreadyExists, taken + ": not a checkpoint, because " + path +
                                            " is not a store, so it is not replaced");
  }
  return OpenOrCreate(fs, path);
}

Result<Store> Store::Open(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(path));
  return Open(*fs, path);
}

Result<Store> Store::OpenOrCreate(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(path));
  return OpenOrCreate(*fs, path);
}

std::string Store::CheckpointPath(std::string_view name) const { return JoinPath(path_, name); }

Status Store::CheckWritable() const {
  TENSORMOUNT_RETURN_IF_ERROR(fs_->Need(Ability::kWrite, path_));
  return CheckFeatures();
}

Status Store::CheckChangeable() const {
  return fs_->object_writer() != nullptr ? CheckFeatures() : CheckWritable();
}

Status Store::CheckFeatures() const {
  if (unknown_read_compatible_ == 0) return Status();
  return Status(Code::kReadOnly,
                path_ + ": a store of a newer format, which this version can only read: " +
                    "read-compatible feature bits " + Hex(unknown_read_compatible_));
}

Result<std::vector<std::string>> Store::Names() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs_->List(path_));
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : entries) {
    if (entry.kind != FileKind::kDirectory || !CheckCheckpointName(entry.name).ok()) continue;
    names.push_back(entry.name);
  }
  return names;
}

Status Store::ReadListings(const std::vector<std::string>& names, const Look& look,
                           std::vector<CheckpointListing>& out) const {
  using Clock = std::chrono::steady_clock;
  out.assign(names.size(), {});
  const std::size_t alone = std::min(names.size(), kLooksAlone);
  const Clock::time_point begin = Clock::now();
  // The last ones, which a save mostly has to read.
  for (std::size_t i = names.size() - alone; i < names.size(); ++i) out[i] = look(i);
  const Clock::duration each = (Clock::now() - begin) / std::max<std::size_t>(alone, 1);
  struct Nothing {};
  TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Nothing>(
      names.size() - alone, LookThreads(names.size() - alone, each), [&](std::size_t i, Nothing&) {
        out[i] = look(i);
        return Status();
      }));
  // Entries that exceeded the limit of open files during the parallel reads are read again, one by
  // one.
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].problem.code() == Code::kResourceExhausted) out[i] = FindListing(names[i]);
  }
  return Status();
}

Result<std::vector<CheckpointListing>> Store::List() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Names());
  std::vector<CheckpointListing> out;
  TENSORMOUNT_RETURN_IF_ERROR(ReadListings(
      names, [&](std::size_t i) { return FindListing(names[i]); }, out));
  // Entries that were removed meanwhile are dropped.
  std::erase_if(out, [](const auto& c) { return c.problem.code() == Code::kNotFound; });
  return out;
}

CheckpointListing Store::FindListing(const std::string& name, CommitRecord* record) const {
  using State = CheckpointListing::State;
  const std::string directory = CheckpointPath(name);
  CheckpointListing listing;
  listing.name = name;
  const auto bad = [&](State state, Status problem) {
    listing.state = state;
    listing.problem = std::move(problem);
    return listing;
  };
  // The bytes are read first and then decoded, because the error of a read has the same code as
  // damage, and does not prove damage.
  Result<std::string> bytes = store_moves::ReadCommitBytes(*fs_, directory);
  for (int again = 0; again < 3 && !bytes.ok(); ++again) {
    const Code code = bytes.status().code();
    if (code != Code::kNotFound && code != Code::kStale) break;
    const Status there = fs_->LinkStat(directory).status();
    if (!there.ok()) return bad(State::kUnread, there);
    // The read may have failed because another checkpoint was just being renamed to this name.
    bytes = store_moves::ReadCommitBytes(*fs_, directory);
  }
  if (bytes.status().code() == Code::kNotFound && fs_->object_writer() != nullptr) {
    // A copy that has not ended, a removal, or objects of others: fsck tells.
    return bad(State::kNoCheckpoint,
               Status(Code::kNotFound, directory + ": no such checkpoint: there is no COMMIT"));
  }
  if (bytes.status().code() == Code::kNotFound) {
    for (const char* part : {"manifest", "data"}) {
      const Status there = fs_->LinkStat(JoinPath(directory, part)).status();
      if (there.code() == Code::kNotFound) {
        return bad(State::kNoCheckpoint,
                   Status(Code::kDataLoss,
                          directory + ": the directory is not a checkpoint: it has no COMMIT"));
      }
      if (!there.ok()) return bad(State::kUnread, there);
    }
    return bad(
        State::kDamaged,
        Status(Code::kDataLoss,
               directory + ": the checkpoint has no COMMIT: COMMIT was lost or never written"));
  }
  if (!bytes.ok()) {
    const Result<FileInfo> info = fs_->LinkStat(JoinPath(directory, kCommitFile));
    const bool is_file = !info.ok() || info.value().kind == FileKind::kFile;
    return bad(is_file ? State::kUnread : State::kDamaged, bytes.status());
  }
  Result<DecodedCommit> commit = DecodeCommit(bytes.value(), JoinPath(directory, kCommitFile));
  if (!commit.ok()) {
    return bad(commit.status().code() == Code::kDataLoss ? State::kDamaged : State::kUnread,
               commit.status());
  }
  listing.uuid = commit.value().record.uuid;
  listing.generation = commit.value().record.generation;
  listing.parent = commit.value().record.parent;
  listing.derived = (commit.value().record.compatible & kCommitDerived) != 0;
  listing.commit_bytes = bytes.value().size();
  listing.commit_damage = std::move(commit.value().damage);
  if (record != nullptr) *record = std::move(commit.value().record);
  return listing;
}

Result<std::vector<CheckpointListing>> Store::ListForSave() const {
  if (!fs_->Can(Ability::kStamps)) return List();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Names());
  if (names.size() < kFewestKnownGenerations) return List();
  const std::vector<KnownGeneration> before = ReadKnownGenerations(*fs_, path_);
  const std::int64_t now = fs_->NowSeconds();
  std::vector<FileInfo> directories(names.size());
  std::vector<CheckpointListing> out;
  const auto look = [&](std::size_t i) {
    // The directory is looked at before COMMIT is read, so that a later change of COMMIT is a
    // change of what was seen.
    const Result<FileInfo> directory = fs_->LinkStat(CheckpointPath(names[i]));
    if (directory.ok()) {
      directories[i] = directory.value();
      const auto known = std::ranges::lower_bound(before, names[i], {}, &KnownGeneration::name);
      if (known != before.end() && known->IsOf(names[i], directory.value())) {
        CheckpointListing listing;
        listing.name = known->name;
        listing.uuid = known->uuid;
        listing.generation = known->generation;
        listing.derived = known->derived;
        return listing;
      }
    }
    return FindListing(names[i]);
  };
  TENSORMOUNT_RETURN_IF_ERROR(ReadListings(names, look, out));
  // The two that the save uses: the latest, and the one with the highest generation.
  const auto agrees = [&](const CheckpointListing& used) {
    if (WasRead(used)) return true;
    const CheckpointListing now_read = FindListing(used.name);
    return now_read.problem.ok() && now_read.uuid == used.uuid &&
           now_read.generation == used.generation && now_read.derived == used.derived;
  };
  const CheckpointListing* const latest = Highest(out);
  const CheckpointListing& last = *std::ranges::max_element(
      out, {}, [](const auto& one) { return one.problem.ok() ? one.generation : 0; });
  if (latest != nullptr && (!agrees(*latest) || (&last != latest && !agrees(last)))) return List();
  std::vector<KnownGeneration> after;
  std::size_t more = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const FileInfo& directory = directories[i];
    // A directory that changed just now may change again without a new time.
    if (!out[i].problem.ok() || directory.inode == 0 ||
        directory.ctime_seconds > now - kSettledSeconds) {
      continue;
    }
    more += WasRead(out[i]) ? 1 : 0;
    after.push_back({names[i], directory.inode, directory.ctime_seconds,
                     directory.ctime_nanoseconds, out[i].uuid, out[i].generation, out[i].derived});
  }
  if (more >= kWorthWriting) WriteKnownGenerations(*fs_, path_, after);
  return out;
}

const CheckpointListing* Store::Highest(const std::vector<CheckpointListing>& all) {
  const CheckpointListing* best = nullptr;
  for (const CheckpointListing& c : all) {
    if (!c.problem.ok()) continue;
    const auto rank = [](const CheckpointListing& one) {
      return std::tuple(!one.derived, one.generation, one.uuid, one.name);
    };
    if (best == nullptr || rank(*best) < rank(c)) best = &c;
  }
  return best;
}

Result<LatestCheckpoint> Store::Latest() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, List());
  return LatestOf(all);
}

Result<LatestCheckpoint> Store::LatestOf(const std::vector<CheckpointListing>& all) const {
  LatestCheckpoint latest;
  for (const CheckpointListing& c : all) {
    if (c.state == CheckpointListing::State::kUnread) {
      return c.problem.WithContext(
          "checkpoint " + c.name +
          " cannot be read now and may be the latest; pass a checkpoint by name");
    }
    if (c.state == CheckpointListing::State::kDamaged) {
      latest.warnings.push_back("checkpoint " + c.name +
                                " was skipped and may be newer: " + c.problem.message());
    }
  }
  const CheckpointListing* best = Highest(all);
  if (best == nullptr) {
    std::string why = path_ + ": the store has no checkpoint";
    for (const std::string& warning : latest.warnings) why += "; " + warning;
    return Status(Code::kNotFound, why);
  }
  static_cast<CheckpointListing&>(latest) = *best;
  return latest;
}

// Gc removes claims below the highest, in ascending order. So if the claim `seen`, which was the
// highest before our mkdir, still exists after it, gc has removed no claim above `seen`, and nobody
// has claimed our number before.
Result<std::uint64_t> Store::ClaimGeneration(std::uint64_t above) const {
  const std::string folder = JoinPath(path_, kGenerationsFolder);
  const auto list = [&]() -> Result<std::vector<std::uint64_t>> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs_->List(folder));
    std::vector<std::uint64_t> claims;
    for (const DirectoryEntry& e : entries) {
      if (const std::optional<std::uint64_t> n = ParseGeneration(e.name)) claims.push_back(*n);
    }
    return claims;
  };
  for (int attempt = 0; attempt < 10000; ++attempt) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> claims, list());
    const std::uint64_t seen = claims.empty() ? 0 : *std::max_element(claims.begin(), claims.end());
    const std::uint64_t base = std::max(seen, above);
    if (base >= std::numeric_limits<std::int64_t>::max()) {
      return Status(Code::kDataLoss, folder + ": generation " + std::to_string(base) +
                                         " is the largest possible, so no save can follow it");
    }
    const std::uint64_t mine = base + 1;
    const Status made = fs_->CreateDirectory(JoinPath(folder, std::to_string(mine)));
    if (made.code() == Code::kAlreadyExists) continue;
    TENSORMOUNT_RETURN_IF_ERROR(made);
    if (seen != 0) {
      const Status still = fs_->LinkStat(JoinPath(folder, std::to_string(seen))).status();
      if (still.ok()) return mine;
      if (still.code() != Code::kNotFound) return still;
    } else {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> now, list());
      if (now.size() == 1 && now[0] == mine) return mine;
    }
    // Gaps between generations are allowed: this claim stays, and the next number is tried.
  }
  return Status(Code::kBusy, folder + ": too many saves begin at the same time; try again");
}

// Once this claim exists, gc may remove a lower claim that a starting save has seen as the highest.
// That save then takes another number (ClaimGeneration).
Status Store::ClaimUpTo(std::uint64_t generation) const {
  const std::string folder = JoinPath(path_, kGenerationsFolder);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs_->List(folder));
  for (const DirectoryEntry& e : entries) {
    if (ParseGeneration(e.name).value_or(0) >= generation) return Status();
  }
  const Status made = fs_->CreateDirectory(JoinPath(folder, std::to_string(generation)));
  if (made.code() == Code::kAlreadyExists) return Status();
  TENSORMOUNT_RETURN_IF_ERROR(made);
  return store_moves::SyncClaim(*fs_, path_, generation);
}

Status Store::PrepareToWrite() const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckChangeable());
  if (fs_->object_writer() != nullptr) return {};
  for (const std::string_view folder : {kStagingFolder, kTrashFolder, kGenerationsFolder}) {
    TENSORMOUNT_RETURN_IF_ERROR(fs_->EnsureDirectory(JoinPath(path_, folder)));
  }
  return Status();
}

Status Store::CheckFree(const std::string& name) const {
  const std::string path = CheckpointPath(name);
  if (!fs_->Exists(path) || store_moves::IsEmptyDirectory(*fs_, path)) return Status();
  return Status(Code::kAlreadyExists, path + ": exists already");
}

Status Store::ClaimPlace(const std::string& name, IfExists if_exists, BaseChoice base,
                         const std::string& base_name, Staging& staging) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  TENSORMOUNT_RETURN_IF_ERROR(PrepareToWrite());
  if (if_exists == IfExists::kFail) TENSORMOUNT_RETURN_IF_ERROR(CheckFree(name));
  if (if_exists == IfExists::kReplace && fs_->Exists(CheckpointPath(name))) {
    TENSORMOUNT_RETURN_IF_ERROR(pins::CheckUnpinned(*fs_, path_, name));
  }
  staging.store = path_;
  staging.name = name;
  std::uint64_t highest = 0;
  // A checkpoint with an unreadable COMMIT must not stop saves, so its generation and uuid are not
  // used. The save still gets a higher generation, because ClaimGeneration also looks at the claims
  // in .generations/. Such a checkpoint cannot be the parent; this affects only mtimes and the
  // default base.
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, ListForSave());
  for (const CheckpointListing& c : all) {
    if (c.problem.ok()) highest = std::max(highest, c.generation);
  }
  if (const CheckpointListing* latest = Highest(all); latest != nullptr) {
    staging.parent = latest->uuid;
    staging.parent_name = latest->name;
  }
  if (base == BaseChoice::kLatest) {
    staging.base = staging.parent;
    staging.base_name = staging.parent_name;
  } else if (base == BaseChoice::kNamed) {
    const auto missing = [&] {
      return Status(Code::kNotFound, CheckpointPath(base_name) + ": no such checkpoint");
    };
    if (!CheckCheckpointName(base_name).ok()) return missing();
    const Result<FileInfo> there = fs_->LinkStat(CheckpointPath(base_name));
    const CheckpointListing found = FindListing(base_name);
    if (found.problem.code() == Code::kNotFound ||
        (there.ok() && there.value().kind != FileKind::kDirectory)) {
      return missing();
    }
    if (found.state == CheckpointListing::State::kNoCheckpoint) {
      return Status(Code::kNotFound, found.problem.message());
    }
    staging.base_problem = found.problem;
    if (found.problem.ok()) staging.base = found.uuid;
    staging.base_name = base_name;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(staging.generation, ClaimGeneration(highest));
  return Status();
}

Result<Staging> Store::Begin(const std::string& name, IfExists if_exists, BaseChoice base,
                             const std::string& base_name) const {
  const std::string staging_folder = JoinPath(path_, kStagingFolder);
  Staging staging;
  TENSORMOUNT_RETURN_IF_ERROR(ClaimPlace(name, if_exists, base, base_name, staging));
  // The directory's name, which ends with ".<8 hex digits>", must fit in 255 bytes.
  const std::string stem = name.substr(0, 255 - 9);
  for (int attempt = 0; attempt < 16; ++attempt) {
    staging.uuid = Uuid::Random();
    staging.directory = JoinPath(staging_folder, stem + "." + staging.ShortId());
    const Status made = fs_->CreateDirectory(staging.directory);
    if (made.code() == Code::kAlreadyExists) continue;
    TENSORMOUNT_RETURN_IF_ERROR(made);
    Status filled = fs_->WriteFileDurably(JoinPath(staging.directory, store_paths::kUuidFile),
                                          staging.uuid.ToString());
    for (const char* folder : {"data", "manifest"}) {
      if (filled.ok()) filled = fs_->CreateDirectory(JoinPath(staging.directory, folder));
    }
    if (filled.ok() && !staging.base.IsZero()) {
      // BASE gets its name by a rename, because a partly written BASE would stop prunes.
      const std::string hidden = JoinPath(staging.directory, ".base");
      filled = fs_->WriteFileDurably(hidden, staging.base.ToString() + "\n");
      if (filled.ok()) {
        filled = fs_->RenameNoReplace(hidden, JoinPath(staging.directory, store_paths::kBaseFile));
      }
    }
    if (filled.ok()) return staging;
    (void)fs_->RemoveTree(staging.directory);  // If this fails, gc removes it.
    return filled;
  }
  return Status(Code::kAlreadyExists,
                staging_folder + ": no free name for the staging directory of " + name);
}

Result<std::string> ResolveSourcePath(FileSystem& fs, std::string_view given,
                                      std::vector<std::string>* warnings) {
  std::string path = WithoutTrailingSlashes(given);
  const std::size_t slash = path.rfind('/');
  if (path.substr(slash == std::string::npos ? 0 : slash + 1) == "latest" && !fs.Exists(path)) {
    const std::string parent = slash == std::string::npos ? "."
                               : slash == 0               ? "/"
                                                          : path.substr(0, slash);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, parent));
    TENSORMOUNT_ASSIGN_OR_RETURN(const LatestCheckpoint latest, store.Latest());
    path = store.CheckpointPath(latest.name);
    if (warnings != nullptr) {
      warnings->insert(warnings->end(), latest.warnings.begin(), latest.warnings.end());
    }
  }
  return fs.Resolve(path);
}

Result<StoreAndName> SplitCheckpointPath(const std::string& path) {
  const std::string trimmed = WithoutTrailingSlashes(path);
  const std::size_t slash = trimmed.rfind('/');
  StoreAndName out;
  if (slash == std::string::npos) {
    out = {.store = ".", .name = trimmed};
  } else {
    out = {.store = slash == 0 ? "/" : trimmed.substr(0, slash), .name = trimmed.substr(slash + 1)};
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(out.name).WithContext(path));
  return out;
}

Result<std::string> NameInStore(const std::string& store, const std::string& given) {
  if (given.find('/') == std::string::npos && given != "latest") {
    TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(given));
    return given;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(store));
  const std::string named = given == "latest" ? JoinPath(store, given) : given;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, ResolveSourcePath(*fs, named));
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName parts, SplitCheckpointPath(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string own, fs->Resolve(store));
  if (parts.store != own) {
    return Status(Code::kInvalidArgument, given + ": not in the store " + store +
                                              ": files can be shared only within a store");
  }
  return parts.name;
}

Result<StoreAndName> SplitStagingPath(const std::string& path) {
  constexpr std::string_view kFolder = ".staging/";
  const std::size_t end = path.find_last_not_of('/') + 1;
  // Position of the path's last part; 0 if the path has no slash.
  const std::size_t name = path.substr(0, end).rfind('/') + 1;
  const std::string_view before = std::string_view(path).substr(0, name);
  if (name == end || !before.ends_with(kFolder)) {
    return Status(Code::kInvalidArgument, path + ": not of the form STORE/.staging/NAME");
  }
  const std::string_view store = before.substr(0, before.size() - kFolder.size());
  if (!store.empty() && store.back() != '/') {
    return Status(Code::kInvalidArgument, path + ": not of the form STORE/.staging/NAME");
  }
  return StoreAndName{store.empty() ? "." : std::string(store), path.substr(name, end - name)};
}

}  // namespace tensormount
