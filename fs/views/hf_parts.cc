// SPDX-License-Identifier: Apache-2.0
// How hf/ divides tensors into model-0000N-of-0000M files of a bounded size.
#include "fs/views/hf_parts.h"

#include <algorithm>
#include <functional>

#include <fmt/core.h>

#include "base/checked.h"
#include "fs/views/checkpoint_text.h"
#include "index/records/safetensors_order.h"

namespace tensormount::fs {
namespace {

// Under the format's limit of 100,000,000 bytes, with room for the metadata and the padding.
constexpr std::uint64_t kMaxHeaderBytes = 99'000'000;
// From the list or the number before it to the first tensor of the map.
constexpr std::string_view kAfterMetadata = "\n  },\n  \"weight_map\": {";

// At least what an entry takes in a header: JSON may escape a byte as six.
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
  struct Unit {
    std::string_view suffix;
    std::uint64_t bytes;
  };
  // Longer ones first: "GB" does not end a "GiB", but "B" would.
  static constexpr Unit kUnits[] = {
      {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30},
      {"KB", 1'000},       {"MB", 1'000'000},   {"GB", 1'000'000'000},
      {"K", 1'000},        {"M", 1'000'000},    {"G", 1'000'000'000},
  };
  const auto bad = [&] {
    return Status(Code::kInvalidArgument, "size of a part \"" + std::string(text) +
                                              "\": a number of bytes, or of K, M, G, KB, MB, GB "
                                              "(powers of 1000), KiB, MiB, GiB (of 1024)");
  };
  std::string_view digits = text;
  std::uint64_t unit = 1;
  for (const Unit& u : kUnits) {
    if (!text.ends_with(u.suffix)) continue;
    digits.remove_suffix(u.suffix.size());
    unit = u.bytes;
    break;
  }
  if (digits.empty() || digits.size() > 19) return bad();
  std::uint64_t number = 0;  // 19 digits fit.
  for (const char c : digits) {
    if (c < '0' || c > '9') return bad();
    number = number * 10 + static_cast<std::uint64_t>(c - '0');
  }
  const auto bytes = CheckedMul(number, unit);
  if (!bytes || *bytes == 0 || *bytes > INT64_MAX) return bad();
  return *bytes;
}

Status HfParts::CheckRules(const ShownCheckpoint& shown, const HfOptions& options) {
  if (!options.rules) return {};
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
                                                     std::uint64_t whole_bytes) {
  std::unique_ptr<HfParts> layout(new HfParts(shown, options));
  TENSORMOUNT_RETURN_IF_ERROR(layout->Divide());
  Part& first = layout->parts_[0];
  if (layout->parts_.size() == 1 && !options.rules && whole_bytes > first.data_bytes) {
    layout->is_whole_ = true;
    first.header_bytes = whole_bytes - first.data_bytes;
    return std::unique_ptr<const HfParts>(std::move(layout));
  }
  // What the header is, and so how long, is known only when it was made.
  for (std::size_t i = 0; i < layout->parts_.size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const File file, layout->Build(i));
    layout->parts_[i].header_bytes = file.header->size();
  }
  return std::unique_ptr<const HfParts>(std::move(layout));
}

Status HfParts::Divide() {
  const std::uint32_t count = shown_.tensors.count();
  first_held_ = first_left_out_ = count;
  Part part;
  std::uint64_t header = 0;  // A bound of the open part's.
  bool empty = true;         // The open part has no tensor yet.
  TENSORMOUNT_RETURN_IF_ERROR(
      shown_.tensors.ForEachEntry(0, count, [&](std::uint32_t number, const TensorEntry& entry) {
        const std::string name = TensorName(entry.meta.key());
        if (name.empty()) return Status();
        if (!SafetensorsHolds(entry.meta.dtype(), name)) {
          if (left_out_++ == 0) first_left_out_ = number;
          return Status();
        }
        if (first_held_ == count) first_held_ = number;
        const std::uint64_t bytes = entry.meta.bytes();
        const std::uint64_t more = HeaderBytesBound(name, entry.meta);
        const auto with = CheckedAdd(part.data_bytes, bytes);
        if (!empty && (!with || *with > options_.part_bytes || header + more > kMaxHeaderBytes)) {
          part.end = number;
          parts_.push_back(part);
          part = {.first = number};
          header = 0;
        }
        empty = false;
        part.data_bytes += bytes;
        header += more;
        const auto total = CheckedAdd(total_bytes_, bytes);
        if (!total) return Status(Code::kUnsupported, "hf/: too many bytes for one model");
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

Result<HfParts::File> HfParts::Build(std::size_t number) const {
  const Part& part = parts_[number];
  std::vector<TensorMeta> metas;
  std::vector<std::uint32_t> ordinals;
  TENSORMOUNT_RETURN_IF_ERROR(shown_.tensors.ForEachEntry(
      part.first, part.end, [&](std::uint32_t, const TensorEntry& entry) {
        std::string name = TensorName(entry.meta.key());
        if (name.empty() || !SafetensorsHolds(entry.meta.dtype(), name)) return Status();
        TENSORMOUNT_ASSIGN_OR_RETURN(
            TensorMeta meta,
            TensorMeta::Make(std::move(name), entry.meta.dtype(), entry.meta.shape()));
        metas.push_back(std::move(meta));
        ordinals.push_back(entry.ordinal);
        return Status();
      }));
  std::vector<const TensorMeta*> pointers;
  pointers.reserve(metas.size());
  for (const TensorMeta& meta : metas) pointers.push_back(&meta);
  TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsOrder layout, LayOutSafetensors(pointers));
  if (layout.header.empty())
    return Status(Code::kInternal, "hf/: the header of a part is too long");

  auto segments = std::make_shared<std::vector<FileSegments::Segment>>();
  segments->reserve(metas.size() + 1);
  segments->push_back({.kind = FileSegments::Segment::Kind::kLiteral,
                       .ordinal = 0,
                       .begin = 0,
                       .length = layout.header.size(),
                       .skip = 0});
  for (std::size_t i = 0; i < metas.size(); ++i) {
    if (metas[i].bytes() == 0) continue;
    segments->push_back({.kind = FileSegments::Segment::Kind::kTensor,
                         .ordinal = ordinals[i],
                         .begin = layout.offsets[i],
                         .length = metas[i].bytes(),
                         .skip = 0});
  }
  std::sort(segments->begin(), segments->end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  const FileSegments::Segment& last = segments->back();
  if (last.begin + last.length != layout.header.size() + part.data_bytes ||
      (part.header_bytes != 0 && part.header_bytes != layout.header.size())) {
    return Status(Code::kDataLoss, "hf/: the index changed while a part was laid out");
  }
  return File{.segments = std::move(segments),
              .header = std::make_shared<const std::string>(std::move(layout.header))};
}

Result<std::shared_ptr<const GeneratedText>> HfParts::IndexJson() const {
  // Items are all tensors, twice where some are left out: first for the list of these.
  GeneratedText::Parts text;
  const std::uint32_t count = shown_.tensors.count();
  if (left_out_ > 0 && count > UINT32_MAX / 2) {
    return Status(Code::kUnsupported, "hf/: too many tensors for one index");
  }
  text.head = fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}", total_bytes_);
  text.head += left_out_ > 0 ? ",\n    \"tensormount_left_out\": [" : kAfterMetadata;
  text.tail = "\n  }\n}\n";
  text.items = left_out_ > 0 ? 2 * count : count;
  text.render = [this](std::uint32_t first, std::uint32_t n, std::string& out) {
    return RenderIndex(first, n, out);
  };
  return GeneratedText::Make(std::move(text));
}

Status HfParts::RenderIndex(std::uint32_t first, std::uint32_t count, std::string& out) const {
  const std::uint32_t tensors = shown_.tensors.count();
  const std::uint32_t lists = left_out_ > 0 ? tensors : 0;  // Items of the list before the map.
  const std::uint32_t end = first + count;
  if (first < lists) {
    const std::uint32_t last = std::min(end, lists);
    TENSORMOUNT_RETURN_IF_ERROR(shown_.tensors.ForEachEntry(
        first, last, [&](std::uint32_t number, const TensorEntry& entry) {
          const std::string name = TensorName(entry.meta.key());
          if (name.empty() || SafetensorsHolds(entry.meta.dtype(), name)) return Status();
          out += number == first_left_out_ ? "\n      " : ",\n      ";
          out += JsonString(name);
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
  std::size_t part = static_cast<std::size_t>(
      std::upper_bound(parts_.begin(), parts_.end(), first,
                       [](std::uint32_t n, const Part& p) { return n < p.end; }) -
      parts_.begin());
  return shown_.tensors.ForEachEntry(
      first, end - lists, [&](std::uint32_t number, const TensorEntry& entry) {
        while (number >= parts_[part].end) ++part;
        const std::string name = TensorName(entry.meta.key());
        if (name.empty() || !SafetensorsHolds(entry.meta.dtype(), name)) {
          return Status();
        }
        out += number == first_held_ ? "\n    " : ",\n    ";
        out += fmt::format("{}: \"{}\"", JsonString(name), NameOf(part));
        return Status();
      });
}

}  // namespace tensormount::fs
