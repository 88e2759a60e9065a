// SPDX-License-Identifier: Apache-2.0
// model.safetensors, declared in checkpoint_views.h: all tensors that the format supports, as one
// file.
#include <algorithm>
#include <mutex>

#include "fs/views/checkpoint_views.h"
#include "fs/views/file_view.h"
#include "fs/views/tied_names.h"
#include "index/records/safetensors_order.h"

namespace tensormount::fs {
namespace {

using Segment = FileSegments::Segment;

// The safetensors format: 8 bytes little-endian, the length of the header; the header, JSON with
// type, shape and data_offsets of each tensor, padded with spaces; then all data without gaps,
// which readers check.
//
// Source of the header:
//   a foreign .safetensors file, keys not mapped   that file, byte for byte
//   a checkpoint of ours, keys not mapped          the index, which stores it since the publish
//   keys mapped, tied tensors, an index in memory  made here, and kept
// The order of the tensors is computed when the size is first requested, and takes 32 bytes for
// each tensor.
class SafetensorsView : public FileView {
 public:
  explicit SafetensorsView(const ShownCheckpoint& shown)
      : FileView("model.safetensors", shown.opened.index().info().json_mtime), shown_(shown) {}

 private:
  struct Assembled {
    std::shared_ptr<const std::vector<Segment>> segments;
    // Set only if the header was made here; otherwise it is read from the index or from the source.
    std::shared_ptr<const std::string> header;
    bool is_source = false;  // The file is a foreign file, unchanged.
  };

  // Does not read a stored header, because a listing asks for the size of every view.
  Result<std::uint64_t> Size() const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Assembled assembled, Assemble());
    return assembled.segments->back().begin + assembled.segments->back().length;
  }

  Result<FileSegments> Segments() const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(Assembled assembled, Assemble());
    if (!assembled.header) {
      const std::uint64_t length = assembled.segments->front().length;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          std::string header,
          assembled.is_source ? SourceBytes(length) : shown_.opened.index().SafetensorsHeader());
      // Size() has reported this length; with another length all tensors would move.
      if (header.size() != length) {
        return Status(Code::kDataLoss,
                      "model.safetensors: the header does not have the recorded length");
      }
      assembled.header = std::make_shared<const std::string>(std::move(header));
    }
    return FileSegments::FromSharedSegments(std::move(assembled.segments),
                                            std::move(assembled.header));
  }

  Result<Assembled> Assemble() const {
    // The lock is held during the computation, so that it runs once. Failures are not cached.
    const std::lock_guard lock(mutex_);
    if (assembled_.segments) return assembled_;
    std::vector<Segment> segments;
    Assembled made;
    const bool own_keys = !shown_.opened.is_mapped();
    if (own_keys && shown_.opened.commit() == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(made.is_source, LayOutSource(segments));
    }
    if (!made.is_source) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TiedNames tied, TiedNames::Make(shown_));
      TENSORMOUNT_RETURN_IF_ERROR(own_keys && tied.empty() && !shown_.opened.index().in_memory()
                                      ? LayOutRecorded(segments)
                                      : LayOutAnew(segments, tied, made.header));
    }
    // Readers compute positions from the header and refuse gaps, so an index with gaps is damaged.
    if (!AreAdjacent(segments)) {
      return Status(Code::kDataLoss, "index: tensors of model.safetensors overlap or leave a gap");
    }
    made.segments = std::make_shared<const std::vector<Segment>>(std::move(segments));
    assembled_ = std::move(made);
    return assembled_;
  }

  // Sorts the segments by position; true if they neither overlap nor leave a gap.
  static bool AreAdjacent(std::vector<Segment>& segments) {
    std::sort(segments.begin(), segments.end(),
              [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < segments.size(); ++i) {
      if (segments[i].begin != segments[i - 1].begin + segments[i - 1].length) return false;
    }
    return true;
  }

  // Reads the first `size` bytes of the foreign file, which are its header.
  Result<std::string> SourceBytes(std::uint64_t size) const {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, shown_.opened.OpenFile(0));
    std::string bytes(static_cast<std::size_t>(size), '\0');
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n, file->ReadAt(0, bytes.data(), bytes.size()));
    bytes.resize(n);
    return bytes;
  }

  // Lays the tensors out as in the foreign file. Returns false, and lays nothing out, unless the
  // source is one file that consists of a header and these tensors, each as one packed run. For
  // other sources a header is made.
  Result<bool> LayOutSource(std::vector<Segment>& segments) const {
    const CheckpointIndex& index = shown_.opened.index();
    if (index.files().size() != 1 || !index.files()[0].name.ends_with(".safetensors")) return false;
    const std::uint64_t size = index.files()[0].length;
    std::uint64_t first = size;
    std::vector<Segment> found;
    bool whole = true;  // Each tensor seen so far is one packed run.
    Status inner;
    TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
      if (tensor.meta.bytes() == 0) return true;
      whole = whole && tensor.chunks == 1 && !tensor.wide && !tensor.pending;
      if (!whole) return false;
      // The index has the extents, because tensors with pending chunks were excluded above.
      const Result<std::shared_ptr<const ExtentTable>> table = index.Extents(tensor);
      inner = table.status();
      if (!inner.ok()) return false;
      const Result<ChunkRecord> chunk = table.value()->At(0);
      inner = chunk.status();
      if (!inner.ok()) return false;
      whole = chunk.value().length == tensor.meta.bytes();
      if (!whole) return false;
      found.push_back({.kind = Segment::Kind::kTensor,
                       .ordinal = tensor.ordinal,
                       .begin = chunk.value().offset,
                       .length = tensor.meta.bytes()});
      first = std::min(first, chunk.value().offset);
      return true;
    }));
    TENSORMOUNT_RETURN_IF_ERROR(inner);
    if (!whole) return false;
    // The bytes before the data are the header, which was read when the source was opened.
    if (first == 0) return false;
    found.push_back({.kind = Segment::Kind::kLiteral, .length = first});
    if (!AreAdjacent(found) || found.back().begin + found.back().length != size) return false;
    segments = std::move(found);
    return true;
  }

  static Status None() {
    return Status(Code::kNotFound, "the checkpoint has no model.safetensors");
  }

  Status LayOutRecorded(std::vector<Segment>& segments) const {
    const CheckpointIndex& index = shown_.opened.index();
    // A model whose header would exceed the format's limit has no model.safetensors.
    if (index.safetensors_header_bytes() == 0) return None();
    segments.push_back(
        {.kind = Segment::Kind::kLiteral, .length = index.safetensors_header_bytes()});
    return index.ForEachTensor(0, [&](const TensorEntry& tensor) {
      if (tensor.in_safetensors && tensor.meta.bytes() > 0) {
        segments.push_back({.kind = Segment::Kind::kTensor,
                            .ordinal = tensor.ordinal,
                            .begin = tensor.safetensors_offset,
                            .length = tensor.meta.bytes()});
      }
      return true;
    });
  }

  // Makes a header, because the index's header lacks a key map's names or the names of tied
  // tensors, or the index is in memory and has no header. Uses LayOutSafetensors like the publish,
  // so the same tensors give the same file on every machine.
  Status LayOutAnew(std::vector<Segment>& segments, const TiedNames& tied,
                    std::shared_ptr<const std::string>& header) const {
    std::vector<TensorEntry> entries;
    entries.reserve(shown_.tensors.count());
    std::vector<const TensorMeta*> metas;
    for (std::uint32_t i = 0; i < shown_.tensors.count(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, shown_.tensors.EntryAt(i));
      entries.push_back(std::move(entry));
      metas.push_back(&entries.back().meta);
    }
    // Additional names of a tied tensor are written as metadata, as safetensors.torch.save_model
    // does: its load_model refuses a file in which a tied tensor is stored twice.
    std::map<std::string, std::string> metadata;
    for (const auto& [number, names] : tied.all()) {
      for (const std::string& name : names) metadata[name] = metas[number]->key();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsOrder order,
                                 LayOutSafetensors(metas, std::move(metadata)));
    if (order.header.empty()) return None();
    segments.push_back({.kind = Segment::Kind::kLiteral, .length = order.header.size()});
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (!order.held[i] || metas[i]->bytes() == 0) continue;
      segments.push_back({.kind = Segment::Kind::kTensor,
                          .ordinal = entries[i].ordinal,
                          .begin = order.offsets[i],
                          .length = metas[i]->bytes()});
    }
    header = std::make_shared<const std::string>(std::move(order.header));
    return {};
  }

  const ShownCheckpoint& shown_;
  mutable std::mutex mutex_;
  mutable Assembled assembled_;
};

}  // namespace

std::unique_ptr<const View> MakeSafetensorsView(const ShownCheckpoint& shown) {
  return std::make_unique<SafetensorsView>(shown);
}

}  // namespace tensormount::fs
