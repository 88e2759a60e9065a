// SPDX-License-Identifier: Apache-2.0
// Operations of fuse_bridge.h that change something, and operations on files below .staging/.
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "fs/mount/fuse_bridge_internal.h"
#include "fs/mount/mount_call.h"

namespace tensormount::fs {

namespace {

using WritePtr = std::shared_ptr<WriteHandle>;

// Refuses a request without further checks.
void Refuse(fuse_req_t req, int error = EROFS) {
  BridgeOf(req).vfs.stats().Count(Op::kRefused, {}, true);
  fuse_reply_err(req, error);
}

// On a read-only mount: refuses the request and returns true.
bool IsReadOnlyMount(fuse_req_t req) {
  if (BridgeOf(req).vfs.writable()) return false;
  Refuse(req);
  return true;
}

Reply Done() {
  return Reply([](fuse_req_t r) { fuse_reply_err(r, 0); });
}

// Serves operations that return a Status. Stagings report their own failures.
void ServeStatus(fuse_req_t req, Op op, NodeId node, std::function<Status()> work) {
  Serve(req, op, node, true, [work = std::move(work)]() -> Result<Reply> {
    TENSORMOUNT_RETURN_IF_ERROR(work());
    return Done();
  });
}

// Replies with an entry, for whose node the caller has counted a reference. The reference belongs
// to the kernel once the reply was sent.
Reply EntryReply(Vfs& vfs, const Vfs::Entry& entry) {
  auto reference = std::make_shared<NodeReference>(vfs, entry.id);
  return Reply([reference, param = ParamOf(entry)](fuse_req_t r) {
    if (fuse_reply_entry(r, &param) == 0) reference->Keep();
  });
}

// Like Serve, for work on borrowed bytes: on the calling thread the work uses the caller's bytes;
// `keep`, which copies them, runs only if the work is queued.
void ServeData(fuse_req_t req, Op op, NodeId node, std::function<Result<Reply>()> work,
               const std::function<void()>& keep) {
  Bridge& bridge = BridgeOf(req);
  const auto since = std::chrono::steady_clock::now();
  auto answer = PendingAnswerOf(req, op, bridge, since);
  QueueOf(req, op).Run(
      answer,
      [req, &bridge, op, since, node, answer, work = std::move(work)] {
        const Result<Reply> result = Guarded(work);
        if (answer->Claim()) Answer(req, bridge, op, since, node, result);
      },
      keep);
}

// Makes the file bypass the page cache: other programs see writes at once, and no page is written
// back after close(2), when a publish may have begun.
void SetModes(fuse_file_info& info) {
  info.direct_io = 1;
  info.keep_cache = 0;
  info.noflush = 0;
}

// The reply gives two things to the kernel, a node and an open file. Both are taken back if the
// reply fails.
void OpCreate(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t, fuse_file_info* fi) {
  if (IsReadOnlyMount(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kCreate, parent, true,
        [&vfs, parent, info = *fi, name = std::string(name)]() mutable -> Result<Reply> {
          TENSORMOUNT_ASSIGN_OR_RETURN(Vfs::Created made, vfs.Create(parent, name, info.flags));
          SetModes(info);
          auto reference = std::make_shared<NodeReference>(vfs, made.entry.id);
          return Reply([&vfs, info, reference, param = ParamOf(made.entry),
                        handle = std::move(made.handle)](fuse_req_t r) mutable {
            auto open = std::make_unique<OpenFile>();
            open->write = std::move(handle);
            open->users = std::make_unique<FileUsers>(fuse_req_ctx(r)->pid);
            open->counted = MountStats::OpenHandle(vfs.stats());
            info.fh = reinterpret_cast<std::uint64_t>(open.get());
            // If the reply fails, the kernel sends neither RELEASE nor FORGET, so the destructors
            // of `open` and `reference` clean up.
            if (fuse_reply_create(r, &param, &info) != 0) return;
            (void)open.release();
            reference->Keep();
          });
        });
}

void OpMkdir(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t) {
  if (IsReadOnlyMount(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kMkdir, parent, true, [&vfs, parent, name = std::string(name)]() -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, vfs.MakeDirectory(parent, name));
    return EntryReply(vfs, entry);
  });
}

void OpUnlink(fuse_req_t req, fuse_ino_t parent, const char* name) {
  if (IsReadOnlyMount(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  ServeStatus(req, Op::kRemove, parent,
              [&vfs, parent, name = std::string(name)] { return vfs.Unlink(parent, name); });
}

void OpRmdir(fuse_req_t req, fuse_ino_t parent, const char* name) {
  if (IsReadOnlyMount(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  ServeStatus(req, Op::kRemove, parent, [&vfs, parent, name = std::string(name)] {
    return vfs.RemoveDirectory(parent, name);
  });
}

// Serves RENAME, steps 1 and 4 of publish_calls.h. The work belongs to the queue and goes on if its
// caller is killed.
void OpPublish(fuse_req_t req, PublishCalls::Names names, unsigned flags) {
  Bridge& bridge = BridgeOf(req);
  PublishCalls& calls = *bridge.publishes;
  const pid_t thread = fuse_req_ctx(req)->pid;
  if (const auto begun = calls.Find(thread, names)) {
    ServeLong(
        req, Op::kRename, names.folder,
        [&calls, begun, thread](LongWork& self) -> Result<Reply> {
          // The reply is ignored, because the work runs again.
          if (calls.WaitForEnd(*begun, [&self] { return self.PrepareRetry(); })) return Done();
          calls.Remove(thread, begun);
          TENSORMOUNT_RETURN_IF_ERROR(*begun->result);
          return Done();
        },
        // This request only waits, so a killed caller can be answered.
        [](fuse_req_t) { return false; });
    return;
  }
  const auto call = calls.Add(thread, std::move(names));
  ServeLong(
      req, Op::kRename, call->names.folder,
      [&bridge, &calls, call, flags](LongWork&) -> Result<Reply> {
        const auto& [folder, name, as] = call->names;
        std::optional<Vfs::Entry> staging;
        std::shared_ptr<NodeReference> reference;
        const Result<Reply> done = Guarded([&]() -> Result<Reply> {
          if (const auto found = bridge.vfs.Lookup(folder, name); found.ok()) {
            reference = std::make_shared<NodeReference>(bridge.vfs, found.value().id);
            staging = found.value();
          }
          TENSORMOUNT_RETURN_IF_ERROR(bridge.vfs.Rename(folder, name, kRootId, as, flags));
          return Done();
        });
        calls.End(*call, done.status(), std::move(staging), std::move(reference));
        return done;
      },
      [call, thread](fuse_req_t r) {
        if (thread <= 0) return false;
        call->kernel_retries = true;
        fuse_reply_err(r, ESTALE);
        return true;
      });
}

void OpRename(fuse_req_t req, fuse_ino_t parent, const char* name, fuse_ino_t to_parent,
              const char* to_name, unsigned flags) {
  if (IsReadOnlyMount(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  if (IsStaged(parent) && to_parent == kRootId) {
    OpPublish(req, {.folder = parent, .name = name, .as = to_name}, flags);
    return;
  }
  // The kernel keeps both directories locked until the answer, so this work must not access the
  // mount itself.
  ServeStatus(req, Op::kRename, parent,
              [&vfs, parent, name = std::string(name), to_parent, to_name = std::string(to_name),
               flags] { return vfs.Rename(parent, name, to_parent, to_name, flags); });
}

void RefuseMaking(fuse_req_t req, fuse_ino_t parent, const char* name) {
  if (IsReadOnlyMount(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  ServeStatus(req, Op::kRefused, parent,
              [&vfs, parent, name = std::string(name)] { return vfs.RefuseMaking(parent, name); });
}

// Only a change of the size has an effect. Modes, owners and times are accepted and ignored,
// because `cp -p` and rsync set them.
void OpSetattr(fuse_req_t req, fuse_ino_t node, struct stat* attributes, int to_set,
               fuse_file_info* fi) {
  if (IsReadOnlyMount(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  const WritePtr handle = fi != nullptr && fi->fh != 0 ? OpenFileOf(fi).write : nullptr;
  const bool resize = (to_set & FUSE_SET_ATTR_SIZE) != 0;
  const auto size = static_cast<std::uint64_t>(attributes->st_size);
  Serve(req, Op::kSetattr, node, true, [&vfs, node, handle, resize, size]() -> Result<Reply> {
    if (resize) {
      TENSORMOUNT_RETURN_IF_ERROR(handle ? handle->Truncate(size) : vfs.Truncate(node, size));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, vfs.SetAttributes(node));
    return Reply([entry](fuse_req_t r) {
      const struct stat st = StatOf(entry.attributes);
      fuse_reply_attr(r, &st, entry.seconds);
    });
  });
}

void OpWrite(fuse_req_t req, fuse_ino_t node, const char* data, std::size_t size, off_t offset,
             fuse_file_info* fi) {
  Bridge& bridge = BridgeOf(req);
  const WritePtr handle = OpenFileOf(fi).write;
  if (!handle) return Refuse(req, EBADF);
  if (offset < 0 || size > kMaxRequestBytes) return Refuse(req, EINVAL);
  // The bytes are in this thread's buffer, which is reused when this returns; they are copied only
  // for another thread.
  auto copy = std::make_shared<std::string>();
  // Writes from the page cache come only from shared mappings: at the page's offset, independent of
  // the open flags, and without a lock owner.
  const bool pages = fi->writepage != 0;
  const bool append = !pages && (fi->flags & O_APPEND) != 0;
  if (!pages) OpenFileOf(fi).users->NoteWrite(fi->lock_owner, fuse_req_ctx(req)->pid);
  ServeData(
      req, Op::kWrite, node,
      [&bridge, handle, data, copy, size, offset, append, pages]() -> Result<Reply> {
        const char* const bytes = copy->empty() ? data : copy->data();
        if (pages) {
          TENSORMOUNT_RETURN_IF_ERROR(
              handle->WritePages(static_cast<std::uint64_t>(offset), bytes, size));
        } else if (append) {
          TENSORMOUNT_RETURN_IF_ERROR(handle->Append(bytes, size).status());
        } else {
          TENSORMOUNT_RETURN_IF_ERROR(
              handle->Write(static_cast<std::uint64_t>(offset), bytes, size));
        }
        bridge.vfs.stats().CountStaged(0, size);
        return Reply([size](fuse_req_t r) { fuse_reply_write(r, size); });
      },
      [copy, data, size] { copy->assign(data, size); });
}

// close(2) waits for this answer, so its error can tell the program that data are not durable.
void OpFlush(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi) {
  const WritePtr handle = OpenFileOf(fi).write;
  if (!handle) {
    fuse_reply_err(req, 0);
    return;
  }
  switch (OpenFileOf(fi).users->NoteClose(fi->lock_owner, fuse_req_ctx(req)->pid)) {
    case FileUsers::Close::kUnrelated:
      fuse_reply_err(req, 0);
      return;
    case FileUsers::Close::kNotLast:
      ServeStatus(req, Op::kFlush, node, [handle] { return handle->Sync(); });
      return;
    case FileUsers::Close::kLast:
      ServeStatus(req, Op::kFlush, node, [handle] { return handle->Flush(); });
  }
}

void OpFsync(fuse_req_t req, fuse_ino_t node, int, fuse_file_info* fi) {
  const WritePtr handle = OpenFileOf(fi).write;
  if (!handle) {
    fuse_reply_err(req, 0);  // Published files are durable.
    return;
  }
  ServeStatus(req, Op::kFsync, node, [handle] { return handle->Sync(); });
}

void OpFsyncdir(fuse_req_t req, fuse_ino_t, int, fuse_file_info*) { fuse_reply_err(req, 0); }

// Lengthens the file if necessary. Space is allocated only when bytes are written, and punching
// holes is refused.
void OpFallocate(fuse_req_t req, fuse_ino_t node, int mode, off_t offset, off_t length,
                 fuse_file_info* fi) {
  if (IsReadOnlyMount(req)) return;
  const WritePtr handle = OpenFileOf(fi).write;
  if (!handle) return Refuse(req, EBADF);
  if ((mode & ~FALLOC_FL_KEEP_SIZE) != 0) return Refuse(req, EOPNOTSUPP);
  const bool keep = (mode & FALLOC_FL_KEEP_SIZE) != 0;
  ServeStatus(req, Op::kSetattr, node, [handle, keep, offset, length]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes now, handle->Stat());
    // The sum cannot overflow: the kernel refuses negative values (EINVAL) and sums above the
    // largest file (EFBIG).
    const auto end = static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(length);
    if (keep || end <= now.size) return {};
    return handle->Truncate(end);
  });
}

void RefuseAttribute(fuse_req_t req, fuse_ino_t node) {
  if (IsReadOnlyMount(req)) return;
  Refuse(req, BridgeOf(req).vfs.RefuseChanging(node).ToErrno());
}

}  // namespace

bool IsStaged(NodeId node) { return Vfs::IsStaged(node); }

// Files of published checkpoints come here only to be refused with the right errno.
void OpenStaged(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi) {
  Vfs& vfs = BridgeOf(req).vfs;
  if (!IsStaged(node)) {
    Refuse(req, vfs.writable() ? vfs.OpenStaged(node, fi->flags).status().ToErrno() : EROFS);
    return;
  }
  Serve(req, Op::kOpenStaged, node, true, [&vfs, node, info = *fi]() mutable -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(WritePtr handle, vfs.OpenStaged(node, info.flags));
    SetModes(info);
    return Reply([&vfs, info, handle = std::move(handle)](fuse_req_t r) mutable {
      auto open = std::make_unique<OpenFile>();
      open->write = std::move(handle);
      open->users = std::make_unique<FileUsers>(fuse_req_ctx(r)->pid);
      open->counted = MountStats::OpenHandle(vfs.stats());
      info.fh = reinterpret_cast<std::uint64_t>(open.get());
      // Several processes may write one tensor at once, each at its own offset.
      const FuseShim::OpenReplyScope together(0, true);
      // If the reply fails, the kernel sends no RELEASE, so the destructor of `open` closes the
      // file.
      if (fuse_reply_open(r, &info) == 0) (void)open.release();
    });
  });
}

void ReadStaged(fuse_req_t req, std::size_t size, off_t offset, fuse_file_info* fi) {
  Bridge& bridge = BridgeOf(req);
  if (size > kMaxRequestBytes || offset < 0) return Refuse(req, EINVAL);
  const WritePtr handle = OpenFileOf(fi).write;
  // Direct reads carry a lock owner; reads for the page cache (mappings) carry none.
  const bool pages = fi->lock_owner == 0;
  Serve(req, Op::kReadStaged, 0, true, [&bridge, handle, size, offset, pages]() -> Result<Reply> {
    if (pages) TENSORMOUNT_RETURN_IF_ERROR(handle->NoteMapping());
    char* buffer = ThreadBuffer();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n,
                                 handle->Read(static_cast<std::uint64_t>(offset), buffer, size));
    bridge.vfs.stats().CountStaged(n, 0);
    // The reading thread sends the reply before its next read, so the buffer is still valid.
    return Reply([buffer, n](fuse_req_t r) { fuse_reply_buf(r, buffer, n); });
  });
}

void SeekStaged(fuse_req_t req, off_t offset, int whence, fuse_file_info* fi) {
  if (offset < 0) return Refuse(req, ENXIO);
  if (whence != SEEK_DATA && whence != SEEK_HOLE) return Refuse(req, EINVAL);
  const WritePtr handle = OpenFileOf(fi).write;
  Serve(req, Op::kOther, 0, true,
        [handle, at = static_cast<std::uint64_t>(offset), whence]() -> Result<Reply> {
          TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t found,
                                       handle->Seek(at, whence == SEEK_DATA));
          return Reply([found](fuse_req_t r) { fuse_reply_lseek(r, static_cast<off_t>(found)); });
        });
}

// Finishes remaining work (pages of a mapping) before the answer, although the kernel does not wait
// for the answer to RELEASE.
void ReleaseStaged(fuse_req_t req, fuse_ino_t node, std::unique_ptr<OpenFile> open) {
  const std::shared_ptr<OpenFile> last(std::move(open));
  // writing() runs on the queue, because it may block behind a close(2) in progress, whose caller
  // was killed.
  ServeStatus(req, Op::kFlush, node,
              [last] { return last->write->writing() ? last->write->Release() : Status(); });
}

void AddWriteOps(fuse_lowlevel_ops& ops) {
  ops.create = OpCreate;
  ops.mkdir = OpMkdir;
  ops.unlink = OpUnlink;
  ops.rmdir = OpRmdir;
  ops.rename = OpRename;
  ops.setattr = OpSetattr;
  ops.write = OpWrite;
  ops.flush = OpFlush;
  ops.fsync = OpFsync;
  ops.fsyncdir = OpFsyncdir;
  ops.fallocate = OpFallocate;
  ops.mknod = [](fuse_req_t r, fuse_ino_t parent, const char* name, mode_t, dev_t) {
    RefuseMaking(r, parent, name);
  };
  ops.symlink = [](fuse_req_t r, const char*, fuse_ino_t parent, const char* name) {
    RefuseMaking(r, parent, name);
  };
  ops.link = [](fuse_req_t r, fuse_ino_t, fuse_ino_t parent, const char* name) {
    RefuseMaking(r, parent, name);
  };
  ops.setxattr = [](fuse_req_t r, fuse_ino_t node, const char*, const char*, std::size_t, int) {
    RefuseAttribute(r, node);
  };
  ops.removexattr = [](fuse_req_t r, fuse_ino_t node, const char*) { RefuseAttribute(r, node); };
}

}  // namespace tensormount::fs
