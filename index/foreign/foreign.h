// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_FOREIGN_H_
#define TENSORMOUNT_INDEX_FOREIGN_FOREIGN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/foreign_inventory.h"

// What adapters of foreign formats use: ForeignFolder for access to the files, and ForeignBuilder,
// which collects records.

namespace tensormount {

// A directory (or one file) of a foreign checkpoint. Its symlinks may lead only into the bounds:
// the directory itself or a --root directory above it, other --root directories, and the blobs
// directory of a Hugging Face hub cache. Names are relative to the directory and have no "..".
// Thread-safe.
class ForeignFolder {
 public:
  // `path` must be resolved (ResolveSourcePath). `roots`: the --root directories. The first bound
  // is the deepest root above `path`; without one, `path` itself (the directory, if `path` is a
  // file). Other roots are bounds only if a link in the directory leads into them.
  static Result<ForeignFolder> Open(FileSystem& fs, const std::string& path,
                                    std::span<const std::string> roots);

  FileSystem& fs() const { return *fs_; }
  // The resolved path of the directory, or of the file if the source is one file.
  const std::string& path() const { return path_; }
  // A directory that contains all bounds(); the names in file records are relative to it.
  const std::string& root() const { return root_; }
  // Files are opened only below these directories.
  const std::vector<std::string>& bounds() const { return bounds_; }
  // The name of the file if the source is one file; empty for a directory.
  const std::string& file() const { return file_; }
  // The name as messages show it, below the path of the directory.
  std::string Shown(std::string_view name) const;

  // Opens a file. kDataLoss: neither a file nor a directory (a FIFO, a loop of links), or the name
  // is not a valid relative path. kPermissionDenied: the name or a link leads out of the bounds.
  Result<std::unique_ptr<File>> OpenRead(std::string_view name) const;
  // Reads a file of at most `max_bytes`. kDataLoss: the file is larger; or a file over 1 MiB does
  // not begin, after white space, with the text `first` ("{" for JSON; empty accepts all files).
  // The first bytes are checked before memory is allocated, because a huge sparse file costs its
  // author nothing.
  Result<std::string> ReadFile(std::string_view name, std::uint64_t max_bytes,
                               std::string_view first = {}) const;
  // Lists a directory below this one, sorted; "" is the directory itself.
  Result<std::vector<DirectoryEntry>> List(std::string_view name) const;
  // Whether a file of any kind or a directory has this name. Does not open it.
  bool Has(std::string_view name) const;
  // The name relative to the root. Checks only the name, not the file: kDataLoss or
  // kPermissionDenied as in OpenRead.
  Result<std::string> PathFromRoot(std::string_view name) const;
  // A directory below this one, with the same root.
  Result<ForeignFolder> Subfolder(std::string_view name) const;

  // Like PathFromRoot, but with absolute symlinks on the path resolved, as in FileRecord::name and
  // for OpenLocated. Errors: those of OpenRead.
  Result<std::string> Locate(std::string_view name) const;
  // Opens a result of Locate. Fails if the path meanwhile leads out of the bounds.
  Result<std::unique_ptr<File>> OpenLocated(const std::string& below) const;
  // The file's information. Errors: those of OpenRead.
  Result<FileInfo> Stat(std::string_view name) const;

 private:
  template <typename F>
  auto WithinBounds(std::string_view name, F f) const -> decltype(f(std::string(), std::string()));
  Status DataLossOf(std::string_view name, const Status& status) const;
  Status AddBounds(std::span<const std::string> roots);

  FileSystem* fs_ = nullptr;
  std::string path_;
  std::string root_;
  // The directory relative to the root; empty if it is the root.
  std::string folder_;
  std::vector<std::string> bounds_;  // Resolved; the first one contains the directory.
  std::string file_;
};

// For --partial: removes incomplete tensors, and lists all losses in the content metadata under
// "lost". Does nothing if there is no loss.
void RemoveIncompleteTensors(ForeignInventory& inventory);

// Counts the names that one warning is about, and keeps the first. Hostile metadata may repeat one
// error a million times, and the warning must fit in one line.
struct CountedNames {
  std::size_t count = 0;
  std::string first;
  void Add(std::string_view name) {
    if (count++ == 0) first = name;
  }
};

// Collects and checks the records of a foreign checkpoint. An adapter calls the Add functions in
// any order. If one fails, the adapter returns the error, which ends the read; if only one tensor
// is wrong, the adapter instead leaves this tensor out (Drop). Numbers of tensors and files are
// valid until Finish. Not thread-safe; used for one read. `folder` must outlive this object.
class ForeignBuilder {
 public:
  // `producer`: the program that wrote the checkpoint, such as "torch.distributed.checkpoint".
  ForeignBuilder(const ForeignFolder& folder, std::string producer);
  ~ForeignBuilder();

  const ForeignFolder& folder() const { return folder_; }
  void SetProducer(std::string producer) { inventory_.info.producer = std::move(producer); }
  void SetWorldSize(std::uint32_t n) { inventory_.info.world_size = n; }

  // Adds a file, unless it was added before, and returns its number. Its size and mtime are read
  // once. Errors: those of ForeignFolder::OpenRead, and kDataLoss for a directory.
  Result<std::uint32_t> AddFile(std::string_view name);
  std::uint64_t FileLength(std::uint32_t file) const;
  std::int64_t FileTime(std::uint32_t file) const;  // The file's mtime in seconds.
  // Whether AddFile was called for this name, or for a file in this directory.
  bool Uses(std::string_view name) const;
  // Opens the file and keeps it open for later calls; at most a few hundred files are kept open.
  Result<std::shared_ptr<File>> OpenFile(std::uint32_t file);

  // Sets the wanted keys: until the next call, AddTensor gives other tensors a number but leaves
  // them out. Null: all keys are wanted. `keys` must stay valid until the next call.
  void TakeOnly(const std::set<std::string>* keys) { only_ = keys; }
  // Reserves memory for about `n` tensors; more or fewer may be added.
  void ReserveTensors(std::size_t n);
  // Adds a tensor and returns its number. kDataLoss: the key is not UTF-8, is empty, has over 2,048
  // bytes or a NUL, or was added before; or the number of elements overflows.
  Result<std::uint32_t> AddTensor(std::string_view key, DType dtype, const Dims& shape);
  const TensorMeta& MetaOf(std::uint32_t tensor) const;
  // Adds a chunk. `strides`: in bytes along each axis; empty for a packed chunk. `length`: from the
  // first byte to the end of the last element. kDataLoss: the chunk exceeds the file or the shape,
  // or its length does not match its region. Empty regions are ignored.
  Status AddChunk(std::uint32_t tensor, const Region& region, std::uint32_t file,
                  std::uint64_t offset, std::uint64_t length, const Dims& strides = {});
  // Adds a chunk whose bytes the ItemResolver locates later, in an item at these bytes of the file.
  Status AddPendingChunk(std::uint32_t tensor, const Region& region, std::uint32_t file,
                         std::uint64_t offset, std::uint64_t length);
  void SetResolver(ItemResolver resolver);

  // Adds an object or, if it has a grid, one of its parts, as in ObjectRecord. kDataLoss: the key
  // or the index is not valid, or the bytes exceed the file. If parts of a grid are missing or
  // stored twice, Finish leaves the object out and counts it as lost.
  Status AddObject(std::string_view key, std::uint32_t file, std::uint64_t offset,
                   std::uint64_t length, const Dims& index = {}, const Dims& grid = {});
  // Adds a common value. It is left out with a warning if its name is not valid or was added
  // before, or if it exceeds the limits.
  void AddCommon(const std::string& name, CommonValue value);
  void Warn(std::string warning);
  // Adds the name of a file to ForeignInventory::beside.
  void AddBeside(std::string name) { beside_.push_back(std::move(name)); }
  // Leaves a tensor out, counts it as lost, and warns: "tensor w: left out: ...".
  void Drop(std::uint32_t tensor, std::string_view why);
  // Leaves a tensor out with a warning; it is not lost, because its data exist in a form that is
  // not supported.
  void LeaveOut(std::uint32_t tensor, std::string_view why);
  // Whether a lost key is that of a tensor or of an object.
  enum class LostKind { kTensor, kObject };
  // Reports a tensor or object that the checkpoint names but whose bytes or metadata are missing or
  // wrong. `file`: empty if unknown. `reason`: such as "the file is missing". `part`: true if only
  // a part of the tensor is missing, and the tensor was added with its other parts. One warning
  // covers all keys with the same file, reason and `part`.
  void ReportLost(std::string_view file, std::string_view reason, LostKind what,
                  std::string_view key, bool part = false);
  // Reports the loss of a file, if it is unknown which tensors the file had.
  void ReportLostFile(std::string_view file, std::string_view reason);

  // Sorts the records and checks each tensor. A tensor with cells in no chunk is kept with a
  // warning (reading these cells fails); a tensor with cells in two chunks is left out with a
  // warning. The UUID is computed from root, files, sizes, mtimes and records, so an unchanged
  // source is the same checkpoint when it is opened again.
  Result<ForeignInventory> Finish();

 private:
  Status AppendChunk(std::uint32_t tensor, ChunkRecord& chunk);
  Status CheckCover(std::uint32_t tensor);
  void SortTensors();
  void CheckObjects();
  void AddLoss(ForeignLoss loss);
  std::vector<ForeignLoss> TakeLosses();
  Status SortFiles();
  void SetIdentity();

  const ForeignFolder& folder_;
  Inventory inventory_;
  std::vector<std::string> beside_;
  const std::set<std::string>* only_ = nullptr;
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

namespace pickle {
class Value;
}
// Converts a pickle value that consists of None, bool, int, float, str, bytes, tuples, lists and
// dicts with string or integer keys (also OrderedDict and the like, Namespace and path objects).
// nullopt for other values, and for values over the limits.
std::optional<CommonValue> CommonFromPickle(const pickle::Value& value);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_FOREIGN_H_
