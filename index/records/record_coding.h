// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_RECORD_CODING_H_
#define TENSORMOUNT_INDEX_RECORDS_RECORD_CODING_H_

#include <string>
#include <string_view>
#include <utility>

#include "tensormount/status.h"

#include "base/coding.h"
#include "index/records/inventory.h"

// Records of manifests and the index (docs/format.md, "Records"), above the coding of
// shard/coding.h. Encoders append to a ByteWriter. Decoders check what one record alone can show.

namespace tensormount {

// Limits of docs/format.md, "Limits". Decoders enforce them.
inline constexpr std::size_t kMaxFileNameBytes = 4096;
// Longest producer and longest name of a parent.
inline constexpr std::size_t kMaxTextBytes = 4096;
// Limits of one common value: bytes of its encoding, and number of values in its tree. The second
// limit exists because a value that takes one byte on disk takes much more memory.
inline constexpr std::size_t kMaxCommonBytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxCommonNodes = std::size_t{4} << 20;

// Whether `name` is a relative path without empty, "." or ".." parts and without NUL, of at most
// kMaxFileNameBytes.
bool IsRelativeName(std::string_view name);
// Whether `name` is a relative path below data/, manifest/ or index/ of a checkpoint that cannot
// lead elsewhere. This is the last check before the name in a record is joined to a path. Opens
// below the directory's descriptor also follow no symbolic links.
bool IsSafeName(std::string_view name);

// kInvalidArgument if a tree is deeper than kMaxCommonDepth or exceeds the limits above: "has
// 70000000 bytes, at most 67108864 are allowed". A tree that passes can be encoded and decoded,
// also inside `outer` more containers.
Status CheckCommon(const CommonValue& value, int outer = 0);

// Encoders and decoders in pairs. A decoder that returns no Result leaves a failure in the reader
// (ByteReader::status), where the caller checks it.
void EncodeUuid(ByteWriter& out, const Uuid& uuid);
Uuid DecodeUuid(ByteReader& in);

void EncodeInfo(ByteWriter& out, const CheckpointInfo& info);
// `from_memory`: the record was never on disk. Only then may the root (of a foreign checkpoint)
// begin with a URL scheme; a stored root is a path on the host.
Result<CheckpointInfo> DecodeInfo(ByteReader& in, bool from_memory = false);

void EncodeFile(ByteWriter& out, const FileRecord& file);
Result<FileRecord> DecodeFile(ByteReader& in);

void EncodeObject(ByteWriter& out, const ObjectRecord& object);
Result<ObjectRecord> DecodeObject(ByteReader& in, std::string_view what);

void EncodeExtra(ByteWriter& out, const ExtraRange& extra);
Result<ExtraRange> DecodeExtra(ByteReader& in);

// Encodes a value without its name. The value must have passed CheckCommon. Equal values have equal
// bytes, and DecodeCommon refuses any other encoding. Recursive, at most kMaxCommonDepth deep.
void EncodeCommon(ByteWriter& out, const CommonValue& value);
Result<CommonValue> DecodeCommon(ByteReader& in, std::string_view what);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_RECORD_CODING_H_
