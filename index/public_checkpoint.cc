// SPDX-License-Identifier: Apache-2.0
// Checkpoint and Tensor of tensormount/checkpoint.h over OpenedCheckpoint. This file is directly in
// index/ because it uses every directory below, index/foreign too.
//
// Handles hold copies of values or a shared pointer to the opened checkpoint, so a Tensor may
// outlive its Checkpoint, and any thread may use both. Read and ReadBytes read whole leaves or
// pages, so that every byte they return is verified, if the checkpoint has hashes. Map verifies
// nothing.
#include "index/public_checkpoint.h"

#include "base/file_system.h"
#include "index/foreign/open_source.h"
#include "index/foreign/rule_packs.h"
#include "index/read/checkpoint.h"
#include "index/read/threaded_read.h"
#include "index/records/layer_names.h"

namespace tensormount {

struct Checkpoint::Impl {
  std::shared_ptr<const OpenedCheckpoint> opened;
  int threads = 0;  // From OpenOptions.
};

// The tensor of a key. If the key names one layer of a stacked tensor, reads go to a box of the
// stacked tensor.
struct Tensor::Impl {
  std::shared_ptr<const OpenedCheckpoint> opened;
  int threads = 0;  // From OpenOptions.
  TensorEntry entry;
  std::optional<LayerEntry> layer;  // Set for a layer; `entry` is then unused.

  const TensorMeta& meta() const { return layer ? layer->meta : entry.meta; }
  // The stored tensor, and the offset in it at which bytes [offset, offset + size) of this tensor
  // begin.
  Result<std::pair<const TensorEntry*, std::uint64_t>> Stored(std::uint64_t offset,
                                                              std::size_t size) const {
    if (offset > meta().bytes() || size > meta().bytes() - offset) {
      return Status(Code::kInvalidArgument,
                    "tensor " + meta().key() + ": the requested bytes reach past its end");
    }
    if (layer) return std::pair(&layer->stacked, layer->offset + offset);
    return std::pair(&entry, offset);
  }
};

Tensor::Tensor(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

const std::string& Tensor::key() const { return impl_->meta().key(); }
DType Tensor::dtype() const { return impl_->meta().dtype(); }
const Dims& Tensor::shape() const { return impl_->meta().shape(); }
std::uint64_t Tensor::bytes() const { return impl_->meta().bytes(); }
// A layer has no digest: the stored digest covers the whole stacked tensor.
std::optional<std::uint64_t> Tensor::digest() const {
  if (impl_->layer || !impl_->entry.has_digest) return std::nullopt;
  return impl_->entry.digest;
}

Result<std::optional<ValueStatistics>> Tensor::statistics() const {
  if (impl_->layer) return std::optional<ValueStatistics>();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ValueCounts> counts,
                               impl_->opened->CountsOf(impl_->entry));
  if (!counts) return std::optional<ValueStatistics>();
  const TensorMeta& meta = impl_->meta();
  ValueStatistics out;
  out.count = ValuesIn(meta.dtype(), meta.elements());
  out.zeros = counts->zeros;
  out.nan = counts->nan;
  out.posinf = counts->posinf;
  out.neginf = counts->neginf;
  if (out.count > counts->nonfinite()) out.absmax = AbsmaxOf(meta.dtype(), counts->absmax_bits);
  return std::optional(out);
}

// For a layer, InStack maps the region to a region of the stacked tensor, and adds an axis to the
// buffer of a box.
Status Tensor::Read(const Region& region, const BufferView& out) const {
  if (!impl_->layer) {
    return ReadByThreads(*impl_->opened, impl_->entry, region, out, ReadVerify::kExtendLeaves,
                         impl_->threads);
  }
  const LayerEntry& layer = *impl_->layer;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region in_stack, layer.InStack(region));
  return ReadByThreads(*impl_->opened, layer.stacked, in_stack, layer.InStack(out, region),
                       ReadVerify::kExtendLeaves, impl_->threads);
}

Status Tensor::ReadBytes(std::uint64_t offset, void* out, std::size_t size) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto stored, impl_->Stored(offset, size));
  return ReadBytesByThreads(*impl_->opened, *stored.first, stored.second, out, size,
                            ReadVerify::kExtendLeaves, impl_->threads);
}

Result<MappedBytes> Tensor::Map(std::uint64_t offset, std::size_t size) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto stored, impl_->Stored(offset, size));
  if (size == 0) return MappedBytes{.data = nullptr, .size = 0, .keep = impl_};
  TENSORMOUNT_RETURN_IF_ERROR(impl_->opened->fs().Need(Ability::kKernelFiles, "tensor " + key()));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::vector<OpenedCheckpoint::MappedRange> ranges,
      impl_->opened->MapBytes(*stored.first, stored.second, size, ReadVerify::kOff,
                              OpenedCheckpoint::ForeignFiles::kMap));
  if (ranges.size() != 1) {
    return Status(Code::kUnsupported,
                  "tensor " + key() + ": bytes [" + std::to_string(offset) + ", " +
                      std::to_string(offset + size) +
                      ") are not contiguous in one file, so they cannot be mapped");
  }
  return MappedBytes{
      .data = ranges[0].data,
      .size = size,
      .keep = std::make_shared<std::pair<std::shared_ptr<const Impl>, std::shared_ptr<const void>>>(
          impl_, ranges[0].keep)};
}

Checkpoint::Checkpoint(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

const std::shared_ptr<const OpenedCheckpoint>& CheckpointInside::Of(const Checkpoint& checkpoint) {
  return checkpoint.impl_->opened;
}

Result<Checkpoint> Checkpoint::Open(const std::string& path) { return Open(path, OpenOptions()); }

Result<Checkpoint> Checkpoint::Open(const std::string& path, const OpenOptions& options) {
  if (options.threads < 0) {
    return Status(Code::kInvalidArgument,
                  path + ": " + std::to_string(options.threads) + " threads");
  }
  auto impl = std::make_shared<Impl>();
  impl->threads = options.threads;
  const std::string chosen = options.file.empty() ? path : JoinPath(path, options.file);
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSource(chosen, options.roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(FoundSource one, LatestOf(found, options.roots));
  if (one.path != found.path) {
    const char* kind = found.kind == SourceKind::kStore ? "a store" : "a training directory";
    one.warnings.push_back(chosen + " is " + kind + "; its latest checkpoint, " +
                           one.path.substr(one.path.rfind('/') + 1) + ", was opened");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(impl->opened, OpenFound(one, options.roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(impl->opened, ApplyNames(impl->opened, options.names));
  return Checkpoint(std::move(impl));
}

const std::string& Checkpoint::path() const { return impl_->opened->directory(); }
std::string Checkpoint::uuid() const {
  // A checkpoint without COMMIT is a foreign one. The uuid in its index is only a hash of its
  // records, made at open.
  if (impl_->opened->commit() == nullptr) return std::string();
  return impl_->opened->index().info().uuid.ToString();
}
std::vector<std::string> Checkpoint::warnings() const { return impl_->opened->warnings(); }

Result<std::vector<std::string>> Checkpoint::keys() const {
  std::vector<std::string> keys;
  TENSORMOUNT_RETURN_IF_ERROR(impl_->opened->index().ForEachTensor(0, [&](const TensorEntry& t) {
    keys.push_back(t.meta.key());
    return true;
  }));
  return keys;
}

// A stored key wins over a layer of the same name.
Result<Tensor> Checkpoint::tensor(std::string_view key) const {
  auto impl = std::make_shared<Tensor::Impl>();
  impl->opened = impl_->opened;
  impl->threads = impl_->threads;
  Result<TensorEntry> entry = impl_->opened->index().Find(key);
  if (entry.ok()) {
    impl->entry = std::move(entry).value();
    return Tensor(std::move(impl));
  }
  if (entry.status().code() != Code::kNotFound) return entry.status();
  TENSORMOUNT_ASSIGN_OR_RETURN(impl->layer, impl_->opened->index().ResolveLayer(key));
  if (!impl->layer) return entry.status();
  return Tensor(std::move(impl));
}

// The parts of an object are neighbours, because the list is sorted by key.
Result<std::vector<std::string>> Checkpoint::objects() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts,
                               impl_->opened->index().Objects());
  std::vector<std::string> keys;
  for (const ObjectRecord& part : parts) {
    if (keys.empty() || keys.back() != part.key) keys.push_back(part.key);
  }
  return keys;
}

Result<Dims> Checkpoint::object_grid(std::string_view key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts,
                               impl_->opened->index().ObjectParts(key));
  return parts.empty() ? Dims() : parts.front().grid;
}

Result<std::string> Checkpoint::object(std::string_view key, const Dims& index) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts,
                               impl_->opened->index().ObjectParts(key));
  for (const ObjectRecord& part : parts) {
    if (!(part.index == index)) continue;
    // The index may be damaged: allocate nothing larger than the file it names.
    if (part.file >= impl_->opened->index().files().size() ||
        part.length > impl_->opened->index().files()[part.file].length) {
      return Status(Code::kDataLoss,
                    "object " + part.key + ": its bytes reach past the end of its data file");
    }
    std::string bytes(part.length, '\0');
    TENSORMOUNT_RETURN_IF_ERROR(impl_->opened->ReadObject(part, 0, bytes.data(), bytes.size()));
    return bytes;
  }
  const Dims grid = parts.empty() ? Dims() : parts.front().grid;
  return Status(Code::kNotFound,
                "object " + std::string(key) +
                    (index.rank() == 0 && grid.rank() > 0
                         ? " has parts on a grid " + grid.ToString() + ": pass the index of a part"
                         : " has no part " + index.ToString()));
}

// Reserved records (per-rank values, content metadata) are left out, because they are not common
// values of the user.
Result<std::map<std::string, CommonValue>> Checkpoint::common() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(CommonState state, impl_->opened->index().Common());
  return std::move(state.values);
}

Result<CommonValue> Checkpoint::common(std::string_view name) const {
  if (IsReservedCommonName(name)) {
    return Status(Code::kNotFound, "no common value " + std::string(name));
  }
  return impl_->opened->index().CommonRecord(name);
}

Result<std::map<int, std::map<std::string, CommonValue>>> Checkpoint::rank_common() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(CommonState state, impl_->opened->index().Common());
  return std::move(state.ranks);
}

Result<CommonValue> Checkpoint::rank_common(int rank, std::string_view name) const {
  const std::string record = RankRecordName(rank);
  Result<CommonValue> all = impl_->opened->index().CommonRecord(record);
  if (!all.ok() && all.status().code() != Code::kNotFound) return all.status();
  if (all.ok()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const CommonValues values,
                                 ValuesOf(std::move(all).value(), "common record " + record));
    if (const auto found = values.find(std::string(name)); found != values.end()) {
      return found->second;
    }
  }
  return Status(Code::kNotFound,
                "no common value " + std::string(name) + " of rank " + std::to_string(rank));
}

Result<CommonDict> Checkpoint::content_metadata() const {
  Result<CommonValue> value = impl_->opened->index().CommonRecord(kContentMetadataRecord);
  if (!value.ok() && value.status().code() == Code::kNotFound) return CommonDict();
  if (!value.ok()) return value.status();
  auto* dict = value.value().get_if<CommonDict>();
  if (dict == nullptr) return Status(Code::kDataLoss, "content metadata: not a dict");
  return std::move(*dict);
}

}  // namespace tensormount
