// SPDX-License-Identifier: Apache-2.0
// The part of pins.h about single checkpoints: pins, ephemeral marks, bases of running saves, the
// removal lock, and the removal of marks by gc. A pin that cannot be parsed protects its
// checkpoint, because ignoring the pin could delete a checkpoint that must stay.
#include "index/store/pins.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <set>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "index/read/pinned_commit.h"
#include "index/records/store_paths.h"
#include "index/store/retained_file.h"
#include "index/store/retention.h"
#include "index/store/store_moves.h"

namespace tensormount::pins {
namespace {

constexpr std::string_view kPinFormat = "tensormount-pin";
constexpr std::string_view kPruneLock = ".lock";
constexpr std::size_t kUuidDigits = 32;
constexpr std::size_t kMaxReason = 4096;
// Largest size of a file BASE, which has a line for each checkpoint that the save shares files
// with.
constexpr std::uint64_t kMaxBaseBytes = std::uint64_t{1} << 20;
// Longest wait for a removal to finish or to be undone.
constexpr double kRemovalSeconds = 30;

std::string PinsFolder(const std::string& store) {
  return JoinPath(store, store_paths::kPinsFolder);
}

// The uuid in a file name "<uuid>" or "<uuid>.<8 hex digits>".
std::optional<Uuid> UuidOfName(std::string_view name) {
  return name.size() < kUuidDigits ? std::nullopt : Uuid::Parse(name.substr(0, kUuidDigits));
}

// "user 1000 on HOST", for messages. The user's name is not used, because finding it would need a
// look-up in system databases.
std::string ProcessText() {
  char host[256] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  return "user " + std::to_string(geteuid()) + " on " + (host[0] == '\0' ? "?" : host);
}

std::string EncodePin(const PinnedCheckpoint& pin) {
  nlohmann::ordered_json json;
  json["format"] = std::string(kPinFormat);
  json["version"] = 1;
  json["uuid"] = pin.uuid;
  json["name"] = pin.name;
  json["reason"] = pin.reason;
  json["by"] = pin.by;
  json["created"] = pin.created;
  json["expires"] = pin.expires;
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// Decodes the file of a pin. If the file cannot be read or parsed, the result has a problem and
// never expires.
PinnedCheckpoint DecodePin(const Uuid& uuid, const RetainedText& read, std::int64_t now) {
  const Result<std::string>& text = read.text;
  PinnedCheckpoint pin;
  pin.unread = read.unread;
  pin.uuid = uuid.ToString();
  const auto bad = [&](std::string why) {
    pin.problem = std::move(why);
    pin.expires = 0;
    pin.expired = false;
    return pin;
  };
  if (!text.ok()) return bad(text.status().message());
  const nlohmann::json json = nlohmann::json::parse(text.value(), nullptr, false);
  if (!json.is_object()) return bad("not a JSON object");
  const auto word = [&](const char* name) {
    const auto it = json.find(name);
    return it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  pin.name = word("name");
  pin.reason = word("reason");
  pin.by = word("by");
  if (word("format") != kPinFormat) return bad("\"format\" is not the format of a pin");
  const auto version = json.find("version");
  if (version == json.end() || !version->is_number_unsigned() || *version != 1) {
    return bad("the pin was written by a newer version of tensormount");
  }
  if (word("uuid") != pin.uuid) return bad("\"uuid\" differs from the file name");
  const auto created = json.find("created");
  if (created != json.end() && created->is_number_integer()) pin.created = *created;
  const auto expires = json.find("expires");
  if (expires == json.end() || !expires->is_number_integer() ||
      (expires->is_number_unsigned() && expires->get<std::uint64_t>() > INT64_MAX)) {
    return bad("\"expires\" is not a number");
  }
  pin.expires = expires->get<std::int64_t>();
  pin.expired = pin.expires != 0 && now >= pin.expires;
  return pin;
}

PinnedCheckpoint ReadPin(FileSystem& fs, const std::string& folder, const std::string& name,
                         const Uuid& uuid, std::int64_t now) {
  return DecodePin(uuid, ReadRetained(fs, JoinPath(folder, name)), now);
}

// Whether `a` expires later than `b`, or at the same time and is newer.
bool HoldsLonger(const PinnedCheckpoint& a, const PinnedCheckpoint& b) {
  const auto rank = [](const PinnedCheckpoint& p) {
    return std::pair(p.expires == 0 ? INT64_MAX : p.expires, p.created);
  };
  return rank(a) > rank(b);
}

// The uuid of the checkpoint at `directory`, which must not be a symbolic link. kNotFound: there is
// no checkpoint.
Result<Uuid> UuidAt(FileSystem& fs, const std::string& directory) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(directory));
  if (info.kind != FileKind::kDirectory) {
    return Status(Code::kInvalidArgument, directory + ": not a checkpoint: not a directory");
  }
  Result<DecodedCommit> commit = store_moves::ReadCommit(fs, directory);
  // The read may have failed because another checkpoint was just replacing this one, so it is
  // repeated once.
  if (!commit.ok()) commit = store_moves::ReadCommit(fs, directory);
  if (!commit.ok()) return commit.status();
  return commit.value().record.uuid;
}

// Names of all files in the pins directory `folder` that are pins of this checkpoint.
Result<std::vector<std::string>> PinsOf(FileSystem& fs, const std::string& folder,
                                        const std::string& uuid) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               store_moves::ListIfExists(fs, folder));
  std::vector<std::string> names;
  for (const DirectoryEntry& e : entries) {
    if (e.name.starts_with(uuid)) names.push_back(e.name);
  }
  return names;
}

// Writes a pin and removes all older pins of the checkpoint. Each of two concurrent callers removes
// only pins that existed before its own, so at least one of the two pins stays.
Status WritePin(FileSystem& fs, const std::string& store, const PinnedCheckpoint& pin) {
  const std::string folder = PinsFolder(store);
  TENSORMOUNT_RETURN_IF_ERROR(EnsureFolderDurably(fs, store, store_paths::kPinsFolder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> before, PinsOf(fs, folder, pin.uuid));
  TENSORMOUNT_RETURN_IF_ERROR(
      ReplaceRetained(fs, folder, pin.uuid, EncodePin(pin), ExchangeFallback::kSecondName));
  for (const std::string& name : before) {
    if (name == pin.uuid) continue;  // ReplaceRetained has replaced it.
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.RemoveTree(JoinPath(folder, name)).WithContext("remove the older pin"));
  }
  return before.empty() ? Status() : fs.SyncDirectory(folder);
}

std::string TimeText(std::int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  char text[64] = {};
  if (gmtime_r(&time, &parts) == nullptr ||
      std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts) == 0) {
    return std::to_string(seconds);
  }
  return text;
}

// Collects the uuids of all stagings, entries of .trash and checkpoints. Returns false if a uuid
// could not be determined.
Result<bool> FindUuids(FileSystem& fs, const Store& store, std::set<Uuid>& known) {
  for (const std::string_view folder : {store_paths::kStagingFolder, store_paths::kTrashFolder}) {
    const std::string path = JoinPath(store.path(), folder);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                                 store_moves::ListIfExists(fs, path));
    for (const DirectoryEntry& e : entries) {
      if (e.kind != FileKind::kDirectory) continue;
      // A copy in progress has no COMMIT yet, but the name of its work directory contains the uuid.
      if (e.name.starts_with(store_paths::kCopyPrefix)) {
        const auto copied =
            Uuid::Parse(std::string_view(e.name).substr(store_paths::kCopyPrefix.size()));
        if (copied) known.insert(*copied);
        continue;
      }
      const Result<Uuid> uuid = store_moves::ReadFolderUuid(fs, JoinPath(path, e.name));
      if (uuid.ok()) known.insert(uuid.value());
      // kNotFound is ignored: the entry has no uuid (yet), or was removed. Any other error means
      // that a uuid is unknown.
      if (!uuid.ok() && uuid.status().code() != Code::kNotFound) return false;
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> live, store.List());
  for (const CheckpointListing& c : live) {
    if (c.problem.ok()) known.insert(c.uuid);
    if (c.state != CheckpointListing::State::kGood &&
        c.state != CheckpointListing::State::kNoCheckpoint) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string Describe(const PinnedCheckpoint& pin) {
  std::string text = "pinned";
  if (!pin.reason.empty()) text += " (" + pin.reason + ")";
  if (pin.expires != 0) {
    text += (pin.expired ? ", expired " : ", until ") + TimeText(pin.expires);
  }
  if (!pin.problem.empty())
    text += "; the pin cannot be read, so it does not expire: " + pin.problem;
  return text;
}

Result<PinMap> ReadAll(FileSystem& fs, const std::string& store, std::int64_t now) {
  const std::string folder = PinsFolder(store);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               store_moves::ListIfExists(fs, folder));
  PinMap pins;
  for (const DirectoryEntry& e : entries) {
    const std::optional<Uuid> uuid = UuidOfName(e.name);
    if (!uuid) continue;
    // The pin was there when the directory was listed, so it is included even if its file has been
    // removed since.
    PinnedCheckpoint pin = ReadPin(fs, folder, e.name, *uuid, now);
    const auto [it, inserted] = pins.try_emplace(*uuid, pin);
    if (!inserted && HoldsLonger(pin, it->second)) it->second = std::move(pin);
  }
  return pins;
}

Result<std::optional<PinnedCheckpoint>> Find(FileSystem& fs, const std::string& store,
                                             const Uuid& uuid, std::int64_t now) {
  const std::string folder = PinsFolder(store);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                               PinsOf(fs, folder, uuid.ToString()));
  std::optional<PinnedCheckpoint> found;
  for (const std::string& name : names) {
    PinnedCheckpoint pin = ReadPin(fs, folder, name, uuid, now);
    if (!pin.expired && (!found || HoldsLonger(pin, *found))) found = std::move(pin);
  }
  return found;
}

Status PinBeforePublish(FileSystem& fs, const std::string& store, const Uuid& uuid,
                        const std::string& name, const std::string& reason) {
  PinnedCheckpoint pin;
  pin.uuid = uuid.ToString();
  pin.name = name;
  pin.reason = reason;
  pin.by = ProcessText();
  pin.created = fs.NowSeconds();
  return WritePin(fs, store, pin);
}

Result<PinnedCheckpoint> Pin(FileSystem& fs, const Store& store, const std::string& name,
                             const PinOptions& options) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  TENSORMOUNT_RETURN_IF_ERROR(store.CheckWritable());
  if (options.reason.size() > kMaxReason) {
    return Status(Code::kInvalidArgument, "the reason of a pin has more than 4,096 bytes");
  }
  if (options.expires < 0) {
    return Status(Code::kInvalidArgument, "a pin cannot expire before 1970");
  }
  const std::string directory = store.CheckpointPath(name);
  const Result<Uuid> uuid = UuidAt(fs, directory);
  if (uuid.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, directory + ": no such checkpoint");
  }
  if (!uuid.ok()) return uuid.status();
  PinnedCheckpoint pin;
  pin.uuid = uuid.value().ToString();
  pin.name = name;
  pin.reason = options.reason;
  pin.by = ProcessText();
  pin.created = fs.NowSeconds();
  pin.expires = options.expires;
  pin.expired = pin.expires != 0 && pin.created >= pin.expires;
  TENSORMOUNT_RETURN_IF_ERROR(
      retention::WithTrashHint(fs, store.path(), WritePin(fs, store.path(), pin)));
  // A removal (without force) looks for pins after its rename, and moves a pinned checkpoint back
  // before it releases the lock. So the checkpoint is at its name now, or will be moved back there,
  // or was removed before this pin existed.
  Result<Uuid> still = UuidAt(fs, directory);
  if (still.status().code() == Code::kNotFound) {
    const Result<std::unique_ptr<File>> lock = Lock(fs, store.path(), kRemovalSeconds);
    // Without locks this call can only wait longer, about two seconds.
    const int most = lock.ok() && lock.value() != nullptr ? 50 : 500;
    still = UuidAt(fs, directory);
    for (int again = 0; again < most && still.status().code() == Code::kNotFound; ++again) {
      fs.SleepFor(std::chrono::milliseconds(4));
      still = UuidAt(fs, directory);
    }
  }
  const bool gone =
      still.ok() ? still.value() != uuid.value() : still.status().code() == Code::kNotFound;
  if (gone) {
    // The checkpoint is gone, so the pin is removed: it would only keep the checkpoint in .trash. A
    // pin that another caller has written meanwhile stays.
    const std::string path = JoinPath(PinsFolder(store.path()), pin.uuid);
    const Result<std::string> there = fs.ReadFile(path, kMaxRetainedFileBytes);
    if (there.ok() && there.value() == EncodePin(pin)) (void)fs.RemoveFile(path);
    return Status(Code::kNotFound,
                  directory + ": the checkpoint was removed while it was being pinned");
  }
  if (!still.ok()) return still.status();
  return pin;
}

Status Unpin(FileSystem& fs, const Store& store, const std::string& name) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  TENSORMOUNT_RETURN_IF_ERROR(store.CheckWritable());
  const std::string directory = store.CheckpointPath(name);
  const Result<Uuid> uuid = UuidAt(fs, directory);
  if (uuid.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, directory + ": no such checkpoint");
  }
  if (!uuid.ok()) return uuid.status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool any, RemovePins(fs, store.path(), uuid.value()));
  if (!any) return Status(Code::kNotFound, directory + ": the checkpoint is not pinned");
  return {};
}

Result<bool> RemovePins(FileSystem& fs, const std::string& store, const Uuid& uuid) {
  const std::string folder = PinsFolder(store);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                               PinsOf(fs, folder, uuid.ToString()));
  for (const std::string& name : names) {
    TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(JoinPath(folder, name)));
  }
  if (!names.empty()) TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(folder));
  return !names.empty();
}

Status Refusal(const std::string& directory, const std::string& held) {
  return Status(Code::kPermissionDenied,
                directory + ": " + held + ": unpin it first, or remove it with force");
}

Status CheckUnpinned(FileSystem& fs, const std::string& store, const std::string& name) {
  const std::int64_t now = fs.NowSeconds();
  const std::string directory = JoinPath(store, name);
  const auto refuse = [&](const PinnedCheckpoint& pin) {
    return Refusal(directory, Describe(pin));
  };
  const Result<Uuid> uuid = UuidAt(fs, directory);
  if (uuid.ok()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto pin, Find(fs, store, uuid.value(), now));
    return pin ? refuse(*pin) : Status();
  }
  // The checkpoint's uuid cannot be read, so any pin with this checkpoint's name may be its pin.
  TENSORMOUNT_ASSIGN_OR_RETURN(const PinMap all, ReadAll(fs, store, now));
  for (const auto& [pinned, pin] : all) {
    if (!pin.expired && pin.name == name) return refuse(pin);
  }
  return Status();
}

Status MarkEphemeral(FileSystem& fs, const std::string& store, const Uuid& uuid,
                     const std::string& name) {
  TENSORMOUNT_RETURN_IF_ERROR(EnsureFolderDurably(fs, store, store_paths::kEphemeralFolder));
  const std::string folder = JoinPath(store, store_paths::kEphemeralFolder);
  const Status made = fs.WriteFileDurably(JoinPath(folder, uuid.ToString()), name);
  if (!made.ok() && made.code() != Code::kAlreadyExists) return made;
  return fs.SyncDirectory(folder);
}

Status ForgetEphemeral(FileSystem& fs, const std::string& store, const Uuid& uuid) {
  return fs.RemoveFile(JoinPath(JoinPath(store, store_paths::kEphemeralFolder), uuid.ToString()));
}

Result<std::map<Uuid, std::string>> ReadEphemeral(FileSystem& fs, const std::string& store) {
  const std::string folder = JoinPath(store, store_paths::kEphemeralFolder);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               store_moves::ListIfExists(fs, folder));
  std::map<Uuid, std::string> marked;
  for (const DirectoryEntry& e : entries) {
    const std::optional<Uuid> uuid = Uuid::Parse(e.name);
    if (!uuid) continue;
    const Result<std::string> name = fs.ReadFile(JoinPath(folder, e.name), 255);
    marked[*uuid] = name.ok() && CheckCheckpointName(name.value()).ok() ? name.value() : "";
  }
  return marked;
}

Result<std::map<Uuid, std::string>> ReadBases(FileSystem& fs, const std::string& store) {
  const std::string folder = JoinPath(store, store_paths::kStagingFolder);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               store_moves::ListIfExists(fs, folder));
  std::map<Uuid, std::string> bases;
  for (const DirectoryEntry& e : entries) {
    // Hidden entries are skipped: stagings that are still being created, copies and repairs do not
    // use files of a base.
    if (e.kind != FileKind::kDirectory || e.name.starts_with('.')) continue;
    const std::string staging = JoinPath(folder, e.name);
    const std::string below = std::string(store_paths::kStagingFolder) + "/" + e.name;
    const std::string path = JoinPath(staging, store_paths::kBaseFile);
    const Result<std::string> text = fs.ReadFile(path, kMaxBaseBytes);
    if (!text.ok() && text.status().code() != Code::kNotFound) return text.status();
    if (text.ok()) {
      std::string_view rest = text.value();
      while (!rest.empty()) {
        const std::size_t end = std::min(rest.find('\n'), rest.size());
        const std::optional<Uuid> uuid = Uuid::Parse(rest.substr(0, end));
        if (!uuid) {
          return Status(Code::kDataLoss,
                        path +
                            ": a line is not 32 hex digits, so the checkpoint that this save "
                            "shares files with is unknown");
        }
        bases.try_emplace(*uuid, below);
        rest.remove_prefix(std::min(end + 1, rest.size()));
      }
    }
    const std::string shared = JoinPath(staging, store_paths::kSharedFile);
    const Result<std::string> said = fs.ReadFile(shared, kMaxRetainedFileBytes);
    if (said.status().code() == Code::kNotFound) continue;
    if (!said.ok()) return said.status();
    const nlohmann::json json = nlohmann::json::parse(said.value(), nullptr, false);
    const auto parent = json.is_object() ? json.find("parent") : json.end();
    const std::optional<Uuid> uuid = json.is_object() && parent != json.end() && parent->is_string()
                                         ? Uuid::Parse(parent->get_ref<const std::string&>())
                                         : std::nullopt;
    if (!uuid) {
      return Status(Code::kDataLoss,
                    shared +
                        ": \"parent\" is not 32 hex digits, so the checkpoint that this save "
                        "shares files with is unknown");
    }
    if (!uuid->IsZero()) bases.try_emplace(*uuid, below);
  }
  return bases;
}

Result<std::unique_ptr<File>> Lock(FileSystem& fs, const std::string& store, double wait_seconds) {
  if (!fs.Can(Ability::kLocks)) return std::unique_ptr<File>();
  const std::string path = JoinPath(PinsFolder(store), kPruneLock);
  const auto open = [&]() -> Result<std::unique_ptr<File>> {
    TENSORMOUNT_RETURN_IF_ERROR(EnsureFolderDurably(fs, store, store_paths::kPinsFolder));
    return fs.OpenShared(path);
  };
  Result<std::unique_ptr<File>> opened = open();
  // If the disk has no space for the lock file, no lock is taken: removing checkpoints must work on
  // a full disk.
  if (opened.status().code() == Code::kResourceExhausted) return std::unique_ptr<File>();
  TENSORMOUNT_RETURN_IF_ERROR(opened.status());
  std::unique_ptr<File> file = std::move(opened).value();
  constexpr std::chrono::milliseconds kPause(10);
  // The comparison is false for NaN, so a NaN means no wait.
  const std::int64_t pauses =
      wait_seconds > 0 ? static_cast<std::int64_t>(std::min(wait_seconds, 1e9) * 100) : 0;
  for (std::int64_t waited = 0;; ++waited) {
    const Status locked = file->TryLockExclusive();
    if (locked.ok()) return file;
    if (HasNoLocks(locked)) return std::unique_ptr<File>();
    if (locked.code() != Code::kBusy) return locked;
    if (waited >= pauses) {
      return Status(Code::kBusy, store + ": another process is pruning the store");
    }
    fs.SleepFor(kPause);
  }
}

void Sweep(FileSystem& fs, const Store& store, const Store::GcOptions& options,
           Store::GcReport& report) {
  // Pins and marks are listed before checkpoints are searched. Each one's checkpoint, or its
  // staging, existed before it, so the search finds the checkpoint if it still exists. While the
  // lock is held, nobody moves entries back from .trash.
  std::vector<std::pair<std::string, Uuid>> marks;
  std::vector<std::string> leftovers;
  const auto fail = [&](std::string_view below, const Status& why) {
    if (why.code() != Code::kNotFound) {
      report.failed.push_back(std::string(below) + ": " + why.message());
    }
  };
  for (const std::string_view folder : {store_paths::kPinsFolder, store_paths::kEphemeralFolder}) {
    const auto entries = store_moves::ListIfExists(fs, JoinPath(store.path(), folder));
    if (!entries.ok()) return fail(folder, entries.status());
    for (const DirectoryEntry& e : entries.value()) {
      const std::string below = std::string(folder) + "/" + e.name;
      const std::optional<Uuid> uuid = UuidOfName(e.name);
      const bool hidden = e.name.starts_with('.') && e.name != kPruneLock;
      if (!uuid && !hidden) continue;
      const Result<FileInfo> info = fs.LinkStat(JoinPath(store.path(), below));
      if (!info.ok()) continue;
      // Skips files that are too young: hidden files that a writer may still be writing, and pins
      // or marks that exist before their checkpoints (during a file-by-file copy of a store). Files
      // with a time in the future stay.
      const std::int64_t written = info.value().mtime_seconds;
      const std::int64_t came = std::max(written, info.value().ctime_seconds);
      const auto limit = uuid ? options.staging_age : std::max(options.grace, kHiddenFileAge);
      if (fs.NowSeconds() - limit.count() <= (uuid ? came : written)) continue;
      if (uuid) marks.emplace_back(below, *uuid);
      if (hidden) leftovers.push_back(below);
    }
  }
  if (marks.empty() && leftovers.empty()) return;
  std::unique_ptr<File> held;  // Released at the end.
  if (!options.dry_run) {
    Result<std::unique_ptr<File>> lock = Lock(fs, store.path(), 0);
    if (lock.status().code() == Code::kBusy) return;
    if (!lock.ok()) return fail(store_paths::kPinsFolder, lock.status());
    held = std::move(lock).value();
    // Without locks pins and marks stay; they are small.
    if (held == nullptr) return;
  }

  std::set<Uuid> known;
  const auto all_known = [&] {
    return std::ranges::all_of(marks,
                               [&](const auto& mark) { return known.contains(mark.second); });
  };
  // If a uuid was not found, the search is repeated: a checkpoint that is being replaced moves to
  // .staging and then to .trash, and the first search may have missed it.
  for (int pass = 0; pass < 2 && (pass == 0 || !all_known()); ++pass) {
    const Result<bool> sure = FindUuids(fs, store, known);
    if (!sure.ok()) return fail(".", sure.status());
    if (!sure.value()) return;
  }
  const auto remove = [&](const std::string& below) {
    if (!options.dry_run) {
      const Status removed = fs.RemoveFile(JoinPath(store.path(), below));
      if (!removed.ok()) return fail(below, removed);
    }
    report.removed.push_back(below);
  };
  for (const auto& [below, uuid] : marks) {
    if (!known.contains(uuid)) remove(below);
  }
  for (const std::string& below : leftovers) remove(below);
}

}  // namespace tensormount::pins
