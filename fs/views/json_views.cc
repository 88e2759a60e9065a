// SPDX-License-Identifier: Apache-2.0
// checkpoint.json and common.json, declared in checkpoint_views.h.
#include <mutex>

#include "fs/views/checkpoint_text.h"
#include "fs/views/checkpoint_views.h"
#include "fs/views/file_view.h"

namespace tensormount::fs {
namespace {

// checkpoint.json. The text is made at the first access: it lists the existing views, and hf/ and
// model.safetensors depend on the checkpoint, so all views must exist first.
class CheckpointJsonView : public FileView {
 public:
  CheckpointJsonView(const ShownCheckpoint& shown, const ViewList& views)
      : FileView("checkpoint.json", shown.opened.index().info().json_mtime),
        shown_(shown),
        views_(views) {}
  bool listed_by_default() const override { return true; }

 private:
  Result<FileSegments> Segments() const override {
    const std::lock_guard lock(mutex_);
    if (!text_) {
      std::vector<std::string> names;
      // This view's own Stat is not called, because it would take mutex_ again; this view always
      // exists.
      for (const auto& view : views_) {
        const Status there = view.get() == this ? Status() : view->Stat(View::kRoot).status();
        if (there.code() == Code::kNotFound) continue;
        TENSORMOUNT_RETURN_IF_ERROR(there);
        names.emplace_back(view->name());
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(text_, CheckpointJson(shown_, names));
    }
    FileSegments segments;
    segments.AddText(text_);
    return segments;
  }

  const ShownCheckpoint& shown_;
  const ViewList& views_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const GeneratedText> text_;
};

// common.json. The text is made with the view, because it is small and damage must show when the
// checkpoint is opened.
class CommonJsonView : public FileView {
 public:
  CommonJsonView(std::string text, std::int64_t mtime)
      : FileView("common.json", mtime),
        text_(std::make_shared<const std::string>(std::move(text))) {}
  bool listed_by_default() const override { return true; }

 private:
  Result<FileSegments> Segments() const override {
    FileSegments segments;
    segments.AddLiteral(text_);
    return segments;
  }

  const std::shared_ptr<const std::string> text_;
};

}  // namespace

std::unique_ptr<const View> MakeCheckpointJsonView(const ShownCheckpoint& shown,
                                                   const ViewList& views) {
  return std::make_unique<CheckpointJsonView>(shown, views);
}

Result<std::unique_ptr<const View>> MakeCommonJsonView(const ShownCheckpoint& shown) {
  const CheckpointIndex& index = shown.opened.index();
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string text, CommonJson(index));
  return std::unique_ptr<const View>(
      std::make_unique<CommonJsonView>(std::move(text), index.info().common_mtime));
}

}  // namespace tensormount::fs
