// SPDX-License-Identifier: Apache-2.0
// Encodes a rank's request as a message. Every rank that plans decodes the message, as strictly as
// external data.
#include "collective/load/request.h"

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/coding.h"
#include "base/errors.h"
#include "collective/layout/call_options.h"
#include "index/records/common_tree.h"
#include "shard/coding.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

constexpr std::string_view kRequestMagic("TMLOADR\0", 8);
// Version of this format and of how ranks interpret it; part of every fingerprint.
constexpr std::uint32_t kRequestVersion = 2;
constexpr std::string_view kWhat = "load request of a rank";

Result<LoadRequest::Item> ReadItem(ByteReader& in, const std::vector<TensorMeta>& tensors) {
  LoadRequest::Item item;
  item.tensor = in.U32();
  item.item = in.U32();
  if (item.tensor >= tensors.size()) {
    return DataLoss(kWhat, "a shard refers to a tensor that the request does not list");
  }
  const TensorMeta& meta = tensors[item.tensor];
  TENSORMOUNT_ASSIGN_OR_RETURN(item.region, DecodeRegion(in, kWhat, meta.key(), meta.shape()));
  return item;
}

Result<LoadRequest> ReadBody(ByteReader& in) {
  LoadRequest request;
  const std::uint32_t tensors = in.U32();
  for (std::uint32_t i = 0; i < tensors && in.status().ok(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, DecodeMeta(in, kWhat));
    request.tensors.push_back(std::move(meta));
  }
  const std::uint32_t items = in.U32();
  for (std::uint32_t i = 0; i < items && in.status().ok(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(LoadRequest::Item item, ReadItem(in, request.tensors));
    request.items.push_back(std::move(item));
  }
  const std::uint32_t objects = in.U32();
  for (std::uint32_t i = 0; i < objects && in.status().ok(); ++i) {
    LoadRequest::Object object;
    object.key = in.String(kMaxKeyBytes);
    TENSORMOUNT_ASSIGN_OR_RETURN(object.index, DecodeDims(in, kWhat));
    TENSORMOUNT_ASSIGN_OR_RETURN(object.grid, DecodeDims(in, kWhat));
    request.objects.push_back(std::move(object));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return request;
}

// Whether two cells of a buffer may share memory, as in an expanded tensor: false only if, with the
// axes sorted by step, each step is larger than the farthest offset that the axes before it reach.
bool MayShareMemory(const BufferView& buffer) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> axes;  // Step and extent.
  for (int a = 0; a < buffer.shape.rank(); ++a) {
    if (buffer.shape[a] == 0) return false;
    if (buffer.shape[a] == 1) continue;
    const std::int64_t step = buffer.strides[a];
    axes.emplace_back(step < 0 ? std::uint64_t{0} - static_cast<std::uint64_t>(step)
                               : static_cast<std::uint64_t>(step),
                      static_cast<std::uint64_t>(buffer.shape[a]));
  }
  std::sort(axes.begin(), axes.end());
  std::uint64_t reached = 0;  // Farthest offset that the previous axes reach.
  for (const auto& [step, extent] : axes) {
    if (step <= reached) return true;
    const auto more = CheckedMul(step, extent - 1);
    const auto sum = more ? CheckedAdd(reached, *more) : std::nullopt;
    if (!sum) return false;  // Larger than any memory: other checks report this.
    reached = *sum;
  }
  return false;
}

}  // namespace

Result<std::string> EncodeRequest(const StateDict& request) {
  TENSORMOUNT_RETURN_IF_ERROR(request.status());
  if (request.tensors().size() > UINT32_MAX || request.objects().size() > UINT32_MAX) {
    return Status(Code::kInvalidArgument, "more than 2^32 shards or objects on one rank");
  }
  ByteWriter out;
  out.Raw(kRequestMagic.data(), kRequestMagic.size());
  out.U32(kRequestVersion);
  std::unordered_map<std::string_view, std::uint32_t> numbers;
  std::vector<const StateDict::TensorItem*> table;
  for (const StateDict::TensorItem& item : request.tensors()) {
    if (item.shard.metadata_only && !item.shard.region.empty()) {
      return Status(Code::kInvalidArgument,
                    "tensor " + item.key + " " + item.shard.region.ToString() +
                        ": the shard has no memory to load into; give it some "
                        "(StateDict::AllocateData)");
    }
    if (MayShareMemory(item.shard.data)) {
      return Status(Code::kInvalidArgument,
                    "tensor " + item.key + " " + item.shard.region.ToString() +
                        ": cells of its buffer share memory (shape " +
                        item.shard.data.shape.ToString() + ", strides " +
                        item.shard.data.strides.ToString() + "): they cannot all be loaded");
    }
    const auto next = static_cast<std::uint32_t>(table.size());
    if (numbers.try_emplace(item.key, next).second) table.push_back(&item);
  }
  out.U32(static_cast<std::uint32_t>(table.size()));
  for (const StateDict::TensorItem* item : table) {
    EncodeMeta(out, item->key, item->shard.data.dtype, item->shard.global_shape);
  }
  out.U32(static_cast<std::uint32_t>(request.tensors().size()));
  for (std::size_t i = 0; i < request.tensors().size(); ++i) {
    const StateDict::TensorItem& item = request.tensors()[i];
    out.U32(numbers.at(item.key));
    out.U32(static_cast<std::uint32_t>(i));
    EncodeRegion(out, item.shard.region);
  }
  out.U32(static_cast<std::uint32_t>(request.objects().size()));
  for (const StateDict::ObjectItem& item : request.objects()) {
    out.String(item.key);
    EncodeDims(out, item.place.index);
    EncodeDims(out, item.place.grid);
  }
  return std::move(out.bytes());
}

Result<LoadRequest> DecodeRequest(std::string_view bytes) {
  ByteReader in(bytes, kWhat);
  if (in.Raw(kRequestMagic.size()) != kRequestMagic || in.U32() != kRequestVersion) {
    return Status(Code::kInvalidArgument, "a rank runs another version of tensormount");
  }
  Result<LoadRequest> request = ReadBody(in);
  if (request.ok()) return request;
  return Status(Code::kDataLoss, std::string(kWhat) + ": " + request.status().message());
}

namespace {

std::vector<std::pair<std::string, std::string>> TextsOfCall(std::string_view path,
                                                             const LoadOptions& options) {
  constexpr std::array<const char*, 4> kStrict = {"raise", "log", "return", "ignore"};
  constexpr std::array<const char*, 4> kVerify = {"off", "auto", "leaves", "end"};
  constexpr std::array<const char*, 3> kPath = {"auto", "direct", "exchange"};
  constexpr std::array<const char*, 3> kVia = {"auto", "host", "devices"};
  constexpr std::array<const char*, 3> kGrow = {"error", "zero", "keep"};
  constexpr std::array<const char*, 4> kGrid = {"error", "by index", "first", "skip"};
  const auto name = [](const auto& names, auto value) {
    const auto i = static_cast<std::size_t>(value);
    return i < names.size() ? std::string(names[i]) : std::to_string(i);
  };
  const auto flag = [](bool on) { return std::string(on ? "on" : "off"); };
  std::string exempt;
  for (const std::string& glob : options.strict_exempt) {
    exempt += (exempt.empty() ? "" : ", ") + QuoteJson(glob);
  }
  std::string rules;
  for (const KeyRule& rule : options.rules) {
    rules += (rules.empty() ? "" : ", ") + QuoteJson(rule.keys) + " (allow_shrink " +
             flag(rule.rule.allow_shrink) + ", grow " + name(kGrow, rule.rule.grow) +
             ", convert_dtype " + flag(rule.rule.convert_dtype) + ", grid " +
             name(kGrid, rule.rule.grid) + ")";
  }
  return {{"path", std::string(path)},
          {"not_stored", name(kStrict, options.not_stored)},
          {"not_requested", name(kStrict, options.not_requested)},
          {"strict_exempt (optional keys)", "[" + exempt + "]"},
          {"rules", "[" + rules + "]"},
          {"validate", flag(options.validate)},
          {"verify", name(kVerify, options.verify)},
          {"read path", name(kPath, options.path)},
          {"exchange_via", name(kVia, options.exchange_via)},
          {"reuse_plan", flag(options.reuse_plan)}};
}

}  // namespace

std::string EncodeCall(std::string_view path, const LoadOptions& options) {
  ByteWriter out;
  for (const auto& [what, value] : TextsOfCall(path, options)) {
    out.String(what);
    out.String(value);
  }
  return std::move(out.bytes());
}

Hash128 CallFingerprint(std::string_view path, const LoadOptions& options) {
  ByteWriter out;
  out.U32(kRequestVersion);
  out.String(EncodeCall(path, options));
  return Xxh3(out.bytes());
}

Status NameDifferentCall(const std::vector<std::string>& calls) {
  constexpr std::size_t kMaxText = std::size_t{1} << 24;
  constexpr std::size_t kShown = 300;
  for (std::size_t rank = 1; rank < calls.size(); ++rank) {
    if (calls[rank] == calls[0]) continue;
    const std::string who = "rank " + std::to_string(rank);
    const std::string says =
        who + ": load was called with another path or other options than on rank 0";
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::optional<DifferentOption> found,
        FindDifferentOption(calls[0], calls[rank], static_cast<int>(rank), kMaxText));
    if (!found) return Status(Code::kInvalidArgument, says);
    return Status(Code::kInvalidArgument,
                  says + ": " + found->name + " is " +
                      std::string(CutUtf8(found->on_rank_0, kShown)) + " on rank 0 and " +
                      std::string(CutUtf8(found->on_rank, kShown)) + " on " + who);
  }
  return Status(Code::kInvalidArgument,
                "load was called with different paths or options on the ranks");
}

}  // namespace tensormount
