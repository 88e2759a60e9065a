// SPDX-License-Identifier: Apache-2.0
// tensors/, npy/ and extents/, declared in checkpoint_views.h; each is a few lines over
// TensorFilesView.
#include "fs/views/checkpoint_text.h"
#include "fs/views/checkpoint_views.h"
#include "fs/views/keyed_view.h"
#include "shard/npy.h"

namespace tensormount::fs {
namespace {

// tensors/: a file has the tensor's row-major bytes. If these are all bytes of a stored file, the
// kernel can read that file itself (passthrough).
class TensorsView : public TensorFilesView {
 public:
  explicit TensorsView(const ShownCheckpoint& shown)
      : TensorFilesView(shown, "tensors", "", &shown.layers.tree()) {}
  bool listed_by_default() const override { return true; }

 private:
  Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const override {
    FileSegments segments;
    segments.AddTensor(tensor.source, tensor.skip, tensor.shown.meta.bytes());
    return segments;
  }
  std::optional<std::uint64_t> KnownSize(const TensorMeta& shown) const override {
    return shown.bytes();
  }
};

// npy/: a file as numpy.save writes it for the tensor; layers of stacked tensors have files too.
// NumPy has no types under a byte: a tensor of such a type is not listed, and a lookup returns
// kNotFound. docs/architecture.md contains a copy of this class.
class NpyView : public TensorFilesView {
 public:
  explicit NpyView(const ShownCheckpoint& shown)
      : TensorFilesView(shown, "npy", ".npy", &shown.layers.tree()) {}

 private:
  Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const override {
    const TensorMeta& meta = tensor.shown.meta;
    Result<std::string> header = MakeNpyHeader(meta.dtype(), meta.shape());
    if (!header.ok()) return Status(Code::kNotFound, ".npy does not support this dtype");
    FileSegments segments;
    segments.AddLiteral(std::move(header).value());
    segments.AddTensor(tensor.source, tensor.skip, meta.bytes());
    return segments;
  }
};

// extents/: only tensors have files here, since a layer has no chunks of its own.
class ExtentsView : public TensorFilesView {
 public:
  explicit ExtentsView(const ShownCheckpoint& shown)
      : TensorFilesView(shown, "extents", ".json", nullptr) {}

 private:
  Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto text, ExtentsJson(shown().opened, tensor.shown));
    FileSegments segments;
    segments.AddText(std::move(text));
    return segments;
  }
  // Returns the time of checkpoint.json instead of the tensor's, because even the bytes of an
  // unchanged tensor may be stored elsewhere in the next checkpoint.
  std::int64_t MtimeOfFile(const TensorEntry&) const override {
    return shown().opened.index().info().json_mtime;
  }
};

}  // namespace

std::unique_ptr<const View> MakeTensorsView(const ShownCheckpoint& shown) {
  return std::make_unique<TensorsView>(shown);
}

std::unique_ptr<const View> MakeNpyView(const ShownCheckpoint& shown) {
  return std::make_unique<NpyView>(shown);
}

std::unique_ptr<const View> MakeExtentsView(const ShownCheckpoint& shown) {
  return std::make_unique<ExtentsView>(shown);
}

}  // namespace tensormount::fs
