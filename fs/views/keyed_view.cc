// SPDX-License-Identifier: Apache-2.0
// Common parts of views that show a file for each key: lookup, listing, names and attributes.
#include "fs/views/keyed_view.h"

#include <algorithm>
#include <cerrno>

#include "fs/answers.h"
#include "fs/views/checkpoint_text.h"

namespace tensormount::fs {
namespace {

// Marks items of hidden keys: the highest of the 40 bits of an item number.
constexpr std::uint64_t kHiddenBit = std::uint64_t{1} << 39;

}  // namespace

// The bit layout is described at the class; KeyedItemOf is the checked inverse.
std::uint64_t KeyedView::ItemOf(const KeyedItem& keyed) {
  return (keyed.key.hidden ? kHiddenBit : 0) |
         (std::uint64_t{keyed.key.number} << kFolderDepthBits) | keyed.depth;
}

Result<KeyedView::KeyedItem> KeyedView::KeyedItemOf(std::uint64_t item) const {
  KeyedItem keyed;
  keyed.key.hidden = (item & kHiddenBit) != 0;
  // The number has 27 bits, so the cast is safe. The check below refuses numbers without a key.
  keyed.key.number = static_cast<std::uint32_t>((item & ~kHiddenBit) >> kFolderDepthBits);
  keyed.depth = static_cast<std::uint32_t>(item & kMaxDepth);
  if (item == kRoot) return keyed;
  // Depth 1 is the view's own directory, whose only valid item number is kRoot.
  if (item >= kMaxItems || keyed.depth == 1 || (keyed.key.hidden && hidden_ == nullptr) ||
      keyed.key.number >= TreeOf(keyed.key).keys().count()) {
    return StaleNodeError("the checkpoint");
  }
  return keyed;
}

Result<ViewNode> KeyedView::FileNode(const KeyedItem& keyed, std::string_view key,
                                     const TensorEntry* entry) const {
  ViewNode file{.item = ItemOf(keyed), .identity = std::string(key)};
  TENSORMOUNT_RETURN_IF_ERROR(StatFile(keyed.key, entry, file));
  return file;
}

Result<ViewNode> KeyedView::StatAt(const KeyedItem& keyed) const {
  const KeyTree& tree = TreeOf(keyed.key);
  if (keyed.depth == 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, tree.keys().KeyAt(keyed.key.number));
    return FileNode(keyed, key, nullptr);
  }
  ViewNode node{.item = ItemOf(keyed), .folder = true, .size = 0, .mtime = empty_mtime_};
  if (keyed.depth > 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(node.identity, tree.PathOf(keyed.key.number, keyed.depth - 1));
  }
  if (tree.keys().count() > 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(node.mtime, MtimeOf(keyed.key));
  }
  return node;
}

Result<ViewNode> KeyedView::Stat(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem keyed, KeyedItemOf(item));
  return StatAt(keyed);
}

Result<ViewChild> KeyedView::ChildOf(const KeyedItem& folder, const TreeChild& found,
                                     std::string_view name, std::string_view stem) const {
  // Files have the suffix; directories do not, since in names of directories it is escaped. Equal
  // sizes of stem and name mean that the name had no suffix.
  if (!suffix_.empty() && found.is_folder != (stem.size() == name.size()))
    return NoSuchNameError(name);
  // An item number has no room for a greater depth. Keys do not reach this limit of 4,095: a key of
  // 2,048 bytes has at most 2,049 names.
  if (found.depth + 1 >= kMaxDepth) return NoSuchNameError(name);
  const KeyedItem keyed{.key = {.hidden = folder.key.hidden, .number = found.ordinal},
                        .depth = found.is_folder ? found.depth + 1 : 0};
  TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, StatAt(keyed));
  return ViewChild{std::string(name), std::move(node)};
}

Result<ViewChild> KeyedView::Lookup(std::uint64_t item, std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem folder, KeyedItemOf(item));
  if (folder.depth == 0) return Status::FromErrno(ENOTDIR, "look up", name);
  // A name that is only the suffix is kept whole, and is not found.
  std::string_view stem = name;
  if (!suffix_.empty() && name.size() > suffix_.size() && name.ends_with(suffix_)) {
    stem.remove_suffix(suffix_.size());
  }
  const Result<TreeChild> found = TreeOf(folder.key).Lookup(folder.folder(), stem);
  if (found.status().code() == Code::kNotFound && hidden_ != nullptr &&
      hidden_->keys().count() > 0 && !folder.key.hidden) {
    return LookupHidden(folder, name, stem);
  }
  TENSORMOUNT_RETURN_IF_ERROR(found.status());
  return ChildOf(folder, found.value(), name, stem);
}

// Finds layers below directories that tensors share: w in layers/0/ may be a layer, while layers/0/
// is a directory of other tensors.
Result<ViewChild> KeyedView::LookupHidden(const KeyedItem& folder, std::string_view name,
                                          std::string_view stem) const {
  // Finds the same directory in the tree of hidden keys, name by name from the root: O(depth)
  // lookups, and only for names that the listed keys do not have.
  KeyedItem in{.key = {.hidden = true}, .depth = 1};
  if (folder.depth > 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path,
                                 tree_.PathOf(folder.key.number, folder.depth - 1));
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find('/', begin), path.size());
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const TreeChild step,
          hidden_->Lookup(in.folder(), std::string_view(path).substr(begin, end - begin)));
      if (!step.is_folder || step.depth + 1 >= kMaxDepth) return NoSuchNameError(name);
      in.key.number = step.ordinal;
      in.depth = step.depth + 1;
      begin = end + 1;
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeChild child, hidden_->Lookup(in.folder(), stem));
  return ChildOf(in, child, name, stem);
}

Status KeyedView::List(std::uint64_t item, std::uint64_t cookie, const Visit& fn) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem folder, KeyedItemOf(item));
  if (folder.depth == 0) return Status::FromErrno(ENOTDIR, "list", PathOf(item));
  // Layers, and directories with only layers, are not listed.
  if (folder.key.hidden) return {};
  Status failed;
  const Status listed =
      tree_.List(folder.folder(), cookie, [&](TreeChild& child, std::uint64_t next) {
        if (child.is_folder && child.depth + 1 >= kMaxDepth) return true;
        const KeyedItem keyed{.key = {.hidden = false, .number = child.ordinal},
                              .depth = child.is_folder ? child.depth + 1 : 0};
        // The scan has read the tensor's record, so a plain file needs no lookup of its own.
        Result<ViewNode> node = child.entry && !child.is_folder
                                    ? FileNode(keyed, child.entry->meta.key(), &*child.entry)
                                    : StatAt(keyed);
        // The view has no file for this key (npy/ has none for 4-bit types), so none is listed.
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
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem keyed, KeyedItemOf(item));
  if (keyed.depth > 0) return Status::FromErrno(EISDIR, "open", PathOf(item));
  return SegmentsAt(keyed.key);
}

std::string KeyedView::PathOf(std::uint64_t item) const {
  std::string path(name_);
  if (item == kRoot) return path;
  path += '/';
  const Result<KeyedItem> keyed = KeyedItemOf(item);
  if (!keyed.ok()) return path + "?";
  const std::uint32_t depth = keyed.value().depth;
  const Result<std::string> rest =
      TreeOf(keyed.value().key).PathOf(keyed.value().key.number, depth > 0 ? depth - 1 : 0);
  path += rest.ok() ? rest.value() : std::string("?");
  if (depth == 0) path += suffix_;
  return path;
}

Result<std::map<std::string, std::string>> KeyedView::Attributes(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyedItem keyed, KeyedItemOf(item));
  if (keyed.depth > 0) return std::map<std::string, std::string>();
  return AttributesAt(keyed.key);
}

TensorFilesView::TensorFilesView(const ShownCheckpoint& shown, std::string_view name,
                                 std::string_view suffix, const KeyTree* hidden)
    : KeyedView(name, suffix, shown.tensor_tree, hidden, shown.opened.index().info().json_mtime),
      shown_(shown) {}

Status TensorFilesView::StatFile(const KeyNumber& key, const TensorEntry* entry,
                                 ViewNode& file) const {
  if (entry != nullptr) {
    // Fast path for `ls -l` on tensors/, which makes no segments and no headers.
    const std::optional<std::uint64_t> known = KnownSize(entry->meta);
    if (known) {
      file.size = *known;
      file.mtime = MtimeOfFile(*entry);
      return {};
    }
  }
  ShownTensor tensor;
  if (entry != nullptr) {
    tensor.shown = *entry;
    tensor.source = *entry;
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(tensor, shown_.TensorAt(key));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileSegments segments, SegmentsOf(tensor));
  file.size = segments.size();
  file.mtime = MtimeOfFile(tensor.shown);
  return {};
}

Result<std::int64_t> TensorFilesView::MtimeOf(const KeyNumber& key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, shown_.TensorAt(key));
  return tensor.shown.mtime;
}

Result<FileSegments> TensorFilesView::SegmentsAt(const KeyNumber& key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, shown_.TensorAt(key));
  return SegmentsOf(tensor);
}

Result<std::map<std::string, std::string>> TensorFilesView::AttributesAt(
    const KeyNumber& key) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ShownTensor tensor, shown_.TensorAt(key));
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
  // Counts that cannot be read are left out: the other attributes are still true.
  if (const auto counts = shown_.opened.CountsOf(tensor.source); counts.ok() && counts.value()) {
    all["zeros"] = std::to_string(counts.value()->zeros);
    all["nan"] = std::to_string(counts.value()->nan);
    all["posinf"] = std::to_string(counts.value()->posinf);
    all["neginf"] = std::to_string(counts.value()->neginf);
    if (const std::string absmax =
            AbsmaxText(entry.meta.dtype(), ValuesIn(entry.meta.dtype(), entry.meta.elements()),
                       *counts.value());
        !absmax.empty()) {
      all["absmax"] = absmax;
    }
  }
  // stored_key is set only if a name map shows a stored tensor under another key.
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored, shown_.opened.StoredKeyOf(key.number));
  if (!stored.empty() && stored != entry.meta.key()) all["stored_key"] = std::move(stored);
  return all;
}

}  // namespace tensormount::fs
