// SPDX-License-Identifier: Apache-2.0
#include "collective/load/exchange_load.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "collective/comm/collective_round.h"
#include "collective/guarded.h"
#include "collective/load/exchange_units.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// What was read and is not yet out, of one rank; and what is on its way to it and cannot be
// received in place. One unit may always pass, however large it is.
constexpr std::uint64_t kOutgoingBytes = 4u << 20;
constexpr std::uint64_t kIncomingBytes = 4u << 20;
constexpr std::size_t kMaxReceives = 64;
// Units of one rank that are on their way, also from memory that is the caller's.
constexpr std::size_t kMaxUnits = 16;
// Shorter runs are cheaper copied out of a block than read one by one.
constexpr std::uint64_t kShortestPiece = 512;
// A gap that is worth a read of its own to leave out.
constexpr std::uint64_t kLongGap = 64u << 10;
// Data files that are open at a time.
constexpr std::size_t kMaxFiles = 64;

// Memory that is only ever overwritten: growing does not clear or keep anything.
class GrowingBuffer {
 public:
  void Reserve(std::uint64_t wanted) {
    if (wanted <= capacity_) return;
    memory_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(wanted));
    capacity_ = wanted;
  }
  std::byte* data() { return memory_.get(); }
  std::uint64_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::uint64_t capacity_ = 0;
};

// Buffers that are used again, and how much memory they ever were. Thread-safe.
class Pool {
 public:
  GrowingBuffer Take(std::uint64_t size) {
    std::lock_guard lock(mutex_);
    // Not a larger one either: what counts as a few bytes on their way must not hold many.
    const auto fitting = std::find_if(free_.begin(), free_.end(),
                                      [&](const GrowingBuffer& b) { return b.capacity() == size; });
    GrowingBuffer bytes;
    if (fitting != free_.end()) {
      bytes = std::move(*fitting);
      free_.erase(fitting);
      return bytes;
    }
    while (!free_.empty() && total_ + size > kOutgoingBytes + kIncomingBytes) {
      total_ -= free_.front().capacity();
      free_.erase(free_.begin());
    }
    bytes.Reserve(size);
    total_ += size;
    peak_ = std::max(peak_, total_);
    return bytes;
  }
  void Give(GrowingBuffer bytes) {
    if (bytes.capacity() == 0) return;
    std::lock_guard lock(mutex_);
    free_.push_back(std::move(bytes));
  }
  std::uint64_t peak() const { return peak_; }

 private:
  std::mutex mutex_;
  std::vector<GrowingBuffer> free_;
  std::uint64_t total_ = 0;
  std::uint64_t peak_ = 0;
};

// Where the bytes of a piece stand in a buffer, if they are one run there; otherwise null.
std::byte* ContiguousPlace(const Box& bytes, const LoadTarget& target) {
  for (const PlacedBox& to : target.placed) {
    if (!to.box.Contains(bytes)) continue;
    const StridedCopy copy = PlanCopy(bytes, PlacePacked(Region(bytes), 0).front(), to);
    return copy.axes == 0 ? target.base + copy.dst_offset : nullptr;
  }
  return nullptr;
}

// Copies the bytes of a piece, which stand as `from` says, to where a target wants them.
void PlaceBytes(const PlacedBox& from, const std::byte* bytes, const Box& part,
                const LoadTarget& target) {
  for (const PlacedBox& to : target.placed) {
    const Box common = Intersect(part, to.box);
    if (!common.empty()) ExecuteCopy(PlanCopy(common, from, to), bytes, target.base);
  }
}

// A unit that was read and is being sent.
struct Outgoing {
  std::vector<ExchangePiece> pieces;
  std::vector<const std::byte*> at;  // Of each piece that others want: its bytes, packed.
  GrowingBuffer memory;
  std::uint64_t size = 0;  // Of the memory that it needs.
  std::size_t unsent = 0;
};

// Reads units one after the other and cuts them up.
class UnitReader {
 public:
  UnitReader(const OpenedCheckpoint& checkpoint, LoadVerify verify)
      : checkpoint_(checkpoint), verify_(verify) {}

  // Finds places for the pieces of a unit; sets out.size. The memory may then be given.
  void Plan(const ExchangeUnits& units, const ExchangeUnit& unit, Outgoing& out) {
    out.pieces = units.PiecesOf(unit);
    out.at.assign(out.pieces.size(), nullptr);
    bytes_ = units.BytesOf(unit);
    packed_at_.assign(out.pieces.size(), kElsewhere);
    out.size = 0;
    for (std::size_t p = 0; p < out.pieces.size(); ++p) {
      const ExchangePiece& piece = out.pieces[p];
      if (piece.receivers.empty()) continue;
      // Sent from where this rank itself wants it, if it is one run there.
      if (!piece.mine.empty()) out.at[p] = ContiguousPlace(piece.bytes, *piece.mine.front());
      if (out.at[p] != nullptr) continue;
      packed_at_[p] = out.size;
      out.size += piece.size();
    }
    in_place_ = UnitVerify(units.tensor(unit)) == ReadVerify::kOff && CutIntoRuns(out);
    if (in_place_) return;
    // All of the unit is read into memory, and what is one run of it is sent from there.
    out.size = static_cast<std::uint64_t>(bytes_.box.volume());
    for (std::size_t p = 0; p < out.pieces.size(); ++p) {
      const ExchangePiece& piece = out.pieces[p];
      out.at[p] = nullptr;
      if (piece.receivers.empty()) continue;
      const StridedCopy copy =
          PlanCopy(piece.bytes, bytes_, PlacePacked(Region(piece.bytes), 0).front());
      if (copy.axes == 0) {
        packed_at_[p] = static_cast<std::uint64_t>(copy.src_offset);
      } else {
        packed_at_[p] = out.size;
        out.size += piece.size();
      }
    }
  }

  Status Read(const ExchangeUnits& units, const ExchangeUnit& unit, Outgoing& out) {
    const PlannedTensor& tensor = units.tensor(unit);
    std::byte* const memory = out.memory.data();
    for (std::size_t p = 0; p < out.pieces.size(); ++p) {
      if (packed_at_[p] != kElsewhere) out.at[p] = memory + packed_at_[p];
    }
    if (in_place_) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(tensor.entry.meta, unit, memory));
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(checkpoint_.ReadPlaced(tensor.entry, {&bytes_, 1}, memory,
                                                         UnitVerify(tensor), stats_, nullptr));
    }
    for (std::size_t p = 0; p < out.pieces.size(); ++p) {
      const ExchangePiece& piece = out.pieces[p];
      const PlacedBox packed = PlacePacked(Region(piece.bytes), 0).front();
      const bool cut = !in_place_ && out.at[p] != nullptr &&
                       packed_at_[p] >= static_cast<std::uint64_t>(bytes_.box.volume());
      if (cut) {
        ExecuteCopy(PlanCopy(piece.bytes, bytes_, packed), memory, memory + packed_at_[p]);
      }
      for (std::size_t m = 0; m < piece.mine.size(); ++m) {
        const LoadTarget& target = *piece.mine[m];
        if (!in_place_) {
          PlaceBytes(bytes_, memory, piece.bytes, target);
        } else if (packed_at_[p] != kElsewhere) {
          PlaceBytes(packed, out.at[p], piece.bytes, target);
        } else if (m > 0) {
          CopyBetween(piece.bytes, *piece.mine.front(), target);
        }
      }
    }
    return {};
  }

  std::uint64_t bytes_read() const { return stats_.bytes_read; }

 private:
  static constexpr std::uint64_t kElsewhere = ~std::uint64_t{0};
  // Bytes of a unit that stand together in the file and in memory.
  struct FileRun {
    std::uint64_t at = 0;       // From the unit's first byte.
    std::byte* base = nullptr;  // Null: of the memory of the unit.
    std::int64_t to = 0;
    std::uint64_t size = 0;
  };

  ReadVerify UnitVerify(const PlannedTensor& tensor) const {
    if (verify_ == LoadVerify::kOff) return ReadVerify::kOff;
    // The digest proves the way from the disk to the last buffer at once.
    return tensor.proof.possible ? ReadVerify::kOff : ReadVerify::kExtendLeaves;
  }

  // A second buffer of this rank that has the same bytes.
  static void CopyBetween(const Box& part, const LoadTarget& from, const LoadTarget& to) {
    for (const PlacedBox& placed : from.placed) {
      const Box common = Intersect(part, placed.box);
      if (!common.empty()) PlaceBytes(placed, from.base, common, to);
    }
  }

  // The runs of a unit and where each goes, in file order, in runs_: then one read both fetches
  // the unit and cuts it up. False where runs are too short for that, or wanted twice.
  bool CutIntoRuns(const Outgoing& out) {
    runs_.clear();
    bool good = true;
    const auto add = [&](const StridedCopy& copy, std::byte* base, std::uint64_t offset) {
      good = good && copy.run >= kShortestPiece;
      if (!good) return;
      copy.ForEachRun([&](std::int64_t from, std::int64_t to, std::uint64_t size) {
        runs_.push_back(
            {static_cast<std::uint64_t>(from), base, to + static_cast<std::int64_t>(offset), size});
      });
    };
    for (std::size_t p = 0; p < out.pieces.size() && good; ++p) {
      const ExchangePiece& piece = out.pieces[p];
      if (packed_at_[p] != kElsewhere) {
        add(PlanCopy(piece.bytes, bytes_, PlacePacked(Region(piece.bytes), 0).front()), nullptr,
            packed_at_[p]);
        continue;
      }
      if (piece.mine.empty()) continue;
      const LoadTarget& target = *piece.mine.front();
      for (const PlacedBox& to : target.placed) {
        const Box common = Intersect(piece.bytes, to.box);
        if (!common.empty()) add(PlanCopy(common, bytes_, to), target.base, 0);
      }
    }
    if (!good) return false;
    std::sort(runs_.begin(), runs_.end(),
              [](const FileRun& a, const FileRun& b) { return a.at < b.at; });
    for (std::size_t i = 1; i < runs_.size(); ++i) {
      if (runs_[i].at < runs_[i - 1].at + runs_[i - 1].size) return false;
    }
    return true;
  }

  Result<File*> Open(const ExchangeUnit& unit) {
    // Units come in file order, so old ones are done with; thousands would pass the limit.
    if (files_.size() >= kMaxFiles && !files_.contains(unit.file)) files_.clear();
    std::unique_ptr<File>& file = files_[unit.file];
    if (file == nullptr) {
      const std::string name = checkpoint_.FilePath(unit.file);
      Result<std::unique_ptr<File>> opened = checkpoint_.OpenFile(unit.file);
      if (opened.status().code() == Code::kNotFound) {
        return Status(Code::kDataLoss, name + ": the file is missing");
      }
      if (!opened.ok()) return opened.status();
      file = std::move(opened).value();
    }
    return file.get();
  }

  Status ReadRuns(const TensorMeta& meta, const ExchangeUnit& unit, std::byte* memory) {
    const auto failed = [&](const Status& why) {
      return why.WithContext("tensor " + meta.key() + " " + unit.box.ToString());
    };
    Result<File*> file = Open(unit);
    if (!file.ok()) return failed(file.status());
    for (std::size_t i = 0; i < runs_.size();) {
      // What nobody wants between two runs goes where nobody looks, but for long gaps.
      const std::uint64_t begin = runs_[i].at;
      std::uint64_t at = begin;
      pieces_.clear();
      for (; i < runs_.size() && runs_[i].at - at < kLongGap; ++i) {
        if (runs_[i].at > at) {
          gap_.Reserve(kLongGap);
          pieces_.push_back({gap_.data(), static_cast<std::size_t>(runs_[i].at - at)});
        }
        pieces_.push_back({(runs_[i].base == nullptr ? memory : runs_[i].base) + runs_[i].to,
                           static_cast<std::size_t>(runs_[i].size)});
        at = runs_[i].at + runs_[i].size;
      }
      Result<std::size_t> got = file.value()->ReadPiecesAt(unit.offset + begin, pieces_);
      if (!got.ok()) return failed(got.status());
      stats_.bytes_read += got.value();
      if (got.value() != at - begin) {
        return failed(
            Status(Code::kDataLoss, checkpoint_.FilePath(unit.file) + ": byte " +
                                        std::to_string(unit.offset + begin + got.value()) +
                                        ": the file ends here"));
      }
    }
    if (Status still = checkpoint_.CheckStill(unit.file, *file.value()); !still.ok()) {
      return failed(still);
    }
    return {};
  }

  const OpenedCheckpoint& checkpoint_;
  const LoadVerify verify_;
  // Of the unit that was planned last.
  PlacedBox bytes_;
  std::vector<std::uint64_t> packed_at_;  // Of each piece in the memory.
  bool in_place_ = false;
  std::vector<FileRun> runs_;
  std::vector<File::Piece> pieces_;
  GrowingBuffer gap_;
  std::map<std::uint32_t, std::unique_ptr<File>> files_;  // By number.
  ReadStats stats_;
};

// One batch of units: a thread reads, whoever calls Step passes on.
class UnitStream final : public LocalWork {
 public:
  UnitStream(Collective& collective, const ExchangeUnits& units, UnitReader& reader, Pool& pool,
             ExchangeStats& stats, const std::function<void(std::uint64_t)>& progress)
      : comm_(collective.comm()),
        tag_(collective.data_tag()),
        units_(units),
        reader_(reader),
        pool_(pool),
        stats_(stats),
        progress_(progress) {}
  ~UnitStream() override { Cancel(); }

  Result<bool> Step() override {
    bool done = false;
    const Status status = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(done, TrySteps());
      return {};
    });
    if (!status.ok()) {
      Cancel();
      return status;
    }
    return done;
  }

  void Cancel() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    room_.notify_all();
    if (thread_.joinable()) thread_.join();
    for (const Send& send : sends_) comm_.Cancel(send.request);
    sends_.clear();
    for (const Receive& receive : receives_) comm_.Cancel(receive.request);
    receives_.clear();
  }

 private:
  struct Send {
    Communicator::Request request = 0;
    std::shared_ptr<Outgoing> unit;
  };
  struct Receive {
    Communicator::Request request = 0;
    ExchangePiece piece;
    std::byte* to = nullptr;
    GrowingBuffer staged;
  };

  // ---- The reading thread ----

  Status ReadAll() {
    const int me = comm_.rank();
    for (const ExchangeUnit& unit : units_.units()) {
      if (unit.reader != me) continue;
      auto out = std::make_shared<Outgoing>();
      reader_.Plan(units_, unit, *out);
      {
        std::unique_lock lock(mutex_);
        room_.wait(lock, [&] {
          return stop_ || in_flight_ == 0 ||
                 (in_flight_ < kMaxUnits && outgoing_ + out->size <= kOutgoingBytes);
        });
        if (stop_) return {};
        ++in_flight_;
        outgoing_ += out->size;
      }
      out->memory = pool_.Take(out->size);
      const std::uint64_t before = reader_.bytes_read();
      TENSORMOUNT_RETURN_IF_ERROR(reader_.Read(units_, unit, *out));
      progress_(reader_.bytes_read() - before);
      for (const ExchangePiece& piece : out->pieces) out->unsent += piece.receivers.size();
      std::lock_guard lock(mutex_);
      if (out->unsent > 0) {
        ready_.push_back(std::move(out));
      } else {
        --in_flight_;
        outgoing_ -= out->size;
        pool_.Give(std::move(out->memory));
      }
    }
    return {};
  }

  // ---- The caller's thread ----

  void StartReading() {
    thread_ = std::thread([this] {
      const Status status = Guarded([this] { return ReadAll(); });
      std::lock_guard lock(mutex_);
      read_status_ = status;
      read_done_ = true;
    });
  }

  Result<bool> TrySteps() {
    if (!thread_.joinable()) StartReading();
    std::deque<std::shared_ptr<Outgoing>> ready;
    bool read_done = false;
    {
      std::lock_guard lock(mutex_);
      ready.swap(ready_);
      read_done = read_done_;
      if (!read_status_.ok()) return read_status_;
    }
    TENSORMOUNT_RETURN_IF_ERROR(PostReceives());
    for (std::shared_ptr<Outgoing>& out : ready) TENSORMOUNT_RETURN_IF_ERROR(PostSends(out));
    TENSORMOUNT_RETURN_IF_ERROR(TestSends());
    TENSORMOUNT_RETURN_IF_ERROR(TestReceives());
    return read_done && sends_.empty() && receives_.empty() &&
           next_unit_ == units_.units().size() && coming_.empty();
  }

  Status PostSends(const std::shared_ptr<Outgoing>& out) {
    moved = true;
    for (std::size_t p = 0; p < out->pieces.size(); ++p) {
      const ExchangePiece& piece = out->pieces[p];
      for (const int to : piece.receivers) {
        const BufferView view = BufferView::Host(DType::kU8, static_cast<const void*>(out->at[p]),
                                                 Dims{piece.bytes.volume()});
        TENSORMOUNT_ASSIGN_OR_RETURN(const Communicator::Request request,
                                     comm_.Send(to, tag_, view));
        sends_.push_back({request, out});
        ++stats_.messages;
      }
    }
    return {};
  }

  Status TestSends() {
    std::size_t kept = 0;
    Status failure;
    for (std::size_t i = 0; i < sends_.size(); ++i) {
      if (failure.ok()) {
        const Result<bool> done = comm_.Test(sends_[i].request);
        if (!done.ok()) {
          failure = done.status();
          continue;
        }
        if (done.value()) {
          moved = true;
          if (--sends_[i].unit->unsent == 0) Release(*sends_[i].unit);
          continue;
        }
      }
      if (kept != i) sends_[kept] = std::move(sends_[i]);
      ++kept;
    }
    sends_.resize(kept);
    return failure;
  }

  void Release(Outgoing& out) {
    {
      std::lock_guard lock(mutex_);
      --in_flight_;
      outgoing_ -= out.size;
    }
    pool_.Give(std::move(out.memory));
    room_.notify_one();
  }

  // What comes next to this rank, in the order in which every reader sends.
  bool FindComing() {
    const int me = comm_.rank();
    for (; coming_.empty() && next_unit_ < units_.units().size(); ++next_unit_) {
      const ExchangeUnit& unit = units_.units()[next_unit_];
      if (unit.reader == me) continue;
      for (ExchangePiece& piece : units_.PiecesOf(unit)) {
        if (!piece.mine.empty()) coming_.push_back({unit.reader, std::move(piece)});
      }
    }
    return !coming_.empty();
  }

  Status PostReceives() {
    while (receives_.size() < kMaxReceives && FindComing()) {
      auto& [from, piece] = coming_.front();
      Receive receive;
      receive.to = ContiguousPlace(piece.bytes, *piece.mine.front());
      if (receive.to == nullptr) {
        if (incoming_ != 0 && incoming_ + piece.size() > kIncomingBytes) return {};
        incoming_ += piece.size();
        receive.staged = pool_.Take(piece.size());
        receive.to = receive.staged.data();
      }
      const BufferView view =
          BufferView::Host(DType::kU8, static_cast<void*>(receive.to), Dims{piece.bytes.volume()});
      TENSORMOUNT_ASSIGN_OR_RETURN(receive.request, comm_.Receive(from, tag_, view));
      receive.piece = std::move(piece);
      receives_.push_back(std::move(receive));
      coming_.pop_front();
      moved = true;
    }
    return {};
  }

  Status TestReceives() {
    std::size_t kept = 0;
    Status failure;
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      if (failure.ok()) {
        const Result<bool> done = comm_.Test(receives_[i].request);
        if (!done.ok()) {
          failure = done.status();
          continue;
        }
        if (done.value()) {
          Arrived(receives_[i]);
          continue;
        }
      }
      if (kept != i) receives_[kept] = std::move(receives_[i]);
      ++kept;
    }
    receives_.resize(kept);
    return failure;
  }

  void Arrived(Receive& receive) {
    moved = true;
    const ExchangePiece& piece = receive.piece;
    stats_.received += piece.size();
    const bool staged = receive.staged.capacity() != 0;
    const PlacedBox packed = PlacePacked(Region(piece.bytes), 0).front();
    for (std::size_t m = staged ? 0 : 1; m < piece.mine.size(); ++m) {
      PlaceBytes(packed, receive.to, piece.bytes, *piece.mine[m]);
    }
    if (staged) {
      incoming_ -= piece.size();
      pool_.Give(std::move(receive.staged));
    }
  }

  Communicator& comm_;
  const std::uint32_t tag_;
  const ExchangeUnits& units_;
  UnitReader& reader_;
  Pool& pool_;
  ExchangeStats& stats_;
  const std::function<void(std::uint64_t)>& progress_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  std::uint64_t incoming_ = 0;  // Bytes of staged receives.
  std::size_t next_unit_ = 0;
  std::deque<std::pair<int, ExchangePiece>> coming_;

  std::mutex mutex_;
  std::condition_variable room_;
  bool stop_ = false;
  std::size_t in_flight_ = 0;   // Units that were read or are being read.
  std::uint64_t outgoing_ = 0;  // Their memory, in bytes.
  std::deque<std::shared_ptr<Outgoing>> ready_;
  bool read_done_ = false;
  Status read_status_;
  std::thread thread_;  // Last: uses all others.
};

}  // namespace

Result<ExchangeStats> LoadByExchange(const OpenedCheckpoint& checkpoint, Collective& collective,
                                     const LoadPlan& plan, std::span<LoadTarget> targets,
                                     LoadVerify verify,
                                     const std::function<void(std::uint64_t)>& progress) {
  ExchangeStats stats;
  ExchangeUnits units(checkpoint, plan, targets, collective.rank());
  UnitReader reader(checkpoint, verify);
  Pool pool;
  for (;;) {
    bool more = false;
    const Status planned = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(more, units.Next());
      return {};
    });
    TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(planned, "load: plan the exchange"));
    if (!more) break;
    std::uint64_t bytes = 0;
    for (const ExchangeUnit& unit : units.units()) {
      bytes += static_cast<std::uint64_t>(units.BytesOf(unit).box.volume());
    }
    UnitStream stream(collective, units, reader, pool, stats, progress);
    TENSORMOUNT_RETURN_IF_ERROR(collective.Run(stream, bytes, "load: exchange"));
  }
  stats.read = reader.bytes_read();
  stats.peak = pool.peak();
  for (LoadTarget& target : targets) {
    if (!target.tensor->exchange || target.convert) continue;
    target.stats.bytes_wanted = target.bytes;
    const bool by_leaf = verify != LoadVerify::kOff && !target.tensor->proof.possible &&
                         target.tensor->entry.has_digest;
    if (by_leaf) target.stats.bytes_by_leaf = target.bytes;
  }
  return stats;
}

}  // namespace tensormount
