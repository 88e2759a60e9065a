// SPDX-License-Identifier: Apache-2.0
// Of pins.h what is about single checkpoints: pins, ephemeral marks, bases of saves under way, the
// lock, and what gc takes of them. Whatever cannot be understood here holds its checkpoint: a pin
// that is ignored is a checkpoint that is lost.
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
// A checkpoint shares files of a few others.
constexpr std::uint64_t kMaxBaseBytes = std::uint64_t{1} << 20;
// For whom removes to be done, or to have undone it.
constexpr double kRemovalSeconds = 30;

std::string PinsFolder(const std::string& store) {
  return JoinPath(store, store_paths::kPinsFolder);
}

// Of "<uuid>" and "<uuid>.<8 hex digits>".
std::optional<Uuid> UuidOfName(std::string_view name) {
  return name.size() < kUuidDigits ? std::nullopt : Uuid::Parse(name.substr(0, kUuidDigits));
}

// Who this is, for people: names of users would take a look into the system's databases.
std::string Myself() {
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

// What is wrong with it becomes its problem, and then it has no expiry.
PinnedCheckpoint DecodePin(const Uuid& uuid, const Result<std::string>& text, std::int64_t now) {
  PinnedCheckpoint pin;
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
  if (word("format") != kPinFormat) return bad("\"format\" is not that of a pin");
  const auto version = json.find("version");
  if (version == json.end() || !version->is_number_unsigned() || *version != 1) {
    return bad("of a newer version");
  }
  if (word("uuid") != pin.uuid) return bad("\"uuid\" is another one than that of its name");
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
  return DecodePin(uuid, fs.ReadFile(JoinPath(folder, name), kMaxRetainedFileBytes), now);
}

// Whether `a` holds longer than `b`, or as long and is newer.
bool HoldsLonger(const PinnedCheckpoint& a, const PinnedCheckpoint& b) {
  const auto rank = [](const PinnedCheckpoint& p) {
    return std::pair(p.expires == 0 ? INT64_MAX : p.expires, p.created);
  };
  return rank(a) > rank(b);
}

// The uuid of what stands at `name`. kNotFound: nothing does. A link to a checkpoint is none.
Result<Uuid> UuidAt(FileSystem& fs, const std::string& directory) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(directory));
  if (info.kind != FileKind::kDirectory) {
    return Status(Code::kInvalidArgument, directory + ": not a checkpoint: no folder");
  }
  Result<DecodedCommit> commit = store_moves::ReadCommit(fs, directory);
  // Perhaps another one has just taken its place.
  if (!commit.ok()) commit = store_moves::ReadCommit(fs, directory);
  if (!commit.ok()) return commit.status();
  return commit.value().record.uuid;
}

// All files that pin one checkpoint.
Result<std::vector<std::string>> PinsOf(FileSystem& fs, const std::string& folder,
                                        const std::string& uuid) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               store_moves::ListIfThere(fs, folder));
  std::vector<std::string> names;
  for (const DirectoryEntry& e : entries) {
    if (e.name.starts_with(uuid)) names.push_back(e.name);
  }
  return names;
}

// In place of all that pinned it before. Of two who do this at once each takes away only what he
// found before he put his own there, so one of the two stays.
Status WritePin(FileSystem& fs, const std::string& store, const PinnedCheckpoint& pin) {
  const std::string folder = PinsFolder(store);
  TENSORMOUNT_RETURN_IF_ERROR(EnsureFolderDurably(fs, store, store_paths::kPinsFolder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> before, PinsOf(fs, folder, pin.uuid));
  TENSORMOUNT_RETURN_IF_ERROR(
      ReplaceRetained(fs, folder, pin.uuid, EncodePin(pin), InsteadOfExchange::kSecondName));
  for (const std::string& name : before) {
    if (name == pin.uuid) continue;  // That was replaced.
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.RemoveTree(JoinPath(folder, name)).WithContext("an older pin holds it, too"));
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

// All that is in a staging, in .trash or a checkpoint. False: of some nobody can tell which it is.
Result<bool> FindUuids(FileSystem& fs, const Store& store, std::set<Uuid>& known) {
  for (const std::string_view folder : {store_paths::kStagingFolder, store_paths::kTrashFolder}) {
    const std::string path = JoinPath(store.path(), folder);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                                 store_moves::ListIfThere(fs, path));
    for (const DirectoryEntry& e : entries) {
      if (e.kind != FileKind::kDirectory) continue;
      // A copy under way has no COMMIT yet: its name says of which checkpoint it is.
      if (e.name.starts_with(store_paths::kCopyPrefix)) {
        const auto copied =
            Uuid::Parse(std::string_view(e.name).substr(store_paths::kCopyPrefix.size()));
        if (copied) known.insert(*copied);
        continue;
      }
      const Result<Uuid> uuid = store_moves::ReadFolderUuid(fs, JoinPath(path, e.name));
      if (uuid.ok()) known.insert(uuid.value());
      // A staging that is being made or taken away, or one that nobody can read.
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
    text += (pin.expired ? ", but only until " : ", until ") + TimeText(pin.expires);
  }
  if (!pin.problem.empty()) text += "; the pin cannot be read, and holds: " + pin.problem;
  return text;
}

Result<PinMap> ReadAll(FileSystem& fs, const std::string& store, std::int64_t now) {
  const std::string folder = PinsFolder(store);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               store_moves::ListIfThere(fs, folder));
  PinMap pins;
  for (const DirectoryEntry& e : entries) {
    const std::optional<Uuid> uuid = UuidOfName(e.name);
    if (!uuid) continue;
    // Also where it went since it was listed: it was there when we looked.
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
  pin.by = Myself();
  pin.created = fs.NowSeconds();
  pin.expires = options.expires;
  pin.expired = pin.expires != 0 && pin.created >= pin.expires;
  TENSORMOUNT_RETURN_IF_ERROR(
      retention::WithTrashHint(fs, store.path(), WritePin(fs, store.path(), pin)));
  // Who removes looks for pins after the rename, and moves what is pinned back: so it is there, or
  // comes back before he lets go of the lock, or was gone before the pin was there.
  Result<Uuid> still = UuidAt(fs, directory);
  if (still.status().code() == Code::kNotFound) {
    const Result<std::unique_ptr<File>> lock = Lock(fs, store.path(), kRemovalSeconds);
    // Without locks time is all there is.
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
    // Else it would hold in .trash what nobody asked to be kept there. Not that of another one who
    // pinned it since.
    const std::string path = JoinPath(PinsFolder(store.path()), pin.uuid);
    const Result<std::string> there = fs.ReadFile(path, kMaxRetainedFileBytes);
    if (there.ok() && there.value() == EncodePin(pin)) (void)fs.RemoveFile(path);
    return Status(Code::kNotFound, directory + ": it was removed while it was being pinned");
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
  if (!any) return Status(Code::kNotFound, directory + ": it is not pinned");
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
  // Which one it is cannot be read: what was pinned under this name may be it.
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
                               store_moves::ListIfThere(fs, folder));
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
                               store_moves::ListIfThere(fs, folder));
  std::map<Uuid, std::string> bases;
  for (const DirectoryEntry& e : entries) {
    // One that begins with a dot is being made, and links nothing yet.
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
          return Status(Code::kDataLoss, path +
                                             ": a line is not 32 hex digits, so what that save "
                                             "shares files with is not known");
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
      return Status(Code::kDataLoss, shared +
                                         ": \"parent\" is not 32 hex digits, so what that save "
                                         "shares files with is not known");
    }
    if (!uuid->IsZero()) bases.try_emplace(*uuid, below);
  }
  return bases;
}

Result<std::unique_ptr<File>> Lock(FileSystem& fs, const std::string& store, double wait_seconds) {
  const std::string path = JoinPath(PinsFolder(store), kPruneLock);
  const auto open = [&]() -> Result<std::unique_ptr<File>> {
    TENSORMOUNT_RETURN_IF_ERROR(EnsureFolderDurably(fs, store, store_paths::kPinsFolder));
    return fs.OpenShared(path);
  };
  Result<std::unique_ptr<File>> opened = open();
  // On a full disk whoever makes room must not need some.
  if (opened.status().code() == Code::kResourceExhausted) return std::unique_ptr<File>();
  TENSORMOUNT_RETURN_IF_ERROR(opened.status());
  std::unique_ptr<File> file = std::move(opened).value();
  constexpr std::chrono::milliseconds kPause(10);
  // Not a number is no time at all.
  const std::int64_t pauses =
      wait_seconds > 0 ? static_cast<std::int64_t>(std::min(wait_seconds, 1e9) * 100) : 0;
  for (std::int64_t waited = 0;; ++waited) {
    const Status locked = file->TryLockExclusive();
    if (locked.ok()) return file;
    if (HasNoLocks(locked)) return std::unique_ptr<File>();
    if (locked.code() != Code::kBusy) return locked;
    if (waited >= pauses) {
      return Status(Code::kBusy, store + ": somebody else removes checkpoints by rule");
    }
    fs.SleepFor(kPause);
  }
}

void Sweep(FileSystem& fs, const Store& store, const Store::GcOptions& options,
           Store::GcReport& report) {
  // In this order: a mark that we see was made for what was there before, which then is in one of
  // the lists that follow. Under the lock nobody moves anything back from .trash.
  std::vector<std::pair<std::string, Uuid>> marks;
  std::vector<std::string> leftovers;
  const auto fail = [&](std::string_view below, const Status& why) {
    if (why.code() != Code::kNotFound) {
      report.failed.push_back(std::string(below) + ": " + why.message());
    }
  };
  for (const std::string_view folder : {store_paths::kPinsFolder, store_paths::kEphemeralFolder}) {
    const auto entries = store_moves::ListIfThere(fs, JoinPath(store.path(), folder));
    if (!entries.ok()) return fail(folder, entries.status());
    for (const DirectoryEntry& e : entries.value()) {
      const std::string below = std::string(folder) + "/" + e.name;
      const std::optional<Uuid> uuid = UuidOfName(e.name);
      const bool hidden = e.name.starts_with('.') && e.name != kPruneLock;
      if (!uuid && !hidden) continue;
      const Result<FileInfo> info = fs.LinkStat(JoinPath(store.path(), below));
      if (!info.ok()) continue;
      // What is written right now under its hidden name, and marks that came before what they are
      // of, as a copy of a store by files brings them. Of a clock that is ahead they stay.
      const std::int64_t written = info.value().mtime_seconds;
      const std::int64_t came = std::max(written, info.value().ctime_seconds);
      const auto limit = uuid ? options.staging_age : std::max(options.grace, kHiddenFileAge);
      if (fs.NowSeconds() - limit.count() <= (uuid ? came : written)) continue;
      if (uuid) marks.emplace_back(below, *uuid);
      if (hidden) leftovers.push_back(below);
    }
  }
  if (marks.empty() && leftovers.empty()) return;
  std::unique_ptr<File> held;  // Until all is removed.
  if (!options.dry_run) {
    Result<std::unique_ptr<File>> lock = Lock(fs, store.path(), 0);
    if (lock.status().code() == Code::kBusy) return;
    if (!lock.ok()) return fail(store_paths::kPinsFolder, lock.status());
    held = std::move(lock).value();
    if (held == nullptr) return;  // Without locks they stay: they are small.
  }

  std::set<Uuid> known;
  const auto all_known = [&] {
    return std::ranges::all_of(marks,
                               [&](const auto& mark) { return known.contains(mark.second); });
  };
  // Twice where something seems gone: a checkpoint that is replaced goes from its name to .staging
  // and from there to .trash, and may pass us on the way.
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
