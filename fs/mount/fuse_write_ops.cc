// SPDX-License-Identifier: Apache-2.0
// Operations of fuse_bridge.h that change something, and what only files below .staging/ have.
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "fs/mount/fuse_bridge_internal.h"
#include "fs/mount/mount_call.h"

namespace tensormount::fs {

namespace {

using WritePtr = std::shared_ptr<WriteHandle>;

// What is refused without looking, on a mount that is not writable.
void Refuse(fuse_req_t req, int error = EROFS) {
  BridgeOf(req).vfs.stats().Count(Op::kRefused, {}, true);
  fuse_reply_err(req, error);
}

// Whether the request can be refused at once.
bool ReadOnlyHere(fuse_req_t req) {
  if (BridgeOf(req).vfs.writable()) return false;
  Refuse(req);
  return true;
}

Reply Done() {
  return Reply([](fuse_req_t r) { fuse_reply_err(r, 0); });
}

// Serves what answers with a Status. Stagings tell of their failures themselves.
void ServeStatus(fuse_req_t req, Op op, NodeId node, std::function<Status()> work) {
  Serve(req, op, node, true, [work = std::move(work)]() -> Result<Reply> {
    TENSORMOUNT_RETURN_IF_ERROR(work());
    return Done();
  });
}

// Answers with an entry whose node was counted once for the kernel.
// The reference was counted by the lookup; it is the kernel's only once the reply is out.
Reply EntryReply(Vfs& vfs, const Vfs::Entry& entry) {
  auto reference = std::make_shared<NodeReference>(vfs, entry.id);
  return Reply([reference, param = ParamOf(entry)](fuse_req_t r) {
    if (fuse_reply_entry(r, &param) == 0) reference->Keep();
  });
}

// Serves what works on bytes that are only lent: `keep` makes them our own.
// As Serve, for work that can run on the caller's thread with the caller's bytes: `keep` runs only
// where it is queued.
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

// Past the page cache: what one program writes others see at once, and nothing is written late.
// Also for correctness: the page cache would write pages late, after close(2), when a publish may
// have begun.
void SetModes(fuse_file_info& info) {
  info.direct_io = 1;
  info.keep_cache = 0;
  info.noflush = 0;
}

// Two things are given to the kernel at once, a node and an open file. Both go back where the reply
// does not arrive.
void OpCreate(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t, fuse_file_info* fi) {
  if (ReadOnlyHere(req)) return;
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
            // Without an answer there is no release and nothing to forget.
            if (fuse_reply_create(r, &param, &info) != 0) return;
            (void)open.release();
            reference->Keep();
          });
        });
}

void OpMkdir(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t) {
  if (ReadOnlyHere(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kMkdir, parent, true, [&vfs, parent, name = std::string(name)]() -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, vfs.MakeDirectory(parent, name));
    return EntryReply(vfs, entry);
  });
}

void OpUnlink(fuse_req_t req, fuse_ino_t parent, const char* name) {
  if (ReadOnlyHere(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  ServeStatus(req, Op::kRemove, parent,
              [&vfs, parent, name = std::string(name)] { return vfs.Unlink(parent, name); });
}

void OpRmdir(fuse_req_t req, fuse_ino_t parent, const char* name) {
  if (ReadOnlyHere(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  ServeStatus(req, Op::kRemove, parent, [&vfs, parent, name = std::string(name)] {
    return vfs.RemoveDirectory(parent, name);
  });
}

// Steps 1 and 4 of publish_calls.h. The work is the queue's: it goes on where its caller was
// killed.
void OpPublish(fuse_req_t req, PublishCalls::Names names, unsigned flags) {
  Bridge& bridge = BridgeOf(req);
  PublishCalls& calls = *bridge.publishes;
  const pid_t thread = fuse_req_ctx(req)->pid;
  if (const auto begun = calls.Find(thread, names)) {
    ServeLong(
        req, Op::kRename, names.folder,
        [&calls, begun, thread](LongWork& self) -> Result<Reply> {
          if (calls.Waits(*begun, [&self] { return self.Again(); })) return Done();  // Runs again.
          calls.Remove(thread, begun);
          TENSORMOUNT_RETURN_IF_ERROR(*begun->result);
          return Done();
        },
        [](fuse_req_t) { return false; });  // It only waits: who is killed is let go.
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
        call->comes_back = true;
        fuse_reply_err(r, ESTALE);
        return true;
      });
}

void OpRename(fuse_req_t req, fuse_ino_t parent, const char* name, fuse_ino_t to_parent,
              const char* to_name, unsigned flags) {
  if (ReadOnlyHere(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  if (IsStaged(parent) && to_parent == kRootId) {
    OpPublish(req, {.folder = parent, .name = name, .as = to_name}, flags);
    return;
  }
  // The kernel keeps both folders locked until the answer: nothing in here asks it for anything.
  ServeStatus(req, Op::kRename, parent,
              [&vfs, parent, name = std::string(name), to_parent, to_name = std::string(to_name),
               flags] { return vfs.Rename(parent, name, to_parent, to_name, flags); });
}

void RefuseMaking(fuse_req_t req, fuse_ino_t parent, const char* name) {
  if (ReadOnlyHere(req)) return;
  Vfs& vfs = BridgeOf(req).vfs;
  ServeStatus(req, Op::kRefused, parent,
              [&vfs, parent, name = std::string(name)] { return vfs.RefuseMaking(parent, name); });
}

// Only the size means something. Modes, owners and times are accepted, since `cp -p` and rsync set
// them, and change nothing.
void OpSetattr(fuse_req_t req, fuse_ino_t node, struct stat* attributes, int to_set,
               fuse_file_info* fi) {
  if (ReadOnlyHere(req)) return;
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
  // The kernel's bytes lie in the buffer of this thread, which is used again when this returns:
  // they are copied only where another thread is to write them.
  auto copy = std::make_shared<std::string>();
  // From the page cache, where only shared mappings write: at the place of the page, whatever the
  // file was opened for, and by nobody that could be named.
  const bool pages = fi->writepage != 0;
  const bool append = !pages && (fi->flags & O_APPEND) != 0;
  if (!pages) OpenFileOf(fi).users->Wrote(fi->lock_owner, fuse_req_ctx(req)->pid);
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

// close(2) waits for this answer, so its error reaches the program: the place to say that data
// could not be made durable.
void OpFlush(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi) {
  const WritePtr handle = OpenFileOf(fi).write;
  if (!handle) {
    fuse_reply_err(req, 0);
    return;
  }
  switch (OpenFileOf(fi).users->Closed(fi->lock_owner, fuse_req_ctx(req)->pid)) {
    case FileUsers::Close::kNobodys:
      fuse_reply_err(req, 0);
      return;
    case FileUsers::Close::kOne:
      ServeStatus(req, Op::kFlush, node, [handle] { return handle->Sync(); });
      return;
    case FileUsers::Close::kLast:
      ServeStatus(req, Op::kFlush, node, [handle] { return handle->Flush(); });
  }
}

void OpFsync(fuse_req_t req, fuse_ino_t node, int, fuse_file_info* fi) {
  const WritePtr handle = OpenFileOf(fi).write;
  if (!handle) {
    fuse_reply_err(req, 0);  // What is published is durable.
    return;
  }
  ServeStatus(req, Op::kFsync, node, [handle] { return handle->Sync(); });
}

void OpFsyncdir(fuse_req_t req, fuse_ino_t, int, fuse_file_info*) { fuse_reply_err(req, 0); }

// Room is found when bytes are written. Holes are made by truncating.
void OpFallocate(fuse_req_t req, fuse_ino_t node, int mode, off_t offset, off_t length,
                 fuse_file_info* fi) {
  if (ReadOnlyHere(req)) return;
  const WritePtr handle = OpenFileOf(fi).write;
  if (!handle) return Refuse(req, EBADF);
  if ((mode & ~FALLOC_FL_KEEP_SIZE) != 0) return Refuse(req, EOPNOTSUPP);
  const bool keep = (mode & FALLOC_FL_KEEP_SIZE) != 0;
  ServeStatus(req, Op::kSetattr, node, [handle, keep, offset, length]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes now, handle->Stat());
    // No overflow: the kernel refuses negative ones (EINVAL) and a sum above the largest file
    // (EFBIG).
    const auto end = static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(length);
    if (keep || end <= now.size) return {};
    return handle->Truncate(end);
  });
}

void RefuseAttribute(fuse_req_t req, fuse_ino_t node) {
  if (ReadOnlyHere(req)) return;
  Refuse(req, BridgeOf(req).vfs.RefuseChanging(node).ToErrno());
}

}  // namespace

bool IsStaged(NodeId node) { return Vfs::IsStaged(node); }

// Files of published checkpoints come here to be refused with the right errno.
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
      // Several writers of one tensor, each at its own offset.
      const FuseShim::InOpenReply together(0, true);
      // Without an answer there is no release either.
      if (fuse_reply_open(r, &info) == 0) (void)open.release();
    });
  });
}

void ReadStaged(fuse_req_t req, std::size_t size, off_t offset, fuse_file_info* fi) {
  Bridge& bridge = BridgeOf(req);
  if (size > kMaxRequestBytes || offset < 0) return Refuse(req, EINVAL);
  const WritePtr handle = OpenFileOf(fi).write;
  // Reads past the page cache name whose they are; pages are nobody's.
  const bool pages = fi->lock_owner == 0;
  Serve(req, Op::kReadStaged, 0, true, [&bridge, handle, size, offset, pages]() -> Result<Reply> {
    if (pages) TENSORMOUNT_RETURN_IF_ERROR(handle->NoteMapping());
    char* buffer = ThreadBuffer();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n,
                                 handle->Read(static_cast<std::uint64_t>(offset), buffer, size));
    bridge.vfs.stats().CountStaged(n, 0);
    // On the thread that read, before it reads again.
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

// The kernel does not wait for the answer to RELEASE, but work that is left (pages of a mapping) is
// done before it is given.
void ReleaseStaged(fuse_req_t req, fuse_ino_t node, std::unique_ptr<OpenFile> open) {
  const std::shared_ptr<OpenFile> last(std::move(open));
  // Asking waits for a close that is under way, of a process that was killed meanwhile.
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
