// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/fuse_bridge.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <unistd.h>

#include "base/log.h"
#include "fs/mount/fuse_bridge_internal.h"
#include "fs/mount/mount_call.h"

namespace tensormount::fs {

namespace {
using Clock = std::chrono::steady_clock;
}  // namespace

char* ThreadBuffer() {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<char, Free> buffer;
  if (!buffer) {
    buffer.reset(static_cast<char*>(std::aligned_alloc(kPageBytes, kMaxRequestBytes)));
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
                                      : static_cast<blksize_t>(kPageBytes);
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

namespace {

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

fuse_lowlevel_ops MakeOps() {
  fuse_lowlevel_ops ops{};
  ops.init = OpInit;
  AddReadOps(ops);
  AddWriteOps(ops);
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
