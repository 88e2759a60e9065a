// SPDX-License-Identifier: Apache-2.0
// slices/: any box of any tensor as a file that exists when it is looked up. Nothing is listed,
// because there is no end of it. Nodes of boxes are remembered while the kernel knows them.
#include "fs/views/slices_view.h"

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "fs/answers.h"
#include "fs/views/tensor_box.h"
#include "index/read/checkpoint.h"
#include "shard/npy.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

// SliceText; for .npy with integers where axes are dropped, so that the header can be made from it.
std::string CanonicalText(const Slice& slice, bool npy) {
  if (!npy) return SliceText(slice.box);
  std::string text = "[";
  int kept = 0;
  for (int a = 0; a < slice.box.rank(); ++a) {
    if (a > 0) text += ',';
    text += std::to_string(slice.box.begin(a));
    // Which of several axes of one element were dropped makes no difference to the file.
    if (kept < slice.kept.rank() && slice.kept[kept] == slice.box.extent(a)) {
      text += ':' + std::to_string(slice.box.end(a));
      ++kept;
    }
  }
  return text + ']';
}

// A box of one layer as a box of the stack.
Result<Box> InStack(const Box& box, std::int64_t layer) {
  Dims begin{layer};
  Dims extent{1};
  for (int a = 0; a < box.rank(); ++a) {
    begin.push_back(box.begin(a));
    extent.push_back(box.extent(a));
  }
  return Box::Make(begin, extent);
}

}  // namespace

ViewNode SlicesView::NodeOf(std::uint64_t number, const Item& item) {
  return {.item = number,
          .folder = item.folder != nullptr,
          .size = item.size,
          .mtime = item.mtime,
          .identity = item.path};
}

Result<std::shared_ptr<const SlicesView::Item>> SlicesView::Find(std::uint64_t number) const {
  if (number == kRoot) {
    auto root = std::make_shared<Item>();
    root->mtime = shown_.opened.index().info().json_mtime;
    if (shown_.tensors.count() > 0) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry first, shown_.tensors.EntryAt(0));
      root->mtime = first.mtime;
    }
    root->folder = std::make_unique<const Folder>(
        Folder{.tensors = TreeFolder{}, .layers = TreeFolder{}, .key = std::nullopt});
    return std::shared_ptr<const Item>(std::move(root));
  }
  const std::lock_guard lock(mutex_);
  const auto found = items_.find(number);
  if (found == items_.end()) return Status(Code::kStale, "the slice was forgotten");
  return found->second.item;
}

ViewChild SlicesView::Remember(std::string_view name, Item item) const {
  // Never used again in this process: a checkpoint may be closed and opened again, and its view
  // made anew, while the kernel knows items of the one before.
  static std::atomic<std::uint64_t> next_item{kRoot + 1};
  const auto made = std::make_shared<const Item>(std::move(item));
  const std::lock_guard lock(mutex_);
  const auto [at, added] = numbers_.try_emplace(made->path, 0);
  if (added) at->second = next_item.fetch_add(1);
  Remembered& remembered = items_[at->second];
  if (added) remembered.item = made;
  ++remembered.references;
  return {std::string(name), NodeOf(at->second, *made)};
}

void SlicesView::Forget(std::uint64_t item, std::uint64_t references) const {
  std::shared_ptr<const Item> dropped;  // Destroyed outside of the lock.
  const std::lock_guard lock(mutex_);
  const auto found = items_.find(item);
  if (found == items_.end()) return;
  found->second.references -= std::min(references, found->second.references);
  if (found->second.references > 0) return;
  dropped = std::move(found->second.item);
  numbers_.erase(dropped->path);
  items_.erase(found);
}

std::size_t SlicesView::remembered() const {
  const std::lock_guard lock(mutex_);
  return items_.size();
}

Result<SlicesView::Source> SlicesView::SourceOf(const Key& key) const {
  Source source;
  if (!key.layer) {
    TENSORMOUNT_ASSIGN_OR_RETURN(source.shown, shown_.tensors.EntryAt(key.number));
    source.stored = source.shown;
    return source;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(LayerFiles::Layer layer,
                               shown_.layers.At(shown_.opened.index(), key.number));
  return Source{.shown = std::move(layer.entry),
                .stored = std::move(layer.stack),
                .layer = layer.number,
                .stacked_key = std::move(layer.stacked_key)};
}

Result<std::string> SlicesView::PathOfKey(const Key& key) const {
  return (key.layer ? shown_.layers.tree() : shown_.tensor_tree).PathOf(key.number, 0);
}

Result<SlicesView::Key> SlicesView::FindKey(const Folder& folder, std::string_view name) const {
  for (const bool layer : {false, true}) {
    const std::optional<TreeFolder>& in = layer ? folder.layers : folder.tensors;
    if (!in) continue;
    const KeyTree& tree = layer ? shown_.layers.tree() : shown_.tensor_tree;
    Result<TreeChild> child = tree.Lookup(*in, name);
    // A slice is never of a folder, so the mark that tells both apart may be left out.
    if (child.ok() && child.value().is_folder) {
      child = tree.Lookup(*in, std::string(name) + "%=");
    }
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    if (!child.value().is_folder) return Key{layer, child.value().ordinal};
  }
  return NoSuch(name);
}

Result<SlicesView::Item> SlicesView::FolderItem(const Item& in, std::string_view name) const {
  Folder folder;
  Item item;
  for (const bool layer : {true, false}) {
    const std::optional<TreeFolder>& at = layer ? in.folder->layers : in.folder->tensors;
    if (!at) continue;
    const KeyTree& tree = layer ? shown_.layers.tree() : shown_.tensor_tree;
    const Result<TreeChild> child = tree.Lookup(*at, name);
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    if (!child.value().is_folder) continue;
    (layer ? folder.layers : folder.tensors) =
        TreeFolder{.first = child.value().ordinal, .depth = child.value().depth};
    TENSORMOUNT_ASSIGN_OR_RETURN(const Source first, SourceOf({layer, child.value().ordinal}));
    item.mtime = first.shown.mtime;
  }
  if (name.starts_with("%+")) {
    Result<Key> key = FindKey(*in.folder, name.substr(2));
    if (key.ok()) {
      folder.key = key.value();
      TENSORMOUNT_ASSIGN_OR_RETURN(const Source source, SourceOf(key.value()));
      item.mtime = source.shown.mtime;
    } else if (key.status().code() != Code::kNotFound) {
      return key.status();
    }
  }
  if (!folder.tensors && !folder.layers && !folder.key) return NoSuch(name);
  item.path = in.path.empty() ? std::string(name) : in.path + '/' + std::string(name);
  item.folder = std::make_unique<const Folder>(folder);
  return item;
}

Result<SlicesView::Item> SlicesView::FileItem(const Key& key, const SliceName& name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Source source, SourceOf(key));
  const TensorMeta& meta = source.shown.meta;
  Result<Slice> slice = ParseSlice(name.slice, meta.shape());
  if (!slice.ok()) {
    return Status(Code::kNotFound, "tensor " + meta.key() + ": " + slice.status().message());
  }
  Item item;
  item.key = key;
  item.npy = name.npy;
  item.mtime = source.shown.mtime;
  const Result<std::uint64_t> bytes =
      RegionBytes(meta.dtype(), meta.shape(), Region(slice.value().box));
  if (!bytes.ok()) return bytes.status().WithContext("tensor " + meta.key());
  item.size = bytes.value();
  if (name.npy) {
    const Result<std::string> header = MakeNpyHeader(meta.dtype(), slice.value().kept);
    if (!header.ok()) return Status(Code::kNotFound, "no .npy of this type");
    item.size += header.value().size();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(item.path, PathOfKey(key));
  const std::string text = CanonicalText(slice.value(), name.npy);
  item.slice_begin = static_cast<std::uint32_t>(item.path.size() + 1);
  item.slice_size = static_cast<std::uint32_t>(text.size() - 2);
  item.path += text;
  if (name.npy) item.path += ".npy";
  return item;
}

Result<ViewNode> SlicesView::Stat(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const Item> found, Find(item));
  return NodeOf(item, *found);
}

Result<ViewChild> SlicesView::Lookup(std::uint64_t folder, std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const Item> in, Find(folder));
  if (in->folder == nullptr) return Status::FromErrno(ENOTDIR, "look up", name);
  const std::optional<SliceName> slice = ParseSliceName(name);
  if (!slice) {
    TENSORMOUNT_ASSIGN_OR_RETURN(Item item, FolderItem(*in, name));
    return Remember(name, std::move(item));
  }
  Key key;
  if (!slice->stem.empty()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(key, FindKey(*in->folder, slice->stem));
  } else if (in->folder->key) {
    key = *in->folder->key;
  } else {
    return NoSuch(name);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(Item item, FileItem(key, *slice));
  return Remember(name, std::move(item));
}

Status SlicesView::List(std::uint64_t folder, std::uint64_t /*cookie*/, const Visit& /*fn*/) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const Item> found, Find(folder));
  if (found->folder == nullptr) return Status::FromErrno(ENOTDIR, "list", PathOf(folder));
  return {};
}

Result<FileSegments> SlicesView::Open(std::uint64_t file) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const Item> item, Find(file));
  if (item->folder != nullptr) return Status::FromErrno(EISDIR, "open", PathOf(file));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Source source, SourceOf(item->key));
  const TensorMeta& meta = source.shown.meta;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Slice slice,
      ParseSlice(std::string_view(item->path).substr(item->slice_begin, item->slice_size),
                 meta.shape()));
  FileSegments segments;
  if (item->npy) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string header, MakeNpyHeader(meta.dtype(), slice.kept));
    segments.AddLiteral(std::move(header));
  }
  Box box = slice.box;
  if (source.layer) {
    TENSORMOUNT_ASSIGN_OR_RETURN(box, InStack(slice.box, *source.layer));
  }
  TENSORMOUNT_RETURN_IF_ERROR(AddTensorBox(segments, source.stored, box, box.extent()));
  return segments;
}

std::string SlicesView::PathOf(std::uint64_t item) const {
  const auto found = Find(item);
  std::string path(name());
  if (item == kRoot) return path;
  return path + '/' + (found.ok() ? found.value()->path : std::string("?"));
}

Result<std::map<std::string, std::string>> SlicesView::Attributes(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const Item> found, Find(item));
  std::map<std::string, std::string> all;
  if (found->folder != nullptr) return all;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Source source, SourceOf(found->key));
  const TensorMeta& meta = source.shown.meta;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Slice slice,
      ParseSlice(std::string_view(found->path).substr(found->slice_begin, found->slice_size),
                 meta.shape()));
  all.emplace("key", meta.key());
  all.emplace("dtype", std::string(InfoOf(meta.dtype()).name));
  all.emplace("shape", slice.box.extent().ToString());
  all.emplace("box", slice.box.ToString());
  if (source.layer) {
    all.emplace("stacked_key", source.stacked_key);
    all.emplace("layer", std::to_string(*source.layer));
  }
  return all;
}

}  // namespace tensormount::fs
