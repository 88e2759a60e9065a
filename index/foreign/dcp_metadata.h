// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_DCP_METADATA_H_
#define TENSORMOUNT_INDEX_FOREIGN_DCP_METADATA_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "index/archives/pickle.h"
#include "index/foreign/foreign.h"

// The .metadata pickle of torch.distributed.checkpoint as plain records, for torch 1.13
// (torch.distributed._shard.checkpoint) to 2.13, Megatron-Core and OLMo-core.

// Tensors, items and numbers are three flat vectors, and a tensor refers to ranges of the others,
// because separate objects for a million chunks would take several times the memory.
//
// Views (std::string_view) point into the text of the pickle, which `document` owns, so a
// DcpMetadata must outlive all views taken from it. It may be moved.
namespace tensormount {

// Counts tensors and objects that are left out although their data exist. All with the same reason
// get one warning. Missing data are reported to ForeignBuilder instead. Not thread-safe.
class OmissionCounter {
 public:
  // `what`: "tensor" or "object"; `why`: such as "the dtype is not a torch dtype".
  void Add(std::string_view what, std::string_view key, std::string why);
  // Adds warnings like "tensor w: left out: ..." or "12 tensors left out: ... (the first: w)".
  void WarnAll(ForeignBuilder& builder) const;

 private:
  // Counts by reason and `what`.
  std::map<std::pair<std::string, std::string>, CountedNames> counts_;
};

// The location of an item: a torch archive of one tensor, or the bytes of an object. Each chunk of
// a tensor has an item (DcpTensor::first).
struct DcpItem {
  std::string_view path;  // relative_path, unchecked; a view into the document.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::string_view transform;  // The first of transform_descriptors; empty if there is none.
  // False: the metadata have no location.
  bool stored = false;
};

// A tensor in the metadata. DcpMetadata::Shape, Offsets and Sizes read its numbers.
struct DcpTensor {
  std::string_view fqn;
  DType dtype = DType::kU8;
  // True for f4. torch counts pairs of f4 elements on the last axis; all numbers here count
  // elements.
  bool pairs = false;
  std::uint8_t rank = 0;
  std::size_t first = 0;  // The item of chunk i is items[first + i].
  std::size_t count = 0;  // Number of chunks.
  // Position of the shape in DcpMetadata::numbers. The shape is followed, for each chunk, by its
  // offsets and its sizes. Each of these has `rank` numbers.
  std::size_t numbers = 0;
};

// The metadata as records, except planner_data and mcore_data, which are values of the pickle.
struct DcpMetadata {
  pickle::Document document;
  std::vector<DcpTensor> tensors;  // In the order of the pickle.
  std::vector<DcpItem> items;
  std::vector<std::int64_t> numbers;  // Shapes, offsets and sizes; not negative.
  // Names and items of the objects (BytesStorageMetadata), in the order of the pickle. `stored` is
  // false if storage_data has no location.
  std::vector<std::pair<std::string_view, DcpItem>> objects;
  pickle::Value planner_data;  // The value None if the pickle does not have planner_data.
  pickle::Value mcore_data;
  // Warnings about items and entries that belong to no tensor or object; the reader passes them to
  // the builder.
  std::vector<std::string> warnings;

  // The shape, counted in elements (see DcpTensor::pairs).
  Dims Shape(const DcpTensor& tensor) const;
  std::span<const std::int64_t> Offsets(const DcpTensor& tensor, std::size_t chunk) const;
  std::span<const std::int64_t> Sizes(const DcpTensor& tensor, std::size_t chunk) const;
};

// Parses .metadata. kDataLoss: not a valid .metadata pickle. kUnsupported: the pickle uses classes
// that are not on the allow-list. A tensor whose records contradict each other, or whose dtype is
// unknown, is left out. The data files are not examined. Takes linear time if the hints in `index`
// are right, as torch writes them, else O(chunks log chunks).
Result<DcpMetadata> ParseDcpMetadata(std::string bytes, OmissionCounter& left_out);

// Appends the numbers of a torch.Size, tuple or list of non-negative integers to `out`. False if
// the value is something else; the caller must then remove numbers that were appended.
bool ReadPickledSize(const pickle::Value& value, std::vector<std::int64_t>& out);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_METADATA_H_
