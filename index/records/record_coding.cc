// SPDX-License-Identifier: Apache-2.0
// Encoders and decoders of the records in manifests and the index: info, files, objects, extra
// ranges, common values. Common values from outside may be trees of any shape, so depth, counts and
// sizes are checked before allocation.
#include "index/records/record_coding.h"

#include <utility>
#include <vector>

#include "base/errors.h"
#include "shard/coding.h"

namespace tensormount {
namespace {

using ValueKind = CommonValue::Kind;

// Items of a list or tuple; null for other values.
const std::vector<CommonValue>* ItemsOf(const CommonValue& value) {
  if (const auto* list = value.get_if<CommonList>()) return &list->items;
  if (const auto* tuple = value.get_if<CommonTuple>()) return &tuple->items;
  return nullptr;
}

// Size of a tree's encoding. CheckCommon computes it when a common value is set, so that a tree
// that could not be decoded is refused early.
struct CommonSize {
  std::size_t bytes = 0;
  std::size_t nodes = 0;

  // Adds the size of `value`. Returns false if the tree is too deep.
  bool Add(const CommonValue& value, int depth) {
    ++nodes;
    ++bytes;
    if (const auto* s = value.get_if<std::string>()) {
      bytes += 4 + s->size();
    } else if (const auto* data = value.get_if<CommonBytes>()) {
      bytes += 4 + data->data.size();
    } else if (const auto* items = ItemsOf(value)) {
      bytes += 4;
      if (depth == kMaxCommonDepth) return false;
      for (const CommonValue& item : *items) {
        if (!Add(item, depth + 1)) return false;
      }
    } else if (const auto* dict = value.get_if<CommonDict>()) {
      bytes += 4;
      if (depth == kMaxCommonDepth) return false;
      for (const auto& [key, item] : dict->items) {
        const auto* text = std::get_if<std::string>(&key);
        bytes += text == nullptr ? 9 : 5 + text->size();
        if (!Add(item, depth + 1)) return false;
      }
    } else if (value.kind() == ValueKind::kBool) {
      bytes += 1;
    } else if (value.kind() != ValueKind::kNone) {
      bytes += 8;
    }
    return true;
  }
};

// Decodes one tree. A count of items is checked before memory is allocated for them.
class CommonDecoder {
 public:
  CommonDecoder(ByteReader& in, std::string_view what)
      : in_(in), what_(what), begin_(in.position()) {}

  // Decodes the value at `depth`. After each value, the bytes read and the number of values are
  // compared with their limits, so that a small record cannot make a huge tree.
  Result<CommonValue> Value(int depth) {
    const std::uint8_t kind = in_.U8();
    CommonValue value;
    switch (static_cast<ValueKind>(kind)) {
      case ValueKind::kBool: {
        const std::uint8_t b = in_.U8();
        if (b > 1) return DataLoss(what_, "a bool value is neither 0 nor 1");
        value = b != 0;
        break;
      }
      case ValueKind::kInt:
        value = in_.I64();
        break;
      case ValueKind::kUnsigned: {
        const std::uint64_t u = in_.U64();
        value = u;
        // Only values above the range of int64 are unsigned. A second encoding of an int is
        // refused.
        if (value.kind() != ValueKind::kUnsigned && in_.status().ok()) {
          return DataLoss(what_,
                          "a value is stored as unsigned, although it fits a signed integer");
        }
        break;
      }
      case ValueKind::kFloat:
        value = in_.F64();
        break;
      case ValueKind::kString:
        value = std::string(in_.String(kMaxCommonBytes));
        break;
      case ValueKind::kBytes:
        value = CommonBytes{std::string(in_.String(kMaxCommonBytes))};
        break;
      case ValueKind::kNone:
        break;
      case ValueKind::kList: {
        CommonList list;
        TENSORMOUNT_RETURN_IF_ERROR(Items(depth, list.items));
        value = std::move(list);
        break;
      }
      case ValueKind::kTuple: {
        CommonTuple tuple;
        TENSORMOUNT_RETURN_IF_ERROR(Items(depth, tuple.items));
        value = std::move(tuple);
        break;
      }
      case ValueKind::kDict: {
        CommonDict dict;
        TENSORMOUNT_RETURN_IF_ERROR(Entries(depth, dict));
        value = std::move(dict);
        break;
      }
      default:
        return DataLoss(what_, "unknown kind of value " + std::to_string(kind));
    }
    TENSORMOUNT_RETURN_IF_ERROR(in_.status());
    if (in_.position() - begin_ > kMaxCommonBytes || ++nodes_ > kMaxCommonNodes) {
      return DataLoss(what_, "a common value is too large");
    }
    return value;
  }

 private:
  // Reads the number of items of a container at `depth`.
  Result<std::uint32_t> Count(int depth) {
    if (depth >= kMaxCommonDepth) {
      return DataLoss(what_,
                      "nested more than " + std::to_string(kMaxCommonDepth) + " levels deep");
    }
    const std::uint32_t count = in_.U32();
    TENSORMOUNT_RETURN_IF_ERROR(in_.status());
    // Every item takes at least one byte, so a count above the remaining bytes is refused before
    // memory is allocated.
    if (count > in_.left())
      return DataLoss(what_, "the number of items exceeds the remaining bytes");
    return count;
  }

  Status Items(int depth, std::vector<CommonValue>& items) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t count, Count(depth));
    for (std::uint32_t i = 0; i < count; ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(CommonValue item, Value(depth + 1));
      items.push_back(std::move(item));
    }
    return Status();
  }

  Status Entries(int depth, CommonDict& dict) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t count, Count(depth));
    for (std::uint32_t i = 0; i < count; ++i) {
      CommonKey key;
      const std::uint8_t kind = in_.U8();
      if (kind == static_cast<std::uint8_t>(ValueKind::kInt)) {
        key = in_.I64();
      } else if (kind == static_cast<std::uint8_t>(ValueKind::kString)) {
        key = std::string(in_.String(kMaxCommonBytes));
      } else {
        return DataLoss(what_, "unknown kind of key " + std::to_string(kind));
      }
      TENSORMOUNT_RETURN_IF_ERROR(in_.status());
      // Keys must rise, so that a dict has one encoding and no key twice.
      if (!dict.items.empty() && !(dict.items.rbegin()->first < key)) {
        return DataLoss(what_, "the keys of a dict are not in order");
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(CommonValue value, Value(depth + 1));
      dict.items.emplace_hint(dict.items.end(), std::move(key), std::move(value));
    }
    return Status();
  }

  ByteReader& in_;
  const std::string_view what_;
  const std::size_t begin_;
  std::size_t nodes_ = 0;
};

}  // namespace

// Checks whole components instead of searching "..": "a..b" is a name, "a/../b" is not relative.
// Backslashes are ordinary characters.
bool IsRelativeName(std::string_view name) {
  if (name.size() > kMaxFileNameBytes || name.find('\0') != std::string_view::npos) return false;
  while (true) {
    const std::size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

bool IsSafeName(std::string_view name) {
  return (name.starts_with("data/") || name.starts_with("manifest/") ||
          name.starts_with("index/")) &&
         IsRelativeName(name);
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
  if (!info.self_contained) out.String(info.root);
}

Result<CheckpointInfo> DecodeInfo(ByteReader& in, bool from_memory) {
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
  if (!info.self_contained) info.root = in.String(kMaxFileNameBytes);
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (info.self_contained) return info;
  std::string_view path = info.root;
  const std::size_t scheme = path.find("://");
  const bool has_scheme =
      from_memory && scheme != std::string_view::npos && !path.starts_with('/') && scheme > 0;
  if (has_scheme) path.remove_prefix(scheme + 3);
  const bool absolute = path.starts_with('/');
  if (absolute) path.remove_prefix(1);
  if ((absolute && path.empty()) || ((absolute || has_scheme) && IsRelativeName(path))) return info;
  return DataLoss("info", "\"" + info.root + "\" is not an absolute path");
}

void EncodeFile(ByteWriter& out, const FileRecord& file) {
  out.String(file.name);
  out.U8(static_cast<std::uint8_t>(file.placement));
  out.U64(file.length);
  out.Hash(file.root);
  if (file.placement == Placement::kForeign) {
    out.I64(file.mtime_seconds);
    out.I64(file.mtime_nanoseconds);
  }
}

Result<FileRecord> DecodeFile(ByteReader& in) {
  FileRecord file;
  file.name = in.String(kMaxFileNameBytes);
  const std::uint8_t placement = in.U8();
  file.length = in.U64();
  file.root = in.Hash();
  if (placement == static_cast<std::uint8_t>(Placement::kForeign)) {
    file.mtime_seconds = in.I64();
    file.mtime_nanoseconds = in.I64();
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (placement < static_cast<std::uint8_t>(Placement::kTensorFile) ||
      placement > static_cast<std::uint8_t>(Placement::kSafetensors)) {
    return DataLoss("file " + file.name, "unknown placement " + std::to_string(placement));
  }
  file.placement = static_cast<Placement>(placement);
  // The name of a foreign file is below CheckpointInfo::root, any other name below data/. An
  // untrusted record must not lead elsewhere.
  const bool named_well = file.placement == Placement::kForeign
                              ? IsRelativeName(file.name)
                              : file.name.starts_with("data/") && IsSafeName(file.name);
  if (!named_well) return DataLoss("file " + file.name, "not a valid data file name");
  return file;
}

// Encoders and decoders in pairs, each in the field order of docs/format.md, "Records".
void EncodeObject(ByteWriter& out, const ObjectRecord& object) {
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

Result<ObjectRecord> DecodeObject(ByteReader& in, std::string_view what) {
  ObjectRecord object;
  object.key = in.String(kMaxKeyBytes);
  TENSORMOUNT_RETURN_IF_ERROR(DecodeGridPosition(in, what, object.key, object.index, object.grid));
  object.file = in.U32();
  object.offset = in.U64();
  object.length = in.U64();
  object.hash = in.Hash();
  object.manifest = in.U32();
  object.first_leaf = in.U64();
  object.mtime = in.I64();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (Status s = CheckKey(object.key); !s.ok()) return DataLoss(what, s.message());
  // The sum must not wrap, because it is compared with file lengths later.
  if (object.offset + object.length < object.offset) {
    return DataLoss(what, "object " + object.key + ": offset and length overflow");
  }
  return object;
}

void EncodeExtra(ByteWriter& out, const ExtraRange& extra) {
  out.U32(extra.file);
  out.U64(extra.offset);
  out.U64(extra.length);
  out.Hash(extra.hash);
  out.U32(extra.manifest);
  out.U64(extra.first_leaf);
}

Result<ExtraRange> DecodeExtra(ByteReader& in) {
  ExtraRange extra;
  extra.file = in.U32();
  extra.offset = in.U64();
  extra.length = in.U64();
  extra.hash = in.Hash();
  extra.manifest = in.U32();
  extra.first_leaf = in.U64();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return extra;
}

Status CheckCommon(const CommonValue& value, int outer) {
  CommonSize size;
  if (!size.Add(value, outer)) {
    return Status(
        Code::kInvalidArgument,
        "is nested more than " + std::to_string(kMaxCommonDepth - outer) + " levels deep");
  }
  if (size.bytes > kMaxCommonBytes) {
    return Status(Code::kInvalidArgument, "has " + std::to_string(size.bytes) + " bytes, at most " +
                                              std::to_string(kMaxCommonBytes) + " are allowed");
  }
  if (size.nodes > kMaxCommonNodes) {
    return Status(Code::kInvalidArgument, "has " + std::to_string(size.nodes) +
                                              " nested values, at most " +
                                              std::to_string(kMaxCommonNodes) + " are allowed");
  }
  return Status();
}

void EncodeCommon(ByteWriter& out, const CommonValue& value) {
  out.U8(static_cast<std::uint8_t>(value.kind()));
  if (const bool* b = value.get_if<bool>()) {
    out.U8(*b ? 1 : 0);
  } else if (const auto* i = value.get_if<std::int64_t>()) {
    out.I64(*i);
  } else if (const auto* u = value.get_if<std::uint64_t>()) {
    out.U64(*u);
  } else if (const double* d = value.get_if<double>()) {
    out.F64(*d);
  } else if (const auto* s = value.get_if<std::string>()) {
    out.String(*s);
  } else if (const auto* bytes = value.get_if<CommonBytes>()) {
    out.String(bytes->data);
  } else if (const auto* items = ItemsOf(value)) {
    out.U32(static_cast<std::uint32_t>(items->size()));
    for (const CommonValue& item : *items) EncodeCommon(out, item);
  } else if (const auto* dict = value.get_if<CommonDict>()) {
    out.U32(static_cast<std::uint32_t>(dict->items.size()));
    for (const auto& [key, item] : dict->items) {
      // An integer key is encoded like an integer value.
      if (const auto* number = std::get_if<std::int64_t>(&key)) {
        out.U8(static_cast<std::uint8_t>(ValueKind::kInt));
        out.I64(*number);
      } else {
        out.U8(static_cast<std::uint8_t>(ValueKind::kString));
        out.String(*std::get_if<std::string>(&key));
      }
      EncodeCommon(out, item);
    }
  }
}

Result<CommonValue> DecodeCommon(ByteReader& in, std::string_view what) {
  return CommonDecoder(in, what).Value(0);
}

}  // namespace tensormount
