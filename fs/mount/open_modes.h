// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_OPEN_MODES_H_
#define TENSORMOUNT_FS_MOUNT_OPEN_MODES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/mount/file_prover.h"
#include "fs/node.h"
#include "fs/views/virtual_file.h"

namespace tensormount::fs {

// Registers files that the kernel then reads itself.
class BackingRegistrar {
 public:
  virtual ~BackingRegistrar() = default;
  // Registers an open file and returns a positive number that OPEN replies name it by. The kernel
  // keeps the file open, so the caller may close its descriptor. kPermissionDenied: this process
  // never may register; ELOOP: the file is on too many stacked filesystems.
  virtual Result<int> Register(int descriptor) = 0;
  // Ends a registration. No OPEN reply that names `id` may be in flight. Files already open keep
  // the backing file.
  virtual void Unregister(int id) noexcept = 0;
};

// Decides which files the kernel reads itself (passthrough). The kernel answers EIO to an open
// whose mode or backing file differs from those of the node's current opens. So the first open of a
// node decides for all until the last one is released, with one registration for all.
//
// Races that must not mix modes:
//  - Two first opens at once: one decides, the other is retried after the decision.
//  - RELEASE may come long after close(2), so a node counts as open longer than in the kernel,
//    never shorter: the kernel removes the file from the inode before it sends RELEASE. An open
//    meanwhile joins the mode of the released ones.
//  - An OPEN reply is in flight while the last RELEASE of the others is served: an open counts from
//    its decision on, before its reply, so that RELEASE is not the last.
//  - The reply fails (its caller was interrupted): the kernel sends no RELEASE; the Lease in the
//    reply returns its share.
//  - The kernel takes the reply but cannot finish the open: it sends RELEASE as for any handle.
//  - A file is written to while it uses passthrough: a new open (with Options::verify) first
//    compares it with its hashes again, and fails if it is damaged; the mode stays.
//  - The last share ends while the next open arrives: shares are counted under one lock, and the
//    next open registers anew. Both registrations may exist for a moment, which is harmless,
//    because the kernel's inode has dropped the first one (see above).
//
// Thread-safe. Open() may block as long as storage does, without a lock.
class OpenModes {
 public:
  struct Options {
    // Set for `--verify first`: the kernel reads a file that has hashes only after every byte was
    // compared with them; a changed file is compared again.
    bool verify = false;
    // Limit of bytes compared within the open. Beyond it the daemon serves the file while `prover`
    // compares it; a later open uses passthrough.
    std::uint64_t verified_in_open = kVerifiedInOpen;
    // Why passthrough is off, as a message; empty if it is on.
    std::string disabled_reason;
  };
  static constexpr std::uint64_t kVerifiedInOpen = std::uint64_t{64} << 20;
  // `negotiated`: whether the kernel agreed to passthrough; called at every first open. The
  // registrar and the prover must outlive this object.
  OpenModes(BackingRegistrar& registrar, std::function<bool()> negotiated, const Options& options,
            FileProver& prover)
      : registrar_(registrar),
        negotiated_(std::move(negotiated)),
        options_(options),
        prover_(prover) {}

  // The share of one open in the mode of its node, from the decision until its release. The open
  // file (OpenFile) and its reply hold the lease. When the last lease of a node is destroyed, the
  // backing file is unregistered, and the next open decides anew.
  class Lease {
   public:
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    bool passthrough() const { return backing_id_ > 0; }
    int backing_id() const { return backing_id_; }  // 0: the daemon serves reads.

   private:
    friend class OpenModes;
    Lease(OpenModes& modes, NodeId node) : modes_(modes), node_(node) {}
    OpenModes& modes_;
    const NodeId node_;
    int backing_id_ = 0;
    bool counted_ = false;
  };

  // The mode for one more open of a published file. Null if another open is deciding for this node:
  // the callback that `make_retry` returned is then called after the decision, on any thread, and
  // must call Open() again (so that opens behind a blocked file hold no threads). kCancelled once
  // `interrupted` returns true. All other failures are those of verification (kDataLoss, or of
  // storage); a file that cannot use passthrough is served by the daemon.
  // `make_retry` is called only if needed, because it parks the request (LongWork::PrepareRetry).
  using Retry = std::function<void()>;
  Result<std::shared_ptr<Lease>> Open(NodeId node, const std::shared_ptr<const VirtualFile>& file,
                                      const std::function<bool()>& interrupted,
                                      const std::function<Retry()>& make_retry);
  // Like Open, but without access to storage; null if the mode cannot be decided without storage.
  std::shared_ptr<Lease> Join(NodeId node);
  // How an open of the file would be served now, without trying it: "passthrough"; "daemon";
  // "daemon (proving 37 %)" (passthrough after the proof); "daemon (not proven)" (an open starts
  // the proof); "daemon (damaged)" (the proof failed).
  std::string TierOf(NodeId node, const VirtualFile& file) const;
  // Checks that this process may register files, with a memory file. For --tier passthrough.
  Status Probe();

  // For .tensormount/status: shows operators why files do not use passthrough.
  struct Counts {
    std::uint64_t passed = 0;  // Opens that use passthrough.
    std::uint64_t daemon = 0;
    std::uint64_t fell_back = 0;         // Opens in `daemon` that fell back, by `reasons`.
    std::uint64_t without_hashes = 0;    // Files without hashes that were registered.
    std::uint64_t verified_at_open = 0;  // Files verified within their open.
    std::size_t live_backings = 0;       // Current registrations.
    std::map<std::string, std::uint64_t> reasons;  // Opens by reason; the sum is `fell_back`.
  };
  Counts counts() const;
  // Why passthrough is off; empty if it is on.
  std::string DisabledReason() const;

 private:
  // State of a node with open files: created by the first open, erased with the last share.
  struct Entry {
    bool deciding = true;
    std::size_t shares = 0;
    int backing_id = 0;
    std::vector<Retry> waiting;  // Opens that wait for the decision.
  };
  // The first open's decision: a registration, or 0 and the reason.
  struct Decision {
    int backing_id = 0;
    std::string fallback;  // Why passthrough was not used, or empty.
  };
  Result<Decision> Decide(NodeId node, const std::shared_ptr<const VirtualFile>& file,
                          const std::function<bool()>& interrupted);
  // Never fails: a file that cannot be registered is served by the daemon.
  Decision Register(const VirtualFile& file, const Result<VirtualFile::Backing>& backing);
  // For a further open of a file that uses passthrough: verifies the file if it was written to
  // since.
  Status ProveAgain(const VirtualFile& file, const std::function<bool()>& interrupted);
  // Both require the lock. AddShare counts one more open and records how it is served.
  void AddShare(Entry& entry, Lease& lease);
  std::string DisabledReasonLocked() const;
  void Release(NodeId node) noexcept;

  BackingRegistrar& registrar_;
  const std::function<bool()> negotiated_;
  const Options options_;
  FileProver& prover_;
  mutable std::mutex mutex_;
  std::unordered_map<NodeId, Entry> entries_;
  // Why the kernel refused registrations for good; empty if it did not. A missing right
  // (CAP_SYS_ADMIN) does not come back, so no other file is tried.
  std::string forbidden_;
  Counts counts_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_OPEN_MODES_H_
