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
// JSON header, data. Reader: every rule is checked; nothing is allocated before its size was
// checked against the file and the format's limit of 100,000,000 header bytes.

namespace tensormount {

struct SafetensorsEntry {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  std::uint64_t begin = 0;  // In the data part.
  std::uint64_t end = 0;
};

// What a header says, all of it checked: begins and ends are within the data part, and each entry's
// bytes are as many as its shape takes.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // Sorted by begin, end (empty ones first), key.
  // Tensors of element types that we do not know, by key, with the type's name: not in `entries`.
  // Their bytes are within the data part, and nothing else is.
  std::map<std::string, std::string> unknown;
  std::map<std::string, std::string> metadata;
  std::uint64_t data_offset = 0;  // 8 + header length: where the data part begins in the file.
};

// What to do about a tensor of an element type that we do not know.
enum class UnknownDType {
  kRefuse,   // kUnsupported for the whole file.
  kLeaveOut  // SafetensorsHeader::unknown.
};

// `file_size` is the whole file's. kDataLoss says which rule is broken and by which key: header
// length, UTF-8, JSON (duplicate keys too), types, dtype, shape × dtype = length, overlap, gaps,
// data past the end or bytes left over. Keys are not checked against CheckKey: the format
// allows more. kUnsupported for a dtype that we do not know, for ranks over kMaxRank, for a string
// of over 16 MiB and metadata of over 32 MiB. Memory besides the text is that of the entries and
// the metadata.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view header_json,
                                                 std::uint64_t file_size,
                                                 UnknownDType unknown = UnknownDType::kRefuse);
Result<SafetensorsHeader> ReadSafetensorsHeader(File& file,
                                                UnknownDType unknown = UnknownDType::kRefuse);

// Writes a header, tensor by tensor: the order of calls is that of the data. Entries are placed
// without gaps, as the format demands.
class SafetensorsHeaderWriter {
 public:
  // Memory for so many tensors, not a limit.
  explicit SafetensorsHeaderWriter(std::size_t tensors = 0);

  // Before all tensors. kInvalidArgument: not UTF-8.
  Status AddMetadata(const std::map<std::string, std::string>& metadata);
  // Where the tensor begins in the data part; it ends where the next one begins. `key` is kept as
  // it is until Finish. kUnsupported for a dtype that the format lacks; kInvalidArgument for a key
  // that is no UTF-8, reserved or was added before, or a shape that overflows.
  Result<std::uint64_t> Add(std::string_view key, DType dtype, const Dims& shape);
  // Bytes 0 up to the data part: u64 length and JSON padded with spaces so that data begin at a
  // multiple of `alignment` (a power of two >= 8). kInvalidArgument for another alignment and a
  // header over the format's limit.
  Result<std::string> Finish(std::uint64_t alignment = 4096);

 private:
  std::string out_;
  std::unordered_set<std::string_view> keys_;
  std::uint64_t at_ = 0;
};

// The header for these tensors in this order; begin and end of `entries` are filled in. Errors: as
// those of the writer.
Result<std::string> MakeSafetensorsHeader(std::vector<SafetensorsEntry>& entries,
                                          const std::map<std::string, std::string>& metadata,
                                          std::uint64_t alignment = 4096);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_SAFETENSORS_H_
