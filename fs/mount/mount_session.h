// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_MOUNT_SESSION_H_
#define TENSORMOUNT_FS_MOUNT_MOUNT_SESSION_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/views/hf_options.h"
#include "fs/views/served_data.h"

namespace tensormount::fs {

// What `mount` may be told. Paths are the host's.
// Defaults are those of `tensormount mount` (docs/cli.md).
struct MountOptions {
  std::string source;                   // VfsOptions::source.
  std::vector<std::string> roots = {};  // VfsOptions::roots.
  std::string mount_point;              // An empty folder.
  // Nothing can be written. Otherwise a store that this process may write shows .staging/.
  bool read_only = false;
  // List every view (docs/semantics.md): npy/, slices/, extents/, zarr/, hf/, model.safetensors.
  // All of them can be opened by name without it.
  bool list_views = false;
  std::shared_ptr<const KeyMap> map;  // Other names for keys; null: none.
  HfOptions hf;                       // How hf/ is cut, and what it has.
  bool allow_other = false;
  enum class Tier { kAuto, kPassthrough, kDaemon } tier = Tier::kAuto;
  ServeVerify verify = ServeVerify::kFirst;
  int threads = 0;  // That read data, 0: as many as cores, at least 2.
  // As where the kernel cannot map direct files (before Linux 6.6): reads go through its cache.
  bool page_cache = false;
  // How long storage has before a caller that is being killed is let go. Tests set less.
  std::chrono::milliseconds give_up_after{200};
};

class MountCore;  // Of mount_session.cc.

// A live mount. Needs the right to mount (root, or fusermount3).
//
// The process that serves a mount must not map files of this mount into its own memory, nor pass
// mapped pages of them to system calls: a page fault waits for the daemon's answer with the
// process's memory lock held, and the daemon's own threads need that lock to answer. Map in another
// process (a forked child will do).
class MountSession {
 public:
  // Opens the source, mounts, and returns once the mount answers. The process must not have
  // started threads that it wants to keep over a fork: become a daemon first.
  //   kNotFound           no such source or mount point
  //   kBusy               the mount point is not empty or is a mount already
  //   kPermissionDenied   not allowed to mount; allow_other refused (and why)
  //   kUnavailable        no /dev/fuse;  kUnsupported: built without FUSE, or tier not offered
  // Where it fails after the mount was made it is unmounted again.
  static Result<std::unique_ptr<MountSession>> Start(FileSystem& fs, const MountOptions& options);
  // Unmounts, lazily where it is busy, and joins. What storage holds for good keeps what it uses:
  // better a leak than a crash.
  ~MountSession();
  MountSession(const MountSession&) = delete;
  MountSession& operator=(const MountSession&) = delete;

  // Returns when the mount is gone: unmounted from outside, or by Stop(). Not kDeadlineExceeded.
  Status Wait();
  // From any thread or a signal-handling thread: unmounts (clean where not busy, else lazily).
  void Stop();
  // One line of JSON, as in .tensormount/status.
  std::string StatusJson() const;

 private:
  explicit MountSession(std::shared_ptr<MountCore> core) : core_(std::move(core)) {}

  // Its threads may outlive this where storage holds them.
  std::shared_ptr<MountCore> core_;
};

// Unmounts what is mounted at `mount_point` (fusermount3, or umount2 as root) and waits until it
// is gone or `deadline`: kBusy where it is in use and `lazy` is false.
// A lazy unmount takes the mount out of the tree at once, and ends it when the last file is closed.
Status Unmount(const std::string& mount_point, bool lazy, std::chrono::milliseconds timeout);
// Takes away what is mounted at `mount_point` where it is a mount of ours whose daemon is gone
// (every access answers ENOTCONN). False: there is none; live mounts and others' are left alone.
Result<bool> ClearDeadMount(const std::string& mount_point);
// Whether something is mounted at exactly this path (from /proc/self/mountinfo).
bool IsMountPoint(const std::string& path);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_MOUNT_SESSION_H_
