// SPDX-License-Identifier: Apache-2.0
// The layout of layout_model.cc as JSON (layout.h).
#include <nlohmann/json.hpp>

#include "fs/pictures/layout.h"

namespace tensormount::fs {
namespace {

std::vector<std::int64_t> List(const Dims& dims) { return {dims.begin(), dims.end()}; }

}  // namespace

nlohmann::ordered_json ChunkMapJson(const ChunkMap& layout) {
  // Names of the enumerators of ChunkMapHolder::Kind, in their order.
  static constexpr const char* kKinds[] = {"rank", "part", "mount", "file"};
  nlohmann::ordered_json json = {{"key", layout.key},
                                 {"dtype", layout.dtype},
                                 {"shape", List(layout.shape)},
                                 {"bytes", layout.bytes},
                                 {"checkpoint", layout.source},
                                 {"files", layout.files},
                                 {"elements", layout.elements},
                                 {"elements_in_chunks", layout.covered},
                                 {"holders", nlohmann::ordered_json::array()},
                                 {"chunks", nlohmann::ordered_json::array()}};
  if (!layout.layer_note.empty()) json["layer"] = layout.layer_note;
  for (const ChunkMapHolder& holder : layout.holders) {
    nlohmann::ordered_json item = {{"kind", kKinds[static_cast<std::size_t>(holder.kind)]},
                                   {"name", holder.name},
                                   {"chunks", holder.chunks},
                                   {"bytes", holder.bytes}};
    const bool numbered =
        holder.kind == ChunkMapHolder::Kind::kRank || holder.kind == ChunkMapHolder::Kind::kPart;
    if (numbered) item["number"] = holder.number;
    json["holders"].push_back(std::move(item));
  }
  for (const ChunkMapEntry& chunk : layout.chunks) {
    nlohmann::ordered_json item = {{"region", chunk.region}};
    for (const Box& box : chunk.boxes) {
      item["boxes"].push_back({{"begin", List(box.begin())}, {"extent", List(box.extent())}});
    }
    item["holder"] = chunk.holder;
    item["file"] = chunk.file;
    item["offset"] = chunk.offset;
    item["length"] = chunk.length;
    item["strided"] = chunk.strides.rank() > 0;
    if (chunk.strides.rank() > 0) item["strides"] = List(chunk.strides);
    if (!chunk.hash.empty()) item["hash"] = chunk.hash;
    json["chunks"].push_back(std::move(item));
  }
  return json;
}

}  // namespace tensormount::fs
