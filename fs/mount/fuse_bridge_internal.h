// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_INTERNAL_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_INTERNAL_H_

// What the files of the bridge share; nobody else includes it. Each file of operations fills its
// part of the table that FuseBridge gives to libfuse.

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

// Files up to this go through the page cache in every mode: one request fetches them whole.
inline constexpr std::uint64_t kSmallFile = 128 * 1024;
inline constexpr std::size_t kPageBytes = 4096;
// What most work below .staging/ takes less than, on storage that answers; and what those may wait
// who need a lock that the kernel holds meanwhile.
inline constexpr std::chrono::milliseconds kSoon{20};

// What operations work with: the userdata of every request. All outlive the session.
// libfuse passes this pointer with every request (fuse_req_userdata), so it must not move.
struct Bridge {
  Vfs& vfs;
  Queues& queues;
  FuseShim& shim;
  OpenModes& modes;
  std::chrono::milliseconds give_up_after;  // MountOptions::give_up_after.
  std::unique_ptr<SourceSpace> space = nullptr;
  std::unique_ptr<PublishCalls> publishes = std::make_unique<PublishCalls>();
};
inline Bridge& BridgeOf(fuse_req_t req) { return *static_cast<Bridge*>(fuse_req_userdata(req)); }

// What fuse_file_info::fh of an open file points to; released by the RELEASE request. Exactly one
// of both is set.
// Allocated by the reply to OPEN or CREATE, and owned by the kernel from the moment that the reply
// was sent.
struct OpenFile {
  std::shared_ptr<const VirtualFile> file;  // Of a published checkpoint, of .tensormount/.
  std::shared_ptr<WriteHandle> write;       // Below .staging/.
  std::shared_ptr<OpenModes::Lease> lease = nullptr;  // Of `file` where there is a mode to keep to.
  std::unique_ptr<FileUsers> users = nullptr;         // Of `write`.
  MountStats::OpenHandle counted = {};
};
inline OpenFile& OpenFileOf(const fuse_file_info* fi) {
  return *reinterpret_cast<OpenFile*>(fi->fh);
}

// One reference of a node that a reply is about to give to the kernel: goes back where the reply
// does not reach it (its caller was interrupted).
// A shared pointer to one travels in the reply, since std::function copies what it holds.
class NodeReference {
 public:
  NodeReference(Vfs& vfs, NodeId id) : vfs_(vfs), id_(id) {}
  ~NodeReference();
  NodeReference(const NodeReference&) = delete;
  NodeReference& operator=(const NodeReference&) = delete;
  // The kernel has it and will say when it forgets it.
  void Keep() { kept_ = true; }

 private:
  Vfs& vfs_;
  const NodeId id_;
  bool kept_ = false;
};

// How to send the answer. Called once, on the thread that made it, under no lock; dropped where the
// caller was interrupted and answered meanwhile, so what it holds must clean up by itself.
// Work gives back how to answer instead of answering, because it may end after the caller was
// interrupted and answered by the watchdog: then the reply is destroyed unsent, and what it holds
// (a lease, a reference of a node) goes back by its destructor.
struct Reply {
  template <typename Send>
  explicit Reply(Send s, std::optional<Op> op = std::nullopt)
      : send(std::move(s)), counted_as(op) {}
  std::function<void(fuse_req_t)> send;
  std::optional<Op> counted_as;  // Instead of what the request was served as.
};

// Serves a request here, or, where it may block, on its queue, so that others stay served. `work`
// returns how to reply; every failure of it, an exception included, is counted, reported and
// answered once. `work` must not use the request or what belongs to it (names, buffers): where it
// is queued those are gone when this returns.
void Serve(fuse_req_t req, Op op, NodeId node, bool may_block, std::function<Result<Reply>()> work);
struct LongRequest;  // Of fuse_bridge.cc.
// What long work can ask while it runs. One for each time that it runs: whoever calls what Again
// returned may do so before the work that asked for it has returned.
class LongWork {
 public:
  explicit LongWork(LongRequest& request) : request_(request) {}
  // Whether the caller gave up; it then has been answered.
  bool Interrupted();
  // For work that must wait for other work, and shall hold no thread meanwhile: it returns at once
  // (with anything), and runs again from its beginning after somebody has called the result.
  std::function<void()> Again();
  bool runs_again() const { return runs_again_; }

 private:
  LongRequest& request_;
  bool runs_again_ = false;
};
// `soon`, where the kernel holds locks that others need until it is answered: replies with what can
// be said without storage, or returns false. Called where the work takes longer than kSoon, which
// goes on. It must not wait.
void ServeLong(fuse_req_t req, Op op, NodeId node, std::function<Result<Reply>(LongWork&)> work,
               const std::function<bool(fuse_req_t)>& soon = {});
// Where a request of this kind waits for storage.
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
// The answer that a request waits for, which began `since`: who is being killed is told EINTR.
std::shared_ptr<PendingAnswer> PendingAnswerOf(fuse_req_t req, Op op, Bridge& bridge,
                                               std::chrono::steady_clock::time_point since);
// Answers EINTR, and says so, where the caller is being killed and storage had its time.
bool AnswerIfDying(fuse_req_t req, Op op, Bridge& bridge,
                   std::chrono::steady_clock::time_point since, std::chrono::milliseconds waited);
// Runs work, exceptions turned into a Status.
// An exception must not pass through libfuse, which is C.
Result<Reply> Guarded(const std::function<Result<Reply>()>& work) noexcept;
// Counts, reports and sends the result of work.
// To be called once for a request, by whoever claimed its answer.
void Answer(fuse_req_t req, Bridge& bridge, Op op, std::chrono::steady_clock::time_point since,
            NodeId node, const Result<Reply>& result);
// Failures that are answers and not worth a line.
bool IsOrdinary(const Status& status);

struct stat StatOf(const Attributes& attributes);
fuse_entry_param ParamOf(const Vfs::Entry& entry);
// A value for one who first asks how long it is (`size` 0).
Reply XattrReply(std::string value, std::size_t size);
// One page-aligned buffer of kMaxRequestBytes a thread, used again for every read.
char* ThreadBuffer();

// lookup, getattr, readdir, open, read, ...: what does not change anything.
void AddReadOps(fuse_lowlevel_ops& ops);
// create, write, rename, ...: below .staging/, and refused elsewhere. Also flush and fsync.
void AddWriteOps(fuse_lowlevel_ops& ops);

// The parts of operations on both kinds of files that fuse_write_ops.cc has.
// Whether the node lies below .staging/.
bool IsStaged(NodeId node);
// open(2) of a node that is staged, or for writing, or to truncate.
void OpenStaged(fuse_req_t req, fuse_ino_t node, fuse_file_info* fi);
// read(2) and lseek(2) of a file that has OpenFile::write.
void ReadStaged(fuse_req_t req, std::size_t size, off_t offset, fuse_file_info* fi);
void SeekStaged(fuse_req_t req, off_t offset, int whence, fuse_file_info* fi);
// The last that is heard of such a file.
void ReleaseStaged(fuse_req_t req, fuse_ino_t node, std::unique_ptr<OpenFile> open);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_INTERNAL_H_
