// SPDX-License-Identifier: Apache-2.0
// Messages of a save's ranks after the plan: votes, the staging, reports, the verdict.
#include "collective/save/save_messages.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "collective/comm/status_wire.h"
#include "index/records/record_coding.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

constexpr std::size_t kMaxSaveText = std::size_t{1} << 16;

void WriteVote(ByteWriter& out, const Vote& vote) {
  WriteStatus(out, vote.status);
  out.U8(vote.cancel ? 1 : 0);
}

Vote ReadVote(ByteReader& in) {
  Vote vote;
  vote.status = ReadStatus(in);
  vote.cancel = in.U8() != 0;
  if (!in.status().ok()) vote.status = in.status();
  return vote;
}

void WriteCounts(ByteWriter& out, const LinkCounts& counts) {
  out.U64(counts.files_linked);
  out.U64(counts.bytes_linked);
  out.U64(counts.files_copied);
  out.U64(counts.bytes_copied);
  out.String(counts.refused);
}

LinkCounts ReadCounts(ByteReader& in) {
  LinkCounts counts;
  counts.files_linked = in.U64();
  counts.bytes_linked = in.U64();
  counts.files_copied = in.U64();
  counts.bytes_copied = in.U64();
  counts.refused = in.String(kMaxSaveText);
  return counts;
}

}  // namespace

std::string EncodeVote(const Vote& vote) {
  ByteWriter out;
  WriteVote(out, vote);
  return std::move(out.bytes());
}

Status VerdictOf(std::span<const Vote> votes) {
  Status first;
  std::size_t failed = 0;
  int asked = -1;
  for (std::size_t r = 0; r < votes.size(); ++r) {
    if (votes[r].cancel && asked < 0) asked = static_cast<int>(r);
    if (votes[r].status.ok()) continue;
    if (failed++ == 0) first = FromRank(static_cast<int>(r), votes[r].status);
  }
  if (failed > 1) {
    return first.WithMessage(first.message() + (failed == 2 ? " (1 other rank failed too)"
                                                            : " (" + std::to_string(failed - 1) +
                                                                  " other ranks failed too)"));
  }
  if (failed == 0 && asked >= 0) {
    return Status(Code::kCancelled, "the save was cancelled by rank " + std::to_string(asked))
        .With({.rank = asked});
  }
  return first;
}

Status VerdictOf(std::span<const std::string> encoded) {
  std::vector<Vote> votes;
  votes.reserve(encoded.size());
  for (const std::string& bytes : encoded) {
    ByteReader in(bytes, "vote of a rank");
    votes.push_back(ReadVote(in));
    if (const Status status = in.Finish(); votes.back().status.ok() && !status.ok()) {
      votes.back().status = status;
    }
  }
  return VerdictOf(votes);
}

std::string EncodeBegin(const Vote& vote, std::uint64_t machine) {
  ByteWriter out;
  WriteVote(out, vote);
  out.U64(machine);
  return std::move(out.bytes());
}

Status VerdictOfBegin(std::span<const std::string> encoded, int& ranks_here) {
  std::vector<Vote> votes;
  votes.reserve(encoded.size());
  std::map<std::uint64_t, int> of_machine;  // By machine: its number of ranks.
  ranks_here = 1;
  for (const std::string& bytes : encoded) {
    ByteReader in(bytes, "vote of a rank");
    votes.push_back(ReadVote(in));
    ranks_here = std::max(ranks_here, ++of_machine[in.U64()]);
    if (const Status status = in.Finish(); votes.back().status.ok() && !status.ok()) {
      votes.back().status = status;
    }
  }
  return VerdictOf(votes);
}

std::string EncodeStaging(const Status& status, const Staging& staging, int ranks_here) {
  ByteWriter out;
  WriteStatus(out, status);
  if (!status.ok()) return std::move(out.bytes());
  out.String(staging.store);
  out.String(staging.directory);
  out.String(staging.name);
  EncodeUuid(out, staging.uuid);
  out.U64(staging.generation);
  EncodeUuid(out, staging.parent);
  out.String(staging.parent_name);
  EncodeUuid(out, staging.base);
  out.String(staging.base_name);
  out.String(staging.base_note);
  out.U32(static_cast<std::uint32_t>(ranks_here));
  return std::move(out.bytes());
}

Result<Staging> DecodeStaging(std::string_view bytes, int& ranks_here) {
  ByteReader in(bytes, "the staging directory that rank 0 sent");
  TENSORMOUNT_RETURN_IF_ERROR(ReadStatus(in));
  Staging staging;
  staging.store = in.String(kMaxSaveText);
  staging.directory = in.String(kMaxSaveText);
  staging.name = in.String(kMaxSaveText);
  staging.uuid = DecodeUuid(in);
  staging.generation = in.U64();
  staging.parent = DecodeUuid(in);
  staging.parent_name = in.String(kMaxSaveText);
  staging.base = DecodeUuid(in);
  staging.base_name = in.String(kMaxSaveText);
  staging.base_note = in.String(kMaxSaveText);
  ranks_here = static_cast<int>(in.U32());
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return staging;
}

std::string EncodeReport(const WriterReport& report) {
  ByteWriter out;
  WriteVote(out, report.vote);
  out.U64(report.bytes);
  out.U64(report.manifest_bytes);
  out.U64(report.linked_manifest_bytes);
  WriteCounts(out, report.linked);
  out.U64(report.replicas.differing);
  out.U64(report.replicas.compared_bytes);
  out.String(report.replicas.key);
  out.U32(static_cast<std::uint32_t>(report.replicas.listed.size()));
  for (const std::string& line : report.replicas.listed) out.String(line);
  out.U8(report.rank_common ? 1 : 0);
  if (report.rank_common) EncodeCommon(out, *report.rank_common);
  out.String(CutUtf8(report.nonfinite, kMaxSaveText));
  return std::move(out.bytes());
}

Result<WriterReport> DecodeReport(std::string_view bytes) {
  ByteReader in(bytes, "report of a rank");
  WriterReport report;
  report.vote = ReadVote(in);
  report.bytes = in.U64();
  report.manifest_bytes = in.U64();
  report.linked_manifest_bytes = in.U64();
  report.linked = ReadCounts(in);
  report.replicas.differing = in.U64();
  report.replicas.compared_bytes = in.U64();
  report.replicas.key = in.String(kMaxSaveText);
  const std::uint32_t lines = in.U32();
  if (lines > ReplicaFindings::kMaxListed) {
    return Status(Code::kDataLoss, "report of a rank: lists too many differing replicas");
  }
  for (std::uint32_t i = 0; i < lines; ++i) {
    report.replicas.listed.emplace_back(in.String(kMaxSaveText));
  }
  const bool common = in.U8() != 0;
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (common) {
    TENSORMOUNT_ASSIGN_OR_RETURN(report.rank_common, DecodeCommon(in, "report"));
  }
  report.nonfinite = in.String(kMaxSaveText);
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return report;
}

std::string EncodeVerdict(const SaveVerdict& verdict) {
  ByteWriter out;
  WriteStatus(out, verdict.status);
  out.U64(verdict.bytes_written);
  out.U64(verdict.replica_bytes_compared);
  WriteCounts(out, verdict.linked);
  out.U32(static_cast<std::uint32_t>(verdict.warnings.size()));
  for (const std::string& warning : verdict.warnings) out.String(CutUtf8(warning, kMaxSaveText));
  return std::move(out.bytes());
}

Result<SaveVerdict> DecodeVerdict(std::string_view bytes) {
  ByteReader in(bytes, "the verdict that rank 0 sent");
  SaveVerdict verdict;
  verdict.status = ReadStatus(in);
  verdict.bytes_written = in.U64();
  verdict.replica_bytes_compared = in.U64();
  verdict.linked = ReadCounts(in);
  const std::uint32_t warnings = in.U32();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  for (std::uint32_t i = 0; i < warnings && in.status().ok(); ++i) {
    verdict.warnings.emplace_back(in.String(kMaxSaveText));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return verdict;
}

}  // namespace tensormount
