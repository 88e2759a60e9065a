// SPDX-License-Identifier: Apache-2.0
// slices/: any box of any tensor as a file, created at lookup. Nothing is listed, because a
// tensor has too many boxes. Nodes of boxes are kept while the kernel knows them.
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

// The slice in canonical form. Plain files of w[0,:] and w[0:1,:] are the same, so their text is
// SliceText. Their .npy headers have different shapes, so for .npy a dropped axis is an integer.
std::string CanonicalText(const Slice& slice, bool npy) {
  if (!npy) return SliceText(slice.box);
  std::string text = "[";
  int kept = 0;
  for (int a = 0; a < slice.box.rank(); ++a) {
    if (a > 0) text += ',';
    text += std::to_string(slice.box.begin(a));
    // If several axes have one element, it makes no difference to the file which of them is
    // dropped.
    if (kept < slice.kept.rank() && slice.kept[kept] == slice.box.extent(a)) {
      text += ':' + std::to_string(slice.box.end(a));
      ++kept;
    }
  }
  return text + ']';
}

// Converts a box of one layer to a box of the stack.
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

ViewNode SlicesView::NodeOf(std::uint64_t number, const SliceItem& item) {
  return {.item = number,
          .folder = item.folder,
          .size = item.size,
          .mtime = item.mtime,
          .identity = item.path};
}

Result<std::shared_ptr<const SliceItem>> SlicesView::Find(std::uint64_t number) const {
  // The root is not among the items: the kernel never looks it up in this view, and cannot forget
  // it.
  if (number == kRoot) {
    auto root = std::make_shared<SliceItem>();
    root->mtime = shown_.opened.index().info().json_mtime;
    if (shown_.tensors.count() > 0) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry first, shown_.tensors.EntryAt(0));
      root->mtime = first.mtime;
    }
    root->folder = true;
    root->tensors = TreeFolder{};
    root->layers = TreeFolder{};
    return std::shared_ptr<const SliceItem>(std::move(root));
  }
  return items_->Find(number);
}

ViewChild SlicesView::Remember(std::string_view name, SliceItem item) const {
  const auto made = std::make_shared<const SliceItem>(std::move(item));
  return {std::string(name), NodeOf(items_->Remember(made), *made)};
}

Result<std::shared_ptr<const SliceItem>> SliceItems::Find(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = items_.find(number);
  if (found == items_.end())
    return Status(Code::kStale, "the slice is no longer cached; look it up again");
  return found->second.item;
}

std::uint64_t SliceItems::Remember(const std::shared_ptr<const SliceItem>& item) {
  // Item numbers are never reused in this process, because the kernel may still know items of an
  // earlier checkpoint. 2^40 numbers last 12 days at a million lookups a second.
  static std::atomic<std::uint64_t> next_item{View::kRoot + 1};
  const std::lock_guard lock(mutex_);
  // The key in numbers_ refers to the path in the stored item; Forget removes both together.
  const auto [at, added] = numbers_.try_emplace(item->path, 0);
  if (added) at->second = next_item.fetch_add(1);
  Remembered& remembered = items_[at->second];
  if (added) remembered.item = item;
  ++remembered.references;
  return at->second;
}

void SliceItems::Forget(std::uint64_t number, std::uint64_t references) {
  // Declared before the lock, so that the item is destroyed after the lock is released.
  std::shared_ptr<const SliceItem> dropped;
  const std::lock_guard lock(mutex_);
  const auto found = items_.find(number);
  if (found == items_.end()) return;
  // More references than counted would be a bug, but no reason to end the mount.
  found->second.references -= std::min(references, found->second.references);
  if (found->second.references > 0) return;
  dropped = std::move(found->second.item);
  numbers_.erase(dropped->path);
  items_.erase(found);
}

std::size_t SliceItems::size() const {
  const std::lock_guard lock(mutex_);
  return items_.size();
}

Result<KeyNumber> SlicesView::FindKey(const SliceItem& folder, std::string_view name) const {
  for (const bool layer : {false, true}) {
    const std::optional<TreeFolder>& in = layer ? folder.layers : folder.tensors;
    if (!in) continue;
    const KeyTree& tree = shown_.TreeOf({.hidden = layer});
    Result<TreeChild> child = tree.Lookup(*in, name);
    // Slices are never directories, so the suffix "%=" that distinguishes a file from a directory
    // may be omitted: with keys a and a/b, "a[0]" can only mean the tensor.
    if (child.ok() && child.value().is_folder) {
      child = tree.Lookup(*in, std::string(name) + "%=");
    }
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    if (!child.value().is_folder) return KeyNumber{layer, child.value().ordinal};
  }
  return NoSuchNameError(name);
}

Result<SliceItem> SlicesView::FolderItem(const SliceItem& in, std::string_view name) const {
  SliceItem item;
  // Both trees may have the directory. The tree of tensors comes last, so that its time counts.
  for (const bool layer : {true, false}) {
    const std::optional<TreeFolder>& at = layer ? in.layers : in.tensors;
    if (!at) continue;
    const KeyTree& tree = shown_.TreeOf({.hidden = layer});
    const Result<TreeChild> child = tree.Lookup(*at, name);
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    if (!child.value().is_folder) continue;
    (layer ? item.layers : item.tensors) =
        TreeFolder{.first = child.value().ordinal, .depth = child.value().depth};
    TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor first,
                                 shown_.TensorAt({layer, child.value().ordinal}));
    item.mtime = first.shown.mtime;
  }
  // A directory "%+NAME" may have two meanings at once: it contains overlong keys, and slices of
  // the key NAME.
  if (name.starts_with("%+")) {
    Result<KeyNumber> key = FindKey(in, name.substr(2));
    if (key.ok()) {
      item.key = key.value();
      TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, shown_.TensorAt(key.value()));
      item.mtime = tensor.shown.mtime;
    } else if (key.status().code() != Code::kNotFound) {
      return key.status();
    }
  }
  if (!item.tensors && !item.layers && !item.key) return NoSuchNameError(name);
  item.path = in.path.empty() ? std::string(name) : in.path + '/' + std::string(name);
  item.folder = true;
  return item;
}

Result<SliceItem> SlicesView::FileItem(const KeyNumber& key, const SliceName& name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, shown_.TensorAt(key));
  const TensorMeta& meta = tensor.shown.meta;
  Result<Slice> slice = ParseSlice(name.slice, meta.shape());
  if (!slice.ok()) {
    return Status(Code::kNotFound, "tensor " + meta.key() + ": " + slice.status().message());
  }
  SliceItem item;
  item.key = key;
  item.npy = name.npy;
  item.mtime = tensor.shown.mtime;
  // kInvalidArgument if the box does not begin and end on whole bytes. Not kNotFound, because the
  // tensor exists and the user can correct the slice.
  const Result<std::uint64_t> bytes =
      RegionBytes(meta.dtype(), meta.shape(), Region(slice.value().box));
  if (!bytes.ok()) return bytes.status().WithContext("tensor " + meta.key());
  item.size = bytes.value();
  if (name.npy) {
    const Result<std::string> header = MakeNpyHeader(meta.dtype(), slice.value().kept);
    if (!header.ok()) return Status(Code::kNotFound, ".npy does not support this dtype");
    item.size += header.value().size();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(item.path, shown_.TreeOf(key).PathOf(key.number, 0));
  const std::string text = CanonicalText(slice.value(), name.npy);
  // The slice begins after the bracket. `text` has both brackets.
  item.slice_begin = static_cast<std::uint32_t>(item.path.size() + 1);
  item.slice_size = static_cast<std::uint32_t>(text.size() - 2);
  item.path += text;
  if (name.npy) item.path += ".npy";
  return item;
}

Result<ViewNode> SlicesView::Stat(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const SliceItem> found, Find(item));
  return NodeOf(item, *found);
}

Result<ViewChild> SlicesView::Lookup(std::uint64_t folder, std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const SliceItem> in, Find(folder));
  if (!in->folder) return Status::FromErrno(ENOTDIR, "look up", name);
  const std::optional<SliceName> slice = ParseSliceName(name);
  if (!slice) {
    TENSORMOUNT_ASSIGN_OR_RETURN(SliceItem item, FolderItem(*in, name));
    return Remember(name, std::move(item));
  }
  KeyNumber key;
  if (!slice->stem.empty()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(key, FindKey(*in, slice->stem));
  } else if (in->key) {
    key = *in->key;
  } else {
    return NoSuchNameError(name);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(SliceItem item, FileItem(key, *slice));
  return Remember(name, std::move(item));
}

Status SlicesView::List(std::uint64_t folder, std::uint64_t /*cookie*/, const Visit& /*fn*/) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const SliceItem> found, Find(folder));
  if (!found->folder) return Status::FromErrno(ENOTDIR, "list", PathOf(folder));
  return {};
}

Result<FileSegments> SlicesView::Open(std::uint64_t file) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const SliceItem> item, Find(file));
  if (item->folder) return Status::FromErrno(EISDIR, "open", PathOf(file));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, shown_.TensorAt(*item->key));
  const TensorMeta& meta = tensor.shown.meta;
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
  if (tensor.layer >= 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(box, InStack(slice.box, tensor.layer));
  }
  TENSORMOUNT_RETURN_IF_ERROR(AddTensorBox(segments, tensor.source, box, box.extent()));
  return segments;
}

std::string SlicesView::PathOf(std::uint64_t item) const {
  const auto found = Find(item);
  std::string path(name());
  if (item == kRoot) return path;
  return path + '/' + (found.ok() ? found.value()->path : std::string("?"));
}

Result<std::map<std::string, std::string>> SlicesView::Attributes(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const SliceItem> found, Find(item));
  std::map<std::string, std::string> all;
  if (found->folder) return all;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, shown_.TensorAt(*found->key));
  const TensorMeta& meta = tensor.shown.meta;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Slice slice,
      ParseSlice(std::string_view(found->path).substr(found->slice_begin, found->slice_size),
                 meta.shape()));
  all.emplace("key", meta.key());
  all.emplace("dtype", std::string(InfoOf(meta.dtype()).name));
  all.emplace("shape", slice.box.extent().ToString());
  all.emplace("box", slice.box.ToString());
  if (tensor.layer >= 0) {
    all.emplace("stacked_key", tensor.stacked_key);
    all.emplace("layer", std::to_string(tensor.layer));
  }
  return all;
}

}  // namespace tensormount::fs
