// SPDX-License-Identifier: Apache-2.0
// The file of kept_statistics.h. Two commands may write it at once, so it has a hash of all its
// bytes, and a reader takes all of it or nothing.
#include "index/store/kept_statistics.h"

#include "base/coding.h"
#include "index/read/derived_index.h"
#include "index/records/record_coding.h"
#include "index/records/store_paths.h"
#include "index/store/store.h"

namespace tensormount {
namespace {

constexpr std::string_view kStatisticsMagic = "TMSTATS1";
constexpr std::string_view kStatisticsFile = "statistics";
// Largest file that is read or written: some two million tensors.
constexpr std::uint64_t kMaxStatisticsBytes = std::uint64_t{256} << 20;
constexpr std::size_t kStatisticsHashBytes = 16;

std::string PathOfStatistics(const OpenedCheckpoint& checkpoint, const Uuid& uuid) {
  return JoinPath(DerivedDirectory(checkpoint.directory(), uuid), kStatisticsFile);
}

void EncodeInt128(ByteWriter& out, Int128 value) {
  out.U64(static_cast<std::uint64_t>(value));
  out.I64(static_cast<std::int64_t>(value >> 64));
}

Int128 DecodeInt128(ByteReader& in) {
  const std::uint64_t low = in.U64();
  return (static_cast<Int128>(in.I64()) << 64) | low;
}

}  // namespace

Status KeptStatistics::CanKeep(const OpenedCheckpoint& checkpoint) {
  const auto refuse = [&](const char* why) {
    return Status(Code::kUnsupported, checkpoint.directory() + ": " + why);
  };
  if (checkpoint.commit() == nullptr) {
    return refuse("a checkpoint of another program has no place for results");
  }
  if (checkpoint.is_mapped()) return refuse("a name map is applied");
  if (!checkpoint.fs().Can(Ability::kKernelFiles)) return refuse("the store is behind a URL");
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Store store, Store::Open(checkpoint.fs(), JoinPath(checkpoint.directory(), "..")));
  return store.CheckWritable();
}

Result<KeptStatistics> KeptStatistics::Read(const OpenedCheckpoint& checkpoint) {
  const CommitRecord& commit = checkpoint.commit()->record;
  const std::string path = PathOfStatistics(checkpoint, commit.uuid);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes,
                               checkpoint.fs().ReadFile(path, kMaxStatisticsBytes));
  TENSORMOUNT_ASSIGN_OR_RETURN(KeptStatistics kept, Decode(bytes, path));
  if (kept.uuid() != commit.uuid || kept.content_root() != commit.content_root) {
    return Status(Code::kDataLoss, path + ": the statistics belong to another checkpoint");
  }
  return kept;
}

Status KeptStatistics::Write(const OpenedCheckpoint& checkpoint) const {
  const std::string path = PathOfStatistics(checkpoint, uuid_);
  const std::string bytes = Encode();
  if (bytes.size() > kMaxStatisticsBytes) {
    return Status(Code::kResourceExhausted, path + ": statistics of " +
                                                std::to_string(entries_.size()) +
                                                " tensors are more than " +
                                                std::to_string(kMaxStatisticsBytes >> 20) + " MiB");
  }
  FileSystem& fs = checkpoint.fs();
  const std::string store = JoinPath(checkpoint.directory(), "..");
  TENSORMOUNT_RETURN_IF_ERROR(fs.EnsureDirectory(JoinPath(store, store_paths::kDerivedFolder)));
  TENSORMOUNT_RETURN_IF_ERROR(fs.EnsureDirectory(DerivedDirectory(checkpoint.directory(), uuid_)));
  return fs.ReplaceFile(path, bytes);
}

const TensorStatistics* KeptStatistics::Find(const TensorEntry& tensor) const {
  const auto found = entries_.find(tensor.ordinal);
  if (found == entries_.end() || !tensor.has_digest || found->second.digest != tensor.digest) {
    return nullptr;
  }
  return &found->second.statistics;
}

void KeptStatistics::Put(const TensorEntry& tensor, const TensorStatistics& statistics) {
  if (tensor.has_digest) entries_[tensor.ordinal] = {tensor.digest, statistics};
}

std::string KeptStatistics::Encode() const {
  ByteWriter out;
  out.Raw(kStatisticsMagic.data(), kStatisticsMagic.size());
  EncodeUuid(out, uuid_);
  out.Hash(content_root_);
  out.U64(entries_.size());
  for (const auto& [ordinal, entry] : entries_) {
    const TensorStatistics& one = entry.statistics;
    out.U32(ordinal);
    out.U64(entry.digest);
    out.U64(one.count);
    out.U64(one.zeros);
    out.U64(one.subnormals);
    out.U64(one.nan);
    out.U64(one.posinf);
    out.U64(one.neginf);
    out.F64(one.min);
    out.F64(one.max);
    out.F64(one.mean);
    out.F64(one.norm);
    EncodeInt128(out, one.integer_sum);
    EncodeInt128(out, one.integer_min);
    EncodeInt128(out, one.integer_max);
  }
  const Hash128 hash = Xxh3(out.bytes());
  out.Hash(hash);
  return std::move(out.bytes());
}

Result<KeptStatistics> KeptStatistics::Decode(std::string_view bytes, const std::string& what) {
  const Status damaged(Code::kDataLoss, what + ": damaged, or of another version");
  if (bytes.size() < kStatisticsMagic.size() + kStatisticsHashBytes ||
      !bytes.starts_with(kStatisticsMagic)) {
    return damaged;
  }
  const std::string_view hashed = bytes.substr(0, bytes.size() - kStatisticsHashBytes);
  if (ByteReader(bytes.substr(hashed.size()), "hash").Hash() != Xxh3(hashed)) return damaged;
  ByteReader in(hashed.substr(kStatisticsMagic.size()), what);
  const Uuid uuid = DecodeUuid(in);
  KeptStatistics kept(uuid, in.Hash());
  const std::uint64_t count = in.U64();
  for (std::uint64_t i = 0; i < count && in.status().ok(); ++i) {
    const std::uint32_t ordinal = in.U32();
    Entry entry;
    TensorStatistics& one = entry.statistics;
    entry.digest = in.U64();
    one.count = in.U64();
    one.zeros = in.U64();
    one.subnormals = in.U64();
    one.nan = in.U64();
    one.posinf = in.U64();
    one.neginf = in.U64();
    one.min = in.F64();
    one.max = in.F64();
    one.mean = in.F64();
    one.norm = in.F64();
    one.integer_sum = DecodeInt128(in);
    one.integer_min = DecodeInt128(in);
    one.integer_max = DecodeInt128(in);
    kept.entries_.emplace_hint(kept.entries_.end(), ordinal, entry);
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return kept;
}

}  // namespace tensormount
