// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "index/foreign/zarr_array.h"

using namespace tensormount;

// The text of a .zarray; its last line is taken for the name of a chunk too.
extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Result<ZarrArray> array = ParseZarray(text, size % 2 != 0);
  const std::size_t line = text.rfind('\n');
  if (line != std::string_view::npos) (void)ParseChunkName(text.substr(line + 1), 2, '.');
  if (!array.ok()) return 0;
  const Dims grid = array.value().Grid();
  if (grid.rank() != array.value().shape.rank()) std::abort();
  for (const std::int64_t extent : array.value().chunks) {
    if (extent < 1) std::abort();
  }
  return 0;
}
