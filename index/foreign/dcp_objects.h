// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_
#define TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

#include "index/archives/torch_archive.h"
#include "index/foreign/dcp_metadata.h"
#include "index/foreign/foreign.h"
#include "index/foreign/value_budget.h"
#include "index/records/inventory.h"

namespace tensormount {

// The torch archive that an object consists of; nullopt if it is not one. A pickle without an
// archive is not parsed, because its bytes could be anything.
std::optional<TorchArchive> ArchiveOfObject(const std::string& bytes, const std::string& key);
// The value of an object that torch.save wrote. nullopt: the bytes are not a torch archive, the
// value is not plain data, or the budget is exceeded.
std::optional<CommonValue> ValueOfObject(const std::string& bytes, const std::string& key,
                                         ValueBudget& budget);
// Size of the largest object that an export converts to a plain value.
inline constexpr std::uint64_t kMaxObjectValue = std::uint64_t{1} << 20;

// Adds the objects of a DCP checkpoint to the builder: each as opaque bytes, and a small object
// that is a torch archive of plain data also as a common value. Call Add for all objects, in any
// order, and then Finish once, which reads the small objects in a few large reads. The builder must
// outlive this object.
class DcpObjects {
 public:
  explicit DcpObjects(ForeignBuilder& builder) : builder_(builder) {}
  // `part` has no hashes, and must be within its file.
  void Add(ObjectRecord part) { parts_.push_back(std::move(part)); }
  // Passes all objects to the builder. `megatron`: the objects are wrapped in lists, and one of
  // them may be the common state of Megatron-Core. An object that cannot be converted to a value is
  // added as an object only. Fails only if a file cannot be read.
  Status Finish(bool megatron, OmissionCounter& left_out);

 private:
  // AddCommon reads the small objects and passes their values to the builder. It calls AddValues
  // for neighbouring objects in one file, which calls AddValue for each object.
  Status AddCommon(bool megatron);
  Result<std::size_t> AddValues(std::size_t first, std::size_t count, bool megatron);
  // `bytes`: the bytes of the object.
  Status AddValue(const ObjectRecord& part, const std::string& bytes, bool megatron);

  ForeignBuilder& builder_;
  std::vector<ObjectRecord> parts_;
  // The limit for all values of the checkpoint together, including the common state.
  ValueBudget budget_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_
