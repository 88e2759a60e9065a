// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "shard/npy.h"

using namespace tensormount;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Result<std::uint64_t> offset = NpyDataOffset(bytes);
  const Result<NpyHeader> header = ParseNpyHeader(bytes);
  if (!header.ok()) return 0;
  if (!offset.ok() || offset.value() != header.value().data_offset) std::abort();
  if (!CheckedProduct(header.value().shape)) std::abort();
  return 0;
}
