// SPDX-License-Identifier: Apache-2.0
// Divides the tensors of hf/ into model-0000N-of-0000M files of a bounded size.
#include "fs/views/hf_parts.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include <fmt/core.h>

#include "base/byte_size.h"
#include "base/checked.h"
#include "fs/views/checkpoint_text.h"
#include "fs/views/tied_names.h"
#include "index/records/safetensors_order.h"

namespace tensormount::fs {
namespace {

// Largest header of a part. The format allows 100,000,000 bytes; the rest is room for metadata and
// padding.
constexpr std::uint64_t kMaxHeaderBytes = 99'000'000;
// Text of the index between the end of "metadata" and the first tensor of the weight map.
constexpr std::string_view kAfterMetadata = "\n  },\n  \"weight_map\": {";

// Upper bound of an entry's size in a header; JSON may escape a byte as six. The entry
//   "name":{"dtype":"BF16","shape":[4096,4096],"data_offsets":[0,33554432]},
// has at most 96 bytes without the name and the shape (type, two offsets of 20 digits,
// punctuation), and each axis at most 20 digits and a comma. A bound suffices, because a part may
// be closed early but must never pass the limit.
std::uint64_t HeaderBytesBound(std::string_view name, const TensorMeta& meta) {
  std::uint64_t bytes = 96 + 21 * static_cast<std::uint64_t>(meta.shape().rank());
  for (const char c : name) {
    const bool plain = c >= 0x20 && c < 0x7f && c != '"' && c != '\\';
    bytes += plain ? 1 : 6;
  }
  return bytes;
}

}  // namespace

Result<std::uint64_t> ParsePartSize(std::string_view text) {
  return ParseByteSize("part size", text);
}

Status HfParts::CheckRules(const ShownCheckpoint& shown, const HfOptions& options) {
  if (!options.rules) return {};
  // Collects all keys, because two tensors that get the same name can be anywhere in the order.
  std::vector<std::string> keys;
  keys.reserve(shown.tensors.count());
  TENSORMOUNT_RETURN_IF_ERROR(
      shown.tensors.Scan(0, [&](std::uint32_t, const std::string& key, const TensorEntry*) {
        keys.push_back(key);
        return true;
      }));
  const auto names = options.rules->ApplyToAll(keys);
  return names.ok() ? Status() : names.status().WithContext("rules of hf/");
}

Result<std::unique_ptr<const HfParts>> HfParts::Make(const ShownCheckpoint& shown,
                                                     const HfOptions& options,
                                                     std::uint64_t whole_bytes,
                                                     bool tied_embeddings) {
  std::unique_ptr<HfParts> hf(new HfParts(shown, options));
  TENSORMOUNT_RETURN_IF_ERROR(hf->FindTied(tied_embeddings));
  TENSORMOUNT_RETURN_IF_ERROR(hf->Divide());
  // A single part without rules and tied names equals model.safetensors: hf/ then opens that file,
  // which may use passthrough.
  Part& first = hf->parts_[0];
  if (hf->parts_.size() == 1 && !options.rules && hf->tied_.empty() &&
      whole_bytes > first.data_bytes) {
    hf->is_whole_ = true;
    first.header_bytes = whole_bytes - first.data_bytes;
    return std::unique_ptr<const HfParts>(std::move(hf));
  }
  // The length of a header is known only after it was made. Each header is made and dropped,
  // because all headers of a large model would take some hundred MB.
  for (std::size_t i = 0; i < hf->parts_.size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileSegments file, hf->Build(i));
    hf->parts_[i].header_bytes = file.literal(0).size();
  }
  return std::unique_ptr<const HfParts>(std::move(hf));
}

Status HfParts::FindTied(bool tied_embeddings) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const TiedNames found, TiedNames::Make(shown_));
  if (found.empty()) return {};
  // Additional names, and their tensors.
  std::map<std::string, std::uint32_t, std::less<>> further;
  for (const auto& [number, names] : found.all()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, shown_.tensors.KeyAt(number));
    std::vector<std::string>& all = tied_[number];
    if (std::string own = Renamed(key); !own.empty()) all.push_back(std::move(own));
    for (const std::string& name : names) {
      std::string renamed = Renamed(name);
      // Rules may give several names of a tensor the same name, which is then listed once.
      if (!CheckKey(renamed).ok() || std::ranges::find(all, renamed) != all.end()) continue;
      if (further.try_emplace(renamed, number).second) all.push_back(std::move(renamed));
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(
      shown_.tensors.Scan(0, [&](std::uint32_t number, const std::string& key, const TensorEntry*) {
        // Keys have priority: an additional name that is also the name of another tensor's key is
        // dropped.
        const auto same = further.find(Renamed(key));
        if (same != further.end() && same->second != number) {
          std::erase(tied_[same->second], same->first);
        }
        return true;
      }));
  for (auto& [number, names] : tied_) {
    if (tied_embeddings && !std::ranges::all_of(names, IsOutputEmbedding)) {
      std::erase_if(names, IsOutputEmbedding);
    }
    std::ranges::sort(names);
    further_names_ += names.size() > 1 ? names.size() - 1 : 0;
  }
  return {};
}

std::vector<std::string> HfParts::NamesOf(std::uint32_t number,
                                          const std::string& shown_key) const {
  if (const auto it = tied_.find(number); it != tied_.end()) return it->second;
  std::string name = Renamed(shown_key);
  if (name.empty()) return {};
  return {std::move(name)};
}

Status HfParts::Divide() {
  const std::uint32_t count = shown_.tensors.count();
  first_held_ = first_left_out_ = count;
  Part part;
  std::uint64_t header = 0;  // Upper bound of the bytes of the current part's header.
  bool empty = true;         // The current part has no tensor yet.
  TENSORMOUNT_RETURN_IF_ERROR(
      shown_.tensors.ForEachEntry(0, count, [&](std::uint32_t number, const TensorEntry& entry) {
        std::optional<std::uint64_t> bytes = 0;
        std::uint64_t more = 0;
        bool held = false;
        for (const std::string& name : NamesOf(number, entry.meta.key())) {
          if (!CanStoreInSafetensors(entry.meta.dtype(), name)) {
            if (left_out_++ == 0) first_left_out_ = number;
            continue;
          }
          held = true;
          if (first_held_ == count) first_held_ = number;
          if (bytes) bytes = CheckedAdd(*bytes, entry.meta.bytes());
          more += HeaderBytesBound(name, entry.meta);
        }
        if (!held) return Status();
        // A part has at least one tensor, however large; otherwise a tensor over part_bytes would
        // fit nowhere.
        const auto with = bytes ? CheckedAdd(part.data_bytes, *bytes) : std::nullopt;
        if (!empty && (!with || *with > options_.part_bytes || header + more > kMaxHeaderBytes)) {
          part.end = number;
          parts_.push_back(part);
          part = {.first = number};
          header = 0;
        }
        empty = false;
        const auto total = bytes ? CheckedAdd(total_bytes_, *bytes) : std::nullopt;
        if (!total)
          return Status(Code::kUnsupported, "hf/: the tensors have more than 2^64 bytes in all");
        part.data_bytes += *bytes;
        header += more;
        total_bytes_ = *total;
        return Status();
      }));
  part.end = count;
  parts_.push_back(part);
  return {};
}

std::string HfParts::NameOf(std::size_t part) const {
  if (parts_.size() == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", part + 1, parts_.size());
}

Result<FileSegments> HfParts::Build(std::size_t number) const {
  const Part& part = parts_[number];
  std::vector<TensorMeta> metas;
  std::vector<std::uint32_t> ordinals;
  TENSORMOUNT_RETURN_IF_ERROR(shown_.tensors.ForEachEntry(
      part.first, part.end, [&](std::uint32_t tensor, const TensorEntry& entry) {
        for (std::string& name : NamesOf(tensor, entry.meta.key())) {
          if (!CanStoreInSafetensors(entry.meta.dtype(), name)) continue;
          TENSORMOUNT_ASSIGN_OR_RETURN(
              TensorMeta meta,
              TensorMeta::Make(std::move(name), entry.meta.dtype(), entry.meta.shape()));
          metas.push_back(std::move(meta));
          ordinals.push_back(entry.ordinal);
        }
        return Status();
      }));
  std::vector<const TensorMeta*> pointers;
  pointers.reserve(metas.size());
  for (const TensorMeta& meta : metas) pointers.push_back(&meta);
  // A part has the order and header that model.safetensors would have with only these tensors
  // (index/records/safetensors_order.h): by falling element size, as safetensors itself writes
  // files, which aligns all data.
  TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsOrder order, LayOutSafetensors(pointers));
  if (order.header.empty()) return Status(Code::kInternal, "hf/: the header of a file is too long");

  auto segments = std::make_shared<std::vector<FileSegments::Segment>>();
  segments->reserve(metas.size() + 1);
  segments->push_back({.kind = FileSegments::Segment::Kind::kLiteral,
                       .ordinal = 0,
                       .begin = 0,
                       .length = order.header.size(),
                       .skip = 0});
  for (std::size_t i = 0; i < metas.size(); ++i) {
    // An empty tensor is in the header, but has no bytes.
    if (metas[i].bytes() == 0) continue;
    segments->push_back({.kind = FileSegments::Segment::Kind::kTensor,
                         .ordinal = ordinals[i],
                         .begin = order.offsets[i],
                         .length = metas[i].bytes(),
                         .skip = 0});
  }
  std::sort(segments->begin(), segments->end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  const FileSegments::Segment& last = segments->back();
  // Stat has reported the sizes before, so a part of another size must fail instead of ending
  // early.
  if (last.begin + last.length != order.header.size() + part.data_bytes ||
      (part.header_bytes != 0 && part.header_bytes != order.header.size())) {
    return Status(Code::kDataLoss, "hf/: the index changed while a file of hf/ was generated");
  }
  return FileSegments::FromSharedSegments(
      std::move(segments), std::make_shared<const std::string>(std::move(order.header)));
}

Result<std::shared_ptr<const GeneratedText>> HfParts::IndexJson() const {
  // The weight map has one item for each tensor. If tensors are left out, the list of their names
  // comes before it, which also has one item for each tensor (RenderIndex).
  const std::uint32_t count = shown_.tensors.count();
  if (left_out_ > 0 && count > UINT32_MAX / 2) {
    return Status(Code::kUnsupported, "hf/: too many tensors for one index");
  }
  std::string head = fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}", total_bytes_);
  head += left_out_ > 0 ? ",\n    \"tensormount_left_out\": [" : kAfterMetadata;
  const auto render = [this](std::uint32_t first, std::uint32_t n, std::string& out) {
    return RenderIndex(first, n, out);
  };
  return GeneratedText::Make(std::move(head), left_out_ > 0 ? 2 * count : count, render,
                             "\n  }\n}\n");
}

Status HfParts::RenderIndex(std::uint32_t first, std::uint32_t count, std::string& out) const {
  const std::uint32_t tensors = shown_.tensors.count();
  // Items [0, lists) are the list of left-out tensors, the rest the weight map, each with one item
  // for each tensor; most items of the list render nothing.
  const std::uint32_t lists = left_out_ > 0 ? tensors : 0;
  const std::uint32_t end = first + count;
  if (first < lists) {
    const std::uint32_t last = std::min(end, lists);
    TENSORMOUNT_RETURN_IF_ERROR(shown_.tensors.ForEachEntry(
        first, last, [&](std::uint32_t number, const TensorEntry& entry) {
          bool first_of_all = number == first_left_out_;
          for (const std::string& name : NamesOf(number, entry.meta.key())) {
            if (CanStoreInSafetensors(entry.meta.dtype(), name)) continue;
            out += std::exchange(first_of_all, false) ? "\n      " : ",\n      ";
            out += JsonString(name);
          }
          return Status();
        }));
    if (last == lists) {
      out += "\n    ]";
      out += kAfterMetadata;
    }
    first = last;
  }
  if (first >= end) return {};
  first -= lists;
  // Parts are ranges in the order of the tensors, so one search finds the first part.
  std::size_t part = static_cast<std::size_t>(
      std::upper_bound(parts_.begin(), parts_.end(), first,
                       [](std::uint32_t n, const Part& p) { return n < p.end; }) -
      parts_.begin());
  return shown_.tensors.ForEachEntry(
      first, end - lists, [&](std::uint32_t number, const TensorEntry& entry) {
        while (number >= parts_[part].end) ++part;
        bool first_of_all = number == first_held_;
        for (const std::string& name : NamesOf(number, entry.meta.key())) {
          if (!CanStoreInSafetensors(entry.meta.dtype(), name)) continue;
          out += std::exchange(first_of_all, false) ? "\n    " : ",\n    ";
          out += fmt::format("{}: \"{}\"", JsonString(name), NameOf(part));
        }
        return Status();
      });
}

}  // namespace tensormount::fs
