// SPDX-License-Identifier: Apache-2.0
// Operations of fuse_bridge.h that change nothing. Separate from fuse_write_ops.cc, because most
// mounts have only these.
#include <array>
#include <cerrno>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/uio.h>

#include "fs/mount/fuse_bridge_internal.h"
#include "fs/mount/mount_call.h"

namespace tensormount::fs {

namespace {

// From this size on, a reply from a mapping is faster than a read into a buffer.
constexpr std::size_t kMappedFrom = 128 * 1024;

constexpr std::string_view kTierXattr = "user.tensormount.tier";

// Releases references of a node by vfs.Forget, if V has that function.
template <typename V>
void ForgetIn(V& vfs, NodeId node, std::uint64_t references) {
  if constexpr (requires { vfs.Forget(node, references); }) vfs.Forget(node, references);
}

Reply FoundReply(const fuse_entry_param& param, std::shared_ptr<NodeReference> reference) {
  return Reply([param, reference = std::move(reference)](fuse_req_t r) {
    if (fuse_reply_entry(r, &param) == 0 && reference) reference->Keep();
  });
}

Result<Reply> Find(Vfs& vfs, NodeId parent, const std::string& name) {
  const Result<Vfs::Entry> entry = vfs.Lookup(parent, name);
  if (entry.ok()) {
    return FoundReply(ParamOf(entry.value()),
                      std::make_shared<NodeReference>(vfs, entry.value().id));
  }
  if (entry.status().code() != Code::kNotFound) return entry.status();
  fuse_entry_param param{};
  // The kernel may not cache "no such entry" below .staging/ or in the root, where `latest` could
  // point to a name that the kernel still believes absent.
  const bool comes = IsStaged(parent) || parent == kRootId;
  param.entry_timeout = comes ? 0 : Vfs::kRootSeconds;
  return FoundReply(param, nullptr);
}

// Whether the lookup is a step of a publishing rename(2) (publish_calls.h) and was answered as
// such.
bool AnswerPublishLookup(fuse_req_t req, fuse_ino_t parent, std::string_view name) {
  Bridge& bridge = BridgeOf(req);
  PublishCalls& calls = *bridge.publishes;
  const auto call = calls.FindByThread(fuse_req_ctx(req)->pid);
  if (!call) return false;
  if (parent == kRootId && name == Vfs::kStagingName) {
    ServeLong(req, Op::kLookup, parent, [&bridge, &calls, call](LongWork& self) -> Result<Reply> {
      if (calls.WaitForEnd(*call, [&self] { return self.PrepareRetry(); })) {
        // Ignored, because the work runs again.
        return Status::FromErrno(EAGAIN, "look up", Vfs::kStagingName);
      }
      return Find(bridge.vfs, kRootId, std::string(Vfs::kStagingName));
    });
    return true;
  }
  if (!calls.Succeeded(*call)) return false;
  // An entry without a node, which the kernel does not cache: "no such entry".
  fuse_entry_param param{};
  std::shared_ptr<NodeReference> reference;
  if (parent == call->names.folder && name == call->names.name) {
    const auto staging = calls.TakeStaging(*call, reference);
    if (!staging) return false;
    param = ParamOf(*staging);
    param.entry_timeout = 0;
    // The attributes are cached, because the kernel checks the staging's mode next and a removed
    // staging cannot answer GETATTR.
    param.attr_timeout = PublishCalls::kExpectedFor.count();
  } else if (parent != kRootId || name != call->names.as) {
    return false;
  }
  Serve(req, Op::kLookup, parent, false,
        [param, reference]() -> Result<Reply> { return FoundReply(param, reference); });
  return true;
}

// Looks up a name in .staging/. The kernel holds .staging/ locked meanwhile, and for a rename(2)
// the root too, so if storage does not respond soon, the answer for a staging that this mount knows
// comes from memory. Later operations on the staging check again whether it still exists.
void OpLookupStaging(fuse_req_t req, fuse_ino_t parent, std::string name) {
  Vfs& vfs = BridgeOf(req).vfs;
  ServeLong(
      req, Op::kLookup, parent, [&vfs, parent, name](LongWork&) { return Find(vfs, parent, name); },
      [&vfs, parent, name](fuse_req_t r) {
        const auto known = vfs.KnownStaging(parent, name);
        if (!known) return false;
        FoundReply(ParamOf(*known), std::make_shared<NodeReference>(vfs, known->id)).send(r);
        return true;
      });
}

void OpLookup(fuse_req_t req, fuse_ino_t parent, const char* name) {
  Vfs& vfs = BridgeOf(req).vfs;
  if (AnswerPublishLookup(req, parent, name)) return;
  if (Vfs::IsStagingRoot(parent)) {
    OpLookupStaging(req, parent, name);
    return;
  }
  Serve(req, Op::kLookup, parent, vfs.MayBlock(parent),
        [&vfs, parent, name = std::string(name)] { return Find(vfs, parent, name); });
}

Reply AttributesReply(const Vfs::Entry& entry) {
  return Reply([entry](fuse_req_t r) {
    const struct stat st = StatOf(entry.attributes);
    fuse_reply_attr(r, &st, entry.seconds);
  });
}

void OpGetattr(fuse_req_t req, fuse_ino_t node, fuse_file_info*) {
  Vfs& vfs = BridgeOf(req).vfs;
  const auto stat = [&vfs, node]() -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, vfs.Stat(node));
    return AttributesReply(entry);
  };
  if (IsStaged(node)) {
    ServeLong(
        req, Op::kGetattr, node, [stat](LongWork&) { return stat(); },
        [&vfs, node](fuse_req_t r) {
          const auto known = vfs.KnownStaging(node);
          if (known) AttributesReply(*known).send(r);
          return known.has_value();
        });
    return;
  }
  Serve(req, Op::kGetattr, node, vfs.MayBlock(node), stat);
}

void OpReadlink(fuse_req_t req, fuse_ino_t node) {
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kReadlink, node, false, [&vfs, node]() -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string target, vfs.ReadLink(node));
    return Reply([target](fuse_req_t r) { fuse_reply_readlink(r, target.c_str()); });
  });
}

void OpOpendir(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi) {
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kOpen, node, vfs.MayBlock(node), [&vfs, node, info = *fi]() -> Result<Reply> {
    // The kernel must not cache listings: cached listings lack attributes, and `ls -l` after `ls`
    // would request them file by file (100,000 files: 8.0 s instead of 1.2 s).
    TENSORMOUNT_RETURN_IF_ERROR(vfs.Stat(node).status());
    return Reply([info](fuse_req_t r) { fuse_reply_open(r, &info); });
  });
}

void ListInto(fuse_req_t req, fuse_ino_t node, std::size_t size, off_t offset, bool plus) {
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kReaddir, node, vfs.MayBlock(node),
        [&vfs, req, node, size, offset, plus]() -> Result<Reply> {
          auto out = std::make_shared<std::string>();
          out->resize(std::min(size, kMaxRequestBytes));
          std::size_t used = 0;
          const Status status =
              vfs.List(node, static_cast<std::uint64_t>(offset), [&](const Vfs::Listed& listed) {
                const fuse_entry_param param = ParamOf(listed.entry);
                const auto next = static_cast<off_t>(listed.next);
                const std::size_t left = out->size() - used;
                const std::size_t need =
                    plus ? fuse_add_direntry_plus(req, out->data() + used, left,
                                                  listed.name.c_str(), &param, next)
                         : fuse_add_direntry(req, out->data() + used, left, listed.name.c_str(),
                                             &param.attr, next);
                if (need > left) return false;
                used += need;
                return true;
              });
          // Entries found so far are returned; the failure recurs at the next call.
          if (!status.ok() && used == 0) return status;
          return Reply([out, used](fuse_req_t r) { fuse_reply_buf(r, out->data(), used); });
        });
}

void OpReaddir(fuse_req_t req, fuse_ino_t node, std::size_t size, off_t offset, fuse_file_info*) {
  ListInto(req, node, size, offset, false);
}

void OpReaddirplus(fuse_req_t req, fuse_ino_t node, std::size_t size, off_t offset,
                   fuse_file_info*) {
  ListInto(req, node, size, offset, true);
}

// Sends the reply to an open, in the chosen mode. Afterwards `open` must not be used: the kernel
// may send READ and RELEASE on other threads.
void ReplyOpen(fuse_req_t req, fuse_file_info info, std::unique_ptr<OpenFile> open) {
  const int backing = open->lease ? open->lease->backing_id() : 0;
  info.fh = reinterpret_cast<std::uint64_t>(open.get());
  int sent = 0;
  if (backing > 0) {
    info.direct_io = info.keep_cache = 0;
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17)
    info.backing_id = backing;
    sent = fuse_reply_open(req, &info);
#else
    const FuseShim::OpenReplyScope names(backing, false);
    sent = fuse_reply_open(req, &info);
#endif
  } else {
    sent = fuse_reply_open(req, &info);
  }
  // If the reply fails, the kernel sends no RELEASE, so `open` keeps the file and frees it.
  if (sent == 0) (void)open.release();
}

// Whether the kernel could read the file itself (passthrough); only such files need an open mode.
bool CanUsePassthrough(const VirtualFile& file) { return file.immutable() && file.reads_data(); }

Reply OpenedReply(const Bridge& bridge, fuse_file_info info,
                  const std::shared_ptr<const VirtualFile>& file,
                  const std::shared_ptr<OpenModes::Lease>& lease) {
  const bool passed = lease && lease->passthrough();
  if (passed) bridge.vfs.stats().CountPassthrough(file->size());
  // Small files use the page cache: one request fetches them whole. The choice is fixed for each
  // node, because the kernel cannot mix cached and direct opens.
  info.direct_io = !file->immutable() || (file->reads_data() && file->size() > kSmallFile &&
                                          bridge.shim.direct_io_mmap());
  info.keep_cache = file->immutable();
  info.noflush = 1;
  return Reply(
      [&stats = bridge.vfs.stats(), info, file, lease](fuse_req_t r) {
        auto open = std::make_unique<OpenFile>(OpenFile{file, nullptr, lease});
        open->counted = MountStats::OpenHandle(stats);
        ReplyOpen(r, info, std::move(open));
      },
      passed ? Op::kOpenPassthrough : Op::kOpen);
}

// An open that may need storage first. Runs again from its beginning after a concurrent first open
// of the same node has decided (OpenModes::Open returned null).
Result<Reply> OpenFromStorage(Bridge& bridge, NodeId node, const fuse_file_info& info,
                              LongWork& self) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto file, bridge.vfs.OpenFile(node));
  if (!CanUsePassthrough(*file)) return OpenedReply(bridge, info, file, nullptr);
  const auto lease = bridge.modes.Open(
      node, file, [&self] { return self.Interrupted(); }, [&self] { return self.PrepareRetry(); });
  if (lease.status().code() == Code::kCancelled) {
    return Status::FromErrno(EINTR, "open", file->label());
  }
  // Adds the file's label, because the report of a failed open names only the inode number.
  if (!lease.ok()) return lease.status().WithContext(file->label());
  // The error is ignored, because the work runs again.
  if (!lease.value()) return Status::FromErrno(EAGAIN, "open", file->label());
  return OpenedReply(bridge, info, file, lease.value());
}

// Answers an open that needs no storage on this thread, and queues any other, where a killed caller
// can be answered.
void OpOpen(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi) {
  if (IsStaged(node) || (fi->flags & O_ACCMODE) != O_RDONLY || (fi->flags & O_TRUNC) != 0) {
    OpenStaged(req, node, fi);
    return;
  }
  Bridge& bridge = BridgeOf(req);
  // Opening a status file must not wait for a disk.
  if (!bridge.vfs.MayBlock(node)) {
    const auto since = std::chrono::steady_clock::now();
    bool slow = false;
    const Result<Reply> reply = Guarded([&]() -> Result<Reply> {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto file, bridge.vfs.OpenFile(node));
      if (!CanUsePassthrough(*file)) return OpenedReply(bridge, *fi, file, nullptr);
      if (const auto lease = bridge.modes.Join(node)) {
        return OpenedReply(bridge, *fi, file, lease);
      }
      slow = true;
      return Status::FromErrno(EAGAIN, "open", file->label());
    });
    if (!slow) {
      Answer(req, bridge, Op::kOpen, since, node, reply);
      return;
    }
  }
  ServeLong(req, Op::kOpen, node, [&bridge, node, info = *fi](LongWork& self) {
    return OpenFromStorage(bridge, node, info, self);
  });
}

void OpRelease(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi) {
  std::unique_ptr<OpenFile> open(&OpenFileOf(fi));
  if (open->write) {
    ReleaseStaged(req, node, std::move(open));
    return;
  }
  open.reset();
  fuse_reply_err(req, 0);
}

void OpRead(fuse_req_t req, fuse_ino_t, std::size_t size, off_t offset, fuse_file_info* fi) {
  Bridge& bridge = BridgeOf(req);
  if (OpenFileOf(fi).write) {
    ReadStaged(req, size, offset, fi);
    return;
  }
  const std::shared_ptr<const VirtualFile>& file = OpenFileOf(fi).file;
  // A longer read cannot be shortened, because a short answer would mean end of file. The kernel
  // sends none, because it respects max_read.
  if (size > kMaxRequestBytes || offset < 0) {
    fuse_reply_err(req, EINVAL);
    return;
  }
  Serve(req, Op::kRead, 0, file->reads_data(), [&bridge, file, size, offset]() -> Result<Reply> {
    ReadStats read;
    // Long runs go from the data file's pages to the kernel without a copy. If another program has
    // just truncated the data file, the reply fails with EFAULT, and the kernel gives the reader
    // EIO.
    if (size >= kMappedFrom) {
      auto mapped = file->Map(static_cast<std::uint64_t>(offset), size);
      if (!mapped.empty()) {
        std::size_t bytes = 0;
        for (const auto& piece : mapped) bytes += piece.size;
        read.bytes_read = read.bytes_wanted = bytes;
        bridge.vfs.stats().CountBytes(bytes, read);
        return Reply([mapped = std::move(mapped)](fuse_req_t r) {
          std::array<iovec, OpenedCheckpoint::kMaxMapped> pieces;
          for (std::size_t i = 0; i < mapped.size(); ++i) {
            pieces[i] = {const_cast<std::byte*>(mapped[i].data), mapped[i].size};
          }
          fuse_reply_iov(r, pieces.data(), static_cast<int>(mapped.size()));
        });
      }
    }
    char* buffer = ThreadBuffer();
    const Result<std::size_t> got =
        file->Read(static_cast<std::uint64_t>(offset), buffer, size, &read);
    if (!got.ok()) {
      if (!IsOrdinary(got.status())) {
        bridge.vfs.stats().Report(OpName(Op::kRead), file->label(), got.status());
      }
      return got.status();
    }
    bridge.vfs.stats().CountBytes(got.value(), read);
    // The reading thread sends the reply before its next read, so the buffer is still valid.
    return Reply([buffer, n = got.value()](fuse_req_t r) { fuse_reply_buf(r, buffer, n); });
  });
}

void OpLseek(fuse_req_t req, fuse_ino_t, off_t offset, int whence, fuse_file_info* fi) {
  if (OpenFileOf(fi).write) {
    SeekStaged(req, offset, whence, fi);
    return;
  }
  const auto size = static_cast<off_t>(OpenFileOf(fi).file->size());
  // Published files have no holes.
  if (offset < 0 || offset >= size) {
    fuse_reply_err(req, ENXIO);
  } else if (whence == SEEK_DATA || whence == SEEK_HOLE) {
    fuse_reply_lseek(req, whence == SEEK_DATA ? offset : size);
  } else {
    fuse_reply_err(req, EINVAL);
  }
}

void OpGetxattr(fuse_req_t req, fuse_ino_t node, const char* name, std::size_t size) {
  Vfs& vfs = BridgeOf(req).vfs;
  OpenModes& modes = BridgeOf(req).modes;
  // To determine a file's tier, the file is opened in storage.
  const bool may_block = vfs.MayBlock(node) || name == kTierXattr;
  Serve(req, Op::kXattr, node, may_block,
        [&vfs, &modes, node, size, name = std::string(name)]() -> Result<Reply> {
          TENSORMOUNT_ASSIGN_OR_RETURN(std::string value, vfs.GetXattr(node, name));
          if (name == kTierXattr) {
            // The open modes of the mount decide how an open would be served.
            const auto file = vfs.OpenFile(node);
            if (file.ok() && CanUsePassthrough(*file.value())) {
              value = modes.TierOf(node, *file.value());
            }
          }
          return XattrReply(std::move(value), size);
        });
}

void OpListxattr(fuse_req_t req, fuse_ino_t node, std::size_t size) {
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kXattr, node, vfs.MayBlock(node), [&vfs, node, size]() -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto names, vfs.ListXattrs(node));
    std::string all;
    for (const std::string& name : names) all += name + '\0';
    return XattrReply(std::move(all), size);
  });
}

// Answers with the numbers of the source's filesystem and this mount's limit on the length of
// names.
void OpStatfs(fuse_req_t req, fuse_ino_t node) {
  SourceSpace& space = *BridgeOf(req).space;
  Serve(req, Op::kStatfs, node, !space.IsFresh(), [&space]() -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(struct statvfs st, space.Get());
    if (st.f_bsize == 0) st.f_bsize = st.f_frsize = kPageBytes;
    st.f_namemax = 255;
    return Reply([st](fuse_req_t r) { fuse_reply_statfs(r, &st); });
  });
}

void OpForget(fuse_req_t req, fuse_ino_t node, std::uint64_t references) {
  ForgetIn(BridgeOf(req).vfs, node, references);
  fuse_reply_none(req);
}

void OpForgetMulti(fuse_req_t req, std::size_t count, fuse_forget_data* forgets) {
  for (std::size_t i = 0; i < count; ++i) {
    ForgetIn(BridgeOf(req).vfs, forgets[i].ino, forgets[i].nlookup);
  }
  fuse_reply_none(req);
}

}  // namespace

NodeReference::~NodeReference() {
  if (!kept_) ForgetIn(vfs_, id_, 1);
}

void AddReadOps(fuse_lowlevel_ops& ops) {
  ops.lookup = OpLookup;
  ops.forget = OpForget;
  ops.forget_multi = OpForgetMulti;
  ops.getattr = OpGetattr;
  ops.readlink = OpReadlink;
  ops.opendir = OpOpendir;
  ops.readdir = OpReaddir;
  ops.readdirplus = OpReaddirplus;
  ops.open = OpOpen;
  ops.read = OpRead;
  ops.release = OpRelease;
  ops.lseek = OpLseek;
  ops.getxattr = OpGetxattr;
  ops.listxattr = OpListxattr;
  ops.statfs = OpStatfs;
}

}  // namespace tensormount::fs
