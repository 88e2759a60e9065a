// SPDX-License-Identifier: Apache-2.0
// Connects libfuse's low-level calls with Vfs: requests that cannot block are answered at once,
// others run on threads that may block. Only files named fuse_* use libfuse.
#include "fs/mount/fuse_bridge.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <unistd.h>

#include "base/log.h"
#include "fs/mount/callers.h"
#include "fs/mount/fuse_bridge_internal.h"
#include "fs/mount/mount_call.h"

namespace tensormount::fs {

namespace {

using Clock = std::chrono::steady_clock;

// Whether a caller that is being killed may be answered while its request is in progress. A sync is
// allowed to go on without its caller, because it only makes durable what was written before.
PendingAnswer::EarlyAnswer EarlyAnswerFor(Op op) {
  switch (op) {
    case Op::kOpenStaged:  // May truncate the file or write a mark.
    case Op::kCreate:
    case Op::kWrite:
    case Op::kSetattr:
    case Op::kMkdir:
    case Op::kRemove:
    case Op::kRename:
      return PendingAnswer::EarlyAnswer::kBeforeBegin;
    default:
      return PendingAnswer::EarlyAnswer::kAllowed;
  }
}

}  // namespace

// One buffer for each thread, so that a read of a megabyte allocates nothing.
char* ThreadBuffer() {
  thread_local std::unique_ptr<char, decltype([](char* p) { std::free(p); })> buffer;
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
  // `cp` and `cat` use this as the size of their reads.
  st.st_blksize = a.size > kSmallFile ? static_cast<blksize_t>(kMaxRequestBytes)
                                      : static_cast<blksize_t>(kPageBytes);
  st.st_blocks = static_cast<blkcnt_t>((std::min(a.size, a.allocated) + 511) / 512);
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
    case ENAMETOOLONG:
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

std::shared_ptr<PendingAnswer> PendingAnswerOf(fuse_req_t req, Op op, Bridge& bridge,
                                               Clock::time_point since) {
  return std::make_shared<PendingAnswer>(
      EarlyAnswerFor(op), [req, &bridge, op, since](std::chrono::milliseconds waited) {
        return AnswerIfDying(req, op, bridge, since, waited);
      });
}

bool AnswerIfDying(fuse_req_t req, Op op, Bridge& bridge, Clock::time_point since,
                   std::chrono::milliseconds waited) {
  if (waited < bridge.give_up_after || fuse_req_interrupted(req) == 0 ||
      !IsBeingKilled(fuse_req_ctx(req)->pid)) {
    return false;
  }
  bridge.vfs.stats().CountInterrupted();
  bridge.vfs.stats().Count(op, Clock::now() - since, true);
  fuse_reply_err(req, EINTR);
  return true;
}

Result<Reply> Guarded(const std::function<Result<Reply>()>& op) noexcept {
  try {
    return op();
  } catch (const std::bad_alloc&) {
    return Status::FromErrno(ENOMEM, "serve", "a request");
  } catch (const std::exception& e) {
    return Status(Code::kInternal, e.what());
  } catch (...) {
    return Status(Code::kInternal, "internal error: an exception of an unknown type was thrown");
  }
}

void Answer(fuse_req_t req, Bridge& bridge, Op op, Clock::time_point since, NodeId node,
            const Result<Reply>& result) {
  if (result.ok()) {
    bridge.vfs.stats().Count(result.value().counted_as.value_or(op), Clock::now() - since, false);
    // A failure of the reply is ignored: the caller was interrupted and no longer waits.
    result.value().send(req);
    return;
  }
  bridge.vfs.stats().Count(op, Clock::now() - since, true);
  // Reads and stagings have reported their failures already, with the name of the file.
  if (op != Op::kRead && OpTier(op) != Tier::kStaging && !IsOrdinary(result.status())) {
    bridge.vfs.stats().Report(OpName(op), "inode " + std::to_string(node), result.status());
  }
  fuse_reply_err(req, result.status().ToErrno());
}

void Serve(fuse_req_t req, Op op, NodeId node, bool may_block,
           std::function<Result<Reply>()> work) {
  if (may_block) {
    ServeLong(req, op, node, [work = std::move(work)](LongWork&) { return work(); });
    return;
  }
  const Clock::time_point since = Clock::now();
  Answer(req, BridgeOf(req), op, since, node, Guarded(work));
}

// One request that runs on `queue`, maybe in several attempts.
// Shared by the queue, by callbacks of PrepareRetry and by the running attempt. libfuse owns the
// request, which lives until the reply.
struct LongRequest : std::enable_shared_from_this<LongRequest> {
  fuse_req_t req;
  Op op;
  NodeId node;
  Bridge& bridge;
  BlockingWork& queue;
  std::function<Result<Reply>(LongWork&)> work;
  const Clock::time_point since = Clock::now();
  std::shared_ptr<PendingAnswer> answer;

  LongRequest(fuse_req_t r, Op o, NodeId n, std::function<Result<Reply>(LongWork&)> w)
      : req(r), op(o), node(n), bridge(BridgeOf(r)), queue(QueueOf(r, o)), work(std::move(w)) {}

  // Makes one attempt. If the work called PrepareRetry, its result is ignored, and it runs again.
  void Run() {
    queue.Run(answer, [self = shared_from_this()] {
      LongWork attempt(*self);
      const Result<Reply> result = Guarded([&] { return self->work(attempt); });
      if (!attempt.will_retry() && self->answer->Claim()) {
        Answer(self->req, self->bridge, self->op, self->since, self->node, result);
      }
    });
  }
};

bool LongWork::Interrupted() {
  return request_.answer->AnswerLate() || request_.answer->answered();
}

std::function<void()> LongWork::PrepareRetry() {
  will_retry_ = true;
  return [self = request_.shared_from_this(), watched = request_.queue.Park(request_.answer)] {
    self->Run();
  };
}

void ServeLong(fuse_req_t req, Op op, NodeId node, std::function<Result<Reply>(LongWork&)> work,
               const std::function<bool(fuse_req_t)>& soon) {
  const auto request = std::make_shared<LongRequest>(req, op, node, std::move(work));
  if (soon) {
    request->answer = std::make_shared<PendingAnswer>(
        PendingAnswer::EarlyAnswer::kKeepsWork,
        [req, op, &bridge = request->bridge, since = request->since,
         soon](std::chrono::milliseconds waited) {
          return (waited >= kSoon && soon(req)) || AnswerIfDying(req, op, bridge, since, waited);
        });
  } else {
    request->answer = PendingAnswerOf(req, op, request->bridge, request->since);
  }
  request->Run();
}

Reply XattrReply(std::string value, std::size_t size) {
  return Reply([value = std::move(value), size](fuse_req_t r) {
    if (size == 0) {
      fuse_reply_xattr(r, value.size());
    } else if (value.size() > size) {
      fuse_reply_err(r, ERANGE);
    } else {
      fuse_reply_buf(r, value.data(), value.size());
    }
  });
}

namespace {

constexpr unsigned kMostBackground = 256;

// RequestFeature sets a flag for INIT if the kernel has it; ClearFeature clears a flag that libfuse
// sets by default.
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17)
void RequestFeature(fuse_conn_info* conn, std::uint64_t flag) {
  (void)fuse_set_feature_flag(conn, flag);
}
void ClearFeature(fuse_conn_info* conn, std::uint64_t flag) { fuse_unset_feature_flag(conn, flag); }
#else
void RequestFeature(fuse_conn_info* conn, unsigned flag) { conn->want |= conn->capable & flag; }
void ClearFeature(fuse_conn_info* conn, unsigned flag) { conn->want &= ~flag; }
#endif

// libfuse enables some capabilities by default, so unwanted ones are cleared by name.
void OpInit(void* userdata, fuse_conn_info* conn) {
  conn->max_write = kMaxRequestBytes;
  conn->max_read = kMaxRequestBytes;
  conn->max_readahead = kMaxRequestBytes;
  // Limit of requests that no thread waits for (read-ahead), over all files; the kernel delays
  // further ones. The default of 12 would let one stuck disk stop the read-ahead of all files.
  conn->max_background = kMostBackground;
  conn->congestion_threshold = kMostBackground / 4 * 3;
  // Contents never change without notice to the kernel, spliced replies are slower (measured), and
  // a writeback cache is not faster and excludes passthrough.
  for (const unsigned flag : {FUSE_CAP_AUTO_INVAL_DATA, FUSE_CAP_SPLICE_READ, FUSE_CAP_SPLICE_WRITE,
                              FUSE_CAP_SPLICE_MOVE, FUSE_CAP_WRITEBACK_CACHE}) {
    ClearFeature(conn, flag);
  }
  for (const unsigned flag : {FUSE_CAP_READDIRPLUS, FUSE_CAP_READDIRPLUS_AUTO,
                              FUSE_CAP_PARALLEL_DIROPS, FUSE_CAP_ASYNC_READ, FUSE_CAP_ASYNC_DIO}) {
    RequestFeature(conn, flag);
  }
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17)
  const std::uint32_t depth = static_cast<Bridge*>(userdata)->shim.options().passthrough_depth;
  if (depth > 0) {
    RequestFeature(conn, FUSE_CAP_PASSTHROUGH);
    conn->max_backing_stack_depth = depth - 1;  // libfuse sends this value plus one.
  }
#else
  (void)userdata;
#endif
  conn->time_gran = 1000000000;  // Timestamps have a resolution of one second.
}

fuse_lowlevel_ops MakeOps() {
  fuse_lowlevel_ops ops{};
  ops.init = OpInit;
  AddReadOps(ops);
  AddWriteOps(ops);
  return ops;
}

// Receives libfuse's own messages, which would go to standard error otherwise.
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

FuseBridge::FuseBridge(std::unique_ptr<Bridge> bridge, fuse_session* session)
    : bridge_(std::move(bridge)), session_(session) {}

Result<std::unique_ptr<FuseBridge>> FuseBridge::Make(Vfs& vfs, Queues& queues, FuseShim& shim,
                                                     OpenModes& modes,
                                                     std::chrono::milliseconds give_up_after,
                                                     int fd) {
  fuse_set_log_func(LogLine);
  auto bridge = std::make_unique<Bridge>(Bridge{vfs, queues, shim, modes, give_up_after});
  bridge->space = std::make_unique<SourceSpace>(vfs.fs(), vfs.source());
  std::string program = "tensormount";
  std::string option = "-o";
  // max_read must have the same value as at mount(2).
  std::string max_read = "max_read=" + std::to_string(kMaxRequestBytes);
  char* argv[] = {program.data(), option.data(), max_read.data(), nullptr};
  fuse_args args = FUSE_ARGS_INIT(3, argv);
  const fuse_lowlevel_ops ops = MakeOps();
  fuse_session* const session = fuse_session_new(&args, &ops, sizeof ops, bridge.get());
  fuse_opt_free_args(&args);
  if (session == nullptr) {
    close(fd);
    return Status(Code::kInternal, "libfuse could not create a session");
  }
  const fuse_custom_io io{.writev = ShimWritev, .read = ShimRead};
  if (fuse_session_custom_io(session, &io, fd) != 0) {
    close(fd);
    fuse_session_destroy(session);
    return Status(Code::kInternal, "libfuse did not accept the FUSE device");
  }
  return std::unique_ptr<FuseBridge>(new FuseBridge(std::move(bridge), session));
}

bool FuseBridge::LibfuseKnowsPassthrough() { return FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17); }

std::string FuseBridge::LibfuseVersion() { return fuse_pkgversion(); }

FuseBridge::~FuseBridge() { fuse_session_destroy(session_); }

// libfuse allocates the buffer at the first request and reuses it on this thread.
void FuseBridge::Serve() {
  fuse_buf buffer{};
  while (fuse_session_exited(session_) == 0) {
    const int n = fuse_session_receive_buf(session_, &buffer);
    if (n == -EINTR) continue;
    if (n <= 0) break;
    fuse_session_process_buf(session_, &buffer);
  }
  fuse_session_exit(session_);
  std::free(buffer.mem);
}

void FuseBridge::Exit() { fuse_session_exit(session_); }

bool FuseBridge::exited() const { return fuse_session_exited(session_) != 0; }

}  // namespace tensormount::fs
