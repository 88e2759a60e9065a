// SPDX-License-Identifier: Apache-2.0
#include "collective/validate/descriptor.h"

#include <bit>
#include <unordered_map>
#include <utility>

#include "index/record_coding.h"
#include "state/common_records.h"

namespace tensormount {
namespace {

constexpr std::string_view kMagic("TMSAVED\0", 8);
constexpr std::size_t kMaxPath = 1 << 16;

void WriteDims(ByteWriter& out, const Dims& dims) {
  out.U8(static_cast<std::uint8_t>(dims.rank()));
  for (std::int64_t v : dims) out.I64(v);
}

Result<Dims> ReadDims(ByteReader& in) {
  const int rank = in.U8();
  if (rank > kMaxRank)
    return Status(Code::kDataLoss, "rank " + std::to_string(rank) + " is too high");
  Dims dims;
  for (int a = 0; a < rank; ++a) dims.push_back(in.I64());
  return dims;
}

Result<ShardDescriptor> ReadShard(ByteReader& in, bool is_short,
                                  const std::vector<TensorMeta>& tensors) {
  const std::string_view bytes = in.Raw(is_short ? kShortShardBytes : kLongShardBytes);
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  ShardRecord record;
  const bool sane = is_short ? ReadShardRecord<kShortShardRank>(bytes.data(), &record)
                             : ReadShardRecord<kMaxRank>(bytes.data(), &record);
  if (!sane || record.tensor >= tensors.size()) {
    return Status(Code::kDataLoss, "a shard record is damaged");
  }
  const TensorMeta& meta = tensors[record.tensor];
  if ((meta.shape().rank() <= kShortShardRank) != is_short) {
    return Status(Code::kDataLoss, "a shard record is of another rank");
  }
  Result<Region> region = RegionOf(record, meta.shape());
  if (!region.ok()) return region.status().WithContext("tensor " + meta.key());
  return ShardDescriptor{record.tensor, record.item, std::move(region).value()};
}

Status ReadTensors(ByteReader& in, RankDescriptor& d) {
  const std::uint32_t count = in.U32();
  for (std::uint32_t i = 0; i < count && in.status().ok(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(DType dtype, DTypeFromNumber(in.U8()));
    TENSORMOUNT_ASSIGN_OR_RETURN(Dims shape, ReadDims(in));
    const std::string_view key = in.String(kMaxKeyBytes);
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, TensorMeta::Make(std::string(key), dtype, shape));
    d.tensors.push_back(std::move(meta));
  }
  return in.status();
}

Status ReadShards(ByteReader& in, RankDescriptor& d) {
  const std::uint64_t n_short = in.U32();
  const std::uint64_t n_long = in.U32();
  if (n_short * kShortShardBytes + n_long * kLongShardBytes > in.left()) {
    return Status(Code::kDataLoss, "more shards are announced than there are bytes");
  }
  d.shards.reserve(n_short + n_long);
  for (std::uint64_t i = 0; i < n_short + n_long; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(ShardDescriptor shard, ReadShard(in, i < n_short, d.tensors));
    d.shards.push_back(std::move(shard));
  }
  return in.status();
}

Status ReadObjects(ByteReader& in, RankDescriptor& d) {
  const std::uint32_t count = in.U32();
  for (std::uint32_t i = 0; i < count && in.status().ok(); ++i) {
    ObjectDescriptor object;
    object.key = in.String(kMaxKeyBytes);
    TENSORMOUNT_ASSIGN_OR_RETURN(object.index, ReadDims(in));
    TENSORMOUNT_ASSIGN_OR_RETURN(object.grid, ReadDims(in));
    object.length = in.U64();
    object.hash = in.Hash();
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    // A wish (loads) may leave the grid out; it has no bytes.
    const bool wish = object.length == 0 && object.grid.rank() == 0;
    if (!wish && object.index.rank() != object.grid.rank()) {
      return Status(Code::kDataLoss, "object " + object.key + ": index and grid differ in rank");
    }
    for (int a = 0; a < object.grid.rank(); ++a) {
      if (object.index[a] < 0 || object.index[a] >= object.grid[a]) {
        return Status(Code::kDataLoss, "object " + object.key + ": index outside of its grid");
      }
    }
    d.objects.push_back(std::move(object));
  }
  return in.status();
}

Status ReadBody(ByteReader& in, RankDescriptor& d) {
  d.path = in.String(kMaxPath);
  const std::uint8_t placement = in.U8();
  const std::uint8_t replicas = in.U8();
  if (placement > static_cast<std::uint8_t>(PlacementRule::kSafetensors) ||
      replicas > static_cast<std::uint8_t>(ReplicaCheck::kOff)) {
    return Status(Code::kDataLoss, "an option is damaged");
  }
  d.placement = static_cast<PlacementRule>(placement);
  d.replicas = static_cast<ReplicaCheck>(replicas);
  d.if_exists = in.U8() != 0 ? IfExists::kReplace : IfExists::kFail;
  d.producer = in.String(kMaxTextBytes);
  d.now = in.I64();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  TENSORMOUNT_RETURN_IF_ERROR(ReadTensors(in, d));
  TENSORMOUNT_RETURN_IF_ERROR(ReadShards(in, d));
  TENSORMOUNT_RETURN_IF_ERROR(ReadObjects(in, d));
  const std::uint32_t count = in.U32();
  for (std::uint32_t i = 0; i < count && in.status().ok(); ++i) {
    CommonDescriptor common;
    common.name = in.String(kMaxKeyBytes);
    common.hash = in.Hash();
    d.common.push_back(std::move(common));
  }
  return in.Finish();
}

}  // namespace

std::string EncodeDescriptor(const StateDict& state, std::string_view path,
                             const SaveOptions& options, int rank, int world) {
  ByteWriter out;
  out.Raw(kMagic.data(), kMagic.size());
  out.U32(kDescriptorVersion);
  out.U32(static_cast<std::uint32_t>(rank));
  out.U32(static_cast<std::uint32_t>(world));
  Status status = state.status();
  if (status.ok() && (path.size() > kMaxPath || options.producer.size() > kMaxTextBytes)) {
    status = Status(Code::kInvalidArgument, "the path or the name of the producer is too long");
  }
  if (status.ok() && state.tensors().size() > UINT32_MAX) {
    status = Status(Code::kInvalidArgument, "more than 2^32 shards on one rank");
  }
  WriteStatus(out, status);
  if (!status.ok()) return std::move(out.bytes());

  out.String(path);
  out.U8(static_cast<std::uint8_t>(options.placement));
  out.U8(static_cast<std::uint8_t>(options.replicas));
  out.U8(options.if_exists == IfExists::kReplace ? 1 : 0);
  out.String(options.producer);
  out.I64(options.now);

  std::unordered_map<std::string_view, std::uint32_t> numbers;
  std::vector<const StateDict::TensorItem*> table;
  std::uint32_t n_short = 0;
  std::uint32_t n_long = 0;
  for (const StateDict::TensorItem& item : state.tensors()) {
    const auto next = static_cast<std::uint32_t>(table.size());
    if (numbers.try_emplace(item.key, next).second) table.push_back(&item);
    ++(item.shard.global_shape.rank() <= kShortShardRank ? n_short : n_long);
  }
  out.U32(static_cast<std::uint32_t>(table.size()));
  for (const StateDict::TensorItem* item : table) {
    out.U8(static_cast<std::uint8_t>(item->shard.data.dtype));
    WriteDims(out, item->shard.global_shape);
    out.String(item->key);
  }
  out.U32(n_short);
  out.U32(n_long);
  for (const bool want_long : {false, true}) {
    for (std::size_t i = 0; i < state.tensors().size(); ++i) {
      const StateDict::TensorItem& item = state.tensors()[i];
      if ((item.shard.global_shape.rank() > kShortShardRank) != want_long) continue;
      WriteShardRecord(out, numbers.at(item.key), static_cast<std::uint32_t>(i), item.shard.region,
                       item.shard.replica);
    }
  }
  out.U32(static_cast<std::uint32_t>(state.objects().size()));
  for (const StateDict::ObjectItem& item : state.objects()) {
    out.String(item.key);
    WriteDims(out, item.place.index);
    WriteDims(out, item.place.grid);
    out.U64(item.bytes.size());
    out.Hash(Xxh3(item.bytes));
  }
  const CommonValues common = SharedCommonRecords(state);
  out.U32(static_cast<std::uint32_t>(common.size()));
  for (const auto& [name, value] : common) {
    out.String(name);
    ByteWriter encoded;
    EncodeCommon(encoded, value);
    out.Hash(Xxh3(encoded.bytes()));
  }
  return std::move(out.bytes());
}

Result<RankDescriptor> DecodeDescriptor(std::string_view bytes, int rank, int world) {
  const std::string what = "descriptor of rank " + std::to_string(rank);
  ByteReader in(bytes, what);
  const std::string_view magic = in.Raw(kMagic.size());
  const std::uint32_t version = in.U32();
  if (magic != kMagic || version != kDescriptorVersion) {
    return Status(Code::kInvalidArgument,
                  "rank " + std::to_string(rank) + " runs another version of tensormount");
  }
  const std::uint32_t its_rank = in.U32();
  const std::uint32_t its_world = in.U32();
  if (its_rank != static_cast<std::uint32_t>(rank) ||
      its_world != static_cast<std::uint32_t>(world)) {
    return Status(Code::kInvalidArgument, "rank " + std::to_string(rank) +
                                              " takes itself for rank " + std::to_string(its_rank) +
                                              " of " + std::to_string(its_world));
  }
  RankDescriptor d;
  d.status = ReadStatus(in);
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (!d.status.ok()) return d;
  if (Status status = ReadBody(in, d); !status.ok()) {
    return status.code() == Code::kDataLoss
               ? status.WithContext(what)
               : Status(Code::kDataLoss, what + ": " + status.message());
  }
  return d;
}

}  // namespace tensormount
