// SPDX-License-Identifier: Apache-2.0
// model.safetensors: all tensors that the format has a type for.
#include <algorithm>
#include <mutex>

#include "fs/views/checkpoint_views.h"
#include "fs/views/file_view.h"
#include "index/safetensors_layout.h"

namespace tensormount::fs {
namespace {

using Segment = FileContent::Segment;

class SafetensorsView : public FileView {
 public:
  explicit SafetensorsView(const ShownCheckpoint& shown)
      : FileView("model.safetensors", shown.opened.index().info().json_mtime), shown_(shown) {}

 private:
  struct Layout {
    std::shared_ptr<const std::vector<Segment>> segments;
    // Held only where keys are mapped; otherwise it is read from the index.
    std::shared_ptr<const std::string> header;
  };

  Result<std::uint64_t> Size() const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Layout layout, LaidOut());
    return layout.segments->back().begin + layout.segments->back().length;
  }

  Result<FileContent> Content() const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(Layout layout, LaidOut());
    if (!layout.header) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::string header, shown_.opened.index().SafetensorsHeader());
      if (header.size() != layout.segments->front().length) {
        return Status(Code::kDataLoss, "model.safetensors: the header has another length");
      }
      layout.header = std::make_shared<const std::string>(std::move(header));
    }
    return FileContent::Shared(std::move(layout.segments), std::move(layout.header));
  }

  Result<Layout> LaidOut() const {
    const std::lock_guard lock(mutex_);
    if (layout_.segments) return layout_;
    std::vector<Segment> segments;
    std::shared_ptr<const std::string> header;
    TENSORMOUNT_RETURN_IF_ERROR(shown_.tensors.has_own_keys() ? LayOutOwn(segments)
                                                              : LayOutRenamed(segments, header));
    std::sort(segments.begin(), segments.end(),
              [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < segments.size(); ++i) {
      if (segments[i].begin != segments[i - 1].begin + segments[i - 1].length) {
        return Status(Code::kDataLoss,
                      "index: tensors of model.safetensors overlap or leave a gap");
      }
    }
    layout_ = {std::make_shared<const std::vector<Segment>>(std::move(segments)),
               std::move(header)};
    return layout_;
  }

  static Status None() { return Status(Code::kNotFound, "no model.safetensors here"); }

  Status LayOutOwn(std::vector<Segment>& segments) const {
    const CheckpointIndex& index = shown_.opened.index();
    // The format has a limit: a model past it has no file of this kind.
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

  // The names in the header are others than those that the index has it with.
  Status LayOutRenamed(std::vector<Segment>& segments,
                       std::shared_ptr<const std::string>& header) const {
    std::vector<TensorEntry> entries;
    entries.reserve(shown_.tensors.count());
    std::vector<const TensorMeta*> metas;
    for (std::uint32_t i = 0; i < shown_.tensors.count(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, shown_.tensors.EntryAt(i));
      entries.push_back(std::move(entry));
      metas.push_back(&entries.back().meta);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsLayout layout, LayOutSafetensors(metas));
    if (layout.header.empty()) return None();
    segments.push_back({.kind = Segment::Kind::kLiteral, .length = layout.header.size()});
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (!layout.held[i] || metas[i]->bytes() == 0) continue;
      segments.push_back({.kind = Segment::Kind::kTensor,
                          .ordinal = entries[i].ordinal,
                          .begin = layout.offsets[i],
                          .length = metas[i]->bytes()});
    }
    header = std::make_shared<const std::string>(std::move(layout.header));
    return {};
  }

  const ShownCheckpoint& shown_;
  mutable std::mutex mutex_;
  mutable Layout layout_;
};

}  // namespace

std::unique_ptr<const View> MakeSafetensorsView(const ShownCheckpoint& shown) {
  return std::make_unique<SafetensorsView>(shown);
}

}  // namespace tensormount::fs
