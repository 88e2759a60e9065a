// SPDX-License-Identifier: Apache-2.0
#define FUSE_USE_VERSION 314
#include "fs/mount/fuse_bridge.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <new>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <fuse3/fuse_lowlevel.h>

#include "base/log.h"
#include "fs/mount/mount_call.h"

namespace tensormount::fs {

namespace {

using Clock = std::chrono::steady_clock;

// Files up to this go through the page cache in every mode: one request fetches them whole.
constexpr std::uint64_t kSmallFile = 128 * 1024;
constexpr std::size_t kPage = 4096;
// From here on a reply from a mapping is faster than a read into a buffer.
constexpr std::size_t kMappedFrom = 128 * 1024;

struct Bridge {
  Vfs& vfs;
  BlockingWork& reads;
  BlockingWork& opens;
  FuseShim& shim;
};
Bridge& BridgeOf(fuse_req_t req) { return *static_cast<Bridge*>(fuse_req_userdata(req)); }

// One page-aligned buffer a thread, used again for every read.
char* ThreadBuffer() {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<char, Free> buffer;
  if (!buffer) {
    buffer.reset(static_cast<char*>(std::aligned_alloc(kPage, kMaxRequestBytes)));
    if (!buffer) throw std::bad_alloc();
  }
  return buffer.get();
}

struct stat StatOf(const Attributes& a) {
  struct stat st {};
  st.st_ino = a.inode;
  st.st_mode = a.mode | (a.kind == FileKind::kDirectory ? S_IFDIR
                         : a.kind == FileKind::kSymlink ? S_IFLNK
                                                        : S_IFREG);
  st.st_nlink = 1;
  st.st_uid = a.uid;
  st.st_gid = a.gid;
  st.st_size = static_cast<off_t>(a.size);
  // What `cp` and `cat` take as the size of their reads.
  st.st_blksize = a.size > kSmallFile ? static_cast<blksize_t>(kMaxRequestBytes)
                                      : static_cast<blksize_t>(kPage);
  st.st_blocks = static_cast<blkcnt_t>((a.size + 511) / 512);
  st.st_mtim.tv_sec = st.st_ctim.tv_sec = st.st_atim.tv_sec = static_cast<time_t>(a.mtime);
  return st;
}

fuse_entry_param ParamOf(const Vfs::Entry& entry) {
  fuse_entry_param param{};
  param.ino = entry.id;
  param.attr = StatOf(entry.attributes);
  param.attr_timeout = entry.seconds;
  param.entry_timeout = entry.seconds;
  return param;
}

// Failures that are answers and not worth a line.
bool IsOrdinary(const Status& status) {
  switch (status.ToErrno()) {
    case ENOENT:
    case ENODATA:
    case EOPNOTSUPP:
    case ESTALE:
    case ERANGE:
    case ENOTDIR:
    case EISDIR:
    case EINTR:
      return true;
    default:
      return false;
  }
}

// Runs `op`, which returns what to answer with: a callable that replies, made under no lock. Every
// failure, an exception included, is reported and answered once, here.
using Reply = std::function<void(fuse_req_t)>;
Result<Reply> Guarded(const std::function<Result<Reply>()>& op) noexcept {
  try {
    return op();
  } catch (const std::bad_alloc&) {
    return Status::FromErrno(ENOMEM, "serve", "a request");
  } catch (const std::exception& e) {
    return Status(Code::kInternal, e.what());
  } catch (...) {
    return Status(Code::kInternal, "unknown exception");
  }
}

void Answer(fuse_req_t req, Bridge& bridge, Op op, Clock::time_point since, NodeId node,
            const Result<Reply>& result) {
  bridge.vfs.stats().Count(op, Clock::now() - since, !result.ok());
  if (result.ok()) {
    // A reply fails when the caller was interrupted: nobody is left to tell.
    result.value()(req);
    return;
  }
  // Reads know the name of their file and have told.
  if (op != Op::kRead && !IsOrdinary(result.status())) {
    bridge.vfs.stats().Report(OpName(op), "node " + std::to_string(node), result.status());
  }
  fuse_reply_err(req, result.status().ToErrno());
}

// Serves a request here, or where it may block so that others stay served.
void Serve(fuse_req_t req, Op op, NodeId node, bool may_block,
           std::function<Result<Reply>()> work) {
  Bridge& bridge = BridgeOf(req);
  const Clock::time_point since = Clock::now();
  if (!may_block) {
    Answer(req, bridge, op, since, node, Guarded(work));
    return;
  }
  auto answer =
      std::make_shared<PendingAnswer>([req] { return fuse_req_interrupted(req) != 0; },
                                      [req, &bridge, op, since] {
                                        bridge.vfs.stats().CountInterrupted();
                                        bridge.vfs.stats().Count(op, Clock::now() - since, true);
                                        fuse_reply_err(req, EINTR);
                                      });
  BlockingWork& queue = op == Op::kRead ? bridge.reads : bridge.opens;
  queue.Run(answer, [req, &bridge, op, since, node, answer, work = std::move(work)] {
    const Result<Reply> result = Guarded(work);
    if (answer->Claim()) Answer(req, bridge, op, since, node, result);
  });
}

void OpInit(void* userdata, fuse_conn_info* conn) {
  (void)userdata;
  conn->max_write = kMaxRequestBytes;
  conn->max_read = kMaxRequestBytes;
  conn->max_readahead = kMaxRequestBytes;
  // Contents never change behind the kernel's back, and spliced replies are slower (measured).
  conn->want &= ~static_cast<unsigned>(FUSE_CAP_AUTO_INVAL_DATA | FUSE_CAP_SPLICE_READ |
                                       FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
  conn->want |=
      conn->capable &
      static_cast<unsigned>(FUSE_CAP_READDIRPLUS | FUSE_CAP_READDIRPLUS_AUTO |
                            FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ | FUSE_CAP_ASYNC_DIO);
  conn->time_gran = 1000000000;  // Whole seconds.
}

void OpLookup(fuse_req_t req, fuse_ino_t parent, const char* name) {
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kLookup, parent, vfs.MayBlock(parent),
        [&vfs, parent, name = std::string(name)]() -> Result<Reply> {
          const Result<Vfs::Entry> entry = vfs.Lookup(parent, name);
          fuse_entry_param param{};
          if (entry.ok()) {
            param = ParamOf(entry.value());
          } else if (entry.status().code() == Code::kNotFound) {
            param.entry_timeout = Vfs::kRootSeconds;  // "Not there" is worth remembering.
          } else {
            return entry.status();
          }
          return Reply([param](fuse_req_t r) { fuse_reply_entry(r, &param); });
        });
}

void OpGetattr(fuse_req_t req, fuse_ino_t node, fuse_file_info*) {
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kGetattr, node, vfs.MayBlock(node), [&vfs, node]() -> Result<Reply> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, vfs.Stat(node));
    return Reply([entry](fuse_req_t r) {
      const struct stat st = StatOf(entry.attributes);
      fuse_reply_attr(r, &st, entry.seconds);
    });
  });
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
    // The kernel does not keep listings: what it keeps has no attributes, and `ls -l` after
    // `ls` would ask for those of each file one by one (of 100,000: 8.0 s against 1.2 s).
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
          // Entries that were found count; the failure comes again with the next call.
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

using Handle = std::shared_ptr<const VirtualFile>;
const Handle& HandleOf(const fuse_file_info* fi) { return *reinterpret_cast<Handle*>(fi->fh); }

void OpOpen(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi) {
  Bridge& bridge = BridgeOf(req);
  if ((fi->flags & O_ACCMODE) != O_RDONLY || (fi->flags & O_TRUNC) != 0) {
    bridge.vfs.stats().Count(Op::kRefused, {}, true);
    fuse_reply_err(req, EROFS);
    return;
  }
  Serve(req, Op::kOpen, node, bridge.vfs.MayBlock(node),
        [&bridge, node, info = *fi]() mutable -> Result<Reply> {
          TENSORMOUNT_ASSIGN_OR_RETURN(Handle file, bridge.vfs.OpenFile(node));
          // One mode for an inode, always: the kernel mixes none.
          info.direct_io = !file->immutable() || (file->reads_data() && file->size() > kSmallFile &&
                                                  bridge.shim.direct_io_mmap());
          info.keep_cache = file->immutable();
          info.noflush = 1;
          return Reply([info, file](fuse_req_t r) mutable {
            auto handle = std::make_unique<Handle>(file);
            info.fh = reinterpret_cast<std::uint64_t>(handle.get());
            // Without an answer there is no release either.
            if (fuse_reply_open(r, &info) == 0) (void)handle.release();
          });
        });
}

void OpRelease(fuse_req_t req, fuse_ino_t, fuse_file_info* fi) {
  delete reinterpret_cast<Handle*>(fi->fh);
  fuse_reply_err(req, 0);
}

void OpRead(fuse_req_t req, fuse_ino_t, std::size_t size, off_t offset, fuse_file_info* fi) {
  Bridge& bridge = BridgeOf(req);
  const Handle& file = HandleOf(fi);
  // The kernel keeps to max_read; a shorter answer would be the end of the file.
  if (size > kMaxRequestBytes || offset < 0) {
    fuse_reply_err(req, EINVAL);
    return;
  }
  Serve(req, Op::kRead, 0, file->reads_data(), [&bridge, file, size, offset]() -> Result<Reply> {
    ReadStats read;
    // Long runs go from the data file's pages to the kernel without a copy of ours. Where such a
    // file was cut short a moment ago the kernel answers EIO itself (EFAULT for our reply).
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
    // On the thread that read, before it reads again.
    return Reply([buffer, n = got.value()](fuse_req_t r) { fuse_reply_buf(r, buffer, n); });
  });
}

void OpLseek(fuse_req_t req, fuse_ino_t, off_t offset, int whence, fuse_file_info* fi) {
  const auto size = static_cast<off_t>(HandleOf(fi)->size());
  // No file has holes.
  if (offset < 0 || offset >= size) {
    fuse_reply_err(req, ENXIO);
  } else if (whence == SEEK_DATA || whence == SEEK_HOLE) {
    fuse_reply_lseek(req, whence == SEEK_DATA ? offset : size);
  } else {
    fuse_reply_err(req, EINVAL);
  }
}

// Sends a value to one who first asks how long it is.
Reply XattrReply(std::string value, std::size_t size) {
  return [value = std::move(value), size](fuse_req_t r) {
    if (size == 0) {
      fuse_reply_xattr(r, value.size());
    } else if (value.size() > size) {
      fuse_reply_err(r, ERANGE);
    } else {
      fuse_reply_buf(r, value.data(), value.size());
    }
  };
}

void OpGetxattr(fuse_req_t req, fuse_ino_t node, const char* name, std::size_t size) {
  Vfs& vfs = BridgeOf(req).vfs;
  Serve(req, Op::kXattr, node, vfs.MayBlock(node),
        [&vfs, node, size, name = std::string(name)]() -> Result<Reply> {
          TENSORMOUNT_ASSIGN_OR_RETURN(std::string value, vfs.GetXattr(node, name));
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

void OpStatfs(fuse_req_t req, fuse_ino_t) {
  struct statvfs st {};
  st.f_bsize = st.f_frsize = kPage;
  st.f_namemax = 255;
  BridgeOf(req).vfs.stats().Count(Op::kStatfs, {}, false);
  fuse_reply_statfs(req, &st);
}

void OpFlush(fuse_req_t req, fuse_ino_t, fuse_file_info*) { fuse_reply_err(req, 0); }

// Whatever would change something. With the mount read-only the kernel refuses most before us.
void Refuse(fuse_req_t req) {
  BridgeOf(req).vfs.stats().Count(Op::kRefused, {}, true);
  fuse_reply_err(req, EROFS);
}

fuse_lowlevel_ops MakeOps() {
  fuse_lowlevel_ops ops{};
  ops.init = OpInit;
  ops.lookup = OpLookup;
  ops.getattr = OpGetattr;
  ops.readlink = OpReadlink;
  ops.opendir = OpOpendir;
  ops.readdir = OpReaddir;
  ops.readdirplus = OpReaddirplus;
  ops.open = OpOpen;
  ops.read = OpRead;
  ops.flush = OpFlush;
  ops.release = OpRelease;
  ops.lseek = OpLseek;
  ops.getxattr = OpGetxattr;
  ops.listxattr = OpListxattr;
  ops.statfs = OpStatfs;
  ops.setattr = [](fuse_req_t r, fuse_ino_t, struct stat*, int, fuse_file_info*) { Refuse(r); };
  ops.mknod = [](fuse_req_t r, fuse_ino_t, const char*, mode_t, dev_t) { Refuse(r); };
  ops.mkdir = [](fuse_req_t r, fuse_ino_t, const char*, mode_t) { Refuse(r); };
  ops.unlink = [](fuse_req_t r, fuse_ino_t, const char*) { Refuse(r); };
  ops.rmdir = [](fuse_req_t r, fuse_ino_t, const char*) { Refuse(r); };
  ops.symlink = [](fuse_req_t r, const char*, fuse_ino_t, const char*) { Refuse(r); };
  ops.rename = [](fuse_req_t r, fuse_ino_t, const char*, fuse_ino_t, const char*, unsigned) {
    Refuse(r);
  };
  ops.link = [](fuse_req_t r, fuse_ino_t, fuse_ino_t, const char*) { Refuse(r); };
  ops.create = [](fuse_req_t r, fuse_ino_t, const char*, mode_t, fuse_file_info*) { Refuse(r); };
  ops.write = [](fuse_req_t r, fuse_ino_t, const char*, std::size_t, off_t, fuse_file_info*) {
    Refuse(r);
  };
  ops.fallocate = [](fuse_req_t r, fuse_ino_t, int, off_t, off_t, fuse_file_info*) { Refuse(r); };
  ops.setxattr = [](fuse_req_t r, fuse_ino_t, const char*, const char*, std::size_t, int) {
    Refuse(r);
  };
  ops.removexattr = [](fuse_req_t r, fuse_ino_t, const char*) { Refuse(r); };
  return ops;
}

// libfuse's own words, which would go to standard error otherwise.
void LogLine(fuse_log_level level, const char* format, va_list arguments) {
  char line[512];
  std::vsnprintf(line, sizeof line, format, arguments);
  std::string_view text(line);
  while (text.ends_with('\n')) text.remove_suffix(1);
  Log(level <= FUSE_LOG_ERR ? LogLevel::kWarning : LogLevel::kDebug, text);
}

ssize_t ShimRead(int fd, void* buffer, std::size_t size, void* userdata) {
  return static_cast<Bridge*>(userdata)->shim.Read(fd, buffer, size);
}

ssize_t ShimWritev(int fd, iovec* pieces, int count, void* userdata) {
  return static_cast<Bridge*>(userdata)->shim.Writev(fd, pieces, count);
}

}  // namespace

struct FuseBridge::Impl {
  Bridge bridge;
  fuse_session* session = nullptr;
};

FuseBridge::FuseBridge(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<FuseBridge>> FuseBridge::Make(Vfs& vfs, BlockingWork& reads,
                                                     BlockingWork& opens, FuseShim& shim, int fd) {
  fuse_set_log_func(LogLine);
  auto impl = std::make_unique<Impl>(Impl{{vfs, reads, opens, shim}});
  std::string program = "tensormount";
  std::string option = "-o";
  std::string max_read = "max_read=" + std::to_string(kMaxRequestBytes);  // As it was mounted.
  char* argv[] = {program.data(), option.data(), max_read.data(), nullptr};
  fuse_args args = FUSE_ARGS_INIT(3, argv);
  const fuse_lowlevel_ops ops = MakeOps();
  impl->session = fuse_session_new(&args, &ops, sizeof ops, &impl->bridge);
  fuse_opt_free_args(&args);
  if (impl->session == nullptr) {
    close(fd);
    return Status(Code::kInternal, "libfuse made no session");
  }
  const fuse_custom_io io{.writev = ShimWritev, .read = ShimRead};
  if (fuse_session_custom_io(impl->session, &io, fd) != 0) {
    close(fd);
    fuse_session_destroy(impl->session);
    return Status(Code::kInternal, "libfuse refused its device");
  }
  return std::unique_ptr<FuseBridge>(new FuseBridge(std::move(impl)));
}

FuseBridge::~FuseBridge() { fuse_session_destroy(impl_->session); }

void FuseBridge::Serve() {
  fuse_buf buffer{};
  while (fuse_session_exited(impl_->session) == 0) {
    const int n = fuse_session_receive_buf(impl_->session, &buffer);
    if (n == -EINTR) continue;
    if (n <= 0) break;
    fuse_session_process_buf(impl_->session, &buffer);
  }
  fuse_session_exit(impl_->session);
  std::free(buffer.mem);
}

void FuseBridge::Exit() { fuse_session_exit(impl_->session); }

bool FuseBridge::exited() const { return fuse_session_exited(impl_->session) != 0; }

}  // namespace tensormount::fs
