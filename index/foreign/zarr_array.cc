// SPDX-License-Identifier: Apache-2.0
// The parser of .zarray files: shape, chunks, dtype, order and codec. The error for a compressed
// array names the codec.
//
// The JSON may be hostile: its depth and size are limited, the type of every field is checked, and
// shape and chunks are checked for overflow, so that later code may multiply their extents.
#include "index/foreign/zarr_array.h"

#include <charconv>
#include <cstdint>

#include <nlohmann/json.hpp>

#include "shard/npy.h"
#include "shard/strict_json.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

Status BadZarray(const std::string& why) { return Status(Code::kDataLoss, ".zarray: " + why); }
Status UnsupportedZarray(const std::string& why) {
  return Status(Code::kUnsupported, ".zarray: " + why);
}

Result<Dims> Numbers(const Json& json, const char* name) {
  const auto found = json.find(name);
  if (found == json.end() || !found->is_array())
    return BadZarray(std::string(name) + " is not a list");
  if (found->size() > static_cast<std::size_t>(kMaxRank)) {
    return UnsupportedZarray(std::string(name) + " has more than " + std::to_string(kMaxRank) +
                             " axes");
  }
  Dims out;
  for (const Json& item : *found) {
    if (!item.is_number_unsigned() || item.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) {
      return BadZarray(std::string(name) + " has an element that is not a whole number");
    }
    out.push_back(static_cast<std::int64_t>(item.get<std::uint64_t>()));
  }
  return out;
}

// The codec's name in {"id": "blosc", ...}.
std::string CodecName(const Json& codec) {
  if (codec.is_object() && codec.contains("id") && codec["id"].is_string()) {
    return codec["id"].get_ref<const std::string&>().substr(0, 64);
  }
  return "a codec without a name";
}

// Fails if the array has a compressor or filters, because then the bytes in chunk files are not the
// elements.
Status CheckStoredPlainly(const Json& json) {
  const auto compressor = json.find("compressor");
  if (compressor != json.end() && !compressor->is_null()) {
    return UnsupportedZarray("compressed with " + CodecName(*compressor) +
                             "; only uncompressed arrays are supported");
  }
  const auto filters = json.find("filters");
  if (filters == json.end() || filters->is_null()) return Status();
  if (!filters->is_array()) return BadZarray("filters are not a list");
  if (filters->empty()) return Status();
  return UnsupportedZarray("filtered with " + CodecName((*filters)[0]) +
                           "; only arrays without filters are supported");
}

// The dtype: a type string of NumPy ("<f4"), or "bfloat16", which NumPy does not have.
Result<DType> ParseDType(const Json& json, bool raw_is_bf16) {
  const auto found = json.find("dtype");
  if (found == json.end()) return BadZarray("has no dtype");
  if (found->is_array()) return UnsupportedZarray("elements with several fields are not supported");
  if (!found->is_string()) return BadZarray("dtype is not a string");
  const auto& name = found->get_ref<const std::string&>();
  if (name == "bfloat16" || (raw_is_bf16 && name == "|V2")) return DType::kBF16;
  const Result<DType> dtype = DTypeFromNpyDescr(name);
  if (!dtype.ok()) return dtype.status().WithContext(".zarray");
  return dtype;
}

}  // namespace

// Rounds up without adding to the shape, because a sum could overflow.
Dims ZarrArray::Grid() const {
  Dims grid;
  for (int a = 0; a < shape.rank(); ++a) {
    grid.push_back(shape[a] / chunks[a] + (shape[a] % chunks[a] == 0 ? 0 : 1));
  }
  return grid;
}

Result<ZarrArray> ParseZarray(std::string_view text, bool raw_is_bf16) {
  const Result<Json> parsed = ParseStrictJson(text, {.max_depth = 8, .max_values = 10'000});
  if (!parsed.ok()) return BadZarray(parsed.status().message());
  const Json& json = parsed.value();
  const auto version = json.find("zarr_format");
  if (version == json.end()) return BadZarray("has no zarr_format");
  if (*version != 2)
    return UnsupportedZarray("zarr_format " + version->dump().substr(0, 32) +
                             " is not supported (supported: 2)");
  TENSORMOUNT_RETURN_IF_ERROR(CheckStoredPlainly(json));
  ZarrArray array;
  TENSORMOUNT_ASSIGN_OR_RETURN(array.dtype, ParseDType(json, raw_is_bf16));
  TENSORMOUNT_ASSIGN_OR_RETURN(array.shape, Numbers(json, "shape"));
  TENSORMOUNT_ASSIGN_OR_RETURN(array.chunks, Numbers(json, "chunks"));
  if (array.chunks.rank() != array.shape.rank()) {
    return BadZarray("chunks " + array.chunks.ToString() + " do not have as many axes as shape " +
                     array.shape.ToString());
  }
  for (const std::int64_t extent : array.chunks) {
    if (extent < 1)
      return BadZarray("chunks " + array.chunks.ToString() + ": extents must be at least 1");
  }
  if (const Status fits = CheckShape(array.dtype, array.shape); !fits.ok()) {
    return BadZarray(fits.message());
  }
  if (const Status fits = CheckShape(array.dtype, array.chunks); !fits.ok()) {
    return BadZarray("chunks: " + fits.message());
  }
  const auto order = json.find("order");
  if (order == json.end() || (*order != "C" && *order != "F"))
    return BadZarray("order is not C or F");
  array.fortran_order = *order == "F";
  if (const auto found = json.find("dimension_separator"); found != json.end()) {
    if (*found != "." && *found != "/") return BadZarray("dimension_separator is not . or /");
    array.separator = *found == "." ? '.' : '/';
  }
  const auto fill = json.find("fill_value");
  if (fill != json.end() && !fill->is_null()) array.fill_value = fill->dump();
  return array;
}

Status ParseZgroup(std::string_view text) {
  const Result<Json> json = ParseStrictJson(text, {.max_depth = 8, .max_values = 10'000});
  if (!json.ok()) return {Code::kDataLoss, json.status().message()};
  const auto version = json.value().find("zarr_format");
  if (version == json.value().end()) return {Code::kDataLoss, "the metadata has no zarr_format"};
  if (*version == 2) return {};
  return {Code::kUnsupported,
          "zarr_format " + version->dump().substr(0, 32) + " is not supported (supported: 2)"};
}

// "1.02", "+1.2" and "1.2.3" are not names of chunks of an array with two axes. Otherwise two files
// could have names of the same chunk.
std::optional<Dims> ParseChunkName(std::string_view name, int rank, char separator) {
  if (rank == 0) return name == "0" ? std::optional(Dims()) : std::nullopt;
  Dims out;
  while (true) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error != std::errc() || number < 0 || name.front() == '-') return std::nullopt;
    const auto digits = static_cast<std::size_t>(end - name.data());
    if (digits > 1 && name.front() == '0') return std::nullopt;
    out.push_back(number);
    name.remove_prefix(digits);
    if (out.rank() == rank) return name.empty() ? std::optional(out) : std::nullopt;
    if (name.empty() || name.front() != separator) return std::nullopt;
    name.remove_prefix(1);
  }
}

}  // namespace tensormount
