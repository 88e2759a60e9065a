// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h: NumPy's files (numpy/lib/format.py), which are .npy, .npz as written
// by numpy.savez, and directories of .npy. Arrays in Fortran order are read with strides; nothing
// is converted.
//
// An .npy file is a magic number, a header that is the text of a Python dict (descr, fortran_order,
// shape), and the elements. shard/npy parses the header; nothing evaluates it. An .npz is a zip of
// such files.
#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <span>
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

// Whether an error concerns only one array, which is then left out. Other errors (permissions, a
// failing disk) fail the read, because they would occur with the next array too.
bool IsArrayError(const Status& status) {
  return status.code() == Code::kUnsupported || status.code() == Code::kDataLoss;
}

// Number of bytes that are read for a header; almost all headers are smaller.
constexpr std::uint64_t kNpyHeadBytes = 4096;

// Reads the header of the array in bytes [begin, begin + length) of the file. `head`: the first
// bytes of the array, if the caller has read them. If they do not contain the whole header, the
// header is read from the file.
Result<NpyHeader> ReadNpyHeader(File& file, std::uint64_t begin, std::uint64_t length,
                                std::string head) {
  if (head.empty()) {
    head.resize(std::min(length, kNpyHeadBytes));
    TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(begin, head.data(), head.size()));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t wanted, NpyDataOffset(head));
  if (wanted > head.size() && wanted <= length) {
    head.resize(wanted);
    TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(begin, head.data(), head.size()));
  }
  return ParseNpyHeader(head);
}

// Strides in bytes in Fortran order: neighbours on the first axis are adjacent.
Dims FortranStrides(DType dtype, const Dims& shape) {
  Dims strides;
  auto step = static_cast<std::int64_t>(InfoOf(dtype).bits / 8);
  for (const std::int64_t extent : shape) {
    strides.push_back(step);
    // Cannot overflow: TensorMeta has checked the shape.
    step *= std::max<std::int64_t>(extent, 1);
  }
  return strides;
}

// Adds the array in bytes [begin, begin + length) of a file. `head`: the first bytes of the array,
// if the caller has read them.
Status AddArray(ForeignBuilder& builder, std::string_view key, std::uint32_t number,
                std::uint64_t begin, std::uint64_t length, std::string head = {}) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, builder.OpenFile(number));
  TENSORMOUNT_ASSIGN_OR_RETURN(const NpyHeader header,
                               ReadNpyHeader(*file, begin, length, std::move(head)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorMeta meta,
                               TensorMeta::Make("x", header.dtype, header.shape));
  // Cannot be negative, because the whole header is within `length` bytes.
  const std::uint64_t available = length - header.data_offset;
  if (available < meta.bytes()) {
    return Status(Code::kDataLoss,
                  std::to_string(available) + " bytes of elements are stored, but shape " +
                      header.shape.ToString() + " of " + std::string(InfoOf(header.dtype).name) +
                      " needs " + std::to_string(meta.bytes()));
  }
  if (available > meta.bytes()) {
    builder.Warn("tensor " + std::string(key.substr(0, 256)) + ": " +
                 std::to_string(available - meta.bytes()) +
                 " bytes after its elements are ignored");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t tensor,
                               builder.AddTensor(key, header.dtype, header.shape));
  Dims strides;
  if (header.fortran_order) {
    strides = FortranStrides(header.dtype, header.shape);
    // A vector, or a matrix of one row, is the same in both orders. As a packed chunk it is read
    // faster.
    if (ArePackedStrides(header.dtype, header.shape, strides)) strides = {};
  }
  return builder.AddChunk(tensor, Box::Whole(header.shape), number, begin + header.data_offset,
                          meta.bytes(), strides);
}

// Adds one of several arrays. If something is wrong with this array alone, it is left out: as lost
// if it is damaged, with a warning if it is not supported.
Status AddOrSkipArray(ForeignBuilder& builder, std::string_view key, std::uint32_t number,
                      std::uint64_t begin, std::uint64_t length, std::string head = {}) {
  const Status status = AddArray(builder, key, number, begin, length, std::move(head));
  if (status.ok() || !IsArrayError(status)) return status;
  if (status.code() == Code::kDataLoss) {
    builder.ReportLost({}, status.message(), ForeignBuilder::LostKind::kTensor, key);
    return Status();
  }
  builder.Warn("tensor " + std::string(key.substr(0, 256)) + ": left out: " + status.message());
  return Status();
}

// Reads the first bytes of all entries together. If that fails, all results are empty, and
// ReadNpyHeader reads each entry separately.
std::vector<std::string> HeadsOf(File& file, std::span<const ZipEntry> entries) {
  std::vector<std::string> heads(entries.size());
  std::vector<std::size_t> order(entries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return entries[a].offset < entries[b].offset; });
  std::vector<ReadRun> runs;
  for (const std::size_t i : order) {
    heads[i].resize(std::min(entries[i].size, kNpyHeadBytes));
    runs.push_back({entries[i].offset, std::as_writable_bytes(std::span(heads[i]))});
  }
  if (!file.ReadMany(runs).ok()) heads.assign(entries.size(), std::string());
  return heads;
}

// Adds the arrays of an .npz. Keys are entry names without ".npy", as in numpy.load.
Status ReadNpz(ForeignBuilder& builder, std::uint32_t number) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, builder.OpenFile(number));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZipArchive zip,
                               ZipArchive::Read(*file, 0, builder.FileLength(number)));
  std::set<std::string_view> names;
  for (const ZipEntry& entry : zip.entries()) names.insert(entry.name);
  constexpr std::size_t kTogether = 256;
  std::vector<std::string> heads;
  for (std::size_t i = 0; i < zip.entries().size(); ++i) {
    const ZipEntry& entry = zip.entries()[i];
    if (i % kTogether == 0) {
      const std::span<const ZipEntry> left = std::span(zip.entries()).subspan(i);
      heads = HeadsOf(*file, left.subspan(0, std::min(left.size(), kTogether)));
    }
    if (!entry.name.ends_with(kNpy) || entry.name.size() == kNpy.size()) {
      builder.Warn("entry " + entry.name.substr(0, 256) + ": left out: it is not an .npy file");
      continue;
    }
    const std::string_view key =
        std::string_view(entry.name).substr(0, entry.name.size() - kNpy.size());
    if (names.contains(key)) {
      // For a key that is also the full name of an entry, numpy.load returns that entry.
      builder.Warn("tensor " + std::string(key.substr(0, 256)) +
                   ": left out: the archive also has an entry '" + std::string(key.substr(0, 256)) +
                   "', which NumPy loads under this name");
      continue;
    }
    TENSORMOUNT_RETURN_IF_ERROR(AddOrSkipArray(builder, key, number, entry.offset, entry.size,
                                               std::move(heads[i % kTogether])));
  }
  return Status();
}

// Adds the .npy files in a directory and below. Links to directories are not followed, because they
// could form a cycle. Keys are paths below the directory, so `a/b.npy` and `a.b.npy` are two
// tensors.
Status ReadBelow(const ForeignFolder& folder, ForeignBuilder& builder, const std::string& below,
                 int depth) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder.List(below));
  for (const DirectoryEntry& entry : entries) {
    if (entry.name.starts_with('.')) continue;
    const std::string name = below.empty() ? entry.name : below + "/" + entry.name;
    if (entry.kind == FileKind::kDirectory) {
      if (depth == kMaxNumpyDepth) {
        builder.Warn("directory " + name + ": left out: nested too deep");
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(ReadBelow(folder, builder, name, depth + 1));
      continue;
    }
    if (!name.ends_with(kNpy) || entry.name.size() == kNpy.size()) continue;
    const Result<std::uint32_t> added = builder.AddFile(name);
    const std::string_view key = std::string_view(name).substr(0, name.size() - kNpy.size());
    // The file is a FIFO or a loop of links.
    if (added.status().code() == Code::kDataLoss) {
      builder.ReportLost(name, "the file is not a regular file", ForeignBuilder::LostKind::kTensor,
                         key);
      continue;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number, added);
    TENSORMOUNT_RETURN_IF_ERROR(
        AddOrSkipArray(builder, key, number, 0, builder.FileLength(number)));
  }
  return Status();
}

// Whether the directory, or one directly below it, has a .npy file.
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
    // The bytes decide: a link, or a file in the cache of a Hugging Face hub, may have any name.
    // The bytes of a zip do not decide if the zip is empty, or if its first entry is not an array;
    // then the name must end with ".npz".
    const FileType begin = FileTypeOf(folder, folder.file());
    return begin == FileType::kNpy || begin == FileType::kNumpyZip ||
           (begin == FileType::kZip && folder.file().ends_with(kNpz));
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    if (folder.file().empty()) return ReadBelow(folder, builder, "", 0);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number, builder.AddFile(folder.file()));
    if (FileTypeOf(folder, folder.file()) != FileType::kNpy) return ReadNpz(builder, number);
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
