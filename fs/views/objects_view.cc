// SPDX-License-Identifier: Apache-2.0
// objects/KEY, and objects/KEY/0.3 if the object has a grid; declared in checkpoint_views.h.
#include "fs/views/checkpoint_text.h"
#include "fs/views/checkpoint_views.h"
#include "fs/views/keyed_view.h"

namespace tensormount::fs {
namespace {

// A file has the bytes of one object part as they were saved (a pickle, a config.json); nothing is
// parsed. Sizes and times are in the index, so listings read nothing else.
class ObjectsView : public KeyedView {
 public:
  explicit ObjectsView(const ShownCheckpoint& shown)
      : KeyedView("objects", "", shown.objects.tree(), nullptr,
                  shown.opened.index().info().json_mtime),
        opened_(shown.opened),
        objects_(shown.objects) {}
  bool listed_by_default() const override { return true; }

 private:
  // KeyedView has checked the number against the tree, which has a path for each part.
  const ObjectRecord& PartAt(const KeyNumber& key) const { return objects_.parts()[key.number]; }
  Status StatFile(const KeyNumber& key, const TensorEntry*, ViewNode& file) const override {
    file.size = PartAt(key).length;
    file.mtime = PartAt(key).mtime;
    return {};
  }
  Result<std::int64_t> MtimeOf(const KeyNumber& key) const override { return PartAt(key).mtime; }
  Result<FileSegments> SegmentsAt(const KeyNumber& key) const override {
    FileSegments segments;
    segments.AddObject(key.number, PartAt(key).length);
    return segments;
  }
  Result<std::map<std::string, std::string>> AttributesAt(const KeyNumber& key) const override {
    const ObjectRecord& part = PartAt(key);
    std::map<std::string, std::string> all;
    all["key"] = part.key;
    std::string stored = opened_.StoredObjectKey(part.key);
    if (stored != part.key) all["stored_key"] = std::move(stored);
    // The hash of the stored bytes, with which a copy can be checked without reading the mount
    // again. Parts of foreign checkpoints and of `adopt --quick` have none.
    if (part.has_hash()) all["hash"] = "xxh3-128:" + part.hash.ToHex();
    if (part.grid.rank() > 0) {
      all["index"] = DimsText(part.index);
      all["grid"] = DimsText(part.grid);
    }
    return all;
  }

  const OpenedCheckpoint& opened_;
  const ShownObjects& objects_;
};

}  // namespace

std::unique_ptr<const View> MakeObjectsView(const ShownCheckpoint& shown) {
  return std::make_unique<ObjectsView>(shown);
}

}  // namespace tensormount::fs
