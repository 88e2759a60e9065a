// SPDX-License-Identifier: Apache-2.0
// A LayoutReport as text, as JSON and in a message.
#include "collective/layout/report.h"

#include <algorithm>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/counted.h"
#include "collective/layout/layout.h"
#include "shard/coding.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

constexpr std::size_t kMaxReportMessage = std::size_t{1} << 20;
constexpr std::size_t kMinFindingBytes = 1 + 4 + 4 + 8 + 1 + 8 + 4 + 4;

std::string SizeText(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  std::size_t unit = 0;
  std::uint64_t tenths = bytes;
  for (; tenths >= 1024 && unit < 6; ++unit) {
    // The last division keeps one decimal digit: it multiplies by ten first.
    if (tenths / 1024 < 1024) {
      tenths = tenths * 10 / 1024;
      ++unit;
      break;
    }
    tenths /= 1024;
  }
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " " + kUnits[unit];
}

Result<Dims> ReadReportDims(ByteReader& in, std::string_view what) {
  const int rank = in.U8();
  if (rank > kMaxAxes)
    return Status(Code::kDataLoss, std::string(what) + ": a box has too many axes");
  Dims dims;
  for (int a = 0; a < rank; ++a) dims.push_back(in.I64());
  return dims;
}

// The name of a kind that this version does not know.
constexpr std::string_view kUnknownKind = "unknown";

}  // namespace

std::string_view FindingKindName(FindingKind kind) {
  switch (kind) {
    case FindingKind::kMissing:
      return "missing";
    case FindingKind::kOverlap:
      return "overlap";
    case FindingKind::kDType:
      return "dtype";
    case FindingKind::kShape:
      return "shape";
    case FindingKind::kNoMain:
      return "no_main";
    case FindingKind::kSeveralMains:
      return "several_mains";
    case FindingKind::kMixedLabels:
      return "mixed_labels";
    case FindingKind::kObjectMissing:
      return "object_missing";
    case FindingKind::kObjectTwice:
      return "object_twice";
    case FindingKind::kObjectGrid:
      return "object_grid";
    case FindingKind::kObjectContents:
      return "object_contents";
    case FindingKind::kKind:
      return "kind";
    case FindingKind::kLayerName:
      return "layer_name";
    case FindingKind::kCommon:
      return "common";
  }
  return kUnknownKind;
}

Status LayoutReport::ToStatus() const {
  if (ok()) return Status();
  std::string text =
      findings.empty() ? "the shards of the ranks do not form whole tensors" : findings[0].message;
  if (!findings.empty() && !findings[0].cause.empty()) text += " (" + findings[0].cause + ")";
  if (finding_count > 1 && !findings.empty()) {
    text += "; " + Counted(finding_count - 1, "more finding");
  }
  const Status status(Code::kInvalidArgument, std::move(text));
  if (findings.empty()) return status;
  const Finding& first = findings[0];
  ErrorFields fields{.rank = first.ranks.size() == 1 ? first.ranks[0] : -1,
                     .key = first.key,
                     .cause = first.cause};
  if (first.box) {
    fields.box_begin.assign(first.box->begin().begin(), first.box->begin().end());
    fields.box_extent.assign(first.box->extent().begin(), first.box->extent().end());
  }
  return status.With(fields);
}

std::string LayoutReport::ToText() const {
  std::string text = Counted(tensors, "tensor") + " of " + SizeText(bytes) + " and " +
                     Counted(objects, "object") + " on " +
                     Counted(static_cast<std::uint64_t>(world), "rank") + ": " +
                     Counted(boxes, "shard") + " in " + Counted(layouts, "different layout") +
                     ", " + SizeText(replica_bytes) + " of replicas\n";
  if (ok()) return text + "sound: every element is held exactly once, not counting replicas\n";
  text += Counted(finding_count, "finding") + "\n";
  for (const Finding& finding : findings) {
    text += std::string(FindingKindName(finding.kind)) + ": " + finding.message + "\n";
    if (!finding.cause.empty()) text += "    " + finding.cause + "\n";
  }
  if (finding_count > findings.size()) {
    text += "and " + std::to_string(finding_count - findings.size()) + " more\n";
  }
  return text;
}

std::string LayoutReport::ToJson() const {
  using Json = nlohmann::ordered_json;
  const auto numbers = [](const Dims& dims) {
    Json array = Json::array();
    for (const std::int64_t v : dims) array.push_back(v);
    return array;
  };
  Json json;
  json["ok"] = ok();
  json["world"] = world;
  json["tensors"] = tensors;
  json["boxes"] = boxes;
  json["bytes"] = bytes;
  json["replica_bytes"] = replica_bytes;
  json["objects"] = objects;
  json["layouts"] = layouts;
  json["finding_count"] = finding_count;
  json["findings"] = Json::array();
  for (const Finding& finding : findings) {
    Json one;
    one["kind"] = FindingKindName(finding.kind);
    one["key"] = finding.key;
    one["ranks"] = finding.ranks;
    one["rank_count"] = finding.rank_count;
    if (finding.box) {
      one["begin"] = numbers(finding.box->begin());
      one["extent"] = numbers(finding.box->extent());
    }
    one["elements"] = finding.elements;
    one["message"] = finding.message;
    one["cause"] = finding.cause;
    json["findings"].push_back(std::move(one));
  }
  // Invalid UTF-8 comes from a caller's text; it must not stop a report.
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

LayoutReport MergeReports(std::span<const LayoutReport> reports, std::size_t limit) {
  LayoutReport merged;
  for (const LayoutReport& report : reports) {
    merged.world = std::max(merged.world, report.world);
    merged.tensors += report.tensors;
    merged.boxes += report.boxes;
    merged.bytes = CheckedAdd(merged.bytes, report.bytes).value_or(UINT64_MAX);
    merged.replica_bytes =
        CheckedAdd(merged.replica_bytes, report.replica_bytes).value_or(UINT64_MAX);
    merged.objects += report.objects;
    merged.layouts = std::max(merged.layouts, report.layouts);
    merged.finding_count =
        CheckedAdd(merged.finding_count, report.finding_count).value_or(UINT64_MAX);
    merged.findings.insert(merged.findings.end(), report.findings.begin(), report.findings.end());
    merged.warnings.insert(merged.warnings.end(), report.warnings.begin(), report.warnings.end());
  }
  // Findings of one key are already in order, because one rank checks all of a key.
  std::stable_sort(merged.findings.begin(), merged.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.key < b.key; });
  if (merged.findings.size() > limit) merged.findings.resize(limit);
  if (merged.warnings.size() > limit) merged.warnings.resize(limit);
  return merged;
}

void EncodeReport(ByteWriter& out, const LayoutReport& report) {
  out.U32(static_cast<std::uint32_t>(report.world));
  for (const std::uint64_t v : {report.tensors, report.boxes, report.bytes, report.replica_bytes,
                                report.objects, report.layouts, report.finding_count}) {
    out.U64(v);
  }
  out.U32(static_cast<std::uint32_t>(report.findings.size()));
  for (const Finding& finding : report.findings) {
    out.U8(static_cast<std::uint8_t>(finding.kind));
    out.String(finding.key);
    out.U32(static_cast<std::uint32_t>(finding.ranks.size()));
    for (const int rank : finding.ranks) out.U32(static_cast<std::uint32_t>(rank));
    out.U64(finding.rank_count);
    out.U8(finding.box.has_value() ? 1 : 0);
    if (finding.box) {
      EncodeDims(out, finding.box->begin());
      EncodeDims(out, finding.box->extent());
    }
    out.U64(finding.elements);
    out.String(CutUtf8(finding.message, kMaxReportMessage));
    out.String(CutUtf8(finding.cause, kMaxReportMessage));
  }
  out.U32(static_cast<std::uint32_t>(report.warnings.size()));
  for (const std::string& warning : report.warnings) {
    out.String(CutUtf8(warning, kMaxReportMessage));
  }
}

Result<LayoutReport> DecodeReport(ByteReader& in, std::string_view what) {
  const auto broken = [&](std::string_view why) {
    return Status(Code::kDataLoss, std::string(what) + ": " + std::string(why));
  };
  LayoutReport report;
  report.world = static_cast<int>(in.U32() & 0x7fffffffu);
  for (std::uint64_t* v : {&report.tensors, &report.boxes, &report.bytes, &report.replica_bytes,
                           &report.objects, &report.layouts, &report.finding_count}) {
    *v = in.U64();
  }
  const std::uint32_t count = in.U32();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (count > in.left() / kMinFindingBytes)
    return broken("the message is too short for the findings that it announces");
  for (std::uint32_t i = 0; i < count; ++i) {
    Finding finding;
    const std::uint8_t kind = in.U8();
    finding.kind = static_cast<FindingKind>(kind);
    if (FindingKindName(finding.kind) == kUnknownKind) {
      return broken("the message has a finding of an unknown kind");
    }
    finding.key = in.String(kMaxReportMessage);
    const std::uint32_t ranks = in.U32();
    if (ranks > in.left() / 4)
      return broken("the message is too short for the ranks that it announces");
    for (std::uint32_t r = 0; r < ranks; ++r) {
      finding.ranks.push_back(static_cast<int>(in.U32() & 0x7fffffffu));
    }
    finding.rank_count = in.U64();
    if (in.U8() != 0) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Dims begin, ReadReportDims(in, what));
      TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extent, ReadReportDims(in, what));
      Result<Box> box = Box::Make(begin, extent);
      if (!box.ok()) return broken(box.status().message());
      finding.box = std::move(box).value();
    }
    finding.elements = in.U64();
    finding.message = in.String(kMaxReportMessage);
    finding.cause = in.String(kMaxReportMessage);
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    report.findings.push_back(std::move(finding));
  }
  const std::uint32_t warnings = in.U32();
  if (warnings > in.left() / 4)
    return broken("the message is too short for the warnings that it announces");
  for (std::uint32_t i = 0; i < warnings; ++i) {
    report.warnings.emplace_back(in.String(kMaxReportMessage));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return report;
}

}  // namespace tensormount
