// SPDX-License-Identifier: Apache-2.0
// How a file is opened: passed through to the kernel, where it is one stored file all of whose
// bytes were compared with their hashes; through the page cache; or past it. Counts why a file was
// not passed through, for `stats`.
#include "fs/mount/open_modes.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "base/at_exit.h"

namespace tensormount::fs {
namespace {

// Reasons that are told apart; all others are counted together.
constexpr std::size_t kMaxReasons = 16;
constexpr std::uint32_t kWritableBits = 0222;

std::string WhyErrno(int error) {
  switch (error) {
    case EPERM:
      return "the kernel refused (EPERM): CAP_SYS_ADMIN is needed, outside of user namespaces";
    case ELOOP:
      return "the file lies on too many stacked filesystems (ELOOP)";
    case EOPNOTSUPP:
      return "the file's filesystem cannot be passed through (EOPNOTSUPP)";
    default:
      return std::string("the kernel refused: ") + std::strerror(error);
  }
}

}  // namespace

OpenModes::Lease::~Lease() {
  if (counted_) modes_.Release(node_);
}

// The first open of a node makes its Entry with deciding = true, drops the lock and decides, which
// may read megabytes. Opens that come meanwhile leave a call in `waiting` and return null. When the
// decision stands they are called, without the lock, and come again.
Result<std::shared_ptr<OpenModes::Lease>> OpenModes::Open(
    NodeId node, const std::shared_ptr<const VirtualFile>& file,
    const std::function<bool()>& interrupted, const std::function<Again()>& make_again) {
  const std::shared_ptr<Lease> lease(new Lease(*this, node));
  std::unique_lock lock(mutex_);
  if (const auto found = entries_.find(node); found != entries_.end()) {
    Entry& entry = found->second;
    if (entry.deciding) {
      entry.waiting.push_back(make_again());
      return std::shared_ptr<Lease>();
    }
    Share(entry, *lease);
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
  const std::vector<Again> waiting = std::move(entry.waiting);
  const AtExit call_all([&waiting] {
    for (const Again& again : waiting) again();
  });
  // Declared last: the lock is given back before they are called.
  const std::unique_lock held = std::move(lock);
  if (!decision.ok()) {
    // Those who waited decide anew: this one may just have been interrupted.
    entries_.erase(node);
    return decision.status();
  }
  entry.deciding = false;
  entry.backing_id = decision.value().backing_id;
  if (entry.backing_id > 0) ++counts_.live_backings;
  Share(entry, *lease);
  if (const std::string& why = decision.value().fallback; !why.empty()) {
    ++counts_.fell_back;
    const bool room = counts_.reasons.size() < kMaxReasons || counts_.reasons.contains(why);
    ++counts_.reasons[room ? why : "other reasons"];
  }
  return lease;
}

namespace {

VirtualFile::Proceed Unless(const std::function<bool()>& interrupted) {
  return [&interrupted](std::uint64_t) { return !interrupted || !interrupted(); };
}

}  // namespace

// Registers before it compares: a file that cannot be passed through anyway need not be read.
Result<OpenModes::Decision> OpenModes::Decide(NodeId node,
                                              const std::shared_ptr<const VirtualFile>& file,
                                              const std::function<bool()>& interrupted) {
  if (!WhyNot().empty()) return Decision{};
  const Result<VirtualFile::Backing> backing = file->OpenBacking();
  Decision decision = Register(*file, backing);
  if (decision.backing_id == 0 || !options_.verify) return decision;
  AtExit take_back([this, id = decision.backing_id] { registrar_.Unregister(id); });
  TENSORMOUNT_ASSIGN_OR_RETURN(const VirtualFile::Proof proof, file->ProofOf(backing.value()));
  const bool verify = proof.hashed && !proof.whole;
  if (verify) {
    // Its other bytes are served.
    if (prover_.FoundDamaged(node, proof.stamp)) return Decision{.fallback = "it is damaged"};
    if (proof.left > options_.verified_in_open) {
      prover_.Add(node, file, proof);
      return Decision{};
    }
    const Status proven = file->Prove(backing.value(), Unless(interrupted));
    if (proven.code() == Code::kUnavailable) return Decision{.fallback = "its file changes"};
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
  return proof.hashed && !proof.whole ? file.Prove(backing, Unless(interrupted)) : Status();
}

OpenModes::Decision OpenModes::Register(const VirtualFile& file,
                                        const Result<VirtualFile::Backing>& backing) {
  // Where it is made of several files, or of a part of one, there is nothing to fall back from.
  if (backing.status().code() == Code::kNotFound) return {};
  if (backing.status().code() == Code::kDataLoss) {
    return {.fallback = "its file is not as the index says"};
  }
  if (!backing.ok()) {
    return {.fallback = std::string("its file cannot be opened: ") +
                        std::strerror(backing.status().ToErrno())};
  }
  const FileInfo& info = backing.value().info;
  if (info.size != file.size()) {
    return {.fallback = "its file does not have the size that the index says"};
  }
  // Of a store they are. What other programs wrote is not, and whether it changed is looked at with
  // every read: the kernel would not.
  if ((info.mode & kWritableBits) != 0) {
    return {.fallback = "its file is not sealed (somebody may write to it)"};
  }
  const int descriptor = backing.value().file->descriptor();
  if (descriptor < 0) return {.fallback = "its file has no descriptor"};
  const Result<int> id = registrar_.Register(descriptor);
  if (id.ok()) return {.backing_id = id.value()};
  const std::string why = WhyErrno(id.status().ToErrno());
  if (id.status().code() == Code::kPermissionDenied) {
    const std::lock_guard lock(mutex_);
    forbidden_ = why;  // That does not change: no use in asking for every file.
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

// Without storage: joins those that have the node open, or the daemon's where nothing is passed
// through at all.
std::shared_ptr<OpenModes::Lease> OpenModes::Join(NodeId node) {
  const std::shared_ptr<Lease> lease(new Lease(*this, node));
  const std::lock_guard lock(mutex_);
  auto found = entries_.find(node);
  if (found == entries_.end()) {
    if (WhyNotLocked().empty()) return nullptr;
    found = entries_.emplace(node, Entry{.deciding = false}).first;
  }
  // Whether it still may be passed through has to be looked at.
  if (found->second.deciding || (options_.verify && found->second.backing_id > 0)) return nullptr;
  Share(found->second, *lease);
  return lease;
}

void OpenModes::Share(Entry& entry, Lease& lease) {
  ++entry.shares;
  lease.counted_ = true;
  lease.backing_id_ = entry.backing_id;
  ++(lease.passthrough() ? counts_.passed : counts_.daemon);
}

// An attribute of the file (user.tensormount.tier), for people and tests: it must not change what
// it tells of, so it registers and proves nothing.
std::string OpenModes::TierOf(NodeId node, const VirtualFile& file) const {
  const std::string daemon = "daemon";
  const std::string passthrough = "passthrough";
  if (!WhyNot().empty()) return daemon;
  bool open = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(node);
    if (found != entries_.end() && !found->second.deciding) {
      if (found->second.backing_id > 0) return passthrough;
      open = true;  // All that are open at one time are served alike.
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
  if (prover_.FoundDamaged(node, proof.value().stamp)) return daemon + " (damaged)";
  const bool begins = proof.value().hashed && !proof.value().whole &&
                      proof.value().left > options_.verified_in_open;
  return begins ? daemon + " (not proven)" : passthrough;
}

std::string OpenModes::WhyNot() const {
  const std::lock_guard lock(mutex_);
  return WhyNotLocked();
}

std::string OpenModes::WhyNotLocked() const {
  if (!options_.refused.empty()) return options_.refused;
  if (!negotiated_()) return "the kernel does not offer it (Linux 6.9 and later do)";
  return forbidden_;
}

// A file in memory is registered and released at once.
Status OpenModes::Probe() {
  if (std::string why = WhyNot(); !why.empty()) return Status(Code::kUnsupported, std::move(why));
  const int fd = memfd_create("tensormount-probe", MFD_CLOEXEC);
  if (fd < 0) return Status::FromErrno(errno, "make", "a file in memory");
  const Result<int> id = registrar_.Register(fd);
  close(fd);
  if (id.ok()) {
    registrar_.Unregister(id.value());
    return {};
  }
  std::string why = WhyErrno(id.status().ToErrno());
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
