// SPDX-License-Identifier: Apache-2.0
// schema.json: the planned content of a staging. Edits of several mounts are merged; an edit that
// contradicts others is refused when it is added, not at publish.
#include "fs/save/schema.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <thread>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "index/records/inventory.h"
#include "index/store/store.h"

namespace tensormount::fs {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxSchemaBytes = std::uint64_t{1} << 30;
constexpr std::size_t kMaxProducerBytes = 4096;
constexpr std::string_view kPlacements[] = {"auto", "tensor-file", "rank-shard"};

// Checks a text without building a tree, because nlohmann's tree silently keeps the last of two
// members with one name. (Its parser with a callback would detect them, but takes quadratic time
// for an object of many objects.)
class Checker : public Json::json_sax_t {
 public:
  const std::string& problem() const { return problem_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return Open(); }
  bool key(string_t& name) override {
    if (open_.back().insert(name).second) return true;
    return Fail("\"" + name + "\" occurs twice");
  }
  bool end_object() override { return Close(); }
  bool start_array(std::size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool parse_error(std::size_t, const std::string&, const Json::exception& e) override {
    return Fail(std::string("not JSON: ") + e.what());
  }

 private:
  bool Open() {
    open_.emplace_back();
    return open_.size() <= static_cast<std::size_t>(kMaxCommonDepth) || Fail("nested too deeply");
  }
  bool Close() {
    open_.pop_back();
    return true;
  }
  bool Fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  std::vector<std::unordered_set<std::string>> open_;  // Names so far in each enclosing object.
  std::string problem_;
};

Result<Json> ParseStrictly(std::string_view text) {
  Checker checker;
  if (!Json::sax_parse(text, &checker)) return InvalidArgument(checker.problem());
  return Json::parse(text, nullptr, false);
}

// Signed and unsigned are distinguished, because nlohmann would turn 2^64 - 1 into -1.
Result<Dims> ParseDims(const Json& json, const std::string& at) {
  if (!json.is_array()) return InvalidArgument(at + ": not a list of numbers");
  if (json.size() > static_cast<std::size_t>(kMaxRank)) {
    return InvalidArgument(
        fmt::format("{}: {} axes, at most {} are allowed", at, json.size(), kMaxRank));
  }
  Dims dims;
  for (std::size_t i = 0; i < json.size(); ++i) {
    if (!json[i].is_number_integer() || json[i] < 0 ||
        (json[i].is_number_unsigned() &&
         json[i].get<std::uint64_t>() >
             static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))) {
      return InvalidArgument(
          fmt::format("{}[{}]: {}: not a whole number from 0 to 2^63 - 1", at, i, json[i].dump()));
    }
    dims.push_back(json[i].get<std::int64_t>());
  }
  return dims;
}

// Refuses members of `json` that are not in `known`.
Status CheckMembers(const Json& json, const std::string& at,
                    std::initializer_list<std::string_view> known) {
  if (!json.is_object()) return InvalidArgument(at + ": not an object");
  for (const auto& member : json.items()) {
    if (std::find(known.begin(), known.end(), member.key()) == known.end()) {
      return InvalidArgument(fmt::format("{}{}\"{}\": unknown field", at, at.empty() ? "" : ": ",
                                         member.key().substr(0, 256)));
    }
  }
  return Status();
}

Result<TensorMeta> ParseTensor(const std::string& key, const Json& json) {
  const std::string at = "tensors." + key;
  TENSORMOUNT_RETURN_IF_ERROR(CheckMembers(json, at, {"dtype", "shape"}));
  const auto dtype = json.find("dtype");
  if (dtype == json.end()) return InvalidArgument(at + ".dtype: missing");
  if (!dtype->is_string()) return InvalidArgument(at + ".dtype: not a string");
  const Result<DType> type = DTypeFromName(dtype->get_ref<const std::string&>());
  if (!type.ok()) return InvalidArgument(at + ".dtype: " + type.status().message());
  const auto shape = json.find("shape");
  if (shape == json.end()) return InvalidArgument(at + ".shape: missing");
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims dims, ParseDims(*shape, at + ".shape"));
  const Status fits = CheckShape(type.value(), dims);
  if (!fits.ok()) return InvalidArgument(at + ".shape: " + fits.message());
  Result<TensorMeta> meta = TensorMeta::Make(key, type.value(), dims);
  if (!meta.ok()) return InvalidArgument("tensors: " + meta.status().message());
  return meta;
}

Result<StagingSchema::ObjectSpec> ParseObject(const std::string& key, const Json& json) {
  const std::string at = "objects." + key;
  const Status name = CheckKey(key);
  if (!name.ok()) return InvalidArgument("objects: " + name.message());
  TENSORMOUNT_RETURN_IF_ERROR(CheckMembers(json, at, {"grid"}));
  StagingSchema::ObjectSpec spec;
  const auto grid = json.find("grid");
  if (grid == json.end()) return spec;
  TENSORMOUNT_ASSIGN_OR_RETURN(spec.grid, ParseDims(*grid, at + ".grid"));
  const std::optional<std::int64_t> parts = CheckedProduct(spec.grid);
  if (!parts || *parts < 1 || *parts > std::numeric_limits<std::uint32_t>::max()) {
    return InvalidArgument(at + ".grid: " + spec.grid.ToString() +
                           " does not have between 1 and 2^32 - 1 parts");
  }
  return spec;
}

std::string TensorText(const TensorMeta& meta) {
  return std::string(InfoOf(meta.dtype()).name) + " " + meta.shape().ToString();
}

Json DimsJson(const Dims& dims) {
  Json json = Json::array();
  for (const std::int64_t d : dims) json.push_back(d);
  return json;
}

// Reads all edits once. kAlreadyExists: two of them conflict, maybe only for a moment.
Result<StagingSchema> ReadSchemasOnce(FileSystem& fs, const std::string& staging_directory) {
  const std::string folder = JoinPath(staging_directory, "schema");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(folder));
  StagingSchema all;
  for (const DirectoryEntry& entry : entries) {
    if (entry.name.starts_with('.') || !entry.name.ends_with(".json")) continue;
    const Result<std::string> text = fs.ReadFile(JoinPath(folder, entry.name), kMaxSchemaBytes);
    // The edit was withdrawn between the listing and the reading.
    if (text.status().code() == Code::kNotFound) continue;
    if (!text.ok()) return text.status();
    const Result<StagingSchema> one = StagingSchema::Parse(text.value());
    if (!one.ok()) {
      return Status(Code::kDataLoss, "schema/" + entry.name + ": " + one.status().message());
    }
    const Status merged = all.Merge(one.value());
    if (!merged.ok()) return merged.WithContext("schema/" + entry.name);
  }
  return all;
}

}  // namespace

// Each branch checks one field, and its error names the field's position. Unknown fields are
// refused, so that a typo does not silently mean the default.
Result<StagingSchema> StagingSchema::Parse(std::string_view text) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Json json, ParseStrictly(text));
  if (!json.is_object()) return InvalidArgument("not a JSON object");
  TENSORMOUNT_RETURN_IF_ERROR(CheckMembers(
      json, "", {"tensors", "objects", "writers", "placement", "reuse", "producer", "content"}));
  StagingSchema schema;
  if (const auto tensors = json.find("tensors"); tensors != json.end()) {
    if (!tensors->is_object()) return InvalidArgument("tensors: not an object");
    for (const auto& member : tensors->items()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, ParseTensor(member.key(), member.value()));
      schema.tensors_.emplace(member.key(), std::move(meta));
    }
  }
  if (const auto objects = json.find("objects"); objects != json.end()) {
    if (!objects->is_object()) return InvalidArgument("objects: not an object");
    for (const auto& member : objects->items()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(ObjectSpec spec, ParseObject(member.key(), member.value()));
      schema.objects_.emplace(member.key(), spec);
    }
  }
  if (const auto writers = json.find("writers"); writers != json.end()) {
    if (!writers->is_number_unsigned() || writers->get<std::uint64_t>() < 1 ||
        writers->get<std::uint64_t>() > (1u << 20)) {
      return InvalidArgument("writers: " + writers->dump().substr(0, 64) +
                             ": not a number from 1 to 1048576");
    }
    schema.writers_ = writers->get<std::uint32_t>();
  }
  if (const auto placement = json.find("placement"); placement != json.end()) {
    if (!placement->is_string() ||
        std::find(std::begin(kPlacements), std::end(kPlacements),
                  placement->get_ref<const std::string&>()) == std::end(kPlacements)) {
      return InvalidArgument("placement: " + placement->dump().substr(0, 64) +
                             ": not \"auto\", \"tensor-file\" or \"rank-shard\"");
    }
    schema.placement_ = placement->get<std::string>();
  }
  if (const auto reuse = json.find("reuse"); reuse != json.end()) {
    if (!reuse->is_string()) return InvalidArgument("reuse: not a string");
    const std::string word = reuse->get<std::string>();
    if (word != "auto" && word != "off") {
      TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(word).WithContext("reuse"));
    }
    if (word != "auto") schema.reuse_ = word;
  }
  if (const auto producer = json.find("producer"); producer != json.end()) {
    if (!producer->is_string()) return InvalidArgument("producer: not a string");
    schema.producer_ = producer->get<std::string>();
    if (schema.producer_.size() > kMaxProducerBytes) {
      return InvalidArgument(fmt::format("producer: longer than {} bytes", kMaxProducerBytes));
    }
  }
  if (const auto content = json.find("content"); content != json.end()) {
    Result<CommonValue> value = CommonFromJson(content->dump());
    if (!value.ok()) return InvalidArgument("content: " + value.status().message());
    const CommonDict* dict = value.value().get_if<CommonDict>();
    if (dict == nullptr) return InvalidArgument("content: not an object");
    schema.content_ = *dict;
  }
  return schema;
}

std::string StagingSchema::ToJson() const {
  Json json = Json::object();
  Json& tensors = json["tensors"] = Json::object();
  for (const auto& [key, meta] : tensors_) {
    tensors[key] = {{"dtype", std::string(InfoOf(meta.dtype()).name)},
                    {"shape", DimsJson(meta.shape())}};
  }
  if (!objects_.empty()) {
    Json& objects = json["objects"] = Json::object();
    for (const auto& [key, spec] : objects_) {
      objects[key] = Json::object();
      if (spec.grid.rank() > 0) objects[key]["grid"] = DimsJson(spec.grid);
    }
  }
  if (writers_) json["writers"] = *writers_;
  if (!placement_.empty()) json["placement"] = placement_;
  if (!reuse_.empty()) json["reuse"] = reuse_;
  if (!producer_.empty()) json["producer"] = producer_;
  if (!content_.items.empty()) json["content"] = Json::parse(CommonToJson(CommonValue(content_)));
  return json.dump(1, ' ') + "\n";
}

// Equal fields merge, and a field that only one of the two has is taken. Anything else is a
// conflict, whose message has both values.
Status StagingSchema::Merge(const StagingSchema& other) {
  const auto differs = [](const std::string& what, const std::string& here,
                          const std::string& there) {
    return Status(Code::kAlreadyExists,
                  fmt::format("{}: {} in one schema.json, {} in another", what, here, there));
  };
  // All is checked before anything is changed.
  for (const auto& [key, meta] : other.tensors_) {
    const auto mine = tensors_.find(key);
    if (mine == tensors_.end()) continue;
    if (mine->second.dtype() != meta.dtype() || !(mine->second.shape() == meta.shape())) {
      return differs("tensor " + key, TensorText(mine->second), TensorText(meta));
    }
  }
  for (const auto& [key, spec] : other.objects_) {
    const auto mine = objects_.find(key);
    if (mine != objects_.end() && !(mine->second == spec)) {
      return differs("object " + key, "grid " + mine->second.grid.ToString(),
                     "grid " + spec.grid.ToString());
    }
  }
  if (writers_ && other.writers_ && *writers_ != *other.writers_) {
    return differs("writers", std::to_string(*writers_), std::to_string(*other.writers_));
  }
  if (!placement_.empty() && !other.placement_.empty() && placement_ != other.placement_) {
    return differs("placement", placement_, other.placement_);
  }
  if (!reuse_.empty() && !other.reuse_.empty() && reuse_ != other.reuse_) {
    return differs("reuse", "\"" + reuse_ + "\"", "\"" + other.reuse_ + "\"");
  }
  if (!producer_.empty() && !other.producer_.empty() && producer_ != other.producer_) {
    return differs("producer", "\"" + producer_ + "\"", "\"" + other.producer_ + "\"");
  }
  for (const auto& [key, value] : other.content_.items) {
    const CommonValue* mine = content_.Find(key);
    if (mine == nullptr || *mine == value) continue;
    const std::string* name = std::get_if<std::string>(&key);
    return differs("content" + (name != nullptr ? "." + *name : std::string()),
                   CommonToJson(*mine).substr(0, 64), CommonToJson(value).substr(0, 64));
  }
  tensors_.insert(other.tensors_.begin(), other.tensors_.end());
  objects_.insert(other.objects_.begin(), other.objects_.end());
  if (other.writers_) writers_ = other.writers_;
  if (!other.placement_.empty()) placement_ = other.placement_;
  if (!other.reuse_.empty()) reuse_ = other.reuse_;
  if (!other.producer_.empty()) producer_ = other.producer_;
  content_.items.insert(other.content_.items.begin(), other.content_.items.end());
  return Status();
}

Result<StagingSchema> ReadSchemas(FileSystem& fs, const std::string& staging_directory) {
  // Usually a conflicting edit exists only until its writer notices the conflict.
  for (int attempt = 0;; ++attempt) {
    Result<StagingSchema> all = ReadSchemasOnce(fs, staging_directory);
    if (all.ok() || all.status().code() != Code::kAlreadyExists || attempt == 5) return all;
    std::this_thread::sleep_for(std::chrono::milliseconds(2 << attempt));
  }
}

Status AddSchema(FileSystem& fs, const std::string& staging_directory,
                 const std::string& incarnation, const StagingSchema& edit) {
  const std::string folder = JoinPath(staging_directory, "schema");
  // Detects a conflict with existing edits before anything is written. A conflict with a concurrent
  // edit is detected below.
  TENSORMOUNT_ASSIGN_OR_RETURN(StagingSchema now, ReadSchemas(fs, staging_directory));
  TENSORMOUNT_RETURN_IF_ERROR(now.Merge(edit));
  // The edit is written under a hidden name first, so that nobody reads a partial file.
  // RenameNoReplace makes the numbers of one mount unique even if two of its threads add edits at
  // once.
  const std::string temporary =
      JoinPath(folder, "." + incarnation + "." + Uuid::Random().Short() + ".new");
  Status moved = fs.WriteFileDurably(temporary, edit.ToJson());
  std::string name;
  for (int n = 0; moved.ok(); ++n) {
    name = JoinPath(folder, fmt::format("{}-{}.json", incarnation, n));
    if (fs.Exists(name)) continue;
    moved = fs.RenameNoReplace(temporary, name);
    if (moved.ok()) break;
    if (moved.code() == Code::kAlreadyExists) moved = Status();
  }
  if (!moved.ok()) {
    (void)fs.RemoveFile(temporary);  // A remaining file has no effect: hidden names are not read.
    return moved;
  }
  // Each writer reads after it has written, so of two conflicting edits at least one writer sees
  // both.
  const Result<StagingSchema> all = ReadSchemasOnce(fs, staging_directory);
  if (!all.ok()) {
    const Status removed = fs.RemoveFile(name);
    if (!removed.ok() && removed.code() != Code::kNotFound) return removed;
    // A power loss may bring the file back; edits and the publish then report the conflict.
    (void)fs.SyncDirectory(folder);
    return all.status();
  }
  return fs.SyncDirectory(folder);
}

}  // namespace tensormount::fs
