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

struct Bridge;  // Of fuse_bridge_internal.h.

// Turns requests of the kernel into calls on Vfs and results into replies; it decides nothing but
// on which thread, so that what a mount does can be tested on Vfs, without a kernel.
// libfuse is used below its high-level interface (fuse_lowlevel): node ids are ours, replies may be
// sent from any thread, and the caller chooses the threads.
class FuseBridge {
 public:
  // Speaks over `fd`, which it closes in the end. All others must outlive it. On failure `fd` is
  // closed too. `give_up_after`: how long storage has before a caller that is being killed is let
  // go.
  static Result<std::unique_ptr<FuseBridge>> Make(Vfs& vfs, Queues& queues, FuseShim& shim,
                                                  OpenModes& modes,
                                                  std::chrono::milliseconds give_up_after, int fd);
  // Whether passthrough is libfuse's business at INIT (FuseShim::Options::by_libfuse).
  static bool LibfuseKnowsPassthrough();
  static std::string LibfuseVersion();
  ~FuseBridge();

  // Receives and answers requests on the calling thread, until the mount is gone or Exit(). May
  // run on several threads. A signal with a handler makes it look at Exit().
  void Serve();
  void Exit();
  // Whether the kernel said that the mount is gone.
  bool exited() const;

 private:
  FuseBridge(std::unique_ptr<Bridge> bridge, fuse_session* session);

  const std::unique_ptr<Bridge> bridge_;  // What requests are served with.
  fuse_session* const session_;           // Owned.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_BRIDGE_H_
