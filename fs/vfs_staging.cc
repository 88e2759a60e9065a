// SPDX-License-Identifier: Apache-2.0
// Vfs of vfs.h: what changes something: below .staging/ by StagingTree, elsewhere refused. Apart
// from vfs.cc, which is all that a mount of a single checkpoint has.
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/log.h"
#include "fs/vfs.h"
#include "fs/views/checkpoint_text.h"

namespace tensormount::fs {
namespace {

Status ReadOnly(std::string_view what) { return Status::FromErrno(EROFS, "change", what); }

Status NotPermitted(std::string_view why) {
  return Status::FromParts(Code::kPermissionDenied, EPERM, std::string(why));
}

}  // namespace

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

Vfs::Entry Vfs::StagedEntry(const StagingTree::Node& node) {
  return {.id = IdOf({.slot = 0, .view = kStagingView, .item = node.item}),
          .attributes = node.attributes,
          // Nothing below it is kept by the kernel: other mounts change it too.
          .seconds = node.item == StagingTree::kRoot ? kRootSeconds : 0};
}

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

Status Vfs::ListStaged(NodeId folder, std::uint64_t cookie,
                       const std::function<bool(const Listed&)>& fn) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Entry own, StatStaged(folder));
  constexpr std::uint64_t kDots = 2;
  for (std::uint64_t i = cookie; i < kDots; ++i) {
    const Entry dot{.id = 0, .attributes = own.attributes, .seconds = 0};
    if (!fn({.name = i == 0 ? "." : "..", .entry = dot, .next = i + 1})) return {};
  }
  // Without an id the kernel looks a name up when somebody wants it: nothing to count here.
  return staging_->List(NodeOf(folder).item, cookie > kDots ? cookie - kDots : 0,
                        [&](std::string_view name, const Attributes& a, std::uint64_t next) {
                          return fn({.name = std::string(name),
                                     .entry = {.id = 0, .attributes = a, .seconds = 0},
                                     .next = next + kDots});
                        });
}

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

std::string Vfs::StagingFields() {
  return fmt::format(R"("writable": {}, "not_writable_because": {}{}{})", writable(),
                     not_writable_because_.empty() ? "null" : JsonString(not_writable_because_),
                     staging_ ? ", " : "", staging_ ? staging_->StatusFields() : "");
}

}  // namespace tensormount::fs
