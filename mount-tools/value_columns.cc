// SPDX-License-Identifier: Apache-2.0
// Value counts of tensors as JSON, columns and fields of conditions.
#include "mount-tools/value_columns.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "shard/element_values.h"

namespace tensormount::tools {
namespace {

bool IsInteger(DType dtype) {
  const NumberKind kind = NumberKindOf(dtype);
  return kind == NumberKind::kInteger || kind == NumberKind::kUnsigned;
}

std::uint64_t FiniteValues(const TensorMeta& meta, const ValueCounts& counts) {
  return ValuesIn(meta.dtype(), meta.elements()) - counts.nonfinite();
}

}  // namespace

void AddCountsJson(const TensorMeta& meta, const std::optional<ValueCounts>& counts,
                   nlohmann::ordered_json& json) {
  if (!counts) {
    for (const char* name : {"zeros", "nan", "posinf", "neginf", "absmax"}) json[name] = nullptr;
    return;
  }
  json["zeros"] = counts->zeros;
  json["nan"] = counts->nan;
  json["posinf"] = counts->posinf;
  json["neginf"] = counts->neginf;
  if (FiniteValues(meta, *counts) == 0) {
    json["absmax"] = nullptr;
  } else if (IsInteger(meta.dtype())) {
    json["absmax"] = counts->absmax_bits;
  } else {
    json["absmax"] = AbsmaxOf(meta.dtype(), counts->absmax_bits);
  }
}

std::string AbsmaxText(const TensorMeta& meta, const ValueCounts& counts) {
  const std::uint64_t values = ValuesIn(meta.dtype(), meta.elements());
  std::string text = AbsmaxText(meta.dtype(), values, counts);
  return text.empty() ? "-" : text;
}

std::string CountsHeading() {
  return fmt::format("{:>10} {:>8} {:>8} {:>12} ", "zeros", "nan", "inf", "absmax");
}

std::string CountsColumns(const TensorMeta& meta, const std::optional<ValueCounts>& counts) {
  if (!counts) return fmt::format("{:>10} {:>8} {:>8} {:>12} ", "?", "?", "?", "?");
  return fmt::format("{:>10} {:>8} {:>8} {:>12} ", counts->zeros, counts->nan,
                     counts->posinf + counts->neginf, AbsmaxText(meta, *counts));
}

std::optional<Condition::Kind> KindOfField(std::string_view field) {
  if (field == "key" || field == "dtype") return Condition::Kind::kText;
  for (const std::string_view number :
       {"rank", "elements", "count", "bytes", "chunks", "counted", "zeros", "nan", "posinf",
        "neginf", "inf", "nonfinite", "absmax"}) {
    if (field == number) return Condition::Kind::kNumber;
  }
  return std::nullopt;
}

std::optional<Condition::Value> FieldOf(const TensorEntry& tensor,
                                        const std::optional<ValueCounts>& counts,
                                        std::string_view field) {
  const TensorMeta& meta = tensor.meta;
  const auto number = [](auto value) { return Condition::Value(static_cast<double>(value)); };
  if (field == "key") return Condition::Value(meta.key());
  if (field == "dtype") return Condition::Value(std::string(InfoOf(meta.dtype()).name));
  if (field == "rank") return number(meta.shape().rank());
  if (field == "elements") return number(meta.elements());
  if (field == "count") return number(ValuesIn(meta.dtype(), meta.elements()));
  if (field == "bytes") return number(meta.bytes());
  if (field == "chunks") return number(tensor.chunks);
  if (field == "counted") return number(counts ? 1 : 0);
  if (!counts) return std::nullopt;
  if (field == "zeros") return number(counts->zeros);
  if (field == "nan") return number(counts->nan);
  if (field == "posinf") return number(counts->posinf);
  if (field == "neginf") return number(counts->neginf);
  if (field == "inf") return number(counts->posinf + counts->neginf);
  if (field == "nonfinite") return number(counts->nonfinite());
  if (field == "absmax" && FiniteValues(meta, *counts) > 0) {
    return number(AbsmaxOf(meta.dtype(), counts->absmax_bits));
  }
  return std::nullopt;
}

}  // namespace tensormount::tools
