// SPDX-License-Identifier: Apache-2.0
// One mount from mount to unmount: the device, threads that receive requests, threads that may
// block, the watchdog, signals. Shared state outlives the session (MountCore), because a thread
// that storage blocks cannot be ended.
#include "fs/mount/mount_session.h"

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <future>
#include <mutex>
#include <pthread.h>
#include <set>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/deadline.h"
#include "base/file_system_for.h"
#include "base/log.h"
#include "base/mapping.h"
#include "base/parallel.h"
#include "base/thread.h"
#include "fs/mount/blocking_work.h"
#include "fs/mount/fuse_backing.h"
#include "fs/mount/fuse_bridge.h"
#include "fs/mount/fuse_shim.h"
#include "fs/mount/mount_call.h"
#include "fs/mount/mount_table.h"
#include "fs/mount/open_modes.h"
#include "fs/vfs.h"
#include "fs/views/checkpoint_text.h"

namespace tensormount::fs {
namespace {

// How long Start waits until the kernel's INIT was answered.
constexpr std::chrono::seconds kStartPatience{10};
// How long Stop and Wait wait for threads that still serve when the mount is gone; stuck threads
// are left behind.
constexpr std::chrono::seconds kSessionStopPatience{5};
constexpr std::chrono::milliseconds kUnmountPatience{3000};
// Interval of the watchdog.
constexpr std::chrono::milliseconds kTick = BlockingWork::kStuckAfter;
// How long the end of a mount waits for written bytes to become durable.
constexpr std::chrono::seconds kDrainPatience{60};
constexpr int kReadaheadKiB = 1024;

// Interrupts threads in read(2) of the device; its handler does nothing.
int WakeSignal() { return SIGRTMIN + 9; }

void InstallWakeSignal() {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  sigemptyset(&action.sa_mask);
  // Without SA_RESTART, so that the signal interrupts read(2).
  sigaction(WakeSignal(), &action, nullptr);
}

// Why passthrough is impossible whatever the kernel supports; empty if it may work.
std::string ReasonAgainstPassthrough(const MountOptions& options) {
  if (options.tier == MountOptions::Tier::kDaemon) return "--tier daemon";
  if (options.verify == ServeVerify::kAlways) {
    return "--verify always: the daemon checks every read";
  }
  return PassthroughObstacle();
}

Status PassthroughError(const std::string& why) {
  return Status(Code::kUnsupported,
                "--tier passthrough: " + why + "; with --tier auto the daemon serves such files");
}

// Options of the shim. Depth 0 means that passthrough is not requested.
FuseShim::Options ShimOptions(const MountOptions& options, const std::string& source) {
  const bool pass = ReasonAgainstPassthrough(options).empty();
  return {.want_mmap = !options.page_cache,
          .passthrough_depth = pass ? PassthroughDepth(source) : 0,
          .by_libfuse = FuseBridge::LibfuseKnowsPassthrough()};
}

OpenModes::Options ModeOptions(const MountOptions& options) {
  return {.verify = options.verify == ServeVerify::kFirst,
          .disabled_reason = ReasonAgainstPassthrough(options)};
}

}  // namespace

// Everything that the threads of a mount share. Each thread holds a reference, because storage may
// block it longer than the session lives.
class MountCore : public std::enable_shared_from_this<MountCore> {
 public:
  MountCore(const MountOptions& options, std::unique_ptr<Vfs> vfs, int readers)
      : options_(options),
        readers_(readers),
        vfs_(std::move(vfs)),
        queues_(readers),
        shim_(ShimOptions(options, vfs_->source())),
        prover_([this](NodeId node) { return vfs_->CheckpointExists(node); },
                [this](const VirtualFile& file, const Status& status) {
                  vfs_->stats().Report("verify", file.label(), status);
                }),
        modes_(
            backing_, [this] { return shim_.passthrough(); }, ModeOptions(options), prover_) {}

  Status Start();
  // `failed`: Start() failed, so the mount is unmounted even if its threads have ended.
  void Stop(bool failed = false);
  Status Wait();
  std::string StatusJson();
  // Waits until no thread of the mount runs; false: storage still blocks some.
  bool WaitUntilIdle();

 private:
  void StartThread(std::function<void()> body);
  void ServeLoop();
  void WatchLoop();
  // Waits until no thread serves requests; false: some are stuck.
  bool WaitForThreads(std::chrono::nanoseconds patience);
  void SetReadahead();
  // Makes written bytes durable, on a thread that may be left behind.
  void Drain();
  std::string PassthroughJson();
  void AddMetrics(MetricsText& text);

  const MountOptions options_;
  const int readers_;
  std::string mount_point_;
  std::unique_ptr<Vfs> vfs_;
  Queues queues_;
  FuseShim shim_;
  FuseBacking backing_;
  FileProver prover_;
  OpenModes modes_;
  std::unique_ptr<FuseBridge> bridge_;
  std::string device_;
  int readahead_kib_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<pthread_t> serving_;
  bool gone_ = false;  // A thread saw that the mount is gone.
  bool stopping_ = false;
  bool work_ = false;  // The watchdog may have work.
  bool watch_ended_ = false;
};

// The order is required: the device is mounted, the bridge reads from it, threads serve it; then a
// stat of the mount point is answered, which proves that the mount works.
Status MountCore::Start() {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const host, FileSystemFor(options_.mount_point));
  TENSORMOUNT_ASSIGN_OR_RETURN(mount_point_, host->Resolve(options_.mount_point));
  TENSORMOUNT_ASSIGN_OR_RETURN(const int fd, MountFuse({.mount_point = mount_point_,
                                                        .source = vfs_->source(),
                                                        .allow_other = options_.allow_other,
                                                        .read_only = !vfs_->writable()}));
  backing_.SetDevice(fd);
  Result<std::unique_ptr<FuseBridge>> bridge =
      FuseBridge::Make(*vfs_, queues_, shim_, modes_, options_.give_up_after, fd);
  if (!bridge.ok()) {
    (void)Unmount(mount_point_, true, kUnmountPatience);
    return bridge.status();
  }
  bridge_ = std::move(bridge).value();
  if (const auto entry = FindMount(mount_point_)) device_ = entry->device;
  InstallWakeSignal();
  vfs_->SetStatus([core = weak_from_this()] {
    const auto alive = core.lock();
    return alive ? alive->StatusJson() : std::string();
  });
  vfs_->SetMetrics([core = weak_from_this()](MetricsText& text) {
    if (const auto alive = core.lock()) alive->AddMetrics(text);
  });
  // Wakes the watchdog, which sleeps while there is no work.
  for (BlockingWork* work : queues_.all()) {
    work->SetWake([this] {
      const std::lock_guard lock(mutex_);
      work_ = true;
      changed_.notify_all();
    });
  }
  // One thread more than may read data, so that one is always free to receive.
  for (int i = 0; i <= readers_; ++i) StartThread([this] { ServeLoop(); });
  Thread([self = shared_from_this()] { self->WatchLoop(); }).detach();

  std::unique_lock lock(mutex_);
  const Deadline deadline = Deadline::After(kStartPatience);
  while (!shim_.initialized() && !gone_ && !deadline.Passed()) {
    changed_.wait_for(lock, std::chrono::milliseconds(2));
  }
  if (!shim_.initialized()) {
    return Status(Code::kUnavailable, mount_point_ +
                                          ": the kernel did not initialize the new mount in time; "
                                          "`tensormount doctor` checks FUSE");
  }
  lock.unlock();
  struct stat st;
  if (stat(mount_point_.c_str(), &st) != 0) return Status::FromErrno(errno, "stat", mount_point_);
  if (options_.tier == MountOptions::Tier::kPassthrough) {
    // Files that are stored in several parts are still served by the daemon, but passthrough must
    // be possible.
    const Status possible = modes_.Probe();
    if (!possible.ok()) return PassthroughError(possible.message());
  }
  SetReadahead();
  return {};
}

void MountCore::StartThread(std::function<void()> body) {
  const std::lock_guard lock(mutex_);
  Thread thread([self = shared_from_this(), body = std::move(body)] {
    {
      const std::lock_guard started(self->mutex_);
      self->serving_.insert(pthread_self());
    }
    sigset_t wake;
    sigemptyset(&wake);
    sigaddset(&wake, WakeSignal());
    pthread_sigmask(SIG_UNBLOCK, &wake, nullptr);
    body();
    pthread_sigmask(SIG_BLOCK, &wake, nullptr);
    const std::lock_guard ended(self->mutex_);
    self->serving_.erase(pthread_self());
    self->gone_ = true;
    self->changed_.notify_all();
  });
  serving_.insert(thread.native_handle());
  thread.detach();
}

void MountCore::ServeLoop() { bridge_->Serve(); }

// Sleeps while no work is pending, so that an idle mount does not wake up.
void MountCore::WatchLoop() {
  std::unique_lock lock(mutex_);
  const auto over = [this] { return (gone_ || stopping_) && serving_.empty(); };
  while (!over()) {
    if (work_) {
      changed_.wait_for(lock, kTick, over);
    } else {
      changed_.wait(lock, [&] { return work_ || over(); });
      continue;
    }
    // work_ is cleared before the check, so that work arriving meanwhile sets it again.
    work_ = false;
    lock.unlock();
    bool none = true;
    for (BlockingWork* queue : queues_.all()) {
      (void)queue->Watch();
      none = queue->StopWatchIfIdle() && none;
    }
    lock.lock();
    work_ = work_ || !none;
  }
  watch_ended_ = true;
  changed_.notify_all();
}

// Threads block in read(2) of the device, which returns when the mount is gone or a signal
// (WakeSignal) interrupts it.
bool MountCore::WaitForThreads(std::chrono::nanoseconds patience) {
  const Deadline deadline = Deadline::After(patience);
  std::unique_lock lock(mutex_);
  while (!serving_.empty()) {
    if (deadline.Passed()) return false;
    if (bridge_->exited()) {
      // The signal is repeated, because a thread may be about to enter read(2) when the first
      // signal arrives.
      for (const pthread_t thread : serving_) pthread_kill(thread, WakeSignal());
    }
    changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
  return true;
}

// Returns when one thread has seen that the mount is gone; the others are then woken.
Status MountCore::Wait() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return gone_; });
  }
  if (!WaitForThreads(kSessionStopPatience)) {
    Log(LogLevel::kWarning,
        mount_point_ + ": unmounted, but threads of the daemon still wait for storage");
  }
  return {};
}

// Only the first caller unmounts, and only if the mount still exists. Another mount that has taken
// its place (another device number) is left alone.
void MountCore::Stop(bool failed) {
  prover_.Stop();
  if (!bridge_) return;
  bool mine = false;
  {
    const std::lock_guard lock(mutex_);
    mine = !stopping_ && (!gone_ || failed);
    stopping_ = true;
  }
  if (mine) {
    Drain();
    const auto entry = FindMount(mount_point_);
    if (entry && entry->device == device_) {
      Status status = Unmount(mount_point_, false, kUnmountPatience);
      if (status.code() == Code::kBusy) {
        Log(LogLevel::kWarning, mount_point_ + " is in use: unmounted lazily");
        status = Unmount(mount_point_, true, kUnmountPatience);
      }
      if (!status.ok()) Log(LogLevel::kError, status.ToString());
    }
    // After a lazy unmount, open files would otherwise keep the threads serving.
    bridge_->Exit();
  }
  (void)WaitForThreads(kSessionStopPatience);
}

// To be called after Stop: whether everything that refers to this object has ended, so that it may
// be destroyed.
bool MountCore::WaitUntilIdle() {
  const Deadline deadline = Deadline::After(kSessionStopPatience);
  std::unique_lock lock(mutex_);
  changed_.notify_all();
  for (;;) {
    const bool watched = bridge_ == nullptr || watch_ended_;
    if (serving_.empty() && watched && queues_.idle() && prover_.idle()) {
      return true;
    }
    if (deadline.Passed()) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
}

// Makes bytes durable that programs wrote to files which they have not closed; close(2) and
// fsync(2) report their own result.
void MountCore::Drain() {
  if (!vfs_->writable()) return;
  // Runs on a separate thread, which storage may block for good; the mount then ends without it.
  auto done = std::make_shared<std::promise<void>>();
  const std::future<void> ended = done->get_future();
  Thread([self = shared_from_this(), done] {
    const Status status = self->vfs_->Drain();
    if (!status.ok())
      Log(LogLevel::kError,
          "some data written through the mount is not durable: " + status.message());
    done->set_value();
  }).detach();
  if (ended.wait_for(kDrainPatience) != std::future_status::ready) {
    Log(LogLevel::kError,
        "storage does not answer: some data written through the mount may not be durable");
  }
}

// Sets the read-ahead of the mount, which only files in the page cache use.
void MountCore::SetReadahead() {
  if (device_.empty()) return;
  const std::string path = "/sys/class/bdi/" + device_ + "/read_ahead_kb";
  if (geteuid() == 0) {
    // INIT cannot raise the read-ahead above the system's 128 KiB. Failures are ignored: in a
    // container this file may be read-only.
    std::ofstream out(path);
    out << kReadaheadKiB << std::flush;
  }
  std::ifstream in(path);
  in >> readahead_kib_;
}

// The reasons in `counts` for not using passthrough, as a JSON object.
static std::string ReasonsJson(const OpenModes::Counts& counts) {
  std::string out;
  for (const auto& [reason, opens] : counts.reasons) {
    out += fmt::format("{}{}: {}", out.empty() ? "" : ", ", JsonString(reason), opens);
  }
  return "{" + out + "}";
}

std::string MountCore::PassthroughJson() {
  const OpenModes::Counts counts = modes_.counts();
  const std::string why = modes_.DisabledReason();
  const FileProver::Load load = prover_.load();
  return fmt::format(
      R"({{"negotiated": {}, "why_not": {}, "opens": {}, "daemon_opens": {}, "fell_back": {}, )"
      R"("reasons": {}, "live_backing_files": {}, "opens_without_hashes": {}, "verified_at_open": {}, )"
      R"("proving": {{"file": {}, "percent": {}, "waiting": {}, "proven": {}, "damaged": {}}}}})",
      shim_.passthrough(), JsonString(why), counts.passed, counts.daemon, counts.fell_back,
      ReasonsJson(counts), counts.live_backings, counts.without_hashes, counts.verified_at_open,
      JsonString(options_.allow_other ? "" : load.file), load.percent, load.waiting, load.proven,
      load.damaged);
}

void MountCore::AddMetrics(MetricsText& text) {
  using Type = MetricsText::Type;
  text.Family("mount_info", Type::kGauge, "The mount point and the tier of reads; always 1");
  text.Sample({{"mount_point", mount_point_},
               {"tier", modes_.DisabledReason().empty() ? "passthrough" : "daemon"},
               {"data_files", shim_.direct_io_mmap() ? "direct_io" : "page_cache"}},
              1);
  const std::pair<std::string_view, const BlockingWork&> queues[] = {{"reads", queues_.reads},
                                                                     {"writes", queues_.writes},
                                                                     {"syncs", queues_.syncs},
                                                                     {"opens", queues_.opens}};
  text.Family("queue_running", Type::kGauge, "Requests being served");
  for (const auto& [name, queue] : queues) text.Sample({{"queue", name}}, queue.load().running);
  text.Family("queue_waiting", Type::kGauge, "Requests waiting for a thread");
  for (const auto& [name, queue] : queues) text.Sample({{"queue", name}}, queue.load().waiting);
  text.Family("queue_oldest_seconds", Type::kGauge, "Age of the oldest unanswered request");
  for (const auto& [name, queue] : queues) {
    text.Sample({{"queue", name}}, std::chrono::duration<double>(queue.load().oldest).count());
  }
  const OpenModes::Counts counts = modes_.counts();
  text.Family("opens_total", Type::kCounter,
              "Opens of tensor files, by the tier that serves the reads");
  text.Sample({{"tier", "passthrough"}}, counts.passed);
  text.Sample({{"tier", "daemon"}}, counts.daemon);
  text.Family("opens_fell_back_total", Type::kCounter,
              "Opens that fell back from passthrough to the daemon, by reason");
  for (const auto& [reason, opens] : counts.reasons) text.Sample({{"reason", reason}}, opens);
  text.One("backing_files", Type::kGauge, "Files open with kernel passthrough",
           counts.live_backings);
  text.One("files_verified_at_open_total", Type::kCounter, "Files verified at open",
           counts.verified_at_open);
  const FileProver::Load proving = prover_.load();
  text.One("proving_waiting", Type::kGauge, "Large files waiting for verification",
           proving.waiting);
  text.One("files_proven_total", Type::kCounter, "Large files that were verified", proving.proven);
  text.One("files_damaged_total", Type::kCounter, "Large files that were found to be damaged",
           proving.damaged);
}

std::string MountCore::StatusJson() {
  const BlockingWork::Load load = queues_.reads.load();
  return fmt::format(
      R"({{{}, "mount_point": {}, "pid": {}, "tier": "{}", "data_files": "{}", )"
      R"("passthrough": {}, "libfuse": {}, "max_read": {}, "readahead_kib": {}, "threads": {}, )"
      R"("kernel_protocol": "7.{}", "reads_running": {}, "reads_waiting": {}, "oldest_ms": {}}})"
      "\n",
      vfs_->StatusFields(), JsonString(mount_point_), getpid(),
      modes_.DisabledReason().empty() ? "passthrough" : "daemon",
      shim_.direct_io_mmap() ? "direct_io" : "page_cache", PassthroughJson(),
      JsonString(FuseBridge::LibfuseVersion()), kMaxRequestBytes, readahead_kib_, readers_,
      shim_.kernel_minor(), load.running, load.waiting, load.oldest.count());
}

namespace {

void StopMount(std::shared_ptr<MountCore> core, bool failed) {
  core->Stop(failed);
  if (core->WaitUntilIdle()) return;
  Log(LogLevel::kWarning, "storage does not answer: the stopped mount keeps its memory");
  (void)new std::shared_ptr<MountCore>(std::move(core));
}

// The mount point must be an empty directory outside of the source.
Status CheckMountPoint(const std::string& path, const std::string& source) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const host, FileSystemFor(path));
  if (const auto entry = FindMount(path); entry && entry->type == kMountType) {
    return Status(Code::kBusy, "mount point " + path + ": something is mounted here already");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, host->Stat(path));
  if (info.kind != FileKind::kDirectory) {
    return Status(Code::kInvalidArgument, "mount point " + path + ": not a directory");
  }
  if (IsMountPoint(path)) {
    return Status(Code::kBusy, "mount point " + path + ": something is mounted here already");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto entries, host->List(path));
  if (!entries.empty()) {
    return Status(Code::kBusy, "mount point " + path + ": the directory is not empty");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string real, host->Resolve(path));
  if ((real + '/').starts_with(source + '/')) {
    return Status(
        Code::kInvalidArgument,
        "mount point " + path + ": the directory is inside the source that would be mounted there");
  }
  return {};
}

// Refuses a source below a directory that other users cannot enter: they must not see more through
// the mount than without it.
Status CheckAncestors(FileSystem& fs, const std::string& source) {
  std::string path = source;
  while (path.size() > 1) {
    const std::size_t slash = path.rfind('/');
    path = slash == 0 ? "/" : path.substr(0, slash);
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
    if ((info.mode & 0001) == 0) {
      return Status(Code::kPermissionDenied,
                    "allow_other refused: other users cannot enter " + path +
                        ", but could read the files below it through the mount");
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<MountSession>> MountSession::Start(FileSystem& fs,
                                                          const MountOptions& options) {
  // Reads of many short runs use mappings of data files. If another program truncates such a file,
  // the read must fail instead of killing the daemon.
  EnableMappingGuard();
  if (options.tier == MountOptions::Tier::kPassthrough) {
    const std::string why = ReasonAgainstPassthrough(options);
    if (!why.empty()) return PassthroughError(why);
  }
  if (options.allow_other && !fs.Can(Ability::kKernelFiles)) {
    return Status(Code::kUnsupported,
                  "allow_other refused: " + options.source +
                      " is not on this host, so the permissions of other users are unknown");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<Vfs> vfs,
                               Vfs::Open(fs, {.source = options.source,
                                              .list_views = options.list_views,
                                              .verify = options.verify,
                                              .map = options.map,
                                              .hf = options.hf,
                                              .writable = !options.read_only,
                                              .roots = options.roots,
                                              .other_users = options.allow_other}));
  TENSORMOUNT_RETURN_IF_ERROR(CheckMountPoint(options.mount_point, vfs->source()));
  if (options.allow_other) TENSORMOUNT_RETURN_IF_ERROR(CheckAncestors(fs, vfs->source()));
  const int cores = static_cast<int>(HostCores());
  const int readers = std::clamp(options.threads > 0 ? options.threads : cores, 2, 64);
  auto core = std::make_shared<MountCore>(options, std::move(vfs), readers);
  const Status started = core->Start();
  if (!started.ok()) {
    StopMount(std::move(core), true);
    return started;
  }
  return std::unique_ptr<MountSession>(new MountSession(std::move(core)));
}

Result<std::unique_ptr<MountSession>> MountSession::Start(const MountOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(options.source));
  return Start(*fs, options);
}

MountSession::~MountSession() { StopMount(std::move(core_), false); }

Status MountSession::Wait() { return core_->Wait(); }

void MountSession::Stop() { core_->Stop(); }

std::string MountSession::StatusJson() const { return core_->StatusJson(); }

}  // namespace tensormount::fs
