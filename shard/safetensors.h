// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_SAFETENSORS_H_
#define TENSORMOUNT_SHARD_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
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

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // Sorted by begin, end (empty ones first), key.
  std::map<std::string, std::string> metadata;
  std::uint64_t data_offset = 0;  // 8 + header length: where the data part begins in the file.
};

// `file_size` is the whole file's. kDataLoss says which rule is broken and by which key: header
// length, UTF-8, JSON (duplicate keys too), types, dtype, shape × dtype = length, overlap, gaps,
// data past the end or bytes left over. Keys are not checked against CheckKey: the format
// allows more. kUnsupported for a dtype that we do not know, for ranks over kMaxRank, for a string
// of over 16 MiB and metadata of over 32 MiB. Memory besides the text is that of the entries and
// the metadata.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view header_json,
                                                 std::uint64_t file_size);
Result<SafetensorsHeader> ReadSafetensorsHeader(File& file);

// Bytes 0 up to the data part for these tensors in this order: u64 length and JSON padded with
// spaces so that data begin at a multiple of `alignment` (a power of two >= 8). Entries are placed
// without gaps, as the format demands; begin/end of `entries` are filled in.
// kUnsupported for a dtype that the format lacks, kInvalidArgument for duplicate keys or a header
// over the format's limit.
Result<std::string> MakeSafetensorsHeader(std::vector<SafetensorsEntry>& entries,
                                          const std::map<std::string, std::string>& metadata,
                                          std::uint64_t alignment = 4096);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_SAFETENSORS_H_
