// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_MOUNT_SESSION_H_
#define TENSORMOUNT_FS_MOUNT_MOUNT_SESSION_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/views/hf_options.h"
#include "fs/views/served_data.h"

namespace tensormount::fs {

// Options of a mount. The mount point is a path on the host; the source may also be a URL
// (FileSystemFor). Defaults are those of `tensormount mount` (docs/cli.md).
struct MountOptions {
  // A store, a checkpoint in our or a foreign format, or a training directory.
  std::string source;
  // Directories in which data of adopted and foreign checkpoints may lie.
  std::vector<std::string> roots = {};
  std::string mount_point;  // An empty directory.
  // Refuse all writes. If false, and the source is a store that this process may write, .staging/
  // is shown.
  bool read_only = false;
  // List every view (docs/mounting.md): npy/, slices/, extents/, zarr/, hf/, dcp/,
  // model.safetensors. Views that are not listed can still be opened by name.
  bool list_views = false;
  NameMap map;   // Empty: tensors are as stored.
  HfOptions hf;  // How hf/ is split, and which tensors it has.
  bool allow_other = false;
  enum class Tier { kAuto, kPassthrough, kDaemon } tier = Tier::kAuto;
  ServeVerify verify = ServeVerify::kFirst;
  int threads = 0;  // Threads that read data, 2 to 64; 0: number of cores.
  // Read through the page cache, as for kernels that cannot map direct files (before Linux 6.6).
  bool page_cache = false;
  // How long a caller that is being killed waits for storage before it gets EINTR. Shorter in
  // tests.
  std::chrono::milliseconds give_up_after{200};
};

class MountCore;  // Declared in mount_session.cc.

// A live mount. Requires the right to mount (root, or fusermount3).
//
// The process that serves a mount must not map files of this mount, nor pass such mapped pages to
// system calls: a page fault waits for the daemon with the process's memory lock held, which the
// daemon's threads need. Map in another process (a forked child is enough).
class MountSession {
 public:
  // Opens the source, mounts, and returns once the mount answers. Starts threads, which a later
  // fork would lose: become a daemon first.
  //   kNotFound           no such source or mount point
  //   kBusy               the mount point is not empty, or is a mount already
  //   kInvalidArgument    the mount point is not a directory, or lies inside the source
  //   kPermissionDenied   not allowed to mount; allow_other refused (and why)
  //   kUnavailable        no /dev/fuse, or the kernel did not initialize the mount in time
  //   kUnsupported        built without FUSE, or the tier or allow_other is not available
  // If it fails after mounting, it unmounts again.
  static Result<std::unique_ptr<MountSession>> Start(FileSystem& fs, const MountOptions& options);
  // Like the other Start, on the filesystem that `options.source` names (FileSystemFor).
  static Result<std::unique_ptr<MountSession>> Start(const MountOptions& options);
  // Unmounts, lazily if busy, and joins the threads. Threads that storage blocks keep their memory:
  // a leak instead of a crash.
  ~MountSession();
  MountSession(const MountSession&) = delete;
  MountSession& operator=(const MountSession&) = delete;

  // Returns OK when the mount is gone, whether it was unmounted from outside or by Stop().
  Status Wait();
  // Unmounts, lazily if busy. May be called from any thread, including a signal-handling thread.
  void Stop();
  // One line of JSON, as in .tensormount/status.
  std::string StatusJson() const;

 private:
  explicit MountSession(std::shared_ptr<MountCore> core) : core_(std::move(core)) {}

  // Shared with threads that may outlive this object while storage blocks them.
  std::shared_ptr<MountCore> core_;
};

// Unmounts `mount_point` (fusermount3, or umount2 as root) and waits until it is gone, at most
// `timeout`. kBusy: it is in use and `lazy` is false. A lazy unmount detaches the mount at once and
// ends it when the last file is closed.
Status Unmount(const std::string& mount_point, bool lazy, std::chrono::milliseconds timeout);
// Removes a Tensormount mount at `mount_point` whose daemon is gone (every access returns
// ENOTCONN). False: there is none; live mounts and mounts of other filesystems are left alone.
Result<bool> ClearDeadMount(const std::string& mount_point);
// Whether something is mounted at exactly this path (from /proc/self/mountinfo).
bool IsMountPoint(const std::string& path);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_MOUNT_SESSION_H_
