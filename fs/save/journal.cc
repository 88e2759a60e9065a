// SPDX-License-Identifier: Apache-2.0
// The journal of a mount (docs/format.md, "Staging of mounts"): the bytes that the mount wrote,
// with leaf hashes, in records that each have a checksum. The reader distinguishes a tail torn by a
// crash, which is dropped, from damage of durable records, which is an error.
#include "fs/save/journal.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "base/errors.h"
#include "index/records/record_coding.h"
#include "shard/coding.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kJournalMagic{"TMJOURN\0", 8};
constexpr std::uint32_t kJournalVersion = 1;
constexpr std::size_t kJournalHeadBytes = 64;
constexpr std::size_t kIncarnationDigits = 16;

// Bytes of a frame around a record's body: the u32 length before the body, the u64 checksum after
// it.
constexpr std::size_t kRecordFrameBytes = 12;
// Upper limit of a body, so that a damaged length cannot cause a huge read or allocation.
constexpr std::size_t kMaxRecordBytes = std::size_t{16} << 20;

// A mark contains its own position and how much of the file was durable when it was written, so
// that a reader can tell damage from a tail that was never synced.
constexpr std::uint8_t kMarkKind = 8;
constexpr std::size_t kMarkBodyBytes = 17;  // u8 kind, u64 position, u64 synced.
constexpr std::size_t kMarkBytes = kMarkBodyBytes + kRecordFrameBytes;

constexpr std::uint64_t kMaxPosition = 0x7FFF'FFFF'FFFF'FFFF;
constexpr std::size_t kMaxReasonBytes = 4096;
// Bytes that are read at a time. Larger than usual records; a larger record makes the window grow.
constexpr std::size_t kWindowBytes = std::size_t{4} << 20;

std::string FolderOf(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::uint64_t Checksum(std::string_view body) { return Xxh3(body).low; }

// ByteWriter::String writes the u32 length before the bytes.
std::string FrameRecord(std::string_view body) {
  ByteWriter out;
  out.String(body);
  out.U64(Checksum(body));
  return std::move(out.bytes());
}

bool IsIncarnation(std::string_view text) {
  return text.size() == kIncarnationDigits && std::ranges::all_of(text, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::string EncodeHead(const Uuid& checkpoint, std::string_view incarnation) {
  ByteWriter out;
  out.Raw(kJournalMagic.data(), kJournalMagic.size());
  out.U32(kJournalVersion);
  out.U32(static_cast<std::uint32_t>(kJournalHeadBytes));
  EncodeUuid(out, checkpoint);
  out.Raw(incarnation.data(), incarnation.size());
  out.Hash(Xxh3(out.bytes()));
  return std::move(out.bytes());
}

std::string EncodeMark(std::uint64_t position, std::uint64_t synced) {
  ByteWriter body;
  body.U8(kMarkKind);
  body.U64(position);
  body.U64(synced);
  return FrameRecord(body.bytes());
}

void EncodeLeaves(ByteWriter& out, const std::vector<Hash128>& leaves) {
  for (const Hash128& leaf : leaves) out.Hash(leaf);
}

// Decodes the rest of a record, which must be exactly the leaf hashes of `bytes` bytes.
Result<std::vector<Hash128>> DecodeLeaves(ByteReader& in, std::uint64_t bytes,
                                          std::string_view what) {
  if (in.left() != LeafCount(bytes) * 16) {
    return DataLoss(what, std::to_string(in.left()) + " bytes of leaf hashes do not fit " +
                              std::to_string(bytes) + " bytes of data");
  }
  std::vector<Hash128> leaves(static_cast<std::size_t>(LeafCount(bytes)));
  for (Hash128& leaf : leaves) leaf = in.Hash();
  return leaves;
}

// Decodes record bodies and checks them against earlier records of the journal. Every number is
// checked before it is used as a size or an index: a journal may be damaged beyond its checksum or
// be written by a faulty program, and the publish may run in the daemon that serves everybody.
class RecordDecoder {
 public:
  Result<JournalRecord> Decode(std::string_view body, std::string_view what) {
    ByteReader in(body, what);
    JournalRecord record;
    const std::uint8_t kind = in.U8();
    record.kind = static_cast<JournalRecord::Kind>(kind);
    Status status;
    switch (record.kind) {
      case JournalRecord::Kind::kFile:
        status = DecodeFile(in, what, record);
        break;
      case JournalRecord::Kind::kTarget:
        status = DecodeTarget(in, what, record);
        break;
      case JournalRecord::Kind::kExtent:
        status = DecodeExtent(in, what, record);
        break;
      case JournalRecord::Kind::kForget:
        status = DecodeForget(in, what, record);
        break;
      case JournalRecord::Kind::kObject:
      case JournalRecord::Kind::kRemoveObject:
        status = DecodeObject(in, what, record);
        break;
      case JournalRecord::Kind::kCondemn:
        status = DecodeCondemn(in, what, record);
        break;
      default:
        return DataLoss(what, "unknown record kind " + std::to_string(kind));
    }
    TENSORMOUNT_RETURN_IF_ERROR(status);
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    return record;
  }

 private:
  Status DecodeFile(ByteReader& in, std::string_view what, JournalRecord& record) {
    record.number = in.U32();
    const std::uint8_t placement = in.U8();
    record.file_name = in.String(kMaxFileNameBytes);
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    if (record.number != files_) return DataLoss(what, "file numbers are not consecutive");
    record.placement = static_cast<Placement>(placement);
    if (record.placement != Placement::kTensorFile && record.placement != Placement::kPack) {
      return DataLoss(what, "a data file has the invalid placement " + std::to_string(placement));
    }
    if (!record.file_name.starts_with("data/") || !IsSafeName(record.file_name)) {
      return DataLoss(what, "a data file has the invalid name '" + record.file_name + "'");
    }
    ++files_;
    return {};
  }

  Status DecodeTarget(ByteReader& in, std::string_view what, JournalRecord& record) {
    record.number = in.U32();
    record.end = in.U64();
    record.target.key = in.String(kMaxKeyBytes);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims begin, DecodeDims(in, what));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extent, DecodeDims(in, what));
    TENSORMOUNT_ASSIGN_OR_RETURN(record.target.shape, DecodeDims(in, what));
    record.target.bits = in.U8();
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    Result<Box> box = Box::Make(begin, extent);
    if (!box.ok()) return DataLoss(what, box.status().message());
    record.target.box = box.value();
    if (Status key = CheckKey(record.target.key); !key.ok()) return DataLoss(what, key.message());
    if (record.number != targets_.size())
      return DataLoss(what, "the numbers of write targets are not consecutive");
    if (record.end > kMaxPosition)
      return DataLoss(what, "a write target is larger than 2^63 bytes");
    targets_.push_back(record.end);
    return {};
  }

  // Positions stay below 2^63, so that they fit off_t and the signed numbers of regions.
  Status CheckFile(std::uint32_t file, std::uint64_t offset, std::uint64_t length,
                   std::string_view what) const {
    if (file >= files_) return DataLoss(what, "file " + std::to_string(file) + " was not declared");
    if (!RangeWithin(offset, length, kMaxPosition))
      return DataLoss(what, "a byte range ends past 2^63");
    return {};
  }

  Status DecodeExtent(ByteReader& in, std::string_view what, JournalRecord& record) {
    StagedExtent& e = record.extent;
    e.target = in.U32();
    e.begin = in.U64();
    e.length = in.U64();
    e.runs = in.U64();
    e.stride = in.U64();
    e.file = in.U32();
    e.offset = in.U64();
    e.contribution = in.U64();
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    record.number = e.target;
    if (e.target >= targets_.size()) {
      return DataLoss(what, "write target " + std::to_string(e.target) + " was not declared");
    }
    if (e.length == 0 || e.runs == 0 || (e.runs == 1) != (e.stride == 0) ||
        (e.runs > 1 && e.stride <= e.length)) {
      return DataLoss(what, "the lengths and distances of runs are invalid");
    }
    // Products of numbers from disk must not overflow.
    const std::optional<std::uint64_t> bytes = CheckedMul(e.runs, e.length);
    const std::optional<std::uint64_t> last = CheckedMul(e.runs - 1, e.stride);
    const std::optional<std::uint64_t> span =
        last.has_value() ? CheckedAdd(*last, e.length) : std::nullopt;
    if (!bytes.has_value() || !span.has_value() ||
        !RangeWithin(e.begin, *span, targets_[e.target])) {
      return DataLoss(what, "bytes are past the end of write target " + std::to_string(e.target));
    }
    if (*bytes > kMaxExtentBytes) return DataLoss(what, "an extent is larger than 4 GiB");
    TENSORMOUNT_RETURN_IF_ERROR(CheckFile(e.file, e.offset, *bytes, what));
    TENSORMOUNT_ASSIGN_OR_RETURN(e.leaves, DecodeLeaves(in, *bytes, what));
    return {};
  }

  Status DecodeForget(ByteReader& in, std::string_view what, JournalRecord& record) {
    record.number = in.U32();
    record.begin = in.U64();
    record.end = in.U64();
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    if (record.number >= targets_.size() || record.begin > record.end ||
        record.end > targets_[record.number]) {
      return DataLoss(what, "a truncated byte range is not within its write target");
    }
    return {};
  }

  Status DecodeObject(ByteReader& in, std::string_view what, JournalRecord& record) {
    StagedObject& o = record.object;
    o.key = in.String(kMaxKeyBytes);
    TENSORMOUNT_ASSIGN_OR_RETURN(o.index, DecodeDims(in, what));
    if (Status key = CheckKey(o.key); !key.ok()) return DataLoss(what, key.message());
    if (record.kind == JournalRecord::Kind::kRemoveObject) return {};
    o.file = in.U32();
    o.offset = in.U64();
    o.length = in.U64();
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    if (o.length == 0) {
      if (o.file != kNoFile || o.offset != 0)
        return DataLoss(what, "an empty object has a file or an offset");
    } else {
      if (o.length > kMaxObjectBytes)
        return DataLoss(what, "an object of " + std::to_string(o.length) +
                                  " bytes, more than the limit of 32 GiB");
      TENSORMOUNT_RETURN_IF_ERROR(CheckFile(o.file, o.offset, o.length, what));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(o.leaves, DecodeLeaves(in, o.length, what));
    return {};
  }

  Status DecodeCondemn(ByteReader& in, std::string_view what, JournalRecord& record) {
    record.number = in.U32();
    record.file_name = in.String(kMaxRecordBytes);
    record.reason = in.String(kMaxReasonBytes);
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    if (record.number != kNoFile && record.number >= targets_.size()) {
      return DataLoss(what, "write target " + std::to_string(record.number) +
                                " is marked unusable, but was not declared");
    }
    return {};
  }

  std::uint32_t files_ = 0;
  std::vector<std::uint64_t> targets_;  // Sizes of the targets in bytes, by number.
};

// Reads a file through a window, so that memory does not grow with the file's claimed sizes.
class Window {
 public:
  Window(File& file, std::uint64_t size) : file_(file), size_(size) {}

  std::uint64_t size() const { return size_; }
  // `n` bytes at `at`, valid until the next call; nullopt if the file ends before.
  Result<std::optional<std::string_view>> Get(std::uint64_t at, std::size_t n) {
    if (!RangeWithin(at, n, size_)) return std::optional<std::string_view>();
    if (at < begin_ || at + n > begin_ + bytes_.size()) {
      const std::uint64_t want = std::min<std::uint64_t>(std::max(n, kWindowBytes), size_ - at);
      bytes_.resize(static_cast<std::size_t>(want));
      begin_ = at;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                   file_.ReadAt(at, bytes_.data(), bytes_.size()));
      if (got < bytes_.size()) {
        bytes_.resize(got);
        size_ = at + got;  // The file was truncated meanwhile.
        if (got < n) return std::optional<std::string_view>();
      }
    }
    return std::optional<std::string_view>(
        std::string_view(bytes_).substr(static_cast<std::size_t>(at - begin_), n));
  }

  // The body of the frame at `at`; nullopt if the frame is incomplete or damaged.
  Result<std::optional<std::string_view>> Body(std::uint64_t at) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto head, Get(at, 4));
    if (!head.has_value()) return head;
    const auto length = LoadLittle<std::uint32_t>(head->data());
    if (length == 0 || length > kMaxRecordBytes) return std::optional<std::string_view>();
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto frame, Get(at, length + kRecordFrameBytes));
    if (!frame.has_value()) return frame;
    const std::string_view body = frame->substr(4, length);
    if (LoadLittle<std::uint64_t>(frame->data() + 4 + length) != Checksum(body)) {
      return std::optional<std::string_view>();
    }
    return std::optional<std::string_view>(body);
  }

 private:
  File& file_;
  std::uint64_t size_;
  std::uint64_t begin_ = 0;
  std::string bytes_;
};

// Fields of a mark: its position, and how much of the journal was durable when it was written.
std::uint64_t MarkPosition(std::string_view body) {
  return LoadLittle<std::uint64_t>(body.data() + 1);
}
std::uint64_t MarkSynced(std::string_view body) {
  return LoadLittle<std::uint64_t>(body.data() + 9);
}
bool IsJournalMark(std::string_view body) {
  return body.size() == kMarkBodyBytes && static_cast<std::uint8_t>(body[0]) == kMarkKind;
}

// kDataLoss if a valid mark after `bad` says that the byte at `bad` had been durable.
// Tries every byte position after `bad`, because a broken length does not tell where the next frame
// begins. Linear in the rest of the file, mostly one comparison of 4 bytes a position; only a
// candidate that contains its own position is hashed.
Status CheckNotSynced(Window& window, std::uint64_t bad, std::string_view what) {
  for (std::uint64_t at = bad + 1; RangeWithin(at, kMarkBytes, window.size()); ++at) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto frame, window.Get(at, kMarkBytes));
    if (!frame.has_value()) break;
    if (LoadLittle<std::uint32_t>(frame->data()) != kMarkBodyBytes) continue;
    const std::string_view body = frame->substr(4, kMarkBodyBytes);
    if (!IsJournalMark(body) || MarkPosition(body) != at) continue;
    if (LoadLittle<std::uint64_t>(frame->data() + 4 + kMarkBodyBytes) != Checksum(body)) continue;
    if (MarkSynced(body) > bad) {
      return DataLoss(what, "the journal is damaged at byte " + std::to_string(bad) +
                                ", although these bytes were synced");
    }
  }
  return {};
}

// Reads the head; kNotFound if it is missing or incomplete and no bytes were synced.
Status ReadHead(Window& window, std::string_view what, Journal& journal) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto head, window.Get(0, kJournalHeadBytes));
  ByteReader in(head.value_or(std::string_view()), what);
  const std::string_view magic = in.Raw(kJournalMagic.size());
  const std::uint32_t version = in.U32();
  const std::uint32_t length = in.U32();
  journal.checkpoint = DecodeUuid(in);
  journal.incarnation = in.Raw(kIncarnationDigits);
  const Hash128 hash = in.Hash();
  if (!head.has_value() || magic != kJournalMagic ||
      hash != Xxh3(head->substr(0, kJournalHeadBytes - 16))) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckNotSynced(window, 0, what));
    return Status(Code::kNotFound, std::string(what) + ": nothing was written into this journal");
  }
  if (version != kJournalVersion || length != kJournalHeadBytes) {
    return Status(Code::kUnsupported, std::string(what) + ": journal version " +
                                          std::to_string(version) +
                                          " is not supported (supported: 1)");
  }
  if (!IsIncarnation(journal.incarnation))
    return DataLoss(what, "the header has no valid id of the save (incarnation)");
  return {};
}

}  // namespace

std::string EncodeRecord(const JournalRecord& record) {
  ByteWriter out;
  out.U8(static_cast<std::uint8_t>(record.kind));
  switch (record.kind) {
    case JournalRecord::Kind::kFile:
      out.U32(record.number);
      out.U8(static_cast<std::uint8_t>(record.placement));
      out.String(record.file_name);
      break;
    case JournalRecord::Kind::kTarget:
      out.U32(record.number);
      out.U64(record.end);
      out.String(record.target.key);
      EncodeDims(out, record.target.box.begin());
      EncodeDims(out, record.target.box.extent());
      EncodeDims(out, record.target.shape);
      out.U8(record.target.bits);
      break;
    case JournalRecord::Kind::kExtent: {
      const StagedExtent& e = record.extent;
      out.U32(e.target);
      out.U64(e.begin);
      out.U64(e.length);
      out.U64(e.runs);
      out.U64(e.stride);
      out.U32(e.file);
      out.U64(e.offset);
      out.U64(e.contribution);
      EncodeLeaves(out, e.leaves);
      break;
    }
    case JournalRecord::Kind::kForget:
      out.U32(record.number);
      out.U64(record.begin);
      out.U64(record.end);
      break;
    case JournalRecord::Kind::kObject:
    case JournalRecord::Kind::kRemoveObject: {
      const StagedObject& o = record.object;
      out.String(o.key);
      EncodeDims(out, o.index);
      if (record.kind == JournalRecord::Kind::kRemoveObject) break;
      out.U32(o.file);
      out.U64(o.offset);
      out.U64(o.length);
      EncodeLeaves(out, o.leaves);
      break;
    }
    case JournalRecord::Kind::kCondemn:
      out.U32(record.number);
      out.String(record.file_name);
      out.String(std::string_view(record.reason).substr(0, kMaxReasonBytes));
      break;
  }
  return FrameRecord(out.bytes());
}

// Stops at the first incomplete or damaged frame. CheckNotSynced then decides whether the bytes
// from there on are a torn tail or damage.
Result<Journal> ReadJournal(FileSystem& fs, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.OpenRead(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
  Window window(*file, info.size);
  Journal journal;
  TENSORMOUNT_RETURN_IF_ERROR(ReadHead(window, path, journal));
  RecordDecoder decoder;
  std::uint64_t at = kJournalHeadBytes;
  for (;;) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto body, window.Body(at));
    if (!body.has_value()) break;
    const std::uint64_t end = at + body->size() + kRecordFrameBytes;
    if (IsJournalMark(*body)) {
      if (MarkPosition(*body) != at || MarkSynced(*body) > at) {
        return DataLoss(
            path, "the sync mark at byte " + std::to_string(at) + " records another position");
      }
    } else {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          JournalRecord record,
          decoder.Decode(*body, path + ": record at byte " + std::to_string(at)));
      journal.records.push_back(std::move(record));
    }
    at = end;
  }
  journal.bytes = at;
  TENSORMOUNT_RETURN_IF_ERROR(CheckNotSynced(window, at, path));
  return journal;
}

// ---- Writing ----------------------------------------------------------------------------------

Status JournalWriter::Check() const {
  if (!failure_.ok()) return failure_;
  if (file_ == nullptr) return Status(Code::kStale, path_ + ": closed");
  return {};
}

Result<std::unique_ptr<JournalWriter>> JournalWriter::Create(FileSystem& fs,
                                                             const std::string& path,
                                                             const Uuid& checkpoint,
                                                             const std::string& incarnation) {
  if (!IsIncarnation(incarnation)) {
    return Status(Code::kInvalidArgument, "incarnation '" + incarnation + "' is not 16 hex digits");
  }
  std::unique_ptr<JournalWriter> made(new JournalWriter(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(made->file_, fs.CreateExclusive(path));
  const std::string head = EncodeHead(checkpoint, incarnation);
  // The head must be durable before the first record is synced; otherwise the journal could become
  // unreadable with durable records in it.
  Status status = made->file_->WriteAt(0, head.data(), head.size());
  if (status.ok()) status = made->file_->Sync();
  if (status.ok()) status = fs.SyncDirectory(FolderOf(path));
  if (!status.ok()) {
    (void)fs.RemoveFile(path);  // Otherwise a retry would fail, because the file exists.
    return status;
  }
  made->end_ = made->wanted_ = made->synced_ = head.size();
  return made;
}

Status JournalWriter::Append(std::string_view records) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Check());
  Status status = file_->WriteAt(end_, records.data(), records.size());
  if (!status.ok()) {
    failure_ = status;
    return status;
  }
  end_ += records.size();
  wanted_ = end_;
  return {};
}

Status JournalWriter::Sync() {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = wanted_;
  const auto deadline = std::chrono::steady_clock::now() + kStoragePatience;
  // Like DataFile::Sync, but appends a mark after the fsync. The mark itself need not be synced.
  while (synced_ < target) {
    TENSORMOUNT_RETURN_IF_ERROR(Check());
    if (syncing_) {
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
        return Status(Code::kDeadlineExceeded, path_ + ": timed out waiting for fsync");
      }
      continue;
    }
    syncing_ = true;
    const std::uint64_t reaches = end_;
    const std::shared_ptr<File> file = file_;
    lock.unlock();
    const Status status = file->Sync();
    lock.lock();
    syncing_ = false;
    if (status.ok()) {
      synced_ = reaches;
      // The mark is optional: once it is durable, damage before it can be told from a torn tail. If
      // the mark cannot be written, the next record overwrites it.
      const std::string mark = EncodeMark(end_, reaches);
      if (file_ != nullptr && file_->WriteAt(end_, mark.data(), mark.size()).ok()) {
        end_ += mark.size();
      }
    } else if (failure_.ok()) {
      failure_ = status;
    }
    changed_.notify_all();
  }
  return failure_;
}

std::uint64_t JournalWriter::synced_bytes() const {
  const std::lock_guard lock(mutex_);
  return synced_;
}

void JournalWriter::Close() {
  const std::lock_guard lock(mutex_);
  file_.reset();
}

}  // namespace tensormount::fs
