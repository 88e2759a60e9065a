// SPDX-License-Identifier: Apache-2.0
// JSON of the results of verify, diff and stats --full.
#include "index/read/report_json.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tensormount {
namespace {

using OrderedJson = nlohmann::ordered_json;

// A number, or "inf" for values that are not finite, because JSON has no infinity.
OrderedJson NumberJson(double value) {
  return std::isfinite(value) ? OrderedJson(value) : OrderedJson("inf");
}

std::vector<std::int64_t> PositionOf(std::uint64_t element, const Dims& shape) {
  const Dims index = IndexOf(element, shape);
  return {index.begin(), index.end()};
}

OrderedJson ValuesJson(const ValueMismatch& v, const Dims& shape) {
  OrderedJson json = {{"elements", v.compared},
                      {"differing", v.differing},
                      {"nan_on_one_side", v.nan_beside},
                      {"nan_on_both", v.nan_both},
                      {"equal_with_other_bits", v.equal_other_bits}};
  if (v.differing > 0) json["first_at"] = PositionOf(v.first, shape);
  if (v.max_abs) {
    json["max_abs"] =
        v.max_abs_integer ? OrderedJson(*v.max_abs_integer) : NumberJson(v.max_abs->value);
    json["max_abs_at"] = PositionOf(v.max_abs->at, shape);
    json["max_rel"] = NumberJson(v.max_rel->value);
    json["max_rel_at"] = PositionOf(v.max_rel->at, shape);
  }
  return json;
}

// `exact`: max_abs is an exact integer.
OrderedJson ChangeJson(const ValueChange& change, bool exact) {
  return {{"values", change.count},
          {"changed", change.changed},
          {"non_finite", change.non_finite},
          {"max_abs", exact ? OrderedJson(change.max_abs_integer) : NumberJson(change.max_abs)},
          {"mean_abs", NumberJson(change.mean_abs())},
          {"l2_change", NumberJson(change.l2_change())},
          {"cosine", change.cosine()}};
}

// An exact integer of 64 bits, which is signed or not.
OrderedJson IntegerJson(Int128 value) {
  if (value < 0) return static_cast<std::int64_t>(value);
  return static_cast<std::uint64_t>(value);
}

// The JSON for one side of a mismatch. Tensors have metadata; objects have only a size.
OrderedJson SideJson(const std::optional<TensorMeta>& meta,
                     const std::optional<std::uint64_t>& bytes) {
  if (!meta) return OrderedJson{{"bytes", *bytes}};
  return OrderedJson{
      {"dtype", InfoOf(meta->dtype()).name},
      {"shape", std::vector<std::int64_t>(meta->shape().begin(), meta->shape().end())},
      {"bytes", meta->bytes()}};
}

const char* EventName(Mismatch::Kind kind) {
  switch (kind) {
    case Mismatch::Kind::kAdded:
      return "added";
    case Mismatch::Kind::kRemoved:
      return "removed";
    case Mismatch::Kind::kChanged:
      break;
  }
  return "changed";
}

}  // namespace

nlohmann::ordered_json DamageJson(const VerifyReport::Damage& damage) {
  OrderedJson json = {{"object", damage.object},
                      {"file", damage.file},
                      {"offset", damage.offset},
                      {"reason", damage.reason},
                      {"lost", damage.lost}};
  if (!damage.shared_with.empty()) json["shared_with"] = damage.shared_with;
  if (!damage.keys.empty()) json["keys"] = damage.keys;
  return json;
}

nlohmann::ordered_json VerifiedJson(const VerifyReport& report, bool quick) {
  const auto lost = std::count_if(report.damages.begin(), report.damages.end(),
                                  [](const auto& damage) { return damage.lost; });
  return {{"whole", report.damages.empty()},  {"quick", quick},
          {"tensors", report.tensors},        {"chunks", report.chunks},
          {"bytes", report.bytes_checked},    {"bytes_without_hash", report.bytes_without_hash},
          {"damages", report.damages.size()}, {"lost", lost}};
}

nlohmann::ordered_json MismatchJson(const Mismatch& d) {
  // Names in the order of Mismatch::Subject.
  static constexpr const char* kWhat[] = {"tensor", "object", "common"};
  OrderedJson json = {{"event", EventName(d.kind)},
                      {"what", kWhat[static_cast<std::size_t>(d.subject)]},
                      {"key", d.key}};
  if (d.first || d.first_bytes) json["first"] = SideJson(d.first, d.first_bytes);
  if (d.second || d.second_bytes) json["second"] = SideJson(d.second, d.second_bytes);
  if (!d.reason.empty()) json["reason"] = d.reason;
  if (d.first_element) json["first_at"] = PositionOf(*d.first_element, d.first->shape());
  if (d.values) json["values"] = ValuesJson(*d.values, d.first->shape());
  if (d.change) {
    json["stats"] = ChangeJson(*d.change, HasIntegerChange(d.first->dtype(), d.second->dtype()));
  }
  return json;
}

nlohmann::ordered_json ComparedJson(const CompareSummary& s, bool stats) {
  OrderedJson json = {{"same", s.same()},       {"added", s.added},
                      {"removed", s.removed},   {"changed", s.changed},
                      {"equal", s.equal},       {"by_digest", s.by_digest},
                      {"by_bytes", s.by_bytes}, {"bytes_read", s.bytes_read}};
  if (stats) {
    json["unchanged_values"] = s.unchanged_values;
    json["stats"] = ChangeJson(s.change, /*exact=*/false);
  }
  return json;
}

nlohmann::ordered_json StatisticsJson(const TensorEntry& tensor, const TensorStatistics& one,
                                      bool known) {
  const TensorMeta& meta = tensor.meta;
  OrderedJson json = {
      {"key", meta.key()},
      {"dtype", InfoOf(meta.dtype()).name},
      {"shape", std::vector<std::int64_t>(meta.shape().begin(), meta.shape().end())},
      {"count", one.count},
      {"zeros", one.zeros},
      {"subnormals", one.subnormals},
      {"nan", one.nan},
      {"posinf", one.posinf},
      {"neginf", one.neginf}};
  const bool integers = IsIntegerDType(meta.dtype());
  if (one.finite() == 0) {
    for (const char* name : {"min", "max", "absmax", "mean"}) json[name] = nullptr;
  } else if (integers) {
    json["min"] = IntegerJson(one.integer_min);
    json["max"] = IntegerJson(one.integer_max);
    json["absmax"] = IntegerJson(std::max(-one.integer_min, one.integer_max));
    json["mean"] = one.mean;
  } else {
    json["min"] = one.min;
    json["max"] = one.max;
    json["absmax"] = one.absmax();
    json["mean"] = one.mean;
  }
  json["norm"] = NumberJson(one.norm);
  // A text, because most readers of JSON round integers of more than 53 or 64 bits.
  if (integers) json["sum"] = DecimalText(one.integer_sum);
  json["kept"] = known;
  return json;
}

nlohmann::ordered_json MeasuredJson(const StatisticsSummary& s) {
  return {{"tensors", s.tensors},      {"kept", s.known},
          {"values", s.values},        {"nan", s.nan},
          {"infinite", s.infinite},    {"norm", NumberJson(s.squares.Root())},
          {"bytes_read", s.bytes_read}};
}

}  // namespace tensormount
