// SPDX-License-Identifier: Apache-2.0
// The text of checkpoint.json, common.json and extents/KEY.json.
// checkpoint.json describes a whole checkpoint to programs without our library. Its head (fields of
// the checkpoint, files, objects) is made once; entries of tensors are rendered block by block
// while the file is read. The bytes contain no path of the mount, no mount time and no order of a
// hash table, so they are the same on every machine (with foreign files: if their root is).
#include "fs/views/checkpoint_text.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "index/records/safetensors_order.h"

namespace tensormount::fs {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Names of files and messages may be invalid UTF-8, which JSON cannot represent: it becomes U+FFFD.
std::string JsonText(const OrderedJson& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// The entry of a tensor, as one line, so that grep and diff work on the file. The line ends with a
// brace, which ExtentsJson removes to add fields.
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
  line += fmt::format(R"("bytes": {})", object.length);
  if (object.has_hash()) line += fmt::format(R"(, "hash": "xxh3-128:{}")", object.hash.ToHex());
  return line + "}";
}

// Appends an item of a list; items after the first begin with the separating comma.
void AppendItem(std::string& out, bool first, std::string_view item) {
  out += first ? "\n    " : ",\n    ";
  out += item;
}

// The members that describe a region: its box, and for a flat range of that box also the first
// element and the number of elements.
std::string RegionFields(const Region& region) {
  std::string text = fmt::format(R"("begin": {}, "extent": {})", DimsText(region.box().begin()),
                                 DimsText(region.box().extent()));
  if (region.is_flat()) {
    text += fmt::format(R"(, "flat": [{}, {}])", region.flat_first(), region.volume());
  }
  return text;
}

// Appends the keys of the tensors that model.safetensors leaves out to a JSON list.
Status AppendNotInSafetensors(const ShownTensors& tensors, std::string& out) {
  return tensors.ForEachEntry(0, tensors.count(), [&](std::uint32_t, const TensorEntry& entry) {
    if (!CanStoreInSafetensors(entry.meta)) {
      out += (out.back() == '[' ? "" : ", ") + JsonString(entry.meta.key());
    }
    return Status();
  });
}

}  // namespace

std::string JsonString(std::string_view text) { return JsonText(OrderedJson(text)); }

std::string DimsText(const Dims& dims) { return dims.ToString(); }

std::string DigestText(Crc64 digest) { return fmt::format("crc64-nvme:{:016x}", digest); }

Result<std::shared_ptr<const GeneratedText>> CheckpointJson(const ShownCheckpoint& shown,
                                                            const std::vector<std::string>& views) {
  const OpenedCheckpoint& opened = shown.opened;
  const ShownTensors& tensors = shown.tensors;
  const LayerFiles& layers = shown.layers;
  const std::vector<ObjectRecord>& objects = shown.objects.parts();
  const CheckpointIndex& index = opened.index();
  const CheckpointInfo& info = index.info();
  // The user's description of the checkpoint (content metadata) is optional: kNotFound means that
  // there is none, and any other failure is returned.
  const Result<CommonValue> metadata = index.CommonRecord(kContentMetadataRecord);
  if (!metadata.ok() && metadata.status().code() != Code::kNotFound) return metadata.status();
  std::string head = "{\n";
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
  if (metadata.ok()) head += fmt::format("  \"content\": {},\n", CommonToJson(metadata.value()));
  if (opened.commit() != nullptr) {
    head += fmt::format("  \"content_root\": \"xxh3-128:{}\",\n",
                        opened.commit()->record.content_root.ToHex());
  }
  head += fmt::format("  \"tensor_count\": {},\n  \"tensor_bytes\": {},\n  \"chunk_count\": {},\n",
                      tensors.count(), opened.index().tensor_bytes(), opened.index().chunk_count());
  head += "  \"views\": [";
  for (const std::string& view : views) {
    head += (head.back() == '[' ? "" : ", ") + JsonString(view);
  }
  head += "],\n  \"not_in_safetensors\": [";
  TENSORMOUNT_RETURN_IF_ERROR(AppendNotInSafetensors(tensors, head));
  head += "],\n";
  if (!layers.stacks().empty()) {
    head += "  \"layers\": {";
    for (const LayerFiles::Stack& stack : layers.stacks()) {
      head += fmt::format("{}{}: {}", head.back() == '{' ? "" : ", ", JsonString(stack.key),
                          JsonString(stack.pattern));
    }
    head += "},\n";
  }
  head += "  \"files\": [";
  // Data files are few (one for each rank, or for each large tensor), so all are listed in the
  // head.
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
  // The reference to `tensors` stays valid, because `shown` outlives the text.
  const auto render = [&tensors](std::uint32_t first, std::uint32_t count, std::string& out) {
    return tensors.ForEachEntry(first, first + count,
                                [&](std::uint32_t number, const TensorEntry& entry) {
                                  AppendItem(out, number == 0, TensorLine(entry));
                                  return Status();
                                });
  };
  return GeneratedText::Make(std::move(head), tensors.count(), render, "\n  ]\n}\n");
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
  // Names with '$' are reserved, so they cannot collide with values of the user.
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

Result<std::shared_ptr<const GeneratedText>> ExtentsJson(const OpenedCheckpoint& opened,
                                                         const TensorEntry& tensor) {
  // In a foreign checkpoint this may read data files, to locate pending chunks.
  const Result<std::shared_ptr<const ExtentTable>> found = opened.Extents(tensor);
  std::string head = TensorLine(tensor);
  head.pop_back();  // Removes the brace, because fields follow.
  // An error is shown in the file, because one unreadable tensor must not make the listing of the
  // directory fail.
  const auto failed = [&head](const Status& why) {
    return GeneratedText::Make(
        head + fmt::format(", \"error\": {}}}\n", JsonString(why.ToString())), 0, {}, "");
  };
  if (!found.ok()) return failed(found.status());
  // A tensor that a name map puts together has no chunks of its own.
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string whole, opened.StoredKeyOf(tensor.ordinal));
  if (whole.empty()) {
    constexpr std::size_t kMostKeys = 1000;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> keys,
                                 opened.StoredKeysOf(tensor.ordinal, kMostKeys));
    std::string text;
    for (const std::string& key : keys) text += (text.empty() ? "" : ", ") + JsonString(key);
    return GeneratedText::Make(head + fmt::format(", \"put_together_from\": [{}]}}\n", text), 0, {},
                               "");
  }
  const std::shared_ptr<const ExtentTable> table = found.value();
  if (table->size() > UINT32_MAX) {
    return failed(Status(Code::kUnsupported, "tensor " + tensor.meta.key() + ": too many chunks"));
  }
  const auto render = [&opened, table](std::uint32_t first, std::uint32_t count, std::string& out) {
    for (std::uint32_t i = first; i < first + count; ++i) {
      // Chunks are decoded one by one, because a tensor may have millions of them.
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, table->At(i));
      const std::vector<FileRecord>& files = opened.index().files();
      if (chunk.file >= files.size()) {
        return Status(Code::kDataLoss,
                      "index: a chunk refers to a file that is not in the file table");
      }
      // Names of foreign files are relative to a root that this text does not contain.
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
  // Make renders every row, so it fails if a row is damaged.
  auto text = GeneratedText::Make(head + ", \"extents\": [",
                                  static_cast<std::uint32_t>(table->size()), render, "\n  ]}\n");
  if (text.ok()) return text;
  return failed(text.status().WithContext("tensor " + tensor.meta.key()));
}

}  // namespace tensormount::fs
