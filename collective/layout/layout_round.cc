// SPDX-License-Identifier: Apache-2.0
// Rank 0's evaluation of the first messages of a save or a validation.
#include "collective/layout/layout_round.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/coding.h"

namespace tensormount {
namespace {

constexpr std::uint8_t kRoundVersion = 0xA2;  // Also identifies the kind of message.
constexpr std::uint8_t kFailedFlag = 1;
constexpr std::string_view kDomain("tensormount job layout v1\0", 26);

// Decodes the message of `rank` into `m`, and checks its version and world size.
Status DecodeRound(std::string_view bytes, std::size_t rank, std::size_t world, RoundMessage& m) {
  const std::string who = "rank " + std::to_string(rank);
  ByteReader in(bytes, who);
  const std::uint8_t version = in.U8();
  const std::uint8_t flags = in.U8();
  m.world = in.U16();
  m.boxes = in.U32();
  m.layout.tensors.low = in.U64();
  m.layout.tensors.high = in.U64();
  m.layout.objects = in.U64();
  m.layout.contents = in.U64();
  m.call = in.U64();
  m.common = in.U64();
  m.plan = in.U64();
  if (bytes.size() != kRoundBytes || version != kRoundVersion) {
    return Status(Code::kInvalidArgument, who + " runs another version of tensormount");
  }
  if (flags > kFailedFlag)
    return Status(Code::kDataLoss,
                  who + ": the first message of this rank is damaged (unknown flags)");
  m.failed = flags == kFailedFlag;
  if (m.world != (world & 0xffff)) {
    return Status(Code::kInvalidArgument,
                  who + " is in a group of another size than rank 0, whose group has " +
                      std::to_string(world) + " ranks");
  }
  return Status();
}

Status ReadNumbers(ByteReader& in, std::uint32_t world, std::vector<std::uint32_t>& numbers) {
  const std::uint32_t count = in.U32();
  if (count > in.left() / 4) return Status(Code::kDataLoss, "answer of rank 0: truncated");
  for (std::uint32_t i = 0; i < count; ++i) {
    numbers.push_back(in.U32());
    if (numbers.back() >= world) {
      return Status(Code::kDataLoss,
                    "answer of rank 0: the answer refers to a rank that does not exist");
    }
  }
  return in.status();
}

// The lowest rank of each class; empty if there is only one class.
std::vector<std::uint32_t> Speakers(const RankClasses& classes) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t r = 0; r < classes.size(); ++r) {
    if (classes[r] == r) ranks.push_back(r);
  }
  if (ranks.size() == 1) ranks.clear();
  return ranks;
}

}  // namespace

std::string EncodeRound(const RoundMessage& m) {
  const std::uint64_t head = kRoundVersion | std::uint64_t{m.failed ? kFailedFlag : 0u} << 8 |
                             std::uint64_t{m.world & 0xffff} << 16 | std::uint64_t{m.boxes} << 32;
  const std::uint64_t words[] = {head,
                                 m.layout.tensors.low,
                                 m.layout.tensors.high,
                                 m.layout.objects,
                                 m.layout.contents,
                                 m.call,
                                 m.common,
                                 m.plan};
  static_assert(sizeof(words) == kRoundBytes);
  std::string bytes(kRoundBytes, '\0');
  for (std::size_t i = 0; i < std::size(words); ++i) StoreLittle(&bytes[8 * i], words[i]);
  return bytes;
}

Result<RoundAnswer> AnswerRound(std::span<const std::string> parts, std::uint32_t owners) {
  std::vector<RoundMessage> messages(parts.size());
  bool failed = false;
  for (std::size_t r = 0; r < parts.size(); ++r) {
    TENSORMOUNT_RETURN_IF_ERROR(DecodeRound(parts[r], r, parts.size(), messages[r]));
    failed |= messages[r].failed;
  }
  RoundAnswer answer;
  if (failed) {
    answer.next = RoundAnswer::Next::kFailed;
    return answer;
  }
  for (std::uint32_t r = 1; r < messages.size(); ++r) {
    if (messages[r].call == messages[0].call) continue;
    answer.next = RoundAnswer::Next::kOptionsDiffer;
    answer.differing_rank = r;
    return answer;
  }

  AgreementMaker agreed(kDomain);
  for (const RoundMessage& m : messages) {
    const std::uint64_t words[] = {m.layout.tensors.low, m.layout.tensors.high, m.layout.objects};
    agreed.Add(words, m.plan);
    answer.boxes += m.boxes;
  }
  answer.agreed = agreed.Finish();
  const std::size_t ranks = messages.size();
  answer.common = Speakers(ClassesOf(ranks, [&](std::size_t r) {
    return Hash128{messages[r].common, 0};
  }));

  RankClasses tensors =
      ClassesOf(ranks, [&](std::size_t r) -> const Hash128& { return messages[r].layout.tensors; });
  std::uint64_t told = 0;
  for (std::uint32_t r = 0; r < tensors.size(); ++r) {
    if (tensors[r] != r) continue;
    told += messages[r].boxes;
    ++answer.layouts;
  }
  const auto world = static_cast<std::uint64_t>(messages.size());
  answer.owners = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
      owners != 0 ? owners : std::min(told / kBoxesAnOwner + 1, kMostOwners), 1, world));

  std::set<std::uint64_t> contents;
  for (const RoundMessage& m : messages) {
    if (m.layout.contents != 0 && contents.size() < 2) contents.insert(m.layout.contents);
  }
  // If the plan is kept, objects are compared only if ranks have different ones.
  const bool objects = answer.agreed.unchanged ? contents.size() > 1 : !contents.empty();
  if (objects) {
    answer.objects = ClassesOf(ranks, [&](std::size_t r) {
      return Hash128{messages[r].layout.contents, 0};
    });
  }
  if (!answer.agreed.unchanged) answer.tensors = std::move(tensors);
  return answer;
}

std::string EncodeAnswer(const RoundAnswer& answer) {
  ByteWriter out;
  out.U8(static_cast<std::uint8_t>(answer.next));
  WriteAgreement(out, answer.agreed);
  out.U32(answer.differing_rank);
  out.U32(answer.owners);
  out.U64(answer.boxes);
  out.U64(answer.layouts);
  WriteClasses(out, answer.common);
  WriteClasses(out, answer.tensors);
  WriteClasses(out, answer.objects);
  return std::move(out.bytes());
}

Result<RoundAnswer> DecodeAnswer(std::string_view bytes, std::uint32_t world) {
  ByteReader in(bytes, "answer of rank 0");
  RoundAnswer answer;
  const std::uint8_t next = in.U8();
  answer.agreed = ReadAgreement(in);
  answer.differing_rank = in.U32();
  answer.owners = in.U32();
  answer.boxes = in.U64();
  answer.layouts = in.U64();
  TENSORMOUNT_RETURN_IF_ERROR(ReadNumbers(in, world, answer.common));
  TENSORMOUNT_RETURN_IF_ERROR(ReadClasses(in, world, answer.tensors));
  TENSORMOUNT_RETURN_IF_ERROR(ReadClasses(in, world, answer.objects));
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  if (next > static_cast<std::uint8_t>(RoundAnswer::Next::kOptionsDiffer) ||
      answer.differing_rank >= world || answer.owners == 0 || answer.owners > world) {
    return Status(Code::kDataLoss, "answer of rank 0: a field has an invalid value");
  }
  answer.next = static_cast<RoundAnswer::Next>(next);
  return answer;
}

}  // namespace tensormount
