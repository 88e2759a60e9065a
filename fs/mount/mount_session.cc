// SPDX-License-Identifier: Apache-2.0
// One mount from mount to unmount: the device, threads that receive requests, threads that may
// wait, the watchdog, signals. What threads share outlives the session (MountCore), because a
// thread that storage holds cannot be ended.
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
#include <thread>
#include <unistd.h>

#include <fmt/core.h>

#include "base/deadline.h"
#include "base/log.h"
#include "base/mapping.h"
#include "base/parallel.h"
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

// Until the kernel has said hello and been answered.
constexpr std::chrono::seconds kStartPatience{10};
// For threads that still serve when the mount is gone; those that are stuck are left behind.
constexpr std::chrono::seconds kSessionStopPatience{5};
constexpr std::chrono::milliseconds kUnmountPatience{3000};
// Between two looks of the watchdog.
constexpr std::chrono::milliseconds kTick = BlockingWork::kStuckAfter;
// For what was written to be durable before a mount ends.
constexpr std::chrono::seconds kDrainPatience{60};
constexpr int kReadaheadKiB = 1024;

// Wakes threads out of read(2) on the device; its handler does nothing.
int WakeSignal() { return SIGRTMIN + 9; }

void InstallWakeSignal() {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  sigemptyset(&action.sa_mask);
  sigaction(WakeSignal(), &action, nullptr);  // Without SA_RESTART.
}

// Why nothing can be passed through whatever the kernel says; empty where it may be.
std::string ReasonAgainstPassthrough(const MountOptions& options) {
  if (options.tier == MountOptions::Tier::kDaemon) return "--tier daemon";
  if (options.verify == ServeVerify::kAlways) {
    return "--verify always: every read is checked, by the daemon";
  }
  return PassthroughObstacle();
}

Status PassthroughRefused(const std::string& why) {
  return Status(Code::kUnsupported,
                "--tier passthrough: " + why +
                    "; --tier auto passes through what it can and serves the rest");
}

// Depth 0 is not asking at all.
FuseShim::Options ShimOptions(const MountOptions& options, const std::string& source) {
  const bool pass = ReasonAgainstPassthrough(options).empty();
  return {.want_mmap = !options.page_cache,
          .passthrough_depth = pass ? PassthroughDepth(source) : 0,
          .by_libfuse = FuseBridge::LibfuseKnowsPassthrough()};
}

OpenModes::Options ModeOptions(const MountOptions& options) {
  return {.verify = options.verify == ServeVerify::kFirst,
          .refused = ReasonAgainstPassthrough(options)};
}

}  // namespace

// Everything that the threads of a mount share. They may outlive the session where storage holds
// them, so each holds this.
class MountCore : public std::enable_shared_from_this<MountCore> {
 public:
  MountCore(const MountOptions& options, std::unique_ptr<Vfs> vfs, int readers)
      : options_(options),
        readers_(readers),
        vfs_(std::move(vfs)),
        queues_(readers),
        shim_(ShimOptions(options, vfs_->source())),
        prover_([this](NodeId node) { return vfs_->IsThere(node); },
                [this](const VirtualFile& file, const Status& status) {
                  vfs_->stats().Report("verify", file.label(), status);
                }),
        modes_(
            backing_, [this] { return shim_.passthrough(); }, ModeOptions(options), prover_) {}

  Status Start();
  // `failed`: the mount never answered, whatever its threads heard.
  void Stop(bool failed = false);
  Status Wait();
  std::string StatusJson();
  // Waits until nothing of the mount runs any more; false: storage holds some of it.
  bool Idle();

 private:
  void StartThread(std::function<void()> body);
  void ServeLoop();
  void WatchLoop();
  // Waits until no thread serves any more; false: some are stuck.
  bool WaitForThreads(std::chrono::nanoseconds patience);
  void SetReadahead();
  // Makes durable what was written, on a thread that may be left behind.
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
  bool gone_ = false;  // Some thread heard that the mount is gone.
  bool stopping_ = false;
  bool work_ = false;  // There may be some for the watchdog.
  bool watch_ended_ = false;
};

// The order matters: the device is mounted first, then the bridge reads from it, then threads serve
// it, and only then can the kernel answer a stat of the mount point, which is the proof that it
// works.
Status MountCore::Start() {
  TENSORMOUNT_ASSIGN_OR_RETURN(mount_point_, HostFileSystem().Resolve(options_.mount_point));
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
  // One more than may read data: that one always listens.
  for (int i = 0; i <= readers_; ++i) StartThread([this] { ServeLoop(); });
  std::thread([self = shared_from_this()] { self->WatchLoop(); }).detach();

  std::unique_lock lock(mutex_);
  const Deadline deadline = Deadline::After(kStartPatience);
  while (!shim_.initialized() && !gone_ && !deadline.Passed()) {
    changed_.wait_for(lock, std::chrono::milliseconds(2));
  }
  if (!shim_.initialized()) {
    return Status(Code::kUnavailable, mount_point_ + ": the kernel did not greet the new mount");
  }
  lock.unlock();
  // The mount answers when this does.
  struct stat st;
  if (stat(mount_point_.c_str(), &st) != 0) return Status::FromErrno(errno, "stat", mount_point_);
  if (options_.tier == MountOptions::Tier::kPassthrough) {
    // Files that lie in pieces are the daemon's all the same; but it must be possible.
    const Status possible = modes_.Probe();
    if (!possible.ok()) return PassthroughRefused(possible.message());
  }
  SetReadahead();
  return {};
}

void MountCore::StartThread(std::function<void()> body) {
  // Signals are the business of the program, not of these threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  // But for those that a thread raises itself: blocked, they end the process whatever handler there
  // is, and the one of SIGBUS answers EIO (base/mapping.h).
  for (const int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, own);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const std::lock_guard lock(mutex_);
  std::thread thread([self = shared_from_this(), body = std::move(body)] {
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
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void MountCore::ServeLoop() { bridge_->Serve(); }

// Sleeps while no work is pending: a mount that nobody uses does not wake up.
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
    work_ = false;  // Before asking: what comes in between sets it again.
    lock.unlock();
    bool none = true;
    for (BlockingWork* queue : queues_.all()) {
      (void)queue->Watch();
      none = queue->Unwatched() && none;
    }
    lock.lock();
    work_ = work_ || !none;
  }
  watch_ended_ = true;
  changed_.notify_all();
}

// Threads block in read(2) of the device. It returns when the mount is gone, or when a signal
// interrupts it; the handler of WakeSignal does nothing but that.
bool MountCore::WaitForThreads(std::chrono::nanoseconds patience) {
  const Deadline deadline = Deadline::After(patience);
  std::unique_lock lock(mutex_);
  while (!serving_.empty()) {
    if (deadline.Passed()) return false;
    if (bridge_->exited()) {
      // Again and again: a thread may be on its way into read(2) when the first one comes.
      for (const pthread_t thread : serving_) pthread_kill(thread, WakeSignal());
    }
    changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
  return true;
}

// One thread that hears that the mount is gone is enough to know; the others are then woken.
Status MountCore::Wait() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return gone_; });
  }
  if (!WaitForThreads(kSessionStopPatience)) {
    Log(LogLevel::kWarning, mount_point_ + ": unmounted; left threads behind that storage holds");
  }
  return {};
}

// Only the first caller unmounts, and nobody does where the mount is gone already. A mount of
// somebody else that has taken the place (another device number) is left alone.
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
    // A lazy unmount would let those serve on who have files open.
    bridge_->Exit();
  }
  (void)WaitForThreads(kSessionStopPatience);
}

// Asked after Stop: whether everything that refers to this has ended, so that it may be destroyed.
bool MountCore::Idle() {
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

// Programs were told by close(2) or fsync(2) whether their bytes are durable. This is for what was
// written and not closed.
void MountCore::Drain() {
  if (!vfs_->writable()) return;
  // On a thread of its own: storage may hold it for good, and then the mount ends without it.
  auto done = std::make_shared<std::promise<void>>();
  const std::future<void> ended = done->get_future();
  std::thread([self = shared_from_this(), done] {
    const Status status = self->vfs_->Drain();
    if (!status.ok())
      Log(LogLevel::kError, "not all that was written is safe: " + status.message());
    done->set_value();
  }).detach();
  if (ended.wait_for(kDrainPatience) != std::future_status::ready) {
    Log(LogLevel::kError, "storage does not answer: not all that was written is safe");
  }
}

// Only for files that are served through the page cache; others are read past it.
void MountCore::SetReadahead() {
  if (device_.empty()) return;
  const std::string path = "/sys/class/bdi/" + device_ + "/read_ahead_kb";
  if (geteuid() == 0) {
    // INIT cannot raise it over the system's 128 KiB. A container may not allow it: then not.
    std::ofstream out(path);
    out << kReadaheadKiB << std::flush;
  }
  std::ifstream in(path);
  in >> readahead_kib_;
}

// The fallbacks of `counts` as a JSON object.
static std::string ReasonsJson(const OpenModes::Counts& counts) {
  std::string out;
  for (const auto& [reason, opens] : counts.reasons) {
    out += fmt::format("{}{}: {}", out.empty() ? "" : ", ", JsonString(reason), opens);
  }
  return "{" + out + "}";
}

std::string MountCore::PassthroughJson() {
  const OpenModes::Counts counts = modes_.counts();
  const std::string why = modes_.WhyNot();
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
  text.Family("mount_info", Type::kGauge, "Where and how it is mounted; always 1");
  text.Sample({{"mount_point", mount_point_},
               {"tier", modes_.WhyNot().empty() ? "passthrough" : "daemon"},
               {"data_files", shim_.direct_io_mmap() ? "direct_io" : "page_cache"}},
              1);
  const std::pair<std::string_view, const BlockingWork&> queues[] = {{"reads", queues_.reads},
                                                                     {"writes", queues_.writes},
                                                                     {"syncs", queues_.syncs},
                                                                     {"opens", queues_.opens}};
  text.Family("queue_running", Type::kGauge, "Requests that threads work on");
  for (const auto& [name, queue] : queues) text.Sample({{"queue", name}}, queue.load().running);
  text.Family("queue_waiting", Type::kGauge, "Requests that wait for a thread");
  for (const auto& [name, queue] : queues) text.Sample({{"queue", name}}, queue.load().waiting);
  text.Family("queue_oldest_seconds", Type::kGauge,
              "How long the oldest request that is not answered has waited");
  for (const auto& [name, queue] : queues) {
    text.Sample({{"queue", name}}, std::chrono::duration<double>(queue.load().oldest).count());
  }
  const OpenModes::Counts counts = modes_.counts();
  text.Family("opens_total", Type::kCounter, "Opens of tensor files, by who then reads them");
  text.Sample({{"tier", "passthrough"}}, counts.passed);
  text.Sample({{"tier", "daemon"}}, counts.daemon);
  text.Family("opens_fell_back_total", Type::kCounter,
              "Opens that the kernel might have served, by the reason why it did not");
  for (const auto& [reason, opens] : counts.reasons) text.Sample({{"reason", reason}}, opens);
  text.One("backing_files", Type::kGauge, "Files that the kernel reads itself now",
           counts.live_backings);
  text.One("files_verified_at_open_total", Type::kCounter, "Files that were verified at an open",
           counts.verified_at_open);
  const FileProver::Load proving = prover_.load();
  text.One("proving_waiting", Type::kGauge, "Large files that wait to be verified",
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
      modes_.WhyNot().empty() ? "passthrough" : "daemon",
      shim_.direct_io_mmap() ? "direct_io" : "page_cache", PassthroughJson(),
      JsonString(FuseBridge::LibfuseVersion()), kMaxRequestBytes, readahead_kib_, readers_,
      shim_.kernel_minor(), load.running, load.waiting, load.oldest.count());
}

namespace {

void Leave(std::shared_ptr<MountCore> core, bool failed) {
  core->Stop(failed);
  if (core->Idle()) return;
  Log(LogLevel::kWarning, "storage does not answer: left a stopped mount in memory");
  (void)new std::shared_ptr<MountCore>(std::move(core));
}

// A fresh and empty folder, outside of what it is to show.
Status CheckMountPoint(const std::string& path, const std::string& source) {
  FileSystem& host = HostFileSystem();
  if (const auto entry = FindMount(path); entry && entry->type == kMountType) {
    return Status(Code::kBusy, "mount point " + path + ": something is mounted here already");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, host.Stat(path));
  if (info.kind != FileKind::kDirectory) {
    return Status(Code::kInvalidArgument, "mount point " + path + ": not a folder");
  }
  if (IsMountPoint(path)) {
    return Status(Code::kBusy, "mount point " + path + ": something is mounted here already");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto entries, host.List(path));
  if (!entries.empty()) {
    return Status(Code::kBusy, "mount point " + path + ": the folder is not empty");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string real, host.Resolve(path));
  if ((real + '/').starts_with(source + '/')) {
    return Status(Code::kInvalidArgument, "mount point " + path + ": lies in what is mounted");
  }
  return {};
}

// Others shall see no more through the mount than they could without it.
Status CheckAncestors(FileSystem& fs, const std::string& source) {
  std::string path = source;
  while (path.size() > 1) {
    const std::size_t slash = path.rfind('/');
    path = slash == 0 ? "/" : path.substr(0, slash);
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
    if ((info.mode & 0001) == 0) {
      return Status(Code::kPermissionDenied,
                    "allow_other refused: " + path +
                        " is closed to others, who would see through the mount what lies below it");
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<MountSession>> MountSession::Start(FileSystem& fs,
                                                          const MountOptions& options) {
  // Reads of many short runs go through mappings of data files, which somebody may cut short.
  EnableMappingGuard();
  if (options.tier == MountOptions::Tier::kPassthrough) {
    const std::string why = ReasonAgainstPassthrough(options);
    if (!why.empty()) return PassthroughRefused(why);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<Vfs> vfs,
                               Vfs::Open(fs, {.source = options.source,
                                              .list_views = options.list_views,
                                              .verify = options.verify,
                                              .map = options.map,
                                              .hf = options.hf,
                                              .writable = !options.read_only,
                                              .roots = options.roots,
                                              .others = options.allow_other}));
  TENSORMOUNT_RETURN_IF_ERROR(CheckMountPoint(options.mount_point, vfs->source()));
  if (options.allow_other) TENSORMOUNT_RETURN_IF_ERROR(CheckAncestors(fs, vfs->source()));
  const int cores = static_cast<int>(HostCores());
  const int readers = std::clamp(options.threads > 0 ? options.threads : cores, 2, 64);
  auto core = std::make_shared<MountCore>(options, std::move(vfs), readers);
  const Status started = core->Start();
  if (!started.ok()) {
    Leave(std::move(core), true);
    return started;
  }
  return std::unique_ptr<MountSession>(new MountSession(std::move(core)));
}

MountSession::~MountSession() { Leave(std::move(core_), false); }

Status MountSession::Wait() { return core_->Wait(); }

void MountSession::Stop() { core_->Stop(); }

std::string MountSession::StatusJson() const { return core_->StatusJson(); }

}  // namespace tensormount::fs
