// SPDX-License-Identifier: Apache-2.0
// What the files of a checkpoint contain; checkpoint_view.cc has their names and attributes.
#include <algorithm>
#include <cstring>

#include "fs/views/checkpoint_text.h"
#include "fs/views/checkpoint_view.h"
#include "base/mapping.h"
#include "index/safetensors_layout.h"
#include "shard/leaf_hash.h"
#include "shard/npy.h"

namespace tensormount::fs {
namespace {

Status Stale() { return Status(Code::kStale, "the checkpoint has no such node"); }

Status NoSuch(std::string_view name) {
  return Status(Code::kNotFound, "no " + std::string(name) + " here");
}

}  // namespace

Result<std::shared_ptr<const VirtualFile>> CheckpointView::OpenFile(const Node& of) const {
  const std::optional<KeyNode> known = KeyNodeOf(of);
  if (!known) return Stale();
  const KeyNode& node = *known;
  std::shared_ptr<VirtualFile> file(new VirtualFile);
  file->view_ = shared_from_this();
  file->label_ = options_.name.empty() ? PathOfKey(node) : options_.name + "/" + PathOfKey(node);
  if (node.is_folder()) return Status::FromErrno(EISDIR, "open", file->label_);
  const auto of_literal = [&](std::string text) {
    file->literal_ = std::make_shared<const std::string>(std::move(text));
    file->Add(Segment::Kind::kLiteral, 0, file->literal_->size());
  };
  const auto of_text = [&](std::shared_ptr<const GeneratedText> text) {
    file->text_ = std::move(text);
    file->Add(Segment::Kind::kText, 0, file->text_->size());
  };
  if (node.view == ViewKind::kFixed) {
    switch (static_cast<FixedFile>(node.ordinal)) {
      case FixedFile::kCheckpointJson: {
        TENSORMOUNT_ASSIGN_OR_RETURN(auto text, Json());
        of_text(std::move(text));
        return std::shared_ptr<const VirtualFile>(std::move(file));
      }
      case FixedFile::kCommonJson:
        of_literal(common_json_);
        return std::shared_ptr<const VirtualFile>(std::move(file));
      case FixedFile::kSafetensors: {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto safetensors, SafetensorsFile());
        file->shared_ = {safetensors, &safetensors->segments};
        file->literal_ = safetensors->header;
        if (!file->literal_) {
          TENSORMOUNT_ASSIGN_OR_RETURN(std::string header, opened_->index().SafetensorsHeader());
          file->literal_ = std::make_shared<const std::string>(std::move(header));
        }
        if (file->literal_->size() != file->shared_->front().length) {
          return Status(Code::kDataLoss, file->label_ + ": the header has another length");
        }
        file->size_ = file->shared_->back().begin + file->shared_->back().length;
        file->reads_data_ = true;
        return std::shared_ptr<const VirtualFile>(std::move(file));
      }
      default:
        return Stale();
    }
  }
  if (node.view == ViewKind::kObjects) {
    if (node.ordinal >= objects_->parts.size()) return Stale();
    file->Add(Segment::Kind::kObject, node.ordinal, objects_->parts[node.ordinal].length);
    return std::shared_ptr<const VirtualFile>(std::move(file));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(Served served, ServedBy(node));
  const TensorMeta& meta = served.shown.meta;
  if (node.view == ViewKind::kExtents) {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto text, Extents(served.shown));
    of_text(std::move(text));
    return std::shared_ptr<const VirtualFile>(std::move(file));
  }
  if (node.view == ViewKind::kNpy || node.view == ViewKind::kNpyLayers) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string header, MakeNpyHeader(meta.dtype(), meta.shape()));
    of_literal(std::move(header));
  }
  file->Add(Segment::Kind::kTensor, served.source.ordinal, meta.bytes(), served.skip);
  file->tensor_ = std::move(served.source);
  return std::shared_ptr<const VirtualFile>(std::move(file));
}

Result<std::map<std::string, std::string>> CheckpointView::Xattrs(const Node& of) const {
  const std::optional<KeyNode> known = KeyNodeOf(of);
  if (!known) return Stale();
  const KeyNode& node = *known;
  std::map<std::string, std::string> all;
  const auto add = [&](std::string_view name, std::string value) {
    all.emplace("user.tensormount." + std::string(name), std::move(value));
  };
  const CheckpointInfo& info = opened_->index().info();
  if (node.view == ViewKind::kFixed) {
    if (node.is_folder()) {
      add("uuid", info.uuid.ToString());
      add("generation", std::to_string(info.generation));
      if (!info.parent.IsZero()) add("parent", info.parent.ToString());
      add("producer", info.producer);
    }
    return all;
  }
  if (node.is_folder()) return all;
  add("tier", "daemon");
  if (node.view == ViewKind::kObjects) {
    if (node.ordinal >= objects_->parts.size()) return Stale();
    const ObjectContent& part = objects_->parts[node.ordinal];
    add("key", part.key);
    if (!objects_->stored_keys.empty() && objects_->stored_keys[node.ordinal] != part.key) {
      add("stored_key", objects_->stored_keys[node.ordinal]);
    }
    add("hash", "xxh3-128:" + part.hash.ToHex());
    if (part.grid.rank() > 0) {
      add("index", DimsText(part.index));
      add("grid", DimsText(part.grid));
    }
    return all;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Served served, ServedBy(node));
  const TensorEntry& entry = served.shown;
  add("key", entry.meta.key());
  add("dtype", std::string(InfoOf(entry.meta.dtype()).name));
  add("shape", DimsText(entry.meta.shape()));
  if (entry.has_digest) add("digest", DigestText(entry.digest));
  if (served.layer >= 0) {
    add("stacked_key", served.stacked_key);
    add("layer", std::to_string(served.layer));
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored, tensor_keys_->StoredKeyAt(node.ordinal));
    if (std::string_view(stored) != entry.meta.key()) add("stored_key", std::move(stored));
  }
  return all;
}

Result<std::shared_ptr<const GeneratedText>> CheckpointView::Json() const {
  const std::lock_guard lock(mutex_);
  if (!json_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        GeneratedText::Parts parts,
        CheckpointJson(*opened_, *tensor_keys_, *layers_, objects_->parts));
    TENSORMOUNT_ASSIGN_OR_RETURN(json_, GeneratedText::Make(std::move(parts)));
  }
  return json_;
}

Result<std::shared_ptr<const GeneratedText>> CheckpointView::Extents(
    const TensorEntry& tensor) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(GeneratedText::Parts parts, ExtentsJson(opened_->index(), tensor));
  return GeneratedText::Make(std::move(parts));
}

Result<CheckpointView::Safetensors> CheckpointView::LayOutOwn() const {
  const CheckpointIndex& index = opened_->index();
  Safetensors file;
  // The format has a limit: a model past it has no file of this kind.
  if (index.safetensors_header_bytes() == 0) return NoSuch("model.safetensors");
  file.segments.push_back(
      {.kind = Segment::Kind::kLiteral, .length = index.safetensors_header_bytes()});
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
    if (tensor.in_safetensors && tensor.meta.bytes() > 0) {
      file.segments.push_back({.kind = Segment::Kind::kTensor,
                               .ordinal = tensor.ordinal,
                               .begin = tensor.safetensors_offset,
                               .length = tensor.meta.bytes()});
    }
    return true;
  }));
  return file;
}

// The names in the header are others than those that the index has it with.
Result<CheckpointView::Safetensors> CheckpointView::LayOutRenamed() const {
  std::vector<TensorEntry> entries;
  entries.reserve(tensor_keys_->count());
  std::vector<const TensorMeta*> metas;
  for (std::uint32_t i = 0; i < tensor_keys_->count(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, tensor_keys_->EntryAt(i));
    entries.push_back(std::move(entry));
    metas.push_back(&entries.back().meta);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsLayout layout, LayOutSafetensors(metas));
  if (layout.header.empty()) return NoSuch("model.safetensors");
  Safetensors file;
  file.segments.push_back({.kind = Segment::Kind::kLiteral, .length = layout.header.size()});
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!layout.held[i] || metas[i]->bytes() == 0) continue;
    file.segments.push_back({.kind = Segment::Kind::kTensor,
                             .ordinal = entries[i].ordinal,
                             .begin = layout.offsets[i],
                             .length = metas[i]->bytes()});
  }
  file.header = std::make_shared<const std::string>(std::move(layout.header));
  return file;
}

Result<std::shared_ptr<const CheckpointView::Safetensors>> CheckpointView::SafetensorsFile() const {
  const std::lock_guard lock(mutex_);
  if (safetensors_) return safetensors_;
  TENSORMOUNT_ASSIGN_OR_RETURN(Safetensors file, options_.map ? LayOutRenamed() : LayOutOwn());
  std::sort(file.segments.begin(), file.segments.end(),
            [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < file.segments.size(); ++i) {
    const Segment& before = file.segments[i - 1];
    if (file.segments[i].begin != before.begin + before.length) {
      return Status(Code::kDataLoss, "index: tensors of model.safetensors overlap or leave a gap");
    }
  }
  safetensors_ = std::make_shared<const Safetensors>(std::move(file));
  return safetensors_;
}

std::shared_ptr<CheckpointView::GoodBlocks> CheckpointView::GoodBlocksOf(
    const TensorEntry& tensor) const {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<GoodBlocks>& blocks = good_blocks_[tensor.ordinal];
  if (!blocks) {
    blocks = std::make_shared<GoodBlocks>((tensor.meta.bytes() + kLeafBytes - 1) / kLeafBytes);
  }
  return blocks;
}

std::vector<OpenedCheckpoint::MappedPiece> CheckpointView::MapTensor(const TensorEntry& tensor,
                                                                     std::uint64_t offset,
                                                                     std::size_t size) const {
  if (options_.verify != ServeVerify::kOff) return {};
  auto mapped = opened_->MapBytes(tensor, offset, size);
  // Why it failed is found out, and told, by the read that follows.
  if (!mapped.ok()) return {};
  for (const auto& piece : mapped.value()) {
    if (!InMemory(piece.data, piece.size)) return {};
  }
  return std::move(mapped).value();
}

Status CheckpointView::ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out,
                                  std::size_t size, ReadStats* stats) const {
  if (options_.verify == ServeVerify::kOff) {
    return opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kOff, stats);
  }
  if (options_.verify == ServeVerify::kAlways) {
    return opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kExtendLeaves, stats);
  }
  const std::shared_ptr<GoodBlocks> good = GoodBlocksOf(tensor);
  const std::uint64_t first = offset / kLeafBytes;
  const std::uint64_t last = (offset + size - 1) / kLeafBytes;
  const auto bit = [&](std::uint64_t block) { return std::uint64_t{1} << (block % 64); };
  bool all_good = true;
  for (std::uint64_t b = first; b <= last && all_good; ++b) {
    all_good = (good->words[b / 64].load(std::memory_order_acquire) & bit(b)) != 0;
  }
  if (all_good) return opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kOff, stats);
  // Whole blocks, so that these need not be checked again.
  const std::uint64_t begin = first * kLeafBytes;
  const std::uint64_t end = std::min((last + 1) * kLeafBytes, tensor.meta.bytes());
  if (begin == offset && end == offset + size) {
    TENSORMOUNT_RETURN_IF_ERROR(
        opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kExtendLeaves, stats));
  } else {
    std::vector<char> scratch(static_cast<std::size_t>(end - begin));
    TENSORMOUNT_RETURN_IF_ERROR(opened_->ReadBytes(tensor, begin, scratch.data(), scratch.size(),
                                                   ReadVerify::kExtendLeaves, stats));
    std::memcpy(out, scratch.data() + (offset - begin), size);
  }
  for (std::uint64_t b = first; b <= last; ++b) {
    good->words[b / 64].fetch_or(bit(b), std::memory_order_release);
  }
  return {};
}

Status CheckpointView::ReadObject(std::uint32_t number, std::uint64_t offset, char* out,
                                  std::size_t size) const {
  if (number >= objects_->parts.size()) return Stale();
  const ObjectContent& part = objects_->parts[number];
  // Whole leaves are what ReadObject checks.
  const std::uint64_t begin = offset / kLeafBytes * kLeafBytes;
  const std::uint64_t end =
      std::min((offset + size + kLeafBytes - 1) / kLeafBytes * kLeafBytes, part.length);
  if (options_.verify == ServeVerify::kOff || (begin == offset && end == offset + size)) {
    return opened_->ReadObject(part, offset, out, size);
  }
  std::vector<char> scratch(static_cast<std::size_t>(end - begin));
  TENSORMOUNT_RETURN_IF_ERROR(opened_->ReadObject(part, begin, scratch.data(), scratch.size()));
  std::memcpy(out, scratch.data() + (offset - begin), size);
  return {};
}

}  // namespace tensormount::fs
