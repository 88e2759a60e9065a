// SPDX-License-Identifier: Apache-2.0
// The hashes of a stored range: leaves and optionally pages, computed together while the data are
// in cache.
#include "shard/chunk_accumulator.h"

#include <utility>

#include "shard/page_hash.h"

namespace tensormount {

void ChunkHashes::AppendTo(std::vector<Hash128>& manifest) const {
  manifest.insert(manifest.end(), leaves.begin(), leaves.end());
  if (!pages.empty()) AppendPageHashes(leaves, root, pages, manifest);
}

ChunkAccumulator::ChunkAccumulator(Pages pages, std::optional<DType> values) : leaves_(kLeafBytes) {
  if (pages == Pages::kHashed) pages_.emplace(kHashPageBytes);
  if (values && CanCount(*values)) values_.emplace(*values);
}

void ChunkAccumulator::Update(const void* data, std::size_t size) {
  leaves_.Update(data, size);
  if (pages_) pages_->Update(data, size);
  if (values_) values_->Update(data, size);
}

ChunkHashes ChunkAccumulator::Finish() {
  ChunkHashes hashes;
  hashes.length = leaves_.length();
  hashes.leaves = leaves_.Take();
  hashes.root = ChunkRoot(hashes.leaves, hashes.length);
  if (pages_) hashes.pages = pages_->Take();
  if (values_) hashes.counts = values_->Take();
  return hashes;
}

ChunkHashes HashChunk(const void* data, std::size_t size) {
  ChunkAccumulator hashes;
  hashes.Update(data, size);
  return hashes.Finish();
}

}  // namespace tensormount
