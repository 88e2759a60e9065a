// SPDX-License-Identifier: Apache-2.0
// Compares whole files with their hashes in the background, at the lowest I/O priority, so that
// their next open can use passthrough.
#include "fs/mount/file_prover.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unordered_map>

#include "base/thread.h"

namespace tensormount::fs {
namespace {

// Linux's idle I/O class: requests of such a thread come after all others.
constexpr int kIoprioWhoThread = 1;
constexpr int kIoprioIdle = 3 << 13;

// Lowers the calling thread's CPU and I/O priority. If the kernel refuses, they stay normal.
void LowerPriority() {
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
  (void)syscall(SYS_ioprio_set, kIoprioWhoThread, 0, kIoprioIdle);
}

int PercentOf(std::uint64_t done, std::uint64_t all) {
  return all == 0 ? 100
                  : static_cast<int>(static_cast<double>(done) * 100 / static_cast<double>(all));
}

}  // namespace

// State of a FileProver, shared with the detached thread, which storage may block longer than the
// prover lives.
struct FileProver::Core {
  struct Task {
    NodeId node = 0;
    std::shared_ptr<const VirtualFile> file;
    std::uint64_t done = 0;  // Bytes compared so far.
  };

  Core(Wanted w, Report r) : wanted(std::move(w)), report(std::move(r)) {}

  // The loop of the thread.
  void RunLoop();
  // Compares the file of one task. Called without the lock.
  Status Prove(const Task& task, FileStamp& stamp);
  bool ContinueProof(NodeId node, std::uint64_t done);

  const Wanted wanted;
  const Report report;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;  // The first task is in progress.
  std::unordered_map<NodeId, FileStamp> damaged;
  std::uint64_t proven = 0;
  std::uint64_t bad = 0;
  bool started = false;
  bool stopping = false;
  bool ended = false;
};

// Called between two steps of 1 MiB: ends the proof after a stop or when the checkpoint is gone.
bool FileProver::Core::ContinueProof(NodeId node, std::uint64_t done) {
  {
    const std::lock_guard lock(mutex);
    if (stopping) return false;
    tasks.front().done = std::max(tasks.front().done, done);
  }
  return !wanted || wanted(node);
}

Status FileProver::Core::Prove(const Task& task, FileStamp& stamp) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const VirtualFile::Backing backing, task.file->OpenBacking());
  stamp = task.file->StampOf(backing, backing.info);
  return task.file->Prove(backing,
                          [&](std::uint64_t done) { return ContinueProof(task.node, done); });
}

void FileProver::Core::RunLoop() {
  // In Linux each thread has its own priority, so the rest of the daemon is unaffected.
  LowerPriority();
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return stopping || !tasks.empty(); });
    if (stopping) break;
    Task task = tasks.front();
    lock.unlock();
    FileStamp stamp;
    Status status;
    try {
      status = Prove(task, stamp);
    } catch (const std::exception& e) {
      status = Status(Code::kInternal, task.file->label() + ": " + e.what());
    }
    // Not reported: a stopped proof, a file that keeps changing, and a removed checkpoint. The next
    // open of the file tries again.
    const bool tell = !status.ok() && status.code() != Code::kCancelled &&
                      status.code() != Code::kUnavailable && status.code() != Code::kStale;
    if (tell && report) report(*task.file, status);
    lock.lock();
    tasks.pop_front();
    if (status.ok()) {
      ++proven;
      damaged.erase(task.node);
    }
    if (status.code() == Code::kDataLoss) {
      ++bad;
      damaged[task.node] = stamp;
    }
    lock.unlock();
    task.file.reset();  // Without the lock, because this may close the file's checkpoint.
    lock.lock();
  }
  tasks.clear();
  ended = true;
  changed.notify_all();
}

FileProver::FileProver(Wanted wanted, Report report)
    : core_(std::make_shared<Core>(std::move(wanted), std::move(report))) {}

void FileProver::Stop() {
  const std::lock_guard lock(core_->mutex);
  core_->stopping = true;
  core_->changed.notify_all();
}

bool FileProver::idle() const {
  const std::lock_guard lock(core_->mutex);
  return !core_->started || core_->ended;
}

FileProver::~FileProver() {
  Stop();
  std::unique_lock lock(core_->mutex);
  core_->changed.wait(lock, [&] { return !core_->started || core_->ended; });
}

// Starts the thread only with the first task, because most mounts never need the thread.
void FileProver::Add(NodeId node, std::shared_ptr<const VirtualFile> file,
                     const VirtualFile::Proof& proof) {
  const std::lock_guard lock(core_->mutex);
  if (core_->stopping || core_->tasks.size() >= kMostWaiting) return;
  for (const Core::Task& task : core_->tasks) {
    if (task.node == node) return;
  }
  const std::uint64_t done = file->size() - std::min(file->size(), proof.unverified_bytes);
  core_->tasks.push_back({node, std::move(file), done});
  core_->changed.notify_all();
  if (core_->started) return;
  core_->started = true;
  Thread([core = core_] { core->RunLoop(); }).detach();
}

bool FileProver::IsKnownDamaged(NodeId node, const FileStamp& stamp) const {
  const std::lock_guard lock(core_->mutex);
  const auto known = core_->damaged.find(node);
  if (known == core_->damaged.end() || !stamp.IsUnwrittenSince(known->second)) return false;
  // IsUnwrittenSince is not transitive, so the next stamp is compared with this one.
  known->second = stamp;
  return true;
}

std::optional<int> FileProver::Percent(NodeId node) const {
  const std::lock_guard lock(core_->mutex);
  for (const Core::Task& task : core_->tasks) {
    if (task.node == node) return PercentOf(task.done, task.file->size());
  }
  return std::nullopt;
}

FileProver::Load FileProver::load() const {
  const std::lock_guard lock(core_->mutex);
  Load load{.proven = core_->proven, .damaged = core_->bad};
  if (!core_->tasks.empty()) {
    const Core::Task& first = core_->tasks.front();
    load.file = first.file->label();
    load.percent = PercentOf(first.done, first.file->size());
    load.waiting = core_->tasks.size() - 1;
  }
  return load;
}

}  // namespace tensormount::fs
