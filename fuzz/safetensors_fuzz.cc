// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "fuzz/memory_file.h"
#include "shard/safetensors.h"

using namespace tensormount;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  MemoryFile file(bytes);
  const Result<SafetensorsHeader> header = ReadSafetensorsHeader(file);
  if (header.ok()) {
    for (const SafetensorsEntry& entry : header.value().entries) {
      if (entry.begin > entry.end || entry.end > size - header.value().data_offset) std::abort();
    }
  }
  // The same as a header of a large file, so that most mutations get past the sizes.
  (void)ParseSafetensorsHeader(bytes, std::uint64_t{1} << 40);
  return 0;
}
