// SPDX-License-Identifier: Apache-2.0
// What views have in common that show a file for each key: lookup, listing, names and attributes.
#include "fs/views/keyed_view.h"

#include <algorithm>
#include <cerrno>

#include "fs/answers.h"
#include "fs/views/checkpoint_text.h"

namespace tensormount::fs {
namespace {

constexpr int kKeyedDepthBits = 12;
constexpr std::uint64_t kHiddenBit = std::uint64_t{1} << 39;

}  // namespace

std::uint64_t KeyedView::ItemOf(const KeyedItem& place) {
  return (place.key.hidden ? kHiddenBit : 0) |
         (std::uint64_t{place.key.number} << kKeyedDepthBits) | place.depth;
}

Result<KeyedView::KeyedItem> KeyedView::KeyedItemOf(std::uint64_t item) const {
  KeyedItem place;
  place.key.hidden = (item & kHiddenBit) != 0;
  place.key.number = static_cast<std::uint32_t>((item & ~kHiddenBit) >> kKeyedDepthBits);
  place.depth = static_cast<std::uint32_t>(item & kMaxDepth);
  if (item == kRoot) return place;
  // The folder itself has but the one number.
  if (item >= kMaxItems || place.depth == 1 || (place.key.hidden && !hidden_) ||
      place.key.number >= KeysOf(place).keys.count()) {
    return StaleNode("the checkpoint");
  }
  return place;
}

Result<ViewNode> KeyedView::FileNode(const KeyedItem& place, std::string_view key,
                                     const TensorEntry* entry) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileFacts facts, FactsOf(place.key, entry));
  return ViewNode{.item = ItemOf(place),
                  .folder = false,
                  .size = facts.size,
                  .mtime = facts.mtime,
                  .identity = std::string(key)};
}

Result<ViewNode> KeyedView::StatAt(const KeyedItem& place) const {
  const Keys& keys = KeysOf(place);
  if (place.depth == 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys.keys.KeyAt(place.key.number));
    return FileNode(place, key, nullptr);
  }
  ViewNode node{.item = ItemOf(place), .folder = true, .size = 0, .mtime = empty_mtime_};
  if (place.depth > 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(node.identity,
                                 keys.tree.PathOf(place.key.number, place.depth - 1));
  }
  if (keys.keys.count() > 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(node.mtime, MtimeOf(place.key));
  }
  return node;
}

Result<ViewNode> KeyedView::Stat(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem place, KeyedItemOf(item));
  return StatAt(place);
}

Result<ViewChild> KeyedView::ChildOf(const KeyedItem& folder, const TreeChild& found,
                                     std::string_view name, std::string_view stem) const {
  // Folders have no suffix, files always: never both, since such folder names are escaped.
  if (!suffix_.empty() && found.is_folder != (stem.size() == name.size())) return NoSuch(name);
  if (found.depth + 1 >= kMaxDepth) return NoSuch(name);
  const KeyedItem place{.key = {.hidden = folder.key.hidden, .number = found.ordinal},
                        .depth = found.is_folder ? found.depth + 1 : 0};
  TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, StatAt(place));
  return ViewChild{std::string(name), std::move(node)};
}

Result<ViewChild> KeyedView::Lookup(std::uint64_t item, std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem folder, KeyedItemOf(item));
  if (folder.depth == 0) return Status::FromErrno(ENOTDIR, "look up", name);
  std::string_view stem = name;
  if (!suffix_.empty() && name.size() > suffix_.size() && name.ends_with(suffix_)) {
    stem.remove_suffix(suffix_.size());
  }
  const Result<TreeChild> found = KeysOf(folder).tree.Lookup(folder.folder(), stem);
  if (found.status().code() == Code::kNotFound && hidden_ && hidden_->keys.count() > 0 &&
      !folder.key.hidden) {
    return LookupHidden(folder, name, stem);
  }
  TENSORMOUNT_RETURN_IF_ERROR(found.status());
  return ChildOf(folder, found.value(), name, stem);
}

Result<ViewChild> KeyedView::LookupHidden(const KeyedItem& folder, std::string_view name,
                                          std::string_view stem) const {
  // The same folder in the tree of the hidden names.
  KeyedItem in{.key = {.hidden = true}, .depth = 1};
  if (folder.depth > 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path,
                                 keys_.tree.PathOf(folder.key.number, folder.depth - 1));
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find('/', begin), path.size());
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const TreeChild step,
          hidden_->tree.Lookup(in.folder(), std::string_view(path).substr(begin, end - begin)));
      if (!step.is_folder || step.depth + 1 >= kMaxDepth) return NoSuch(name);
      in.key.number = step.ordinal;
      in.depth = step.depth + 1;
      begin = end + 1;
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeChild child, hidden_->tree.Lookup(in.folder(), stem));
  return ChildOf(in, child, name, stem);
}

Status KeyedView::List(std::uint64_t item, std::uint64_t cookie, const Visit& fn) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem folder, KeyedItemOf(item));
  if (folder.depth == 0) return Status::FromErrno(ENOTDIR, "list", PathOf(item));
  if (folder.key.hidden) return {};
  Status failed;
  const Status listed =
      keys_.tree.List(folder.folder(), cookie, [&](TreeChild& child, std::uint64_t next) {
        if (child.is_folder && child.depth + 1 >= kMaxDepth) return true;
        const KeyedItem place{.key = {.hidden = false, .number = child.ordinal},
                              .depth = child.is_folder ? child.depth + 1 : 0};
        Result<ViewNode> node = child.entry && !child.is_folder
                                    ? FileNode(place, child.entry->meta.key(), &*child.entry)
                                    : StatAt(place);
        // The view has no file of this key.
        if (node.status().code() == Code::kNotFound) return true;
        if (!node.ok()) {
          failed = node.status();
          return false;
        }
        ViewChild out{std::move(child.name), std::move(node).value()};
        if (!child.is_folder) out.name += suffix_;
        return fn(out, next);
      });
  TENSORMOUNT_RETURN_IF_ERROR(listed);
  return failed;
}

Result<FileSegments> KeyedView::Open(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem place, KeyedItemOf(item));
  if (place.depth > 0) return Status::FromErrno(EISDIR, "open", PathOf(item));
  return SegmentsAt(place.key);
}

std::string KeyedView::PathOf(std::uint64_t item) const {
  std::string path(name_);
  if (item == kRoot) return path;
  path += '/';
  const Result<KeyedItem> place = KeyedItemOf(item);
  if (!place.ok()) return path + "?";
  const std::uint32_t depth = place.value().depth;
  const Result<std::string> rest =
      KeysOf(place.value()).tree.PathOf(place.value().key.number, depth > 0 ? depth - 1 : 0);
  path += rest.ok() ? rest.value() : std::string("?");
  if (depth == 0) path += suffix_;
  return path;
}

Result<std::map<std::string, std::string>> KeyedView::Attributes(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem place, KeyedItemOf(item));
  if (place.depth > 0) return std::map<std::string, std::string>();
  return AttributesAt(place.key);
}

TensorFilesView::TensorFilesView(const ShownCheckpoint& shown, std::string_view name,
                                 std::string_view suffix, Layers layers)
    : KeyedView(name, suffix, Keys{shown.tensors, shown.tensor_tree},
                layers == Layers::kHidden
                    ? std::optional<Keys>(Keys{shown.layers.keys(), shown.layers.tree()})
                    : std::nullopt,
                shown.opened.index().info().json_mtime),
      shown_(shown) {}

Result<ShownTensor> TensorFilesView::TensorAt(const KeyNumber& key) const {
  ShownTensor tensor;
  if (key.hidden) {
    TENSORMOUNT_ASSIGN_OR_RETURN(LayerFiles::Layer layer,
                                 shown_.layers.At(shown_.opened.index(), key.number));
    tensor.shown = std::move(layer.entry);
    tensor.source = std::move(layer.stack);
    tensor.skip = layer.skip;
    tensor.layer = layer.number;
    tensor.stacked_key = std::move(layer.stacked_key);
    return tensor;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(tensor.shown, shown_.tensors.EntryAt(key.number));
  tensor.source = tensor.shown;
  return tensor;
}

Result<KeyedView::FileFacts> TensorFilesView::FactsOf(const KeyNumber& key,
                                                      const TensorEntry* entry) const {
  if (entry != nullptr) {
    const std::optional<std::uint64_t> known = KnownSize(entry->meta);
    if (known) return FileFacts{.size = *known, .mtime = MtimeOfFile(*entry)};
  }
  ShownTensor tensor;
  if (entry != nullptr) {
    tensor.shown = *entry;
    tensor.source = *entry;
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(tensor, TensorAt(key));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileSegments segments, SegmentsOf(tensor));
  return FileFacts{.size = segments.size(), .mtime = MtimeOfFile(tensor.shown)};
}

Result<std::int64_t> TensorFilesView::MtimeOf(const KeyNumber& key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, TensorAt(key));
  return tensor.shown.mtime;
}

Result<FileSegments> TensorFilesView::SegmentsAt(const KeyNumber& key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, TensorAt(key));
  return SegmentsOf(tensor);
}

Result<std::map<std::string, std::string>> TensorFilesView::AttributesAt(
    const KeyNumber& key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, TensorAt(key));
  const TensorEntry& entry = tensor.shown;
  std::map<std::string, std::string> all;
  all["key"] = entry.meta.key();
  all["dtype"] = InfoOf(entry.meta.dtype()).name;
  all["shape"] = DimsText(entry.meta.shape());
  if (entry.has_digest) all["digest"] = DigestText(entry.digest);
  if (key.hidden) {
    all["stacked_key"] = tensor.stacked_key;
    all["layer"] = std::to_string(tensor.layer);
    return all;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored, shown_.tensors.StoredKeyAt(key.number));
  if (stored != entry.meta.key()) all["stored_key"] = std::move(stored);
  return all;
}

}  // namespace tensormount::fs
