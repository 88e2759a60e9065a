// SPDX-License-Identifier: Apache-2.0
// The NCCL mover: a polled state machine. Only Close blocks.
//
//   kNone -- id, ncclCommInitRankConfig --> kConnecting -- no longer in progress --> kReady
//   kReady -- Release, ncclCommSuspend --> kSuspending --> kSuspended
//   kSuspended -- Prepare, ncclCommResume --> kResuming --> kReady
//   kReady -- Release, no suspend --> kEnding (a thread: finalize, destroy) --> kNone
//   any but kNone -- Stop --> kEnding (a thread: revoke, abort)
#include "gpu/nccl_link.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/thread.h"

namespace tensormount::gpu {
namespace {

constexpr std::chrono::milliseconds kEndPause{1};
// Limit for ncclCommFinalize, which may wait for ranks still in their exchange.
constexpr std::chrono::seconds kFinishLimit{30};

// Ends a communicator on its own thread, because these calls block on the device and on other
// ranks.
class NcclEnding {
 public:
  enum class How { kFinish, kAbort };

  NcclEnding(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<NcclStream> stream,
             NcclComm* comm, How how, bool revoke, std::chrono::milliseconds patience)
      : over_(std::make_shared<std::atomic<bool>>(false)) {
    try {
      thread_ = Thread([over = over_, library = std::move(library), stream = std::move(stream),
                        comm, how, revoke, patience] {
        bool ended = false;
        const auto end = [&]() -> Status {
          ended = true;
          if (how == How::kFinish) {
            Finish(*library, comm);
          } else {
            Abort(*library, comm, revoke, patience);
          }
          return {};
        };
        // Ignores errors, because this thread has nobody to report them to. If the device cannot be
        // made current, `end` runs anyway.
        (void)stream->RunOnDevice(end);
        if (!ended) (void)end();
        over->store(true);
      });
    } catch (const std::system_error&) {
      // Without a thread the communicator never ends, and Settled stays false; blocking here
      // forever would be worse.
    }
  }
  // If the communicator has not ended, its thread continues detached.
  ~NcclEnding() {
    if (IsDone()) {
      thread_.join();
    } else if (thread_.joinable()) {
      thread_.detach();
    }
  }
  NcclEnding(const NcclEnding&) = delete;
  NcclEnding& operator=(const NcclEnding&) = delete;

  bool IsDone() const { return over_->load(); }
  void Await(const Deadline& deadline) const {
    while (!IsDone() && !deadline.Passed()) std::this_thread::sleep_for(kEndPause);
  }

 private:
  // Waits until the communicator is no longer in progress. False at the deadline, or on failure.
  static bool WaitUntilIdle(const NcclLibrary& library, NcclComm* comm, const Deadline& deadline) {
    while (true) {
      NcclResult state = NcclResult::kInProgress;
      const NcclResult asked = library.api().comm_get_async_error(comm, &state);
      if (asked != NcclResult::kSuccess) return false;
      if (state != NcclResult::kInProgress) return state == NcclResult::kSuccess;
      if (deadline.Passed()) return false;
      std::this_thread::sleep_for(kEndPause);
    }
  }
  static bool HasStarted(NcclResult result) {
    return result == NcclResult::kSuccess || result == NcclResult::kInProgress;
  }
  static void Finish(const NcclLibrary& library, NcclComm* comm) {
    if (HasStarted(library.api().comm_finalize(comm)) &&
        WaitUntilIdle(library, comm, Deadline::After(kFinishLimit))) {
      (void)library.api().comm_destroy(comm);
    } else {
      (void)library.api().comm_abort(comm);
    }
  }
  static void Abort(const NcclLibrary& library, NcclComm* comm, bool revoke,
                    std::chrono::milliseconds patience) {
    if (revoke && HasStarted(library.api().comm_revoke(comm, 0))) {
      (void)WaitUntilIdle(library, comm, Deadline::After(patience));
    }
    (void)library.api().comm_abort(comm);  // Also after a revoke that failed or timed out.
  }

  const std::shared_ptr<std::atomic<bool>> over_;
  Thread thread_;  // Not joinable if the thread could not be created.
};

class NcclMover final : public BulkMover {
 public:
  NcclMover(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<NcclStream> stream,
            int rank, int ranks, const NcclOptions& options)
      : library_(std::move(library)),
        stream_(std::move(stream)),
        rank_(rank),
        ranks_(ranks),
        options_(options) {}

  std::string Close() override {
    // Aborts a communicator that is not ready: a suspended one must not be finalized.
    if (comm_ != nullptr) {
      End(state_ == State::kReady ? NcclEnding::How::kFinish : NcclEnding::How::kAbort);
    }
    if (ending_ == nullptr) return {};
    ending_->Await(Deadline::After(options_.patience));
    if (ending_->IsDone()) return {};
    return "NCCL: a communicator was not destroyed by the deadline; a background thread goes on "
           "with it";
  }

  std::string kind() const override { return "nccl"; }
  Status Check(const BulkRange& range) override {
    if (range.device.kind == DeviceKind::kCuda) return {};
    return {Code::kUnsupported, "NCCL can transfer only device memory, and this is host memory"};
  }

  Result<bool> Prepare(const Broadcast& broadcast) override {
    return RunOnDevice([&] { return PrepareOnDevice(broadcast); });
  }
  void OnBroadcast(std::string_view word) override {
    NcclUniqueId id;
    if (word.size() != sizeof(id.internal)) return;
    std::memcpy(id.internal, word.data(), word.size());
    ids_.push_back(id);
  }

  void Begin(BulkExchange& exchange) override {
    exchange_ = &exchange;
    groups_ = NcclGroups(exchange.plan, ranks_, options_);
    group_ = 0;
    first_ = 0;
    phase_ = Phase::kIdle;
  }
  // Nothing to do: a group starts when all of it is ready, which Move checks.
  void OnPut(const std::vector<std::size_t>& /*transfers*/) override {}

  Result<bool> Move() override {
    return RunOnDevice([&] { return MoveOnDevice(); });
  }

  std::string Suspects(const BulkMove& /*late*/) const override {
    if (phase_ == Phase::kIdle) return {};
    std::set<int> peers;
    for (std::size_t i = first_; i < last_; ++i) peers.insert(exchange_->mine[i].peer);
    if (peers.size() < 2) return {};
    std::string words;
    for (const int peer : peers) words += (words.empty() ? " " : ", ") + std::to_string(peer);
    return ", or another unit of its group (" + GroupInWords() + ", with ranks" + words +
           "): NCCL does not say which";
  }

  void Stop() override {
    phase_ = Phase::kIdle;
    marked_ = false;
    if (comm_ != nullptr) End(NcclEnding::How::kAbort);
  }
  Result<bool> Settled() override {
    if (ending_ != nullptr && !ending_->IsDone()) return false;
    // Awaits a mark, because work on the stream may end slightly later than the communicator.
    if (!marked_) TENSORMOUNT_RETURN_IF_ERROR(stream_->Mark());
    marked_ = true;
    return stream_->Done();
  }
  Result<bool> Release() override {
    return RunOnDevice([&] { return ReleaseOnDevice(); });
  }

 private:
  enum class State { kNone, kConnecting, kReady, kSuspending, kSuspended, kResuming, kEnding };
  // State of a group: kLaunching: passed to NCCL, which enqueues it later; kRunning: on the stream.
  enum class Phase { kIdle, kLaunching, kRunning };

  // Makes NCCL calls with the device current.
  template <typename Calls>
  Result<bool> RunOnDevice(Calls calls) {
    Result<bool> result = false;
    TENSORMOUNT_RETURN_IF_ERROR(stream_->RunOnDevice([&] {
      result = calls();
      return result.status();
    }));
    return result;
  }

  Result<bool> PrepareOnDevice(const Broadcast& broadcast) {
    switch (state_) {
      case State::kNone:
        return Connect(broadcast);
      case State::kConnecting:
        return AdvanceTo(State::kReady, "ncclCommInitRankConfig");
      case State::kSuspended:
        TENSORMOUNT_RETURN_IF_ERROR(Checked(library_->api().comm_resume(comm_), "ncclCommResume"));
        state_ = State::kResuming;
        return false;
      case State::kResuming:
        return AdvanceTo(State::kReady, "ncclCommResume");
      case State::kReady:
        return true;
      case State::kSuspending:
      case State::kEnding:
        break;
    }
    return Status(Code::kInternal,
                  "internal error: NCCL: an exchange begins while its communicator shuts down");
  }

  Result<bool> MoveOnDevice() {
    while (true) {
      if (phase_ == Phase::kIdle) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool launched, LaunchNext());
        if (!launched) return first_ == exchange_->mine.size();
      }
      const Result<bool> ended = GroupEnded();
      if (!ended.ok()) return ended.status().WithContext(GroupInWords());
      if (!ended.value()) return false;
      for (std::size_t i = first_; i < last_; ++i) exchange_->mine[i].done = true;
      first_ = last_;
      phase_ = Phase::kIdle;
    }
  }

  Result<bool> ReleaseOnDevice() {
    switch (state_) {
      case State::kNone:
      case State::kSuspended:
        return true;
      case State::kReady:
        return Suspend();
      case State::kSuspending:
        return AdvanceTo(State::kSuspended, "ncclCommSuspend");
      case State::kEnding:
        if (!ending_->IsDone()) return false;
        ending_.reset();
        state_ = State::kNone;
        return true;
      case State::kConnecting:
      case State::kResuming:
        break;
    }
    // Release was called before the communicator became ready. Once it is, the next call suspends
    // or ends it.
    TENSORMOUNT_RETURN_IF_ERROR(AdvanceTo(State::kReady, "connect").status());
    return false;
  }

  Status Checked(NcclResult result, std::string_view action) const {
    return library_->ToStatus(result, action, comm_);
  }

  // Polls the communicator: false while an earlier call on it is in progress.
  Result<bool> IsCommIdle(std::string_view action) const {
    NcclResult state = NcclResult::kInProgress;
    TENSORMOUNT_RETURN_IF_ERROR(
        Checked(library_->api().comm_get_async_error(comm_, &state), "ncclCommGetAsyncError"));
    TENSORMOUNT_RETURN_IF_ERROR(Checked(state, action));
    return state == NcclResult::kSuccess;
  }
  Result<bool> AdvanceTo(State next, std::string_view action) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool quiet, IsCommIdle(action));
    if (quiet) state_ = next;
    return quiet;
  }

  Result<bool> Connect(const Broadcast& broadcast) {
    if (rank_ == 0) {
      NcclUniqueId id;
      TENSORMOUNT_RETURN_IF_ERROR(Checked(library_->api().get_unique_id(&id), "ncclGetUniqueId"));
      broadcast(std::string_view(id.internal, sizeof(id.internal)));
      ids_.push_back(id);
    }
    if (ids_.empty()) return false;
    const NcclUniqueId id = ids_.front();
    ids_.pop_front();
    NcclConfig config;
    config.blocking = 0;
    TENSORMOUNT_RETURN_IF_ERROR(
        Checked(library_->api().comm_init_rank_config(&comm_, ranks_, id, rank_, &config),
                "ncclCommInitRankConfig"));
    state_ = State::kConnecting;
    return false;
  }

  Result<bool> Suspend() {
    const NcclApi& api = library_->api();
    if (api.comm_suspend == nullptr || api.comm_resume == nullptr) {
      End(NcclEnding::How::kFinish);
      return false;
    }
    // If suspending fails, the communicator keeps its memory. Destroying it instead is not
    // possible, because the communicators of other ranks may be suspended.
    if (!Checked(api.comm_suspend(comm_, kNcclSuspendMemory), "ncclCommSuspend").ok()) return true;
    state_ = State::kSuspending;
    return false;
  }

  // Starts a thread that ends the communicator.
  void End(NcclEnding::How how) {
    // Only a communicator that is ready can have transfers to revoke.
    const bool revoke = state_ == State::kReady && library_->api().comm_revoke != nullptr;
    ending_ = std::make_unique<NcclEnding>(library_, stream_, std::exchange(comm_, nullptr), how,
                                           revoke, options_.patience);
    state_ = State::kEnding;
  }

  // Launches the next group in which this rank has units. False if not all of these units are
  // ready, or no group is left.
  Result<bool> LaunchNext() {
    std::vector<BulkMove>& mine = exchange_->mine;
    if (first_ == mine.size()) return false;
    while (group_ + 1 < groups_.size() && groups_[group_ + 1] <= mine[first_].unit) ++group_;
    const std::uint64_t end =
        group_ + 1 < groups_.size() ? groups_[group_ + 1] : exchange_->plan.size();
    for (last_ = first_; last_ < mine.size() && mine[last_].unit < end; ++last_) {
      if (!mine[last_].put) return false;
    }
    TENSORMOUNT_RETURN_IF_ERROR(Launch().WithContext(GroupInWords()));
    phase_ = Phase::kLaunching;
    return true;
  }

  Status Launch() {
    const NcclApi& api = library_->api();
    TENSORMOUNT_RETURN_IF_ERROR(Checked(api.group_start(), "ncclGroupStart"));
    Status said;
    for (std::size_t i = first_; i < last_ && said.ok(); ++i) {
      const BulkMove& mine = exchange_->mine[i];
      if (mine.sends) {
        said = Checked(api.send(mine.from, mine.bytes, NcclDataType::kUint8, mine.peer, comm_,
                                stream_->handle()),
                       "ncclSend");
      }
      if (mine.receives && said.ok()) {
        said = Checked(api.recv(mine.to, mine.bytes, NcclDataType::kUint8, mine.peer, comm_,
                                stream_->handle()),
                       "ncclRecv");
      }
    }
    // Ends the group even after an error: an open group is state of this thread, and later NCCL
    // calls of the thread would be added to it.
    const Status ended = Checked(api.group_end(), "ncclGroupEnd");
    return said.ok() ? ended : said;
  }

  Result<bool> GroupEnded() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool quiet, IsCommIdle("NCCL"));
    if (phase_ == Phase::kLaunching) {
      // Transfers are on the stream only once the communicator is idle: an earlier mark would be
      // reached before they end.
      if (!quiet) return false;
      TENSORMOUNT_RETURN_IF_ERROR(stream_->Mark());
      phase_ = Phase::kRunning;
    }
    return stream_->Done();
  }

  std::string GroupInWords() const {
    const BulkMove& first = exchange_->mine[first_];
    const BulkMove& last = exchange_->mine[last_ - 1];
    std::string words = "unit " + std::to_string(first.unit);
    if (first.unit != last.unit) words += " to " + std::to_string(last.unit);
    return words;
  }

  const std::shared_ptr<const NcclLibrary> library_;
  const std::shared_ptr<NcclStream> stream_;
  const int rank_;
  const int ranks_;
  const NcclOptions options_;

  State state_ = State::kNone;
  NcclComm* comm_ = nullptr;
  std::deque<NcclUniqueId> ids_;  // IDs that rank 0 has sent, of communicators not yet made.
  std::unique_ptr<NcclEnding> ending_;
  bool marked_ = false;  // Whether the stream was marked since Stop.

  BulkExchange* exchange_ = nullptr;
  std::vector<std::uint64_t> groups_;
  std::size_t group_ = 0;
  Phase phase_ = Phase::kIdle;
  std::size_t first_ = 0;  // All of this rank's transfers before this one are done.
  std::size_t last_ = 0;   // The current group is this rank's transfers [first_, last_).
};

class NcclLink final : public DeviceLink {
 public:
  NcclLink(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<NcclStream> stream,
           const NcclOptions& options)
      : library_(std::move(library)), stream_(std::move(stream)), options_(options) {}
  std::string version() const override { return "NCCL " + library_->VersionText(); }
  std::string device() const override { return stream_->device(); }
  Result<std::unique_ptr<BulkMover>> MakeMover(int rank, int ranks) override {
    return std::unique_ptr<BulkMover>(
        std::make_unique<NcclMover>(library_, stream_, rank, ranks, options_));
  }

 private:
  const std::shared_ptr<const NcclLibrary> library_;
  const std::shared_ptr<NcclStream> stream_;
  const NcclOptions options_;
};

}  // namespace

std::vector<std::uint64_t> NcclGroups(const std::vector<BulkUnit>& plan, int ranks,
                                      const NcclOptions& options) {
  struct Load {
    std::uint64_t group = 0;  // The group of `units` and `bytes`; groups count from 1 here.
    std::size_t units = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<Load> loads(static_cast<std::size_t>(ranks));
  std::vector<std::uint64_t> groups = {0};
  const auto load_of = [&](int rank) -> Load& {
    Load& load = loads[static_cast<std::size_t>(rank)];
    if (load.group != groups.size()) load = {.group = groups.size()};
    return load;
  };
  const auto full = [&](const Load& load, std::uint64_t bytes) {
    return load.units >= options.group_units ||
           (load.units > 0 &&
            (bytes > options.group_bytes || load.bytes > options.group_bytes - bytes));
  };
  for (std::size_t u = 0; u < plan.size(); ++u) {
    const BulkUnit& unit = plan[u];
    if (unit.bytes == 0) continue;
    if (full(load_of(unit.from), unit.bytes) || full(load_of(unit.to), unit.bytes)) {
      groups.push_back(u);
    }
    for (const int rank : {unit.from, unit.to}) {
      Load& load = load_of(rank);
      ++load.units;
      load.bytes += unit.bytes;
      if (unit.from == unit.to) break;
    }
  }
  return groups;
}

std::unique_ptr<DeviceLink> MakeNcclLink(std::shared_ptr<const NcclLibrary> library,
                                         std::shared_ptr<NcclStream> stream,
                                         const NcclOptions& options) {
  return std::make_unique<NcclLink>(std::move(library), std::move(stream), options);
}

}  // namespace tensormount::gpu
