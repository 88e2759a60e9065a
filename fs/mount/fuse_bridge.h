// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_H_

#include <chrono>
#include <memory>
#include <string>

#include "tensormount/status.h"

#include "fs/mount/blocking_work.h"
#include "fs/mount/fuse_shim.h"
#include "fs/mount/open_modes.h"
#include "fs/vfs.h"

struct fuse_session;

namespace tensormount::fs {

struct Bridge;  // Declared in fuse_bridge_internal.h.

// Turns requests of the kernel into calls on Vfs and results into replies. The bridge decides on
// which thread a request runs, what the kernel caches, and which close(2) is the last; all else can
// be tested on Vfs without a kernel. Uses libfuse's low-level interface (fuse_lowlevel): node ids
// are ours, replies may be sent from any thread, and the caller supplies the threads.
class FuseBridge {
 public:
  // Communicates over `fd` and closes it, on failure too. All other arguments must outlive the
  // bridge. `give_up_after`: how long storage has before a killed caller is answered with EINTR.
  static Result<std::unique_ptr<FuseBridge>> Make(Vfs& vfs, Queues& queues, FuseShim& shim,
                                                  OpenModes& modes,
                                                  std::chrono::milliseconds give_up_after, int fd);
  // Whether libfuse itself negotiates passthrough at INIT (FuseShim::Options::by_libfuse).
  static bool LibfuseKnowsPassthrough();
  static std::string LibfuseVersion();
  ~FuseBridge();

  // Receives and answers requests on the calling thread until the mount is gone or Exit() is
  // called. May run on several threads. A signal with a handler makes the thread check for Exit().
  void Serve();
  void Exit();
  // Whether the mount is gone or Exit() was called; then every Serve() returns.
  bool exited() const;

 private:
  FuseBridge(std::unique_ptr<Bridge> bridge, fuse_session* session);

  const std::unique_ptr<Bridge> bridge_;  // The context for serving requests.
  fuse_session* const session_;           // Owned by this object.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_H_
