// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_ADOPT_SAFETENSORS_MAKER_H_
#define TENSORMOUNT_TESTS_ADOPT_SAFETENSORS_MAKER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shard/safetensors.h"
#include "tests/support/random.h"
#include "tests/support/temp_dir.h"

namespace tensormount {

// A tensor for a file, and bytes that are told by its name alone.
struct MadeTensor {
  std::string key;
  DType dtype = DType::kF32;
  Dims shape;
  std::string bytes() const {
    std::uint64_t size = InfoOf(dtype).bits / 8;
    for (const std::int64_t extent : shape) size *= static_cast<std::uint64_t>(extent);
    std::uint64_t seed = 7;
    for (const char c : key) seed = seed * 131 + static_cast<unsigned char>(c);
    return Random(seed).Bytes(size);
  }
};

// Writes a valid file; the bytes of each tensor are `bytes[i]`, or its own where that is empty.
inline void WriteSafetensors(const std::string& path, const std::vector<MadeTensor>& tensors,
                             const std::map<std::string, std::string>& metadata = {},
                             const std::vector<std::string>& bytes = {}) {
  std::vector<SafetensorsEntry> entries;
  std::string data;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    entries.push_back(
        {.key = tensors[i].key, .dtype = tensors[i].dtype, .shape = tensors[i].shape});
    data += i < bytes.size() ? bytes[i] : tensors[i].bytes();
  }
  const Result<std::string> header = MakeSafetensorsHeader(entries, metadata, 8);
  WriteWholeFile(path, header.value() + data);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_ADOPT_SAFETENSORS_MAKER_H_
