// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_SYNTHETIC_STAGING_H_
#define TENSORMOUNT_BENCH_SYNTHETIC_STAGING_H_

#include <cstdint>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/store/store.h"

namespace tensormount {

// A staging with very many chunks and no data: sparse files of the right length, invented hashes
// and digests. Publishes and opens like a real one; reading any data is a checksum error.
struct SyntheticSpec {
  int tensors = 1000;
  int chunks_per_tensor = 100;  // Rows of [chunks_per_tensor, 16] f32, dealt out to the writers.
  int writers = 4;
  std::uint64_t seed = 1;  // Of the digests: equal seeds, equal tensors.
};
Status WriteSyntheticStaging(FileSystem& fs, const Staging& staging, const SyntheticSpec& spec);

}  // namespace tensormount

#endif  // TENSORMOUNT_BENCH_SYNTHETIC_STAGING_H_
