// SPDX-License-Identifier: Apache-2.0
// DumpSpec of tensormount/validate.h: describes a running job, gathered from its ranks, in the form
// that `check` reads.
#include <atomic>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tensormount/validate.h"

#include "base/coding.h"
#include "collective/comm/collective.h"
#include "collective/guarded.h"
#include "collective/layout/layout_gather.h"
#include "collective/layout/spec.h"
#include "collective/layout/wire.h"

namespace tensormount {
namespace {

// JSON whose fields keep the order in which they are added.
using OrderedJson = nlohmann::ordered_json;

constexpr std::size_t kMaxSpecText = 2 * kMaxKeyBytes;  // Maximum length of a key or pattern.

OrderedJson Numbers(const Dims& dims) {
  OrderedJson list = OrderedJson::array();
  for (const std::int64_t v : dims) list.push_back(v);
  return list;
}

OrderedJson ShardJson(const TensorMeta& meta, const DecodedLayout::ShardItem& shard) {
  OrderedJson json = {{"key", meta.key()},
                      {"dtype", InfoOf(meta.dtype()).name},
                      {"shape", Numbers(meta.shape())},
                      {"begin", Numbers(shard.region.box().begin())},
                      {"extent", Numbers(shard.region.box().extent())}};
  if (shard.region.is_flat()) {
    json["flat"] = {shard.region.flat_first(), shard.region.volume()};
  }
  if (shard.replica == Replica::kMain) json["replica"] = "main";
  if (shard.replica == Replica::kCopy) json["replica"] = "copy";
  return json;
}

OrderedJson ObjectJson(const DecodedLayout::ObjectItem& object) {
  OrderedJson json = {{"key", object.key}};
  if (object.grid.rank() > 0) {
    json["index"] = Numbers(object.index);
    json["grid"] = Numbers(object.grid);
  }
  // A text that is equal for equal bytes.
  json["contents"] = std::to_string(object.length) + ":" + object.hash.ToHex();
  return json;
}

std::string Line(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

Result<std::string> SpecOf(int world, const std::vector<GatheredLayout>& layouts,
                           const std::map<std::string, std::string>& layers) {
  std::string text = "{\"world\": " + std::to_string(world) + ",\n \"layouts\": [";
  bool first_layout = true;
  for (const GatheredLayout& layout : layouts) {
    if (layout.encoded.empty()) continue;  // No shards or objects.
    TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedLayout decoded,
                                 DecodeLayout(layout.encoded, "layout"));
    text += first_layout ? "\n" : ",\n";
    first_layout = false;
    text += "  {\"ranks\": \"" + SpecRanksText(layout.ranks) + "\",\n   \"shards\": [";
    bool first = true;
    for (const DecodedLayout::ShardItem& shard : decoded.shards) {
      text += first ? "\n    " : ",\n    ";
      first = false;
      text += Line(ShardJson(decoded.tensors[shard.tensor], shard));
    }
    text += "],\n   \"objects\": [";
    first = true;
    for (const DecodedLayout::ObjectItem& object : decoded.objects) {
      text += first ? "\n    " : ",\n    ";
      first = false;
      text += Line(ObjectJson(object));
    }
    text += "]}";
  }
  text += "]";
  if (!layers.empty()) text += ",\n \"layers\": " + Line(OrderedJson(layers));
  return text + "}\n";
}

}  // namespace

Result<std::string> DumpSpec(const StateDict& state, Communicator& comm, const Timeouts& timeouts) {
  return DumpSpec(state, comm, timeouts, nullptr);
}

Result<std::string> DumpSpec(const StateDict& state, Communicator& comm, const Timeouts& timeouts,
                             const std::atomic<bool>* cancel) {
  Collective collective(comm, timeouts, cancel);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<GatheredLayout> layouts,
                               GatherLayouts(collective, state));
  ByteWriter mine;
  mine.U32(static_cast<std::uint32_t>(state.layer_names().size()));
  for (const auto& [key, pattern] : state.layer_names()) {
    mine.String(key);
    mine.String(pattern);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                               collective.Gather(mine.bytes(), "gather names of layers"));
  std::string text;
  const Status made = Guarded([&]() -> Status {
    if (collective.rank() != 0) return {};
    std::map<std::string, std::string> layers;
    for (const std::string& bytes : names) {
      ByteReader in(bytes, "names of layers that a rank sent");
      const std::uint32_t count = in.U32();
      for (std::uint32_t i = 0; i < count && in.status().ok(); ++i) {
        std::string key(in.String(kMaxSpecText));
        layers.emplace(std::move(key), std::string(in.String(kMaxSpecText)));
      }
      TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(text, SpecOf(collective.size(), layouts, layers));
    return {};
  });
  TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(made, "write the spec"));
  return text;
}

}  // namespace tensormount
