// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_RECORD_CODING_H_
#define TENSORMOUNT_INDEX_RECORDS_RECORD_CODING_H_

#include <string>
#include <string_view>
#include <utility>

#include "tensormount/status.h"

#include "base/coding.h"
#include "index/records/inventory.h"

// Logical records as manifests and the index write them (docs/format.md, "Records"), above those of
// shard/coding.h. Encoders
// append; decoders check every field and give kDataLoss that begins with the reader's name.

namespace tensormount {

// Limits of docs/format.md, "Limits". Encoders and decoders use the same ones: what was written can
// always be read again.
inline constexpr std::size_t kMaxFileNameBytes = 4096;
// The producer, the name of the parent.
inline constexpr std::size_t kMaxTextBytes = 4096;
// Of the encoding of one common value, and of the values in its tree, itself included: a node in
// memory is much larger than its one byte on disk.
inline constexpr std::size_t kMaxCommonBytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxCommonNodes = std::size_t{4} << 20;

// Whether `name` is a path below a folder, without empty, "." or ".." parts.
bool IsRelativeName(std::string_view name);
// Whether `name` is a relative path below a checkpoint's data/, manifest/ or index/ that can lead
// nowhere else.
// The last line of defence before a name from a record is joined to a path; files are opened below
// a descriptor without following links besides.
bool IsSafeName(std::string_view name);

// kInvalidArgument where a tree is nested over kMaxCommonDepth deep or larger than the limits
// above: "has 70000000 bytes, at most 67108864 are allowed". What passes can be encoded and
// decoded, also inside of `outer` more containers.
Status CheckCommon(const CommonValue& value, int outer = 0);

// Pairs. A decoder that returns no Result leaves failures in the reader (ByteReader::status), where
// its caller finds them.
void EncodeUuid(ByteWriter& out, const Uuid& uuid);
Uuid DecodeUuid(ByteReader& in);

void EncodeInfo(ByteWriter& out, const CheckpointInfo& info);
Result<CheckpointInfo> DecodeInfo(ByteReader& in);

void EncodeFile(ByteWriter& out, const FileRecord& file);
Result<FileRecord> DecodeFile(ByteReader& in);

void EncodeObject(ByteWriter& out, const ObjectRecord& object);
Result<ObjectRecord> DecodeObject(ByteReader& in, std::string_view what);

void EncodeExtra(ByteWriter& out, const ExtraRange& extra);
Result<ExtraRange> DecodeExtra(ByteReader& in);

// The value alone. Equal values have equal bytes, and decoding takes no others. To be checked
// first (CheckCommon).
// Recursive, at most kMaxCommonDepth deep.
void EncodeCommon(ByteWriter& out, const CommonValue& value);
Result<CommonValue> DecodeCommon(ByteReader& in, std::string_view what);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_RECORD_CODING_H_
