// SPDX-License-Identifier: Apache-2.0
// The parser of metadata.json of OLMo-core 0.1 (olmo_metadata.h). ParseStrictJson passes the
// tensors one by one to a callback, so that 256 MiB of JSON are never all in memory as values.
// Duplicate keys are refused, because parsers treat them differently.
#include "index/foreign/olmo_metadata.h"

#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "shard/strict_json.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

// A non-negative integer; nullopt for other values, also for 1.0.
std::optional<std::int64_t> Number(const Json& json) {
  if (!json.is_number_unsigned()) return std::nullopt;
  const auto value = json.get<std::uint64_t>();
  if (value > static_cast<std::uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<std::int64_t>(value);
}

Result<Dims> NumbersOf(const Json& json, std::string_view what) {
  if (!json.is_array()) return DataLoss(std::string(what) + " is not a list");
  if (json.size() > static_cast<std::size_t>(kMaxRank)) {
    return Status(Code::kUnsupported,
                  std::string(what) + " has more than " + std::to_string(kMaxRank) + " axes");
  }
  Dims out;
  for (const Json& item : json) {
    const auto number = Number(item);
    if (!number) return DataLoss(std::string(what) + " has an element that is not a whole number");
    out.push_back(*number);
  }
  return out;
}

// The value of a field; a null pointer if the field does not exist or is null (None in Python).
const Json* Field(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

// Adds the range in `json`: [begin, end) counts elements in the row-major order of the whole
// tensor.
Status AddRange(const Box& whole, const Json& json, std::vector<Region>& out) {
  const auto begin = json.is_array() && json.size() == 2 ? Number(json[0]) : std::nullopt;
  const auto end = begin ? Number(json[1]) : std::nullopt;
  if (!end) return DataLoss("a flattened range is not a pair of whole numbers");
  if (*end < *begin || *end > whole.volume()) {
    return DataLoss("flattened range " + std::to_string(*begin) + " to " + std::to_string(*end) +
                    " is not within the " + std::to_string(whole.volume()) +
                    " elements of the tensor");
  }
  if (*end == *begin) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(Region region, Region::Flat(whole, *begin, *end - *begin));
  out.push_back(std::move(region));
  return Status();
}

// Adds the ranges in `json`: a list of pairs or, in older releases, one pair.
Status AddRanges(const Box& whole, const Json& json, std::vector<Region>& out) {
  if (!json.is_array()) return DataLoss("flattened offsets are not a list");
  if (!json.empty() && json[0].is_number()) return AddRange(whole, json, out);
  for (const Json& range : json) TENSORMOUNT_RETURN_IF_ERROR(AddRange(whole, range, out));
  return Status();
}

// Adds the regions of a shard, which has flattened_offsets (ranges), or local_shape and
// global_offset (a box), or neither (the file stores no part of the tensor).
Status AddSpec(const Box& whole, const Json& spec, std::vector<Region>& out) {
  if (!spec.is_object()) return DataLoss("the description of a shard is not an object");
  const Json* const ranges = Field(spec, "flattened_offsets");
  const Json* const extent = Field(spec, "local_shape");
  const Json* const offset = Field(spec, "global_offset");
  if (ranges != nullptr) return AddRanges(whole, *ranges, out);
  if (extent == nullptr && offset == nullptr) return Status();
  if (extent == nullptr || offset == nullptr)
    return DataLoss("only one of local_shape and global_offset is given");
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extents, NumbersOf(*extent, "local_shape"));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims begin, NumbersOf(*offset, "global_offset"));
  const Result<Box> box = Box::Make(begin, extents);
  if (!box.ok()) return DataLoss(box.status().message());
  if (box.value().rank() != whole.rank() || !box.value().Within(whole.extent())) {
    return DataLoss("shard " + box.value().ToString() + " is not within " +
                    whole.extent().ToString());
  }
  if (!box.value().empty()) out.emplace_back(box.value());
  return Status();
}

class OlmoMetadataReader {
 public:
  OlmoMetadata metadata;

  Status Add(const std::string& key, const Json& json) {
    OlmoTensor tensor;
    tensor.key = key;
    if (const Status status = Fill(json, tensor); !status.ok()) {
      return status.WithContext("tensor " + key.substr(0, 256));
    }
    metadata.tensors.push_back(std::move(tensor));
    return Status();
  }

 private:
  Status Fill(const Json& json, OlmoTensor& tensor) {
    if (!json.is_object()) return DataLoss("the description is not an object");
    const Json* const shape = Field(json, "shape");
    if (shape == nullptr) return DataLoss("the description has no shape");
    TENSORMOUNT_ASSIGN_OR_RETURN(tensor.shape, NumbersOf(*shape, "shape"));
    // The dtype may be unknown here, so the check uses the largest elements.
    if (const Status fits = CheckShape(DType::kC128, tensor.shape); !fits.ok()) {
      return DataLoss("shape " + tensor.shape.ToString() + " overflows");
    }
    if (const Json* const dtype = Field(json, "dtype")) {
      if (!dtype->is_string()) return DataLoss("dtype is not a string");
      const Result<DType> known = DTypeFromName(dtype->get_ref<const std::string&>());
      if (known.ok()) {
        tensor.dtype = known.value();
      } else {
        // An unknown dtype is not damage: only this tensor is left out.
        tensor.problem = known.status();
      }
    }
    const Json* const specs = Field(json, "shard_spec_per_file");
    const Json* const older = Field(json, "flattened_offsets_per_file");
    if ((specs == nullptr) == (older == nullptr)) {
      return DataLoss(
          "the description must have exactly one of shard_spec_per_file and "
          "flattened_offsets_per_file");
    }
    const Json& files = specs != nullptr ? *specs : *older;
    if (!files.is_object()) return DataLoss("the shards are not an object");
    const Box whole = Box::Whole(tensor.shape);
    for (const auto& [name, spec] : files.items()) {
      OlmoShard shard;
      // Null means that the file stores no part of the tensor.
      if (!spec.is_null()) {
        const Status status = specs != nullptr ? AddSpec(whole, spec, shard.regions)
                                               : AddRanges(whole, spec, shard.regions);
        if (!status.ok()) return status.WithContext("in " + name.substr(0, 256));
      }
      if (shard.regions.empty()) continue;
      shard.file = NumberOf(name);
      tensor.shards.push_back(std::move(shard));
    }
    return Status();
  }

  // Returns the index of a file in metadata.files; adds the file if it is new.
  std::uint32_t NumberOf(const std::string& name) {
    const auto next = static_cast<std::uint32_t>(metadata.files.size());
    const auto [at, fresh] = numbers_.emplace(name, next);
    if (fresh) metadata.files.push_back(name);
    return at->second;
  }

  std::unordered_map<std::string, std::uint32_t> numbers_;
};

}  // namespace

Result<OlmoMetadata> ParseOlmoMetadata(std::string_view json) {
  OlmoMetadataReader reader;
  const auto rest = ParseStrictJson(
      json, "tensors",
      [&](const std::string& key, const Json& value) { return reader.Add(key, value); });
  if (!rest.ok()) return rest.status();
  const auto tensors = rest.value().find("tensors");
  if (tensors == rest.value().end() || !tensors->is_object()) {
    return DataLoss("JSON: has no object 'tensors'");
  }
  return std::move(reader.metadata);
}

}  // namespace tensormount
