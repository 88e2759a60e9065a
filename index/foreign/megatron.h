// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_MEGATRON_H_
#define TENSORMOUNT_INDEX_FOREIGN_MEGATRON_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "index/archives/pickle.h"
#include "index/archives/torch_archive.h"
#include "index/foreign/foreign.h"
#include "index/foreign/value_budget.h"
#include "index/records/inventory.h"

// What Megatron-Core's dist_checkpointing adds to the formats that it writes
// (megatron/core/dist_checkpointing/{core,mapping}.py, strategies/torch.py).

namespace tensormount {

// "torch_dist" or "zarr": sharded_backend of metadata.json; empty: it is not there or something
// else.
// Looks at metadata.json alone; never fails.
std::string MegatronBackend(const ForeignFolder& folder);
// kUnsupported, by name, where metadata.json names a backend or a version that nobody looked at.
Status CheckMegatronBackend(const ForeignFolder& folder);

// The name of a sharded object is "KEY/shard_1.0_2.4": element [1, 0] of a grid of [2, 4]. Takes
// names apart, into records of which key, index and grid are set; where index and grid have rank 0
// the name is of no sharded object, and the key is all of it. Goes from the right end, since keys
// may hold '/', and takes all names of a checkpoint at once: those that old releases cut off after
// the last but one extent get the missing one from the others. Objects whose parts do not fill
// their grid exactly stay plain objects with their full names.
std::vector<ObjectRecord> MegatronObjects(std::span<const std::string> names);

// The original shape of optimizer state that was stored flattened: its stored shape is the number
// of fragments along every axis and the elements of a fragment.
class MegatronFlatShape {
 public:
  // nullopt where the two do not go together.
  static std::optional<MegatronFlatShape> Make(const Dims& stored, const Dims& original);
  const Dims& original() const { return original_; }
  // What a stored chunk holds of the original: it must lie in one fragment. kDataLoss.
  Result<Region> RegionOf(std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> sizes) const;

 private:
  Dims original_;
  Dims fragment_;  // Extents of one fragment.
};

// Adds what an archive of common state holds, which stands at byte `at` of file number `file`, a
// dict or a list that holds one: tensors as tensors, under the keys that lead to them, and what is
// plain data as a common value a key. `from` names it in warnings about what is neither.
Status AddMegatronCommon(const TorchArchive& archive, std::uint32_t file, std::uint64_t at,
                         std::string_view from, ForeignBuilder& builder, ValueBudget& budget);

// Adds common.pt, where there is one, as an object and as common values.
Status AddMegatronCommonFile(const ForeignFolder& folder, ForeignBuilder& builder);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_MEGATRON_H_
