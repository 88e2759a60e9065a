// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_
#define TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

#include "index/foreign/dcp_metadata.h"
#include "index/foreign/foreign.h"
#include "index/foreign/value_budget.h"
#include "index/records/inventory.h"

namespace tensormount {

// The plain data that an object's bytes are as torch.save writes them; nullopt: opaque bytes, an
// archive with more than plain data in it, or over the budget.
std::optional<CommonValue> ValueOfObject(const std::string& bytes, const std::string& key,
                                         ValueBudget& budget);
// Objects that are larger are nobody's plain values.
inline constexpr std::uint64_t kMaxObjectValue = std::uint64_t{1} << 20;

// Objects of DCP checkpoints: opaque bytes each, and where these are a torch archive of plain data
// and small, a common value too. What a checkpoint has of them stands at the beginnings of its
// files, so that they are read in a few large reads.
// Used once: Add all, then Finish. The order of Add does not matter, since objects are sorted by
// file and offset before they are read. The builder outlives it.
class DcpObjects {
 public:
  explicit DcpObjects(ForeignBuilder& builder) : builder_(builder) {}
  // An object part without hashes, which must lie within its file.
  void Add(ObjectRecord part) { parts_.push_back(std::move(part)); }
  // Gives all to the builder. `megatron`: objects are wrapped in lists, and one of them may be the
  // common state.
  // Fails only where a file cannot be read; an object that is no archive, or too large for a value,
  // stays an object.
  Status Finish(bool megatron, LeftOut& left_out);

 private:
  // Reads the small ones and gives their values to the builder.
  Status AddCommon(bool megatron);
  // `bytes`: those of the part.
  Status AddValue(const ObjectRecord& part, const std::string& bytes, bool megatron);

  ForeignBuilder& builder_;
  std::vector<ObjectRecord> parts_;
  // One for all values of the checkpoint, the common state included.
  ValueBudget budget_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_
