// SPDX-License-Identifier: Apache-2.0
#include "index/record_coding.h"

namespace tensormount {
namespace {

Status Broken(std::string_view what, std::string_view why) {
  return Status(Code::kDataLoss, std::string(what) + ": " + std::string(why));
}

Result<Dims> DecodeDims(ByteReader& in, int max_rank, std::string_view what) {
  const std::uint8_t rank = in.U8();
  if (rank > max_rank) return Broken(what, "rank " + std::to_string(rank));
  Dims dims;
  for (int a = 0; a < rank; ++a) dims.push_back(in.I64());
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return dims;
}

}  // namespace

bool IsSafeName(std::string_view name) {
  if (name.size() > kMaxFileNameBytes || name.find('\0') != std::string_view::npos) return false;
  if (!name.starts_with("data/") && !name.starts_with("manifest/") && !name.starts_with("index/")) {
    return false;
  }
  while (true) {
    const std::size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

std::size_t CommonBytesOf(const CommonValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return text->size();
  if (const auto* bytes = std::get_if<CommonBytes>(&value)) return bytes->data.size();
  return 0;
}

void EncodeUuid(ByteWriter& out, const Uuid& uuid) {
  out.U64(uuid.high);
  out.U64(uuid.low);
}

Uuid DecodeUuid(ByteReader& in) {
  Uuid uuid;
  uuid.high = in.U64();
  uuid.low = in.U64();
  return uuid;
}

void EncodeDims(ByteWriter& out, const Dims& dims) {
  out.U8(static_cast<std::uint8_t>(dims.rank()));
  for (const std::int64_t d : dims) out.I64(d);
}

void EncodeInfo(ByteWriter& out, const CheckpointInfo& info) {
  EncodeUuid(out, info.uuid);
  out.U64(info.generation);
  EncodeUuid(out, info.parent);
  out.String(info.parent_name);
  out.String(info.producer);
  out.U32(info.world_size);
  out.I64(info.created);
  out.I64(info.json_mtime);
  out.I64(info.common_mtime);
  out.U8(info.self_contained ? 1 : 0);
}

Result<CheckpointInfo> DecodeInfo(ByteReader& in) {
  CheckpointInfo info;
  info.uuid = DecodeUuid(in);
  info.generation = in.U64();
  info.parent = DecodeUuid(in);
  info.parent_name = in.String(kMaxTextBytes);
  info.producer = in.String(kMaxTextBytes);
  info.world_size = in.U32();
  info.created = in.I64();
  info.json_mtime = in.I64();
  info.common_mtime = in.I64();
  info.self_contained = in.U8() != 0;
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return info;
}

void EncodeFile(ByteWriter& out, const FileRecord& file) {
  out.String(file.name);
  out.U8(static_cast<std::uint8_t>(file.placement));
  out.U64(file.length);
  out.Hash(file.root);
}

Result<FileRecord> DecodeFile(ByteReader& in) {
  FileRecord file;
  file.name = in.String(kMaxFileNameBytes);
  const std::uint8_t placement = in.U8();
  file.length = in.U64();
  file.root = in.Hash();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (placement < static_cast<std::uint8_t>(Placement::kTensorFile) ||
      placement > static_cast<std::uint8_t>(Placement::kSafetensors)) {
    return Broken("file " + file.name, "unknown placement " + std::to_string(placement));
  }
  file.placement = static_cast<Placement>(placement);
  const bool named_well =
      file.placement == Placement::kForeign
          ? file.name.starts_with("/") && file.name.find('\0') == std::string::npos
          : file.name.starts_with("data/") && IsSafeName(file.name);
  if (!named_well) return Broken("file " + file.name, "not a name of a data file");
  return file;
}

void EncodeMeta(ByteWriter& out, const TensorMeta& meta) {
  out.String(meta.key());
  out.U8(static_cast<std::uint8_t>(meta.dtype()));
  EncodeDims(out, meta.shape());
}

Result<TensorMeta> DecodeMeta(ByteReader& in, std::string_view what) {
  std::string key(in.String(kMaxKeyBytes));
  const std::uint8_t number = in.U8();
  TENSORMOUNT_ASSIGN_OR_RETURN(Dims shape, DecodeDims(in, kMaxRank, what));
  Result<DType> dtype = DTypeFromNumber(number);
  if (!dtype.ok()) return dtype.status().WithContext(std::string(what) + ": tensor " + key);
  Result<TensorMeta> meta = TensorMeta::Make(std::move(key), dtype.value(), shape);
  if (!meta.ok()) return Broken(what, meta.status().message());
  return meta;
}

void EncodeObject(ByteWriter& out, const ObjectContent& object) {
  out.String(object.key);
  EncodeDims(out, object.index);
  EncodeDims(out, object.grid);
  out.U32(object.file);
  out.U64(object.offset);
  out.U64(object.length);
  out.Hash(object.hash);
  out.U32(object.manifest);
  out.U64(object.first_leaf);
  out.I64(object.mtime);
}

Result<ObjectContent> DecodeObject(ByteReader& in, std::string_view what) {
  ObjectContent object;
  object.key = in.String(kMaxKeyBytes);
  TENSORMOUNT_ASSIGN_OR_RETURN(object.index, DecodeDims(in, kMaxRank, what));
  TENSORMOUNT_ASSIGN_OR_RETURN(object.grid, DecodeDims(in, kMaxRank, what));
  object.file = in.U32();
  object.offset = in.U64();
  object.length = in.U64();
  object.hash = in.Hash();
  object.manifest = in.U32();
  object.first_leaf = in.U64();
  object.mtime = in.I64();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (Status s = CheckKey(object.key); !s.ok()) return Broken(what, s.message());
  if (object.index.rank() != object.grid.rank()) {
    return Broken(what, "object " + object.key + ": index and grid differ in rank");
  }
  for (int a = 0; a < object.grid.rank(); ++a) {
    if (object.index[a] < 0 || object.index[a] >= object.grid[a]) {
      return Broken(what, "object " + object.key + ": part " + object.index.ToString() +
                              " is not on its grid " + object.grid.ToString());
    }
  }
  if (object.offset + object.length < object.offset) {
    return Broken(what, "object " + object.key + ": offset and length overflow");
  }
  return object;
}

void EncodeExtra(ByteWriter& out, const ExtraPiece& extra) {
  out.U32(extra.file);
  out.U64(extra.offset);
  out.U64(extra.length);
  out.Hash(extra.hash);
  out.U32(extra.manifest);
  out.U64(extra.first_leaf);
}

Result<ExtraPiece> DecodeExtra(ByteReader& in) {
  ExtraPiece extra;
  extra.file = in.U32();
  extra.offset = in.U64();
  extra.length = in.U64();
  extra.hash = in.Hash();
  extra.manifest = in.U32();
  extra.first_leaf = in.U64();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return extra;
}

void EncodeCommon(ByteWriter& out, const CommonValue& value) {
  out.U8(static_cast<std::uint8_t>(value.index()));
  if (const auto* b = std::get_if<bool>(&value)) {
    out.U8(*b ? 1 : 0);
  } else if (const auto* i = std::get_if<std::int64_t>(&value)) {
    out.I64(*i);
  } else if (const auto* d = std::get_if<double>(&value)) {
    out.F64(*d);
  } else if (const auto* s = std::get_if<std::string>(&value)) {
    out.String(*s);
  } else {
    out.String(std::get<CommonBytes>(value).data);
  }
}

Result<CommonValue> DecodeCommon(ByteReader& in, std::string_view what) {
  CommonValue value;
  switch (const std::uint8_t kind = in.U8(); kind) {
    case 0: {
      const std::uint8_t b = in.U8();
      if (b > 1) return Broken(what, "a bool that is neither");
      value = b != 0;
      break;
    }
    case 1:
      value = in.I64();
      break;
    case 2:
      value = in.F64();
      break;
    case 3:
      value = std::string(in.String(kMaxCommonBytes));
      break;
    case 4:
      value = CommonBytes{std::string(in.String(kMaxCommonBytes))};
      break;
    default:
      return Broken(what, "unknown kind of value " + std::to_string(kind));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return value;
}

}  // namespace tensormount
