// SPDX-License-Identifier: Apache-2.0
// Chooses whether the kernel reads an open file itself (passthrough) or the daemon serves the
// reads. Passthrough needs a file that is exactly one stored file. With --verify first all its
// bytes must have been compared with their hashes, unless they have none. Counts why files did not
// use passthrough, for .tensormount/status.
#include "fs/mount/open_modes.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "base/at_exit.h"

namespace tensormount::fs {
namespace {

// Number of reasons that are counted separately; all others are counted together.
constexpr std::size_t kMaxReasons = 16;
constexpr std::uint32_t kWritableBits = 0222;

std::string RegisterErrorText(int error) {
  switch (error) {
    case EPERM:
      return "the kernel refused (EPERM): CAP_SYS_ADMIN in the initial user namespace is needed";
    case ELOOP:
      return "the file is on too many stacked filesystems (ELOOP)";
    case EOPNOTSUPP:
      return "the file's filesystem does not support passthrough (EOPNOTSUPP)";
    default:
      return std::string("the kernel refused: ") + std::strerror(error);
  }
}

}  // namespace

OpenModes::Lease::~Lease() {
  if (counted_) modes_.Release(node_);
}

// The first open of a node creates its Entry with deciding = true, drops the lock and decides,
// which may read megabytes. Opens that arrive meanwhile add a callback to `waiting` and return
// null. After the decision the callbacks run, without the lock, and these opens are retried.
Result<std::shared_ptr<OpenModes::Lease>> OpenModes::Open(
    NodeId node, const std::shared_ptr<const VirtualFile>& file,
    const std::function<bool()>& interrupted, const std::function<Retry()>& make_retry) {
  const std::shared_ptr<Lease> lease(new Lease(*this, node));
  std::unique_lock lock(mutex_);
  if (const auto found = entries_.find(node); found != entries_.end()) {
    Entry& entry = found->second;
    if (entry.deciding) {
      entry.waiting.push_back(make_retry());
      return std::shared_ptr<Lease>();
    }
    AddShare(entry, *lease);
    lock.unlock();
    if (options_.verify && lease->passthrough()) {
      TENSORMOUNT_RETURN_IF_ERROR(ProveAgain(*file, interrupted));
    }
    return lease;
  }
  entries_.emplace(node, Entry());
  lock.unlock();
  const Result<Decision> decision = [&]() -> Result<Decision> {
    try {
      return Decide(node, file, interrupted);
    } catch (const std::exception& e) {
      return Status(Code::kInternal, file->label() + ": " + e.what());
    }
  }();
  lock.lock();
  Entry& entry = entries_.at(node);
  const std::vector<Retry> waiting = std::move(entry.waiting);
  const AtExit call_all([&waiting] {
    for (const Retry& again : waiting) again();
  });
  // Declared last, so that the lock is released before the callbacks run.
  const std::unique_lock held = std::move(lock);
  if (!decision.ok()) {
    // Of the waiting opens one decides anew, because this open may only have been interrupted.
    entries_.erase(node);
    return decision.status();
  }
  entry.deciding = false;
  entry.backing_id = decision.value().backing_id;
  if (entry.backing_id > 0) ++counts_.live_backings;
  AddShare(entry, *lease);
  if (const std::string& why = decision.value().fallback; !why.empty()) {
    ++counts_.fell_back;
    const bool room = counts_.reasons.size() < kMaxReasons || counts_.reasons.contains(why);
    ++counts_.reasons[room ? why : "other reasons"];
  }
  return lease;
}

namespace {

VirtualFile::Proceed ProceedUnlessInterrupted(const std::function<bool()>& interrupted) {
  return [&interrupted](std::uint64_t) { return !interrupted || !interrupted(); };
}

}  // namespace

// Registers before it compares, because a file that cannot use passthrough need not be read.
Result<OpenModes::Decision> OpenModes::Decide(NodeId node,
                                              const std::shared_ptr<const VirtualFile>& file,
                                              const std::function<bool()>& interrupted) {
  if (!DisabledReason().empty()) return Decision{};
  const Result<VirtualFile::Backing> backing = file->OpenBacking();
  Decision decision = Register(*file, backing);
  if (decision.backing_id == 0 || !options_.verify) return decision;
  AtExit take_back([this, id = decision.backing_id] { registrar_.Unregister(id); });
  TENSORMOUNT_ASSIGN_OR_RETURN(const VirtualFile::Proof proof, file->ProofOf(backing.value()));
  const bool verify = proof.hashed && !proof.whole;
  if (verify) {
    // The daemon serves a damaged file, because it can still give out the undamaged bytes.
    if (prover_.IsKnownDamaged(node, proof.stamp)) return Decision{.fallback = "it is damaged"};
    if (proof.unverified_bytes > options_.verified_in_open) {
      prover_.Add(node, file, proof);
      return Decision{};
    }
    const Status proven = file->Prove(backing.value(), ProceedUnlessInterrupted(interrupted));
    if (proven.code() == Code::kUnavailable) return Decision{.fallback = "its file keeps changing"};
    TENSORMOUNT_RETURN_IF_ERROR(proven);
  }
  const std::lock_guard lock(mutex_);
  counts_.without_hashes += !proof.hashed;
  counts_.verified_at_open += verify;
  take_back.Cancel();
  return decision;
}

Status OpenModes::ProveAgain(const VirtualFile& file, const std::function<bool()>& interrupted) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const VirtualFile::Backing backing, file.OpenBacking());
  TENSORMOUNT_ASSIGN_OR_RETURN(const VirtualFile::Proof proof, file.ProofOf(backing));
  return proof.hashed && !proof.whole ? file.Prove(backing, ProceedUnlessInterrupted(interrupted))
                                      : Status();
}

OpenModes::Decision OpenModes::Register(const VirtualFile& file,
                                        const Result<VirtualFile::Backing>& backing) {
  // A file made of several files, or of a part of one, can never use passthrough, so this is no
  // fallback.
  if (backing.status().code() == Code::kNotFound) return {};
  if (backing.status().code() == Code::kDataLoss) {
    return {.fallback = "its file does not match the index"};
  }
  if (!backing.ok()) {
    return {.fallback = std::string("its file cannot be opened: ") +
                        std::strerror(backing.status().ToErrno())};
  }
  const FileInfo& info = backing.value().info;
  if (info.size != file.size()) {
    return {.fallback = "the size of its file does not match the index"};
  }
  // Files of a store are read-only. Files that other programs wrote may change, so the daemon
  // checks them at every read; the kernel would not.
  if ((info.mode & kWritableBits) != 0) {
    return {.fallback = "its file is not sealed (it may still be written to)"};
  }
  const int descriptor = backing.value().file->descriptor();
  if (descriptor < 0) return {.fallback = "its file has no descriptor"};
  const Result<int> id = registrar_.Register(descriptor);
  if (id.ok()) return {.backing_id = id.value()};
  const std::string why = RegisterErrorText(id.status().ToErrno());
  if (id.status().code() == Code::kPermissionDenied) {
    const std::lock_guard lock(mutex_);
    forbidden_ = why;  // The refusal is permanent, so no other file is tried.
  }
  return {.fallback = why};
}

void OpenModes::Release(NodeId node) noexcept {
  int id = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(node);
    if (found == entries_.end() || --found->second.shares > 0) return;
    id = found->second.backing_id;
    entries_.erase(found);
    if (id > 0) --counts_.live_backings;
  }
  if (id > 0) registrar_.Unregister(id);
}

// Accesses no storage: joins the mode of the current opens, or the daemon's if passthrough is off.
std::shared_ptr<OpenModes::Lease> OpenModes::Join(NodeId node) {
  const std::shared_ptr<Lease> lease(new Lease(*this, node));
  const std::lock_guard lock(mutex_);
  auto found = entries_.find(node);
  if (found == entries_.end()) {
    if (DisabledReasonLocked().empty()) return nullptr;
    found = entries_.emplace(node, Entry{.deciding = false}).first;
  }
  // A file that uses passthrough must be checked for changes, which only Open does.
  if (found->second.deciding || (options_.verify && found->second.backing_id > 0)) return nullptr;
  AddShare(found->second, *lease);
  return lease;
}

void OpenModes::AddShare(Entry& entry, Lease& lease) {
  ++entry.shares;
  lease.counted_ = true;
  lease.backing_id_ = entry.backing_id;
  ++(lease.passthrough() ? counts_.passed : counts_.daemon);
}

// For the attribute user.tensormount.tier: registers and proves nothing, so that asking does not
// change the answer.
std::string OpenModes::TierOf(NodeId node, const VirtualFile& file) const {
  const std::string daemon = "daemon";
  const std::string passthrough = "passthrough";
  if (!DisabledReason().empty()) return daemon;
  bool open = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(node);
    if (found != entries_.end() && !found->second.deciding) {
      if (found->second.backing_id > 0) return passthrough;
      open = true;  // The daemon serves the file, and so all its opens until the last is released.
    }
  }
  if (const std::optional<int> percent = prover_.Percent(node)) {
    return daemon + " (proving " + std::to_string(*percent) + " %)";
  }
  if (open) return daemon;
  const Result<VirtualFile::Backing> backing = file.OpenBacking();
  if (!backing.ok() || backing.value().info.size != file.size() ||
      (backing.value().info.mode & kWritableBits) != 0) {
    return daemon;
  }
  if (!options_.verify) return passthrough;
  const Result<VirtualFile::Proof> proof = file.ProofOf(backing.value());
  if (!proof.ok()) return daemon;
  if (prover_.IsKnownDamaged(node, proof.value().stamp)) return daemon + " (damaged)";
  const bool begins = proof.value().hashed && !proof.value().whole &&
                      proof.value().unverified_bytes > options_.verified_in_open;
  return begins ? daemon + " (not proven)" : passthrough;
}

std::string OpenModes::DisabledReason() const {
  const std::lock_guard lock(mutex_);
  return DisabledReasonLocked();
}

std::string OpenModes::DisabledReasonLocked() const {
  if (!options_.disabled_reason.empty()) return options_.disabled_reason;
  if (!negotiated_()) return "the kernel does not support passthrough (Linux 6.9 and later do)";
  return forbidden_;
}

// Registers a memory file and releases it at once.
Status OpenModes::Probe() {
  if (std::string why = DisabledReason(); !why.empty())
    return Status(Code::kUnsupported, std::move(why));
  const int fd = memfd_create("tensormount-probe", MFD_CLOEXEC);
  if (fd < 0) return Status::FromErrno(errno, "make", "a file in memory");
  const Result<int> id = registrar_.Register(fd);
  close(fd);
  if (id.ok()) {
    registrar_.Unregister(id.value());
    return {};
  }
  std::string why = RegisterErrorText(id.status().ToErrno());
  if (id.status().code() == Code::kPermissionDenied) {
    const std::lock_guard lock(mutex_);
    forbidden_ = why;
  }
  return Status(id.status().code(), std::move(why));
}

OpenModes::Counts OpenModes::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace tensormount::fs
