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

// What adapters of foreign formats share: the folder that they may look into, and the records that
// they make of it.

namespace tensormount {

// A folder (or one file) of a foreign checkpoint, and the folders that nothing may lead out of: the
// folder itself, or one above it that the operator named, and others that links of it lead into:
// named ones, and the blobs of a hub's cache. Names are relative to the folder and have no "..".
// Thread-safe.
class ForeignFolder {
 public:
  // `path` is resolved (ResolveSourcePath). `roots`: folders that the operator named besides. Of
  // those that `path` lies below the deepest counts, else `path` (of a file: its folder) itself; of
  // the others those that a link in the folder leads into.
  static Result<ForeignFolder> Open(FileSystem& fs, const std::string& path,
                                    std::span<const std::string> roots);

  FileSystem& fs() const { return *fs_; }
  const std::string& path() const { return path_; }  // As resolved; of a file: the file's.
  // What names of records are relative to: the folder that holds all of bounds().
  const std::string& root() const { return root_; }
  // Files are opened below these, and below nothing else.
  const std::vector<std::string>& bounds() const { return bounds_; }
  // The name of the only file where the source is one; empty: a folder.
  const std::string& file() const { return file_; }
  std::string Shown(std::string_view name) const;  // For messages.

  // kDataLoss for what is no file or folder, as a FIFO or links that lead round;
  // kPermissionDenied "... leads out of ROOT: name a folder that holds both with --root" for links
  // and names that do; kDataLoss for names that are no relative path.
  Result<std::unique_ptr<File>> OpenRead(std::string_view name) const;
  // `first`: what it begins with after white space, "{" of JSON: looked at before a large file is
  // read, since a size costs whoever writes it nothing. kDataLoss: not that. Empty: anything.
  Result<std::string> ReadFile(std::string_view name, std::uint64_t max_bytes,
                               std::string_view first = {}) const;
  // Below the folder; "" is the folder itself. Sorted.
  Result<std::vector<DirectoryEntry>> List(std::string_view name) const;
  // Whether there is such a file or folder (of any kind), without opening it.
  bool Has(std::string_view name) const;
  // The name relative to the root, as FileRecord::name has it. kDataLoss as above.
  Result<std::string> BelowRoot(std::string_view name) const;
  // A folder below this one, with the same root.
  Result<ForeignFolder> Below(std::string_view name) const;

  // BelowRoot of what the name leads to, where an absolute link stands on the way: a name that can
  // be opened without following it. The same errors as OpenRead.
  Result<std::string> Locate(std::string_view name) const;
  // Opens what Locate gave, and nothing that leads out of its bound.
  Result<std::unique_ptr<File>> OpenLocated(const std::string& below) const;
  // What is there. The same errors.
  Result<FileInfo> Stat(std::string_view name) const;

 private:
  template <typename F>
  auto Beneath(std::string_view name, F f) const -> decltype(f(std::string(), std::string()));
  Status DamageOf(std::string_view name, const Status& status) const;
  Status AddBounds(std::span<const std::string> roots);

  FileSystem* fs_ = nullptr;
  std::string path_;
  std::string root_;
  std::string folder_;               // Relative to the root; empty: the root itself.
  std::vector<std::string> bounds_;  // Resolved; the one that holds the folder is the first.
  std::string file_;
};

// For whoever takes what is there: without the tensors that are not whole, and with the content
// metadata saying under "lost" what the checkpoint lacks. Nothing where nothing is lost.
void LeaveOutLost(ForeignInventory& inventory);

// What one warning counts, and the first of it by name: hostile metadata may have a million of one
// fault, and a report is to stay one line.
struct CountedNames {
  std::size_t count = 0;
  std::string first;
  void Add(std::string_view name) {
    if (count++ == 0) first = name;
  }
};

// Collects what an adapter finds and checks all of it. An adapter calls Add* in any order and
// returns the first failure: what concerns the checkpoint as a whole ends the read, what concerns
// one tensor leaves it out with a warning (Drop).
// For one thread and one read. `folder` must outlive it. Whatever Add* and Drop say, the numbers
// that they gave stay good until Finish.
class ForeignBuilder {
 public:
  // `producer`: "torch.distributed.checkpoint".
  ForeignBuilder(const ForeignFolder& folder, std::string producer);
  ~ForeignBuilder();

  const ForeignFolder& folder() const { return folder_; }
  void SetProducer(std::string producer) { inventory_.info.producer = std::move(producer); }
  void SetWorldSize(std::uint32_t n) { inventory_.info.world_size = n; }

  // The number of a file, which is looked at once (size, mtime). Errors as ForeignFolder's.
  Result<std::uint32_t> AddFile(std::string_view name);
  std::uint64_t FileLength(std::uint32_t file) const;
  std::int64_t FileTime(std::uint32_t file) const;  // Its mtime in seconds.
  // Whether AddFile was called for the name, or for one below it.
  bool Uses(std::string_view name) const;
  // Opened for reading once and kept while the builder lives (at most some hundred at a time).
  Result<std::shared_ptr<File>> OpenFile(std::uint32_t file);

  // Until it is called again: only tensors with these keys are taken, others are left out without
  // a word. Null: all. Not owned.
  void TakeOnly(const std::set<std::string>* keys) { only_ = keys; }
  // So many tensors will be added, or more, or fewer.
  void ReserveTensors(std::size_t n);
  // The number of a new tensor. kDataLoss: a key that is no UTF-8, empty, over 2,048 bytes, holds
  // NUL or was added before; a shape that overflows.
  Result<std::uint32_t> AddTensor(std::string_view key, DType dtype, const Dims& shape);
  const TensorMeta& MetaOf(std::uint32_t tensor) const;
  // A chunk of it. `strides`: bytes along each axis, empty for packed rows; `length`: from the
  // first byte to the end of the last. kDataLoss where it does not lie within the file and the
  // shape or has not the length of its region. Empty regions are ignored.
  Status AddChunk(std::uint32_t tensor, const Region& region, std::uint32_t file,
                  std::uint64_t offset, std::uint64_t length, const Dims& strides = {});
  // A chunk whose bytes are found later in an item of the file (ItemResolver).
  Status AddPendingChunk(std::uint32_t tensor, const Region& region, std::uint32_t file,
                         std::uint64_t offset, std::uint64_t length);
  void SetResolver(ItemResolver resolver);

  // Opaque bytes; index and grid as in ObjectRecord. kDataLoss as for tensors; parts that are
  // missing from a grid are found by Finish, which leaves the object out with a warning.
  Status AddObject(std::string_view key, std::uint32_t file, std::uint64_t offset,
                   std::uint64_t length, const Dims& index = {}, const Dims& grid = {});
  // Reserved names and trees over the limits are left out with a warning.
  void AddCommon(const std::string& name, CommonValue value);
  void Warn(std::string warning);
  // ForeignInventory::beside.
  void Beside(std::string name) { beside_.push_back(std::move(name)); }
  // Leaves a tensor out and warns: "tensor w: left out: ...". What it should be is lost.
  void Drop(std::uint32_t tensor, std::string_view why);
  // The same where its bytes are there, or stand for themselves, in a form that we do not read.
  void LeaveOut(std::uint32_t tensor, std::string_view why);
  // The checkpoint names the tensor or object, which was not added, and its files lack it.
  // `file`: empty where it is in none; `reason`: "the file is missing". Told in one line a reason.
  enum class What { kTensor, kObject };
  // `part`: a tensor that was added, of which other cells are there.
  void Lose(std::string_view file, std::string_view reason, What what, std::string_view key,
            bool part = false);
  // The same of a file of which nobody knows what was in it.
  void LoseFile(std::string_view file, std::string_view reason);

  // Sorts, finds what chunks leave uncovered (kept, with a warning: reading these cells fails) and
  // cover twice (left out, with a warning), and gives the whole an identity made of root, files,
  // sizes, mtimes and records: the same source opened again is the same checkpoint.
  Result<ForeignInventory> Finish();

 private:
  Status AppendChunk(std::uint32_t tensor, ChunkRecord& chunk);
  Status CheckCover(std::uint32_t tensor);
  void SortTensors();
  void CheckObjects();
  void Lost(ForeignLoss loss);
  std::vector<ForeignLoss> TakeLost();
  Status SortFiles();
  void SetIdentity();

  const ForeignFolder& folder_;
  Inventory inventory_;
  std::vector<std::string> beside_;
  const std::set<std::string>* only_ = nullptr;
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

// A common value of what a pickle holds, where it is made of None, bool, int, float, str, bytes,
// tuples, lists and dicts with string or integer keys (OrderedDict, Namespace and path objects
// too). nullopt: it is something else.
namespace pickle {
class Value;
}
std::optional<CommonValue> CommonFromPickle(const pickle::Value& value);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_FOREIGN_H_
