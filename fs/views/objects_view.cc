// SPDX-License-Identifier: Apache-2.0
// Declared in checkpoint_views.h: objects/KEY, and objects/KEY/0.3 where the object has a grid.
#include "fs/views/checkpoint_text.h"
#include "fs/views/checkpoint_views.h"
#include "fs/views/keyed_view.h"

namespace tensormount::fs {
namespace {

class ObjectsView : public KeyedView {
 public:
  explicit ObjectsView(const ShownCheckpoint& shown)
      : KeyedView("objects", "", Keys{shown.objects.keys(), shown.objects.tree()}, std::nullopt,
                  shown.opened.index().info().json_mtime),
        objects_(shown.objects) {}
  bool listed_by_default() const override { return true; }

 private:
  const ObjectRecord& PartAt(const KeyNumber& key) const { return objects_.parts()[key.number]; }
  Result<FileFacts> FactsOf(const KeyNumber& key, const TensorEntry*) const override {
    return FileFacts{.size = PartAt(key).length, .mtime = PartAt(key).mtime};
  }
  Result<std::int64_t> MtimeOf(const KeyNumber& key) const override { return PartAt(key).mtime; }
  Result<FileSegments> SegmentsAt(const KeyNumber& key) const override {
    FileSegments content;
    content.AddObject(key.number, PartAt(key).length);
    return content;
  }
  Result<std::map<std::string, std::string>> AttributesAt(const KeyNumber& key) const override {
    const ObjectRecord& part = PartAt(key);
    std::map<std::string, std::string> all;
    all["key"] = part.key;
    const std::string_view stored = objects_.stored_key(key.number);
    if (!stored.empty() && stored != part.key) all["stored_key"] = stored;
    all["hash"] = "xxh3-128:" + part.hash.ToHex();
    if (part.grid.rank() > 0) {
      all["index"] = DimsText(part.index);
      all["grid"] = DimsText(part.grid);
    }
    return all;
  }

  const ShownObjects& objects_;
};

}  // namespace

std::unique_ptr<const View> MakeObjectsView(const ShownCheckpoint& shown) {
  return std::make_unique<ObjectsView>(shown);
}

}  // namespace tensormount::fs
