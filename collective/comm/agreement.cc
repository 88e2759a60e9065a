// SPDX-License-Identifier: Apache-2.0
// Classes of ranks with equal inputs, and the fingerprint of a job.
#include "collective/comm/agreement.h"

namespace tensormount {

std::vector<std::vector<int>> RanksByClass(const RankClasses& class_of) {
  std::vector<std::vector<int>> ranks(class_of.size());
  for (std::size_t r = 0; r < class_of.size(); ++r) {
    ranks[class_of[r]].push_back(static_cast<int>(r));
  }
  return ranks;
}

bool SendsForClass(const RankClasses& class_of, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  return r < class_of.size() && class_of[r] == r;
}

void WriteClasses(ByteWriter& out, const RankClasses& class_of) {
  out.U32(static_cast<std::uint32_t>(class_of.size()));
  for (const std::uint32_t speaker : class_of) out.U32(speaker);
}

Status ReadClasses(ByteReader& in, std::uint32_t world, RankClasses& class_of) {
  const std::uint32_t count = in.U32();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (count != 0 && count != world) {
    return Status(Code::kDataLoss,
                  "answer of rank 0: the number of rank classes differs from the number of ranks");
  }
  for (std::uint32_t r = 0; r < count && in.status().ok(); ++r) {
    class_of.push_back(in.U32());
    // The number of a class is its lowest rank, which was read before all others of the class.
    if (class_of[r] > r || class_of[class_of[r]] != class_of[r]) {
      return Status(Code::kDataLoss, "answer of rank 0: the list of rank classes is malformed");
    }
  }
  return in.status();
}

void AgreementMaker::Add(std::span<const std::uint64_t> brought, std::uint64_t kept) {
  for (const std::uint64_t word : brought) {
    pending_[used_++] = word;
    if (used_ == pending_.size()) Flush();
  }
  if (ranks_++ == 0) kept_ = kept;
  if (kept != kept_) kept_ = 0;
}

void AgreementMaker::Flush() {
  all_.Update(pending_.data(), used_ * sizeof(pending_[0]));
  used_ = 0;
}

Agreement AgreementMaker::Finish() {
  Flush();
  const Hash128 job = all_.Value();
  return {.job = job, .unchanged = kept_ != 0 && kept_ == job.low};
}

void WriteAgreement(ByteWriter& out, const Agreement& agreement) {
  out.Hash(agreement.job);
  out.U8(agreement.unchanged ? 1 : 0);
}

Agreement ReadAgreement(ByteReader& in) {
  Agreement agreement;
  agreement.job = in.Hash();
  agreement.unchanged = in.U8() != 0;
  return agreement;
}

}  // namespace tensormount
