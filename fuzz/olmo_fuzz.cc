// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "index/foreign/olmo_metadata.h"

using namespace tensormount;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const Result<OlmoMetadata> metadata =
      ParseOlmoMetadata({reinterpret_cast<const char*>(data), size});
  if (!metadata.ok()) return 0;
  for (const OlmoTensor& tensor : metadata.value().tensors) {
    for (const OlmoShard& shard : tensor.shards) {
      if (shard.file >= metadata.value().files.size()) std::abort();
      if (!tensor.problem.ok()) continue;
      for (const Region& region : shard.regions) {
        if (!region.Within(tensor.shape)) std::abort();
      }
    }
  }
  return 0;
}
