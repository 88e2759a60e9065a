// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_SAFETENSORS_H_
#define TENSORMOUNT_SHARD_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "base/file_system.h"

// The safetensors format (huggingface/safetensors README, section "Format"): u64 header length,
// JSON header, data. The reader checks every rule, and allocates memory only after checking its
// size against the file and the format's limit of 100,000,000 header bytes.

namespace tensormount {

struct SafetensorsEntry {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  std::uint64_t begin = 0;  // Bytes [begin, end) of the data part.
  std::uint64_t end = 0;
};

// A parsed and checked header: offsets are within the data part, and match the sizes of the shapes.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // Sorted by begin, end (empty ones first), key.
  // Tensors of unknown element types: key to name of the type. They are not in `entries`; only
  // their offsets are checked.
  std::map<std::string, std::string> unknown;
  std::map<std::string, std::string> metadata;
  std::uint64_t data_offset = 0;  // 8 + header length: where the data part begins in the file.
};

// Handling of a tensor of an unknown element type.
enum class UnknownDType {
  kRefuse,   // kUnsupported for the whole file.
  kLeaveOut  // The tensor is only listed in SafetensorsHeader::unknown.
};

// Parses the JSON text of a header. `file_size` is the size of the whole file. kDataLoss names the
// broken rule and the key: header length, UTF-8, JSON (duplicate keys too), types, dtype, shape ×
// dtype = length, overlap, gaps, data past the end or bytes left over. Keys are not checked against
// CheckKey, because the format allows more. kUnsupported for an unknown dtype, more than kMaxRank
// axes, a string over 16 MiB and metadata over 32 MiB. Besides the text, memory is needed only for
// keys, entries and metadata.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view header_json,
                                                 std::uint64_t file_size,
                                                 UnknownDType unknown = UnknownDType::kRefuse);
Result<SafetensorsHeader> ReadSafetensorsHeader(File& file,
                                                UnknownDType unknown = UnknownDType::kRefuse);

// Writes a header tensor by tensor, in the order of the data. Entries are placed without gaps, as
// the format requires.
class SafetensorsHeaderWriter {
 public:
  // `tensors`: expected number of tensors, a capacity hint and not a limit.
  explicit SafetensorsHeaderWriter(std::size_t tensors = 0);

  // Writes the metadata; call it before Add. kInvalidArgument: not UTF-8.
  Status AddMetadata(const std::map<std::string, std::string>& metadata);
  // Writes a tensor, and returns its begin in the data part; it ends where the next tensor begins.
  // The memory of `key` must stay valid until Finish. kUnsupported for a dtype that the format
  // lacks; kInvalidArgument for a key that is not UTF-8, reserved or duplicate, or a shape that
  // overflows or does not fill whole bytes.
  Result<std::uint64_t> Add(std::string_view key, DType dtype, const Dims& shape);
  // The bytes before the data part: u64 length and JSON padded with spaces so that data begin at a
  // multiple of `alignment` (a power of two >= 8). kInvalidArgument for another alignment and for a
  // header over the format's limit.
  Result<std::string> Finish(std::uint64_t alignment = 4096);

 private:
  std::string out_;
  std::unordered_set<std::string_view> keys_;
  std::uint64_t at_ = 0;
};

// The header for these tensors in this order; fills in begin and end of `entries`. The errors are
// those of SafetensorsHeaderWriter.
Result<std::string> MakeSafetensorsHeader(std::vector<SafetensorsEntry>& entries,
                                          const std::map<std::string, std::string>& metadata,
                                          std::uint64_t alignment = 4096);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_SAFETENSORS_H_
