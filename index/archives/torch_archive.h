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

// The format of torch.save since 1.6: a zip with data.pkl and one stored entry for each storage
// (torch/serialization.py, caffe2/serialize/inline_container.h).

namespace tensormount {

// A strided view of a storage. The element at `index` begins at byte offset + sum(index[a] *
// strides[a]). Strides are in bytes and never negative; the stride of an axis that torch expanded
// is zero. Already checked: [offset, offset + length) lies within the storage's entry in the file,
// and every element lies within that range.
struct StoredTensor {
  DType dtype = DType::kU8;
  Dims shape;
  Dims strides;              // Empty for f4, which has two elements a byte and is always packed.
  std::uint64_t offset = 0;  // Offset of the first element in the file.
  // Bytes from offset to the end of the last element. 0 for a tensor without elements.
  std::uint64_t length = 0;
  // Whether the elements are dense in row-major order, so that the strides add no information.
  bool packed = false;
};

// The torch archive in bytes [begin, begin + length) of a file. The object has the pickle and the
// zip directory in memory and no reference to the file. Read reads the zip directory, the local
// headers, data.pkl, version and byteorder, but not the storages.
class TorchArchive {
 public:
  // Reads an archive. kDataLoss and kUnsupported as ZipArchive::Read and pickle::Parse return
  // them. Also kDataLoss if data.pkl is missing, occurs twice or fails its CRC, if byteorder is
  // unknown, if an entry lies outside of the directory of data.pkl, or if the name of an entry
  // differs only in case from another entry or from a name that torch looks for (torch ignores
  // case). Also kUnsupported if byteorder is "big" (a missing entry means little), if `version` is
  // missing or unknown (torch refuses both), or if the archive is a TorchScript program.
  // kResourceExhausted if data.pkl exceeds the limits of a parse.
  static Result<TorchArchive> Read(File& file, std::uint64_t begin, std::uint64_t length,
                                   const pickle::Options& options = {});

  const pickle::Document& document() const { return *document_; }
  const ZipArchive& zip() const { return zip_; }

  // Whether a value is a tensor or a parameter. The arguments are not checked (IsTorchTensor).
  static bool IsTensor(const pickle::Value& value);
  // The position of the tensor's bytes. kDataLoss if the storage is missing, is too short for the
  // view or has another size than the pickle declares, or if the call is malformed. kUnsupported,
  // with the reason, for quantised, sparse, nested and meta tensors, for subclasses, for views
  // whose bytes are not their values, and for dtypes that tensormount does not have.
  Result<StoredTensor> TensorOf(const pickle::Value& value) const;

 private:
  // Directory of data.pkl: "archive/".
  std::string prefix_;
  ZipArchive zip_;
  std::unique_ptr<pickle::Document> document_;
  // Keys of storages that the pickle declares with different types or sizes.
  std::set<std::string, std::less<>> conflicting_storages_;
};

// The tensor of an archive whose root is a tensor (an item of a .distcp file). Errors as for
// TorchArchive; also kDataLoss if the root of the pickle is not a tensor.
Result<StoredTensor> ReadTorchItem(File& file, std::uint64_t begin, std::uint64_t length);

// A description of an object's bytes for people. For a torch archive or a bare pickle: the listing
// of the pickle (pickle::Describe). For other bytes: one line that says what they are. A
// pickle over 64 MiB is not listed.
Result<std::string> DescribeObject(File& file, std::uint64_t begin, std::uint64_t length);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_ARCHIVES_TORCH_ARCHIVE_H_
