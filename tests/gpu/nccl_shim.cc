// SPDX-License-Identifier: Apache-2.0
// NCCL's entry points over host memory, between ranks that are threads of one process: a shared
// library that gpu/nccl_library.h opens in place of NCCL, where there is no GPU, or only one. It
// proves our state machine, not NCCL. What it assumes of NCCL, by what its User Guide and the
// comments of its header say of 2.14 to 2.32:
//
// ncclGetVersion          major * 10000 + minor * 100 + patch. [API, "ncclGetVersion"]
// ncclGetUniqueId         128 bytes, good for one communicator, that the application hands to the
//                         other ranks. [API, "ncclGetUniqueId"]
// ncclCommInitRankConfig  with blocking = 0 it returns ncclInProgress, the communicator exists and
//                         must be asked with ncclCommGetAsyncError until it is no longer in
//                         progress; it ends when all ranks have come. [Usage, "Creating a
//                         communicator with options"; API, "ncclConfig_t"]. Two ranks on one device
//                         are an invalid usage, found while it connects. [Usage, "Creating a
//                         communicator": one rank a device; the words are those of its log]
// ncclCommGetAsyncError   ncclInProgress while something that was called goes on; an error stays.
//                         [API, "ncclCommGetAsyncError"; Usage, "Fault tolerance"]
// ncclGroupStart/End      all calls between are one operation and go on side by side; the calls may
//                         return ncclInProgress, and nothing of them is sure to be on the stream
//                         until the communicator is no longer in progress. A thread's own. [Usage,
//                         "Group calls", "Nonblocking group operation"]
// ncclSend, ncclRecv      no tags: of one pair in order; they meet with the same count and type;
//                         "blocking for the GPU", so that groups of one stream go one after the
//                         other. [API, "Point to point"; Usage, same]. What happens where counts
//                         differ is not said: here they never meet.
// ncclCommFinalize        of a communicator without errors, once nothing is under way; asked until
//                         it is no longer in progress, then destroyed. [API, "ncclCommFinalize"]
// ncclCommDestroy         frees what finalize left. [API, "ncclCommDestroy"]
// ncclCommAbort           ends what is on the device and frees the communicator, which must not be
//                         used again, not even asked. It is called for each rank; others are not
//                         told. [API, "ncclCommAbort"; Usage, "Fault tolerance"]. That it may wait
//                         for ranks of the same machine is played by a fault.
// ncclCommRevoke          stops what is in flight; in progress until it is quiet; no finalize after
//                         it. [the header's comment, 2.29 on]. That abort may follow is assumed:
//                         the header says destroy, split and shrink.
// ncclCommSuspend/Resume  of this rank alone, not to be used in between. [the header's comment].
//                         That both are asked for with ncclCommGetAsyncError is assumed.
// ncclGetErrorString, ncclGetLastError   texts. [API, same names]
//
// current device          of each call that of the communicator, which is that of its init. [Usage,
//                         "Creating a communicator"; that the others need it is assumed]
//
// Streams are the shim's own, or those of the driver of the tests (fake_cuda.h) where the process
// has that: data is then memory of its devices, and current is what it calls so.
//
// Left out: collectives, windows and one-sided calls, split, shrink and grow, which we do not call.
// With NCCL_SHIM_OLD it is a version without revoke, suspend and resume.
#include "tests/gpu/nccl_shim.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/nccl_api.h"
#include "tests/gpu/fake_cuda.h"

#if defined(NCCL_SHIM_OLD)
#define NCCL_SHIM_VERSION 21403
#else
#define NCCL_SHIM_VERSION 23203
#endif

using tensormount::gpu::NcclConfig;
using tensormount::gpu::NcclDataType;
using tensormount::gpu::NcclResult;
using tensormount::gpu::NcclUniqueId;

namespace tensormount::gpu {

struct NcclComm {
  virtual ~NcclComm() = default;
};

}  // namespace tensormount::gpu

using tensormount::gpu::NcclComm;

namespace {

constexpr int kOwnDevice = -1;
// A wait of the shim ends by being told; this is only for sleeps of its faults.
constexpr auto kLongSleep = std::chrono::milliseconds(20);

// The driver of the tests; null where the process has none.
const tensormount::FakeCuda* Fake() {
  static std::atomic<const tensormount::FakeCuda*> found{nullptr};
  if (found == nullptr) {
    void* const driver =
        ::dlopen(tensormount::gpu::cuda::kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (driver == nullptr) return nullptr;
    const auto entry = reinterpret_cast<const tensormount::FakeCuda* (*)()>(
        ::dlsym(driver, tensormount::kFakeCudaControl));
    if (entry != nullptr) found = entry();
  }
  return found;
}
int CurrentOfDriver() {
  const tensormount::FakeCuda* const fake = Fake();
  return fake == nullptr ? kOwnDevice : fake->current_device();
}

// Faults and counts, of all communicators of the process.
class ShimState {
 public:
  struct Outcome {
    int action = 0;
    int value = 0;
  };

  static ShimState& Get() {
    static auto* const state = new ShimState;  // Never destroyed: threads may outlive main.
    return *state;
  }

  void Add(const NcclShimFault& fault) {
    std::lock_guard lock(mutex_);
    faults_.push_back({fault.call, fault.rank, fault.at, fault.action, fault.value});
  }
  void ClearFaults() {
    std::lock_guard lock(mutex_);
    faults_.clear();
  }
  void Reset() {
    std::lock_guard lock(mutex_);
    faults_.clear();
    calls_.clear();
    by_rank_.clear();
    misuse_.clear();
    largest_ = 0;
    ++life_;
    changed_.notify_all();
  }
  // Counts the call, sleeps where it is to be late, and says what else befalls it.
  Outcome Called(const std::string& call, int rank) {
    std::unique_lock lock(mutex_);
    ++calls_[call];
    const int number = ++by_rank_[{call, rank}];
    Outcome outcome;
    for (const Fault& fault : faults_) {
      if (fault.call != call || (fault.rank >= 0 && fault.rank != rank)) continue;
      if (fault.at == 0 || fault.at == number) outcome = {fault.action, fault.value};
    }
    if (outcome.action == kNcclShimDelay) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(outcome.value));
    }
    return outcome;
  }
  void Misuse(const std::string& what) {
    std::lock_guard lock(mutex_);
    if (misuse_.empty()) misuse_ = what;
  }
  // Until Reset.
  void Hang() {
    std::unique_lock lock(mutex_);
    const int life = life_;
    while (life_ == life) changed_.wait_for(lock, kLongSleep);
  }
  int Calls(const std::string& call) {
    std::lock_guard lock(mutex_);
    return calls_[call];
  }
  const char* misuse() {
    std::lock_guard lock(mutex_);
    thread_local std::string said;
    said = misuse_;
    return said.c_str();
  }
  void Sent(std::uint64_t count) {
    std::lock_guard lock(mutex_);
    largest_ = std::max(largest_, count);
  }
  std::uint64_t largest() {
    std::lock_guard lock(mutex_);
    return largest_;
  }

  std::atomic<int> live{0};
  std::atomic<std::uint64_t> ids{0};

 private:
  struct Fault {
    std::string call;
    int rank;
    int at;
    int action;
    int value;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Fault> faults_;
  std::map<std::string, int> calls_;
  std::map<std::pair<std::string, int>, int> by_rank_;
  std::string misuse_;
  std::uint64_t largest_ = 0;
  int life_ = 0;
};

// Does what it is given later, in order, on a thread of its own: a stream, and what NCCL does
// behind a call that returned.
class ShimQueue {
 public:
  ShimQueue() : thread_([this] { Run(); }) {}
  ~ShimQueue() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void Give(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
      ++given_;
    }
    changed_.notify_all();
  }
  std::uint64_t given() {
    std::lock_guard lock(mutex_);
    return given_;
  }
  bool Did(std::uint64_t count) {
    std::lock_guard lock(mutex_);
    return done_ >= count;
  }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stop_ || !work_.empty(); });
      if (work_.empty()) return;
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++done_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::uint64_t given_ = 0;
  std::uint64_t done_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

// Streams of ShimQueue; all others are the driver's.
class OwnStreams {
 public:
  static OwnStreams& Get() {
    static auto* const streams = new OwnStreams;
    return *streams;
  }
  void Add(void* stream) {
    std::lock_guard lock(mutex_);
    streams_.insert(stream);
  }
  void Remove(void* stream) {
    std::lock_guard lock(mutex_);
    streams_.erase(stream);
  }
  bool Has(void* stream) {
    std::lock_guard lock(mutex_);
    return streams_.count(stream) != 0;
  }

 private:
  std::mutex mutex_;
  std::set<void*> streams_;
};

struct ShimOp {
  bool sends = false;
  int peer = 0;
  std::byte* data = nullptr;
  std::uint64_t count = 0;
  bool hangs = false;
  bool done = false;  // Under the clique's lock.
};

// The ranks of one id.
struct ShimClique {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int> devices;  // Of those who came, by rank.
  int came = 0;
  // By sender and receiver.
  std::map<std::pair<int, int>, std::deque<ShimOp*>> sends;
  std::map<std::pair<int, int>, std::deque<ShimOp*>> receives;

  void Meet(const std::pair<int, int>& pair) {
    auto& from = sends[pair];
    auto& to = receives[pair];
    while (!from.empty() && !to.empty() && from.front()->count == to.front()->count) {
      std::memcpy(to.front()->data, from.front()->data, from.front()->count);
      to.front()->done = from.front()->done = true;
      from.pop_front();
      to.pop_front();
    }
  }
};

std::shared_ptr<ShimClique> CliqueOf(const NcclUniqueId& id, int ranks) {
  static std::mutex mutex;
  static auto* const cliques = new std::map<std::string, std::weak_ptr<ShimClique>>;
  std::lock_guard lock(mutex);
  auto& kept = (*cliques)[std::string(id.internal, sizeof(id.internal))];
  std::shared_ptr<ShimClique> clique = kept.lock();
  if (clique == nullptr) {
    clique = std::make_shared<ShimClique>();
    clique->devices.assign(static_cast<std::size_t>(ranks), kOwnDevice);
    kept = clique;
  }
  return clique;
}

// What outlives the handle: work on streams may still hold it.
class ShimComm {
 public:
  // `device`: which it is of; `current`: of the driver, where that has one.
  ShimComm(std::shared_ptr<ShimClique> clique, int ranks, int rank, int device, int current)
      : clique_(std::move(clique)),
        ranks_(ranks),
        rank_(rank),
        device_(device),
        current_(current) {}

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int current() const { return current_; }
  bool suspended = false;  // Of the caller's thread.
  bool finalized = false;

  NcclResult State() {
    std::lock_guard lock(clique_->mutex);
    if (error_ != NcclResult::kSuccess) return error_;
    return busy_ > 0 ? NcclResult::kInProgress : NcclResult::kSuccess;
  }
  bool Gone() {
    std::lock_guard lock(clique_->mutex);
    return stopped_;
  }
  std::string LastError() {
    std::lock_guard lock(clique_->mutex);
    return last_error_;
  }
  void SetError(NcclResult error, const std::string& words) {
    std::lock_guard lock(clique_->mutex);
    error_ = error;
    last_error_ = words;
    clique_->changed.notify_all();
  }
  void Busy(int more) {
    std::lock_guard lock(clique_->mutex);
    busy_ += more;
  }

  void Join() {
    std::unique_lock lock(clique_->mutex);
    ++clique_->came;
    clique_->devices[static_cast<std::size_t>(rank_)] = device_;
    clique_->changed.notify_all();
    clique_->changed.wait(lock, [&] { return stopped_ || clique_->came == ranks_; });
    for (int r = 0; r < ranks_ && !stopped_; ++r) {
      if (r == rank_ || device_ == kOwnDevice) continue;
      if (clique_->devices[static_cast<std::size_t>(r)] != device_) continue;
      error_ = NcclResult::kInvalidUsage;
      last_error_ = "Duplicate GPU detected : rank " + std::to_string(std::min(r, rank_)) +
                    " and rank " + std::to_string(std::max(r, rank_)) + " both on CUDA device " +
                    std::to_string(device_);
    }
  }

  // As a kernel on the stream does: until all of them are done, or the communicator is stopped.
  void RunGroup(std::vector<ShimOp>& ops) {
    std::unique_lock lock(clique_->mutex);
    if (stopped_) return;
    ++running_;
    for (ShimOp& op : ops) {
      if (op.hangs) continue;
      const std::pair<int, int> pair =
          op.sends ? std::pair(rank_, op.peer) : std::pair(op.peer, rank_);
      (op.sends ? clique_->sends : clique_->receives)[pair].push_back(&op);
      clique_->Meet(pair);
    }
    clique_->changed.notify_all();
    clique_->changed.wait(lock, [&] {
      return stopped_ ||
             std::all_of(ops.begin(), ops.end(), [](const auto& op) { return op.done; });
    });
    for (ShimOp& op : ops) {
      for (auto* queues : {&clique_->sends, &clique_->receives}) {
        for (auto& [pair, queue] : *queues) std::erase(queue, &op);
      }
    }
    --running_;
    clique_->changed.notify_all();
  }

  // After this nothing of it touches memory.
  void StopAll() {
    std::unique_lock lock(clique_->mutex);
    stopped_ = true;
    clique_->changed.notify_all();
    clique_->changed.wait(lock, [&] { return running_ == 0; });
  }

  ShimQueue& host() { return *host_; }
  // On the caller's thread: that of the queue may hold the last pointer to this.
  void EndHost() { host_.reset(); }

 private:
  const std::shared_ptr<ShimClique> clique_;
  const int ranks_;
  const int rank_;
  const int device_;
  const int current_;
  // Under the clique's lock.
  NcclResult error_ = NcclResult::kSuccess;
  std::string last_error_;
  int busy_ = 0;     // Calls that are in progress.
  int running_ = 0;  // Groups on streams.
  bool stopped_ = false;
  std::unique_ptr<ShimQueue> host_ = std::make_unique<ShimQueue>();
};

struct ShimHandle final : NcclComm {
  explicit ShimHandle(std::shared_ptr<ShimComm> c) : comm(std::move(c)) { ++ShimState::Get().live; }
  ~ShimHandle() override { --ShimState::Get().live; }
  const std::shared_ptr<ShimComm> comm;
};

std::shared_ptr<ShimComm> Of(NcclComm* comm) { return static_cast<ShimHandle*>(comm)->comm; }

// Whose device must be current.
ShimState::Outcome CalledOf(const char* call, ShimComm& comm) {
  if (comm.current() != kOwnDevice && comm.current() != CurrentOfDriver()) {
    ShimState::Get().Misuse(std::string(call) + " with another current device");
  }
  return ShimState::Get().Called(call, comm.rank());
}

// Begins what a call goes on with after it returned, on the communicator's own thread.
NcclResult GoOn(const std::shared_ptr<ShimComm>& comm, const ShimState::Outcome& outcome,
                std::function<void()> work) {
  comm->Busy(1);
  comm->host().Give([comm, outcome, work = std::move(work)] {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (outcome.action == kNcclShimHang) return;  // In progress for ever.
    work();
    if (outcome.action == kNcclShimAsyncError) {
      comm->SetError(static_cast<NcclResult>(outcome.value), "a fault of the shim");
    }
    comm->Busy(-1);
  });
  return NcclResult::kInProgress;
}

struct ShimGroup {
  int depth = 0;
  std::shared_ptr<ShimComm> comm;
  void* stream = nullptr;
  std::vector<ShimOp> ops;
};
thread_local ShimGroup shim_group;
thread_local int shim_device = kOwnDevice;

NcclResult Transfer(const char* call, bool sends, void* data, std::size_t count, NcclDataType type,
                    int peer, NcclComm* handle, void* stream) {
  const auto comm = Of(handle);
  ShimState& shim = ShimState::Get();
  const auto outcome = CalledOf(call, *comm);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  if (type != NcclDataType::kUint8 || peer < 0 || peer >= comm->ranks() || data == nullptr ||
      stream == nullptr) {
    return NcclResult::kInvalidArgument;
  }
  if (shim_group.depth == 0) shim.Misuse(std::string(call) + " outside of a group");
  if (comm->suspended) shim.Misuse(std::string(call) + " on a suspended communicator");
  if (comm->State() == NcclResult::kInProgress) {
    shim.Misuse(std::string(call) + " while the communicator is in progress");
  }
  if (sends) shim.Sent(count);
  shim_group.comm = comm;
  shim_group.stream = stream;
  const bool own = OwnStreams::Get().Has(stream);
  shim_group.ops.push_back({.sends = sends,
                            .peer = peer,
                            .data = own ? static_cast<std::byte*>(data) : Fake()->reveal(data),
                            .count = count,
                            .hangs = outcome.action == kNcclShimHang});
  if (outcome.action == kNcclShimAsyncError) {
    comm->SetError(static_cast<NcclResult>(outcome.value), "a fault of the shim");
  }
  return NcclResult::kSuccess;
}

}  // namespace

#define NCCL_SHIM_EXPORT extern "C" __attribute__((visibility("default")))

NCCL_SHIM_EXPORT NcclResult ncclGetVersion(int* version) {
  *version = NCCL_SHIM_VERSION;
  return NcclResult::kSuccess;
}

NCCL_SHIM_EXPORT const char* ncclGetErrorString(NcclResult result) {
  switch (result) {
    case NcclResult::kRemoteError:
      return "remote process exited or there was a network error";
    case NcclResult::kInvalidUsage:
      return "invalid usage";
    default:
      return "some error";
  }
}

NCCL_SHIM_EXPORT const char* ncclGetLastError(NcclComm* comm) {
  thread_local std::string said;
  said = comm == nullptr ? "" : Of(comm)->LastError();
  return said.c_str();
}

NCCL_SHIM_EXPORT NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  const auto outcome = ShimState::Get().Called("ncclGetUniqueId", 0);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  std::memset(id->internal, 0x5a, sizeof(id->internal));
  const std::uint64_t number = ++ShimState::Get().ids;
  std::memcpy(id->internal, &number, sizeof(number));
  return NcclResult::kSuccess;
}

NCCL_SHIM_EXPORT NcclResult ncclCommInitRankConfig(NcclComm** out, int ranks, NcclUniqueId id,
                                                   int rank, NcclConfig* config) {
  const auto outcome = ShimState::Get().Called("ncclCommInitRankConfig", rank);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  if (config == nullptr || config->magic != NcclConfig::kMagic || config->version < 21400 ||
      config->size < sizeof(NcclConfig) || config->blocking != 0 || rank < 0 || rank >= ranks) {
    return NcclResult::kInvalidArgument;  // The shim has no blocking form.
  }
  const int current = CurrentOfDriver();
  auto comm = std::make_shared<ShimComm>(
      CliqueOf(id, ranks), ranks, rank, shim_device == kOwnDevice ? current : shim_device, current);
  *out = new ShimHandle(comm);
  return GoOn(comm, outcome, [comm] { comm->Join(); });
}

NCCL_SHIM_EXPORT NcclResult ncclCommGetAsyncError(NcclComm* comm, NcclResult* error) {
  const auto outcome = CalledOf("ncclCommGetAsyncError", *Of(comm));
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  *error = Of(comm)->State();
  return NcclResult::kSuccess;
}

NCCL_SHIM_EXPORT NcclResult ncclCommFinalize(NcclComm* handle) {
  const auto comm = Of(handle);
  ShimState& shim = ShimState::Get();
  const auto outcome = CalledOf("ncclCommFinalize", *comm);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  if (comm->State() != NcclResult::kSuccess) shim.Misuse("ncclCommFinalize after an error");
  if (comm->Gone()) shim.Misuse("ncclCommFinalize after ncclCommRevoke");
  if (comm->suspended) shim.Misuse("ncclCommFinalize on a suspended communicator");
  comm->finalized = true;
  return GoOn(comm, outcome, [] {});
}

NCCL_SHIM_EXPORT NcclResult ncclCommDestroy(NcclComm* handle) {
  const auto comm = Of(handle);
  ShimState& shim = ShimState::Get();
  CalledOf("ncclCommDestroy", *comm);
  if (!comm->finalized || comm->State() != NcclResult::kSuccess) {
    shim.Misuse("ncclCommDestroy of a communicator that is not finalized");
  }
  comm->StopAll();
  comm->EndHost();
  delete static_cast<ShimHandle*>(handle);
  return NcclResult::kSuccess;
}

NCCL_SHIM_EXPORT NcclResult ncclCommAbort(NcclComm* handle) {
  const auto comm = Of(handle);
  const auto outcome = CalledOf("ncclCommAbort", *comm);
  if (outcome.action == kNcclShimHang) ShimState::Get().Hang();
  comm->StopAll();
  comm->EndHost();
  delete static_cast<ShimHandle*>(handle);
  return NcclResult::kSuccess;
}

NCCL_SHIM_EXPORT NcclResult ncclGroupStart() {
  ++shim_group.depth;
  return NcclResult::kSuccess;
}

NCCL_SHIM_EXPORT NcclResult ncclGroupEnd() {
  if (--shim_group.depth > 0) return NcclResult::kSuccess;
  const ShimGroup group = std::exchange(shim_group, {});
  if (group.comm == nullptr) return NcclResult::kSuccess;
  const auto outcome = CalledOf("ncclGroupEnd", *group.comm);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  return GoOn(group.comm, outcome, [comm = group.comm, stream = group.stream, ops = group.ops] {
    const auto work = [comm, ops]() mutable { comm->RunGroup(ops); };
    if (OwnStreams::Get().Has(stream)) {
      static_cast<ShimQueue*>(stream)->Give(work);
    } else {
      Fake()->enqueue(comm->current(), stream, work);
    }
  });
}

NCCL_SHIM_EXPORT NcclResult ncclSend(const void* data, std::size_t count, NcclDataType type,
                                     int peer, NcclComm* comm, void* stream) {
  return Transfer("ncclSend", true, const_cast<void*>(data), count, type, peer, comm, stream);
}

NCCL_SHIM_EXPORT NcclResult ncclRecv(void* data, std::size_t count, NcclDataType type, int peer,
                                     NcclComm* comm, void* stream) {
  return Transfer("ncclRecv", false, data, count, type, peer, comm, stream);
}

#if !defined(NCCL_SHIM_OLD)
NCCL_SHIM_EXPORT NcclResult ncclCommRevoke(NcclComm* handle, int flags) {
  const auto comm = Of(handle);
  const auto outcome = CalledOf("ncclCommRevoke", *comm);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  if (flags != 0) return NcclResult::kInvalidArgument;
  return GoOn(comm, outcome, [comm] { comm->StopAll(); });
}

NCCL_SHIM_EXPORT NcclResult ncclCommSuspend(NcclComm* handle, int flags) {
  const auto comm = Of(handle);
  const auto outcome = CalledOf("ncclCommSuspend", *comm);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  if (flags != tensormount::gpu::kNcclSuspendMemory) return NcclResult::kInvalidArgument;
  if (comm->suspended) ShimState::Get().Misuse("ncclCommSuspend twice");
  comm->suspended = true;
  return GoOn(comm, outcome, [] {});
}

NCCL_SHIM_EXPORT NcclResult ncclCommResume(NcclComm* handle) {
  const auto comm = Of(handle);
  const auto outcome = CalledOf("ncclCommResume", *comm);
  if (outcome.action == kNcclShimError) return static_cast<NcclResult>(outcome.value);
  if (!comm->suspended || comm->State() != NcclResult::kSuccess) {
    ShimState::Get().Misuse("ncclCommResume of what is not suspended yet");
  }
  comm->suspended = false;
  return GoOn(comm, outcome, [] {});
}
#endif

NCCL_SHIM_EXPORT void nccl_shim_add_fault(const NcclShimFault* fault) {
  ShimState::Get().Add(*fault);
}
NCCL_SHIM_EXPORT void nccl_shim_clear_faults(void) { ShimState::Get().ClearFaults(); }
NCCL_SHIM_EXPORT void nccl_shim_reset(void) { ShimState::Get().Reset(); }
NCCL_SHIM_EXPORT int nccl_shim_calls(const char* call) { return ShimState::Get().Calls(call); }
NCCL_SHIM_EXPORT int nccl_shim_live(void) { return ShimState::Get().live; }
NCCL_SHIM_EXPORT const char* nccl_shim_misuse(void) { return ShimState::Get().misuse(); }
NCCL_SHIM_EXPORT std::uint64_t nccl_shim_largest(void) { return ShimState::Get().largest(); }
NCCL_SHIM_EXPORT void nccl_shim_set_device(int device) { shim_device = device; }
NCCL_SHIM_EXPORT void* nccl_shim_stream_create(void) {
  auto* const stream = new ShimQueue;
  OwnStreams::Get().Add(stream);
  return stream;
}
NCCL_SHIM_EXPORT void nccl_shim_stream_destroy(void* stream) {
  OwnStreams::Get().Remove(stream);
  delete static_cast<ShimQueue*>(stream);
}
NCCL_SHIM_EXPORT std::uint64_t nccl_shim_stream_mark(void* stream) {
  return static_cast<ShimQueue*>(stream)->given();
}
NCCL_SHIM_EXPORT int nccl_shim_stream_done(void* stream, std::uint64_t mark) {
  return static_cast<ShimQueue*>(stream)->Did(mark) ? 1 : 0;
}
