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

// The .metadata pickle of torch.distributed.checkpoint as plain records, whatever release wrote it:
// torch 1.13 (torch.distributed._shard.checkpoint) to 2.13, Megatron-Core, OLMo-core.

// Flat on purpose: tensors, items and numbers are three vectors, in which a tensor has ranges. A
// million chunks as objects of their own (a vector of offsets, a vector of sizes) would take
// several times that memory, and an allocation each.
//
// Views (std::string_view) point into the stream, which `document` keeps: a DcpMetadata must
// outlive whatever was taken from it, and may be moved.
namespace tensormount {

// What was left out and why, told in one line a reason: the loss of one file may concern ten
// thousand tensors.
// Not for losses, which ForeignBuilder counts by key: this is for what is there in a form that we
// do not read. Not thread-safe; one a read.
class LeftOut {
 public:
  // `what`: "tensor" or "object"; `why`: "its file __1_0.distcp is missing".
  void Add(std::string_view what, std::string_view key, std::string why);
  // "tensor w: left out: ..." or "12 tensors left out: ... (the first: w)".
  void WarnAll(ForeignBuilder& builder) const;

 private:
  std::map<std::pair<std::string, std::string>, CountedNames> counts_;  // By reason, what.
};

// Where an item lies: a torch archive of one tensor, or the bytes of an object. There is one for
// each chunk of the checkpoint, in the order of DcpTensor::first.
struct DcpItem {
  std::string_view path;  // relative_path, unchecked; views are into the document.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::string_view transform;  // The first of transform_descriptors; empty: stored as it is.
  bool stored = false;         // False: the metadata name a chunk, but not where it lies.
};

// The sizes of chunk i are behind its offsets: numbers [numbers + (2 + 2 i) rank, ...).
// DcpMetadata::Offsets and Sizes know this; nobody else should.
struct DcpTensor {
  std::string_view fqn;
  DType dtype = DType::kU8;
  bool pairs = false;  // torch's f4 are pairs; here they are one by one, on the last axis.
  std::uint8_t rank = 0;
  std::size_t first = 0;  // Chunk i's item is items[first + i],
  std::size_t count = 0;
  // its offsets and sizes are numbers[numbers + (1 + 2 * i) * rank...], behind the shape.
  std::size_t numbers = 0;
};

// planner_data and mcore_data are left as they are in the pickle: the reader takes from them what
// it knows.
struct DcpMetadata {
  pickle::Document document;
  std::vector<DcpTensor> tensors;  // In the order of the file.
  std::vector<DcpItem> items;
  std::vector<std::int64_t> numbers;  // None is negative.
  // Byte entries of the state dict, by name. Not `stored` where storage_data does not name it.
  std::vector<std::pair<std::string_view, DcpItem>> objects;
  pickle::Value planner_data;  // None where there is none.
  pickle::Value mcore_data;
  // About items and entries that belong to nothing; the reader gives them to the builder.
  std::vector<std::string> warnings;

  // The shape in elements of ours: of pairs of f4 the last axis is doubled already, as it is in
  // offsets and sizes.
  Dims Shape(const DcpTensor& tensor) const;
  std::span<const std::int64_t> Offsets(const DcpTensor& tensor, std::size_t chunk) const;
  std::span<const std::int64_t> Sizes(const DcpTensor& tensor, std::size_t chunk) const;
};

// kDataLoss: no such pickle; kUnsupported: asks for names that are not on the list. A tensor whose
// records contradict each other, or of a dtype that we lack, is left out.
// O(chunks log chunks) at worst, and linear where the hints of the metadata agree, as they do in
// what torch writes. Nothing is checked against files here.
Result<DcpMetadata> ParseDcpMetadata(std::string bytes, LeftOut& left_out);

// A torch.Size, tuple or list of integers that are not negative; false: it is none.
// Appends to `out`, also what it has read of a size that turns out to be none: callers cut it off.
bool ReadPickledSize(const pickle::Value& value, std::vector<std::int64_t>& out);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_METADATA_H_
