// SPDX-License-Identifier: Apache-2.0
// Declared in checkpoint_views.h: tensors/, npy/ and extents/. In one file because each is a few
// lines over TensorFilesView.
#include "fs/views/checkpoint_text.h"
#include "fs/views/checkpoint_views.h"
#include "fs/views/keyed_view.h"
#include "shard/npy.h"

namespace tensormount::fs {
namespace {

class TensorsView : public TensorFilesView {
 public:
  explicit TensorsView(const ShownCheckpoint& shown)
      : TensorFilesView(shown, "tensors", "", Layers::kHidden) {}
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

class NpyView : public TensorFilesView {
 public:
  explicit NpyView(const ShownCheckpoint& shown)
      : TensorFilesView(shown, "npy", ".npy", Layers::kHidden) {}

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

class ExtentsView : public TensorFilesView {
 public:
  explicit ExtentsView(const ShownCheckpoint& shown)
      : TensorFilesView(shown, "extents", ".json", Layers::kNo) {}

 private:
  Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(GeneratedText::Parts parts,
                                 ExtentsJson(shown().opened, tensor.shown));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto text, GeneratedText::Make(std::move(parts)));
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
