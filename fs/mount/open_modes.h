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

// Gives the kernel files to read by itself.
class BackingRegistrar {
 public:
  virtual ~BackingRegistrar() = default;
  // Registers an open file; the kernel holds it from then on, and the caller may close its
  // descriptor. A number above 0 that replies to OPEN name it by. kPermissionDenied: this process
  // will never be allowed to; ELOOP: it lies on too many filesystems.
  virtual Result<int> Register(int descriptor) = 0;
  // No OPEN reply that names it may be on its way. What is open keeps the file.
  virtual void Unregister(int id) noexcept = 0;
};

// Which files the kernel reads itself. The kernel answers EIO to an open in another mode than, or
// with another backing file than, those of the same node that are open. So the first open of a
// node decides for all until the last of them is released, and one registration serves them.
//
// Races, and why none of them mixes modes:
//  - Two first opens at once: one decides, the other comes again after its decision.
//  - RELEASE comes late, long after close(2): a node then counts as open for longer than it is in
//    the kernel, never for shorter, because the kernel takes the file out of the inode before it
//    sends RELEASE. An open in between joins those that are as good as gone, in their mode.
//  - An OPEN reply is on its way while the last RELEASE of the others is served: an open is counted
//    from its decision on, before its reply, so that RELEASE is not the last.
//  - The reply does not arrive (its caller was interrupted): the kernel sends no RELEASE for it,
//  and
//    the Lease that the reply held gives its share back.
//  - The kernel takes the reply but cannot finish the open: it sends RELEASE as for any handle.
//  - A file is written to while it is passed through: who opens it then is not let in before it was
//    compared anew, and gets the error where it is damaged; the mode stays.
//  - The last share goes while the next open comes: shares are counted under one lock, and the next
//    open registers anew; that both registrations live for a moment does no harm, because the
//    kernel's inode has let go of the first one (see above).
//
// Thread-safe. Open() may block for as long as storage does, without a lock.
class OpenModes {
 public:
  struct Options {
    // "verify first": every byte is compared with its hash before the kernel reads the file, and
    // again when it has changed since.
    bool verify = false;
    // Up to this many bytes are compared within the open. Where more are left the daemon serves,
    // and `prover` compares; a later open is passed through.
    std::uint64_t verified_in_open = kVerifiedInOpen;
    // Not empty: nothing is passed through, and why, for a person.
    std::string refused;
  };
  static constexpr std::uint64_t kVerifiedInOpen = std::uint64_t{64} << 20;
  // `negotiated`: whether the kernel agreed, asked at every first open. All must outlive it.
  OpenModes(BackingRegistrar& registrar, std::function<bool()> negotiated, const Options& options,
            FileProver& prover)
      : registrar_(registrar),
        negotiated_(std::move(negotiated)),
        options_(options),
        prover_(prover) {}

  // One open's share in the mode of its node, from the decision until its release.
  // Held by the open file (OpenFile) and by its reply. The last one of a node to go unregisters the
  // backing file, and the next open decides anew.
  class Lease {
   public:
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    bool passthrough() const { return backing_id_ > 0; }
    int backing_id() const { return backing_id_; }  // 0: the daemon serves.

   private:
    friend class OpenModes;
    Lease(OpenModes& modes, NodeId node) : modes_(modes), node_(node) {}
    OpenModes& modes_;
    const NodeId node_;
    int backing_id_ = 0;
    bool counted_ = false;
  };

  // The mode for one more open of a file of a published checkpoint. Null where another open is just
  // deciding for this node: `again` is called once that is over, on whatever thread, and shall call
  // Open() again (so that opens that wait for one hanging file hold no threads). kCancelled once
  // `interrupted` says so; otherwise fails only where verification does (kDataLoss): a file that
  // cannot be passed through is the daemon's.
  // Made only where it is needed, because it keeps the request waiting (LongWork::Again).
  using Again = std::function<void()>;
  Result<std::shared_ptr<Lease>> Open(NodeId node, const std::shared_ptr<const VirtualFile>& file,
                                      const std::function<bool()>& interrupted,
                                      const std::function<Again()>& make_again);
  // The same where it can be said without looking at the file; null where it cannot.
  std::shared_ptr<Lease> Join(NodeId node);
  // What an open of the file would get now, as far as can be said without trying: "passthrough",
  // "daemon", "daemon (proving 37 %)" where it will be passed through once that is done, "daemon
  // (not proven)" where its open will begin that, "daemon (damaged)" where that has failed.
  std::string TierOf(NodeId node, const VirtualFile& file) const;
  // Registers a file in memory and takes it back: whether this process may. For --tier passthrough.
  Status Probe();

  // For .tensormount/status, so that an operator sees why files are not passed through.
  struct Counts {
    std::uint64_t passed = 0;  // Opens.
    std::uint64_t daemon = 0;
    std::uint64_t fell_back = 0;         // Those of `daemon` that might have been passed through.
    std::uint64_t without_hashes = 0;    // Registered: as good as its file.
    std::uint64_t verified_at_open = 0;  // Files.
    std::size_t live_backings = 0;       // Registrations now.
    std::map<std::string, std::uint64_t> reasons;  // Of fell_back.
  };
  Counts counts() const;
  // Why nothing is passed through; empty where files are.
  std::string WhyNot() const;

 private:
  // Of one node that has opens: made by the first one, while it decides, and erased with the last
  // share.
  struct Entry {
    bool deciding = true;
    std::size_t shares = 0;
    int backing_id = 0;
    std::vector<Again> waiting;  // For the decision.
  };
  // The first open's decision: a registration, or 0 and why.
  struct Decision {
    int backing_id = 0;
    std::string fallback;  // Not empty: it might have been passed through.
  };
  Result<Decision> Decide(NodeId node, const std::shared_ptr<const VirtualFile>& file,
                          const std::function<bool()>& interrupted);
  // Never fails: what cannot be registered is the daemon's.
  Decision Register(const VirtualFile& file, const Result<VirtualFile::Backing>& backing);
  // Of a file that is passed through already: whether it still may be.
  Status ProveAgain(const VirtualFile& file, const std::function<bool()>& interrupted);
  // Both with the lock held.
  // Counts one more open and says how it is served.
  void Share(Entry& entry, Lease& lease);
  std::string WhyNotLocked() const;
  void Release(NodeId node) noexcept;

  BackingRegistrar& registrar_;
  const std::function<bool()> negotiated_;
  const Options options_;
  FileProver& prover_;
  mutable std::mutex mutex_;
  std::unordered_map<NodeId, Entry> entries_;
  // Then no further file is tried: a missing right (CAP_SYS_ADMIN) does not come back.
  std::string forbidden_;  // Not empty: the kernel said that it never will.
  Counts counts_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_OPEN_MODES_H_
