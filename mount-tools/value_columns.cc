// SPDX-License-Identifier: Apache-2.0
// Value counts of tensors as JSON, columns and fields of conditions.
#include "mount-tools/value_columns.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "shard/element_values.h"

namespace tensormount::tools {
namespace {

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
  } else if (IsIntegerDType(meta.dtype())) {
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
        "neginf", "inf", "nonfinite", "absmax", "min", "max", "mean", "norm", "subnormals"}) {
    if (field == number) return Condition::Kind::kNumber;
  }
  return std::nullopt;
}

std::optional<Condition::Value> FieldOf(const TensorEntry& tensor,
                                        const std::optional<ValueCounts>& counts,
                                        const TensorStatistics* full, std::string_view field) {
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
  if (full != nullptr) {
    if (field == "subnormals") return number(full->subnormals);
    if (full->finite() > 0) {
      if (field == "min") return number(full->min);
      if (field == "max") return number(full->max);
      if (field == "mean") return number(full->mean);
      if (field == "norm") return number(full->norm);
    }
  }
  if (!counts && full == nullptr) return std::nullopt;
  if (field == "absmax") {
    if (counts && FiniteValues(meta, *counts) > 0) {
      return number(AbsmaxOf(meta.dtype(), counts->absmax_bits));
    }
    if (!counts && full->finite() > 0) return number(full->absmax());
    return std::nullopt;
  }
  const std::uint64_t posinf = counts ? counts->posinf : full->posinf;
  const std::uint64_t neginf = counts ? counts->neginf : full->neginf;
  const std::uint64_t nan = counts ? counts->nan : full->nan;
  if (field == "zeros") return number(counts ? counts->zeros : full->zeros);
  if (field == "nan") return number(nan);
  if (field == "posinf") return number(posinf);
  if (field == "neginf") return number(neginf);
  if (field == "inf") return number(posinf + neginf);
  if (field == "nonfinite") return number(nan + posinf + neginf);
  return std::nullopt;
}

}  // namespace tensormount::tools
