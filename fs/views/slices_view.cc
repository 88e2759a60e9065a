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
// w[0,:] and w[0:1,:] have the same bytes but .npy headers of other shapes: two files. As plain
// files they are one.
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

ViewNode SlicesView::NodeOf(std::uint64_t number, const SliceItem& item) {
  return {.item = number,
          .folder = item.folder,
          .size = item.size,
          .mtime = item.mtime,
          .identity = item.path};
}

Result<std::shared_ptr<const SliceItem>> SlicesView::Find(std::uint64_t number) const {
  // The root is not in the maps: the kernel never looks it up below this view, and it cannot be
  // forgotten.
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
  if (found == items_.end()) return Status(Code::kStale, "the slice was forgotten");
  return found->second.item;
}

std::uint64_t SliceItems::Remember(const std::shared_ptr<const SliceItem>& item) {
  // Never used again in this process: of two checkpoints, or of one that is removed and saved
  // again, the kernel may know items of the one before.
  // 2^40 of them: a million look-ups a second would take 12 days to use them up.
  static std::atomic<std::uint64_t> next_item{View::kRoot + 1};
  const std::lock_guard lock(mutex_);
  // The key is a view of the path within the item that is stored below: both go together, in
  // Forget.
  const auto [at, added] = numbers_.try_emplace(item->path, 0);
  if (added) at->second = next_item.fetch_add(1);
  Remembered& remembered = items_[at->second];
  if (added) remembered.item = item;
  ++remembered.references;
  return at->second;
}

void SliceItems::Forget(std::uint64_t number, std::uint64_t references) {
  // Declared before the lock, so destroyed after it is released.
  std::shared_ptr<const SliceItem> dropped;
  const std::lock_guard lock(mutex_);
  const auto found = items_.find(number);
  if (found == items_.end()) return;
  // More than there are would be a bug of the kernel's or ours, and no reason to end the mount.
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
    // A slice is never of a folder, so the mark that tells both apart may be left out.
    // With keys a and a/b, "a[0]" can only mean the tensor.
    if (child.ok() && child.value().is_folder) {
      child = tree.Lookup(*in, std::string(name) + "%=");
    }
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    if (!child.value().is_folder) return KeyNumber{layer, child.value().ordinal};
  }
  return NoSuch(name);
}

Result<SliceItem> SlicesView::FolderItem(const SliceItem& in, std::string_view name) const {
  SliceItem item;
  // Both trees may have it, and the tensors' own time is the one that stays.
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
  // Both meanings may hold at once: the folder of an overlong key, and the one that makes room for
  // a slice.
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
  if (!item.tensors && !item.layers && !item.key) return NoSuch(name);
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
  // kInvalidArgument where the box does not begin and end on bytes; this is not "no such file",
  // since the user can mend it.
  const Result<std::uint64_t> bytes =
      RegionBytes(meta.dtype(), meta.shape(), Region(slice.value().box));
  if (!bytes.ok()) return bytes.status().WithContext("tensor " + meta.key());
  item.size = bytes.value();
  if (name.npy) {
    const Result<std::string> header = MakeNpyHeader(meta.dtype(), slice.value().kept);
    if (!header.ok()) return Status(Code::kNotFound, "no .npy of this type");
    item.size += header.value().size();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(item.path, shown_.TreeOf(key).PathOf(key.number, 0));
  const std::string text = CanonicalText(slice.value(), name.npy);
  // Behind the bracket; two brackets belong to the text.
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
    return NoSuch(name);
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
