// SPDX-License-Identifier: Apache-2.0
// What lookup, getattr, read and readdir mean, without a line of FUSE: node ids are slot, view and
// item (docs/architecture.md), and everything below a checkpoint is its CheckpointView's. What
// concerns .staging/ goes to StagingTree.
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

// Bytes of a name, as on other filesystems.
constexpr std::size_t kMaxName = 255;

// Cookies of a listing: the dots, then what the folder itself counts from 1.
constexpr std::uint64_t kDots = 2;
// Of the root of a store: latest, then the slots by id.
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

// What a node of slot 0 is; nothing for numbers that mean nothing.
std::optional<Fixed> FixedOf(const Node& node) {
  if (node.slot != 0 || node.view != kOwnView) return std::nullopt;
  const Fixed fixed = static_cast<Fixed>(node.item);
  if (fixed == Fixed::kRoot || (fixed >= Fixed::kLatest && fixed <= Fixed::kMetrics)) return fixed;
  return std::nullopt;
}

// A hash of names, so that inode numbers are the same in every mount and after a restart; 0 and 1
// mean something else to programs.
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

// The two entries that every folder begins with. False: fn wants no more.
bool ListDots(const Attributes& attributes, std::uint64_t cookie,
              const std::function<bool(const Vfs::Listed&)>& fn) {
  // Without an id: the kernel knows both.
  for (std::uint64_t i = cookie; i < kDots; ++i) {
    if (!fn({.name = i == 0 ? "." : "..", .entry = {.attributes = attributes}, .next = i + 1})) {
      return false;
    }
  }
  return true;
}

Status ReadOnly(std::string_view what) { return Status::FromErrno(EROFS, "change", what); }

Status NotPermitted(std::string_view why) {
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
  vfs->kind_ = found.kind;
  vfs->source_ = found.path;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      vfs->watch_, StoreWatch::Start(fs, found.kind, found.path, options.list_views, options.verify,
                                     options.map, options.hf, options.roots, options.others));
  if (options.writable) vfs->OpenStaging(fs);
  if (!HoldsMany(found.kind)) {
    // Say now what is wrong with it.
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto slot, vfs->watch_->Find(1));
    TENSORMOUNT_RETURN_IF_ERROR(vfs->watch_->View(*slot).status());
  } else if (options.map || options.hf.rules) {
    const auto now = vfs->watch_->Now();
    if (now->latest) TENSORMOUNT_RETURN_IF_ERROR(vfs->watch_->View(*now->latest).status());
  }
  return vfs;
}

// Opens the checkpoint where it is not open yet, which is what may take long (MayBlock).
Result<Vfs::Located> Vfs::Locate(NodeId id) {
  Located place{.node = NodeOf(id), .view = nullptr};
  if (place.node.slot == 0) {
    if (id != kRootId || HoldsMany(kind_)) return place;
    place.node.slot = 1;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto slot, watch_->Find(place.node.slot));
  TENSORMOUNT_ASSIGN_OR_RETURN(place.view, watch_->View(*slot));
  return place;
}

// As Locate, and also finds files of a checkpoint that was removed while programs had them open:
// read(2) and fstat(2) of those go on, as on other filesystems.
Result<Vfs::Located> Vfs::LocateFile(NodeId id) {
  Result<Located> place = Locate(id);
  if (place.status().code() != Code::kStale) return place;
  const Node node = NodeOf(id);
  const auto kept = watch_->KeptView(node.slot);
  if (!kept) return place;
  // A folder leads to files that nobody has open.
  const Result<Attributes> attributes = kept->Stat(node);
  if (!attributes.ok() || attributes.value().kind != FileKind::kFile) return place;
  return Located{.node = node, .view = kept};
}

bool Vfs::IsThere(NodeId node) {
  const std::uint32_t slot = NodeOf(node).slot;
  return watch_->Find(slot == 0 ? 1 : slot).ok();
}

// A folder of a store's root is answered by the listing; only the first look at the store takes
// long.
bool Vfs::MayBlock(NodeId id) {
  std::uint32_t slot = NodeOf(id).slot;
  if (slot == 0) {
    if (id != kRootId) return IsStaged(id);
    if (HoldsMany(kind_)) return options_.others || !watch_->settled();
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
  // A look that is as old as the last request would let somebody in who was shut out since.
  const auto now = options_.others ? watch_->Now() : watch_->Last();
  Entry entry{.id = kRootId, .attributes = {}, .seconds = kRootSeconds};
  entry.attributes = {.kind = FileKind::kDirectory,
                      .inode = InodeOf(source_, ""),
                      .size = 0,
                      .mode = now->ownership.folder_mode,
                      .uid = now->ownership.uid,
                      .gid = now->ownership.gid,
                      .mtime = now->mtime};
  // Who may write to the store may publish: the kernel looks at the root's mode.
  if (staging_) entry.attributes.mode |= now->ownership.write_mode;
  return entry;
}

Result<Vfs::Entry> Vfs::LatestEntry(const StoreWatch::Listing& now) {
  TENSORMOUNT_RETURN_IF_ERROR(now.latest_unknown);
  if (!now.latest) return NoSuch(kLatestName);
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

// The size is that of the text now. The text that is read is made when the file is opened, and may
// differ: these files are read past the page cache.
Result<Vfs::Entry> Vfs::ControlEntry(Fixed fixed) {
  const auto now = watch_->Last();
  const bool folder = fixed == Fixed::kControl;
  Entry entry{.id = IdOf(MountNode(fixed)), .attributes = {}, .seconds = 0};
  entry.attributes = {.kind = folder ? FileKind::kDirectory : FileKind::kFile,
                      .inode = InodeOf(source_, "/" + std::string(ControlName(fixed))),
                      .size = folder ? 0 : ControlText(fixed).size(),
                      .mode = folder ? now->ownership.folder_mode : now->ownership.file_mode,
                      .uid = now->ownership.uid,
                      .gid = now->ownership.gid,
                      .mtime = now->mtime};
  // Names files and tensors that not everybody may know of.
  if (fixed == Fixed::kErrors && options_.others) entry.attributes.mode &= 0400;
  return entry;
}

// Names that come and go, so each entry is given for kRootSeconds only.
Result<Vfs::Entry> Vfs::LookupInRoot(std::string_view name) {
  if (name == kControlName) return ControlEntry(Fixed::kControl);
  if (!HoldsMany(kind_)) {
    (void)watch_->Now();  // Sees whether it is still there.
    TENSORMOUNT_ASSIGN_OR_RETURN(const Located root, Locate(kRootId));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Child child, root.view->Lookup(root.node, name));
    Entry entry = EntryOf(child);
    entry.seconds = kRootSeconds;  // A removal must show.
    return entry;
  }
  if (name == kStagingName && staging_) {
    return LookupStaged(kRootId, name);
  }
  if (name == kLatestName) return LatestEntry(*watch_->Now());
  const auto slot = watch_->FindName(std::string(name));
  if (slot) return SlotEntry(*slot);
  // Where the store itself went, nobody may take it for one without this checkpoint.
  TENSORMOUNT_RETURN_IF_ERROR(watch_->Last()->store_gone);
  return NoSuch(name);
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
    return NoSuch(name);
  }
  return Status::FromErrno(ENOTDIR, "look up", name);
}

Result<Vfs::Entry> Vfs::Stat(NodeId id) {
  if (id == kRootId) return RootEntry();
  if (IsStaged(id)) return StatStaged(id);
  const Node node = NodeOf(id);
  if (node.slot == 0) {
    const std::optional<Fixed> fixed = FixedOf(node);
    if (!fixed) return Status(Code::kStale, "no such node");
    return *fixed == Fixed::kLatest ? LatestEntry(*watch_->Now()) : ControlEntry(*fixed);
  }
  if (node.view == kOwnView && node.item == kRootItem) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto slot, watch_->Find(node.slot));
    return SlotEntry(*slot);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, LocateFile(id));
  if (!place.view) return Status(Code::kStale, "no such node");
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, place.view->Stat(place.node));
  return Entry{.id = id, .attributes = attributes, .seconds = kSealedSeconds};
}

Result<std::string> Vfs::ReadLink(NodeId id) {
  if (id != IdOf(MountNode(Fixed::kLatest))) {
    return Status(Code::kInvalidArgument, "not a symbolic link");
  }
  const auto now = watch_->Now();
  TENSORMOUNT_RETURN_IF_ERROR(now->latest_unknown);
  if (!now->latest) return NoSuch(kLatestName);
  return now->latest->name;
}

// A slot's cookie is its id: a listing that goes on later neither repeats nor skips one, whatever
// came or went meanwhile.
Status Vfs::ListStore(std::uint64_t cookie, const std::function<bool(const Listed&)>& fn) {
  const auto now = watch_->Now();
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
  if (id == kRootId && HoldsMany(kind_)) return ListStore(cookie, fn);
  if (IsStaged(id)) return ListStaged(id, cookie, fn);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Located place, Locate(id));
  if (!place.view) {
    if (place.node == MountNode(Fixed::kControl)) return ListControl(cookie, fn);
    return Status::FromErrno(ENOTDIR, "list", "this node");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Entry own, Stat(id));
  if (own.attributes.kind != FileKind::kDirectory) {
    return Status::FromErrno(ENOTDIR, "list", "this node");
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
  if (!fixed) return Status(Code::kStale, "no such node");
  for (const Fixed control : kControlFiles) {
    if (*fixed == control) {
      return VirtualFile::OfText(fmt::format("{}/{}", kControlName, ControlName(control)),
                                 ControlText(control));
    }
  }
  return Status::FromErrno(*fixed == Fixed::kLatest ? ELOOP : EISDIR, "open", "this node");
}

void Vfs::Forget(NodeId id, std::uint64_t references) {
  const Node node = NodeOf(id);
  if (IsStaged(id) && staging_) staging_->Forget(node.item, references);
  if (node.slot == 0) return;
  const auto slot = watch_->Find(node.slot);
  if (!slot.ok()) return;
  // Of others nothing is counted.
  if (node.view == CheckpointView::kSlicesView)
    slot.value()->slices()->Forget(node.item, references);
}

Result<std::string> Vfs::GetXattr(NodeId id, std::string_view name) {
  if (!name.starts_with("user.")) {
    return Status(Code::kUnsupported, "only user. attributes here");
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
  const auto now = watch_->settled() ? watch_->Last() : watch_->Now(StoreWatch::kPatience);
  std::string problems;
  for (const std::string& problem : now->problems) {
    problems += (problems.empty() ? "" : ", ") + JsonString(problem);
  }
  return fmt::format(
      R"("source": {}, "kind": "{}", "verify": "{}", "views_listed": {}, "mapped": {}, "checkpoints": {}, )"
      R"("latest": {}, "open_checkpoints": {}, "store_answers": {}, "errors": {}, )"
      R"({}, "problems": [{}])",
      JsonString(source_), KindName(kind_), VerifyName(options_.verify), options_.list_views,
      options_.map != nullptr, now->by_id.size(),
      now->latest && HoldsMany(kind_) ? JsonString(now->latest->name) : "null",
      watch_->open_checkpoints(), watch_->answers(), stats_.errors(), StagingFields(), problems);
}

// ---- Saving: .staging/, and all that is refused ------------------------------------------------

void Vfs::OpenStaging(FileSystem& fs) {
  if (kind_ != SourceKind::kStore) return;  // Checkpoints never change.
  Status status;
  // As this process may write: a mount gives nobody more rights than it has itself.
  if (access(source_.c_str(), W_OK) != 0) {
    status = Status::FromErrno(errno, "write to", source_);
  } else {
    Result<std::unique_ptr<StagingTree>> staging = StagingTree::Make(fs, source_, stats_);
    status = staging.status();
    if (staging.ok()) staging_ = std::move(staging).value();
  }
  if (status.ok()) return;
  not_writable_because_ = status.message();
  Log(LogLevel::kWarning, "mounted read-only: " + not_writable_because_);
}

// What is below .staging/ has the modes of the store, as the watch saw them last: whoever comes by
// a path has passed the root, which looked.
Vfs::Entry Vfs::StagedEntry(const StagingTree::Node& node) const {
  const Ownership own = watch_->Last()->ownership;
  Attributes attributes = node.attributes;
  attributes.uid = own.uid;
  attributes.gid = own.gid;
  attributes.mode =
      own.write_mode |
      (attributes.kind == FileKind::kDirectory ? own.folder_mode : own.folder_mode & 0444);
  return {.id = IdOf({.slot = 0, .view = kStagingView, .item = node.item}),
          .attributes = attributes,
          // Nothing below it is kept by the kernel: other mounts change it too.
          .seconds = node.item == StagingTree::kRoot ? kRootSeconds : 0};
}

// Lookups below .staging/ count a reference, which Forget gives back.
Result<Vfs::Entry> Vfs::LookupStaged(NodeId folder, std::string_view name) {
  if (!staging_) return Status(Code::kStale, "no such node");
  if (folder == kRootId) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto root, staging_->Stat(StagingTree::kRoot));
    return StagedEntry(root);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto node, staging_->Lookup(NodeOf(folder).item, name));
  return StagedEntry(node);
}

Result<Vfs::Entry> Vfs::StatStaged(NodeId node) {
  if (!staging_) return Status(Code::kStale, "no such node");
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
  // Without an id the kernel looks a name up when somebody wants it: nothing to count here.
  return staging_->List(NodeOf(folder).item, cookie > kDots ? cookie - kDots : 0,
                        [&](std::string_view name, const Attributes& a, std::uint64_t next) {
                          return fn({.name = std::string(name),
                                     .entry = {.id = 0, .attributes = a, .seconds = 0},
                                     .next = next + kDots});
                        });
}

// The tree, or why not: EROFS for what exists and never changes, EPERM (and a line of help) for a
// name that could be meant for a new checkpoint. `mv` and `cp` print only the errno.
Result<StagingTree*> Vfs::StagingOf(NodeId node, std::string_view operation,
                                    std::string_view name) {
  if (staging_ && IsStaged(node)) return staging_.get();
  const std::string what(name.empty() ? std::string_view("this file") : name);
  if (!staging_ || node != kRootId) return ReadOnly(what);
  // Names in the root: checkpoints are what they are, others cannot come to be here.
  if (name == "latest" || watch_->FindName(what)) return ReadOnly(what);
  const Status status = NotPermitted(
      "only checkpoints are here: make .staging/NAME, write, then mv it here; "
      "`tensormount rm` removes one");
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
  if (node == kRootId && staging_) return NotPermitted("the root's attributes are the store's");
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

// Three kinds: a staging into the root publishes it; an object within its staging; all else is
// refused. Never with EXDEV, at which `mv` would begin to copy.
Status Vfs::Rename(NodeId folder, std::string_view name, NodeId to_folder, std::string_view to_name,
                   unsigned flags) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingTree* const tree, StagingOf(folder, "rename", name));
  const auto refuse = [&](std::string_view why) {
    const Status status = NotPermitted(why);
    stats_.Report("rename", name, status);
    return status;
  };
  if ((flags & ~static_cast<unsigned>(RENAME_NOREPLACE)) != 0) {
    return refuse("nothing is exchanged here");
  }
  const bool staging = NodeOf(folder).item == StagingTree::kRoot;
  if (to_folder == kRootId) {
    if (!staging) return refuse("only a whole staging can be published");
    const Status status = tree->Publish(name, to_name);
    // Who renamed it finds it there.
    watch_->Refresh();
    return status;
  }
  if (!IsStaged(to_folder)) return ReadOnly(to_name);
  if (staging) return refuse("a staging is published by mv to the root of the mount");
  return tree->RenameWithin(NodeOf(folder).item, name, NodeOf(to_folder).item, to_name);
}

Status Vfs::RefuseMaking(NodeId folder, std::string_view name) {
  const Status status = StagingOf(folder, "make", name).status();
  return status.ok() ? NotPermitted("no links and no special files here") : status;
}

Status Vfs::RefuseChanging(NodeId node) {
  return staging_ && IsStaged(node)
             ? Status(Code::kUnsupported, "files of a staging have no extended attributes")
             : ReadOnly("this file");
}

Status Vfs::Drain() { return staging_ ? staging_->SyncAll() : Status(); }

std::string Vfs::Metrics() {
  using Type = MetricsText::Type;
  MetricsText text;
  stats_.AddMetrics(text);
  // As status: what was seen last, where the store does not answer.
  const auto now = watch_->settled() ? watch_->Last() : watch_->Now(StoreWatch::kPatience);
  text.Family("source_info", Type::kGauge, "What is mounted; always 1");
  text.Sample({{"source", source_}, {"kind", KindName(kind_)}}, 1);
  text.One("checkpoints", Type::kGauge, "Checkpoints that are shown", now->by_id.size());
  text.One("open_checkpoints", Type::kGauge, "Checkpoints that the daemon keeps open",
           watch_->open_checkpoints());
  text.One("problems", Type::kGauge, "Checkpoints that cannot be shown", now->problems.size());
  text.One("store_answers", Type::kGauge, "0 while a look at the source's folder has not come back",
           watch_->answers() ? 1 : 0);
  if (now->latest) {
    text.One("latest_timestamp_seconds", Type::kGauge,
             "When the latest checkpoint was published, in seconds since 1970", now->latest->mtime);
  }
  text.One("writable", Type::kGauge, "1 where checkpoints can be saved through the mount",
           writable() ? 1 : 0);
  if (staging_) {
    const StagingTree::Counts counts = staging_->counts();
    text.One("stagings", Type::kGauge, "Stagings that this mount knows", counts.stagings);
    text.One("staging_open_writers", Type::kGauge, "Files of stagings that are open for writing",
             counts.open_writers);
    text.One("staging_files", Type::kGauge, "Files that stagings of this mount were written to",
             counts.files);
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
