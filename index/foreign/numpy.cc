// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h. NumPy's own files (numpy/lib/format.py): .npy, .npz as numpy.savez
// writes it, and folders of .npy. Arrays in Fortran order are strided windows; nothing is
// converted.
//
// An .npy file is a magic number, a header that is the text of a Python dict (descr, fortran_order,
// shape), and the elements. The header is parsed as that literal by shard/npy and never evaluated.
// An .npz is a zip of such files.
#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "index/archives/zip_archive.h"
#include "index/foreign/file_begin.h"
#include "index/foreign/format.h"
#include "shard/npy.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kNpy = ".npy";
constexpr std::string_view kNpz = ".npz";
constexpr int kMaxNumpyDepth = 32;

// Of one array: whether it is left out, rather than ending the read of all.
// Errors of reading (no permission, a disk that fails) end the read, for the next array would fail
// as well.
bool ConcernsOneArray(const Status& status) {
  return status.code() == Code::kUnsupported || status.code() == Code::kDataLoss;
}

// 4 KiB hold almost every header; a longer one says how long it is and is read again, at most to
// the end of the array's bytes.
Result<NpyHeader> ReadNpyHeader(File& file, std::uint64_t begin, std::uint64_t length) {
  std::string head(std::min<std::uint64_t>(length, 4096), '\0');
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(begin, head.data(), head.size()));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t wanted, NpyDataOffset(head));
  if (wanted > head.size() && wanted <= length) {
    head.resize(wanted);
    TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(begin, head.data(), head.size()));
  }
  return ParseNpyHeader(head);
}

// Bytes from an element to the next along each axis where the first axis is the dense one.
Dims FortranStrides(DType dtype, const Dims& shape) {
  Dims strides;
  auto step = static_cast<std::int64_t>(InfoOf(dtype).bits / 8);
  for (const std::int64_t extent : shape) {
    strides.push_back(step);
    step *= std::max<std::int64_t>(extent, 1);  // Fits: TensorMeta was made.
  }
  return strides;
}

// The array in bytes [begin, begin + length) of a file.
Status AddArray(ForeignBuilder& builder, std::string_view key, std::uint32_t number,
                std::uint64_t begin, std::uint64_t length) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, builder.OpenFile(number));
  TENSORMOUNT_ASSIGN_OR_RETURN(const NpyHeader header, ReadNpyHeader(*file, begin, length));
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorMeta meta,
                               TensorMeta::Make("x", header.dtype, header.shape));
  // ParseNpyHeader was given no more than `length` bytes and found the header whole, so this is not
  // negative.
  const std::uint64_t available = length - header.data_offset;
  if (available < meta.bytes()) {
    return Status(Code::kDataLoss, std::to_string(available) + " bytes of elements, but shape " +
                                       header.shape.ToString() + " of " +
                                       std::string(InfoOf(header.dtype).name) + " takes " +
                                       std::to_string(meta.bytes()));
  }
  if (available > meta.bytes()) {
    builder.Warn("tensor " + std::string(key.substr(0, 256)) + ": " +
                 std::to_string(available - meta.bytes()) + " bytes after it are not shown");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t tensor,
                               builder.AddTensor(key, header.dtype, header.shape));
  Dims strides;
  if (header.fortran_order) {
    strides = FortranStrides(header.dtype, header.shape);
    // A vector, or a matrix of one row, is the same in both orders: then it is packed and reads
    // need no gather.
    if (ArePackedStrides(header.dtype, header.shape, strides)) strides = {};
  }
  return builder.AddChunk(tensor, Box::Whole(header.shape), number, begin + header.data_offset,
                          meta.bytes(), strides);
}

// One of several arrays: what is wrong with it alone becomes a warning.
Status AddOneOf(ForeignBuilder& builder, std::string_view key, std::uint32_t number,
                std::uint64_t begin, std::uint64_t length) {
  const Status status = AddArray(builder, key, number, begin, length);
  if (status.ok() || !ConcernsOneArray(status)) return status;
  if (status.code() == Code::kDataLoss) {
    builder.Lose({}, status.message(), ForeignBuilder::What::kTensor, key);
    return Status();
  }
  builder.Warn("tensor " + std::string(key.substr(0, 256)) + ": left out: " + status.message());
  return Status();
}

// Keys are entry names without ".npy", as numpy.load shows them.
Status ReadNpz(ForeignBuilder& builder, std::uint32_t number) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, builder.OpenFile(number));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZipArchive zip,
                               ZipArchive::Read(*file, 0, builder.FileLength(number)));
  std::set<std::string_view> names;
  for (const ZipEntry& entry : zip.entries()) names.insert(entry.name);
  for (const ZipEntry& entry : zip.entries()) {
    if (!entry.name.ends_with(kNpy) || entry.name.size() == kNpy.size()) {
      builder.Warn("entry " + entry.name.substr(0, 256) + ": left out: it is no .npy file");
      continue;
    }
    const std::string_view key =
        std::string_view(entry.name).substr(0, entry.name.size() - kNpy.size());
    if (names.contains(key)) {
      // NumPy takes the entry of that very name.
      builder.Warn("tensor " + std::string(key.substr(0, 256)) +
                   ": left out: the archive has an entry '" + std::string(key.substr(0, 256)) +
                   "' too, and NumPy shows that by this name");
      continue;
    }
    TENSORMOUNT_RETURN_IF_ERROR(AddOneOf(builder, key, number, entry.offset, entry.size));
  }
  return Status();
}

// Links to folders are not followed: they could lead in circles.
// The key of a file is its path below the folder, so that `a/b.npy` and `a.b.npy` stay two tensors.
Status ReadBelow(const ForeignFolder& folder, ForeignBuilder& builder, const std::string& below,
                 int depth) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder.List(below));
  for (const DirectoryEntry& entry : entries) {
    if (entry.name.starts_with('.')) continue;
    const std::string name = below.empty() ? entry.name : below + "/" + entry.name;
    if (entry.kind == FileKind::kDirectory) {
      if (depth == kMaxNumpyDepth) {
        builder.Warn("folder " + name + ": left out: nested too deep");
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(ReadBelow(folder, builder, name, depth + 1));
      continue;
    }
    if (!name.ends_with(kNpy) || entry.name.size() == kNpy.size()) continue;
    const Result<std::uint32_t> added = builder.AddFile(name);
    const std::string_view key = std::string_view(name).substr(0, name.size() - kNpy.size());
    if (added.status().code() == Code::kDataLoss) {  // A FIFO, a link that leads round.
      builder.Lose(name, "is no regular file", ForeignBuilder::What::kTensor, key);
      continue;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number, added);
    TENSORMOUNT_RETURN_IF_ERROR(AddOneOf(builder, key, number, 0, builder.FileLength(number)));
  }
  return Status();
}

// Whether there is a .npy file in a folder or right below it.
// One level down and no further: a probe is not a walk.
bool HasArrays(const ForeignFolder& folder, const std::string& below, bool descend) {
  const Result<std::vector<DirectoryEntry>> entries = folder.List(below);
  if (!entries.ok()) return false;
  for (const DirectoryEntry& entry : entries.value()) {
    if (entry.kind != FileKind::kDirectory && !entry.name.starts_with('.') &&
        entry.name.ends_with(kNpy)) {
      return true;
    }
  }
  if (!descend) return false;
  for (const DirectoryEntry& entry : entries.value()) {
    if (entry.kind == FileKind::kDirectory && !entry.name.starts_with('.') &&
        HasArrays(folder, entry.name, false))
      return true;
  }
  return false;
}

class Numpy : public ForeignFormat {
 public:
  std::string_view name() const override { return "numpy"; }

  bool Probe(const ForeignFolder& folder) const override {
    if (folder.file().empty()) return HasArrays(folder, "", true);
    // By bytes, since a hub or a link may give a file any name. An archive without entries, or of
    // others first, is told by its name.
    const FileBegin begin = BeginOf(folder, folder.file());
    return begin == FileBegin::kNpy || begin == FileBegin::kNumpyZip ||
           (begin == FileBegin::kZip && folder.file().ends_with(kNpz));
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    if (folder.file().empty()) return ReadBelow(folder, builder, "", 0);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number, builder.AddFile(folder.file()));
    if (BeginOf(folder, folder.file()) != FileBegin::kNpy) return ReadNpz(builder, number);
    std::string key = folder.file();
    if (key.ends_with(kNpy) && key.size() > kNpy.size()) key.resize(key.size() - kNpy.size());
    return AddArray(builder, key, number, 0, builder.FileLength(number))
        .WithContext(folder.Shown(folder.file()));
  }
};

}  // namespace

const ForeignFormat& NumpyFormat() {
  static const Numpy kFormat;
  return kFormat;
}

}  // namespace tensormount
