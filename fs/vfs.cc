// SPDX-License-Identifier: Apache-2.0
// The meaning of lookup, getattr, read and readdir, independent of FUSE. Node ids are slot, view
// and item (docs/architecture.md); CheckpointView handles everything below a checkpoint,
// StagingTree everything below .staging/.
#include "fs/vfs.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <optional>
#include <unistd.h>

#include <fmt/core.h>

#include "base/coding.h"
#include "base/hash.h"
#include "base/log.h"
#include "fs/answers.h"
#include "fs/views/checkpoint_text.h"
#include "index/records/commit_record.h"
#include "index/store/store.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kLatestName = "latest";
constexpr std::string_view kControlName = ".tensormount";

// Longest name in bytes, as on other filesystems.
constexpr std::size_t kMaxName = 255;

// Number of cookies that "." and ".." take in a listing. The cookies of the directory's own entries
// are raised by this number.
constexpr std::uint64_t kDots = 2;
// Cookies in the root of a store: `latest`, then slots from kSlotCookies on, by id.
constexpr std::uint64_t kLatestCookie = 3;
constexpr std::uint64_t kSlotCookies = 16;

constexpr std::array<Fixed, 4> kControlFiles = {Fixed::kStatus, Fixed::kStats, Fixed::kErrors,
                                                Fixed::kMetrics};

std::string_view ControlName(Fixed fixed) {
  switch (fixed) {
    case Fixed::kStatus:
      return "status";
    case Fixed::kStats:
      return "stats";
    case Fixed::kErrors:
      return "errors";
    case Fixed::kMetrics:
      return "metrics";
    default:
      return kControlName;
  }
}

Node MountNode(Fixed fixed) { return {.item = static_cast<std::uint64_t>(fixed)}; }

// The node of the mount itself that has this number; nullopt if there is none.
std::optional<Fixed> FixedOf(const Node& node) {
  if (node.slot != 0 || node.view != kOwnView) return std::nullopt;
  const Fixed fixed = static_cast<Fixed>(node.item);
  if (fixed == Fixed::kRoot || (fixed >= Fixed::kLatest && fixed <= Fixed::kMetrics)) return fixed;
  return std::nullopt;
}

// An inode number: a hash of names, so that it is the same in every mount and after a restart. At
// least 2, because 0 and 1 have special meanings for programs.
std::uint64_t InodeOf(std::string_view source, std::string_view name) {
  ByteWriter text;
  text.String(source);
  text.String(name);
  return std::max<std::uint64_t>(Xxh3Low64(text.bytes()), 2);
}

std::string_view KindName(SourceKind kind) {
  switch (kind) {
    case SourceKind::kStore:
      return "store";
    case SourceKind::kCheckpoint:
      return "checkpoint";
    case SourceKind::kForeign:
      return "foreign";
    case SourceKind::kForeignSteps:
      return "foreign-steps";
  }
  return "";
}

std::string_view VerifyName(ServeVerify verify) {
  switch (verify) {
    case ServeVerify::kOff:
      return "off";
    case ServeVerify::kFirst:
      return "first";
    case ServeVerify::kAlways:
      return "always";
  }
  return "";
}

// Lists "." and "..". Returns false if `fn` ended the listing.
bool ListDots(const Attributes& attributes, std::uint64_t cookie,
              const std::function<bool(const Vfs::Listed&)>& fn) {
  // The two entries get no node id, because the kernel knows their nodes.
  for (std::uint64_t i = cookie; i < kDots; ++i) {
    if (!fn({.name = i == 0 ? "." : "..", .entry = {.attributes = attributes}, .next = i + 1})) {
      return false;
    }
  }
  return true;
}

Status ReadOnlyError(std::string_view what) { return Status::FromErrno(EROFS, "change", what); }

Status NotPermittedError(std::string_view why) {
  return Status::FromParts(Code::kPermissionDenied, EPERM, std::string(why));
}

}  // namespace

Result<std::unique_ptr<Vfs>> Vfs::Open(FileSystem& fs, const VfsOptions& options) {
  std::unique_ptr<Vfs> vfs(new Vfs);
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found,
                               FindSource(fs, options.source, options.roots));
  if (found.kind == SourceKind::kStore) {
    TENSORMOUNT_RETURN_IF_ERROR(Store::Open(fs, found.path).status());
  }
  vfs->options_ = options;
  vfs->fs_ = &fs;
  vfs->kind_ = found.kind;
  vfs->source_ = found.path;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      vfs->watch_, StoreWatch::Start(fs, found.kind, found.path, options.list_views, options.verify,
                                     options.map, options.hf, options.roots, options.other_users));
  if (options.writable) vfs->OpenStaging();
  if (!ShowsManyCheckpoints(found.kind)) {
    // Opens the checkpoint now, so that its problems fail the mount.
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto slot, vfs->watch_->Find(1));
    TENSORMOUNT_RETURN_IF_ERROR(vfs->watch_->View(*slot).status());
  } else if (!options.map.empty() || options.hf.rules) {
    const auto now = vfs->watch_->CurrentListing();
    if (now->latest) TENSORMOUNT_RETURN_IF_ERROR(vfs->watch_->View(*now->latest).status());
  }
  return vfs;
}

// Opens the checkpoint if it is closed, which may take long (MayBlock).
Result<Vfs::Located> Vfs::Locate(NodeId id) {
  Located place{.node = NodeOf(id), .view = nullptr};
  if (place.node.slot == 0) {
    if (id != kRootId || ShowsManyCheckpoints(kind_)) return place;
    place.node.slot = 1;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto slot, watch_->Find(place.node.slot));
  TENSORMOUNT_ASSIGN_OR_RETURN(place.view, watch_->View(*slot));
  return place;
}

// So read(2) and fstat(2) on open files of a removed checkpoint continue to work, as on other
// filesystems.
Result<Vfs::Located> Vfs::LocateFile(NodeId id) {
  Result<Located> place = Locate(id);
  if (place.status().code() != Code::kStale) return place;
  const Node node = NodeOf(id);
  const auto kept = watch_->KeptView(node.slot);
  if (!kept) return place;
  // Only files: a directory of a removed checkpoint would lead to files that no program has open.
  const Result<Attributes> attributes = kept->Stat(node);
  if (!attributes.ok() || attributes.value().kind != FileKind::kFile) return place;
  return Located{.node = node, .view = kept};
}

bool Vfs::CheckpointExists(NodeId node) {
  const std::uint32_t slot = NodeOf(node).slot;
  return watch_->Find(slot == 0 ? 1 : slot).ok();
}

// The root of a store is answered from the listing, which takes longer than StoreWatch::kPatience
// only during the first check of the store. With `other_users` a recent listing is needed, which
// may block each time.
bool Vfs::MayBlock(NodeId id) {
  std::uint32_t slot = NodeOf(id).slot;
  if (slot == 0) {
    if (id != kRootId) return IsStaged(id);
    if (ShowsManyCheckpoints(kind_)) return options_.other_users || !watch_->first_check_done();
    slot = 1;
  }
  const auto found = watch_->Find(slot);
  return found.ok() && !found.value()->opened();
}

Vfs::Entry Vfs::EntryOf(const Child& child) const {
  return {.id = IdOf(child.node), .attributes = child.attributes, .seconds = kSealedSeconds};
}

Vfs::Entry Vfs::SlotEntry(const Slot& slot) const {
  Entry entry;
  entry.id = IdOf({.slot = slot.id, .item = kRootItem});
  entry.seconds = kRootSeconds;
  entry.attributes = {.kind = FileKind::kDirectory,
                      .inode = InodeOf(slot.uuid.ToString(), slot.name),
                      .size = 0,
                      .mode = slot.ownership.folder_mode,
                      .uid = slot.ownership.uid,
                      .gid = slot.ownership.gid,
                      .mtime = slot.mtime};
  return entry;
}

Result<Vfs::Entry> Vfs::RootEntry() {
  // With `other_users` an old listing could admit a user whose access was revoked since.
  const auto now = options_.other_users ? watch_->CurrentListing() : watch_->LastListing();
  Entry entry{.id = kRootId, .attributes = {}, .seconds = kRootSeconds};
  entry.attributes = {.kind = FileKind::kDirectory,
                      .inode = InodeOf(source_, ""),
                      .size = 0,
                      .mode = now->ownership.folder_mode,
                      .uid = now->ownership.uid,
                      .gid = now->ownership.gid,
                      .mtime = now->mtime};
  // Users that may write to the store may publish; the kernel checks the root's mode.
  if (staging_) entry.attributes.mode |= now->ownership.write_mode;
  return entry;
}

Result<Vfs::Entry> Vfs::LatestEntry(const StoreWatch::Listing& now) {
  TENSORMOUNT_RETURN_IF_ERROR(now.latest_unknown);
  if (!now.latest) return NoSuchNameError(kLatestName);
  Entry entry{.id = IdOf(MountNode(Fixed::kLatest)), .attributes = {}, .seconds = kRootSeconds};
  entry.attributes = {.kind = FileKind::kSymlink,
                      .inode = InodeOf(source_, kLatestName),
                      .size = now.latest->name.size(),
                      .mode = 0777,
                      .uid = now.ownership.uid,
                      .gid = now.ownership.gid,
                      .mtime = now.latest->mtime};
  return entry;
}

std::string Vfs::ControlText(Fixed fixed) {
  switch (fixed) {
    case Fixed::kStatus:
      return status_ ? status_() : "{" + StatusFields() + "}\n";
    case Fixed::kStats:
      return stats_.StatsJson();
    case Fixed::kErrors:
      return stats_.ErrorsJson();
    case Fixed::kMetrics:
      return Metrics();
    default:
      return "";
  }
}

// The size is that of the current text. The text is rendered again at open and may differ, so these
// files bypass the page cache.
Result<Vfs::Entry> Vfs::ControlEntry(Fixed fixed) {
  const auto now = watch_->LastListing();
  const bool folder = fixed == Fixed::kControl;
  Entry entry{.id = IdOf(MountNode(fixed)), .attributes = {}, .seconds = 0};
  entry.attributes = {.kind = folder ? FileKind::kDirectory : FileKind::kFile,
                      .inode = InodeOf(source_, "/" + std::string(ControlName(fixed))),
                      .size = folder ? 0 : ControlText(fixed).size(),
                      .mode = folder ? now->ownership.folder_mode : now->ownership.file_mode,
                      .uid = now->ownership.uid,
                      .gid = now->ownership.gid,
                      .mtime = now->mtime};
  // .tensormount/errors contains names of files and tensors that not everybody may know.
  if (fixed == Fixed::kErrors && options_.other_users) entry.attributes.mode &= 0400;
  return entry;
}

// Names come and go, so entries are valid for kRootSeconds only.
Result<Vfs::Entry> Vfs::LookupInRoot(std::string_view name) {
  if (name == kControlName) return ControlEntry(Fixed::kControl);
  if (!ShowsManyCheckpoints(kind_)) {
    (void)watch_->CurrentListing();  // Checks whether the checkpoint still exists.
    TENSORMOUNT_ASSIGN_OR_RETURN(const Located root, Locate(kRootId));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Child child, root.view->Lookup(root.node, name));
    Entry entry = EntryOf(child);
    entry.seconds = kRootSeconds;  // A removal of the checkpoint must become visible.
    return entry;
  }
  if (name == kStagingName && staging_) {
    return LookupStaged(kRootId, name);
  }
  if (name == kLatestName) return LatestEntry(*watch_->CurrentListing());
  const auto slot = watch_->FindName(std::string(name));
  if (slot) return SlotEntry(*slot);
  // A store that is gone must not look like one without this checkpoint.
  TENSORMOUNT_RETURN_IF_ERROR(watch_->LastListing()->store_gone);
  return NoSuchNameError(name);
}

Result<Vfs::Entry> Vfs::Lookup(NodeId folder, std::string_view name) {
  if (name.size() > kMaxName) return Status::FromErrno(ENAMETOOLONG, "look up", "a name");
  if (folder == kRootId) return LookupInRoot(name);
  if (IsStaged(folder)) return LookupStaged(folder, name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, Locate(folder));
  if (place.view) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Child child, place.view->Lookup(place.node, name));
    return EntryOf(child);
  }
  if (place.node == MountNode(Fixed::kControl)) {
    for (const Fixed fixed : kControlFiles) {
      if (name == ControlName(fixed)) return ControlEntry(fixed);
    }
    return NoSuchNameError(name);
  }
  return Status::FromErrno(ENOTDIR, "look up", name);
}

Result<Vfs::Entry> Vfs::Stat(NodeId id) {
  if (id == kRootId) return RootEntry();
  if (IsStaged(id)) return StatStaged(id);
  const Node node = NodeOf(id);
  if (node.slot == 0) {
    const std::optional<Fixed> fixed = FixedOf(node);
    if (!fixed) return Status(Code::kStale, "stale inode number: the mount has no such entry");
    return *fixed == Fixed::kLatest ? LatestEntry(*watch_->CurrentListing()) : ControlEntry(*fixed);
  }
  if (node.view == kOwnView && node.item == kRootItem) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto slot, watch_->Find(node.slot));
    return SlotEntry(*slot);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, LocateFile(id));
  if (!place.view) return Status(Code::kStale, "stale inode number: the mount has no such entry");
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, place.view->Stat(place.node));
  return Entry{.id = id, .attributes = attributes, .seconds = kSealedSeconds};
}

Result<std::string> Vfs::ReadLink(NodeId id) {
  if (id != IdOf(MountNode(Fixed::kLatest))) {
    return Status(Code::kInvalidArgument, "read a link: the entry is not a symbolic link");
  }
  const auto now = watch_->CurrentListing();
  TENSORMOUNT_RETURN_IF_ERROR(now->latest_unknown);
  if (!now->latest) return NoSuchNameError(kLatestName);
  return now->latest->name;
}

// A slot's cookie depends on its id only, so a continued listing neither repeats nor skips a slot,
// whichever slots were added or removed meanwhile.
Status Vfs::ListStore(std::uint64_t cookie, const std::function<bool(const Listed&)>& fn) {
  const auto now = watch_->CurrentListing();
  TENSORMOUNT_RETURN_IF_ERROR(now->store_gone);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Entry root, RootEntry());
  if (!ListDots(root.attributes, cookie, fn)) return {};
  if (cookie < kLatestCookie && now->latest) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Entry entry, LatestEntry(*now));
    if (!fn({.name = std::string(kLatestName), .entry = entry, .next = kLatestCookie})) return {};
  }
  for (const auto& slot : now->by_id) {
    const std::uint64_t own = kSlotCookies + slot->id;
    if (own <= cookie) continue;
    if (!fn({.name = slot->name, .entry = SlotEntry(*slot), .next = own})) return {};
  }
  return {};
}

Status Vfs::ListControl(std::uint64_t cookie, const std::function<bool(const Listed&)>& fn) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Entry own, ControlEntry(Fixed::kControl));
  if (!ListDots(own.attributes, cookie, fn)) return {};
  std::uint64_t next = kDots;
  for (const Fixed fixed : kControlFiles) {
    if (++next <= cookie) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Entry entry, ControlEntry(fixed));
    if (!fn({.name = std::string(ControlName(fixed)), .entry = entry, .next = next})) return {};
  }
  return {};
}

Status Vfs::List(NodeId id, std::uint64_t cookie, const std::function<bool(const Listed&)>& fn) {
  if (id == kRootId && ShowsManyCheckpoints(kind_)) return ListStore(cookie, fn);
  if (IsStaged(id)) return ListStaged(id, cookie, fn);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, Locate(id));
  if (!place.view) {
    if (place.node == MountNode(Fixed::kControl)) return ListControl(cookie, fn);
    return Status::FromErrno(ENOTDIR, "list", "an entry of the mount");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Entry own, Stat(id));
  if (own.attributes.kind != FileKind::kDirectory) {
    return Status::FromErrno(ENOTDIR, "list", "an entry of the mount");
  }
  if (!ListDots(own.attributes, cookie, fn)) return {};
  const std::uint64_t from = cookie > kDots ? cookie - kDots : 0;
  return place.view->List(place.node, from, [&](const Child& child, std::uint64_t next) {
    Listed listed{.name = child.name, .entry = EntryOf(child), .next = next + kDots};
    if (id == kRootId) listed.entry.seconds = kRootSeconds;
    return fn(listed);
  });
}

Result<std::shared_ptr<const VirtualFile>> Vfs::OpenFile(NodeId id) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, LocateFile(id));
  if (place.view) return place.view->OpenFile(place.node);
  const std::optional<Fixed> fixed = FixedOf(place.node);
  if (!fixed) return Status(Code::kStale, "stale inode number: the mount has no such entry");
  for (const Fixed control : kControlFiles) {
    if (*fixed == control) {
      return VirtualFile::OfText(fmt::format("{}/{}", kControlName, ControlName(control)),
                                 ControlText(control));
    }
  }
  return Status::FromErrno(*fixed == Fixed::kLatest ? ELOOP : EISDIR, "open",
                           "an entry of the mount");
}

void Vfs::Forget(NodeId id, std::uint64_t references) {
  const Node node = NodeOf(id);
  if (IsStaged(id) && staging_) staging_->Forget(node.item, references);
  if (node.slot == 0) return;
  const auto slot = watch_->Find(node.slot);
  if (!slot.ok()) return;
  // Of all views only slices/ counts references.
  if (node.view == CheckpointView::kSlicesView)
    slot.value()->slices()->Forget(node.item, references);
}

Result<std::string> Vfs::GetXattr(NodeId id, std::string_view name) {
  if (!name.starts_with("user.")) {
    return Status(Code::kUnsupported,
                  "only extended attributes in the user. namespace are supported");
  }
  const Status none = Status::FromErrno(ENODATA, "read attribute", name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, LocateFile(id));
  if (!place.view) return none;
  TENSORMOUNT_ASSIGN_OR_RETURN(auto all, place.view->Xattrs(place.node));
  const auto it = all.find(std::string(name));
  if (it == all.end()) return none;
  return it->second;
}

Result<std::vector<std::string>> Vfs::ListXattrs(NodeId id) {
  std::vector<std::string> names;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, LocateFile(id));
  if (!place.view) return names;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto all, place.view->Xattrs(place.node));
  for (const auto& [name, value] : all) names.push_back(name);
  return names;
}

std::string Vfs::StatusFields() {
  const auto now = watch_->first_check_done() ? watch_->LastListing()
                                              : watch_->CurrentListing(StoreWatch::kPatience);
  std::string problems;
  for (const std::string& problem : now->problems) {
    problems += (problems.empty() ? "" : ", ") + JsonString(problem);
  }
  return fmt::format(
      R"("source": {}, "kind": "{}", "verify": "{}", "views_listed": {}, "mapped": {}, "checkpoints": {}, )"
      R"("latest": {}, "open_checkpoints": {}, "store_answers": {}, "errors": {}, )"
      R"({}, "problems": [{}])",
      JsonString(source_), KindName(kind_), VerifyName(options_.verify), options_.list_views,
      !options_.map.empty(), now->by_id.size(),
      now->latest && ShowsManyCheckpoints(kind_) ? JsonString(now->latest->name) : "null",
      watch_->open_checkpoints(), watch_->is_responding(), stats_.errors(), StagingFields(),
      problems);
}

// ---- Saving: .staging/, and refusals of other changes ------------------------------------------

void Vfs::OpenStaging() {
  if (kind_ != SourceKind::kStore) return;  // Only a store has stagings.
  Status status = fs_->Need(Ability::kWrite, source_);
  // A mount grants no more rights than this process has.
  if (status.ok() && fs_->Can(Ability::kKernelFiles) && access(source_.c_str(), W_OK) != 0) {
    status = Status::FromErrno(errno, "write to", source_);
  }
  if (status.ok()) {
    Result<std::unique_ptr<StagingTree>> staging = StagingTree::Make(*fs_, source_, stats_);
    status = staging.status();
    if (staging.ok()) staging_ = std::move(staging).value();
  }
  if (status.ok()) return;
  not_writable_because_ = status.message();
  Log(LogLevel::kWarning, "mounted read-only: " + not_writable_because_);
}

// Nodes below .staging/ have the owner and modes of the store in the last listing. The kernel also
// checks the modes of the root, through which every path leads.
Vfs::Entry Vfs::StagedEntry(const StagingTree::Node& node) const {
  const Ownership own = watch_->LastListing()->ownership;
  Attributes attributes = node.attributes;
  attributes.uid = own.uid;
  attributes.gid = own.gid;
  attributes.mode =
      own.write_mode |
      (attributes.kind == FileKind::kDirectory ? own.folder_mode : own.folder_mode & 0444);
  return {.id = IdOf({.slot = 0, .view = kStagingView, .item = node.item}),
          .attributes = attributes,
          // The kernel caches nothing below .staging/, because other mounts change stagings, too.
          .seconds = node.item == StagingTree::kRoot ? kRootSeconds : 0};
}

// Lookups below .staging/ count a reference, which Forget releases.
Result<Vfs::Entry> Vfs::LookupStaged(NodeId folder, std::string_view name) {
  if (!staging_) return Status(Code::kStale, "stale inode number: the mount has no such entry");
  if (folder == kRootId) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto root, staging_->Stat(StagingTree::kRoot));
    return StagedEntry(root);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto node, staging_->Lookup(NodeOf(folder).item, name));
  return StagedEntry(node);
}

Result<Vfs::Entry> Vfs::StatStaged(NodeId node) {
  if (!staging_) return Status(Code::kStale, "stale inode number: the mount has no such entry");
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto found, staging_->Stat(NodeOf(node).item));
  return StagedEntry(found);
}

std::optional<Vfs::Entry> Vfs::KnownStaging(NodeId folder, std::string_view name) {
  if (!staging_ || !IsStagingRoot(folder)) return std::nullopt;
  const auto node = staging_->LookupKnown(name);
  return node ? std::optional(StagedEntry(*node)) : std::nullopt;
}

std::optional<Vfs::Entry> Vfs::KnownStaging(NodeId node) {
  if (!staging_ || !IsStaged(node)) return std::nullopt;
  const auto known = staging_->StatKnown(NodeOf(node).item);
  return known ? std::optional(StagedEntry(*known)) : std::nullopt;
}

Status Vfs::ListStaged(NodeId folder, std::uint64_t cookie,
                       const std::function<bool(const Listed&)>& fn) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Entry own, StatStaged(folder));
  if (!ListDots(own.attributes, cookie, fn)) return {};
  // Entries have no id, so the kernel looks names up when needed and no reference is counted.
  return staging_->List(NodeOf(folder).item, cookie > kDots ? cookie - kDots : 0,
                        [&](std::string_view name, const Attributes& a, std::uint64_t next) {
                          return fn({.name = std::string(name),
                                     .entry = {.id = 0, .attributes = a, .seconds = 0},
                                     .next = next + kDots});
                        });
}

// The staging tree if `node` belongs to it, else the refusal: EROFS for existing names that never
// change, EPERM (and a help line in .tensormount/errors, because `mv` and `cp` print only the
// errno) for names that could be meant as a new checkpoint.
Result<StagingTree*> Vfs::StagingOf(NodeId node, std::string_view operation,
                                    std::string_view name) {
  if (staging_ && IsStaged(node)) return staging_.get();
  const std::string what(name.empty() ? std::string_view("a file of the mount") : name);
  if (!staging_ || node != kRootId) return ReadOnlyError(what);
  // `name` is in the root: an existing checkpoint never changes; another name cannot be made here.
  if (name == "latest" || watch_->FindName(what)) return ReadOnlyError(what);
  const Status status = NotPermittedError(
      "only checkpoints can be in this directory: to save one, make .staging/NAME, write to it, "
      "then mv it here; to remove one, use `tensormount rm`");
  stats_.Report(operation, what, status);
  return status;
}

Result<std::shared_ptr<WriteHandle>> Vfs::OpenStaged(NodeId node, int flags) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(node, "open", ""));
  return tree->Open(NodeOf(node).item, flags);
}

Result<Vfs::Created> Vfs::Create(NodeId folder, std::string_view name, int flags) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(folder, "create", name));
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree::Opened made,
                               tree->Create(NodeOf(folder).item, name, flags));
  return Created{.entry = StagedEntry(made.node), .handle = std::move(made.handle)};
}

Result<Vfs::Entry> Vfs::MakeDirectory(NodeId folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(folder, "mkdir", name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto node, tree->MakeDirectory(NodeOf(folder).item, name));
  return StagedEntry(node);
}

Status Vfs::Truncate(NodeId node, std::uint64_t size) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(node, "truncate", ""));
  return tree->Truncate(NodeOf(node).item, size);
}

Result<Vfs::Entry> Vfs::SetAttributes(NodeId node) {
  if (node == kRootId && staging_)
    return NotPermittedError(
        "the attributes of the root are those of the store directory; change them there");
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(node, "setattr", ""));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto found, tree->SetAttributes(NodeOf(node).item));
  return StagedEntry(found);
}

Status Vfs::Unlink(NodeId folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(folder, "unlink", name));
  return tree->Unlink(NodeOf(folder).item, name);
}

Status Vfs::RemoveDirectory(NodeId folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(folder, "rmdir", name));
  return tree->RemoveDirectory(NodeOf(folder).item, name);
}

// A rename of a staging into the root publishes the staging; an object can be renamed within its
// staging; all other renames are refused. No error is EXDEV, because `mv` would then copy the
// files.
Status Vfs::Rename(NodeId folder, std::string_view name, NodeId to_folder, std::string_view to_name,
                   unsigned flags) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(folder, "rename", name));
  const auto refuse = [&](std::string_view why) {
    const Status status = NotPermittedError(why);
    stats_.Report("rename", name, status);
    return status;
  };
  if ((flags & ~static_cast<unsigned>(RENAME_NOREPLACE)) != 0) {
    return refuse("rename: two names cannot be exchanged in a mount");
  }
  const bool staging = NodeOf(folder).item == StagingTree::kRoot;
  if (to_folder == kRootId) {
    if (!staging) return refuse("rename: only a whole staging directory can be published");
    const Status status = tree->Publish(name, to_name);
    // The program that renamed the staging must find the new checkpoint at once.
    watch_->Refresh();
    return status;
  }
  if (!IsStaged(to_folder)) return ReadOnlyError(to_name);
  if (staging) return refuse("to publish a staging directory, mv it to the root of the mount");
  return tree->RenameWithin(NodeOf(folder).item, name, NodeOf(to_folder).item, to_name);
}

Status Vfs::RefuseMaking(NodeId folder, std::string_view name) {
  const Status status = StagingOf(folder, "make", name).status();
  return status.ok() ? NotPermittedError("links and special files cannot be made in a mount")
                     : status;
}

Status Vfs::RefuseChanging(NodeId node) {
  return staging_ && IsStaged(node)
             ? Status(Code::kUnsupported,
                      "files in a staging directory have no extended attributes")
             : ReadOnlyError("a file of the mount");
}

Status Vfs::Drain() { return staging_ ? staging_->SyncAll() : Status(); }

std::string Vfs::Metrics() {
  using Type = MetricsText::Type;
  MetricsText text;
  stats_.AddMetrics(text);
  // As in StatusFields: the last listing if the store does not answer.
  const auto now = watch_->first_check_done() ? watch_->LastListing()
                                              : watch_->CurrentListing(StoreWatch::kPatience);
  text.Family("source_info", Type::kGauge, "The mounted path and its kind; always 1");
  text.Sample({{"source", source_}, {"kind", KindName(kind_)}}, 1);
  text.One("checkpoints", Type::kGauge, "Checkpoints that are shown", now->by_id.size());
  text.One("open_checkpoints", Type::kGauge, "Checkpoints that the daemon keeps open",
           watch_->open_checkpoints());
  text.One("problems", Type::kGauge,
           "Checkpoints that cannot be shown, and reasons why the source cannot be read",
           now->problems.size());
  text.One("store_answers", Type::kGauge,
           "0 while a listing of the source directory is pending, else 1",
           watch_->is_responding() ? 1 : 0);
  if (now->latest) {
    text.One("latest_timestamp_seconds", Type::kGauge,
             "When the latest checkpoint was published, in seconds since 1970", now->latest->mtime);
    text.Family("latest_info", Type::kGauge, "The name of the latest checkpoint; always 1");
    text.Sample({{"checkpoint", now->latest->name}}, 1);
    if (now->latest->generation > 0) {
      text.One("latest_generation", Type::kGauge, "Generation of the latest checkpoint",
               now->latest->generation);
    }
    if (now->latest->data_bytes > 0) {
      text.One("latest_bytes", Type::kGauge, "Bytes of the data files of the latest checkpoint",
               now->latest->data_bytes);
    }
    if (const std::optional<std::uint64_t> nonfinite = now->latest->nonfinite()) {
      text.One("latest_nonfinite", Type::kGauge,
               "NaNs and infinities in the tensors of the latest checkpoint", *nonfinite);
    }
  }
  text.One("writable", Type::kGauge, "1 if checkpoints can be saved through the mount, else 0",
           writable() ? 1 : 0);
  if (staging_) {
    const StagingTree::Counts counts = staging_->counts();
    text.One("stagings", Type::kGauge, "Staging directories known to this mount", counts.stagings);
    text.One("staging_open_writers", Type::kGauge,
             "Files in staging directories that are open for writing", counts.open_writers);
    text.One("staging_files", Type::kGauge,
             "Data files written by the staging directories of this mount", counts.files);
  }
  if (metrics_) metrics_(text);
  return std::move(text).Take();
}

std::string Vfs::StagingFields() {
  return fmt::format(R"("writable": {}, "not_writable_because": {}{}{})", writable(),
                     not_writable_because_.empty() ? "null" : JsonString(not_writable_because_),
                     staging_ ? ", " : "", staging_ ? staging_->StatusFields() : "");
}

}  // namespace tensormount::fs
