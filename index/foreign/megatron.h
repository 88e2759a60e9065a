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

// The additions of Megatron-Core's dist_checkpointing to the formats that it writes
// (megatron/core/dist_checkpointing/{core,mapping}.py, strategies/torch.py).

namespace tensormount {

// The field sharded_backend of metadata.json ("torch_dist", "zarr"); empty if the file is missing
// or damaged, or another program wrote it.
std::string MegatronBackend(const ForeignFolder& folder);
// Checks metadata.json, if Megatron-Core wrote it. kUnsupported: a backend or version is unknown;
// the message names the field.
Status CheckMegatronBackend(const ForeignFolder& folder);

// Parses the names of sharded objects: "KEY/shard_1.0_2.4" is part [1, 0] of an object that is
// divided by a grid of [2, 4]. The result has key, index and grid for each name. A name of another
// form is the key of a plain object, whose index and grid are empty. The suffix is searched from
// the right, because keys may contain '/'. All names of a checkpoint are needed at once, because
// old releases omit the last extent of the grid, which follows from the other names. Objects whose
// parts do not fill their grid exactly become plain objects.
std::vector<ObjectRecord> MegatronObjects(std::span<const std::string> names);

// The original shape of optimizer state that was stored flattened. The stored shape is the number
// of fragments along every axis, then the number of elements of a fragment.
class MegatronFlatShape {
 public:
  // `stored`: the stored shape; `original`: the original shape. nullopt if they do not match.
  static std::optional<MegatronFlatShape> Make(const Dims& stored, const Dims& original);
  const Dims& original() const { return original_; }
  // The region of the original tensor that a stored chunk has. kDataLoss: the chunk is not within
  // one fragment.
  Result<Region> RegionOf(std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> sizes) const;

 private:
  Dims original_;
  Dims fragment_;  // Extents of one fragment.
};

// Adds the content of an archive of common state, which is a dict or a list with one dict. Tensors
// get the keys on the path to them as names. Each other key of the dict becomes a common value, as
// far as it has plain data. The archive begins at byte `at` of file number `file`. `from` is the
// name of the archive in warnings.
Status AddMegatronCommon(const TorchArchive& archive, std::uint32_t file, std::uint64_t at,
                         std::string_view from, ForeignBuilder& builder, ValueBudget& budget);

// The values that AddMegatronCommon adds.
CommonDict MegatronValues(const TorchArchive& archive);
// Name of the file with the common state, up to Megatron-Core 0.16, and of the object, since 0.19.
inline constexpr std::string_view kMegatronCommonFile = "common.pt";
inline constexpr std::string_view kMegatronCommonObject = "common_state";
// Largest common state that is parsed, because it is read when the checkpoint is opened.
inline constexpr std::uint64_t kMaxMegatronCommon = std::uint64_t{64} << 20;

// Adds common.pt, if it exists, as an object, and its tensors and values (AddMegatronCommon).
Status AddMegatronCommonFile(const ForeignFolder& folder, ForeignBuilder& builder);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_MEGATRON_H_
