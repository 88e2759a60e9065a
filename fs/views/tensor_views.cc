// SPDX-License-Identifier: Apache-2.0
// Declared in checkpoint_views.h: tensors/, npy/ and extents/. In one file because each is a few
// lines over TensorFilesView.
#include "fs/views/checkpoint_text.h"
#include "fs/views/checkpoint_views.h"
#include "fs/views/keyed_view.h"
#include "shard/npy.h"

namespace tensormount::fs {
namespace {

// A file is the tensor's row-major bytes and nothing else. It may be a whole stored file, and is
// then read by the kernel.
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

// A file is what numpy.save would write of the tensor; layers of stacked tensors have one too.
// NumPy has no types under a byte: listings leave such a tensor out, look-ups say that it is not
// there. docs/architecture.md has this class as it stands here.
class NpyView : public TensorFilesView {
 public:
  explicit NpyView(const ShownCheckpoint& shown)
      : TensorFilesView(shown, "npy", ".npy", &shown.layers.tree()) {}

 private:
  Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const override {
    const TensorMeta& meta = tensor.shown.meta;
    Result<std::string> header = MakeNpyHeader(meta.dtype(), meta.shape());
    if (!header.ok()) return Status(Code::kNotFound, "no .npy of this type");
    FileSegments segments;
    segments.AddLiteral(std::move(header).value());
    segments.AddTensor(tensor.source, tensor.skip, meta.bytes());
    return segments;
  }
};

// Listed by name only for tensors as they are stored: a layer has no chunks of its own.
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
  // Where the bytes are changes with every checkpoint.
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
