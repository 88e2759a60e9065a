// SPDX-License-Identifier: Apache-2.0
// checkpoint.json: made piece by piece while it is read, because it has an entry for each tensor.
#include "fs/views/checkpoint_text.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "index/records/safetensors_order.h"

namespace tensormount::fs {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string JsonText(const OrderedJson& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string TensorLine(const TensorEntry& tensor) {
  const TensorMeta& meta = tensor.meta;
  std::string line =
      fmt::format(R"({{"key": {}, "dtype": "{}", "shape": {}, "bytes": {}, "chunks": {})",
                  JsonString(meta.key()), InfoOf(meta.dtype()).name, DimsText(meta.shape()),
                  meta.bytes(), tensor.chunks);
  if (tensor.has_digest) line += fmt::format(R"(, "digest": "{}")", DigestText(tensor.digest));
  return line + "}";
}

std::string ObjectLine(const ObjectRecord& object) {
  std::string line = fmt::format(R"({{"key": {}, )", JsonString(object.key));
  if (object.grid.rank() > 0) {
    line +=
        fmt::format(R"("index": {}, "grid": {}, )", DimsText(object.index), DimsText(object.grid));
  }
  return line +
         fmt::format(R"("bytes": {}, "hash": "xxh3-128:{}"}})", object.length, object.hash.ToHex());
}

// Items after the first begin with the comma that separates them.
void AppendItem(std::string& out, bool first, std::string_view item) {
  out += first ? "\n    " : ",\n    ";
  out += item;
}

std::string RegionFields(const Region& region) {
  std::string text = fmt::format(R"("begin": {}, "extent": {})", DimsText(region.box().begin()),
                                 DimsText(region.box().extent()));
  if (region.is_flat()) {
    text += fmt::format(R"(, "flat": [{}, {}])", region.flat_first(), region.volume());
  }
  return text;
}

// Keys of the tensors that model.safetensors leaves out.
Status AppendNotInSafetensors(const ShownTensors& tensors, std::string& out) {
  return tensors.ForEachEntry(0, tensors.count(), [&](std::uint32_t, const TensorEntry& entry) {
    if (!SafetensorsHolds(entry.meta)) {
      out += (out.back() == '[' ? "" : ", ") + JsonString(entry.meta.key());
    }
    return Status();
  });
}

}  // namespace

std::string JsonString(std::string_view text) { return JsonText(OrderedJson(text)); }

std::string DimsText(const Dims& dims) { return dims.ToString(); }

std::string DigestText(Crc64 digest) { return fmt::format("crc64-nvme:{:016x}", digest); }

Result<GeneratedText::Parts> CheckpointJson(const ShownCheckpoint& shown,
                                            const std::vector<std::string>& views) {
  const OpenedCheckpoint& opened = shown.opened;
  const ShownTensors& tensors = shown.tensors;
  const LayerFiles& layers = shown.layers;
  const std::vector<ObjectRecord>& objects = shown.objects.parts();
  const CheckpointIndex& index = opened.index();
  const CheckpointInfo& info = index.info();
  const Result<CommonValue> content = index.CommonRecord(kContentMetadataRecord);
  if (!content.ok() && content.status().code() != Code::kNotFound) return content.status();
  GeneratedText::Parts parts;
  std::string& head = parts.head;
  head = "{\n";
  head += fmt::format("  \"format\": \"tensormount\",\n  \"version\": {},\n", kFormatVersion);
  head += fmt::format("  \"uuid\": \"{}\",\n  \"generation\": {},\n", info.uuid.ToString(),
                      info.generation);
  if (info.parent.IsZero()) {
    head += "  \"parent\": null,\n";
  } else {
    head += fmt::format("  \"parent\": {{\"uuid\": \"{}\", \"name\": {}}},\n",
                        info.parent.ToString(), JsonString(info.parent_name));
  }
  head += fmt::format("  \"producer\": {},\n  \"world_size\": {},\n  \"created\": {},\n",
                      JsonString(info.producer), info.world_size, info.created);
  head += fmt::format("  \"self_contained\": {},\n", info.self_contained);
  if (!info.self_contained) head += fmt::format("  \"root\": {},\n", JsonString(info.root));
  if (content.ok()) head += fmt::format("  \"content\": {},\n", CommonToJson(content.value()));
  if (opened.commit() != nullptr) {
    head += fmt::format("  \"content_root\": \"xxh3-128:{}\",\n",
                        opened.commit()->record.content_root.ToHex());
  }
  head += fmt::format("  \"tensor_count\": {},\n  \"tensor_bytes\": {},\n  \"chunk_count\": {},\n",
                      tensors.count(), tensors.bytes(), tensors.chunks());
  head += "  \"views\": [";
  for (const std::string& view : views) {
    head += (head.back() == '[' ? "" : ", ") + JsonString(view);
  }
  head += "],\n  \"not_in_safetensors\": [";
  TENSORMOUNT_RETURN_IF_ERROR(AppendNotInSafetensors(tensors, head));
  head += "],\n";
  if (!layers.patterns().empty()) {
    head += "  \"layers\": {";
    for (const auto& [key, pattern] : layers.patterns()) {
      head += fmt::format("{}{}: {}", head.back() == '{' ? "" : ", ", JsonString(key),
                          JsonString(pattern));
    }
    head += "},\n";
  }
  head += "  \"files\": [";
  for (std::size_t i = 0; i < index.files().size(); ++i) {
    const FileRecord& file = index.files()[i];
    AppendItem(head, i == 0,
               fmt::format(R"({{"name": {}, "placement": "{}", "bytes": {}}})",
                           JsonString(file.name), PlacementName(file.placement), file.length));
  }
  head += "\n  ],\n  \"objects\": [";
  for (std::size_t i = 0; i < objects.size(); ++i) {
    AppendItem(head, i == 0, ObjectLine(objects[i]));
  }
  head += "\n  ],\n  \"tensors\": [";
  parts.tail = "\n  ]\n}\n";
  parts.items = tensors.count();
  parts.render = [&tensors](std::uint32_t first, std::uint32_t count, std::string& out) {
    return tensors.ForEachEntry(first, first + count,
                                [&](std::uint32_t number, const TensorEntry& entry) {
                                  AppendItem(out, number == 0, TensorLine(entry));
                                  return Status();
                                });
  };
  return parts;
}

Result<std::string> CommonJson(const CheckpointIndex& index) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState common, index.Common());
  std::string text = "{";
  bool first = true;
  const auto line = [&](std::string_view key, std::string_view value) {
    text += first ? "\n  " : ",\n  ";
    first = false;
    text += JsonString(key) + ": ";
    text += value;
  };
  for (const auto& [key, value] : common.values) line(key, CommonToJson(value));
  if (!common.content.items.empty()) line("$content", CommonToJson(common.content));
  if (!common.ranks.empty()) {
    std::string ranks = "{";
    for (const auto& [rank, values] : common.ranks) {
      ranks += fmt::format("{}\n    \"{}\": {}", ranks.size() > 1 ? "," : "", rank,
                           CommonToJson(DictOf(values)));
    }
    line("$ranks", ranks + "\n  }");
  }
  return text + (first ? "}\n" : "\n}\n");
}

Result<GeneratedText::Parts> ExtentsJson(const OpenedCheckpoint& opened,
                                         const TensorEntry& tensor) {
  const Result<std::shared_ptr<const ExtentTable>> found = opened.Extents(tensor);
  GeneratedText::Parts parts;
  const std::string line = TensorLine(tensor);
  if (!found.ok()) {
    // One tensor whose items cannot be read must not hide the others from who lists the folder.
    parts.head = line.substr(0, line.size() - 1) +
                 fmt::format(", \"error\": {}}}\n", JsonString(found.status().ToString()));
    return parts;
  }
  const std::shared_ptr<const ExtentTable> table = found.value();
  // The tensor's own fields, then its chunks.
  parts.head = line.substr(0, line.size() - 1) + ", \"extents\": [";
  parts.tail = "\n  ]}\n";
  if (table->size() > UINT32_MAX) {
    return Status(Code::kUnsupported, "tensor " + tensor.meta.key() + ": too many chunks");
  }
  parts.items = static_cast<std::uint32_t>(table->size());
  parts.render = [&opened, table](std::uint32_t first, std::uint32_t count, std::string& out) {
    for (std::uint32_t i = first; i < first + count; ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, table->At(i));
      const std::vector<FileRecord>& files = opened.index().files();
      if (chunk.file >= files.size()) {
        return Status(Code::kDataLoss, "index: a chunk is in a file that is not in the table");
      }
      // Names of foreign files are relative to a root that this text does not give.
      const bool foreign = files[chunk.file].placement == Placement::kForeign;
      std::string item =
          fmt::format(R"({{{}, "file": {}, "offset": {}, "bytes": {})", RegionFields(chunk.region),
                      JsonString(foreign ? opened.FilePath(chunk.file) : files[chunk.file].name),
                      chunk.offset, chunk.length);
      if (chunk.strides.rank() > 0) {
        item += fmt::format(R"(, "strides": {})", chunk.strides.ToString());
      }
      if (chunk.has_hash) item += fmt::format(R"(, "hash": "xxh3-128:{}")", chunk.hash.ToHex());
      AppendItem(out, i == 0, item + "}");
    }
    return Status();
  };
  return parts;
}

}  // namespace tensormount::fs
