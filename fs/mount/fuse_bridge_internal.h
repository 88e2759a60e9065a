// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_INTERNAL_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_INTERNAL_H_

// Declarations that the source files of the bridge share; not to be included elsewhere. Each file
// with operations fills its part of the table that FuseBridge gives to libfuse.

#define FUSE_USE_VERSION 314

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <sys/stat.h>

#include <fuse3/fuse_lowlevel.h>

#include "tensormount/status.h"

#include "fs/handle.h"
#include "fs/mount/blocking_work.h"
#include "fs/mount/file_users.h"
#include "fs/mount/fuse_shim.h"
#include "fs/mount/open_modes.h"
#include "fs/mount/publish_calls.h"
#include "fs/mount/source_space.h"
#include "fs/mount_stats.h"
#include "fs/vfs.h"
#include "fs/views/virtual_file.h"

namespace tensormount::fs {

// Published files up to this size, if the daemon serves them, go through the page cache in every
// mode: one request fetches them whole.
inline constexpr std::uint64_t kSmallFile = 128 * 1024;
inline constexpr std::size_t kPageBytes = 4096;
// Most work below .staging/ takes less than this on responsive storage. Requests with a callback
// `soon` (ServeLong) are answered from memory after this time, if possible.
inline constexpr std::chrono::milliseconds kSoon{20};

// The context of all operations: the userdata of every request (fuse_req_userdata), so it must not
// move. All members outlive the session.
struct Bridge {
  Vfs& vfs;
  Queues& queues;
  FuseShim& shim;
  OpenModes& modes;
  std::chrono::milliseconds give_up_after;  // Time before a killed caller gets EINTR.
  std::unique_ptr<SourceSpace> space = nullptr;
  std::unique_ptr<PublishCalls> publishes = std::make_unique<PublishCalls>();
};
inline Bridge& BridgeOf(fuse_req_t req) { return *static_cast<Bridge*>(fuse_req_userdata(req)); }

// An open file, referenced by fuse_file_info::fh and freed at RELEASE. Exactly one of `file` and
// `write` is set.
// Allocated by the reply to OPEN or CREATE; the kernel owns it once the reply was sent.
struct OpenFile {
  std::shared_ptr<const VirtualFile> file;  // A published file, or a file of .tensormount/.
  std::shared_ptr<WriteHandle> write;       // A file below .staging/.
  // The open mode of `file`; null if the kernel can never read the file itself.
  std::shared_ptr<OpenModes::Lease> lease = nullptr;
  std::unique_ptr<FileUsers> users = nullptr;  // Set with `write`.
  MountStats::OpenHandle counted = {};
};
inline OpenFile& OpenFileOf(const fuse_file_info* fi) {
  return *reinterpret_cast<OpenFile*>(fi->fh);
}

// One reference to a node that a reply is about to give to the kernel; released if the reply fails
// (its caller was interrupted).
// The reply holds it in a shared pointer, because std::function copies its captures.
class NodeReference {
 public:
  NodeReference(Vfs& vfs, NodeId id) : vfs_(vfs), id_(id) {}
  ~NodeReference();
  NodeReference(const NodeReference&) = delete;
  NodeReference& operator=(const NodeReference&) = delete;
  // The kernel has the reference and will send FORGET for it.
  void Keep() { kept_ = true; }

 private:
  Vfs& vfs_;
  const NodeId id_;
  bool kept_ = false;
};

// A successful answer to a request. `send` is called at most once, on the thread that made the
// reply. If the caller was interrupted and answered meanwhile, the reply is destroyed unsent, so
// its captures (a lease, a node reference) must clean up in their destructors.
struct Reply {
  template <typename Send>
  explicit Reply(Send s, std::optional<Op> op = std::nullopt)
      : send(std::move(s)), counted_as(op) {}
  std::function<void(fuse_req_t)> send;
  std::optional<Op> counted_as;  // Replaces the request's own Op in the counters.
};

// Serves a request on this thread or, if it may block, on its queue. `work` returns the reply; each
// failure, exceptions included, is counted and answered once, and reported (Answer). `work` must
// not use the request or its memory (names, buffers), which are invalid once this returns if the
// work was queued.
void Serve(fuse_req_t req, Op op, NodeId node, bool may_block, std::function<Result<Reply>()> work);
struct LongRequest;  // Declared in fuse_bridge.cc.
// Functions that long work may call while it runs. Each run has its own object: the callback of
// PrepareRetry may be called before the run that requested it has returned.
class LongWork {
 public:
  explicit LongWork(LongRequest& request) : request_(request) {}
  // Whether the caller is being killed, or the request was answered for another reason. If true,
  // the request was answered, and the work should end.
  bool Interrupted();
  // Lets work wait for other work without holding a thread: the work returns at once (with any
  // value) and runs again from its beginning after the returned function is called.
  std::function<void()> PrepareRetry();
  bool will_retry() const { return will_retry_; }

 private:
  LongRequest& request_;
  bool will_retry_ = false;
};
// Serves a request on its queue. `soon` is for requests during which the kernel holds locks that
// others need: it is called if the work takes longer than kSoon, and replies from memory or returns
// false; the work goes on. `soon` must not block.
void ServeLong(fuse_req_t req, Op op, NodeId node, std::function<Result<Reply>(LongWork&)> work,
               const std::function<bool(fuse_req_t)>& soon = {});
// The queue for requests of this kind.
inline BlockingWork& QueueOf(fuse_req_t req, Op op) {
  Queues& queues = BridgeOf(req).queues;
  switch (op) {
    case Op::kRead:
    case Op::kReadStaged:
      return queues.reads;
    case Op::kWrite:
      return queues.writes;
    case Op::kFlush:
    case Op::kFsync:
    case Op::kRename:
      return queues.syncs;
    default:
      return queues.opens;
  }
}
// The pending answer of a request that began at `since`; a caller that is being killed gets EINTR.
std::shared_ptr<PendingAnswer> PendingAnswerOf(fuse_req_t req, Op op, Bridge& bridge,
                                               std::chrono::steady_clock::time_point since);
// Answers EINTR and returns true if the caller is being killed and has waited for
// Bridge::give_up_after.
bool AnswerIfDying(fuse_req_t req, Op op, Bridge& bridge,
                   std::chrono::steady_clock::time_point since, std::chrono::milliseconds waited);
// Runs work and turns exceptions into a Status: an exception must not pass through libfuse, which
// is C.
Result<Reply> Guarded(const std::function<Result<Reply>()>& work) noexcept;
// Counts and sends the result of work. Reports a failure, unless it is ordinary, or a read or a
// staging reported it. Called once for a request, by the thread that claimed its answer.
void Answer(fuse_req_t req, Bridge& bridge, Op op, std::chrono::steady_clock::time_point since,
            NodeId node, const Result<Reply>& result);
// Whether the failure is an ordinary answer that is not worth a log line.
bool IsOrdinary(const Status& status);

struct stat StatOf(const Attributes& attributes);
fuse_entry_param ParamOf(const Vfs::Entry& entry);
// The reply to getxattr or listxattr: the value, or its length if `size` is 0.
Reply XattrReply(std::string value, std::size_t size);
// One page-aligned buffer of kMaxRequestBytes for each thread, reused for every read.
char* ThreadBuffer();

// Operations that change nothing: lookup, getattr, readdir, open, read, ...
void AddReadOps(fuse_lowlevel_ops& ops);
// Operations that change something below .staging/ and are refused elsewhere: create, write,
// rename, ...; also flush and fsync.
void AddWriteOps(fuse_lowlevel_ops& ops);

// Operations on staged files that fuse_read_ops.cc delegates to fuse_write_ops.cc.
//
// Whether the node is .staging/ or lies below it.
bool IsStaged(NodeId node);
// open(2) of a staged node, or of any node with write access or O_TRUNC.
void OpenStaged(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi);
// read(2) and lseek(2) of a file that has OpenFile::write.
void ReadStaged(fuse_req_t req, std::size_t size, off_t offset, fuse_file_info* fi);
void SeekStaged(fuse_req_t req, off_t offset, int whence, fuse_file_info* fi);
// RELEASE of a file that has OpenFile::write.
void ReleaseStaged(fuse_req_t req, fuse_ino_t node, std::unique_ptr<OpenFile> open);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_INTERNAL_H_
