// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_CHECKPOINT_H_
#define TENSORMOUNT_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/common_value.h"
#include "tensormount/dtype.h"
#include "tensormount/name_map.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Mapped bytes of a tensor. Valid as long as `keep` exists, which also keeps the checkpoint open.
struct MappedBytes {
  const std::byte* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> keep;
};

// One tensor of an opened checkpoint. A cheap handle that keeps the checkpoint open; thread-safe.
// Counts of the values of a tensor, taken when it was saved (docs/numbers.md). A complex element
// counts as two values.
struct ValueStatistics {
  std::uint64_t count = 0;  // Number of values.
  std::uint64_t zeros = 0;  // Of both signs.
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  // The largest magnitude of the finite values; nullopt: none is finite. Exact, except for integers
  // beyond 2^53, which are rounded.
  std::optional<double> absmax;
};

class TENSORMOUNT_EXPORT Tensor {
 public:
  const std::string& key() const;
  DType dtype() const;
  const Dims& shape() const;
  std::uint64_t bytes() const;
  // CRC-64/NVME of the row-major bytes; nullopt if none is stored (foreign formats, a quick adopt),
  // and for a layer of a stacked tensor.
  std::optional<std::uint64_t> digest() const;
  // The counts that the save took; nullopt: they are not known (foreign formats, saves without
  // them or through a mount, layers of a stacked tensor, tensors that a name map puts together).
  // kDataLoss: they are damaged.
  Result<std::optional<ValueStatistics>> statistics() const;

  // Reads a box (or flat range) of the tensor into `out`, whatever sharding it was saved with.
  // `out` may be strided; its dtype must be the tensor's and its shape the region's extents.
  //   kInvalidArgument  region, dtype or shape do not match
  //   kDataLoss         stored bytes are missing or damaged: names tensor, box, file and byte
  // On failure the contents of `out` are undefined. Every byte is verified before the return, if
  // the checkpoint has checksums.
  Status Read(const Region& region, const BufferView& out) const;
  // Reads bytes [offset, offset + size) of the row-major byte string. Errors as for Read.
  Status ReadBytes(std::uint64_t offset, void* out, std::size_t size) const;

  // Maps bytes [offset, offset + size) without a copy; they must be one run of one file. The bytes
  // are not verified. If another program truncates the file, accessing the bytes raises SIGBUS; if
  // it rewrites the file in place, the bytes change.
  //   kInvalidArgument  the range reaches past the end
  //   kUnsupported      the bytes are not one run of one file, or not mappable: use ReadBytes
  Result<MappedBytes> Map(std::uint64_t offset, std::size_t size) const;

 private:
  friend class Checkpoint;
  struct Impl;
  explicit Tensor(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

struct OpenOptions {
  // Trusted directories: data of adopted checkpoints may lie below them, no matter who adopted the
  // checkpoints, and links of foreign checkpoints may lead into them.
  std::vector<std::string> roots = {};
  // The file or index to read in a foreign directory that holds several sets of weights; the same
  // as opening `path`/file. Empty: the format decides.
  std::string file = {};
  // Largest number of threads for one read of a tensor, the caller's included. A read uses one for
  // each 4 MiB, or for each 1,024 short runs; these threads have ended when the read returns. 0:
  // one per core, at most 8. 1: only the caller's thread.
  int threads = 0;
  // A name map: the checkpoint has the keys that it gives. An error of the map fails the open:
  // kInvalidArgument, or kNotFound for a tensor that a rule needs.
  NameMap names = {};
};

// A published checkpoint, or a checkpoint in a foreign format, opened for reading without ranks. A
// cheap handle; thread-safe. Reading executes no code from the checkpoint and writes nothing.
//
// Example:
//
//   const auto checkpoint = Checkpoint::Open("STORE/latest");
//   const auto tensor = checkpoint.value().tensor("w");
//   std::vector<float> rows(2 * 4096);
//   const Status status = tensor.value().Read(
//       Box::Make({0, 0}, {2, 4096}).value(), BufferView::Host(DType::kF32, rows.data(), {2,
//       4096}));
//
// A Checkpoint keeps reading the checkpoint that was opened, even if that is removed or replaced
// meanwhile.
class TENSORMOUNT_EXPORT Checkpoint {
 public:
  // `path`: a checkpoint ("STORE/step-1000"), "STORE/latest", or a directory or file in a format of
  // docs/formats-adopted.md. For a store, or a training directory in a foreign format, opens the
  // latest checkpoint, which warnings() names.
  //   kNotFound          no such checkpoint
  //   kDataLoss          the checkpoint's metadata are damaged beyond repair
  //   kUnsupported       written in a newer format, or in an unknown one
  //   kPermissionDenied  the checkpoint refers to files outside its directory that no root covers
  static Result<Checkpoint> Open(const std::string& path);
  static Result<Checkpoint> Open(const std::string& path, const OpenOptions& options);

  const std::string& path() const;
  // 32 hex digits, unique for each saved checkpoint, even under the same name; empty for foreign
  // formats.
  std::string uuid() const;
  // Problems that did not prevent opening, or that later reads of the index met and worked around;
  // and which checkpoint was opened, if `path` was a directory of several.
  std::vector<std::string> warnings() const;

  // Keys of tensors, in byte order.
  Result<std::vector<std::string>> keys() const;
  Result<Tensor> tensor(std::string_view key) const;  // kNotFound: no such tensor.

  // Keys of objects, in byte order.
  Result<std::vector<std::string>> objects() const;
  // The grid that an object was saved on; no axes if it has no grid. kNotFound: no such object.
  Result<Dims> object_grid(std::string_view key) const;
  // The bytes of an object, or of one part of it on its grid. kNotFound: no such object or part.
  Result<std::string> object(std::string_view key, const Dims& index = {}) const;

  Result<std::map<std::string, CommonValue>> common() const;
  Result<CommonValue> common(std::string_view name) const;  // kNotFound: no such value.
  // Values that each rank of the save set for itself; ranks without any are not in the map.
  Result<std::map<int, std::map<std::string, CommonValue>>> rank_common() const;
  // A value that rank `rank` of the save set for itself. kNotFound: no such value.
  Result<CommonValue> rank_common(int rank, std::string_view name) const;
  // Metadata of the application about the whole checkpoint; empty if none were set.
  Result<CommonDict> content_metadata() const;

 private:
  friend struct CheckpointInside;  // index/public_checkpoint.h
  struct Impl;
  explicit Checkpoint(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_CHECKPOINT_H_
