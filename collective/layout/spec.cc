// SPDX-License-Identifier: Apache-2.0
// Parses a job described in JSON (docs/spec.md): meshes, patterns of keys, which tensor axis is cut
// over which mesh axis. Unknown fields other than "comment" are errors, and an error in a list
// names the entry ("tensors[3]").
#include "collective/layout/spec.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

namespace tensormount {
namespace {

using Json = nlohmann::json;

Status InvalidSpec(std::string why) { return Status(Code::kInvalidArgument, std::move(why)); }

// One combination of values for the names of "repeat".
using Variables = std::map<std::string, std::int64_t>;

std::optional<std::int64_t> Number(std::string_view text) {
  std::int64_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size() || v < 0) return std::nullopt;
  return v;
}

Status CheckFields(const Json& json, std::initializer_list<std::string_view> known) {
  if (!json.is_object()) return InvalidSpec("must be a JSON object");
  for (const auto& [name, value] : json.items()) {
    if (name != "comment" && std::find(known.begin(), known.end(), name) == known.end()) {
      return InvalidSpec("unknown field \"" + name + "\"");
    }
  }
  return {};
}

Result<std::string> TextOf(const Json& json, const char* field) {
  if (!json.contains(field) || !json[field].is_string()) {
    return InvalidSpec("\"" + std::string(field) + "\" must be a string");
  }
  return json[field].get<std::string>();
}

Result<std::int64_t> IntOf(const Json& json, std::string_view what) {
  if (!json.is_number_integer() ||
      (json.is_number_unsigned() &&
       json.get<std::uint64_t>() >
           static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) ||
      json.get<std::int64_t>() < 0) {
    return InvalidSpec(std::string(what) + ": must be a non-negative integer");
  }
  return json.get<std::int64_t>();
}

Result<Dims> DimsOf(const Json& json, const char* field) {
  if (!json.contains(field) || !json[field].is_array() || json[field].size() > kMaxRank) {
    return InvalidSpec("\"" + std::string(field) + "\" must be a list of at most 16 numbers");
  }
  Dims dims;
  for (const Json& item : json[field]) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t v, IntOf(item, field));
    dims.push_back(v);
  }
  return dims;
}

// Replaces the variables in a text: "layers.{i}.w" becomes "layers.3.w".
std::string Substitute(std::string text, const Variables& variables) {
  for (const auto& [name, value] : variables) {
    const std::string slot = "{" + name + "}";
    for (std::size_t at = text.find(slot); at != std::string::npos; at = text.find(slot, at)) {
      text.replace(at, slot.size(), std::to_string(value));
    }
  }
  return text;
}

// Computes an expression with one variable: "{i}", "{i}/2" or "{i}%4".
Result<std::int64_t> Evaluate(const std::string& text, const Variables& variables) {
  const Status bad = InvalidSpec("\"" + text +
                                 "\": must be {NAME}, {NAME}/N or {NAME}%N with a name of "
                                 "\"repeat\"");
  const std::size_t close = text.find('}');
  if (!text.starts_with('{') || close == std::string::npos) return bad;
  const auto it = variables.find(text.substr(1, close - 1));
  if (it == variables.end()) return bad;
  if (close + 1 == text.size()) return it->second;
  const auto n = Number(std::string_view(text).substr(close + 2));
  if (!n || *n == 0) return bad;
  if (text[close + 1] == '/') return it->second / *n;
  if (text[close + 1] == '%') return it->second % *n;
  return bad;
}

// Builds a JobSpec from JSON. Equal rules and sets of ranks are stored once.
class Parser {
 public:
  Result<JobSpec> Run(const Json& json);

 private:
  Status Ranks(const Json& json);
  Status Tensors(const Json& list);
  Status OneTensor(const Json& json, const Variables& variables);
  Status Split(const Json& json, const Variables& variables, JobSpec::Tensor& tensor);
  Status Objects(const Json& list);
  Status OneObject(const Json& json);
  Status Layouts(const Json& list);
  Status Layers(const Json& json);
  Result<TensorMeta> Meta(const Json& json, const Variables& variables);
  Result<Region> RegionOf(const Json& json, const Dims& shape);
  Result<Replica> ReplicaOf(const Json& json);
  Result<std::uint32_t> RankSet(const Json& json);
  Result<std::uint32_t> Rule(const std::string& text);
  Result<int> MeshAxis(const Json& name);
  Result<std::vector<int>> MeshAxes(const Json& names);
  Status NewKey(const std::string& key);

  JobSpec spec_;
  std::map<SpecRanks, std::uint32_t> set_of_;
  std::unordered_map<std::string, std::uint32_t> set_of_text_;
  std::unordered_map<std::string, std::uint32_t> rule_of_;
  std::unordered_set<std::string> keys_;
};

Status Parser::Ranks(const Json& json) {
  if (json.contains("world") == json.contains("mesh")) {
    return InvalidSpec("give either \"world\" or \"mesh\"");
  }
  if (json.contains("world")) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t world, IntOf(json["world"], "world"));
    if (world < 1 || world > JobSpec::kMaxWorld)
      return InvalidSpec("world: must be 1 to 16777216 ranks");
    spec_.world = static_cast<int>(world);
    return {};
  }
  if (!json["mesh"].is_array()) return InvalidSpec("mesh: must be a list of [name, size]");
  std::int64_t world = 1;
  for (const Json& axis : json["mesh"]) {
    if (!axis.is_array() || axis.size() != 2 || !axis[0].is_string()) {
      return InvalidSpec("mesh: must be a list of [name, size]");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t size, IntOf(axis[1], "mesh"));
    if (size < 1 || size > JobSpec::kMaxWorld || world * size > JobSpec::kMaxWorld) {
      return InvalidSpec("mesh: must have 1 to 16777216 ranks");
    }
    world *= size;
    for (const JobSpec::MeshAxis& other : spec_.mesh) {
      if (other.name == axis[0])
        return InvalidSpec("mesh: axis \"" + other.name + "\" is listed twice");
    }
    spec_.mesh.push_back({.name = axis[0].get<std::string>(), .size = static_cast<int>(size)});
  }
  int stride = 1;
  for (std::size_t i = spec_.mesh.size(); i-- > 0; stride *= spec_.mesh[i].size) {
    spec_.mesh[i].stride = stride;
  }
  spec_.world = static_cast<int>(world);
  return {};
}

Result<std::uint32_t> Parser::RankSet(const Json& json) {
  SpecRanks ranks;
  const auto add = [&](std::int64_t rank) -> Status {
    if (rank >= spec_.world) {
      return InvalidSpec("rank " + std::to_string(rank) + ": there are only " +
                         std::to_string(spec_.world) + " ranks");
    }
    ranks.push_back(static_cast<int>(rank));
    return {};
  };
  const std::string text = json.is_string() ? json.get<std::string>() : std::string();
  if (json.is_string()) {
    // Many entries have the same text, so each text is parsed once.
    const auto known = set_of_text_.find(text);
    if (known != set_of_text_.end()) return known->second;
    std::string_view rest = text == "all" ? std::string_view() : std::string_view(text);
    if (text == "all") {
      for (int r = 0; r < spec_.world; ++r) ranks.push_back(r);
    } else if (rest.empty()) {
      return InvalidSpec("ranks: the string is empty");
    }
    while (!rest.empty()) {
      const std::size_t comma = rest.find(',');
      std::string_view part = rest.substr(0, comma);
      rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
      const std::size_t slash = part.find('/');
      const auto step = slash == std::string_view::npos ? std::optional<std::int64_t>(1)
                                                        : Number(part.substr(slash + 1));
      part = part.substr(0, slash);
      const std::size_t dash = part.find('-');
      const auto first = Number(part.substr(0, dash));
      const auto last = dash == std::string_view::npos ? first : Number(part.substr(dash + 1));
      if (!first || !last || !step || *step < 1 || *last < *first) {
        return InvalidSpec("ranks \"" + text + "\": must be like 0-7,16,32-60/4");
      }
      if (*last >= spec_.world) TENSORMOUNT_RETURN_IF_ERROR(add(*last));
      for (std::int64_t r = *first; r <= *last; r += std::min<std::int64_t>(*step, spec_.world)) {
        TENSORMOUNT_RETURN_IF_ERROR(add(r));
      }
    }
  } else if (json.is_array()) {
    for (const Json& item : json) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t rank, IntOf(item, "ranks"));
      TENSORMOUNT_RETURN_IF_ERROR(add(rank));
    }
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t rank, IntOf(json, "ranks"));
    TENSORMOUNT_RETURN_IF_ERROR(add(rank));
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  const auto [it, fresh] =
      set_of_.emplace(std::move(ranks), static_cast<std::uint32_t>(spec_.rank_sets.size()));
  if (fresh) spec_.rank_sets.push_back(it->first);
  if (json.is_string()) set_of_text_.emplace(text, it->second);
  return it->second;
}

Result<std::uint32_t> Parser::Rule(const std::string& text) {
  const auto known = rule_of_.find(text);
  if (known != rule_of_.end()) return known->second;
  TENSORMOUNT_ASSIGN_OR_RETURN(ShardRule rule, ShardRule::Parse(text, spec_.world));
  const auto number = static_cast<std::uint32_t>(spec_.rules.size());
  spec_.rules.push_back(std::move(rule));
  spec_.whole.push_back(text == "replicate");
  rule_of_.emplace(text, number);
  return number;
}

Result<int> Parser::MeshAxis(const Json& name) {
  for (std::size_t i = 0; i < spec_.mesh.size(); ++i) {
    if (name.is_string() && spec_.mesh[i].name == name) return static_cast<int>(i);
  }
  return InvalidSpec(name.dump(-1, ' ', false, Json::error_handler_t::replace) +
                     " is not an axis of the mesh");
}

Result<std::vector<int>> Parser::MeshAxes(const Json& names) {
  std::vector<int> axes;
  const Json list = names.is_array() ? names : Json::array({names});
  for (const Json& name : list) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const int axis, MeshAxis(name));
    if (std::find(axes.begin(), axes.end(), axis) != axes.end()) {
      return InvalidSpec("mesh axis \"" + spec_.mesh[static_cast<std::size_t>(axis)].name +
                         "\" is listed twice");
    }
    axes.push_back(axis);
  }
  if (axes.empty()) return InvalidSpec("give at least one axis of the mesh");
  return axes;
}

Status Parser::NewKey(const std::string& key) {
  if (!keys_.insert(key).second) return InvalidSpec("key " + key + " is used twice");
  return {};
}

Result<TensorMeta> Parser::Meta(const Json& json, const Variables& variables) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, TextOf(json, "key"));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string name, TextOf(json, "dtype"));
  const Result<DType> dtype = DTypeFromName(name);
  if (!dtype.ok()) return InvalidSpec(dtype.status().message());
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims shape, DimsOf(json, "shape"));
  return TensorMeta::Make(Substitute(key, variables), dtype.value(), shape);
}

Result<Region> Parser::RegionOf(const Json& json, const Dims& shape) {
  Box box = Box::Whole(shape);
  if (json.contains("begin") != json.contains("extent")) {
    return InvalidSpec("give both \"begin\" and \"extent\", or neither");
  }
  if (json.contains("begin")) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims begin, DimsOf(json, "begin"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extent, DimsOf(json, "extent"));
    TENSORMOUNT_ASSIGN_OR_RETURN(box, Box::Make(begin, extent));
  }
  if (!json.contains("flat")) return Region(box);
  const Json& flat = json["flat"];
  if (!flat.is_array() || flat.size() != 2) return InvalidSpec("\"flat\" must be [first, count]");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t first, IntOf(flat[0], "flat"));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t count, IntOf(flat[1], "flat"));
  return Region::Flat(box, first, count);
}

Result<Replica> Parser::ReplicaOf(const Json& json) {
  if (!json.contains("replica")) return Replica::kUnlabelled;
  if (json["replica"] == "main") return Replica::kMain;
  if (json["replica"] == "copy") return Replica::kCopy;
  return InvalidSpec("\"replica\" must be main or copy");
}

Status Parser::Split(const Json& json, const Variables& variables, JobSpec::Tensor& tensor) {
  if (!json["split"].is_object()) return InvalidSpec("\"split\" must be an object");
  std::set<int> used;
  const auto use = [&](const std::vector<int>& axes) -> Status {
    for (const int axis : axes) {
      if (!used.insert(axis).second) {
        return InvalidSpec("mesh axis \"" + spec_.mesh[static_cast<std::size_t>(axis)].name +
                           "\" splits the tensor twice");
      }
    }
    return {};
  };
  for (const auto& [name, over] : json["split"].items()) {
    const auto axis = Number(name);
    if (!axis || *axis >= tensor.meta.shape().rank()) {
      return InvalidSpec("split: \"" + name + "\" is not an axis of a tensor of shape " +
                         tensor.meta.shape().ToString());
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<int> axes, MeshAxes(over));
    TENSORMOUNT_RETURN_IF_ERROR(use(axes));
    tensor.cuts.push_back({.axis = static_cast<int>(*axis), .over = std::move(axes)});
  }
  if (json.contains("flat")) {
    TENSORMOUNT_ASSIGN_OR_RETURN(tensor.flat, MeshAxes(json["flat"]));
    TENSORMOUNT_RETURN_IF_ERROR(use(tensor.flat));
  }
  if (!json.contains("only")) return {};
  if (!json["only"].is_object()) return InvalidSpec("\"only\" must be an object");
  for (const auto& [name, places] : json["only"].items()) {
    JobSpec::MeshSelection only;
    TENSORMOUNT_ASSIGN_OR_RETURN(only.mesh_axis, MeshAxis(name));
    const Json list = places.is_array() ? places : Json::array({places});
    for (const Json& place : list) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const std::int64_t at,
          place.is_string() ? Evaluate(place.get<std::string>(), variables) : IntOf(place, "only"));
      const int size = spec_.mesh[static_cast<std::size_t>(only.mesh_axis)].size;
      if (at >= size) {
        return InvalidSpec("only: place " + std::to_string(at) + " is not on mesh axis " + name +
                           ", which has places 0 to " + std::to_string(size - 1));
      }
      only.places.push_back(static_cast<int>(at));
    }
    std::sort(only.places.begin(), only.places.end());
    tensor.only.push_back(std::move(only));
  }
  return {};
}

Status Parser::OneTensor(const Json& json, const Variables& variables) {
  if (spec_.tensors.size() >= JobSpec::kMaxTensors)
    return InvalidSpec("more than 16777216 tensors");
  TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, Meta(json, variables));
  TENSORMOUNT_RETURN_IF_ERROR(NewKey(meta.key()));
  JobSpec::Tensor tensor{.meta = std::move(meta)};
  if (json.contains("split")) {
    tensor.kind = JobSpec::Tensor::Kind::kSplit;
    TENSORMOUNT_RETURN_IF_ERROR(Split(json, variables, tensor));
  } else if (json.contains("shard")) {
    tensor.kind = JobSpec::Tensor::Kind::kRule;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, TextOf(json, "shard"));
    TENSORMOUNT_ASSIGN_OR_RETURN(tensor.rule, Rule(text));
  } else {
    if (!json["shards"].is_array()) return InvalidSpec("\"shards\" must be a list");
    for (const Json& item : json["shards"]) {
      TENSORMOUNT_RETURN_IF_ERROR(
          CheckFields(item, {"ranks", "begin", "extent", "flat", "replica"}));
      if (!item.contains("ranks")) return InvalidSpec("a shard has no \"ranks\"");
      JobSpec::Shard shard;
      TENSORMOUNT_ASSIGN_OR_RETURN(shard.ranks, RankSet(item["ranks"]));
      TENSORMOUNT_ASSIGN_OR_RETURN(shard.region, RegionOf(item, tensor.meta.shape()));
      TENSORMOUNT_ASSIGN_OR_RETURN(shard.replica, ReplicaOf(item));
      tensor.shards.push_back(std::move(shard));
    }
  }
  spec_.tensors.push_back(std::move(tensor));
  return {};
}

Status Parser::Tensors(const Json& list) {
  if (!list.is_array()) return InvalidSpec("tensors: must be a list");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Json& json = list[i];
    const auto parse = [&]() -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(CheckFields(
          json, {"key", "dtype", "shape", "repeat", "shard", "split", "flat", "only", "shards"}));
      if (json.contains("shard") + json.contains("split") + json.contains("shards") != 1) {
        return InvalidSpec("give exactly one of \"shard\", \"split\" and \"shards\"");
      }
      if (!json.contains("split") && (json.contains("flat") || json.contains("only"))) {
        return InvalidSpec("\"flat\" and \"only\" require \"split\"");
      }
      struct Range {
        std::string name;
        std::int64_t begin = 0, end = 0;
      };
      std::vector<Range> ranges;
      Variables variables;
      if (json.contains("repeat")) {
        if (!json["repeat"].is_object()) return InvalidSpec("\"repeat\" must be an object");
        for (const auto& [name, range] : json["repeat"].items()) {
          if (!range.is_array() || range.size() != 2)
            return InvalidSpec("repeat: must be [begin, end]");
          TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t begin, IntOf(range[0], "repeat"));
          TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t end, IntOf(range[1], "repeat"));
          if (begin >= end) return {};
          ranges.push_back({name, begin, end});
          variables[name] = begin;
        }
      }
      for (;;) {  // Visits all combinations of the ranges' values.
        TENSORMOUNT_RETURN_IF_ERROR(OneTensor(json, variables));
        std::size_t r = ranges.size();
        for (; r > 0; --r) {
          const Range& range = ranges[r - 1];
          if (++variables[range.name] < range.end) break;
          variables[range.name] = range.begin;
        }
        if (r == 0) return {};
      }
    };
    const Status status = parse();
    if (!status.ok()) return status.WithContext("tensors[" + std::to_string(i) + "]");
  }
  return {};
}

Status Parser::OneObject(const Json& json) {
  TENSORMOUNT_RETURN_IF_ERROR(
      CheckFields(json, {"key", "ranks", "by_rank", "grid", "parts", "contents"}));
  JobSpec::Object object;
  TENSORMOUNT_ASSIGN_OR_RETURN(object.key, TextOf(json, "key"));
  TENSORMOUNT_RETURN_IF_ERROR(CheckKey(object.key));
  TENSORMOUNT_RETURN_IF_ERROR(NewKey(object.key));
  if (json.contains("contents")) {
    TENSORMOUNT_ASSIGN_OR_RETURN(object.contents, TextOf(json, "contents"));
  }
  if (json.contains("ranks") + json.contains("by_rank") + json.contains("parts") > 1) {
    return InvalidSpec("give at most one of \"ranks\", \"by_rank\" and \"parts\"");
  }
  if (json.contains("by_rank")) {
    if (json["by_rank"] != true) return InvalidSpec("\"by_rank\" must be true");
    object.by_rank = true;
  } else if (json.contains("parts")) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims grid, DimsOf(json, "grid"));
    if (!json["parts"].is_array()) return InvalidSpec("\"parts\" must be a list");
    for (const Json& item : json["parts"]) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckFields(item, {"index", "ranks", "contents"}));
      if (!item.contains("ranks")) return InvalidSpec("a part has no \"ranks\"");
      JobSpec::ObjectPart part{.grid = grid, .contents = object.contents};
      TENSORMOUNT_ASSIGN_OR_RETURN(part.index, DimsOf(item, "index"));
      TENSORMOUNT_ASSIGN_OR_RETURN(part.ranks, RankSet(item["ranks"]));
      if (item.contains("contents")) {
        TENSORMOUNT_ASSIGN_OR_RETURN(part.contents, TextOf(item, "contents"));
      }
      object.parts.push_back(std::move(part));
    }
  } else {
    JobSpec::ObjectPart part{.contents = object.contents};
    TENSORMOUNT_ASSIGN_OR_RETURN(part.ranks,
                                 RankSet(json.contains("ranks") ? json["ranks"] : Json("all")));
    object.parts.push_back(std::move(part));
  }
  spec_.objects.push_back(std::move(object));
  return {};
}

Status Parser::Objects(const Json& list) {
  if (!list.is_array()) return InvalidSpec("objects: must be a list");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Status status = OneObject(list[i]);
    if (!status.ok()) return status.WithContext("objects[" + std::to_string(i) + "]");
  }
  return {};
}

Status Parser::Layouts(const Json& list) {
  if (!list.is_array()) return InvalidSpec("layouts: must be a list");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Json& json = list[i];
    const auto parse = [&]() -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(CheckFields(json, {"ranks", "shards", "objects"}));
      JobSpec::Layout layout;
      if (!json.contains("ranks")) return InvalidSpec("\"ranks\" is missing");
      TENSORMOUNT_ASSIGN_OR_RETURN(layout.ranks, RankSet(json["ranks"]));
      for (const char* field : {"shards", "objects"}) {
        if (json.contains(field) && !json[field].is_array()) {
          return InvalidSpec("\"" + std::string(field) + "\" must be a list");
        }
      }
      for (const Json& item : json.value("shards", Json::array())) {
        TENSORMOUNT_RETURN_IF_ERROR(
            CheckFields(item, {"key", "dtype", "shape", "begin", "extent", "flat", "replica"}));
        TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, Meta(item, {}));
        TENSORMOUNT_ASSIGN_OR_RETURN(const Region region, RegionOf(item, meta.shape()));
        TENSORMOUNT_ASSIGN_OR_RETURN(const Replica replica, ReplicaOf(item));
        layout.items.push_back({std::move(meta), region, replica});
      }
      for (const Json& item : json.value("objects", Json::array())) {
        TENSORMOUNT_RETURN_IF_ERROR(CheckFields(item, {"key", "index", "grid", "contents"}));
        JobSpec::ObjectPart part;
        TENSORMOUNT_ASSIGN_OR_RETURN(std::string key, TextOf(item, "key"));
        if (item.contains("grid")) {
          TENSORMOUNT_ASSIGN_OR_RETURN(part.index, DimsOf(item, "index"));
          TENSORMOUNT_ASSIGN_OR_RETURN(part.grid, DimsOf(item, "grid"));
        }
        if (item.contains("contents")) {
          TENSORMOUNT_ASSIGN_OR_RETURN(part.contents, TextOf(item, "contents"));
        }
        layout.objects.emplace_back(std::move(key), std::move(part));
      }
      spec_.layouts.push_back(std::move(layout));
      return {};
    };
    const Status status = parse();
    if (!status.ok()) return status.WithContext("layouts[" + std::to_string(i) + "]");
  }
  return {};
}

Status Parser::Layers(const Json& json) {
  if (!json.is_object()) return InvalidSpec("layers: must be a JSON object");
  for (const auto& [key, pattern] : json.items()) {
    if (!pattern.is_string()) return InvalidSpec("layers: " + key + ": must be a string");
    spec_.layers.emplace(key, pattern.get<std::string>());
  }
  return {};
}

Result<JobSpec> Parser::Run(const Json& json) {
  TENSORMOUNT_RETURN_IF_ERROR(
      CheckFields(json, {"world", "mesh", "tensors", "objects", "layouts", "layers"}));
  if (json.contains("layouts") && (json.contains("tensors") || json.contains("objects"))) {
    return InvalidSpec("\"layouts\" cannot be combined with \"tensors\" or \"objects\"");
  }
  TENSORMOUNT_RETURN_IF_ERROR(Ranks(json));
  if (json.contains("tensors")) TENSORMOUNT_RETURN_IF_ERROR(Tensors(json["tensors"]));
  if (json.contains("objects")) TENSORMOUNT_RETURN_IF_ERROR(Objects(json["objects"]));
  if (json.contains("layouts")) TENSORMOUNT_RETURN_IF_ERROR(Layouts(json["layouts"]));
  if (json.contains("layers")) TENSORMOUNT_RETURN_IF_ERROR(Layers(json["layers"]));
  return std::move(spec_);
}

}  // namespace

std::string SpecRanksText(const SpecRanks& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    // Finds the longest run of ranks at equal distances that begins at i.
    std::size_t end = i + 1;
    const int step = end < ranks.size() ? ranks[end] - ranks[i] : 1;
    while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
    if (end - i < 3 && step != 1) end = i + 1;
    if (!text.empty()) text += ',';
    text += std::to_string(ranks[i]);
    if (end - i > 1) {
      text += '-' + std::to_string(ranks[end - 1]);
      if (step != 1) text += '/' + std::to_string(step);
    }
    i = end;
  }
  return text;
}

Result<JobSpec> JobSpec::Parse(std::string_view json) {
  const Json parsed = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) return InvalidSpec("spec: not JSON");
  Result<JobSpec> spec = Parser().Run(parsed);
  if (!spec.ok()) return spec.status().WithContext("spec");
  return spec;
}

}  // namespace tensormount
