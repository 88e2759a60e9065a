// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_TORCH_ARCHIVE_H_
#define TENSORMOUNT_INDEX_ARCHIVES_TORCH_ARCHIVE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/archives/pickle.h"
#include "index/archives/zip_archive.h"

// What torch.save writes since 1.6: a zip with data.pkl and one stored entry a storage
// (torch/serialization.py, caffe2/serialize/inline_container.h).

namespace tensormount {

// A strided window of a storage: bytes of an element stand at
// offset + sum(index[a] * strides[a]). Strides are bytes, never negative; zero where torch
// expanded.
// All in bytes and checked: offset + length lies within the file's storage entry, and every element
// within [offset, offset + length).
struct StoredTensor {
  DType dtype = DType::kU8;
  Dims shape;
  Dims strides;              // Of f4 (two elements a byte, always packed) empty.
  std::uint64_t offset = 0;  // In the file.
  std::uint64_t length = 0;  // From there to the end of the last element; 0 for no elements.
  bool packed = false;       // Dense rows: strides say nothing more.
};

// The archive in bytes [begin, begin + length) of a file.
// Keeps the pickle and the directory in memory and no reference to the file. Reading it costs the
// directory, the local headers and data.pkl; storages are not touched.
class TorchArchive {
 public:
  // kDataLoss, kUnsupported as ZipArchive::Read and pickle::Parse say; kDataLoss where data.pkl is
  // missing or fails its CRC, where entries lie outside of its folder, and where names differ in
  // nothing but case, or in case from what torch looks for: it finds them; kUnsupported where
  // byteorder says "big" (none: little), where `version` is none that we know or is not there
  // (torch refuses both), and of TorchScript programs.
  static Result<TorchArchive> Read(File& file, std::uint64_t begin, std::uint64_t length,
                                   const pickle::Options& options = {});

  const pickle::Document& document() const { return *document_; }
  const ZipArchive& zip() const { return zip_; }

  // Whether a value is a tensor (or a parameter around one).
  static bool IsTensor(const pickle::Value& value);
  // Where it is. kDataLoss: a storage that is not there, is too short for the view, or numbers that
  // overflow; kUnsupported by name: quantised, sparse, nested, meta, subclasses, dtypes that we
  // lack.
  Result<StoredTensor> TensorOf(const pickle::Value& value) const;

 private:
  std::string prefix_;  // "archive/"
  ZipArchive zip_;
  std::unique_ptr<pickle::Document> document_;
  std::set<std::string, std::less<>>
      two_kinds_;  // Keys of storages that are said to be two things.
};

// The one tensor that an archive is (an item of a .distcp file). Errors: as those of
// TorchArchive, and kDataLoss where the root of the pickle is no tensor.
Result<StoredTensor> ReadTorchItem(File& file, std::uint64_t begin, std::uint64_t length);

// What an object's bytes are, for a person: the listing of the pickle in a torch archive or of a
// bare pickle (pickle::Describe, names it asks for marked "not called"), or one line that says what
// they are instead. Reads at most 64 MiB.
Result<std::string> DescribeObject(File& file, std::uint64_t begin, std::uint64_t length);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_ARCHIVES_TORCH_ARCHIVE_H_
